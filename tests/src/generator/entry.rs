//! Writes one operation in the manner of each recorder.

use super::program::Call;
use super::record::Writer;
use rcomm_recorder::model::{Entry, EntryState, Frame, OpType, Peer, Signature};
use rcomm_recorder::publish::Recorder;

/// An operation as the rank issued it.
pub(super) struct Issued {
    pub(super) group: usize,
    pub(super) call: Call,
    pub(super) peer: Peer,
    pub(super) is_p2p: bool,
}

/// The outcome of an operation, with times in ns since the start of the job.
#[derive(Clone, Copy)]
pub(super) struct Outcome {
    pub(super) state: EntryState,
    pub(super) arrived: i64,
    pub(super) ended: Option<i64>,
}

impl Outcome {
    /// The outcome of a member of a block, in a record where only the closing marker completes.
    pub(super) fn hidden(self) -> Self {
        Self {
            state: EntryState::Scheduled,
            ended: None,
            ..self
        }
    }
}

impl Writer<'_> {
    /// Appends the entry of an operation to the record.
    pub(super) fn entry(&mut self, issued: Issued, outcome: Outcome) {
        let Issued {
            group,
            call,
            peer,
            is_p2p,
        } = issued;
        let Outcome {
            state,
            arrived,
            ended,
        } = outcome;
        let recorder = self.dump.recorder;
        let counts = self.seq[&group];
        let records_starts =
            self.spec.recording.starts && matches!(recorder, Recorder::Nccl | Recorder::Rcomm);
        let state = match (recorder, state) {
            (Recorder::NativeGloo, _) => EntryState::Scheduled,
            (Recorder::Nccl | Recorder::Rcomm, EntryState::Started) if records_starts => {
                EntryState::Started
            }
            (_, EntryState::Started) => EntryState::Scheduled,
            (_, state) => state,
        };
        let retired = ended.is_some() || recorder == Recorder::NativeGloo;
        let ended = ended.filter(|_| recorder != Recorder::NativeGloo);
        let completed = ended.map_or(0, |ended| self.noticed(ended));
        let started = match recorder {
            Recorder::NativeGloo => 0,
            Recorder::Hook | Recorder::Torchcomms => completed,
            _ if records_starts && state != EntryState::Scheduled => self.clock.wall(arrived),
            _ => 0,
        };
        let records_duration = records_starts || recorder == Recorder::Hook;
        let is_collective = !is_p2p;
        let reduce_op = call.reduce_op.filter(|_| recorder == Recorder::Rcomm);
        let root = call.root.filter(|_| recorder == Recorder::Rcomm);
        let is_torchcomms = recorder == Recorder::Torchcomms;
        let entry = Entry {
            record_id: self.operations + u64::from(recorder == Recorder::Rcomm),
            collective_seq_id: if is_torchcomms {
                self.operations
            } else {
                counts[0]
            },
            p2p_seq_id: if is_torchcomms || (is_collective && recorder == Recorder::Nccl) {
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
            is_p2p: is_p2p && !is_torchcomms,
            peer: if is_torchcomms { Peer::None } else { peer },
            root,
            reduce_op,
            time_created_ns: self.clock.wall(arrived),
            time_discovered_started_ns: started,
            time_discovered_completed_ns: completed,
            duration_ms: ended
                .filter(|_| records_duration)
                .map(|ended| (ended - arrived) as f32 / 1e6),
            graph_id: None,
            timeout_ms: 600_000,
            thread: None,
        };
        self.operations += 1;
        self.dump.entries.push(entry);
    }

    /// The wall-clock time at which the host records that an operation has ended, in ns. With NCCL, the watchdog
    /// notices the end later, but not after the record was taken.
    fn noticed(&mut self, ended: i64) -> i64 {
        let late_ms = match self.dump.recorder {
            Recorder::Nccl => self.spec.recording.notice_ms,
            _ => 0,
        };
        let late = (self.notice.draw() % (late_ms * 1_000_000 + 1)) as i64;
        self.clock.wall((ended + late).min(self.taken.max(ended)))
    }

    /// The index of the call's signature in the record, to which a new signature is added.
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
        let no_splits = [Vec::new(), Vec::new()];
        let records_splits = self.spec.recording.splits
            && !matches!(
                self.dump.recorder,
                Recorder::NativeGloo | Recorder::Torchcomms
            );
        let splits = if records_splits {
            &call.splits
        } else {
            &no_splits
        };
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

    /// The index of the stack of a call at this line in the record, to which a new stack is added; `None` if stacks are
    /// not recorded.
    fn stack(&mut self, line: u32) -> Option<u32> {
        if !self.spec.recording.frames {
            return None;
        }
        if let Some(&at) = self.stacks.get(&line) {
            return Some(at);
        }
        let at = self.dump.stacks.len() as u32;
        let frame = self.dump.frames.len() as u32;
        let frame_of = |name: &str, line| Frame {
            name: name.into(),
            filename: "/srv/train.py".into(),
            line,
        };
        self.dump.frames.push(frame_of("forward", line));
        self.dump.frames.push(frame_of("main", 300));
        self.dump.stacks.push(vec![frame, frame + 1]);
        self.stacks.insert(line, at);
        Some(at)
    }
}
