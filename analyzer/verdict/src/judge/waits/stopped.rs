//! The waits of ranks whose processes are stopped, and for them.
//!
//! A process that is stopped records nothing. The device may have ended the operation that its record shows as
//! unfinished, as that of its peers did.

use crate::align::Aligned;
use crate::judge::waits::wait_graph::{Node, Place, WaitGraph};

/// For each node: whether the process of the rank is stopped by a signal or a debugger.
pub(super) fn stopped_nodes(aligned: &Aligned<'_>) -> Vec<bool> {
    let ranks = aligned.expected.iter();
    let is_stopped = |rank: u32| {
        let mut records = aligned.records_of(rank);
        records.any(|record| aligned.records[record].stop().is_some())
    };
    ranks.map(|&rank| is_stopped(rank)).collect()
}

impl WaitGraph {
    /// Removes the waits of stopped ranks in collectives that all other members have completed, if others wait for these
    /// ranks elsewhere: the record ends there, and does not show that the rank is still inside.
    pub(super) fn drop_waits_of_stopped(&mut self, stopped: &[bool]) {
        let is_missed = |node: Node| {
            let mut missing = self.missing.iter().flatten();
            missing.any(|&(other, _)| other == node)
        };
        let of_stopped = (0..self.ranks).filter(|&node| stopped[node] && is_missed(node));
        let left: Vec<(Node, usize)> = of_stopped
            .flat_map(|node| self.waits_in[node].iter().map(move |&place| (node, place)))
            .filter(|&(_, place)| {
                let is_collective = matches!(self.places[place], Place::Collective { .. });
                let mut arrived = self.arrived[place].iter();
                is_collective
                    && self.missing[place].is_empty()
                    && arrived.all(|&node| stopped[node])
            })
            .collect();
        for &(node, place) in &left {
            self.waits_in[node].retain(|&other| other != place);
        }
        self.completed_by_others = left;
    }

    /// The place of a collective that all other members have completed, and that this stopped rank's record shows as
    /// unfinished.
    pub(crate) fn completed_by_others(&self, node: Node) -> Option<usize> {
        let mut left = self.completed_by_others.iter();
        left.find(|&&(other, _)| other == node)
            .map(|&(_, place)| place)
    }
}
