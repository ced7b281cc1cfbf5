//! The newest picture of the job, what came before it, and a bell that rings when it changes.

use crate::counters::Counters;
use crate::history::{History, inflate};
use crate::metrics::{self, Exemplars, Form};
use crate::snapshot::{ApiSnapshot, Delta, Point};
use rcomm_analyzer::source::Source;
use rcomm_analyzer::{Anchor, Live, LiveOptions, Pace, Snapshot, Watch, analyze};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// One picture in the forms that it is asked for. Shared, never changed.
pub(crate) struct Frame {
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) body: ApiSnapshot,
    /// The picture as JSON.
    pub(crate) text: Arc<str>,
    /// The picture that the delta builds on, and the delta as JSON.
    pub(crate) delta: Option<(u64, Arc<str>)>,
}

impl Frame {
    /// A picture that follows none.
    pub(crate) fn of(snapshot: Arc<Snapshot>) -> Self {
        let body = ApiSnapshot::of(&snapshot);
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

/// The newest [`Snapshot`]; any number of readers, none of which holds up the others or the analysis.
///
/// Clones share the same picture.
#[derive(Clone)]
pub struct SnapshotStore {
    newest: watch::Receiver<Option<Arc<Frame>>>,
    counters: Arc<Mutex<Counters>>,
    history: Arc<Mutex<History>>,
}

/// What the thread that judges does with each snapshot.
struct Publisher {
    sender: watch::Sender<Option<Arc<Frame>>>,
    counters: Arc<Mutex<Counters>>,
    history: Arc<Mutex<History>>,
    /// Number and JSON form of the picture before.
    last: Option<(u64, serde_json::Value)>,
}

impl Publisher {
    fn take(&mut self, snapshot: Snapshot) {
        lock(&self.counters).take(&snapshot);
        let mut frame = Frame::of(Arc::new(snapshot));
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
        let live = Live::new(options, analyze, names);
        let (sender, newest) = watch::channel(None);
        let store = Self {
            newest,
            counters: Arc::default(),
            history: Arc::default(),
        };
        let mut publisher = Publisher {
            sender,
            counters: store.counters.clone(),
            history: store.history.clone(),
            last: None,
        };
        let sink = move |snapshot| publisher.take(snapshot);
        let watch = Watch::start(sources, live, pace, Anchor::now(), sink)?;
        Ok((store, watch))
    }

    /// The newest picture; `None` before the first look at the sources is over.
    pub fn newest(&self) -> Option<Arc<Snapshot>> {
        self.frame().map(|frame| frame.snapshot.clone())
    }

    pub(crate) fn frame(&self) -> Option<Arc<Frame>> {
        self.newest.borrow().clone()
    }

    /// Every picture from now on, beginning with the present one. A slow reader skips pictures.
    pub(crate) fn changes(&self) -> watch::Receiver<Option<Arc<Frame>>> {
        let mut changes = self.newest.clone();
        changes.mark_changed();
        changes
    }

    /// The picture, and what was counted since the watching began, as Prometheus reads it.
    pub fn metrics(&self, form: Form, exemplars: Exemplars) -> String {
        let newest = self.newest();
        metrics::write(newest.as_deref(), &lock(&self.counters), form, exemplars)
    }

    /// Looks at what was counted, and holds up the judge meanwhile.
    pub(crate) fn with_counters<T>(&self, look: impl FnOnce(&Counters) -> T) -> T {
        look(&lock(&self.counters))
    }

    /// A point for each picture that is kept, the oldest first.
    pub(crate) fn points(&self) -> Vec<Point> {
        lock(&self.history).points()
    }

    /// The JSON form of a picture that is kept.
    pub(crate) fn past(&self, number: u64) -> Option<String> {
        let deflated = lock(&self.history).deflated(number)?;
        inflate(&deflated).ok()
    }
}
