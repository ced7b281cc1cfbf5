//! Runs the watchdog's inbox in each order of events that loom explores. Another test shows that this model detects a
//! missing wake-up.

use super::{Fault, Inbox, Requests};
use crate::op::error::{Error, ErrorKind};
use crate::op::info::OpInfo;
use crate::op::monitor::model::{Model, WakeAll, WakeNone, Wakes, count_orders};

use rcomm_recorder::model::OpType;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

fn fault(wire_id: u64) -> Fault {
    let op_info = OpInfo {
        record_id: 1,
        op: OpType::AllReduce,
        seq: 1,
        is_p2p: false,
        turn_lane: Some(0),
        ends_itself: false,
        is_timed: false,
        timeout: Duration::from_secs(1),
    };
    let error = Error::new(ErrorKind::Timeout, "not done".to_owned());
    Fault {
        wire_id,
        op_info,
        error,
    }
}

/// Two callers report a fault each, then the watchdog is stopped. The watchdog must find both faults, although no
/// time-out ends its waits. Returns how many orders loom has explored.
fn every_fault_is_found<W: Wakes + 'static>() -> usize {
    count_orders(|| {
        let inbox: Arc<Inbox<Model<Requests, W>>> = Arc::new(Inbox::default());
        let watchdog = loom::thread::spawn({
            let inbox = inbox.clone();
            move || {
                let mut found = Vec::new();
                loop {
                    let (faults, stopped) = inbox.take(None, |requests| {
                        (std::mem::take(&mut requests.faults), requests.stopped)
                    });
                    found.extend(faults.iter().map(|fault| fault.wire_id));
                    if stopped {
                        return found;
                    }
                }
            }
        });
        let caller = loom::thread::spawn({
            let inbox = inbox.clone();
            move || inbox.leave_urgent(|requests| requests.faults.push(fault(1)))
        });
        inbox.leave_urgent(|requests| requests.faults.push(fault(2)));
        caller.join().expect("the thread panicked");
        inbox.stop();
        let mut found = watchdog.join().expect("the thread panicked");
        found.sort_unstable();
        assert_eq!(found, [1, 2]);
    })
}

#[test]
fn the_watchdog_finds_every_fault_once_and_ends() {
    assert!(every_fault_is_found::<WakeAll>() > 20);
}

#[test]
fn an_inbox_that_wakes_no_thread_fails_the_model() {
    let none = catch_unwind(AssertUnwindSafe(every_fault_is_found::<WakeNone>));
    assert!(none.is_err());
}
