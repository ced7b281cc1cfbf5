//! Call stacks of running processes, taken from outside.

use super::SourceError;
use super::worker_servers::WorkerServerSource;
use rcomm_recorder::model::{Frame, Rank};
use rcomm_verdict::StackNode;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// At most this many frames of one process are read.
const MOST_FRAMES: usize = 4096;

/// A way to take the call stacks of running ranks.
pub trait StackRequests: Send + Sync {
    /// Takes the stacks of all ranks at once.
    ///
    /// # Blocking
    ///
    /// At most until the deadline.
    ///
    /// # Errors
    ///
    /// If no rank is known.
    fn take(&self, deadline: Instant) -> Result<TakenStacks, SourceError>;
}

/// The call stacks of ranks at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakenStacks {
    /// The kind of frames, for a heading, like `Python frames`.
    pub what: &'static str,
    /// The stacks of all threads, merged from the outermost frame inwards.
    pub stacks: Vec<StackNode>,
    /// Ranks whose stacks were taken, ascending.
    pub taken: Vec<Rank>,
    /// Ranks whose stacks were not taken, with the reason, ascending.
    pub refused: Vec<(Rank, String)>,
}

impl TakenStacks {
    pub(super) fn merge(answers: Vec<(Rank, Result<String, String>)>) -> Self {
        let mut merged = Self {
            what: "Python frames",
            ..Self::default()
        };
        let mut stacks = Vec::new();
        for (rank, answer) in answers {
            match answer {
                Ok(text) => {
                    merged.taken.push(rank);
                    stacks.extend(read_traceback(&text).into_iter().map(|stack| (stack, rank)));
                }
                Err(reason) => merged.refused.push((rank, reason)),
            }
        }
        let stacks = stacks.iter();
        let stacks = stacks.map(|(frames, rank)| (frames.iter().rev(), vec![*rank]));
        merged.stacks = StackNode::merge(stacks);
        merged
    }
}

/// Takes the Python frames of every thread from PyTorch's worker servers. It changes nothing in the processes.
pub struct WorkerServerStacks(Mutex<WorkerServerSource>);

impl WorkerServerStacks {
    /// Takes the stacks of the ranks of this source, on separate connections.
    pub fn new(source: WorkerServerSource) -> Self {
        Self(Mutex::new(source))
    }
}

impl StackRequests for WorkerServerStacks {
    fn take(&self, deadline: Instant) -> Result<TakenStacks, SourceError> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let answers = source.ask_each("/handler/dump_traceback", deadline)?;
        let text = |body: Vec<u8>| String::from_utf8_lossy(&body).into_owned();
        let answers = answers.into_iter();
        let answers = answers.map(|(rank, answer)| (rank, answer.map(text)));
        Ok(TakenStacks::merge(answers.collect()))
    }
}

/// Parses the output of Python's `faulthandler`: one stack for each thread, innermost frame first. Threads without a
/// Python frame are left out.
///
/// ```text
/// Thread 0x00007ff61edcfb80 (most recent call first):
///   File "train.py", line 13 in load
///   File "train.py", line 40 in <module>
/// ```
fn read_traceback(text: &str) -> Vec<Vec<Frame>> {
    let mut stacks: Vec<Vec<Frame>> = Vec::new();
    let mut frames = 0;
    for line in text.lines() {
        if !line.starts_with(' ') {
            stacks.push(Vec::new());
            continue;
        }
        let Some(frame) = read_frame(line.trim_start()).filter(|_| frames < MOST_FRAMES) else {
            continue;
        };
        frames += 1;
        match stacks.last_mut() {
            Some(stack) => stack.push(frame),
            None => stacks.push(vec![frame]),
        }
    }
    stacks.retain(|stack| !stack.is_empty());
    stacks
}

fn read_frame(line: &str) -> Option<Frame> {
    let rest = line.strip_prefix("File \"")?;
    let (filename, rest) = rest.rsplit_once("\", line ")?;
    let (number, name) = rest.split_once(" in ")?;
    let printable = |text: &str| text.chars().filter(|c| !c.is_control()).collect();
    Some(Frame {
        name: printable(name),
        filename: printable(filename),
        line: number.parse().unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "Current thread 0x01 (most recent call first):\n  <no Python frame>\n\n\
        Thread 0x02 (most recent call first):\n  File \"a.py\", line 13 in load\n  \
        File \"/x/a b.py\", line 40 in <module>\n";

    #[test]
    fn threads_with_frames_are_read_and_equal_stacks_are_merged() {
        let stacks = read_traceback(TEXT);
        let [stack] = stacks.as_slice() else {
            panic!("one thread has frames: {stacks:?}");
        };
        assert_eq!((stack[0].name.as_str(), stack[0].line), ("load", 13));
        assert_eq!(stack[1].filename, "/x/a b.py");
        let other = TEXT.replace("line 13 in load", "line 20 in step");
        let answers = vec![
            (0, Ok(TEXT.to_owned())),
            (1, Ok(other)),
            (2, Ok(TEXT.to_owned())),
            (3, Err("HTTP status 500".to_owned())),
        ];
        let merged = TakenStacks::merge(answers);
        let [root] = merged.stacks.as_slice() else {
            panic!("one outermost frame: {merged:?}");
        };
        assert_eq!(root.ranks, [0, 1, 2]);
        let inner: Vec<_> = root
            .children
            .iter()
            .map(|node| (&*node.name, &*node.ranks))
            .collect();
        assert_eq!(inner, [("load", &[0, 2][..]), ("step", &[1])]);
        assert_eq!(merged.taken, [0, 1, 2]);
        assert_eq!(merged.refused, [(3, "HTTP status 500".to_owned())]);
    }

    #[test]
    fn text_that_is_no_traceback_has_no_stack() {
        for text in [
            "",
            "<html>",
            "  File \"a",
            "  File \"a\", line x in f\n\n\u{1b}[2J",
        ] {
            let stacks = read_traceback(text);
            assert!(
                stacks.iter().flatten().all(|frame| frame.line == 0),
                "{stacks:?}"
            );
        }
        let long = "  File \"a.py\", line 1 in f\n".repeat(10_000);
        assert_eq!(read_traceback(&long)[0].len(), MOST_FRAMES);
    }
}
