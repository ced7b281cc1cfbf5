//! Which panes the first screen has, and what keeps them in their places while operations come and go.

use super::screens::{Fold, OverviewPane, ViewModel, has_trends, has_two_columns, page_of};
use crate::page::Page;
use crate::page::layout::{is_whole, needed, needed_rows};
use std::collections::HashMap;

/// How the first screen was built last: what keeps the panes in their places while operations come and go.
#[derive(Clone, Debug)]
pub(super) struct Arrangement {
    /// The panes on display, in the order of the page's panes.
    pub(super) panes: Vec<OverviewPane>,
    /// What they were arranged for.
    occasion: Occasion,
    /// The most rows that the tables of groups and of operations in flight have needed on this occasion.
    kept_rows: HashMap<OverviewPane, u16>,
}

/// What the panes are arranged for. A pane gets fewer rows than it has needed before only if this changes.
#[derive(Clone, Debug, PartialEq)]
struct Occasion {
    job: String,
    size: (u16, u16),
    /// Whether there are root causes.
    blocked: bool,
    filter: String,
    problems_only: bool,
    fold: Fold,
}

impl Occasion {
    fn of(model: &ViewModel<'_>) -> Self {
        Self {
            job: model.snapshot.job.clone(),
            size: model.size,
            blocked: !model.index.roots().is_empty(),
            filter: model.filter.text().to_owned(),
            problems_only: model.problems_only,
            fold: model.fold,
        }
    }
}

/// The first screen's page, and how it is arranged; `before` is how it was arranged last. While the user has selected
/// something (`selecting`), panes come and go only if the occasion changes.
pub(super) fn arranged(
    model: &ViewModel<'_>,
    before: Option<&Arrangement>,
    selecting: bool,
) -> (Arrangement, Page) {
    let occasion = Occasion::of(model);
    let blocked = occasion.blocked;
    let before = before.filter(|before| before.occasion == occasion);
    let mut kept_rows = before.map_or_else(HashMap::new, |before| before.kept_rows.clone());
    let mut panes = OverviewPane::chosen(model.layout, model.size, blocked).to_vec();
    // Nothing is known of the processes that wrote dumps. A user's own panes stay.
    let has_look = !model.is_replay || !model.layout.is_empty();
    panes.retain(|pane| *pane != OverviewPane::Look || has_look);
    let has_trends = has_trends(model) || !model.layout.is_empty();
    panes.retain(|pane| *pane != OverviewPane::Trends || has_trends);
    let mut page = page_of(model, &panes, &kept_rows);
    let additional = match model.layout.is_empty() {
        true => OverviewPane::additional_panes(model.size, blocked),
        false => &[],
    };
    // Operations in flight come and go while the job runs: what is above them stays in its place.
    let is_last = |pane: &OverviewPane| match pane {
        OverviewPane::InFlight => !blocked && !has_two_columns(model),
        pane => *pane == OverviewPane::Ranks,
    };
    for &pane in additional {
        if panes.contains(&pane) {
            continue;
        }
        // Of two columns, the left one ends with the operations: it is the shorter one where many are in flight.
        let is_next = |other: &OverviewPane| match pane {
            OverviewPane::Operations if has_two_columns(model) => *other == OverviewPane::Groups,
            _ => is_last(other),
        };
        let mut panes_with = panes.clone();
        panes_with.insert(panes.iter().position(is_next).unwrap_or(panes.len()), pane);
        let page_with = page_of(model, &panes_with, &kept_rows);
        let is_shown = match before.filter(|_| selecting) {
            Some(before) => before.panes.contains(&pane),
            None => takes_no_row(&page_with, &page, model.size),
        };
        if is_shown {
            (panes, page) = (panes_with, page_with);
        } else if let Some(index) = panes_with.iter().position(|other| *other == pane) {
            let rows = needed_rows(&page_with.panes[index], model.size.0);
            keep(pane, rows, &mut kept_rows);
        }
    }
    for (&pane, shown) in panes.iter().zip(&page.panes) {
        let rows = needed_rows(shown, model.size.0).min(model.size.1 / KEPT_DIVISOR);
        keep(pane, rows, &mut kept_rows);
    }
    let arrangement = Arrangement {
        panes,
        occasion,
        kept_rows,
    };
    (arrangement, page)
}

/// Whether a page with one more pane shows all rows that the page without it shows.
fn takes_no_row(page_with: &Page, page: &Page, size: (u16, u16)) -> bool {
    let last = page_with.right.last().copied().unwrap_or(0);
    let mut left = (0..last).filter(|index| !page_with.right.contains(index));
    needed(page_with, size) <= size.1.max(needed(page, size))
        && left.all(|index| is_whole(page_with, index, size))
}

/// Notes the rows that a pane needs, if it is one whose rows come and go.
fn keep(pane: OverviewPane, rows: u16, kept_rows: &mut HashMap<OverviewPane, u16>) {
    if matches!(pane, OverviewPane::Groups | OverviewPane::InFlight) {
        let kept = kept_rows.entry(pane).or_default();
        *kept = rows.max(*kept);
    }
}

/// A pane on display keeps at most the terminal's rows divided by this.
const KEPT_DIVISOR: u16 = 4;
