//! The reports on the dumps of known faults are compared with what was injected. Each scenario is judged in each form,
//! with its files in both orders.
//!
//! Each report must answer four questions: which ranks are at fault, which kind of fault it is, in which operation the
//! fault shows first, and whether any other rank is accused.

use rcomm_analyzer::load::{LoadOptions, LoadedDump, load_all};
use rcomm_analyzer::{Analysis, Code, Extent, Finding, Policy, Report, Severity, Unread};
use rcomm_recorder::model::Rank;
use serde::Deserialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What was injected, as `truth.json` records it.
#[derive(Deserialize)]
struct Truth {
    /// The name of the finding that reports the fault; `healthy` if there is none.
    kind: String,
    /// The names of other findings that report it as well.
    #[serde(default)]
    kind_alternatives: Vec<String>,
    culprit_ranks: Vec<Rank>,
    /// The sets of ranks that may be at fault, if the dumps are ambiguous.
    #[serde(default)]
    culprit_alternatives: Vec<Vec<Rank>>,
    /// The name or the description of the group of the operation in which the fault shows first.
    first_bad_pg: Option<String>,
    /// The number of that operation in its group.
    first_bad_seq: Option<u64>,
    /// `false` where the recorder does not record what would identify the culprit.
    #[serde(default = "decidable_by_default")]
    decidable: bool,
}

fn decidable_by_default() -> bool {
    true
}

impl Truth {
    fn read(scenario: &Path) -> Self {
        let text =
            std::fs::read_to_string(scenario.join("truth.json")).expect("a scenario has a truth");
        serde_json::from_str(&text).expect("a truth has these fields")
    }

    /// The sets of ranks that may be at fault: one, unless the dumps are ambiguous.
    fn culprits(&self) -> Vec<Vec<Rank>> {
        if self.culprit_alternatives.is_empty() {
            vec![self.culprit_ranks.clone()]
        } else {
            self.culprit_alternatives.clone()
        }
    }

    /// The questions that the report answers wrongly. Without a fault, the only one is whether nothing is claimed; if
    /// the fault is not decidable, whether no finding is certain.
    fn misses(&self, report: &Report) -> Vec<&'static str> {
        let findings: Vec<&Finding> = report
            .findings
            .iter()
            .filter(|finding| finding.severity != Severity::Note)
            .collect();
        if self.kind == "healthy" {
            return if findings.is_empty() {
                vec![]
            } else {
                vec!["innocents"]
            };
        }
        if !self.decidable {
            let is_certain = findings.iter().any(|finding| finding.confidence > 0.6);
            return if is_certain {
                vec!["certainty"]
            } else {
                vec![]
            };
        }
        let Some(first) = findings.first() else {
            return vec!["culprit", "kind", "place"];
        };
        let sets = self.culprits();
        let names_culprit = sets.contains(&first.culprit_ranks)
            || (sets.len() > 1
                && first.culprit_ranks.is_empty()
                && first.alternatives.iter().any(|set| sets.contains(set)));
        let names_kind = first.name == self.kind || self.kind_alternatives.contains(&first.name);
        let group = first.group.as_ref();
        // A cycle has no single place, and a straggler is late everywhere.
        let names_place = self.first_bad_seq.is_none()
            || self.kind == "cross_group_deadlock"
            || (first.seq == self.first_bad_seq
                && group.is_some_and(|group| {
                    [Some(&group.desc), Some(&group.name)].contains(&self.first_bad_pg.as_ref())
                }));
        let mut causes = findings.iter().filter(|finding| {
            let is_error = finding.severity == Severity::Error || self.kind == "straggler";
            finding.caused_by.is_none() && is_error
        });
        let accuses_no_other = causes.all(|cause| {
            let mut accused = cause.culprit_ranks.iter();
            accused.all(|rank| sets.iter().any(|set| set.contains(rank)))
        });
        let is_reported =
            |set: &Vec<Rank>| first.alternatives.contains(set) || first.culprit_ranks == *set;
        let lists_alternatives = sets.len() == 1 || sets.iter().all(is_reported);
        let questions = [
            (names_culprit, "culprit"),
            (names_kind, "kind"),
            (names_place, "place"),
            (accuses_no_other && lists_alternatives, "innocents"),
        ];
        let missed = questions.into_iter().filter(|(is_right, _)| !is_right);
        missed.map(|(_, name)| name).collect()
    }
}

/// The order in which files are given to the analysis.
enum Order {
    Forwards,
    Backwards,
}

/// The report on the dumps of this folder.
fn judge(folder: &Path, order: &Order) -> Report {
    judge_under(folder, order, Policy::default())
}

/// Works as [`judge`], under a policy of the caller's.
fn judge_under(folder: &Path, order: &Order, policy: Policy) -> Report {
    let (mut dumps, loaded) =
        load_all(&[folder.to_owned()], &LoadOptions::default()).expect("the folder is there");
    if matches!(order, Order::Backwards) {
        dumps.reverse();
    }
    let mut analysis = Analysis::new(policy);
    for LoadedDump {
        dump, path, cut, ..
    } in &dumps
    {
        let extent = if *cut { Extent::Cut } else { Extent::Whole };
        analysis.add_from(path, dump, extent);
    }
    for problem in loaded.problems {
        analysis.add_problem(problem, Unread::Part);
    }
    analysis.finish()
}

/// The folders of all scenarios.
fn scenarios() -> Vec<PathBuf> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let roots = ["dumps", "circumstances", "live"].map(|folder| fixtures.join(folder));
    let mut folders: Vec<PathBuf> = roots
        .iter()
        .flat_map(|root| std::fs::read_dir(root).expect("the fixtures are there"))
        .map(|entry| entry.expect("a folder can be listed").path())
        .filter(|path| path.join("truth.json").is_file())
        .collect();
    folders.sort();
    folders
}

#[test]
fn every_known_fault_is_diagnosed_in_every_form_and_file_order() {
    let (mut sets, mut misses) = (0, Vec::new());
    for scenario in scenarios() {
        let truth = Truth::read(&scenario);
        for form in ["pickle", "json"] {
            let folder = scenario.join(form);
            if !folder.is_dir() {
                continue;
            }
            sets += 1;
            let forwards = judge(&folder, &Order::Forwards);
            let backwards = judge(&folder, &Order::Backwards);
            assert_eq!(forwards, backwards, "{}: order of files", folder.display());
            let missed = truth.misses(&forwards);
            if !missed.is_empty() {
                let first = forwards.findings.first().map(|first| &first.sentence);
                misses.push(format!(
                    "{}: {missed:?}, first finding {first:?}",
                    folder.display()
                ));
            }
        }
    }
    eprintln!(
        "known faults: {} of {sets} sets of dumps right",
        sets - misses.len()
    );
    assert!(sets >= 60, "only {sets} sets of dumps were found");
    assert!(misses.is_empty(), "{}", misses.join("\n"));
}

/// The newest time in the dumps of a folder, in ns since 1970. An analysis as of this time gives each operation an age.
fn newest_ns(folder: &Path) -> Option<i64> {
    let read = load_all(&[folder.to_owned()], &LoadOptions::default());
    let (dumps, _) = read.expect("the folder is there");
    let entries = dumps.iter().flat_map(|loaded| &loaded.dump.entries);
    let times = entries.map(|entry| {
        entry
            .time_created_ns
            .max(entry.time_discovered_completed_ns)
    });
    let dump_times = dumps.iter().map(|loaded| loaded.dump.identity.dump_time_ns);
    times.chain(dump_times).max()
}

/// The code of the first error and the ranks that it accuses; `None` without an error.
fn accused(report: &Report) -> Option<(Code, Vec<Rank>)> {
    let mut errors = report.findings.iter();
    let first = errors.find(|finding| finding.severity == Severity::Error)?;
    Some((first.code, first.culprit_ranks.clone()))
}

#[test]
fn the_age_from_which_on_an_operation_is_overdue_never_changes_who_is_accused() {
    let (mut looks, mut table) = (0, String::new());
    for scenario in scenarios() {
        let folder = scenario.join("json");
        if !folder.is_dir() {
            continue;
        }
        let at = |now_ns: Option<i64>, overdue: Duration| {
            let policy = Policy {
                now_ns,
                snapshot: true,
                overdue,
                ..Policy::default()
            };
            judge_under(&folder, &Order::Forwards, policy)
        };
        let with_overdue = |overdue| at(None, overdue);
        let baseline = with_overdue(Duration::ZERO);
        let dated = at(newest_ns(&folder), Duration::ZERO);
        let in_flight = dated
            .in_flight
            .iter()
            .filter_map(|operation| operation.age_ms);
        let ages = in_flight.map(|ms| Duration::from_secs_f64(ms.max(0.0) / 1e3));
        let spread = std::iter::successors(Some(Duration::from_micros(100)), |age| Some(*age * 3));
        let mut ages: Vec<Duration> = ages.chain(spread.take(16)).collect();
        ages.sort_unstable();
        ages.dedup();
        let mut silent_from = None;
        let age_count = ages.len();
        for age in ages {
            let accused_now = accused(&with_overdue(age + Duration::from_micros(1)));
            looks += 1;
            match accused_now {
                None => silent_from = silent_from.or(Some(age)),
                Some(_) => silent_from = None,
            }
            assert!(
                accused_now.is_none() || accused_now == accused(&baseline),
                "{}: {accused_now:?} with --overdue {age:?}, else {:?}",
                scenario.display(),
                accused(&baseline)
            );
        }
        let whom = accused(&baseline).map_or_else(
            || "no rank".to_owned(),
            |(code, ranks)| format!("{code} {ranks:?}"),
        );
        let name = scenario.file_name().unwrap_or_default().to_string_lossy();
        let from = silent_from
            .filter(|_| accused(&baseline).is_some())
            .map_or_else(String::new, |age| format!("{age:.1?}"));
        let _ = writeln!(table, "| {name} | {age_count} | {whom} | {from} |");
    }
    eprintln!(
        "| fixture | values of --overdue | who is accused | no rank is accused from this value on |\n\
         |---|---|---|---|\n{table}\n\
         {looks} looks, 0 changed whom they accuse"
    );
    assert!(looks >= 500, "only {looks} looks");
}
