//! Makes the records of a small job.

use rcomm_recorder::model::{
    Entry, EntryState, FailedOperation, Failure, FailureKind, OpType, Peer, ProcessGroupInfo, Rank,
    RankStatus, Signature,
};
use rcomm_recorder::publish::{
    Dump, DumpGroup, LaunchRecord, LaunchSignal, LaunchedRank, RankEnd, Recorder, RingReader,
};

/// 13:00:00 UTC of some day, ns since the epoch.
const ONE_O_CLOCK: i64 = 1_699_966_800_000_000_000;

/// A moment, `seconds` after 13:00:00 UTC.
pub(crate) fn at(seconds: f64) -> i64 {
    ONE_O_CLOCK + (seconds * 1e9) as i64
}

/// The state of an operation, and when it was recorded.
#[derive(Clone, Copy)]
pub(crate) enum State {
    /// Issued, and not ended.
    Pending,
    /// Completed at this time.
    Done(f64),
    /// Ended with an error at this time.
    Failed(f64),
}

/// The record of one rank of a job of `ranks`, with its all_reduces in order: when each was issued, and its state. The
/// time-out of each is 30 s.
pub(crate) fn record(rank: Rank, ranks: Rank, operations: &[(f64, State)]) -> Dump {
    let mut dump = Dump {
        recorder: Recorder::Rcomm,
        status: Some(RankStatus::default()),
        ..Dump::default()
    };
    dump.identity.rank = Some(rank);
    dump.identity.world_size = Some(ranks);
    dump.identity.host = "n0".to_owned();
    dump.identity.pid = 100 + rank;
    dump.groups.push(DumpGroup {
        info: ProcessGroupInfo {
            id: 0,
            name: "0".to_owned(),
            desc: "default_pg".to_owned(),
            ranks: (0..ranks).collect(),
        },
        place: None,
        status: None,
    });
    dump.signatures.push(Signature {
        backend: "cpu".to_owned(),
        op_name: "all_reduce".to_owned(),
        input_sizes: vec![vec![64]],
        output_sizes: vec![vec![64]],
        input_dtypes: vec!["Float".to_owned()],
        output_dtypes: vec!["Float".to_owned()],
        ..Signature::default()
    });
    let entries = operations
        .iter()
        .zip(1..)
        .map(|(&(issued, state), number)| {
            // Of an operation that failed, a ring notes how long it lasted, and no time of completion.
            let (state, ended, lasted) = match state {
                State::Pending => (EntryState::Started, 0, None),
                State::Done(then) => (EntryState::Completed, at(then), None),
                State::Failed(then) => (EntryState::Failed, 0, Some((then - issued) as f32 * 1e3)),
            };
            Entry {
                record_id: number,
                collective_seq_id: number,
                p2p_seq_id: 0,
                op_id: number,
                group: 0,
                signature: 0,
                stack: None,
                op: OpType::AllReduce,
                state,
                retired: state > EntryState::Started,
                is_p2p: false,
                peer: Peer::None,
                root: None,
                reduce_op: None,
                time_created_ns: at(issued),
                time_discovered_started_ns: at(issued),
                time_discovered_completed_ns: ended,
                duration_ms: lasted,
                graph_id: None,
                timeout_ms: 30_000,
                thread: None,
            }
        });
    dump.entries = entries.collect();
    dump
}

/// Adds an access to a window of the group to the record of a rank: of which kind, to whom, when it was issued, and its
/// state. Its time-out is 30 s.
pub(crate) fn with_access(
    mut dump: Dump,
    op: OpType,
    peer: Rank,
    (issued, state): (f64, State),
) -> Dump {
    let mut entry = record(0, 1, &[(issued, state)]).entries.remove(0);
    let number = dump.entries.len() as u64 + 1;
    (entry.record_id, entry.op_id) = (number, number);
    (entry.op, entry.peer) = (op, Peer::Rank(peer));
    entry.collective_seq_id = 0;
    entry.signature = dump.signatures.len() as u32;
    dump.signatures.push(Signature {
        backend: "window".to_owned(),
        op_name: op.name().to_owned(),
        ..Signature::default()
    });
    dump.entries.push(entry);
    dump
}

/// The ring of a dead process that gave its last sign of life at this time.
pub(crate) fn dead(dump: Dump, last: f64) -> Dump {
    taken(dump, last, RingReader::OWNER_IS_DEAD)
}

/// A ring that was closed at this time.
pub(crate) fn closed(dump: Dump, last: f64) -> Dump {
    taken(dump, last, RingReader::CLOSED)
}

/// The ring of the plug-in for NCCL in a process that is gone: it has no signs of life and states no time-outs.
pub(crate) fn left_by_plug_in(dump: Dump) -> Dump {
    let last = dump.entries.iter().map(|entry| {
        let ended = entry.time_discovered_completed_ns;
        ended.max(entry.time_created_ns)
    });
    let last_ns = last.max().unwrap_or(0);
    let mut dump = taken(dump, 0.0, RingReader::OWNER_IS_DEAD);
    dump.identity.dump_time_ns = last_ns;
    dump.recorder = Recorder::NcclProfiler;
    dump.status = Some(RankStatus::default());
    for entry in &mut dump.entries {
        entry.timeout_ms = 0;
    }
    dump
}

/// The ring of a live process, read at this time.
pub(crate) fn alive(dump: Dump, now: f64) -> Dump {
    taken(dump, now, RingReader::OWNER_LIVES)
}

/// The dump as taken for this reason at this time, which is also that of the last heartbeat.
fn taken(mut dump: Dump, then: f64, reason: &str) -> Dump {
    dump.identity.dump_time_ns = at(then);
    dump.identity.reason = reason.to_owned();
    if let Some(status) = &mut dump.status {
        status.heartbeat_ns = at(then);
    }
    dump
}

/// The ring of a process that was stopped at `then`, read at `now`.
pub(crate) fn stopped(dump: Dump, then: f64, now: f64) -> Dump {
    let mut dump = taken(dump, now, RingReader::OWNER_IS_STOPPED);
    if let Some(status) = &mut dump.status {
        status.heartbeat_ns = at(then);
    }
    dump
}

/// Adds a failure of the rank's last operation, as the rank recorded it at this time.
pub(crate) fn fails(mut dump: Dump, kind: FailureKind, about: &[Rank], then: f64) -> Dump {
    let rank = dump.identity.rank.unwrap_or_default();
    let last = dump
        .entries
        .last()
        .expect("the rank has an operation that can fail");
    dump.failures.push(Failure {
        id: 1,
        group: Some(0),
        operation: Some(FailedOperation {
            op: last.op,
            seq: last.collective_seq_id,
            is_p2p: false,
            record_id: last.record_id,
        }),
        time_ns: at(then),
        ..Failure::new(kind, about, rank, "")
    });
    dump
}

/// A launch record: the signal that the launcher received and when, and for each rank, from 0 on, the exit code, the
/// signal and the time of its end.
pub(crate) fn launch(
    received: Option<(i32, f64)>,
    ends: &[(Option<i32>, Option<i32>, f64)],
) -> LaunchRecord {
    let signal = |(signal, then)| LaunchSignal {
        signal,
        time_ns: at(then),
    };
    let rank = |(rank, &(exit_code, signal, then))| LaunchedRank {
        rank,
        end: Some(RankEnd {
            time_ns: at(then),
            exit_code,
            signal,
            out_of_memory: None,
        }),
        ..LaunchedRank::default()
    };
    LaunchRecord {
        received: received.map(signal).into_iter().collect(),
        ranks: (0..).zip(ends).map(rank).collect(),
        ..LaunchRecord::default()
    }
}
