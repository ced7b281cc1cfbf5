//! The sources and their status.

use super::{ViewModel, cut_cell};
use crate::page::layout::wrap;
use crate::page::table::{Cell, Headings, Mark, Row, Table, number, rest};
use crate::page::theme::Tone;
use crate::page::{Body, Line, Page, Pane, plain, styled};
use rcomm_analyzer::Snapshot;
use rcomm_analyzer::format::count;
use rcomm_recorder::model::text::age;

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let snapshot = model.snapshot;
    let rows = snapshot.sources.iter().map(|source| {
        let silence = source.silence;
        let silence = silence.map(|silence| silence.as_secs_f64() * 1e3 + model.later_ms);
        let (tone, glyph, state) = match &source.error {
            Some(error) => (Tone::Silent, '?', error.clone()),
            None if source.answered < source.known => {
                let missing = source.known - source.answered;
                (
                    Tone::Late,
                    '~',
                    format!("{} not answering", count(missing as u64, "rank")),
                )
            }
            None if source.silence.is_none() => (Tone::Dim, ' ', "no answer yet".into()),
            None if model.is_replay => (Tone::Plain, ' ', "was read".into()),
            None => (Tone::Plain, ' ', "answers".into()),
        };
        Row {
            mark: Mark::new(glyph, tone),
            cells: vec![
                Cell::text(source.name.as_str()),
                Cell::number(
                    format!("{}/{}", source.answered, source.known),
                    source.answered as f64,
                ),
                // Of records that were read once, there is no other answer to wait for.
                Cell::number(
                    match silence {
                        Some(_) if model.is_replay => String::new(),
                        Some(_) => format!("{} ago", age(silence)),
                        None => age(None),
                    },
                    silence.unwrap_or(f64::NAN),
                ),
                Cell::text(state),
            ],
            tone,
            target: None,
            problem: source.error.is_some() || source.answered < source.known,
        }
    });
    let head = vec![vec![plain(format!(
        "{} held; the last analysis took {:.1} ms",
        count(snapshot.entries() as u64, "operation"),
        snapshot.cost.as_secs_f64() * 1e3
    ))]];
    let table = Table {
        columns: vec![
            rest("source", 0),
            number("ranks", 0),
            number("last answer", 0),
            rest("state", 0),
        ],
        rows: rows.collect(),
        headings: Headings::Shown,
        empty: "no source".into(),
    };
    Page::of(head, "sources", table)
}

/// The texts of the source in a row that the table cuts; `None` if it cuts none.
pub(super) fn selected(model: &ViewModel<'_>, page: &Page, row: usize) -> Option<Pane> {
    let columns = 0..page.table(0)?.columns.len();
    let cut = columns.filter_map(|column| cut_cell(model, page, row, column));
    let width = usize::from(model.size.0);
    let lines: Vec<Line> = cut
        .flat_map(|text| wrap(&vec![plain(text)], width, usize::MAX))
        .collect();
    (!lines.is_empty()).then(|| Pane {
        title: "selected source".into(),
        body: Body::Text(lines),
    })
}

/// The page while no rank is known: the status of each source, and the problems of the input.
pub(in crate::state) fn no_ranks_page(snapshot: &Snapshot) -> Page {
    let mut head: Vec<Line> = vec![vec![styled(" NO JOB ", Tone::Silent)]];
    for source in &snapshot.sources {
        let status = source
            .error
            .as_deref()
            .unwrap_or("answers, but reports no ranks");
        head.push(vec![styled(source.name.clone(), Tone::Title)]);
        head.push(vec![plain(format!("  {status}"))]);
    }
    for problem in &snapshot.report.problems {
        let text = format!("  {} {}: {}", problem.code, problem.path, problem.sentence);
        head.push(vec![styled(text, Tone::Late)]);
    }
    Page {
        head,
        ..Page::default()
    }
}
