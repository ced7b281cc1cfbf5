//! Recognizes the signs that a job was started again. The lines after a sign belong to another attempt.

use super::Line;
use super::scan::leading_number;
use rcomm_recorder::model::Rank;
use rcomm_verdict::logs::{Event, Fact, Progress};
use std::collections::{BTreeMap, BTreeSet};

/// The largest number of entries of each collection of [`Signs`].
const MAX_STORED: usize = 1 << 16;

/// What the lines of one attempt have shown so far.
#[derive(Debug, Default)]
pub(super) struct Signs {
    /// Ranks that have created their default group.
    started: BTreeSet<Rank>,
    /// For each rank and group: the newest operation that had completed, and the index after the fact that states it.
    completed: BTreeMap<(Rank, String), (u64, usize)>,
    /// For each of torchrun's agents that reported a failed worker: the index after that report.
    failed: BTreeMap<u32, usize>,
    /// The index after the newest report that a process ended.
    last_failed: usize,
}

impl Signs {
    /// Stores what this line shows, and returns whether a new attempt begins with it.
    pub(super) fn note_line(&mut self, line: &Line<'_>) -> bool {
        let text = line.text;
        if text.contains("; will restart worker group")
            // torchrun prints this line once, before it starts its workers.
            || text.contains("Setting OMP_NUM_THREADS environment variable for each process")
        {
            return true;
        }
        let is_start =
            text.contains("ProcessGroupNCCL initialization options") && text.contains("[PG ID 0 ");
        match line.label.rank.filter(|_| is_start) {
            Some(rank) => self.started.len() < MAX_STORED && !self.started.insert(rank),
            None => false,
        }
    }

    /// Stores what `fact` shows, and returns the index of the fact with which a new attempt began; `None` if `fact`
    /// does not show that one began. `line` states `fact`, which will have the index `index`.
    pub(super) fn note_fact(
        &mut self,
        line: &Line<'_>,
        index: usize,
        fact: &Fact,
    ) -> Option<usize> {
        match (&fact.event, fact.rank) {
            (Event::Progress(progress), Some(rank)) => self.note_progress(rank, progress, index),
            (Event::Ended(_), _) => {
                self.last_failed = index + 1;
                let agent = agent(line.text)?;
                if self.failed.len() >= MAX_STORED {
                    return None;
                }
                // An agent reports one failed worker, stops the others, and starts all of them again.
                self.failed.insert(agent, index + 1)
            }
            _ => None,
        }
    }

    /// Does what [`note_fact`](Self::note_fact) does, for a rank's counters. The counters of one process never
    /// decrease, so a decrease shows that another process counts.
    fn note_progress(&mut self, rank: Rank, progress: &Progress, index: usize) -> Option<usize> {
        let key = (rank, progress.group.clone());
        let before = self.completed.get(&key).copied();
        if self.completed.len() < MAX_STORED
            && let Some(completed) = progress.completed
        {
            self.completed.insert(key, (completed, index + 1));
        }
        let (completed, after) = before?;
        let went_back = progress.enqueued.is_none_or(|newest| newest < completed)
            || progress.failed.is_some_and(|failed| failed <= completed);
        // The earlier processes ended where a launcher reported that a process ended. If no launcher did so since this
        // rank's last line, they ended after that line.
        went_back.then(|| after.max(self.last_failed))
    }
}

/// Returns the process id of torchrun's agent in a line like `E0213 12:07:20.086000 870572 torch/distributed/elastic/…]
/// failed (…`.
fn agent(text: &str) -> Option<u32> {
    let (before, _) = text.split_once(" torch/distributed/elastic/")?;
    leading_number(before.rsplit_once(' ')?.1).map(|(agent, _)| agent)
}
