//! Enters the waits of ranks in accesses to windows. They are edges from rank to rank, since no place of the graph is
//! common to both.

use crate::align::Aligned;
use crate::align::one_sided::one_sided_of;
use crate::judge::life::Life;
use crate::judge::life::interrupted::is_young;
use crate::judge::overcome::is_history;
use crate::judge::policy::Policy;
use crate::judge::waits::wait_graph::{Node, WaitGraph};
use rcomm_recorder::model::EntryState;

impl WaitGraph {
    /// Enters the waits in accesses to windows. As with messages, three kinds of accesses are no waits: those that a
    /// process left open when it ended in order, those that it issued shortly before its end, if it ended first, and
    /// those that failed before the rank continued.
    pub(super) fn enter_one_sided(&mut self, aligned: &Aligned<'_>, policy: &Policy, life: &Life) {
        // Without a place, no wait is judged.
        if self.places.is_empty() {
            return;
        }
        for (record, full_record) in aligned.records.iter().enumerate() {
            let Some(node) = self.node(full_record.rank) else {
                continue;
            };
            let first = life.gone(full_record.rank);
            let first = first.filter(|_| life.went_first(full_record.rank));
            for access in one_sided_of(aligned, record, &self.pending[record]) {
                let op = aligned.op(record, access.position);
                let left_open =
                    op.state != EntryState::Failed && life.ended_in_order(full_record.rank);
                let young = first
                    .is_some_and(|gone| is_young(aligned, policy, gone, record, access.position));
                if left_open || young || is_history(aligned, record, op) {
                    continue;
                }
                if let Some(peer) = self.node(access.peer)
                    && !self.one_sided[node].contains(&peer)
                {
                    self.one_sided[node].push(peer);
                }
            }
        }
    }

    /// Whether a rank waits: in a place of the graph, or in an access to a window.
    pub(crate) fn waits(&self, node: Node) -> bool {
        !self.waits_in[node].is_empty() || !self.one_sided[node].is_empty()
    }
}
