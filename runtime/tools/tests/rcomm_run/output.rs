//! Output that cannot be written, or is not read, and signals that the launcher ignores.

use super::{LONG, Running, rcomm_run, shell, shell_with_folder};
use rustix::process::Signal;
use std::fs::File;
use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::Instant;

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

/// Starts a launcher whose only rank runs this script and ends, and does not read its output. Sends SIGTERM once the
/// rank has ended, and returns the exit code.
fn end_unread(script: &str) -> i32 {
    let script = format!("echo $$ > $DIR/new; mv $DIR/new $DIR/pid; {script}");
    let (command, folder) = shell_with_folder(1, &[], &script);
    let mut running = Running::start(command);
    let deadline = Instant::now() + LONG;
    let pid = loop {
        assert!(Instant::now() < deadline, "the rank did not start");
        match std::fs::read_to_string(folder.path().join("pid")) {
            Ok(pid) => break pid,
            Err(_) => std::thread::yield_now(),
        }
    };
    assert!(super::ends(pid.trim()), "the rank did not end");
    running.signal(Signal::TERM);
    loop {
        if let Some(status) = running.process.try_wait().unwrap() {
            return status.code().unwrap();
        }
        assert!(Instant::now() < deadline + LONG, "the launcher did not end");
        std::thread::yield_now();
    }
}

#[test]
fn a_signal_ends_a_launcher_whose_output_no_process_reads() {
    // The launcher has read all of it, and cannot write it all; or a process that the rank has left writes more than all
    // queues hold.
    for script in ["seq 10000", "seq 3000000 & exit 0"] {
        assert_eq!(end_unread(script), 143, "{script}");
    }
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
