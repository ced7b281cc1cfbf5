//! What the threads of processes on this node do, from the kernel's files on a user's own processes.
//! No process is asked, stopped or traced.

use super::{RingSource, SourceError, StackRequests, TakenStacks};
use rcomm_recorder::model::{Frame, Rank};
use rcomm_verdict::StackNode;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Threads of one process that are looked at at most.
const MOST_THREADS: usize = 1_024;

/// The ranks whose rings are on this node: what each of their threads runs or waits in.
pub struct RingThreads(Mutex<RingSource>);

impl RingThreads {
    /// Looks at the ranks of the job that this source would show.
    pub fn new(source: RingSource) -> Self {
        Self(Mutex::new(source))
    }
}

impl StackRequests for RingThreads {
    fn take(&self, deadline: Instant) -> Result<TakenStacks, SourceError> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken = TakenStacks {
            what: "threads as the kernel sees them",
            ..TakenStacks::default()
        };
        let mut stacks: Vec<(Vec<Frame>, Rank)> = Vec::new();
        for (rank, process) in source.processes()? {
            let threads = match process {
                None => Err("its process is gone, or of another host or container".to_owned()),
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
        // The name first, then what it is in: equal names on several ranks share a row.
        let merged = stacks
            .iter()
            .map(|(frames, rank)| (frames.iter(), vec![*rank]));
        taken.stacks = StackNode::merge(merged);
        Ok(taken)
    }
}

/// Each thread of a process: its name, then what it does.
fn threads_of(proc: &Path, pid: u32) -> Result<Vec<Vec<Frame>>, String> {
    let tasks = proc.join(format!("{pid}/task"));
    let listed = fs::read_dir(&tasks).map_err(|error| format!("{}: {error}", tasks.display()))?;
    let mut threads: Vec<Vec<Frame>> = Vec::new();
    for task in listed.flatten().take(MOST_THREADS) {
        let read = |what: &str| fs::read_to_string(task.path().join(what)).unwrap_or_default();
        let (name, status, place) = (read("comm"), read("status"), read("wchan"));
        // It may have ended since.
        if !status.is_empty() {
            threads.push(vec![
                frame(&printable(&name)),
                frame(&doing(&status, &place)),
            ]);
        }
    }
    threads.sort_by(|a, b| a[0].name.cmp(&b[0].name));
    Ok(threads)
}

/// `sleeps in futex_wait_queue`, from the text of `status` and of `wchan`.
fn doing(status: &str, place: &str) -> String {
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    let state = state.map_or("", str::trim_start);
    let what = match state.chars().next() {
        Some('R') => return "runs, or waits for a processor".to_owned(),
        Some('S') => "sleeps",
        Some('D') => "waits for a device or a file system",
        Some('T') => "is stopped",
        Some('t') => "is held by a debugger",
        Some('Z' | 'X') => "has ended",
        Some('I') => "is idle",
        _ => "is in a state that is not known",
    };
    // The kernel shows `0` where it hides the value.
    match printable(place).as_str() {
        "" | "0" => what.to_owned(),
        place => format!("{what} in {place}"),
    }
}

fn printable(text: &str) -> String {
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
    fn a_thread_of_a_rank_is_named_with_what_it_waits_in() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut config = RecorderConfig::new("job", 3, 4);
        config.placement = Placement::Dir(directory.path().to_owned());
        let _recorder = FlightRecorder::create(&config).expect("a ring in a fresh directory");
        let (release, held) = channel::<()>();
        let waits = std::thread::Builder::new().name("waits-for-you".into());
        let waits = waits.spawn(move || held.recv()).expect("a thread");
        let source = RingSource::new(directory.path().to_owned(), None);
        let threads = RingThreads::new(source);
        let deadline = Instant::now() + Duration::from_secs(20);
        // It takes a moment until it has its name, and sleeps.
        loop {
            let taken = threads.take(deadline).expect("there is a ring");
            assert_eq!((&taken.taken[..], taken.refused.len()), (&[3][..], 0));
            let thread = node(&taken.stacks, "waits-for-you");
            if thread.is_some_and(|it| it.children[0].name.starts_with("sleeps")) {
                break;
            }
            assert!(Instant::now() < deadline, "{:?}", taken.stacks);
        }
        drop(release);
        // Nothing was sent.
        assert!(waits.join().expect("no panic").is_err());
    }

    #[test]
    fn what_the_kernel_tells_is_said_in_words() {
        let describe =
            |state: &str, place: &str| doing(&format!("Name:\tx\nState:\t{state}\n"), place);
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
            "waits for a device or a file system in nfs_wait_bit_killable"
        );
        assert_eq!(
            describe("T (stopped)", "do_signal_stop"),
            "is stopped in do_signal_stop"
        );
        assert_eq!(
            doing("", "\u{1b}[2J"),
            "is in a state that is not known in [2J"
        );
    }

    #[test]
    fn a_process_that_is_not_there_is_an_answer() {
        let error = threads_of(Path::new("/proc"), u32::MAX).expect_err("no such process");
        assert!(error.contains("/task"), "{error}");
    }
}
