//! Writes the rank × sequence matrices: one table for each group, with equal rows folded.

use super::Text;
use super::shown::ShownRecords;
use rcomm_recorder::model::Rank;
use rcomm_verdict::Report;
use rcomm_verdict::format::{GroupNames, Ranks, Spans, count};
use rcomm_verdict::matrix::{Cell, Matrix, Row, Rows, matrix};
use std::io::{self, Write};

/// At most this many sequence numbers are shown.
const MAX_COLUMNS: usize = 16;
/// At most this many rows of a matrix are shown.
const MAX_ROWS: usize = 40;

pub(super) fn write(
    shown: &ShownRecords<'_>,
    report: &Report,
    names: &GroupNames,
    out: &mut dyn Write,
) -> io::Result<()> {
    if shown.dumps.is_empty() || shown.groups.is_empty() {
        return Ok(());
    }
    writeln!(out, "<section>\n<h2>Collectives by rank</h2>")?;
    write!(out, "<p class=\"legend small\">")?;
    for &(cell, letter, meaning) in Cell::LEGEND {
        write!(
            out,
            "<span><b class=\"cell {}\">{letter}</b> {meaning}</span> ",
            class(cell)
        )?;
    }
    writeln!(out, "</p>")?;
    for group in &shown.groups {
        let table = matrix(
            shown.dumps.iter().copied(),
            group,
            report,
            MAX_COLUMNS,
            Rows::Folded,
        );
        if table.seqs.is_empty() {
            continue;
        }
        writeln!(
            out,
            "<h3>{} <span class=\"small\">{}</span></h3>\n<div class=\"wide\" tabindex=\"0\"><table class=\"matrix\"><thead><tr><th>ranks",
            Text(&names.name(group)),
            Text(&Ranks(&group.ranks).to_string()),
        )?;
        for (seq, op) in table.seqs.iter().zip(&table.ops) {
            write!(out, "<th title=\"{} #{seq}\"><span>{seq}</span>", Text(op))?;
        }
        writeln!(out, "</tr></thead><tbody>")?;
        for row in table.rows.iter().take(MAX_ROWS) {
            let is_culprit = |rank: &Rank| shown.culprits.contains(rank);
            let (at_fault, others): (Vec<Rank>, Vec<Rank>) =
                row.ranks.iter().copied().partition(is_culprit);
            for (ranks, attribute) in [(at_fault, " class=\"fault\""), (others, "")] {
                if !ranks.is_empty() {
                    write_row(&ranks, attribute, row, &table, out)?;
                }
            }
        }
        writeln!(out, "</tbody></table></div>")?;
        if table.rows.len() > MAX_ROWS {
            let rest = count((table.rows.len() - MAX_ROWS) as u64, "more row");
            writeln!(out, "<p class=\"small\">{rest} not shown here.</p>")?;
        }
    }
    if shown.groups_cut > 0 {
        let rest = count(shown.groups_cut as u64, "more group");
        writeln!(out, "<p class=\"small\">{rest} not shown here.</p>")?;
    }
    writeln!(out, "</section>")
}

/// Writes ranks with equal cells as one row.
fn write_row(
    ranks: &[Rank],
    row_attribute: &str,
    row: &Row,
    table: &Matrix,
    out: &mut dyn Write,
) -> io::Result<()> {
    write!(
        out,
        "<tr{row_attribute}><th>{}",
        Text(&Spans(ranks).to_string())
    )?;
    for ((cell, seq), op) in row.cells.iter().zip(&table.seqs).zip(&table.ops) {
        write!(
            out,
            "<td class=\"cell {}\" title=\"{} #{seq}: {}\">{}",
            class(*cell),
            Text(op),
            meaning(*cell),
            cell.letter()
        )?;
    }
    writeln!(out, "</tr>")
}

const fn class(cell: Cell) -> &'static str {
    match cell {
        Cell::Queued => "queued",
        Cell::Started => "started",
        Cell::Completed => "completed",
        Cell::Failed => "failed",
        Cell::NeverIssued => "never",
        Cell::Mismatch => "mismatch",
        Cell::Lost => "lost",
        Cell::NoRecord => "norecord",
    }
}

fn meaning(cell: Cell) -> &'static str {
    Cell::LEGEND
        .iter()
        .find(|(known, ..)| *known == cell)
        .map_or("", |&(.., meaning)| meaning)
}
