//! What an analysis takes for granted.

use rcomm_recorder::model::Rank;
use std::time::Duration;

/// Parameters of an analysis. Now is one of them: the analysis itself reads no clock.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The time of judgement, wall clock, ns since the epoch.
    ///
    /// `None` = each dump's own time, and where a dump carries none (PyTorch's), it is taken as made
    /// because something hung.
    pub now_ns: Option<i64>,
    /// The dumps are a look at a running job: what is merely pending and younger than `overdue` is no
    /// finding, and the verdict is `running`.
    pub snapshot: bool,
    /// From which age on a pending operation counts as stuck in a snapshot.
    pub overdue: Duration,
    /// Ranks that should be there, where something else than the dumps tells (a scheduler, a flag).
    pub world_size: Option<u32>,
    /// Ranks whose record is not given since they no longer answer: a live view says so itself.
    pub silent: Vec<Rank>,
    /// Of each record the newest so many operations were given, whatever the ring holds; `None` = all.
    pub newest: Option<usize>,
    /// How many of a finding's victims are listed before the list is cut.
    pub max_victims: usize,
    /// From which share of the job's time on a straggler is worth a warning, 0..1.
    pub straggler_share: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            now_ns: None,
            snapshot: false,
            overdue: Duration::from_secs(5),
            world_size: None,
            silent: Vec::new(),
            newest: None,
            max_victims: 64,
            straggler_share: 0.02,
        }
    }
}
