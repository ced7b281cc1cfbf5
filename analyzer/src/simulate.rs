//! A job that does not exist, recorded as if it did: for demonstrations, tests and measurements of
//! scale.
//!
//! Every rank runs the same program: in each step an all-gather and a reduce-scatter over its
//! tensor-parallel group (the ranks of its host), a barrier of all ranks every eighth step, and an
//! all-reduce over its data-parallel group (one rank of every host). From the situation's moment on
//! something goes wrong, and how far each rank comes follows from the rules of blocking operations:
//! a rank issues its next operation when all members have entered the one before.

use rcomm_recorder::model::{
    Entry, EntryState, Frame, OpType, Peer, ProcessGroupInfo, ProcessGroupStatus, Rank, RankStatus,
    ReduceOp, Signature,
};
use rcomm_recorder::publish::{Dump, DumpGroup, FormatVersion, Identity, Recorder};
use std::collections::HashMap;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Situation {
    /// Nothing.
    Healthy,
    /// One rank never issues an all-reduce that its group waits in.
    StuckRank,
    /// One rank enters the barrier of all before the collective of its tensor-parallel group, the
    /// others after it.
    Deadlock,
    /// One rank issues another operation than its group.
    Mismatch,
    /// The ranks of one host come late, again and again.
    Straggler,
    /// One rank's record can no longer be read; the job runs on.
    SilentRank,
}

impl Situation {
    /// Every situation, with the name it goes by on a command line.
    pub const ALL: &'static [(Self, &'static str)] = &[
        (Self::Healthy, "healthy"),
        (Self::StuckRank, "stuck"),
        (Self::Deadlock, "deadlock"),
        (Self::Mismatch, "mismatch"),
        (Self::Straggler, "straggler"),
        (Self::SilentRank, "silent"),
    ];

    /// The name it goes by.
    pub fn name(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(situation, _)| *situation == self)
            .map_or("", |&(_, name)| name)
    }

    /// The situation of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .find(|(_, known)| *known == name)
            .map(|&(situation, _)| situation)
    }
}

const MS: i64 = 1_000_000;
const STEP_NS: i64 = 200 * MS;
const SLOT_NS: i64 = 50 * MS;
/// Operations of one step: gather, scatter, barrier (or nothing), all-reduce.
const SLOTS: u64 = 4;
/// The slot in which things go wrong, per kind of operation.
const GATHER: u64 = 0;
const SCATTER: u64 = 1;
const BARRIER: u64 = 2;
const ALL_REDUCE: u64 = 3;
/// How late a straggler's host is.
const LATE_NS: i64 = 4 * MS;

/// See the module.
#[derive(Clone, Debug)]
pub struct Simulation {
    situation: Situation,
    ranks: u32,
    per_host: u32,
    start_ns: i64,
    window: usize,
    job: String,
}

/// How far each rank came after the fault.
#[derive(Debug)]
struct Progress {
    /// Operations issued from the step of the fault on.
    issued: Vec<usize>,
    /// Whether the newest of them waits for somebody.
    blocked: Vec<bool>,
}

/// One operation of the program: its place (step, slot) decides everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    step: u64,
    slot: u64,
}

impl Simulation {
    /// The step in which things go wrong. A multiple of eight, so that it has a barrier.
    pub const FAULT_STEP: u64 = 48;

    /// A job of `ranks` ranks, eight to a host (fewer where `ranks` is small), that began at
    /// `start_ns` (wall clock, ns since the epoch).
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
        }
    }

    /// Keeps at most the newest `window` operations of each rank, as a small ring would.
    pub fn with_window(mut self, window: usize) -> Self {
        self.window = window.max(1);
        self
    }

    /// The same job, begun at another time.
    pub fn begun_at(mut self, start_ns: i64) -> Self {
        self.start_ns = start_ns;
        self
    }

    /// Ranks of the job.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Ranks of one host.
    pub fn ranks_per_host(&self) -> u32 {
        self.per_host
    }

    /// Name of the job.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The rank that the fault happens to.
    pub fn culprit(&self) -> Rank {
        self.ranks / 2 + (self.per_host - 1).min(5)
    }

    /// When things go wrong, ns since the epoch.
    pub fn fault_ns(&self) -> i64 {
        self.start_ns + Self::FAULT_STEP as i64 * STEP_NS
    }

    /// Whether this rank's record can be read at `now_ns`.
    pub fn answers(&self, rank: Rank, now_ns: i64) -> bool {
        self.situation != Situation::SilentRank
            || rank != self.culprit()
            || now_ns < self.fault_ns()
    }

    /// The records of all ranks as they stand at `now_ns`, ascending by rank. A rank that no longer
    /// answers is left with its last record.
    pub fn dumps_at(&self, now_ns: i64) -> Vec<Dump> {
        let progress = self.progress(now_ns);
        (0..self.ranks)
            .map(|rank| {
                let now = if self.answers(rank, now_ns) {
                    now_ns
                } else {
                    self.fault_ns() - 1
                };
                self.dump(rank, now, &progress)
            })
            .collect()
    }

    fn host_of(&self, rank: Rank) -> u32 {
        rank / self.per_host
    }

    fn hosts(&self) -> u32 {
        self.ranks / self.per_host
    }

    /// The program of `rank` in one step, in its own order.
    fn slots(&self, rank: Rank, step: u64) -> Vec<u64> {
        let mut slots = vec![GATHER, SCATTER];
        if step.is_multiple_of(8) {
            slots.push(BARRIER);
        }
        slots.push(ALL_REDUCE);
        if self.situation == Situation::Deadlock
            && step == Self::FAULT_STEP
            && rank == self.culprit()
        {
            slots.swap(1, 2);
        }
        slots
    }

    fn nominal_ns(&self, place: Place) -> i64 {
        self.start_ns + place.step as i64 * STEP_NS + place.slot as i64 * SLOT_NS
    }

    /// When `rank` reaches `place` if nothing holds it back: the nominal time and a little jitter.
    fn arrival_ns(&self, rank: Rank, place: Place) -> i64 {
        let mut x = (u64::from(rank) << 32) ^ (place.step * SLOTS + place.slot);
        // splitmix64's finisher: the same jitter on every run.
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let jitter = (x >> 40) as i64 % 200_000;
        self.nominal_ns(place) + jitter + self.late_ns(rank)
    }

    fn late_ns(&self, rank: Rank) -> i64 {
        let slow = self.situation == Situation::Straggler
            && self.host_of(rank) == self.host_of(self.culprit());
        if slow { LATE_NS } else { 0 }
    }

    fn members(&self, rank: Rank, slot: u64) -> Vec<Rank> {
        match slot {
            BARRIER => (0..self.ranks).collect(),
            ALL_REDUCE => (0..self.hosts())
                .map(|host| host * self.per_host + rank % self.per_host)
                .collect(),
            _ => {
                let first = self.host_of(rank) * self.per_host;
                (first..first + self.per_host).collect()
            }
        }
    }

    /// When the operation at `place` is over on `rank`'s group, if all members came.
    fn end_ns(&self, rank: Rank, place: Place) -> i64 {
        let slowest = if self.situation == Situation::Straggler {
            let slow = self.host_of(self.culprit());
            let here =
                place.slot == BARRIER || place.slot == ALL_REDUCE || self.host_of(rank) == slow;
            if here { LATE_NS } else { 0 }
        } else {
            0
        };
        let duration = match place.slot {
            BARRIER => MS,
            ALL_REDUCE => 12 * MS,
            _ => 3 * MS,
        };
        self.nominal_ns(place) + 200_000 + slowest + duration
    }

    /// How many operations each rank has issued from the step of the fault on, or `None` while
    /// nothing is wrong.
    fn progress(&self, now_ns: i64) -> Option<Progress> {
        let stops = matches!(
            self.situation,
            Situation::StuckRank | Situation::Deadlock | Situation::Mismatch
        );
        if !stops || now_ns < self.fault_ns() {
            return None;
        }
        // What a rank wants to do next, as far as its clock allows, from the step of the fault on.
        // Blocked ranks never get further than two steps.
        let steps = Self::FAULT_STEP..Self::FAULT_STEP + 3;
        let program: Vec<Vec<Place>> = (0..self.ranks)
            .map(|rank| {
                steps
                    .clone()
                    .flat_map(|step| {
                        let slots = self.slots(rank, step);
                        slots.into_iter().map(move |slot| Place { step, slot })
                    })
                    .filter(|&place| self.arrival_ns(rank, place) <= now_ns)
                    .take_while(|&place| {
                        self.situation != Situation::StuckRank
                            || rank != self.culprit()
                            || place != Self::fault_of(Situation::StuckRank)
                    })
                    .collect()
            })
            .collect();
        let mut entered: HashMap<(Place, u32), u32> = HashMap::new();
        let mut issued = vec![0usize; program.len()];
        let mut blocked = vec![false; program.len()];
        loop {
            let mut moved = false;
            for rank in 0..self.ranks {
                let own = &program[rank as usize];
                let at = issued[rank as usize];
                let free = match at.checked_sub(1).map(|last| own[last]) {
                    None => true,
                    Some(place) => {
                        let inside = entered.get(&(place, self.group_index(rank, place.slot)));
                        inside == Some(&self.group_size(place.slot)) && !self.is_broken(rank, place)
                    }
                };
                blocked[rank as usize] = !free;
                if free && let Some(&next) = own.get(at) {
                    let group = self.group_index(rank, next.slot);
                    *entered.entry((next, group)).or_default() += 1;
                    issued[rank as usize] += 1;
                    moved = true;
                }
            }
            if !moved {
                return Some(Progress { issued, blocked });
            }
        }
    }

    /// Whether the operation at `place` cannot end in `rank`'s group, although all members came.
    fn is_broken(&self, rank: Rank, place: Place) -> bool {
        self.situation == Situation::Mismatch
            && place == Self::fault_of(Situation::Mismatch)
            && self.host_of(rank) == self.host_of(self.culprit())
    }

    /// Which of the groups of its kind `rank` is in.
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

    fn fault_of(situation: Situation) -> Place {
        let slot = match situation {
            Situation::StuckRank => ALL_REDUCE,
            _ => SCATTER,
        };
        Place {
            step: Self::FAULT_STEP,
            slot,
        }
    }

    /// Sequence number of the operation at `place` in its group, from 1.
    fn seq(place: Place) -> u64 {
        match place.slot {
            GATHER => place.step * 2 + 1,
            SCATTER => place.step * 2 + 2,
            BARRIER => place.step / 8 + 1,
            _ => place.step + 1,
        }
    }

    fn dump(&self, rank: Rank, now_ns: i64, progress: &Option<Progress>) -> Dump {
        let since = ((now_ns - self.start_ns).max(0) / STEP_NS) as u64;
        let last_step = match progress {
            Some(_) => since.min(Self::FAULT_STEP + 2),
            None => since,
        };
        // About three operations a step; the barrier adds one in eight.
        let first_step = last_step.saturating_sub(self.window as u64 / 3 + 1);
        let mut entries = Vec::with_capacity(self.window + 8);
        let mut beyond = 0;
        for step in first_step..=last_step {
            for slot in self.slots(rank, step) {
                let place = Place { step, slot };
                if self.arrival_ns(rank, place) > now_ns {
                    break;
                }
                if step >= Self::FAULT_STEP
                    && let Some(progress) = progress
                {
                    if beyond >= progress.issued[rank as usize] {
                        break;
                    }
                    beyond += 1;
                }
                entries.push(self.entry(rank, place, now_ns, progress));
            }
        }
        let cut = entries.len().saturating_sub(self.window);
        entries.drain(..cut);
        let status = |slot: u64| -> ProcessGroupStatus {
            let group = u32::from(Self::group_of(slot));
            let newest = |least: EntryState| {
                entries
                    .iter()
                    .rev()
                    .find(|e: &&Entry| e.group == group && e.state >= least)
                    .map_or(-1, |e| e.collective_seq_id as i64)
            };
            ProcessGroupStatus {
                last_enqueued: newest(EntryState::Scheduled),
                last_started: newest(EntryState::Started),
                last_completed: newest(EntryState::Completed),
                timeout_ms: 0,
            }
        };
        let group = |id: u32, name: String, desc: &str, slot: u64| DumpGroup {
            info: ProcessGroupInfo {
                id,
                name,
                desc: desc.into(),
                ranks: self.members(rank, slot),
            },
            status: Some(status(slot)),
        };
        let groups = vec![
            self.world_group(status(BARRIER)),
            group(1, format!("tp_{}", self.host_of(rank)), "tp", GATHER),
            group(2, format!("dp_{}", rank % self.per_host), "dp", ALL_REDUCE),
        ];
        let phase_since = entries.last().map_or(self.start_ns, |e| e.time_created_ns);
        let stuck_here =
            progress.is_some() && self.situation == Situation::StuckRank && rank == self.culprit();
        Dump {
            version: FormatVersion::WRITTEN,
            recorder: Recorder::Rcomm,
            identity: Identity {
                rank: Some(rank),
                world_size: Some(self.ranks),
                host: format!("n{:03}", self.host_of(rank)),
                job: self.job.clone(),
                attempt: 0,
                pid: 4000 + rank,
                dump_time_ns: now_ns,
                reason: String::new(),
            },
            status: Some(RankStatus {
                phase: if stuck_here { "load data" } else { "train" }.into(),
                phase_since_ns: phase_since,
                step: last_step as i64,
                heartbeat_ns: now_ns,
                dropped: 0,
            }),
            comm_lib_version: String::new(),
            groups,
            signatures: signatures(),
            frames: frames(),
            stacks: vec![vec![0, 4], vec![1, 4], vec![2, 4], vec![3, 4]],
            threads: vec![],
            entries,
            nccl_comm_state: vec![],
        }
    }

    /// The group of all. A large job's records leave its members out: they are the world.
    fn world_group(&self, status: ProcessGroupStatus) -> DumpGroup {
        const LISTED: u32 = 4096;
        DumpGroup {
            info: ProcessGroupInfo {
                id: 0,
                name: "0".into(),
                desc: "default_pg".into(),
                ranks: (0..if self.ranks <= LISTED { self.ranks } else { 0 }).collect(),
            },
            status: Some(status),
        }
    }

    fn group_of(slot: u64) -> u8 {
        match slot {
            BARRIER => 0,
            ALL_REDUCE => 2,
            _ => 1,
        }
    }

    fn entry(&self, rank: Rank, place: Place, now_ns: i64, progress: &Option<Progress>) -> Entry {
        let created = self.arrival_ns(rank, place);
        let started = created + 30_000;
        let ended = self.end_ns(rank, place);
        let program = self.slots(rank, place.step);
        let here = program
            .iter()
            .position(|&slot| slot == place.slot)
            .unwrap_or(0);
        let open = match progress {
            Some(progress) if place.step >= Self::FAULT_STEP => {
                let before: usize = (Self::FAULT_STEP..place.step)
                    .map(|step| self.slots(rank, step).len())
                    .sum();
                before + here + 1 == progress.issued[rank as usize]
                    && progress.blocked[rank as usize]
            }
            _ => false,
        };
        let completed = !open && ended <= now_ns;
        let wrong = self.situation == Situation::Mismatch
            && rank == self.culprit()
            && place == Self::fault_of(Situation::Mismatch);
        let (signature, op) = match place.slot {
            _ if wrong => (4, OpType::AllReduce),
            GATHER => (0, OpType::AllGatherSingle),
            SCATTER => (1, OpType::ReduceScatterSingle),
            BARRIER => (2, OpType::Barrier),
            _ => (3, OpType::AllReduce),
        };
        Entry {
            record_id: place.step * 3 + place.step.div_ceil(8) + here as u64 + 1,
            collective_seq_id: Self::seq(place),
            p2p_seq_id: 0,
            op_id: Self::seq(place),
            group: u32::from(Self::group_of(place.slot)),
            signature,
            stack: Some(place.slot as u32),
            op,
            state: if completed {
                EntryState::Completed
            } else if started <= now_ns {
                EntryState::Started
            } else {
                EntryState::Scheduled
            },
            retired: completed,
            is_p2p: false,
            peer: Peer::None,
            root: None,
            reduce_op: matches!(op, OpType::AllReduce | OpType::ReduceScatterSingle)
                .then_some(ReduceOp::Sum),
            time_created_ns: created,
            time_discovered_started_ns: if started <= now_ns { started } else { 0 },
            time_discovered_completed_ns: if completed { ended } else { 0 },
            duration_ms: completed.then(|| (ended - started) as f32 / MS as f32),
            timeout_ms: 600_000,
            thread: None,
        }
    }
}

fn signatures() -> Vec<Signature> {
    let made = |name: &str, input: u64, output: u64| Signature {
        backend: "nccl".into(),
        op_name: name.into(),
        input_sizes: vec![vec![input]],
        output_sizes: vec![vec![output]],
        input_dtypes: vec!["BFloat16".into()],
        output_dtypes: vec!["BFloat16".into()],
        ..Signature::default()
    };
    const M: u64 = 1 << 20;
    vec![
        made("all_gather_single", 4 * M, 32 * M),
        made("reduce_scatter_single", 32 * M, 4 * M),
        made("barrier", 1, 1),
        made("all_reduce", 64 * M, 64 * M),
        made("all_reduce", 32 * M, 32 * M),
    ]
}

fn frames() -> Vec<Frame> {
    let frame = |name: &str, filename: &str, line: u32| Frame {
        name: name.into(),
        filename: filename.into(),
        line,
    };
    vec![
        frame("forward", "model.py", 118),
        frame("backward", "model.py", 164),
        frame("checkpoint", "train.py", 97),
        frame("reduce_gradients", "optim.py", 41),
        frame("train_step", "train.py", 61),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const LATER: i64 = 30_000 * MS;

    fn open(dump: &Dump) -> Vec<(OpType, u64, u32)> {
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
            for dump in simulation.dumps_at(simulation.fault_ns() + LATER) {
                let ids: Vec<u64> = dump.entries.iter().map(|e| e.record_id).collect();
                let expected: Vec<u64> = (1..=ids.len() as u64).collect();
                assert_eq!(ids, expected, "{situation:?}");
            }
        }
    }

    #[test]
    fn a_stuck_rank_holds_up_everybody_and_waits_for_nobody() {
        let simulation = Simulation::new(Situation::StuckRank, 16, 0);
        let dumps = simulation.dumps_at(simulation.fault_ns() + LATER);
        let culprit = simulation.culprit();
        for (rank, dump) in (0..).zip(&dumps) {
            assert_eq!(open(dump).is_empty(), rank == culprit, "rank {rank}");
        }
        let seq = Simulation::FAULT_STEP + 1;
        let mate = &dumps[(culprit % 8) as usize];
        assert_eq!(open(mate), [(OpType::AllReduce, seq, 2)]);
    }

    #[test]
    fn a_deadlock_leaves_one_rank_in_the_barrier_and_its_group_before_it() {
        let simulation = Simulation::new(Situation::Deadlock, 16, 0);
        let dumps = simulation.dumps_at(simulation.fault_ns() + LATER);
        let culprit = simulation.culprit() as usize;
        assert_eq!(open(&dumps[culprit])[0].0, OpType::Barrier);
        for mate in (8..16).filter(|&rank| rank != culprit) {
            assert_eq!(open(&dumps[mate])[0].0, OpType::ReduceScatterSingle);
        }
    }

    #[test]
    fn a_mismatch_is_one_rank_with_another_operation_under_the_same_number() {
        let simulation = Simulation::new(Situation::Mismatch, 16, 0);
        let dumps = simulation.dumps_at(simulation.fault_ns() + LATER);
        let seen: HashSet<_> = dumps[8..].iter().map(|dump| open(dump)[0]).collect();
        assert_eq!(seen.len(), 2);
        let seqs: HashSet<_> = seen.iter().map(|(_, seq, _)| seq).collect();
        assert_eq!(seqs.len(), 1);
    }

    #[test]
    fn a_healthy_job_never_stops() {
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
