//! Writes the dialect as pickle, the encoding that PyTorch's own analyzer loads.
//!
//! Every entry contains its frames; a frame is written once and referred to afterwards.

use super::keys::{Field, frame};
use super::names::backend_for_torch;
use super::write::{self, Encoder};
use crate::model::dump::Dump;
use crate::publish::pickle::PickleWriter;

impl Dump {
    /// The dump as a pickle (protocol 2, plain data only): the 2.10 dialect of PyTorch's flight recorder,
    /// with rcomm's additional keys. A backend that PyTorch's tools do not know is `c10d` in `profiling_name`; its own
    /// name is under the key `backend`.
    pub fn to_pickle(&self) -> Vec<u8> {
        let mut out = Writer {
            pickle: PickleWriter::new(),
            frames: vec![None; self.frames.len()],
        };
        write::dump(self, &mut out);
        out.pickle.finish()
    }
}

/// The encoder for pickle.
struct Writer {
    pickle: PickleWriter,
    /// Memo numbers of the frames written so far.
    frames: Vec<Option<u32>>,
}

impl Writer {
    /// Writes a frame, or a reference to it if it was written before.
    fn frame(&mut self, dump: &Dump, index: u32) {
        if let Some(memo) = self.frames[index as usize] {
            self.pickle.recall(memo);
            return;
        }
        let row = &dump.frames[index as usize];
        self.pickle.open_dict();
        self.pickle.text(frame::NAME);
        self.pickle.text(&row.name);
        self.pickle.text(frame::FILENAME);
        self.pickle.text(&row.filename);
        self.pickle.text(frame::LINE);
        self.pickle.uint(row.line.into());
        self.pickle.close_dict();
        self.frames[index as usize] = Some(self.pickle.remember());
    }
}

impl Encoder for Writer {
    fn dict(&mut self, fill: impl FnOnce(&mut Self)) {
        self.pickle.open_dict();
        fill(self);
        self.pickle.close_dict();
    }

    fn key(&mut self, key: &str) {
        self.pickle.text(key);
    }

    fn list(&mut self, fill: impl FnOnce(&mut Self)) {
        self.pickle.open_list();
        fill(self);
        self.pickle.close_list();
    }

    fn text(&mut self, text: &str) {
        self.pickle.text(text);
    }

    fn int(&mut self, value: i64) {
        self.pickle.int(value);
    }

    fn uint(&mut self, value: u64) {
        self.pickle.uint(value);
    }

    fn float(&mut self, value: f64) {
        self.pickle.float(value);
    }

    fn bool(&mut self, value: bool) {
        self.pickle.bool(value);
    }

    fn time(&mut self, ns: i64) {
        match ns {
            0 => self.pickle.none(),
            ns => self.pickle.int(ns),
        }
    }

    fn counter(&mut self, value: i64) {
        self.pickle.int(value);
    }

    fn pair(&mut self, name: &str, desc: &str) {
        self.pickle.text(name);
        self.pickle.text(desc);
        self.pickle.close_pair();
    }

    fn backend<'a>(&self, name: &'a str) -> &'a str {
        backend_for_torch(name)
    }

    fn stack_tables(&mut self, _: &Dump) {}

    fn stack(&mut self, dump: &Dump, stack: Option<u32>) {
        self.key(Field::Frames.key());
        let frames = stack.map_or(&[][..], |index| &dump.stacks[index as usize]);
        self.list(|out| frames.iter().for_each(|&index| out.frame(dump, index)));
    }
}
