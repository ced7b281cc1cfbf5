//! A rank without free descriptors. The limit is that of the whole process, so each test runs in a process of its own.

use super::{LONG, Wiring, world_context};
use crate::CpuFactory;
use crate::mesh::handshake::{ChannelKind, Identity};
use crate::mesh::host::segment_of;
use crate::mesh::{ChannelRequest, PeerState};
use crate::transport::fd_passing;
use crate::wait::{Failure, Stop, WaitMode, WaitPolicy};
use rcomm_core::backend::BackendFactory;
use rcomm_core::store::{HashStore, Store};
use rcomm_core::{Deadline, ErrorKind, Secret};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Set in the process of the test.
const INSIDE: &str = "RCOMM_TEST_OF_SHORTAGE";
const TOO_MANY: &str = "Too many open files";
/// What the errors of a rank that cannot accept its callers say.
const CANNOT_ACCEPT: &str = "cannot accept the connections of other ranks: Too many open files";

/// Opens files until this process may open no more.
fn take_all_descriptors() -> Vec<File> {
    let limit = Rlimit {
        current: Some(64),
        ..getrlimit(Resource::Nofile)
    };
    setrlimit(Resource::Nofile, limit).unwrap();
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

#[test]
fn a_rank_without_descriptors_says_so_and_blames_no_peer() {
    if std::env::var_os(INSIDE).is_none() {
        let name = "tests::shortage::a_rank_without_descriptors_says_so_and_blames_no_peer";
        let mut inside = Command::new(std::env::current_exe().unwrap());
        inside
            .args(["--exact", name, "--nocapture"])
            .env(INSIDE, "1");
        let output = inside.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{output:?}"
        );
        return;
    }
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let open =
        |rank| CpuFactory::open(&world_context(store.clone(), rank, 3, Wiring::Tcp)).unwrap();
    let (lower, higher) = (open(0), open(2));
    let address = store.get("cpu/addr/0", LONG).unwrap();
    let address: SocketAddr = String::from_utf8(address).unwrap().parse().unwrap();
    let caller = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    let file = File::open("/dev/null").unwrap().into();
    let taken = take_all_descriptors();

    let stop = Stop::default();
    let deadline = Deadline::In(LONG).started();
    let mut policy = WaitPolicy::new(&stop, deadline, WaitMode::Sleep);
    let channel = |peer| ChannelRequest {
        group: 7,
        kind: ChannelKind::P2p,
        peer,
        streams: 1,
    };
    // Rank 2 cannot call rank 0, which it must not blame, nor find out whether it is gone.
    let dialed = higher.mesh.connect(channel(0), &mut policy).err();
    assert!(matches!(dialed, Some(Failure::Io(_))), "{dialed:?}");
    let found = higher.mesh.find_gone(0, &mut policy);
    assert!(matches!(found, Ok(PeerState::Unknown)), "{found:?}");
    assert!(!higher.is_lost(0, LONG));

    // Rank 1 may be the caller that rank 0 cannot accept.
    rustix::net::connect(&caller, &address).unwrap();
    let failed = lower.mesh.connect(channel(1), &mut policy).err();
    match &failed {
        Some(Failure::Io(error)) => {
            assert!(error.to_string().starts_with(CANNOT_ACCEPT), "{error}")
        }
        _ => panic!("{failed:?}"),
    }
    let failed = lower.mesh.try_connect(channel(1), &mut policy).err();
    assert!(matches!(failed, Some(Failure::Io(_))), "{failed:?}");
    // Rank 1 never publishes its host.
    let error = lower.mesh.host().layout(&[0, 1], 0, deadline).unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (ErrorKind::Io, &[][..]));
    assert!(error.to_string().contains(CANNOT_ACCEPT), "{error}");

    // The rank that made the segment is not to blame either, and this rank may lack only the descriptor for the
    // segment.
    let identity = Identity::new(2, 3, "test", &Secret::from_text("test"));
    let error = segment_of(1, &identity, "none", LONG).err().unwrap();
    assert_eq!((error.kind(), error.ranks()), (ErrorKind::Io, &[][..]));
    assert!(error.to_string().contains(TOO_MANY), "{error}");
    fd_passing::send(&here, b"file", &file).unwrap();
    let error = fd_passing::receive(&there, &mut [0; 4]).unwrap_err();
    assert!(error.to_string().contains(TOO_MANY), "{error}");

    drop(taken);
    // A rank that does not answer is named.
    let error = segment_of(1, &identity, "none", LONG).err().unwrap();
    assert_eq!((error.kind(), error.ranks()), (ErrorKind::Io, &[1][..]));
    // The caller was not lost.
    let until = Instant::now() + LONG;
    while lower.mesh.try_connect(channel(1), &mut policy).is_err() {
        assert!(Instant::now() < until, "no caller is accepted any more");
        std::thread::sleep(Duration::from_millis(5));
    }
}
