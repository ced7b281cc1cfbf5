//! A screen's content as data, built by the state and drawn by the view.

pub(crate) mod columns;
pub mod layout;
pub mod selection;
pub mod table;
pub mod theme;
pub(crate) mod width;

use self::selection::first_shown;
use self::table::Table;
use self::theme::Tone;
use rcomm_recorder::model::Rank;
use std::ops::Range;

/// A piece of text with one meaning.
#[derive(Clone, Debug, PartialEq)]
pub struct StyledText {
    /// The text.
    pub text: String,
    /// The meaning of the text, which determines its style.
    pub tone: Tone,
}

/// A text with this meaning.
pub fn styled(text: impl Into<String>, tone: Tone) -> StyledText {
    StyledText {
        text: text.into(),
        tone,
    }
}

/// Text of no particular meaning.
pub fn plain(text: impl Into<String>) -> StyledText {
    styled(text, Tone::Plain)
}

/// One line of text, in pieces.
pub type Line = Vec<StyledText>;

/// A titled part of a page.
#[derive(Clone, Debug, PartialEq)]
pub struct Pane {
    /// The title; empty if the pane has none.
    pub title: String,
    /// The content.
    pub body: Body,
}

/// The content of a pane.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Rows under columns.
    Table(Table),
    /// One cell per host or rank, or per several of them if there are too few cells.
    Strip(Strip),
    /// Cells in rows and columns.
    Grid(Grid),
    /// Operations over time.
    Timeline(Timeline),
    /// Lines of text.
    Text(Vec<Line>),
}

/// One cell of a strip or a grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dot {
    /// The character.
    pub glyph: char,
    /// The meaning of the cell.
    pub tone: Tone,
}

/// Many cells in reading order.
#[derive(Clone, Debug, PartialEq)]
pub struct Strip {
    /// The name of one unit: `host` or `rank`.
    pub unit: &'static str,
    /// The severity and the dot of each unit: if several units share a cell, the dot of the most severe is shown.
    pub dots: Vec<(u8, Dot)>,
}

/// Cells in rows and columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// Headings of the columns.
    pub columns: Vec<String>,
    /// Headings of the rows.
    pub rows: Vec<String>,
    /// Row by row: the rank and the dot of each cell; `None` if there is no cell.
    pub dots: Vec<Vec<Option<(Rank, Dot)>>>,
    /// Explanation of the characters, which takes a row; empty if the pane's title has it.
    pub legend: Line,
}

impl Grid {
    /// Width of the rows' labels.
    pub(crate) const LABEL_WIDTH: u16 = 7;

    /// The number of lines that the grid takes besides its rows: the headings of the columns, and the legend.
    pub(crate) fn rows_around(&self) -> usize {
        1 + usize::from(!self.legend.is_empty())
    }

    /// The columns that are drawn, among them the selected one, and the width of each in characters: that of the widest
    /// name if all names fit into `room` characters, else 1.
    pub(crate) fn shown_columns(&self, room: usize, selected: usize) -> (Range<usize>, usize) {
        let widest = self.columns.iter().map(String::len).max().unwrap_or(1) + 1;
        let width = match self.columns.len() * widest <= room {
            true => widest,
            false => 1,
        };
        let fitting = (room / width).max(1);
        let first = first_shown(selected, self.columns.len(), fitting);
        (first..(first + fitting).min(self.columns.len()), width)
    }
}

/// Timeline glyph: within an operation.
pub const INSIDE: char = '█';
/// Timeline glyph: the beginning of an operation that follows another without a gap.
pub const GAP_BEFORE: char = '▐';
/// Timeline glyph: within an operation that has not ended.
pub const PENDING: char = '▒';

/// Timeline glyph: within an operation that has failed.
pub const FAILED: char = 'x';

/// Timeline glyph: the time that the user has chosen.
pub const CURSOR: char = '│';

/// Operations over time, in lanes (rows), one for each rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Left edge, wall clock, ns since the epoch.
    pub from_ns: i64,
    /// Right edge, wall clock, ns since the epoch.
    pub to_ns: i64,
    /// The lanes, from top to bottom.
    pub lanes: Vec<Lane>,
    /// The time that the user has chosen, wall clock, ns since the epoch; `None` before the first choice.
    pub cursor_ns: Option<i64>,
}

/// One lane of a timeline: the operations of one rank, those of all its recorders.
#[derive(Clone, Debug, PartialEq)]
pub struct Lane {
    /// The rank.
    pub rank: Rank,
    /// Label of the lane.
    pub label: String,
    /// Tone of the label.
    pub tone: Tone,
    /// Operations, oldest first; the one that the rank waits in is the last. Each is drawn over those before it.
    pub spans: Vec<Span>,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Time of issue, wall clock, ns since the epoch.
    pub from_ns: i64,
    /// When the recorder noticed the end, wall clock, ns since the epoch; for a pending operation of a process that is
    /// gone, the end of its record. `None` for a pending operation of a process that may live.
    pub to_ns: Option<i64>,
    /// Whether the operation has not ended.
    pub pending: bool,
    /// Whether the operation has failed.
    pub failed: bool,
    /// The operation, shown where there is room.
    pub op: String,
    /// Its number and group, shown where there is room: `#41 dp_5`.
    pub call: String,
    /// How long it has been pending, shown where there is room; `None` if it is not overdue.
    pub age: Option<String>,
    /// Tone of the kind of group.
    pub tone: Tone,
}

/// A screen's content.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Lines above all panes.
    pub head: Vec<Line>,
    /// Panes, from top to bottom; within each of two columns if `right` names some.
    pub panes: Vec<Pane>,
    /// Indices of the panes that are drawn in a right column, ascending; the panes after them take the whole width
    /// below both columns. Empty if all panes are drawn one below another.
    pub right: Vec<usize>,
    /// For each pane, the rows that it gets at least, so that others do not move while its rows come and go; none for
    /// the panes that the list does not reach.
    pub kept_rows: Vec<u16>,
}

impl Pane {
    /// The name of the pane in the configuration, and that by which the focus stays on it: its title up to the first
    /// colon, comma or two spaces, with `_` for spaces. What changes with the job is behind these.
    pub fn name(&self) -> String {
        let title = self.title.split([':', ',']).next().unwrap_or("");
        let title = title.split("  ").next().unwrap_or("");
        title.trim().replace(' ', "_")
    }
}

impl Page {
    /// A page with a single table below some lines.
    pub fn of(head: Vec<Line>, title: impl Into<String>, table: Table) -> Self {
        Self {
            head,
            panes: vec![Pane {
                title: title.into(),
                body: Body::Table(table),
            }],
            ..Self::default()
        }
    }

    /// The pane at this index, if it is a table.
    pub fn table(&self, pane: usize) -> Option<&Table> {
        match self.panes.get(pane).map(|pane| &pane.body) {
            Some(Body::Table(table)) => Some(table),
            _ => None,
        }
    }

    /// Number of rows that a selection can move over; 0 if the pane has none.
    pub fn rows(&self, pane: usize) -> usize {
        match self.panes.get(pane).map(|pane| &pane.body) {
            Some(Body::Table(table)) => table.rows.len(),
            Some(Body::Grid(grid)) => grid.rows.len(),
            Some(Body::Timeline(timeline)) => timeline.lanes.len(),
            Some(Body::Text(lines)) => lines.len(),
            Some(Body::Strip(_)) | None => 0,
        }
    }
}
