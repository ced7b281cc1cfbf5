//! Operations in flight: one row per collective or message, joined over its ranks. Equal operations of groups with
//! the same description share a row, unless the user unfolds them.

use super::{Fold, ViewModel, cut_cell, group_target, name_ranks};
use crate::page::layout::wrap;
use crate::page::table::{Cell, Column, Headings, Mark, Row, Table, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Body, Page, Pane, plain};
use rcomm_analyzer::filter::Subject;
use rcomm_analyzer::format::{arrived, count, joined};
use rcomm_analyzer::{GroupState, InstanceReport, InstanceState, Severity, Verdict};
use rcomm_recorder::model::text::{age, narrow_bytes};
use std::collections::HashMap;

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    Page::of(vec![], title(model), table(model, |_| true))
}

/// Heading of the column of missing ranks, and what it begins with if operations have failed.
const MISSING: &str = "missing";

/// The missing ranks or the error of the operations in a row, which the table cuts; `None` if they fit.
pub(super) fn selected(model: &ViewModel<'_>, page: &Page, row: usize) -> Option<Pane> {
    let columns = &page.table(0)?.columns;
    let is_wanted = |column: &Column| column.name.starts_with(MISSING);
    let index = columns.iter().position(is_wanted)?;
    let line = vec![plain(cut_cell(model, page, row, index)?)];
    Some(Pane {
        title: columns[index].name.clone().into_owned(),
        body: Body::Text(wrap(&line, usize::from(model.size.0), usize::MAX)),
    })
}

/// The title of the table.
pub(super) fn title(model: &ViewModel<'_>) -> &'static str {
    match has_failure(model) {
        true => "in flight, or failed",
        false => "in flight",
    }
}

/// Whether an operation of the list has failed.
fn has_failure(model: &ViewModel<'_>) -> bool {
    let mut instances = model.snapshot.report.in_flight.iter();
    instances.any(|instance| instance.state == InstanceState::Failed)
}

/// The table of the operations that pass `wanted` and the filter.
pub(super) fn table(model: &ViewModel<'_>, wanted: impl Fn(&InstanceReport) -> bool) -> Table {
    let hangs = matches!(
        model.snapshot.report.verdict,
        Verdict::Stuck | Verdict::Mismatch
    );
    let mut folds: Vec<Vec<&InstanceReport>> = Vec::new();
    let mut fold_of_key: HashMap<_, usize> = HashMap::new();
    for instance in &model.snapshot.report.in_flight {
        let problem = is_problem(instance, hangs);
        if !wanted(instance) || (model.problems_only && !problem) || !passes(model, instance) {
            continue;
        }
        let key = (
            instance.group.desc.as_str(),
            instance.op.as_str(),
            instance.seq,
            (instance.state, instance.overdue),
            (joined(instance), instance.missing.len()),
        );
        let desc = &instance.group.desc;
        let alike = model.fold == Fold::Alike && !desc.is_empty() && desc != "undefined";
        match fold_of_key.get(&key) {
            Some(&index) if alike => folds[index].push(instance),
            _ => {
                if alike {
                    fold_of_key.insert(key, folds.len());
                }
                folds.push(vec![instance]);
            }
        }
    }
    Table {
        columns: vec![
            number("age", 0),
            text("group", 0),
            number("", 0),
            number("seq", 0),
            text("op", 0),
            number("bytes", 3),
            number("joined", 0),
            text("state", 0),
            rest(
                match has_failure(model) {
                    true => "missing or error",
                    false => MISSING,
                },
                0,
            ),
        ],
        rows: folds.iter().map(|fold| row(model, fold, hangs)).collect(),
        headings: Headings::Shown,
        empty: if model.snapshot.report.in_flight.is_empty() {
            "nothing is in flight".into()
        } else if model.filter.is_empty() && !model.problems_only {
            "nothing is in flight here".into()
        } else {
            model.none_left("operation in flight")
        },
    }
}

fn passes(model: &ViewModel<'_>, instance: &InstanceReport) -> bool {
    model.passes_group(
        &instance.group,
        &Subject {
            op: Some(&instance.op),
            state: Some(instance.state.filter_words()),
            age_ms: Some(model.age_of(instance).unwrap_or(f64::NAN)),
            seq: Some(instance.seq),
            bytes: Some(instance.bytes),
            ..Subject::default()
        },
    )
}

/// Whether the operation has failed, or ranks wait in it in a job that is stuck or has a mismatch (`hangs`).
fn is_problem(instance: &InstanceReport, hangs: bool) -> bool {
    instance.state == InstanceState::Failed || hangs && instance.is_blocked()
}

/// Whether the operation is the cause, and not one that is behind it in its group.
fn is_blamed(model: &ViewModel<'_>, instance: &InstanceReport) -> bool {
    let findings = model.snapshot.report.findings.iter();
    let mut named = findings
        .filter(|finding| finding.severity == Severity::Error && finding.caused_by.is_none())
        .filter(|finding| finding.group.as_ref() == Some(&instance.group))
        .filter_map(|finding| finding.seq.zip(finding.seq_kind))
        .peekable();
    let is_any = named.peek().is_none();
    let is_bad = model.index.group(&instance.group) == GroupState::Bad;
    is_bad && (is_any || named.any(|it| it == (instance.seq, instance.seq_kind)))
}

/// The size of an operation; if its members passed different ones that must be equal, the least and the largest.
fn size_cell(instance: &InstanceReport) -> Cell {
    let largest = narrow_bytes(instance.bytes);
    let value = instance.bytes as f64;
    match instance.least_bytes {
        None => Cell::number(largest, value),
        Some(least) => {
            Cell::number(format!("{} or {largest}", narrow_bytes(least)), value).toned(Tone::Bad)
        }
    }
}

fn row(model: &ViewModel<'_>, fold: &[&InstanceReport], hangs: bool) -> Row {
    let first = fold[0];
    let failed = first.state == InstanceState::Failed;
    // An operation that has failed grows no older.
    let ages = fold.iter().filter_map(|i| model.age_of(i));
    let oldest = ages.filter(|_| !failed).reduce(f64::max);
    let problem = is_problem(first, hangs);
    let blamed = is_blamed(model, first);
    let (mark, tone) = match (problem, blamed) {
        (true, false) if failed => (Mark::new('x', Tone::Late), Tone::Late),
        (true, true) => (Mark::new('!', Tone::Bad), Tone::Bad),
        (true, false) => (Mark::new('.', Tone::Waiting), Tone::Waiting),
        _ => (Mark::NONE, Tone::Plain),
    };
    let missing = match fold {
        [one] => error_and_missing(one),
        [first, others @ ..]
            if let Some(error) = &first.error
                && others.iter().all(|other| other.error == first.error) =>
        {
            error.clone()
        }
        _ if first.missing.is_empty() => String::new(),
        _ => {
            let ranks = count(first.missing.len() as u64, "rank");
            not_yet(first, format!("{ranks} of each"))
        }
    };
    let groups: Vec<_> = fold.iter().map(|instance| &instance.group).collect();
    let fold_count = if fold.len() > 1 {
        format!("x{}", fold.len())
    } else {
        String::new()
    };
    Row {
        mark,
        cells: vec![
            Cell::number(age(oldest), oldest.unwrap_or(f64::NAN)),
            Cell::text(model.labels(groups.iter().copied())),
            Cell::text(fold_count).toned(Tone::Dim),
            Cell::number(first.seq.to_string(), first.seq as f64),
            Cell::text(first.op.as_str()),
            size_cell(first),
            Cell::number(joined(first), arrived(first) as f64),
            Cell::text(first.state.word().replace('_', " ")),
            Cell::text(missing),
        ],
        tone,
        target: Some(group_target(&groups)),
        problem,
    }
}

/// The error of an operation that has failed, and the ranks that have not joined: `rank 517` under the heading
/// [`MISSING`], `rank 517 not yet` while the operation is not overdue. Ranks whose progress is unknown are listed as
/// not known.
fn error_and_missing(instance: &InstanceReport) -> String {
    let mut parts = Vec::new();
    parts.extend(instance.error.clone());
    if !instance.missing.is_empty() {
        let ranks = name_ranks(&instance.missing, 4);
        parts.push(match instance.error {
            None => not_yet(instance, ranks),
            Some(_) => format!("{MISSING}: {ranks}"),
        });
    }
    if !instance.unknown.is_empty() {
        parts.push(format!("{} not known", name_ranks(&instance.unknown, 4)));
    }
    parts.join(", ")
}

/// The ranks that an operation misses, with `not yet` if they may be on their way: it is neither overdue nor failed.
fn not_yet(instance: &InstanceReport, ranks: String) -> String {
    match instance.overdue || instance.state == InstanceState::Failed {
        true => ranks,
        false => format!("{ranks} not yet"),
    }
}
