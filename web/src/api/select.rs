//! Evaluates a filter expression for a page: returns which rows match.

use super::SnapshotSelector;
use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use axum::Json;
use axum::extract::{Query, State};
use rcomm_analyzer::filter::{Filter, KEYS, Subject};
use rcomm_analyzer::{Code, Finding, InstanceState, Report, Severity};
use rcomm_recorder::model::Rank;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

#[derive(Debug, Deserialize)]
pub(crate) struct SelectQuery {
    filter: String,
    at: Option<u64>,
    upload: Option<String>,
    job: Option<String>,
}

/// Indices of the matching rows, by section of the report.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Selected {
    findings: Vec<usize>,
    groups: Vec<usize>,
    ranks: Vec<usize>,
    in_flight: Vec<usize>,
}

pub(crate) async fn select(
    State(app): State<AppState>,
    Query(query): Query<SelectQuery>,
) -> Result<Json<Selected>, Refusal> {
    let filter = Filter::parse(&query.filter).map_err(|error| Refusal::Query(error.to_string()))?;
    let selector = SnapshotSelector {
        at: query.at,
        upload: query.upload,
        job: query.job,
    };
    Ok(Json(selected(&*selector.report(&app).await?, &filter)))
}

/// A key of the filter language and the values it takes.
#[derive(Serialize)]
pub(crate) struct FilterKey {
    key: &'static str,
    takes: &'static str,
}

pub(crate) async fn filter_keys() -> Json<Vec<FilterKey>> {
    Json(
        KEYS.iter()
            .map(|&(key, takes)| FilterKey { key, takes })
            .collect(),
    )
}

fn matching_indices<T>(rows: &[T], passes: impl Fn(&T) -> bool) -> Vec<usize> {
    let rows = rows.iter().enumerate();
    rows.filter(|(_, row)| passes(row))
        .map(|(at, _)| at)
        .collect()
}

/// Applies the filter to the rows of each section.
fn selected(report: &Report, filter: &Filter) -> Selected {
    let host = |rank: Rank| {
        let at = report.ranks.binary_search_by_key(&rank, |row| row.rank);
        at.map_or("", |at| report.ranks[at].host.as_str())
    };
    // The filter takes NaN for an unknown value, and `None` for rows that have no such value.
    let unknown = |ms: Option<f64>| Some(ms.unwrap_or(f64::NAN));
    let is_waiting = |rank: Rank| report.waits.iter().any(|wait| wait.rank == rank);
    let culprits = |is_meant: &dyn Fn(&Finding) -> bool| -> HashSet<Rank> {
        let meant = report.findings.iter().filter(|finding| is_meant(finding));
        // Of a cycle all ranks are at fault, if none is named.
        let ranks = meant.flat_map(|finding| match finding.culprit_ranks.as_slice() {
            [] => &finding.cycle,
            culprits => culprits,
        });
        ranks.copied().collect()
    };
    let roots =
        culprits(&|finding| finding.severity == Severity::Error && finding.caused_by.is_none());
    let late = culprits(&|finding| finding.code == Code::W220);
    Selected {
        findings: matching_indices(&report.findings, |row| {
            filter.matches(&Subject {
                ranks: &row.culprit_ranks,
                group: row.group.as_ref(),
                op: row.op.as_deref(),
                code: Some(row.code.id()),
                seq: row.seq,
                text: &row.sentence,
                host_of: Some(&|rank| host(rank)),
                ..Subject::default()
            })
        }),
        groups: matching_indices(&report.groups, |row| {
            filter.matches(&Subject {
                ranks: &row.group.ranks,
                group: Some(&row.group),
                age_ms: unknown(row.oldest_ms),
                lag_ms: unknown(row.lag_p50_ms),
                seq: row.last_seq,
                state: Some(if row.in_flight > 0 { "running" } else { "ok" }),
                text: &row.backend,
                host_of: Some(&|rank| host(rank)),
                ..Subject::default()
            })
        }),
        ranks: matching_indices(&report.ranks, |row| {
            let does = match row {
                _ if !row.read => "silent",
                _ if report.failure(row.rank).is_some() => "failed",
                _ if is_waiting(row.rank) => "waiting",
                _ if row.pending > 0 => "running",
                _ => "ok",
            };
            // Of a rank that a finding blames, the state has two words, so that a filter finds either.
            let state = match (roots.contains(&row.rank), late.contains(&row.rank)) {
                (true, _) => format!("root {does}"),
                (false, true) => format!("late {does}"),
                (false, false) => does.to_owned(),
            };
            filter.matches(&Subject {
                ranks: &[row.rank],
                state: Some(&state),
                lag_ms: unknown(row.lag_p50_ms),
                text: row.last_call.as_deref().unwrap_or_default(),
                host_of: Some(&|rank| host(rank)),
                ..Subject::default()
            })
        }),
        in_flight: matching_indices(&report.in_flight, |row| {
            let state = match row.state {
                InstanceState::Running => "running",
                InstanceState::Waiting => "waiting",
                InstanceState::HalfOpen => "half_open",
                InstanceState::Mismatch => "mismatch",
                InstanceState::Failed => "failed",
            };
            filter.matches(&Subject {
                ranks: &row.group.ranks,
                group: Some(&row.group),
                op: Some(&row.op),
                state: Some(state),
                age_ms: unknown(row.age_ms),
                seq: Some(row.seq),
                bytes: Some(row.bytes),
                host_of: Some(&|rank| host(rank)),
                ..Subject::default()
            })
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::simulate::{Simulation, Situation};
    use rcomm_analyzer::{Policy, analyze};

    fn passing(filter: &str) -> Selected {
        passing_of(Situation::StuckRank, filter)
    }

    fn passing_of(situation: Situation, filter: &str) -> Selected {
        let simulation = Simulation::new(situation, 16, 0);
        let now = simulation.fault_ns() + 8_000_000_000;
        let policy = Policy {
            now_ns: Some(now),
            snapshot: true,
            ..Policy::default()
        };
        let report = analyze(&simulation.dumps_at(now), &policy);
        selected(
            &report,
            &Filter::parse(filter).expect("the filter is valid"),
        )
    }

    #[test]
    fn one_filter_serves_all_sections() {
        let all = passing("");
        assert_eq!((all.ranks.len(), all.in_flight.len() > 1), (16, true));
        let some = passing("rank:13 group:dp_5");
        assert_eq!(
            (some.ranks, some.groups.len(), some.in_flight.len()),
            (vec![13], 1, 1)
        );
        assert!(passing("host:n001").ranks.iter().all(|at| *at >= 8));
        assert_eq!(passing("age>1h").in_flight, [] as [usize; 0]);
        assert_eq!(passing("code:E101").findings, [0]);
    }

    #[test]
    fn ranks_at_fault_and_late_ranks_are_selected_by_their_state() {
        assert_eq!(passing("state:root").ranks, [13]);
        assert_eq!(passing("!state:root").ranks.len(), 15);
        assert!(!passing("state:waiting").ranks.contains(&13));
        assert_eq!(passing("state:late").ranks, [] as [usize; 0]);
        let late = passing_of(Situation::Straggler, "state:late").ranks;
        assert!(!late.is_empty() && late.len() <= 8, "{late:?}");
        let all_of_a_cycle = passing_of(Situation::Deadlock, "state:root").ranks;
        assert!(!all_of_a_cycle.is_empty());
    }
}
