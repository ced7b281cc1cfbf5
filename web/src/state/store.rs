//! Stores the newest snapshot of the job and its history, and notifies readers of changes.

use crate::metrics::counters::Counters;
use crate::metrics::{self, Exemplars, Form};
use crate::state::history::{History, inflate};
use crate::state::snapshot::{ApiSnapshot, Delta, Point, Records};
use rcomm_analyzer::source::Source;
use rcomm_analyzer::{Anchor, Live, LiveOptions, Pace, Snapshot, Watch, analyze_on_threads};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// One snapshot in all served forms. Immutable.
pub(crate) struct Frame {
    pub(crate) snapshot: Arc<Snapshot>,
    /// The snapshot as the API describes it.
    pub(crate) body: ApiSnapshot,
    /// The snapshot as JSON.
    pub(crate) text: Arc<str>,
    /// Number of the snapshot that the delta applies to, and the delta as JSON; `None` for the first snapshot.
    pub(crate) delta: Option<(u64, Arc<str>)>,
}

impl Frame {
    /// The frame of a snapshot, without a delta.
    pub(crate) fn of(snapshot: Arc<Snapshot>, records: Records) -> Self {
        let body = ApiSnapshot::of(&snapshot, records);
        let text = json(&body);
        Self {
            snapshot,
            body,
            text,
            delta: None,
        }
    }
}

fn json(value: &impl serde::Serialize) -> Arc<str> {
    // Plain data with text for keys always has a JSON form.
    serde_json::to_string(value).unwrap_or_default().into()
}

/// The newest [`Snapshot`], the counters and the history. Readers of the newest snapshot do not wait for the
/// analysis; readers of the counters or the history and the analysis wait for each other.
///
/// Clones share the same state.
#[derive(Clone)]
pub struct SnapshotStore {
    newest: watch::Receiver<Option<Arc<Frame>>>,
    counters: Arc<Mutex<Counters>>,
    history: Arc<Mutex<History>>,
    /// The clock of the snapshots' moments.
    anchor: Anchor,
}

/// Publishes each snapshot from the analysis thread.
struct Publisher {
    sender: watch::Sender<Option<Arc<Frame>>>,
    counters: Arc<Mutex<Counters>>,
    history: Arc<Mutex<History>>,
    records: Records,
    /// Number and JSON form of the previous snapshot.
    last: Option<(u64, serde_json::Value)>,
}

impl Publisher {
    fn take(&mut self, snapshot: Snapshot) {
        lock(&self.counters).take(&snapshot);
        let mut frame = Frame::of(Arc::new(snapshot), self.records);
        let number = frame.snapshot.number;
        // Plain data with text for keys always has a JSON form.
        let value = serde_json::to_value(&frame.body).unwrap_or_default();
        if let Some((base, last)) = &self.last {
            frame.delta = Some((*base, json(&Delta::between(*base, last, &value))));
        }
        self.last = Some((number, value));
        lock(&self.history).add(Point::of(&frame.snapshot), &frame.text);
        self.sender.send_replace(Some(Arc::new(frame)));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SnapshotStore {
    /// Watches `sources` until the returned [`Watch`] is dropped.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn watch(
        sources: Vec<Box<dyn Source>>,
        options: LiveOptions,
        pace: Pace,
    ) -> std::io::Result<(Self, Watch)> {
        let names = sources.iter().map(|source| source.name()).collect();
        let records = match sources.iter().all(|source| source.is_static()) {
            true => Records::Written,
            false => Records::Followed,
        };
        let live = Live::new(options, analyze_on_threads, names);
        let (sender, newest) = watch::channel(None);
        let store = Self {
            newest,
            counters: Arc::default(),
            history: Arc::default(),
            anchor: Anchor::now(),
        };
        let mut publisher = Publisher {
            sender,
            counters: store.counters.clone(),
            history: store.history.clone(),
            records,
            last: None,
        };
        let sink = move |snapshot| publisher.take(snapshot);
        let watch = Watch::start(sources, live, pace, store.anchor, sink)?;
        Ok((store, watch))
    }

    /// The newest snapshot; `None` before the first read of the sources.
    pub fn newest(&self) -> Option<Arc<Snapshot>> {
        self.frame().map(|frame| frame.snapshot.clone())
    }

    pub(crate) fn frame(&self) -> Option<Arc<Frame>> {
        self.newest.borrow().clone()
    }

    /// The time since the newest snapshot was judged, ms; 0 if there is none.
    pub(crate) fn newest_age_ms(&self) -> f64 {
        let judged_at = self
            .newest
            .borrow()
            .as_ref()
            .map(|frame| frame.snapshot.at.elapsed);
        let now = self.anchor.moment().elapsed;
        judged_at.map_or(0.0, |at| now.saturating_sub(at).as_secs_f64() * 1e3)
    }

    /// Every snapshot from now on, starting with the current one. A slow reader skips some.
    pub(crate) fn changes(&self) -> watch::Receiver<Option<Arc<Frame>>> {
        let mut changes = self.newest.clone();
        changes.mark_changed();
        changes
    }

    /// The metrics of the newest snapshot and the counters since start-up, as Prometheus text. The analysis waits
    /// while they are written.
    pub fn metrics(&self, form: Form, exemplars: Exemplars) -> String {
        let newest = self.newest();
        metrics::write(newest.as_deref(), &lock(&self.counters), form, exemplars)
    }

    /// Reads the counters; the analysis waits until `look` returns.
    pub(crate) fn with_counters<T>(&self, look: impl FnOnce(&Counters) -> T) -> T {
        look(&lock(&self.counters))
    }

    /// One point for each kept snapshot, oldest first.
    pub(crate) fn points(&self) -> Vec<Point> {
        lock(&self.history).points()
    }

    /// The JSON form of a kept snapshot; `None` if it is not kept.
    pub(crate) fn past(&self, number: u64) -> Option<String> {
        let deflated = lock(&self.history).deflated(number)?;
        inflate(&deflated).ok()
    }
}
