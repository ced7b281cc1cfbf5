//! Reads the stacks of ranks. A file holds either Python stacks, in the form of Python's `faulthandler`, which
//! PyTorch's worker servers call:
//!
//! ```text
//! Thread 0x00007ff61edcfb80 (most recent call first):
//!   File "train.py", line 13 in load
//!   File "train.py", line 40 in <module>
//! ```
//!
//! or a native stack, as `rcomm-fr collect` writes it:
//!
//! ```text
//! Native thread 4711 by py-spy (most recent call first):
//!   clock_nanosleep (libc.so.6)
//! ```

use rcomm_recorder::model::{Frame, Rank};
use rcomm_verdict::{Finding, FrameRef, Place, Report};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// At most this many Python frames of one file are read.
const MOST_FRAMES: usize = 4096;
/// At most this many frames of one stack are added to a finding, and at most this many of a native stack are read.
const MOST_SHOWN: usize = 64;

/// How a file with a native stack begins; the number of the process follows.
pub const NATIVE_HEADER: &str = "Native thread";
/// How the first line of a stack ends.
const HEADER_END: &str = "(most recent call first):";
/// The number of characters that are kept of the name and of the place of a native frame.
const MAX_NAME: usize = 240;

/// A frame of machine code: printed and parsed as `name (place)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NativeFrame {
    name: String,
    /// The file name of the library, or of the source with the line; empty if unknown.
    place: String,
}

impl NativeFrame {
    /// A frame in the library or source file at `path`, of which only the last part is kept.
    pub fn new(name: &str, path: &str) -> Self {
        let cleaned = |text: &str| -> String {
            let printable = text.trim().chars().filter(|c| !c.is_control());
            printable.take(MAX_NAME).collect()
        };
        Self {
            name: cleaned(name),
            place: cleaned(path.rsplit('/').next().unwrap_or(path)),
        }
    }
}

impl fmt::Display for NativeFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, place } = self;
        if place.is_empty() {
            return write!(f, "{name}");
        }
        write!(f, "{name} ({place})")
    }
}

/// The Python stacks of one rank's threads at one moment, or its native stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStacks {
    /// The file; for a member of an archive, the archive's path, a colon and the member's name.
    pub path: String,
    /// The rank.
    pub rank: Rank,
    /// One stack for each thread that has a Python frame, innermost frame first.
    pub threads: Vec<Vec<Frame>>,
    /// The native stack of the main thread, or of another if none of the main thread was taken, innermost frame first;
    /// empty in a file with Python stacks.
    pub native: Vec<NativeFrame>,
}

impl RankStacks {
    /// Parses the text of the file at this path, which [`is_stacks`] accepts.
    pub fn parse(path: &str, rank: Rank, text: &str) -> Self {
        Self {
            path: path.to_owned(),
            rank,
            threads: parse(text),
            native: parse_native(text),
        }
    }

    /// The stack of the main thread, innermost frame first: the last one that began in a module's body or, if none did,
    /// the last one, since the newest thread is printed first. `None` if no thread has a Python frame.
    fn main_thread(&self) -> Option<&[Frame]> {
        let began_in_module = |stack: &&Vec<Frame>| {
            let outermost = stack.last();
            outermost.is_some_and(|frame| frame.name == "<module>")
        };
        let mut newest_last = self.threads.iter().rev();
        let main = newest_last.find(began_in_module);
        main.or(self.threads.last()).map(Vec::as_slice)
    }

    /// Where the main thread is: the innermost frame of the program's own code, and the library call that it is in.
    /// Frames of installed packages and of Python are not the program's own; frames of the package rcomm are no library
    /// call. If the program has no frame of its own, the innermost frame counts; `None` without a frame.
    pub fn place(&self) -> Option<String> {
        let stack = self.main_thread()?;
        let innermost = stack.iter().find(|frame| !is_of_rcomm(frame));
        let innermost = innermost.or(stack.first())?;
        let own = stack.iter().find(|frame| !is_library(frame));
        let frame = own.unwrap_or(innermost);
        let within = match std::ptr::eq(frame, innermost) {
            true => String::new(),
            false => format!(", within {}", innermost.name),
        };
        Some(format!(
            "{} ({}:{}){within}",
            frame.name, frame.filename, frame.line
        ))
    }
}

/// The folders of installed packages.
const PACKAGES: [&str; 2] = ["/site-packages/", "/dist-packages/"];

/// Whether the frame is of an installed package or of Python.
fn is_library(frame: &Frame) -> bool {
    let name = &frame.filename;
    let is_package = PACKAGES.iter().any(|folder| name.contains(folder));
    name.starts_with('<') || is_package || name.contains("/lib/python3")
}

/// Whether the frame is of the Python package rcomm, which wraps calls of PyTorch to record them.
fn is_of_rcomm(frame: &Frame) -> bool {
    let rest = PACKAGES
        .iter()
        .find_map(|folder| frame.filename.split_once(folder));
    rest.is_some_and(|(_, rest)| rest.starts_with("rcomm/"))
}

/// Whether a file with these first bytes holds stacks.
pub fn is_stacks(head: &[u8]) -> bool {
    let text = head.trim_ascii_start();
    let line = text.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let begins = [
        &b"Thread 0x"[..],
        b"Current thread 0x",
        NATIVE_HEADER.as_bytes(),
    ];
    begins.iter().any(|begin| line.starts_with(begin))
        && line.trim_ascii_end().ends_with(HEADER_END.as_bytes())
}

/// Parses the stacks: one for each thread, innermost frame first. Threads without a Python frame are left out.
/// At most 4096 frames are read.
pub fn parse(text: &str) -> Vec<Vec<Frame>> {
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

/// Parses the native stack, innermost frame first; empty if the text has none.
pub fn parse_native(text: &str) -> Vec<NativeFrame> {
    let mut lines = text.lines();
    if !lines
        .next()
        .is_some_and(|line| line.starts_with(NATIVE_HEADER))
    {
        return Vec::new();
    }
    let frames = lines.take_while(|line| line.starts_with(' ')).map(|line| {
        let (name, place) = match line
            .strip_suffix(')')
            .and_then(|line| line.rsplit_once(" ("))
        {
            Some(parts) => parts,
            None => (line, ""),
        };
        NativeFrame::new(name, place)
    });
    frames.take(MOST_SHOWN).collect()
}

/// Parses a line like `File "train.py", line 13 in load`.
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

/// The shell command that prints the stacks of this process of this node: Python stacks by `py-spy`, or native ones by
/// `gdb`.
pub fn command(pid: u32, is_python: bool) -> String {
    match is_python {
        true => format!("py-spy dump --pid {pid}"),
        false => format!("gdb -p {pid} -batch -ex 'thread apply all bt'"),
    }
}

/// Adds the command that takes a stack to those findings that ask for one. `pid_of` gives the process of a rank, if it
/// runs on this node.
pub fn name_commands(report: &mut Report, pid_of: impl Fn(Rank) -> Option<u32>) {
    for finding in &mut report.findings {
        if let Some(rank) = finding.rank_of_stack()
            && let Some(pid) = pid_of(rank)
        {
            let mut frames = finding.frames.iter();
            let is_python =
                frames.any(|frame| frame.rank == rank && frame.filename.ends_with(".py"));
            let (ask, command) = (Finding::TAKE_STACK, command(pid, is_python));
            finding.next = finding.next.replacen(ask, &format!("{ask} ({command})"), 1);
        }
    }
}

/// Adds the places of the ranks to the report.
///
/// Puts the main thread's Python stack and the native stack of each rank at fault before the other frames of a finding:
/// Python frames have `now` in [`FrameRef::when`], native ones `native`. If a finding then has a stack of every rank at
/// fault, its next step is to read them, not to take them.
pub fn join(report: &mut Report, stacks: &[RankStacks]) {
    report.now = places(stacks);
    for finding in &mut report.findings {
        let mut frames: Vec<FrameRef> = Vec::new();
        let mut is_complete = !finding.culprit_ranks.is_empty();
        for rank in &finding.culprit_ranks {
            let before = frames.len();
            let of_rank = || stacks.iter().filter(|stacks| stacks.rank == *rank);
            let python = of_rank().find_map(RankStacks::main_thread);
            let stack = python.unwrap_or_default();
            frames.extend(stack.iter().take(MOST_SHOWN).map(|frame| FrameRef {
                rank: *rank,
                when: "now".to_owned(),
                name: frame.name.clone(),
                filename: frame.filename.clone(),
                line: frame.line,
            }));
            let native = of_rank().flat_map(|stacks| &stacks.native);
            frames.extend(native.take(MOST_SHOWN).map(|frame| FrameRef {
                rank: *rank,
                when: "native".to_owned(),
                name: frame.name.clone(),
                filename: frame.place.clone(),
                line: 0,
            }));
            is_complete &= frames.len() > before;
        }
        if is_complete {
            let read = "read its stack, which is in this report";
            finding.next = finding.next.replacen(Finding::TAKE_STACK, read, 1);
        }
        finding.frames.splice(0..0, frames);
    }
}

/// Where the ranks of these stacks are, the place with the fewest ranks first: it is the likeliest to matter. Of a rank
/// without a Python stack, the innermost frame of its native stack is the place.
pub fn places(stacks: &[RankStacks]) -> Vec<Place> {
    let in_python = stacks.iter().filter(|stacks| stacks.place().is_some());
    let in_python: BTreeSet<Rank> = in_python.map(|stacks| stacks.rank).collect();
    let mut ranks_at: BTreeMap<String, BTreeSet<Rank>> = BTreeMap::new();
    for stacks in stacks {
        let native = || match in_python.contains(&stacks.rank) {
            true => None,
            false => stacks.native.first().map(ToString::to_string),
        };
        if let Some(place) = stacks.place().or_else(native) {
            ranks_at.entry(place).or_default().insert(stacks.rank);
        }
    }
    let place = |(place, ranks): (String, BTreeSet<Rank>)| Place {
        ranks: ranks.into_iter().collect(),
        place,
    };
    let mut places: Vec<Place> = ranks_at.into_iter().map(place).collect();
    places.sort_by_key(|place| place.ranks.len());
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::publish::Dump;
    use rcomm_verdict::{Code, Policy, analyze};

    const TEXT: &str = "Current thread 0x01 (most recent call first):\n  <no Python frame>\n\n\
        Thread 0x03 (most recent call first):\n  File \"/x/loader.py\", line 7 in run\n\n\
        Thread 0x02 (most recent call first):\n  File \"a.py\", line 13 in load\n  \
        File \"/x/a b.py\", line 40 in <module>\n\n\
        Thread 0x04 (most recent call first):\n  File \"watch.py\", line 2 in look\n";

    #[test]
    fn the_thread_that_began_in_a_module_is_the_main_thread() {
        assert!(is_stacks(TEXT.as_bytes()));
        let stacks = RankStacks::parse("", 0, TEXT);
        assert_eq!(stacks.threads.len(), 3);
        let main = stacks.main_thread().expect("the text has threads");
        assert_eq!((main[0].name.as_str(), main[0].line), ("load", 13));
        assert_eq!(main[1].filename, "/x/a b.py");
        let threads = vec![stacks.threads[0].clone(), stacks.threads[2].clone()];
        let other = RankStacks { threads, ..stacks };
        let last = other.main_thread().expect("the text has threads");
        assert_eq!(last[0].name, "look");
    }

    #[test]
    fn a_finding_without_culprits_still_asks_for_a_stack() {
        let mut report = analyze::<Dump>(&[], &Policy::default());
        for culprits in [Vec::new(), vec![2]] {
            let mut finding = Finding::new(Code::E101, culprits, String::new());
            finding.next = format!("look at rank 2: {}", Finding::TAKE_STACK);
            report.findings.push(finding);
        }
        join(&mut report, &[RankStacks::parse("", 2, TEXT)]);
        let next = |at: usize| report.findings[at].next.as_str();
        assert_eq!(next(0), "look at rank 2: take its stack");
        assert_eq!(
            next(1),
            "look at rank 2: read its stack, which is in this report"
        );
    }

    #[test]
    fn the_command_is_named_for_the_rank_whose_stack_is_asked_for() {
        let mut report = analyze::<Dump>(&[], &Policy::default());
        let take = Finding::TAKE_STACK;
        for next in [
            format!(
                "look at what rank 12, process 7 on host n0, does after f (a.py:3): {take}; its last"
            ),
            format!("look at what rank 1 does: {take}"),
            format!("ask rank 12: {take}"),
            "look at what rank 12 does".to_owned(),
        ] {
            let mut finding = Finding::new(Code::E101, vec![1, 12], String::new());
            finding.frames = vec![FrameRef {
                rank: 12,
                when: "last_seen".to_owned(),
                name: "f".to_owned(),
                filename: "a.py".to_owned(),
                line: 3,
            }];
            finding.next = next;
            report.findings.push(finding);
        }
        name_commands(&mut report, |rank| (rank == 12).then_some(4711));
        let next = |at: usize| report.findings[at].next.as_str();
        assert_eq!(
            next(0),
            "look at what rank 12, process 7 on host n0, does after f (a.py:3): take its stack (py-spy dump --pid \
             4711); its last"
        );
        assert_eq!(next(1), "look at what rank 1 does: take its stack");
        assert_eq!(next(2), "ask rank 12: take its stack");
        assert_eq!(next(3), "look at what rank 12 does");
        name_commands(&mut report, |rank| (rank == 1).then_some(7));
        assert_eq!(
            report.findings[1].next,
            "look at what rank 1 does: take its stack (gdb -p 7 -batch -ex 'thread apply all bt')"
        );
    }

    #[test]
    fn a_native_stack_is_parsed_as_it_is_printed() {
        let frames = [
            NativeFrame::new("std::f<void (int)>::g", "/lib/x.so"),
            NativeFrame::new("main", ""),
        ];
        let mut text = format!("{NATIVE_HEADER} 7 by gdb (most recent call first):\n");
        for frame in &frames {
            text += &format!("  {frame}\n");
        }
        assert!(is_stacks(text.as_bytes()));
        let stacks = RankStacks::parse("", 2, &text);
        assert_eq!(stacks.native, frames);
        assert_eq!(stacks.main_thread(), None);
        assert_eq!(parse_native(TEXT), []);
    }

    #[test]
    fn text_that_is_no_traceback_is_not_taken_for_stacks_and_a_long_stack_is_cut() {
        for text in [
            "",
            "<html>",
            "  File \"a",
            "  File \"a\", line x in f\n\n\u{1b}[2J",
        ] {
            assert!(!is_stacks(text.as_bytes()));
            let stacks = parse(text);
            assert!(
                stacks.iter().flatten().all(|frame| frame.line == 0),
                "{stacks:?}"
            );
        }
        assert!(!is_stacks(b"Thread 0x12 started\n"));
        let long = "  File \"a.py\", line 1 in f\n".repeat(10_000);
        assert_eq!(parse(&long)[0].len(), MOST_FRAMES);
    }

    #[test]
    fn a_place_is_the_programs_own_line_and_the_library_call_that_it_is_in() {
        let line = |name: &str, path: &str, line: u32| {
            format!("  File \"{path}\", line {line} in {name}\n")
        };
        let packages = "/opt/lib/python3.11/site-packages";
        let torch = format!("{packages}/torch/distributed/distributed_c10d.py");
        let wrapper = line("wait_and_see", &format!("{packages}/rcomm/torch.py"), 369);
        let all_reduce = line("all_reduce", &torch, 2942);
        let step = line("step", "/x/rcomm/torch.py", 40);
        let place = |rank: Rank, frames: &[&str]| {
            let text = format!("Thread 0x01 (most recent call first):\n{}", frames.concat());
            RankStacks::parse("", rank, &text)
        };
        let at_step = "step (/x/rcomm/torch.py:40)";
        let wrapped = place(3, &[&wrapper, &all_reduce, &step]);
        let within = format!("{at_step}, within all_reduce");
        assert_eq!(wrapped.place().as_deref(), Some(within.as_str()));
        let own = place(2, &[&step]);
        assert_eq!(own.place().as_deref(), Some(at_step));
        let only = place(0, &[&all_reduce]).place();
        assert_eq!(only, Some(format!("all_reduce ({torch}:2942)")));
        assert!(
            place(0, &[&wrapper])
                .place()
                .is_some_and(|place| place.starts_with("wait_and_see"))
        );
        assert_eq!(place(0, &[]).place(), None);
        let places = places(&[place(1, &[&all_reduce, &step]), wrapped, own]);
        let ranks: Vec<&[Rank]> = places.iter().map(|place| place.ranks.as_slice()).collect();
        assert_eq!(ranks, [&[2][..], &[1, 3]]);
    }
}
