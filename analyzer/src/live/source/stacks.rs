//! Takes the call stacks of running processes from outside.

use super::{SourceError, WorkerServerSource};
use crate::input::stacks;
use rcomm_recorder::model::Rank;
use rcomm_verdict::StackNode;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A way to take the call stacks of running ranks.
pub trait StackRequests: Send + Sync {
    /// Takes the stacks of all ranks at once.
    ///
    /// # Blocking
    ///
    /// At most until the deadline.
    ///
    /// # Errors
    ///
    /// If no rank is known, or the rings or the store that show the ranks cannot be read.
    fn take(&self, deadline: Instant) -> Result<TakenStacks, SourceError>;
}

/// The call stacks of ranks at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakenStacks {
    /// The kind of frames, for a heading, like `Python frames`.
    pub what: &'static str,
    /// The stacks of all threads, merged from the outermost frame inwards.
    pub stacks: Vec<StackNode>,
    /// Ranks whose stacks were taken, ascending.
    pub taken: Vec<Rank>,
    /// Ranks whose stacks were not taken, with the reason, ascending.
    pub refused: Vec<(Rank, String)>,
}

impl TakenStacks {
    /// Merges the Python stacks that ranks returned as text.
    pub(super) fn merge(answers: Vec<(Rank, Result<String, String>)>) -> Self {
        let mut merged = Self {
            what: "Python frames",
            ..Self::default()
        };
        let mut of_ranks = Vec::new();
        for (rank, answer) in answers {
            match answer {
                Ok(text) => {
                    merged.taken.push(rank);
                    of_ranks.extend(stacks::parse(&text).into_iter().map(|stack| (stack, rank)));
                }
                Err(reason) => merged.refused.push((rank, reason)),
            }
        }
        let stacks = of_ranks
            .iter()
            .map(|(frames, rank)| (frames.iter().rev(), vec![*rank]));
        merged.stacks = StackNode::merge(stacks);
        merged
    }
}

/// Takes the Python frames of every thread from PyTorch's worker servers. Nothing in the processes changes.
pub struct WorkerServerStacks(Mutex<WorkerServerSource>);

impl WorkerServerStacks {
    /// Takes the stacks of the ranks of this source, on separate connections.
    pub fn new(source: WorkerServerSource) -> Self {
        Self(Mutex::new(source))
    }
}

impl StackRequests for WorkerServerStacks {
    fn take(&self, deadline: Instant) -> Result<TakenStacks, SourceError> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(TakenStacks::merge(source.tracebacks(deadline)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "Current thread 0x01 (most recent call first):\n  <no Python frame>\n\n\
        Thread 0x02 (most recent call first):\n  File \"a.py\", line 13 in load\n  \
        File \"/x/a b.py\", line 40 in <module>\n";

    #[test]
    fn equal_stacks_are_merged() {
        let other = TEXT.replace("line 13 in load", "line 20 in step");
        let answers = vec![
            (0, Ok(TEXT.to_owned())),
            (1, Ok(other)),
            (2, Ok(TEXT.to_owned())),
            (3, Err("HTTP status 500".to_owned())),
        ];
        let merged = TakenStacks::merge(answers);
        let [root] = merged.stacks.as_slice() else {
            panic!("one outermost frame: {merged:?}");
        };
        assert_eq!(root.ranks, [0, 1, 2]);
        let inner: Vec<_> = root
            .children
            .iter()
            .map(|node| (&*node.name, &*node.ranks))
            .collect();
        assert_eq!(inner, [("load", &[0, 2][..]), ("step", &[1])]);
        assert_eq!(merged.taken, [0, 1, 2]);
        assert_eq!(merged.refused, [(3, "HTTP status 500".to_owned())]);
    }
}
