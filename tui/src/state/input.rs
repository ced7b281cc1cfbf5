//! The line at the bottom where a filter or a command is typed.

use super::command::{self, KnownNames};
use rcomm_analyzer::filter::{Filter, KEYS};

/// Purpose of the input line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A filter, applied while it is typed.
    Filter,
    /// A command.
    Command,
}

/// A line being typed.
#[derive(Clone, Debug)]
pub struct Input {
    /// The purpose of the line.
    pub purpose: Purpose,
    /// The current text.
    pub text: String,
    /// Position of the cursor, in characters.
    pub cursor: usize,
    /// The error in the text, if there is one.
    pub error: Option<String>,
    /// The filter to restore on cancel.
    before: Filter,
    /// Completions to cycle through, and the index of the current one.
    choices: Vec<String>,
    choice: usize,
}

impl Input {
    /// Starts the input with `text`.
    pub fn new(purpose: Purpose, text: &str, before: Filter) -> Self {
        Self {
            purpose,
            text: text.to_owned(),
            cursor: text.chars().count(),
            error: None,
            before,
            choices: vec![],
            choice: 0,
        }
    }

    /// The filter that applied before the input began.
    pub fn before(&self) -> &Filter {
        &self.before
    }

    /// The offset in bytes of the character at this index; that of the end if there is none.
    fn byte_offset(&self, index: usize) -> usize {
        let mut offsets = self.text.char_indices().map(|(byte, _)| byte);
        offsets.nth(index).unwrap_or(self.text.len())
    }

    /// Inserts a character at the cursor.
    pub fn insert(&mut self, c: char) {
        let offset = self.byte_offset(self.cursor);
        self.text.insert(offset, c);
        self.cursor += 1;
        self.choices.clear();
    }

    /// Deletes the character before the cursor.
    pub fn backspace(&mut self) {
        if self.cursor > 0 {
            self.cursor -= 1;
            let offset = self.byte_offset(self.cursor);
            self.text.remove(offset);
        }
        self.choices.clear();
    }

    /// Deletes the word before the cursor, and the white space between them.
    pub fn delete_word(&mut self) {
        let end = self.byte_offset(self.cursor);
        let head = self.text[..end].trim_end();
        let start = head.rfind(char::is_whitespace).map_or(0, |offset| {
            offset + head[offset..].chars().next().map_or(1, char::len_utf8)
        });
        self.text.replace_range(start..end, "");
        self.cursor = self.text[..start].chars().count();
        self.choices.clear();
    }

    /// Deletes the whole text.
    pub fn clear(&mut self) {
        self.text.clear();
        self.cursor = 0;
        self.choices.clear();
    }

    /// Moves the cursor by `delta` characters, to the ends of the text at most.
    pub fn move_by(&mut self, delta: isize) {
        let last = self.text.chars().count();
        self.cursor = self.cursor.saturating_add_signed(delta).min(last);
    }

    /// Completions of the text, shown as a hint.
    pub fn candidates(&self, names: &KnownNames) -> Vec<String> {
        match self.purpose {
            Purpose::Command => command::complete(&self.text, names),
            Purpose::Filter => complete_filter(&self.text, names),
        }
    }

    /// Completes the text; repeated calls cycle through the completions.
    pub fn complete(&mut self, names: &KnownNames) {
        if self.choices.is_empty() {
            self.choices = self.candidates(names);
            self.choice = 0;
        } else {
            self.choice = (self.choice + 1) % self.choices.len();
        }
        if let Some(text) = self.choices.get(self.choice) {
            self.text.clone_from(text);
            self.cursor = self.text.chars().count();
        }
    }
}

/// The completions of the last term of a filter, each as the whole text: of its key, or of the value after a key.
fn complete_filter(text: &str, names: &KnownNames) -> Vec<String> {
    let term = text.rsplit(char::is_whitespace).next().unwrap_or_default();
    let head = &text[..text.len() - term.len()];
    let (sign, body) = match term.strip_prefix('!') {
        Some(body) => ("!", body),
        None => ("", term),
    };
    let completions = |key: &str, words: &[String], value: &str| -> Vec<String> {
        let matching = words.iter().filter(|word| word.starts_with(value));
        matching
            .map(|word| format!("{head}{sign}{key}:{word}"))
            .collect()
    };
    match body.split_once(':') {
        Some(("group", value)) => completions("group", &names.groups, value),
        Some(("host", value)) => completions("host", &names.hosts, value),
        Some(("op", value)) => completions("op", &names.ops, value),
        Some(("code", value)) => completions("code", &names.codes, value),
        Some(("rank", value)) => completions("rank", &names.ranks, value),
        Some(_) => vec![],
        None => KEYS
            .iter()
            .filter(|(key, _)| key.starts_with(body))
            .map(|(key, _)| format!("{head}{sign}{key}"))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(text: &str) -> Input {
        Input::new(Purpose::Filter, text, Filter::default())
    }

    #[test]
    fn editing_moves_and_deletes_by_characters_and_not_by_bytes() {
        let mut input = typed("größe x");
        input.delete_word();
        assert_eq!(input.text, "größe ");
        input.move_by(-3);
        input.backspace();
        assert_eq!((input.text.as_str(), input.cursor), ("grße ", 2));
        input.insert('ö');
        assert_eq!(input.text, "größe ");
        input.move_by(-100);
        input.backspace();
        assert_eq!(input.cursor, 0);
    }

    #[test]
    fn completion_cycles_through_the_matches() {
        let names = KnownNames {
            groups: vec!["dp_0".into(), "dp_1".into(), "tp_0".into()],
            ..KnownNames::default()
        };
        let mut input = typed("age>5s !group:dp");
        input.complete(&names);
        assert_eq!(input.text, "age>5s !group:dp_0");
        input.complete(&names);
        assert_eq!(input.text, "age>5s !group:dp_1");
        input.complete(&names);
        assert_eq!(input.text, "age>5s !group:dp_0");
        let mut key = typed("ho");
        key.complete(&names);
        assert_eq!(key.text, "host:");
        // A space that does not break lines has two bytes.
        let mut after_wide_space = typed("age>5s\u{a0}group:t");
        after_wide_space.complete(&names);
        assert_eq!(after_wide_space.text, "age>5s\u{a0}group:tp_0");
    }
}
