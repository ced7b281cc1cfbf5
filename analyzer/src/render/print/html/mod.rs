//! Writes the report as one HTML file: findings first, then graphs and tables.
//!
//! The file is self-contained: it has no script and loads nothing, and a content security policy in its head forbids
//! both. All text from a dump is escaped (`Text`). In a job of thousands of ranks, equal rows and ranks that wait in
//! one operation are folded, other rows are cut, and the page states how many.

mod findings;
mod graph;
mod matrices;
mod shown;
mod stacks;
mod tables;
mod timeline;

use super::human::{self, format_ranks_read};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::format::{GroupNames, count, printable};
use rcomm_verdict::{Report, Verdict};
use std::fmt;
use std::io::{self, Write};

/// The highest confidence of a finding whose doubts are at the top of the page, as on rcomm-top's first screen.
const UNSURE: f64 = 0.75;
const STYLE: &str = include_str!("style.css");

/// Writes the page. `dumps` are the records of the report; without them, the matrices and the timeline are left out.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write(report: &Report, dumps: &[Dump], out: &mut dyn Write) -> io::Result<()> {
    let headline = human::one_line(report);
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n",
        Text(&headline)
    )?;
    write_header(report, out)?;
    writeln!(out, "<main>")?;
    let names = GroupNames::of(report);
    findings::write(report, &names, out)?;
    graph::write(report, &names, out)?;
    let shown = shown::ShownRecords::of(report, dumps);
    matrices::write(&shown, report, &names, out)?;
    timeline::write(&shown, &names, out)?;
    stacks::write(report, out)?;
    tables::write(report, &names, out)?;
    writeln!(out, "</main>\n</body>\n</html>")
}

fn write_header(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let class = match report.verdict {
        Verdict::Healthy | Verdict::Running if report.lead().is_some() => "caution",
        Verdict::Healthy | Verdict::Running | Verdict::Ended | Verdict::Cancelled => "fine",
        Verdict::Stuck | Verdict::Mismatch | Verdict::Crashed => "alarm",
        Verdict::Slow | Verdict::Inconclusive => "caution",
    };
    let word = report.word();
    let word = word[..1].to_uppercase() + &word[1..];
    let input = &report.input;
    writeln!(
        out,
        "<header class=\"{class}\">\n<p class=\"verdict\">{word}</p>"
    )?;
    if let Some(finding) = report.lead() {
        writeln!(out, "<h1>{}</h1>", Text(&finding.sentence))?;
        if !finding.next.is_empty() {
            writeln!(
                out,
                "<p class=\"next\"><b>Next:</b> {}</p>",
                Text(&finding.next)
            )?;
        }
        if finding.confidence <= UNSURE {
            let or_else = Some(human::format_doubt(finding)).filter(|doubt| !doubt.is_empty());
            let or_else = or_else.iter().map(|doubt| ("Or else", doubt));
            let doubts = finding.doubts.iter().map(|doubt| ("Not sure", doubt));
            for (name, doubt) in or_else.chain(doubts) {
                writeln!(out, "<p class=\"doubt\"><b>{name}:</b> {}</p>", Text(doubt))?;
            }
        }
    } else {
        let end = report.end.as_ref().map(|end| end.sentence.as_str());
        let text = end.unwrap_or(match report.verdict {
            Verdict::Healthy => "Nothing recorded is pending or wrong",
            Verdict::Running => "Nothing is overdue",
            _ => "The records are inconclusive",
        });
        writeln!(out, "<h1>{}</h1>", Text(text))?;
    }
    writeln!(
        out,
        "<p class=\"input\">Read {}, {} from {}.</p>\n</header>",
        format_ranks_read(input),
        count(input.entries, "operation"),
        count(input.files as u64, "file"),
    )
}

/// Escapes untrusted text for an element or a quoted attribute.
struct Text<'a>(&'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in printable(self.0).chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                c => fmt::Write::write_char(f, c)?,
            }
        }
        Ok(())
    }
}

/// `text` cut to `width` characters; an ellipsis marks the cut.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut kept: String = text.chars().take(width.saturating_sub(1)).collect();
    kept.push('…');
    kept
}
