//! One group: the rank × sequence matrix of its newest collectives, or of those around the oldest unfinished one.

use super::{Fold, ViewModel, name_ranks};
use crate::page::table::{Align, Cell, Column, Headings, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Line, Page, plain, styled};
use crate::state::index::Marked;
use rcomm_analyzer::filter::Subject;
use rcomm_analyzer::format::{count, joined, rank_set};
use rcomm_analyzer::matrix::{self, Matrix, Rows};
use rcomm_analyzer::source::Liveness;
use rcomm_analyzer::{GroupRef, GroupReport, InstanceState, RankState, SeqKind};
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text::age;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};

/// Number of spaces between two columns.
const GAP: usize = 2;
/// Approximate width of all other columns together.
const OTHER_COLUMNS_WIDTH: usize = 46;

/// What is said of members that have not issued a collective that is not overdue.
const NOT_YET: &str = "not yet issued";

pub(super) fn page(model: &ViewModel<'_>, group: &GroupRef) -> Page {
    let report = report_on(model, group);
    let newest = report.and_then(|report| report.last_seq).unwrap_or(0);
    let column_width = newest.to_string().len().max(2) + GAP;
    let room = usize::from(model.size.0).saturating_sub(OTHER_COLUMNS_WIDTH);
    let columns = (room / column_width).clamp(4, 40);
    // The progress of a silent rank since its last record is unknown, so its dumps are left out; the screen of the
    // rank shows them.
    let answering = (model.snapshot.ranks.iter()).filter(|view| !view.silent);
    let dumps = answering.flat_map(|view| view.dumps.iter().map(|dump| (view.rank, dump.as_ref())));
    let matrix = matrix::matrix(dumps, group, &model.snapshot.report, columns, Rows::Each);
    let shown = Shown {
        not_yet: not_yet(model, group),
        matrix,
    };
    let table = table(model, group, &shown);
    Page::of(head(model, group, &shown), "matrix", table)
}

/// A matrix with a row for each rank.
struct Shown {
    matrix: Matrix,
    /// Numbers of collectives that are not overdue: members that have not issued them may be on their way.
    not_yet: HashSet<u64>,
}

impl Shown {
    /// The tone of a cell in the column at this index.
    fn tone(&self, column: usize, cell: matrix::Cell) -> Tone {
        match cell {
            matrix::Cell::NeverIssued if self.not_yet.contains(&self.matrix.seqs[column]) => {
                Tone::Dim
            }
            _ => tone(cell),
        }
    }

    /// Whether collectives are pending that are not overdue, and no member has left out any other.
    fn is_early(&self) -> bool {
        let rows = self.matrix.rows.iter();
        let mut tones = rows.flat_map(|row| {
            let cells = row.cells.iter().enumerate();
            cells
                .filter(|&(_, &cell)| cell == matrix::Cell::NeverIssued)
                .map(move |(column, &cell)| self.tone(column, cell))
        });
        !self.not_yet.is_empty() && tones.all(|tone| tone == Tone::Dim)
    }
}

/// The numbers of the pending collectives of a group that are not overdue.
fn not_yet(model: &ViewModel<'_>, group: &GroupRef) -> HashSet<u64> {
    let pending = model.snapshot.report.pending();
    let group_instances = pending.filter(|instance| {
        instance.seq_kind == SeqKind::CollectiveSeqId && instance.group == *group
    });
    group_instances
        .filter(|instance| !instance.overdue)
        .map(|instance| instance.seq)
        .collect()
}

fn report_on<'a>(model: &'a ViewModel<'_>, group: &GroupRef) -> Option<&'a GroupReport> {
    let mut reports = model.snapshot.report.groups.iter();
    reports.find(|report| report.group == *group)
}

fn head(model: &ViewModel<'_>, group: &GroupRef, shown: &Shown) -> Vec<Line> {
    let report = report_on(model, group);
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
    let seqs = &shown.matrix.seqs;
    if let (Some(first), Some(last)) = (seqs.first(), seqs.last()) {
        facts.push_str(&format!("  seq {first} .. {last}"));
        if let Some(newest) = report.and_then(|it| it.last_seq).filter(|it| it > last) {
            facts.push_str(&format!(" of {newest}"));
        }
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
        let is_message = oldest.seq_kind == SeqKind::P2pSeqId;
        let failed = oldest.state == InstanceState::Failed;
        let which = if failed { "failed" } else { "oldest" };
        let mut text = format!("{which}: {} #{}", oldest.op, oldest.seq);
        text.push_str(&match is_message {
            true => format!(" of {}", name_ranks(&oldest.joined, 6)),
            false => format!(", {} joined", joined(oldest)),
        });
        if let Some(error) = &oldest.error {
            text.push_str(&format!(", {error}"));
        }
        if let Some(waited) = model.age_of(oldest).filter(|_| !failed) {
            text.push_str(&format!(", {}", age(Some(waited))));
        }
        if !oldest.missing.is_empty() {
            let missing = name_ranks(&oldest.missing, 6);
            text.push_str(&match (is_message, oldest.overdue) {
                (true, true) => format!("; {missing} never posted its {}", counterpart(&oldest.op)),
                (true, false) => {
                    format!(
                        "; {missing} has not yet posted its {}",
                        counterpart(&oldest.op)
                    )
                }
                (false, true) => format!(", never issued by {missing}"),
                (false, false) => format!(", {NOT_YET} by {missing}"),
            });
        }
        if is_message {
            text.push_str("; messages have numbers of their own, and are not in the matrix");
        }
        lines.push(vec![plain(text)]);
    }
    let mut legend = Vec::new();
    let is_early = shown.is_early();
    for (cell, letter, meaning) in matrix::Cell::LEGEND {
        let (tone, meaning) = match cell {
            matrix::Cell::NeverIssued if is_early => (Tone::Dim, &NOT_YET),
            _ => (tone(*cell), meaning),
        };
        legend.push(styled(letter.to_string(), tone));
        legend.push(styled(format!(" {meaning}  "), Tone::Dim));
    }
    lines.push(legend);
    lines
}

/// What the other end of a message posts.
fn counterpart(op: &str) -> &'static str {
    match op {
        "send" => "recv",
        "recv" => "send",
        _ => "part",
    }
}

fn tone(cell: matrix::Cell) -> Tone {
    match cell {
        matrix::Cell::Completed => Tone::Good,
        matrix::Cell::Started | matrix::Cell::Queued => Tone::Waiting,
        matrix::Cell::NeverIssued | matrix::Cell::Mismatch | matrix::Cell::Failed => Tone::Bad,
        matrix::Cell::Lost | matrix::Cell::NoRecord => Tone::Silent,
    }
}

/// Ranks that share a row: those with the same cells and in the same state or, unfolded, each one.
fn fold_rows(model: &ViewModel<'_>, matrix: &Matrix) -> Vec<(RankState, matrix::Row)> {
    let mut folds: Vec<(RankState, matrix::Row)> = Vec::new();
    let mut fold_of_key: HashMap<(RankState, &[matrix::Cell]), usize> = HashMap::new();
    for row in &matrix.rows {
        for &rank in &row.ranks {
            if !model.passes_rank(rank, &Subject::default()) {
                continue;
            }
            let state = model.index.rank(rank);
            let index = match model.fold {
                Fold::Alike => *fold_of_key
                    .entry((state, row.cells.as_slice()))
                    .or_insert(folds.len()),
                Fold::Nothing => folds.len(),
            };
            // Nothing is pending in a process that is gone.
            let view = model.snapshot.rank(rank);
            let is_gone = view.is_some_and(|view| view.liveness == Liveness::Dead);
            let since_ns = row.pending_since_ns.filter(|_| !is_gone);
            match folds.get_mut(index) {
                Some((_, known)) => {
                    known.ranks.push(rank);
                    known.pending_since_ns = match (known.pending_since_ns, since_ns) {
                        (Some(one), Some(other)) => Some(one.min(other)),
                        (one, other) => one.or(other),
                    };
                }
                None => folds.push((
                    state,
                    matrix::Row {
                        ranks: vec![rank],
                        cells: row.cells.clone(),
                        pending_since_ns: since_ns,
                    },
                )),
            }
        }
    }
    folds
}

fn table(model: &ViewModel<'_>, group: &GroupRef, shown: &Shown) -> Table {
    let mut columns = vec![text("rank", 0), number("", 0), text("host", 1)];
    columns.extend(shown.matrix.seqs.iter().map(|seq| Column {
        name: Cow::Owned(seq.to_string()),
        align: Align::Right,
        drop_order: 0,
        grows: false,
    }));
    columns.push(number("age", 0));
    columns.push(rest("last call", 2));
    let is_overdue = model.index.is_overdue(group);
    let folds = fold_rows(model, &shown.matrix);
    let rows = folds.iter().filter_map(|(state, row)| {
        let ranks = &row.ranks;
        let &first = ranks.first()?;
        let tones = || {
            let cells = row.cells.iter().enumerate();
            cells.map(move |(column, &cell)| shown.tone(column, cell))
        };
        let problem = tones().any(|tone| tone == Tone::Bad);
        if model.problems_only && !problem {
            return None;
        }
        let pending_ns = row.pending_since_ns.zip(model.as_of_ns);
        let waited = pending_ns.map(|(since, now)| (now - since) as f64 / 1e6);
        let waited = model.age_if(is_overdue, waited);
        let hosts: BTreeSet<&str> = ranks.iter().map(|&rank| model.host(rank)).collect();
        let host = match hosts.len() {
            1 => model.host(first).to_owned(),
            n => format!("{n} hosts"),
        };
        let mut cells = vec![
            Cell::number(rank_set(ranks, 3), f64::from(first)),
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
        let letters = row.cells.iter().map(|cell| cell.letter().to_string());
        cells.extend(
            letters
                .zip(tones())
                .map(|(letter, tone)| Cell::text(letter).toned(tone)),
        );
        cells.push(Cell::number(
            waited.map_or_else(String::new, |ms| age(Some(ms))),
            waited.unwrap_or(f64::NAN),
        ));
        cells.push(Cell::text(last_calls(model, ranks)));
        Some(Row {
            mark: if *state == RankState::Ok {
                crate::page::table::Mark::NONE
            } else {
                state.mark()
            },
            cells,
            tone: Tone::Plain,
            target: Some(match ranks.as_slice() {
                [one] => Target::Rank(*one),
                _ => Target::Ranks(ranks.as_slice().into()),
            }),
            problem,
        })
    });
    Table {
        rows: rows.collect(),
        columns,
        headings: Headings::Shown,
        empty: if shown.matrix.rows.is_empty() {
            let by_whom = match model.snapshot.ranks.iter().any(|view| view.silent) {
                true => " by the ranks that answer",
                false => "",
            };
            format!("no collective has been recorded in this group{by_whom}")
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
