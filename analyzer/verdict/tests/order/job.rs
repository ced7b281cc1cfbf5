//! Makes the records of a small job whose operations have all completed.

use rcomm_recorder::model::{Entry, EntryState, Frame, OpType, Peer, ProcessGroupInfo, Signature};
use rcomm_recorder::publish::{Dump, DumpGroup, Recorder};

/// One call of a rank's program.
#[derive(Clone, Copy)]
pub(crate) enum Call {
    /// `group` is 0 for the world, 1 for a second group of the same ranks. The call stands on `line`; if that is 1000
    /// or more, `line` calls a wrapper, and the call stands in the wrapper.
    AllReduce { group: u32, line: u32 },
    /// A message to `peer`. All messages of one batch have the same `p2p_seq_id`, which is `batch`.
    Send { peer: u32, batch: u64 },
    /// A message from `peer`, numbered in the same way.
    Receive { peer: u32, batch: u64 },
}

/// The records of all ranks: each rank has issued the calls of its program, and all these calls have completed.
pub(crate) fn job(backend: &str, programs: &[Vec<Call>]) -> Vec<Dump> {
    let ranks = programs.len() as u32;
    (0..ranks)
        .zip(programs)
        .map(|(rank, calls)| record(backend, rank, ranks, calls))
        .collect()
}

fn record(backend: &str, rank: u32, ranks: u32, calls: &[Call]) -> Dump {
    let mut dump = Dump {
        recorder: Recorder::Nccl,
        ..Dump::default()
    };
    dump.identity.rank = Some(rank);
    for (id, (name, desc)) in (0..).zip([("0", "default_pg"), ("1", "dp")]) {
        dump.groups.push(DumpGroup {
            info: ProcessGroupInfo {
                id,
                name: name.to_owned(),
                desc: desc.to_owned(),
                ranks: (0..ranks).collect(),
            },
            place: None,
            status: None,
        });
    }
    for op_name in ["all_reduce", "send", "recv"] {
        dump.signatures.push(Signature {
            backend: backend.to_owned(),
            op_name: op_name.to_owned(),
            input_sizes: vec![vec![64]],
            output_sizes: vec![vec![64]],
            input_dtypes: vec!["Float".to_owned()],
            output_dtypes: vec!["Float".to_owned()],
            ..Signature::default()
        });
    }
    let mut collectives = [0u64; 2];
    for (number, &call) in (0..).zip(calls) {
        let (group, signature, op, p2p_seq_id, peer, line) = match call {
            Call::AllReduce { group, line } => {
                collectives[group as usize] += 1;
                (group, 0, OpType::AllReduce, 0, Peer::None, line)
            }
            Call::Send { peer, batch } => (0, 1, OpType::Send, batch, Peer::Rank(peer), 50),
            Call::Receive { peer, batch } => (0, 2, OpType::Recv, batch, Peer::Rank(peer), 51),
        };
        let frame = |name: &str, line| Frame {
            name: name.to_owned(),
            filename: "/srv/train.py".to_owned(),
            line,
        };
        let first = dump.frames.len() as u32;
        if line >= 1000 {
            dump.frames
                .extend([frame("reduce", 7), frame("step", line)]);
        } else {
            dump.frames.push(frame("step", line));
        }
        dump.stacks
            .push((first..dump.frames.len() as u32).collect());
        let created = 1_000_000 * (number as i64 + 1);
        let is_p2p = op != OpType::AllReduce;
        dump.entries.push(Entry {
            record_id: number,
            collective_seq_id: collectives[group as usize],
            p2p_seq_id,
            op_id: number,
            group,
            signature,
            stack: Some(number as u32),
            op,
            state: EntryState::Completed,
            retired: true,
            is_p2p,
            peer,
            root: None,
            reduce_op: None,
            time_created_ns: created,
            time_discovered_started_ns: created,
            time_discovered_completed_ns: created + 100_000_000,
            duration_ms: None,
            graph_id: None,
            timeout_ms: 600_000,
            thread: None,
        });
    }
    dump
}
