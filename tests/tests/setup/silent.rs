//! A store that stops answering while the ranks meet.

use super::{config_at, rendezvous};
use rcomm::{Config, ErrorKind, Store, TcpStore, World};
use rcomm_tests::process::wait_until;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Passes bytes between callers and the store at `port` until `stops` is set. From then on, no byte passes, but all
/// connections stay open. Returns the relay's port.
fn relay_to(port: u16, stops: &Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own_port = listener.local_addr().unwrap().port();
    let stops = stops.clone();
    // These threads end with the test's process.
    std::thread::spawn(move || {
        for caller in listener.incoming() {
            let (caller, store) = (
                caller.unwrap(),
                TcpStream::connect(("127.0.0.1", port)).unwrap(),
            );
            let directions = [
                (caller.try_clone().unwrap(), store.try_clone().unwrap()),
                (store, caller),
            ];
            for (mut from, mut to) in directions {
                let stops = stops.clone();
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(len @ 1..) = from.read(&mut bytes) {
                        if stops.load(Ordering::Acquire) || to.write_all(&bytes[..len]).is_err() {
                            break;
                        }
                    }
                    while stops.load(Ordering::Acquire) {
                        std::thread::park();
                    }
                });
            }
        }
    });
    own_port
}

#[test]
fn a_store_that_stops_answering_during_init_is_named_within_the_time_out() {
    a_silent_store_of_rank_0_is_named(World::init);
}

#[test]
fn a_store_of_the_program_that_stops_answering_during_init_is_named_with_rank_0() {
    a_silent_store_of_rank_0_is_named(|mut config| {
        let rendezvous = config.rendezvous.as_mut().unwrap();
        rendezvous.uses_agent_store = true;
        let store = TcpStore::connect("127.0.0.1", rendezvous.master_port, config.init_timeout)?;
        let builder = World::builder(config).store(Arc::new(store));
        builder.store_at_rank_0().init()
    });
}

/// Rank 1 starts with `init`, and the store that rank 0 serves stops answering once it has checked in.
fn a_silent_store_of_rank_0_is_named(
    init: impl FnOnce(Config) -> rcomm::Result<World> + Send + 'static,
) {
    let store = TcpStore::host("127.0.0.1", 0, Duration::from_secs(60)).unwrap();
    let stops = Arc::new(AtomicBool::new(false));
    let port = relay_to(store.port(), &stops);
    let config = Config {
        init_timeout: Duration::from_secs(4),
        status_wait: Duration::from_millis(500),
        ..config_at(rendezvous(1, 3, port))
    };
    let started = Instant::now();
    let rank_1 = std::thread::spawn(move || {
        let error = init(config).expect_err("the store stops");
        (error, started.elapsed())
    });
    wait_until("rank 1 to check in", || {
        let keys = store.list_keys().unwrap();
        keys.iter().any(|key| key.contains("/here/")).then_some(())
    });
    stops.store(true, Ordering::Release);
    let (error, took) = rank_1.join().unwrap();
    // Requests one after the other, each with the store's own time-out, would take three times as long.
    assert!(took < Duration::from_secs(9), "{took:?}: {error}");
    assert_eq!(
        (error.kind(), error.ranks()),
        (ErrorKind::Timeout, &[0][..])
    );
    let text = error.to_string();
    let expected =
        format!("the store at 127.0.0.1 port {port}, which rank 0 serves, did not answer");
    assert!(text.contains(&expected), "{text}");
    assert!(!text.contains("missing"), "{text}");
}
