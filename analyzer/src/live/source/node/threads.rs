//! Reads the states of the threads of processes on this node from the kernel's files in `/proc`. No process has to
//! answer, and none is stopped or traced.

use crate::live::source::{RingSource, SourceError, StackRequests, TakenStacks};
use rcomm_recorder::model::{Frame, Rank};
use rcomm_verdict::StackNode;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// At most this many threads of one process are read.
const MOST_THREADS: usize = 1_024;

/// Takes the states of the threads of a job's ranks with rings on this node: at most 1,024 threads of each rank.
pub struct RingThreads(Mutex<RingSource>);

impl RingThreads {
    /// Takes the states for the ranks of the job that this source shows.
    pub fn new(source: RingSource) -> Self {
        Self(Mutex::new(source))
    }
}

impl StackRequests for RingThreads {
    fn take(&self, deadline: Instant) -> Result<TakenStacks, SourceError> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(threads_of_ranks(source.processes()?, deadline))
    }
}

/// The threads of the processes of ranks; a process is `None` if it is gone or cannot be seen from here.
pub(super) fn threads_of_ranks(
    processes: impl IntoIterator<Item = (Rank, Option<u32>)>,
    deadline: Instant,
) -> TakenStacks {
    let mut taken = TakenStacks {
        what: "threads as the kernel sees them",
        ..TakenStacks::default()
    };
    let mut stacks: Vec<(Vec<Frame>, Rank)> = Vec::new();
    for (rank, process) in processes {
        let threads = match process {
            None => Err(
                "its process is gone, or runs on another host or in another container".to_owned(),
            ),
            Some(_) if Instant::now() > deadline => Err("there was no time left".to_owned()),
            Some(pid) => threads_of(Path::new("/proc"), pid),
        };
        match threads {
            Ok(threads) => {
                taken.taken.push(rank);
                stacks.extend(threads.into_iter().map(|thread| (thread, rank)));
            }
            Err(reason) => taken.refused.push((rank, reason)),
        }
    }
    // The name is the outer frame, the state the inner one, so threads of one name share a row.
    let merged = stacks
        .iter()
        .map(|(frames, rank)| (frames.iter(), vec![*rank]));
    taken.stacks = StackNode::merge(merged);
    taken
}

/// The threads of a process, each as two frames: its name, then its state.
fn threads_of(proc: &Path, pid: u32) -> Result<Vec<Vec<Frame>>, String> {
    let tasks = proc.join(format!("{pid}/task"));
    let listed = fs::read_dir(&tasks).map_err(|error| format!("{}: {error}", tasks.display()))?;
    let mut threads: Vec<Vec<Frame>> = Vec::new();
    for task in listed.flatten().take(MOST_THREADS) {
        let read = |file: &str| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let (name, status, wchan) = (read("comm"), read("status"), read("wchan"));
        // A thread that has ended since it was listed has no status.
        if !status.is_empty() {
            // The main thread has the name of its program.
            let name = match task.file_name() == *pid.to_string() {
                true => format!("main thread ({})", without_control(&name)),
                false => without_control(&name),
            };
            threads.push(vec![frame(&name), frame(&describe_state(&status, &wchan))]);
        }
    }
    threads.sort_by(|a, b| a[0].name.cmp(&b[0].name));
    Ok(threads)
}

/// The state of a thread, like `sleeps in futex_wait_queue`, from the text of `status` and of `wchan`.
pub(super) fn describe_state(status: &str, wchan: &str) -> String {
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    let state = state.map_or("", str::trim_start);
    let verb = match state.chars().next() {
        Some('R') => return "runs, or waits for a processor".to_owned(),
        Some('S') => "sleeps",
        Some('D') => "sleeps uninterruptibly",
        Some('T') => "is stopped",
        Some('t') => "is held by a debugger",
        Some('Z' | 'X') => "has ended",
        Some('I') => "is idle",
        _ => "is in a state that is not known",
    };
    // The kernel writes `0` if it hides the value, or knows no function in which the thread waits.
    match without_control(wchan).as_str() {
        "" | "0" => verb.to_owned(),
        wchan => format!("{verb} in {wchan}"),
    }
}

/// The text without control characters and without spaces at its end.
fn without_control(text: &str) -> String {
    text.trim_end()
        .chars()
        .filter(|c| !c.is_control())
        .collect()
}

fn frame(name: &str) -> Frame {
    Frame {
        name: name.to_owned(),
        ..Frame::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    fn node<'a>(nodes: &'a [StackNode], name: &str) -> Option<&'a StackNode> {
        nodes.iter().find(|node| node.name == name)
    }

    #[test]
    fn a_thread_of_a_rank_that_waits_is_named_and_sleeps() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let mut config = RecorderConfig::new("job", 3, 4);
        config.placement = Placement::Dir(directory.path().to_owned());
        let _recorder =
            FlightRecorder::create(&config).expect("a ring can be made in a fresh directory");
        let (release, held) = channel::<()>();
        let waits = std::thread::Builder::new().name("waits-for-you".into());
        let waits = waits
            .spawn(move || held.recv())
            .expect("a thread can be started");
        let source = RingSource::new(directory.path().to_owned(), None);
        let threads = RingThreads::new(source);
        let deadline = Instant::now() + Duration::from_secs(20);
        // The thread gets its name and sleeps only after a moment.
        loop {
            let taken = threads.take(deadline).expect("there is a ring");
            assert_eq!((&taken.taken[..], taken.refused.len()), (&[3][..], 0));
            let thread = node(&taken.stacks, "waits-for-you");
            if thread.is_some_and(|node| node.children[0].name.starts_with("sleeps")) {
                let mut names = taken.stacks.iter().map(|node| node.name.as_str());
                assert!(
                    names.any(|name| name.starts_with("main thread (")),
                    "{taken:?}"
                );
                break;
            }
            assert!(Instant::now() < deadline, "{:?}", taken.stacks);
        }
        drop(release);
        // Nothing was sent.
        assert!(waits.join().expect("no thread panics").is_err());
    }

    #[test]
    fn the_state_of_a_thread_is_described() {
        let describe = |state: &str, wchan: &str| {
            describe_state(&format!("Name:\tx\nState:\t{state}\n"), wchan)
        };
        assert_eq!(
            describe("S (sleeping)", "futex_wait_queue"),
            "sleeps in futex_wait_queue"
        );
        assert_eq!(describe("S (sleeping)", "0"), "sleeps");
        assert_eq!(
            describe("R (running)", "0"),
            "runs, or waits for a processor"
        );
        assert_eq!(
            describe("D (disk sleep)", "nfs_wait_bit_killable"),
            "sleeps uninterruptibly in nfs_wait_bit_killable"
        );
        assert_eq!(
            describe("T (stopped)", "do_signal_stop"),
            "is stopped in do_signal_stop"
        );
        assert_eq!(
            describe_state("", "\u{1b}[2J"),
            "is in a state that is not known in [2J"
        );
    }

    #[test]
    fn a_process_that_is_not_there_has_a_reason_instead_of_threads() {
        let error = threads_of(Path::new("/proc"), u32::MAX).expect_err("there is no such process");
        assert!(error.contains("/task"), "{error}");
    }
}
