//! Removes the waits of processes that ended shortly after they had issued an operation.

use crate::align::pending::{Pending, PendingKind};
use crate::align::{Aligned, RecordIx};
use crate::judge::life::{Gone, Life};
use crate::judge::policy::Policy;
use crate::judge::waits::wait_graph::{Node, Place, WaitGraph};
use std::time::Duration;

impl WaitGraph {
    /// The waits of processes that ended first, at places that they had reached only shortly before: each is the node
    /// of the rank, and the place.
    ///
    /// A rank that had not arrived there was not late: the end of the process is the cause of the waits. A process that
    /// had waited for a long time before it ended keeps its wait.
    pub(crate) fn young_waits_of_dead(
        &self,
        aligned: &Aligned<'_>,
        policy: &Policy,
        life: &Life,
    ) -> Vec<(Node, usize)> {
        let mut young = Vec::new();
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
                    let here = pending
                        .find(|&(index, operation)| self.is_at(place, record, index, operation));
                    here.is_none_or(|(_, operation)| {
                        is_young(aligned, policy, gone, record, operation.position)
                    })
                })
            };
            young.extend(
                places
                    .iter()
                    .filter(|&&place| is_young(place))
                    .map(|&place| (node, place)),
            );
        }
        young
    }

    /// Removes these waits from the graph, each a node and a place. A wait stays if all ranks have arrived at the
    /// place, or if a stopped rank has not: the process of that rank exists and cannot arrive. `stopped`: for each
    /// rank, whether it is stopped.
    pub(crate) fn drop_waits(&mut self, waits: &[(Node, usize)], stopped: &[bool]) {
        for &(node, place) in waits {
            let missing = &self.missing[place];
            if !missing.is_empty() && !missing.iter().any(|&(node, _)| stopped[node]) {
                self.waits_in[node].retain(|&other| other != place);
            }
        }
    }

    /// Whether `operation`, at this index among the unfinished operations of a record, is the operation of the place.
    fn is_at(&self, place: usize, record: RecordIx, index: usize, operation: &Pending) -> bool {
        match (&self.places[place], &operation.kind) {
            (Place::Collective { group, seq }, PendingKind::Collective { seq: pending }) => {
                operation.group == *group && pending == seq
            }
            (
                Place::Batch {
                    record: whose,
                    pending,
                    ..
                },
                PendingKind::Batch { .. },
            ) => (*whose, *pending) == (record, index),
            _ => false,
        }
    }
}

/// Whether a process that is gone had issued this operation of its record only shortly before it ended.
pub(crate) fn is_young(
    aligned: &Aligned<'_>,
    policy: &Policy,
    gone: &Gone,
    record: RecordIx,
    position: u32,
) -> bool {
    let op = aligned.op(record, position);
    let timeout_ms = aligned.shared.calls.get(op.call).timeout_ms;
    let age = gone.at_ns().saturating_sub(aligned.created_ns(record, op));
    let age = Duration::from_nanos(u64::try_from(age).unwrap_or(0));
    age < policy.overdue_after(timeout_ms)
}
