//! Makes the records of the simulated ranks.

use super::progress::RankProgress;
use super::{
    ALL_GATHER, ALL_REDUCE, BARRIER, MS, ProgramOp, REDUCE_SCATTER, SLOTS, STEP_NS, Simulation,
    Situation,
};
use rcomm_recorder::model::{
    Entry, EntryState, Frame, OpType, Peer, ProcessGroupInfo, ProcessGroupStatus, Rank, RankStatus,
    ReduceOp, Signature,
};
use rcomm_recorder::publish::{Dump, DumpGroup, FormatVersion, Identity, Recorder};

impl Simulation {
    /// The sequence number of `operation` in its group, from 1.
    fn seq(operation: ProgramOp) -> u64 {
        match operation.slot {
            ALL_GATHER => operation.step * 2 + 1,
            REDUCE_SCATTER => operation.step * 2 + 2,
            BARRIER => operation.step / 8 + 1,
            _ => operation.step + 1,
        }
    }

    /// The record of `rank` as of `now_ns`; `progress` is that of [`Simulation::progress`] at that time.
    pub(super) fn dump(&self, rank: Rank, now_ns: i64, progress: Option<&RankProgress>) -> Dump {
        let elapsed_steps = ((now_ns - self.start_ns).max(0) / STEP_NS) as u64;
        let last_step = match progress {
            Some(_) => elapsed_steps.min(Self::FAULT_STEP + 2),
            None => elapsed_steps,
        };
        // A step has three operations, and every eighth step a barrier.
        let first_step = last_step.saturating_sub(self.window as u64 / 3 + 1);
        let mut entries =
            Vec::with_capacity((last_step - first_step + 1) as usize * SLOTS as usize);
        let mut issued = 0;
        for step in first_step..=last_step {
            for &slot in self.slots(rank, step) {
                let operation = ProgramOp { step, slot };
                if self.arrival_ns(rank, operation) > now_ns {
                    break;
                }
                if step >= Self::FAULT_STEP
                    && let Some(progress) = progress
                {
                    if issued >= progress.issued[rank as usize] {
                        break;
                    }
                    issued += 1;
                }
                entries.push(self.entry(rank, operation, now_ns, progress));
            }
        }
        let cut = entries.len().saturating_sub(self.window);
        entries.drain(..cut);
        entries.shrink_to_fit();
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
            place: None,
            status: Some(status(slot)),
        };
        let groups = vec![
            group(0, "0".into(), "default_pg", BARRIER),
            group(1, format!("tp_{}", self.host_of(rank)), "tp", ALL_GATHER),
            group(2, format!("dp_{}", rank % self.per_host), "dp", ALL_REDUCE),
        ];
        let phase_since = entries.last().map_or(self.start_ns, |e| e.time_created_ns);
        let is_stuck =
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
                begun_ns: 0,
                reason: String::new(),
            },
            status: Some(RankStatus {
                phase: if is_stuck { "load data" } else { "train" }.into(),
                phase_since_ns: phase_since,
                step: last_step as i64,
                heartbeat_ns: now_ns,
                dropped: 0,
                exit: None,
            }),
            comm_lib_version: String::new(),
            groups,
            signatures: signatures(),
            frames: frames(),
            stacks: vec![vec![0, 4], vec![1, 4], vec![2, 4], vec![3, 4]],
            threads: vec![],
            entries,
            nccl_comm_state: vec![],
            failures: vec![],
            closed_ns: 0,
            peers: vec![],
            processor_wait: None,
            reducer_steps: vec![],
        }
    }

    /// The id of the group in which the operation of a slot runs.
    fn group_of(slot: u64) -> u8 {
        match slot {
            BARRIER => 0,
            ALL_REDUCE => 2,
            _ => 1,
        }
    }

    /// The entry of `operation` on `rank` as of `now_ns`.
    fn entry(
        &self,
        rank: Rank,
        operation: ProgramOp,
        now_ns: i64,
        progress: Option<&RankProgress>,
    ) -> Entry {
        let created = self.arrival_ns(rank, operation);
        let started = created + 30_000;
        let ended = self.end_ns(rank, operation);
        let slots = self.slots(rank, operation.step);
        let index = slots
            .iter()
            .position(|&slot| slot == operation.slot)
            .unwrap_or(0);
        let is_blocked = match progress {
            Some(progress) if operation.step >= Self::FAULT_STEP => {
                let before: usize = (Self::FAULT_STEP..operation.step)
                    .map(|step| self.slots(rank, step).len())
                    .sum();
                before + index + 1 == progress.issued[rank as usize]
                    && progress.blocked[rank as usize]
            }
            _ => false,
        };
        let completed = !is_blocked && ended <= now_ns;
        let is_mismatched = self.situation == Situation::Mismatch
            && rank == self.culprit()
            && operation == Self::fault_of(Situation::Mismatch);
        let (signature, op) = match operation.slot {
            _ if is_mismatched => (4, OpType::AllReduce),
            ALL_GATHER => (0, OpType::AllGatherSingle),
            REDUCE_SCATTER => (1, OpType::ReduceScatterSingle),
            BARRIER => (2, OpType::Barrier),
            _ => (3, OpType::AllReduce),
        };
        Entry {
            record_id: operation.step * 3 + operation.step.div_ceil(8) + index as u64 + 1,
            collective_seq_id: Self::seq(operation),
            p2p_seq_id: 0,
            op_id: Self::seq(operation),
            group: u32::from(Self::group_of(operation.slot)),
            signature,
            stack: Some(operation.slot as u32),
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
            reduce_op: op.pattern().reduces().then_some(ReduceOp::Sum),
            time_created_ns: created,
            time_discovered_started_ns: if started <= now_ns { started } else { 0 },
            time_discovered_completed_ns: if completed { ended } else { 0 },
            duration_ms: completed.then(|| (ended - started) as f32 / MS as f32),
            graph_id: None,
            timeout_ms: 600_000,
            thread: None,
        }
    }
}

/// The signatures of every record; an entry refers to them by index.
fn signatures() -> Vec<Signature> {
    let signature = |name: &str, input: u64, output: u64| Signature {
        backend: "nccl".into(),
        op_name: name.into(),
        input_sizes: vec![vec![input]],
        output_sizes: vec![vec![output]],
        input_dtypes: vec!["BFloat16".into()],
        output_dtypes: vec!["BFloat16".into()],
        ..Signature::default()
    };
    const MEBI: u64 = 1 << 20;
    vec![
        signature("all_gather_single", 4 * MEBI, 32 * MEBI),
        signature("reduce_scatter_single", 32 * MEBI, 4 * MEBI),
        signature("barrier", 1, 1),
        signature("all_reduce", 64 * MEBI, 64 * MEBI),
        signature("all_reduce", 32 * MEBI, 32 * MEBI),
    ]
}

/// The frames of every record: one for each slot of a step, in their order, and then the frame that calls them.
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
