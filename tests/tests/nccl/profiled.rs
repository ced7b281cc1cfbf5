//! Runs jobs whose NCCL loads rcomm's plug-in for its profiler interface, as any program's NCCL can.

use super::trouble::on_culprit;
use super::{RANKS, fail, run, start};
use rcomm_analyzer::source::{RingSource, Source};
use rcomm_analyzer::{Code, Live, LiveOptions, Moment, Policy, Snapshot, Verdict, analyze};
use rcomm_recorder::model::EntryState;
use rcomm_recorder::publish::{Dump, Recorder, RingReader, list_rings};
use rcomm_tests::process::{CULPRIT, Job, wait_until};
use rcomm_tests::simulator;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Makes a rank's NCCL load the plug-in.
fn profiled(command: &mut Command) {
    command
        .env("NCCL_PROFILER_PLUGIN", simulator::profiler_path())
        .env_remove("RCOMM_NCCL_EVENTS");
}

/// The records in the job's rings: those of the program's recorder and those of the plug-in.
fn rings(job: &Job) -> Vec<Dump> {
    let listed = list_rings(&job.folder().join("rings")).unwrap();
    let read = |path| RingReader::attach(path).unwrap().snapshot();
    listed.into_iter().map(|ring| read(ring.path)).collect()
}

#[test]
fn a_hang_is_recorded_by_the_plug_in_and_each_rank_counts_once() {
    let job = start("train", |rank, command| {
        profiled(command);
        on_culprit("hang_after=4")(rank, command);
    });
    let (job, _) = fail(job, 0..RANKS);
    let dumps = rings(&job);
    let recorded_by = |recorder| dumps.iter().filter(move |dump| dump.recorder == recorder);
    assert_eq!(recorded_by(Recorder::Rcomm).count(), RANKS as usize);
    assert_eq!(recorded_by(Recorder::NcclProfiler).count(), RANKS as usize);
    let mut stopped = 0;
    for dump in recorded_by(Recorder::NcclProfiler) {
        let rank = dump.identity.rank.unwrap();
        let is_completed =
            |entry: &&rcomm_recorder::model::Entry| entry.state == EntryState::Completed;
        let completed = dump.entries.iter().filter(is_completed).count();
        assert!(completed >= 3, "rank {rank}: {completed}");
        // The abort has ended the operation that hung. If another rank was the first to abort, the operation may be
        // completed here.
        let last = dump.entries.last().unwrap();
        let has_ended = matches!(last.state, EntryState::Failed | EntryState::Completed);
        assert!(has_ended && last.retired, "rank {rank}: {last:?}");
        stopped += usize::from(last.state == EntryState::Failed);
        let communicator = &dump.communicators()[0];
        assert_eq!(
            communicator.group,
            format!("nccl-{:016x}", communicator.hash)
        );
    }
    assert!(stopped > 0, "no rank was the first to abort");
    // The program's rings and dumps have the same hash of the communicator, as its id.
    let hash = recorded_by(Recorder::NcclProfiler)
        .next()
        .unwrap()
        .communicators()[0]
        .hash;
    let written = job.dumps().into_iter().map(|(_, dump)| dump);
    for dump in recorded_by(Recorder::Rcomm).cloned().chain(written) {
        let ids = dump.nccl_comm_state.iter().map(|(id, _)| id.clone());
        let ids: Vec<String> = ids.collect();
        assert_eq!(ids, [format!("{hash:#018x}")], "{:?}", dump.identity);
    }
    let policy = Policy {
        world_size: Some(RANKS),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    assert_eq!(report.ranks.len(), RANKS as usize);
    // The report has the operations of one recorder: those of the group that the program made, under its name.
    let names: Vec<&str> = report
        .groups
        .iter()
        .map(|group| &*group.group.name)
        .collect();
    assert!(
        names.iter().all(|name| !name.starts_with("nccl-")),
        "{names:?}"
    );
    let own: Vec<Dump> = recorded_by(Recorder::Rcomm).cloned().collect();
    let expected = analyze(&own, &policy);
    let codes_and_ranks = |report: &rcomm_analyzer::Report| -> Vec<(Code, Vec<u32>)> {
        let findings = report.findings.iter();
        findings
            .map(|finding| (finding.code, finding.culprit_ranks.clone()))
            .collect()
    };
    assert_eq!(codes_and_ranks(&report), codes_and_ranks(&expected));
    assert_eq!(report.verdict, expected.verdict);
    // Each operation counts once, also in what the live views show.
    assert_eq!(report.input.entries, expected.input.entries);
    let snapshot = live_snapshot(&job);
    assert_eq!(snapshot.report.input.entries, expected.input.entries);
    for view in snapshot.ranks.iter() {
        assert_eq!(view.dumps.len(), 2, "rank {}", view.rank);
        let counted: Vec<Recorder> = view.counted().map(|dump| dump.recorder).collect();
        assert_eq!(counted, [Recorder::Rcomm], "rank {}", view.rank);
    }
}

/// The snapshot that `rcomm-top` and `rcomm-web` show of a job's rings.
fn live_snapshot(job: &Job) -> Snapshot {
    try_live_snapshot(job).unwrap()
}

/// Works as [`live_snapshot`], but returns `None` if there is nothing to show yet.
fn try_live_snapshot(job: &Job) -> Option<Snapshot> {
    let mut source = RingSource::new(job.folder().join("rings"), None);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let at = Moment {
        elapsed: Duration::ZERO,
        wall_ns: now.as_nanos() as i64,
    };
    let poll = source.poll(Instant::now() + Duration::from_secs(60));
    let mut live = Live::new(LiveOptions::default(), analyze, vec![source.name()]);
    live.observe(0, Ok(poll.ok()?), at);
    live.refresh(at)
}

#[test]
fn a_hang_in_a_replayed_graph_is_shown_by_the_plug_in_while_it_lasts() {
    let job = start("replay_hung", |_, command| {
        profiled(command);
        command
            .env("RCOMM_TIMEOUT_MS", "60000")
            .env("RCOMM_INIT_TIMEOUT_MS", "60000");
    });
    // Both records of each rank are read. The program's own shows no pending operation.
    let report = wait_until("the hang in the records of the ranks", || {
        let snapshot = try_live_snapshot(&job)?;
        let is_stuck = snapshot.report.verdict == Verdict::Stuck;
        is_stuck.then(|| snapshot.report.clone())
    });
    let first = &report.findings[0];
    assert_eq!(first.code, Code::E101, "{first:?}");
    assert_eq!(first.culprit_ranks, [CULPRIT], "{first:?}");
    assert!(first.sentence.contains("graph replays"), "{first:?}");
    let has_pending = |dump: &Dump| {
        let pending = [EntryState::Scheduled, EntryState::Started];
        let mut entries = dump.entries.iter();
        entries.any(|entry| pending.contains(&entry.state))
    };
    for dump in rings(&job) {
        let rank = dump.identity.rank;
        let is_shown = dump.recorder == Recorder::NcclProfiler && rank != Some(CULPRIT);
        assert_eq!(has_pending(&dump), is_shown, "rank {rank:?}");
    }
}

#[test]
fn every_kind_of_operation_runs_with_the_plug_in_and_leaves_none_open() {
    for scenario in ["lists", "graph", "split", "streams"] {
        let (job, _) = run(scenario, |_, command| profiled(command));
        // Nothing was pending at the exit, so the plug-in has removed its rings, as the program's recorder has.
        let left: Vec<_> = rings(&job)
            .into_iter()
            .filter(|dump| dump.recorder == Recorder::NcclProfiler)
            .collect();
        assert_eq!(left.len(), 0, "{scenario}");
    }
}
