//! [`HeartbeatMonitor`]: watches the watchdog, and makes the dump when it is stuck.
//!
//! The watchdog calls backends, and a backend may call a driver that does not return. The monitor
//! shares nothing with it but the counter of its rounds, so that it can still act.

use crate::dump_writer::Dumps;
use crate::error::{Error, Result};
use crate::watchdog::Watch;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Owns the thread that counts the watchdog's rounds.
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
    pub(crate) fn start(watch: Arc<Watch>, dumps: Arc<Dumps>, timeout: Duration) -> Result<Self> {
        let stop = Arc::new(Stop::default());
        let listener = Listener {
            stop: stop.clone(),
            watch,
            dumps,
            timeout,
        };
        let thread = std::thread::Builder::new()
            .name("rcomm/heartbeat".to_owned())
            .spawn(move || listener.run())
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

struct Listener {
    stop: Arc<Stop>,
    watch: Arc<Watch>,
    dumps: Arc<Dumps>,
    timeout: Duration,
}

impl Listener {
    fn run(self) {
        let mut heard = (self.watch.rounds(), Instant::now());
        let mut reported = false;
        let interval = (self.timeout / 4).max(Duration::from_millis(1));
        while !self.sleep(interval) {
            let rounds = self.watch.rounds();
            if rounds != heard.0 {
                if reported {
                    tracing::warn!(silent = ?heard.1.elapsed(), "the watchdog goes on");
                }
                heard = (rounds, Instant::now());
                reported = false;
            } else if heard.1.elapsed() >= self.timeout && !reported {
                tracing::error!(
                    silent = ?heard.1.elapsed(),
                    "the watchdog has stopped making rounds; operations are not watched"
                );
                self.dumps.make("the watchdog is stuck");
                reported = true;
            }
        }
    }

    /// Sleeps for this long; says whether the thread shall end.
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
    use crate::dump_writer::DumpWriter;
    use rcomm_recorder::publish::Dump;
    use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
    use std::sync::mpsc;

    struct Send(mpsc::Sender<String>);

    impl DumpWriter for Send {
        fn write(&self, dump: &Dump) -> Result<String> {
            let _ = self.0.send(dump.identity.reason.clone());
            Ok(String::new())
        }
    }

    #[test]
    fn a_silent_watchdog_is_reported_once() {
        let config = RecorderConfig {
            placement: Placement::Memory,
            entries: 16,
            ..RecorderConfig::new("job", 0, 1)
        };
        let recorder = Arc::new(FlightRecorder::create(&config).unwrap());
        let (sender, dumped) = mpsc::channel();
        let dumps = Arc::new(Dumps::new(recorder, Box::new(Send(sender))));
        // Nobody makes rounds over this watch.
        let watch = Arc::new(Watch::default());
        let mut monitor = HeartbeatMonitor::start(watch, dumps, Duration::from_millis(20)).unwrap();
        let reason = dumped.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(reason, "the watchdog is stuck");
        assert!(dumped.recv_timeout(Duration::from_millis(100)).is_err());
        monitor.stop();
    }
}
