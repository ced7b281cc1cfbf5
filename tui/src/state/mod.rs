//! The state of the view, without drawing.
//!
//! [`update`] applies one [`Event`] and returns a [`Command`] for the event loop. Nothing here reads a
//! clock, a file or the terminal.

mod arrangement;
pub mod command;
mod copy;
mod dispatch;
pub mod event;
pub mod history;
pub mod index;
pub mod input;
pub mod screen;
pub mod screens;
pub mod trends;

use crate::keys::Keymap;
use crate::page::layout::{self, Hit};
use crate::page::selection::Selection;
use crate::page::table::{Sort, Table};
use crate::page::theme::{Theme, Tone};
use crate::page::{Body, Line, Page, Pane, StyledText, plain};
use crate::state::event::{Command, Event};
use arrangement::{Arrangement, arranged};
use command::KnownNames;
use history::History;
use index::FrameIndex;
use input::Input;
use rcomm_analyzer::filter::Filter;
use rcomm_analyzer::source::{ProcessFacts, TakenStacks};
use rcomm_analyzer::{Code, GroupRef, Moment, NodeJob, Snapshot};
use rcomm_recorder::model::Rank;
use screen::{Navigation, Screen};
use screens::{
    Fold, Metric, OverviewPane, Scale, ViewModel, fill, no_ranks_page, trouble_elsewhere,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::Discriminant;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use trends::Trends;

/// Options from the command line and the configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// The theme.
    pub theme: Theme,
    /// Draw with ASCII characters only.
    pub ascii: bool,
    /// Allow actions that write.
    pub allow_actions: bool,
    /// Whether ranks can be asked to write their dumps themselves.
    pub askable: bool,
    /// Whether ranks can be asked for their call stacks.
    pub stacks_askable: bool,
    /// Whether facts about the processes of ranks can be read: only where the rings on this node are watched.
    pub reads_process_facts: bool,
    /// Whether the sources never change: dumps and recordings.
    pub still: bool,
    /// Whether dumps are replayed: a snapshot then has the time at which they were read.
    pub dumps: bool,
    /// When the fault of a simulated job begins, wall clock, ns since the epoch; `None` if there is none.
    pub fault_ns: Option<i64>,
    /// Memory for the snapshots that are kept, in bytes; `None` if it depends on the number of ranks.
    pub history: Option<usize>,
    /// The key bindings.
    pub keymap: Keymap,
    /// Codes that are muted at start.
    pub muted: BTreeSet<Code>,
    /// Columns of tables, by the name of their pane; other tables show all columns.
    pub columns: BTreeMap<String, Vec<String>>,
    /// Panes of the first screen, from top to bottom; if empty, the default ones, which depend on the job and on the
    /// size of the terminal.
    pub layout: Vec<OverviewPane>,
}

/// A message in the last line, shown until the next key press.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// The message.
    pub text: String,
    /// The tone of the text.
    pub tone: Tone,
}

/// The state of the view. See the module's documentation.
#[derive(Debug)]
pub struct State {
    /// Options from the command line and the configuration.
    pub options: Options,
    /// The current screen and the history of visited screens.
    pub nav: Navigation,
    /// The current input, if a filter or command is being typed.
    pub input: Option<Input>,
    /// The message in the last line.
    pub message: Option<Message>,
    /// A directory that awaits confirmation before records are written to it.
    pub confirm: Option<PathBuf>,
    /// The call stacks taken last, and when they were taken.
    pub stacks: Option<(Arc<TakenStacks>, Moment)>,
    /// Facts about the processes, hosts and GPUs of the ranks at fault or, if there are none, of the first one that is
    /// late, and of the rank on display, as read last.
    pub process_facts: Vec<ProcessFacts>,
    /// The jobs of this node, those in trouble first; empty if the sources are not rings.
    pub jobs: Arc<[NodeJob]>,
    /// The snapshots that are kept.
    pub history: History,
    /// Figures of the job over time.
    pub trends: Trends,
    /// Filter on the rows.
    pub filter: Filter,
    /// Whether only rows with a problem are shown.
    pub problems_only: bool,
    /// Whether similar groups, operations or ranks share a row.
    pub fold: Fold,
    /// Metric of the heat map.
    pub metric: Metric,
    /// The time range of the timeline.
    pub scale: Scale,
    /// Whether the selection follows the suspect.
    pub follow: bool,
    /// Muted codes.
    pub muted: BTreeSet<Code>,
    /// Marked ranks.
    pub marks: BTreeSet<Rank>,
    /// Columns and rows of the terminal.
    pub size: (u16, u16),
    /// The current time.
    pub now: Moment,
    /// The content of the current screen.
    pub page: Page,
    /// What the first line says of other jobs of the node; `None` where the screen itself says more of them.
    pub other_jobs: Option<StyledText>,
    /// Whether the screen must be drawn again.
    pub changed: bool,
    index: FrameIndex,
    /// The panes of the first screen when it was built last.
    arrangement: Option<Arrangement>,
    /// The selection on each kind of screen that has been shown.
    selections: HashMap<Discriminant<Screen>, Selection>,
    /// The first key of a binding of two keys, once it was pressed.
    pending_key: Option<String>,
    /// When facts about processes were requested last, and of which ranks; `None` before the first time.
    requested: Option<(Duration, Vec<Rank>)>,
    /// Whether facts about processes are being read.
    reading_process_facts: bool,
}

/// Time between two reads of facts about processes: `nvidia-smi` may use a second of processor time.
const PROCESS_FACTS_INTERVAL: Duration = Duration::from_secs(10);

/// Applies an event; returns a command for the event loop.
pub fn update(state: &mut State, event: Event) -> Option<Command> {
    match event {
        Event::Key(key) => {
            state.changed = true;
            return state.press(&key);
        }
        Event::Click(column, row) => return state.click(column, row),
        Event::Scroll(delta) => {
            state.move_by(delta);
            state.rebuild();
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
            let before = state.history.newest();
            if before.is_some_and(|before| before.job != snapshot.job) {
                // The ranks of another job are other processes.
                state.process_facts.clear();
                state.requested = None;
            }
            state.trends.observe(before.map(Arc::as_ref), &snapshot);
            if before.is_none() && state.options.dumps {
                state.scale = Scale::of_whole(&snapshot);
            }
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
            // The message said that they are being taken; their screen says what was taken.
            state.message = None;
            state.rebuild();
        }
        Event::ProcessFacts(process_facts) => {
            state.reading_process_facts = false;
            state.process_facts = process_facts;
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
    /// Creates the state without a snapshot, on a terminal of `size` (columns, rows).
    pub fn new(options: Options, size: (u16, u16), now: Moment) -> Self {
        let mut state = Self {
            nav: Navigation::default(),
            input: None,
            message: None,
            confirm: None,
            stacks: None,
            process_facts: vec![],
            requested: None,
            reading_process_facts: false,
            jobs: Arc::from([]),
            history: History::new(options.history),
            trends: Trends::default(),
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
            other_jobs: None,
            changed: true,
            index: FrameIndex::default(),
            arrangement: None,
            selections: HashMap::new(),
            pending_key: None,
            options,
        };
        state.rebuild();
        state
    }

    /// The displayed snapshot; `None` before the first.
    pub fn snapshot(&self) -> Option<&Arc<Snapshot>> {
        self.history.shown()
    }

    /// The current screen.
    pub fn screen(&self) -> &Screen {
        self.nav.screen()
    }

    /// The selection on the current screen.
    pub fn selection(&self) -> Selection {
        let kind = self.screen().kind();
        self.selections.get(&kind).cloned().unwrap_or_default()
    }

    fn selection_mut(&mut self) -> &mut Selection {
        let kind = self.screen().kind();
        self.selections.entry(kind).or_default()
    }

    /// The focused pane, if it is a table.
    pub fn table(&self) -> Option<&Table> {
        self.page.table(self.selection().pane)
    }

    /// The ranks that are root causes.
    pub fn roots(&self) -> &[Rank] {
        self.index.roots()
    }

    /// Number of hosts that have a name.
    pub fn hosts(&self) -> usize {
        let hosts = self.index.hosts.iter();
        hosts.filter(|host| !host.name.is_empty()).count()
    }

    /// The label of a group, as on every screen.
    pub fn label_of(&self, group: &GroupRef) -> String {
        self.index.names().name(group)
    }

    /// What is at this column and row of the terminal; `None` if no row of a pane is there.
    pub fn hit(&self, column: u16, row: u16) -> Option<Hit> {
        layout::hit(&self.page, self.selection(), self.size, (column, row))
    }

    /// Selects the clicked row, in a grid the clicked cell; opens it if it was selected already.
    fn click(&mut self, column: u16, row: u16) -> Option<Command> {
        let Hit { pane, row, column } = self.hit(column, row)?;
        let selection = self.selection();
        let column = column.unwrap_or(selection.column);
        if (selection.pane, selection.row, selection.column) == (pane, row, column) {
            return self.dispatch(crate::keys::Action::Enter);
        }
        if selection.pane != pane {
            self.focus(pane);
        }
        let selection = self.selection_mut();
        (selection.row, selection.column) = (row, column);
        self.rebuild();
        None
    }

    fn show_message(&mut self, text: impl Into<String>, tone: Tone) {
        self.message = Some(Message {
            text: text.into(),
            tone,
        });
    }

    /// Updates the index and the page after the displayed snapshot changed. If the user follows the suspect, opens the
    /// screen of the first root cause.
    fn show(&mut self) {
        if let Some(snapshot) = self.history.shown() {
            self.index = FrameIndex::new(snapshot, &self.muted);
        }
        if self.follow
            && let Some(&rank) = self.index.roots().first()
        {
            self.nav.go(Screen::Rank(rank));
        }
        self.rebuild();
    }

    /// The focused pane of the first screen; `None` if that has not been built.
    fn focused_overview_pane(&self) -> Option<OverviewPane> {
        let panes = &self.arrangement.as_ref()?.panes;
        panes.get(self.selection().pane).copied()
    }

    /// Moves the focus to another pane of the page.
    fn focus(&mut self, pane: usize) {
        let name = self.page.panes.get(pane).map(Pane::name);
        self.selection_mut().focus(pane, name.unwrap_or_default());
    }

    /// Keeps the focus on its pane while panes above it come and go, and the selection within its rows. If the pane is
    /// no longer shown, the one in its place has the focus.
    fn keep_focus(&mut self) {
        let Selection {
            pane, pane_name, ..
        } = self.selection();
        if pane > 0 {
            let mut panes = self.page.panes.iter().skip(1);
            match panes.position(|other| other.name() == pane_name) {
                Some(index) => self.selection_mut().pane = index + 1,
                None => self.focus(pane.min(self.page.panes.len().saturating_sub(1))),
            }
            let Selection { pane, sort, .. } = self.selection();
            self.sort_pane(pane, sort);
        }
        let rows = self.page.rows(self.selection().pane);
        self.selection_mut().clamp(rows);
    }

    /// Builds the page of the current screen again, and keeps the selection within it.
    fn rebuild(&mut self) {
        self.changed = true;
        self.page = match self.history.shown() {
            _ if *self.screen() == Screen::Help => self.help(),
            None => waiting_page(vec![plain("looking for a job ...")]),
            Some(snapshot)
                if snapshot.ranks.is_empty()
                    && !matches!(self.screen(), Screen::Sources | Screen::Jobs) =>
            {
                no_ranks_page(snapshot)
            }
            Some(snapshot) if *self.screen() == Screen::Overview => {
                let selection = self.selection();
                let selecting = (selection.pane, selection.row) != (0, 0);
                let before = self.arrangement.as_ref();
                let (arrangement, page) = arranged(&self.model(snapshot), before, selecting);
                self.arrangement = Some(arrangement);
                page
            }
            Some(snapshot) => self.model(snapshot).page(self.screen()),
        };
        for pane in &mut self.page.panes {
            let chosen = self.options.columns.get(&pane.name());
            if let (Body::Table(table), Some(names)) = (&mut pane.body, chosen) {
                table.choose(names);
            }
        }
        let selection = self.selection();
        self.sort_pane(0, selection.of_first_pane().1);
        let row = selection.of_first_pane().0;
        let shown = self.history.shown();
        let more = shown.and_then(|it| self.model(it).selected(self.screen(), &self.page, row));
        self.page.panes.extend(more);
        if let Some(snapshot) = self.history.shown() {
            let mut page = std::mem::take(&mut self.page);
            fill(&self.model(snapshot), self.screen(), &mut page);
            self.page = page;
        }
        self.other_jobs = match (self.history.shown(), self.screen()) {
            (Some(_), Screen::Overview | Screen::Jobs) | (None, _) => None,
            (Some(snapshot), _) => trouble_elsewhere(&self.model(snapshot)),
        };
        self.keep_focus();
    }

    /// When the displayed records were taken, ns since the epoch; `None` if there are none, or they do not note it.
    pub fn as_of_ns(&self) -> Option<i64> {
        let snapshot = self.history.shown()?;
        if !self.options.dumps {
            return Some(snapshot.at.wall_ns);
        }
        let taken = snapshot.dumps().map(|(_, dump)| dump.identity.dump_time_ns);
        taken.max().filter(|&taken_ns| taken_ns > 0)
    }

    /// The time of the newest event of an operation in the displayed records, ns since the epoch; `None` without one.
    pub fn newest_event_ns(&self) -> Option<i64> {
        let dumps = self.history.shown()?.dumps();
        let entries = dumps.flat_map(|(_, dump)| &dump.entries);
        let times = entries.map(|entry| {
            entry
                .time_discovered_completed_ns
                .max(entry.time_created_ns)
        });
        times.max().filter(|&ns| ns > 0)
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

    /// Orders the rows of a pane, if it is a table.
    fn sort_pane(&mut self, pane: usize, sort: Sort) {
        if let Some(Body::Table(table)) = self.page.panes.get_mut(pane).map(|p| &mut p.body) {
            table.sort(sort);
        }
    }

    /// What screens need to build their pages.
    fn model<'a>(&'a self, snapshot: &'a Snapshot) -> ViewModel<'a> {
        // The operations of a job that has ended no longer age.
        let stands_still =
            self.history.is_paused() || self.options.still || snapshot.report.end.is_some();
        let later_ms = match stands_still {
            true => 0.0,
            false => {
                let later = self.now.elapsed.saturating_sub(snapshot.at.elapsed);
                later.as_secs_f64() * 1e3
            }
        };
        ViewModel {
            snapshot,
            index: &self.index,
            filter: &self.filter,
            problems_only: self.problems_only,
            muted: &self.muted,
            marks: &self.marks,
            later_ms,
            as_of_ns: self.as_of_ns(),
            fold: self.fold,
            metric: self.metric,
            scale: self.scale,
            size: self.size,
            keymap: &self.options.keymap,
            layout: &self.options.layout,
            row: self.selection().of_first_pane().0,
            stacks: self.stacks.as_ref(),
            // The facts read last are not those of an earlier snapshot.
            process_facts: match self.history.is_paused() {
                true => &[],
                false => &self.process_facts,
            },
            is_replay: self.options.dumps,
            reads_this_node: self.options.reads_process_facts,
            jobs: &self.jobs,
            trends: &self.trends,
            wall_ns: self.now.wall_ns,
            fault_ns: self.options.fault_ns,
        }
    }

    /// The command to read facts about the processes of the ranks at fault or, if there are none, of the first one that
    /// is late, and of the rank on display; `None` if the last read is recent enough or has not ended, or if there is
    /// nothing to read.
    pub fn due_process_facts(&mut self) -> Option<Command> {
        let mut ranks = self.index.roots().to_vec();
        if ranks.is_empty() {
            ranks.extend(self.index.suspect);
        }
        if let Screen::Rank(rank) = self.screen() {
            ranks.insert(0, *rank);
        }
        let elapsed = self.now.elapsed;
        let is_due = self
            .requested
            .as_ref()
            .is_none_or(|(requested_at, requested_ranks)| {
                // Ranks that are at fault or were opened since are read at once.
                *requested_ranks != ranks
                    || elapsed.saturating_sub(*requested_at) >= PROCESS_FACTS_INTERVAL
            });
        if !self.options.reads_process_facts
            || ranks.is_empty()
            || self.reading_process_facts
            || !is_due
        {
            return None;
        }
        self.requested = Some((elapsed, ranks.clone()));
        self.reading_process_facts = true;
        Some(Command::ReadProcessFacts(ranks))
    }

    /// The names that completion can offer.
    pub fn known_names(&self) -> KnownNames {
        let mut names = KnownNames {
            codes: Code::ALL.iter().map(|code| code.id().to_owned()).collect(),
            ranks: self
                .index
                .roots()
                .iter()
                .chain(&self.marks)
                .map(u32::to_string)
                .collect(),
            ..KnownNames::default()
        };
        if let Some(table) = self.table() {
            let named = table.columns.iter().filter(|c| !c.name.is_empty());
            names.columns = named.map(|column| column.name.to_string()).collect();
        }
        if let Some(snapshot) = self.history.shown() {
            let report = &snapshot.report;
            names.groups = report
                .groups
                .iter()
                .map(|g| self.index.names().name(&g.group))
                .collect();
            let ops: BTreeSet<_> = report.in_flight.iter().map(|i| i.op.clone()).collect();
            names.ops = ops.into_iter().collect();
            let hosts = self.index.hosts.iter().map(|host| host.name.to_string());
            names.hosts = hosts.filter(|host| !host.is_empty()).collect();
        }
        names
    }
}

fn waiting_page(line: Line) -> Page {
    Page {
        head: vec![line],
        ..Page::default()
    }
}
