//! Tests ranks that stay stopped by a signal, and a launcher that was stopped itself.

use super::{Running, by_rank, run, shell, shell_with_folder, text};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::time::Duration;

#[test]
fn a_rank_that_stays_stopped_after_the_others_have_ended_is_named_and_ended() {
    let script = "if [ $RANK = 1 ]; then kill -STOP $$; fi; echo done";
    let output = run(shell(3, &["--stop-timeout", "1"], script));
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(124), "{stderr}");
    assert!(
        stderr.contains("rank 1 (process")
            && stderr.contains("stopped by a signal; it gets SIGTERM"),
        "{stderr}"
    );
    assert!(
        stderr.contains("was stopped by a signal for 1 s, and is ended"),
        "{stderr}"
    );
    let lines = by_rank(&output.stdout);
    assert_eq!(
        (&lines[&0][..], &lines[&2][..]),
        (&["done"][..], &["done"][..])
    );
}

#[test]
fn ranks_that_are_all_stopped_get_sigterm_and_are_killed_if_they_ignore_it() {
    let options = ["--stop-timeout", "1", "--grace", "0.5"];
    let script = "trap '' TERM; kill -STOP $$; while :; do sleep 0.05; done";
    let output = run(shell(2, &options, script));
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(124), "{stderr}");
    for rank in ["killing rank 0 (", "killing rank 1 ("] {
        assert!(stderr.contains(rank), "{stderr}");
    }
}

#[test]
fn a_rank_that_runs_after_the_others_have_ended_is_named_and_finishes() {
    // Rank 1 runs on, as if it saved a checkpoint. Only rank 2, which is stopped, is ended.
    let script = "case $RANK in
        0) exit 0;;
        1) touch $DIR/up; until [ -e $DIR/go ]; do sleep 0.01; done; echo saved;;
        2) until [ -e $DIR/up ]; do sleep 0.01; done; kill -STOP $$;;
        esac";
    let (command, folder) = shell_with_folder(3, &["--stop-timeout", "0.5"], script);
    let mut running = Running::start(command);
    let mut stderr = BufReader::new(running.process.stderr.take().unwrap());
    let (mut is_named, mut is_ended) = (false, false);
    let mut printed = String::new();
    while !is_named || !is_ended {
        let mut line = String::new();
        assert!(stderr.read_line(&mut line).unwrap() > 0, "{printed}");
        is_named |= line.contains("rank 1 (") && line.contains("waits, since it is not stopped");
        is_ended |= line.contains("rank 2 (") && line.contains("and is ended");
        printed += &line;
    }
    std::fs::write(folder.path().join("go"), "").unwrap();
    assert_eq!(running.line(), "[rank 1] saved\n", "{printed}");
    assert_eq!(
        running.process.wait().unwrap().code(),
        Some(124),
        "{printed}"
    );
}

#[test]
fn a_job_whose_stopped_rank_is_continued_in_time_ends_with_0() {
    let script = "if [ $RANK = 1 ]; then echo $$; kill -STOP $$; fi; echo done";
    let mut running = Running::start(shell(2, &["--stop-timeout", "40"], script));
    let mut stderr = BufReader::new(running.process.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("rank 1 (process"), "{line}");
    let pid = line.split("(process ").nth(1).unwrap().split(')').next();
    let pid = Pid::from_raw(pid.unwrap().parse().unwrap()).unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(running.process.wait().unwrap().code(), Some(0));
}

#[test]
fn ranks_have_their_grace_period_also_if_the_launcher_was_stopped_before_it() {
    let script = "trap 'echo asked; sleep 0.2; echo saved; exit' TERM
        if [ $RANK = 1 ]; then until [ -e $DIR/up ]; do sleep 0.01; done; exit 3; fi
        touch $DIR/up; while :; do sleep 0.01; done";
    let options = ["--linger", "2", "--grace", "5"];
    let (command, _folder) = shell_with_folder(2, &options, script);
    let mut running = Running::start(command);
    let mut stderr = BufReader::new(running.process.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("rank 1 (process"), "{line}");
    running.signal(Signal::STOP);
    // Longer than both periods together: by the clock, both are over when the launcher continues.
    std::thread::sleep(Duration::from_secs(8));
    running.signal(Signal::CONT);
    let lines = [running.line(), running.line()];
    assert_eq!(lines, ["[rank 0] asked\n", "[rank 0] saved\n"]);
    assert_eq!(running.process.wait().unwrap().code(), Some(3));
}

#[test]
fn ranks_have_their_grace_period_also_if_the_launcher_was_stopped_in_it() {
    let script =
        "trap 'echo asked; until [ -e $DIR/go ]; do sleep 0.01; done; echo saved; exit' TERM
        echo up; while :; do sleep 0.01; done";
    let (command, folder) = shell_with_folder(1, &["--grace", "6"], script);
    let mut running = Running::start(command);
    assert_eq!(running.line(), "[rank 0] up\n");
    running.signal(Signal::TERM);
    assert_eq!(running.line(), "[rank 0] asked\n");
    running.signal(Signal::STOP);
    // Longer than the whole period.
    std::thread::sleep(Duration::from_secs(7));
    running.signal(Signal::CONT);
    std::fs::write(folder.path().join("go"), "").unwrap();
    assert_eq!(running.line(), "[rank 0] saved\n");
    assert_eq!(running.process.wait().unwrap().code(), Some(143));
}

#[test]
fn a_signal_forbids_a_restart_also_after_a_stopped_rank_was_ended() {
    let script = "touch $DIR/attempt.$TORCHELASTIC_RESTART_COUNT
        [ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
        case $RANK in
        0) exit 0;;
        1) trap 'exit 0' TERM; touch $DIR/up; while :; do sleep 0.01; done;;
        2) until [ -e $DIR/up ]; do sleep 0.01; done; kill -STOP $$;;
        esac";
    let options = ["--stop-timeout", "0.5", "--max-restarts", "1"];
    let (command, folder) = shell_with_folder(3, &options, script);
    let mut running = Running::start(command);
    let mut stderr = BufReader::new(running.process.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("rank 2 (") || !line.contains("and is ended") {
        line.clear();
        assert!(stderr.read_line(&mut line).unwrap() > 0);
    }
    running.signal(Signal::TERM);
    assert_eq!(running.process.wait().unwrap().code(), Some(124));
    assert!(!folder.path().join("attempt.1").exists());
}
