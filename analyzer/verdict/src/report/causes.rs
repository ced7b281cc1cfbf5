//! The causal chain: from the ranks at the root of a hang to all ranks that wait because of them.
//!
//! The chain is read from the wait-for graph of a [`Report`], level by level. The findings name the roots; nothing is
//! judged here.

use crate::report::{GroupRef, InstanceState, Report, SeqKind, Severity, Wait};
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// One link of the chain: ranks that wait in the same operation of groups with the same description.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// The distance from the root: 1 = waits for a root itself.
    pub level: usize,
    /// The groups of the operations, in order of their names.
    pub groups: Vec<GroupRef>,
    /// The operation.
    pub op: String,
    /// The smallest and the largest sequence number.
    pub seq: (u64, u64),
    /// The counter of `seq`.
    pub seq_kind: SeqKind,
    /// Waiting ranks, ascending.
    pub ranks: Vec<Rank>,
}

/// The ranks that wait because of `roots`, nearest first.
///
/// Each rank appears at one level only: its shortest distance from a root.
pub fn chain(report: &Report, roots: &[Rank]) -> Vec<Link> {
    let mut waiting_on: HashMap<Rank, Vec<usize>> = HashMap::new();
    for (index, wait) in report.waits.iter().enumerate() {
        for &rank in &wait.on {
            waiting_on.entry(rank).or_default().push(index);
        }
    }
    let mut seen: HashSet<Rank> = roots.iter().copied().collect();
    let mut frontier: Vec<Rank> = roots.to_vec();
    let mut links = Vec::new();
    for level in 1.. {
        let next: BTreeSet<usize> = frontier
            .iter()
            .filter_map(|rank| waiting_on.get(rank))
            .flatten()
            .copied()
            .filter(|&index| !seen.contains(&report.waits[index].rank))
            .collect();
        if next.is_empty() {
            break;
        }
        let mut by_place: BTreeMap<(&str, &str, SeqKind), Vec<&Wait>> = BTreeMap::new();
        for wait in next.iter().map(|&index| &report.waits[index]) {
            by_place
                .entry((&wait.group.desc, &wait.op, wait.seq_kind))
                .or_default()
                .push(wait);
        }
        frontier.clear();
        for ((_, op, seq_kind), waits) in by_place {
            let ranks: BTreeSet<Rank> = waits.iter().map(|wait| wait.rank).collect();
            let groups: BTreeSet<&GroupRef> = waits.iter().map(|wait| &wait.group).collect();
            let seqs = || waits.iter().map(|wait| wait.seq);
            frontier.extend(&ranks);
            links.push(Link {
                level,
                groups: groups.into_iter().cloned().collect(),
                op: op.to_owned(),
                seq: (seqs().min().unwrap_or(0), seqs().max().unwrap_or(0)),
                seq_kind,
                ranks: ranks.into_iter().collect(),
            });
        }
        seen.extend(&frontier);
    }
    links
}

/// The ranks that wait or failed because of `roots`: the [`chain`] or, if no rank of the job waits, the ranks that
/// failed in the operation of the first error that accuses a root and is about one. A rank that left that operation and
/// has failed in another one since is among them only if it had joined the former.
pub fn consequences(report: &Report, roots: &[Rank]) -> Vec<Link> {
    match report.waits.is_empty() {
        true => failures(report, roots).into_iter().collect(),
        false => chain(report, roots),
    }
}

fn failures(report: &Report, roots: &[Rank]) -> Option<Link> {
    let roots: HashSet<Rank> = roots.iter().copied().collect();
    let mut errors = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error && finding.caused_by.is_none())
        .filter(|finding| {
            finding
                .culprit_ranks
                .iter()
                .any(|rank| roots.contains(rank))
        });
    let (cause, group, seq) =
        errors.find_map(|finding| Some((finding, finding.group.as_ref()?, finding.seq?)))?;
    let mut instances = report.in_flight.iter().filter(|instance| {
        instance.state == InstanceState::Failed
            && (instance.seq, Some(instance.seq_kind)) == (seq, cause.seq_kind)
            && instance.group == *group
    });
    let first = instances.next()?;
    let joined = first
        .joined
        .iter()
        .chain(instances.flat_map(|it| &it.joined));
    let failed = joined.filter(|rank| !roots.contains(rank) && report.failure(**rank).is_some());
    let ranks: BTreeSet<Rank> = failed.copied().collect();
    (!ranks.is_empty()).then(|| Link {
        level: 1,
        groups: vec![group.clone()],
        op: first.op.clone(),
        seq: (seq, seq),
        seq_kind: first.seq_kind,
        ranks: ranks.into_iter().collect(),
    })
}

/// The waits that lead from a rank toward a root: each is the wait of a rank for which the previous rank waits. Empty
/// if the rank does not wait.
///
/// The path ends at a rank that waits for no other, or where it closes into a cycle: then the last wait is for a rank
/// that is already in the path.
pub fn path(report: &Report, from: Rank) -> Vec<Wait> {
    let by_rank: HashMap<Rank, &Wait> = report
        .waits
        .iter()
        .rev()
        .map(|wait| (wait.rank, wait))
        .collect();
    let mut path = Vec::new();
    let mut seen = HashSet::from([from]);
    let mut rank = from;
    while let Some(wait) = by_rank.get(&rank) {
        path.push((*wait).clone());
        // A rank that waits for no other is closer to the cause than one that waits.
        let next = wait
            .on
            .iter()
            .find(|on| !by_rank.contains_key(on))
            .or_else(|| wait.on.first());
        match next {
            Some(&next) if seen.insert(next) => rank = next,
            _ => break,
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Input, Verdict};

    fn report(waits: Vec<Wait>) -> Report {
        Report {
            schema: Report::SCHEMA.into(),
            verdict: Verdict::Stuck,
            findings: vec![],
            problems: vec![],
            end: None,
            input: Input::default(),
            groups: vec![],
            ranks: [].into(),
            in_flight: vec![],
            waits,
            stacks: vec![],
            now: vec![],
        }
    }

    fn wait(rank: Rank, on: &[Rank], name: &str, desc: &str) -> Wait {
        Wait {
            rank,
            on: on.to_vec(),
            group: GroupRef {
                name: name.into(),
                desc: desc.into(),
                ranks: [].into(),
            },
            op: "all_reduce".into(),
            seq: 7,
            seq_kind: SeqKind::CollectiveSeqId,
        }
    }

    #[test]
    fn the_chain_goes_outwards_from_the_root_and_names_each_rank_once() {
        let report = report(vec![
            wait(1, &[0], "tp_0", "tp"),
            wait(2, &[0], "dp_0", "dp"),
            wait(3, &[1, 2], "dp_1", "dp"),
        ]);
        let chain = chain(&report, &[0]);
        let seen: Vec<_> = chain
            .iter()
            .map(|link| {
                (
                    link.level,
                    link.groups[0].desc.as_str(),
                    link.ranks.as_slice(),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                (1, "dp", &[2][..]),
                (1, "tp", &[1][..]),
                (2, "dp", &[3][..])
            ]
        );
    }

    #[test]
    fn a_path_prefers_a_rank_that_does_not_wait_and_ends_in_a_cycle() {
        let to_root = report(vec![wait(3, &[1, 2], "g", "g"), wait(1, &[2], "g", "g")]);
        assert_eq!(path(&to_root, 3).len(), 1);
        let cycle = report(vec![wait(1, &[2], "a", "a"), wait(2, &[1], "b", "b")]);
        let path = path(&cycle, 1);
        assert_eq!(path.len(), 2);
        assert_eq!(path[1].on, [1]);
    }
}
