//! The text that is copied to the clipboard.

use super::State;
use super::screens::command_for;
use crate::page::Body;
use crate::page::table::Target;
use crate::state::event::Command;
use crate::state::screen::Screen;
use rcomm_analyzer::RankState;

impl State {
    /// Whether the first line of the pane that looks further at a rank is selected: the command, if it has one.
    fn is_on_command(&self) -> bool {
        let selection = self.selection();
        let pane = self.page.panes.get(selection.pane);
        selection.row == 0 && pane.is_some_and(|pane| pane.name() == "look_further")
    }

    /// The command that looks further at the rank that the selected row is about, if the row shows it or the rank is at
    /// fault or late. On the first screen, that for the suspect if the row is about no rank and no group.
    fn command_to_look_further(&self) -> Option<String> {
        let snapshot = self.history.shown().filter(|_| !self.options.dumps)?;
        let suspect = || (self.index.suspect).filter(|_| *self.screen() == Screen::Overview);
        let is_suspect = |rank| matches!(self.index.rank(rank), RankState::Root | RankState::Late);
        let rank = match self.target() {
            Some(Target::Rank(rank)) if self.is_on_command() || is_suspect(rank) => Some(rank),
            Some(Target::Finding(id)) => {
                let mut findings = snapshot.report.findings.iter();
                let finding = findings.find(|finding| finding.id == id);
                finding
                    .and_then(|finding| finding.culprit_ranks.first().copied())
                    .or_else(suspect)
            }
            None => suspect(),
            Some(_) => None,
        }?;
        command_for(snapshot, rank, self.options.reads_process_facts)
    }

    /// Puts text on the clipboard: the command that looks further at the selected rank, unless a line of text other
    /// than that command is selected. Without a command it is the selected line, and without a line the first line of
    /// the screen.
    pub(super) fn copy(&mut self) -> Option<Command> {
        let selection = self.selection();
        let is_text = matches!(
            self.page.panes.get(selection.pane).map(|pane| &pane.body),
            Some(Body::Text(_))
        );
        if (!is_text || self.is_on_command())
            && let Some(command) = self.command_to_look_further()
        {
            return Some(Command::Copy(command));
        }
        let line = match self.page.panes.get(selection.pane).map(|pane| &pane.body) {
            Some(Body::Table(table)) => table
                .rows
                .get(selection.row)
                .map(crate::page::table::Row::line),
            Some(Body::Text(lines)) => lines.get(selection.row).map(|line| {
                line.iter()
                    .map(|words| words.text.as_str())
                    .collect::<String>()
            }),
            _ => None,
        };
        let head = || {
            let line = self.page.head.first()?;
            Some(
                line.iter()
                    .map(|words| words.text.as_str())
                    .collect::<String>(),
            )
        };
        line.or_else(head)
            .map(|text| Command::Copy(text.trim().to_owned()))
    }
}
