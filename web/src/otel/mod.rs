//! Exports traces, metrics and logs to OpenTelemetry, over OTLP/HTTP.
//!
//! Spans are built from the records and their times; no thread of the job takes part, and the rings
//! serve as the queue. One thread reads the newest snapshot, sends what is new, and waits for the
//! answer. What a slow or dead OTLP collector does not accept is dropped and counted.
//!
//! The rest of the crate does not depend on OpenTelemetry.

mod logs;
mod messages;
mod metrics;
mod operation;
#[cfg(feature = "program-spans")]
mod program;
mod send;
mod settings;
mod spans;
mod value;

#[cfg(feature = "program-spans")]
pub use program::{ProgramSpans, ProgramSpansLayer};
pub use settings::{Settings, SettingsError};

use crate::state::store::SnapshotStore;
use logs::Logs;
use rcomm_analyzer::Snapshot;
use send::Sender;
use spans::Spans;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between two exports of what is new in the newest snapshot.
const ROUND_INTERVAL: Duration = Duration::from_millis(250);

/// Numbers of exported and of dropped items, by signal.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) spans_sent: AtomicU64,
    pub(crate) spans_dropped: AtomicU64,
    pub(crate) logs_sent: AtomicU64,
    pub(crate) logs_dropped: AtomicU64,
    pub(crate) metrics_sent: AtomicU64,
    pub(crate) metrics_dropped: AtomicU64,
}

/// Tells the exporter's thread to stop.
#[derive(Default)]
struct Stop {
    stopped: Mutex<bool>,
    wake: Condvar,
}

/// A running exporter. Stops and joins its thread when dropped.
pub struct Telemetry {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    counts: Arc<Counts>,
    traces: bool,
}

impl Telemetry {
    /// Exports the snapshots of `store` from now on. Operations that ended earlier get no spans; counters include
    /// them.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(store: &SnapshotStore, settings: Settings) -> std::io::Result<Self> {
        let (stop, counts) = (Arc::<Stop>::default(), Arc::<Counts>::default());
        let traces = settings.traces.is_some();
        let mut exporter = Exporter {
            store: store.clone(),
            sender: Sender::new(),
            spans: Spans::beginning_now(settings.ratio),
            logs: Logs::default(),
            settings,
            counts: counts.clone(),
            seen: 0,
            measured: None,
        };
        let stopping = stop.clone();
        let thread = std::thread::Builder::new()
            .name("rcomm/otel".into())
            .spawn(move || {
                let stopped_after_round = |stop: &Stop| {
                    let stopped = stop.stopped.lock().unwrap_or_else(PoisonError::into_inner);
                    let wait = stop
                        .wake
                        .wait_timeout_while(stopped, ROUND_INTERVAL, |stopped| !*stopped);
                    *wait.unwrap_or_else(PoisonError::into_inner).0
                };
                while !stopped_after_round(&stopping) {
                    exporter.round();
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
            counts,
            traces,
        })
    }

    /// Whether traces are exported.
    pub fn exports_traces(&self) -> bool {
        self.traces
    }

    pub(crate) fn counts(&self) -> Arc<Counts> {
        self.counts.clone()
    }
}

impl Drop for Telemetry {
    /// Blocks until the round in progress has ended: at most the time-out of each of its requests in turn.
    fn drop(&mut self) {
        *self
            .stop
            .stopped
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panicked thread has already reported its panic.
            let _ = thread.join();
        }
    }
}

/// The state of the exporter's thread.
struct Exporter {
    store: SnapshotStore,
    sender: Sender,
    spans: Spans,
    logs: Logs,
    settings: Settings,
    counts: Arc<Counts>,
    /// Number of the last exported snapshot; 0 before the first.
    seen: u64,
    /// When metrics were exported last; `None` before the first time.
    measured: Option<Instant>,
}

impl Exporter {
    /// Exports spans and log records of the newest snapshot if it is new, and the metrics if they are due.
    fn round(&mut self) {
        let Some(snapshot) = self.store.newest() else {
            return;
        };
        if snapshot.number != self.seen {
            self.seen = snapshot.number;
            self.trace(&snapshot);
            self.log(&snapshot);
        }
        let due = self
            .measured
            .is_none_or(|then| then.elapsed() >= self.settings.interval);
        if due {
            self.measured = Some(Instant::now());
            self.measure(&snapshot);
        }
    }

    fn trace(&mut self, snapshot: &Snapshot) {
        let Some(destination) = &self.settings.traces else {
            return;
        };
        let batch = self.spans.take(snapshot, &self.settings);
        self.counts.spans_dropped.fetch_add(batch.dropped, Relaxed);
        for (request, spans) in batch.requests {
            let sent = self.sender.send(destination, &request);
            count_result(
                "traces",
                sent,
                spans,
                &self.counts.spans_sent,
                &self.counts.spans_dropped,
            );
        }
    }

    fn log(&mut self, snapshot: &Snapshot) {
        let Some(destination) = &self.settings.logs else {
            return;
        };
        if let Some((request, records)) = self.logs.take(snapshot, &self.settings) {
            let sent = self.sender.send(destination, &request);
            count_result(
                "logs",
                sent,
                records,
                &self.counts.logs_sent,
                &self.counts.logs_dropped,
            );
        }
    }

    fn measure(&self, snapshot: &Snapshot) {
        let Some(destination) = &self.settings.metrics else {
            return;
        };
        let (request, metrics) = self
            .store
            .with_counters(|counters| metrics::request(snapshot, counters, &self.settings));
        let sent = self.sender.send(destination, &request);
        count_result(
            "metrics",
            sent,
            metrics,
            &self.counts.metrics_sent,
            &self.counts.metrics_dropped,
        );
    }
}

/// Counts the items of a request as sent or as dropped, and logs why they were dropped.
fn count_result(
    signal: &str,
    result: Result<(), send::SendError>,
    items: u64,
    sent: &AtomicU64,
    dropped: &AtomicU64,
) {
    match result {
        Ok(()) => sent.fetch_add(items, Relaxed),
        Err(error) => {
            tracing::warn!(signal, items, %error, "dropped: the OTLP collector did not accept the export");
            dropped.fetch_add(items, Relaxed)
        }
    };
}
