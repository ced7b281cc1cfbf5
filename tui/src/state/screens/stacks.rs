//! Call stacks, merged from the outermost frame inwards: live ones where processes can be asked, and those of the
//! newest recorded call of each rank.

use super::ViewModel;
use crate::keys::Action;
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Body, Page, Pane, styled};
use crate::state::index::Marked;
use rcomm_analyzer::filter::Subject;
use rcomm_analyzer::format::{count, rank_set};
use rcomm_analyzer::source::Liveness;
use rcomm_analyzer::{RankState, StackNode};
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text::time_of_day;

/// Maximum number of rows: thousands of distinct frames are not readable as a list.
const MAX_ROWS: usize = 4096;

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let recorded = Pane {
        title: "newest recorded call of each rank, outermost frame first".into(),
        body: Body::Table(table(
            model,
            &model.snapshot.report.stacks,
            "no recorded call site to show",
        )),
    };
    let mut panes = Vec::new();
    let mut head = Vec::new();
    if let Some((taken, at)) = model.stacks {
        let (answered, refused) = (taken.taken.len(), taken.refused.len());
        let time = time_of_day(at.wall_ns);
        let text = format!(
            "taken live at {time} UTC: {} of {answered} of {}{}",
            taken.what,
            count((answered + refused) as u64, "rank"),
            model.hint("; ", &[Action::Stacks], "takes them again")
        );
        head.push(vec![styled(text, Tone::Dim)]);
        if let Some((rank, reason)) = taken.refused.first() {
            let view = model.snapshot.rank(*rank);
            let reason = match view.is_some_and(|view| view.liveness == Liveness::Dead) {
                true => "its process is gone",
                false => reason.as_str(),
            };
            let text = format!("rank {rank}: no stack: {reason}");
            head.push(vec![styled(text, Tone::Late)]);
        }
        panes.push(Pane {
            title: "now".into(),
            body: Body::Table(table(model, &taken.stacks, "no stacks to show")),
        });
    } else {
        let text = "call sites from the records; no process was queried";
        head.push(vec![styled(text, Tone::Dim)]);
    }
    panes.push(recorded);
    Page {
        head,
        panes,
        ..Page::default()
    }
}

/// The table of merged stacks, one row per frame; at most [`MAX_ROWS`].
fn table(model: &ViewModel<'_>, stacks: &[StackNode], empty: &str) -> Table {
    let mut rows = Vec::new();
    // Depth first with an explicit stack: recorded call stacks may be deep.
    let mut todo: Vec<(usize, &StackNode)> = stacks.iter().rev().map(|node| (0, node)).collect();
    while let Some((depth, node)) = todo.pop() {
        let ranks: Vec<Rank> = (node.ranks.iter().copied())
            .filter(|&rank| {
                let subject = Subject {
                    state: Some(model.index.filter_words(model.snapshot, rank)),
                    ..Subject::default()
                };
                (!model.problems_only || model.index.rank(rank) == RankState::Root)
                    && model.passes_rank(rank, &subject)
            })
            .collect();
        if ranks.is_empty() || rows.len() >= MAX_ROWS {
            continue;
        }
        rows.push(row(model, depth, node, ranks));
        todo.extend(node.children.iter().rev().map(|child| (depth + 1, child)));
    }
    Table {
        columns: vec![
            number("count", 0),
            text("ranks", 1),
            rest("frame or thread", 0),
        ],
        rows,
        headings: Headings::Shown,
        empty: empty.into(),
    }
}

fn row(model: &ViewModel<'_>, depth: usize, node: &StackNode, ranks: Vec<Rank>) -> Row {
    // Only frames whose ranks are all root causes, or all late, are marked: a frame that other ranks share does not
    // point to the cause.
    let all_are = |state| ranks.iter().all(|&rank| model.index.rank(rank) == state);
    let root = all_are(RankState::Root);
    let indent = "  ".repeat(depth.min(30));
    let frame = match node.filename.as_str() {
        "" => format!("{indent}{}", node.name),
        file => format!("{indent}{file}:{} {}", node.line, node.name),
    };
    Row {
        mark: match root {
            true => Mark::new('!', Tone::Bad),
            false if all_are(RankState::Late) => RankState::Late.mark(),
            false => Mark::NONE,
        },
        cells: vec![
            Cell::number(ranks.len().to_string(), ranks.len() as f64),
            Cell::text(rank_set(&ranks, 3)).toned(Tone::Dim),
            Cell::text(frame),
        ],
        tone: Tone::Plain,
        target: Some(Target::Ranks(ranks.into())),
        problem: root,
    }
}
