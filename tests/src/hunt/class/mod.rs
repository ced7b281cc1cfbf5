//! Classes of jobs and of evidence. A class changes the job that its seed draws, and what is left of it.

mod attempts;
mod logs;

pub(super) use logs::read as read_log;

use super::Case;
use super::job::{Backend, Fault, Job, MS, Records, SECOND, Wrong};
use super::run::History;
use crate::generator::Random;

/// What the jobs of some seeds have in common. Each class has seeds of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Class {
    /// Any job.
    Any,
    /// The records of two jobs lie in one folder: of an earlier one, and of the one that is judged.
    Attempts,
    /// PyTorch's and the launcher's logs, alone or beside the dumps of some ranks.
    Logs,
    /// The dumps that rcomm's runtime writes while the ranks give up, one after another.
    Dumps,
    /// One rank, or half of the ranks, differs from the others in an operation, its size, type or root, or the order.
    Odds,
    /// Messages and collectives in batches.
    Batches,
    /// Nothing is wrong: the job is well, slow, over or terminated.
    Well,
    /// 32 to 64 ranks in a mesh.
    Meshes,
}

impl Class {
    /// All classes.
    pub const ALL: [Self; 8] = [
        Self::Any,
        Self::Attempts,
        Self::Logs,
        Self::Dumps,
        Self::Odds,
        Self::Batches,
        Self::Well,
        Self::Meshes,
    ];

    /// What distinguishes the random numbers of the class from those of others; 0 for [`Self::Any`].
    pub(super) const fn salt(self) -> u64 {
        (self as u64) << 40
    }

    /// The job of this seed.
    pub(super) fn job(self, seed: u64) -> Job {
        let mut job = Job::draw(seed ^ self.salt());
        let random = &mut Random::new(seed ^ self.salt() ^ 0x636c_6173);
        match self {
            Self::Any | Self::Attempts => {}
            Self::Logs => {
                job.backend = *random.pick(&[Backend::Nccl, Backend::Nccl, Backend::Gloo]);
                job.records = Records::Dumps;
                self.draw_faults(&mut job, random, 0.9);
            }
            Self::Dumps => {
                (job.backend, job.records) = (Backend::Cpu, Records::Own);
                self.draw_faults(&mut job, random, 1.0);
            }
            Self::Odds => odds(&mut job, random),
            Self::Batches => {
                job.batches = true;
                job.is_sharded = job.dp > 1 && random.chance(0.6);
                job.cancelled_at = None;
                let wrong = *random.pick(&[
                    Wrong::SkipsBatch,
                    Wrong::SkipsBatch,
                    Wrong::Hangs,
                    Wrong::Stopped,
                    Wrong::Killed,
                ]);
                let fault = Job::fault(random, job.backend, job.world());
                job.faults = vec![Fault { wrong, ..fault }];
            }
            Self::Well => {
                job.faults.clear();
                if random.chance(0.5) {
                    let rank = random.between(0, u64::from(job.world()) - 1) as u32;
                    job.slow = Some((rank, random.between(3, 9) as i64));
                }
                let cancelled = random.chance(0.4);
                job.cancelled_at = cancelled.then(|| random.between(5, 99) as f64 / 100.0);
            }
            Self::Meshes => {
                (job.tp, job.pp, job.dp) = loop {
                    let tp = *random.pick(&[1, 2, 4, 8]);
                    let pp = *random.pick(&[1, 2, 4]);
                    let dp = *random.pick(&[2, 3, 4, 8, 16]);
                    let is_mesh = [tp, pp, dp].iter().filter(|&&size| size > 1).count() > 1;
                    if is_mesh && (32..=64).contains(&(tp * pp * dp)) {
                        break (tp, pp, dp);
                    }
                };
                job.is_sharded &= job.dp > 1;
                self.draw_faults(&mut job, random, 1.0);
            }
        }
        job.set_groups();
        job
    }

    /// Gives the job one fault, with this probability; else its launcher is asked to end it.
    fn draw_faults(self, job: &mut Job, random: &mut Random, probability: f64) {
        (job.faults, job.cancelled_at) = (Vec::new(), None);
        if random.chance(probability) {
            job.faults
                .push(Job::fault(random, job.backend, job.world()));
        } else {
            job.cancelled_at = Some(random.between(20, 95) as f64 / 100.0);
        }
    }

    /// Changes what has happened in a job of this class.
    pub(super) fn change_history(self, history: &mut History, random: &mut Random) {
        if self == Self::Dumps {
            give_up(history, random);
        }
    }

    /// Adds to the records of a case of this class, or replaces them.
    pub(super) fn change_records(self, case: &mut Case, random: &mut Random) {
        match self {
            Self::Attempts => attempts::add_earlier(case, random),
            Self::Logs => logs::write(case, random),
            _ => {}
        }
    }
}

/// Changes the job so that one rank, or half of the ranks, differs from the others in one call.
fn odds(job: &mut Job, random: &mut Random) {
    (job.backend, job.records) = *random.pick(&[
        (Backend::Nccl, Records::Dumps),
        (Backend::Nccl, Records::Rings),
        (Backend::Cpu, Records::Rings),
        (Backend::Cpu, Records::Own),
    ]);
    (job.tp, job.pp) = (1, 1);
    job.dp = *random.pick(&[2, 3, 4, 6, 8, 16]);
    job.broadcasts = true;
    job.is_sharded = random.chance(0.3);
    job.cancelled_at = None;
    let wrong = *random.pick(&[
        Wrong::OtherOperation,
        Wrong::OtherSize,
        Wrong::OtherType,
        Wrong::OtherRoot,
        Wrong::Swaps,
    ]);
    let world = job.world();
    let first = Fault {
        wrong,
        ..Job::fault(random, job.backend, world)
    };
    let (by_half, with_first) = (random.chance(0.5), random.chance(0.5));
    let is_odd = |rank: &u32| {
        let is_second = match by_half {
            true => *rank >= world / 2,
            false => rank % 2 == 1,
        };
        is_second != with_first
    };
    job.faults = match world.is_multiple_of(2) && random.chance(0.35) {
        true => (0..world)
            .filter(is_odd)
            .map(|rank| Fault { rank, ..first })
            .collect(),
        false => vec![first],
    };
}

/// Makes every rank write a dump when one of its operations fails, before its program gets the error. In half of the
/// jobs the other ranks write one, too, once they hear of the first failure.
fn give_up(history: &mut History, random: &mut Random) {
    let failed = |life: &super::run::Life| life.failures.first().map(|failure| failure.at);
    let first = history.lives.iter().filter_map(failed).min();
    let is_noticed = random.chance(0.5);
    for life in &mut history.lives {
        let own = failed(life).map(|at| at + random.between(1, 8) as i64 * MS);
        let noticed = first.filter(|_| is_noticed);
        let noticed = noticed.map(|at| at + random.between(5, 400) as i64 * MS);
        let written = own.into_iter().chain(noticed).min();
        let can_write = |at: &i64| {
            life.gone.is_none_or(|gone| gone.at > *at)
                && life.stopped.is_none_or(|stopped| stopped > *at)
        };
        life.dumped = written.filter(can_write);
    }
    history.last += SECOND;
}
