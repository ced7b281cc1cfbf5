//! The records that the ranks of a simulated job leave, in the manner of each recorder.

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

/// How much of its past a ring holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// All of it.
    Whole,
    /// The newest part, the same number of operations on every rank.
    Last,
    /// The newest part, a different number of operations on every rank.
    Unequal,
    /// The newest part, of several steps, a different number of operations on every rank.
    Long,
    /// So little that the operations that the host issued ahead of its device may fill it.
    Short,
}

/// The recorder, and what it records.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The recorder.
    pub recorder: Recorder,
    /// Start times and durations are recorded (NCCL: not by default).
    pub starts: bool,
    /// Messages are issued in batches, with closing markers where the recorder writes them.
    pub batched: bool,
    /// Acts that the host issues beyond the first unfinished one.
    pub run_ahead: usize,
    /// Another recorder of the same process, which records another backend: all operations of the
    /// data-parallel groups, and the broadcast of the parameters at the start.
    pub second_recorder: Option<Recorder>,
    /// How much is kept.
    pub window: Window,
    /// Number of ranks on each host.
    pub per_host: u32,
    /// The largest offset of the hosts' clocks to either side, in ms.
    pub clock_spread_ms: u64,
    /// The drift of the hosts' clocks, in parts per million.
    pub drift_ppm: i64,
    /// Call stacks are recorded.
    pub frames: bool,
    /// Split sizes of exchanges are recorded.
    pub splits: bool,
    /// NCCL's watchdog notices completions up to this much later, in ms.
    pub notice_ms: u64,
    /// The records are taken after this share of the job's time, 0..1; `None` = 20 s after its end.
    pub taken_at: Option<f64>,
}

/// When the job starts, in ns since 1970: an arbitrary time in 2026.
const START_NS: i64 = 1_790_000_000_000_000_000;

pub(super) fn dumps(
    spec: &Spec,
    mesh: &Mesh,
    programs: &[Program],
    run: &Run,
    faults: &[Fault],
    random: &mut Random,
) -> Vec<Dump> {
    let crashed = |rank: Rank| {
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
    let common = random.between(24, LONGEST_RING as u64) as usize;
    // A real ring is never so short that it looks like a dump of the active operations only.
    let overrun = faults.iter().any(|fault| fault.kind == Kind::Overrun);
    let common = if overrun { common.max(64) } else { common };
    let moments = run.times.iter().flatten();
    let end = moments
        .map(|times| times.ended.unwrap_or(times.arrived))
        .max()
        .unwrap_or(0);
    let taken = match spec.recording.taken_at {
        Some(share) => (end as f64 * share) as i64,
        None => end + 20_000_000_000,
    };
    let ranks = (0..spec.world()).filter(|&rank| !crashed(rank));
    let mut dumps = Vec::new();
    for rank in ranks {
        for share in spec.recording.shares() {
            let keep = match spec.recording.window {
                Window::Whole => usize::MAX,
                Window::Last => common,
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
            let me = rank as usize;
            let (program, times) =
                order_fault::as_issued(faults, rank, &programs[me], &run.times[me]);
            let mut dump = writer.write(&program, &times, keep);
            for fault in faults.iter().filter(|fault| fault.rank == rank) {
                show_outside(fault.kind, spec.steps, &mut dump);
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
    /// All of it.
    All,
    /// The operations of the device's backend, where the process has a host backend as well.
    Device,
    /// The operations of the host's backend.
    Host(Recorder),
}

impl Recording {
    /// Which host a rank runs on.
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
    fn holds(self, mesh: &Mesh, act: &Act) -> bool {
        // The call is identified by its place in the program: a wrong operation at that place goes to the
        // same backend.
        let parameters = |call: &Call| call.line == super::script::PARAMETERS;
        let by_host = match act {
            Act::Collective { group: 0, calls } => calls.iter().any(parameters),
            act => matches!(mesh.groups[act.group()].desc, "dp" | "shard" | "replicate"),
        };
        match self {
            Self::All => true,
            Self::Device => !by_host,
            Self::Host(_) => by_host,
        }
    }
}

/// The largest number of operations that a ring with [`Window::Last`] holds.
pub(super) const LONGEST_RING: usize = 96;

/// Removes another rank from the group of this name in the record of `rank`.
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

/// Adds the effects of a fault on a record other than on its operations.
fn show_outside(kind: Kind, steps: u32, dump: &mut Dump) {
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

#[derive(Clone, Copy)]
pub(super) struct Clock {
    offset: i64,
    ppm: i64,
}

impl Clock {
    pub(super) fn wall(self, ns: i64) -> i64 {
        START_NS + self.offset + ns + ns / 1_000_000 * self.ppm
    }
}

pub(super) struct Writer<'a> {
    pub(super) spec: &'a Spec,
    mesh: &'a Mesh,
    rank: Rank,
    pub(super) clock: Clock,
    pub(super) dump: Dump,
    /// The record's number of each group.
    pub(super) local: HashMap<usize, u32>,
    /// Number of collectives, messages and operations of each group so far.
    pub(super) seq: HashMap<usize, [u64; 3]>,
    pub(super) signatures: HashMap<Signature, u32>,
    pub(super) stacks: HashMap<u32, u32>,
    /// Number of all operations so far.
    pub(super) operations: u64,
    /// Draws how late the watchdog notices completions.
    pub(super) notice: Random,
    /// When the record is taken, ns since the start.
    pub(super) taken: i64,
    /// The messages of the batch that is being written whose other half was posted, a bit each.
    matched: u32,
    /// The act that failed by itself.
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

    fn write(mut self, program: &Program, times: &[Times], keep: usize) -> Dump {
        // Events after the record was taken are not in it.
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
        let native = self.dump.recorder == Recorder::NativeGloo;
        for at in 0..self.mesh.groups.len() {
            let group = &self.mesh.groups[at];
            if self.mesh.has(at, self.rank) {
                self.local.insert(at, self.dump.groups.len() as u32);
                let torchcomms = self.dump.recorder == Recorder::Torchcomms;
                self.dump.groups.push(DumpGroup {
                    info: ProcessGroupInfo {
                        id: self.dump.groups.len() as u32,
                        name: group.name.clone(),
                        desc: if torchcomms {
                            "nccl".into()
                        } else {
                            group.desc.into()
                        },
                        ranks: if native && at != 0 {
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
        let last = times.iter().filter(|times| times.ended.is_some()).count();
        let issued = if times.len() > last {
            (last + 1 + ahead).min(program.acts.len())
        } else {
            last
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
            let seen = times.get(at);
            let arrived = seen.map_or_else(
                || {
                    times.last().map_or(0, |last| last.arrived)
                        + (at - times.len() + 1) as i64 * 50_000
                },
                |times| times.arrived,
            );
            let state = match seen {
                Some(times) if times.ended.is_some() => EntryState::Completed,
                Some(_) => EntryState::Started,
                None => EntryState::Scheduled,
            };
            let outcome = Outcome {
                state,
                arrived,
                ended: seen.and_then(|times| times.ended),
            };
            self.matched = seen.map_or(0, |times| times.matched);
            self.act(act, outcome);
        }
        if keep < self.dump.entries.len() {
            let drop = self.dump.entries.len() - keep;
            self.dump.entries.drain(..drop);
        }
        if self.dump.recorder == Recorder::Nccl {
            self.add_status();
        }
        self.dump
    }

    fn act(&mut self, act: &Act, outcome: Outcome) {
        let group = act.group();
        let counts = self.seq.entry(group).or_insert([0; 3]);
        match act {
            Act::Collective { calls, .. } => {
                counts[0] += 1;
                // The other recorders record each operation on its own.
                let blocks = matches!(self.dump.recorder, Recorder::Nccl | Recorder::Rcomm);
                // In NCCL's records, only the closing marker of a coalesced block has a state.
                let marked = calls.len() > 1 && self.dump.recorder == Recorder::Nccl;
                for (nth, call) in calls.iter().enumerate() {
                    let counts = self.seq.entry(group).or_insert([0; 3]);
                    counts[0] += u64::from(nth > 0 && !blocks);
                    counts[2] += 1;
                    let issued = Issued {
                        group,
                        call: call.clone(),
                        peer: Peer::None,
                        is_p2p: false,
                    };
                    self.entry(issued, if marked { outcome.hidden() } else { outcome });
                }
                if marked {
                    self.entry(marker(group, calls[0].line, false), outcome);
                }
            }
            Act::Batch { messages, line, .. } => {
                if self.dump.recorder == Recorder::NativeGloo {
                    counts[2] += messages.len() as u64;
                    return;
                }
                let batched = self.spec.recording.batched || messages.len() > 1;
                let markers =
                    batched && matches!(self.dump.recorder, Recorder::Nccl | Recorder::Rcomm);
                let hidden = markers && self.dump.recorder == Recorder::Nccl;
                counts[1] += u64::from(markers);
                for (nth, message) in messages.iter().enumerate() {
                    let counts = self.seq.entry(group).or_insert([0; 3]);
                    counts[1] += u64::from(!markers);
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
                    // Outside of NCCL's blocks each message ends on its own.
                    let matched = self.matched & 1 << nth != 0;
                    let outcome = match outcome {
                        _ if hidden => outcome.hidden(),
                        Outcome {
                            ended: None,
                            arrived,
                            ..
                        } if matched => Outcome {
                            state: EntryState::Completed,
                            arrived,
                            ended: Some(arrived + 200_000),
                        },
                        _ => outcome,
                    };
                    self.entry(issued, outcome);
                }
                if markers {
                    self.entry(marker(group, *line, true), outcome);
                }
            }
        }
    }

    fn add_status(&mut self) {
        for (&group, counts) in &self.seq {
            let local = self.local[&group] as usize;
            let newest = |wanted: &dyn Fn(&Entry) -> bool| {
                let of_group = self
                    .dump
                    .entries
                    .iter()
                    .filter(|entry| entry.group as usize == local);
                let found = of_group.filter(|entry| wanted(entry) && !entry.is_p2p);
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

fn marker(group: usize, line: u32, is_p2p: bool) -> Issued {
    Issued {
        group,
        call: collective(OpType::Coalesced, "coalesced", &[], &[], line),
        peer: Peer::None,
        is_p2p,
    }
}
