//! What is warned of: late ranks and hosts, short rings, uneven and tiny operations, and the like.

use crate::tally::{summary_of, truth};
use crate::{judge, seeds};
use rcomm_analyzer::Code;
use rcomm_recorder::publish::Recorder;
use rcomm_tests::generator::{Exchange, Kind, Spec, Window};

/// A job in which this would be warned of, if the seed has a place for it.
pub(crate) fn spec(seed: u64, kind: Kind) -> Spec {
    let mut spec = Spec::random(seed.wrapping_add(11 << 32), 32);
    spec.steps = 6;
    spec.micro_batches = 4;
    spec.recording.window = Window::Whole;
    match kind {
        Kind::Stalled | Kind::ShortRing | Kind::Dropped | Kind::SlowHost => {
            spec.recording.recorder = Recorder::Rcomm;
        }
        Kind::Turns => spec.steps = 24,
        Kind::Uneven => (spec.dp, spec.ep, spec.pp) = (4, 4, 1),
        Kind::Overrun => {
            spec.recording.recorder = Recorder::Nccl;
            spec.recording.starts = false;
            spec.recording.window = Window::Last;
            spec.recording.run_ahead = 400;
        }
        Kind::Threads => spec.recording.frames = true,
        Kind::Inverted => spec.recording.recorder = Recorder::Nccl,
        Kind::BufferedSends => {
            spec.recording.recorder = Recorder::Nccl;
            spec.recording.batched = false;
            spec.pp = spec.pp.max(2);
            spec.mix.exchange = Exchange::InOrder;
        }
        Kind::Clocks => {
            spec.recording.recorder = Recorder::Nccl;
            spec.recording.starts = false;
            spec.recording.notice_ms = 100;
        }
        _ => {}
    }
    spec.faults = vec![kind];
    spec
}

#[test]
fn what_costs_time_or_room_is_warned_of() {
    for &kind in Kind::WARNINGS {
        let (mut jobs, mut misses) = (0, Vec::new());
        for seed in seeds(12) {
            let job = spec(seed, kind).make();
            if job.faults.is_empty() || !job.decidable {
                continue;
            }
            jobs += 1;
            let report = judge(&job);
            let told_it = report.findings.iter().any(|one| {
                kind.codes().contains(&one.code)
                    && one
                        .culprit_ranks
                        .iter()
                        .all(|rank| job.culprits().contains(rank))
            });
            if !told_it {
                misses.push(format!(
                    "seed {seed}: {} judged as {}",
                    truth(&job),
                    summary_of(&report)
                ));
            }
        }
        eprintln!(
            "| {kind:?} | {jobs} | {} | {} | 0 | 0 | |",
            jobs - misses.len(),
            misses.len()
        );
        assert!(
            jobs > 0 && misses.is_empty(),
            "{kind:?}: {jobs} jobs\n{}",
            misses.join("\n")
        );
    }
}

#[test]
fn who_is_late_in_every_step_is_named() {
    let (mut jobs, mut misses) = (0, Vec::new());
    for seed in seeds(25) {
        let mut spec = Spec::random(seed.wrapping_add(4 << 32), 32);
        spec.steps = 6;
        spec.recording.window = Window::Whole;
        spec.faults = vec![Kind::Slow];
        let job = spec.make();
        if job.faults.is_empty() || !job.decidable {
            continue;
        }
        jobs += 1;
        let report = judge(&job);
        let named = report
            .findings
            .first()
            .is_some_and(|one| one.code == Code::W220 && one.culprit_ranks == job.culprits());
        if !named {
            misses.push(format!(
                "seed {seed}: {} judged as {}",
                truth(&job),
                summary_of(&report)
            ));
        }
    }
    eprintln!("stragglers: {} of {jobs} named", jobs - misses.len());
    assert!(misses.len() * 100 <= jobs, "{}", misses.join("\n"));
}

/// Where each rank of a late host comes with another of them, no rank is later than the rest.
#[test]
fn a_host_that_is_late_as_a_whole_is_named_though_none_of_its_ranks_costs_anything_alone() {
    let job = spec(2288, Kind::SlowHost).make();
    let report = judge(&job);
    let named = report.findings.first();
    let named = named.map(|one| (one.code, one.culprit_ranks.clone()));
    let expected = Some((Code::W220, job.culprits()));
    assert_eq!(named, expected, "{}", summary_of(&report));
}
