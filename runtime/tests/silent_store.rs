//! Calls whose members agree through the store end soon after their own time-outs when the store goes silent.

#![allow(clippy::unwrap_used)]

use rcomm::config::RingDir;
use rcomm::store::TcpStoreServer;
use rcomm::{
    Config, ErrorKind, GroupOptions, MissingRanks, Rendezvous, Result, Store, TcpStore, World,
};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The store's own time-out, for which no call may wait.
const OWN: Duration = Duration::from_secs(3600);
/// The time-out of each call.
const SHORT: Duration = Duration::from_millis(100);
/// More than any call may take: a monitored barrier ends 6 s after its time-out, the others 2 s or 3 s.
const LONGEST: Duration = Duration::from_secs(10);

/// Listens in front of the store at `port`, and passes answers on while `is_silent` is false. Returns its own port.
fn stand_in_front_of(port: u16, is_silent: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own_port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(|client| client.ok()) {
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            let (mut requests, mut to_server) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut requests, &mut to_server));
            let is_silent = is_silent.clone();
            std::thread::spawn(move || pass(server, client, &is_silent));
        }
    });
    own_port
}

/// Passes the answers of the server on to the client until one of them closes its connection; while `is_silent` is set,
/// drops them.
fn pass(mut server: TcpStream, mut client: TcpStream, is_silent: &AtomicBool) {
    let mut answer = [0; 4096];
    while let Ok(received @ 1..) = server.read(&mut answer) {
        if !is_silent.load(Ordering::SeqCst) && client.write_all(&answer[..received]).is_err() {
            return;
        }
    }
}

/// The configuration of one of two ranks that write their dumps to `dumps`.
fn config(rank: u32, dumps: &Path) -> Config {
    Config {
        rendezvous: Some(Rendezvous::explicit(rank, 2, "127.0.0.1", 1).unwrap()),
        ring_dir: RingDir::Memory,
        dump_dir: dumps.to_owned(),
        ..Config::default()
    }
}

#[test]
fn shrink_names_absent_ranks_though_its_connection_fell_silent_during_the_wait() {
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let port = fall_silent_at_the_wait_of_a_shrink(server.port());
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", port, OWN).unwrap());
    let dumps = tempfile::tempdir().unwrap();
    let world = &|rank| {
        let builder = World::builder(config(rank, dumps.path()));
        builder.store(store.clone()).init().unwrap()
    };
    std::thread::scope(|scope| {
        let (tried, all_tried) = mpsc::channel::<()>();
        let other = scope.spawn(move || {
            let world = world(1);
            world.group().barrier().unwrap();
            let _ = all_tried.recv();
            world.shutdown()
        });
        let world = world(0);
        world.group().barrier().unwrap();
        world.group().set_timeout(SHORT);
        let shrunk = world.group().shrink(&[], &GroupOptions::named("all"));
        let error = shrunk.map(drop).unwrap_err();
        assert_eq!(error.ranks(), [1], "{error}");
        drop(tried);
        world.shutdown().unwrap();
        other.join().unwrap().unwrap();
    });
}

/// Listens in front of the store at `port`. The connection that first sends a wait of a shrink gets no answer from then
/// on; others get all. Returns its own port.
fn fall_silent_at_the_wait_of_a_shrink(port: u16) -> u16 {
    /// The opcode of a wait.
    const WAIT: u8 = 6;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own_port = listener.local_addr().unwrap().port();
    let has_fallen = Arc::new(AtomicBool::new(false));
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(|client| client.ok()) {
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            let (mut requests, mut to_server) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            let is_silent = Arc::new(AtomicBool::new(false));
            let (has_fallen, silence) = (has_fallen.clone(), is_silent.clone());
            std::thread::spawn(move || {
                let mut request = [0; 4096];
                while let Ok(received @ 1..) = requests.read(&mut request) {
                    let sent = &request[..received];
                    let is_of_shrink = sent.windows(7).any(|part| part == b"shrink/");
                    if sent[0] == WAIT && is_of_shrink && !has_fallen.swap(true, Ordering::SeqCst) {
                        silence.store(true, Ordering::SeqCst);
                    }
                    if to_server.write_all(sent).is_err() {
                        return;
                    }
                }
            });
            std::thread::spawn(move || pass(server, client, &is_silent));
        }
    });
    own_port
}

#[test]
fn calls_through_the_store_end_soon_after_their_time_outs_when_it_is_silent() {
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let is_silent = Arc::new(AtomicBool::new(false));
    let port = stand_in_front_of(server.port(), is_silent.clone());
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", port, OWN).unwrap());
    let dumps = tempfile::tempdir().unwrap();
    let world = &|rank| {
        let config = Config {
            status_wait: Duration::from_millis(200),
            ..config(rank, dumps.path())
        };
        World::builder(config).store(store.clone()).init().unwrap()
    };
    std::thread::scope(|scope| {
        let (tried, all_tried) = mpsc::channel();
        let (silenced, silence) = mpsc::channel();
        let other = scope.spawn(move || {
            let world = world(1);
            world.group().barrier().unwrap();
            if silence.recv().is_ok() {
                world.group().set_timeout(SHORT);
                let barrier = || world.group().monitored_barrier(MissingRanks::All);
                assert_fails_in_time("monitored_barrier of rank 1", barrier);
            }
            // Also if the first rank has failed.
            let _ = all_tried.recv();
            world.shutdown()
        });
        let world = world(0);
        world.group().barrier().unwrap();
        is_silent.store(true, Ordering::SeqCst);
        silenced.send(()).unwrap();
        try_all(&world, &store);
        is_silent.store(false, Ordering::SeqCst);
        tried.send(()).unwrap();
        world.shutdown().unwrap();
        other.join().unwrap().unwrap();
    });
}

/// Makes all calls at the same time, each of which must fail because the store does not reply.
fn try_all(world: &World, store: &Arc<dyn Store>) {
    let group = world.group();
    group.set_timeout(SHORT);
    let options = GroupOptions::named("all");
    type Call<'a> = Box<dyn FnOnce() -> Result<()> + Send + 'a>;
    let calls: Vec<(&str, Call<'_>)> = vec![
        (
            "shrink",
            Box::new(|| group.shrink(&[1], &options).map(drop)),
        ),
        (
            "find_absent",
            Box::new(|| group.find_absent(SHORT).map(drop)),
        ),
        (
            "monitored_barrier",
            Box::new(|| group.monitored_barrier(MissingRanks::All)),
        ),
        (
            "merge",
            Box::new(|| world.merge(group, 4, &options).map(drop)),
        ),
        (
            "merge_remote",
            Box::new(|| {
                let merged = world.merge_remote(group, 4, "both", store.clone());
                merged.map(drop)
            }),
        ),
    ];
    std::thread::scope(|scope| {
        for (name, call) in calls {
            scope.spawn(move || assert_fails_in_time(name, call));
        }
    });
}

/// Makes a call that must fail because the store does not reply, without accusing a rank.
fn assert_fails_in_time(name: &str, call: impl FnOnce() -> Result<()>) {
    let begun = Instant::now();
    let error = call().unwrap_err();
    let took = begun.elapsed();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{name}: {error}");
    assert!(error.ranks().is_empty(), "{name}: {error}");
    let text = error.to_string();
    assert!(text.contains("the store"), "{name}: {text}");
    assert!(took < LONGEST, "{name}: {took:?}");
}
