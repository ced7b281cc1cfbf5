//! Jobs of real processes, observed while they run.

use crate::session::{BINARY, Session, run};
use rcomm::data_parallel::{BucketSizes, Parameter, Reducer, ReducerOptions};
use rcomm::{Config, ReduceOp, World};
use rcomm_analyzer::{Problem, Report, Severity, Verdict};
use rcomm_tests::process::{CULPRIT, Job, free_port, wait_until};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const RANKS: u32 = 4;
/// Environment variable with the behavior of the job: with `hangs` or `is late`, that of the culprit; with `trains`,
/// that of all ranks. With another text, no rank is at fault.
const BEHAVIOR: &str = "RCOMM_TOP_TEST_BEHAVIOR";

/// Runs one rank of a loop of reductions; the culprit hangs, or joins late, if [`BEHAVIOR`] says so. In a job that
/// `trains`, all ranks average gradients instead.
pub(crate) fn run_as_a_rank() {
    let config = Config::from_environment().expect("the environment is that of a rank");
    let world = World::init(config).expect("the world starts");
    let behavior = std::env::var(BEHAVIOR).unwrap_or_default();
    if behavior == "trains" {
        train(&world);
    }
    let is_culprit = world.rank() == CULPRIT;
    for step in 0.. {
        world.step(step);
        world.phase("load data");
        match behavior.as_str() {
            "hangs" if is_culprit && step == 5 => loop {
                std::thread::sleep(Duration::from_secs(1));
            },
            "is late" if is_culprit => std::thread::sleep(Duration::from_millis(30)),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
        world.phase("train");
        let mut numbers = [1.0f32; 256];
        let summed = world.group().all_reduce(&mut numbers, ReduceOp::Sum);
        summed.expect("all ranks take part");
    }
}

/// Averages the gradients of three parameters, each in a bucket of its own.
fn train(world: &World) {
    let parameters = (0..3).map(|at| Parameter::new(at.to_string(), &[1024 << at]));
    let options = ReducerOptions {
        buckets: BucketSizes { first: 1, rest: 1 },
        ..ReducerOptions::default()
    };
    let reducer = Reducer::<f32>::new(world.group(), parameters.collect(), options);
    let mut reducer = reducer.expect("all ranks have the same model");
    for step in 0.. {
        world.step(step);
        reducer.begin_forward();
        std::thread::sleep(Duration::from_millis(5));
        for parameter in (0..3).rev() {
            let gradient = reducer
                .gradient_mut(parameter)
                .expect("the parameter has a gradient");
            gradient.fill(1.0);
            std::thread::sleep(Duration::from_millis(2));
            reducer
                .mark_ready(parameter)
                .expect("the parameter is part of the step");
        }
        reducer.finish_in_place().expect("all ranks take part");
    }
}

/// Starts a job with this value of [`BEHAVIOR`] and further environment variables; returns it with the address of its
/// store.
fn start(behavior: &str, variables: &[(&str, &str)]) -> (Job, String) {
    let program = std::env::current_exe().expect("the path of this test is known");
    let port = free_port().to_string();
    let job = Job::start_as(
        program.to_str().expect("the path is UTF-8"),
        RANKS,
        "a_rank",
        |_, command| {
            command
                .args(["--exact", "--ignored", "--nocapture"])
                .env(BEHAVIOR, behavior)
                .env("MASTER_PORT", &port)
                .env("RCOMM_TIMEOUT_MS", "600000")
                .envs(variables.iter().copied());
        },
    );
    (job, format!("127.0.0.1:{port}"))
}

/// Starts a job that runs until it is dropped, and waits until all its ranks have endpoints; returns it with the
/// address of its store.
fn job(behavior: &str) -> (Job, String) {
    let (job, store) = start(behavior, &[]);
    wait_until("the endpoints of all ranks", || {
        let rings = job.folder().join("rings");
        let jobs = std::fs::read_dir(rings).ok()?.flatten();
        let files = jobs
            .filter_map(|job| std::fs::read_dir(job.path()).ok())
            .flatten();
        let sockets = files
            .flatten()
            .filter(|file| file.path().extension() == Some("sock".as_ref()));
        (sockets.count() == RANKS as usize).then_some(())
    });
    (job, store)
}

/// The folder with the rings of the job.
fn rings(job: &Job) -> String {
    job.folder().join("rings").display().to_string()
}

/// Returns how many dump files the ranks of the job in `folder` have written.
fn dumps(folder: &Path) -> usize {
    let runs = std::fs::read_dir(folder.join("dumps"));
    let runs = runs.into_iter().flatten().flatten();
    let files = runs.filter_map(|run| std::fs::read_dir(run.path()).ok());
    files.flatten().flatten().count()
}

/// The paths in a folder; none if it cannot be read.
fn list(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files.map(|file| file.path()).collect()
}

fn signal(job: &Job, rank: u32, signal: Signal) {
    let process =
        rustix::process::Pid::from_raw(job.pid(rank) as i32).expect("the process id is valid");
    rustix::process::kill_process(process, signal).expect("the rank is a running child");
}

#[test]
fn a_rank_whose_endpoint_does_not_answer_is_asked_for_its_dump_through_the_store() {
    let (job, store) = job("hangs");
    let arguments = ["--store", &store, "--overdue", "500ms", "--allow-actions"];
    let mut session = Session::start(&arguments, job.folder());
    session.wait_text("rank 2 never issued all_reduce #6");
    // Rank 1 runs on, but its endpoint can no longer be reached.
    let sockets = list(&job.folder().join("rings")).into_iter();
    let mut sockets = sockets.flat_map(|job| list(&job));
    let socket = sockets.find(|path| path.ends_with("1.0.sock"));
    std::fs::remove_file(socket.expect("rank 1 has an endpoint"))
        .expect("the file belongs to this test");
    session.press("dr");
    session.wait_text("dumps written by 3 of 4 ranks");
    session.wait_text("rank 1 was asked through the job's store");
    wait_until("the dump of rank 1", || {
        let dumps = job.dumps();
        let found = dumps.iter().find(|(_, dump)| dump.identity.rank == Some(1));
        found
            .filter(|(_, dump)| dump.identity.reason.contains("asked for from outside"))
            .map(drop)
    });
    session.press("q");
    session.end();
}

#[test]
fn a_rank_killed_after_the_hang_was_shown_appears_in_the_same_view() {
    for killed in [CULPRIT, 3] {
        let (job, _) = job("hangs");
        let rings = rings(&job);
        let arguments = ["--ring-dir", &rings, "--overdue", "500ms"];
        let mut session = Session::start(&arguments, job.folder());
        session.wait_text("rank 2 never issued all_reduce #6");
        signal(&job, killed, Signal::KILL);
        session.wait_text("E150");
        session.wait_text(&format!("the process of rank {killed} is gone"));
        session.press("q");
        session.end();
    }
}

#[test]
fn kernel_wait_functions_of_local_threads_are_shown_without_requests() {
    let (job, _) = job("hangs");
    let rings = rings(&job);
    let mut session = Session::start(&["--ring-dir", &rings, "--overdue", "500ms"], job.folder());
    session.wait_text("rank 2 never issued all_reduce #6");
    session.press("t");
    session.wait_text("threads as the kernel sees them of 4 of 4 ranks");
    session.wait_text("rcomm/");
    session.wait_text("sleeps in");
    // The call site of each rank's newest operation is shown below.
    session.wait_text("job.rs");
    session.press("q");
    session.end();
}

#[test]
fn a_job_found_through_its_store_is_stuck_and_its_ranks_write_their_dumps_when_asked() {
    let (job, store) = job("hangs");
    let arguments = ["--store", &store, "--overdue", "500ms", "--allow-actions"];
    let mut session = Session::start(&arguments, job.folder());
    session.wait_text("STUCK");
    session.wait_text("rank 2 never issued all_reduce #6");
    session.press("d");
    session.wait_text("[r]");
    session.press("r");
    session.wait_text("dumps written by 4 of 4 ranks");
    assert_eq!(dumps(job.folder()), RANKS as usize);
    assert!(
        job.dumps()
            .iter()
            .all(|(_, dump)| dump.identity.reason.contains("endpoint"))
    );
    session.press("8");
    session.wait_text("ranks found in store");
    session.press("q");
    assert_eq!(session.end(), 0);
}

#[test]
fn endpoints_over_tcp_are_read_with_the_secret_of_the_job_and_a_refusal_is_reported() {
    let secret = ("RCOMM_JOB_SECRET", "of this test");
    let (job, store) = start("hangs", &[secret, ("RCOMM_ENDPOINT", "tcp:127.0.0.1:0")]);
    let look = |token: Option<&str>| -> Option<Report> {
        let mut command = Command::new(BINARY);
        command
            .args(["--json", "--overdue", "500ms", "--store", &store])
            .envs([secret])
            .envs(token.map(|token| ("RCOMM_TOP_TOKEN", token)));
        let output = command.output().expect("rcomm-top starts");
        // There may be no store yet, or it lists no rank.
        serde_json::from_slice(&output.stdout).ok()
    };
    let stuck = wait_until("a verdict through endpoints over TCP", || {
        look(None).filter(|report| report.verdict == Verdict::Stuck)
    });
    assert_eq!(stuck.findings[0].culprit_ranks, [CULPRIT]);
    assert_eq!(stuck.input.ranks_read, RANKS as usize);
    let refused = look(Some("another-token-long-enough")).expect("the output is a report");
    assert_eq!(refused.verdict, Verdict::Inconclusive);
    assert_eq!(refused.input.ranks_expected, RANKS as usize);
    let is_reported = |problem: &Problem| {
        let sentence = &problem.sentence;
        sentence.starts_with("ranks 0-3 were not read; rank 0: ") && sentence.contains("token")
    };
    assert!(
        refused.problems.iter().any(is_reported),
        "{:?}",
        refused.problems
    );
    drop(job);
}

#[test]
fn local_ranks_are_asked_through_their_rings_and_a_dead_one_is_reported() {
    let (job, _) = job("hangs");
    let rings = rings(&job);
    let arguments = [
        "--ring-dir",
        &rings,
        "--overdue",
        "500ms",
        "--allow-actions",
    ];
    let mut session = Session::start(&arguments, job.folder());
    session.wait_text("rank 2 never issued all_reduce #6");
    session.press("d");
    session.wait_text("[r]");
    // Ranks 0 and 1 end soon after rank 3, since they wait for it in a reduction; rank 2 is not in one.
    signal(&job, 3, Signal::KILL);
    session.press("r");
    session.wait_text("dumps written by 3 of 4 ranks");
    session.wait_text("rank 3 did not");
    session.press("q");
    session.end();
}

#[test]
fn no_rank_is_asked_for_a_dump_unless_actions_are_allowed() {
    let (job, _) = job("hangs");
    let rings = rings(&job);
    let mut session = Session::start(&["--ring-dir", &rings], job.folder());
    session.wait_text("test-");
    session.press("d");
    session.wait_text("needs --allow-actions");
    session.press("q");
    session.end();
    assert_eq!(dumps(job.folder()), 0);
}

#[test]
fn a_healthy_job_raises_no_warning() {
    let (job, store) = job("");
    // On a busy machine, some rank may really be slow.
    let config = job.folder().join("rcomm");
    std::fs::create_dir(&config).expect("the folder is new");
    let muted = "[warnings.W220]\nthreshold = 1.0\n[warnings.W240]\nenabled = false\n";
    std::fs::write(config.join("top.toml"), muted).expect("the folder is writable");
    let mut session = Session::start(&["--store", &store, "--refresh", "100ms"], job.folder());
    session.wait_text("warnings: none");
    session.press("7");
    session.wait_text("7:timeline");
    session.press("q");
    session.end();
    let (_, out, err) = run(&["--store", &store, "--json"], job.folder());
    let report: rcomm_analyzer::Report = serde_json::from_str(&out).expect(&err);
    let errors = report
        .findings
        .iter()
        .filter(|f| f.severity == Severity::Error);
    assert_eq!(errors.count(), 0, "{out}");
}

#[test]
fn a_rank_that_is_late_in_a_running_job_is_named() {
    let (job, _) = job("is late");
    let rings = rings(&job);
    let mut session = Session::start(&["--ring-dir", &rings], job.folder());
    session.wait_text("SLOW");
    session.wait_text("is repeatedly last");
    session.press("5");
    session.wait("rank 2 among the stragglers", |screen| {
        let text = screen.contents();
        text.contains("5:stragglers") && text.lines().any(|line| line.starts_with("~ 2 "))
    });
    session.press("q");
    session.end();
}

/// Asks `rcomm-web` for a path; returns the body of its answer.
fn get(address: SocketAddr, token: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    let head = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n");
    write!(stream, "{head}Authorization: Bearer {token}\r\n\r\n").expect("the server reads");
    let mut text = String::new();
    stream
        .read_to_string(&mut text)
        .expect("the server answers in UTF-8");
    let (head, body) = text
        .split_once("\r\n\r\n")
        .expect("the head ends with an empty line");
    assert!(head.contains(" 200 "), "{path}: {text}");
    body.to_owned()
}

#[test]
fn the_steps_of_reducers_are_shown_live_and_counted() {
    let (job, _) = job("trains");
    let rings = rings(&job);
    let arguments = ["--ring-dir", &rings, "--refresh", "100ms"];
    let mut session = Session::start(&arguments, job.folder());
    session.press("0");
    session.wait("a row for each rank with its slowest bucket", |screen| {
        let text = screen.contents();
        let row_start = |rank: u32| format!("  {rank} ");
        let rows = || text.lines().filter(|line| line.contains(" of 3: "));
        text.contains("0:reducer")
            && (0..RANKS).all(|rank| rows().any(|line| line.starts_with(&row_start(rank))))
    });
    session.press("q");
    session.end();

    let mut options = rcomm_web::Options {
        ring_dir: Some(job.folder().join("rings")),
        ..rcomm_web::Options::default()
    };
    options.pace.refresh = Duration::from_millis(100);
    let page = rcomm_web::serve(options).expect("the page is served");
    let ask = |path: &str| get(page.address(), page.token(), path);
    let rows = wait_until("a row of each rank", || {
        if !ask("/metrics").contains("rcomm_reducer_steps_total") {
            return None;
        }
        let answer = ask("/api/v1/reducers");
        let answer: serde_json::Value = serde_json::from_str(&answer).expect("the text is JSON");
        let rows = answer["reducers"]
            .as_array()
            .expect("the value is a list")
            .clone();
        (rows.len() == RANKS as usize).then_some(rows)
    });
    for (row, rank) in rows.iter().zip(0..) {
        assert_eq!(row["rank"].as_u64(), Some(rank), "{row}");
        let number = |key: &str| row[key].as_f64().expect("the value is a number");
        assert_eq!(number("bytes"), 4.0 * 7168.0, "{row}");
        // The forward pass sleeps for 5 ms, and the backward pass before each of three buckets for 2 ms.
        assert!(
            number("forward_ms") >= 5.0 && number("backward_ms") >= 6.0,
            "{row}"
        );
        let buckets = row["buckets"].as_array().expect("the value is a list");
        let ready = |at: usize| {
            buckets[at]["ready_ms"]
                .as_f64()
                .expect("the value is a time")
        };
        assert!(ready(0) >= 2.0 && ready(2) >= 6.0, "{row}");
    }
    let metrics = ask("/metrics");
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.rsplit_once(' ')).expect(name).1;
        value.parse().expect("the value is a number")
    };
    let steps = value("rcomm_reducer_steps_total{desc=\"default_pg\"}");
    assert!(steps >= f64::from(RANKS), "{steps}");
    let forward = value("rcomm_reducer_seconds_total{desc=\"default_pg\",part=\"forward\"}");
    assert!(forward >= 0.005 * steps, "{forward} in {steps}");
    assert!(value("rcomm_reducer_step_seconds{desc=\"default_pg\"}") >= 0.011);
}

#[test]
fn views_that_need_records_work_through_a_collector() {
    let (job, _) = job("hangs");
    let mut options = rcomm_web::Options {
        ring_dir: Some(job.folder().join("rings")),
        ..rcomm_web::Options::default()
    };
    options.live.policy.overdue = Duration::from_millis(500);
    options.pace.refresh = Duration::from_millis(200);
    let page = rcomm_web::serve(options).expect("the page is served");
    let address = format!("http://{}", page.address());
    let arguments = [
        "--collector",
        &address,
        "--token",
        page.token(),
        "--refresh",
        "200ms",
    ];
    let mut session = Session::start(&arguments, job.folder());
    session.wait_text("rank 2 never issued all_reduce #6");
    // The matrix, the timeline, and a rank's operations.
    session.press("2\r");
    session.wait_text("never issued by rank 2");
    session.press("7");
    session.wait_text("7:timeline");
    session.press(":rank 1\r");
    session.wait_text("5  all_reduce  completed");
    session.press("q");
    session.end();
}
