//! Applies actions and commands to the state.

use super::State;
use super::command::{self, TypedCommand};
use super::input::{Input, Purpose};
use super::screen::Screen;
use super::screens::{Fold, OverviewPane, first_rank, neighbor};
use crate::keys::{Action, Pressed, key_name};
use crate::page::Body;
use crate::page::table::Target;
use crate::page::theme::{Theme, Tone};
use crate::state::event::Command;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rcomm_analyzer::Code;
use rcomm_analyzer::filter::Filter;
use rcomm_recorder::model::Rank;
use std::sync::Arc;

impl State {
    /// Handles a key press: it answers the open question, edits the input line, or triggers the action of its binding.
    pub(super) fn press(&mut self, key: &KeyEvent) -> Option<Command> {
        if let Some(folder) = self.confirm.take() {
            return match key.code {
                KeyCode::Char('y' | 'Y') => Some(Command::WriteRecords(folder)),
                KeyCode::Char('r' | 'R') if self.options.askable => Some(Command::AskForDumps),
                _ => {
                    self.show_message("nothing was written", Tone::Dim);
                    None
                }
            };
        }
        if self.input.is_some() {
            return self.edit(key);
        }
        self.message = None;
        let name = key_name(key)?;
        let pending = self.pending_key.take();
        match self.options.keymap.press(pending.as_deref(), &name) {
            Pressed::Action(action) => self.dispatch(action),
            Pressed::Pending(first) => {
                self.pending_key = Some(first);
                None
            }
            Pressed::Nothing => None,
        }
    }

    /// Applies a key press to the input line. While a filter is typed, applies the filter too.
    fn edit(&mut self, key: &KeyEvent) -> Option<Command> {
        let names = self.known_names();
        let mut input = self.input.take()?;
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Esc => return self.cancel(&input),
            KeyCode::Char('c' | 'g') if control => return self.cancel(&input),
            KeyCode::Enter => return self.commit(input),
            KeyCode::Tab => input.complete(&names),
            KeyCode::Backspace if input.text.is_empty() => return self.cancel(&input),
            KeyCode::Backspace => input.backspace(),
            KeyCode::Left => input.move_by(-1),
            KeyCode::Right => input.move_by(1),
            KeyCode::Home => input.move_by(isize::MIN),
            KeyCode::End => input.move_by(isize::MAX),
            KeyCode::Char('w') if control => input.delete_word(),
            KeyCode::Char('u') if control => input.clear(),
            KeyCode::Char('a') if control => input.move_by(isize::MIN),
            KeyCode::Char('e') if control => input.move_by(isize::MAX),
            KeyCode::Char(c) if !control => input.insert(c),
            _ => {}
        }
        input.error = None;
        if input.purpose == Purpose::Filter {
            match Filter::parse(&input.text) {
                Ok(filter) => self.filter = filter,
                // While the text does not parse, the filter from before the input applies.
                Err(error) => {
                    self.filter = input.before().clone();
                    input.error = Some(error.to_string());
                }
            }
        }
        self.input = Some(input);
        self.rebuild();
        None
    }

    /// Closes the input line, and restores the filter from before it.
    fn cancel(&mut self, input: &Input) -> Option<Command> {
        self.filter = input.before().clone();
        self.rebuild();
        None
    }

    /// Applies the typed filter or executes the typed command. A filter that does not parse stays in the input line.
    fn commit(&mut self, mut input: Input) -> Option<Command> {
        match input.purpose {
            Purpose::Filter => match Filter::parse(&input.text) {
                Ok(filter) => self.filter = filter,
                Err(error) => {
                    input.error = Some(error.to_string());
                    self.input = Some(input);
                }
            },
            Purpose::Command => match command::parse(&input.text) {
                Ok(command) => return self.execute(command),
                Err(error) => self.show_message(error, Tone::Bad),
            },
        }
        self.rebuild();
        None
    }

    /// Executes a command typed after `:`.
    fn execute(&mut self, command: TypedCommand) -> Option<Command> {
        match command {
            TypedCommand::Go(screen) => self.go(screen),
            TypedCommand::Group(name) => self.go_to_group(&name),
            TypedCommand::Why => self.go(Screen::Why(None)),
            TypedCommand::Filter(text) => match Filter::parse(&text) {
                Ok(filter) => self.filter = filter,
                Err(error) => self.show_message(error.to_string(), Tone::Bad),
            },
            TypedCommand::Sort(name) => self.sort_by_name(name.as_deref()),
            TypedCommand::Mark(rank) => self.mark(rank),
            TypedCommand::Mute(code) => self.mute(code),
            TypedCommand::Export(format, path) => return Some(Command::Export(format, path)),
            TypedCommand::Dump(folder) => self.ask_to_write(folder),
            TypedCommand::Job(name) => return self.show_job(name),
            TypedCommand::Pause => self.history.pause(),
            TypedCommand::Live => return self.dispatch(Action::Live),
            TypedCommand::Theme(name) => {
                self.options.theme = Theme::new(name, self.options.theme.depth());
            }
            TypedCommand::Quit => return Some(Command::Quit),
        }
        self.rebuild();
        None
    }

    /// Performs an action. Returns a command if the event loop has to do a part of it.
    pub(super) fn dispatch(&mut self, action: Action) -> Option<Command> {
        let page_height =
            isize::try_from(usize::from(self.size.1).saturating_sub(6).max(1)).unwrap_or(1);
        match action {
            Action::Quit => return Some(Command::Quit),
            Action::Suspend => return Some(Command::Suspend),
            Action::Redraw => return Some(Command::Redraw),
            Action::Copy => return self.copy(),
            Action::View(number) => {
                if let Some(screen) = Screen::numbered(number) {
                    self.go(screen);
                }
            }
            Action::Help if *self.screen() == Screen::Help => {
                self.nav.up();
            }
            Action::Help => self.go(Screen::Help),
            Action::Back => {
                if !self.nav.up() {
                    self.filter = Filter::default();
                    self.problems_only = false;
                }
                self.follow = false;
            }
            Action::Enter => return self.open(),
            Action::Up => self.move_by(-1),
            Action::Down => self.move_by(1),
            Action::HalfUp => self.move_by(-page_height / 2),
            Action::HalfDown => self.move_by(page_height / 2),
            Action::PageUp => self.move_by(-page_height),
            Action::PageDown => self.move_by(page_height),
            Action::Top => self.move_by(isize::MIN),
            Action::Bottom => self.move_by(isize::MAX),
            Action::Left | Action::Right => self.move_sideways(action == Action::Right),
            Action::NextPane => self.next_pane(1),
            Action::PreviousPane => self.next_pane(self.page.panes.len().saturating_sub(1)),
            Action::Expand => self.expand(),
            Action::Filter => self.open_input(Purpose::Filter),
            Action::Command => self.open_input(Purpose::Command),
            Action::Export => self.begin_command("export "),
            Action::NextMatch => self.next_problem(1),
            Action::PreviousMatch => self.next_problem(-1),
            Action::HistoryBack => self.nav.back(),
            Action::HistoryForward => self.nav.forward(),
            Action::LastView => self.nav.swap(),
            Action::Sort => self.sort_by_next(),
            Action::Reverse => {
                let sort = &mut self.selection_mut().sort;
                sort.reversed = !sort.reversed;
            }
            Action::Problems => self.problems_only = !self.problems_only,
            Action::Pause if self.history.is_paused() => return self.dispatch(Action::Live),
            Action::Pause => self.history.pause(),
            Action::Live => {
                self.history.live();
                self.show();
            }
            Action::StepBack => self.step(-1),
            Action::StepForward => self.step(1),
            Action::JumpBack => self.step(-10),
            Action::JumpForward => self.step(10),
            Action::Follow => self.toggle_follow(),
            Action::Why => self.go(Screen::Why(self.target())),
            Action::Stacks => {
                self.go(Screen::Stacks);
                if self.options.stacks_askable {
                    self.show_message("taking call stacks ...", Tone::Dim);
                    self.rebuild();
                    return Some(Command::TakeStacks);
                }
            }
            Action::Explain => match self.code_in_focus() {
                Some(code) => self.go(Screen::Explained(code)),
                None => self.show_message("select a warning first", Tone::Dim),
            },
            Action::Mute => self.mute_selected(),
            Action::Mark => match self.rank_in_focus() {
                Some(rank) => self.mark(rank),
                None => self.show_message("select a rank to mark it", Tone::Dim),
            },
            Action::Compare => self.go(Screen::Compare),
            Action::Dump => self.ask_to_write("rcomm-dumps".into()),
            Action::Metric => self.metric = self.metric.next(),
            Action::Fold => {
                self.fold = match self.fold {
                    Fold::Alike => Fold::Nothing,
                    Fold::Nothing => Fold::Alike,
                };
            }
            Action::ZoomIn => self.zoom(0.5),
            Action::ZoomOut => self.zoom(2.0),
            Action::PreviousOperation => self.step_operation(false),
            Action::NextOperation => self.step_operation(true),
        }
        self.rebuild();
        None
    }

    fn go(&mut self, screen: Screen) {
        // A screen below groups, ranks or warnings starts at its top; other screens keep their selection.
        if Screen::parent(&screen).is_some_and(|parent| parent != Screen::Overview) {
            self.selections.remove(&screen.kind());
        }
        self.nav.go(screen);
    }

    /// Goes to the group with this label, else to the first whose name or description contains `name`.
    fn go_to_group(&mut self, name: &str) {
        let found = self.history.shown().and_then(|snapshot| {
            let groups = || snapshot.report.groups.iter().map(|report| &report.group);
            let exact = groups().find(|group| self.index.names().name(group) == name);
            let part = || groups().find(|g| g.name.contains(name) || g.desc.contains(name));
            exact.or_else(part).cloned()
        });
        match found {
            Some(group) => self.go(Screen::Group(Arc::new(group))),
            None => self.show_message(format!("no group named `{name}`"), Tone::Bad),
        }
    }

    pub(super) fn move_by(&mut self, delta: isize) {
        let rows = self.page.rows(self.selection().pane);
        self.selection_mut().move_by(delta, rows);
    }

    /// Moves a timeline by a quarter of its width, or the selection in a heat map by one column.
    fn move_sideways(&mut self, right: bool) {
        if *self.screen() == Screen::Timeline {
            self.scale.pan(if right { -1 } else { 1 });
            return;
        }
        let pane = self.selection().pane;
        let columns = match self.page.panes.get(pane).map(|pane| &pane.body) {
            Some(Body::Grid(grid)) => grid.columns.len(),
            _ => 0,
        };
        let selection = self.selection_mut();
        selection.column = if right {
            (selection.column + 1).min(columns.saturating_sub(1))
        } else {
            selection.column.saturating_sub(1)
        };
    }

    /// Zooms the timeline. The time under the cursor keeps its place or, without a cursor, the time at four fifths of
    /// the width.
    fn zoom(&mut self, factor: f64) {
        let to_ns = match self.page.panes.first().map(|pane| &pane.body) {
            Some(Body::Timeline(timeline)) => Some(timeline.to_ns),
            _ => None,
        };
        self.scale.zoom(factor, to_ns);
    }

    /// Moves the cursor of the timeline to another operation of the selected rank.
    fn step_operation(&mut self, forward: bool) {
        let (row, _) = self.selection().of_first_pane();
        let Some(Body::Timeline(timeline)) = self.page.panes.first().map(|pane| &pane.body) else {
            return;
        };
        let (Some(lane), Some(snapshot)) = (timeline.lanes.get(row), self.history.shown()) else {
            return;
        };
        let to_ns = timeline.to_ns;
        match neighbor(snapshot, lane.rank, self.scale.cursor_ns, forward) {
            Some(at_ns) => self.scale.show(at_ns, to_ns),
            None => self.show_message("no further operation is recorded", Tone::Dim),
        }
    }

    fn next_pane(&mut self, by: usize) {
        let panes = self.page.panes.len().max(1);
        self.focus((self.selection().pane + by) % panes);
    }

    /// On the first screen, opens the view of the focused pane; for the panes `Look` and `Operations`, that of the rank
    /// they show: the suspect or, if there is none, the first rank. The trends have no view.
    fn expand(&mut self) {
        let shown = self.history.shown();
        if let Some(snapshot) = shown.filter(|_| *self.screen() == Screen::Overview) {
            let screen = match self.focused_overview_pane() {
                Some(OverviewPane::Warnings) => Screen::Warnings,
                Some(OverviewPane::Groups) => Screen::Groups,
                Some(OverviewPane::InFlight) => Screen::InFlight,
                Some(OverviewPane::Ranks) => Screen::Ranks,
                Some(OverviewPane::Why) => Screen::Why(None),
                Some(OverviewPane::Timeline) => Screen::Timeline,
                Some(OverviewPane::Look | OverviewPane::Operations) => {
                    let rank = first_rank(&self.model(snapshot));
                    let Some(rank) = rank else { return };
                    Screen::Rank(rank)
                }
                Some(OverviewPane::Trends) | None => return,
            };
            self.go(screen);
        }
    }

    /// Opens the subject of the selected row. Without one: on the first screen, the view of the focused pane.
    fn open(&mut self) -> Option<Command> {
        match self.target() {
            Some(Target::Job(name)) => return self.show_job(name),
            Some(target) => self.go(Screen::of(&target)),
            None if *self.screen() == Screen::Overview => self.expand(),
            // The row of a note or of a code without findings: there is nothing but the explanation.
            None if *self.screen() == Screen::Warnings => {
                if let Some(code) = self.code_of_row() {
                    self.go(Screen::Explained(code));
                }
            }
            None => {}
        }
        self.rebuild();
        None
    }

    /// Goes to the first screen, and requests another job, which is shown after the next read.
    fn show_job(&mut self, name: Arc<str>) -> Option<Command> {
        self.go(Screen::Overview);
        self.rebuild();
        Some(Command::ShowJob(name))
    }

    /// The subject of the selected row or cell. If a row has none: the rank, group or finding that the screen shows.
    pub(super) fn target(&self) -> Option<Target> {
        let selection = self.selection();
        match self.page.panes.get(selection.pane).map(|pane| &pane.body) {
            Some(Body::Table(table)) => {
                if let Some(target) = table.rows.get(selection.row).and_then(|r| r.target.clone()) {
                    return Some(target);
                }
            }
            Some(Body::Grid(grid)) => {
                let (rank, _) = grid
                    .dots
                    .get(selection.row)?
                    .get(selection.column)?
                    .as_ref()?;
                return Some(Target::Rank(*rank));
            }
            Some(Body::Timeline(timeline)) => {
                return timeline
                    .lanes
                    .get(selection.row)
                    .map(|lane| Target::Rank(lane.rank));
            }
            _ => {}
        }
        match self.screen() {
            Screen::Rank(rank) => Some(Target::Rank(*rank)),
            Screen::Group(group) => Some(Target::Group(group.clone())),
            Screen::Finding(id) => Some(Target::Finding(*id)),
            _ => None,
        }
    }

    /// The rank of the selected row or cell, else that of the screen; `None` if there is none.
    fn rank_in_focus(&self) -> Option<Rank> {
        match self.target() {
            Some(Target::Rank(rank)) => Some(rank),
            Some(Target::Ranks(ranks)) if ranks.len() == 1 => ranks.first().copied(),
            _ => match self.screen() {
                Screen::Rank(rank) => Some(*rank),
                _ => None,
            },
        }
    }

    /// Starts the input of a filter, with the text of the current filter, or of a command, with no text.
    fn open_input(&mut self, purpose: Purpose) {
        let text = match purpose {
            Purpose::Filter => self.filter.text(),
            Purpose::Command => "",
        };
        self.input = Some(Input::new(purpose, text, self.filter.clone()));
    }

    /// Starts the input of a command with this text.
    fn begin_command(&mut self, text: &str) {
        self.input = Some(Input::new(Purpose::Command, text, self.filter.clone()));
    }

    /// Selects the next row with a problem, downwards if `direction` is 1, else upwards. Wraps around at the ends of
    /// the table.
    fn next_problem(&mut self, direction: isize) {
        let selection = self.selection();
        let found = self.page.table(selection.pane).and_then(|table| {
            let count = table.rows.len();
            let row_after = |distance: usize| match direction {
                1 => (selection.row + distance) % count,
                _ => (selection.row + count - distance % count) % count,
            };
            (1..=count)
                .map(row_after)
                .find(|&row| table.rows[row].problem)
        });
        match found {
            Some(row) => self.selection_mut().row = row,
            None => self.show_message("no row here shows a problem", Tone::Dim),
        }
    }

    fn sort_by_next(&mut self) {
        let columns = self.table().map_or(0, |table| table.columns.len());
        let sort = &mut self.selection_mut().sort;
        sort.column = match sort.column {
            None if columns > 0 => Some(0),
            Some(index) if index + 1 < columns => Some(index + 1),
            _ => None,
        };
        self.show_sort();
    }

    /// Sorts by the first column whose name contains `name`; restores the default order without a name.
    fn sort_by_name(&mut self, name: Option<&str>) {
        let column = match name {
            None => None,
            Some(name) => {
                let columns = self
                    .table()
                    .map(|table| table.columns.as_slice())
                    .unwrap_or(&[]);
                let found = columns.iter().position(|column| column.name.contains(name));
                if found.is_none() {
                    self.show_message(format!("no column named `{name}`"), Tone::Bad);
                    return;
                }
                found
            }
        };
        self.selection_mut().sort.column = column;
        self.show_sort();
    }

    fn show_sort(&mut self) {
        let column = self.selection().sort.column;
        let name =
            column.and_then(|index| self.table()?.columns.get(index).map(|c| c.name.clone()));
        match name {
            Some(name) if name.is_empty() => self.show_message("sorted by count", Tone::Dim),
            Some(name) => self.show_message(format!("sorted by {name}"), Tone::Dim),
            None => self.show_message("default order", Tone::Dim),
        }
    }

    fn step(&mut self, delta: isize) {
        self.history.step(delta);
        self.show();
    }

    fn toggle_follow(&mut self) {
        self.follow = !self.follow;
        if !self.follow {
            self.show_message("no longer following", Tone::Dim);
        } else if self.index.roots().is_empty() {
            self.show_message(
                "following: will select the suspect when there is one",
                Tone::Accent,
            );
        } else {
            let stop = self.options.keymap.hint(&[Action::Follow], "stops");
            let stop = stop.map_or_else(String::new, |stop| format!("; {stop}"));
            self.show_message(format!("following the suspect{stop}"), Tone::Accent);
            self.show();
        }
    }

    fn mark(&mut self, rank: Rank) {
        if !self.marks.remove(&rank) {
            self.marks.insert(rank);
        }
        let marked =
            rcomm_analyzer::format::rank_set(&self.marks.iter().copied().collect::<Vec<_>>(), 8);
        let compare = self.options.keymap.hint(&[Action::Compare], "compares");
        let compare = compare.map_or_else(String::new, |compare| format!("  {compare}"));
        self.show_message(format!("marked: {marked}{compare}"), Tone::Accent);
    }

    /// Mutes a code, or unmutes it if it is muted.
    fn mute(&mut self, code: Code) {
        if !self.muted.remove(&code) {
            self.muted.insert(code);
        }
        self.show();
    }

    /// The code in the selected row of a table.
    fn code_of_row(&self) -> Option<Code> {
        let row = self.table()?.rows.get(self.selection().row)?;
        row.cells.iter().find_map(|cell| Code::parse(&cell.text))
    }

    /// The code of the selected row or, if that is about none, of the finding on display.
    fn code_in_focus(&self) -> Option<Code> {
        let id = match (self.target(), self.screen()) {
            (Some(Target::Finding(id)), _) => id,
            (_, Screen::Finding(id)) => *id,
            // The row may belong to a code without findings.
            _ => return self.code_of_row(),
        };
        let findings = &self.history.shown()?.report.findings;
        findings.iter().find(|f| f.id == id).map(|f| f.code)
    }

    /// Mutes the code of the selected row, or unmutes it.
    fn mute_selected(&mut self) {
        match self.code_in_focus() {
            Some(code) => self.mute(code),
            None => self.show_message("select a warning first", Tone::Dim),
        }
    }

    fn ask_to_write(&mut self, folder: std::path::PathBuf) {
        if self.options.allow_actions {
            self.confirm = Some(folder);
        } else {
            self.show_message(
                "saving or requesting dumps needs --allow-actions",
                Tone::Bad,
            );
        }
    }
}
