//! The merged stacks as a tree: where do the programs part.

use super::Text;
use crate::report::{Report, StackNode};
use crate::words::Ranks;
use std::io::{self, Write};

/// Frames drawn one under the other; deeper ones are left out with a word.
const MAX_DEPTH: usize = 128;

pub(super) fn write(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    if report.stacks.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "<section>\n<h2>Stacks</h2>\n<p class=\"small\">The newest recorded call of every rank, outermost frame first.</p>\n<ul class=\"stacks\">"
    )?;
    for node in &report.stacks {
        write_node(node, 0, out)?;
    }
    writeln!(out, "</ul>\n</section>")
}

/// A straight run of frames stays in one list; a new list begins where ranks part.
fn write_node(node: &StackNode, depth: usize, out: &mut dyn Write) -> io::Result<()> {
    if depth >= MAX_DEPTH {
        return writeln!(out, "<li class=\"small\">deeper frames left out</li>");
    }
    writeln!(
        out,
        "<li><code>{}</code> <span class=\"small\">{}:{}</span> <span class=\"ranks\">{}</span></li>",
        Text(&node.name),
        Text(&node.filename),
        node.line,
        Text(&Ranks(&node.ranks).to_string()),
    )?;
    match node.children.as_slice() {
        [] => Ok(()),
        [only] => write_node(only, depth + 1, out),
        many => many.iter().try_for_each(|child| {
            writeln!(out, "<li><ul>")?;
            write_node(child, depth + 1, out)?;
            writeln!(out, "</ul></li>")
        }),
    }
}
