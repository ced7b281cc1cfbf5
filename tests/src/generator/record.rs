//! The records that the ranks of a simulated job leave, in the manner of each recorder.

use super::fault::{Fault, Kind};
use super::mesh::Mesh;
use super::program::{Act, Call, Program};
use super::simulate::{Run, Times};
use super::{Random, Spec};
use rcomm_recorder::model::{
    Entry, EntryState, Frame, OpType, Peer, ProcessGroupInfo, ProcessGroupStatus, Rank, RankStatus,
    Signature,
};
use rcomm_recorder::publish::{Dump, DumpGroup, FormatVersion, Identity, Recorder, RingReader};
use std::collections::HashMap;

/// How much of its past a ring holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Everything.
    Whole,
    /// The newest part, on every rank as many operations.
    Last,
    /// The newest part, on every rank another number.
    Unequal,
}

/// Who records, and what.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Whose manner.
    pub recorder: Recorder,
    /// Start times and durations are recorded (NCCL: not by default).
    pub starts: bool,
    /// Messages are issued in batches, with closing markers where the recorder writes them.
    pub batched: bool,
    /// Acts that the host issues beyond the first unfinished one.
    pub run_ahead: usize,
    /// How much is kept.
    pub window: Window,
    /// The hosts' clocks are so far apart, ms, to either side.
    pub clock_spread_ms: u64,
    /// And drift by so much.
    pub drift_ppm: i64,
    /// Call stacks are recorded.
    pub frames: bool,
    /// Split sizes of exchanges are recorded.
    pub splits: bool,
    /// The records are taken when so much of the job's time has gone by, 0..1; `None` = at its end.
    pub taken_at: Option<f64>,
}

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
            .any(|fault| fault.kind == Kind::Crash && fault.rank == rank)
    };
    let hosts = spec.world().div_ceil(8);
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
    let common = random.between(24, 96) as usize;
    let moments = run.times.iter().flatten();
    let end = moments
        .map(|times| times.ended.unwrap_or(times.arrived))
        .max()
        .unwrap_or(0);
    let taken = match spec.recording.taken_at {
        Some(share) => (end as f64 * share) as i64,
        None => end + 20_000_000_000,
    };
    (0..spec.world())
        .filter(|&rank| !crashed(rank))
        .map(|rank| {
            let keep = match spec.recording.window {
                Window::Whole => usize::MAX,
                Window::Last => common,
                Window::Unequal => random.between(24, 200) as usize,
            };
            let clock = Clock {
                offset: offsets[(rank / 8) as usize],
                ppm: spec.recording.drift_ppm,
            };
            let mut writer = Writer::new(spec, mesh, rank, clock);
            writer.taken = taken;
            writer.failed_at = faults
                .iter()
                .find(|fault| fault.kind == Kind::Fails && fault.rank == rank)
                .map(|fault| fault.at);
            let mut dump = writer.write(&programs[rank as usize], run, keep);
            for fault in faults.iter().filter(|fault| fault.rank == rank) {
                show_outside(fault.kind, &mut dump);
            }
            dump
        })
        .collect()
}

/// What a fault leaves in a record beside the operations.
fn show_outside(kind: Kind, dump: &mut Dump) {
    match kind {
        Kind::Dead => dump.identity.reason = RingReader::OWNER_IS_DEAD.into(),
        Kind::Stalled => {
            let taken = dump.identity.dump_time_ns;
            if let Some(status) = &mut dump.status {
                status.heartbeat_ns = taken - 90_000_000_000;
            }
        }
        Kind::ShortRing => {
            dump.entries.drain(..dump.entries.len().saturating_sub(12));
            dump.status.get_or_insert_default().dropped = 3;
        }
        _ => {}
    }
}

#[derive(Clone, Copy)]
struct Clock {
    offset: i64,
    ppm: i64,
}

impl Clock {
    fn wall(self, ns: i64) -> i64 {
        START_NS + self.offset + ns + ns / 1_000_000 * self.ppm
    }
}

struct Writer<'a> {
    spec: &'a Spec,
    mesh: &'a Mesh,
    rank: Rank,
    clock: Clock,
    dump: Dump,
    local: HashMap<usize, u32>,
    seq: HashMap<usize, [u64; 3]>,
    signatures: HashMap<Signature, u32>,
    stacks: HashMap<u32, u32>,
    everything: u64,
    /// When the record is taken, ns since the start.
    taken: i64,
    /// Which act failed by itself.
    failed_at: Option<usize>,
}

impl<'a> Writer<'a> {
    fn new(spec: &'a Spec, mesh: &'a Mesh, rank: Rank, clock: Clock) -> Self {
        let dump = Dump {
            version: FormatVersion::WRITTEN,
            recorder: spec.recording.recorder,
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
            everything: 0,
            taken: 0,
            failed_at: None,
        }
    }

    fn write(mut self, program: &Program, run: &Run, keep: usize) -> Dump {
        // What had not happened yet when the record was taken is not in it.
        let taken = self.taken;
        let times: Vec<Times> = run.times[self.rank as usize]
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
                host: format!("host{}", self.rank / 8),
                job: "job".into(),
                dump_time_ns: self.clock.wall(taken),
                reason: "time-out".into(),
                ..self.dump.identity
            };
            self.dump.status = Some(RankStatus {
                step: -1,
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
                            Vec::new()
                        } else {
                            group.ranks.clone()
                        },
                    },
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
            if self.failed_at == Some(at) {
                let arrived = times.get(at).map_or(0, |times| times.arrived);
                self.act(
                    act,
                    EntryState::Failed,
                    arrived,
                    Some(arrived + 1_000_000_000),
                );
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
            self.act(act, state, arrived, seen.and_then(|times| times.ended));
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

    fn act(&mut self, act: &Act, state: EntryState, arrived: i64, ended: Option<i64>) {
        let group = act.group();
        let counts = self.seq.entry(group).or_insert([0; 3]);
        match act {
            Act::Collective { calls, .. } => {
                counts[0] += 1;
                // Others than these record each operation on its own.
                let blocks = matches!(self.dump.recorder, Recorder::Nccl | Recorder::Rcomm);
                for (nth, call) in calls.iter().enumerate() {
                    let counts = self.seq.entry(group).or_insert([0; 3]);
                    counts[0] += u64::from(nth > 0 && !blocks);
                    counts[2] += 1;
                    // Members of a coalesced block take no state of their own in NCCL's records.
                    let hidden = calls.len() > 1 && self.dump.recorder == Recorder::Nccl;
                    let state = if hidden { EntryState::Scheduled } else { state };
                    let ended = ended.filter(|_| !hidden);
                    self.entry(
                        group,
                        call.clone(),
                        Peer::None,
                        state,
                        arrived,
                        ended,
                        false,
                    );
                }
                if calls.len() > 1 && self.dump.recorder == Recorder::Nccl {
                    let marker = marker(calls[0].line);
                    self.entry(group, marker, Peer::None, state, arrived, ended, false);
                }
            }
            Act::Batch { messages, line, .. } => {
                if self.dump.recorder == Recorder::NativeGloo {
                    counts[2] += messages.len() as u64;
                    return;
                }
                let batched = self.spec.recording.batched;
                let markers =
                    batched && matches!(self.dump.recorder, Recorder::Nccl | Recorder::Rcomm);
                if markers {
                    counts[1] += 1;
                }
                for message in messages {
                    let counts = self.seq.entry(group).or_insert([0; 3]);
                    if !markers {
                        counts[1] += 1;
                    }
                    counts[2] += 1;
                    let (op, name) = if message.sends {
                        (OpType::Send, "send")
                    } else {
                        (OpType::Recv, "recv")
                    };
                    let shape = vec![message.elements];
                    let hidden = markers && self.dump.recorder == Recorder::Nccl;
                    let state = if hidden { EntryState::Scheduled } else { state };
                    let ended = ended.filter(|_| !hidden);
                    let call = Call {
                        input: shape.clone(),
                        output: shape,
                        ..super::program::collective(op, name, &[], &[], *line)
                    };
                    self.entry(
                        group,
                        call,
                        Peer::Rank(message.peer),
                        state,
                        arrived,
                        ended,
                        true,
                    );
                }
                if markers {
                    self.entry(
                        group,
                        marker(*line),
                        Peer::None,
                        state,
                        arrived,
                        ended,
                        true,
                    );
                }
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one entry")]
    fn entry(
        &mut self,
        group: usize,
        call: Call,
        peer: Peer,
        state: EntryState,
        arrived: i64,
        ended: Option<i64>,
        is_p2p: bool,
    ) {
        let recorder = self.dump.recorder;
        let counts = self.seq[&group];
        let starts =
            self.spec.recording.starts && matches!(recorder, Recorder::Nccl | Recorder::Rcomm);
        let state = match (recorder, state) {
            (Recorder::NativeGloo, _) => EntryState::Scheduled,
            (Recorder::Nccl | Recorder::Rcomm, EntryState::Started) if starts => {
                EntryState::Started
            }
            (_, EntryState::Started) => EntryState::Scheduled,
            (_, state) => state,
        };
        let wall = |ns: i64| self.clock.wall(ns);
        let retired = ended.is_some() || recorder == Recorder::NativeGloo;
        let ended = ended.filter(|_| recorder != Recorder::NativeGloo);
        let completed = ended.map_or(0, wall);
        let started = match recorder {
            Recorder::NativeGloo => 0,
            Recorder::Hook | Recorder::Torchcomms => completed,
            _ if starts && state != EntryState::Scheduled => wall(arrived),
            _ => 0,
        };
        let timed = starts || recorder == Recorder::Hook;
        let is_collective = !is_p2p;
        let reduce_op = call.reduce_op.filter(|_| recorder == Recorder::Rcomm);
        let root = call.root.filter(|_| recorder == Recorder::Rcomm);
        let torchcomms = recorder == Recorder::Torchcomms;
        let entry = Entry {
            record_id: self.everything + u64::from(recorder == Recorder::Rcomm),
            collective_seq_id: if torchcomms {
                self.everything
            } else {
                counts[0]
            },
            p2p_seq_id: if torchcomms || (is_collective && recorder == Recorder::Nccl) {
                0
            } else {
                counts[1]
            },
            op_id: counts[2],
            group: self.local[&group],
            signature: self.signature(&call),
            stack: self.stack(call.line),
            op: call.op,
            state,
            retired,
            is_p2p: is_p2p && !torchcomms,
            peer: if torchcomms { Peer::None } else { peer },
            root,
            reduce_op,
            time_created_ns: self.clock.wall(arrived),
            time_discovered_started_ns: started,
            time_discovered_completed_ns: completed,
            duration_ms: ended
                .filter(|_| timed)
                .map(|ended| (ended - arrived) as f32 / 1e6),
            timeout_ms: 600_000,
            thread: None,
        };
        self.everything += 1;
        self.dump.entries.push(entry);
    }

    fn signature(&mut self, call: &Call) -> u32 {
        let shapes = |shape: &[u64]| {
            if shape.is_empty() {
                vec![]
            } else {
                vec![shape.to_vec()]
            }
        };
        let types = |shape: &[u64]| {
            if shape.is_empty() {
                vec![]
            } else {
                vec![call.dtype.to_owned()]
            }
        };
        let backend = match self.dump.recorder {
            Recorder::Hook => "frgloo",
            Recorder::NativeGloo => "gloo",
            Recorder::Rcomm => "cpu",
            _ => "nccl",
        };
        let (input, output) = match (self.dump.recorder, call.op) {
            (Recorder::Hook, OpType::Send) => (call.input.clone(), vec![]),
            (Recorder::Hook, OpType::Recv) => (vec![], call.output.clone()),
            _ => (call.input.clone(), call.output.clone()),
        };
        let none = [Vec::new(), Vec::new()];
        let recorded = self.spec.recording.splits
            && !matches!(
                self.dump.recorder,
                Recorder::NativeGloo | Recorder::Torchcomms
            );
        let splits = if recorded { &call.splits } else { &none };
        let signature = Signature {
            backend: backend.into(),
            op_name: call.name.into(),
            input_sizes: shapes(&input),
            output_sizes: shapes(&output),
            input_dtypes: types(&input),
            output_dtypes: types(&output),
            input_splits: splits[0].clone(),
            output_splits: splits[1].clone(),
        };
        if let Some(&at) = self.signatures.get(&signature) {
            return at;
        }
        let at = self.dump.signatures.len() as u32;
        self.dump.signatures.push(signature.clone());
        self.signatures.insert(signature, at);
        at
    }

    fn stack(&mut self, line: u32) -> Option<u32> {
        if !self.spec.recording.frames {
            return None;
        }
        if let Some(&at) = self.stacks.get(&line) {
            return Some(at);
        }
        let at = self.dump.stacks.len() as u32;
        let frame = self.dump.frames.len() as u32;
        let own = |name: &str, line| Frame {
            name: name.into(),
            filename: "/srv/train.py".into(),
            line,
        };
        self.dump.frames.push(own("forward", line));
        self.dump.frames.push(own("main", 300));
        self.dump.stacks.push(vec![frame, frame + 1]);
        self.stacks.insert(line, at);
        Some(at)
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
            };
            self.dump.groups[local].status = Some(status);
        }
    }
}

fn marker(line: u32) -> Call {
    super::program::collective(OpType::Coalesced, "coalesced", &[], &[], line)
}
