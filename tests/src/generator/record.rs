//! Writes the records that the ranks of a simulated job leave, in the manner of each recorder.

use super::Kind;
use super::entry::{Issued, Outcome};
use super::fault::Fault;
use super::mesh::Mesh;
use super::program::{Act, Call, Program, collective};
use super::simulate::{Run, Times};
use super::{Random, Spec, order_fault};
use rcomm_recorder::model::{
    Entry, EntryState, OpType, Peer, ProcessGroupInfo, ProcessGroupStatus, Rank, RankStatus,
    Signature,
};
use rcomm_recorder::publish::{Dump, DumpGroup, FormatVersion, Identity, Recorder, RingReader};
use std::collections::HashMap;

/// How much of the job's past a ring holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// The whole past.
    Whole,
    /// The newest part, the same number of operations on every rank.
    Last,
    /// The newest part, a different number of operations on every rank.
    Unequal,
    /// The newest part, of several steps, a different number of operations on every rank.
    Long,
    /// So little that the operations that the host issued ahead of its device may fill the ring.
    Short,
}

/// The recorder, and what it records.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The recorder.
    pub recorder: Recorder,
    /// Whether start times and durations are recorded; by default, NCCL's recorder does not record them.
    pub starts: bool,
    /// Whether messages are issued in batches, with closing markers where the recorder writes them.
    pub batched: bool,
    /// The number of acts that the host issues beyond the first unfinished one.
    pub run_ahead: usize,
    /// A second recorder of the same process, which records another backend. That backend has all operations of the
    /// data-parallel groups, and the broadcast of the parameters at the start.
    pub second_recorder: Option<Recorder>,
    /// How much of the job's past the records hold.
    pub window: Window,
    /// Number of ranks on each host.
    pub per_host: u32,
    /// The largest offset of the hosts' clocks to either side, in ms.
    pub clock_spread_ms: u64,
    /// The drift of the hosts' clocks, in parts per million.
    pub drift_ppm: i64,
    /// Whether call stacks are recorded.
    pub frames: bool,
    /// Whether the split sizes of exchanges are recorded.
    pub splits: bool,
    /// The longest time from a completion until NCCL's watchdog notices it, in ms.
    pub notice_ms: u64,
    /// The share of the job's time after which the records are taken, 0..1; `None` for 20 s after the job's end.
    pub taken_at: Option<f64>,
}

/// When the job starts, in ns since 1970: an arbitrary time in 2026.
const START_NS: i64 = 1_790_000_000_000_000_000;

/// The records that the ranks leave, ordered by rank.
pub(super) fn dumps(
    spec: &Spec,
    mesh: &Mesh,
    programs: &[Program],
    run: &Run,
    faults: &[Fault],
    random: &mut Random,
) -> Vec<Dump> {
    let leaves_no_record = |rank: Rank| {
        faults
            .iter()
            .filter(|fault| {
                matches!(
                    fault.kind,
                    Kind::Crash | Kind::Clocks | Kind::HostDown | Kind::HostsDown
                )
            })
            .any(|fault| fault.culprits.contains(&rank))
    };
    let hosts = spec.recording.host_of(spec.world() - 1) + 1;
    let spread = spec.recording.clock_spread_ms as i64 * 1_000_000;
    let offsets: Vec<i64> = (0..hosts)
        .map(|_| {
            if spread == 0 {
                0
            } else {
                (random.draw() % (2 * spread) as u64) as i64 - spread
            }
        })
        .collect();
    let ring_size = random.between(24, LONGEST_RING as u64) as usize;
    // No real ring is so short that it looks like a dump of the active operations only.
    let is_overrun = faults.iter().any(|fault| fault.kind == Kind::Overrun);
    let ring_size = if is_overrun {
        ring_size.max(64)
    } else {
        ring_size
    };
    let times = run.times.iter().flatten();
    let end = times
        .map(|times| times.ended.unwrap_or(times.arrived))
        .max()
        .unwrap_or(0);
    let taken = match spec.recording.taken_at {
        Some(share) => (end as f64 * share) as i64,
        None => end + 20_000_000_000,
    };
    let ranks = (0..spec.world()).filter(|&rank| !leaves_no_record(rank));
    let mut dumps = Vec::new();
    for rank in ranks {
        for share in spec.recording.shares() {
            let keep = match spec.recording.window {
                Window::Whole => usize::MAX,
                Window::Last => ring_size,
                Window::Unequal => random.between(24, 200) as usize,
                Window::Long => random.between(200, 400) as usize,
                Window::Short => random.between(64, 110) as usize,
            };
            let clock = Clock {
                offset: offsets[spec.recording.host_of(rank) as usize],
                ppm: spec.recording.drift_ppm,
            };
            let mut writer = Writer::new(spec, mesh, rank, clock, share);
            writer.taken = taken;
            writer.failed_at = faults
                .iter()
                .find(|fault| fault.kind == Kind::Fails && fault.rank == rank)
                .map(|fault| fault.at);
            let index = rank as usize;
            let (program, times) =
                order_fault::as_issued(faults, rank, &programs[index], &run.times[index]);
            let mut dump = writer.write(&program, &times, keep);
            for fault in faults.iter().filter(|fault| fault.rank == rank) {
                show_in_record(fault.kind, spec.steps, &mut dump);
                if fault.kind == Kind::Members {
                    leave_one_out(&mesh.groups[fault.group].name, rank, &mut dump);
                }
            }
            dumps.push(dump);
        }
    }
    dumps
}

/// The part of a program that one recorder records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// The whole program.
    All,
    /// The operations of the device's backend, where the process has a host backend as well.
    Device,
    /// The operations of the host's backend.
    Host(Recorder),
}

impl Recording {
    /// The number of a rank's host.
    pub(super) fn host_of(&self, rank: Rank) -> u32 {
        rank / self.per_host
    }

    /// The ranks of a rank's host.
    pub(super) fn ranks_of_host(&self, rank: Rank, world: u32) -> Vec<Rank> {
        let first = self.host_of(rank) * self.per_host;
        (first..(first + self.per_host).min(world)).collect()
    }

    fn shares(&self) -> Vec<Share> {
        match self.second_recorder {
            None => vec![Share::All],
            Some(host) => vec![Share::Device, Share::Host(host)],
        }
    }
}

impl Share {
    /// Whether the recorder of this share records the act.
    fn holds(self, mesh: &Mesh, act: &Act) -> bool {
        // The broadcast of the parameters is recognized by its line, because a wrong operation at that line goes to the
        // same backend.
        let is_broadcast = |call: &Call| call.line == super::script::PARAMETERS;
        let is_on_host = match act {
            Act::Collective { group: 0, calls } => calls.iter().any(is_broadcast),
            act => matches!(mesh.groups[act.group()].desc, "dp" | "shard" | "replicate"),
        };
        match self {
            Self::All => true,
            Self::Device => !is_on_host,
            Self::Host(_) => is_on_host,
        }
    }
}

/// The largest number of operations that a ring with [`Window::Last`] holds.
pub(super) const LONGEST_RING: usize = 96;

/// Removes a rank other than `rank` from the groups of this name in the record of `rank`.
fn leave_one_out(name: &str, rank: Rank, dump: &mut Dump) {
    for group in dump
        .groups
        .iter_mut()
        .filter(|group| group.info.name == name)
    {
        let mut ranks = group.info.ranks.to_vec();
        if let Some(other) = ranks.iter().rposition(|&other| other != rank) {
            ranks.remove(other);
        }
        group.info.ranks = ranks.into();
    }
}

/// Adds the effects that a fault has on the record itself, not on its operations.
fn show_in_record(kind: Kind, steps: u32, dump: &mut Dump) {
    match kind {
        Kind::Dead => dump.identity.reason = RingReader::OWNER_IS_DEAD.into(),
        Kind::Stalled => {
            let taken = dump.identity.dump_time_ns;
            if let Some(status) = &mut dump.status {
                status.heartbeat_ns = taken - 90_000_000_000;
            }
        }
        Kind::ShortRing => {
            let step = dump.entries.len() / steps as usize;
            dump.entries.drain(..dump.entries.len() - step / 2);
        }
        Kind::Dropped => dump.status.get_or_insert_default().dropped = 3,
        _ => {}
    }
}

/// The clock of a host.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    /// The error of the clock at the start of the job, in ns.
    offset: i64,
    /// The drift of the clock, in parts per million.
    ppm: i64,
}

impl Clock {
    /// What the clock shows this long after the start of the job, in ns since 1970.
    pub(super) fn wall(self, ns: i64) -> i64 {
        START_NS + self.offset + ns + ns / 1_000_000 * self.ppm
    }
}

/// Writes the record of one recorder of a rank.
pub(super) struct Writer<'a> {
    pub(super) spec: &'a Spec,
    mesh: &'a Mesh,
    rank: Rank,
    pub(super) clock: Clock,
    pub(super) dump: Dump,
    /// The number of each group in the record.
    pub(super) local: HashMap<usize, u32>,
    /// The numbers of collectives, messages and operations that each group has had so far.
    pub(super) seq: HashMap<usize, [u64; 3]>,
    pub(super) signatures: HashMap<Signature, u32>,
    pub(super) stacks: HashMap<u32, u32>,
    /// The number of operations of all groups so far.
    pub(super) operations: u64,
    /// Draws how late the watchdog notices completions.
    pub(super) notice: Random,
    /// When the record is taken, in ns since the start of the job.
    pub(super) taken: i64,
    /// A bit for each message of the batch that is being written; it is set if the message's other half was posted.
    matched: u32,
    /// The index of the act that failed on this rank.
    failed_at: Option<usize>,
    share: Share,
}

impl<'a> Writer<'a> {
    fn new(spec: &'a Spec, mesh: &'a Mesh, rank: Rank, clock: Clock, share: Share) -> Self {
        let dump = Dump {
            version: FormatVersion::WRITTEN,
            recorder: match share {
                Share::Host(recorder) => recorder,
                Share::All | Share::Device => spec.recording.recorder,
            },
            identity: Identity {
                rank: Some(rank),
                ..Identity::default()
            },
            ..Dump::default()
        };
        Self {
            spec,
            mesh,
            rank,
            clock,
            dump,
            local: HashMap::new(),
            seq: HashMap::new(),
            signatures: HashMap::new(),
            stacks: HashMap::new(),
            operations: 0,
            notice: Random::new(spec.seed ^ u64::from(rank) << 32),
            taken: 0,
            matched: 0,
            failed_at: None,
            share,
        }
    }

    /// Writes the record of a program whose acts have these times. The record keeps the newest `keep` operations.
    fn write(mut self, program: &Program, times: &[Times], keep: usize) -> Dump {
        // The record does not hold what happened after it was taken.
        let taken = self.taken;
        let times: Vec<Times> = times
            .iter()
            .take_while(|times| times.arrived <= taken)
            .map(|times| Times {
                ended: times.ended.filter(|&ended| ended <= taken),
                ..*times
            })
            .collect();
        if self.dump.recorder == Recorder::Rcomm {
            self.dump.identity = Identity {
                world_size: Some(self.spec.world()),
                host: format!("host{}", self.spec.recording.host_of(self.rank)),
                job: "job".into(),
                dump_time_ns: self.clock.wall(taken),
                reason: "time-out".into(),
                ..self.dump.identity
            };
            let has_step = self.spec.faults.contains(&Kind::ShortRing);
            self.dump.status = Some(RankStatus {
                step: if has_step {
                    i64::from(self.spec.steps) - 1
                } else {
                    -1
                },
                heartbeat_ns: self.clock.wall(taken - 100_000_000),
                ..RankStatus::default()
            });
        }
        let is_gloo = self.dump.recorder == Recorder::NativeGloo;
        for at in 0..self.mesh.groups.len() {
            let group = &self.mesh.groups[at];
            if self.mesh.has(at, self.rank) {
                self.local.insert(at, self.dump.groups.len() as u32);
                let is_torchcomms = self.dump.recorder == Recorder::Torchcomms;
                self.dump.groups.push(DumpGroup {
                    info: ProcessGroupInfo {
                        id: self.dump.groups.len() as u32,
                        name: group.name.clone(),
                        desc: if is_torchcomms {
                            "nccl".into()
                        } else {
                            group.desc.into()
                        },
                        ranks: if is_gloo && at != 0 {
                            [].into()
                        } else {
                            group.ranks.as_slice().into()
                        },
                    },
                    place: None,
                    status: None,
                });
            }
        }
        let ahead = self.spec.recording.run_ahead;
        let ended = times.iter().filter(|times| times.ended.is_some()).count();
        let issued = if times.len() > ended {
            (ended + 1 + ahead).min(program.acts.len())
        } else {
            ended
        };
        for (at, act) in program.acts[..issued].iter().enumerate() {
            if !self.share.holds(self.mesh, act) {
                continue;
            }
            if self.failed_at == Some(at) {
                let arrived = times.get(at).map_or(0, |times| times.arrived);
                let failed = Outcome {
                    state: EntryState::Failed,
                    arrived,
                    ended: Some(arrived + 1_000_000_000),
                };
                self.act(act, failed);
                continue;
            }
            let reached = times.get(at);
            let arrived = reached.map_or_else(
                || {
                    times.last().map_or(0, |last| last.arrived)
                        + (at - times.len() + 1) as i64 * 50_000
                },
                |times| times.arrived,
            );
            let state = match reached {
                Some(times) if times.ended.is_some() => EntryState::Completed,
                Some(_) => EntryState::Started,
                None => EntryState::Scheduled,
            };
            let outcome = Outcome {
                state,
                arrived,
                ended: reached.and_then(|times| times.ended),
            };
            self.matched = reached.map_or(0, |times| times.matched);
            self.act(act, outcome);
        }
        if keep < self.dump.entries.len() {
            let excess = self.dump.entries.len() - keep;
            self.dump.entries.drain(..excess);
        }
        if self.dump.recorder == Recorder::Nccl {
            self.add_status();
        }
        self.dump
    }

    /// Records the operations of an act.
    fn act(&mut self, act: &Act, outcome: Outcome) {
        let group = act.group();
        let counts = self.seq.entry(group).or_insert([0; 3]);
        match act {
            Act::Collective { calls, .. } => {
                counts[0] += 1;
                // The other recorders number each operation of a block on its own.
                let knows_blocks = matches!(self.dump.recorder, Recorder::Nccl | Recorder::Rcomm);
                // In NCCL's records, only the closing marker of a coalesced block has a state.
                let has_marker = calls.len() > 1 && self.dump.recorder == Recorder::Nccl;
                for (nth, call) in calls.iter().enumerate() {
                    let counts = self.seq.entry(group).or_insert([0; 3]);
                    counts[0] += u64::from(nth > 0 && !knows_blocks);
                    counts[2] += 1;
                    let issued = Issued {
                        group,
                        call: call.clone(),
                        peer: Peer::None,
                        is_p2p: false,
                    };
                    self.entry(
                        issued,
                        if has_marker {
                            outcome.hidden()
                        } else {
                            outcome
                        },
                    );
                }
                if has_marker {
                    self.entry(marker(group, calls[0].line, false), outcome);
                }
            }
            Act::Batch { messages, line, .. } => {
                if self.dump.recorder == Recorder::NativeGloo {
                    counts[2] += messages.len() as u64;
                    return;
                }
                let is_batched = self.spec.recording.batched || messages.len() > 1;
                let has_marker =
                    is_batched && matches!(self.dump.recorder, Recorder::Nccl | Recorder::Rcomm);
                let is_hidden = has_marker && self.dump.recorder == Recorder::Nccl;
                counts[1] += u64::from(has_marker);
                for (nth, message) in messages.iter().enumerate() {
                    let counts = self.seq.entry(group).or_insert([0; 3]);
                    counts[1] += u64::from(!has_marker);
                    counts[2] += 1;
                    let (op, name) = if message.sends {
                        (OpType::Send, "send")
                    } else {
                        (OpType::Recv, "recv")
                    };
                    let shape = vec![message.elements];
                    let issued = Issued {
                        group,
                        call: Call {
                            input: shape.clone(),
                            output: shape,
                            ..collective(op, name, &[], &[], *line)
                        },
                        peer: if message.from_any && !message.sends {
                            Peer::Any
                        } else {
                            Peer::Rank(message.peer)
                        },
                        is_p2p: true,
                    };
                    // Outside of NCCL's blocks, each message ends on its own.
                    let is_matched = self.matched & 1 << nth != 0;
                    let outcome = match outcome {
                        _ if is_hidden => outcome.hidden(),
                        Outcome {
                            ended: None,
                            arrived,
                            ..
                        } if is_matched => Outcome {
                            state: EntryState::Completed,
                            arrived,
                            ended: Some(arrived + 200_000),
                        },
                        _ => outcome,
                    };
                    self.entry(issued, outcome);
                }
                if has_marker {
                    self.entry(marker(group, *line, true), outcome);
                }
            }
        }
    }

    /// Adds the status of each group, as NCCL's recorder writes it.
    fn add_status(&mut self) {
        for (&group, counts) in &self.seq {
            let local = self.local[&group] as usize;
            let newest = |wanted: &dyn Fn(&Entry) -> bool| {
                let group_entries = self
                    .dump
                    .entries
                    .iter()
                    .filter(|entry| entry.group as usize == local);
                let found = group_entries.filter(|entry| wanted(entry) && !entry.is_p2p);
                found
                    .map(|entry| entry.collective_seq_id as i64)
                    .max()
                    .unwrap_or(-1)
            };
            let status = ProcessGroupStatus {
                last_enqueued: if counts[0] == 0 { -1 } else { counts[0] as i64 },
                last_started: newest(&|entry| entry.time_discovered_started_ns > 0),
                last_completed: newest(&|entry| entry.state == EntryState::Completed),
                timeout_ms: 0,
            };
            self.dump.groups[local].status = Some(status);
        }
    }
}

/// The marker that closes a block of collectives or a batch of messages.
fn marker(group: usize, line: u32, is_p2p: bool) -> Issued {
    Issued {
        group,
        call: collective(OpType::Coalesced, "coalesced", &[], &[], line),
        peer: Peer::None,
        is_p2p,
    }
}
