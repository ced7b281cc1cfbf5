//! Checks what docs/SECURITY.md states: where a default run listens, who may open what it leaves, and every limit.

#![allow(clippy::unwrap_used)]

mod limits;

use rcomm_tests::fault::Fault;
use rcomm_tests::process::{Job, wait_until};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const RANKS: u32 = 4;

/// A socket on which a process listens, or that receives datagrams.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Listening {
    Tcp(IpAddr),
    Datagram(IpAddr),
    Unix(String),
}

/// The sockets of a process that other processes can reach.
fn listening(pid: u32) -> BTreeSet<Listening> {
    let mut by_inode: BTreeMap<u64, Listening> = BTreeMap::new();
    let table = |name: &str| {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
        let lines = text.lines().skip(1).map(str::to_owned);
        lines.collect::<Vec<_>>()
    };
    for name in ["tcp", "tcp6", "udp", "udp6"] {
        for line in table(name) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let address = address(fields[1]);
            let inode = fields[9].parse().unwrap();
            match (name.starts_with("tcp"), fields[3]) {
                (true, "0A") => by_inode.insert(inode, Listening::Tcp(address)),
                (true, _) => None,
                (false, _) => by_inode.insert(inode, Listening::Datagram(address)),
            };
        }
    }
    for line in table("unix") {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // This is the flag __SO_ACCEPTCON: the socket listens.
        if fields[3] == "00010000" {
            let path = fields.get(7).copied().unwrap_or_default();
            by_inode.insert(fields[6].parse().unwrap(), Listening::Unix(path.to_owned()));
        }
    }
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let sockets = descriptors.filter_map(|descriptor| {
        let target = fs::read_link(descriptor.path()).ok()?;
        let inode = target
            .to_str()?
            .strip_prefix("socket:[")?
            .strip_suffix(']')?;
        by_inode.get(&inode.parse().ok()?).cloned()
    });
    sockets.collect()
}

/// The address in an entry such as `0100007F:1F90`, in which every word of four bytes has the machine's order.
fn address(entry: &str) -> IpAddr {
    let (host, _) = entry.split_once(':').unwrap();
    let words = (0..host.len() / 8).map(|at| {
        let word = u32::from_str_radix(&host[at * 8..at * 8 + 8], 16).unwrap();
        word.to_ne_bytes()
    });
    let bytes: Vec<u8> = words.flatten().collect();
    match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(four) => Ipv4Addr::from(four).into(),
        Err(_) => Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[..]).unwrap()).into(),
    }
}

/// The paths of a directory and of everything below it.
fn below(directory: &Path) -> Vec<PathBuf> {
    let mut found = vec![directory.to_owned()];
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(below(&entry.path())),
            _ => found.push(entry.path()),
        }
    }
    found
}

#[track_caller]
fn assert_private(path: &Path) {
    let metadata = fs::symlink_metadata(path).unwrap();
    let mode = metadata.mode() & 0o777;
    let expected = if metadata.is_dir() { 0o700 } else { 0o600 };
    assert_eq!(mode, expected, "{}: mode {mode:o}", path.display());
}

#[test]
fn a_default_run_listens_for_its_host_only_and_leaves_private_files() {
    for transport in ["shm", "tcp"] {
        let program = env!("CARGO_BIN_EXE_rank");
        let job = Job::start(program, RANKS, Fault::StopJoining, |_, command| {
            command
                .env("RCOMM_TRANSPORT", transport)
                .env("RCOMM_TIMEOUT_MS", "600000");
        });
        let socket = |rank| job.ring_path(rank).with_extension("sock");
        wait_until("the endpoints of all ranks", || {
            (0..RANKS).all(|rank| socket(rank).exists()).then_some(())
        });
        let mut abstract_sockets = BTreeSet::new();
        let mut ports = 0;
        for rank in 0..RANKS {
            for socket in listening(job.pid(rank)) {
                match socket {
                    Listening::Tcp(address) => {
                        assert!(address.is_loopback(), "rank {rank}: {address}");
                        ports += 1;
                    }
                    Listening::Datagram(address) => panic!("rank {rank}: {address}"),
                    // Such a name is in no file system, and only its randomness protects it from being guessed.
                    Listening::Unix(path) if path.starts_with('@') => {
                        assert!(path.len() > 32, "{path}");
                        abstract_sockets.insert(path);
                    }
                    Listening::Unix(path) => assert_private(Path::new(&path)),
                }
            }
        }
        // At least the store has a port.
        assert!(ports > 0, "{transport}: no port was found");
        assert!(
            abstract_sockets.len() <= 1,
            "{transport}: {abstract_sockets:?}"
        );
        for path in below(&job.folder().join("rings")) {
            assert_private(&path);
        }
        drop(job);
    }
}

#[test]
fn what_a_failed_run_leaves_is_private() {
    let program = env!("CARGO_BIN_EXE_rank");
    let mut job = Job::start(program, RANKS, Fault::Kill, |_, _| ());
    for rank in 0..RANKS {
        job.wait(rank);
    }
    let dumps = below(&job.folder().join("dumps"));
    assert!(dumps.len() > 2, "{dumps:?}");
    for path in dumps.iter().chain(&below(&job.folder().join("rings"))) {
        assert_private(path);
    }
}
