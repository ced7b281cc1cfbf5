//! Compares the results of a row with the expected ones.

use crate::job::{INIT_TIMEOUT, Job, TIMEOUT};
use crate::rank::{Event, EventKind};
use crate::scenario::{At, Expect, Fault, Scenario};
use rcomm_analyzer::load::{LoadOptions, load_all};
use rcomm_analyzer::{Code, Policy, Severity, analyze};
use rcomm_recorder::publish::{Dump, list_rings};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;

/// One line of the table. A result is `None` if the row does not check it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// Why the row could not be tried on this system; `None` if it was tried.
    pub(crate) skipped: Option<String>,
    /// When the last of the ranks that had to get an error got it, in seconds after the fault; how many of them got
    /// one, and how many had to.
    pub(crate) got_error: Option<(f64, usize, usize)>,
    /// Whether the last of these errors came in time.
    pub(crate) in_time: Option<bool>,
    /// How many of these ranks got an error that named the right ranks, and how many were expected to.
    pub(crate) named: Option<(usize, usize)>,
    /// The verdict with the codes and the culprits of its findings, and whether they are right.
    pub(crate) verdict: Option<(String, bool)>,
    /// How many ranks left a record, and how many had to.
    pub(crate) records: Option<(usize, usize)>,
    /// Resources that were leaked.
    pub(crate) leaks: Vec<String>,
    /// Whether the job could start again and end cleanly.
    pub(crate) restart: Option<bool>,
    /// Other deviations from the expected result.
    pub(crate) wrong: Vec<String>,
    /// The errors of the ranks, to be printed.
    pub(crate) errors: Vec<String>,
}

impl Row {
    pub(crate) fn is_right(&self) -> bool {
        let is_full =
            |counts: &Option<(usize, usize)>| counts.is_none_or(|(right, all)| right == all);
        self.in_time != Some(false)
            && self.got_error.is_none_or(|(_, got, all)| got == all)
            && is_full(&self.named)
            && is_full(&self.records)
            && self.verdict.as_ref().is_none_or(|(_, right)| *right)
            && self.leaks.is_empty()
            && self.restart != Some(false)
            && self.wrong.is_empty()
    }

    /// Checks the errors that the ranks got.
    pub(crate) fn judge_errors(
        &mut self,
        scenario: &Scenario,
        events: &[Event],
        fault_ms: u64,
        slack: Duration,
    ) {
        let must_get_error = |rank: &u32| match scenario.expect {
            Expect::Named | Expect::Refused(_) => !scenario.culprits.contains(rank),
            Expect::CutOff | Expect::Apart | Expect::StoreLost => true,
            Expect::Healthy | Expect::Ended | Expect::OnlyCulprit(_) => false,
        };
        let expected_ranks: Vec<u32> = (0..scenario.ranks).filter(must_get_error).collect();
        if expected_ranks.is_empty() {
            return;
        }
        // The start may take `INIT_TIMEOUT`, and so may the group that ranks make after the store is lost.
        let is_start = matches!(scenario.expect, Expect::Refused(_) | Expect::StoreLost);
        let limit = if is_start { INIT_TIMEOUT } else { TIMEOUT } + slack;
        let (mut latest, mut got, mut named, mut must_name) = (0, 0, 0, 0);
        for &rank in &expected_ranks {
            let has_failed = |event: &&Event| matches!(event.kind, EventKind::Failed { .. });
            let mut its_events = events.iter().filter(|event| event.rank == rank);
            let first = its_events.find(has_failed);
            let Some(Event {
                kind: EventKind::Failed { ranks, text, .. },
                at_ms,
                ..
            }) = first
            else {
                continue;
            };
            got += 1;
            // The process of a rank that the fault has ended must not be called alive.
            if scenario.kills() && text.contains("still run") {
                self.wrong.push(format!("rank {rank}: {text}"));
            }
            // A rank whose operation has failed may leave before another one gets its error.
            let has_failed_before = |other: u32| {
                let mut failed = events.iter().filter(has_failed);
                failed.any(|event| event.rank == other && event.at_ms <= *at_ms)
            };
            let gone = called_gone(text);
            if !scenario.kills() && !gone.iter().all(|&other| has_failed_before(other)) {
                self.wrong
                    .push(format!("rank {rank} calls a rank gone that runs: {text}"));
            }
            latest = latest.max(at_ms.saturating_sub(fault_ms));
            // A rank that was cut off itself may name any rank that it cannot reach.
            if scenario.expect == Expect::CutOff && scenario.culprits.contains(&rank) {
                continue;
            }
            must_name += 1;
            named += usize::from(match scenario.expect {
                Expect::Refused(words) => text.contains(words),
                Expect::StoreLost => ranks.is_empty() && text.contains("the store"),
                // A rank may name one that it waited for, but must not call one gone that both can reach.
                Expect::Apart => {
                    let listed = listed(text);
                    !ranks.is_empty() && listed.iter().all(|rank| scenario.culprits.contains(rank))
                }
                _ => names(scenario.culprits, ranks, text),
            });
        }
        let expected = expected_ranks.iter().filter(|rank| {
            !(scenario.expect == Expect::CutOff && scenario.culprits.contains(rank))
        });
        self.got_error = Some((latest as f64 / 1000.0, got, expected_ranks.len()));
        self.in_time = Some(Duration::from_millis(latest) <= limit);
        self.named = Some((named, expected.count().max(must_name)));
    }

    /// Checks which ranks have a record, and whether the analysis of the records names the culprits: none in a job
    /// that runs on, and no other rank where only the culprit may fail.
    pub(crate) fn judge_records(&mut self, scenario: &Scenario, job: &Job<'_>) {
        if scenario.expect == Expect::Ended {
            return;
        }
        let rings = job.ring_folders();
        let rings = rings
            .iter()
            .flat_map(|folder| list_rings(folder).unwrap_or_default());
        let rings: Vec<_> = rings
            .filter(|ring| {
                let folder = ring.path.parent().and_then(|folder| folder.file_name());
                folder.is_some_and(|folder| folder == job.name.as_str())
            })
            .collect();
        let ranks: BTreeSet<_> = rings
            .iter()
            .filter_map(|ring| ring.ring.as_ref().ok()?.identity.rank)
            .collect();
        let without = match scenario.fault {
            Fault::Absent | Fault::Itself(_, At::Start) => scenario.culprits.len(),
            Fault::Ring(_) => 1,
            _ => 0,
        };
        let all = scenario.ranks as usize - without;
        let only_culprit = matches!(scenario.expect, Expect::OnlyCulprit(_));
        if !only_culprit {
            self.records = Some((ranks.len().min(all), all));
        }
        let mut paths: Vec<_> = rings.into_iter().map(|ring| ring.path).collect();
        // A job that runs on may have been asked for dumps, which are older than its rings.
        if job.dump_folder().exists() && scenario.expect != Expect::Healthy {
            paths.push(job.dump_folder());
        }
        if paths.is_empty() && only_culprit {
            // Without a record, the job has run to its end.
            return;
        }
        let Ok((dumps, _)) = load_all(&paths, &LoadOptions::default()) else {
            self.verdict = Some(("no record".to_owned(), false));
            return;
        };
        let dumps: Vec<Dump> = dumps.into_iter().map(|loaded| loaded.dump).collect();
        let policy = Policy {
            snapshot_of_rings: scenario.expect == Expect::Healthy,
            ..Policy::default()
        };
        let report = analyze(&dumps, &policy);
        let roots = report.findings.iter();
        let roots = roots
            .filter(|finding| finding.severity == Severity::Error && finding.caused_by.is_none());
        let roots: Vec<_> = roots.collect();
        let culprits: BTreeSet<u32> = roots
            .iter()
            .flat_map(|finding| finding.culprit_ranks.clone())
            .collect();
        let codes: Vec<String> = roots
            .iter()
            .map(|finding| format!("{:?}", finding.code))
            .collect();
        let has = |code: Code| roots.iter().any(|finding| finding.code == code);
        let names_only_culprits = culprits.iter().all(|rank| scenario.culprits.contains(rank));
        let exactly = names_only_culprits && culprits.len() == scenario.culprits.len();
        let right = match scenario.expect {
            Expect::Healthy => culprits.is_empty(),
            Expect::OnlyCulprit(_) => names_only_culprits,
            Expect::CutOff => exactly && has(Code::E152),
            Expect::Apart => names_only_culprits && has(Code::E152),
            Expect::StoreLost => exactly && has(Code::E153),
            Expect::Named | Expect::Refused(_) | Expect::Ended => exactly,
        };
        let sentences = roots.iter();
        self.errors
            .extend(sentences.map(|finding| format!("verdict: {}", finding.sentence)));
        let shown = format!("{:?} {} {:?}", report.verdict, codes.join(","), culprits);
        self.verdict = Some((shown.to_lowercase(), right));
    }

    /// Checks for leaked resources and wrong results.
    pub(crate) fn judge_leaks_and_results(&mut self, events: &[Event]) {
        for event in events {
            match &event.kind {
                EventKind::Left { fds, threads } if *fds > 0 || *threads > 0 => {
                    self.leaks.push(format!(
                        "rank {}: {fds} descriptors, {threads} threads",
                        event.rank
                    ));
                }
                EventKind::Wrong(operation) => self
                    .wrong
                    .push(format!("rank {}: a wrong {operation}", event.rank)),
                _ => {}
            }
        }
    }

    /// Keeps the errors of the ranks for printing.
    pub(crate) fn keep_errors(&mut self, events: &[Event]) {
        for event in events {
            if let EventKind::Failed {
                call,
                kind,
                ranks,
                text,
            } = &event.kind
            {
                self.errors.push(format!(
                    "rank {}, {call}, {kind} {ranks:?}: {text}",
                    event.rank
                ));
            }
        }
    }
}

/// The ranks that an error's text lists as gone, without an answer, or missing.
fn listed(text: &str) -> BTreeSet<u32> {
    listed_after(text, &["gone: rank", "no answer: rank", "missing rank"])
}

/// The ranks whose processes have ended according to an error's text, or which closed their connections.
fn called_gone(text: &str) -> BTreeSet<u32> {
    let mut gone = listed_after(text, &["gone: rank"]);
    for words in [" is gone: ", " are gone: ", " closed its connection"] {
        for (at, _) in text.match_indices(words) {
            let list = text[..at].rsplit("rank").next().unwrap_or_default();
            let ranks = list.trim_start_matches('s').split(", ");
            gone.extend(ranks.filter_map(|rank| rank.trim().parse::<u32>().ok()));
        }
    }
    gone
}

/// The ranks of the lists that begin with one of `heads`.
fn listed_after(text: &str, heads: &[&str]) -> BTreeSet<u32> {
    let mut listed = BTreeSet::new();
    for head in heads {
        for (at, _) in text.match_indices(head) {
            let list = text[at + head.len()..].trim_start_matches('s');
            for word in list.trim_start().split(", ") {
                let digits = word.find(|c: char| !c.is_ascii_digit());
                let Ok(rank) = word[..digits.unwrap_or(word.len())].parse() else {
                    break;
                };
                listed.insert(rank);
                if digits.is_some() {
                    break;
                }
            }
        }
    }
    listed
}

/// Whether an error names the culprits and no other rank: its `ranks` must be some of them, and together with the lists
/// of its text all of them.
fn names(culprits: &[u32], ranks: &[u32], text: &str) -> bool {
    let named: BTreeSet<u32> = listed(text).into_iter().chain(ranks.to_vec()).collect();
    !ranks.is_empty()
        && ranks.iter().all(|rank| culprits.contains(rank))
        && named.iter().eq(culprits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_blames_another_rank_is_not_right() {
        assert!(names(&[2], &[2], "rank 2 is gone"));
        assert!(!names(&[2], &[], "rank 2 is gone"));
        assert!(!names(&[2], &[0, 2], "ranks 0, 2 are gone"));
        assert!(!names(
            &[1, 3],
            &[1],
            "rank 1 is gone; 3.0 s after its issue"
        ));
        assert!(names(&[1, 3], &[1], "rank 1 is gone; no answer: rank 3"));
        assert!(!names(&[1], &[1], "rank 1 is gone; no answer: ranks 1, 3"));
    }

    #[test]
    fn ranks_are_read_from_the_lists_of_an_errors_text() {
        let text = "3.0 s after its issue; arrived: rank 0; gone: ranks 1, 3; no answer: rank 2 (3 of 4 members";
        assert_eq!(listed(text), [1, 2, 3].into());
        assert_eq!(listed("missing ranks 5, 12: 3 s"), [5, 12].into());
        let gone = "ranks 2, 3 are gone: their connections ended; gone: rank 1; no answer: rank 0";
        assert_eq!(called_gone(gone), [1, 2, 3].into());
        let closed = "all_reduce #33 on group default_pg: rank 2 closed its connection";
        assert_eq!(called_gone(closed), [2].into());
        let broke = "the connection to rank 2 ended, but its process still runs; arrived: rank 0";
        assert_eq!(called_gone(broke), BTreeSet::new());
    }

    #[test]
    fn a_row_with_a_rank_without_an_error_is_not_right() {
        let row = Row {
            got_error: Some((1.0, 2, 3)),
            ..Row::default()
        };
        assert!(!row.is_right() && Row::default().is_right());
    }
}
