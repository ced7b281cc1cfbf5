//! Help: keys, filter terms, commands, words and marks. The keys are from the same list as those of the dispatcher and
//! the footer.

use crate::keys::{BINDINGS, Keymap, Section};
use crate::page::table::Mark;
use crate::page::theme::Tone;
use crate::page::{Body, Line, Page, Pane, plain, styled};
use crate::state::command::COMMANDS;
use crate::state::index::Marked;
use rcomm_analyzer::RankState;
use rcomm_analyzer::filter;

/// Words on the screens that do not explain themselves.
const WORDS: &[(&str, &str)] = &[
    (
        "root",
        "at fault in an error, or in its cycle, if no other finding causes it",
    ),
    (
        "seq last/min",
        "newest collective issued by any member / by all members",
    ),
    ("in flight", "not ended; (7/8): 7 of 8 members have joined"),
    ("oldest", "age of the oldest operation in flight"),
    (
        "lag p50/p99",
        "wait for the last member, ms: median, 99th percentile",
    ),
    ("GB/s", "bandwidth of the busiest link, nccl-tests' busbw"),
];

pub(super) fn page(keymap: &Keymap) -> Page {
    let mut lines: Vec<Line> = Vec::new();
    let title = |lines: &mut Vec<Line>, text: &str| {
        if !lines.is_empty() {
            lines.push(vec![]);
        }
        lines.push(vec![styled(text, Tone::Title)]);
    };
    for &(section, name) in Section::ALL {
        title(&mut lines, name);
        for binding in BINDINGS.iter().filter(|b| b.section == section) {
            let keys = keymap.keys(binding.action).join("  ");
            lines.push(vec![
                styled(format!("  {keys:<16}"), Tone::Accent),
                plain(binding.help),
            ]);
        }
    }
    title(&mut lines, "filter: all terms must hold, ! negates one");
    for (key, meaning) in filter::KEYS {
        lines.push(vec![
            styled(format!("  {key:<16}"), Tone::Accent),
            plain(*meaning),
        ]);
    }
    title(&mut lines, "commands");
    let width = COMMANDS.iter().map(|(usage, _)| usage.len()).max();
    let width = width.unwrap_or_default();
    for (usage, meaning) in COMMANDS {
        lines.push(vec![
            styled(format!("  :{usage:<width$}  "), Tone::Accent),
            plain(*meaning),
        ]);
    }
    title(&mut lines, "words");
    for (word, meaning) in WORDS {
        lines.push(vec![
            styled(format!("  {word:<16}"), Tone::Accent),
            plain(*meaning),
        ]);
    }
    title(&mut lines, "marks");
    for state in RankState::ALL {
        let (Mark { glyph, tone }, word) = (state.mark(), state.word());
        lines.push(vec![styled(format!("  {glyph:<16}"), tone), plain(word)]);
    }
    Page {
        head: vec![],
        panes: vec![Pane {
            title: "help".into(),
            body: Body::Text(lines),
        }],
        ..Page::default()
    }
}
