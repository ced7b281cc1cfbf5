//! The layout of a screen, used for drawing and for mouse clicks.

use super::selection::{Selection, first_shown};
use super::table::{Headings, Table};
use super::theme::Tone;
use super::width::text_width;
use super::{Body, Grid, Line, Page, Pane, Timeline, styled};
use ratatui::layout::Rect;

/// Rectangles of one screen.
pub(crate) struct Layout {
    pub(crate) header: Rect,
    /// The head's lines, wrapped to the width.
    pub(crate) head: Vec<Line>,
    /// The rows of the screen that the head gets; if they are too few, its last lines are not shown.
    head_area: Rect,
    pub(crate) panes: Vec<Rect>,
    pub(crate) footer: Rect,
}

impl Layout {
    /// One rectangle for each row of the screen that the head gets, from top to bottom.
    pub(crate) fn head_rects(&self) -> impl Iterator<Item = Rect> {
        let area = self.head_area;
        (area.y..area.bottom()).map(move |y| Rect::new(area.x, y, area.width, 1))
    }
}

/// Computes the layout of a page on a screen of this size.
pub(crate) fn of(page: &Page, area: Rect) -> Layout {
    let row = |y: u16, height: u16| {
        let y = y.min(area.bottom());
        Rect::new(area.x, y, area.width, height.min(area.bottom() - y))
    };
    let (header, footer) = bars(area.height);
    let available = area.height - header - footer;
    let wrapped: Vec<Vec<Line>> = (page.head.iter())
        .map(|line| wrap_head(line, area.width, area.height))
        .collect();
    // The head gets at most half of the available rows, or more if its lines up to the last doubt need them, as long as
    // the panes keep `MIN_ROWS_OF_PANES`.
    let whole: usize = wrapped[..to_last_doubt(&page.head)]
        .iter()
        .map(Vec::len)
        .sum();
    let max_head_height = if page.panes.is_empty() {
        available
    } else {
        let whole = u16::try_from(whole).unwrap_or(u16::MAX);
        (available / 2)
            .max(1)
            .max(whole.min(max_head_rows(available)))
    };
    let head: Vec<Line> = wrapped.into_iter().flatten().collect();
    let head_height = u16::try_from(head.len())
        .unwrap_or(u16::MAX)
        .min(max_head_height);
    let top = area.y + header + head_height;
    let rest = available - head_height;
    Layout {
        panes: panes(page, row(top, rest)),
        header: row(area.y, header),
        head,
        head_area: row(area.y + header, head_height),
        footer: row(area.bottom() - footer, footer),
    }
}

/// The rows of the header and of the footer on a screen with this many rows. On a tiny screen they are dropped first:
/// the head has the verdict.
fn bars(rows: u16) -> (u16, u16) {
    (u16::from(rows >= 4), u16::from(rows >= 3))
}

/// Number of rows that a doubt leaves for the panes.
const MIN_ROWS_OF_PANES: u16 = 3;

/// Maximum number of the `available` rows that the head takes for its doubts.
fn max_head_rows(available: u16) -> u16 {
    available.saturating_sub(MIN_ROWS_OF_PANES)
}

/// The number of lines of a head up to its last doubt; 0 if it has none.
fn to_last_doubt(head: &[Line]) -> usize {
    head.iter().rposition(is_doubt).map_or(0, |last| last + 1)
}

/// Whether the doubts of this head are too long for a screen of this size that also has panes.
pub(crate) fn cuts_doubt(head: &[Line], (width, rows): (u16, u16)) -> bool {
    let (header, footer) = bars(rows);
    let max_rows = max_head_rows(rows - header - footer);
    let lines = head[..to_last_doubt(head)].iter();
    let whole: usize = lines.map(|line| wrap_head(line, width, rows).len()).sum();
    whole > usize::from(max_rows)
}

/// The areas of the panes: one below another; or, if `page.right` names some, in two columns, with the panes after the
/// last of them below both columns.
fn panes(page: &Page, area: Rect) -> Vec<Rect> {
    let mut rects = vec![Rect::default(); page.panes.len()];
    let wanted = |index: usize, width: u16| wanted_rows(page, index, width);
    let mut stack = |panes: &[usize], area: Rect, spare: usize| {
        let wanted: Vec<u16> = panes
            .iter()
            .map(|&index| wanted(index, area.width))
            .collect();
        let mut heights = share(&wanted, area.height, spare);
        let least: Vec<u16> = panes
            .iter()
            .zip(&wanted)
            .map(|(&index, &wanted)| least_rows(&page.panes[index]).min(wanted))
            .collect();
        give_each_pane_its_least(&mut heights, &least);
        let mut y = area.y;
        for (&index, height) in panes.iter().zip(heights) {
            rects[index] = Rect::new(area.x, y, area.width, height);
            y += height;
        }
    };
    let Some(&last) = page.right.last() else {
        let all: Vec<usize> = (0..page.panes.len()).collect();
        stack(&all, area, spare_of(page, &all));
        return rects;
    };
    let (right, left): (Vec<usize>, Vec<usize>) =
        (0..=last).partition(|index| page.right.contains(index));
    let below: Vec<usize> = (last + 1..page.panes.len()).collect();
    let width = area.width.saturating_sub(1) / 2;
    let sum = |panes: &[usize], width| {
        let rows = panes.iter().map(|&index| wanted(index, width));
        rows.fold(0, u16::saturating_add)
    };
    // The columns get at most two thirds, or more if the panes below them need less than the rest.
    let max_height =
        (area.height - area.height / 3).max(area.height.saturating_sub(sum(&below, area.width)));
    let height = sum(&left, width).max(sum(&right, width)).min(max_height);
    let x = area.x + area.width - width;
    let spare = |column: &[usize]| column.len().saturating_sub(1);
    stack(
        &left,
        Rect::new(area.x, area.y, width, height),
        spare(&left),
    );
    stack(&right, Rect::new(x, area.y, width, height), spare(&right));
    let rest = Rect::new(area.x, area.y + height, area.width, area.height - height);
    stack(&below, rest, spare_of(page, &below));
    rects
}

/// The index, among these panes, of the one that gets the rows that no pane needs: the last, or the last but one if the
/// last is a strip or a grid of the ranks, which stays at the bottom of the screen.
fn spare_of(page: &Page, panes: &[usize]) -> usize {
    let last = panes.last().map(|&index| &page.panes[index].body);
    let shows_ranks = matches!(last, Some(Body::Strip(_) | Body::Grid(_)));
    panes.len().saturating_sub(1 + usize::from(shows_ranks))
}

/// The most rows that a line of the head that states no doubt may take on a terminal of `rows` rows. A tall terminal
/// has room for long sentences, whose ends say how the job ended; a short one leaves more rows to the panes.
fn max_rows_of_head_line(rows: u16) -> usize {
    match rows {
        0..20 => 2,
        20..24 => 4,
        _ => 6,
    }
}

/// Whether a line of the head states a doubt.
pub(crate) fn is_doubt(line: &Line) -> bool {
    line.first().is_some_and(|words| words.tone == Tone::Doubt)
}

/// Wraps a line of the head on a terminal of this size.
fn wrap_head(line: &Line, width: u16, rows: u16) -> Vec<Line> {
    let max_lines = match is_doubt(line) {
        true => usize::MAX,
        false => max_rows_of_head_line(rows),
    };
    wrap(line, usize::from(width), max_lines)
}

/// Wraps a line to at most `max_lines` lines. The last of these may be too wide, and so may one that is a single word.
/// Lines after the first begin with three spaces. Below 20 columns, the line is not wrapped.
pub(crate) fn wrap(line: &Line, width: usize, max_lines: usize) -> Vec<Line> {
    let whole: usize = line.iter().map(|w| text_width(&w.text)).sum();
    if whole <= width || width < 20 {
        return vec![line.clone()];
    }
    let mut lines: Vec<Line> = vec![vec![]];
    let mut used = 0;
    for part in line {
        for word in part.text.split_inclusive(' ') {
            let word_width = text_width(word.trim_end());
            if used + word_width > width && used > 0 && lines.len() < max_lines {
                lines.push(vec![styled("   ", part.tone)]);
                used = 3;
            }
            used += text_width(word);
            let last = lines.len() - 1;
            match lines[last].last_mut() {
                Some(before) if before.tone == part.tone => before.text.push_str(word),
                _ => lines[last].push(styled(word, part.tone)),
            }
        }
    }
    // Drop trailing spaces: with one, a line that is exactly as wide as the screen would be cut with an ellipsis.
    for last in lines.iter_mut().filter_map(|line| line.last_mut()) {
        last.text.truncate(last.text.trim_end().len());
    }
    lines
}

/// Number of rows for the pane at this index: those that are kept for it, or those that it needs if these are more.
fn wanted_rows(page: &Page, index: usize, width: u16) -> u16 {
    let kept = page.kept_rows.get(index).copied().unwrap_or(0);
    needed_rows(&page.panes[index], width).max(kept)
}

/// Number of rows that a pane needs to show everything, with its title. A strip gets at most three.
pub(crate) fn needed_rows(pane: &Pane, width: u16) -> u16 {
    let title = usize::from(!pane.title.is_empty());
    let rows = match &pane.body {
        Body::Table(table) => headings(table) + table.rows.len().max(1),
        Body::Strip(strip) => strip
            .dots
            .len()
            .div_ceil(usize::from(width.max(2)) - 1)
            .clamp(1, 3),
        Body::Text(lines) => lines.len(),
        Body::Grid(grid) => grid.rows.len() + grid.rows_around(),
        // The axis takes a row.
        Body::Timeline(timeline) => timeline.lanes.len() + 1,
    };
    u16::try_from(title + rows).unwrap_or(u16::MAX)
}

/// Number of rows that a terminal of this width needs to show everything, except that a strip gets at most three.
/// `rows` is the number that the terminal has: it limits how many rows a line of the head may take.
pub fn needed(page: &Page, (width, rows): (u16, u16)) -> u16 {
    let head: usize = (page.head.iter())
        .map(|line| wrap_head(line, width, rows).len())
        .sum();
    let last = page.right.last();
    let sum = |is_in: &dyn Fn(usize) -> bool| {
        let panes = (0..page.panes.len()).filter(|&index| is_in(index));
        let rows = panes.map(|index| wanted_rows(page, index, width));
        rows.fold(0, u16::saturating_add)
    };
    let is_below = |index: usize| last.is_none_or(|&last| index > last);
    let left = sum(&|index| !is_below(index) && !page.right.contains(&index));
    let right = sum(&|index| page.right.contains(&index));
    // 2 rows: the header and the footer.
    let without_head = sum(&is_below)
        .saturating_add(left.max(right))
        .saturating_add(2);
    without_head.saturating_add(u16::try_from(head).unwrap_or(u16::MAX))
}

/// Whether a pane has all its rows on a terminal of this size.
pub(crate) fn is_whole(page: &Page, pane: usize, (width, height): (u16, u16)) -> bool {
    let rect = of(page, Rect::new(0, 0, width, height)).panes[pane];
    needed_rows(&page.panes[pane], rect.width) <= rect.height
}

/// The number of rows that a pane has beyond what it needs, on a terminal of this size.
pub(crate) fn spare_rows(page: &Page, pane: usize, (width, height): (u16, u16)) -> u16 {
    let rect = of(page, Rect::new(0, 0, width, height)).panes[pane];
    let needed = needed_rows(&page.panes[pane], rect.width);
    rect.height.saturating_sub(needed)
}

/// Distributes `available` rows: small panes get what they need, the others share the rest. Rows that no pane needs go
/// to the pane with the index `spare`.
fn share(wanted: &[u16], available: u16, spare: usize) -> Vec<u16> {
    let mut given = vec![0u16; wanted.len()];
    let mut rest = available;
    while rest > 0 {
        let unsatisfied: Vec<usize> = (0..wanted.len())
            .filter(|&i| given[i] < wanted[i])
            .collect();
        if unsatisfied.is_empty() {
            break;
        }
        // Distribute row by row, from the bottom up: the short panes at the bottom are served first.
        for &i in unsatisfied.iter().rev() {
            if rest > 0 {
                given[i] += 1;
                rest -= 1;
            }
        }
    }
    if let Some(pane) = given.get_mut(spare) {
        *pane += rest;
    }
    given
}

/// Number of rows with which a pane shows something: a table also needs its headings and a row.
fn least_rows(pane: &Pane) -> u16 {
    let title = u16::from(!pane.title.is_empty());
    match &pane.body {
        Body::Table(table) => title + u16::from(headings(table) > 0) + 1,
        _ => title + 1,
    }
}

/// Takes rows from the tallest panes for those that have fewer than their least.
fn give_each_pane_its_least(heights: &mut [u16], least: &[u16]) {
    for index in 0..heights.len() {
        while heights[index] < least[index] {
            let others = (0..heights.len()).rev();
            let can_give = others.filter(|&other| heights[other] > least[other]);
            let Some(tallest) = can_give.max_by_key(|&other| heights[other]) else {
                return;
            };
            heights[tallest] -= 1;
            heights[index] += 1;
        }
    }
}

/// Maximum number of rows of a lane of a timeline.
const MAX_LANE_ROWS: u16 = 3;

/// The number of rows of each lane of a timeline whose lanes share `rows` rows: more than one where all have room.
pub(crate) fn rows_of_lane(timeline: &Timeline, rows: u16) -> u16 {
    let lanes = u16::try_from(timeline.lanes.len())
        .unwrap_or(u16::MAX)
        .max(1);
    (rows / lanes).clamp(1, MAX_LANE_ROWS)
}

/// Number of lines that the headings of columns take: 0 or 1.
pub(crate) fn headings(table: &Table) -> usize {
    usize::from(table.headings == Headings::Shown && !table.rows.is_empty())
}

/// The area of a pane without its title line.
pub(crate) fn below_title(pane: &Pane, area: Rect) -> Rect {
    let title = u16::from(!pane.title.is_empty() && area.height > 1);
    Rect::new(area.x, area.y + title, area.width, area.height - title)
}

/// What is at one place of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The index of the pane.
    pub pane: usize,
    /// The index of its row.
    pub row: usize,
    /// The index of the column, if a cell of a grid is there.
    pub column: Option<usize>,
}

/// What is at column `x` and row `y` of a terminal of this size; `None` if no row of a pane is there. `selection`
/// determines how far the focused pane is scrolled.
pub fn hit(
    page: &Page,
    selection: Selection,
    (width, height): (u16, u16),
    (x, y): (u16, u16),
) -> Option<Hit> {
    let layout = of(page, Rect::new(0, 0, width, height));
    let index = layout
        .panes
        .iter()
        .position(|rect| rect.contains((x, y).into()))?;
    let pane = page.panes.get(index)?;
    let body = below_title(pane, layout.panes[index]);
    let mut row = usize::from(y.checked_sub(body.y)?);
    let mut shown_rows = usize::from(body.height);
    let (selected, selected_column) = match selection.pane == index {
        true => (selection.row, selection.column),
        false => (0, 0),
    };
    let mut column = None;
    match &pane.body {
        Body::Table(table) => {
            row = row.checked_sub(headings(table))?;
            shown_rows = shown_rows.saturating_sub(headings(table));
        }
        Body::Grid(grid) => {
            // The headings of the columns are above the rows, and the legend is below them.
            row = row.checked_sub(1)?;
            shown_rows = shown_rows.checked_sub(grid.rows_around())?;
            if row >= shown_rows {
                return None;
            }
            column = column_at(grid, body, selected_column, x);
        }
        Body::Timeline(timeline) => {
            let lane_rows = usize::from(rows_of_lane(timeline, body.height.saturating_sub(1)));
            row /= lane_rows;
            shown_rows = shown_rows.saturating_sub(1) / lane_rows;
        }
        Body::Strip(_) | Body::Text(_) => {}
    }
    let rows = page.rows(index);
    let row = row + first_shown(selected, rows, shown_rows);
    (row < rows).then_some(Hit {
        pane: index,
        row,
        column,
    })
}

/// The index of the column of a grid in `body` that is drawn at column `x` of the terminal; `None` if none is.
fn column_at(grid: &Grid, body: Rect, selected: usize, x: u16) -> Option<usize> {
    let room = usize::from(body.width.checked_sub(Grid::LABEL_WIDTH)?);
    let (shown, width) = grid.shown_columns(room, selected);
    let from_first = usize::from(x.checked_sub(body.x)?.checked_sub(Grid::LABEL_WIDTH)?);
    let column = shown.start + from_first / width;
    shown.contains(&column).then_some(column)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panes_share_the_rows_and_never_exceed_them() {
        assert_eq!(share(&[2, 5, 3], 20, 1), [2, 15, 3]);
        assert_eq!(share(&[10, 10, 3], 9, 1), [3, 3, 3]);
        assert_eq!(share(&[10], 4, 0), [4]);
        assert_eq!(share(&[10, 10], 0, 0), [0, 0]);
        assert_eq!(share(&[], 7, 0), [0u16; 0]);
    }

    #[test]
    fn a_pane_with_headings_takes_a_row_from_the_tallest() {
        let mut heights = [2, 4, 3, 3];
        give_each_pane_its_least(&mut heights, &[3, 2, 2, 2]);
        assert_eq!(heights, [3, 3, 3, 3]);
        // Where no pane can give a row, all stay as they are.
        let mut few = [2, 2];
        give_each_pane_its_least(&mut few, &[3, 2]);
        assert_eq!(few, [2, 2]);
    }

    #[test]
    fn two_columns_share_no_cell_and_what_follows_is_below_both() {
        let pane = |lines: usize| Pane {
            title: "pane".into(),
            body: Body::Text(vec![vec![]; lines]),
        };
        let ranks = Pane {
            title: "ranks".into(),
            body: Body::Strip(crate::page::Strip {
                unit: "rank",
                dots: vec![],
            }),
        };
        let mut page = Page {
            head: vec![],
            panes: vec![pane(3), pane(2), pane(4), pane(5), ranks],
            right: vec![2],
            kept_rows: vec![],
        };
        let rects = panes(&page, Rect::new(0, 1, 161, 40));
        assert_eq!(rects[0], Rect::new(0, 1, 80, 4));
        assert_eq!(rects[1], Rect::new(0, 5, 80, 3));
        assert_eq!(rects[2], Rect::new(81, 1, 80, 7));
        assert_eq!(rects[3], Rect::new(0, 8, 161, 31));
        assert_eq!(rects[4], Rect::new(0, 39, 161, 2));
        // Ranks stay at the bottom. A last pane of any other kind directly follows the one before it, and gets the
        // spare rows.
        let below_ranks = page.panes.pop();
        page.panes.push(pane(1));
        let texts = panes(&page, Rect::new(0, 1, 161, 40));
        assert_eq!(texts[3], Rect::new(0, 8, 161, 6));
        assert_eq!(texts[4], Rect::new(0, 14, 161, 27));
        page.panes.pop();
        page.panes.extend(below_ranks);
        // Where there are too few rows, both parts get some.
        let low = panes(&page, Rect::new(0, 1, 161, 9));
        assert_eq!((low[0].height, low[1].height, low[2].height), (3, 3, 6));
        assert_eq!((low[3].height, low[4].height), (1, 2));
        // Without any row, no pane gets one.
        let none = panes(&page, Rect::new(0, 1, 161, 0));
        assert!(none.iter().all(|rect| rect.height == 0));
    }

    #[test]
    fn a_doubt_takes_rows_from_the_panes_and_leaves_them_some() {
        let text = "a doubt of some words that say why this may be wrong ".repeat(5);
        let doubt = |tone| vec![styled(text.trim_end(), tone)];
        let page = |tone| Page {
            head: vec![vec![styled("sentence", Tone::Plain)], doubt(tone)],
            panes: vec![Pane {
                title: "pane".into(),
                body: Body::Text(vec![vec![]; 20]),
            }],
            ..Page::default()
        };
        let area = Rect::new(0, 0, 40, 16);
        let rows = wrap(&doubt(Tone::Doubt), 40, usize::MAX).len();
        assert!(rows > 6 && rows < 10, "{rows}");
        let layout = of(&page(Tone::Doubt), area);
        assert_eq!(layout.head_rects().count(), 1 + rows);
        assert_eq!(usize::from(layout.panes[0].height), 16 - 2 - 1 - rows);
        assert!(!cuts_doubt(&page(Tone::Doubt).head, (40, 16)));
        // On a screen with fewer rows, the doubts are too long.
        assert!(cuts_doubt(&page(Tone::Doubt).head, (40, 12)));
        let low = of(&page(Tone::Doubt), Rect::new(0, 0, 40, 12));
        assert_eq!((low.head_rects().count(), low.panes[0].height), (7, 3));
        // A line that states no doubt gives way to the panes.
        assert!(of(&page(Tone::Plain), area).head_rects().count() <= 7);
    }

    #[test]
    fn a_long_line_is_wrapped() {
        let line = vec![styled(
            "a sentence of several words that is long",
            Tone::Plain,
        )];
        let lines = wrap(&line, 24, 4);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0][0].text, "a sentence of several");
        let full = wrap(&line, 21, 4);
        assert_eq!(full[0][0].text, "a sentence of several");
        assert_eq!(wrap(&line, 22, 1)[0][0].text, line[0].text);
    }
}
