//! Faults of messages and hosts, class by class: halves of messages that do not match, and hosts that are gone. Each
//! class is also judged with rings so short that operations issued ahead of the device may fill them.

use crate::seeds;
use crate::tally::{RIGHT, Tally};
use rcomm_recorder::publish::Recorder;
use rcomm_tests::generator::{Exchange, Job, Kind, Random, Spec, Window};

/// How much of the job the rings hold.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Rings {
    /// The whole job, or several steps of it.
    Long,
    /// So little that operations issued ahead may fill the rings.
    Short,
}

/// A job of the class, decidable or not, if this seed gives one.
pub(crate) fn job(seed: u64, kind: Kind, rings: Rings) -> Option<Job> {
    let mut spec = Spec::random(seed.wrapping_add((40 + kind as u64) << 32), 32);
    let mut random = Random::new(seed ^ 0xc1a5_5e50);
    spec.recording.per_host = *random.pick(&[2, 4, 8]);
    if spec.recording.recorder == Recorder::NativeGloo {
        spec.recording.recorder = Recorder::Hook;
    }
    let is_of_messages = Kind::MESSAGES.contains(&kind);
    if is_of_messages && spec.pp < 2 {
        spec.pp = *random.pick(&[2, 4]);
    }
    // Three pipelines show which of the two ends deviates.
    if is_of_messages && spec.tp * spec.dp < 3 {
        spec.dp = 4;
        spec.ep = 1;
    }
    spec.mix.exchange = match kind {
        Kind::SendFirst | Kind::AllSendFirst => Exchange::InOrder,
        Kind::Lopsided => *random.pick(&[Exchange::Paired, Exchange::Joint]),
        _ => *random.pick(&[
            Exchange::None,
            Exchange::None,
            Exchange::Paired,
            Exchange::Joint,
            Exchange::InOrder,
        ]),
    };
    if rings == Rings::Long {
        spec.recording.window = *random.pick(&[Window::Whole, Window::Long]);
        spec.steps = 6;
    }
    if rings == Rings::Short {
        spec.recording.recorder = Recorder::Nccl;
        spec.recording.window = Window::Short;
        spec.recording.run_ahead = *random.pick(&[0, 8, 40, 100]);
        spec.steps = 6;
        spec.micro_batches = 4;
    }
    spec.faults = vec![kind];
    let job = spec.make();
    (!job.faults.is_empty() && !job.blocked.is_empty()).then_some(job)
}

fn tally(kind: Kind, rings: Rings) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds(24) {
        if let Some(job) = job(seed, kind, rings).filter(|job| job.decidable) {
            tally.add(seed, &job, 0.5);
        }
    }
    tally
}

#[test]
fn faults_of_messages_and_hosts_are_diagnosed() {
    for &kind in Kind::MESSAGES.iter().chain(Kind::HOSTS) {
        tally(kind, Rings::Long).assert_right(&format!("{kind:?}"), RIGHT);
    }
}

#[test]
fn faults_of_messages_and_hosts_in_short_rings_are_diagnosed_or_left_open() {
    for &kind in Kind::MESSAGES.iter().chain(Kind::HOSTS) {
        tally(kind, Rings::Short).assert_right_or_open(&format!("{kind:?}, short rings"), RIGHT);
    }
}
