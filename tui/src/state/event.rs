//! Events that change the state, and commands that the state issues.

use ratatui::crossterm::event::KeyEvent;
use rcomm_analyzer::source::{ProcessFacts, TakenStacks};
use rcomm_analyzer::{Moment, NodeJob, Snapshot};
use rcomm_recorder::model::Rank;
use std::path::PathBuf;
use std::sync::Arc;

/// A change outside the state, from a thread or the terminal.
#[derive(Clone, Debug)]
pub enum Event {
    /// A key was pressed.
    Key(KeyEvent),
    /// The mouse was clicked at this column and row.
    Click(u16, u16),
    /// The wheel was turned by this many rows, down if positive.
    Scroll(isize),
    /// The terminal has a new size: columns, rows.
    Resize(u16, u16),
    /// The current time.
    Tick(Moment),
    /// A new analysis of the job.
    Observed(Arc<Snapshot>),
    /// The jobs of this node, those in trouble first.
    Jobs(Arc<[NodeJob]>),
    /// A request to end the program.
    Terminate,
    /// A request to suspend the program.
    Suspend,
    /// The program resumes in the foreground: redraw.
    Resumed,
    /// Call stacks were taken, at this time.
    Stacks(Arc<TakenStacks>, Moment),
    /// Facts about the processes, hosts and GPUs of ranks were read; empty if that failed.
    ProcessFacts(Vec<ProcessFacts>),
    /// A thread panicked.
    Panicked,
    /// A message for the user: what a command has done, or why it or a recording failed.
    Done(Result<String, String>),
}

/// A request of the state to the event loop.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Quit the program.
    Quit,
    /// Suspend the program.
    Suspend,
    /// Clear the terminal and draw the whole screen.
    Redraw,
    /// Put text on the clipboard.
    Copy(String),
    /// Write the screen, the report or the timeline to a file, by format.
    Export(ExportFormat, PathBuf),
    /// Write the dumps of all ranks to a folder.
    WriteRecords(PathBuf),
    /// Ask the ranks to write their own dumps.
    AskForDumps,
    /// Take the ranks' call stacks.
    TakeStacks,
    /// Read facts about the processes, hosts and GPUs of these ranks.
    ReadProcessFacts(Vec<Rank>),
    /// Show another job of this node.
    ShowJob(Arc<str>),
    /// Quit because a thread panicked.
    Fail,
}

/// The content that `:export` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// The screen, without colors.
    Text,
    /// The report.
    Json,
    /// A timeline for ui.perfetto.dev.
    Perfetto,
}

impl ExportFormat {
    /// Every format with its name and its default file.
    pub const ALL: &'static [(Self, &'static str, &'static str)] = &[
        (Self::Text, "text", "rcomm-top.txt"),
        (Self::Json, "json", "rcomm-report.json"),
        (Self::Perfetto, "perfetto", "rcomm-timeline.json"),
    ];
}
