//! The state of the view, without drawing.
//!
//! [`update`] applies one [`Event`] and returns a [`Command`] for the event loop. Nothing here reads a
//! clock, a file or the terminal.

pub mod command;
mod dispatch;
pub mod event;
pub mod filter;
pub mod history;
pub mod index;
pub mod screen;
pub mod screens;

use crate::keys::Keymap;
use crate::page::layout;
use crate::page::selection::Selection;
use crate::page::table::Table;
use crate::page::theme::{Theme, Tone};
use crate::page::{Body, Line, Page, plain, styled};
use crate::state::event::{Command, Event};
use command::Facts;
use filter::Input;
use history::History;
use index::FrameIndex;
use rcomm_analyzer::filter::Filter;
use rcomm_analyzer::format::group_label;
use rcomm_analyzer::source::TakenStacks;
use rcomm_analyzer::{Code, Moment, NodeJob, Snapshot};
use rcomm_recorder::model::Rank;
use screen::{Navigation, Screen};
use screens::{Fold, Metric, OverviewPane, Scale, ViewModel};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::Discriminant;
use std::path::PathBuf;
use std::sync::Arc;

/// Options from the command line and the configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// The colours.
    pub theme: Theme,
    /// Characters of ASCII only.
    pub ascii: bool,
    /// Actions that write are allowed.
    pub allow_actions: bool,
    /// Ranks can be asked to write their dumps themselves.
    pub askable: bool,
    /// Ranks can be asked for their call stacks.
    pub stacks_askable: bool,
    /// The sources are recorded: nothing new will arrive.
    pub still: bool,
    /// Memory for recorded frames, bytes.
    pub history: usize,
    /// The keys.
    pub keymap: Keymap,
    /// Codes muted from the beginning.
    pub muted: BTreeSet<Code>,
    /// Columns of tables, by the name of their pane; a table that is not named shows all.
    pub columns: BTreeMap<String, Vec<String>>,
    /// Panes of the first screen, from top to bottom; none: as many as the terminal has room for.
    pub layout: Vec<OverviewPane>,
}

/// A message in the last line, until the next key.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// The message.
    pub text: String,
    /// How it looks.
    pub tone: Tone,
}

/// See the module.
#[derive(Debug)]
pub struct State {
    /// From the command line and the configuration.
    pub options: Options,
    /// Which screen.
    pub nav: Navigation,
    /// The line being typed.
    pub input: Option<Input>,
    /// A sentence at the bottom.
    pub message: Option<Message>,
    /// A directory that awaits confirmation before records are written to it.
    pub confirm: Option<PathBuf>,
    /// Call stacks as they were taken last, and when.
    pub stacks: Option<(Arc<TakenStacks>, Moment)>,
    /// The jobs of this node, trouble first; empty where other sources are shown.
    pub jobs: Arc<[NodeJob]>,
    /// Recorded frames.
    pub history: History,
    /// What rows must pass.
    pub filter: Filter,
    /// Problems only.
    pub problems_only: bool,
    /// Alike rows in one.
    pub fold: Fold,
    /// What the heat map shows.
    pub metric: Metric,
    /// What part of time the timeline shows.
    pub scale: Scale,
    /// Going where the suspect is.
    pub follow: bool,
    /// Muted codes.
    pub muted: BTreeSet<Code>,
    /// Marked ranks.
    pub marks: BTreeSet<Rank>,
    /// Columns and rows of the terminal.
    pub size: (u16, u16),
    /// The present.
    pub now: Moment,
    /// What the screen lists.
    pub page: Page,
    /// Something to draw has changed.
    pub changed: bool,
    index: FrameIndex,
    selections: HashMap<Discriminant<Screen>, Selection>,
    pending: Option<String>,
}

/// Applies an event; returns a command for the event loop.
pub fn update(state: &mut State, event: Event) -> Option<Command> {
    match event {
        Event::Key(key) => {
            state.changed = true;
            return state.press(&key);
        }
        Event::Click(column, row) => return state.click(column, row),
        Event::Scroll(delta) => {
            state.changed = true;
            state.move_by(delta);
        }
        Event::Resize(columns, rows) => {
            state.size = (columns, rows);
            state.rebuild();
        }
        Event::Tick(now) => {
            // Only whole seconds are shown.
            let shown = |moment: Moment| (moment.wall_ns / 1_000_000_000, moment.elapsed.as_secs());
            let moved = shown(state.now) != shown(now);
            state.now = now;
            if moved {
                state.rebuild();
            }
        }
        Event::Observed(snapshot) => {
            state.now = state.now.max(snapshot.at);
            state.history.push(snapshot);
            if !state.history.is_paused() {
                state.show();
            } else {
                state.changed = true;
            }
        }
        Event::Suspend => return Some(Command::Suspend),
        Event::Terminate => return Some(Command::Quit),
        Event::Panicked => return Some(Command::Fail),
        Event::Stacks(stacks, at) => {
            state.stacks = Some((stacks, at));
            state.rebuild();
        }
        Event::Jobs(jobs) => {
            state.jobs = jobs;
            state.rebuild();
        }
        Event::Resumed => {
            state.changed = true;
            return Some(Command::Redraw);
        }
        Event::Done(result) => {
            state.changed = true;
            state.message = Some(match result {
                Ok(text) => Message {
                    text,
                    tone: Tone::Good,
                },
                Err(text) => Message {
                    text,
                    tone: Tone::Bad,
                },
            });
        }
    }
    None
}

impl State {
    /// Nothing seen yet, on a terminal of `size` (columns, rows).
    pub fn new(options: Options, size: (u16, u16), now: Moment) -> Self {
        let mut state = Self {
            nav: Navigation::default(),
            input: None,
            message: None,
            confirm: None,
            stacks: None,
            jobs: Arc::from([]),
            history: History::new(options.history),
            filter: Filter::default(),
            problems_only: false,
            fold: Fold::default(),
            metric: Metric::default(),
            scale: Scale::default(),
            follow: false,
            muted: options.muted.clone(),
            marks: BTreeSet::new(),
            size,
            now,
            page: Page::default(),
            changed: true,
            index: FrameIndex::default(),
            selections: HashMap::new(),
            pending: None,
            options,
        };
        state.rebuild();
        state
    }

    /// The frame shown.
    pub fn snapshot(&self) -> Option<&Arc<Snapshot>> {
        self.history.shown()
    }

    /// The screen shown.
    pub fn screen(&self) -> &Screen {
        self.nav.screen()
    }

    /// What is selected on the screen shown.
    pub fn selection(&self) -> Selection {
        let kind = self.screen().kind();
        self.selections.get(&kind).copied().unwrap_or_default()
    }

    fn selection_mut(&mut self) -> &mut Selection {
        let kind = self.screen().kind();
        self.selections.entry(kind).or_default()
    }

    /// The table in focus.
    pub fn table(&self) -> Option<&Table> {
        self.page.table(self.selection().pane)
    }

    /// Ranks at the root.
    pub fn roots(&self) -> &[Rank] {
        &self.index.roots
    }

    /// How many hosts have a name.
    pub fn hosts(&self) -> usize {
        let hosts = self.index.hosts.iter();
        hosts.filter(|host| !host.name.is_empty()).count()
    }

    /// The pane and its row under this column and row of the terminal.
    pub fn hit(&self, column: u16, row: u16) -> Option<(usize, usize)> {
        layout::hit(&self.page, self.selection(), self.size, (column, row))
    }

    /// Selects what was clicked on; a second click opens it.
    fn click(&mut self, column: u16, row: u16) -> Option<Command> {
        let (pane, row) = self.hit(column, row)?;
        self.changed = true;
        let selection = self.selection_mut();
        let again = (selection.pane, selection.row) == (pane, row);
        (selection.pane, selection.row) = (pane, row);
        again
            .then(|| self.dispatch(crate::keys::Action::Enter))
            .flatten()
    }

    fn show_message(&mut self, text: impl Into<String>, tone: Tone) {
        self.message = Some(Message {
            text: text.into(),
            tone,
        });
    }

    /// Shows another frame: updates the index.
    fn show(&mut self) {
        if let Some(snapshot) = self.history.shown() {
            self.index = FrameIndex::new(snapshot, &self.muted);
        }
        if self.follow
            && let Some(&rank) = self.index.roots.first()
        {
            self.nav.go(Screen::Rank(rank));
        }
        self.rebuild();
    }

    /// Builds the page again.
    fn rebuild(&mut self) {
        self.changed = true;
        self.page = match self.history.shown() {
            _ if *self.screen() == Screen::Help => self.help(),
            None => waiting(vec![plain("looking for a job ...")]),
            Some(snapshot)
                if snapshot.ranks.is_empty()
                    && !matches!(self.screen(), Screen::Sources | Screen::Jobs) =>
            {
                nothing(snapshot)
            }
            Some(snapshot) => self.model(snapshot).page(self.screen()),
        };
        for pane in &mut self.page.panes {
            let chosen = self.options.columns.get(&pane.name());
            if let (Body::Table(table), Some(names)) = (&mut pane.body, chosen) {
                table.choose(names);
            }
        }
        let Selection { pane, sort, .. } = self.selection();
        if let Some(Body::Table(table)) = self.page.panes.get_mut(pane).map(|p| &mut p.body) {
            table.sort(sort);
        }
        let pane = pane.min(self.page.panes.len().saturating_sub(1));
        let rows = self.page.rows(pane);
        let selection = self.selection_mut();
        selection.pane = pane;
        selection.clamp(rows);
    }

    fn help(&self) -> Page {
        let index = FrameIndex::default();
        let empty = Snapshot::empty(self.now);
        ViewModel {
            index: &index,
            ..self.model(&empty)
        }
        .page(&Screen::Help)
    }

    fn model<'a>(&'a self, snapshot: &'a Snapshot) -> ViewModel<'a> {
        let later = if self.history.is_paused() || self.options.still {
            0.0
        } else {
            let later = self.now.elapsed.saturating_sub(snapshot.at.elapsed);
            later.as_secs_f64() * 1e3
        };
        ViewModel {
            snapshot,
            index: &self.index,
            filter: &self.filter,
            problems_only: self.problems_only,
            muted: &self.muted,
            marks: &self.marks,
            later_ms: later,
            fold: self.fold,
            metric: self.metric,
            scale: self.scale,
            size: self.size,
            keymap: &self.options.keymap,
            layout: &self.options.layout,
            stacks: self.stacks.as_ref(),
            jobs: &self.jobs,
            wall_ns: self.now.wall_ns,
        }
    }

    /// The names that completion offers.
    pub fn facts(&self) -> Facts {
        let mut facts = Facts {
            codes: Code::ALL.iter().map(|code| code.id().to_owned()).collect(),
            ranks: self
                .index
                .roots
                .iter()
                .chain(&self.marks)
                .map(u32::to_string)
                .collect(),
            ..Facts::default()
        };
        if let Some(table) = self.table() {
            let named = table.columns.iter().filter(|c| !c.name.is_empty());
            facts.columns = named.map(|column| column.name.to_string()).collect();
        }
        if let Some(snapshot) = self.history.shown() {
            let report = &snapshot.report;
            facts.groups = report
                .groups
                .iter()
                .map(|g| group_label(&g.group))
                .collect();
            let ops: BTreeSet<_> = report.in_flight.iter().map(|i| i.op.clone()).collect();
            facts.ops = ops.into_iter().collect();
            let hosts = self.index.hosts.iter().map(|host| host.name.to_string());
            facts.hosts = hosts.filter(|host| !host.is_empty()).collect();
        }
        facts
    }
}

fn waiting(line: Line) -> Page {
    Page {
        head: vec![line],
        panes: vec![],
    }
}

/// The page without any rank: for each source why, and what to do.
fn nothing(snapshot: &Snapshot) -> Page {
    let mut head: Vec<Line> = vec![vec![styled(" NO JOB ", Tone::Silent)]];
    for source in &snapshot.sources {
        let status = source
            .error
            .as_deref()
            .unwrap_or("answers, but reports no ranks");
        head.push(vec![styled(source.name.clone(), Tone::Title)]);
        head.push(vec![plain(format!("  {status}"))]);
    }
    for problem in &snapshot.report.problems {
        let text = format!("  {} {}: {}", problem.code, problem.path, problem.sentence);
        head.push(vec![styled(text, Tone::Late)]);
    }
    Page {
        head,
        panes: vec![],
    }
}
