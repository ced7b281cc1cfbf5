//! The selection on each screen.

use crate::page::table::Sort;

/// The selected cell and the order of rows on one screen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Selected row of the focused pane.
    pub row: usize,
    /// Selected column, on screens whose columns can be selected (heat map).
    pub column: usize,
    /// Focused pane.
    pub pane: usize,
    /// Its name when it got the focus: its index changes while panes above it come and go.
    pub pane_name: String,
    /// Order of the rows of the focused pane.
    pub sort: Sort,
    /// The selected row of the first pane and the order of its rows, while another pane has the focus.
    pub first: (usize, Sort),
}

impl Selection {
    /// Moves the focus to another pane, with this name. The first pane keeps its row and its order, since other panes
    /// show details of that row.
    pub fn focus(&mut self, pane: usize, name: String) {
        if self.pane == 0 {
            self.first = (self.row, self.sort);
        }
        (self.pane, self.pane_name) = (pane, name);
        (self.row, self.sort) = match pane {
            0 => self.first,
            _ => <(usize, Sort)>::default(),
        };
    }

    /// The selected row of the first pane and the order of its rows, also while another pane has the focus.
    pub fn of_first_pane(&self) -> (usize, Sort) {
        match self.pane {
            0 => (self.row, self.sort),
            _ => self.first,
        }
    }

    /// Moves by `delta` rows among `rows`, stopping at the ends.
    pub fn move_by(&mut self, delta: isize, rows: usize) {
        self.row = self.row.saturating_add_signed(delta);
        self.clamp(rows);
    }

    /// Keeps the selection within `rows`.
    pub fn clamp(&mut self, rows: usize) {
        self.row = self.row.min(rows.saturating_sub(1));
    }
}

/// Returns the first row to show so that the selected one is among the `height` shown rows of `rows`.
///
/// It does not depend on what was shown before: the selected row is kept in the middle, except near the ends.
pub fn first_shown(selected: usize, rows: usize, height: usize) -> usize {
    let last = rows.saturating_sub(height);
    selected.saturating_sub(height / 2).min(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_selected_row_is_always_shown(rows in 1usize..500, selected in 0usize..500, height in 1usize..60) {
            let selected = selected.min(rows - 1);
            let first = first_shown(selected, rows, height);
            prop_assert!(first <= selected && selected < first + height);
            prop_assert!(first + height <= rows || first == 0);
        }
    }
}
