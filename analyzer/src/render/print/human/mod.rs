//! Prints the report as text.
//!
//! The first line is the verdict with its sentence. Below it are the details of the finding, such as its beginning, the
//! next step, the waiting ranks, the culprit's stack, the consequences, and what was ruled out.
//! Further findings follow, then notes and problems of the input, of which a brief page prints ten, and on a verbose
//! page tables. The last lines state what was read, and name the command that explains the first finding's code.
//!
//! Colors are ANSI sequences; for output without colors, wrap the writer in `anstream::AutoStream`. Colors never carry
//! meaning alone.

mod difference;
mod explanation;
mod finding;
mod page;
mod record;
mod tables;
mod waiters;

pub use difference::write_difference;
pub use explanation::{write_codes, write_explanation};
pub use finding::format_doubt;
pub use page::{Detail, Layout};
pub use record::write_record;
pub use tables::write_table;
pub(crate) use waiters::failures;

use page::{ALARM, CAUTION, DIM, FINE, Page};
use rcomm_verdict::format::{GroupNames, count, grouped, printable};
use rcomm_verdict::{Code, Finding, Input, LogInput, Place, Report, Severity, Verdict};
use std::io::{self, Write};

/// Writes the report.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write(report: &Report, layout: &Layout, out: &mut dyn Write) -> io::Result<()> {
    let mut page = Page::new(layout, out);
    let names = GroupNames::of(report);
    let roots: Vec<&Finding> = report
        .findings
        .iter()
        .filter(|finding| is_root(report, finding) && finding.severity != Severity::Note)
        .collect();
    let (first, others) = match roots.split_first() {
        Some((first, others)) if report.lead().is_some() => (Some(*first), others),
        _ => (undecided(report), roots.as_slice()),
    };
    match first {
        None => {
            write_without_finding(report, &mut page)?;
            write_places(report, &mut page)?;
        }
        Some(first) => {
            write_headline(report, first, &mut page)?;
            finding::write_details(report, first, &names, &mut page)?;
            if !others.is_empty() {
                let more = count(others.len() as u64, "more finding");
                page.item("also", CAUTION, &format!("{more} below"))?;
            }
        }
    }
    for other in others {
        page.blank()?;
        let (head, style) = match other.severity {
            Severity::Error => ("ALSO", ALARM),
            Severity::Warning | Severity::Note => ("WARNING", CAUTION),
        };
        page.headline(head, style, &other.sentence)?;
        finding::write_details(report, other, &names, &mut page)?;
    }
    write_notes(report, &mut page)?;
    if layout.detail == Detail::Verbose {
        tables::write(report, &names, &mut page)?;
    }
    write_footer(report, roots.first().map(|finding| finding.code), &mut page)
}

/// The note to show first if logs were read but do not decide: its text states what the logs show.
fn undecided(report: &Report) -> Option<&Finding> {
    let is_undecided = report.verdict == Verdict::Inconclusive && report.input.logs.is_some();
    let first = report.findings.first().filter(|_| is_undecided)?;
    (first.severity == Severity::Note).then_some(first)
}

/// Whether the finding is not a consequence of another one. A cause that this report does not contain is ignored.
fn is_root(report: &Report, finding: &Finding) -> bool {
    finding.caused_by.is_none_or(|cause| {
        cause == finding.id || !report.findings.iter().any(|other| other.id == cause)
    })
}

/// The verdict in capitals, and its color.
fn verdict_word(report: &Report) -> (String, anstyle::Style) {
    let style = match report.verdict {
        Verdict::Healthy | Verdict::Running if report.lead().is_some() => CAUTION,
        verdict => verdict_style(verdict),
    };
    (report.word().to_uppercase(), style)
}

/// The color of a verdict.
const fn verdict_style(verdict: Verdict) -> anstyle::Style {
    match verdict {
        Verdict::Healthy | Verdict::Running | Verdict::Ended | Verdict::Cancelled => FINE,
        Verdict::Stuck | Verdict::Mismatch | Verdict::Crashed => ALARM,
        Verdict::Slow | Verdict::Inconclusive => CAUTION,
    }
}

fn write_headline(report: &Report, first: &Finding, page: &mut Page<'_>) -> io::Result<()> {
    let (word, style) = verdict_word(report);
    page.headline(&word, style, &first.sentence)
}

/// Writes the headline of a report without an error or a warning.
fn write_without_finding(report: &Report, page: &mut Page<'_>) -> io::Result<()> {
    let (word, style) = verdict_word(report);
    let pending = report.in_flight.len() as u64;
    if let Some(end) = &report.end {
        return page.headline(&word, style, &end.sentence);
    }
    let sentence = match report.verdict {
        Verdict::Healthy => "nothing recorded is pending or wrong".to_owned(),
        // The pending operations are messages, which no list of the report has; or those of a live view have just
        // ended.
        Verdict::Running if pending == 0 => "nothing is overdue".to_owned(),
        Verdict::Running => match oldest_pending(report) {
            Some(age) => format!(
                "{} pending, the oldest for {age}; none is overdue",
                count_are(pending, "operation")
            ),
            None => format!(
                "{} pending, none is overdue",
                count_are(pending, "operation")
            ),
        },
        Verdict::Inconclusive if report.input.ranks_read == 0 && !report.now.is_empty() => {
            "no record of any rank could be read, so there is nothing to judge; where the ranks were, as \
             their stacks show, is listed below"
                .to_owned()
        }
        Verdict::Inconclusive if report.input.ranks_read == 0 => {
            "no record of any rank could be read, so there is nothing to judge".to_owned()
        }
        Verdict::Inconclusive if let Some(silence) = report.silence() => silence.to_owned(),
        Verdict::Inconclusive => {
            "the records do not show whether the job is stuck; what is missing is listed below"
                .to_owned()
        }
        // These verdicts come with a finding, but perhaps not in the report of another program.
        Verdict::Stuck
        | Verdict::Mismatch
        | Verdict::Slow
        | Verdict::Ended
        | Verdict::Cancelled
        | Verdict::Crashed => "the report names no cause".to_owned(),
    };
    page.headline(&word, style, &sentence)
}

/// Writes where the ranks were when their stacks were taken.
fn write_places(report: &Report, page: &mut Page<'_>) -> io::Result<()> {
    let shown = match page.detail() {
        Detail::Brief => 10,
        Detail::Verbose => usize::MAX,
    };
    for Place { ranks, place } in report.now.iter().take(shown) {
        let text = format!("{} in {place}", rcomm_verdict::format::Ranks(ranks));
        page.item("now", DIM, &text)?;
    }
    if let Some(rest) = report.now.len().checked_sub(shown).filter(|&rest| rest > 0) {
        let text = format!("{}; --verbose shows all", count(rest as u64, "more place"));
        page.plain(DIM, &text)?;
    }
    Ok(())
}

/// A number with its noun and verb: `1 operation is`, `2 operations are`.
fn count_are(n: u64, noun: &str) -> String {
    format!("{} {}", count(n, noun), if n == 1 { "is" } else { "are" })
}

fn oldest_pending(report: &Report) -> Option<String> {
    report
        .in_flight
        .iter()
        .filter_map(|instance| instance.age_ms)
        .max_by(f64::total_cmp)
        .map(rcomm_verdict::format::duration_ms)
}

/// Writes the notes among the findings, then the problems of the input.
fn write_notes(report: &Report, page: &mut Page<'_>) -> io::Result<()> {
    // The headline has this sentence already.
    let headline = report.silence();
    let problems = report.problems.iter();
    let problems = problems.filter(|problem| Some(problem.sentence.as_str()) != headline);
    let notes: Vec<(Code, String)> = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Note && is_root(report, finding))
        .filter(|finding| undecided(report).is_none_or(|shown| shown.id != finding.id))
        .map(|finding| (finding.code, finding.sentence.clone()))
        .chain(problems.map(|problem| {
            // The sentence may already contain the path.
            let text = if problem.path.is_empty() || problem.sentence.contains(&problem.path) {
                problem.sentence.clone()
            } else {
                format!("{}: {}", problem.path, problem.sentence)
            };
            (problem.code, text)
        }))
        .collect();
    if notes.is_empty() {
        return Ok(());
    }
    page.blank()?;
    let shown = match page.detail() {
        Detail::Brief => 10,
        Detail::Verbose => usize::MAX,
    };
    for (code, sentence) in notes.iter().take(shown) {
        page.headline(&format!("NOTE {code}"), DIM, sentence)?;
    }
    if let Some(rest) = notes.len().checked_sub(shown).filter(|&rest| rest > 0) {
        let text = format!(
            "{} left out here; --verbose shows all",
            count(rest as u64, "more note")
        );
        page.plain(DIM, &text)?;
    }
    Ok(())
}

fn write_footer(report: &Report, code: Option<Code>, page: &mut Page<'_>) -> io::Result<()> {
    let input = &report.input;
    page.blank()?;
    let expected = input.ranks_expected.max(input.ranks_read);
    let mut text = format!(
        "read {}, {} from {}",
        format_ranks_read(input),
        count(input.entries, "operation"),
        count(input.files as u64, "file"),
    );
    let unread: Vec<u32> = report
        .ranks
        .iter()
        .filter(|rank| !rank.read)
        .map(|rank| rank.rank)
        .collect();
    if !unread.is_empty() {
        text += &format!("; no record of {}", rcomm_verdict::format::Ranks(&unread));
    }
    if input.may_have_more {
        text += "; no record states how many ranks the job has";
    }
    if let Some(logs) = &input.logs {
        text = match input.ranks_read {
            0 => format!("read {}", format_logs(logs)),
            _ => format!("{text}; {}", format_logs(logs)),
        };
    }
    let style = if input.ranks_read < expected {
        CAUTION
    } else {
        DIM
    };
    page.plain(style, &text)?;
    if let Some(code) = code {
        let more = match page.detail() {
            Detail::Brief => "; --verbose shows the evidence",
            Detail::Verbose => "",
        };
        page.plain(DIM, &format!("rcomm-fr explain {code} gives details{more}"))?;
    }
    Ok(())
}

/// How many ranks were read, like `7 of 8 ranks`; `8 ranks` if all that are known were read and there may be more.
pub fn format_ranks_read(input: &Input) -> String {
    let expected = input.ranks_expected.max(input.ranks_read);
    let ranks = count(expected as u64, "rank");
    match input.may_have_more && input.ranks_read == expected {
        true => ranks,
        false => format!("{} of {ranks}", input.ranks_read),
    }
}

/// The logs that were read, like `12 facts about 8 ranks from 4,096 lines of 1 log`.
fn format_logs(logs: &LogInput) -> String {
    let mut text = format!(
        "{} about {} from {} of {}",
        count(logs.facts, "fact"),
        count(logs.ranks as u64, "rank"),
        count(logs.lines, "line"),
        count(logs.files as u64, "log"),
    );
    if logs.other_attempts > 0 {
        let facts = count(logs.other_attempts, "fact");
        text += &format!("; {facts} about other attempts of the job set aside");
    }
    if logs.left_out > 0 {
        text += &format!("; {} over the limit left out", grouped(logs.left_out));
    }
    text
}

/// The verdict and its sentence in one line, for a log or a prompt; without a sentence, the verdict and what was read.
pub fn one_line(report: &Report) -> String {
    let (word, _) = verdict_word(report);
    match (report.lead().or_else(|| undecided(report)), &report.end) {
        (Some(finding), _) => format!("{word}  {}", printable(&finding.sentence)),
        (None, Some(end)) => format!("{word}  {}", printable(&end.sentence)),
        (None, None) => {
            let input = &report.input;
            format!(
                "{word}  read {}, {}",
                format_ranks_read(input),
                count(input.entries, "operation"),
            )
        }
    }
}
