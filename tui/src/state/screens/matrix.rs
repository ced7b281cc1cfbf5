//! One group: the rank × sequence matrix of its newest collectives.

use super::{Fold, ViewModel};
use crate::page::table::{Align, Cell, Column, Headings, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Line, Page, plain, styled};
use crate::state::index::Marked;
use rcomm_analyzer::filter::Subject;
use rcomm_analyzer::format::{count, rank_set};
use rcomm_analyzer::matrix::{self, Matrix, Rows};
use rcomm_analyzer::source::Liveness;
use rcomm_analyzer::{GroupRef, InstanceState, RankState};
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text::age;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// Width of the column of one sequence number.
const COLUMN_WIDTH: u16 = 4;
/// Approximate width of all other columns together.
const OTHER_COLUMNS_WIDTH: u16 = 46;

pub(super) fn page(model: &ViewModel<'_>, group: &GroupRef) -> Page {
    let columns =
        usize::from((model.size.0.saturating_sub(OTHER_COLUMNS_WIDTH) / COLUMN_WIDTH).clamp(4, 40));
    let rows = match model.fold {
        Fold::Alike => Rows::Folded,
        Fold::Nothing => Rows::Each,
    };
    // The progress of a silent rank since its last record is unknown, so its dumps are left out; the screen of the
    // rank shows them.
    let answering = (model.snapshot.ranks.iter()).filter(|view| !view.silent);
    let dumps = answering.flat_map(|view| view.dumps.iter().map(|dump| (view.rank, dump.as_ref())));
    let findings = &model.snapshot.report.findings;
    let matrix = matrix::matrix(dumps, group, findings, columns, rows);
    Page::of(head(model, group, &matrix), "matrix", table(model, &matrix))
}

fn head(model: &ViewModel<'_>, group: &GroupRef, matrix: &Matrix) -> Vec<Line> {
    let report = model
        .snapshot
        .report
        .groups
        .iter()
        .find(|r| r.group == *group);
    let state = model.index.group(group);
    let mut facts = format!("  {}", count(group.ranks.len() as u64, "rank"));
    if let Some(report) = report {
        if !report.backend.is_empty() {
            facts.push_str(&format!("  {}", report.backend));
        }
        if report.timeout_ms > 0 {
            facts.push_str(&format!(
                "  time-out {}",
                age(Some(report.timeout_ms as f64))
            ));
        }
    }
    if let (Some(first), Some(last)) = (matrix.seqs.first(), matrix.seqs.last()) {
        facts.push_str(&format!("  seq {first} .. {last}"));
    }
    let oldest = model.index.oldest(model.snapshot, group);
    let mut lines = vec![vec![
        styled(model.labels([group]), Tone::Title),
        plain(facts),
        plain("  "),
        styled(
            model.index.group_word(model.snapshot, group),
            state.mark().tone,
        ),
    ]];
    if let Some(oldest) = oldest {
        let expected = super::in_flight::expected(oldest);
        let joined = format!("{}/{expected}", oldest.joined.len());
        let failed = oldest.state == InstanceState::Failed;
        let which = if failed { "failed" } else { "oldest" };
        let mut text = format!("{which}: {} #{}, {joined} joined", oldest.op, oldest.seq);
        if let Some(error) = &oldest.error {
            text.push_str(&format!(", {error}"));
        }
        if let Some(waited) = model.age(oldest.age_ms).filter(|_| !failed) {
            text.push_str(&format!(", {}", age(Some(waited))));
        }
        if !oldest.missing.is_empty() {
            let missing = rank_set(&oldest.missing, 6);
            let so_far = match oldest.overdue {
                true => "never issued",
                false => "not yet issued",
            };
            text.push_str(&format!(", {so_far} by {missing}"));
        }
        lines.push(vec![plain(text)]);
    }
    let mut legend = Vec::new();
    for (cell, letter, meaning) in matrix::Cell::LEGEND {
        legend.push(styled(letter.to_string(), tone(*cell)));
        legend.push(styled(format!(" {meaning}  "), Tone::Dim));
    }
    lines.push(legend);
    lines
}

fn tone(cell: matrix::Cell) -> Tone {
    match cell {
        matrix::Cell::Completed => Tone::Good,
        matrix::Cell::Started | matrix::Cell::Queued => Tone::Waiting,
        matrix::Cell::NeverIssued | matrix::Cell::Mismatch | matrix::Cell::Failed => Tone::Bad,
        matrix::Cell::Lost | matrix::Cell::NoRecord => Tone::Silent,
    }
}

fn table(model: &ViewModel<'_>, matrix: &Matrix) -> Table {
    let mut columns = vec![text("rank", 0), number("", 0), text("host", 1)];
    let last = matrix.seqs.len().saturating_sub(1);
    let are_short = matrix.seqs.last().is_none_or(|&seq| seq < 100);
    let headings = matrix.seqs.iter().enumerate().map(|(at, seq)| {
        // Between the first and the last column, the last two digits suffice.
        let name = if at == 0 || at == last || are_short {
            seq.to_string()
        } else {
            format!("{:02}", seq % 100)
        };
        Column {
            name: Cow::Owned(name),
            align: Align::Right,
            drop_order: 0,
            grows: false,
        }
    });
    columns.extend(headings);
    columns.push(number("age", 0));
    columns.push(rest("last call", 2));
    let rows = matrix.rows.iter().filter_map(|row| {
        let ranks: Vec<_> = (row.ranks.iter().copied())
            .filter(|&rank| model.passes_rank(rank, &Subject::default()))
            .collect();
        let &first = ranks.first()?;
        let problem = row.cells.iter().any(|cell| tone(*cell) == Tone::Bad);
        if model.problems_only && !problem {
            return None;
        }
        // Nothing is pending in a process that is gone.
        let is_gone = |rank: &Rank| {
            let view = model.snapshot.rank(*rank);
            view.is_some_and(|view| view.liveness == Liveness::Dead)
        };
        let since_ns = row.pending_since_ns.filter(|_| !ranks.iter().all(is_gone));
        let pending_ns = since_ns.zip(model.as_of_ns);
        let waited = pending_ns.map(|(since, now)| (now - since) as f64 / 1e6 + model.later_ms);
        let hosts: BTreeSet<&str> = ranks.iter().map(|&rank| model.host(rank)).collect();
        let host = match hosts.len() {
            1 => model.host(first).to_owned(),
            n => format!("{n} hosts"),
        };
        let mut cells = vec![
            Cell::number(rank_set(&ranks, 3), f64::from(first)),
            Cell::number(
                if ranks.len() > 1 {
                    format!("x{}", ranks.len())
                } else {
                    String::new()
                },
                ranks.len() as f64,
            )
            .toned(Tone::Dim),
            Cell::text(host),
        ];
        cells.extend(
            row.cells
                .iter()
                .map(|&cell| Cell::text(cell.letter().to_string()).toned(tone(cell))),
        );
        cells.push(Cell::number(
            waited.map_or_else(String::new, |ms| age(Some(ms))),
            waited.unwrap_or(f64::NAN),
        ));
        cells.push(Cell::text(last_calls(model, &ranks)));
        // The worst state, so that a folded row does not hide it.
        let states = ranks.iter();
        let states = states.map(|&rank| model.index.rank(rank));
        let state = states.max().unwrap_or(RankState::Ok);
        Some(Row {
            mark: if state == RankState::Ok {
                crate::page::table::Mark::NONE
            } else {
                state.mark()
            },
            cells,
            tone: Tone::Plain,
            target: Some(match ranks.as_slice() {
                [one] => Target::Rank(*one),
                _ => Target::Ranks(ranks.into()),
            }),
            problem,
        })
    });
    Table {
        rows: rows.collect(),
        columns,
        headings: Headings::Shown,
        empty: if matrix.rows.is_empty() {
            "no collective of this group is in the records of ranks that answer".into()
        } else {
            model.none_left("rank")
        },
    }
}

/// The newest call of ranks that share a row. If they make the same call in different groups, the number of groups
/// takes the place of the group; if their calls differ, only the number of calls is shown.
fn last_calls(model: &ViewModel<'_>, ranks: &[Rank]) -> String {
    let reports = ranks
        .iter()
        .filter_map(|&rank| model.index.report(model.snapshot, rank));
    let calls: BTreeSet<&str> = reports
        .filter_map(|report| report.last_call.as_deref())
        .collect();
    let without_group: BTreeSet<&str> = (calls.iter())
        .map(|call| call.split(" on group ").next().unwrap_or(call))
        .collect();
    match (calls.len(), without_group.first()) {
        (0, _) | (_, None) => String::new(),
        (1, _) => calls.first().map_or(String::new(), |&call| call.to_owned()),
        (groups, Some(call)) if without_group.len() == 1 => format!("{call} on {groups} groups"),
        (calls, _) => format!("{calls} different calls"),
    }
}
