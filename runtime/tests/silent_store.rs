//! Calls whose members agree through the store end at their own time-outs when the store goes silent.

#![allow(clippy::unwrap_used)]

use rcomm::config::RingDir;
use rcomm::store::TcpStoreServer;
use rcomm::{Config, ErrorKind, GroupOptions, Rendezvous, Result, Store, TcpStore, World};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The store's own time-out, which no call may take.
const OWN: Duration = Duration::from_secs(3600);

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

fn pass(mut server: TcpStream, mut client: TcpStream, is_silent: &AtomicBool) {
    let mut answer = [0; 4096];
    while let Ok(received @ 1..) = server.read(&mut answer) {
        if !is_silent.load(Ordering::SeqCst) && client.write_all(&answer[..received]).is_err() {
            return;
        }
    }
}

#[test]
fn shrink_search_and_merges_end_at_their_time_outs_when_the_store_is_silent() {
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let is_silent = Arc::new(AtomicBool::new(false));
    let port = stand_in_front_of(server.port(), is_silent.clone());
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", port, OWN).unwrap());
    let dumps = tempfile::tempdir().unwrap();
    let world = &|rank| {
        let config = Config {
            rendezvous: Some(Rendezvous::explicit(rank, 2, "127.0.0.1", 1).unwrap()),
            ring_dir: RingDir::Memory,
            dump_dir: dumps.path().to_owned(),
            status_wait: Duration::from_millis(200),
            ..Config::default()
        };
        World::builder(config).store(store.clone()).init().unwrap()
    };
    std::thread::scope(|scope| {
        let (tried, all_tried) = mpsc::channel();
        let other = scope.spawn(move || {
            let world = world(1);
            world.group().barrier().unwrap();
            // Also if the first rank has failed.
            let _ = all_tried.recv();
            world.shutdown()
        });
        let world = world(0);
        world.group().barrier().unwrap();
        is_silent.store(true, Ordering::SeqCst);
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
    let short = Duration::from_millis(100);
    group.set_timeout(short);
    let options = GroupOptions::named("all");
    type Call<'a> = Box<dyn FnOnce() -> Result<()> + Send + 'a>;
    let calls: Vec<(&str, Call<'_>)> = vec![
        (
            "shrink",
            Box::new(|| group.shrink(&[1], &options).map(drop)),
        ),
        (
            "find_absent",
            Box::new(|| group.find_absent(short).map(drop)),
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
            scope.spawn(move || {
                let begun = Instant::now();
                let error = call().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{name}: {error}");
                let text = error.to_string();
                assert!(text.contains("the store"), "{name}: {text}");
                let took = begun.elapsed();
                assert!(took < OWN / 30, "{name}: {took:?}");
            });
        }
    });
}
