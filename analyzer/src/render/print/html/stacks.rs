//! Writes the merged stacks as a tree, with the ranks that are in each frame and those that are not.

use super::Text;
use rcomm_recorder::model::Rank;
use rcomm_verdict::format::{Ranks, Spans};
use rcomm_verdict::{Report, StackNode};
use std::collections::BTreeSet;
use std::io::{self, Write};

/// The largest depth that is drawn; a line states that deeper frames are left out.
const MAX_DEPTH: usize = 128;

pub(super) fn write(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    if report.stacks.is_empty() {
        return Ok(());
    }
    let with_stack: BTreeSet<Rank> = report
        .stacks
        .iter()
        .flat_map(|node| node.ranks.iter().copied())
        .collect();
    let ranks = report.ranks.iter().map(|rank| rank.rank);
    let without_stack: Vec<Rank> = ranks.filter(|rank| !with_stack.contains(rank)).collect();
    let absence = if without_stack.is_empty() {
        String::new()
    } else {
        format!(" No stack of {} is recorded.", Ranks(&without_stack))
    };
    writeln!(
        out,
        "<section>\n<h2>Stacks</h2>\n<p class=\"small\">The newest recorded call of every rank that has a stack, \
         outermost frame first. <em>Not here</em>: ranks whose stacks are equal up to the caller of this frame, but \
         do not go through it.{}</p>\n<ul class=\"stacks\">",
        Text(&absence)
    )?;
    let lead = report.findings.first();
    let culprits = lead.map_or(&[][..], |finding| &finding.culprit_ranks);
    let with_stack: Vec<Rank> = with_stack.into_iter().collect();
    for node in &report.stacks {
        write_node(node, &with_stack, culprits, 0, out)?;
    }
    writeln!(out, "</ul>\n</section>")
}

/// Writes a frame and those that it called. Frames without branches stay in one list; a new list begins where ranks
/// called different frames.
fn write_node(
    node: &StackNode,
    caller_ranks: &[Rank],
    culprits: &[Rank],
    depth: usize,
    out: &mut dyn Write,
) -> io::Result<()> {
    if depth >= MAX_DEPTH {
        return writeln!(out, "<li class=\"small\">deeper frames are left out</li>");
    }
    let elsewhere = node.not_here(caller_ranks);
    // A frame is marked if a culprit is in it and a rank of the calling frame is not.
    let is_fault = !elsewhere.is_empty() && node.ranks.iter().any(|rank| culprits.contains(rank));
    write!(
        out,
        "<li{}><code>{}</code> <span class=\"small\">{}:{}</span> <span class=\"ranks\">{}</span>",
        if is_fault { " class=\"fault\"" } else { "" },
        Text(&node.name),
        Text(&node.filename),
        node.line,
        Text(&Ranks(&node.ranks).to_string()),
    )?;
    if !elsewhere.is_empty() {
        write!(
            out,
            " <span class=\"elsewhere\">not here: {}</span>",
            Text(&Spans(&elsewhere).to_string())
        )?;
    }
    writeln!(out, "</li>")?;
    match node.children.as_slice() {
        [] => Ok(()),
        [only] => write_node(only, &node.ranks, culprits, depth + 1, out),
        many => many.iter().try_for_each(|child| {
            writeln!(out, "<li><ul>")?;
            write_node(child, &node.ranks, culprits, depth + 1, out)?;
            writeln!(out, "</ul></li>")
        }),
    }
}
