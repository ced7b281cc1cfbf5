//! The snapshots of the last while, for pausing and stepping.

use rcomm_analyzer::Snapshot;
use std::collections::VecDeque;
use std::sync::Arc;

/// Recorded snapshots, oldest first, within a budget of memory.
#[derive(Debug)]
pub struct History {
    frames: VecDeque<(Arc<Snapshot>, usize)>,
    bytes: usize,
    budget: usize,
    /// Which frame is shown; `None` = always the newest.
    at: Option<usize>,
}

impl History {
    /// Remembers about `budget` bytes, and at least the newest frame.
    pub fn new(budget: usize) -> Self {
        Self {
            frames: VecDeque::new(),
            bytes: 0,
            budget,
            at: None,
        }
    }

    /// Adds the newest frame; the oldest give way.
    pub fn push(&mut self, snapshot: Arc<Snapshot>) {
        let cost = cost(&snapshot, self.frames.back().map(|(last, _)| last.as_ref()));
        self.bytes += cost;
        self.frames.push_back((snapshot, cost));
        // The frame that is looked at stays, and so does the newest.
        while self.bytes > self.budget && self.frames.len() > 1 && self.at != Some(0) {
            if let Some((_, cost)) = self.frames.pop_front() {
                self.bytes -= cost;
                self.at = self.at.map(|at| at - 1);
            }
        }
        // A pause that outlasts the memory keeps its own frame and lets go of what came after it.
        while self.bytes > self.budget && self.frames.len() > 2 {
            if let Some((_, cost)) = self.frames.remove(1) {
                self.bytes -= cost;
            }
        }
    }

    /// The frame shown.
    pub fn shown(&self) -> Option<&Arc<Snapshot>> {
        let at = self.at.unwrap_or(self.frames.len().checked_sub(1)?);
        self.frames.get(at).map(|(snapshot, _)| snapshot)
    }

    /// Whether a frame is held while newer ones come.
    pub fn is_paused(&self) -> bool {
        self.at.is_some()
    }

    /// Number of the frame shown, from 1, and how many there are.
    pub fn position(&self) -> (usize, usize) {
        let newest = self.frames.len();
        (self.at.map_or(newest, |at| at + 1), newest)
    }

    /// Holds the newest frame.
    pub fn pause(&mut self) {
        if self.at.is_none() {
            self.at = self.frames.len().checked_sub(1);
        }
    }

    /// Shows the newest frame again, always.
    pub fn live(&mut self) {
        self.at = None;
    }

    /// Pauses and steps by `delta` frames, stopping at the ends.
    pub fn step(&mut self, delta: isize) {
        self.pause();
        if let Some(at) = &mut self.at {
            let last = self.frames.len().saturating_sub(1);
            *at = at.saturating_add_signed(delta).min(last);
        }
    }
}

/// What a frame costs beyond the one before it: records that did not change are shared.
fn cost(snapshot: &Snapshot, before: Option<&Snapshot>) -> usize {
    const ENTRY: usize = size_of::<rcomm_recorder::model::Entry>();
    const RANK: usize = 256;
    let shared = |rank, dump: &Arc<_>| {
        before
            .and_then(|before| before.rank(rank))
            .is_some_and(|view| view.dumps.iter().any(|known| Arc::ptr_eq(known, dump)))
    };
    let records: usize = snapshot
        .ranks
        .iter()
        .flat_map(|view| view.dumps.iter().map(move |dump| (view.rank, dump)))
        .filter(|(rank, dump)| !shared(*rank, dump))
        .map(|(_, dump)| dump.entries.len() * ENTRY + 1024)
        .sum();
    let members: usize = snapshot
        .report
        .groups
        .iter()
        .map(|g| g.group.ranks.len())
        .sum();
    records + snapshot.ranks.len() * RANK + members * 4
}
