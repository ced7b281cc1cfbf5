//! Prints the details of a finding below its sentence.

use super::page::{ACT, Detail, PLAIN, Page};
use super::waiters;
use crate::render::state_name;
use rcomm_verdict::format::{
    GroupNames, Ranks, count, counter, format_frame, format_place, group_label,
};
use rcomm_verdict::{Evidence, Finding, FrameRef, LogLine, Report, Severity};
use std::io;

/// A brief page shows at most this many lines of one kind.
const BRIEF_LINES: usize = 6;

/// Writes all of a finding but its sentence.
pub(super) fn write_details(
    report: &Report,
    finding: &Finding,
    names: &GroupNames,
    page: &mut Page<'_>,
) -> io::Result<()> {
    if let Some(since) = &finding.since {
        page.item("since", PLAIN, &since.to_string())?;
    }
    if !finding.next.is_empty() {
        page.item("next", ACT, &finding.next)?;
    }
    let doubt = format_doubt(finding);
    if !doubt.is_empty() {
        page.item("or else", PLAIN, &doubt)?;
    }
    page.items(
        "waiting",
        brief(
            waiters::format(finding, report, names),
            page.detail(),
            "operation",
        ),
    )?;
    page.items(
        "failed",
        brief(waiters::failures(finding, report), page.detail(), "error"),
    )?;
    page.items(
        "where",
        brief(format_stacks(&finding.frames), page.detail(), "frame"),
    )?;
    page.items("programs", &finding.diff)?;
    write_consequences(report, finding, 0, page)?;
    page.items("ruled out", &finding.ruled_out)?;
    page.items("not sure", &finding.doubts)?;
    page.items("log", brief(format_log(finding), page.detail(), "line"))?;
    if page.detail() == Detail::Verbose {
        page.items(
            "evidence",
            finding
                .evidence
                .iter()
                .map(|evidence| format_evidence(evidence, names)),
        )?;
    }
    page.item("finding", PLAIN, &format_identity(finding))
}

/// Code, confidence and place, like `E101 not_joined, 97 % sure; group dp/12 of ranks 0-3; collective_seq_id 9133`.
fn format_identity(finding: &Finding) -> String {
    let mut text = format!("{} {}", finding.code, finding.name);
    if finding.severity != Severity::Note {
        let percent = finding.confidence.clamp(0.0, 1.0) * 100.0;
        text += &format!(", {percent:.0} % sure");
    }
    if let Some(name) = &finding.recorded_op {
        text += &format!("; {name} in the records and logs");
    }
    if let Some(group) = &finding.group {
        text += &format!("; group {} of {}", group_label(group), Ranks(&group.ranks));
    }
    if let (Some(seq), Some(kind)) = (finding.seq, finding.seq_kind) {
        text += &format!("; {} {seq}", counter(kind));
    }
    text
}

/// The other sets of culprits that the records allow, like `the records allow as well: rank 3`; empty if there are
/// none.
pub fn format_doubt(finding: &Finding) -> String {
    let sets: Vec<String> = finding
        .alternatives
        .iter()
        .filter(|set| **set != finding.culprit_ranks)
        .map(|set| Ranks(set).to_string())
        .collect();
    if sets.is_empty() {
        return String::new();
    }
    let list = sets.join(", or ");
    if finding.culprit_ranks.is_empty() {
        format!("the records do not show which side is at fault: {list}")
    } else {
        format!("the records allow as well: {list}")
    }
}

/// The lines of the stacks. Of the frames of one stack after the innermost, only the places are printed.
fn format_stacks(frames: &[FrameRef]) -> Vec<String> {
    let mut previous: Option<(u32, &str)> = None;
    let mut lines = Vec::with_capacity(frames.len());
    for frame in frames {
        let stack = (frame.rank, frame.when.as_str());
        lines.push(if previous.replace(stack) == Some(stack) {
            format!("called from {}", format_place(frame))
        } else {
            format_frame(frame)
        });
    }
    lines
}

fn format_log(finding: &Finding) -> Vec<String> {
    let cite = |line: &LogLine| {
        let rank = line
            .rank
            .map_or(String::new(), |rank| format!("rank {rank}: "));
        let sign = if line.contradicts {
            "contradicts: "
        } else {
            ""
        };
        format!("{sign}{}:{}: {rank}{}", line.path, line.line, line.text)
    };
    finding.log.iter().map(cite).collect()
}

fn format_evidence(evidence: &Evidence, names: &GroupNames) -> String {
    let state = state_name(evidence.state);
    let call = match &evidence.group {
        Some(group) => names.operation(&evidence.op, evidence.seq, group),
        None => format!("{} #{}", evidence.op, evidence.seq),
    };
    format!(
        "rank {} record {}: {call}, {state}",
        evidence.rank, evidence.record_id
    )
}

/// Writes the consequences of a finding, indented by their distance from it.
fn write_consequences(
    report: &Report,
    cause: &Finding,
    depth: usize,
    page: &mut Page<'_>,
) -> io::Result<()> {
    // A report of another program could contain a loop of causes, which this limit ends.
    if depth > 8 {
        return Ok(());
    }
    let consequences: Vec<&Finding> = report
        .findings
        .iter()
        .filter(|finding| finding.caused_by == Some(cause.id) && finding.id != cause.id)
        .collect();
    let shown = match page.detail() {
        Detail::Brief => BRIEF_LINES,
        Detail::Verbose => usize::MAX,
    };
    for (index, finding) in consequences.iter().take(shown).enumerate() {
        let key = if index == 0 && depth == 0 {
            "leads to"
        } else {
            ""
        };
        let text = format!(
            "{}{} {}",
            "\u{a0}\u{a0}".repeat(depth),
            finding.code,
            finding.sentence
        );
        page.item(key, PLAIN, &text)?;
        write_consequences(report, finding, depth + 1, page)?;
    }
    if consequences.len() > shown {
        let text = format!(
            "and {}; --verbose shows all",
            count((consequences.len() - shown) as u64, "more consequence")
        );
        page.item("", PLAIN, &text)?;
    }
    Ok(())
}

/// The first lines and a count of the rest; with `--verbose`, all lines.
fn brief(mut lines: Vec<String>, detail: Detail, noun: &str) -> Vec<String> {
    if detail == Detail::Brief && lines.len() > BRIEF_LINES {
        let rest = lines.len() - BRIEF_LINES;
        lines.truncate(BRIEF_LINES);
        lines.push(format!(
            "and {}; --verbose shows all",
            count(rest as u64, &format!("more {noun}"))
        ));
    }
    lines
}
