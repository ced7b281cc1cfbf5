//! Takes the native stack of a process of this node, which shows where the code below Python waits.
//!
//! To walk a native stack, a program has to hold the process for a moment. So the stack is taken only of ranks at
//! fault, by the first of these programs that is installed and gives one: py-spy, eu-stack of elfutils, gdb. py-spy
//! reads the frames in about a tenth of a second; gdb first reads the symbols of all libraries. A process that is
//! stopped, traced or in an uninterruptible wait is not touched. For such a process, and where no program may trace,
//! only the kernel's own view is taken.

use super::py_spy::{self, PROGRAM as PY_SPY};
use rcomm_analyzer::stacks::{NATIVE_HEADER, NativeFrame};
use rustix::process::{Pid, Signal, kill_process};
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// The longest time that one program may take.
const LIMIT: Duration = Duration::from_secs(20);
/// The time that a program gets to detach from the process after SIGTERM.
const DETACH_LIMIT: Duration = Duration::from_secs(2);
/// The time between two polls of a running program.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum number of frames of one thread that are kept.
const MAX_FRAMES: usize = 64;

/// The frames of each thread, by the thread's id.
type Threads = Vec<(u64, Vec<NativeFrame>)>;

/// A program that prints native stacks.
struct Tool {
    name: &'static str,
    /// The arguments, with the process id in place of `PID`.
    arguments: &'static [&'static str],
    /// Reads the threads from the program's output.
    read: fn(&str) -> Threads,
}

const TOOLS: [Tool; 3] = [
    Tool {
        name: PY_SPY,
        arguments: &["dump", "--native", "--json", "--pid", "PID"],
        read: read_py_spy,
    },
    Tool {
        name: "eu-stack",
        arguments: &["-m", "-n", "64", "-p", "PID"],
        read: read_lines,
    },
    Tool {
        name: "gdb",
        // No start-up file, and no symbols from a network.
        arguments: &[
            "-nx",
            "-nh",
            "-batch",
            "-iex",
            "set auto-load off",
            "-iex",
            "set debuginfod enabled off",
            "-p",
            "PID",
            "-ex",
            "thread apply all backtrace 64",
        ],
        read: read_lines,
    },
];

/// The native stack of the main thread, or of another if a program shows none of it, as text that
/// [`stacks::parse_native`](rcomm_analyzer::stacks::parse_native) reads, and the reasons why programs gave none. Blocks
/// for at most [`LIMIT`] and [`DETACH_LIMIT`] per program, and then for [`DETACH_LIMIT`].
pub(super) fn take(pid: u32) -> (String, Vec<String>) {
    let mut reasons = Vec::new();
    match state(pid) {
        Some('R' | 'S') => {
            for tool in &TOOLS {
                match run(tool, pid) {
                    Ok(frames) => return (text(tool.name, pid, &frames), reasons),
                    Err(Some(reason)) => reasons.push(reason),
                    // The program is not installed.
                    Err(None) => {}
                }
            }
            if reasons.is_empty() {
                let names = TOOLS.map(|tool| tool.name).join(", ");
                reasons.push(format!("none of {names} is in PATH"));
            }
            // A program that was ended may still hold the process.
            if !wait_until_untraced(|| state(pid), Instant::now() + DETACH_LIMIT) {
                return (text("the kernel", pid, &[]), reasons);
            }
        }
        Some(_) => {
            reasons.push(
                "the process is stopped, traced or in an uninterruptible wait: no program was started to read its stack"
                    .to_owned(),
            );
        }
        None => reasons.push("the process has ended".to_owned()),
    }
    (text("the kernel", pid, &kernel_frames(pid)), reasons)
}

/// Where the main thread waits, as the kernel shows it, in the form of [`take`]; `None` if it waits for nothing, or if
/// the kernel does not show this to this user. Starts no program.
pub(super) fn kernel_stack(pid: u32) -> Option<String> {
    let frames = kernel_frames(pid);
    (!frames.is_empty()).then(|| text("the kernel", pid, &frames))
}

/// The frames, innermost first, with a head that states the process and what took them: `by`, a program or the kernel.
fn text(by: &str, pid: u32, frames: &[NativeFrame]) -> String {
    let mut text = format!("{NATIVE_HEADER} {pid} by {by} (most recent call first):\n");
    for frame in frames.iter().take(MAX_FRAMES) {
        let _ = writeln!(text, "  {frame}");
    }
    text
}

/// The frames of the main thread, or of the thread printed last if the main thread has none. `Err` has the reason why
/// there are none, or `None` if the program is not installed.
fn run(tool: &Tool, pid: u32) -> Result<Vec<NativeFrame>, Option<String>> {
    let name = tool.name;
    let arguments = tool.arguments.iter();
    let arguments = arguments.map(|argument| argument.replace("PID", &pid.to_string()));
    let mut command = Command::new(name);
    command.args(arguments);
    let (mut child, output) = match py_spy::start(&mut command) {
        Ok(started) => started,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(None),
        Err(error) => return Err(Some(format!("{name} cannot be started: {error}"))),
    };
    let ended = wait(&mut child, Instant::now() + LIMIT);
    if ended.is_none() {
        end(&mut child);
        // A program that is killed while it begins to trace can leave the process stopped.
        if state(pid) == Some('T')
            && let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw)
        {
            let _ = kill_process(pid, Signal::CONT);
        }
        let limit = LIMIT.as_secs();
        return Err(Some(format!("{name} did not end within {limit} s")));
    }
    let printed = py_spy::read_output(output).map_err(|why| Some(format!("{name}: {why}")))?;
    let mut threads = (tool.read)(&printed);
    threads.retain(|(_, frames)| !frames.is_empty());
    let main = threads.iter().position(|(id, _)| *id == u64::from(pid));
    match main.or(threads.len().checked_sub(1)) {
        Some(main) => Ok(threads.swap_remove(main).1),
        None => {
            let mut lines = printed.lines().map(str::trim);
            let last = lines.rfind(|line| !line.is_empty());
            let last: String = last.unwrap_or("nothing").chars().take(200).collect();
            let printable = last.replace(|c: char| c.is_control(), "");
            Err(Some(format!("{name} printed: {printable}")))
        }
    }
}

/// How the program ended; `None` if it has not ended by the deadline, or if the system does not report it.
fn wait(child: &mut Child, deadline: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
            _ => return None,
        }
    }
}

/// Ends a program that traces a process: first by SIGTERM, on which it detaches from the process.
fn end(child: &mut Child) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM);
    }
    if wait(child, Instant::now() + DETACH_LIMIT).is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Waits until the process is neither stopped nor traced. Until then the kernel would show where a tracer holds it, and
/// not where it waits. Returns whether that was so by the deadline.
fn wait_until_untraced(mut state: impl FnMut() -> Option<char>, deadline: Instant) -> bool {
    while matches!(state(), Some('T' | 't')) {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    true
}

/// The letter of the process's state in the kernel; `None` if it has ended.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields
        .trim_start()
        .chars()
        .next()
        .filter(|letter| !matches!(*letter, 'Z' | 'X'))
}

/// Where the main thread waits, as the kernel shows it: the kernel's functions, which only root may read, or else the
/// one function in which the thread sleeps; then the system call.
fn kernel_frames(pid: u32) -> Vec<NativeFrame> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let frame = |name: &str| NativeFrame::new(name, "kernel");
    let stack = read("stack");
    let functions = stack.lines().filter_map(|line| {
        let place = line.split_once("] ")?.1;
        Some(frame(place.split('+').next()?))
    });
    let mut frames: Vec<NativeFrame> = functions.take(MAX_FRAMES).collect();
    let function = read("wchan");
    if frames.is_empty() && !matches!(function.trim(), "" | "0") {
        frames.push(frame(&function));
    }
    if let Some(number) = read("syscall")
        .split_whitespace()
        .next()
        .filter(|word| word.parse::<u32>().is_ok())
    {
        frames.push(frame(&format!("system call {number}")));
    }
    frames
}

/// The native frames of each thread. Python frames are left out: they are taken without a stop of the process.
fn read_py_spy(printed: &str) -> Threads {
    let threads = py_spy::threads(printed).unwrap_or_default();
    let threads = threads.into_iter().map(|thread| {
        let native = thread
            .frames
            .iter()
            .filter(|frame| is_library(&frame.filename) && !is_address(&frame.name));
        let frames = native.map(|frame| NativeFrame::new(&frame.name, &frame.filename));
        (thread.os_thread_id.unwrap_or(0), frames.collect())
    });
    threads.collect()
}

/// Whether a frame's name is its address, because its library has no symbol there.
fn is_address(name: &str) -> bool {
    name.starts_with("0x")
}

/// Whether a file is machine code, not a Python source.
fn is_library(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    !name.ends_with(".py") && !name.starts_with('<')
}

/// The frames in the output of eu-stack (`TID 7:`) and gdb (`Thread 1 (Thread 0x7f (LWP 7) "python")`), both with a
/// line like `#0  0x00007f in name ...` for each frame.
fn read_lines(printed: &str) -> Threads {
    let mut threads = Threads::new();
    let id = |text: &str| -> Option<u64> {
        let digits = text.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse().ok()
    };
    for line in printed.lines() {
        if let Some(rest) = line.strip_prefix('#') {
            let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit()).trim();
            if let (Some((_, frames)), Some(frame)) = (threads.last_mut(), read_frame(rest)) {
                frames.push(frame);
            }
        } else if let Some(thread) = line.strip_prefix("TID ").and_then(id) {
            threads.push((thread, Vec::new()));
        } else if line.starts_with("Thread ") {
            let thread = line
                .split_once("LWP ")
                .or_else(|| line.split_once("process "));
            threads.push((
                thread.and_then(|(_, rest)| id(rest)).unwrap_or(0),
                Vec::new(),
            ));
        }
    }
    threads
}

/// Reads a frame without its number: `0x7f in f (a=1) from /lib/x.so` or `f (a=1) at x.c:71` by gdb, `0x7f f -
/// /lib/x.so` by eu-stack. `None` if the frame has no symbol.
fn read_frame(line: &str) -> Option<NativeFrame> {
    let mut rest = line;
    if let Some((address, after)) = rest.split_once(' ')
        && is_address(address)
    {
        rest = after.trim_start();
        rest = rest.strip_prefix("in ").unwrap_or(rest);
    }
    // An address without a symbol.
    if rest.starts_with("- ") {
        return None;
    }
    let (call, place) = [" from ", " at ", " - "]
        .iter()
        .find_map(|sign| rest.rsplit_once(sign))
        .unwrap_or((rest, ""));
    let name = call.split(" (").next().unwrap_or(call).trim();
    // gdb writes `??` for a function without a symbol.
    let is_known = !matches!(name, "" | "??") && !is_address(name);
    is_known.then(|| NativeFrame::new(name, place))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::stacks;

    fn frames_as_text(threads: &[(u64, Vec<NativeFrame>)]) -> Vec<(u64, Vec<String>)> {
        let shown = threads.iter().map(|(id, frames)| {
            let frames = frames.iter().map(ToString::to_string);
            (*id, frames.collect())
        });
        shown.collect()
    }

    #[test]
    fn the_output_of_each_program_is_read() {
        let gdb = "[New LWP 8]\n0x00007f in ?? ()\n\nThread 2 (Thread 0x7f1 (LWP 8) \"worker\"):\n\
            #0  0x00007f86 in epoll_wait (epfd=3) from /lib/libc.so.6\n\n\
            Thread 1 (Thread 0x7f0 (LWP 7) \"python3\"):\n\
            #0  __GI___clock_nanosleep (clock_id=1) at ../sysdeps/clock_nanosleep.c:71\n\
            #1  0x00007f85 in ?? () from /x/libtorch_cpu.so\n\
            #2  0x00007f86 in gloo::transport::tcp::UnboundBuffer::waitRecv(int*) () from /x/libtorch_cpu.so\n";
        let thread = |id: u64, frames: &[&str]| -> (u64, Vec<String>) {
            (id, frames.iter().map(ToString::to_string).collect())
        };
        assert_eq!(
            frames_as_text(&read_lines(gdb)),
            [
                thread(8, &["epoll_wait (libc.so.6)"]),
                thread(
                    7,
                    &[
                        "__GI___clock_nanosleep (clock_nanosleep.c:71)",
                        "gloo::transport::tcp::UnboundBuffer::waitRecv(int*) (libtorch_cpu.so)"
                    ]
                ),
            ]
        );
        let elfutils = "PID 7 - process\nTID 7:\n#0  0x00007f86 clock_nanosleep - /lib/libc.so.6\n#1  0x00007f87 - /lib/x.so\n";
        assert_eq!(
            frames_as_text(&read_lines(elfutils)),
            [thread(7, &["clock_nanosleep (libc.so.6)"])]
        );
        let py_spy = r#"[{"pid":7,"thread_id":140,"thread_name":"MainThread","os_thread_id":7,"active":true,"owns_gil":false,
            "frames":[{"name":"clock_nanosleep","filename":"/lib/libc.so.6","module":"/lib/libc.so.6","line":0},
            {"name":"load","filename":"/x/a.py","module":null,"line":13}]}]"#;
        assert_eq!(
            frames_as_text(&read_py_spy(py_spy)),
            [thread(7, &["clock_nanosleep (libc.so.6)"])]
        );
        for nothing in ["", "{", "Error: Permission denied", "#0 0x1 f - x"] {
            assert!(
                read_lines(nothing).is_empty() && read_py_spy(nothing).is_empty(),
                "{nothing:?} holds no thread"
            );
        }
    }

    /// Waits up to 30 s until the process is in this state, and returns its last state.
    fn wait_for_state(pid: u32, wanted: char) -> Option<char> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let now = state(pid);
            if now == Some(wanted) || Instant::now() > deadline {
                return now;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    #[test]
    fn a_sleeping_process_has_a_stack_and_sleeps_on_afterwards() {
        let mut child = Command::new("sleep")
            .arg("600")
            .spawn()
            .expect("the program `sleep` starts");
        let pid = child.id();
        wait_for_state(pid, 'S');
        let (text, reasons) = take(pid);
        let after = wait_for_state(pid, 'S');
        let _ = child.kill();
        let _ = child.wait();
        assert!(stacks::is_stacks(text.as_bytes()), "{text}");
        let frames = stacks::parse_native(&text);
        // A sandbox may hide the kernel's view, and refuse to trace: then there are reasons.
        assert!(!frames.is_empty() || !reasons.is_empty(), "{text}");
        assert_eq!(after, Some('S'), "{text} {reasons:?}");
    }

    #[test]
    fn the_kernel_is_asked_only_once_no_program_holds_the_process() {
        let soon = || Instant::now() + Duration::from_secs(30);
        let mut states = ['t', 'T', 'S', 't'].into_iter();
        assert!(wait_until_untraced(|| states.next(), soon()));
        assert_eq!(
            states.next(),
            Some('t'),
            "it waited on after the process slept"
        );
        assert!(wait_until_untraced(|| None, soon()));
        assert!(!wait_until_untraced(|| Some('t'), Instant::now()));
    }

    #[test]
    fn a_stopped_process_is_not_traced() {
        let mut child = Command::new("sleep")
            .arg("600")
            .spawn()
            .expect("the program `sleep` starts");
        let pid = child.id();
        kill_process(Pid::from_child(&child), Signal::STOP).expect("a process may stop its child");
        wait_for_state(pid, 'T');
        let (text, reasons) = take(pid);
        let after = state(pid);
        let _ = child.kill();
        let _ = child.wait();
        assert!(text.contains("by the kernel"), "{text}");
        assert!(reasons[0].contains("no program was started"), "{reasons:?}");
        assert_eq!(after, Some('T'));
    }
}
