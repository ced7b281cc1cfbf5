//! The TCP store between processes' ends: connecting, faults, and the rendezvous over it.

#![allow(clippy::unwrap_used)]

use rcomm::store::{BatchReply, BatchRequest, Store, StoreAccess, TcpStore, TcpStoreServer};
use rcomm::{ErrorKind, Rendezvous, Result};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(100);

/// A port that has no listener and that the kernel does not assign: below the range from which it
/// takes ports by itself, and from sixteen that belong to this process alone.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut own = (0..16).map(|_| {
        let nth = NEXT.fetch_add(1, Ordering::Relaxed) % 16;
        10_000 + ((std::process::id() * 16 + nth) % 20_000) as u16
    });
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    own.find(free).unwrap()
}

#[track_caller]
fn refusal<T>(result: Result<T>, kind: ErrorKind) -> String {
    let error = result.err().expect("refused");
    assert_eq!(error.kind(), kind, "{error}");
    error.to_string()
}

/// Listens, and does `serve` with each connection.
fn stranger(serve: impl Fn(TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || listener.incoming().flatten().for_each(serve));
    port
}

#[test]
fn port_that_nobody_listens_on_is_named() {
    let port = free_port();
    let text = refusal(
        TcpStore::connect("127.0.0.1", port, SHORT),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains(&format!("127.0.0.1 port {port}")), "{text}");
    assert!(text.contains("nothing listens there"), "{text}");
    assert!(text.contains("MASTER_PORT"), "{text}");
}

#[test]
fn server_of_another_kind_is_told_apart_at_once() {
    let port = stranger(|mut socket| {
        let _ = socket.write_all(b"SSH-2.0-OpenSSH_9.6\r\n");
        let _ = socket.read_to_end(&mut Vec::new());
    });
    // The deadline is far: what ends this is the answer.
    let text = refusal(
        TcpStore::connect("127.0.0.1", port, Duration::from_secs(3600)),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("not a store"), "{text}");
    assert!(text.contains("SSH-2.0"), "{text}");
}

#[test]
fn server_that_says_nothing_or_hangs_up_is_described() {
    let (keep, kept) = mpsc::channel();
    let silent = stranger(move |socket| keep.send(socket).unwrap());
    let text = refusal(
        TcpStore::connect("127.0.0.1", silent, SHORT),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("does not answer"), "{text}");
    drop(kept);

    let closing = stranger(|mut socket| {
        let _ = socket.read(&mut [0; 16]);
    });
    let text = refusal(
        TcpStore::connect("127.0.0.1", closing, Duration::from_secs(1)),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("closes the connection"), "{text}");
}

#[test]
fn what_an_attempt_met_is_not_hidden_by_a_last_one_that_had_no_time() {
    let (keep, kept) = mpsc::channel();
    let answered = AtomicBool::new(false);
    let port = stranger(move |mut socket| {
        if answered.swap(true, Ordering::Relaxed) {
            // The deadline passes during the second attempt.
            keep.send(socket).unwrap();
        } else {
            let _ = socket.read(&mut [0; 16]);
        }
    });
    let text = refusal(
        TcpStore::connect("127.0.0.1", port, Duration::from_millis(900)),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("closes the connection"), "{text}");
    drop(kept);
}

#[test]
fn an_addition_in_a_hurry_does_not_wait_for_a_server_that_has_stopped_answering() {
    let (keep, kept) = mpsc::channel();
    let port = stranger(move |mut socket| {
        // Greets as a store does, and sends no more: the client's nonce comes back.
        let mut hello = [0; 10];
        socket.read_exact(&mut hello).unwrap();
        socket.write_all(&hello[6..]).unwrap();
        keep.send(socket).unwrap();
    });
    // The store's own patience is that of a test that hangs.
    let store = TcpStore::connect("127.0.0.1", port, Duration::from_secs(3600)).unwrap();
    let text = refusal(store.add_within("n", 1, SHORT), ErrorKind::Timeout);
    assert!(text.contains("did not answer add of 1 to \"n\""), "{text}");
    drop(kept);

    let host = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let store = TcpStore::connect("127.0.0.1", host.port(), LONG).unwrap();
    assert_eq!(store.add_within("n", 2, LONG).unwrap(), 2);
    assert_eq!(host.add("n", 1).unwrap(), 3);
}

#[test]
fn client_that_is_early_waits_for_the_server() {
    let port = free_port();
    thread::scope(|scope| {
        let early = scope.spawn(move || TcpStore::connect("127.0.0.1", port, LONG)?.add("n", 1));
        let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], port).unwrap();
        assert_eq!(early.join().unwrap().unwrap(), 1);
        drop(server);
    });
}

#[test]
fn port_that_is_taken_is_named() {
    let first = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let text = refusal(
        TcpStore::host("127.0.0.1", first.port(), LONG),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("is taken"), "{text}");
}

#[test]
fn address_of_another_host_is_refused() {
    let text = refusal(TcpStore::host("192.0.2.1", 0, LONG), ErrorKind::Rendezvous);
    assert!(text.contains("192.0.2.1"), "{text}");
}

#[test]
fn server_that_goes_away_ends_every_call() {
    let host = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let port = host.port();
    let client = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| client.wait(&["never"], LONG));
        // Whether the wait has come to the server by now or not, it ends with it.
        client.set("here", b"").unwrap();
        drop(host);
        let text = refusal(waiting.join().unwrap(), ErrorKind::Store);
        assert!(text.contains(&port.to_string()), "{text}");
    });
    refusal(client.set("k", b""), ErrorKind::Store);
}

#[test]
fn what_the_server_would_refuse_is_not_sent() {
    let store = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let long_key = "k".repeat(8192);
    let text = refusal(store.set(&long_key, b""), ErrorKind::InvalidArgument);
    assert!(text.contains("8192 bytes"), "{text}");
    store.set(&long_key[1..], b"longest").unwrap();
    assert_eq!(store.get(&long_key[1..], LONG).unwrap(), b"longest");
    let large = vec![0; (8 << 20) + 1];
    refusal(store.set("k", &large), ErrorKind::InvalidArgument);
    refusal(
        store.multi_set(&[("k", &large)]),
        ErrorKind::InvalidArgument,
    );
    store.set("k", &large[1..]).unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), &large[1..]);
    let many = vec!["k"; 131_073];
    refusal(store.wait(&many, LONG), ErrorKind::InvalidArgument);
    assert!(store.check(&many[1..]).unwrap());
}

#[test]
fn connection_is_used_on_after_a_wait_timed_out() {
    let store = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    for round in 0..20 {
        refusal(store.get("late", Duration::ZERO), ErrorKind::Timeout);
        refusal(
            store.wait(&["late"], Duration::from_micros(200)),
            ErrorKind::Timeout,
        );
        refusal(
            store.multi_get(&["late", "n"], Duration::ZERO),
            ErrorKind::Timeout,
        );
        assert_eq!(store.add("n", 1).unwrap(), round + 1);
    }
}

#[test]
fn value_that_comes_while_waiting_is_the_one_returned() {
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

fn place(rank: u32, world_size: u32, port: u16) -> Rendezvous {
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
                    place(rank, 8, port)
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
fn ranks_that_do_not_come_are_counted() {
    let port = free_port();
    let brief = Duration::from_secs(2);
    let text = refusal(
        place(0, 3, port).open_store(&StoreAccess::Open, brief),
        ErrorKind::Timeout,
    );
    assert!(text.contains("1 of 3 ranks"), "{text}");
}

#[test]
fn wrong_jobs_are_refused_before_any_deadline() {
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let ours = Rendezvous {
        uses_agent_store: true,
        ..place(0, 2, server.port())
    };
    ours.open_store(&StoreAccess::Open, LONG).unwrap();
    let text = refusal(
        ours.open_store(&StoreAccess::Open, LONG),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("was started 2 times"), "{text}");
    let larger = Rendezvous {
        rank: 2,
        world_size: 3,
        ..ours.clone()
    };
    let text = refusal(
        larger.open_store(&StoreAccess::Open, LONG),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("world size of 3"), "{text}");
    let other = Rendezvous {
        job: "other".to_owned(),
        ..ours
    };
    let text = refusal(
        other.open_store(&StoreAccess::Open, LONG),
        ErrorKind::Rendezvous,
    );
    assert!(text.contains("two jobs share MASTER_PORT"), "{text}");
}

/// A proxy between one client and a server, which counts how often the client sent after it had been answered.
fn counted(server: u16) -> (u16, Arc<AtomicU32>) {
    let turns = Arc::new(AtomicU32::new(0));
    let counter = turns.clone();
    let port = stranger(move |client| {
        let server = TcpStream::connect(("127.0.0.1", server)).unwrap();
        for socket in [&client, &server] {
            socket.set_nodelay(true).unwrap();
        }
        // The client's words before the server's answer are one turn, in however many pieces they come.
        let answered = Arc::new(AtomicBool::new(true));
        let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let told = answered.clone();
        let back = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                told.store(true, Ordering::SeqCst);
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
        });
        let (mut client, mut server) = (client, server);
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            if answered.swap(false, Ordering::SeqCst) {
                counter.fetch_add(1, Ordering::SeqCst);
            }
            server.write_all(&bytes[..count]).unwrap();
        }
        drop(server.shutdown(std::net::Shutdown::Both));
        back.join().unwrap();
    });
    (port, turns)
}

#[test]
fn what_is_there_is_got_in_one_round_trip_and_a_batch_takes_one() {
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let (port, turns) = counted(server.port());
    let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    let turns_of = |call: &dyn Fn()| {
        turns.store(0, Ordering::SeqCst);
        call();
        turns.load(Ordering::SeqCst)
    };
    assert_eq!(turns_of(&|| store.set("a", b"1").unwrap()), 1);
    let get = || assert_eq!(store.get("a", LONG).unwrap(), b"1");
    assert_eq!(turns_of(&get), 1);
    let both = || assert_eq!(store.multi_get(&["a", "a"], LONG).unwrap().len(), 2);
    assert_eq!(turns_of(&both), 1);
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
    assert_eq!(turns_of(&batch), 1);
    let values = store.multi_get(&["b", "c", "count"], LONG).unwrap();
    assert_eq!(values, [&b"4"[..], b"5", b"3"]);
}

/// Many clients of a server, all by address.
#[test]
#[ignore = "run by the test below, in a process that is traced"]
fn a_thousand_clients_come_and_go() {
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
        .args(["--exact", "a_thousand_clients_come_and_go", "--ignored"])
        .output();
    let Ok(output) = traced else {
        eprintln!("skipped: there is no strace here");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("PTRACE") || said.contains("Operation not permitted") {
        eprintln!("skipped: nothing may be traced here: {said}");
        return;
    }
    assert!(output.status.success(), "{said}");
    let trace = std::fs::read_to_string(&trace).unwrap();
    let connects = trace.lines().filter(|line| line.contains("connect("));
    assert!(connects.clone().count() >= 1024);
    // What a look-up reads first, whatever it asks then; a name server listens on port 53.
    for word in [
        "nsswitch.conf",
        "resolv.conf",
        "/etc/hosts",
        "htons(53)",
        "nscd",
    ] {
        let asked = trace.lines().find(|line| line.contains(word));
        assert_eq!(asked, None);
    }
}
