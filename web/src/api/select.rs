//! Evaluates a filter expression for a page: returns which rows match.

use super::SnapshotSelector;
use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use axum::Json;
use axum::extract::{Query, State};
use rcomm_analyzer::filter::{Filter, KEYS, Subject};
use rcomm_analyzer::{Report, States};
use rcomm_recorder::model::Rank;
use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize)]
pub(crate) struct SelectQuery {
    filter: String,
    /// This and the next two select the snapshot, as in [`SnapshotSelector`].
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
    let judged = selector.judged(&app).await?;
    Ok(Json(selected(&judged.report, &judged.states(), &filter)))
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
        .map(|(index, _)| index)
        .collect()
}

/// Applies the filter to the rows of each section.
fn selected(report: &Report, states: &States, filter: &Filter) -> Selected {
    let host = |rank: Rank| {
        let index = report.ranks.binary_search_by_key(&rank, |row| row.rank);
        index.map_or("", |index| report.ranks[index].host.as_str())
    };
    // The filter takes NaN for an unknown value, and `None` for rows that have no such value.
    let unknown = |ms: Option<f64>| Some(ms.unwrap_or(f64::NAN));
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
                state: Some(states.group_filter_words(report, &row.group)),
                text: &row.backend,
                host_of: Some(&|rank| host(rank)),
                ..Subject::default()
            })
        }),
        ranks: matching_indices(&report.ranks, |row| {
            let state = states.rank(row.rank).filter_words(row.pending > 0);
            filter.matches(&Subject {
                ranks: &[row.rank],
                state: Some(state),
                lag_ms: unknown(row.lag_p50_ms),
                text: row.last_call.as_deref().unwrap_or_default(),
                host_of: Some(&|rank| host(rank)),
                ..Subject::default()
            })
        }),
        in_flight: matching_indices(&report.in_flight, |row| {
            filter.matches(&Subject {
                ranks: &row.group.ranks,
                group: Some(&row.group),
                op: Some(&row.op),
                state: Some(row.state.filter_words()),
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
    use crate::state::snapshot::{Records, ranks_of, status_of};
    use rcomm_analyzer::simulate::{Simulation, Situation};
    use rcomm_analyzer::source::SimulatedSource;
    use rcomm_analyzer::{Live, LiveOptions, Moment, RankState, Snapshot, Source, analyze};
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    /// The snapshot of a job of 16 ranks 8 s after its fault. It was also read once before the fault.
    fn snapshot_of(situation: Situation) -> Snapshot {
        let simulation = Simulation::new(situation, 16, 1_700_000_000_000_000_000);
        let fault_ns = simulation.fault_ns();
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["simulated".into()]);
        let mut newest = None;
        for (elapsed, wall_ns) in [(0, fault_ns - 1), (8, fault_ns + 8_000_000_000)] {
            let mut source = SimulatedSource::new(simulation.clone(), move || wall_ns);
            let at = Moment {
                elapsed: Duration::from_secs(3600 + elapsed),
                wall_ns,
            };
            live.observe(0, source.poll(Instant::now()), at);
            newest = live.refresh(at).or(newest);
        }
        newest.expect("the first poll gives a snapshot")
    }

    fn filtered(snapshot: &Snapshot, states: &States, filter: &str) -> Selected {
        let filter = Filter::parse(filter).expect("the filter is valid");
        selected(&snapshot.report, states, &filter)
    }

    fn passing(filter: &str) -> Selected {
        passing_of(Situation::StuckRank, filter)
    }

    fn passing_of(situation: Situation, filter: &str) -> Selected {
        let snapshot = snapshot_of(situation);
        let states = States::of_snapshot(&snapshot, &BTreeSet::new());
        filtered(&snapshot, &states, filter)
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
        assert!(passing("host:n001").ranks.iter().all(|index| *index >= 8));
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

    #[test]
    fn the_filter_the_page_and_earlier_snapshots_have_the_same_states() {
        let mut seen = BTreeSet::new();
        for &(situation, _) in Situation::ALL {
            let mut snapshot = snapshot_of(situation);
            // Rank 0 has no record, and a call of rank 1 has failed.
            let mut report = Report::clone(&snapshot.report);
            report.ranks[0].read = false;
            report.ranks[1].failure = Some("gone".into());
            report.ranks[1].pending = 0;
            snapshot.report = Arc::new(report);
            let mut views = snapshot.ranks.to_vec();
            views[0].dumps.clear();
            snapshot.ranks = views.into();
            let states = States::of_snapshot(&snapshot, &BTreeSet::new());
            let sent = status_of(&snapshot, Records::Followed).rank_states;
            let past = States::of_past(&snapshot.report, ranks_of(&sent));
            for row in &snapshot.report.ranks {
                let state = states.rank(row.rank);
                seen.insert(state);
                assert_eq!(past.rank(row.rank), state, "rank {} of {sent:?}", row.rank);
                let filter = format!("state:{}", state.key());
                let found = filtered(&snapshot, &past, &filter).ranks;
                assert!(found.contains(&(row.rank as usize)), "{filter}: {found:?}");
            }
        }
        assert_eq!(seen, BTreeSet::from(RankState::ALL));
    }
}
