//! Whether others outlived the end of a process: then it was not one of many that a signal ended together.

use super::harm::{failed_early, losses};
use super::order::{apart_ns, was_asked};
use super::{Gone, NOTICED_NS, TOGETHER_NS};
use crate::align::Aligned;
use crate::judge::overcome::is_overcome;
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, BTreeSet};

/// The processes whose ends others outlived.
pub(super) struct Outlived {
    /// Of the ranks whose ends others noted by name: those that were outlived.
    named: BTreeSet<Rank>,
    /// Whether others outlived an end from which a process suffered without naming the rank.
    is_any: bool,
    /// The ranks that suffered from an end.
    suffering: BTreeSet<Rank>,
    /// For each rank whose end others noted by name: these others.
    noted_by: BTreeMap<Rank, BTreeSet<Rank>>,
    /// Those of `suffering` that named no rank.
    unnamed: BTreeSet<Rank>,
    /// Number of ranks of the job.
    ranks: usize,
}

impl Outlived {
    /// The ends that the processes of `gone` noticed, and others outlived. A signal that ends all processes ends some
    /// before others, and these may just have time to notice: then no process gives a sign of life after that, and none
    /// that noticed notes an exit of its own.
    pub(super) fn new(aligned: &Aligned<'_>, gone: &[Gone]) -> Self {
        let are_related = apart_ns(aligned) == TOGETHER_NS;
        let last_sign = |without: Option<Rank>| {
            let others = gone.iter().filter(|process| Some(process.rank) != without);
            others.max_by_key(|process| process.seen_ns)
        };
        let last = last_sign(None).filter(|_| are_related);
        let last_but_one = last.and_then(|last| last_sign(Some(last.rank)));
        let mut outlived = Self {
            named: BTreeSet::new(),
            is_any: false,
            suffering: BTreeSet::new(),
            noted_by: BTreeMap::new(),
            unnamed: BTreeSet::new(),
            ranks: aligned.expected.len(),
        };
        for process in gone {
            let ended_itself = process.exit.is_some()
                && !process.was_signalled
                && !process.in_order
                && !was_asked(aligned, process);
            let is_outlived = |noticed_ns: i64, lost: Option<Rank>| {
                let survivors = [Some(process), last, last_but_one].into_iter().flatten();
                let mut survivors = survivors.filter(|process| Some(process.rank) != lost);
                let lived_on =
                    |other: &Gone| other.seen_ns.saturating_sub(noticed_ns) >= NOTICED_NS;
                ended_itself || survivors.any(lived_on)
            };
            let (mut names, mut fails) = (false, false);
            for record in aligned.records_of(process.rank) {
                let offset_ns = aligned.offsets_ns[record];
                let mut is_named = false;
                for failure in losses(&aligned.records[record]) {
                    if is_overcome(aligned, record, failure, None) {
                        continue;
                    }
                    is_named = true;
                    let noticed_ns = failure.time_ns.saturating_sub(offset_ns);
                    let lost = failure.ranks.iter().copied();
                    for rank in lost.filter(|&rank| rank != process.rank) {
                        let noted_by = outlived.noted_by.entry(rank).or_default();
                        noted_by.insert(process.rank);
                        if is_outlived(noticed_ns, Some(rank)) {
                            outlived.named.insert(rank);
                        }
                    }
                }
                let failed_ns = failed_early(aligned, record);
                names |= is_named;
                fails |= failed_ns.is_some();
                outlived.is_any |=
                    !is_named && failed_ns.is_some_and(|noticed_ns| is_outlived(noticed_ns, None));
            }
            if fails || names {
                outlived.suffering.insert(process.rank);
            }
            if fails && !names {
                outlived.unnamed.insert(process.rank);
            }
        }
        outlived
    }

    /// Whether others outlived the end of this rank's process. So they did if all others, two at least, suffered from
    /// it: of ranks that one signal ends, hardly all have the time to notice. Those that lost another rank do not
    /// count.
    pub(super) fn has(&self, rank: Rank) -> bool {
        let noted_by = self.noted_by.get(&rank);
        let by_it = |other: &&Rank| {
            self.unnamed.contains(*other) || noted_by.is_some_and(|by| by.contains(*other))
        };
        let all_suffer = self.ranks > 2
            && !self.suffering.contains(&rank)
            && self.suffering.iter().filter(by_it).count() + 1 == self.ranks;
        self.is_any || self.named.contains(&rank) || all_suffer
    }
}
