//! Draws the wait-for graphs of the first errors that no other finding caused, as SVG: the culprits are on the left,
//! and each column waits for the one to its left. A cycle begins with a culprit, each of its ranks waits for the next
//! one, and the ranks that wait behind it are below and right of it. If no rank waits any more, the ranks that failed
//! because of the culprits are drawn.
//!
//! Outside of cycles, ranks that wait in the same operation share a box, so a job of thousands of ranks has few boxes.

use super::{Text, cut};
use rcomm_recorder::model::Rank;
use rcomm_verdict::causes::consequences;
use rcomm_verdict::format::{GroupNames, Ranks, count};
use rcomm_verdict::{Finding, Report, Severity, Wait};
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

const BOX_WIDTH: usize = 240;
const BOX_HEIGHT: usize = 66;
const GAP_X: usize = 44;
/// Arrows between columns that are not side by side run here.
const GAP_Y: usize = 26;
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
    /// The operation, or what happened to these ranks.
    text: String,
    /// The group of the operation; empty if there is none.
    group: String,
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
    let graphs = roots.iter().take(MAX_GRAPHS);
    let graphs = graphs.map(|finding| place(report, finding, names));
    let graphs: Vec<Vec<Node>> = graphs.filter(|nodes| nodes.len() > 1).collect();
    if graphs.is_empty() {
        return Ok(());
    }
    // The waits of ranks that have failed since are in the report, too.
    let is_over = |wait: &Wait| {
        let mut accused = roots.iter().flat_map(|finding| &finding.culprit_ranks);
        report.failure(wait.rank).is_some() || accused.any(|rank| *rank == wait.rank)
    };
    let (title, arrows) = match report.waits.iter().all(is_over) {
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

/// The boxes of the culprits, or of the ranks of a cycle, and of the ranks that wait or failed because of them, with at
/// most [`MAX_COLUMN`] operations a column.
fn place(report: &Report, finding: &Finding, names: &GroupNames) -> Vec<Node> {
    let (mut nodes, roots) = match finding.cycle.is_empty() {
        true => (vec![root(finding)], &finding.culprit_ranks),
        false => (place_cycle(finding, report, names), &finding.cycle),
    };
    let mut waits_of: HashMap<Rank, Vec<&Wait>> = HashMap::new();
    for wait in &report.waits {
        waits_of.entry(wait.rank).or_default().push(wait);
    }
    let placed = nodes.iter();
    let placed = placed.flat_map(|node| node.ranks.iter().map(|&rank| (rank, node.column)));
    let mut columns: HashMap<Rank, usize> = placed.collect();
    // Per column, the boxes and the operations that are left out.
    let mut rows: Vec<usize> = vec![1; nodes.len()];
    let mut cut_links: Vec<usize> = vec![0; nodes.len()];
    for link in consequences(report, roots) {
        let mut node = Node {
            title: Ranks(&link.ranks).to_string(),
            text: operation(report, &link.ranks, &link.op, link.seq),
            group: names.fold(&link.groups),
            ranks: link.ranks,
            class: "waits",
            column: link.level,
            row: 0,
        };
        // The ranks of a cycle have a column each.
        let waits = node.ranks.iter().filter_map(|rank| waits_of.get(rank));
        let awaited = waits.flatten().flat_map(|wait| &wait.on);
        let nearest = awaited.filter_map(|rank| columns.get(rank)).min();
        node.column = nearest.map_or(link.level, |column| column + 1);
        columns.extend(node.ranks.iter().map(|&rank| (rank, node.column)));
        if rows.len() <= node.column {
            rows.resize(node.column + 1, 0);
            cut_links.resize(node.column + 1, 0);
        }
        node.row = rows[node.column];
        if node.row < MAX_COLUMN {
            rows[node.column] += 1;
            nodes.push(node);
        } else {
            cut_links[node.column] += 1;
        }
    }
    let cut = cut_links.iter().enumerate().filter(|(_, cut)| **cut > 0);
    nodes.extend(cut.map(|(column, cut)| Node {
        ranks: vec![],
        title: format!("and {cut} more"),
        text: "operations".to_owned(),
        group: String::new(),
        class: "waits",
        column,
        row: rows[column],
    }));
    nodes
}

/// The box of the ranks that a finding without a cycle accuses.
fn root(finding: &Finding) -> Node {
    Node {
        ranks: finding.culprit_ranks.clone(),
        title: Ranks(&finding.culprit_ranks).to_string(),
        text: finding.name.replace('_', " "),
        group: String::new(),
        class: "root",
        column: 0,
        row: 0,
    }
}

/// The operation in which these ranks wait, or in which all of them have failed.
fn operation(report: &Report, ranks: &[Rank], op: &str, (first, last): (u64, u64)) -> String {
    let has_failed = |rank: &Rank| report.failure(*rank).is_some();
    let failed = if ranks.iter().all(has_failed) {
        "failed in "
    } else {
        ""
    };
    match first == last {
        true => format!("{failed}{op} #{first}"),
        false => format!("{failed}{op} #{first}..{last}"),
    }
}

/// One box for each rank of a cycle, in the order of the cycle, from a culprit on.
fn place_cycle(finding: &Finding, report: &Report, names: &GroupNames) -> Vec<Node> {
    let (mut cycle, culprits) = (finding.cycle.clone(), &finding.culprit_ranks);
    let first = cycle.iter().position(|rank| culprits.contains(rank));
    cycle.rotate_left(first.unwrap_or(0));
    let nexts = cycle.iter().cycle().skip(1);
    let place = |(column, (&rank, next)): (usize, (&Rank, &Rank))| {
        let mut waits = report.waits.iter();
        let wait = waits.find(|wait| wait.rank == rank && wait.on.contains(next));
        let is_root = culprits.is_empty() || culprits.contains(&rank);
        Node {
            ranks: vec![rank],
            title: format!("rank {rank}"),
            text: wait.map_or_else(String::new, |wait| {
                operation(report, &[rank], &wait.op, (wait.seq, wait.seq))
            }),
            group: wait.map_or_else(String::new, |wait| names.name(&wait.group)),
            class: if is_root { "root" } else { "cycle" },
            column,
            row: 0,
        }
    };
    cycle.iter().zip(nexts).enumerate().map(place).collect()
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
            if from_index != to_index && leads_to(from, to, waits) {
                write_edge(from, to, out)?;
            }
        }
    }
    for node in nodes {
        let (x, y) = (node.left(), node.top());
        let on = if node.group.is_empty() { "" } else { " on " };
        writeln!(
            out,
            "<g class=\"{}\"><title>{}: {}{on}{}</title><rect x=\"{x}\" y=\"{y}\" width=\"{BOX_WIDTH}\" height=\"{BOX_HEIGHT}\" rx=\"6\"/>",
            node.class,
            Text(&node.title),
            Text(&node.text),
            Text(&node.group),
        )?;
        // The title is bold and larger.
        let lines = [
            (20, " class=\"title\"", &node.title, BOX_CHARS - 7),
            (39, "", &node.text, BOX_CHARS),
            (55, "", &node.group, BOX_CHARS),
        ];
        let written = lines.into_iter().filter(|(.., text, _)| !text.is_empty());
        for (below, class, text, chars) in written {
            let (x, y) = (x + 10, y + below);
            write!(
                out,
                "<text x=\"{x}\" y=\"{y}\"{class}>{}</text>",
                Text(&cut(text, chars))
            )?;
        }
        writeln!(out, "</g>")?;
    }
    writeln!(out, "</svg></div>")
}

/// Whether an arrow leads from `from` to `to`: if its ranks wait for those of `to` or, if no rank waits, failed because
/// of them. Outside of a cycle, `to` must be in the next column to the left.
fn leads_to(from: &Node, to: &Node, waits: &[Wait]) -> bool {
    let is_cycle = from.class != "waits" && to.class != "waits";
    (is_cycle || to.column + 1 == from.column) && (waits.is_empty() || awaits(from, to, waits))
}

/// Whether a rank of `from` waits for a rank of `to`.
fn awaits(from: &Node, to: &Node, waits: &[Wait]) -> bool {
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
