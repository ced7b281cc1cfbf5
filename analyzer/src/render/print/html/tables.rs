//! Writes the operations in flight, the groups and the ranks as tables that can be folded.

use super::Text;
use rcomm_verdict::format::{
    GroupNames, Spans, age_in_words, count, duration_ms, format_ranks, grouped, joined, size,
};
use rcomm_verdict::{InstanceState, Report};
use std::io::{self, Write};

/// The largest number of rows of a table; the rest is counted.
const MAX_ROWS: usize = 256;

pub(super) fn write(report: &Report, names: &GroupNames, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "<section>\n<h2>Details</h2>")?;
    let in_flight = report.in_flight.iter().map(|instance| {
        let state = match instance.state {
            InstanceState::Running => "running",
            InstanceState::Queued => "queued",
            InstanceState::Waiting => "waiting",
            InstanceState::HalfOpen => "half open",
            InstanceState::Mismatch => "mismatch",
            InstanceState::Failed => "failed",
        };
        vec![
            age_in_words(instance).unwrap_or_else(|| "–".to_owned()),
            instance.op.clone(),
            instance.seq.to_string(),
            names.name(&instance.group),
            size(instance),
            joined(instance),
            state.to_owned(),
            match (instance.missing.as_slice(), &instance.error) {
                ([], Some(error)) => error.clone(),
                ([], None) => String::new(),
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
        "In flight or failed",
        &[
            "age",
            "operation",
            "seq",
            "group",
            "bytes",
            "joined",
            "state",
            missing,
        ],
        in_flight,
        out,
    )?;
    let groups = report.groups.iter().map(|group| {
        vec![
            names.name(&group.group),
            Spans(&group.group.ranks).to_string(),
            group.backend.clone(),
            number(group.last_seq),
            number(group.min_seq),
            group.in_flight.to_string(),
            duration(group.oldest_ms),
            duration(group.lag_p50_ms),
            duration(group.lag_p99_ms),
            group
                .busbw_gbs
                .map_or_else(|| "–".to_owned(), |gbs| format!("{gbs:.1} GB/s")),
            if group.timeout_ms == 0 {
                "–".to_owned()
            } else {
                duration_ms(group.timeout_ms as f64)
            },
        ]
    });
    table(
        "Groups",
        &[
            "group",
            "ranks",
            "backend",
            "last seq",
            "min seq",
            "in flight",
            "oldest",
            "lag p50",
            "lag p99",
            "bus bandwidth",
            "time-out",
        ],
        groups,
        out,
    )?;
    let ranks = report.ranks.iter().map(|rank| {
        vec![
            rank.rank.to_string(),
            rank.host.clone(),
            if rank.read { "yes" } else { "no record" }.to_owned(),
            rank.pending.to_string(),
            grouped(rank.lost),
            rank.phase.clone().unwrap_or_default(),
            rank.step.map_or_else(String::new, |step| step.to_string()),
            rank.last_call.clone().unwrap_or_default(),
            rank.lag_share
                .map_or_else(|| "–".to_owned(), |share| format!("{:.1} %", share * 100.0)),
        ]
    });
    table(
        "Ranks",
        &[
            "rank",
            "host",
            "read",
            "pending",
            "lost",
            "phase",
            "step",
            "last call",
            "share of the job's time lost because of it",
        ],
        ranks,
        out,
    )?;
    writeln!(out, "</section>")
}

fn duration(ms: Option<f64>) -> String {
    ms.map_or_else(|| "–".to_owned(), duration_ms)
}

fn number(n: Option<u64>) -> String {
    n.map_or_else(|| "–".to_owned(), |n| n.to_string())
}

fn table(
    name: &str,
    heads: &[&str],
    rows: impl ExactSizeIterator<Item = Vec<String>>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let row_count = rows.len();
    if row_count == 0 {
        return Ok(());
    }
    write!(
        out,
        "<details><summary>{name} <span class=\"small\">{}</span></summary>\n<div class=\"wide\" tabindex=\"0\"><table><thead><tr>",
        grouped(row_count as u64)
    )?;
    for head in heads {
        write!(out, "<th>{head}")?;
    }
    writeln!(out, "</tr></thead><tbody>")?;
    for row in rows.take(MAX_ROWS) {
        write!(out, "<tr>")?;
        for cell in row {
            write!(out, "<td>{}", Text(&cell))?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</tbody></table></div>")?;
    if row_count > MAX_ROWS {
        let rest = count((row_count - MAX_ROWS) as u64, "more row");
        writeln!(out, "<p class=\"small\">{rest} left out</p>")?;
    }
    writeln!(out, "</details>")
}
