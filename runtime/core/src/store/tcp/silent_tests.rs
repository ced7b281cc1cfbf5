//! Calls to a store that goes silent somewhere between the connection and the reply.

use super::{StoreAccess, TcpStore, TcpStoreServer};
use crate::op::error::ErrorKind;
use crate::store::{QueueStore, Store, StoreCollectives, StoreLimits, StoreQuery};
use rcomm_recorder::publish::{Secret, StoreCaller};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The store's own time-out, which no call below may take.
const OWN: Duration = Duration::from_secs(60);
/// The time-out of each call.
const SHORT: Duration = Duration::from_millis(20);

/// Listens in front of the store at `port`. Of the store's answers, each connection passes on the first `passed` bytes;
/// then it stays open without a word. Returns its own port.
fn stand_in_front_of(port: u16, passed: Arc<AtomicUsize>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own_port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let (mut requests, mut to_server) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut requests, &mut to_server));
            let passed = passed.clone();
            std::thread::spawn(move || pass(server, client, &passed));
        }
    });
    own_port
}

/// Passes answers on until the limit of this connection is reached, then only reads them.
fn pass(mut server: TcpStream, mut client: TcpStream, passed: &AtomicUsize) {
    let mut answer = [0; 4096];
    let mut done = 0;
    while let Ok(received @ 1..) = server.read(&mut answer) {
        let more = passed.load(Ordering::SeqCst).saturating_sub(done);
        let sent = received.min(more);
        done += sent;
        if client.write_all(&answer[..sent]).is_err() {
            return;
        }
    }
}

/// Makes all kinds of calls at the same time, most of which need a new connection, while the store is silent after
/// this many bytes. Returns how long each took.
fn calls_to_a_store_that_is_silent_after(bytes: usize) -> Vec<(&'static str, Duration)> {
    let access = StoreAccess::Secret(Secret::generate().unwrap());
    let host = [IpAddr::V4(Ipv4Addr::LOCALHOST)];
    let server = TcpStoreServer::bind_with(&host, 0, &access, StoreLimits::default()).unwrap();
    let passed = Arc::new(AtomicUsize::new(usize::MAX));
    let port = stand_in_front_of(server.port(), passed.clone());
    let store = Arc::new(TcpStore::connect_with("127.0.0.1", port, OWN, &access).unwrap());
    store.set("there", b"1").unwrap();
    passed.store(bytes, Ordering::SeqCst);
    let shared: Arc<dyn Store> = store.clone();
    let collectives = StoreCollectives::new(shared.clone(), "silent", 0, 2).unwrap();
    type Ask<'a> = Box<dyn FnOnce() -> bool + Send + 'a>;
    let asks: Vec<(&'static str, Ask<'_>)> = vec![
        ("get", Box::new(|| store.get("there", SHORT).is_err())),
        (
            "multi_get",
            Box::new(|| store.multi_get(&["there"], SHORT).is_err()),
        ),
        ("wait", Box::new(|| store.wait(&["there"], SHORT).is_err())),
        (
            "barrier",
            Box::new(|| Store::barrier(&*store, "all", 2, SHORT).is_err()),
        ),
        (
            "queue_pop",
            Box::new(|| store.queue_pop("queue", SHORT).is_err()),
        ),
        (
            "wait_for_workers",
            Box::new(|| store.wait_for_workers(2, SHORT).is_err()),
        ),
        (
            "collective",
            Box::new(|| collectives.all_sum(1, SHORT).is_err()),
        ),
        (
            "query",
            Box::new(|| {
                let ask = |store: &dyn Store| store.set("more", b"");
                StoreQuery::within(&shared, SHORT, ask).is_err()
            }),
        ),
    ];
    std::thread::scope(|scope| {
        let asked: Vec<_> = asks
            .into_iter()
            .map(|(name, ask)| {
                scope.spawn(move || {
                    let began = Instant::now();
                    assert!(ask(), "{name} had a reply");
                    (name, began.elapsed())
                })
            })
            .collect();
        asked.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

#[test]
fn no_call_to_a_silent_store_outlasts_its_own_time_out() {
    // It accepts, and no more; it begins to answer the challenge; it has answered it; it has taken the proof.
    let places = [0, 7, StoreCaller::ANSWER_LEN, StoreCaller::ANSWER_LEN + 1];
    std::thread::scope(|scope| {
        let silent = places.map(|bytes| {
            let calls = move || calls_to_a_store_that_is_silent_after(bytes);
            (bytes, scope.spawn(calls))
        });
        for (bytes, calls) in silent {
            for (name, took) in calls.join().unwrap() {
                assert!(
                    took < OWN / 2,
                    "{name}, silent after {bytes} bytes: {took:?}"
                );
            }
        }
    });
}

#[test]
fn absent_ranks_are_named_though_a_connection_went_silent_during_the_wait() {
    let access = StoreAccess::Secret(Secret::generate().unwrap());
    let host = [IpAddr::V4(Ipv4Addr::LOCALHOST)];
    let server = TcpStoreServer::bind_with(&host, 0, &access, StoreLimits::default()).unwrap();
    // The proof, then the replies to the batch of an `all_sum`: two counts and a nonce. The wait that follows gets
    // none, and the new connection that asks for the names gets as many.
    let passed = StoreCaller::ANSWER_LEN + 1 + 8 + 8 + 4;
    let port = stand_in_front_of(server.port(), Arc::new(AtomicUsize::new(passed)));
    let store = TcpStore::connect_with("127.0.0.1", port, OWN, &access).unwrap();
    let collectives = StoreCollectives::new(Arc::new(store), "silent", 0, 3).unwrap();
    let error = collectives.all_sum(1, SHORT).unwrap_err();
    assert_eq!(error.ranks(), [1, 2], "{error}");
}

#[test]
fn a_broadcast_over_a_silent_store_accuses_no_rank() {
    let access = StoreAccess::Secret(Secret::generate().unwrap());
    let host = [IpAddr::V4(Ipv4Addr::LOCALHOST)];
    let server = TcpStoreServer::bind_with(&host, 0, &access, StoreLimits::default()).unwrap();
    let passed = Arc::new(AtomicUsize::new(usize::MAX));
    let port = stand_in_front_of(server.port(), passed.clone());
    let store = TcpStore::connect_with("127.0.0.1", port, OWN, &access).unwrap();
    let collectives = StoreCollectives::new(Arc::new(store), "silent", 0, 2).unwrap();
    passed.store(0, Ordering::SeqCst);
    let error = collectives.broadcast(None, 1, SHORT).unwrap_err();
    assert!(error.ranks().is_empty(), "{error}");
    assert!(error.to_string().contains("did not say which"), "{error}");
}

#[test]
fn a_wait_whose_connection_was_slow_to_make_ends_when_others_do() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // Validates each connection. Closes the first one, and delays the second until shortly before the end of the call.
    let held = std::thread::spawn(move || {
        let delays = [Duration::ZERO, SHORT + super::client::GRACE * 19 / 20];
        let held = delays.map(|delay| {
            let (mut client, _) = listener.accept().unwrap();
            let mut hello = [0; 10];
            client.read_exact(&mut hello).unwrap();
            std::thread::sleep(delay);
            client.write_all(&hello[6..]).unwrap();
            let answered = Instant::now();
            // Reads what the second connection sends, until the client closes it.
            let mut request = [0; 64];
            while !delay.is_zero() && matches!(client.read(&mut request), Ok(1..)) {}
            answered.elapsed()
        });
        held[1]
    });
    let store = TcpStore::connect("127.0.0.1", port, OWN).unwrap();
    store.wait(&["never"], SHORT).unwrap_err();
    let error = store.wait(&["never"], SHORT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let held = held.join().unwrap();
    assert!(held < super::client::GRACE / 2, "{held:?}");
}
