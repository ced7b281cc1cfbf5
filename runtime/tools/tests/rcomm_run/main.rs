//! Tests `rcomm-run` with real processes.

#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::print_stdout)]

mod nodes;
mod output;
mod stopped;

use rcomm::store::{Store, StoreAccess, TcpStore};
use rcomm::{Config, ErrorKind, ReduceOp, Secret, World};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::collections::HashMap;
use std::io::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Time limit of a wait for a process, a file or a store, longer than any takes.
const LONG: Duration = Duration::from_secs(60);

fn rcomm_run(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rcomm-run"));
    command.args(arguments).env_remove("RCOMM_JOB_SECRET");
    command
}

/// The command that runs `script` in a shell on each of this number of ranks.
fn shell(ranks: u32, options: &[&str], script: &str) -> Command {
    let ranks = ranks.to_string();
    let mut command = rcomm_run(&["-n", &ranks]);
    command.args(options).args(["sh", "-c", script]);
    command
}

fn run(mut command: Command) -> Output {
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The lines of each rank, in order.
fn by_rank(bytes: &[u8]) -> HashMap<u32, Vec<&str>> {
    let mut lines: HashMap<u32, Vec<&str>> = HashMap::new();
    for line in text(bytes).lines() {
        let (rank, rest) = line
            .strip_prefix("[rank ")
            .and_then(|line| line.split_once("] "))
            .unwrap_or_else(|| panic!("no rank before {line:?}"));
        lines.entry(rank.parse().unwrap()).or_default().push(rest);
    }
    lines
}

/// Waits until the process has ended, for [`LONG`] at most; returns whether it has.
fn ends(pid: &str) -> bool {
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    let deadline = Instant::now() + LONG;
    while test_kill_process(pid).is_ok() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// A launcher that runs during the test.
struct Running {
    process: Child,
    stdout: BufReader<ChildStdout>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut process = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        Self { process, stdout }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// The rest of the ranks' output, the standard error, and the launcher's exit code.
    fn finish(mut self) -> (String, String, i32) {
        let (mut out, mut err) = (String::new(), String::new());
        self.stdout.read_to_string(&mut out).unwrap();
        let mut stderr = self.process.stderr.take().unwrap();
        stderr.read_to_string(&mut err).unwrap();
        let status = self.process.wait().unwrap();
        (
            out,
            err,
            status.code().expect("no signal kills the launcher"),
        )
    }
}

#[test]
fn ranks_get_torchruns_environment_and_a_secret() {
    let output = run(shell(3, &[], "env"));
    assert!(output.status.success());
    let ranks = by_rank(&output.stdout);
    let mut secrets = Vec::new();
    for rank in 0..3 {
        let env: HashMap<&str, &str> = ranks[&rank]
            .iter()
            .filter_map(|line| line.split_once('='))
            .collect();
        let text = rank.to_string();
        for name in ["RANK", "LOCAL_RANK", "ROLE_RANK"] {
            assert_eq!(env[name], text, "{name}");
        }
        for name in ["WORLD_SIZE", "LOCAL_WORLD_SIZE"] {
            assert_eq!(env[name], "3", "{name}");
        }
        assert_eq!(env["TORCHELASTIC_USE_AGENT_STORE"], "True");
        let rendezvous = rcomm::Rendezvous::from_environment(|name| {
            env.get(name).map(|value| (*value).to_owned())
        })
        .unwrap();
        assert_eq!((rendezvous.rank, rendezvous.world_size), (rank, 3));
        assert_ne!(rendezvous.master_port, 0);
        assert!(rendezvous.is_single_host() && rendezvous.uses_agent_store);
        secrets.push((env["RCOMM_JOB_SECRET"].to_owned(), rendezvous.job));
    }
    assert_eq!(secrets[0].0.len(), 64);
    assert!(secrets.iter().all(|secret| *secret == secrets[0]));
    let again = run(shell(1, &[], "echo $RCOMM_JOB_SECRET"));
    let again = by_rank(&again.stdout);
    assert_ne!(again[&0][0], secrets[0].0, "two jobs have the same secret");
}

#[test]
fn no_line_is_lost_or_torn() {
    let script = "seq 20000; seq 20000 >&2; printf 'no newline'";
    let output = run(shell(4, &[], script));
    assert!(output.status.success());
    let numbers: Vec<String> = (1..=20_000).map(|number| number.to_string()).collect();
    let (out, err) = (by_rank(&output.stdout), by_rank(&output.stderr));
    for rank in 0..4 {
        assert_eq!(out[&rank][..20_000], numbers);
        assert_eq!(out[&rank][20_000..], ["no newline"]);
        assert_eq!(err[&rank], numbers);
    }
}

/// Like [`shell`], with a folder, `$DIR`, for files by which the ranks wait for each other. Also returns the folder,
/// which is removed when it is dropped.
fn shell_with_folder(ranks: u32, options: &[&str], script: &str) -> (Command, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = shell(ranks, options, script);
    command.env("DIR", folder.path());
    (command, folder)
}

#[test]
fn failure_is_reported_while_the_output_is_stalled() {
    // Rank 0 writes more than all pipes and queues hold; the test reads it only after rank 1's failure is reported.
    let script = "if [ $RANK = 1 ]; then until [ -e $DIR/up ]; do sleep 0.01; done; exit 9; fi
        trap '' TERM; touch $DIR/up; seq 3000000";
    let (mut command, _folder) = shell_with_folder(2, &["--grace", "60"], script);
    let mut process = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(process.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(
        line.contains("rank 1") && line.contains("exited with 9"),
        "{line}"
    );
    let mut out = Vec::new();
    process
        .stdout
        .take()
        .unwrap()
        .read_to_end(&mut out)
        .unwrap();
    let ranks = by_rank(&out);
    let count = ranks[&0].len();
    assert_eq!(ranks[&0][count - 1], count.to_string(), "lines are missing");
    assert_eq!(count, 3_000_000);
    assert_eq!(process.wait().unwrap().code(), Some(9));
}

#[test]
fn the_first_failure_is_named_and_ends_the_other_ranks() {
    let script = "echo $$; touch $DIR/$RANK
        if [ $RANK != 2 ]; then sleep 1000; fi
        until [ -e $DIR/0 -a -e $DIR/1 -a -e $DIR/3 ]; do sleep 0.01; done; exit 7";
    let (command, _folder) = shell_with_folder(4, &["--linger", "0"], script);
    let output = run(command);
    assert_eq!(output.status.code(), Some(7));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("rank 2"), "{stderr}");
    assert!(stderr.contains("exited with 7 after "), "{stderr}");
    assert!(
        stderr.contains("ending the other ranks of this host (3)"),
        "{stderr}"
    );
    let ranks = by_rank(&output.stdout);
    assert_eq!(ranks.len(), 4);
    for (rank, lines) in ranks {
        assert!(ends(lines[0]), "rank {rank}");
    }
}

#[test]
fn the_signal_that_killed_a_rank_is_named() {
    let output = run(shell(
        2,
        &[],
        "if [ $RANK = 0 ]; then kill -KILL $$; fi; sleep 1000",
    ));
    assert_eq!(output.status.code(), Some(128 + 9));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("rank 0") && stderr.contains("was killed by SIGKILL"),
        "{stderr}"
    );
    // This is the default of `--linger`.
    assert!(
        stderr.contains("ending the other ranks of this host (1) in 5 s"),
        "{stderr}"
    );
}

#[test]
fn rank_that_ignores_sigterm_is_killed_with_its_children() {
    let script = "if [ $RANK = 1 ]; then until [ -e $DIR/up ]; do sleep 0.01; done; exit 3; fi
        trap '' TERM; sh -c 'echo $$; touch $DIR/up; sleep 1000'; sleep 1000";
    let (command, _folder) = shell_with_folder(2, &["--grace", "0.2"], script);
    let output = run(command);
    assert_eq!(output.status.code(), Some(3));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("killing the remaining ranks") && stderr.contains("rank 0"),
        "{stderr}"
    );
    assert!(ends(by_rank(&output.stdout)[&0][0]));
}

#[test]
fn other_ranks_continue_for_the_linger_time() {
    let script = "if [ $RANK = 1 ]; then exit 4; fi; sleep 0.3; echo dumped";
    let output = run(shell(2, &["--linger", "60"], script));
    assert_eq!(output.status.code(), Some(4));
    assert_eq!(by_rank(&output.stdout)[&0], ["dumped"]);
}

#[test]
fn others_write_their_dumps_after_a_rank_has_exited() {
    let dumps = tempfile::tempdir().unwrap();
    let myself = std::env::current_exe().unwrap();
    let test_of_rank = "one_rank_of_which_number_1_exits";
    let mut command = rcomm_run(&["-n", "3", "--linger", "60"]);
    command
        .arg(myself)
        .args(["--ignored", "--exact", test_of_rank, "--nocapture"])
        .env("RCOMM_DUMP_DIR", dumps.path())
        .env("RCOMM_RING_DIR", dumps.path().join("rings"))
        .env("RCOMM_TIMEOUT_MS", "60000");
    let output = run(command);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{stderr}");
    assert!(
        stderr.contains("ending the other ranks of this host (2) in 1 min"),
        "{stderr}"
    );
    let out = text(&output.stdout);
    for rank in [0, 2] {
        let lines = out.lines().filter(|line| line.contains("survived: "));
        let prefix = format!("[rank {rank}] ");
        let line = lines.clone().find(|line| line.starts_with(&prefix));
        let line = line.unwrap_or_else(|| panic!("rank {rank} printed nothing: {out} {stderr}"));
        let (_, dump) = line.split_once("dump: ").unwrap();
        let dump = dump.split_once(".json").unwrap().0;
        let dump = std::fs::read_to_string(format!("{dump}.json")).unwrap();
        assert!(dump.contains("all_reduce"), "{dump}");
    }
}

#[test]
#[ignore = "a rank of the job of others_write_their_dumps_after_a_rank_has_exited"]
fn one_rank_of_which_number_1_exits() {
    let world = World::init(Config::from_environment().unwrap()).unwrap();
    let mut data = [1.0f32; 16];
    world.group().all_reduce(&mut data, ReduceOp::Sum).unwrap();
    if world.rank() == 1 {
        std::process::exit(7);
    }
    let error = world.group().all_reduce(&mut data, ReduceOp::Sum);
    println!("survived: {}", error.unwrap_err());
}

#[test]
fn signals_to_stop_are_forwarded_to_the_ranks() {
    // This process may ignore SIGHUP, as by `nohup`. A launcher that it starts would too, unless the signal is caught
    // here.
    signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::default()).unwrap();
    for (signal, name, code) in [
        (Signal::TERM, "TERM", 143),
        (Signal::INT, "INT", 130),
        (Signal::HUP, "HUP", 129),
    ] {
        let script = format!(
            "trap 'echo got {name}; exit 0' {name}; echo ready; while :; do sleep 0.05; done"
        );
        let mut running = Running::start(shell(2, &[], &script));
        assert!(running.line().ends_with("ready\n"));
        assert!(running.line().ends_with("ready\n"));
        running.signal(signal);
        let (out, err, exit) = running.finish();
        assert_eq!(
            out.matches(&format!("got {name}")).count(),
            2,
            "{out} {err}"
        );
        assert_eq!(exit, code);
        assert!(err.contains(&format!("SIG{name}")), "{err}");
    }
}

#[test]
fn a_second_signal_kills_the_ranks() {
    let script = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
    let mut running = Running::start(shell(1, &["--grace", "1000"], script));
    running.line();
    running.signal(Signal::TERM);
    let mut line = String::new();
    let mut stderr = BufReader::new(running.process.stderr.take().unwrap());
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("SIGTERM"), "{line}");
    running.signal(Signal::TERM);
    line.clear();
    stderr.read_line(&mut line).unwrap();
    assert!(
        line.contains("at a signal that came while the ranks were ending: rank 0"),
        "{line}"
    );
    assert_eq!(running.process.wait().unwrap().code(), Some(143));
}

#[test]
fn a_first_signal_while_ranks_linger_gives_them_the_grace_period() {
    // The rank needs some time after the signal, and the grace period leaves it that.
    let script = "if [ $RANK = 1 ]; then until [ -e $DIR/up ]; do sleep 0.01; done; exit 3; fi
        trap 'sleep 0.5; echo cleaned up; exit 0' TERM; touch $DIR/up; while :; do sleep 0.05; done";
    let (command, _folder) = shell_with_folder(2, &["--linger", "1000", "--grace", "1000"], script);
    let mut running = Running::start(command);
    let mut stderr = BufReader::new(running.process.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("ending the other ranks"), "{line}");
    running.signal(Signal::TERM);
    assert_eq!(running.line(), "[rank 0] cleaned up\n");
    assert_eq!(running.process.wait().unwrap().code(), Some(3));
}

#[test]
fn user_signals_are_forwarded_and_do_not_end_the_job() {
    let script =
        "trap 'echo dump' USR1; trap 'exit 0' USR2; echo ready; while :; do sleep 0.05; done";
    let mut running = Running::start(shell(1, &[], script));
    assert_eq!(running.line(), "[rank 0] ready\n");
    running.signal(Signal::USR1);
    assert_eq!(running.line(), "[rank 0] dump\n");
    running.signal(Signal::USR2);
    let (_, _, code) = running.finish();
    assert_eq!(code, 0);
}

/// Runs a job of one rank with these options, and calls `use_store` with the port of its store. Returns the rank's
/// `RCOMM_STORE` and, after a blank, the launcher's standard error.
fn with_a_store(options: &[&str], use_store: impl FnOnce(u16)) -> String {
    let script = "trap 'exit 0' USR1; echo $MASTER_PORT $RCOMM_STORE; while :; do sleep 0.05; done";
    let mut running = Running::start(shell(1, options, script));
    let line = running.line();
    let mut fields = line.trim().rsplit(' ');
    let mode = fields.next().unwrap().to_owned();
    use_store(fields.next().unwrap().parse().unwrap());
    running.signal(Signal::USR1);
    let (_, errors, code) = running.finish();
    assert_eq!(code, 0);
    format!("{mode} {errors}")
}

#[test]
fn store_is_served_to_clients_with_the_secret_while_the_job_runs() {
    let mut kept = None;
    let mode = with_a_store(&["--job-secret", "theirs"], |port| {
        let access = StoreAccess::Secret(Secret::from_text("theirs"));
        let store = TcpStore::connect_with("127.0.0.1", port, LONG, &access).unwrap();
        store.set("k", b"v").unwrap();
        assert_eq!(store.get("k", LONG).unwrap(), b"v");
        let without_secret = TcpStore::connect("127.0.0.1", port, LONG);
        let error = without_secret
            .err()
            .expect("a client without the secret is refused");
        assert_eq!(error.kind(), ErrorKind::Unauthorized, "{error}");
        kept = Some(store);
    });
    assert!(mode.starts_with("secret"), "{mode}");
    let store = kept.unwrap();
    assert!(
        store.set("k", b"v").is_err(),
        "the store is still served after the job"
    );
}

#[test]
fn an_open_store_must_be_requested_and_is_announced() {
    let printed = with_a_store(&["--open-store"], |port| {
        let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
        store.set("k", b"v").unwrap();
    });
    assert!(printed.starts_with("open"), "{printed}");
    assert!(printed.contains("the store is open"), "{printed}");
}

#[test]
fn a_process_left_behind_does_not_keep_the_launcher_running() {
    let output = run(shell(1, &[], "sleep 1000 & echo $!"));
    assert!(output.status.success());
    let ranks = by_rank(&output.stdout);
    let left = Pid::from_raw(ranks[&0][0].parse().unwrap()).unwrap();
    kill_process(left, Signal::KILL).unwrap();
}

#[test]
fn a_closed_output_does_not_stop_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let done = folder.path().join("done");
    let script = format!("seq 300000; touch {}", done.display());
    let mut running = Running::start(shell(1, &[], &script));
    assert_eq!(running.line(), "[rank 0] 1\n");
    let Running {
        mut process,
        stdout,
    } = running;
    drop(stdout);
    assert!(process.wait().unwrap().success());
    assert!(done.exists());
}

#[test]
fn program_that_cannot_be_started_has_the_shells_exit_codes() {
    let output = run(rcomm_run(&["-n", "2", "/no/such/program"]));
    assert_eq!(output.status.code(), Some(127));
    assert!(text(&output.stderr).contains("/no/such/program"));
    let output = run(rcomm_run(&["-n", "2", "/etc/passwd"]));
    assert_eq!(output.status.code(), Some(126));
}

#[test]
fn wrong_command_lines_are_explained() {
    for (arguments, stderr) in [
        (&["-n", "0", "true"][..], "0 is not in"),
        (&["-n", "2"], "PROGRAM"),
        (
            &["-n", "2", "--nnodes", "2", "--node-rank", "2", "true"],
            "--node-rank is 2",
        ),
        (
            &["-n", "2", "--nnodes", "3", "--master-port", "1", "true"],
            "RCOMM_JOB_SECRET",
        ),
        (
            &["-n", "2", "--grace", "soon", "true"],
            "not a number of seconds",
        ),
    ] {
        let output = run(rcomm_run(arguments));
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(
            text(&output.stderr).contains(stderr),
            "{}",
            text(&output.stderr)
        );
    }
    let help = run(rcomm_run(&["--help"]));
    for code in ["128+S", "124", "125", "126", "127"] {
        assert!(text(&help.stdout).contains(code));
    }
}

#[test]
fn pytorch_runs_under_rcomm_run() {
    const PROGRAM: &str = "
import torch, torch.distributed as dist
dist.init_process_group('gloo')
ones = torch.ones(4)
dist.all_reduce(ones)
print('sum', ones.tolist(), dist.get_rank())
dist.destroy_process_group()
";
    let Ok(python) = std::env::var("RCOMM_TEST_PYTHON") else {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: RCOMM_TEST_PYTHON names no Python with torch"
        );
        return;
    };
    let output = run(rcomm_run(&["-n", "2", &python, "-c", PROGRAM]));
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let ranks = by_rank(&output.stdout);
    for rank in 0..2 {
        let line = format!("sum [2.0, 2.0, 2.0, 2.0] {rank}");
        assert!(ranks[&rank].contains(&line.as_str()), "{ranks:?} {stderr}");
    }
}

#[test]
fn a_failed_job_is_started_again_as_often_as_allowed() {
    let options = ["--max-restarts", "2", "--linger", "0"];
    let script = "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; \
                  [ $RANK = 0 ] || [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 5";
    let output = run(shell(2, &options, script));
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}");
    let lines = by_rank(&output.stdout);
    assert_eq!(lines[&1], ["0 of 2", "1 of 2", "2 of 2"]);
    assert!(
        err.contains("all ranks start again: restart 1 of 2"),
        "{err}"
    );

    let output = run(shell(1, &options, "echo up; exit 5"));
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(by_rank(&output.stdout)[&0], ["up"; 3]);
}

#[test]
fn a_signal_to_the_launcher_ends_the_job_also_where_restarts_are_left() {
    let mut job = Running::start(shell(1, &["--max-restarts", "9"], "echo up; sleep 1000"));
    job.line();
    job.signal(Signal::TERM);
    let (out, err, code) = job.finish();
    assert_eq!(code, 143, "{err}");
    assert_eq!(out, "");
}

#[test]
fn a_process_joins_in_place_of_each_failed_rank_as_often_as_allowed() {
    let script = "echo join=$RCOMM_JOIN; if [ $RANK = 1 ]; then exit 7; fi; \
                  if [ $RANK = 0 ]; then trap 'exit 0' TERM; while :; do sleep 0.05; done; fi";
    let output = run(shell(2, &["--replace", "2", "--linger", "0"], script));
    let (out, err) = (by_rank(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(7), "{err}");
    assert_eq!(out[&0], ["join="]);
    assert_eq!(out[&1], ["join=", "join=1", "join=1"]);
    let failures = "exited with 7 after";
    assert_eq!(err.matches(failures).count(), 3, "{err}");
    assert!(
        err.contains("a process joins in its place, 2 of 2"),
        "{err}"
    );
}
