//! The contract of stores, checked on every implementation; files that are damaged or no stores; and the collectives
//! over stores.

#![allow(clippy::unwrap_used)]

use rcomm::store::{
    FileStore, HashStore, PrefixStore, QueueStore, Store, StoreCollectives, TcpStore,
};
use rcomm::{ErrorKind, Result};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(20);

/// Runs `check` on a new store of each kind, with two handles to it.
fn on_every_store(check: impl Fn(&dyn Store, &dyn Store)) {
    let hash = HashStore::new();
    check(&hash, &hash);

    let beneath = Arc::new(HashStore::new());
    beneath.set("other", b"outside the prefix").unwrap();
    let first = PrefixStore::new("dp", beneath.clone());
    let second = PrefixStore::new("dp", beneath as Arc<dyn Store>);
    check(&first, &second);

    let first = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let second = TcpStore::connect("127.0.0.1", first.port(), LONG).unwrap();
    check(&first, &second);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let first = FileStore::open(&path, Some(2)).unwrap();
    let second = FileStore::open(&path, Some(2)).unwrap();
    check(&first, &second);
    drop(first);
    assert!(
        path.exists(),
        "the file is gone though one of its two users is still there"
    );
    drop(second);
    assert!(!path.exists(), "the last user has not removed the file");
}

fn on_every_queue_store(check: impl Fn(&dyn QueueStore)) {
    check(&HashStore::new());
    check(&PrefixStore::new("dp", Arc::new(HashStore::new())));
    check(&TcpStore::host("127.0.0.1", 0, LONG).unwrap());
}

fn timed_out<T: std::fmt::Debug>(result: Result<T>) -> String {
    let error = result.expect_err("nothing ends the wait");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    error.to_string()
}

#[test]
fn a_value_set_through_one_handle_is_read_through_the_other() {
    on_every_store(|first, second| {
        first.set("k", b"first").unwrap();
        assert_eq!(second.get("k", LONG).unwrap(), b"first");
        second.set("k", b"").unwrap();
        assert_eq!(first.get("k", LONG).unwrap(), b"");
        first.append("k", b"ab").unwrap();
        second.append("k", b"c").unwrap();
        second.append("new", b"\0\xff").unwrap();
        assert_eq!(
            first.multi_get(&["k", "new"], LONG).unwrap(),
            [b"abc".to_vec(), b"\0\xff".to_vec()]
        );
        first
            .multi_set(&[("x", b"1"), ("y", b"2"), ("x", b"3")])
            .unwrap();
        assert_eq!(second.multi_get(&["x", "y"], LONG).unwrap(), [b"3", b"2"]);
        assert!(second.multi_get(&[], LONG).unwrap().is_empty());
    });
}

#[test]
fn keys_are_counted_listed_and_removed() {
    on_every_store(|first, second| {
        first.set("a", b"1").unwrap();
        second.set("b/c", b"2").unwrap();
        let mut keys = first.list_keys().unwrap();
        keys.sort();
        assert_eq!(keys, ["a", "b/c"]);
        assert_eq!(second.num_keys().unwrap(), 2);
        assert!(first.check(&["a", "b/c"]).unwrap());
        assert!(second.delete("a").unwrap());
        assert!(!first.delete("a").unwrap());
        assert!(!first.check(&["a", "b/c"]).unwrap());
        assert!(first.check(&[]).unwrap());
        assert_eq!(first.num_keys().unwrap(), 1);
    });
}

#[test]
fn counters_are_stored_as_decimal_text() {
    on_every_store(|first, second| {
        assert_eq!(first.add("n", 5).unwrap(), 5);
        assert_eq!(second.add("n", -7).unwrap(), -2);
        assert_eq!(first.get("n", LONG).unwrap(), b"-2");
        first.set("n", b"many").unwrap();
        let error = second.add("n", 1).expect_err("not a number");
        assert_eq!(error.kind(), ErrorKind::Store);
    });
}

#[test]
fn compare_set_returns_the_stored_value_or_for_a_missing_key_the_expected_one() {
    on_every_store(|first, second| {
        assert_eq!(first.compare_set("k", b"x", b"new").unwrap(), b"x");
        assert!(!second.check(&["k"]).unwrap());
        assert_eq!(first.compare_set("k", b"", b"first").unwrap(), b"first");
        assert_eq!(second.compare_set("k", b"other", b"new").unwrap(), b"first");
        assert_eq!(second.compare_set("k", b"first", b"new").unwrap(), b"new");
        assert_eq!(first.get("k", LONG).unwrap(), b"new");
    });
}

#[test]
fn time_out_of_a_wait_names_the_missing_keys() {
    on_every_store(|first, _| {
        first.set("here", b"").unwrap();
        let text = timed_out(first.wait(&["here", "late"], SHORT));
        assert!(
            text.contains("late\"") && !text.contains("here\""),
            "{text}"
        );
        assert!(text.contains("20 ms"), "{text}");
        timed_out(first.get("late", SHORT));
        timed_out(first.multi_get(&["here", "late"], Duration::ZERO));
        first.wait(&["here"], Duration::ZERO).unwrap();
    });
}

#[test]
fn waiting_calls_do_not_block_other_threads_and_end_when_the_keys_are_set() {
    on_every_store(|first, _| {
        thread::scope(|scope| {
            let waiting = scope.spawn(|| first.wait(&["a", "b"], LONG));
            let getting = scope.spawn(|| first.get("b", LONG));
            // The calls of this thread must succeed whether or not the other two wait already.
            first.set("a", b"1").unwrap();
            assert_eq!(first.add("count", 1).unwrap(), 1);
            first.set("b", b"2").unwrap();
            waiting.join().unwrap().unwrap();
            assert_eq!(getting.join().unwrap().unwrap(), b"2");
        });
    });
}

#[test]
fn barrier_blocks_until_all_ranks_have_arrived() {
    on_every_store(|first, second| {
        let text = timed_out(first.barrier("early", 2, SHORT));
        assert!(
            text.contains("1 of 2 ranks") || text.contains("not all 2 ranks"),
            "{text}"
        );
        let (passed, all_passed) = mpsc::channel();
        thread::scope(|scope| {
            for store in [first, second, first] {
                let passed = passed.clone();
                scope.spawn(move || passed.send(store.barrier("b", 4, LONG)));
            }
            assert!(
                all_passed.recv_timeout(SHORT).is_err(),
                "a rank has passed before the fourth came"
            );
            second.barrier("b", 4, LONG).unwrap();
            for _ in 0..3 {
                all_passed.recv_timeout(LONG).unwrap().unwrap();
            }
        });
    });
}

#[test]
fn concurrent_adds_lose_nothing() {
    on_every_store(|first, second| {
        thread::scope(|scope| {
            for store in [first, second] {
                for _ in 0..2 {
                    scope.spawn(move || {
                        (0..50).for_each(|_| {
                            store.add("n", 1).unwrap();
                        })
                    });
                }
            }
        });
        assert_eq!(first.get("n", LONG).unwrap(), b"200");
    });
}

#[test]
fn queue_returns_values_in_order_of_pushes() {
    on_every_queue_store(|store| {
        assert_eq!(store.try_queue_pop("q").unwrap(), None);
        timed_out(store.queue_pop("q", SHORT));
        store.queue_push("q", b"one").unwrap();
        store.queue_push("q", b"two").unwrap();
        assert_eq!(store.queue_len("q").unwrap(), 2);
        assert_eq!(store.num_keys().unwrap(), 0, "a queue is counted as a key");
        assert!(store.check(&["q"]).unwrap());
        assert_eq!(store.queue_pop("q", LONG).unwrap(), b"one");
        assert_eq!(store.try_queue_pop("q").unwrap(), Some(b"two".to_vec()));
        assert_eq!(store.queue_len("q").unwrap(), 0);
        assert!(!store.check(&["q"]).unwrap());
    });
}

#[test]
fn each_value_of_a_queue_is_popped_once() {
    on_every_queue_store(|store| {
        thread::scope(|scope| {
            let takers: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| store.queue_pop("q", LONG).unwrap()))
                .collect();
            for value in [b"0", b"1", b"2", b"3"] {
                store.queue_push("q", value).unwrap();
            }
            let mut taken: Vec<_> = takers
                .into_iter()
                .map(|taker| taker.join().unwrap())
                .collect();
            taken.sort();
            assert_eq!(taken, [b"0", b"1", b"2", b"3"]);
        });
    });
}

#[test]
fn half_written_record_of_a_killed_writer_is_discarded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::open(&path, None).unwrap();
    store.set("a", b"whole").unwrap();
    let whole = std::fs::metadata(&path).unwrap().len();
    let mut file = std::fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .unwrap();
    std::io::Write::write_all(&mut file, b"\x02\0\0\0/b\x10\0\0\0only part").unwrap();
    assert!(!store.check(&["b"]).unwrap());
    store.set("c", b"next").unwrap();
    assert_eq!(store.get("c", LONG).unwrap(), b"next");
    let other = FileStore::open(&path, None).unwrap();
    assert_eq!(other.get("a", LONG).unwrap(), b"whole");
    assert_eq!(other.num_keys().unwrap(), 2);
    assert!(std::fs::read(&path).unwrap()[whole as usize..].starts_with(b"\x02\0\0\0/c"));
}

#[test]
fn a_file_that_is_no_store_is_refused_and_left_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("not_a_store");
    let foreign: [&[u8]; 2] = [
        b"\x03\0\0\0abc\0\0\0\0 and more",
        b"text that a user wants to keep",
    ];
    for content in foreign {
        std::fs::write(&path, content).unwrap();
        let opened = FileStore::open(&path, None).map(drop);
        let error = opened.expect_err("not a store");
        assert_eq!(error.kind(), ErrorKind::Store);
        assert!(error.to_string().contains("store record"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), content);
    }
}

/// Runs `body` for three ranks on threads: over a new store in memory, a new TCP store and a new file store.
fn three_ranks(body: impl Fn(&StoreCollectives, u32) + Sync) {
    let run = |stores: [Arc<dyn Store>; 3]| {
        thread::scope(|scope| {
            for (rank, store) in (0..).zip(stores) {
                let body = &body;
                scope.spawn(move || {
                    let collectives = StoreCollectives::new(store, "control", rank, 3).unwrap();
                    body(&collectives, rank);
                });
            }
        });
    };
    let hash: Arc<dyn Store> = Arc::new(HashStore::new());
    run([hash.clone(), hash.clone(), hash]);
    let host = Arc::new(TcpStore::host("127.0.0.1", 0, LONG).unwrap());
    let other = || -> Arc<dyn Store> {
        Arc::new(TcpStore::connect("127.0.0.1", host.port(), LONG).unwrap())
    };
    run([host.clone(), other(), other()]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let file = || -> Arc<dyn Store> { Arc::new(FileStore::open(&path, Some(3)).unwrap()) };
    run([file(), file(), file()]);
}

#[test]
fn control_collectives_carry_the_values_of_all_ranks() {
    three_ranks(|collectives, rank| {
        for round in 0..3u8 {
            collectives.barrier(LONG).unwrap();
            let sum = collectives.all_sum(i64::from(rank) - 5, LONG).unwrap();
            assert_eq!(sum, -12);
            let sent = [rank as u8, round];
            let expected = [vec![0, round], vec![1, round], vec![2, round]];
            assert_eq!(collectives.all_gather(&sent, LONG).unwrap(), expected);
            let value = (rank == 1).then_some(&sent[..]);
            assert_eq!(collectives.broadcast(value, 1, LONG).unwrap(), [1, round]);
            let gathered = collectives.gather(&sent, 2, LONG).unwrap();
            assert_eq!(gathered, (rank == 2).then_some(expected.to_vec()));
            let parts: [&[u8]; 3] = [b"a", b"", &sent];
            let part = collectives
                .scatter((rank == 0).then_some(&parts[..]), 0, LONG)
                .unwrap();
            assert_eq!(
                part,
                [b"a".to_vec(), Vec::new(), vec![0, round]][rank as usize]
            );
        }
    });
}

#[test]
fn control_collectives_leave_only_the_keys_of_the_last_ones() {
    let store = Arc::new(HashStore::new());
    let collectives = StoreCollectives::new(store.clone(), "control", 0, 1).unwrap();
    let mut most_keys = 0;
    for _ in 0..20 {
        collectives.all_gather(b"value", LONG).unwrap();
        collectives.broadcast(Some(b"value"), 0, LONG).unwrap();
        collectives.all_sum(1, LONG).unwrap();
        most_keys = most_keys.max(store.num_keys().unwrap());
    }
    assert!(most_keys <= 6, "{most_keys}");
}

#[test]
fn control_collectives_name_the_ranks_that_do_not_come() {
    three_ranks(|collectives, rank| {
        if rank == 1 {
            return;
        }
        let errors = [
            collectives.barrier(SHORT).unwrap_err(),
            collectives.all_gather(b"", SHORT).unwrap_err(),
            collectives.broadcast(None, 1, SHORT).unwrap_err(),
            collectives.scatter(None, 1, SHORT).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Timeout);
            // The other rank may come after this rank's time-out.
            assert!(error.ranks().contains(&1), "{error}");
            assert!(!error.ranks().contains(&rank), "{error}");
        }
        let refused = collectives.broadcast(Some(b"x"), 1, SHORT).unwrap_err();
        assert!(
            refused.to_string().contains("only rank 1, the root"),
            "{refused}"
        );
        let refused = collectives.scatter(Some(&[]), rank, SHORT).unwrap_err();
        assert!(
            refused
                .to_string()
                .contains("0 values were given to scatter"),
            "{refused}"
        );
        let refused = collectives.gather(b"", 3, SHORT).unwrap_err();
        assert!(
            refused.to_string().contains("not one of 3 ranks"),
            "{refused}"
        );
    });
}
