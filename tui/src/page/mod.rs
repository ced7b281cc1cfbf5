//! A screen's content as data, built by the state and drawn by the view.

pub mod layout;
pub mod selection;
pub mod table;
pub mod theme;
pub(crate) mod width;

use self::table::Table;
use self::theme::Tone;
use rcomm_recorder::model::Rank;

/// A piece of text with one meaning.
#[derive(Clone, Debug, PartialEq)]
pub struct StyledText {
    /// The text.
    pub text: String,
    /// What it means.
    pub tone: Tone,
}

/// Text of this tone.
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

/// One line.
pub type Line = Vec<StyledText>;

/// A titled part of a page.
#[derive(Clone, Debug, PartialEq)]
pub struct Pane {
    /// Its title; empty = none.
    pub title: String,
    /// What it holds.
    pub body: Body,
}

/// What a pane holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Rows under columns.
    Table(Table),
    /// One cell per host or rank, as small as can be.
    Strip(Strip),
    /// Cells in rows and columns.
    Grid(Grid),
    /// Lanes along time.
    Timeline(Timeline),
    /// Lines to read.
    Text(Vec<Line>),
}

/// One cell of a strip or a grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dot {
    /// Its character.
    pub glyph: char,
    /// What it means.
    pub tone: Tone,
}

/// Many cells in reading order.
#[derive(Clone, Debug, PartialEq)]
pub struct Strip {
    /// Unit of one cell: `host`, `rank`.
    pub unit: &'static str,
    /// One per unit, with how bad it is: where several share a cell, the worst is shown.
    pub dots: Vec<(u8, Dot)>,
}

/// Cells in rows and columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// Heads of the columns.
    pub columns: Vec<String>,
    /// Heads of the rows.
    pub rows: Vec<String>,
    /// Row by row: whose cell, and how it looks; `None` = there is no such cell.
    pub dots: Vec<Vec<Option<(Rank, Dot)>>>,
    /// What the characters mean.
    pub legend: Line,
}

/// In a timeline: in an operation.
pub const INSIDE: char = '█';
/// In a timeline: in an operation that is not over.
pub const PENDING: char = '▒';

/// Lanes along time.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Left edge, wall clock, ns.
    pub from_ns: i64,
    /// Right edge, wall clock, ns.
    pub to_ns: i64,
    /// One per rank.
    pub lanes: Vec<Lane>,
}

/// One rank's time.
#[derive(Clone, Debug, PartialEq)]
pub struct Lane {
    /// Whose.
    pub rank: Rank,
    /// Label of the lane.
    pub label: String,
    /// How the label looks.
    pub tone: Tone,
    /// Operations, oldest first.
    pub spans: Vec<Span>,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// From its issue, ns.
    pub from_ns: i64,
    /// To its completion; `None` = pending.
    pub to_ns: Option<i64>,
}

/// A screen's content.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Lines above everything.
    pub head: Vec<Line>,
    /// Parts, from top to bottom.
    pub panes: Vec<Pane>,
}

impl Pane {
    /// Its name in the configuration: its title up to where facts begin.
    pub fn name(&self) -> String {
        let title = self.title.split([':', ',']).next().unwrap_or("");
        let title = title.split("  ").next().unwrap_or("");
        title.trim().replace(' ', "_")
    }
}

impl Page {
    /// One table under a few lines.
    pub fn of(head: Vec<Line>, title: impl Into<String>, table: Table) -> Self {
        Self {
            head,
            panes: vec![Pane {
                title: title.into(),
                body: Body::Table(table),
            }],
        }
    }

    /// The pane of this number, if it is a table.
    pub fn table(&self, pane: usize) -> Option<&Table> {
        match self.panes.get(pane).map(|pane| &pane.body) {
            Some(Body::Table(table)) => Some(table),
            _ => None,
        }
    }

    /// Rows that a selection can move over.
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
