//! Tests that the plug-in's rings are joined with NCCL's own reports on the same processes.

use crate::faults::with_one;
use crate::job::{Job, Until};
use rcomm_analyzer::ras::{self, RasReport};
use rcomm_analyzer::{Code, Policy, Verdict, analyze};
use rcomm_recorder::publish::Dump;

/// A report of NCCL's RAS, as `ncclras -f json` prints it, on the processes of these rings. RAS considers rank `dead`
/// as dead.
fn ras_report(dumps: &[Dump], dead: u32) -> RasReport {
    let member = |dump: &Dump, state: &str| {
        let rank = dump.identity.rank.expect("a rank");
        format!(
            r#"{{"rank": {rank}, "host": "{}", "pid": {}, "cuda_dev": {rank}, "nvml_dev": {rank}, "status": {state}}}"#,
            dump.identity.host, dump.identity.pid
        )
    };
    let good = r#"{"init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false}"#;
    let lost = r#"{"unresponsive": true, "considered_dead": true}"#;
    let is_dead = |dump: &&Dump| dump.identity.rank == Some(dead);
    let living = dumps.iter().filter(|dump| !is_dead(dump));
    let living: Vec<String> = living.map(|dump| member(dump, good)).collect();
    let missing: Vec<String> = (dumps.iter().filter(is_dead))
        .map(|dump| member(dump, lost))
        .collect();
    // The size is not that of the world, so only host and process id lead to the rank.
    let text = format!(
        r#"{{"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [{{
            "hash": "0xabc", "size": 9, "ranks_count": {}, "missing_ranks_count": 1,
            "ranks": [{}], "missing_ranks": [{}]}}]}}"#,
        living.len(),
        living.join(","),
        missing.join(",")
    );
    RasReport::parse(text.as_bytes()).expect("a report")
}

#[test]
fn a_process_in_a_report_of_ras_is_found_by_its_ring() {
    let last = with_one(2, Until::NotCalled, Until::Running);
    let job = Job::start(6, last, |_| {});
    let dumps = job.dumps();
    let policy = Policy {
        world_size: Some(4),
        ..Policy::default()
    };
    let mut report = analyze(&dumps, &policy);
    ras::join(&mut report, [&ras_report(&dumps, 2)]);
    let first = &report.findings[0];
    assert_eq!((first.code, &*first.culprit_ranks), (Code::E101, &[2][..]));
    let pid = job.ranks[2].0.id();
    assert!(
        first
            .sentence
            .contains(&format!("NCCL RAS: its process {pid} on ")),
        "{}",
        first.sentence
    );

    // If nothing is wrong in the rings, NCCL's report alone names the rank.
    let job = Job::start(6, with_one(0, Until::Done, Until::Done), |_| {});
    let dumps = job.dumps();
    let mut report = analyze(&dumps, &policy);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    ras::join(&mut report, [&ras_report(&dumps, 1)]);
    assert_eq!(report.verdict, Verdict::Stuck);
    assert_eq!(report.findings[0].code, Code::E150);
    assert_eq!(report.findings[0].culprit_ranks, [1]);
}
