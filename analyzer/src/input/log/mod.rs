//! Reads logs: the lines that PyTorch, NCCL, gloo and launchers print when a job fails, of one rank or of all in one
//! file.
//!
//! A log is read as a stream of lines, so its size does not matter; each line is cut at [`MAX_LINE`] and at most
//! [`MAX_FACTS`] facts are kept of each attempt of the job. Labels before the message (torchrun's and PyTorch's
//! `[rank3]:`, Slurm's `3: `, time stamps, a container's, colors) are removed first. A line is searched for fixed words
//! and parsed without regular expressions: the cost is linear in the length of the line, and no sequence of bytes is an
//! error.

mod elastic;
mod label;
mod nccl;
mod restart;
mod scan;
mod torch;

use label::Label;
use rcomm_recorder::model::Rank;
use rcomm_verdict::logs::{Attempt, Event, Fact, Log};
use restart::Signs;
use std::collections::{BTreeSet, HashMap};
use std::io::{self, BufRead, Read};

/// The largest number of bytes of a line that are read; the rest is skipped.
pub const MAX_LINE: usize = 16 << 10;

/// The largest number of facts that are kept of one attempt of a job in one log.
pub const MAX_FACTS: usize = 50_000;

/// The largest number of attempts that are kept of one log; the facts of older ones are counted only.
pub const MAX_ATTEMPTS: usize = 4;

/// The largest number of processes whose rank is stored.
const MAX_PROCESSES: usize = 1 << 16;

/// Whether a file with these first bytes can be a log: it is text, but not a JSON document.
pub fn may_begin(head: &[u8]) -> bool {
    let text = head.trim_ascii_start();
    // A pickle begins with 0x80.
    let is_binary = head.first() == Some(&0x80) || head.contains(&0);
    // Docker writes one JSON object per line.
    let is_document = text.first() == Some(&b'{') && !text.starts_with(br#"{"log":"#);
    !is_binary && !is_document && !text.is_empty()
}

/// Reads a log to its end, and blocks until then. `rank` is the rank in the name of the file; it counts only if no line
/// has a label with a rank.
///
/// # Errors
/// If `input` cannot be read.
pub fn read(path: &str, rank: Option<Rank>, input: impl Read) -> io::Result<Log> {
    let mut reader = LogReader::new(path);
    let mut input = io::BufReader::new(input);
    let mut line = Vec::new();
    while next_line(&mut input, &mut line)? {
        reader.line(&line);
    }
    Ok(reader.finish(rank))
}

/// The next line without its end, cut at [`MAX_LINE`]; `false` at the end of the input.
fn next_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let mut has_bytes = false;
    loop {
        let piece = match input.fill_buf() {
            Ok(piece) => piece,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if piece.is_empty() {
            return Ok(has_bytes);
        }
        has_bytes = true;
        // Progress bars return to the start of the line: each of their states counts as a line.
        let end = piece
            .iter()
            .position(|&byte| byte == b'\n' || byte == b'\r');
        let taken = &piece[..end.unwrap_or(piece.len())];
        let left = MAX_LINE.saturating_sub(line.len());
        line.extend_from_slice(&taken[..taken.len().min(left)]);
        let used = end.map_or(piece.len(), |end| end + 1);
        input.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

/// Reads a log line by line.
#[derive(Default)]
struct LogReader {
    log: Log,
    /// The newest attempt.
    attempt: Attempt,
    /// What the lines of the newest attempt have shown, which is needed to read the next lines.
    state: State,
    /// The ranks that the labels of all lines state.
    labels: BTreeSet<Rank>,
}

/// What the lines of an attempt have shown so far.
#[derive(Default)]
struct State {
    /// The ranks of processes by `host:pid`, with which NCCL's lines begin.
    ranks: HashMap<String, Rank>,
    /// The size of the communicator that `ranks` belong to: the largest one so far.
    nranks: u32,
    /// The index of each fact of which only the process is known, and that process as `host:pid`.
    of_process: Vec<(usize, String)>,
    desync: torch::Desync,
    /// Whether the last line without a label is of a traceback.
    in_traceback: bool,
    failures: elastic::FailureList,
    signs: Signs,
}

/// A line, split into labels and message.
struct Line<'a> {
    label: Label,
    /// The message after the labels, with its indent.
    text: &'a str,
}

impl LogReader {
    /// A reader of the log at `path`.
    fn new(path: &str) -> Self {
        Self {
            log: Log {
                path: path.to_owned(),
                ..Log::default()
            },
            ..Self::default()
        }
    }

    /// Takes the next line, without its line break.
    fn line(&mut self, bytes: &[u8]) {
        self.log.lines += 1;
        let bytes = &bytes[..bytes.len().min(MAX_LINE)];
        let raw = String::from_utf8_lossy(bytes);
        let text = label::without_docker_json(&raw);
        let text = label::without_colors(&text);
        let (label, end_of_labels) = Label::of(&text);
        self.labels.extend(label.rank);
        let line = Line {
            label,
            text: &text[end_of_labels..],
        };
        self.read_line(&line);
    }

    /// Adds what a line shows to the newest attempt, or to a new one if the line begins one.
    fn read_line(&mut self, line: &Line<'_>) {
        if self.state.signs.note_line(line) {
            self.begin_attempt(self.attempt.facts.len());
            self.state = State::default();
            // The line is the first sign of the new attempt.
            self.state.signs.note_line(line);
        }
        if let Some(size) = torch::world_size(line.text) {
            self.note_world_size(size);
        }
        if let Some(membership) = nccl::communicator(line.text) {
            self.note_membership(membership);
        }
        let mut found = Vec::new();
        let state = &mut self.state;
        torch::read_line(line, &mut state.desync, &mut state.in_traceback, &mut found);
        elastic::read_line(line, &mut self.state.failures, &mut found);
        let process = nccl::read_line(line, &mut found);
        for (rank, event) in found {
            self.add_fact(line, rank, event, process.as_deref());
        }
    }

    /// Begins a new attempt with the fact of this index, or with the next one if there is none. Does nothing if no fact
    /// is before it.
    fn begin_attempt(&mut self, first: usize) {
        if first == 0 {
            return;
        }
        self.resolve_processes();
        let next = Attempt {
            world_size: None,
            facts: self.attempt.facts.split_off(first),
        };
        let ended = std::mem::replace(&mut self.attempt, next);
        self.log.attempts.push(ended);
        self.state.signs = Signs::default();
        if self.log.attempts.len() >= MAX_ATTEMPTS {
            self.log.left_out += self.log.attempts.remove(0).facts.len() as u64;
        }
    }

    /// Sets the rank of each fact of which only the process was known.
    fn resolve_processes(&mut self) {
        for (index, process) in self.state.of_process.drain(..) {
            self.attempt.facts[index].rank = self.state.ranks.get(&process).copied();
        }
    }

    fn note_world_size(&mut self, size: u32) {
        let known = self.attempt.world_size.unwrap_or(0);
        self.attempt.world_size = Some(known.max(size));
    }

    /// Stores the rank of a process in a communicator; the largest communicator counts as the world.
    fn note_membership(&mut self, membership: nccl::Membership) {
        let state = &mut self.state;
        if membership.nranks < state.nranks {
            return;
        }
        if membership.nranks > state.nranks {
            state.ranks.clear();
            state.nranks = membership.nranks;
        }
        if state.ranks.len() < MAX_PROCESSES {
            state.ranks.insert(membership.process, membership.rank);
        }
        self.note_world_size(membership.nranks);
    }

    /// Adds the fact of a line to the newest attempt, or to a new one if the fact shows a restart. `process` is the
    /// `host:pid` with which the line begins, if any.
    fn add_fact(
        &mut self,
        line: &Line<'_>,
        rank: Option<Rank>,
        event: Event,
        process: Option<&str>,
    ) {
        let fact = Fact {
            line: self.log.lines,
            rank,
            event,
        };
        let index = self.attempt.facts.len();
        // A fact that is left out may show a restart, too, after which facts are kept again. An index that was noted
        // for an earlier one that was left out lies beyond the end of the list: hence the minimum.
        if let Some(first) = self.state.signs.note_fact(line, index, &fact) {
            self.begin_attempt(first.min(index));
            let index = self.attempt.facts.len();
            self.state.signs.note_fact(line, index, &fact);
        }
        if self.attempt.facts.len() >= MAX_FACTS {
            self.log.left_out += 1;
            return;
        }
        if let (None, Some(process)) = (rank, process) {
            let index = self.attempt.facts.len();
            self.state.of_process.push((index, process.to_owned()));
        }
        self.attempt.facts.push(fact);
    }

    /// The log that was read. `rank` is the rank in the name of the file; it counts only if no line has a label with a
    /// rank.
    fn finish(mut self, rank: Option<Rank>) -> Log {
        self.resolve_processes();
        self.log.attempts.push(self.attempt);
        // If all labels state one rank, the file is that rank's. The name counts only without labels, since its number
        // may mean something else.
        let rank_of_file = match (self.labels.len(), rank) {
            (1, _) => self.labels.first().copied(),
            (0, named) => named,
            _ => None,
        };
        let attempts = self.log.attempts.iter_mut();
        for fact in attempts.flat_map(|attempt| &mut attempt.facts) {
            // A launcher and the kernel report the ends of any processes, not only of the one that wrote the log.
            let is_of_writer = !matches!(
                fact.event,
                Event::Ended(_) | Event::OutOfMemory { .. } | Event::Terminated
            );
            if fact.rank.is_none() && is_of_writer {
                fact.rank = rank_of_file;
            }
        }
        self.log
    }
}

#[cfg(test)]
mod tests;
