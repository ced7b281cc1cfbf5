//! Why: the causal chain of a rank, a group, a finding, or of the whole hang.

use super::{ViewModel, group_target, overview};
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, rest, text};
use crate::page::theme::Tone;
use crate::page::{Line, Page, plain, styled};
use rcomm_analyzer::causes::{self, Link};
use rcomm_analyzer::format::{count, rank_set};
use rcomm_recorder::model::Rank;

pub(super) fn page(model: &ViewModel<'_>, target: Option<&Target>) -> Page {
    let report = &model.snapshot.report;
    // For a waiting rank, the path to its cause comes first. The root causes and the ranks that wait because of them
    // follow.
    let waiting = match target {
        Some(Target::Rank(rank)) => report
            .waits
            .iter()
            .any(|w| w.rank == *rank)
            .then_some(*rank),
        Some(Target::Ranks(ranks)) => ranks
            .iter()
            .copied()
            .find(|rank| report.waits.iter().any(|w| w.rank == *rank)),
        Some(Target::Group(group)) => waiter(model, &[group.as_ref()]),
        Some(Target::Groups(groups)) => {
            let groups: Vec<_> = groups.iter().map(AsRef::as_ref).collect();
            waiter(model, &groups)
        }
        Some(Target::Finding(_) | Target::Job(_)) | None => None,
    };
    let roots = roots(model, target);
    let mut rows = Vec::new();
    let mut head: Vec<Line> = Vec::new();
    if let Some(rank) = waiting {
        head.push(vec![plain(format!(
            "from {} to its cause",
            model.rank_label(rank)
        ))]);
        rows.extend(path(model, rank));
    }
    let chain = causes::chain(report, &roots);
    if !roots.is_empty() {
        head.push(vec![
            plain("root: "),
            styled(named(&roots), Tone::Bad),
            plain(waiters(&chain, roots.len())),
        ]);
    }
    if let Some(at) = model.index.head.filter(|_| waiting.is_none()) {
        head.push(vec![plain(model.sentence(&report.findings[at]))]);
    }
    rows.extend(tree(model, &roots, &chain));
    Page::of(head, "why", table(rows))
}

/// The roots of the whole hang, and the ranks that wait because of them.
pub(super) fn whole(model: &ViewModel<'_>) -> Table {
    let roots = &model.index.roots;
    let chain = causes::chain(&model.snapshot.report, roots);
    Table {
        headings: Headings::Hidden,
        ..table(tree(model, roots, &chain).collect())
    }
}

fn tree<'a>(
    model: &'a ViewModel<'_>,
    roots: &'a [Rank],
    chain: &'a [Link],
) -> impl Iterator<Item = Row> + 'a {
    let causes = roots.iter().take(8).map(|&rank| root(model, rank));
    causes.chain(chain.iter().map(|link| self::link(model, link)))
}

fn table(rows: Vec<Row>) -> Table {
    Table {
        columns: vec![text("", 0), text("who", 0), rest("does what", 0)],
        rows,
        headings: Headings::Shown,
        empty: "no blocked ranks".into(),
    }
}

fn named(ranks: &[Rank]) -> String {
    let several = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{several} {}", rank_set(ranks, 8))
}

fn waiters(chain: &[Link], roots: usize) -> String {
    let n: usize = chain.iter().map(|link| link.ranks.len()).sum();
    let them = if roots == 1 { "it" } else { "them" };
    match n {
        0 => String::new(),
        1 => format!("; 1 rank waits because of {them}"),
        n => format!("; {} wait because of {them}", count(n as u64, "rank")),
    }
}

/// A rank that waits in one of these groups; `None` if there is none.
fn waiter(model: &ViewModel<'_>, groups: &[&rcomm_analyzer::GroupRef]) -> Option<Rank> {
    let waits = &model.snapshot.report.waits;
    waits
        .iter()
        .find(|wait| groups.contains(&&wait.group))
        .map(|wait| wait.rank)
}

fn roots(model: &ViewModel<'_>, target: Option<&Target>) -> Vec<Rank> {
    if let Some(Target::Finding(id)) = target {
        let findings = &model.snapshot.report.findings;
        if let Some(finding) = findings.iter().find(|f| f.id == *id)
            && !finding.culprit_ranks.is_empty()
        {
            return finding.culprit_ranks.clone();
        }
    }
    model.index.roots.clone()
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

fn path(model: &ViewModel<'_>, from: Rank) -> Vec<Row> {
    let path = causes::path(&model.snapshot.report, from);
    let step = |wait: &rcomm_analyzer::Wait| {
        let call = overview::call(model, &wait.op, wait.seq, &wait.group);
        let what = format!("waits in {call} for {}", rank_set(&wait.on, 4));
        let who = model.rank_label(wait.rank);
        let mark = Mark::new('.', Tone::Waiting);
        row(
            mark,
            "".into(),
            who,
            what,
            Tone::Waiting,
            Target::Rank(wait.rank),
        )
    };
    path.iter().map(step).collect()
}

/// The row of a root cause: the last call that it recorded.
fn root(model: &ViewModel<'_>, rank: Rank) -> Row {
    let report = model.index.report(model.snapshot, rank);
    let findings = model.snapshot.report.findings.iter();
    let frame = findings.flat_map(|f| &f.frames).find(|f| f.rank == rank);
    let mut what = match report.and_then(|r| r.last_call.as_ref()) {
        Some(call) => format!("last recorded call: {call}"),
        // The report has no last call for a silent rank.
        None => last_call(model, rank).map_or_else(
            || "recorded no call".into(),
            |call| format!("last recorded call: {call}"),
        ),
    };
    if let Some(f) = frame {
        let call_site = format!(" at {}:{} {}", f.filename, f.line, f.name);
        what.push_str(call_site.trim_end());
    }
    if let Some(phase) = report
        .and_then(|r| r.phase.as_ref())
        .filter(|p| !p.is_empty())
    {
        what.push_str(&format!(", phase {phase:?}"));
    }
    let who = model.rank_label(rank);
    let mark = Mark::new('!', Tone::Bad);
    row(
        mark,
        "root".into(),
        who,
        what,
        Tone::Bad,
        Target::Rank(rank),
    )
}

/// The newest operation in a rank's dump; `None` if the rank has none.
fn last_call(model: &ViewModel<'_>, rank: Rank) -> Option<String> {
    let dump = model.snapshot.rank(rank)?.first_dump()?;
    let entry = dump.entries.last()?;
    let group = super::rank::group_of(dump, entry)?;
    let seq = if entry.op.is_p2p() {
        entry.p2p_seq_id
    } else {
        entry.collective_seq_id
    };
    Some(overview::call(
        model,
        super::rank::op_name(dump, entry),
        seq,
        &group,
    ))
}

fn link(model: &ViewModel<'_>, link: &Link) -> Row {
    let seq = match link.seq {
        (a, b) if a == b => format!("#{a}"),
        (a, b) => format!("#{a}..{b}"),
    };
    let groups: Vec<_> = link.groups.iter().collect();
    let n = count(link.ranks.len() as u64, "rank");
    let verb = if link.ranks.len() == 1 {
        "waits"
    } else {
        "wait"
    };
    let what = format!(
        "{verb} in {} {seq} on {}",
        link.op,
        model.labels(groups.iter().copied())
    );
    let step = format!("{}└─ ", "   ".repeat(link.level.min(8) - 1));
    let who = format!("{n}: {}", rank_set(&link.ranks, 3));
    row(
        Mark::new('.', Tone::Waiting),
        step,
        who,
        what,
        Tone::Waiting,
        group_target(&groups),
    )
}
