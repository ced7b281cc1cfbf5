//! Ranks that leave, and hosts and stores that do not answer: the bytes that a rank has sent before it leaves still
//! arrive, no wait lasts beyond its limit, and errors name the rank that is missing.

use super::*;
use crate::mesh::ChannelRequest;
use crate::mesh::handshake::ChannelKind;
use crate::wait::{Stop, WaitMode, WaitPolicy};
use rcomm_core::ErrorKind;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::Instant;

/// A store that runs `then` once: when its rank checks `key` or sets it, or, if `key` is [`MANY`], when the rank reads
/// several keys.
struct RunOnAccess {
    key: &'static str,
    store: Arc<dyn Store>,
    then: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

/// The key that a rank looks for when it has waited for rank 1 for some time without a channel, to find out whether
/// rank 1 is still alive.
const LIVENESS: &str = "cpu/addr/1";

/// In place of a key: the rank reads several keys.
const MANY: &str = "*";

impl RunOnAccess {
    fn run_on(&self, key: &str) {
        let then = match key == self.key {
            true => self.then.lock().unwrap().take(),
            false => None,
        };
        if let Some(then) = then {
            then();
        }
    }
}

impl Store for RunOnAccess {
    fn check(&self, keys: &[&str]) -> Result<bool> {
        if let [key] = keys {
            self.run_on(key);
        }
        self.store.check(keys)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.run_on(key);
        self.store.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.get(key, timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(key, delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(key, expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.store.wait(keys, timeout)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.store.delete(key)
    }

    fn num_keys(&self) -> Result<u64> {
        self.store.num_keys()
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.store.list_keys()
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(key, value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        if self.key == MANY
            && let Some(then) = self.then.lock().unwrap().take()
        {
            then();
        }
        self.store.multi_get(keys, timeout)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.store.multi_set(pairs)
    }

    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        self.store.barrier(key, world_size, timeout)
    }
}

/// Makes two ranks and returns the first. The second runs `last` and ends, after the first has found no channel to the
/// second, and before the first checks whether the second is still alive.
fn first_after_end_of_second(wiring: Wiring, last: impl FnOnce(&Rig) + Send + 'static) -> Rig {
    let shared: Arc<dyn Store> = Arc::new(HashStore::new());
    let store_of_first = Arc::new(RunOnAccess {
        key: LIVENESS,
        store: shared.clone(),
        then: Mutex::default(),
    });
    let store = store_of_first.clone();
    let (here, there) = std::thread::scope(|scope| {
        let here = scope.spawn(move || Rig::new(store, 0, 2, wiring));
        let there = scope.spawn(move || Rig::new(shared, 1, 2, wiring));
        (here.join().unwrap(), there.join().unwrap())
    });
    let leave = move || {
        last(&there);
        drop(there);
    };
    *store_of_first.then.lock().unwrap() = Some(Box::new(leave));
    here
}

/// Opens a channel of this kind to `peer`, and returns its blocking socket.
fn channel(rig: &Rig, kind: ChannelKind, peer: u32) -> TcpStream {
    let stop = Stop::default();
    let mut policy = WaitPolicy::new(&stop, LONG.into(), WaitMode::Oversubscribed);
    let request = ChannelRequest {
        group: 1,
        kind,
        peer,
        streams: 1,
    };
    let mut streams = rig.factory.mesh.connect(request, &mut policy).unwrap();
    let stream = streams.remove(0).socket;
    stream.set_nonblocking(false).unwrap();
    stream
}

#[test]
fn a_channel_that_a_rank_opened_before_it_left_is_found() {
    let rig = first_after_end_of_second(Wiring::Tcp, |leaving| {
        let mut channel = channel(leaving, ChannelKind::Collective, 0);
        channel.write_all(b"the last").unwrap();
    });
    let mut channel = channel(&rig, ChannelKind::Collective, 1);
    let mut received = Vec::new();
    channel.read_to_end(&mut received).unwrap();
    assert_eq!(received, b"the last");
}

#[test]
fn a_message_that_a_rank_sent_before_it_left_is_received() {
    for &wiring in WIRINGS {
        let rig = first_after_end_of_second(wiring, |leaving| {
            let buffer = Buffer::from_slice(&[7i32, 8]);
            let (peer, tag) = (0, 3);
            leaving.run(Op::Send { buffer, peer, tag }).unwrap();
        });
        let mut data = [0i32; 2];
        let received = rig.run(Op::Recv {
            buffer: Buffer::from_mut(&mut data),
            peer: Some(1),
            tag: 3,
        });
        received.unwrap_or_else(|error| panic!("{wiring:?}: {error}"));
        assert_eq!(data, [7, 8], "{wiring:?}");
    }
}

#[test]
fn a_host_that_does_not_answer_delays_no_check_beyond_its_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = listener.local_addr().unwrap();
    // With a full queue the system answers no further connection, as a host that is cut off.
    let mut queued = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
        queued.push(stream);
        assert!(queued.len() < 16, "the queue does not fill");
    }
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    store
        .set("cpu/addr/1", address.to_string().as_bytes())
        .unwrap();
    let context = world_context(store, 0, 2, Wiring::Tcp);
    let factory = CpuFactory::open(&context).unwrap();
    // On a busy machine a check may take longer, but not every check does.
    let is_short = |_| {
        let began = Instant::now();
        assert!(!factory.is_lost(1, Duration::from_millis(50)));
        began.elapsed() < Duration::from_secs(1)
    };
    assert!((0..5).any(is_short));
}

#[test]
fn a_store_that_falls_silent_does_not_hold_up_a_rank_beyond_its_deadline() {
    let (release, held) = std::sync::mpsc::channel::<()>();
    let has_waited = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let waited = has_waited.clone();
    let store: Arc<dyn Store> = Arc::new(RunOnAccess {
        key: "cpu/host_of/1",
        store: Arc::new(HashStore::new()),
        // Like a store that answers only long after the deadline.
        then: Mutex::new(Some(Box::new(move || {
            if held
                .recv_timeout(LONG)
                .is_err_and(|error| error == std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                waited.store(true, std::sync::atomic::Ordering::Relaxed);
            }
        }))),
    });
    let factory = CpuFactory::open(&world_context(store, 0, 2, Wiring::Tcp)).unwrap();
    // Rank 1 never publishes its host, and the store does not say so.
    let deadline = Deadline::In(Duration::from_millis(400)).started();
    let layout = factory.mesh.host().layout(&[0, 1], 0, deadline);
    assert_eq!(
        layout.err().map(|error| error.kind()),
        Some(rcomm_core::ErrorKind::Timeout)
    );
    assert!(!has_waited.load(std::sync::atomic::Ordering::Relaxed));
    drop(release);
}

/// A new store that runs `then` when a rank first reads several keys.
fn run_on_read(then: impl FnOnce() + Send + 'static) -> Arc<dyn Store> {
    Arc::new(RunOnAccess {
        key: MANY,
        store: Arc::new(HashStore::new()),
        then: Mutex::new(Some(Box::new(then))),
    })
}

#[test]
fn a_wait_for_hosts_ends_though_the_store_panics_or_never_answers_it() {
    let store = run_on_read(|| panic!("a defect of the store"));
    let error = hosts_of_two(store, LONG);
    assert_eq!(error.kind(), ErrorKind::Store, "{error}");
    let (never, answer) = std::sync::mpsc::channel::<()>();
    let store = run_on_read(move || {
        let _ = answer.recv();
    });
    let error = hosts_of_two(store, Duration::from_millis(10));
    // Only the request for the hosts stays without an answer.
    assert_eq!(
        (error.kind(), error.ranks()),
        (ErrorKind::Timeout, &[1][..]),
        "{error}"
    );
    drop(never);
}

#[test]
fn a_rank_that_has_not_come_is_named_although_the_wait_for_it_ended_late() {
    let limit = Duration::from_millis(400);
    // As on a busy host, the wait ends only after the deadline.
    let store = run_on_read(move || std::thread::sleep(limit));
    let error = hosts_of_two(store, limit);
    assert_eq!(
        (error.kind(), error.ranks()),
        (ErrorKind::Timeout, &[1][..]),
        "{error}"
    );
}

/// The error that rank 0 of two gets when it looks for the hosts of both, for `limit` at most. Rank 1 never joins.
fn hosts_of_two(store: Arc<dyn Store>, limit: Duration) -> rcomm_core::Error {
    let factory = CpuFactory::open(&world_context(store, 0, 2, Wiring::Tcp)).unwrap();
    let deadline = Deadline::In(limit).started();
    let layout = factory.mesh.host().layout(&[0, 1], 0, deadline);
    layout.map(|_| ()).unwrap_err()
}

#[test]
fn a_rank_that_left_after_its_time_out_is_not_blamed_though_the_store_is_silent() {
    assert_names_whom_the_rank_that_left_awaited(|_| {});
}

#[test]
fn a_rank_that_left_is_not_blamed_though_another_call_was_in_flight() {
    // The receive ends with the group, and tells at once that the rank leaves; the thread that ends the group is then
    // still at the silent store.
    assert_names_whom_the_rank_that_left_awaited(|rig| {
        rig.issue(Op::Recv {
            buffer: Buffer::from_vec(vec![0_u8]),
            peer: Some(2),
            tag: 7,
        })
    });
}

/// Rank 1 of three waits in vain for rank 2 in a group of the two, and leaves the group of all, in which it has made
/// the call `pending`. Checks that the error of rank 0, which waits for it there, names rank 2 although the store
/// answers neither.
fn assert_names_whom_the_rank_that_left_awaited<P>(pending: impl Fn(&Rig) -> P + Sync) {
    let shared: Arc<dyn Store> = Arc::new(HashStore::new());
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(held));
    let silent = || -> Arc<dyn Store> {
        let held = held.clone();
        Arc::new(RunOnAccess {
            // Rank 1 writes its reason under this key, and rank 0 looks for it there.
            key: "world//gave_up/1",
            store: shared.clone(),
            then: Mutex::new(Some(Box::new(move || {
                let _ = held.lock().unwrap().recv_timeout(LONG);
            }))),
        })
    };
    let pair_of = |rig: &Rig| {
        let pair = group_context(&rig.store, "pair", 2, &[1, 2], rig.rank as u32);
        rig.factory.connect(pair, LONG.into()).unwrap()
    };
    let error = std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let rig = Rig::new(silent(), 0, 3, Wiring::Shm);
            rig.run(Op::Barrier).unwrap_err()
        });
        scope.spawn(|| {
            let rig = Rig::new(silent(), 1, 3, Wiring::Shm);
            let _pending = pending(&rig);
            let pair = pair_of(&rig);
            let call = rig.call(&Op::Barrier, Duration::from_millis(100));
            let late = pair.run(&mut Op::Barrier, call, &NoObserver).err();
            assert_eq!(late.map(|late| late.ranks().to_vec()), Some(vec![2]));
            // It ends without having come to the first barrier of all ranks.
        });
        scope.spawn(|| {
            // Rank 2 comes to no barrier at all.
            let rig = Rig::new(shared.clone(), 2, 3, Wiring::Shm);
            let _pair = pair_of(&rig);
            shared.wait(&["the end"], LONG).unwrap();
        });
        let error = first.join().unwrap();
        shared.set("the end", b"").unwrap();
        drop(release);
        error
    });
    assert_eq!(error.ranks(), [2], "{error}");
    assert_eq!(
        error.to_string(),
        "waited for rank 2 until the deadline (as rank 1 found)"
    );
}
