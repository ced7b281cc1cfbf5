//! Writes the dialect as JSON.
//!
//! PyTorch leaves stacks out of its JSON. rcomm's JSON has a table of frames and a table of stacks, and
//! an entry names its stack by number.

use super::keys::{Field, frame, top};
use super::write::{self, Encoder};
use crate::model::dump::Dump;
use std::io::Write as _;

impl Dump {
    /// The dump as JSON: the 2.10 dialect of PyTorch's flight recorder, with rcomm's additional keys.
    pub fn to_json(&self) -> Vec<u8> {
        let mut out = JsonWriter {
            bytes: Vec::with_capacity(512 * (self.entries.len() + 8)),
            needs_no_comma: true,
        };
        write::dump(self, &mut out);
        out.bytes
    }
}

/// The encoder for JSON.
struct JsonWriter {
    bytes: Vec<u8>,
    /// Whether nothing was written since the last opening bracket or key, so that no comma is needed.
    needs_no_comma: bool,
}

impl JsonWriter {
    /// Writes a comma if one is needed before the next value or key.
    fn separate(&mut self) {
        if !self.needs_no_comma {
            self.bytes.push(b',');
        }
        self.needs_no_comma = false;
    }

    /// Writes a list or a dict.
    fn bracketed(&mut self, [open, close]: [u8; 2], fill: impl FnOnce(&mut Self)) {
        self.separate();
        self.bytes.push(open);
        self.needs_no_comma = true;
        fill(self);
        self.needs_no_comma = false;
        self.bytes.push(close);
    }

    fn put(&mut self, value: std::fmt::Arguments<'_>) {
        self.separate();
        self.bytes
            .write_fmt(value)
            .expect("a vector takes every byte");
    }

    fn quoted(&mut self, text: &str) {
        serde_json::to_writer(&mut self.bytes, text).expect("a vector takes every string");
    }
}

impl Encoder for JsonWriter {
    fn dict(&mut self, fill: impl FnOnce(&mut Self)) {
        self.bracketed(*b"{}", fill);
    }

    fn key(&mut self, key: &str) {
        self.separate();
        self.quoted(key);
        self.bytes.push(b':');
        self.needs_no_comma = true;
    }

    fn list(&mut self, fill: impl FnOnce(&mut Self)) {
        self.bracketed(*b"[]", fill);
    }

    fn text(&mut self, text: &str) {
        self.separate();
        self.quoted(text);
    }

    fn int(&mut self, value: i64) {
        self.put(format_args!("{value}"));
    }

    fn uint(&mut self, value: u64) {
        self.put(format_args!("{value}"));
    }

    /// JSON has no infinity and no "not a number": those become null, as in PyTorch's JSON.
    fn float(&mut self, value: f64) {
        if value.is_finite() {
            self.put(format_args!("{value:?}"));
        } else {
            self.put(format_args!("null"));
        }
    }

    fn bool(&mut self, value: bool) {
        self.put(format_args!("{value}"));
    }

    fn time(&mut self, ns: i64) {
        self.int(ns);
    }

    fn counter(&mut self, value: i64) {
        self.put(format_args!("\"{value}\""));
    }

    fn pair(&mut self, name: &str, desc: &str) {
        self.list(|out| {
            out.text(name);
            out.text(desc);
        });
    }

    fn backend<'a>(&self, name: &'a str) -> &'a str {
        name
    }

    fn stack_tables(&mut self, dump: &Dump) {
        if dump.stacks.is_empty() {
            return;
        }
        self.key(top::FRAMES);
        self.list(|out| {
            for row in &dump.frames {
                out.dict(|out| {
                    out.key(frame::NAME);
                    out.text(&row.name);
                    out.key(frame::FILENAME);
                    out.text(&row.filename);
                    out.key(frame::LINE);
                    out.uint(row.line.into());
                });
            }
        });
        self.key(top::STACKS);
        self.list(|out| {
            for stack in &dump.stacks {
                out.list(|out| stack.iter().for_each(|&index| out.uint(index.into())));
            }
        });
    }

    fn stack(&mut self, _: &Dump, stack: Option<u32>) {
        if let Some(stack) = stack {
            self.key(Field::Stack.key());
            self.uint(stack.into());
        }
    }
}
