//! Key bindings as data: the footer, the help and the dispatcher share one list, [`BINDINGS`].

mod bindings;

pub use bindings::{Action, BINDINGS, Binding, Section};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::collections::{BTreeMap, HashMap};

/// The name of a key as the configuration spells it: `q`, `G`, `ctrl-d`, `space`, `enter`, `shift-tab`, `f5`. `None`
/// if the key cannot be bound.
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

/// Key bindings with the changes of the configuration.
#[derive(Clone, Debug)]
pub struct Keymap {
    /// By key, or by a pair of keys separated by a space.
    actions: HashMap<String, Action>,
    /// The keys of each action.
    shown: HashMap<Action, Vec<String>>,
}

/// Meaning of a key press.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pressed {
    /// The key triggers this action.
    Action(Action),
    /// The key is the first of a pair.
    Pending(String),
    /// The key is not bound.
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
    /// The default keys, with those of some actions replaced. `changes` maps the name of an action to its new keys.
    ///
    /// # Errors
    ///
    /// If an action is unknown, or a new key is a key of another action: a new one, or a default one of an action that
    /// `changes` does not have.
    pub fn with(changes: &BTreeMap<String, Vec<String>>) -> Result<Self, String> {
        let mut map = Self::default();
        let mut changed = Vec::new();
        for (name, keys) in changes {
            let binding = BINDINGS
                .iter()
                .find(|binding| binding.name == name)
                .ok_or_else(|| format!("unknown action `{name}` under [keys]"))?;
            map.actions.retain(|_, action| *action != binding.action);
            changed.push((binding, keys));
        }
        // All old keys are free before the first new one is taken: two actions may swap theirs.
        for (binding, keys) in changed {
            let name = binding.name;
            for key in keys {
                if let Some(other) = map.actions.get(key) {
                    let other = BINDINGS.iter().find(|b| b.action == *other);
                    let other = other.map_or("another action", |b| b.name);
                    return Err(format!(
                        "key `{key}` is bound to both `{name}` and `{other}`"
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

    /// The meaning of `key` after `pending`, the first key of a pair if one was pressed.
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

    /// A map in which no action has a key: for a page that is printed, where none can be pressed.
    pub fn without_keys() -> Self {
        Self {
            actions: HashMap::new(),
            shown: HashMap::new(),
        }
    }

    /// The first key of each of these actions, and what they do: `[(] [)] operation`. `None` if one of them has no key.
    pub fn hint(&self, actions: &[Action], does: &str) -> Option<String> {
        let mut hint = String::new();
        for &action in actions {
            hint.push_str(&format!("[{}] ", self.keys(action).first()?));
        }
        hint.push_str(does);
        Some(hint.trim_end().to_owned())
    }

    /// The keys of an action; empty if it has none.
    pub fn keys(&self, action: Action) -> &[String] {
        self.shown.get(&action).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn keys_and_names_are_unique() {
        let keys: Vec<_> = BINDINGS.iter().flat_map(|b| b.keys).collect();
        assert_eq!(keys.len(), keys.iter().collect::<HashSet<_>>().len());
        let names: HashSet<_> = BINDINGS.iter().map(|b| b.name).collect();
        assert_eq!(names.len(), BINDINGS.len());
    }

    #[test]
    fn the_second_key_of_a_pair_completes_it_or_acts_alone() {
        let map = Keymap::default();
        assert_eq!(map.press(None, "g"), Pressed::Pending("g".into()));
        assert_eq!(map.press(Some("g"), "g"), Pressed::Action(Action::Top));
        assert_eq!(map.press(Some("g"), "j"), Pressed::Action(Action::Down));
        assert_eq!(map.press(None, "@"), Pressed::Nothing);
    }

    #[test]
    fn a_hint_has_the_keys_of_its_actions_or_is_left_out() {
        let hint = |map: &Keymap| map.hint(&[Action::Enter, Action::Why], "opens");
        assert_eq!(
            hint(&Keymap::default()).as_deref(),
            Some("[enter] [w] opens")
        );
        assert_eq!(hint(&Keymap::without_keys()), None);
        let unbound = BTreeMap::from([("why".to_owned(), vec![])]);
        let unbound = Keymap::with(&unbound).expect("an action may have no key");
        assert_eq!(hint(&unbound), None);
    }

    #[test]
    fn a_changed_key_replaces_the_default_and_conflicts_are_named() {
        let change = |name: &str, key: &str| {
            Keymap::with(&BTreeMap::from([(name.to_owned(), vec![key.to_owned()])]))
        };
        let map = change("why", "W").expect("the key is free");
        assert_eq!(map.press(None, "W"), Pressed::Action(Action::Why));
        assert_eq!(map.press(None, "w"), Pressed::Nothing);
        let conflict = change("why", "q").expect_err("q quits");
        assert!(
            conflict.contains("`why`") && conflict.contains("`quit`"),
            "{conflict}"
        );
        let swapped = Keymap::with(&BTreeMap::from([
            ("why".to_owned(), vec!["t".to_owned()]),
            ("stacks".to_owned(), vec!["w".to_owned()]),
        ]));
        let swapped = swapped.expect("each key has one action");
        assert_eq!(swapped.press(None, "t"), Pressed::Action(Action::Why));
        assert_eq!(swapped.press(None, "w"), Pressed::Action(Action::Stacks));
        assert!(
            change("fly", "x")
                .expect_err("no such action")
                .contains("`fly`")
        );
    }
}
