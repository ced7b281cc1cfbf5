//! Simulates a job and its records, for demonstrations, tests and measurements of scale.
//!
//! Every rank runs the same program: in each step an all-gather and a reduce-scatter over its tensor-parallel group
//! (the ranks of its host), a barrier of all ranks every eighth step, and an all-reduce over its data-parallel group
//! (one rank of every host). A fault occurs in one step; only a straggler is late in all steps. How far each rank gets
//! then follows from the rules of blocking operations: a rank issues its next operation when all members have entered
//! its previous one.

mod progress;
mod record;

use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use std::sync::Arc;

/// The fault of a simulated job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "args", derive(clap::ValueEnum))]
pub enum Situation {
    /// Nothing is wrong.
    Healthy,
    /// One rank never issues an all-reduce that its group waits in.
    #[cfg_attr(feature = "args", value(name = "stuck"))]
    StuckRank,
    /// One rank enters the barrier of all ranks before the collective of its smaller group, the others after theirs.
    Deadlock,
    /// One rank issues another operation than its group.
    Mismatch,
    /// The ranks of one host arrive late in every step.
    Straggler,
    /// One rank's record can no longer be read; the job runs on.
    #[cfg_attr(feature = "args", value(name = "silent"))]
    SilentRank,
}

impl Situation {
    /// Every situation with its name on a command line.
    pub const ALL: &'static [(Self, &'static str)] = &[
        (Self::Healthy, "healthy"),
        (Self::StuckRank, "stuck"),
        (Self::Deadlock, "deadlock"),
        (Self::Mismatch, "mismatch"),
        (Self::Straggler, "straggler"),
        (Self::SilentRank, "silent"),
    ];

    /// The situation's name on a command line.
    pub fn name(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(situation, _)| *situation == self)
            .map_or("", |&(_, name)| name)
    }
}

const MS: i64 = 1_000_000;
/// The duration of one step of the program, ns.
const STEP_NS: i64 = 200 * MS;
/// The time between two slots of a step, ns.
const SLOT_NS: i64 = 50 * MS;
/// The slots of one step, one for each operation: all-gather, reduce-scatter, barrier (or nothing), all-reduce.
const SLOTS: u64 = 4;
/// The slot of each operation in a step.
const ALL_GATHER: u64 = 0;
const REDUCE_SCATTER: u64 = 1;
const BARRIER: u64 = 2;
const ALL_REDUCE: u64 = 3;
/// The delay of the ranks of the straggling host, ns.
const LATE_NS: i64 = 4 * MS;

/// A simulated job.
#[derive(Clone, Debug)]
pub struct Simulation {
    situation: Situation,
    ranks: u32,
    per_host: u32,
    start_ns: i64,
    window: usize,
    job: String,
    members: Arc<Members>,
}

/// The members of every group, shared by all records.
#[derive(Debug)]
struct Members {
    world: Arc<[Rank]>,
    /// The groups of the hosts, by host.
    tensor_parallel: Vec<Arc<[Rank]>>,
    /// The groups with one rank of each host, by rank on the host.
    data_parallel: Vec<Arc<[Rank]>>,
}

/// One operation of the program; step and slot determine everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ProgramOp {
    step: u64,
    slot: u64,
}

impl Simulation {
    /// The step of the fault. A multiple of eight, so that it has a barrier.
    pub const FAULT_STEP: u64 = 48;

    /// A job of `ranks` ranks, but at least two, that began at `start_ns` (wall clock, ns since the epoch). It has two
    /// hosts or more, each with the same number of ranks, at most eight.
    pub fn new(situation: Situation, ranks: u32, start_ns: i64) -> Self {
        let ranks = ranks.max(2);
        let per_host = (1..=8u32)
            .rev()
            .find(|n| ranks.is_multiple_of(*n) && ranks / n >= 2)
            .unwrap_or(1);
        Self {
            situation,
            ranks,
            per_host,
            start_ns,
            window: 256,
            job: format!("demo-{}", situation.name()),
            members: Arc::new(Members {
                world: (0..ranks).collect(),
                tensor_parallel: (0..ranks / per_host)
                    .map(|host| (host * per_host..(host + 1) * per_host).collect())
                    .collect(),
                data_parallel: (0..per_host)
                    .map(|local| (local..ranks).step_by(per_host as usize).collect())
                    .collect(),
            }),
        }
    }

    /// Keeps at most the newest `window` operations of each rank, as a small ring would.
    pub fn with_window(mut self, window: usize) -> Self {
        self.window = window.max(1);
        self
    }

    /// The same job with another time of its beginning, ns since the epoch.
    pub fn begun_at(mut self, start_ns: i64) -> Self {
        self.start_ns = start_ns;
        self
    }

    /// The number of ranks of the job.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The number of ranks on a host.
    pub fn ranks_per_host(&self) -> u32 {
        self.per_host
    }

    /// The name of the job.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The rank at fault; of [`Situation::Straggler`] one rank of the late host. [`Situation::Healthy`] has no fault.
    pub fn culprit(&self) -> Rank {
        self.ranks / 2 + (self.per_host - 1).min(5)
    }

    /// When the step begins in which the fault occurs, ns since the epoch.
    pub fn fault_ns(&self) -> i64 {
        self.start_ns + Self::FAULT_STEP as i64 * STEP_NS
    }

    /// Whether this rank's record can be read at `now_ns`.
    pub fn answers(&self, rank: Rank, now_ns: i64) -> bool {
        self.situation != Situation::SilentRank
            || rank != self.culprit()
            || now_ns < self.fault_ns()
    }

    /// The records of all ranks as of `now_ns`, ascending by rank. The record of a rank that no longer
    /// answers is the last that it gave.
    pub fn dumps_at(&self, now_ns: i64) -> Vec<Dump> {
        self.each_at(now_ns).collect()
    }

    /// The records of [`Self::dumps_at`], each made when it is taken.
    pub fn each_at(&self, now_ns: i64) -> impl Iterator<Item = Dump> + '_ {
        let progress = self.progress(now_ns);
        (0..self.ranks).map(move |rank| {
            let now = if self.answers(rank, now_ns) {
                now_ns
            } else {
                self.fault_ns() - 1
            };
            self.dump(rank, now, progress.as_ref())
        })
    }

    fn host_of(&self, rank: Rank) -> u32 {
        rank / self.per_host
    }

    fn hosts(&self) -> u32 {
        self.ranks / self.per_host
    }

    /// The slots of the operations of `rank` in one step, in the order in which it issues them.
    fn slots(&self, rank: Rank, step: u64) -> &'static [u64] {
        let is_out_of_order = self.situation == Situation::Deadlock
            && step == Self::FAULT_STEP
            && rank == self.culprit();
        if is_out_of_order {
            &[ALL_GATHER, BARRIER, REDUCE_SCATTER, ALL_REDUCE]
        } else if step.is_multiple_of(8) {
            &[ALL_GATHER, REDUCE_SCATTER, BARRIER, ALL_REDUCE]
        } else {
            &[ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE]
        }
    }

    /// When `operation` is due without any delay, ns since the epoch.
    fn nominal_ns(&self, operation: ProgramOp) -> i64 {
        self.start_ns + operation.step as i64 * STEP_NS + operation.slot as i64 * SLOT_NS
    }

    /// When `rank` issues `operation` if no other rank delays it: the nominal time, some jitter, and the delay of a
    /// straggler; ns since the epoch.
    fn arrival_ns(&self, rank: Rank, operation: ProgramOp) -> i64 {
        let mut x = (u64::from(rank) << 32) ^ (operation.step * SLOTS + operation.slot);
        // The multiplications of splitmix64's finalizer: the jitter is the same in every run.
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let jitter = (x >> 40) as i64 % 200_000;
        self.nominal_ns(operation) + jitter + self.late_ns(rank)
    }

    /// The delay of a rank of the straggling host, ns; 0 for all other ranks.
    fn late_ns(&self, rank: Rank) -> i64 {
        let is_late = self.situation == Situation::Straggler
            && self.host_of(rank) == self.host_of(self.culprit());
        if is_late { LATE_NS } else { 0 }
    }

    fn members(&self, rank: Rank, slot: u64) -> Arc<[Rank]> {
        let group = self.group_index(rank, slot) as usize;
        match slot {
            BARRIER => self.members.world.clone(),
            ALL_REDUCE => self.members.data_parallel[group].clone(),
            _ => self.members.tensor_parallel[group].clone(),
        }
    }

    /// When `operation` ends in the group of `rank` if all members arrived, ns.
    fn end_ns(&self, rank: Rank, operation: ProgramOp) -> i64 {
        let delay = if self.situation == Situation::Straggler {
            let late_host = self.host_of(self.culprit());
            let has_late_member = operation.slot == BARRIER
                || operation.slot == ALL_REDUCE
                || self.host_of(rank) == late_host;
            if has_late_member { LATE_NS } else { 0 }
        } else {
            0
        };
        let duration = match operation.slot {
            BARRIER => MS,
            ALL_REDUCE => 12 * MS,
            _ => 3 * MS,
        };
        self.nominal_ns(operation) + 200_000 + delay + duration
    }

    /// The index of the group of `rank` among the groups of its kind.
    fn group_index(&self, rank: Rank, slot: u64) -> u32 {
        match slot {
            BARRIER => 0,
            ALL_REDUCE => rank % self.per_host,
            _ => self.host_of(rank),
        }
    }

    fn group_size(&self, slot: u64) -> u32 {
        match slot {
            BARRIER => self.ranks,
            ALL_REDUCE => self.hosts(),
            _ => self.per_host,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::OpType;
    use std::collections::HashSet;

    const LATER_NS: i64 = 30_000 * MS;

    fn unfinished(dump: &Dump) -> Vec<(OpType, u64, u32)> {
        dump.entries
            .iter()
            .filter(|e| !e.retired)
            .map(|e| (e.op, e.collective_seq_id, e.group))
            .collect()
    }

    #[test]
    fn records_are_numbered_without_gaps_in_order_of_issue() {
        for &(situation, _) in Situation::ALL {
            let simulation = Simulation::new(situation, 16, 0).with_window(4000);
            for dump in simulation.dumps_at(simulation.fault_ns() + LATER_NS) {
                let ids: Vec<u64> = dump.entries.iter().map(|e| e.record_id).collect();
                let expected: Vec<u64> = (1..=ids.len() as u64).collect();
                assert_eq!(ids, expected, "{situation:?}");
            }
        }
    }

    #[test]
    fn a_stuck_rank_holds_up_all_others_and_waits_for_none() {
        let simulation = Simulation::new(Situation::StuckRank, 16, 0);
        let dumps = simulation.dumps_at(simulation.fault_ns() + LATER_NS);
        let culprit = simulation.culprit();
        for (rank, dump) in (0..).zip(&dumps) {
            assert_eq!(unfinished(dump).is_empty(), rank == culprit, "rank {rank}");
        }
        let seq = Simulation::FAULT_STEP + 1;
        let member = &dumps[(culprit % 8) as usize];
        assert_eq!(unfinished(member), [(OpType::AllReduce, seq, 2)]);
    }

    #[test]
    fn a_deadlock_leaves_one_rank_in_the_barrier_and_its_group_before_it() {
        let simulation = Simulation::new(Situation::Deadlock, 16, 0);
        let dumps = simulation.dumps_at(simulation.fault_ns() + LATER_NS);
        let culprit = simulation.culprit() as usize;
        assert_eq!(unfinished(&dumps[culprit])[0].0, OpType::Barrier);
        for member in (8..16).filter(|&rank| rank != culprit) {
            assert_eq!(unfinished(&dumps[member])[0].0, OpType::ReduceScatterSingle);
        }
    }

    #[test]
    fn a_mismatch_is_two_operations_under_one_number() {
        let simulation = Simulation::new(Situation::Mismatch, 16, 0);
        let dumps = simulation.dumps_at(simulation.fault_ns() + LATER_NS);
        let operations: HashSet<_> = dumps[8..].iter().map(|dump| unfinished(dump)[0]).collect();
        assert_eq!(operations.len(), 2);
        let seqs: HashSet<_> = operations.iter().map(|(_, seq, _)| seq).collect();
        assert_eq!(seqs.len(), 1);
    }

    #[test]
    fn a_healthy_job_goes_on_with_a_full_window() {
        let simulation = Simulation::new(Situation::Healthy, 8, 0).with_window(60);
        let last = |ns| {
            simulation.dumps_at(ns)[3]
                .entries
                .last()
                .map(|e| e.record_id)
        };
        assert!(last(100_000 * MS) < last(101_000 * MS));
        assert_eq!(simulation.dumps_at(100_000 * MS)[3].entries.len(), 60);
    }
}
