//! Makes the rank views of a snapshot from the last answers of the sources.

use super::latest::LatestRecords;
use super::{Moment, RankView};
use crate::live::source::Collected;
use rcomm_recorder::model::Rank;
use rcomm_verdict::{RankReport, Report};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// The views of all ranks that a source has observed, and of the other ranks of a world of this size.
pub(super) fn recorded_views(
    kept: &LatestRecords,
    silent: &BTreeSet<Rank>,
    at: Moment,
    world: Option<u32>,
) -> Vec<RankView> {
    let mut views: BTreeMap<Rank, RankView> = (0..world.unwrap_or(0))
        .map(|rank| (rank, RankView::missing(rank)))
        .collect();
    let mut hosts: BTreeSet<Arc<str>> = BTreeSet::new();
    let mut last_host: Option<Arc<str>> = None;
    for (&(rank, ..), slot) in &kept.slots {
        let view = views.entry(rank).or_insert_with(|| RankView::missing(rank));
        let silence = slot.answered.map(|then| at.elapsed.saturating_sub(then));
        view.silence = match (view.silence, silence) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        view.liveness = view.liveness.max(slot.liveness);
        if view.failure.is_none() {
            view.failure.clone_from(&slot.failure);
        }
        if let Some(dump) = &slot.dump {
            view.add(dump);
            let host = dump.identity.host.as_str();
            if view.host.is_empty() && !host.is_empty() {
                // Ranks that follow one another mostly share a host, so the host of the previous rank is compared
                // first.
                if last_host.as_deref() != Some(host) {
                    let known = hosts.get(host).cloned();
                    let host = known.unwrap_or_else(|| Arc::from(host));
                    hosts.insert(host.clone());
                    last_host = Some(host);
                }
                view.host = last_host.clone().unwrap_or_default();
            }
        }
    }
    let mut views: Vec<RankView> = views.into_values().collect();
    for view in &mut views {
        view.silent = silent.contains(&view.rank);
    }
    number_on_hosts(&mut views);
    views
}

/// Adds the ranks of a collector's report to the views that were made from records, and marks the ranks that no longer
/// answer the collector as silent.
pub(super) fn collected_views(recorded: Vec<RankView>, collected: &Collected) -> Vec<RankView> {
    let mut views: BTreeMap<Rank, RankView> =
        recorded.into_iter().map(|view| (view.rank, view)).collect();
    for reported in &collected.report.ranks {
        let view = views
            .entry(reported.rank)
            .or_insert_with(|| RankView::missing(reported.rank));
        if view.host.is_empty() {
            view.host = reported.host.as_str().into();
        }
        view.silent |= collected.silent.binary_search(&reported.rank).is_ok();
    }
    let mut views: Vec<RankView> = views.into_values().collect();
    number_on_hosts(&mut views);
    views
}

/// Adds the ranks of `views` that the report lacks: no record of them was judged, and no record says how many ranks the
/// job has. Both are ascending.
pub(super) fn add_unjudged(report: &mut Report, views: &[RankView]) {
    let judged: BTreeSet<Rank> = report.ranks.iter().map(|row| row.rank).collect();
    let unjudged = views.iter().filter(|view| !judged.contains(&view.rank));
    let unjudged = unjudged.map(|view| RankReport {
        rank: view.rank,
        host: view.host.to_string(),
        pid: view.first_dump().map_or(0, |dump| dump.identity.pid),
        read: false,
        phase: None,
        step: None,
        pending: 0,
        failure: None,
        lost: 0,
        last_call: None,
        lag_p50_ms: None,
        lag_share: None,
    });
    report.ranks.extend(unjudged);
    report.ranks.sort_by_key(|row| row.rank);
    report.input.ranks_expected = report.input.ranks_expected.max(report.ranks.len());
}

/// Sets `local_rank`: numbers the ranks of each host.
fn number_on_hosts(views: &mut [RankView]) {
    let mut on_host: HashMap<Arc<str>, u32> = HashMap::new();
    for view in views {
        let next = on_host.entry(view.host.clone()).or_default();
        view.local_rank = *next;
        *next += 1;
    }
}
