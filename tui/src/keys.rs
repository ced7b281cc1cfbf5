//! The keys, as data: the footer, the help and the dispatcher read the same list.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::collections::{BTreeMap, HashMap};

/// What a key can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "each is explained by its line in BINDINGS")]
pub enum Action {
    View(u8),
    Help,
    Quit,
    Back,
    Enter,
    Up,
    Down,
    Left,
    Right,
    Top,
    Bottom,
    HalfUp,
    HalfDown,
    PageUp,
    PageDown,
    NextPane,
    PreviousPane,
    Expand,
    Filter,
    Command,
    NextMatch,
    PreviousMatch,
    HistoryBack,
    HistoryForward,
    LastView,
    Sort,
    Reverse,
    Problems,
    Pause,
    StepBack,
    StepForward,
    JumpBack,
    JumpForward,
    Live,
    Follow,
    Why,
    Stacks,
    Explain,
    Mute,
    Mark,
    Compare,
    Copy,
    Export,
    Dump,
    Metric,
    Fold,
    ZoomIn,
    ZoomOut,
    Suspend,
    Redraw,
}

/// Where a binding stands in the help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Going somewhere.
    Views,
    /// Moving within a view.
    Move,
    /// Choosing what is shown.
    Show,
    /// Looking at another time.
    Time,
    /// Asking about what is selected.
    Ask,
    /// Taking something away.
    Take,
}

impl Section {
    /// Every section with its title, in the order of the help.
    pub const ALL: &'static [(Self, &'static str)] = &[
        (Self::Views, "views"),
        (Self::Move, "move"),
        (Self::Show, "show"),
        (Self::Time, "time"),
        (Self::Ask, "ask"),
        (Self::Take, "take away, act"),
    ];
}

/// One action with its keys.
#[derive(Clone, Copy, Debug)]
pub struct Binding {
    /// What it does.
    pub action: Action,
    /// Its name in the configuration file.
    pub name: &'static str,
    /// Keys as [`key_name`] spells them; two keys in a row are separated by a space.
    pub keys: &'static [&'static str],
    /// A word for the footer; empty = not shown there.
    pub hint: &'static str,
    /// A line for the help.
    pub help: &'static str,
    /// Where in the help.
    pub section: Section,
}

const fn bind(
    section: Section,
    action: Action,
    name: &'static str,
    keys: &'static [&'static str],
    hint: &'static str,
    help: &'static str,
) -> Binding {
    Binding {
        action,
        name,
        keys,
        hint,
        help,
        section,
    }
}

/// Every key. The footer shows those with a hint, in this order, as far as they fit.
pub const BINDINGS: &[Binding] = {
    use Action as A;
    use Section::{Ask, Move, Show, Take, Time, Views};
    &[
        bind(Views, A::Help, "help", &["?"], "help", "help for this view"),
        bind(
            Views,
            A::View(1),
            "overview",
            &["1"],
            "",
            "overview: stuck? who? since when?",
        ),
        bind(Views, A::View(2), "groups", &["2"], "", "process groups"),
        bind(
            Views,
            A::View(3),
            "ranks",
            &["3"],
            "",
            "ranks, host by host",
        ),
        bind(
            Views,
            A::View(4),
            "in_flight",
            &["4"],
            "",
            "collectives in flight",
        ),
        bind(
            Views,
            A::View(5),
            "stragglers",
            &["5"],
            "",
            "ranks that arrive late",
        ),
        bind(
            Views,
            A::View(6),
            "warnings",
            &["6"],
            "",
            "warnings: what the analysis found",
        ),
        bind(Views, A::View(7), "timeline", &["7"], "", "timeline"),
        bind(
            Views,
            A::View(8),
            "sources",
            &["8"],
            "",
            "sources: what is read, and how it answers",
        ),
        bind(
            Show,
            A::Problems,
            "problems",
            &["z"],
            "problems",
            "show problems only, and back",
        ),
        bind(
            Ask,
            A::Why,
            "why",
            &["w"],
            "why",
            "why: the causal chain of what is selected",
        ),
        bind(
            Ask,
            A::Stacks,
            "stacks",
            &["t"],
            "stacks",
            "call stacks, grouped",
        ),
        bind(
            Take,
            A::Dump,
            "dump",
            &["d"],
            "dump",
            "write every rank's record to a folder (--allow-actions)",
        ),
        bind(
            Show,
            A::Filter,
            "filter",
            &["/"],
            "filter",
            "filter rows: rank:0-63 group:dp op:reduce state:wait age>5s !host:n07",
        ),
        bind(
            Time,
            A::Pause,
            "pause",
            &["space"],
            "pause",
            "pause, and go on",
        ),
        bind(
            Views,
            A::Enter,
            "enter",
            &["enter"],
            "open",
            "open what is selected",
        ),
        bind(
            Views,
            A::Back,
            "back",
            &["esc", "backspace"],
            "back",
            "up one level; clears the filter at the top",
        ),
        bind(
            Views,
            A::Command,
            "command",
            &[":"],
            "command",
            "command line with completion",
        ),
        bind(Views, A::Quit, "quit", &["q", "ctrl-c"], "quit", "quit"),
        bind(
            Views,
            A::HistoryBack,
            "history_back",
            &["["],
            "",
            "the view before",
        ),
        bind(
            Views,
            A::HistoryForward,
            "history_forward",
            &["]"],
            "",
            "forward again",
        ),
        bind(
            Views,
            A::LastView,
            "last_view",
            &["-"],
            "",
            "the last view, to and fro",
        ),
        bind(Move, A::Down, "down", &["j", "down"], "", "down"),
        bind(Move, A::Up, "up", &["k", "up"], "", "up"),
        bind(
            Move,
            A::Left,
            "left",
            &["h", "left"],
            "",
            "left; earlier in the timeline",
        ),
        bind(
            Move,
            A::Right,
            "right",
            &["l", "right"],
            "",
            "right; later in the timeline",
        ),
        bind(Move, A::Top, "top", &["g g", "home"], "", "first row"),
        bind(Move, A::Bottom, "bottom", &["G", "end"], "", "last row"),
        bind(
            Move,
            A::HalfDown,
            "half_down",
            &["ctrl-d"],
            "",
            "half a page down",
        ),
        bind(
            Move,
            A::HalfUp,
            "half_up",
            &["ctrl-u"],
            "",
            "half a page up",
        ),
        bind(
            Move,
            A::PageDown,
            "page_down",
            &["pagedown"],
            "",
            "a page down",
        ),
        bind(Move, A::PageUp, "page_up", &["pageup"], "", "a page up"),
        bind(Move, A::NextPane, "next_pane", &["tab"], "", "next pane"),
        bind(
            Move,
            A::PreviousPane,
            "previous_pane",
            &["shift-tab"],
            "",
            "previous pane",
        ),
        bind(
            Move,
            A::NextMatch,
            "next_match",
            &["n"],
            "",
            "next row with a problem",
        ),
        bind(
            Move,
            A::PreviousMatch,
            "previous_match",
            &["N"],
            "",
            "previous row with a problem",
        ),
        bind(Show, A::Sort, "sort", &["s"], "", "sort by the next column"),
        bind(Show, A::Reverse, "reverse", &["S"], "", "reverse the order"),
        bind(
            Show,
            A::Expand,
            "expand",
            &["e"],
            "",
            "expand the pane to its own view",
        ),
        bind(
            Show,
            A::Fold,
            "fold",
            &["o"],
            "",
            "fold equal rows, and unfold",
        ),
        bind(
            Show,
            A::Metric,
            "metric",
            &["c"],
            "",
            "next metric of the heat map",
        ),
        bind(
            Show,
            A::ZoomIn,
            "zoom_in",
            &["+", "="],
            "",
            "zoom in on the timeline",
        ),
        bind(
            Show,
            A::ZoomOut,
            "zoom_out",
            &["_"],
            "",
            "zoom out of the timeline",
        ),
        bind(
            Show,
            A::Mute,
            "mute",
            &["a"],
            "",
            "mute the code of the selected warning, and back",
        ),
        bind(Time, A::StepBack, "step_back", &[","], "", "one frame back"),
        bind(
            Time,
            A::StepForward,
            "step_forward",
            &["."],
            "",
            "one frame forward",
        ),
        bind(
            Time,
            A::JumpBack,
            "jump_back",
            &["<"],
            "",
            "ten frames back",
        ),
        bind(
            Time,
            A::JumpForward,
            "jump_forward",
            &[">"],
            "",
            "ten frames forward",
        ),
        bind(Time, A::Live, "live", &["L"], "", "live again"),
        bind(
            Ask,
            A::Follow,
            "follow",
            &["f"],
            "",
            "follow the current suspect",
        ),
        bind(
            Ask,
            A::Explain,
            "explain",
            &["!"],
            "",
            "explain the selected warning",
        ),
        bind(Ask, A::Mark, "mark", &["m"], "", "mark the selected rank"),
        bind(
            Ask,
            A::Compare,
            "compare",
            &["M"],
            "",
            "compare the marked ranks side by side",
        ),
        bind(
            Take,
            A::Copy,
            "copy",
            &["y"],
            "",
            "copy the selected line to the clipboard",
        ),
        bind(
            Take,
            A::Export,
            "export",
            &["x"],
            "",
            "export: text, JSON or Perfetto",
        ),
        bind(
            Take,
            A::Suspend,
            "suspend",
            &["ctrl-z"],
            "",
            "suspend; fg comes back",
        ),
        bind(
            Take,
            A::Redraw,
            "redraw",
            &["ctrl-l"],
            "",
            "draw everything again",
        ),
    ]
};

/// How a key is spelt: `q`, `G`, `ctrl-d`, `space`, `enter`, `shift-tab`, `f5`.
pub fn key_name(key: &KeyEvent) -> Option<String> {
    let base = match key.code {
        KeyCode::Char(' ') => "space".to_owned(),
        KeyCode::Char(c) => c.to_string(),
        KeyCode::Enter => "enter".into(),
        KeyCode::Esc => "esc".into(),
        KeyCode::Backspace => "backspace".into(),
        KeyCode::Tab => "tab".into(),
        KeyCode::BackTab => return Some("shift-tab".into()),
        KeyCode::Up => "up".into(),
        KeyCode::Down => "down".into(),
        KeyCode::Left => "left".into(),
        KeyCode::Right => "right".into(),
        KeyCode::Home => "home".into(),
        KeyCode::End => "end".into(),
        KeyCode::PageUp => "pageup".into(),
        KeyCode::PageDown => "pagedown".into(),
        KeyCode::Delete => "delete".into(),
        KeyCode::Insert => "insert".into(),
        KeyCode::F(n) => format!("f{n}"),
        _ => return None,
    };
    // Terminals send shifted characters as themselves: `G`, `<`.
    Some(if key.modifiers.contains(KeyModifiers::CONTROL) {
        format!("ctrl-{base}")
    } else if key.modifiers.contains(KeyModifiers::ALT) {
        format!("alt-{base}")
    } else {
        base
    })
}

/// Which keys do what, after the configuration had its say.
#[derive(Clone, Debug)]
pub struct Keymap {
    actions: HashMap<String, Action>,
    shown: HashMap<Action, Vec<String>>,
}

/// What became of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pressed {
    /// It does this.
    Action(Action),
    /// It is the first of a pair.
    Pending(String),
    /// It does nothing.
    Nothing,
}

impl Default for Keymap {
    fn default() -> Self {
        let mut map = Self {
            actions: HashMap::new(),
            shown: HashMap::new(),
        };
        for binding in BINDINGS {
            let keys = binding.keys.iter().map(|key| (*key).to_owned()).collect();
            map.bind(binding.action, keys);
        }
        map
    }
}

impl Keymap {
    /// The default keys, with those of some actions replaced: action name → keys.
    ///
    /// # Errors
    ///
    /// A sentence that names an unknown action, or two actions that want the same key.
    pub fn with(changes: &BTreeMap<String, Vec<String>>) -> Result<Self, String> {
        let mut map = Self::default();
        for (name, keys) in changes {
            let binding = BINDINGS
                .iter()
                .find(|binding| binding.name == name)
                .ok_or_else(|| format!("unknown action `{name}` under [keys]"))?;
            map.actions.retain(|_, action| *action != binding.action);
            for key in keys {
                if let Some(other) = map.actions.get(key) {
                    let other = BINDINGS.iter().find(|b| b.action == *other);
                    let other = other.map_or("another action", |b| b.name);
                    return Err(format!(
                        "key `{key}` is wanted by both `{name}` and `{other}`"
                    ));
                }
            }
            map.bind(binding.action, keys.clone());
        }
        Ok(map)
    }

    fn bind(&mut self, action: Action, keys: Vec<String>) {
        for key in &keys {
            self.actions.insert(key.clone(), action);
        }
        self.shown.insert(action, keys);
    }

    /// What `key` does after `pending` (the first key of a pair, or nothing).
    pub fn press(&self, pending: Option<&str>, key: &str) -> Pressed {
        if let Some(first) = pending
            && let Some(&action) = self.actions.get(&format!("{first} {key}"))
        {
            return Pressed::Action(action);
        }
        if let Some(&action) = self.actions.get(key) {
            return Pressed::Action(action);
        }
        let begins = |known: &String| known.split_once(' ').is_some_and(|(first, _)| first == key);
        if self.actions.keys().any(begins) {
            Pressed::Pending(key.to_owned())
        } else {
            Pressed::Nothing
        }
    }

    /// The keys of an action.
    pub fn keys(&self, action: Action) -> &[String] {
        self.shown.get(&action).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_key_and_no_name_is_given_twice() {
        let keys: Vec<_> = BINDINGS.iter().flat_map(|b| b.keys).collect();
        assert_eq!(keys.len(), keys.iter().collect::<HashSet<_>>().len());
        let names: HashSet<_> = BINDINGS.iter().map(|b| b.name).collect();
        assert_eq!(names.len(), BINDINGS.len());
    }

    #[test]
    fn a_pair_of_keys_acts_on_the_second() {
        let map = Keymap::default();
        assert_eq!(map.press(None, "g"), Pressed::Pending("g".into()));
        assert_eq!(map.press(Some("g"), "g"), Pressed::Action(Action::Top));
        assert_eq!(map.press(Some("g"), "j"), Pressed::Action(Action::Down));
        assert_eq!(map.press(None, "@"), Pressed::Nothing);
    }

    #[test]
    fn a_changed_key_replaces_the_default_and_conflicts_are_named() {
        let change = |name: &str, key: &str| {
            Keymap::with(&BTreeMap::from([(name.to_owned(), vec![key.to_owned()])]))
        };
        let map = change("why", "W").expect("free key");
        assert_eq!(map.press(None, "W"), Pressed::Action(Action::Why));
        assert_eq!(map.press(None, "w"), Pressed::Nothing);
        let conflict = change("why", "q").expect_err("q quits");
        assert!(
            conflict.contains("`why`") && conflict.contains("`quit`"),
            "{conflict}"
        );
        assert!(change("fly", "x").expect_err("no such").contains("`fly`"));
    }
}
