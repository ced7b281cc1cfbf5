//! Every code that a report can have is reported for some generated job. Errors and warnings, except `W150`, must
//! accuse only ranks at fault.

use crate::tally::{roots, summary_of, truth};
use crate::{judge, warnings};
use rcomm_analyzer::logs::{self, Attempt, Event, Fact, Log};
use rcomm_analyzer::source::{Liveness, Observation, Poll, Seen};
use rcomm_analyzer::{
    Analysis, Code, Live, LiveOptions, Moment, Policy, Report, Severity, analyze,
};
use rcomm_recorder::model::{LinkEnd, PeerLink, Rank};
use rcomm_recorder::publish::RingReader;
use rcomm_tests::generator::{Damage, Job, Kind, Random, Spec};
use std::collections::BTreeSet;
use std::time::Duration;

/// The cause that makes the analysis report each code.
const MADE_BY: &[(Code, Cause)] = &[
    (Code::E101, Cause::Fault(Kind::Stuck)),
    (Code::E102, Cause::Fault(Kind::Crash)),
    (Code::E103, Cause::Fault(Kind::Skip)),
    (Code::E104, Cause::Fault(Kind::Extra)),
    (Code::E105, Cause::Fault(Kind::Members)),
    (Code::E110, Cause::Fault(Kind::Op)),
    (Code::E111, Cause::Fault(Kind::Dtype)),
    (Code::E112, Cause::Fault(Kind::Size)),
    (Code::E113, Cause::Fault(Kind::Swap)),
    (Code::E114, Cause::Fault(Kind::Splits)),
    (Code::E120, Cause::Fault(Kind::LostMessage)),
    (Code::E121, Cause::Fault(Kind::MessageSize)),
    (Code::E130, Cause::Fault(Kind::Detour)),
    (Code::E135, Cause::Fault(Kind::Fabric)),
    (Code::E140, Cause::Fault(Kind::Stalled)),
    (Code::E150, Cause::Fault(Kind::Dead)),
    (Code::E151, Cause::Stop),
    (Code::E152, Cause::UnreachableInLog),
    (Code::E152, Cause::LinksSilent),
    (Code::E153, Cause::StoreSilent),
    (Code::W150, Cause::Silence),
    (Code::W160, Cause::Fault(Kind::ShortRing)),
    (Code::W220, Cause::Fault(Kind::SlowHost)),
    (Code::W230, Cause::Fault(Kind::Uneven)),
    (Code::W240, Cause::Fault(Kind::Tiny)),
    (Code::W250, Cause::Fault(Kind::NearTimeout)),
    (Code::W260, Cause::Fault(Kind::Clocks)),
    (Code::W270, Cause::Fault(Kind::Threads)),
    (Code::W280, Cause::Fault(Kind::Inverted)),
    (Code::W290, Cause::Fault(Kind::BufferedSends)),
    (Code::N300, Cause::Damage(Damage::Stale)),
    (Code::N301, Cause::Damage(Damage::Missing)),
    (Code::N302, Cause::Fault(Kind::Overrun)),
    (Code::N303, Cause::Damage(Damage::MixedVersions)),
    (Code::N304, Cause::Midway),
    (Code::N305, Cause::Nothing),
    (Code::N306, Cause::Fault(Kind::Turns)),
];

/// What makes the analysis report a code.
#[derive(Clone, Copy)]
enum Cause {
    /// An injected fault.
    Fault(Kind),
    /// Damaged records.
    Damage(Damage),
    /// A rank no longer answers a live view.
    Silence,
    /// A signal stops the rank that the others wait for.
    Stop,
    /// The network of the rank that the others wait for is cut.
    LinksSilent,
    /// The store of a job without a fault no longer answers.
    StoreSilent,
    /// The records of a healthy job were taken before its end, and nothing in them says so.
    Midway,
    /// The job has no fault.
    Nothing,
    /// There is no record, but there is the log of a rank that cannot reach another host.
    UnreachableInLog,
}

#[test]
fn every_code_is_reported_for_a_job_that_has_its_cause() {
    let made: BTreeSet<Code> = MADE_BY.iter().map(|&(code, _)| code).collect();
    assert_eq!(
        made,
        Code::ALL.iter().copied().collect(),
        "the codes with a cause in MADE_BY (left) are not all codes (right)"
    );
    for &(code, cause) in MADE_BY {
        let (mut jobs, mut found, mut misses) = (0, 0, Vec::new());
        for seed in 0..150 {
            let Some((job, report)) = job_with(seed, cause) else {
                continue;
            };
            jobs += 1;
            if has_code(&job, &report, code) {
                found += 1;
            } else {
                misses.push(format!(
                    "seed {seed}: {} judged as {}",
                    truth(&job),
                    summary_of(&report)
                ));
            }
            if found == 3 {
                break;
            }
        }
        eprintln!(
            "| {code} {} | found in {found} of {jobs} jobs |",
            code.name()
        );
        assert!(
            found > 0,
            "{code} is not reported for any job:\n{}",
            misses.join("\n")
        );
    }
}

/// The job of this seed with the cause, and its report. `None` if the job has no place for the cause, or if the records
/// do not show it.
fn job_with(seed: u64, cause: Cause) -> Option<(Job, Report)> {
    let hang = |kind: Kind| {
        let mut spec = Spec::random(seed.wrapping_add(13 << 32), 32);
        spec.faults = vec![kind];
        spec.make()
    };
    let job = match cause {
        Cause::Fault(kind @ (Kind::Fabric | Kind::Members)) => hang(kind),
        Cause::Fault(kind) if Kind::HANGS.contains(&kind) => hang(kind),
        Cause::Fault(kind) => warnings::spec(seed, kind).make(),
        Cause::Damage(damage) => {
            let mut job = hang(Kind::Stuck);
            if !job.apply(damage, &mut Random::new(seed)) {
                return None;
            }
            job
        }
        Cause::Stop => {
            let mut job = hang(Kind::Stuck);
            let stopped = job.culprits();
            for dump in &mut job.dumps {
                if dump
                    .identity
                    .rank
                    .is_some_and(|rank| stopped.contains(&rank))
                {
                    dump.identity.reason = RingReader::OWNER_IS_STOPPED.into();
                }
            }
            job
        }
        Cause::LinksSilent => {
            let mut job = hang(Kind::Stuck);
            let cut = job.culprits();
            let ranks = job.dumps.len() as Rank;
            for dump in &mut job.dumps {
                let this_rank = dump.identity.rank.unwrap_or_default();
                let taken = dump.identity.dump_time_ns;
                let others = (0..ranks).filter(|&other| other != this_rank);
                let link = |other| {
                    let crosses = cut.contains(&this_rank) != cut.contains(&other);
                    PeerLink {
                        heard_ns: taken - if crosses { 9_000_000_000 } else { 300_000_000 },
                        sampled_ns: taken,
                        interval_ms: 1_000,
                        ..PeerLink::to(LinkEnd::Rank(other))
                    }
                };
                dump.peers = others.map(link).collect();
            }
            job
        }
        Cause::StoreSilent => {
            let mut spec = Spec::random(seed, 16);
            spec.recording.recorder = rcomm_recorder::publish::Recorder::Rcomm;
            let mut job = spec.make();
            for dump in &mut job.dumps {
                let beat = dump.status.as_ref().map_or(0, |status| status.heartbeat_ns);
                dump.peers.push(PeerLink {
                    waited_since_ns: beat - 5_000_000_000,
                    ..PeerLink::to(LinkEnd::Store)
                });
            }
            let report = judge(&job);
            return Some((job, report));
        }
        Cause::Midway | Cause::Nothing => {
            let mut spec = Spec::random(seed, 16);
            if matches!(cause, Cause::Midway) {
                let share = Random::new(seed).between(30, 95) as f64 / 100.0;
                spec.recording.taken_at = Some(share);
            }
            let job = spec.make();
            let report = judge(&job);
            return Some((job, report));
        }
        Cause::UnreachableInLog => {
            let job = Spec::random(seed, 16).make();
            let rank = Random::new(seed).between(0, u64::from(job.spec.world()) - 1) as Rank;
            let log = Log {
                path: "job.log".into(),
                lines: 1,
                attempts: vec![Attempt {
                    world_size: None,
                    facts: vec![Fact {
                        line: 1,
                        rank: Some(rank),
                        event: Event::Unreachable {
                            peer: format!("10.0.0.{}", seed % 200),
                            status: "No route to host".into(),
                        },
                    }],
                }],
                ..Log::default()
            };
            let mut report = Analysis::new(Policy::default()).finish();
            logs::join(&mut report, &[log]);
            return Some((job, report));
        }
        Cause::Silence => {
            let mut spec = Spec::random(seed, 16);
            spec.recording.recorder = rcomm_recorder::publish::Recorder::Rcomm;
            let job = spec.make();
            let report = fall_silent(&job)?;
            return Some((job, report));
        }
    };
    let shows_fault = !job.faults.is_empty() && job.decidable;
    let report = judge(&job);
    shows_fault.then_some((job, report))
}

/// Whether the report has the code. An error must be the first that no other finding causes, and name at least one
/// rank, all of them at fault; or no rank if none is at fault. A warning, except `W150`, must name only ranks at fault.
/// A note must be among the problems of the input.
fn has_code(job: &Job, report: &Report, code: Code) -> bool {
    let guilty = job.culprits();
    match code.severity() {
        Severity::Error => roots(report).next().is_some_and(|first| {
            first.code == code
                && first.culprit_ranks.is_empty() == guilty.is_empty()
                && first.culprit_ranks.iter().all(|rank| guilty.contains(rank))
        }),
        Severity::Warning => report.findings.iter().any(|finding| {
            let mut named = finding.culprit_ranks.iter();
            finding.code == code && (code == Code::W150 || named.all(|rank| guilty.contains(rank)))
        }),
        Severity::Note => report.problems.iter().any(|problem| problem.code == code),
    }
}

/// The report of a live view that has seen all ranks once, after which one of them no longer answers.
fn fall_silent(job: &Job) -> Option<Report> {
    let judge = |dumps: &[std::sync::Arc<rcomm_recorder::publish::Dump>], policy: &Policy| {
        let dumps: Vec<_> = dumps.iter().map(AsRef::as_ref).collect();
        analyze::<&rcomm_recorder::publish::Dump>(&dumps, policy)
    };
    let mut live = Live::new(LiveOptions::default(), judge, vec!["ranks".into()]);
    let at = |seconds: u64| Moment {
        elapsed: Duration::from_secs(seconds),
        wall_ns: job.dumps[0].identity.dump_time_ns + seconds as i64 * 1_000_000_000,
    };
    let poll_of = |see: &dyn Fn(Rank) -> Seen| Poll {
        observations: (0..job.dumps.len() as Rank)
            .map(|rank| Observation {
                rank,
                part: 0,
                liveness: Liveness::Unknown,
                seen: see(rank),
            })
            .collect(),
        ..Poll::default()
    };
    let see_all = |rank: Rank| Seen::Changed(Box::new(job.dumps[rank as usize].clone()));
    live.observe(0, Ok(poll_of(&see_all)), at(1));
    live.refresh(at(1))?;
    let see_all_but_one = |rank: Rank| match rank {
        0 => Seen::Failed("connection refused".into()),
        _ => Seen::Unchanged {
            heartbeat_ns: 0,
            as_of_ns: 0,
        },
    };
    live.observe(0, Ok(poll_of(&see_all_but_one)), at(30));
    Some(live.refresh(at(30))?.report.as_ref().clone())
}
