//! Everything that can happen, in one enum.

use ratatui::crossterm::event::KeyEvent;
use rcomm_analyzer::source::TakenStacks;
use rcomm_analyzer::{Moment, Snapshot};
use std::path::PathBuf;
use std::sync::Arc;

/// Something happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A key was pressed.
    Key(KeyEvent),
    /// The mouse was pressed at this column and row of the terminal.
    Click(u16, u16),
    /// The wheel was turned by so many rows.
    Scroll(isize),
    /// The terminal has a new size: columns, rows.
    Resize(u16, u16),
    /// Time went by.
    Tick(Moment),
    /// The job was judged anew.
    Observed(Arc<Snapshot>),
    /// Somebody asks the program to end.
    Terminate,
    /// Somebody asks the program to go to the background.
    Suspend,
    /// The program comes back to the foreground: redraw.
    Resumed,
    /// Call stacks were taken.
    Stacks(Arc<TakenStacks>, Moment),
    /// A thread panicked.
    Panicked,
    /// A command is done; what to tell the user.
    Done(Result<String, String>),
}

/// What the state asks the outside to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// End.
    Quit,
    /// Go to the background.
    Suspend,
    /// Clear the terminal and draw everything.
    Redraw,
    /// Put text on the clipboard.
    Copy(String),
    /// Write something to a file.
    Export(ExportFormat, PathBuf),
    /// Write every rank's record to a folder.
    WriteRecords(PathBuf),
    /// Ask the ranks to write their dumps themselves.
    AskForDumps,
    /// Take the ranks' call stacks.
    TakeStacks,
    /// End, since a thread panicked.
    Fail,
}

/// What `:export` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// The screen, without colours.
    Text,
    /// The report.
    Json,
    /// A timeline for ui.perfetto.dev.
    Perfetto,
}

impl ExportFormat {
    /// Every format with its name and the file it goes to by default.
    pub const ALL: &'static [(Self, &'static str, &'static str)] = &[
        (Self::Text, "text", "rcomm-top.txt"),
        (Self::Json, "json", "rcomm-report.json"),
        (Self::Perfetto, "perfetto", "rcomm-timeline.json"),
    ];
}
