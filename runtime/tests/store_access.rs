//! Access to a store and its limits, over real sockets: who is refused, at which limit, and with which error.
#![allow(clippy::unwrap_used)]

#[path = "../../recorder/tests/certificates/mod.rs"]
mod certificates;

use certificates::Ca;
use rcomm::store::{Store, StoreAccess, StoreLimits, TcpStore, TcpStoreServer};
use rcomm::{Config, ErrorKind, Rendezvous, Secret, Tls, World};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant, SystemTime};

const LONG: Duration = Duration::from_secs(60);
/// The first message of a connection: its opcode and a magic number.
const VALIDATE: [u8; 5] = [0x00, 0xCE, 0xF7, 0x85, 0x3C];

fn secret(text: &str) -> StoreAccess {
    StoreAccess::Secret(Secret::from_text(text))
}

fn server(access: &StoreAccess, limits: StoreLimits) -> TcpStoreServer {
    TcpStoreServer::bind_with(&[Ipv4Addr::LOCALHOST.into()], 0, access, limits).unwrap()
}

fn connect(server: &TcpStoreServer, access: &StoreAccess) -> rcomm::Result<TcpStore> {
    TcpStore::connect_with("127.0.0.1", server.port(), LONG, access)
}

fn connect_raw(server: &TcpStoreServer, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.local_addr()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// Reads until the server closes the connection.
fn read_to_end(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset is an end, too.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn set(key: &[u8], value: &[u8]) -> Vec<u8> {
    let text = |bytes: &[u8]| [&(bytes.len() as u64).to_le_bytes(), bytes].concat();
    [vec![1], text(key), text(value)].concat()
}

#[test]
fn clients_with_the_secret_are_served_and_others_get_the_reason() {
    let server = server(&secret("ours"), StoreLimits::default());
    let store = connect(&server, &secret("ours")).unwrap();
    store.set("k", b"v").unwrap();
    assert_eq!(store.add("n", 2).unwrap(), 2);
    assert_eq!(store.get("k", LONG).unwrap(), b"v");

    let error = connect(&server, &secret("theirs")).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unauthorized);
    assert!(
        error.to_string().contains("a different job secret"),
        "{error}"
    );

    let error = connect(&server, &StoreAccess::Open).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unauthorized);
    let text = error.to_string();
    assert!(
        text.contains("only from those who prove the job's secret"),
        "{text}"
    );
    assert!(text.contains("RCOMM_JOB_SECRET"), "{text}");
    // The store notes refused clients, so that an error about missing ranks can name the cause.
    let noted = store.get("rcomm/refused", LONG).unwrap();
    assert_eq!(String::from_utf8(noted).unwrap(), "2 127.0.0.1");
}

#[test]
fn store_served_by_a_rank_requires_the_secret() {
    let config = |rank, master_port| Config {
        secret: Some(Secret::from_text("ours")),
        rendezvous: Some(Rendezvous {
            master_port,
            ..Rendezvous::explicit(rank, 2, "127.0.0.1", 1).unwrap()
        }),
        ..Config::default()
    };
    let store = World::connect_store(&config(0, 0), LONG).unwrap();
    let other = World::connect_store(&config(1, store.port()), LONG).unwrap();
    store.set("k", b"v").unwrap();
    assert_eq!(other.get("k", LONG).unwrap(), b"v");
    let error = TcpStore::connect("127.0.0.1", store.port(), LONG);
    assert_eq!(error.err().unwrap().kind(), ErrorKind::Unauthorized);
}

#[test]
fn no_request_is_served_before_the_proof() {
    let server = server(&secret("ours"), StoreLimits::default());
    let store = connect(&server, &secret("ours")).unwrap();
    let hello = [&[0x70], &[7u8; 32][..]].concat();
    let proof = [&[0x71], &[7u8; 32][..]].concat();
    for first in [
        set(b"/k", b"v"),
        [&VALIDATE[..], &set(b"/k", b"v")].concat(),
        [&VALIDATE[..], &proof].concat(),
        [&VALIDATE[..], &hello, &set(b"/k", b"v")].concat(),
        [&VALIDATE[..], &hello, &proof, &set(b"/k", b"v")].concat(),
        [&VALIDATE[..], &hello, &hello].concat(),
    ] {
        let reply = read_to_end(connect_raw(&server, &first));
        assert!(reply.contains("rcomm refuses: "), "{reply:?}");
    }
    assert!(!store.check(&["k"]).unwrap());
}

#[test]
fn a_client_with_a_secret_refuses_an_open_store() {
    let open = server(&StoreAccess::Open, StoreLimits::default());
    let error = connect(&open, &secret("ours")).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unauthorized);
    assert!(error.to_string().contains("this store is open"), "{error}");
}

#[test]
fn slow_clients_without_a_proof_are_dropped_and_others_are_served() {
    let limits = StoreLimits {
        proof_time: Duration::from_millis(300),
        unproved: 4,
        ..StoreLimits::default()
    };
    for access in [secret("ours"), StoreAccess::Open] {
        let server = server(&access, limits.clone());
        let many: Vec<_> = (0..32)
            .map(|_| connect_raw(&server, &VALIDATE[..2]))
            .collect();
        let store = connect(&server, &access).unwrap();
        store.set("k", b"v").unwrap();
        let started = Instant::now();
        for slow in many {
            assert_eq!(read_to_end(slow), "");
        }
        assert!(started.elapsed() < LONG);
        store.set("k", b"w").unwrap();
    }
}

#[test]
fn a_client_with_an_unfinished_request_is_dropped_and_others_are_served() {
    let limits = StoreLimits {
        request_time: Duration::from_millis(300),
        unfinished_per_host: 3,
        ..StoreLimits::default()
    };
    let server = server(&StoreAccess::Open, limits);
    let half = &set(b"/k", b"value")[..12];
    let unfinished = [&VALIDATE[..], half].concat();
    let slow: Vec<_> = (0..8).map(|_| connect_raw(&server, &unfinished)).collect();
    let store = connect(&server, &StoreAccess::Open).unwrap();
    for client in slow {
        assert_eq!(read_to_end(client), "");
    }
    // A client that sends a request byte by byte, but in time, is served, and a client may pause between requests.
    let mut byte_by_byte = connect_raw(&server, &VALIDATE);
    for byte in set(b"/k", b"value") {
        byte_by_byte.write_all(&[byte]).unwrap();
    }
    assert_eq!(store.get("k", LONG).unwrap(), b"value");
    let pausing = connect(&server, &StoreAccess::Open).unwrap();
    pausing.set("a", b"1").unwrap();
    let error = store.get("never", Duration::from_millis(900)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    pausing.set("a", b"2").unwrap();
}

#[test]
fn a_server_may_give_its_clients_unlimited_time() {
    let limits = StoreLimits {
        proof_time: Duration::MAX,
        request_time: Duration::MAX,
        ..StoreLimits::default()
    };
    let server = server(&StoreAccess::Open, limits);
    let request = set(b"/k", b"value");
    let mut slow = connect_raw(&server, &[&VALIDATE[..], &request[..12]].concat());
    let store = connect(&server, &StoreAccess::Open).unwrap();
    assert!(!store.check(&["k"]).unwrap());
    slow.write_all(&request[12..]).unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), b"value");
}

#[test]
fn a_request_above_a_limit_is_refused_with_the_numbers_and_later_ones_are_served() {
    let limits = StoreLimits {
        stored_bytes: 10_000,
        stored_keys: 20,
        ..StoreLimits::default()
    };
    let server = server(&secret("ours"), limits);
    let store = connect(&server, &secret("ours")).unwrap();
    store.set("large", &[7; 9_000]).unwrap();
    let refused = |error: rcomm::Error| {
        assert_eq!(error.kind(), ErrorKind::Store);
        error.to_string()
    };
    let text = refused(store.set("more", &[7; 2_000]).unwrap_err());
    assert!(text.contains("above the limit of 10000"), "{text}");
    assert!(text.contains("refused set of \"more\""), "{text}");
    let text = refused(store.append("large", &[7; 2_000]).unwrap_err());
    assert!(text.contains("above the limit of 10000"), "{text}");
    // At the limit, existing keys can still be read, replaced and removed.
    assert_eq!(store.get("large", LONG).unwrap(), [7; 9_000]);
    store.set("large", b"small now").unwrap();
    for key in 0..19 {
        store.set(&format!("k{key}"), b"").unwrap();
    }
    let text = refused(store.add("one more", 1).unwrap_err());
    assert!(text.contains("holds 20 keys, which is the limit"), "{text}");
    store.delete("k0").unwrap();
    assert_eq!(store.add("one more", 1).unwrap(), 1);
}

#[test]
fn pending_waits_count_towards_the_limit_of_stored_bytes() {
    let limits = StoreLimits {
        stored_bytes: 2_000,
        ..StoreLimits::default()
    };
    let server = server(&secret("ours"), limits);
    let store = connect(&server, &secret("ours")).unwrap();
    let long = "x".repeat(4_000);
    let error = store.wait(&[&long], LONG).unwrap_err();
    assert!(
        error.to_string().contains("above the limit of 2000"),
        "{error}"
    );
    // Cancelled waits no longer count.
    for _ in 0..20 {
        let error = store
            .wait(&["absent"], Duration::from_millis(1))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    }
}

#[test]
fn unfinished_requests_of_all_clients_share_a_limit_in_bytes() {
    let limits = StoreLimits {
        unfinished_bytes: 1 << 20,
        ..StoreLimits::default()
    };
    let server = server(&StoreAccess::Open, limits);
    let unfinished = [&VALIDATE[..], &set(b"/k", &[7; 700 << 10])[..600 << 10]].concat();
    let first = connect_raw(&server, &unfinished);
    let second = connect_raw(&server, &unfinished);
    // The server closes one of the two connections and continues.
    let (sender, closed) = std::sync::mpsc::channel();
    for stream in [first, second] {
        let sender = sender.clone();
        std::thread::spawn(move || {
            read_to_end(stream);
            let _ = sender.send(());
        });
    }
    closed.recv_timeout(LONG).unwrap();
    let store = connect(&server, &StoreAccess::Open).unwrap();
    store.set("k", &[7; 300 << 10]).unwrap();
}

#[test]
fn connections_above_the_limit_are_closed() {
    let limits = StoreLimits {
        connections: 2,
        ..StoreLimits::default()
    };
    let server = server(&StoreAccess::Open, limits);
    let held = [(); 2].map(|()| connect(&server, &StoreAccess::Open).unwrap());
    assert_eq!(read_to_end(connect_raw(&server, &[])), "");
    drop(held);
    // Closed connections no longer count.
    connect(&server, &StoreAccess::Open).unwrap();
}

#[test]
fn the_default_limits_are_those_in_the_documentation() {
    let limits = StoreLimits::default();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/SECURITY.md");
    let page = std::fs::read_to_string(page).unwrap();
    for line in [
        format!(
            "| store: keys, values and waits together | {} MiB |",
            limits.stored_bytes >> 20
        ),
        format!("| store: keys | {} |", limits.stored_keys),
        format!(
            "| store: unfinished requests of all clients | {} MiB |",
            limits.unfinished_bytes >> 20
        ),
        format!(
            "| store: clients of one host with an unfinished request | {} |",
            limits.unfinished_per_host
        ),
        format!(
            "| store: unread replies | {} MiB |",
            limits.unread_bytes >> 20
        ),
        format!("| store: connections | {} |", limits.connections),
        format!(
            "| store: connections without a proof | {} |",
            limits.unproved
        ),
        format!(
            "| store: time for one request | {} s |",
            limits.request_time.as_secs()
        ),
        format!(
            "| store: time for the proof | {} s |",
            limits.proof_time.as_secs()
        ),
    ] {
        assert!(page.contains(&line), "docs/SECURITY.md lacks {line}");
    }
}

/// The identity that this CA issues to `name`.
fn identity(ca: &Ca, name: &str) -> Tls {
    let folder = tempfile::tempdir().unwrap();
    Tls::from_files(&ca.issue(folder.path(), name)).unwrap()
}

/// Starts a proxy for one connection to `server`. Returns the proxy's port, and a thread that returns what the client
/// sent.
fn listen_in(server: &TcpStoreServer) -> (u16, std::thread::JoinHandle<Vec<u8>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = server.local_addr();
    let overheard = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(address).unwrap();
        let (mut replies, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let copy = std::thread::spawn(move || std::io::copy(&mut replies, &mut back));
        let mut received = Vec::new();
        let mut piece = [0; 4096];
        while let Ok(len @ 1..) = client.read(&mut piece) {
            received.extend_from_slice(&piece[..len]);
            server.write_all(&piece[..len]).unwrap();
        }
        server.shutdown(std::net::Shutdown::Write).unwrap();
        // The copy of the replies ends with the connection.
        let _ = copy.join();
        received
    });
    (port, overheard)
}

#[test]
fn with_tls_values_of_any_size_arrive_and_cannot_be_read_on_the_way() {
    let ca = Ca::new();
    let words = b"what only the ranks may read".as_slice();
    for secret in [None, Some(Secret::from_text("ours"))] {
        let access = StoreAccess::Tls(identity(&ca, "server"), secret.clone());
        let server = server(&access, StoreLimits::default());
        let store = connect(&server, &access).unwrap();
        for size in [0, 1, 16_384, 16_385, 1 << 20, 8 << 20] {
            let value: Vec<u8> = (0..size)
                .map(|index: usize| (index * 7 / 3) as u8)
                .collect();
            store.set("k", &value).unwrap();
            assert!(store.get("k", LONG).unwrap() == value, "{size} bytes");
        }
        // Waits end, also those of a client with another certificate.
        let theirs = StoreAccess::Tls(identity(&ca, "client"), secret.clone());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| connect(&server, &theirs).unwrap().get("late", LONG));
            store.set("late", b"come").unwrap();
            assert_eq!(waiting.join().unwrap().unwrap(), b"come");
        });
        let (port, overheard) = listen_in(&server);
        let store = TcpStore::connect_with("127.0.0.1", port, LONG, &access).unwrap();
        store.set("key", words).unwrap();
        drop(store);
        let overheard = overheard.join().unwrap();
        assert!(overheard.len() > words.len());
        assert!(!overheard.windows(words.len()).any(|piece| piece == words));
    }
}

#[test]
fn a_store_and_a_client_of_which_one_has_no_tls_or_another_ca_name_the_difference() {
    let (ours, theirs) = (Ca::new(), Ca::new());
    let secret = Secret::from_text("ours");
    let access = StoreAccess::Tls(identity(&ours, "server"), Some(secret.clone()));
    let with_tls = server(&access, StoreLimits::default());
    let error = |server: &TcpStoreServer, access: &StoreAccess| {
        connect(server, access).err().unwrap().to_string()
    };
    for plain in [StoreAccess::Open, StoreAccess::Secret(secret.clone())] {
        let refused = error(&with_tls, &plain);
        assert!(
            refused.contains("takes TLS only, and this process has none"),
            "{refused}"
        );
        assert!(refused.contains("RCOMM_TLS_CERT"), "{refused}");
        let without = server(&plain, StoreLimits::default());
        let refused = error(&without, &access);
        assert!(
            refused.contains("it does not use TLS, and this process does"),
            "{refused}"
        );
    }
    let stranger = StoreAccess::Tls(identity(&theirs, "stranger"), Some(secret.clone()));
    let refused = error(&with_tls, &stranger);
    assert!(
        refused.contains("certificate is not from the CA of this process"),
        "{refused}"
    );
    // A caller that accepts the server's certificate, and has none that the server accepts.
    let folder = tempfile::tempdir().unwrap();
    let mut both = theirs.issue(folder.path(), "both");
    let cas = [&both.ca, &ours.issue(folder.path(), "ours").ca];
    let cas: String = cas.map(|ca| std::fs::read_to_string(ca).unwrap()).concat();
    both.ca = folder.path().join("two.pem");
    std::fs::write(&both.ca, cas).unwrap();
    let both = StoreAccess::Tls(Tls::from_files(&both).unwrap(), Some(secret));
    let refused = error(&with_tls, &both);
    assert!(
        refused.contains("does not accept the TLS certificate of this process"),
        "{refused}"
    );
    // TLS does not replace the secret.
    let other = StoreAccess::Tls(identity(&ours, "other"), Some(Secret::from_text("theirs")));
    let refused = error(&with_tls, &other);
    assert!(refused.contains("a different job secret"), "{refused}");
    connect(&with_tls, &access).unwrap().set("k", b"v").unwrap();
}

/// An identity of this CA that was valid when it was read, and no longer is.
fn expired(ca: &Ca) -> Tls {
    let folder = tempfile::tempdir().unwrap();
    // On a busy machine the first certificates may expire before they are read.
    for seconds in [1, 4, 60] {
        let end = SystemTime::now() + Duration::from_secs(seconds);
        let Ok(tls) = Tls::from_files(&ca.issue_until(folder.path(), "old", end)) else {
            continue;
        };
        // The last second counts as a whole.
        while SystemTime::now() < end + Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(50));
        }
        return tls;
    }
    panic!("no certificate was read within the minute in which it is valid");
}

#[test]
fn a_certificate_that_expires_during_the_job_is_named_on_both_ends() {
    let ca = Ca::new();
    let (valid, old) = (identity(&ca, "valid"), expired(&ca));
    let secret = Secret::from_text("ours");
    let access = |tls: &Tls| StoreAccess::Tls(tls.clone(), Some(secret.clone()));
    for (server_has, client_has, expected) in [
        (&old, &valid, "its TLS certificate has expired: renew it"),
        (
            &valid,
            &old,
            "does not accept the TLS certificate of this process, which is not valid now",
        ),
    ] {
        let server = server(&access(server_has), StoreLimits::default());
        let refused = connect(&server, &access(client_has))
            .err()
            .unwrap()
            .to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn clients_that_stop_in_the_handshake_of_tls_are_dropped_and_others_are_served() {
    let limits = StoreLimits {
        proof_time: Duration::from_secs(1),
        unproved: 16,
        ..StoreLimits::default()
    };
    let access = StoreAccess::Tls(identity(&Ca::new(), "rank"), None);
    let server = server(&access, limits);
    // Nothing, the beginning of a TLS record, and the beginning of one with a client's first message of the handshake.
    let starts: [&[u8]; 3] = [&[], &[0x16, 3, 1], &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC]];
    let stalled: Vec<_> = (0..48)
        .map(|index| connect_raw(&server, starts[index % 3]))
        .collect();
    let store = connect(&server, &access).unwrap();
    store.set("k", b"v").unwrap();
    for stalled in stalled {
        assert_eq!(read_to_end(stalled), "");
    }
    let mut garbage = vec![0x16, 3, 1, 0, 200];
    garbage.extend([0xAB; 200]);
    read_to_end(connect_raw(&server, &garbage));
    assert_eq!(store.get("k", LONG).unwrap(), b"v");
}
