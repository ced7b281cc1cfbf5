//! The text that is copied to the clipboard.

use super::State;
use super::screens::command_for;
use crate::page::Body;
use crate::page::table::Target;
use crate::state::event::Command;

impl State {
    /// The command that looks further at a rank at fault, if the selected row is about such a rank.
    fn command_to_look_further(&self) -> Option<String> {
        let snapshot = self.history.shown().filter(|_| !self.options.dumps)?;
        let rank = match self.target()? {
            Target::Rank(rank) if self.index.roots().contains(&rank) => rank,
            Target::Finding(id) => {
                let mut findings = snapshot.report.findings.iter();
                *findings
                    .find(|finding| finding.id == id)?
                    .culprit_ranks
                    .first()?
            }
            _ => return None,
        };
        command_for(snapshot.rank(rank)?, self.options.reads_process_facts)
    }

    /// Puts text on the clipboard: the command that looks further at the selected rank at fault, unless a pane of text
    /// is focused. Without a command it is the selected line, and without a line the first line of the screen.
    pub(super) fn copy(&mut self) -> Option<Command> {
        let selection = self.selection();
        let is_text = matches!(
            self.page.panes.get(selection.pane).map(|pane| &pane.body),
            Some(Body::Text(_))
        );
        if !is_text && let Some(command) = self.command_to_look_further() {
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
