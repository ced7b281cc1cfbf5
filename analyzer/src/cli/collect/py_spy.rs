//! Takes Python stacks of processes of this node with the program `py-spy`, if that is installed.
//!
//! py-spy reads the memory of a process that the user may trace. It neither stops the process nor runs code in it. For
//! native frames it would have to stop the process: see [`native_stack`](super::native_stack).

use rcomm_recorder::model::Rank;
use serde::Deserialize;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read as _, Seek as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The name of the program, which is looked up in PATH.
pub(super) const PROGRAM: &str = "py-spy";
/// The time that is left for stacks even if all other time was used.
pub(super) const MIN_TIME: Duration = Duration::from_secs(5);
/// The number of processes that are read at the same time.
const AT_ONCE: usize = 8;
/// The time between two polls of the running programs.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The longest output that is read, bytes.
const MAX_OUTPUT: u64 = 4 << 20;

/// A thread as `py-spy dump --json` prints it.
#[derive(Deserialize)]
pub(super) struct Thread {
    thread_id: u64,
    thread_name: Option<String>,
    pub(super) os_thread_id: Option<u64>,
    pub(super) frames: Vec<PyFrame>,
}

/// A frame as `py-spy dump --json` prints it.
#[derive(Deserialize)]
pub(super) struct PyFrame {
    pub(super) name: String,
    pub(super) filename: String,
    line: i64,
}

/// The stacks of each process as `faulthandler` prints them, or why there are none. `None` if `py-spy` is not
/// installed. Blocks until shortly after the deadline at the latest.
pub(super) fn dump(
    processes: &[(Rank, u32)],
    deadline: Instant,
) -> Option<Vec<(Rank, Result<String, String>)>> {
    let mut answers = Vec::new();
    let mut waiting = processes.iter();
    let mut running: Vec<(Rank, Child, std::fs::File)> = Vec::new();
    loop {
        while running.len() < AT_ONCE
            && let Some(&(rank, pid)) = waiting.next()
        {
            let mut command = Command::new(PROGRAM);
            command.args(["dump", "--nonblocking", "--json", "--pid", &pid.to_string()]);
            match start(&mut command) {
                Ok((child, output)) => running.push((rank, child, output)),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    // If the program was started before, it has been removed since.
                    for (_, mut child, _) in running {
                        // The program may have ended.
                        let _ = child.kill();
                        let _ = child.wait();
                    }
                    return None;
                }
                Err(error) => {
                    answers.push((rank, Err(format!("{PROGRAM} cannot be started: {error}"))))
                }
            }
        }
        let mut still_running = Vec::new();
        for (rank, mut child, output) in running {
            match child.try_wait() {
                Ok(None) if Instant::now() < deadline => still_running.push((rank, child, output)),
                Ok(Some(_)) => answers.push((rank, read(output))),
                _ => {
                    // An error of these two calls means that the program has ended by now.
                    let _ = child.kill();
                    let _ = child.wait();
                    answers.push((rank, Err(format!("{PROGRAM} did not end in time"))));
                }
            }
        }
        running = still_running;
        if running.is_empty() && waiting.len() == 0 {
            return Some(answers);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Starts the program; its output and its errors go to an unnamed file, so that it never waits for a reader.
pub(super) fn start(command: &mut Command) -> std::io::Result<(Child, std::fs::File)> {
    let output = tempfile::tempfile()?;
    let child = command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        .spawn()?;
    Ok((child, output))
}

/// The stacks in the output of `py-spy`, or why there are none.
fn read(output: std::fs::File) -> Result<String, String> {
    format(&read_output(output)?)
}

/// The output of a program in the file of [`start`], cut at 4 MiB.
pub(super) fn read_output(mut output: std::fs::File) -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = output
        .rewind()
        .and_then(|()| output.take(MAX_OUTPUT).read_to_end(&mut bytes));
    read.map_err(|error| format!("the output cannot be read: {error}"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The threads in the output of `py-spy dump --json`; `None` if the text is not such output.
pub(super) fn threads(printed: &str) -> Option<Vec<Thread>> {
    let begin = printed.find('[')?;
    serde_json::from_str(&printed[begin..]).ok()
}

/// The output of the program in the form of `faulthandler`, with the main thread last. The error has the first line
/// of an output without stacks.
fn format(json: &str) -> Result<String, String> {
    let Some(mut threads) = threads(json) else {
        let first = json
            .lines()
            .find(|line| !line.trim().is_empty())
            .unwrap_or("nothing");
        let printable: String = first
            .chars()
            .filter(|c| !c.is_control())
            .take(200)
            .collect();
        return Err(format!("{PROGRAM} printed: {printable}"));
    };
    threads.sort_by_key(|thread| thread.thread_name.as_deref() == Some("MainThread"));
    let mut text = String::new();
    for thread in threads {
        let _ = writeln!(
            text,
            "Thread 0x{:016x} (most recent call first):",
            thread.thread_id
        );
        for frame in thread.frames {
            let printable = |text: &str| text.replace(|c: char| c.is_control(), "");
            let (name, file) = (printable(&frame.name), printable(&frame.filename));
            let _ = writeln!(text, "  File \"{file}\", line {} in {name}", frame.line);
        }
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::stacks;

    #[test]
    fn output_becomes_stacks_with_the_main_thread_last_and_an_error_becomes_the_reason() {
        let json = r#"[{"pid":1,"thread_id":140,"thread_name":"MainThread","os_thread_id":1,"active":true,"owns_gil":false,
            "frames":[{"name":"load","filename":"/x/a b.py","module":null,"short_filename":"a b.py","line":13,"locals":null}]},
            {"pid":1,"thread_id":141,"thread_name":null,"os_thread_id":2,"active":false,"owns_gil":false,
            "frames":[{"name":"look","filename":"w.py","module":null,"short_filename":"w.py","line":2,"locals":null}]}]"#;
        let text = format(json).expect("the output has threads");
        assert!(stacks::is_stacks(text.as_bytes()), "{text}");
        let threads = stacks::parse(&text);
        assert_eq!((threads.len(), threads[1][0].name.as_str()), (2, "load"));
        let error =
            format("Error: Permission Denied: Try running again with elevated permissions\n")
                .expect_err("the output is not JSON");
        assert!(error.contains("Permission Denied"), "{error}");
    }
}
