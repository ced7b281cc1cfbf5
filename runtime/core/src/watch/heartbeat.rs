//! [`HeartbeatMonitor`]: watches the watchdog. If the watchdog is stuck, the monitor raises the alarm and makes a
//! dump.
//!
//! The watchdog calls backends, and a backend may call a driver that does not return. The monitor only reads
//! the watchdog's counter of rounds, and needs no lock that the watchdog holds during such a call: so it can
//! still act.

use crate::op::error::{Error, Result};
use crate::watch::failure_broadcast::{FailureBroadcast, Incident};
use crate::watch::watchdog::Watch;
use rcomm_recorder::model::text;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const STUCK_MESSAGE: &str = "the watchdog is stuck";

/// Owns the thread `rcomm/heartbeat`, which observes the watchdog's counter of rounds.
pub(crate) struct HeartbeatMonitor {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Stop {
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl HeartbeatMonitor {
    pub(crate) fn start(
        watch: Arc<Watch>,
        broadcast: Arc<FailureBroadcast>,
        timeout: Duration,
    ) -> Result<Self> {
        let stop = Arc::new(Stop::default());
        let monitor_thread = MonitorThread {
            stop: stop.clone(),
            watch,
            broadcast,
            timeout,
        };
        let thread = std::thread::Builder::new()
            .name("rcomm/heartbeat".to_owned())
            .spawn(move || monitor_thread.run())
            .map_err(|error| Error::io("cannot start the thread rcomm/heartbeat", error))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    pub(crate) fn stop(&mut self) {
        *self
            .stop
            .stopped
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.wake.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the heartbeat monitor panicked");
        }
    }
}

impl Drop for HeartbeatMonitor {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The state of the thread.
struct MonitorThread {
    stop: Arc<Stop>,
    watch: Arc<Watch>,
    broadcast: Arc<FailureBroadcast>,
    timeout: Duration,
}

impl MonitorThread {
    fn run(self) {
        let mut last = (self.watch.rounds(), Instant::now());
        let mut reported = false;
        let interval = (self.timeout / 4).max(Duration::from_millis(1));
        while !self.sleep(interval) {
            let rounds = self.watch.rounds();
            if rounds != last.0 {
                if reported {
                    tracing::warn!(
                        silent = text::duration(last.1.elapsed()),
                        "the watchdog works again"
                    );
                }
                last = (rounds, Instant::now());
                reported = false;
            } else if last.1.elapsed() >= self.timeout && !reported {
                tracing::error!(
                    silent = text::duration(last.1.elapsed()),
                    "the watchdog has stopped making rounds; operations are not watched"
                );
                // The alarm is raised first, so that the other ranks write their dumps at about the same moment. A
                // store that does not reply delays this rank's dump by at most a second.
                let until = self.broadcast.status_until();
                self.broadcast
                    .raise(&Incident::of_rank(STUCK_MESSAGE), until);
                self.broadcast.dump(STUCK_MESSAGE, until);
                reported = true;
            }
        }
    }

    /// Sleeps for `interval`, or until the thread must end; returns whether it must.
    fn sleep(&self, interval: Duration) -> bool {
        let stopped = self
            .stop
            .stopped
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let slept = self
            .stop
            .wake
            .wait_timeout_while(stopped, interval, |stopped| !*stopped);
        *slept.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::HashStore;
    use crate::watch::failure_broadcast::tests::broadcast;
    use crate::watch::watchdog::{Helpers, Watchdog};
    use std::sync::mpsc::{Sender, channel};

    #[test]
    fn a_silent_watchdog_is_reported_once_and_all_ranks_dump() {
        let store = Arc::new(HashStore::new());
        let (own_broadcast, dumped, mut own_thread) =
            broadcast(0, &store, Duration::from_millis(10));
        let (_other, other_dumped, mut other_thread) =
            broadcast(1, &store, Duration::from_millis(10));
        let long = Duration::from_secs(30);
        let watch = Arc::new(Watch::default());
        let mut monitor =
            HeartbeatMonitor::start(watch, own_broadcast, Duration::from_millis(20)).unwrap();
        let (reason, flag) = dumped.recv_timeout(long).unwrap();
        assert_eq!(reason, STUCK_MESSAGE);
        assert!(flag, "the flag was not set before the dump");
        let (reason, _) = other_dumped.recv_timeout(long).unwrap();
        assert_eq!(reason, format!("rank 0: {STUCK_MESSAGE}"));
        assert!(dumped.recv_timeout(Duration::from_millis(100)).is_err());
        monitor.stop();
        own_thread.stop();
        other_thread.stop();
    }

    /// A group whose end waits until the monitor is stopped, and sends whether it was.
    struct SlowGroup(Arc<Stop>, Sender<bool>);

    impl Drop for SlowGroup {
        fn drop(&mut self) {
            let stopped = self.0.stopped.lock().unwrap();
            let long = Duration::from_secs(30);
            let stopped = self.0.wake.wait_timeout_while(stopped, long, |it| !*it);
            let _ = self.1.send(*stopped.unwrap().0);
        }
    }

    #[test]
    fn the_watchdog_is_not_monitored_while_the_groups_that_it_has_dropped_end() {
        let store = Arc::new(HashStore::new());
        let interval = Duration::from_millis(10);
        let (broadcast, _dumped, thread) = broadcast(0, &store, interval);
        let watch = Arc::new(Watch::default());
        let long = Duration::from_secs(60);
        let monitor = HeartbeatMonitor::start(watch.clone(), broadcast.clone(), long).unwrap();
        let (ended, has_ended) = channel();
        watch.drop_elsewhere(Box::new(SlowGroup(monitor.stop.clone(), ended)));
        let helpers = Helpers {
            heartbeat: monitor,
            broadcast: thread,
        };
        let mut watchdog =
            Watchdog::start(watch, broadcast, interval, move || Ok(helpers)).unwrap();
        watchdog.stop();
        assert!(has_ended.recv().unwrap(), "the monitor was still at work");
    }
}
