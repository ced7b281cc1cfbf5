//! Reads the last lines of a process's output, and the kernel's messages on GPUs and memory.

use super::Fact;
use rcomm_recorder::model::text::duration_ms;
use rcomm_verdict::format::printable;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Maximum number of lines at the end of a file that are shown.
const SHOWN_LINES: usize = 5;
/// Maximum number of bytes at the end of a file that are read.
const READ_BYTES: u64 = 8 * 1024;
/// Maximum number of messages of the kernel that are read.
const MOST_MESSAGES: usize = 65_536;
/// Maximum number of messages of the kernel that are shown.
const SHOWN_MESSAGES: usize = 2;
/// A message of the kernel that is older than this, in ms, is not shown: it is not considered a cause of the hang.
const MOST_AGE_MS: f64 = 3_600_000.0;

/// The last lines of a process's standard error or, if that has none, of its standard output; empty if neither goes
/// to a file of this node. Output into a pipe cannot be read here.
pub(super) fn end_of(proc: &Path, pid: u32) -> Vec<String> {
    for descriptor in [2, 1] {
        let link = proc.join(format!("{pid}/fd/{descriptor}"));
        // The link of a pipe or a terminal leads to no regular file, and opening it could wait.
        let is_file = fs::metadata(&link).is_ok_and(|metadata| metadata.is_file());
        let lines = match is_file {
            true => last_lines(&link).unwrap_or_default(),
            false => vec![],
        };
        if !lines.is_empty() {
            return lines;
        }
    }
    vec![]
}

/// The last lines of a file that are not blank.
fn last_lines(path: &Path) -> std::io::Result<Vec<String>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let start = length.saturating_sub(READ_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(READ_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    // The first line may be cut.
    let whole_lines = match start {
        0 => &text[..],
        _ => text.split_once('\n').map_or("", |(_, rest)| rest),
    };
    let lines: Vec<&str> = whole_lines
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let last = lines.iter().skip(lines.len().saturating_sub(SHOWN_LINES));
    Ok(last
        .map(|line| printable(line.trim_end()).into_owned())
        .collect())
}

/// A message of the kernel.
#[derive(Debug, PartialEq)]
pub(super) struct Message {
    /// When it was written, ms since the system started.
    at_ms: f64,
    /// Its age, ms.
    ago_ms: f64,
    text: String,
}

/// The newest messages that may concern a process that started at this time, in seconds since the system started: all
/// on GPUs, which may have failed before, and those on processes that were killed since then. All if the time is
/// unknown.
pub(super) fn facts_of(messages: &[Message], started_s: Option<f64>) -> Vec<Fact> {
    let concerns = |message: &&Message| {
        let is_of_gpu = message.text.contains(XID);
        is_of_gpu || started_s.is_none_or(|started_s| message.at_ms >= started_s * 1e3)
    };
    let concerning: Vec<&Message> = messages.iter().filter(concerns).collect();
    let skipped = concerning.len().saturating_sub(SHOWN_MESSAGES);
    let shown = concerning.into_iter().skip(skipped);
    let fact = |message: &Message| {
        let text = format!("{} ago: {}", duration_ms(message.ago_ms), message.text);
        Fact::new("kernel", text, true)
    };
    shown.map(fact).collect()
}

/// What a message of NVIDIA's driver on a failure of a GPU contains.
const XID: &str = "NVRM: Xid";

/// The messages of the kernel from the last hour on failures of GPUs (Xid) and on processes that it killed because
/// memory ran out, oldest first; none if this user may not read them.
pub(super) fn kernel() -> Vec<Message> {
    let mut open = OpenOptions::new();
    // The file gives one message for each read. At its end a read waits for the next message, except with this flag.
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits();
    let opened = open
        .read(true)
        .custom_flags(nonblocking as i32)
        .open("/dev/kmsg");
    let Ok(mut messages) = opened else {
        return vec![];
    };
    let mut text = String::new();
    let mut buffer = [0; 8192];
    for _ in 0..MOST_MESSAGES {
        match messages.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                let message = String::from_utf8_lossy(&buffer[..n]);
                if is_failure(&message) {
                    text.push_str(message.lines().next().unwrap_or(""));
                    text.push('\n');
                }
            }
            // A message was overwritten before it was read. The next read returns the one after it.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PIPE.raw_os_error()) => {}
            Err(_) => break,
        }
    }
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    failures(&text, &uptime)
}

/// Whether a message of the kernel is about a failure of a GPU or a process that was killed for lack of memory.
fn is_failure(message: &str) -> bool {
    [XID, "Out of memory: Killed", "Memory cgroup out of memory"]
        .iter()
        .any(|known| message.contains(known))
}

/// Those of these messages that are not too old, oldest first. Each is a line
/// `priority,number,microseconds since the system started,flags;text`.
fn failures(messages: &str, uptime: &str) -> Vec<Message> {
    let up_ms = uptime
        .split_whitespace()
        .next()
        .and_then(|seconds| seconds.parse::<f64>().ok());
    let Some(up_ms) = up_ms.map(|seconds| seconds * 1e3) else {
        return vec![];
    };
    let reported = messages.lines().filter_map(|line| {
        let (head, text) = line.split_once(';')?;
        let at_ms = head.split(',').nth(2)?.parse::<f64>().ok()? / 1e3;
        let ago_ms = (up_ms - at_ms).max(0.0);
        (ago_ms <= MOST_AGE_MS).then(|| Message {
            at_ms,
            ago_ms,
            text: printable(text).into_owned(),
        })
    });
    reported.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_of_a_file_are_read_and_a_device_is_left_alone() {
        let proc = tempfile::tempdir().expect("a temporary directory can be made");
        let descriptors = proc.path().join("7/fd");
        fs::create_dir_all(&descriptors).expect("the directory takes new files");
        let log = proc.path().join("log");
        let long: String = (0..9_000).map(|n| format!("line {n}\u{1b}[2J\n")).collect();
        fs::write(&log, long + "\n").expect("the file can be written");
        std::os::unix::fs::symlink(&log, descriptors.join("1")).expect("a link can be made");
        std::os::unix::fs::symlink("/dev/null", descriptors.join("2")).expect("a link can be made");
        let lines = end_of(proc.path(), 7);
        assert_eq!(lines.len(), SHOWN_LINES);
        assert!(lines[4].starts_with("line 8999"), "{lines:?}");
        assert!(!lines[4].contains('\u{1b}'), "{lines:?}");
        assert_eq!(end_of(proc.path(), 8), Vec::<String>::new());
    }

    #[test]
    fn new_failures_of_gpus_are_reported_and_old_ones_are_not() {
        let messages = "4,1,1000000,-;NVRM: Xid (PCI:0000:3b:00): 31, old\n\
             4,2,9000000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n\
             x\n";
        assert!(messages.lines().take(2).all(is_failure));
        assert!(!is_failure("6,1,2,-;usb 1-1: new device"));
        let reported = failures(messages, "9013.00 1.0\n");
        let facts = facts_of(&reported, Some(9_001.0));
        let [fact] = &facts[..] else {
            panic!("one of them is new: {reported:?}");
        };
        assert_eq!(
            fact.text,
            "13 s ago: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
        );
        assert_eq!(failures(messages, ""), []);
    }

    #[test]
    fn a_process_that_was_killed_before_the_rank_started_is_no_fact_about_it() {
        let messages = "3,1,9000000000,-;Memory cgroup out of memory: Killed process 7 (other)\n";
        let reported = failures(messages, "9013.00 1.0\n");
        assert_eq!(facts_of(&reported, Some(9_001.0)), []);
        assert_eq!(facts_of(&reported, Some(8_999.0)).len(), 1);
        assert_eq!(facts_of(&reported, None).len(), 1);
    }
}
