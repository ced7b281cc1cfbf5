//! Why: the causal chain of a rank, a group, a finding, or of the whole hang.

use super::{ViewModel, cut_cell, group_target, name_ranks, overview};
use crate::page::layout::wrap;
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, rest, text};
use crate::page::theme::Tone;
use crate::page::{Body, Line, Page, Pane, plain, styled};
use crate::state::index::Marked;
use rcomm_analyzer::causes::{self, Link};
use rcomm_analyzer::format::{count, rank_set};
use rcomm_analyzer::{Finding, FrameRef, RankState, seq_of};
use rcomm_recorder::model::{Entry, Frame, Rank};
use rcomm_recorder::publish::Dump;

pub(super) fn page(model: &ViewModel<'_>, target: Option<&Target>) -> Page {
    let report = &model.snapshot.report;
    // For a waiting rank, the path to its cause comes first. The root causes and the ranks that wait or failed because
    // of them follow.
    let start = match target {
        Some(Target::Rank(rank)) => report
            .waits
            .iter()
            .any(|w| w.rank == *rank)
            .then_some(*rank),
        Some(Target::Ranks(ranks)) => ranks
            .iter()
            .copied()
            .find(|rank| report.waits.iter().any(|w| w.rank == *rank)),
        Some(Target::Group(group)) => a_waiting_rank(model, &[group.as_ref()]),
        Some(Target::Groups(groups)) => {
            let groups: Vec<_> = groups.iter().map(AsRef::as_ref).collect();
            a_waiting_rank(model, &groups)
        }
        Some(Target::Finding(_) | Target::Job(_)) | None => None,
    };
    let roots = roots(model, target);
    let mut rows = Vec::new();
    let mut head: Vec<Line> = Vec::new();
    if let Some(rank) = start {
        head.push(vec![plain(format!(
            "from {} to its cause",
            model.rank_label(rank)
        ))]);
        rows.extend(path(model, rank));
    }
    let chain = causes::consequences(report, &roots);
    if !roots.is_empty() {
        let (word, mark) = cause(model, roots[0]);
        head.push(vec![
            plain(format!("{word}: ")),
            styled(name_ranks(&roots, 8), mark.tone),
            plain(count_waiting(model, &chain, roots.len())),
        ]);
    }
    // The roots are those of the requested finding or, without one, those of the whole hang.
    let finding =
        requested_finding(model, target).or(model.index.head.map(|index| &report.findings[index]));
    if let Some(finding) = finding {
        // For a waiting rank, the path to its cause takes the place of the sentence; the cause is as doubtful.
        let sentence = vec![plain(model.sentence(finding))];
        head.extend(start.is_none().then_some(sentence));
        head.extend(super::finding::doubts_if_unsure(model, finding));
        head.extend((super::finding::next(finding)).filter(|_| start.is_none()));
    }
    rows.extend(tree(model, &roots, &chain));
    Page::of(head, "why", table(rows))
}

/// The headings of the columns.
const WHO: &str = "who";
const DOES_WHAT: &str = "does what";

/// The whole text of a row, if the table cuts it.
pub(super) fn selected(model: &ViewModel<'_>, page: &Page, row: usize) -> Option<Pane> {
    let table = page.table(0)?;
    let column_index = |name| table.columns.iter().position(|column| column.name == name);
    let text = cut_cell(model, page, row, column_index(DOES_WHAT)?)?;
    let row = &table.rows[row.min(table.rows.len() - 1)];
    let who = column_index(WHO).map_or("selected", |index| row.cells[index].text.as_str());
    let line = vec![plain(text)];
    Some(Pane {
        title: who.to_owned(),
        body: Body::Text(wrap(&line, usize::from(model.size.0), usize::MAX)),
    })
}

/// The roots of the whole hang, and the ranks that wait or failed because of them.
pub(super) fn table_of_hang(model: &ViewModel<'_>) -> Table {
    let roots = model.index.roots();
    let chain = causes::consequences(&model.snapshot.report, roots);
    Table {
        headings: Headings::Hidden,
        ..table(tree(model, roots, &chain).collect())
    }
}

/// Maximum number of root causes that have a row of their own.
const MAX_ROOT_ROWS: usize = 8;

/// Rows for the root causes, then for the ranks that wait or failed because of them.
fn tree<'a>(
    model: &'a ViewModel<'_>,
    roots: &'a [Rank],
    chain: &'a [Link],
) -> impl Iterator<Item = Row> + 'a {
    let causes = roots
        .iter()
        .take(MAX_ROOT_ROWS)
        .map(|&rank| root(model, rank));
    let more = roots.get(MAX_ROOT_ROWS..).filter(|more| !more.is_empty());
    let more = more.into_iter().map(further_roots);
    causes
        .chain(more)
        .chain(chain.iter().map(|link| self::link(model, link)))
}

fn table(rows: Vec<Row>) -> Table {
    Table {
        columns: vec![text("", 0), text(WHO, 0), rest(DOES_WHAT, 0)],
        rows,
        headings: Headings::Shown,
        empty: "no rank has waited for too long".into(),
    }
}

/// The end of a sentence about the root causes: how many ranks wait, or failed, because of them; empty if none does.
fn count_waiting(model: &ViewModel<'_>, chain: &[Link], roots: usize) -> String {
    let n: usize = chain.iter().map(|link| link.ranks.len()).sum();
    let them = if roots == 1 { "it" } else { "them" };
    match n {
        0 => String::new(),
        n => {
            let ranks: Vec<Rank> = chain.iter().flat_map(|link| link.ranks.clone()).collect();
            let verb = verb(model, &ranks);
            format!("; {} {verb} because of {them}", count(n as u64, "rank"))
        }
    }
}

/// A rank that waits in one of these groups; `None` if there is none.
fn a_waiting_rank(model: &ViewModel<'_>, groups: &[&rcomm_analyzer::GroupRef]) -> Option<Rank> {
    let waits = &model.snapshot.report.waits;
    waits
        .iter()
        .find(|wait| groups.contains(&&wait.group))
        .map(|wait| wait.rank)
}

/// The finding that the user asked about, if it names culprits.
fn requested_finding<'a>(model: &ViewModel<'a>, target: Option<&Target>) -> Option<&'a Finding> {
    let Some(Target::Finding(id)) = target else {
        return None;
    };
    let findings = &model.snapshot.report.findings;
    let finding = findings.iter().find(|finding| finding.id == *id)?;
    (!finding.culprit_ranks.is_empty()).then_some(finding)
}

/// The culprits of the finding that the user asked about; without one, the root causes of the whole hang.
fn roots(model: &ViewModel<'_>, target: Option<&Target>) -> Vec<Rank> {
    requested_finding(model, target).map_or_else(
        || model.index.roots().to_vec(),
        |finding| finding.culprit_ranks.clone(),
    )
}

fn row(mark: Mark, step: String, who: String, what: String, tone: Tone, target: Target) -> Row {
    Row {
        mark,
        cells: vec![
            Cell::text(step).toned(Tone::Dim),
            Cell::text(who),
            Cell::text(what),
        ],
        tone,
        target: Some(target),
        problem: tone == Tone::Bad,
    }
}

/// One row for each wait on the way from a rank to the cause of its wait.
fn path(model: &ViewModel<'_>, start: Rank) -> Vec<Row> {
    let path = causes::path(&model.snapshot.report, start);
    let step = |wait: &rcomm_analyzer::Wait| {
        let call = overview::call(model, &wait.op, wait.seq, &wait.group);
        let verb = verb(model, &[wait.rank]);
        let what = format!("{verb} in {call} for {}", name_ranks(&wait.on, 4));
        let who = model.rank_label(wait.rank);
        let mark = mark_of(verb);
        row(
            mark,
            "".into(),
            who,
            what,
            mark.tone,
            Target::Rank(wait.rank),
        )
    };
    path.iter().map(step).collect()
}

/// What ranks do in the operations that they wait in: `failed` if each of these ranks has one that ended with an error.
pub(super) fn verb(model: &ViewModel<'_>, ranks: &[Rank]) -> &'static str {
    let report = &model.snapshot.report;
    match ranks {
        _ if ranks.iter().all(|&rank| report.failure(rank).is_some()) => "failed",
        [_] => "waits",
        _ => "wait",
    }
}

fn mark_of(verb: &str) -> Mark {
    match verb {
        "failed" => Mark::new('x', Tone::Late),
        _ => Mark::new('.', Tone::Waiting),
    }
}

/// The row of the root causes that have no row of their own.
fn further_roots(ranks: &[Rank]) -> Row {
    row(
        Mark::new('!', Tone::Bad),
        "root".into(),
        count(ranks.len() as u64, "more rank"),
        rank_set(ranks, 8),
        Tone::Bad,
        Target::Ranks(ranks.into()),
    )
}

/// The row of a root cause: the rank, what it waits in or its last recorded call, with the place in the program, and
/// its phase.
fn root(model: &ViewModel<'_>, rank: Rank) -> Row {
    let rank_report = model.index.report(model.snapshot, rank);
    let newest = model.snapshot.rank(rank).and_then(super::rank::newest);
    let call = newest.and_then(|(dump, entry)| call(model, dump, entry));
    let call = call.or_else(|| rank_report.and_then(|rank_report| rank_report.last_call.clone()));
    let mut waits = model.snapshot.report.waits.iter();
    let wait = waits.find(|wait| wait.rank == rank && !wait.on.is_empty());
    let mut what = match (wait, call) {
        // In a cycle, ranks at fault wait as well.
        (Some(wait), _) => {
            let call = overview::call(model, &wait.op, wait.seq, &wait.group);
            let verb = verb(model, &[rank]);
            format!("{verb} in {call} for {}", name_ranks(&wait.on, 4))
        }
        (None, Some(call)) => format!("last recorded call: {call}"),
        (None, None) => "recorded no call".into(),
    };
    if let Some(frame) = newest.and_then(|(dump, entry)| place(model, rank, dump, entry)) {
        // The row is short, and the rank's own screen has the whole path.
        let file = frame.filename.rsplit('/').next().unwrap_or_default();
        let call_site = format!(" at {file}:{} {}", frame.line, frame.name);
        what.push_str(call_site.trim_end());
    }
    if let Some(phase) = rank_report
        .and_then(|rank_report| rank_report.phase.as_ref())
        .filter(|p| !p.is_empty())
    {
        what.push_str(&format!(", phase `{phase}`"));
    }
    let who = model.rank_label(rank);
    let (word, mark) = cause(model, rank);
    row(mark, word.into(), who, what, mark.tone, Target::Rank(rank))
}

/// The word and the mark of a rank in which waiting begins: a rank that a warning names is not at fault, but late or
/// silent.
fn cause(model: &ViewModel<'_>, rank: Rank) -> (&'static str, Mark) {
    match model.index.rank(rank) {
        state @ (RankState::Late | RankState::Silent) => (state.word(), state.mark()),
        _ => ("root", Mark::new('!', Tone::Bad)),
    }
}

/// The frame to show for a call: the one that a finding names, else the innermost of the program's own. `None` if no
/// stack of the call was recorded.
fn place<'a>(
    model: &ViewModel<'_>,
    rank: Rank,
    dump: &'a Dump,
    entry: &Entry,
) -> Option<&'a Frame> {
    let findings = model.snapshot.report.findings.iter();
    let named: Vec<&FrameRef> = findings
        .flat_map(|finding| &finding.frames)
        .filter(|named| named.rank == rank)
        .collect();
    let is_named = |frame: &&Frame| {
        named.iter().any(|named| {
            (named.filename.as_str(), named.line, named.name.as_str())
                == (&*frame.filename, frame.line, &*frame.name)
        })
    };
    let mut frames = super::rank::frames(dump, entry);
    (frames.find(is_named)).or_else(|| super::rank::own_frame(dump, entry))
}

/// An operation as text; `None` if the record lacks its group.
fn call(model: &ViewModel<'_>, dump: &Dump, entry: &Entry) -> Option<String> {
    let group = super::rank::group_of(dump, entry)?;
    let seq = seq_of(entry);
    Some(overview::call(
        model,
        super::rank::op_name(dump, entry),
        seq,
        &group,
    ))
}

/// The row of one link of the chain: its ranks, and where they wait or failed, indented by the distance from the cause.
fn link(model: &ViewModel<'_>, link: &Link) -> Row {
    let seq = match link.seq {
        (a, b) if a == b => format!("#{a}"),
        (a, b) => format!("#{a}..{b}"),
    };
    let groups: Vec<_> = link.groups.iter().collect();
    let n = count(link.ranks.len() as u64, "rank");
    let verb = verb(model, &link.ranks);
    let what = format!(
        "{verb} in {} {seq} on {}",
        link.op,
        model.labels(groups.iter().copied())
    );
    let step = format!("{}└─ ", "   ".repeat(link.level.min(8) - 1));
    let who = format!("{n}: {}", rank_set(&link.ranks, 3));
    let mark = mark_of(verb);
    row(mark, step, who, what, mark.tone, group_target(&groups))
}
