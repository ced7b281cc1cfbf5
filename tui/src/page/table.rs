//! Tables as data, before they are drawn.

use crate::page::theme::Tone;
use rcomm_analyzer::GroupRef;
use rcomm_recorder::model::Rank;
use std::borrow::Cow;
use std::cmp::Ordering;
use std::sync::Arc;

/// The subject of a row. Opening the row shows it.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// One group.
    Group(Arc<GroupRef>),
    /// Groups shown in one row.
    Groups(Arc<[Arc<GroupRef>]>),
    /// One rank.
    Rank(Rank),
    /// Several ranks.
    Ranks(Arc<[Rank]>),
    /// The finding with this id in the report.
    Finding(u32),
    /// A job of this node.
    Job(Arc<str>),
}

/// The side to which the cells of a column are aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// For text.
    Left,
    /// For numbers.
    Right,
}

/// One column.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    /// The heading.
    pub name: Cow<'static, str>,
    /// Alignment of the column's cells.
    pub align: Align,
    /// Which column a narrow terminal leaves out first: the one with the largest number. One with 0 always stays.
    pub drop_order: u8,
    /// Whether the column takes the remaining width; several such columns share it.
    pub grows: bool,
}

/// A column of text.
pub const fn text(name: &'static str, drop_order: u8) -> Column {
    Column {
        name: Cow::Borrowed(name),
        align: Align::Left,
        drop_order,
        grows: false,
    }
}

/// A column of numbers.
pub const fn number(name: &'static str, drop_order: u8) -> Column {
    Column {
        name: Cow::Borrowed(name),
        align: Align::Right,
        drop_order,
        grows: false,
    }
}

/// A column of text that takes the remaining width.
pub const fn rest(name: &'static str, drop_order: u8) -> Column {
    Column {
        name: Cow::Borrowed(name),
        align: Align::Left,
        drop_order,
        grows: true,
    }
}

/// The content of a cell.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cell {
    /// Text as displayed.
    pub text: String,
    /// Value to sort by, largest first; cells with NaN come after the others, by text.
    pub value: f64,
    /// The tone of the cell; `Plain` uses the tone of the row.
    pub tone: Tone,
}

impl Cell {
    /// A cell with a text.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            value: f64::NAN,
            tone: Tone::Plain,
        }
    }

    /// A cell with a number, displayed as `text`.
    pub fn number(text: impl Into<String>, value: f64) -> Self {
        Self {
            text: text.into(),
            value,
            tone: Tone::Plain,
        }
    }

    /// The same cell in another tone.
    pub fn toned(mut self, tone: Tone) -> Self {
        self.tone = tone;
        self
    }
}

/// A row's mark: what kind of row it is, in one character and a tone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The character.
    pub glyph: char,
    /// The tone of the mark.
    pub tone: Tone,
}

impl Mark {
    /// No mark.
    pub const NONE: Self = Self::new(' ', Tone::Plain);

    /// A mark.
    pub const fn new(glyph: char, tone: Tone) -> Self {
        Self { glyph, tone }
    }
}

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Mark in front of the row.
    pub mark: Mark,
    /// One cell per column.
    pub cells: Vec<Cell>,
    /// The tone of the row.
    pub tone: Tone,
    /// The subject of the row, if it has one.
    pub target: Option<Target>,
    /// Whether the row shows a problem: `n` goes to it, and "problems only" keeps it.
    pub problem: bool,
}

impl Row {
    /// The row as a line of text, for the clipboard.
    pub fn line(&self) -> String {
        let words: Vec<&str> = self
            .cells
            .iter()
            .map(|cell| cell.text.trim())
            .filter(|text| !text.is_empty())
            .collect();
        words.join("  ")
    }
}

/// Rows under columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// The columns.
    pub columns: Vec<Column>,
    /// The rows.
    pub rows: Vec<Row>,
    /// Text shown if the table has no rows.
    pub empty: String,
    /// Whether the headings of the columns are shown.
    pub headings: Headings,
}

/// Whether the headings of columns are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Headings {
    /// Above the rows.
    #[default]
    Shown,
    /// Not shown.
    Hidden,
}

/// The order of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sort {
    /// Index of the column; `None` for the view's default order, most pressing rows first.
    pub column: Option<usize>,
    /// Whether the order is reversed.
    pub reversed: bool,
}

impl Table {
    /// Shows these columns in this order. Unknown names are ignored; if no column would be left, the
    /// table stays unchanged.
    pub fn choose(&mut self, names: &[String]) {
        // The configuration may name the heading `missing or error` by its first part: the other comes and goes.
        let index = |name: &String| {
            let is_named = |column: &Column| {
                let first = column.name.split(" or ").next();
                column.name == *name || first == Some(name.as_str())
            };
            self.columns.iter().position(is_named)
        };
        let order: Vec<usize> = names.iter().filter_map(index).collect();
        if order.is_empty() {
            return;
        }
        self.columns = order
            .iter()
            .map(|&index| self.columns[index].clone())
            .collect();
        for row in &mut self.rows {
            let cells = order
                .iter()
                .filter_map(|&index| row.cells.get(index).cloned());
            row.cells = cells.collect();
        }
    }

    /// Sorts the rows. Equal rows keep their order, or are reversed with the others.
    pub fn sort(&mut self, sort: Sort) {
        if let Some(column) = sort.column {
            self.rows.sort_by(|a, b| compare(a, b, column));
        }
        if sort.reversed {
            self.rows.reverse();
        }
    }
}

/// The default order of two rows by a column: numbers, largest first, before cells without one, which are sorted by
/// their text.
fn compare(a: &Row, b: &Row, column: usize) -> Ordering {
    let (Some(a), Some(b)) = (a.cells.get(column), b.cells.get(column)) else {
        return Ordering::Equal;
    };
    match (a.value.is_nan(), b.value.is_nan()) {
        // Large numbers first: the most pressing are the largest.
        (false, false) => b.value.total_cmp(&a.value),
        (false, true) => Ordering::Less,
        (true, false) => Ordering::Greater,
        (true, true) => a.text.cmp(&b.text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(cells: &[(&str, f64)]) -> Table {
        let row = |&(text, value): &(&str, f64)| Row {
            mark: Mark::NONE,
            cells: vec![Cell::number(text, value)],
            tone: Tone::Plain,
            target: None,
            problem: false,
        };
        Table {
            columns: vec![number("n", 0)],
            rows: cells.iter().map(row).collect(),
            ..Table::default()
        }
    }

    #[test]
    fn large_numbers_come_first_and_unknown_ones_last_unless_the_order_is_reversed() {
        let mut table = table(&[("2", 2.0), ("--", f64::NAN), ("10", 10.0)]);
        let sort = Sort {
            column: Some(0),
            reversed: false,
        };
        table.sort(sort);
        let texts: Vec<_> = table.rows.iter().map(Row::line).collect();
        assert_eq!(texts, ["10", "2", "--"]);
        table.sort(Sort {
            reversed: true,
            ..sort
        });
        assert_eq!(table.rows[0].line(), "--");
    }
}
