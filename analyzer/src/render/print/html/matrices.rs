//! Writes the rank × sequence matrices: one table for each group, with equal rows folded.

use super::Text;
use super::shown::ShownRecords;
use rcomm_recorder::model::Rank;
use rcomm_verdict::format::{GroupNames, Ranks, Spans, count};
use rcomm_verdict::matrix::{Cell, Matrix, Row, Rows, matrix};
use rcomm_verdict::{Finding, GroupRef, Report, SeqKind, Severity};
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::iter;

/// At most this many sequence numbers are shown.
const MAX_COLUMNS: usize = 16;
/// At most this many rows of a matrix are shown.
const MAX_ROWS: usize = 40;
/// The class and the meaning of [`Cell::NeverIssued`] in a collective that is not overdue.
const NOT_YET: (&str, &str) = ("notyet", "not yet issued");

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
        let early = (cell == Cell::NeverIssued).then_some(NOT_YET);
        for (class, meaning) in iter::once((class(cell), meaning)).chain(early) {
            write!(
                out,
                "<span><b class=\"cell {class}\">{letter}</b> {meaning}</span> "
            )?;
        }
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
        let early = not_overdue(report, group);
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
                    write_row(&ranks, attribute, row, &table, &early, out)?;
                }
            }
        }
        writeln!(out, "</tbody></table></div>")?;
        write_messages(report, group, out)?;
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

/// Says of errors and warnings about messages of the group that the matrix does not show them: a rank that they accuse
/// may look fine in it, and another one not.
fn write_messages(report: &Report, group: &GroupRef, out: &mut dyn Write) -> io::Result<()> {
    let about_message = |finding: &&Finding| {
        finding.severity != Severity::Note
            && finding.caused_by.is_none()
            && finding.seq_kind == Some(SeqKind::P2pSeqId)
            && finding.group.as_ref() == Some(group)
    };
    for finding in report.findings.iter().filter(about_message) {
        let message = match (&finding.op, finding.seq) {
            (Some(op), Some(seq)) => format!("{op} #{seq}, a message"),
            _ => "a message".to_owned(),
        };
        writeln!(
            out,
            "<p class=\"small\">{} is about {}: messages have numbers of their own, and are not in the matrix.</p>",
            finding.code,
            Text(&message)
        )?;
    }
    Ok(())
}

/// Writes ranks with equal cells as one row.
fn write_row(
    ranks: &[Rank],
    row_attribute: &str,
    row: &Row,
    table: &Matrix,
    early: &BTreeSet<u64>,
    out: &mut dyn Write,
) -> io::Result<()> {
    write!(
        out,
        "<tr{row_attribute}><th>{}",
        Text(&Spans(ranks).to_string())
    )?;
    for ((cell, seq), op) in row.cells.iter().zip(&table.seqs).zip(&table.ops) {
        let (class, meaning) = match *cell {
            Cell::NeverIssued if early.contains(seq) => NOT_YET,
            cell => (class(cell), meaning(cell)),
        };
        write!(
            out,
            "<td class=\"cell {class}\" title=\"{} #{seq}: {meaning}\">{}",
            Text(op),
            cell.letter()
        )?;
    }
    writeln!(out, "</tr>")
}

/// The numbers of the collectives of a group that are pending and not overdue: members that have not issued them may be
/// on their way.
fn not_overdue(report: &Report, group: &GroupRef) -> BTreeSet<u64> {
    let of_group = report.pending().filter(|instance| {
        instance.seq_kind == SeqKind::CollectiveSeqId && instance.group == *group
    });
    of_group
        .filter(|instance| !instance.overdue)
        .map(|instance| instance.seq)
        .collect()
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
