//! The waits of processes that ended in the middle of an operation.

use crate::align::pending::{Pending, PendingKind};
use crate::align::{Aligned, RecordIx};
use crate::judge::life::Life;
use crate::judge::policy::Policy;
use crate::judge::wait_graph::{Node, Place, WaitGraph};
use std::time::Duration;

impl WaitGraph {
    /// The places where a process was when it ended as the first, and had not been for long, with its node.
    ///
    /// Who has not come there yet was not late: the end of the process is the cause of what others wait
    /// for. A process that had waited for long before it was ended keeps its wait.
    pub(super) fn left_young(
        &self,
        aligned: &Aligned<'_>,
        policy: &Policy,
        life: &Life,
    ) -> Vec<(Node, usize)> {
        let mut left = Vec::new();
        for (node, places) in self.waits_in.iter().enumerate() {
            let rank = aligned.expected[node];
            let gone = life.gone(rank).filter(|_| life.went_first(rank));
            let Some(gone) = gone else {
                continue;
            };
            let is_young = |place: usize| {
                let mut records = aligned.records_of(rank);
                records.all(|record| {
                    let mut pending = self.pending[record].iter().enumerate();
                    let here = pending.find(|&(at, one)| self.is_at(place, record, at, one));
                    here.is_none_or(|(_, one)| {
                        let op = aligned.op(record, one.position);
                        let timeout_ms = aligned.shared.calls.get(op.call).timeout_ms;
                        let age = gone.at_ns().saturating_sub(aligned.created_ns(record, op));
                        let age = Duration::from_nanos(u64::try_from(age).unwrap_or(0));
                        age < policy.overdue_after(timeout_ms)
                    })
                })
            };
            left.extend(
                places
                    .iter()
                    .filter(|&&place| is_young(place))
                    .map(|&place| (node, place)),
            );
        }
        left
    }

    /// Takes these waits out of the graph, where ranks are still to come.
    pub(super) fn drop_waits(&mut self, left: &[(Node, usize)]) {
        for &(node, place) in left {
            if !self.missing[place].is_empty() {
                self.waits_in[node].retain(|&it| it != place);
            }
        }
    }

    /// Whether an unfinished operation of a record, at this position among its unfinished ones, is the place.
    fn is_at(&self, place: usize, record: RecordIx, at: usize, one: &Pending) -> bool {
        match (&self.places[place], &one.what) {
            (Place::Collective { group, seq }, PendingKind::Collective { seq: own }) => {
                one.group == *group && own == seq
            }
            (
                Place::Batch {
                    record: whose,
                    pending,
                    ..
                },
                PendingKind::Batch { .. },
            ) => (*whose, *pending) == (record, at),
            _ => false,
        }
    }
}
