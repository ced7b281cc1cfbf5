//! The newest picture of the job, and a bell that rings when it changes.

use crate::metrics::{self, Exemplars, Form};
use crate::tally::Tally;
use rcomm_analyzer::source::Source;
use rcomm_analyzer::{Anchor, Live, LiveOptions, Pace, Snapshot, Watch, analyze};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// The newest [`Snapshot`]; any number of readers, none of which holds up the others or the analysis.
///
/// Clones share the same picture.
#[derive(Clone)]
pub struct Board {
    newest: watch::Receiver<Option<Arc<Snapshot>>>,
    tally: Arc<Mutex<Tally>>,
}

impl Board {
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
        let tally = Arc::<Mutex<Tally>>::default();
        let counting = tally.clone();
        let sink = move |snapshot: Snapshot| {
            let mut counted = counting.lock().unwrap_or_else(PoisonError::into_inner);
            counted.take(&snapshot);
            drop(counted);
            sender.send_replace(Some(Arc::new(snapshot)));
        };
        let watch = Watch::start(sources, live, pace, Anchor::now(), sink)?;
        Ok((Self { newest, tally }, watch))
    }

    /// The newest picture; `None` before the first look at the sources is over.
    pub fn newest(&self) -> Option<Arc<Snapshot>> {
        self.newest.borrow().clone()
    }

    /// The picture, and what was counted since the watching began, as Prometheus reads it.
    pub fn metrics(&self, form: Form, exemplars: Exemplars) -> String {
        let tally = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        metrics::write(self.newest().as_deref(), &tally, form, exemplars)
    }

    /// Every picture from now on, beginning with the present one. A slow reader skips pictures.
    pub fn changes(&self) -> watch::Receiver<Option<Arc<Snapshot>>> {
        let mut changes = self.newest.clone();
        changes.mark_changed();
        changes
    }
}
