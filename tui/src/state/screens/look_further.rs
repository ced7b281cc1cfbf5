//! Shows what helps to look further at a rank: a command to copy, facts about the rank's process, host and GPU, and the
//! end of the rank's log.

use super::ViewModel;
use crate::keys::Action;
use crate::page::theme::Tone;
use crate::page::width::whole_parts;
use crate::page::{Body, Line, Pane, plain, styled};
use rcomm_analyzer::Snapshot;
use rcomm_analyzer::source::Liveness;
use rcomm_recorder::model::Rank;

/// The [command](Snapshot::look_command) that shows more about a rank. It runs over ssh, unless the rank's host is
/// unknown, or the process is known to be on this node, which needs a source of this node (`reads_this_node`).
pub(in crate::state) fn command(
    snapshot: &Snapshot,
    rank: Rank,
    reads_this_node: bool,
) -> Option<String> {
    let view = snapshot.rank(rank)?;
    let local = snapshot.look_command(rank)?;
    // A collector, too, knows whether its ranks' processes are alive, but these are not on this node.
    let is_alive_or_dead = view.liveness != Liveness::Unknown;
    let is_here = view.host.is_empty() || reads_this_node && is_alive_or_dead;
    Some(match is_here {
        true => local,
        false => format!("ssh {} {}", word(&view.host), word(&local)),
    })
}

/// A word for a shell, quoted unless it needs no quotes.
fn word(text: &str) -> String {
    let is_safe = |c: char| c.is_ascii_alphanumeric() || "-_./:@".contains(c);
    match !text.is_empty() && text.chars().all(is_safe) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// The command for a rank, unless dumps are replayed.
fn shown_command(model: &ViewModel<'_>, rank: Rank) -> Option<String> {
    match model.is_replay {
        true => None,
        false => command(model.snapshot, rank, model.reads_this_node),
    }
}

/// The line of the first screen with the command for the suspect; `None` if there is no such rank, or no command for it.
pub(super) fn line(model: &ViewModel<'_>) -> Option<Line> {
    let rank = model.index.suspect?;
    let command = shown_command(model, rank)?;
    Some(vec![
        styled("   look: ", Tone::Accent),
        plain(command),
        styled(model.hint("  ", &[Action::Copy], "copies"), Tone::Accent),
    ])
}

/// Width of the mark and the subject before the text of a fact.
const PREFIX_WIDTH: usize = 11;

/// The command for a rank, facts about the rank's process, host and GPU, and the end of its log, in a pane of this
/// width; `None` if none of them is known.
pub(super) fn pane(model: &ViewModel<'_>, rank: Rank, width: u16) -> Option<Pane> {
    let mut lines: Vec<Line> = Vec::new();
    let command = shown_command(model, rank);
    lines.extend(command.map(|command| vec![plain(format!("  {:<9}{command}", "command"))]));
    let process_facts = model.process_facts.iter().find(|it| it.rank == rank);
    if let Some(process_facts) = process_facts {
        for fact in &process_facts.facts {
            let tone = if fact.notable {
                Tone::Late
            } else {
                Tone::Plain
            };
            // Color is not the only sign.
            let mark = if fact.notable { "~ " } else { "  " };
            lines.push(vec![
                styled(format!("{mark}{:<9}", fact.about), tone),
                styled(
                    whole_parts(&fact.text, usize::from(width).saturating_sub(PREFIX_WIDTH)),
                    tone,
                ),
            ]);
        }
        for text in &process_facts.log {
            lines.push(vec![styled("  log      ", Tone::Dim), plain(text.clone())]);
        }
    }
    (!lines.is_empty()).then(|| Pane {
        title: format!(
            "look further: {}{}",
            model.rank_label(rank),
            model.hint(", ", &[Action::Copy], "copies")
        ),
        body: Body::Text(lines),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(word("n064.cluster"), "n064.cluster");
        assert_eq!(word("a b"), "'a b'");
        assert_eq!(word("it's; $x"), r"'it'\''s; $x'");
        assert_eq!(word(""), "''");
    }
}
