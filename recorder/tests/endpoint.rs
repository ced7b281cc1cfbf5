//! Tests a rank's endpoint and its client over real sockets, with a stuck rank, and with peers that misbehave.

#![allow(clippy::unwrap_used)]

mod certificates;
mod child;

use certificates::Ca;
use child::Child;
use rcomm_recorder::model::{DType, EntryState, OpType, ProcessGroupInfo};
use rcomm_recorder::publish::{
    Dump, Endpoint, EndpointAddress, EndpointClient, EndpointFollower, EndpointToken, Listen,
    MAX_CONNECTIONS, PeerEndpoint, Tls, TlsFiles,
};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    Tensor, Ticket,
};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

const TENSOR: &[Tensor<'static>] = &[Tensor {
    dtype: DType::F32,
    shape: &[16],
}];

fn recorder(directory: &Path) -> (Arc<FlightRecorder>, GroupHandle) {
    let mut config = RecorderConfig::new("job", 1, 2);
    config.placement = Placement::Dir(directory.to_owned());
    config.entries = 64;
    let recorder = FlightRecorder::create(&config).unwrap();
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0, 1].into(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(60));
    (Arc::new(recorder), group)
}

fn begin(recorder: &FlightRecorder, group: GroupHandle, seq: u64) -> Ticket {
    let key = SignatureKey {
        backend: "cpu",
        op_name: "all_reduce",
        inputs: TENSOR,
        outputs: TENSOR,
    };
    recorder.begin(&Operation {
        collective_seq_id: seq,
        op_id: seq,
        ..Operation::new(group, OpType::AllReduce, SignatureRef::Key(&key))
    })
}

fn client(endpoint: &Endpoint) -> EndpointClient {
    EndpointClient::new(endpoint.address().clone(), None)
}

/// A deadline that no test reaches unless it fails.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

#[test]
fn requests_that_come_before_the_thread_starts_are_answered_once_it_has() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, _) = recorder(directory.path());
    let listen = || Listen::beside(&recorder).unwrap();
    let (endpoint, start) = Endpoint::bind(recorder.clone(), listen()).unwrap();
    let EndpointAddress::Unix(socket) = endpoint.address().clone() else {
        panic!("not a unix socket: {}", endpoint.address());
    };
    // The request is sent before the thread is there.
    let mut early = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    early.write_all(b"GET /ping HTTP/1.0\r\n\r\n").unwrap();
    start().unwrap();
    let mut answer = String::new();
    early.read_to_string(&mut answer).unwrap();
    assert!(answer.ends_with("pong\n"), "{answer}");
    assert_eq!(client(&endpoint).status(soon()).unwrap().entries, 64);
    drop(endpoint);
    assert!(!socket.exists());

    // An endpoint may end before its thread is started: the start then does nothing.
    let (endpoint, start) = Endpoint::bind(recorder.clone(), listen()).unwrap();
    drop(endpoint);
    assert!(!socket.exists());
    start().unwrap();
    assert!(!socket.exists());
}

#[test]
fn status_and_record_are_answered_over_a_private_socket() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, group) = recorder(directory.path());
    let endpoint = Endpoint::serve(recorder.clone(), Listen::beside(&recorder).unwrap()).unwrap();
    let EndpointAddress::Unix(socket) = endpoint.address().clone() else {
        panic!("not a unix socket: {}", endpoint.address());
    };
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let ticket = begin(&recorder, group, 1);
    recorder.completed(ticket);
    begin(&recorder, group, 2);
    recorder.phase("train");
    recorder.step(9);

    let status = client(&endpoint).status(soon()).unwrap();
    assert_eq!(status.identity.rank, Some(1));
    assert_eq!(status.identity.job, "job");
    assert_eq!(
        (status.status.phase.as_str(), status.status.step),
        ("train", 9)
    );
    assert_eq!((status.records, status.entries), (2, 64));
    assert_eq!(
        (status.groups[0].desc.as_str(), status.groups[0].size),
        ("default_pg", 2)
    );
    assert_eq!(status.groups[0].status, recorder.status(group));

    let answer = client(&endpoint).dump(None, soon()).unwrap();
    assert!(!answer.partial && answer.problems.is_empty());
    let snapshot = recorder.snapshot();
    assert_eq!(answer.dump.entries, snapshot.entries);
    assert_eq!(answer.dump.groups, snapshot.groups);
    assert_eq!(answer.dump.status, snapshot.status);
    assert_eq!(answer.dump.identity.rank, Some(1));

    drop(endpoint);
    assert!(!socket.exists());
    recorder.close().unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn later_requests_return_changes_and_an_unknown_number_returns_the_whole_record() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, group) = recorder(directory.path());
    let endpoint = Endpoint::serve(recorder.clone(), Listen::beside(&recorder).unwrap()).unwrap();
    let client = client(&endpoint);
    let tickets: Vec<_> = (1..=3).map(|seq| begin(&recorder, group, seq)).collect();
    let ids = |since| {
        let answer = client.dump(since, soon()).unwrap();
        let ids: Vec<u64> = answer
            .dump
            .entries
            .iter()
            .map(|entry| entry.record_id)
            .collect();
        (ids, answer.partial, answer.change)
    };
    let (returned, partial, first) = ids(None);
    assert_eq!((returned, partial), (vec![1, 2, 3], false));
    let (returned, partial, second) = ids(first);
    assert_eq!((returned, partial), (vec![], true));
    recorder.completed(tickets[1]);
    begin(&recorder, group, 4);
    let (returned, partial, third) = ids(second);
    assert_eq!((returned, partial), (vec![2, 4], true));
    // An older number still returns all changes since then, and the newest one returns none.
    assert_eq!(ids(first).0, [2, 4]);
    assert_eq!(ids(third).0, [0; 0]);
    let before_first = first.map(|first| first - 1);
    for foreign in [Some(0), before_first, Some(u64::MAX)] {
        let (returned, partial, _) = ids(foreign);
        assert_eq!((returned, partial), (vec![1, 2, 3, 4], false));
    }
}

/// The entries with their indices resolved.
fn resolved(dump: &Dump) -> Vec<String> {
    let entries = dump.entries.iter().map(|entry| {
        let group = &dump.groups[entry.group as usize];
        let signature = &dump.signatures[entry.signature as usize];
        let thread = entry.thread.map(|thread| &dump.threads[thread as usize]);
        let frames = entry.stack.map(|stack| {
            let frames = dump.stacks[stack as usize].iter();
            frames
                .map(|&frame| &dump.frames[frame as usize])
                .collect::<Vec<_>>()
        });
        let mut scalars = entry.clone();
        (scalars.group, scalars.signature) = (0, 0);
        (scalars.stack, scalars.thread) = (None, None);
        format!("{scalars:?} {group:?} {signature:?} {thread:?} {frames:?}")
    });
    entries.collect()
}

#[test]
fn follower_has_the_same_record_as_a_full_request() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, world) = recorder(directory.path());
    let endpoint = Endpoint::serve(recorder.clone(), Listen::beside(&recorder).unwrap()).unwrap();
    let mut follower = EndpointFollower::new(client(&endpoint));
    let mut open = Vec::new();
    let mut group = world;
    for round in 0..40_u64 {
        if round % 16 == 7 {
            let info = ProcessGroupInfo {
                id: 1 + round as u32,
                name: round.to_string(),
                desc: "undefined".to_owned(),
                ranks: [1, 0].into(),
            };
            group = recorder.add_group(&info, Duration::ZERO);
        }
        // The rounds issue from no operations to more than the ring holds.
        for n in 0..round * 2 {
            let key = SignatureKey {
                backend: "cpu",
                op_name: "all_to_all",
                inputs: TENSOR,
                outputs: TENSOR,
            };
            let splits = [round, n];
            open.push(recorder.begin(&Operation {
                collective_seq_id: n,
                input_splits: &splits[..(n % 3) as usize],
                call_site: (n % 2 == 0).then(|| std::panic::Location::caller().into()),
                ..Operation::new(group, OpType::AllToAll, SignatureRef::Key(&key))
            }));
        }
        for ticket in open.drain(..open.len() * 2 / 3) {
            recorder.completed(ticket);
        }
        recorder.step(round.cast_signed());
        assert_eq!(follower.poll(soon()).unwrap(), []);
        let full = client(&endpoint).dump(None, soon()).unwrap().dump;
        assert_eq!(resolved(follower.dump()), resolved(&full), "round {round}");
        assert_eq!(follower.dump().status, full.status);
        assert_eq!(follower.dump().groups, full.groups);
    }
}

#[test]
fn a_process_writes_its_dump_on_request() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, _) = recorder(directory.path());
    let endpoint = Endpoint::serve(recorder.clone(), Listen::beside(&recorder).unwrap()).unwrap();
    let ask = || client(&endpoint).write_dump(soon());
    let refused = ask().unwrap_err().to_string();
    assert!(refused.contains("does not write dumps"), "{refused}");
    let path = directory.path().join("rank_1.json");
    let writer = recorder.clone();
    let target = path.clone();
    endpoint.write_dumps(move || {
        let bytes = writer.snapshot().to_json();
        let written = rcomm_recorder::publish::write_dump_file(&target, &bytes);
        let written = written.map_err(|error| error.to_string())?;
        Ok(written.display().to_string())
    });
    assert_eq!(ask().unwrap().place, path.display().to_string());
    let (dump, _) = Dump::read(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(dump.identity.rank, Some(1));
    endpoint.write_dumps(|| Err("the disk is full".to_owned()));
    let failed = ask().unwrap_err().to_string();
    assert!(failed.contains("the disk is full"), "{failed}");
}

#[test]
fn tcp_endpoint_answers_only_clients_with_the_token() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, _) = recorder(directory.path());
    let token = EndpointToken::new("a-token-of-this-job").unwrap();
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let endpoint = Endpoint::serve(recorder, Listen::Tcp(loopback, token.clone())).unwrap();
    let address = endpoint.address().clone();
    let ask = |token| EndpointClient::new(address.clone(), token).status(soon());
    assert_eq!(ask(Some(token)).unwrap().identity.rank, Some(1));
    let other = EndpointToken::new("another-token-of-this-job").unwrap();
    for (token, reason) in [
        (None, "it requires a token"),
        (Some(other), "it refused the token"),
    ] {
        let error = ask(token).unwrap_err();
        assert_eq!(error.to_string(), format!("endpoint {address}: {reason}"));
    }
}

#[test]
fn with_tls_an_endpoint_answers_only_clients_with_a_certificate_of_its_ca() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, _) = recorder(directory.path());
    let ca = Ca::new();
    let identity = |ca: &Ca, name| Tls::from_files(&ca.issue(directory.path(), name)).unwrap();
    let token = EndpointToken::new("a-token-of-this-job").unwrap();
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listen = Listen::Tls(loopback, token.clone(), identity(&ca, "rank"));
    let endpoint = Endpoint::serve(recorder.clone(), listen).unwrap();
    let address = endpoint.address().clone();
    let EndpointAddress::Tcp(socket) = address else {
        panic!("not a TCP address: {address}");
    };
    // Clients that send nothing, or only the beginning of a handshake, do not keep others out.
    let held: Vec<TcpStream> = (0..2 * MAX_CONNECTIONS)
        .map(|index| {
            let mut stream = TcpStream::connect(socket).unwrap();
            stream.write_all(&[0x16, 3, 1, 2][..index % 5]).unwrap();
            stream
        })
        .collect();
    let ask = |tls: Option<Tls>| {
        let client = EndpointClient::new(address.clone(), Some(token.clone()));
        client.with_tls(tls).status(soon())
    };
    assert_eq!(
        ask(Some(identity(&ca, "reader"))).unwrap().identity.rank,
        Some(1)
    );
    drop(held);
    let plain = ask(None).unwrap_err().to_string();
    assert!(
        plain.contains("takes TLS only: set RCOMM_TLS_CERT"),
        "{plain}"
    );
    let foreign = ask(Some(identity(&Ca::new(), "foreign")))
        .unwrap_err()
        .to_string();
    assert!(
        foreign.contains("not from the CA of this process"),
        "{foreign}"
    );
    // The reverse: a client with TLS, and an endpoint without.
    let endpoint = Endpoint::serve(recorder, Listen::Tcp(loopback, token.clone())).unwrap();
    let client = EndpointClient::new(endpoint.address().clone(), Some(token.clone()));
    let client = client.with_tls(Some(identity(&ca, "reader")));
    let error = client.status(soon()).unwrap_err().to_string();
    assert!(
        error.contains("it does not use TLS, and this process does"),
        "{error}"
    );
}

#[test]
fn files_that_make_no_tls_identity_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path();
    let ca = Ca::new();
    let good = ca.issue(folder, "good");
    Tls::from_files(&good).unwrap();
    let refused = |files: &TlsFiles| Tls::from_files(files).unwrap_err().to_string();
    let expired =
        refused(&ca.issue_until(folder, "old", SystemTime::now() - Duration::from_secs(60)));
    assert!(expired.contains("old.cert.pem has expired"), "{expired}");
    let foreign = TlsFiles {
        ca: Ca::new().issue(folder, "foreign").ca,
        ..good.clone()
    };
    let foreign = refused(&foreign);
    assert!(
        foreign.contains("good.cert.pem is not signed by the CA in"),
        "{foreign}"
    );
    let mixed = TlsFiles {
        key: ca.issue(folder, "other").key,
        ..good.clone()
    };
    let mixed = refused(&mixed);
    assert!(mixed.contains("other.key.pem does not fit"), "{mixed}");
    let swapped = TlsFiles {
        certificate: good.key.clone(),
        ..good.clone()
    };
    let swapped = refused(&swapped);
    assert!(
        swapped.contains("good.key.pem holds no certificate"),
        "{swapped}"
    );
    let missing = TlsFiles {
        ca: folder.join("none.pem"),
        ..good.clone()
    };
    let missing = refused(&missing);
    assert!(missing.contains("none.pem cannot be read"), "{missing}");
    let half = TlsFiles::from_lookup(|name| (name == "RCOMM_TLS_CA").then(|| "ca.pem".to_owned()));
    let half = refused(&half.unwrap());
    assert!(half.contains("RCOMM_TLS_CERT is not set"), "{half}");
    assert_eq!(TlsFiles::from_lookup(|_| Some(" ".to_owned())), None);
    let readable = PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(&good.key, readable).unwrap();
    let readable = refused(&good);
    assert!(
        readable.contains("has mode 644") && readable.contains("chmod 600"),
        "{readable}"
    );
}

#[test]
fn the_peers_that_were_set_are_returned() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, _) = recorder(directory.path());
    let endpoint = Endpoint::serve(recorder.clone(), Listen::beside(&recorder).unwrap()).unwrap();
    assert_eq!(client(&endpoint).peers(soon()).unwrap(), []);
    let peers = vec![
        PeerEndpoint {
            rank: 0,
            address: "tcp:10.0.0.1:7000".parse().unwrap(),
        },
        PeerEndpoint {
            rank: 1,
            address: endpoint.address().clone(),
        },
    ];
    endpoint.set_peers(peers.clone());
    assert_eq!(client(&endpoint).peers(soon()).unwrap(), peers);
}

/// The main thread of this rank waits for a lock that it holds itself.
#[test]
#[ignore = "run by the test below, as a process of its own"]
fn rank_that_is_stuck() {
    let Some(directory) = child::directory() else {
        return;
    };
    let (recorder, group) = recorder(&directory);
    let endpoint = Endpoint::serve(recorder.clone(), Listen::beside(&recorder).unwrap()).unwrap();
    recorder.phase("load data");
    begin(&recorder, group, 41);
    child::print_line(&endpoint.address().to_string());
    let held = Mutex::new(());
    let _first = held.lock().unwrap();
    let _second = held.lock();
}

#[test]
fn endpoint_answers_while_the_main_thread_is_stuck() {
    let directory = tempfile::tempdir().unwrap();
    let mut rank = Child::spawn("rank_that_is_stuck", directory.path());
    let client = EndpointClient::new(rank.read_line().parse().unwrap(), None);
    let status = client.status(soon()).unwrap();
    assert_eq!(status.status.phase, "load data");
    assert_eq!(status.groups[0].status.last_enqueued, 41);
    let dump = client.dump(None, soon()).unwrap().dump;
    assert_eq!(dump.entries[0].state, EntryState::Scheduled);
}

#[test]
fn socket_in_use_is_refused_and_a_stale_one_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, _) = recorder(directory.path());
    let listen = Listen::beside(&recorder).unwrap();
    let Listen::Unix(path) = listen.clone() else {
        panic!("not a unix socket: {listen:?}");
    };
    drop(UnixListener::bind(&path).unwrap());
    let endpoint = Endpoint::serve(recorder.clone(), listen.clone()).unwrap();
    let error = Endpoint::serve(recorder.clone(), listen).unwrap_err();
    assert!(error.to_string().contains("cannot listen there"), "{error}");
    assert!(client(&endpoint).status(soon()).is_ok());
}

#[test]
fn misbehaving_clients_do_not_block_others() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, _) = recorder(directory.path());
    let endpoint = Endpoint::serve(recorder.clone(), Listen::beside(&recorder).unwrap()).unwrap();
    let EndpointAddress::Unix(path) = endpoint.address() else {
        panic!("not a unix socket: {}", endpoint.address());
    };
    for junk in [
        &b"\0\xff\r\n\r\n"[..],
        b"GET /dump?since=x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /status HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n",
    ] {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.write_all(junk).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    // Many more clients than are served send half a request: the oldest of them lose their places.
    let half: Vec<_> = (0..8 * MAX_CONNECTIONS)
        .map(|_| {
            let mut stream = UnixStream::connect(path).unwrap();
            stream.write_all(b"GET /status HTTP/1.1\r\n").unwrap();
            stream
        })
        .collect();
    assert!(client(&endpoint).status(soon()).is_ok());
    let mut oldest = &half[0];
    assert!(matches!(oldest.read(&mut [0]), Ok(0) | Err(_)));
}

/// The client's error for a server that answers `answer` and then closes.
fn error_for(answer: &'static [u8]) -> String {
    let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = EndpointAddress::Tcp(server.local_addr().unwrap());
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).unwrap();
        let _ = stream.write_all(answer);
    });
    let error = EndpointClient::new(address.clone(), None)
        .dump(None, soon())
        .unwrap_err();
    serving.join().unwrap();
    let sentence = error.to_string();
    sentence
        .strip_prefix(&format!("endpoint {address}: "))
        .unwrap()
        .to_owned()
}

#[test]
fn invalid_answers_and_silence_are_distinguished() {
    assert!(error_for(b"SSH-2.0-OpenSSH\r\n\r\n").starts_with("it does not speak HTTP"));
    assert_eq!(
        error_for(b""),
        "its answer's head ends too early or is too long"
    );
    assert_eq!(
        error_for(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
        "it answered with HTTP status 404"
    );
    assert_eq!(
        error_for(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf"),
        "it closed the connection before the end of its answer"
    );
    assert_eq!(
        error_for(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"),
        "its answer has a missing or oversized Content-Length"
    );
    assert!(
        error_for(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
            .starts_with("its answer is not a valid record")
    );

    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = EndpointAddress::Tcp(silent.local_addr().unwrap());
    let deadline = Instant::now() + Duration::from_millis(200);
    let error = EndpointClient::new(address, None)
        .status(deadline)
        .unwrap_err();
    assert!(
        error.to_string().ends_with("it did not answer in time"),
        "{error}"
    );
}

#[test]
fn the_error_of_a_missing_endpoint_names_its_path() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("missing.sock");
    let error = EndpointClient::new(EndpointAddress::Unix(path.clone()), None)
        .status(soon())
        .unwrap_err();
    let sentence = error.to_string();
    assert!(
        sentence.contains(path.to_str().unwrap()) && sentence.contains("connection failed"),
        "{sentence}"
    );
}
