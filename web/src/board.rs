//! The newest picture of the job, and a bell that rings when it changes.

use rcomm_analyzer::source::Source;
use rcomm_analyzer::{Anchor, Live, LiveOptions, Pace, Snapshot, Watch, analyze};
use std::sync::Arc;
use tokio::sync::watch;

/// The newest [`Snapshot`]; any number of readers, none of which holds up the others or the analysis.
///
/// Clones share the same picture.
#[derive(Clone)]
pub struct Board {
    newest: watch::Receiver<Option<Arc<Snapshot>>>,
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
        let sink = move |snapshot: Snapshot| {
            sender.send_replace(Some(Arc::new(snapshot)));
        };
        let watch = Watch::start(sources, live, pace, Anchor::now(), sink)?;
        Ok((Self { newest }, watch))
    }

    /// The newest picture; `None` before the first look at the sources is over.
    pub fn newest(&self) -> Option<Arc<Snapshot>> {
        self.newest.borrow().clone()
    }

    /// Every picture from now on, beginning with the present one. A slow reader skips pictures.
    pub fn changes(&self) -> watch::Receiver<Option<Arc<Snapshot>>> {
        let mut changes = self.newest.clone();
        changes.mark_changed();
        changes
    }
}
