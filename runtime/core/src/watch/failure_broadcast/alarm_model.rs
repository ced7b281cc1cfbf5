//! Raises alarms in each order of the ranks' requests to the store that loom explores. Another test shows that this
//! model detects a store whose compare-and-set is not atomic.
//!
//! The code under test is the product's. loom may switch to another rank before each request. The store itself does
//! not use loom's locks, so no other rank runs during a request, as on a store's server.

use super::Incident;
use super::responder::Responder;
use super::tests::{HookedStore, has_cause, unstarted};
use crate::op::error::Result;
use crate::op::monitor::model::count_orders;
use crate::store::{HashStore, Store};
use crate::watch::dump_writer::DumpWriter;
use rcomm_recorder::publish::Dump;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Keeps the reasons of dumps.
#[derive(Clone, Default)]
struct Reasons(Arc<Mutex<Vec<String>>>);

impl DumpWriter for Reasons {
    fn write(&self, dump: &Dump) -> Result<String> {
        let mut reasons = self.0.lock().expect("a thread has panicked");
        reasons.push(dump.identity.reason.clone());
        Ok(String::new())
    }
}

fn store(is_atomic: bool) -> Arc<HookedStore> {
    let turn = loom::sync::Mutex::new(());
    Arc::new(HookedStore {
        store: HashStore::new(),
        before: Box::new(move || drop(turn.lock())),
        after: Box::new(|store| assert!(has_cause(store), "an alarm without a cause")),
        is_atomic,
    })
}

fn responder(rank: u32, store: &Arc<HookedStore>, reasons: &Reasons) -> Responder {
    let never = Duration::from_secs(3_600);
    let broadcast = unstarted(Box::new(reasons.clone()), rank, store.clone(), never);
    Responder::new(broadcast, Vec::new())
}

/// Two ranks fail at once. They raise one alarm and both publish their status. The rank whose cause is not the alarm's
/// reads the other's cause. Returns how many orders loom has explored.
fn two_failures_are_one_alarm(is_atomic: bool) -> usize {
    count_orders(move || {
        let store = store(is_atomic);
        let raise = |rank: u32| {
            let mut responder = responder(rank, &store, &Reasons::default());
            move || {
                let incident = Incident::of_rank("late");
                let alarm = responder.raise(&incident).expect("the store failed");
                (alarm, responder.announced.map(|(_, cause)| cause))
            }
        };
        let (first, second) = (raise(0), loom::thread::spawn(raise(1)));
        let results = [first(), second.join().expect("the thread panicked")];
        let cause = store.store.get("rcomm/cause/0/1", Duration::ZERO);
        let cause = String::from_utf8(cause.expect("an alarm without a cause"))
            .expect("a cause that is not UTF-8");
        for (rank, (alarm, announced)) in results.into_iter().enumerate() {
            assert_eq!(alarm, 1);
            let own_cause = format!("rank {rank}: late");
            assert_eq!(announced, (cause != own_cause).then(|| cause.clone()));
        }
        let both = ["rcomm/status/0/1/0", "rcomm/status/0/1/1"];
        assert!(store.store.check(&both).expect("the store failed"));
    })
}

#[test]
fn ranks_that_fail_at_once_raise_one_alarm() {
    assert!(two_failures_are_one_alarm(true) > 20);
}

#[test]
fn a_store_whose_compare_and_set_is_not_atomic_fails_the_model() {
    let torn = catch_unwind(AssertUnwindSafe(|| two_failures_are_one_alarm(false)));
    assert!(torn.is_err());
}

#[test]
fn a_rank_that_polls_answers_the_alarm_once_with_its_cause() {
    let orders = count_orders(|| {
        let (store, reasons) = (store(true), Reasons::default());
        let mut failed = responder(0, &store, &Reasons::default());
        let mut poller = responder(1, &store, &reasons);
        let other = loom::thread::spawn(move || {
            poller.read_store().expect("the store failed");
            poller
        });
        let alarm = failed.raise(&Incident::of_rank("late"));
        assert_eq!(alarm.expect("the store failed"), 1);
        let mut poller = other.join().expect("the thread panicked");
        poller.read_store().expect("the store failed");
        let reasons = reasons.0.lock().expect("a thread has panicked");
        assert_eq!(*reasons, ["rank 0: late"]);
        let status = store.store.check(&["rcomm/status/0/1/1"]);
        assert!(status.expect("the store failed"));
    });
    assert!(orders > 5, "{orders}");
}
