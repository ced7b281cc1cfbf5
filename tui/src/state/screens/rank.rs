//! One rank: identity, health, what it is at fault for, the ranks it waits for and the ranks that wait for it, what to
//! look at further, the operations in flight that it has issued or that miss it, its newest operations, and the stack of
//! its newest call.

use super::timeline::{end_of, overdue_age};
use super::{ViewModel, in_flight, look_further, name_ranks, overview};
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Body, Line, Page, Pane, plain, styled};
use crate::state::index::Marked;
use rcomm_analyzer::format::{count, grouped, is_library};
use rcomm_analyzer::source::Liveness;
use rcomm_analyzer::{Code, Finding, GroupRef, RankView, Severity, seq_of, status_entry};
use rcomm_recorder::model::text::{age, duration_ms, time_of_day};
use rcomm_recorder::model::{Entry, EntryState, OpType, Rank};
use rcomm_recorder::publish::Dump;
use std::cmp::Reverse;
use std::sync::Arc;

/// Maximum number of listed operations.
const MAX_LISTED: usize = 64;

pub(super) fn page(model: &ViewModel<'_>, rank: Rank) -> Page {
    let Some(view) = model.snapshot.rank(rank) else {
        let text = format!("there is no rank {rank}");
        return Page {
            head: vec![vec![styled(text, Tone::Silent)]],
            ..Page::default()
        };
    };
    let pane = |title: &str, body| Pane {
        title: title.into(),
        body,
    };
    let mut panes: Vec<Pane> = look_further::pane(model, rank, model.size.0)
        .into_iter()
        .collect();
    panes.extend([
        pane(
            &format!("{}, over all members", in_flight::title(model)),
            // Those that it has issued, and those that wait for it.
            Body::Table(in_flight::table(model, |i| {
                let mut ranks = [&i.joined, &i.missing].into_iter();
                ranks.any(|ranks| ranks.binary_search(&rank).is_ok())
            })),
        ),
        pane(
            &format!("{LAST_OPERATIONS}{}", limits(view)),
            Body::Table(operations(model, view)),
        ),
    ]);
    let stack = stack(view);
    if !stack.is_empty() {
        let title = "stack of its newest call, innermost frame first";
        panes.push(pane(title, Body::Text(stack)));
    }
    Page {
        head: head(model, view),
        panes,
        ..Page::default()
    }
}

fn head(model: &ViewModel<'_>, view: &RankView) -> Vec<Line> {
    let rank = view.rank;
    let state = model.index.rank(rank);
    let mut who = vec![
        styled(model.rank_label(rank), Tone::Title),
        plain("  "),
        styled(state.word(), state.mark().tone),
    ];
    let mut facts = String::new();
    if let Some(dump) = view.first_dump() {
        if dump.identity.pid > 0 {
            facts.push_str(&format!("  pid {}", dump.identity.pid));
        }
        if let Some(status) = &dump.status {
            if status.step >= 0 {
                facts.push_str(&format!("  step {}", status.step));
            }
            if !status.phase.is_empty() {
                facts.push_str(&format!("  phase `{}`", status.phase));
            }
        }
    }
    facts.push_str(match view.liveness {
        // A stopped process exists, too.
        Liveness::Alive => "  process exists",
        Liveness::Dead => "  process gone",
        Liveness::Unknown => "",
    });
    who.push(plain(facts));
    let mut lines = vec![who];
    // What a rank is at fault for, or why it is late, is not in its operations.
    let blames = |finding: &&Finding| {
        let is_cause = finding.severity == Severity::Error && finding.caused_by.is_none();
        (is_cause || finding.code == Code::W220)
            && finding.culprit_ranks.contains(&rank)
            && !model.muted.contains(&finding.code)
    };
    if let Some(finding) = model.snapshot.report.findings.iter().find(blames) {
        lines.push(vec![plain(model.sentence(finding))]);
        lines.extend(super::finding::doubts_if_unsure(model, finding));
        lines.extend(super::finding::next(finding));
    }
    let waits = &model.snapshot.report.waits;
    if let Some(wait) = waits.iter().find(|wait| wait.rank == rank) {
        let call = overview::call(model, &wait.op, wait.seq, &wait.group);
        let verb = match model.snapshot.report.failure(rank) {
            Some(_) => "waited",
            None => "waits",
        };
        let text = format!("{verb} for {} in {call}", name_ranks(&wait.on, 6));
        lines.push(vec![plain(text)]);
    }
    if let Some(error) = model.snapshot.report.failure(rank) {
        let text = match error {
            "" => "its call failed, with an error that is not recorded".to_owned(),
            error => format!("its call failed: {error}"),
        };
        lines.push(vec![styled(text, Tone::Late)]);
    }
    let waiting: Vec<Rank> = waits
        .iter()
        .filter(|wait| wait.on.binary_search(&rank).is_ok())
        .map(|wait| wait.rank)
        .collect();
    if !waiting.is_empty() {
        let mut waiting = waiting;
        waiting.sort_unstable();
        waiting.dedup();
        let verb = match super::why::verb(model, &waiting) {
            "failed" => "waited",
            verb => verb,
        };
        // Others may wait for these ranks in turn.
        let text = format!("{} {verb} for it directly", name_ranks(&waiting, 6));
        lines.push(vec![plain(text)]);
    }
    lines.extend(
        view.remarks
            .iter()
            .map(|remark| vec![plain(remark.clone())]),
    );
    lines.push(vec![styled(health(model, view), Tone::Dim)]);
    if let Some(failure) = &view.failure {
        lines.push(vec![styled(
            format!("does not answer: {failure}"),
            Tone::Silent,
        )]);
    }
    lines
}

/// Describes the records of a rank: how many are held and lost, from when, and whether the rank is silent.
fn health(model: &ViewModel<'_>, view: &RankView) -> String {
    let Some(dump) = view.first_dump() else {
        return "no record of it was read".into();
    };
    // Lost entries: the ring wrapped, or this view keeps only the newest.
    let lost = model
        .index
        .report(model.snapshot, view.rank)
        .map_or(0, |r| r.lost);
    let held = count(dump.entries.len() as u64, "operation");
    let mut text = match lost {
        0 => format!("record: {held} held"),
        lost => format!("record: {held} held, {} older gone", grouped(lost)),
    };
    if dump.identity.dump_time_ns > 0 {
        text.push_str(&format!(
            ", as of {} UTC",
            time_of_day(dump.identity.dump_time_ns)
        ));
    }
    if let Some(silence) = view.silence.filter(|_| view.silent) {
        let ms = silence.as_secs_f64() * 1e3 + model.later_ms;
        text.push_str(&format!(", silent for {}", age(Some(ms))));
    }
    if !dump.identity.reason.is_empty() {
        text.push_str(&format!(" ({})", dump.identity.reason));
    }
    text
}

/// The name of an operation; if rcomm does not know it, the name that the recorder gave.
pub(super) fn op_name<'a>(dump: &'a Dump, entry: &Entry) -> &'a str {
    match dump.signatures.get(entry.signature as usize) {
        Some(signature) if entry.op == OpType::Other => &signature.op_name,
        _ => entry.op.name(),
    }
}

/// The group of an entry; `None` if the dump lacks it.
pub(super) fn group_of(dump: &Dump, entry: &Entry) -> Option<GroupRef> {
    let group = dump.groups.get(entry.group as usize)?;
    Some(GroupRef {
        name: group.info.name.clone(),
        desc: group.info.desc.clone(),
        ranks: group.info.ranks.clone(),
    })
}

/// The title of the list of a rank's operations.
pub(super) const LAST_OPERATIONS: &str = "last operations, newest first";

/// The end of the title of the list of a rank's operations: how many it has at most if there are more, and that
/// messages have numbers of their own if it has both them and collectives. Empty if there is neither to say.
fn limits(view: &RankView) -> String {
    let total: usize = view.counted().map(|dump| dump.entries.len()).sum();
    let newest = newest_entries(view);
    let is_of_messages = |entry: &Entry| entry.is_p2p || entry.op.is_p2p();
    let messages = newest
        .iter()
        .filter(|(_, entry)| is_of_messages(entry))
        .count();
    let mut text = String::new();
    if total > MAX_LISTED {
        text.push_str(&format!(", at most {MAX_LISTED}"));
    }
    if messages > 0 && messages < newest.len() {
        text.push_str(", messages numbered apart");
    }
    text
}

/// The newest operations, newest first. If no backend measured how long the completed ones ran, the time from the issue
/// to the end is shown.
pub(super) fn operations(model: &ViewModel<'_>, view: &RankView) -> Table {
    let newest = newest_entries(view);
    // A backend that does not measure may still note a time for an operation that failed.
    let measured = newest
        .iter()
        .any(|(_, entry)| entry.state == EntryState::Completed && entry.duration_ms.is_some());
    let rows = newest.into_iter().map(|(dump, entry)| {
        let ms = match measured {
            true => entry.duration_ms.map(f64::from),
            false => {
                end_of(dump, entry).map(|end_ns| (end_ns - entry.time_created_ns) as f64 / 1e6)
            }
        };
        operation(model, view, (dump, entry), ms)
    });
    Table {
        columns: vec![
            text("issued", 2),
            text("group", 0),
            number("seq", 0),
            text("op", 0),
            text("state", 0),
            number(if measured { "ran" } else { "took" }, 1),
            rest("where", 1),
        ],
        rows: rows.collect(),
        headings: Headings::Shown,
        empty: "no operation is recorded".into(),
    }
}

/// The newest operations of a rank, each with the record that holds it, newest first.
fn newest_entries(view: &RankView) -> Vec<(&Dump, &Entry)> {
    let newest = view.counted().flat_map(|dump| {
        let entries = dump.entries.iter().rev().take(MAX_LISTED);
        entries.map(move |entry| (dump.as_ref(), entry))
    });
    let mut newest: Vec<_> = newest.collect();
    // A rank may have several records. Operations of one moment stay in the order of their record.
    newest.sort_by_key(|(_, entry)| Reverse(entry.time_created_ns));
    newest.truncate(MAX_LISTED);
    newest
}

/// The word for the state of an operation on one rank, as in the matrix's legend.
pub(super) fn state_word(state: EntryState) -> &'static str {
    match state {
        EntryState::Scheduled => "queued",
        state => state.name(),
    }
}

/// The row of one operation; `took_ms` is how long it ran or took, `None` if that is unknown or it has not ended.
fn operation(
    model: &ViewModel<'_>,
    view: &RankView,
    (dump, entry): (&Dump, &Entry),
    took_ms: Option<f64>,
) -> Row {
    let recorded = status_entry(dump, entry).state;
    // Nothing is pending in a process that is gone.
    let cut_off = view.liveness == Liveness::Dead && end_of(dump, entry).is_none();
    let tone = match recorded {
        EntryState::Completed => Tone::Plain,
        EntryState::Failed => Tone::Bad,
        EntryState::Started | EntryState::Scheduled if cut_off => Tone::Late,
        EntryState::Started | EntryState::Scheduled => Tone::Waiting,
    };
    let group = group_of(dump, entry);
    let seq = seq_of(entry);
    let so_far_ms = (group
        .as_ref()
        .filter(|_| !cut_off && end_of(dump, entry).is_none()))
    .and_then(|group| overdue_age(model, group, entry));
    let call_site = own_frame(dump, entry).map_or_else(String::new, |frame| {
        format!("{}:{} {}", frame.filename, frame.line, frame.name)
    });
    let state = match entry.graph_id {
        // The operation runs whenever the graph is launched; launches are not recorded, so its state is unknown.
        Some(graph) => format!("in graph {graph}"),
        None if cut_off => "never ended".to_owned(),
        None => state_word(recorded).to_owned(),
    };
    Row {
        mark: Mark::NONE,
        cells: vec![
            Cell::number(
                time_of_day(entry.time_created_ns),
                entry.time_created_ns as f64,
            ),
            Cell::text(
                group
                    .as_ref()
                    .map_or_else(String::new, |group| model.labels([group])),
            ),
            Cell::number(seq.to_string(), seq as f64),
            Cell::text(op_name(dump, entry)),
            Cell::text(state),
            Cell::number(
                match (took_ms, so_far_ms) {
                    (Some(ms), _) => duration_ms(ms),
                    (None, Some(ms)) => format!("{} so far", duration_ms(ms)),
                    (None, None) => String::new(),
                },
                took_ms.or(so_far_ms).unwrap_or(f64::NAN),
            ),
            Cell::text(call_site),
        ],
        tone,
        target: group.map(|group| Target::Group(Arc::new(group))),
        problem: tone != Tone::Plain,
    }
}

/// The innermost recorded frame of the call of an operation that is the program's own, and not that of the library; the
/// innermost of all if there is none, and `None` without a stack.
pub(super) fn own_frame<'a>(
    dump: &'a Dump,
    entry: &Entry,
) -> Option<&'a rcomm_recorder::model::Frame> {
    let mut own = frames(dump, entry).filter(|frame| !is_library(&frame.filename));
    own.next().or_else(|| frames(dump, entry).next())
}

/// The operation that a rank issued last, with the record that holds it; `None` if no record holds any.
pub(super) fn newest(view: &RankView) -> Option<(&Dump, &Entry)> {
    let last = view
        .counted()
        .filter_map(|dump| Some((dump.as_ref(), dump.entries.last()?)));
    last.max_by_key(|(_, entry)| entry.time_created_ns)
}

/// The frames of the call of an operation, the innermost first; empty without a stack.
pub(super) fn frames<'a>(
    dump: &'a Dump,
    entry: &Entry,
) -> impl Iterator<Item = &'a rcomm_recorder::model::Frame> {
    let stack = entry
        .stack
        .and_then(|index| dump.stacks.get(index as usize));
    let frames = stack.into_iter().flatten();
    frames.filter_map(|&frame| dump.frames.get(frame as usize))
}

fn stack(view: &RankView) -> Vec<Line> {
    let newest = newest(view).into_iter();
    let frames = newest.flat_map(|(dump, entry)| frames(dump, entry));
    frames
        .map(|frame| {
            vec![plain(format!(
                "{}:{} {}",
                frame.filename, frame.line, frame.name
            ))]
        })
        .collect()
}
