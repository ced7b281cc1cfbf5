//! `rcomm-fr collect --ask`: the records of ranks that run: their rings, and what they give by the pipes of PyTorch's
//! NCCL backend and by PyTorch's worker servers.

use crate::collect::{DUMPS, read_archive};
use crate::program::{DEADLINE, Run, finish, rcomm_fr, run};
use crate::rings::record_operations;
use crate::server::{Answers, serve};
use rcomm_recorder::model::OpType;
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that is killed at the end of a test.
pub(crate) struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a process with the environment of a rank. With `has_pipe`, PyTorch's variable names the beginning of a pipe's
/// path.
pub(crate) fn start_rank(rank: u32, job: &str, folder: &Path, has_pipe: bool) -> Rank {
    let mut command = Command::new("sleep");
    command.arg("600");
    as_rank(&mut command, rank, job, folder);
    if has_pipe {
        command.env("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", folder.join("pipe-"));
    }
    Rank(command.spawn().unwrap())
}

/// Gives a process the environment of a rank.
fn as_rank(command: &mut Command, rank: u32, job: &str, folder: &Path) {
    let path = |name: &str| folder.join(name);
    command
        .envs([("RANK", rank.to_string()), ("WORLD_SIZE", "4".to_owned())])
        .envs([("TORCHELASTIC_RUN_ID", job), ("MASTER_ADDR", "127.0.0.1")])
        // No process listens at this port.
        .env("MASTER_PORT", "1")
        .env("RCOMM_RING_DIR", path("rings"))
        .env("TORCH_FR_DUMP_TEMP_FILE", path("rank_"));
}

/// Makes a rank's pipe. If a `dump` is passed, a thread reads the pipe as PyTorch does and answers the first request
/// with a copy of this file.
fn make_pipe(folder: &Path, rank: u32, dump: Option<PathBuf>) {
    let path = folder.join(format!("pipe-{rank}.pipe"));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let Some(dump) = dump else { return };
    let opened = rustix::fs::open(&path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty());
    let mut reader = File::from(opened.unwrap());
    let target = folder.join(format!("rank_{rank}"));
    std::thread::spawn(move || {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut request = [0; 8];
        // Without a writer there is nothing to read, which is not the end of the pipe.
        while Instant::now() < deadline && !matches!(reader.read(&mut request), Ok(1..)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        fs::copy(dump, target).unwrap();
    });
}

/// Runs `rcomm-fr collect -o ARCHIVE ARGS...`.
fn collect(archive: &Path, args: &[&str]) -> Run {
    let mut command = vec!["collect", "-o", archive.to_str().unwrap()];
    command.extend(args);
    run(&command)
}

#[test]
fn ranks_are_asked_through_their_pipes_and_those_that_cannot_be_are_named_with_their_state() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let job = format!("asked-{}", std::process::id());
    let dump = |rank: u32| {
        let scenario = Path::new(DUMPS).join("never-join-w4/pickle");
        Some(scenario.join(format!("rank_{rank}")))
    };
    // An older dump is no answer.
    fs::write(folder.join("rank_0"), "old").unwrap();
    make_pipe(folder, 0, dump(0));
    make_pipe(folder, 1, dump(1));
    make_pipe(folder, 2, None);
    let _ranks = [0, 1, 2, 3].map(|number| start_rank(number, &job, folder, number != 3));
    let archive = folder.join("job.rcap");
    let args = ["--ask", "--job", &job, "--wait", "30s", "--analyze"];
    let collected = collect(&archive, &args);
    let (_, manifest) = read_archive(&archive);
    let absences = manifest["absent"].as_array().unwrap().iter();
    let absences: Vec<String> = absences
        .map(|absence| format!("rank {}: {}", absence["rank"], absence["reason"]))
        .collect();
    let absence_of = |rank: u32| {
        let start = format!("rank {rank}: ");
        let mut absences = absences.iter();
        absences.find(|absence| absence.starts_with(&start))
    };
    assert_eq!((absence_of(0), absence_of(1)), (None, None), "{absences:?}");
    let (rank_2, rank_3) = (absence_of(2).unwrap(), absence_of(3).unwrap());
    assert!(rank_2.contains("is alive: it "), "{rank_2}");
    assert!(rank_2.contains("no process reads it"), "{rank_2}");
    let unset = "was started without TORCH_NCCL_DEBUG_INFO_PIPE_FILE";
    assert!(rank_3.contains(unset), "{rank_3}");
    assert!(collected.stdout.contains("2 of 4 ranks"), "{collected:?}");
    // Standard error names the job.
    let beginning = format!("job {job}: 4 processes without a record, since ");
    assert!(collected.stderr.starts_with(&beginning), "{collected:?}");
    assert!(
        collected.stderr.contains(": sleep 600 (rank 0: process "),
        "{collected:?}"
    );
}

#[test]
fn ranks_whose_store_did_not_take_the_request_were_not_asked() {
    let dir = tempfile::tempdir().unwrap();
    let job = format!("unraised-{}", std::process::id());
    let _rank = start_rank(0, &job, dir.path(), false);
    let archive = dir.path().join("job.rcap");
    let args = ["--ask", "--exception-dump", "--job", &job, "--wait", "2s"];
    let collected = collect(&archive, &args);
    assert!(
        collected
            .stderr
            .contains("note: --exception-dump: failed to read store 127.0.0.1:1"),
        "{collected:?}"
    );
    let manifest = read_archive(&archive).1.to_string();
    assert!(!manifest.contains("it was asked for a dump"), "{manifest}");
    let unset = "was started without TORCH_NCCL_DEBUG_INFO_PIPE_FILE";
    assert!(manifest.contains(unset), "{manifest}");
}

#[test]
fn within_an_allocation_of_slurm_no_job_of_another_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let name = |kind: &str| format!("{kind}-{}", std::process::id());
    let (first, second) = (name("first"), name("second"));
    // The job that started last would be taken where no allocation is known.
    let _ranks = [&first, &second].map(|allocation| {
        let mut command = Command::new("sleep");
        as_rank(command.arg("600"), 0, allocation, dir.path());
        Rank(command.env("SLURM_JOB_ID", allocation).spawn().unwrap())
    });
    let archive = dir.path().join("job.rcap");
    let ask = |allocation: &str| {
        let args = ["collect", "--ask", "--wait", "1ms", "-o"];
        let mut command = rcomm_fr(&args);
        command.arg(&archive).env("SLURM_JOB_ID", allocation);
        finish(command).stderr
    };
    let (of_first, of_second) = (ask(&first), ask(&second));
    assert!(
        of_first.starts_with(&format!("job {first}: ")),
        "{of_first}"
    );
    let other = format!("not asked: --job {second}   1 process");
    assert!(of_first.contains(&other), "{of_first}");
    assert!(
        of_second.starts_with(&format!("job {second}: ")),
        "{of_second}"
    );
}

/// The variable with the folder of the child's ring.
const CHILD_DIR: &str = "RCOMM_TEST_RANK_RING_DIR";

#[test]
fn a_process_with_a_ring_stays() {
    // Started by the test below.
    let Ok(dir) = std::env::var(CHILD_DIR) else {
        return;
    };
    let all_reduce = (OpType::AllReduce, "all_reduce");
    let _ring = record_operations(Path::new(&dir), "named/by its program", 0, all_reduce, 1);
    fs::write(Path::new(&dir).join("recorded"), "").unwrap();
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn the_rings_of_a_job_are_taken_though_its_environment_names_it_otherwise() {
    let dir = tempfile::tempdir().unwrap();
    let (job, rings) = (
        format!("env-{}", std::process::id()),
        dir.path().join("rings"),
    );
    fs::create_dir(&rings).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "collect::running::a_process_with_a_ring_stays",
        "--test-threads=1",
    ]);
    as_rank(&mut command, 0, &job, dir.path());
    // Nor does the environment show where the rings are.
    command.env_remove("RCOMM_RING_DIR").env(CHILD_DIR, &rings);
    let _rank = Rank(command.stdout(Stdio::null()).spawn().unwrap());
    let deadline = Instant::now() + DEADLINE;
    while !rings.join("recorded").exists() {
        assert!(Instant::now() < deadline, "the child records nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
    let archive = dir.path().join("job.rcap");
    let collected = collect(
        &archive,
        &["--ask", "--job", &job, "--wait", "1s", "--no-native-stack"],
    );
    let (_, manifest) = read_archive(&archive);
    assert_eq!(
        manifest["files"].as_array().unwrap().len(),
        1,
        "{collected:?}\n{manifest}"
    );
}

#[test]
fn worker_servers_give_records_and_the_stack_of_the_rank_at_fault() {
    let fixture = |name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/worker_servers");
        fs::read(folder.join(name)).unwrap()
    };
    let stack = "Thread 0x00000001 (most recent call first):\n  File \"/x/train.py\", line 13 in load\n  \
                 File \"/x/train.py\", line 40 in <module>\n";
    let answers = |rank: u32| -> Answers {
        let ring = fixture(&format!("fr_trace_rank{rank}.json"));
        [
            ("/handler/", (200, fixture("handlers.json"))),
            ("/handler/fr_trace_json", (200, ring)),
            (
                "/handler/dump_nccl_trace_pickle",
                (200, fixture("nccl_empty")),
            ),
            ("/handler/dump_traceback", (200, stack.into())),
        ]
        .into()
    };
    let servers: Vec<String> = (0..4)
        .map(|rank| format!("--worker-server={rank}=http://{}", serve(answers(rank))))
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let mut args: Vec<&str> = servers.iter().map(String::as_str).collect();
    args.push("--analyze");
    let collected = collect(&archive, &args);
    assert_eq!(collected.code, Some(1), "{collected:?}");
    let text = &collected.stdout;
    assert!(text.contains("rank 2 never issued all_reduce #6"), "{text}");
    assert!(
        text.contains("rank 2 is now in load (/x/train.py:13)"),
        "{text}"
    );
    assert!(text.contains("called from"), "{text}");
    let next_line = text
        .lines()
        .find(|line| line.trim_start().starts_with("next"));
    assert!(
        next_line.is_some_and(|line| !line.contains("take its stack")),
        "{text}"
    );
    assert!(text.contains("read its stack"), "{text}");
    // The archive holds the stacks.
    let analyzed = run(&["analyze", "--snapshot", archive.to_str().unwrap()]);
    assert!(
        analyzed.stdout.contains("rank 2 is now in load"),
        "{analyzed:?}"
    );
    // Standard output cannot take both the archive and the report.
    let refused = collect(Path::new("-"), &args);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(
        refused.stderr.contains("--analyze prints the report"),
        "{refused:?}"
    );
}

#[test]
fn an_archive_of_stacks_without_records_shows_where_the_ranks_are() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let frame = |line: u32, name: &str| format!("  File \"/x/train.py\", line {line} in {name}\n");
    let mut args = vec!["--world-size".to_owned(), "4".to_owned()];
    for rank in 0..4 {
        let frame = match rank {
            2 => frame(13, "load"),
            _ => frame(40, "step"),
        };
        let path = dir.path().join(format!("rank_{rank}.txt"));
        let text = format!("Thread 0x00000001 (most recent call first):\n{frame}");
        fs::write(&path, text).unwrap();
        args.push(path.display().to_string());
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    collect(&archive, &args);
    let archive = archive.to_str().unwrap();
    // Options may come before the path, without `analyze`.
    let report = run(&["--color", "never", archive]);
    assert_eq!(report.code, Some(2), "{report:?}");
    let text = report
        .stdout
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    for part in [
        "INCONCLUSIVE no record of any rank could be read",
        "now rank 2 in load (/x/train.py:13) now ranks 0,1,3 in step (/x/train.py:40)",
        "not in the archive: ranks 0-3: no readable record was gathered",
        "read 0 of 4 ranks",
    ] {
        assert!(text.contains(part), "{part}: {report:?}");
    }
    assert!(
        !report.stderr.contains("A job that hangs now"),
        "{report:?}"
    );
    let json = run(&["analyze", "--format", "json", archive]);
    let report: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(report["now"][0]["ranks"], serde_json::json!([2]));
}

#[test]
fn ranks_without_records_have_a_verdict_their_common_reason_and_the_place_where_one_waits_alone() {
    let dir = tempfile::tempdir().unwrap();
    let job = format!("bare-{}", std::process::id());
    let mut ranks = Vec::from([0, 1, 3].map(|rank| start_rank(rank, &job, dir.path(), false)));
    // This one waits in a read.
    let mut reads = Command::new("cat");
    as_rank(&mut reads, 2, &job, dir.path());
    ranks.push(Rank(reads.stdin(Stdio::piped()).spawn().unwrap()));
    let waits_in = |rank: &Rank| {
        fs::read_to_string(format!("/proc/{}/wchan", rank.0.id())).unwrap_or_default()
    };
    let deadline = Instant::now() + DEADLINE;
    while ranks.iter().any(|rank| waits_in(rank) == "0") && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let shows_waits = ranks
        .iter()
        .all(|rank| !matches!(waits_in(rank).as_str(), "" | "0"));
    let archive = dir.path().join("job.rcap");
    let ask = |more: &[&str]| {
        let mut command = rcomm_fr(&["collect", "--ask", "--job", &job, "--wait", "1ms", "-o"]);
        // No py-spy is in this folder.
        command.arg(&archive).args(more).env("PATH", dir.path());
        finish(command)
    };
    let unset = "it was started without TORCH_NCCL_DEBUG_INFO_PIPE_FILE";
    let gathered = ask(&[]).stderr;
    assert_eq!(gathered.matches("absent: ").count(), 1, "{gathered}");
    assert_eq!(gathered.matches(unset).count(), 1, "{gathered}");
    assert!(gathered.contains("absent: ranks 0-3: "), "{gathered}");
    let judged = ask(&["--analyze"]);
    assert_eq!(judged.code, Some(2), "{judged:?}");
    // The report has the reason, so standard error does not repeat it.
    assert!(!judged.stderr.contains(unset), "{judged:?}");
    let words: Vec<&str> = judged.stdout.split_whitespace().collect();
    let text = words.join(" ");
    assert!(
        text.starts_with("INCONCLUSIVE no record of any rank"),
        "{text}"
    );
    assert_eq!(text.matches(unset).count(), 1, "{text}");
    assert!(!shows_waits || text.contains("now rank 2 in "), "{text}");
    assert!(
        !shows_waits || text.contains("now ranks 0,1,3 in "),
        "{text}"
    );
}
