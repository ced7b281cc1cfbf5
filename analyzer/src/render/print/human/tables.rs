//! Prints the tables of `--verbose`: operations in flight, groups, ranks and the merged stacks.

use super::page::{ACT, DIM, Layout, PLAIN, Page};
use rcomm_recorder::model::Rank;
use rcomm_verdict::format::{
    GroupNames, Spans, age_in_words, duration_ms, format_ranks, joined, size,
};
use rcomm_verdict::{InstanceState, Report, StackNode};
use std::io::{self, Write};
use textwrap::core::display_width;

/// The largest number of rows of a table of a report or a record; the rest is counted.
const MAX_ROWS: usize = 64;

/// The largest depth of the stack tree that is drawn.
const MAX_DEPTH: usize = 64;

/// Writes a table with a title, which may be empty; writes nothing if there is no row.
///
/// Every row must have as many cells as `heads`. All rows are written, and lines are cut at the width of the page.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write_table(
    title: &str,
    heads: &[&str],
    rows: Vec<Vec<String>>,
    layout: &Layout,
    out: &mut dyn Write,
) -> io::Result<()> {
    write_rows(title, heads, &rows, &mut Page::new(layout, out))
}

pub(super) fn write(report: &Report, names: &GroupNames, page: &mut Page<'_>) -> io::Result<()> {
    write_in_flight(report, names, page)?;
    write_groups(report, names, page)?;
    write_ranks(report, page)?;
    if !report.stacks.is_empty() {
        title("stacks of the newest calls, outermost first", page)?;
        for node in &report.stacks {
            write_stack(node, &[], 0, 0, page)?;
        }
    }
    Ok(())
}

fn write_in_flight(report: &Report, names: &GroupNames, page: &mut Page<'_>) -> io::Result<()> {
    let rows = report.in_flight.iter().map(|instance| {
        let state = match instance.state {
            InstanceState::Running => "running",
            InstanceState::Queued => "queued",
            InstanceState::Waiting => "waiting",
            InstanceState::HalfOpen => "half open",
            InstanceState::Mismatch => "mismatch",
            InstanceState::Failed => "failed",
        };
        vec![
            age_in_words(instance).unwrap_or_else(|| "-".to_owned()),
            names.operation(&instance.op, instance.seq, &instance.group),
            size(instance),
            joined(instance),
            state.to_owned(),
            match (instance.missing.as_slice(), &instance.error) {
                ([], Some(error)) => error.clone(),
                ([], None) => "-".to_owned(),
                (missing, Some(error)) => format!("{}; {error}", format_ranks(missing)),
                (missing, None) => format_ranks(missing),
            },
        ]
    });
    let missing = match report.in_flight.iter().any(|it| it.error.is_some()) {
        true => "missing or error",
        false => "missing",
    };
    table(
        "in flight or failed, oldest first",
        &["age", "operation", "bytes", "joined", "state", missing],
        rows,
        page,
    )
}

fn write_groups(report: &Report, names: &GroupNames, page: &mut Page<'_>) -> io::Result<()> {
    let rows = report.groups.iter().map(|group| {
        vec![
            names.name(&group.group),
            Spans(&group.group.ranks).to_string(),
            match (group.last_seq, group.min_seq) {
                (Some(last), Some(min)) => format!("{last}/{min}"),
                (Some(last), None) => format!("{last}/-"),
                _ => "-".to_owned(),
            },
            group.in_flight.to_string(),
            group.oldest_ms.map_or_else(|| "-".to_owned(), duration_ms),
            group.lag_p50_ms.map_or_else(|| "-".to_owned(), duration_ms),
            if group.timeout_ms == 0 {
                "-".to_owned()
            } else {
                duration_ms(group.timeout_ms as f64)
            },
        ]
    });
    table(
        "groups",
        &[
            "group",
            "ranks",
            "seq last/min",
            "in flight",
            "oldest",
            "lag p50",
            "time-out",
        ],
        rows,
        page,
    )
}

fn write_ranks(report: &Report, page: &mut Page<'_>) -> io::Result<()> {
    let rows = report.ranks.iter().map(|rank| {
        vec![
            rank.rank.to_string(),
            if rank.host.is_empty() {
                "-".to_owned()
            } else {
                rank.host.clone()
            },
            if rank.read {
                rank.pending.to_string()
            } else {
                "no record".to_owned()
            },
            rank.lost.to_string(),
            rank.phase.clone().unwrap_or_else(|| "-".to_owned()),
            rank.last_call.clone().unwrap_or_else(|| "-".to_owned()),
        ]
    });
    table(
        "ranks",
        &["rank", "host", "pending", "lost", "phase", "last call"],
        rows,
        page,
    )
}

fn title(text: &str, page: &mut Page<'_>) -> io::Result<()> {
    page.blank()?;
    page.row(ACT, text)
}

/// Writes at most [`MAX_ROWS`] rows of a table, and counts the rest.
pub(super) fn table(
    name: &str,
    heads: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
    page: &mut Page<'_>,
) -> io::Result<()> {
    let mut rows: Vec<Vec<String>> = rows.collect();
    let cut = rows.len().saturating_sub(MAX_ROWS);
    rows.truncate(MAX_ROWS);
    write_rows(name, heads, &rows, page)?;
    if cut > 0 {
        page.row(DIM, &format!("  and {cut} more"))?;
    }
    Ok(())
}

fn write_rows(
    name: &str,
    heads: &[&str],
    rows: &[Vec<String>],
    page: &mut Page<'_>,
) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let widths: Vec<usize> = (0..heads.len())
        .map(|column| {
            rows.iter()
                .map(|row| display_width(&row[column]))
                .chain([display_width(heads[column])])
                .max()
                .unwrap_or(0)
        })
        .collect();
    if !name.is_empty() {
        title(name, page)?;
    }
    let heads: Vec<String> = heads.iter().map(|&head| head.to_owned()).collect();
    page.row(DIM, &join(&heads, &widths))?;
    for row in rows {
        page.row(PLAIN, &join(row, &widths))?;
    }
    Ok(())
}

fn join(cells: &[String], widths: &[usize]) -> String {
    let mut line = String::from(" ");
    for (cell, width) in cells.iter().zip(widths) {
        line.push(' ');
        line.push_str(cell);
        line.extend(std::iter::repeat_n(
            ' ',
            1 + width.saturating_sub(display_width(cell)),
        ));
    }
    line
}

/// The last two parts of a path: enough to recognize the file, and short enough to leave room for the ranks.
pub(super) fn tail_of(path: &str) -> &str {
    let mut slashes = path.rmatch_indices('/');
    match slashes.nth(1) {
        Some((slash, _)) if slash > 0 => &path[slash + 1..],
        _ => path,
    }
}

/// Writes a frame and those that it called, each with the ranks that are in it and those of the calling frame that are
/// not.
fn write_stack(
    node: &StackNode,
    caller_ranks: &[Rank],
    depth: usize,
    indent: usize,
    page: &mut Page<'_>,
) -> io::Result<()> {
    let margin = "  ".repeat(indent + 1);
    if depth >= MAX_DEPTH {
        return page.row(DIM, &format!("{margin}(deeper frames left out)"));
    }
    let elsewhere = node.not_here(caller_ranks);
    let elsewhere = if elsewhere.is_empty() {
        String::new()
    } else {
        format!(", not {}", Spans(&elsewhere))
    };
    let text = format!(
        "{margin}{} ({}:{})  [{}{elsewhere}]",
        node.name,
        tail_of(&node.filename),
        node.line,
        Spans(&node.ranks),
    );
    page.row(PLAIN, &text)?;
    // Frames without branches stay in one column; the indent grows where ranks called different frames.
    let step = usize::from(node.children.len() > 1);
    for child in &node.children {
        write_stack(child, &node.ranks, depth + 1, indent + step, page)?;
    }
    Ok(())
}
