//! Ranks detect absent ranks by monitored barriers and shutdown notices, and go on in groups without them.

use super::{failing, run};
use rcomm::{
    Config, Error, ErrorKind, GroupOptions, HashStore, MissingRanks, OpType, ReduceOp, Result,
    Store,
};
use rcomm_tests::process::wait_until;
use rcomm_tests::world::{Carrier, on_threads, on_threads_with};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::Duration;

#[test]
fn the_rank_with_the_store_counts_dropped_worlds_as_departed() {
    let change = |config: &mut Config| {
        failing(config);
        // This limit is longer than the test: no rank may wait until it has passed.
        config.status_wait = Duration::from_secs(3_600);
    };
    on_threads(4, &Carrier::Cpu, change, |world| {
        // A rank whose world is dropped counts as departed, like one that is shut down.
        if world.rank() == 2 {
            let _ = world.shutdown();
        }
    });
}

#[test]
fn after_a_shrink_shutdown_waits_for_the_remaining_ranks_only() {
    run(4, |world| {
        let (rank, store) = (world.rank(), world.store().clone());
        let departed = |size: u32| store.add(&format!("rcomm/0/gone_count/{size}"), 0).unwrap();
        if rank == 1 {
            return drop(world);
        }
        let mut world = world;
        wait_until("rank 1 to depart", || (departed(4) == 1).then_some(()));
        world.shrink(&[1]).unwrap();
        if rank == 3 {
            wait_until("the others to depart", || (departed(3) == 2).then_some(()));
            // Rank 0 has not departed: it waits for this rank.
            assert!(!store.check(&["rcomm/0/all gone/3"]).unwrap());
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn the_remaining_ranks_continue_in_a_smaller_group() {
    run(3, |world| {
        if world.rank() == 1 {
            return drop(world);
        }
        let error = world.group().barrier().unwrap_err();
        assert!(!error.is_recoverable());
        let options = GroupOptions::named("survivors");
        let group = world.group().shrink(&[1], &options).unwrap();
        assert_eq!(group.ranks(), [0, 2]);
        let mut sum = [world.rank()];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [2]);
        let other = world.group().shrink(&[0, 1, 2], &options).unwrap_err();
        assert!(other.to_string().contains("excludes itself"), "{other}");
        group.barrier().unwrap();
    });
}

#[test]
fn the_first_result_of_find_absent_ends_the_wait_of_all_ranks() {
    run(3, |world| {
        let (store, group) = (world.store(), world.group());
        match world.rank() {
            0 => {
                wait_until("rank 2 to wait", || {
                    let keys = store.list_keys().unwrap();
                    keys.iter()
                        .any(|key| key.ends_with("absent/1/2"))
                        .then_some(())
                });
                let absent = group.find_absent(Duration::from_millis(1)).unwrap();
                assert_eq!(absent, [1]);
                store.set("test/done", b"1").unwrap();
            }
            1 => {
                store.wait(&["test/done"], Duration::from_secs(60)).unwrap();
                let error = group.find_absent(Duration::from_secs(3_600)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            }
            // Rank 0's result ends this wait.
            _ => {
                let absent = group.find_absent(Duration::from_secs(3_600)).unwrap();
                assert_eq!(absent, [1]);
            }
        }
    });
}

#[test]
fn the_monitored_barrier_names_the_ranks_that_do_not_arrive() {
    run(4, |world| {
        world
            .group()
            .monitored_barrier(MissingRanks::First)
            .unwrap();
        let group = world.group().within(Duration::from_secs(2));
        if world.rank() < 2 {
            let error = group.monitored_barrier(MissingRanks::All).unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains("ranks 2, 3 did not arrive within"),
                "{error}"
            );
            assert_eq!(error.seq(), Some(2));
            assert_eq!(error.ranks(), [2, 3]);
        }
    });
}

#[test]
fn a_monitored_barrier_may_be_issued_by_some_ranks_and_run_blocking_by_others() {
    run(3, |world| {
        let group = world.group();
        for round in 0..3 {
            let work = group.monitored_barrier_async(MissingRanks::All).unwrap();
            assert_eq!(
                (work.op(), work.seq()),
                (OpType::MonitoredBarrier, 3 * round + 1)
            );
            // Other operations run while it is pending.
            let mut sum = [1];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [3]);
            work.wait().unwrap();
            if world.rank() == 1 {
                group.monitored_barrier(MissingRanks::First).unwrap();
            } else {
                let work = group.monitored_barrier_async(MissingRanks::First).unwrap();
                work.wait().unwrap();
            }
        }
        group.barrier().unwrap();
        // The barriers have removed their keys from the store.
        let keys = world.store().list_keys().unwrap();
        let is_left = |key: &String| key.contains("monitored_barrier/");
        assert!(!keys.iter().any(is_left), "{keys:?}");
    });
}

#[test]
fn an_issued_monitored_barrier_names_the_absent_ranks_and_the_group_stays_usable() {
    run(3, |world| {
        let group = world.group();
        let brief = group.within(Duration::from_secs(2));
        if world.rank() == 2 {
            let others = world.store().wait(&["test/done"], Duration::from_secs(30));
            others.unwrap();
        } else {
            // The time-out counts from the issue, so both ranks issue at about the same time.
            let keys = ["test/here/0", "test/here/1"];
            let own_key = keys[world.rank() as usize];
            world.store().set(own_key, b"1").unwrap();
            world.store().wait(&keys, Duration::from_secs(30)).unwrap();
        }
        // A rank that arrives too late gets the same error as the others.
        let work = brief.monitored_barrier_async(MissingRanks::All).unwrap();
        let error = work.wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.is_recoverable(), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("monitored_barrier #1 on group"), "{text}");
        assert!(text.contains("rank 2 did not arrive within"), "{text}");
        if world.rank() == 0 {
            world.store().set("test/done", b"1").unwrap();
        }
        assert!(group.refusal().is_none());
        let mut sum = [world.rank()];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [3]);
        // Nor has the rank that came late left a key.
        let keys = world.store().list_keys().unwrap();
        let is_left = |key: &String| key.contains("monitored_barrier/");
        assert!(!keys.iter().any(is_left), "{keys:?}");
        world.shutdown().unwrap();
    });
}

#[test]
fn an_abort_ends_a_monitored_barrier() {
    run(2, |world| {
        let group = world.group();
        if world.rank() == 1 {
            // This wait ends before the time-out of rank 0's barriers: if they were not aborted, the test would fail.
            let done = world.store().wait(&["test/done"], Duration::from_secs(15));
            return done.unwrap();
        }
        let issued = group.monitored_barrier_async(MissingRanks::All).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| group.monitored_barrier(MissingRanks::All).unwrap_err());
            wait_until("both to be recorded", || {
                (world.snapshot().entries.len() == 2).then_some(())
            });
            group.abort("enough");
            let error = waiting.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            assert!(error.to_string().contains("enough"), "{error}");
        });
        let error = issued.wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        assert!(error.to_string().contains("enough"), "{error}");
        world.store().set("test/done", b"1").unwrap();
    });
}

#[test]
fn a_shrink_that_a_member_does_not_call_names_it() {
    let ended = Barrier::new(4);
    run(4, |world| {
        if world.rank() < 2 {
            let group = world.group().within(Duration::from_millis(300));
            let options = GroupOptions::named("remaining");
            let error = group.shrink(&[3], &options).unwrap_err();
            assert_eq!(
                (error.kind(), error.ranks()),
                (ErrorKind::Timeout, &[2][..])
            );
            let text = error.to_string();
            assert!(
                text.contains("rank 2 did not call shrink within its time-out"),
                "{text}"
            );
        }
        // The rank with the store stays until the others have their error.
        ended.wait();
    });
}

/// A store that does not remove keys of monitored barriers.
#[derive(Default)]
struct Keeping {
    map: HashStore,
    /// Whether a removal waits until `ended` is true; else it fails at once.
    hangs: bool,
    ended: Mutex<bool>,
    ends: Condvar,
}

impl Keeping {
    fn end(&self) {
        *self.ended.lock().unwrap() = true;
        self.ends.notify_all();
    }
}

impl Store for Keeping {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.map.set(key, value)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.map.get(key, timeout)
    }
    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.map.add(key, delta)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.map.compare_set(key, expected, desired)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.map.wait(keys, timeout)
    }
    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.map.check(keys)
    }
    fn delete(&self, key: &str) -> Result<bool> {
        if !key.contains("monitored_barrier/") {
            return self.map.delete(key);
        }
        let mut ended = self.ended.lock().unwrap();
        while self.hangs && !*ended {
            ended = self.ends.wait(ended).unwrap();
        }
        Err(Error::new(ErrorKind::Store, "this key stays"))
    }
    fn num_keys(&self) -> Result<u64> {
        self.map.num_keys()
    }
    fn list_keys(&self) -> Result<Vec<String>> {
        self.map.list_keys()
    }
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.map.append(key, value)
    }
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.map.multi_get(keys, timeout)
    }
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.map.multi_set(pairs)
    }
    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        self.map.barrier(key, world_size, timeout)
    }
}

/// Runs two monitored barriers at a store that does not remove keys; rank 2 is absent from the second.
fn barriers_at(store: Keeping) {
    let store = Arc::new(store);
    on_threads_with(store.clone(), 3, &Carrier::Cpu, failing, |world| {
        let group = world.group();
        group.monitored_barrier(MissingRanks::First).unwrap();
        let done_keys = ["test/done/0", "test/done/1"];
        if world.rank() == 2 {
            return store.wait(&done_keys, Duration::from_secs(120)).unwrap();
        }
        let brief = group.within(Duration::from_secs(2));
        let error = brief.monitored_barrier(MissingRanks::First).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert_eq!(error.ranks(), [2], "{error}");
        // A removal that hangs has not ended before this.
        assert!(!*store.ended.lock().unwrap());
        let own_key = done_keys[world.rank() as usize];
        store.set(own_key, b"1").unwrap();
        store.wait(&done_keys, Duration::from_secs(120)).unwrap();
        store.end();
    });
}

#[test]
fn a_monitored_barrier_names_the_absent_ranks_although_its_keys_cannot_be_removed() {
    barriers_at(Keeping::default());
}

#[test]
fn a_monitored_barrier_does_not_wait_for_a_store_that_hangs_on_removing_its_keys() {
    barriers_at(Keeping {
        hangs: true,
        ..Keeping::default()
    });
}
