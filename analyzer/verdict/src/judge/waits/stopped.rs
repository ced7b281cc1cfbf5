//! Removes waits of ranks whose processes are stopped.
//!
//! A process that is stopped records nothing. The operation that its record shows as unfinished may have ended on its
//! device, as it did on those of the peers.

use crate::align::Aligned;
use crate::align::UnknownReason::{HistoryLost, Outdated};
use crate::judge::waits::wait_graph::{Missing, Node, Place, WaitGraph};

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
    /// Removes waits of stopped ranks for which others wait elsewhere: the record of such a rank ends with the
    /// operation, and does not show that the rank is still inside. A wait is removed if it is in a collective that all
    /// members have joined and that all members that are not stopped have left, or in messages whose other half the
    /// peers' records may have dropped or were taken too early to show. `stopped`: for each rank, whether its process
    /// is stopped.
    pub(super) fn drop_waits_of_stopped(&mut self, stopped: &[bool]) {
        let is_missed = |node: Node| {
            let mut missing = self.missing.iter().flatten();
            missing.any(|&(other, _)| other == node)
        };
        let of_stopped = (0..self.ranks).filter(|&node| stopped[node] && is_missed(node));
        let waits: Vec<(Node, usize)> = of_stopped
            .flat_map(|node| self.waits_in[node].iter().map(move |&place| (node, place)))
            .collect();
        let is_collective = |place: usize| matches!(self.places[place], Place::Collective { .. });
        let is_left = |place: usize| {
            let mut arrived = self.arrived[place].iter();
            is_collective(place)
                && self.missing[place].is_empty()
                && arrived.all(|&node| stopped[node])
        };
        let is_unknown = |place: usize| {
            let missing = &self.missing[place];
            let mut reasons = missing.iter().map(|&(_, why)| why);
            !is_collective(place)
                && !missing.is_empty()
                && reasons.all(|why| matches!(why, Missing::Unknown(HistoryLost | Outdated)))
        };
        let waits = waits.into_iter();
        let waits = waits.filter(|&(_, place)| is_left(place) || is_unknown(place));
        let (left, unknown): (Vec<_>, Vec<_>) = waits.partition(|&(_, place)| is_left(place));
        for &(node, place) in left.iter().chain(&unknown) {
            self.waits_in[node].retain(|&other| other != place);
        }
        self.completed_by_others = left;
    }

    /// The place of a collective that all members that are not stopped have completed, and that the record of this
    /// stopped rank shows as unfinished; `None` if there is none, or if no rank waits for this one.
    pub(crate) fn completed_by_others(&self, node: Node) -> Option<usize> {
        let mut left = self.completed_by_others.iter();
        left.find(|&&(other, _)| other == node)
            .map(|&(_, place)| place)
    }
}
