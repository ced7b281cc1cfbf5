//! The widths of a table's columns.

use super::table::{Headings, Table};
use super::width::text_width;
use std::ops::Range;

/// Number of spaces between two columns.
pub(crate) const GAP: usize = 2;
/// Width that a growing column keeps, if its texts are that wide, as long as other columns can be left out.
const MIN_GROWING: usize = 48;
/// Width of the mark and the space after it.
pub(crate) const MARK_WIDTH: usize = 2;

/// The width of each column of a table that shows these rows in `width`; 0 if the column is left out or has nothing to
/// show.
pub(crate) fn widths(table: &Table, shown: Range<usize>, width: usize) -> Vec<usize> {
    let natural: Vec<usize> = table
        .columns
        .iter()
        .enumerate()
        .map(|(index, column)| {
            let cells = table.rows[shown.clone()]
                .iter()
                .filter_map(|row| row.cells.get(index));
            let widest = cells.map(|cell| text_width(&cell.text)).max().unwrap_or(0);
            let heading = if table.headings == Headings::Shown {
                text_width(&column.name)
            } else {
                0
            };
            widest.max(heading)
        })
        .collect();
    let mut kept: Vec<bool> = natural.iter().map(|&n| n > 0).collect();
    let min_width = |index: usize| {
        if table.columns[index].grows {
            natural[index].min(MIN_GROWING)
        } else {
            natural[index]
        }
    };
    let needed = |kept: &[bool]| -> usize {
        let all = (0..kept.len()).filter(|&index| kept[index]);
        MARK_WIDTH + all.map(|index| min_width(index) + GAP).sum::<usize>()
    };
    while needed(&kept) > width + GAP {
        let droppable =
            (0..kept.len()).filter(|&index| kept[index] && table.columns[index].drop_order > 0);
        match droppable.max_by_key(|&index| table.columns[index].drop_order) {
            Some(index) => kept[index] = false,
            None => break,
        }
    }
    let fixed: usize = (0..kept.len())
        .filter(|&index| kept[index] && !table.columns[index].grows)
        .map(|index| natural[index] + GAP)
        .sum();
    let mut growing: Vec<usize> = (0..kept.len())
        .filter(|&index| kept[index] && table.columns[index].grows)
        .collect();
    let mut widths: Vec<usize> = (0..kept.len())
        .map(|index| if kept[index] { natural[index] } else { 0 })
        .collect();
    // Each growing column takes what it needs, up to an equal share of the width that is left. The columns that need
    // the least come first, and leave the rest to the others.
    growing.sort_by_key(|&index| natural[index]);
    let mut left = width.saturating_sub(MARK_WIDTH + fixed);
    for (done, &index) in growing.iter().enumerate() {
        let todo = growing.len() - done;
        let room = left.saturating_sub(GAP * (todo - 1)) / todo;
        widths[index] = natural[index].min(room.max(1));
        left = left.saturating_sub(widths[index] + GAP);
    }
    widths
}
