//! Calls to a store that goes silent somewhere between the connection and the reply.

use super::{StoreAccess, TcpStore, TcpStoreServer};
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
