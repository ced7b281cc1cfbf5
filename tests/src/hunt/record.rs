//! Writes what the ranks of a job have recorded at some moment.

use super::job::{Backend, Job, MS, Records, SECOND};
use super::run::{History, Life, Operation};
use crate::generator::Random;
use rcomm_recorder::model::{
    Entry, EntryState, FailedOperation, Failure, FailureKind, Frame, OpType, Peer, ProcessExit,
    ProcessGroupInfo, ProcessGroupStatus, Rank, RankStatus, Signature,
};
use rcomm_recorder::publish::{
    Dump, DumpGroup, FormatVersion, LaunchRecord, LaunchSignal, LaunchedRank, RankEnd, Recorder,
    RingReader,
};

/// When the job starts, in ns since 1970: an arbitrary time in 2026.
pub(super) const START_NS: i64 = 1_790_000_000_000_000_000;

/// Writes the records of a job.
pub(super) struct Writer<'a> {
    pub(super) job: &'a Job,
    pub(super) history: &'a History,
    /// The error of each host's clock, ns.
    pub(super) clocks: Vec<i64>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(job: &'a Job, history: &'a History, random: &mut Random) -> Self {
        let hosts = job.host(job.world() - 1) + 1;
        let error = job.clock_error_ns;
        let clocks = (0..hosts)
            .map(|_| match error {
                0 => 0,
                error => (random.draw() % (2 * error as u64)) as i64 - error,
            })
            .collect();
        Self {
            job,
            history,
            clocks,
        }
    }

    /// What the clock of a rank's host shows at a moment of the job.
    pub(super) fn wall(&self, rank: Rank, ns: i64) -> i64 {
        START_NS + ns + self.clocks[self.job.host(rank) as usize]
    }

    /// The record of a rank as it is at this moment.
    pub(super) fn write(&self, rank: Rank, moment: i64) -> Dump {
        let job = self.job;
        let life = &self.history.lives[rank as usize];
        let recorder = match (job.records, job.backend) {
            (Records::Rings | Records::Own, _) => Recorder::Rcomm,
            (Records::Dumps, Backend::Nccl) => Recorder::Nccl,
            (Records::Dumps, _) => Recorder::Hook,
        };
        // A process that is stopped or gone records nothing more.
        let gone = life.gone.filter(|gone| gone.at <= moment);
        let until = gone.map_or(moment, |gone| gone.at);
        let until = life.stopped.map_or(until, |stopped| stopped.min(until));
        let mut dump = Dump {
            version: FormatVersion::WRITTEN,
            recorder,
            ..Dump::default()
        };
        dump.identity.rank = Some(rank);
        let mut local = vec![None; job.groups.len()];
        for (index, group) in job.groups.iter().enumerate() {
            if group.ranks.contains(&rank) {
                local[index] = Some(dump.groups.len() as u32);
                dump.groups.push(DumpGroup {
                    info: ProcessGroupInfo {
                        id: dump.groups.len() as u32,
                        name: group.name.clone(),
                        desc: group.purpose.to_owned(),
                        ranks: group.ranks.as_slice().into(),
                    },
                    place: None,
                    status: None,
                });
            }
        }
        let mut counts = vec![[0; 3]; job.groups.len()];
        let mut random = Random::new(job.seed ^ u64::from(rank) << 24);
        // The record ids of the operations, in order of issue.
        let mut ids = Vec::new();
        for operation in &life.operations {
            // What the host of a device has issued before it was stopped is all that it will ever issue.
            if operation.issued > until {
                break;
            }
            let group = operation.call.group;
            let is_message = operation.call.peer.is_some();
            // gloo carries out the calls of a batch one by one.
            let part = operation.call.part.filter(|_| job.backend != Backend::Gloo);
            let is_counted = part.is_none_or(|part| part.is_first);
            counts[group][usize::from(is_message)] += u64::from(is_counted);
            counts[group][2] += 1;
            let nth = dump.entries.len();
            ids.push(nth as u64 + 1);
            let entry = self.entry(
                &mut dump,
                (rank, nth, operation),
                (local[group].unwrap_or(0), counts[group]),
                until,
                &mut random,
            );
            dump.entries.push(entry);
            if part.is_some_and(|part| part.is_last) {
                close_batch(&mut dump, is_message);
            }
        }
        if recorder == Recorder::Nccl {
            for (index, local) in local.iter().enumerate() {
                let Some(local) = *local else { continue };
                let newest = |wanted: &dyn Fn(&Entry) -> bool| {
                    let group_entries = dump.entries.iter().filter(|entry| entry.group == local);
                    let wanted = group_entries.filter(|entry| !entry.is_p2p && wanted(entry));
                    wanted
                        .map(|entry| entry.collective_seq_id as i64)
                        .max()
                        .unwrap_or(-1)
                };
                let status = ProcessGroupStatus {
                    last_enqueued: newest(&|_| true),
                    last_started: newest(&|entry| entry.time_discovered_started_ns > 0),
                    last_completed: newest(&|entry| entry.state == EntryState::Completed),
                    timeout_ms: 0,
                };
                if counts[index][0] > 0 {
                    dump.groups[local as usize].status = Some(status);
                }
            }
        }
        let excess = dump.entries.len().saturating_sub(job.ring_size);
        dump.entries.drain(..excess);
        if job.records != Records::Dumps {
            self.add_status(&mut dump, (rank, life, &ids), moment, until, &mut random);
        }
        dump
    }

    /// The entry of a rank's operation at the moment `until`. `nth` is the number of entries before it, `group` the
    /// group's index in the record, and `counts` are the numbers of its collectives, its messages and all its
    /// operations so far.
    fn entry(
        &self,
        dump: &mut Dump,
        (rank, nth, operation): (Rank, usize, &Operation),
        (group, counts): (u32, [u64; 3]),
        until: i64,
        random: &mut Random,
    ) -> Entry {
        let job = self.job;
        let call = &operation.call;
        let recorder = dump.recorder;
        let is_on_device = job.backend == Backend::Nccl;
        // NCCL's watchdog notices ends when it polls; writing a dump polls, too.
        let delay = match is_on_device {
            true => random.between(0, 100) as i64 * MS,
            false => 0,
        };
        let ended = operation.ended.filter(|&ended| ended <= until);
        let seen = ended.map(|ended| ended + delay);
        let seen = match recorder {
            Recorder::Nccl => seen.map(|seen| seen.min(until)),
            _ => seen.filter(|&seen| seen <= until),
        };
        let failed = operation.failed.filter(|&failed| failed <= until);
        let begun = operation.begun.filter(|&begun| begun <= until);
        let shows_start = match recorder {
            Recorder::Nccl => job.notes_starts,
            Recorder::Rcomm => job.backend == Backend::Cpu,
            _ => false,
        };
        let state = match (seen, failed) {
            (Some(_), _) => EntryState::Completed,
            (None, Some(_)) => match recorder {
                Recorder::Rcomm => EntryState::Failed,
                _ => EntryState::Scheduled,
            },
            (None, None) if shows_start && begun.is_some() => EntryState::Started,
            (None, None) => EntryState::Scheduled,
        };
        let completed_ns = seen.map_or(0, |seen| self.wall(rank, seen));
        let started_ns = match recorder {
            Recorder::Hook => completed_ns,
            _ if shows_start => begun.map_or(0, |begun| self.wall(rank, begun)),
            _ => 0,
        };
        let lasted = match (recorder, failed, ended) {
            (Recorder::Rcomm, Some(failed), _) => Some(failed - operation.issued),
            (Recorder::Hook, _, Some(ended)) => Some(ended - operation.issued),
            _ => None,
        };
        let is_message = call.peer.is_some();
        Entry {
            record_id: nth as u64 + u64::from(recorder == Recorder::Rcomm),
            collective_seq_id: counts[0],
            p2p_seq_id: match recorder {
                Recorder::Nccl if !is_message => 0,
                _ => counts[1],
            },
            op_id: counts[2],
            group,
            signature: signature(dump, job, operation),
            stack: Some(stack(dump, call.line)),
            op: call.op,
            state,
            retired: seen.is_some() || failed.is_some(),
            is_p2p: is_message,
            peer: call.peer.map_or(Peer::None, Peer::Rank),
            root: call
                .root
                .filter(|_| job.broadcasts && recorder == Recorder::Rcomm),
            reduce_op: None,
            time_created_ns: self.wall(rank, operation.issued),
            time_discovered_started_ns: started_ns,
            time_discovered_completed_ns: completed_ns,
            duration_ms: lasted.map(|ns| ns as f32 / 1e6),
            graph_id: None,
            timeout_ms: (job.timeout_ns / MS) as u64,
            thread: None,
        }
    }

    /// Adds what rcomm's recorder keeps besides the operations.
    fn add_status(
        &self,
        dump: &mut Dump,
        (rank, life, ids): (Rank, &Life, &[u64]),
        moment: i64,
        until: i64,
        random: &mut Random,
    ) {
        let job = self.job;
        let wall = |ns: i64| self.wall(rank, ns);
        let gone = life.gone.filter(|gone| gone.at <= moment);
        let is_closed = gone.is_some_and(|gone| gone.code == Some(0));
        let names_phases = job.backend != Backend::Cpu;
        let beat = wall(until - random.between(0, 250) as i64 * MS).max(wall(0));
        let mut status = RankStatus {
            step: -1,
            heartbeat_ns: beat,
            ..RankStatus::default()
        };
        let step = life.steps.iter().rev().find(|(at, _)| *at <= until);
        if let Some(&(_, step)) = step {
            status.step = i64::from(step);
        }
        let mut phases = life.phases.iter().rev();
        if let Some((since, phase)) = phases.find(|(at, _)| *at <= until)
            && names_phases
        {
            status.phase.clone_from(phase);
            status.phase_since_ns = wall(*since);
        }
        if let Some(gone) = gone
            && job.notes_exits()
        {
            let code = match gone.signal {
                Some(15) => Some(143),
                Some(_) => None,
                None => gone.code,
            };
            status.exit = code.map(|code| ProcessExit {
                time_ns: wall(gone.at - MS),
                code: code as u8,
            });
        }
        let identity = &mut dump.identity;
        identity.world_size = Some(job.world());
        identity.host = format!("host{}", job.host(rank));
        identity.job = "job".to_owned();
        identity.pid = 1000 + rank;
        identity.begun_ns = wall(-SECOND);
        identity.reason = match (gone, life.stopped.filter(|&stopped| stopped <= moment)) {
            (Some(_), _) if is_closed => RingReader::CLOSED,
            (Some(_), _) => RingReader::OWNER_IS_DEAD,
            (None, Some(_)) => RingReader::OWNER_IS_STOPPED,
            (None, None) if job.records == Records::Own => match life.dumped {
                Some(_) => "time-out",
                None => "requested by the program",
            },
            (None, None) => RingReader::OWNER_LIVES,
        }
        .to_owned();
        if job.backend == Backend::Cpu {
            for (noted, id) in life.failures.iter().zip(1..) {
                if noted.at > until {
                    continue;
                }
                let operation = &life.operations[noted.operation];
                let text = match noted.kind {
                    FailureKind::Timeout => "timed out",
                    FailureKind::Mismatch => "the calls of the ranks differ",
                    _ => "the peer is gone",
                };
                let failure = Failure::new(noted.kind, &noted.ranks, rank, text);
                let groups = job.groups[..operation.call.group].iter();
                dump.failures.push(Failure {
                    id,
                    group: Some(groups.filter(|group| group.ranks.contains(&rank)).count() as u32),
                    operation: Some(FailedOperation {
                        op: operation.call.op,
                        seq: operation.number,
                        is_p2p: operation.call.peer.is_some(),
                        record_id: ids[noted.operation],
                    }),
                    time_ns: wall(noted.at),
                    ..failure
                });
            }
        }
        if is_closed {
            dump.closed_ns = wall(until);
        }
        // The time of a ring whose process is gone is the newest in it.
        let exit = status.exit.map_or(0, |exit| exit.time_ns);
        let entries = dump
            .entries
            .iter()
            .flat_map(|entry| [entry.time_created_ns, entry.time_discovered_completed_ns]);
        let newest = entries
            .max()
            .unwrap_or(0)
            .max(exit)
            .max(beat)
            .max(status.phase_since_ns);
        dump.identity.dump_time_ns = match gone {
            Some(_) => newest,
            None => wall(moment),
        };
        dump.status = Some(status);
    }

    /// The launchers' records at this moment, one for each host.
    pub(super) fn launches(&self, moment: i64) -> Vec<LaunchRecord> {
        let job = self.job;
        let hosts = 0..job.host(job.world() - 1) + 1;
        hosts
            .map(|host| {
                let ranks = (0..job.world()).filter(|&rank| job.host(rank) == host);
                let ranks = ranks.map(|rank| {
                    let life = &self.history.lives[rank as usize];
                    let gone = life.gone.filter(|gone| gone.at + MS <= moment);
                    let sent = life.signalled.filter(|&at| at <= moment);
                    LaunchedRank {
                        rank,
                        pid: 1000 + rank,
                        sent: sent
                            .map(|at| LaunchSignal {
                                signal: 15,
                                time_ns: self.wall(rank, at),
                            })
                            .into_iter()
                            .collect(),
                        end: gone.map(|gone| RankEnd {
                            time_ns: self.wall(rank, gone.at + MS),
                            exit_code: gone.code,
                            signal: gone.signal,
                            out_of_memory: None,
                        }),
                    }
                });
                let ranks: Vec<LaunchedRank> = ranks.collect();
                let first_rank = ranks.iter().map(|rank| rank.rank).next().unwrap_or(0);
                let asked = self.history.asked.filter(|&asked| asked <= moment);
                LaunchRecord {
                    schema: LaunchRecord::SCHEMA.to_owned(),
                    job: "job".to_owned(),
                    host: format!("host{host}"),
                    node: host,
                    world_size: job.world(),
                    launcher_pid: 999,
                    started_ns: self.wall(first_rank, -SECOND),
                    ended_ns: match ranks.iter().all(|rank| rank.end.is_some()) {
                        true => self.wall(first_rank, self.history.last),
                        false => 0,
                    },
                    received: asked
                        .map(|at| LaunchSignal {
                            signal: 15,
                            time_ns: self.wall(first_rank, at),
                        })
                        .into_iter()
                        .collect(),
                    ranks,
                    ..LaunchRecord::default()
                }
            })
            .collect()
    }
}

/// How many elements an operation of a group with this many members takes and returns on each rank.
pub(super) fn sizes(op: OpType, elements: u64, members: u64) -> [u64; 2] {
    match op {
        OpType::AllGatherSingle => [elements, elements * members],
        OpType::ReduceScatterSingle => [elements * members, elements],
        OpType::Barrier => [0, 0],
        _ => [elements, elements],
    }
}

/// Adds the marker that closes a batch of two calls, whose entries are the newest in the record. NCCL's recorder notes
/// the state of a batch at its marker only, and rcomm's writes a marker for messages only.
fn close_batch(dump: &mut Dump, of_messages: bool) {
    let is_nccls = dump.recorder == Recorder::Nccl;
    if !is_nccls && !of_messages {
        return;
    }
    let from = dump.entries.len().saturating_sub(2);
    let parts = dump.entries[from..].iter();
    let slowest = parts.min_by_key(|entry| match entry.state {
        EntryState::Completed => (2, -entry.time_discovered_completed_ns),
        EntryState::Started => (1, 0),
        _ => (0, 0),
    });
    let Some(slowest) = slowest.cloned() else {
        return;
    };
    let signature = Signature {
        backend: dump.signatures[slowest.signature as usize].backend.clone(),
        op_name: "coalesced".to_owned(),
        ..Signature::default()
    };
    let known = dump.signatures.iter().position(|known| *known == signature);
    let signature = known.unwrap_or_else(|| {
        dump.signatures.push(signature);
        dump.signatures.len() - 1
    }) as u32;
    if is_nccls {
        for entry in &mut dump.entries[from..] {
            entry.state = EntryState::Scheduled;
            entry.retired = false;
            entry.time_discovered_started_ns = 0;
            entry.time_discovered_completed_ns = 0;
            entry.duration_ms = None;
        }
    }
    dump.entries.push(Entry {
        record_id: dump.entries.len() as u64 + u64::from(!is_nccls),
        op: OpType::Coalesced,
        signature,
        peer: Peer::None,
        root: None,
        ..slowest
    });
}

/// The index of an operation's signature in the record, to which a new one is added.
fn signature(dump: &mut Dump, job: &Job, operation: &Operation) -> u32 {
    let call = &operation.call;
    let members = job.groups[call.group].ranks.len() as u64;
    let name = match call.op {
        OpType::AllGatherSingle => "_allgather_base",
        OpType::ReduceScatterSingle => "_reduce_scatter_base",
        OpType::AllReduce => "all_reduce",
        OpType::Broadcast => "broadcast",
        OpType::Send => "send",
        OpType::Recv => "recv",
        _ => "barrier",
    };
    let [input, output] = sizes(call.op, call.elements, members);
    let shapes = |elements: u64| match elements {
        0 => Vec::new(),
        elements => vec![vec![elements]],
    };
    let types = |elements: u64| match elements {
        0 => Vec::new(),
        _ => vec![call.dtype.to_owned()],
    };
    let signature = Signature {
        backend: match (job.backend, job.records) {
            (Backend::Nccl, _) => "nccl",
            (Backend::Gloo, _) => "gloo",
            (Backend::Cpu, _) => "cpu",
        }
        .to_owned(),
        op_name: name.to_owned(),
        input_sizes: shapes(input),
        output_sizes: shapes(output),
        input_dtypes: types(input),
        output_dtypes: types(output),
        ..Signature::default()
    };
    let known = dump.signatures.iter().position(|known| *known == signature);
    known.unwrap_or_else(|| {
        dump.signatures.push(signature);
        dump.signatures.len() - 1
    }) as u32
}

/// The index of the stack of a call at this line in the record, to which a new one is added.
fn stack(dump: &mut Dump, line: u32) -> u32 {
    let frame = Frame {
        name: "step".to_owned(),
        filename: "/srv/train.py".to_owned(),
        line,
    };
    let known = dump.frames.iter().position(|known| *known == frame);
    known.unwrap_or_else(|| {
        dump.stacks.push(vec![dump.frames.len() as u32]);
        dump.frames.push(frame);
        dump.frames.len() - 1
    }) as u32
}
