//! Tests of the TCP store over real connections: connecting, faults, limits of requests, round trips, the rendezvous.

#![allow(clippy::unwrap_used)]

use rcomm::store::{BatchReply, BatchRequest, Store, StoreAccess, TcpStore, TcpStoreServer};
use rcomm::{ErrorKind, Rendezvous, Result};
use rcomm_recorder::publish::Secret;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(100);

/// Returns a port that has no listener, below the ephemeral port range, from sixteen ports derived from the process
/// id, so that test processes rarely choose the same one.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut candidates = (0..16).map(|_| {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed) % 16;
        10_000 + ((std::process::id() * 16 + offset) % 20_000) as u16
    });
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    candidates.find(is_free).unwrap()
}

#[track_caller]
fn error_text<T>(result: Result<T>, kind: ErrorKind) -> String {
    let error = result.err().expect("the call must fail");
    assert_eq!(error.kind(), kind, "{error}");
    error.to_string()
}

/// Starts a listener, calls `serve` with each connection, and returns the port.
fn serve_connections(serve: impl Fn(TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || listener.incoming().flatten().for_each(serve));
    port
}

#[test]
fn connect_error_names_a_port_without_a_listener() {
    let port = free_port();
    let text = error_text(
        TcpStore::connect("127.0.0.1", port, SHORT),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains(&format!("127.0.0.1 port {port}")), "{text}");
    assert!(text.contains("nothing listens there"), "{text}");
    assert!(text.contains("MASTER_PORT"), "{text}");
}

#[test]
fn server_of_another_protocol_is_reported_at_once() {
    let port = serve_connections(|mut socket| {
        let _ = socket.write_all(b"SSH-2.0-OpenSSH_9.6\r\n");
        let _ = socket.read_to_end(&mut Vec::new());
    });
    // The deadline is an hour away: only the wrong answer can end the call.
    let text = error_text(
        TcpStore::connect("127.0.0.1", port, Duration::from_secs(3600)),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("not a store"), "{text}");
    assert!(text.contains("SSH-2.0"), "{text}");
}

#[test]
fn connect_error_distinguishes_a_silent_server_from_one_that_closes() {
    let (sender, open_sockets) = mpsc::channel();
    let silent = serve_connections(move |socket| sender.send(socket).unwrap());
    let text = error_text(
        TcpStore::connect("127.0.0.1", silent, SHORT),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("does not answer"), "{text}");
    drop(open_sockets);

    let closing = serve_connections(|mut socket| {
        let _ = socket.read(&mut [0; 16]);
    });
    let text = error_text(
        TcpStore::connect("127.0.0.1", closing, Duration::from_secs(1)),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("closes the connection"), "{text}");
}

/// Answers the first message of a client with the first `bytes` of what a store answers.
fn answer_in_part(socket: &mut TcpStream, bytes: usize) {
    let mut hello = [0; 10];
    socket.read_exact(&mut hello).unwrap();
    socket.write_all(&hello[6..][..bytes]).unwrap();
}

#[test]
fn a_truncated_answer_is_reported_as_such_and_the_client_tries_again() {
    let has_closed_one = AtomicBool::new(false);
    let port = serve_connections(move |mut socket| {
        if has_closed_one.swap(true, Ordering::Relaxed) {
            answer_in_part(&mut socket, 4);
            let _ = socket.read_to_end(&mut Vec::new());
        } else {
            answer_in_part(&mut socket, 3);
        }
    });
    TcpStore::connect("127.0.0.1", port, LONG).unwrap();

    let closing = serve_connections(|mut socket| answer_in_part(&mut socket, 3));
    let text = error_text(
        TcpStore::connect("127.0.0.1", closing, Duration::from_secs(1)),
        ErrorKind::Rendezvous,
    );
    assert!(
        text.contains("closed the connection after 3 B of its answer"),
        "{text}"
    );
    assert!(!text.contains("not a store"), "{text}");

    let (sender, open_sockets) = mpsc::channel();
    let silent = serve_connections(move |mut socket| {
        answer_in_part(&mut socket, 2);
        sender.send(socket).unwrap();
    });
    let text = error_text(
        TcpStore::connect("127.0.0.1", silent, SHORT),
        ErrorKind::Rendezvous,
    );
    assert!(
        text.contains("fell silent after 2 B of its answer"),
        "{text}"
    );
    drop(open_sockets);
}

#[test]
fn a_long_foreign_answer_to_a_challenge_is_not_called_a_wrong_secret() {
    let port = serve_connections(|mut socket| {
        let _ = socket.read(&mut [0; 64]);
        let page = [b"HTTP/1.1 400 Bad Request\r\n\r\n".as_slice(), &[b' '; 100]].concat();
        let _ = socket.write_all(&page);
    });
    let access = StoreAccess::Secret(Secret::generate().unwrap());
    let text = error_text(
        TcpStore::connect_with("127.0.0.1", port, LONG, &access),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("not a store: it answered"), "{text}");
    assert!(text.contains("HTTP/1.1 400"), "{text}");
}

#[test]
fn a_last_try_that_times_out_does_not_hide_the_error_of_an_earlier_one() {
    let (sender, open_sockets) = mpsc::channel();
    let has_closed_one = AtomicBool::new(false);
    let port = serve_connections(move |mut socket| {
        if has_closed_one.swap(true, Ordering::Relaxed) {
            // The deadline passes during the second try.
            sender.send(socket).unwrap();
        } else {
            let _ = socket.read(&mut [0; 16]);
        }
    });
    let text = error_text(
        TcpStore::connect("127.0.0.1", port, Duration::from_millis(900)),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("closes the connection"), "{text}");
    drop(open_sockets);
}

#[test]
fn add_within_ends_at_its_own_deadline_when_the_server_stops_answering() {
    let (sender, open_sockets) = mpsc::channel();
    let port = serve_connections(move |mut socket| {
        // Answers the first message as a store does, by returning the client's nonce, and then sends nothing.
        let mut hello = [0; 10];
        socket.read_exact(&mut hello).unwrap();
        socket.write_all(&hello[6..]).unwrap();
        sender.send(socket).unwrap();
    });
    // The store's own time-out is an hour: only the deadline of `add_within` can end the call in time.
    let store = TcpStore::connect("127.0.0.1", port, Duration::from_secs(3600)).unwrap();
    let text = error_text(store.add_within("n", 1, SHORT), ErrorKind::Timeout);
    assert!(text.contains("did not answer add of 1 to \"n\""), "{text}");
    drop(open_sockets);

    let host = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let store = TcpStore::connect("127.0.0.1", host.port(), LONG).unwrap();
    assert_eq!(store.add_within("n", 2, LONG).unwrap(), 2);
    assert_eq!(host.add("n", 1).unwrap(), 3);
}

#[test]
fn client_that_connects_early_waits_for_the_server() {
    let port = free_port();
    thread::scope(|scope| {
        let early = scope.spawn(move || TcpStore::connect("127.0.0.1", port, LONG)?.add("n", 1));
        let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], port).unwrap();
        assert_eq!(early.join().unwrap().unwrap(), 1);
        drop(server);
    });
}

#[test]
fn a_connection_may_have_unlimited_time() {
    let host = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let store = TcpStore::connect("127.0.0.1", host.port(), Duration::MAX).unwrap();
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key", Duration::MAX).unwrap(), b"value");
}

#[test]
fn host_error_says_that_the_port_is_taken() {
    let first = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let text = error_text(
        TcpStore::host("127.0.0.1", first.port(), LONG),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("is taken"), "{text}");
}

#[test]
fn hosting_at_the_address_of_another_host_is_refused() {
    let text = error_text(TcpStore::host("192.0.2.1", 0, LONG), ErrorKind::Rendezvous);
    assert!(text.contains("192.0.2.1"), "{text}");
}

#[test]
fn dropping_the_server_fails_pending_and_later_calls() {
    let host = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let port = host.port();
    let client = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| client.wait(&["never"], LONG));
        // A call that waits does not delay others.
        client.set("here", b"").unwrap();
        // The wait must end with the server, whether or not the request for it has arrived there.
        drop(host);
        let text = error_text(waiting.join().unwrap(), ErrorKind::Store);
        assert!(text.contains(&port.to_string()), "{text}");
    });
    error_text(client.set("k", b""), ErrorKind::Store);
}

#[test]
fn requests_that_the_server_would_refuse_are_not_sent() {
    let store = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let long_key = "k".repeat(8192);
    let text = error_text(store.set(&long_key, b""), ErrorKind::InvalidArgument);
    assert!(text.contains("8192 bytes"), "{text}");
    store.set(&long_key[1..], b"longest").unwrap();
    assert_eq!(store.get(&long_key[1..], LONG).unwrap(), b"longest");
    let large = vec![0; (8 << 20) + 1];
    error_text(store.set("k", &large), ErrorKind::InvalidArgument);
    error_text(
        store.multi_set(&[("k", &large)]),
        ErrorKind::InvalidArgument,
    );
    store.set("k", &large[1..]).unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), &large[1..]);
    let many = vec!["k"; 131_073];
    error_text(store.wait(&many, LONG), ErrorKind::InvalidArgument);
    assert!(store.check(&many[1..]).unwrap());
}

#[test]
fn connection_stays_usable_after_a_wait_timed_out() {
    let store = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    for round in 0..20 {
        error_text(store.get("late", Duration::ZERO), ErrorKind::Timeout);
        error_text(
            store.wait(&["late"], Duration::from_micros(200)),
            ErrorKind::Timeout,
        );
        error_text(
            store.multi_get(&["late", "n"], Duration::ZERO),
            ErrorKind::Timeout,
        );
        assert_eq!(store.add("n", 1).unwrap(), round + 1);
    }
}

#[test]
fn value_that_is_set_during_a_get_is_returned() {
    let store = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    thread::scope(|scope| {
        let readers: Vec<_> = (0..16)
            .map(|_| scope.spawn(|| store.multi_get(&["a", "b"], LONG).unwrap()))
            .collect();
        store.set("b", b"second").unwrap();
        store.set("a", b"").unwrap();
        for reader in readers {
            assert_eq!(reader.join().unwrap(), [b"".to_vec(), b"second".to_vec()]);
        }
    });
}

fn rendezvous(rank: u32, world_size: u32, port: u16) -> Rendezvous {
    Rendezvous::explicit(rank, world_size, "127.0.0.1", port).unwrap()
}

#[test]
fn ranks_find_each_other() {
    let port = free_port();
    let stores: Vec<TcpStore> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..8)
            .rev()
            .map(|rank| {
                scope.spawn(move || {
                    rendezvous(rank, 8, port)
                        .open_store(&StoreAccess::Open, LONG)
                        .unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    stores[0].set("k", b"v").unwrap();
    for store in &stores {
        assert_eq!(store.get("k", LONG).unwrap(), b"v");
    }
}

#[test]
fn a_time_out_says_how_many_ranks_came() {
    let port = free_port();
    let timeout = Duration::from_secs(2);
    let text = error_text(
        rendezvous(0, 3, port).open_store(&StoreAccess::Open, timeout),
        ErrorKind::Timeout,
    );
    assert!(text.contains("1 of 3 ranks"), "{text}");
}

#[test]
fn a_duplicate_rank_another_world_size_and_another_job_are_refused_at_once() {
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let ours = Rendezvous {
        uses_agent_store: true,
        ..rendezvous(0, 2, server.port())
    };
    ours.open_store(&StoreAccess::Open, LONG).unwrap();
    let text = error_text(
        ours.open_store(&StoreAccess::Open, LONG),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("was started 2 times"), "{text}");
    let larger = Rendezvous {
        rank: 2,
        world_size: 3,
        ..ours.clone()
    };
    let text = error_text(
        larger.open_store(&StoreAccess::Open, LONG),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("world size of 3"), "{text}");
    let other = Rendezvous {
        job: "other".to_owned(),
        ..ours
    };
    let text = error_text(
        other.open_store(&StoreAccess::Open, LONG),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("two jobs share MASTER_PORT"), "{text}");
}

/// Starts a proxy between one client and a server; returns its port and a counter of the client's round trips.
fn counting_proxy(server: u16) -> (u16, Arc<AtomicU32>) {
    let round_trips = Arc::new(AtomicU32::new(0));
    let counter = round_trips.clone();
    let port = serve_connections(move |client| {
        let server = TcpStream::connect(("127.0.0.1", server)).unwrap();
        for socket in [&client, &server] {
            socket.set_nodelay(true).unwrap();
        }
        // All that the client sends before the server answers is one round trip, in however many reads it arrives.
        let was_answered = Arc::new(AtomicBool::new(true));
        let (mut replies, mut back_to_client) =
            (server.try_clone().unwrap(), client.try_clone().unwrap());
        let answer_flag = was_answered.clone();
        let reply_thread = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = replies.read(&mut bytes) {
                answer_flag.store(true, Ordering::SeqCst);
                if back_to_client.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
        });
        let (mut client, mut server) = (client, server);
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            if was_answered.swap(false, Ordering::SeqCst) {
                counter.fetch_add(1, Ordering::SeqCst);
            }
            server.write_all(&bytes[..count]).unwrap();
        }
        drop(server.shutdown(std::net::Shutdown::Both));
        reply_thread.join().unwrap();
    });
    (port, round_trips)
}

#[test]
fn a_get_of_keys_that_exist_and_a_batch_take_one_round_trip_each() {
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let (port, round_trips) = counting_proxy(server.port());
    let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    let round_trips_of = |call: &dyn Fn()| {
        round_trips.store(0, Ordering::SeqCst);
        call();
        round_trips.load(Ordering::SeqCst)
    };
    assert_eq!(round_trips_of(&|| store.set("a", b"1").unwrap()), 1);
    let get = || assert_eq!(store.get("a", LONG).unwrap(), b"1");
    assert_eq!(round_trips_of(&get), 1);
    let both = || assert_eq!(store.multi_get(&["a", "a"], LONG).unwrap().len(), 2);
    assert_eq!(round_trips_of(&both), 1);
    let batch = || {
        let replies = store.batch(&[
            BatchRequest::Set {
                key: "b",
                value: b"2",
            },
            BatchRequest::Add {
                key: "count",
                delta: 3,
            },
            BatchRequest::CompareSet {
                key: "b",
                expected: b"2",
                desired: b"4",
            },
            BatchRequest::Set {
                key: "c",
                value: b"5",
            },
        ]);
        let expected = [
            BatchReply::Done,
            BatchReply::Count(3),
            BatchReply::Value(b"4".to_vec()),
            BatchReply::Done,
        ];
        assert_eq!(replies.unwrap(), expected);
    };
    assert_eq!(round_trips_of(&batch), 1);
    let values = store.multi_get(&["b", "c", "count"], LONG).unwrap();
    assert_eq!(values, [&b"4"[..], b"5", b"3"]);
}

/// Connects 1024 clients to one server by IP address, never by name.
#[test]
#[ignore = "run by neither_server_nor_clients_look_up_a_name, in a traced process"]
fn a_thousand_clients_connect_by_address() {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let connect = |_| TcpStore::connect("127.0.0.1", server.port(), LONG).unwrap();
    let clients: Vec<TcpStore> = (0..1024).map(connect).collect();
    for client in &clients {
        client.add("here", 1).unwrap();
    }
    assert_eq!(clients[0].get("here", LONG).unwrap(), b"1024");
}

#[test]
fn neither_server_nor_clients_look_up_a_name() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let traced = std::process::Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=openat,open,connect", "-o"])
        .arg(&trace)
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_thousand_clients_connect_by_address",
            "--ignored",
        ])
        .output();
    let Ok(output) = traced else {
        eprintln!("skipped: there is no strace here");
        return;
    };
    let stderr = String::from_utf8_lossy(&output.stderr);
    if stderr.contains("PTRACE") || stderr.contains("Operation not permitted") {
        eprintln!("skipped: this process may not trace others: {stderr}");
        return;
    }
    assert!(output.status.success(), "{stderr}");
    let trace = std::fs::read_to_string(&trace).unwrap();
    let connects = trace.lines().filter(|line| line.contains("connect("));
    assert!(connects.clone().count() >= 1024);
    // Every name look-up opens one of these files or nscd's socket first; a DNS query goes to port 53.
    for trace_of_lookup in [
        "nsswitch.conf",
        "resolv.conf",
        "/etc/hosts",
        "htons(53)",
        "nscd",
    ] {
        let lookup = trace.lines().find(|line| line.contains(trace_of_lookup));
        assert_eq!(lookup, None);
    }
}
