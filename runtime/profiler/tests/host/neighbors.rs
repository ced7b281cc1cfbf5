//! Of several processes that use one device, each has a ring of its own, and none harms another's ring.

use crate::faults::{all, first, with_one};
use crate::job::{Job, Until, dumps};
use crate::life::run_part;
use rcomm_analyzer::{Code, Policy, Verdict, analyze};
use rcomm_recorder::publish::Dump;
use std::collections::BTreeMap;

#[test]
fn two_jobs_on_one_device_are_recorded_and_judged_apart() {
    let directory = tempfile::tempdir().expect("a folder");
    let start = |job: &'static str, last| {
        Job::start(6, last, |command| {
            command
                .env("TORCHELASTIC_RUN_ID", job)
                .env("CUDA_VISIBLE_DEVICES", "0")
                .env("RCOMM_RING_DIR", directory.path());
        })
    };
    let _healthy = start("healthy", all(Until::Done));
    let _stuck = start("stuck", with_one(2, Until::NotCalled, Until::Running));
    let mut jobs: BTreeMap<String, Vec<Dump>> = BTreeMap::new();
    for dump in dumps(directory.path()) {
        let job = dump.identity.job.clone();
        jobs.entry(job).or_default().push(dump);
    }
    let judge = |job: &str| {
        assert_eq!(jobs[job].len(), 4, "{job}");
        let policy = Policy {
            world_size: Some(4),
            ..Policy::default()
        };
        analyze(&jobs[job], &policy)
    };
    assert_eq!(judge("healthy").verdict, Verdict::Healthy);
    let report = judge("stuck");
    let (code, culprits, sentence) = first(&report);
    assert_eq!((code, culprits), (Code::E101, &[2][..]), "{sentence}");
}

#[test]
fn a_process_that_inherits_a_rank_records_nothing_and_the_rank_s_ring_stays() {
    let job = Job::start(6, all(Until::Done), |_| {});
    let before = job.dumps();
    // This child of the rank has the rank's environment and uses NCCL itself, as a data loader or an evaluation may do.
    let output = run_part("silent-6", job.directory.path(), |command| {
        command
            .env("RANK", "2")
            .env("WORLD_SIZE", "4")
            .env("TORCHELASTIC_RUN_ID", "plain")
            .env("RCOMM_NCCL_EVENTS", "channels,steps,256");
    });
    assert!(output.status.success(), "{output:?}");
    let errors = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = errors
        .lines()
        .filter(|line| line.contains("profiler plug-in"))
        .collect();
    let [line] = lines[..] else {
        panic!("not exactly one line: {errors}");
    };
    assert!(line.contains("records nothing"), "{line}");
    assert!(line.contains("rank 2"), "{line}");
    let after = job.dumps();
    let processes = |dumps: &[Dump]| -> Vec<(Option<u32>, u32, usize)> {
        let process = |dump: &Dump| (dump.identity.rank, dump.identity.pid, dump.entries.len());
        dumps.iter().map(process).collect()
    };
    assert_eq!(processes(&after), processes(&before));
}
