//! Tests the progress of long work: it is shown on a terminal after a second, removed at the end, and absent from a
//! pipe.

use crate::program::{DEADLINE, rcomm_fr};
use portable_pty::{CommandBuilder, PtySize, native_pty_system};
use std::ffi::OsStr;
use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Runs the program on a terminal until its output holds `text`; then calls `go_on` and waits until it ends. Returns
/// the whole output, with the control sequences for the terminal.
fn run_on_a_terminal<A: AsRef<OsStr>>(args: &[A], text: &str, go_on: impl FnOnce()) -> String {
    let size = PtySize {
        cols: 100,
        ..PtySize::default()
    };
    let pair = native_pty_system().openpty(size).unwrap();
    let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_rcomm-fr"));
    command.args(args);
    command.env("TERM", "xterm");
    let mut child = pair.slave.spawn_command(command).unwrap();
    drop(pair.slave);
    let mut reader = pair.master.try_clone_reader().unwrap();
    let (sender, pieces) = channel();
    // Reading fails when the program has closed its end.
    let thread = std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(1..) = reader.read(&mut piece).inspect(|&read| {
            let _ = sender.send(piece[..read].to_vec());
        }) {}
    });
    let deadline = Instant::now() + DEADLINE;
    let mut shown = Vec::new();
    let mut go_on = Some(go_on);
    loop {
        let so_far = String::from_utf8_lossy(&shown).into_owned();
        if so_far.contains(text)
            && let Some(go_on) = go_on.take()
        {
            go_on();
        }
        match pieces.recv_timeout(Duration::from_millis(50)) {
            Ok(piece) => shown.extend(piece),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {
                if child.try_wait().unwrap().is_some() {
                    break;
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                let _ = child.kill();
                panic!("{text:?} did not lead to an end: {so_far}");
            }
        }
    }
    child.wait().unwrap();
    drop(pair.master);
    thread.join().unwrap();
    pieces.into_iter().for_each(|piece| shown.extend(piece));
    assert!(go_on.is_none(), "{text:?} was not shown");
    String::from_utf8_lossy(&shown).into_owned()
}

/// The arguments of `collect` for two hosts. Their commands end, without an archive, once the file `go` exists.
fn slow_hosts(folder: &Path) -> [String; 8] {
    let go = folder.join("go");
    let script = format!("while [ ! -e {} ]; do sleep 0.05; done", go.display());
    let archive = folder.join("job.rcap");
    [
        "collect",
        "-o",
        archive.to_str().unwrap(),
        "--host=n1",
        "--host=n2",
        "--command",
        &format!("sh -c '{script}' {{host}}"),
        "--timeout=60s",
    ]
    .map(str::to_owned)
}

#[test]
fn hosts_that_answer_slowly_are_counted_on_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let shown = run_on_a_terminal(&slow_hosts(dir.path()), "0/2 hosts", || {
        std::fs::write(go, "").unwrap();
    });
    // The line is cleared before the summary.
    let (_, rest) = shown.rsplit_once("hosts").unwrap();
    assert!(
        rest.contains("\x1b[2K") && rest.contains("absent: host n1"),
        "{shown:?}"
    );
}

#[test]
fn a_pipe_gets_no_progress() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let args = slow_hosts(dir.path());
    let child = rcomm_fr(&args.each_ref().map(String::as_str))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // On a terminal, progress would be shown after a second.
    std::thread::sleep(Duration::from_millis(1_200));
    std::fs::write(go, "").unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("absent: host n1"), "{stderr}");
    assert!(!stderr.contains("hosts"), "{stderr}");
}

#[test]
fn ranks_that_do_not_answer_are_waited_for_with_a_line_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let args = [
        "collect",
        "-o",
        archive.to_str().unwrap(),
        &format!("--worker-server=0=http://{address}"),
        "--wait=60s",
    ];
    let shown = run_on_a_terminal(&args, "asking the ranks, for at most 1m", || drop(silent));
    assert!(shown.contains("rank 0"), "{shown:?}");
}
