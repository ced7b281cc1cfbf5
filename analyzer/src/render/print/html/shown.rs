//! Chooses the groups that get a matrix, and the ranks that get a row in the timeline.

use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{GroupRef, Report, Severity};
use std::collections::BTreeSet;

/// At most this many groups get a matrix.
const MAX_GROUPS: usize = 6;
/// At most this many ranks get a row in the timeline.
const MAX_RANKS: usize = 24;

/// The records, with the groups and the ranks that the page shows.
pub(super) struct ShownRecords<'a> {
    /// The dumps that state their rank.
    pub(super) dumps: Vec<(Rank, &'a Dump)>,
    /// Groups with a matrix: those that errors and warnings or their evidence name, then those with operations in
    /// flight, then the others in the report's order.
    pub(super) groups: Vec<&'a GroupRef>,
    /// The number of groups with collectives that [`MAX_GROUPS`] leaves out.
    pub(super) groups_cut: usize,
    /// The ranks with a row in the timeline, ascending. Culprits are chosen first, then the members of the findings'
    /// groups, then victims, then other ranks.
    pub(super) ranks: Vec<Rank>,
    /// The number of ranks with a record that are not shown.
    pub(super) ranks_cut: usize,
    /// The culprits of the errors and warnings that no other finding caused; of a finding without culprits, the ranks
    /// of its cycle.
    pub(super) culprits: BTreeSet<Rank>,
}

impl<'a> ShownRecords<'a> {
    pub(super) fn of(report: &'a Report, dumps: &'a [Dump]) -> Self {
        let dumps: Vec<(Rank, &Dump)> = dumps
            .iter()
            .filter_map(|dump| Some((dump.identity.rank?, dump)))
            .collect();
        let above_note = || {
            report
                .findings
                .iter()
                .filter(|finding| finding.severity != Severity::Note)
        };
        let mut groups: Vec<&GroupRef> = Vec::new();
        let named_by_findings = above_note().flat_map(|finding| {
            let evidence = finding.evidence.iter().filter_map(|e| e.group.as_ref());
            finding.group.iter().chain(evidence)
        });
        let in_flight = report.in_flight.iter().map(|instance| &instance.group);
        let reported = report.groups.iter().map(|group| &group.group);
        // A group without a collective has no matrix.
        let without_collectives: BTreeSet<&GroupRef> = report
            .groups
            .iter()
            .filter(|known| known.last_seq.is_none())
            .map(|known| &known.group)
            .collect();
        for group in named_by_findings.chain(in_flight).chain(reported) {
            if !groups.contains(&group) && !without_collectives.contains(group) {
                groups.push(group);
            }
        }
        let groups_cut = groups.len().saturating_sub(MAX_GROUPS);
        groups.truncate(MAX_GROUPS);

        let culprits: BTreeSet<Rank> = above_note()
            .filter(|finding| finding.caused_by.is_none())
            .flat_map(|finding| {
                // A finding without culprits marks all ranks of its cycle.
                let has_culprits = !finding.culprit_ranks.is_empty();
                let ranks = if has_culprits {
                    &finding.culprit_ranks
                } else {
                    &finding.cycle
                };
                ranks.iter()
            })
            .copied()
            .collect();
        let read: BTreeSet<Rank> = dumps.iter().map(|&(rank, _)| rank).collect();
        let mut chosen: BTreeSet<Rank> = BTreeSet::new();
        let peers = above_note()
            .filter_map(|finding| finding.group.as_ref())
            .flat_map(|group| group.ranks.iter());
        let victims = above_note().flat_map(|finding| finding.victim_ranks.iter());
        let order = culprits.iter().chain(peers).chain(victims).chain(&read);
        for &rank in order.filter(|rank| read.contains(rank)) {
            if chosen.len() == MAX_RANKS {
                break;
            }
            chosen.insert(rank);
        }
        Self {
            groups,
            groups_cut,
            ranks_cut: read.len() - chosen.len(),
            ranks: chosen.into_iter().collect(),
            culprits,
            dumps,
        }
    }
}
