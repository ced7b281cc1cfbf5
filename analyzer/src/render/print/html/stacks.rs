//! The merged stacks as a tree: where the programs part, which ranks are in a frame and which are not.

use super::Text;
use rcomm_recorder::model::Rank;
use rcomm_verdict::format::{Ranks, Spans};
use rcomm_verdict::{Report, StackNode};
use std::collections::BTreeSet;
use std::io::{self, Write};

/// Frames drawn one under the other; deeper ones are left out with a word.
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
    let bare = report.ranks.iter().map(|rank| rank.rank);
    let bare: Vec<Rank> = bare.filter(|rank| !with_stack.contains(rank)).collect();
    let bare = if bare.is_empty() {
        String::new()
    } else {
        format!(" No stack of {} is recorded.", Ranks(&bare))
    };
    writeln!(
        out,
        "<section>\n<h2>Stacks</h2>\n<p class=\"small\">The newest recorded call of every rank, outermost frame \
         first. <em>Not here</em> are ranks of the calling frame that went another way.{}</p>\n<ul class=\"stacks\">",
        Text(&bare)
    )?;
    let fault = report.findings.first();
    let fault = fault.map_or(&[][..], |finding| &finding.culprit_ranks);
    let everybody: Vec<Rank> = with_stack.into_iter().collect();
    for node in &report.stacks {
        write_node(node, &everybody, fault, 0, out)?;
    }
    writeln!(out, "</ul>\n</section>")
}

/// A straight run of frames stays in one list; a new list begins where ranks part.
fn write_node(
    node: &StackNode,
    caller: &[Rank],
    fault: &[Rank],
    depth: usize,
    out: &mut dyn Write,
) -> io::Result<()> {
    if depth >= MAX_DEPTH {
        return writeln!(out, "<li class=\"small\">deeper frames left out</li>");
    }
    let elsewhere = node.not_here(caller);
    // Marked where those at fault went one way and others another.
    let parts = !elsewhere.is_empty() && node.ranks.iter().any(|rank| fault.contains(rank));
    write!(
        out,
        "<li{}><code>{}</code> <span class=\"small\">{}:{}</span> <span class=\"ranks\">{}</span>",
        if parts { " class=\"fault\"" } else { "" },
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
        [only] => write_node(only, &node.ranks, fault, depth + 1, out),
        many => many.iter().try_for_each(|child| {
            writeln!(out, "<li><ul>")?;
            write_node(child, &node.ranks, fault, depth + 1, out)?;
            writeln!(out, "</ul></li>")
        }),
    }
}
