//! Writes the findings as cards, with their consequences inside, and then the problems of the input.

use super::Text;
use crate::render::print::human::{failures, format_doubt};
use crate::render::state_name;
use rcomm_recorder::model::Rank;
use rcomm_verdict::format::{GroupNames, Ranks, counter, format_frame, format_place, group_label};
use rcomm_verdict::{Code, Finding, Report, Severity};
use std::io::{self, Write};

/// Consequences at a greater depth are left out, to bound the nesting.
const MAX_DEPTH: usize = 8;

pub(super) fn write(report: &Report, names: &GroupNames, out: &mut dyn Write) -> io::Result<()> {
    if !report.findings.is_empty() {
        writeln!(out, "<section>\n<h2>Findings</h2>")?;
        for finding in &report.findings {
            let is_in_report = |id| report.findings.iter().any(|other| other.id == id);
            let is_root = finding
                .caused_by
                .is_none_or(|cause| cause == finding.id || !is_in_report(cause));
            if is_root {
                write_card(report, finding, names, 0, out)?;
            }
        }
        writeln!(out, "</section>")?;
    }
    if !report.problems.is_empty() {
        writeln!(out, "<section>\n<h2>Input</h2>\n<ul class=\"problems\">")?;
        for problem in &report.problems {
            writeln!(
                out,
                "<li><code>{}</code> <b>{}</b> {}</li>",
                problem.code,
                Text(&problem.path),
                Text(&problem.sentence)
            )?;
        }
        writeln!(out, "</ul>\n</section>")?;
    }
    Ok(())
}

fn write_card(
    report: &Report,
    finding: &Finding,
    names: &GroupNames,
    depth: usize,
    out: &mut dyn Write,
) -> io::Result<()> {
    let class = match finding.severity {
        Severity::Error => "alarm",
        Severity::Warning => "caution",
        Severity::Note => "note",
    };
    writeln!(
        out,
        "<article class=\"{class}\" id=\"finding-{}\">\n<h3><code>{}</code> {} <span class=\"small\">{:.0} % sure</span></h3>\n<p>{}</p>",
        finding.id,
        finding.code,
        Text(&finding.name),
        finding.confidence.clamp(0.0, 1.0) * 100.0,
        Text(&finding.sentence),
    )?;
    writeln!(out, "<dl>")?;
    let mut item = |name: &str, text: &str| -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        writeln!(out, "<dt>{name}</dt><dd>{}</dd>", Text(text))
    };
    if let Some(since) = &finding.since {
        item("Since", &since.to_string())?;
    }
    item("Next", &finding.next)?;
    if !finding.culprit_ranks.is_empty() {
        item(
            role(finding, depth),
            &Ranks(&finding.culprit_ranks).to_string(),
        )?;
    }
    item("Or else", &format_doubt(finding))?;
    let waiting = finding.victim_ranks.iter().copied();
    let waiting: Vec<Rank> = waiting
        .filter(|&rank| report.failure(rank).is_none())
        .collect();
    if !waiting.is_empty() {
        let shown = Ranks(&waiting).to_string();
        let rest = finding
            .victim_count
            .saturating_sub(finding.victim_ranks.len());
        let more = if rest > 0 {
            format!(" and {rest} more")
        } else {
            String::new()
        };
        item("Waiting", &format!("{shown}{more}"))?;
    }
    for failure in failures(finding, report) {
        item("Failed", &failure)?;
    }
    if let Some(group) = &finding.group {
        item(
            "Group",
            &format!("{} of {}", group_label(group), Ranks(&group.ranks)),
        )?;
    }
    if let (Some(seq), Some(kind)) = (finding.seq, finding.seq_kind) {
        item("Sequence", &format!("{} {seq}", counter(kind)))?;
    }
    let mut stack: Option<(u32, &str)> = None;
    for frame in &finding.frames {
        let is_caller = stack.replace((frame.rank, &frame.when)) == Some((frame.rank, &frame.when));
        if is_caller {
            item("", &format!("called from {}", format_place(frame)))?;
        } else {
            item("Where", &format_frame(frame))?;
        }
    }
    for reason in &finding.ruled_out {
        item("Ruled out", reason)?;
    }
    for doubt in &finding.doubts {
        item("Not sure", doubt)?;
    }
    writeln!(out, "</dl>")?;
    if !finding.diff.is_empty() {
        write!(out, "<pre class=\"diff\">")?;
        for line in &finding.diff {
            let colored = |class: &str| format!("<span class=\"{class}\">{}</span>", Text(line));
            match line.chars().next() {
                Some('-') => writeln!(out, "{}", colored("less"))?,
                Some('+') => writeln!(out, "{}", colored("more"))?,
                _ => writeln!(out, "{}", Text(line))?,
            }
        }
        writeln!(out, "</pre>")?;
    }
    write_evidence(finding, names, out)?;
    if depth < MAX_DEPTH {
        for consequence in &report.findings {
            if consequence.caused_by == Some(finding.id) && consequence.id != finding.id {
                write_card(report, consequence, names, depth + 1, out)?;
            }
        }
    }
    writeln!(out, "</article>")
}

/// What a finding says of its ranks: only an error accuses them. That of a consequence does not.
const fn role(finding: &Finding, depth: usize) -> &'static str {
    match (finding.severity, finding.code) {
        _ if depth > 0 => "Who",
        (Severity::Error, _) => "At fault",
        (_, Code::W220) => "Late",
        (_, Code::W150) => "Silent",
        _ => "Who",
    }
}

fn write_evidence(finding: &Finding, names: &GroupNames, out: &mut dyn Write) -> io::Result<()> {
    if finding.evidence.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "<details><summary>Evidence</summary>\n<div class=\"wide\" tabindex=\"0\"><table><thead><tr><th>rank<th>record<th>operation<th>group<th>seq<th>state</tr></thead><tbody>"
    )?;
    for evidence in &finding.evidence {
        let group = evidence
            .group
            .as_ref()
            .or(finding.group.as_ref())
            .map(|group| names.name(group))
            .unwrap_or_default();
        writeln!(
            out,
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>",
            evidence.rank,
            evidence.record_id,
            Text(&evidence.op),
            Text(&group),
            evidence.seq,
            state_name(evidence.state),
        )?;
    }
    writeln!(out, "</tbody></table></div></details>")
}
