//! The sources and their status.

use super::ViewModel;
use crate::page::table::{Cell, Headings, Mark, Row, Table, number, rest};
use crate::page::theme::Tone;
use crate::page::{Page, plain};
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
                Cell::number(age(silence), silence.unwrap_or(f64::NAN)),
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
            number("reply", 0),
            rest("state", 0),
        ],
        rows: rows.collect(),
        headings: Headings::Shown,
        empty: "no source".into(),
    };
    Page::of(head, "sources", table)
}
