//! Detects ranks that issue operations of one group from the same call sites in crossed order.
//!
//! This happens if two threads share a group, or if the data decide the order of calls. Operations of the same type
//! and size agree, so no comparison of them fails, although the data of two different calls are combined.

use super::statement::MAX_NAMED;
use rcomm_recorder::model::{Rank, text};
use std::collections::{HashSet, VecDeque};

/// How many of the newest operations are remembered: a crossing over more operations is not detected.
const REMEMBERED: usize = 64;
/// How many of the call sites from which all ranks issued the same operation are remembered.
const MAX_COMMON: usize = 4096;

/// Where the ranks of a group issued their newest operations.
#[derive(Debug, Default)]
pub(super) struct Crossings {
    /// Call sites from which all ranks issued the same operation.
    common: HashSet<String>,
    /// The operations since all ranks last issued one from the same call site: the sequence number, and where each
    /// rank issued it.
    since_common: VecDeque<(u64, Vec<String>)>,
    /// Whether a crossing was reported since all ranks last issued an operation from the same call site.
    reported: bool,
}

impl Crossings {
    /// Records the call sites from which the ranks issued operation `seq`, on which they agree. Returns a warning if
    /// the call sites show a crossing that was not reported.
    pub(super) fn observe(
        &mut self,
        seq: u64,
        sites: Vec<String>,
        ranks: &[Rank],
    ) -> Option<String> {
        let is_one_site = sites.windows(2).all(|pair| pair[0] == pair[1]);
        if is_one_site {
            self.since_common.clear();
            self.reported = false;
            if let Some(site) = sites.into_iter().next()
                && !site.is_empty()
                && self.common.len() < MAX_COMMON
            {
                self.common.insert(site);
            }
            return None;
        }
        let warning = if self.reported {
            None
        } else {
            let mut before = self.since_common.iter();
            before.find_map(|(earlier, sites_then)| {
                self.crossing_of((*earlier, sites_then), (seq, &sites), ranks)
            })
        };
        self.reported |= warning.is_some();
        self.since_common.push_back((seq, sites));
        if self.since_common.len() > REMEMBERED {
            self.since_common.pop_front();
        }
        warning
    }

    /// The warning if some ranks issued two operations from two call sites and others issued them from the same call
    /// sites in the opposite order. All ranks must have issued an operation from each of the two before.
    fn crossing_of(
        &self,
        (earlier, sites_then): (u64, &[String]),
        (seq, sites_now): (u64, &[String]),
        ranks: &[Rank],
    ) -> Option<String> {
        let sites_of = |index: usize| (sites_then[index].as_str(), sites_now[index].as_str());
        let is_known =
            |(a, b): (&str, &str)| a != b && self.common.contains(a) && self.common.contains(b);
        let members = 0..sites_now.len();
        let (first, second) = members.clone().map(sites_of).find(|&(a, b)| {
            is_known((a, b)) && members.clone().any(|other| sites_of(other) == (b, a))
        })?;
        let ranks_with = |wanted: (&str, &str)| -> Vec<Rank> {
            let matching = ranks
                .iter()
                .enumerate()
                .filter(|&(index, _)| sites_of(index) == wanted);
            matching.map(|(_, &rank)| rank).collect()
        };
        let [in_order, reversed] = [ranks_with((first, second)), ranks_with((second, first))];
        Some(format!(
            "{} issued #{earlier} at {first} and #{seq} at {second}, {} the other way round: the operations agree, \
             but data of different calls are combined; do two threads share the group, or did a rank leave \
             a call out?",
            text::ranks(&in_order, MAX_NAMED),
            text::ranks(&reversed, MAX_NAMED),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first warning if each rank issues its operations from the call sites in its string, one character each.
    fn first_warning(ranks: &[&str]) -> Option<String> {
        let mut crossings = Crossings::default();
        let world: Vec<Rank> = (0..ranks.len() as Rank).collect();
        (0..ranks[0].len()).find_map(|at| {
            let sites = ranks.iter().map(|sites| sites[at..=at].to_owned());
            crossings.observe(at as u64 + 1, sites.collect(), &world)
        })
    }

    #[test]
    fn a_crossing_is_reported_with_both_call_sites() {
        let warning = first_warning(&["abab", "abab", "abba"]).unwrap();
        assert!(
            warning
                .starts_with("ranks 0, 1 issued #3 at a and #4 at b, rank 2 the other way round:"),
            "{warning}"
        );
    }

    #[test]
    fn a_crossing_is_reported_once_until_all_ranks_issue_from_one_call_site_again() {
        let mut crossings = Crossings::default();
        let mut warnings = 0;
        for pair in ["aa", "bb", "ab", "ba", "ab", "ba", "cc", "ab", "ba"] {
            let sites = pair.chars().map(String::from).collect();
            warnings += usize::from(crossings.observe(1, sites, &[0, 1]).is_some());
        }
        assert_eq!(warnings, 2);
    }

    #[test]
    fn call_sites_that_are_not_crossed_or_not_known_are_not_reported() {
        assert_eq!(first_warning(&["ab", "ba"]), None);
        assert_eq!(first_warning(&["zabbz", "zbabz", "zbbaz"]), None);
        // Where the call sites are not recorded, nothing is known.
        assert_eq!(first_warning(&["ab  ", "ab  "]), None);
    }
}
