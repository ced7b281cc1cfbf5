//! Reducers: the newest step of each group's reducer on each rank, and how much of the communication was exposed.

use super::ViewModel;
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Page, plain};
use rcomm_analyzer::ReducerView;
use rcomm_analyzer::filter::Subject;
use rcomm_recorder::model::text::{bytes, millis};

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let reducers = model.snapshot.reducers();
    let rows = reducers.iter().filter(|view| passes(model, view));
    let mut head = vec![vec![plain(
        "each reducer's newest step on each rank, ms: step = forward + backward + exposed",
    )]];
    head.push(vec![plain(
        "exposed: the part of communication that the backward pass did not hide",
    )]);
    let table = Table {
        columns: vec![
            text("rank", 0),
            text("host", 5),
            text("group", 4),
            number("number", 2),
            number("step", 0),
            number("forward", 3),
            number("backward", 2),
            number("comm", 1),
            number("exposed", 0),
            number("%", 1),
            rest("slowest bucket", 1),
        ],
        rows: rows.map(|view| row(model, view)).collect(),
        headings: Headings::Shown,
        empty: if reducers.is_empty() {
            "no record has steps of a reducer: rcomm's Reducer writes them".into()
        } else {
            model.none_left("reducer")
        },
    };
    Page::of(head, "reducers", table)
}

fn passes(model: &ViewModel<'_>, view: &ReducerView<'_>) -> bool {
    let state = model.index.filter_words(model.snapshot, view.rank);
    !model.problems_only
        && model.passes_rank(
            view.rank,
            &Subject {
                group: Some(&view.group),
                state: Some(state),
                ..Subject::default()
            },
        )
}

fn row(model: &ViewModel<'_>, view: &ReducerView<'_>) -> Row {
    let times = &view.step.times;
    let ms = |ns: u64| {
        let ms = ns as f64 / 1e6;
        Cell::number(millis(Some(ms)), ms)
    };
    let total = times.total_ns();
    let percent = match total {
        0 => f64::NAN,
        total => times.exposed_ns as f64 * 100.0 / total as f64,
    };
    let slowest = view.step.slowest_bucket().map_or_else(String::new, |it| {
        let took = millis(Some(it.communication_ns as f64 / 1e6));
        let (nth, all) = (it.index + 1, times.bucket_count);
        format!("{nth} of {all}: {} in {took} ms", bytes(it.bytes))
    });
    Row {
        mark: Mark::NONE,
        cells: vec![
            Cell::number(view.rank.to_string(), f64::from(view.rank)),
            Cell::text(model.host(view.rank)),
            Cell::text(model.labels([&view.group])),
            Cell::number(times.step.to_string(), times.step as f64),
            ms(total),
            ms(times.forward_ns),
            ms(times.backward_ns),
            ms(times.communication_ns),
            ms(times.exposed_ns),
            Cell::number(format!("{percent:.1}"), percent),
            Cell::text(slowest),
        ],
        tone: Tone::Plain,
        target: Some(Target::Rank(view.rank)),
        problem: false,
    }
}
