//! Draws the wait-for graphs of the first errors that no other finding caused, as SVG: the culprits are on the left,
//! and each column waits for the one to its left. In the graph of a cycle, each rank waits for the next one. If no rank
//! waits any more, the ranks that failed because of the culprits are drawn.
//!
//! Outside of cycles, ranks that wait in the same operation share a box, so a job of thousands of ranks has few boxes.

use super::{Text, cut};
use rcomm_recorder::model::Rank;
use rcomm_verdict::causes::{Link, consequences};
use rcomm_verdict::format::{GroupNames, Ranks, count};
use rcomm_verdict::{Finding, Report, Severity, Wait};
use std::collections::HashSet;
use std::io::{self, Write};

const BOX_WIDTH: usize = 240;
const BOX_HEIGHT: usize = 50;
const GAP_X: usize = 44;
const GAP_Y: usize = 16;
/// The number of characters in a line of a box.
const BOX_CHARS: usize = 33;
/// The largest number of boxes in a column; a last box counts the rest.
const MAX_COLUMN: usize = 12;
/// The largest number of findings that get a graph.
const MAX_GRAPHS: usize = 4;

/// A box of the graph.
struct Node {
    ranks: Vec<Rank>,
    title: String,
    text: String,
    class: &'static str,
    column: usize,
    row: usize,
}

impl Node {
    fn left(&self) -> usize {
        self.column * (BOX_WIDTH + GAP_X) + 4
    }

    fn top(&self) -> usize {
        self.row * (BOX_HEIGHT + GAP_Y) + 4
    }

    fn middle(&self) -> usize {
        self.top() + BOX_HEIGHT / 2
    }
}

pub(super) fn write(report: &Report, names: &GroupNames, out: &mut dyn Write) -> io::Result<()> {
    let roots: Vec<&Finding> = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error && finding.caused_by.is_none())
        .filter(|finding| match finding.cycle.is_empty() {
            true => !finding.culprit_ranks.is_empty(),
            // Without a recorded wait, nothing shows who of a cycle waits for whom.
            false => !report.waits.is_empty(),
        })
        .collect();
    let place = |finding: &&Finding| match finding.cycle.is_empty() {
        true => place_chain(report, finding, names),
        false => place_cycle(finding, &report.waits, names),
    };
    let graphs = roots.iter().take(MAX_GRAPHS).map(place);
    let graphs: Vec<Vec<Node>> = graphs.filter(|nodes| nodes.len() > 1).collect();
    if graphs.is_empty() {
        return Ok(());
    }
    let (title, arrows) = match report.waits.is_empty() {
        true => (
            "Who failed because of whom",
            "those who failed to those at fault",
        ),
        false => (
            "Who waits for whom",
            "those who wait to those they wait for",
        ),
    };
    writeln!(
        out,
        "<section>\n<h2>{title}</h2>\n<p class=\"small\">Arrows lead from {arrows}.</p>"
    )?;
    for nodes in &graphs {
        write_svg(nodes, &report.waits, out)?;
    }
    if roots.len() > MAX_GRAPHS {
        let rest = count((roots.len() - MAX_GRAPHS) as u64, "more error");
        writeln!(
            out,
            "<p class=\"small\">Not shown here: {rest} that no other finding caused.</p>"
        )?;
    }
    writeln!(out, "</section>")
}

/// The boxes of the culprits and of the ranks that wait or failed because of them, with at most [`MAX_COLUMN`] operations a
/// column.
fn place_chain(report: &Report, finding: &Finding, names: &GroupNames) -> Vec<Node> {
    let mut nodes = vec![Node {
        ranks: finding.culprit_ranks.clone(),
        title: Ranks(&finding.culprit_ranks).to_string(),
        text: finding.name.replace('_', " "),
        class: "root",
        column: 0,
        row: 0,
    }];
    let links = consequences(report, &finding.culprit_ranks);
    let mut rows: Vec<usize> = vec![1];
    let mut cut_links: Vec<usize> = vec![0];
    for link in &links {
        if rows.len() <= link.level {
            rows.resize(link.level + 1, 0);
            cut_links.resize(link.level + 1, 0);
        }
        if rows[link.level] < MAX_COLUMN {
            nodes.push(place_link(report, link, rows[link.level], names));
            rows[link.level] += 1;
        } else {
            cut_links[link.level] += 1;
        }
    }
    for (column, &count) in cut_links
        .iter()
        .enumerate()
        .filter(|(_, count)| **count > 0)
    {
        nodes.push(Node {
            ranks: vec![],
            title: format!("and {count} more"),
            text: "operations".to_owned(),
            class: "waits",
            column,
            row: rows[column],
        });
    }
    nodes
}

fn place_link(report: &Report, link: &Link, row: usize, names: &GroupNames) -> Node {
    let seq = match link.seq {
        (first, last) if first == last => format!("#{first}"),
        (first, last) => format!("#{first}..{last}"),
    };
    let have_failed = link
        .ranks
        .iter()
        .all(|&rank| report.failure(rank).is_some());
    let failed = if have_failed { " failed" } else { "" };
    Node {
        ranks: link.ranks.clone(),
        title: Ranks(&link.ranks).to_string(),
        text: format!("{} {seq} on {}{failed}", link.op, names.fold(&link.groups)),
        class: "waits",
        column: link.level,
        row,
    }
}

/// One box for each rank of a cycle, in the order of the cycle.
fn place_cycle(finding: &Finding, waits: &[Wait], names: &GroupNames) -> Vec<Node> {
    let (cycle, culprits) = (&finding.cycle, &finding.culprit_ranks);
    cycle
        .iter()
        .zip(cycle.iter().cycle().skip(1))
        .enumerate()
        .map(|(column, (&rank, next))| {
            let wait = waits
                .iter()
                .find(|wait| wait.rank == rank && wait.on.contains(next));
            Node {
                ranks: vec![rank],
                title: format!("rank {rank}"),
                text: wait.map_or_else(String::new, |wait| {
                    names.operation(&wait.op, wait.seq, &wait.group)
                }),
                class: if culprits.is_empty() || culprits.contains(&rank) {
                    "root"
                } else {
                    "cycle"
                },
                column,
                row: 0,
            }
        })
        .collect()
}

fn write_svg(nodes: &[Node], waits: &[Wait], out: &mut dyn Write) -> io::Result<()> {
    let width = nodes
        .iter()
        .map(|node| node.left() + BOX_WIDTH)
        .max()
        .unwrap_or(0)
        + 8;
    // Arrows that return to the first box of a cycle run below the boxes.
    let height = nodes
        .iter()
        .map(|node| node.top() + BOX_HEIGHT)
        .max()
        .unwrap_or(0)
        + 40;
    writeln!(
        out,
        "<div class=\"wide\" tabindex=\"0\"><svg class=\"graph\" role=\"img\" aria-label=\"wait-for graph\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto-start-reverse\"><path d=\"M0 0 L8 4 L0 8 z\"/></marker></defs>"
    )?;
    for (from_index, from) in nodes.iter().enumerate() {
        for (to_index, to) in nodes.iter().enumerate() {
            if from_index != to_index && waits_for(from, to, waits) {
                write_edge(from, to, out)?;
            }
        }
    }
    for node in nodes {
        let (x, y) = (node.left(), node.top());
        writeln!(
            out,
            "<g class=\"{}\"><title>{}: {}</title><rect x=\"{x}\" y=\"{y}\" width=\"{BOX_WIDTH}\" height=\"{BOX_HEIGHT}\" rx=\"6\"/>\
             <text x=\"{}\" y=\"{}\" class=\"title\">{}</text><text x=\"{}\" y=\"{}\">{}</text></g>",
            node.class,
            Text(&node.title),
            Text(&node.text),
            x + 10,
            y + 20,
            // The title is bold and larger.
            Text(&cut(&node.title, BOX_CHARS - 7)),
            x + 10,
            y + 39,
            Text(&cut(&node.text, BOX_CHARS)),
        )?;
    }
    writeln!(out, "</svg></div>")
}

/// Whether a rank of `from` waits for a rank of `to` or, if no rank waits, failed because of it. Outside of a cycle, `to`
/// must be in the next column to the left.
fn waits_for(from: &Node, to: &Node, waits: &[Wait]) -> bool {
    let is_cycle = from.class != "waits" && to.class != "waits";
    if !is_cycle && to.column + 1 != from.column {
        return false;
    }
    if waits.is_empty() {
        return true;
    }
    let awaited: HashSet<Rank> = to.ranks.iter().copied().collect();
    let waiting: HashSet<Rank> = from.ranks.iter().copied().collect();
    waits
        .iter()
        .filter(|wait| waiting.contains(&wait.rank))
        .any(|wait| wait.on.iter().any(|rank| awaited.contains(rank)))
}

fn write_edge(from: &Node, to: &Node, out: &mut dyn Write) -> io::Result<()> {
    let path = if to.column < from.column {
        let (x1, y1) = (from.left(), from.middle());
        let (x2, y2) = (to.left() + BOX_WIDTH, to.middle());
        if from.column - to.column == 1 {
            let bend = GAP_X / 2;
            format!(
                "M{x1} {y1} C{} {y1} {} {y2} {x2} {y2}",
                x1 - bend,
                x2 + bend
            )
        } else {
            // Run below the boxes in between.
            let low = from.top().max(to.top()) + BOX_HEIGHT + 24;
            let (x1, x2) = (from.left() + BOX_WIDTH / 2, to.left() + BOX_WIDTH / 2);
            let (y1, y2) = (from.top() + BOX_HEIGHT, to.top() + BOX_HEIGHT);
            format!("M{x1} {y1} C{x1} {low} {x2} {low} {x2} {y2}")
        }
    } else {
        let (x1, x2) = (from.left() + BOX_WIDTH, to.left());
        let (y1, y2) = (from.middle() + 10, to.middle() + 10);
        if to.column - from.column == 1 {
            format!("M{x1} {y1} L{x2} {y2}")
        } else {
            let low = from.top().max(to.top()) + BOX_HEIGHT + 30;
            let (x1, x2) = (from.left() + BOX_WIDTH / 2, to.left() + BOX_WIDTH / 2);
            let (y1, y2) = (from.top() + BOX_HEIGHT, to.top() + BOX_HEIGHT);
            format!("M{x1} {y1} C{x1} {low} {x2} {low} {x2} {y2}")
        }
    };
    writeln!(
        out,
        "<path class=\"edge\" d=\"{path}\" marker-end=\"url(#tip)\"/>"
    )
}
