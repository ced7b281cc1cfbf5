//! Stragglers: ranks by the share of the job's time that was lost because of them. If all ranks of a host are late,
//! they share a row.

use super::ViewModel;
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Page, plain};
use rcomm_analyzer::filter::Subject;
use rcomm_analyzer::format::{format_percent, rank_set};
use rcomm_analyzer::{Code, RankReport, Severity};
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text::millis;
use std::collections::{BTreeSet, HashMap};

/// Minimum share of the job's time, 0 to 1, that a listed rank costs; ranks that W220 names are listed in any case.
const MIN_SHARE: f64 = 0.001;

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let report = &model.snapshot.report;
    let accused: BTreeSet<Rank> = report
        .findings
        .iter()
        .filter(|f| f.code == Code::W220)
        .flat_map(|f| f.culprit_ranks.iter().copied())
        .collect();
    let listed: HashMap<Rank, &RankReport> = report
        .ranks
        .iter()
        .filter(|r| r.lag_share.unwrap_or(0.0) >= MIN_SHARE || accused.contains(&r.rank))
        .map(|r| (r.rank, r))
        .collect();
    let mut rows = Vec::new();
    for host in &model.index.hosts {
        let ranks = || {
            host.ranks
                .iter()
                .map(|&index| model.snapshot.ranks[index].rank)
        };
        let host_reports: Vec<&RankReport> = ranks()
            .filter_map(|rank| listed.get(&rank).copied())
            .filter(|report| passes(model, report))
            .collect();
        // If all ranks of a host are late, the host is considered the cause and gets one row, unless the warnings name
        // only some of them. Other late ranks have a row each.
        let named = host_reports
            .iter()
            .filter(|one| accused.contains(&one.rank));
        let all_alike = [0, host_reports.len()].contains(&named.count());
        let is_host_late = host_reports.len() > 1
            && host_reports.len() == host.ranks.len()
            && !host.name.is_empty()
            && all_alike;
        if is_host_late {
            rows.push(row(model, &host_reports, host.ranks.len(), &accused));
        } else {
            let reports = host_reports.iter();
            rows.extend(reports.map(|one| row(model, &[one], host.ranks.len(), &accused)));
        }
    }
    rows.retain(|row| row.problem || !model.problems_only);
    // Cell 5 is the share.
    rows.sort_by(|a, b| b.cells[5].value.total_cmp(&a.cells[5].value));
    let total = report.straggler_share();
    let mut head = vec![vec![plain(
        "lag: behind the first member, with waits elsewhere; share: of the job's time",
    )]];
    if total > 0.0 {
        let text = format!(
            "if the ranks with ~ arrived in time, up to {} of the job's time would be saved",
            format_percent(total)
        );
        head.push(vec![plain(text)]);
    }
    let has_error = (report.findings.iter()).any(|it| it.severity == Severity::Error);
    let empty = if has_error {
        "not judged: the job has an error".into()
    } else if listed.is_empty() {
        "no stragglers found".into()
    } else {
        model.none_left("straggler")
    };
    let table = Table {
        columns: vec![
            text("ranks", 0),
            text("host", 1),
            number("of host", 2),
            text("finding", 0),
            number("lag p50 ms", 0),
            number("share %", 0),
            rest("last call", 3),
        ],
        rows,
        headings: Headings::Shown,
        empty,
    };
    Page::of(head, "stragglers", table)
}

fn passes(model: &ViewModel<'_>, report: &RankReport) -> bool {
    model.passes_rank(
        report.rank,
        &Subject {
            lag_ms: Some(report.lag_p50_ms.unwrap_or(f64::NAN)),
            state: Some(model.index.filter_words(model.snapshot, report.rank)),
            ..Subject::default()
        },
    )
}

fn row(
    model: &ViewModel<'_>,
    late: &[&RankReport],
    on_host: usize,
    accused: &BTreeSet<Rank>,
) -> Row {
    let ranks: Vec<Rank> = late.iter().map(|report| report.rank).collect();
    let problem = ranks.iter().any(|rank| accused.contains(rank));
    let lag = late.iter().filter_map(|r| r.lag_p50_ms).reduce(f64::max);
    // Ranks of one host may share a row: their shares are added.
    let share = late.iter().filter_map(|r| r.lag_share).reduce(|a, b| a + b);
    let percent = share.map_or(f64::NAN, |share| share * 100.0);
    let (mark, tone) = if problem {
        (Mark::new('~', Tone::Late), Tone::Late)
    } else {
        (Mark::NONE, Tone::Plain)
    };
    let finding = match (problem, late.len() > 1) {
        (true, true) => "HOST LATE",
        (true, false) => "RANK LATE",
        _ => "-",
    };
    let last = late[0].last_call.clone().unwrap_or_default();
    Row {
        mark,
        cells: vec![
            Cell::number(rank_set(&ranks, 3), f64::from(ranks[0])),
            Cell::text(model.host(ranks[0])),
            match problem {
                true => Cell::number(format!("{}/{on_host}", late.len()), late.len() as f64),
                false => Cell::text(""),
            },
            Cell::text(finding),
            Cell::number(millis(lag), lag.unwrap_or(f64::NAN)),
            Cell::number(format!("{percent:.1}"), percent),
            Cell::text(last),
        ],
        tone,
        target: Some(Target::Ranks(ranks.into())),
        problem,
    }
}
