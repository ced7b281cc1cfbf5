//! The screen `warnings`: the report's findings and the problems of its input, with their codes and sentences.

use super::{Fold, ViewModel, finding};
use crate::keys::Action;
use crate::page::layout::wrap;
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Body, Page, Pane, plain};
use rcomm_analyzer::filter::Subject;
use rcomm_analyzer::format::count;
use rcomm_analyzer::{Code, Finding, Problem, Severity};

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let mut table = table(model, Muted::Shown);
    if !model.problems_only && model.filter.is_empty() {
        let reported: Vec<Code> = model
            .snapshot
            .report
            .findings
            .iter()
            .map(|f| f.code)
            .collect();
        let unreported = Code::ALL
            .iter()
            .copied()
            .filter(|code| !reported.contains(code) && code.severity() != Severity::Note);
        // Codes without findings say little; those that the user muted stay in sight.
        let (listed, folded): (Vec<Code>, Vec<Code>) =
            unreported.partition(|code| model.fold == Fold::Nothing || model.muted.contains(code));
        let listed = listed
            .into_iter()
            .map(|code| row_without_findings(model, code));
        table.rows.extend(listed);
        if !folded.is_empty() {
            table.rows.push(Row {
                mark: Mark::NONE,
                cells: vec![
                    Cell::text(""),
                    Cell::text(""),
                    Cell::number("0", 0.0),
                    Cell::text(format!(
                        "looked for and not found: {}{}",
                        count(folded.len() as u64, "kind"),
                        model.hint("; ", &[Action::Fold], "lists them")
                    )),
                ],
                tone: Tone::Dim,
                target: None,
                problem: false,
            });
        }
    }
    Page::of(vec![], format!("warnings: {}", summary(model)), table)
}

/// The whole sentence, the doubts and the next step of the finding in a row, or in the last one if there are fewer. For
/// a problem of the input, the sentence. `None` if the row has neither.
pub(super) fn selected(model: &ViewModel<'_>, page: &Page, row: usize) -> Option<Pane> {
    let rows = &page.table(0)?.rows;
    let row = rows.get(row.min(rows.len().saturating_sub(1)))?;
    let width = usize::from(model.size.0);
    let Some(Target::Finding(id)) = row.target else {
        let mut problems = model.snapshot.report.problems.iter();
        let problem = problems.find(|problem| {
            row.cells[0].text == problem.code.id() && row.cells[3].text == statement(problem)
        })?;
        return Some(Pane {
            title: format!("{} {}", problem.code.id(), problem.code.name()),
            body: Body::Text(wrap(&vec![plain(statement(problem))], width, usize::MAX)),
        });
    };
    let mut findings = model.snapshot.report.findings.iter();
    let selected = findings.find(|finding| finding.id == id)?;
    let mut lines = vec![vec![plain(model.sentence(selected))]];
    lines.extend(finding::doubts(selected));
    lines.extend(finding::next(selected));
    let lines = lines.iter().flat_map(|line| wrap(line, width, usize::MAX));
    Some(Pane {
        title: format!("{}{}", selected.code, ways_to_more(model, ": ")),
        body: Body::Text(lines.collect()),
    })
}

/// The keys for the evidence and the explanation of the selected finding, after a separator.
pub(super) fn ways_to_more(model: &ViewModel<'_>, separator: &str) -> String {
    let ways = [
        (Action::Enter, "evidence"),
        (Action::Explain, "explanation"),
    ];
    let ways = ways.map(|(action, shows)| model.keymap.hint(&[action], shows));
    let ways: Vec<String> = ways.into_iter().flatten().collect();
    match ways.is_empty() {
        true => String::new(),
        false => format!("{separator}{}", ways.join(", ")),
    }
}

/// Counts the findings by severity, without muted codes, and the muted codes: `2 errors, 1 warning`. Problems of the
/// input count as notes.
pub(super) fn summary(model: &ViewModel<'_>) -> String {
    let number_of = |severity| {
        let all = model.snapshot.report.findings.iter();
        all.filter(|f| f.severity == severity && !model.muted.contains(&f.code))
            .count()
    };
    let (errors, warnings) = (number_of(Severity::Error), number_of(Severity::Warning));
    let notes = number_of(Severity::Note) + model.snapshot.report.problems.len();
    let mut parts = Vec::new();
    for (n, what) in [(errors, "error"), (warnings, "warning"), (notes, "note")] {
        if n > 0 {
            parts.push(count(n as u64, what));
        }
    }
    if parts.is_empty() {
        parts.push("none".into());
    }
    if !model.muted.is_empty() {
        parts.push(format!("{} muted", count(model.muted.len() as u64, "code")));
    }
    parts.join(", ")
}

/// Whether muted findings are listed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Muted {
    /// Listed, dimmed.
    Shown,
    /// Not listed.
    Hidden,
}

/// The table of the findings and the problems of the input that pass the filter.
pub(super) fn table(model: &ViewModel<'_>, muted: Muted) -> Table {
    let report = &model.snapshot.report;
    let findings = report
        .findings
        .iter()
        .filter(|f| muted == Muted::Shown || !model.muted.contains(&f.code))
        .filter(|f| passes(model, f))
        .map(|finding| row(model, finding));
    let problems = report
        .problems
        .iter()
        .filter(|problem| {
            !model.problems_only
                && model.passes(&Subject {
                    code: Some(problem.code.id()),
                    text: &problem.sentence,
                    ..Subject::default()
                })
        })
        .map(|problem| Row {
            mark: Mark::NONE,
            cells: vec![
                Cell::text(problem.code.id()),
                Cell::text(problem.code.name()),
                Cell::text(""),
                Cell::text(statement(problem)),
            ],
            tone: Tone::Dim,
            target: None,
            problem: false,
        });
    Table {
        columns: vec![
            text("code", 0),
            text("name", 2),
            number("ranks", 1),
            rest("what", 0),
        ],
        rows: findings.chain(problems).collect(),
        headings: Headings::Shown,
        empty: if report.findings.is_empty() {
            "no findings".into()
        } else {
            model.none_left("finding")
        },
    }
}

/// What a problem of the input says, after the file that it is about.
fn statement(problem: &Problem) -> String {
    match problem.path.as_str() {
        "" => problem.sentence.clone(),
        path => format!("{path}: {}", problem.sentence),
    }
}

fn passes(model: &ViewModel<'_>, finding: &Finding) -> bool {
    if model.problems_only && finding.severity == Severity::Note {
        return false;
    }
    if model.filter.is_empty() {
        return true;
    }
    let host_of = |rank| model.host(rank);
    model.passes(&Subject {
        ranks: &finding.culprit_ranks,
        group: finding.group.as_ref(),
        op: finding.op.as_deref(),
        host_of: Some(&host_of),
        code: Some(finding.code.id()),
        seq: finding.seq,
        text: &finding.sentence,
        ..Subject::default()
    })
}

fn row(model: &ViewModel<'_>, finding: &Finding) -> Row {
    let muted = model.muted.contains(&finding.code);
    let (glyph, tone) = match finding.severity {
        _ if muted => (' ', Tone::Dim),
        Severity::Error => ('!', Tone::Bad),
        Severity::Warning => ('~', Tone::Late),
        Severity::Note => (' ', Tone::Dim),
    };
    // Consequences are listed below their cause.
    let indent = if finding.caused_by.is_some() {
        "  + "
    } else {
        ""
    };
    let muted = if muted { " (muted)" } else { "" };
    // Without culprits, the ranks of the cycle are counted; without a cycle, the cell stays empty.
    let ranks = match finding.culprit_ranks.len() {
        0 => finding.cycle.len(),
        ranks => ranks,
    };
    Row {
        mark: Mark::new(glyph, tone),
        cells: vec![
            Cell::text(finding.code.id()).toned(tone),
            Cell::text(finding.name.as_str()),
            match ranks {
                0 => Cell::text(""),
                _ => Cell::number(ranks.to_string(), ranks as f64),
            },
            Cell::text(format!("{indent}{}{muted}", model.sentence(finding))),
        ],
        tone: if finding.caused_by.is_some()
            || !muted.is_empty()
            || finding.severity == Severity::Note
        {
            Tone::Dim
        } else {
            Tone::Plain
        },
        target: Some(Target::Finding(finding.id)),
        problem: finding.severity != Severity::Note,
    }
}

/// The row of a code without findings: no rank, and the meaning of the code.
fn row_without_findings(model: &ViewModel<'_>, code: Code) -> Row {
    let muted = if model.muted.contains(&code) {
        " (muted)"
    } else {
        ""
    };
    Row {
        mark: Mark::NONE,
        cells: vec![
            Cell::text(code.id()),
            Cell::text(code.name()),
            Cell::number("0", 0.0),
            Cell::text(format!("{}{muted}", code.meaning())),
        ],
        tone: Tone::Dim,
        target: None,
        problem: false,
    }
}
