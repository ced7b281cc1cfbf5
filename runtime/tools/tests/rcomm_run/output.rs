//! Tests output that cannot be written or is not read, signals to a launcher with such output, and a signal that the
//! launcher ignores.

use super::{LONG, Running, rcomm_run, shell, shell_with_folder};
use rcomm_recorder::publish::LaunchRecord;
use rustix::process::Signal;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

#[test]
fn output_that_finds_no_space_is_reported_once_and_the_job_goes_on() {
    let mut command = shell(2, &[], "echo one; echo two; echo three >&2");
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut child = command
        .stdout(Stdio::from(full))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = String::new();
    let mut pipe = child.stderr.take().unwrap();
    pipe.read_to_string(&mut stderr).unwrap();
    assert!(child.wait().unwrap().success(), "{stderr}");
    let loss = "rcomm-run: output of the ranks is lost: standard output cannot be written: No space left on device";
    assert_eq!(stderr.matches(loss).count(), 1, "{stderr}");
    assert_eq!(stderr.matches("] three").count(), 2, "{stderr}");
}

/// What is in the file of this name, once it is there.
pub(super) fn content_of(folder: &Path, name: &str) -> String {
    let deadline = Instant::now() + LONG;
    loop {
        match std::fs::read_to_string(folder.join(name)) {
            Ok(text) => return text,
            Err(_) => assert!(Instant::now() < deadline, "there is no file {name}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the launcher has ended, without reading its output; returns the exit code.
pub(super) fn end_of_unread(mut running: Running) -> i32 {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(status) = running.process.try_wait().unwrap() {
            return status.code().unwrap();
        }
        if Instant::now() > deadline {
            running.process.kill().unwrap();
            panic!("the launcher did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The beginning of a script, which writes the process id of the rank to the file `pid`.
pub(super) const WRITE_PID: &str = "echo $$ > $DIR/new; mv $DIR/new $DIR/pid";

/// Starts a launcher whose only rank runs this script, and does not read the launcher's output. Sends SIGTERM to the
/// launcher once the rank has ended, and returns its exit code and the folder.
fn end_unread(options: &[&str], script: &str) -> (i32, TempDir) {
    let script = format!("{WRITE_PID}; {script}");
    let (mut command, folder) = shell_with_folder(1, options, &script);
    command.env("RCOMM_RING_DIR", folder.path());
    let running = Running::start(command);
    let pid = content_of(folder.path(), "pid");
    assert!(super::ends(pid.trim()), "the rank did not end");
    running.signal(Signal::TERM);
    (end_of_unread(running), folder)
}

#[test]
fn a_signal_ends_a_launcher_whose_output_no_process_reads() {
    // The launcher has read all of it, and cannot write it all; or a process that the rank has left writes more than
    // all queues hold.
    for script in ["seq 10000", "seq 3000000 & exit 0"] {
        assert_eq!(end_unread(&[], script).0, 143, "{script}");
    }
}

#[test]
fn one_signal_before_the_end_of_the_ranks_ends_a_launcher_whose_output_no_process_reads() {
    // The launcher has read all of it, and cannot write it all; or a process that the signal does not end writes more
    // than all queues hold.
    for begin in ["seq 10000", "(trap '' TERM; exec seq 3000000) &"] {
        let script = format!("{begin}\n{WRITE_PID}; exec sleep 1000");
        let (command, folder) = shell_with_folder(1, &[], &script);
        let running = Running::start(command);
        content_of(folder.path(), "pid");
        running.signal(Signal::TERM);
        assert_eq!(end_of_unread(running), 143, "{begin}");
    }
}

#[test]
fn a_signal_forbids_a_restart_also_once_all_ranks_have_ended() {
    // A process that the failed rank has left writes more than all queues hold, so that the attempt is not over.
    let script = "touch $DIR/attempt.$TORCHELASTIC_RESTART_COUNT
        [ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; seq 3000000 & exit 3";
    let (code, folder) = end_unread(&["--max-restarts", "1", "--job-id", "a job"], script);
    assert!(folder.path().join("attempt.0").exists());
    assert!(!folder.path().join("attempt.1").exists());
    assert_eq!(code, 3);
    let record = LaunchRecord::of_job(folder.path(), "a job").pop().unwrap();
    let received = record.received.iter().map(|received| received.signal);
    assert_eq!(received.collect::<Vec<_>>(), [Signal::TERM.as_raw()]);
}

#[test]
fn a_launcher_that_ignores_sighup_from_its_start_goes_on_to_ignore_it() {
    let script = "trap 'echo noted; exit 0' USR1; echo ready; while :; do sleep 0.01; done";
    let inner = rcomm_run(&["-n", "1", "sh", "-c", script]);
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]);
    command.arg(inner.get_program()).args(inner.get_args());
    let mut running = Running::start(command);
    assert_eq!(running.line(), "[rank 0] ready\n");
    running.signal(Signal::HUP);
    running.signal(Signal::USR1);
    let (out, err, code) = running.finish();
    assert_eq!((out.as_str(), code), ("[rank 0] noted\n", 0), "{err}");
    assert!(!err.contains("SIGHUP"), "{err}");
}
