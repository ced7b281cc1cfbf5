//! Converts a [`Dump`] to the dialect; shared by the JSON and the pickle writer.
//!
//! Writes version 2.10 as PyTorch's tools expect it, and rcomm's keys where they have a value. The encodings
//! differ only in what [`Encoder`] defines.

use super::keys::{Field, config, failure, peer, rank, reducer, status, top};
use super::names::{ProfilingName, op_name_for_torch};
use crate::model::dump::{Dump, DumpGroup, FormatVersion, Identity, Recorder};
use crate::model::{
    Entry, EntryState, Failure, LinkEnd, OpType, Peer, PeerLink, ProcessGroupInfo, RankStatus,
    ReducerStep, Signature,
};
use std::collections::{HashMap, HashSet};

/// One encoding. A key is followed by exactly one value.
pub(super) trait Encoder {
    fn dict(&mut self, fill: impl FnOnce(&mut Self));
    fn key(&mut self, key: &str);
    fn list(&mut self, fill: impl FnOnce(&mut Self));
    fn text(&mut self, text: &str);
    fn int(&mut self, value: i64);
    fn uint(&mut self, value: u64);
    fn float(&mut self, value: f64);
    fn bool(&mut self, value: bool);
    /// A time; 0 if it was not seen, which is Python's `None` in pickle.
    fn time(&mut self, ns: i64);
    /// A counter of `pg_status`: a string in JSON.
    fn counter(&mut self, value: i64);
    /// Name and description of a group: a tuple in pickle, a list in JSON.
    fn pair(&mut self, name: &str, desc: &str);
    /// The name of a backend of rcomm's in `profiling_name`: in pickle one that PyTorch's tools know.
    fn backend<'a>(&self, name: &'a str) -> &'a str;
    /// Tables written before the entries, in encodings that have a table of stacks.
    fn stack_tables(&mut self, dump: &Dump);
    /// The stack of one entry, key and value.
    fn stack(&mut self, dump: &Dump, stack: Option<u32>);
}

/// Writes the whole dump as one value.
pub(super) fn dump<E: Encoder>(dump: &Dump, out: &mut E) {
    out.dict(|out| {
        out.key(top::VERSION);
        out.text(&FormatVersion::WRITTEN.to_string());
        identity(&dump.identity, dump.recorder, dump.closed_ns, out);
        if let Some(known) = &dump.status {
            out.key(top::STATUS);
            rank_status(known, out);
        }
        out.key(top::PG_CONFIG);
        pg_config(&dump.groups, out);
        out.key(top::PG_STATUS);
        pg_status(&dump.groups, out);
        out.key(top::COMM_LIB_VERSION);
        out.text(&dump.comm_lib_version);
        if !dump.nccl_comm_state.is_empty() {
            out.key(top::NCCL_COMM_STATE);
            out.dict(|out| {
                for (comm, facts) in &dump.nccl_comm_state {
                    out.key(comm);
                    out.dict(|out| {
                        for (name, value) in facts {
                            out.key(name);
                            out.text(value);
                        }
                    });
                }
            });
        }
        if !dump.failures.is_empty() {
            out.key(top::FAILURES);
            out.list(|out| {
                dump.failures
                    .iter()
                    .for_each(|failure| one_failure(failure, out))
            });
        }
        if !dump.peers.is_empty() {
            out.key(top::PEERS);
            out.list(|out| dump.peers.iter().for_each(|link| peer_link(link, out)));
        }
        if let Some(wait) = dump.processor_wait {
            out.key(top::PROCESSOR_WAIT_SINCE);
            out.int(wait.since_ns);
            out.key(top::PROCESSOR_WAIT);
            out.uint(wait.waited_ns);
        }
        if !dump.reducer_steps.is_empty() {
            out.key(top::REDUCER_STEPS);
            out.list(|out| (dump.reducer_steps.iter()).for_each(|step| reducer_step(step, out)));
        }
        out.stack_tables(dump);
        out.key(top::ENTRIES);
        out.list(|out| {
            for entry in &dump.entries {
                self::entry(dump, entry, out);
            }
        });
    });
}

/// Writes the keys of the process, and when it closed its record.
fn identity<E: Encoder>(identity: &Identity, recorder: Recorder, closed_ns: i64, out: &mut E) {
    out.key(top::RECORDER);
    out.text(recorder.name());
    let numbers = [
        (top::RANK, identity.rank.map(i64::from)),
        (top::WORLD_SIZE, identity.world_size.map(i64::from)),
        (top::ATTEMPT, nonzero(identity.attempt.into())),
        (top::PID, nonzero(identity.pid.into())),
        (top::BEGUN, nonzero(identity.begun_ns)),
        (top::DUMP_TIME, nonzero(identity.dump_time_ns)),
        (top::CLOSED, nonzero(closed_ns)),
    ];
    for (key, value) in numbers {
        if let Some(value) = value {
            out.key(key);
            out.int(value);
        }
    }
    let texts = [
        (top::HOST, &identity.host),
        (top::JOB, &identity.job),
        (top::REASON, &identity.reason),
    ];
    for (key, text) in texts {
        if !text.is_empty() {
            out.key(key);
            out.text(text);
        }
    }
}

/// The value; `None` if it is 0.
fn nonzero(value: i64) -> Option<i64> {
    (value != 0).then_some(value)
}

fn rank_status<E: Encoder>(own_status: &RankStatus, out: &mut E) {
    out.dict(|out| {
        out.key(rank::PHASE);
        out.text(&own_status.phase);
        out.key(rank::PHASE_SINCE);
        out.int(own_status.phase_since_ns);
        out.key(rank::STEP);
        out.int(own_status.step);
        out.key(rank::HEARTBEAT);
        out.int(own_status.heartbeat_ns);
        out.key(rank::DROPPED);
        out.uint(own_status.dropped);
        if let Some(exit) = own_status.exit {
            out.key(rank::EXIT_CODE);
            out.int(exit.code.into());
            out.key(rank::EXITED);
            out.int(exit.time_ns);
        }
    });
}

fn reducer_step<E: Encoder>(step: &ReducerStep, out: &mut E) {
    let (times, sums) = (&step.times, &step.times.sums);
    out.dict(|out| {
        out.key(reducer::ENDED);
        out.int(step.ended_ns);
        let numbers = [
            (reducer::ID, step.id),
            (reducer::GROUP, step.group.into()),
            (reducer::STEP, times.step),
            (reducer::FORWARD, times.forward_ns),
            (reducer::BACKWARD, times.backward_ns),
            (reducer::COMMUNICATION, times.communication_ns),
            (reducer::EXPOSED, times.exposed_ns),
            (reducer::BYTES, times.bytes),
            (reducer::BUCKET_COUNT, times.bucket_count.into()),
            (reducer::SUM_STEPS, sums.steps),
            (reducer::SUM_FORWARD, sums.forward_ns),
            (reducer::SUM_BACKWARD, sums.backward_ns),
            (reducer::SUM_COMMUNICATION, sums.communication_ns),
            (reducer::SUM_EXPOSED, sums.exposed_ns),
        ];
        keyed(&numbers, out);
        out.key(reducer::BUCKETS);
        out.list(|out| {
            for bucket in &step.buckets {
                let numbers = [
                    (reducer::INDEX, bucket.index.into()),
                    (reducer::PARAMETERS, bucket.parameters.into()),
                    (reducer::BYTES, bucket.bytes),
                    (reducer::READY, bucket.ready_ns),
                    (reducer::SENT, bucket.sent_ns),
                    (reducer::COMMUNICATION, bucket.communication_ns),
                    (reducer::EXPOSED, bucket.exposed_ns),
                ];
                out.dict(|out| keyed(&numbers, out));
            }
        });
    });
}

/// Writes each key with its number.
fn keyed<E: Encoder>(numbers: &[(&str, u64)], out: &mut E) {
    for &(key, value) in numbers {
        out.key(key);
        out.uint(value);
    }
}

/// Writes the connections to one other end, with the keys that have a value.
fn peer_link<E: Encoder>(link: &PeerLink, out: &mut E) {
    let (rank, is_store) = match link.end {
        LinkEnd::Rank(rank) => (Some(rank), false),
        LinkEnd::StoreAtRank(rank) => (Some(rank), true),
        LinkEnd::Store => (None, true),
    };
    out.dict(|out| {
        if is_store {
            out.key(peer::STORE);
            out.bool(true);
        }
        if let Some(rank) = rank {
            out.key(peer::RANK);
            out.uint(rank.into());
        }
        let times = [
            (peer::HEARD, link.heard_ns),
            (peer::SAMPLED, link.sampled_ns),
            (peer::WAITED_SINCE, link.waited_since_ns),
        ];
        for (key, time) in times {
            if time != 0 {
                out.key(key);
                out.int(time);
            }
        }
        if let Some(waiting) = link.waiting {
            out.key(peer::GROUP);
            out.uint(waiting.group.into());
            out.key(peer::SEQ);
            out.uint(waiting.seq);
            out.key(peer::IS_P2P);
            out.bool(waiting.is_p2p);
        }
        let numbers = [
            (peer::RECEIVED, link.received),
            (peer::SENT, link.sent),
            (peer::UNACKNOWLEDGED, link.unacknowledged.into()),
            (peer::ERRNO, link.errno.into()),
            (peer::INTERVAL, link.interval_ms.into()),
        ];
        for (key, number) in numbers {
            if number != 0 {
                out.key(key);
                out.uint(number);
            }
        }
    });
}

/// Writes one failure, with the keys that it has in the JSON of an endpoint's status.
fn one_failure<E: Encoder>(recorded: &Failure, out: &mut E) {
    out.dict(|out| {
        out.key(failure::ID);
        out.uint(recorded.id);
        out.key(failure::KIND);
        out.text(recorded.kind.name());
        out.key(failure::RANKS);
        out.list(|out| {
            recorded
                .ranks
                .iter()
                .for_each(|&rank| out.uint(rank.into()))
        });
        out.key(failure::RANK_COUNT);
        out.uint(recorded.rank_count.into());
        if let Some(group) = recorded.group {
            out.key(failure::GROUP);
            out.uint(group.into());
        }
        if let Some(operation) = &recorded.operation {
            out.key(failure::OPERATION);
            out.dict(|out| {
                out.key(failure::OP);
                out.text(operation.op.name());
                out.key(failure::SEQ);
                out.uint(operation.seq);
                out.key(failure::IS_P2P);
                out.bool(operation.is_p2p);
                out.key(failure::RECORD_ID);
                out.uint(operation.record_id);
            });
        }
        out.key(failure::TIME);
        out.int(recorded.time_ns);
        out.key(failure::SEEN_BY);
        out.uint(recorded.seen_by.into());
        out.key(failure::TEXT);
        out.text(&recorded.text);
    });
}

/// The keys of groups in `pg_config`.
#[derive(Default)]
struct GroupKeys {
    taken: HashSet<String>,
    /// The last number that was appended to a name with a group's number. The next key begins there: a damaged record
    /// may have thousands of groups of one name and number.
    last: HashMap<String, u64>,
}

impl GroupKeys {
    /// The key of the next group: its name, or, if that is a key already, its name and number; if that is a key too, a
    /// count is appended.
    fn next(&mut self, info: &ProcessGroupInfo) -> String {
        if self.taken.insert(info.name.clone()) {
            return info.name.clone();
        }
        let base = format!("{} ({})", info.name, info.id);
        let mut key = base.clone();
        let last = self.last.entry(base.clone()).or_insert(1);
        while !self.taken.insert(key.clone()) {
            *last += 1;
            key = format!("{base} ({last})");
        }
        key
    }
}

/// Writes the groups under keys of their own: in PyTorch's dumps a group replaces an earlier one of the same name.
fn pg_config<E: Encoder>(groups: &[DumpGroup], out: &mut E) {
    let mut keys = GroupKeys::default();
    out.dict(|out| {
        for DumpGroup { info, place, .. } in groups {
            out.key(&keys.next(info));
            out.dict(|out| {
                out.key(config::NAME);
                out.text(&info.name);
                out.key(config::DESC);
                out.text(&info.desc);
                out.key(config::RANKS);
                out.text(&format!("{:?}", info.ranks));
                out.key(config::PG_ID);
                out.uint(info.id.into());
                if let Some(place) = place {
                    out.key(config::GROUP_RANK);
                    out.uint(place.rank.into());
                    out.key(config::GROUP_SIZE);
                    out.uint(place.size.into());
                }
            });
        }
    });
}

fn pg_status<E: Encoder>(groups: &[DumpGroup], out: &mut E) {
    out.dict(|out| {
        for group in groups {
            let Some(known) = group.status else { continue };
            out.key(&group.info.id.to_string());
            out.dict(|out| {
                out.key(status::ENQUEUED);
                out.counter(known.last_enqueued);
                out.key(status::STARTED);
                out.counter(known.last_started);
                out.key(status::COMPLETED);
                out.counter(known.last_completed);
                if known.timeout_ms > 0 {
                    out.key(status::TIMEOUT);
                    out.uint(known.timeout_ms);
                }
            });
        }
    });
}

fn entry<E: Encoder>(dump: &Dump, entry: &Entry, out: &mut E) {
    let info = &dump.groups[entry.group as usize].info;
    let signature = &dump.signatures[entry.signature as usize];
    let own_rank = dump.identity.rank.and_then(|rank| info.group_rank_of(rank));
    let backend = match dump.recorder {
        Recorder::Rcomm => out.backend(&signature.backend),
        _ => &signature.backend,
    };
    let name = profiling_name(entry, signature, backend, own_rank);
    let parsed = ProfilingName::parse(&name);
    let (has_op_name, has_peer) = (
        parsed.op_name == signature.op_name,
        parsed.peer == entry.peer,
    );
    out.dict(|out| {
        out.stack(dump, entry.stack);
        field(out, Field::RecordId).uint(entry.record_id);
        field(out, Field::PgId).uint(info.id.into());
        field(out, Field::ProcessGroup).pair(&info.name, &info.desc);
        if let Some(thread) = entry.thread {
            let thread = &dump.threads[thread as usize];
            field(out, Field::ThreadName).text(&thread.name);
            field(out, Field::ThreadId).text(&thread.id);
        }
        field(out, Field::CollectiveSeqId).uint(entry.collective_seq_id);
        field(out, Field::P2pSeqId).uint(entry.p2p_seq_id);
        field(out, Field::OpId).uint(entry.op_id);
        field(out, Field::ProfilingName).text(&name);
        field(out, Field::TimeCreated).int(entry.time_created_ns);
        if let Some(duration) = entry.duration_ms {
            field(out, Field::Duration).float(duration.into());
        }
        shapes(field(out, Field::InputSizes), &signature.input_sizes);
        texts(field(out, Field::InputDtypes), &signature.input_dtypes);
        shapes(field(out, Field::OutputSizes), &signature.output_sizes);
        texts(field(out, Field::OutputDtypes), &signature.output_dtypes);
        field(out, Field::State).text(state(entry));
        field(out, Field::TimeStarted).time(entry.time_discovered_started_ns);
        field(out, Field::TimeCompleted).time(entry.time_discovered_completed_ns);
        field(out, Field::Retired).bool(entry.retired);
        field(out, Field::Timeout).uint(entry.timeout_ms);
        field(out, Field::IsP2p).bool(entry.is_p2p);
        // rcomm's keys, each only if it has a value.
        if !has_op_name {
            field(out, Field::OpName).text(&signature.op_name);
        }
        if backend != signature.backend {
            field(out, Field::Backend).text(&signature.backend);
        }
        match entry.peer {
            Peer::Any if !has_peer => field(out, Field::Peer).text("any"),
            Peer::Rank(peer) if !has_peer => field(out, Field::Peer).uint(peer.into()),
            _ => {}
        }
        if let Some(root) = entry.root {
            field(out, Field::Root).uint(root.into());
        }
        if let Some(op) = entry.reduce_op {
            field(out, Field::ReduceOp).text(op.name());
        }
        if !signature.input_splits.is_empty() {
            uints(field(out, Field::InputSplits), &signature.input_splits);
        }
        if !signature.output_splits.is_empty() {
            uints(field(out, Field::OutputSplits), &signature.output_splits);
        }
        if entry.state == EntryState::Failed {
            field(out, Field::Failed).bool(true);
        }
        if let Some(graph) = entry.graph_id {
            field(out, Field::GraphId).uint(graph);
        }
    });
}

/// Writes the key of a field, and returns the encoder for its value.
fn field<E: Encoder>(out: &mut E, field: Field) -> &mut E {
    out.key(field.key());
    out
}

/// The name `<backend>:<op>[ <peers>]`, with peers if both this rank's number in the group and the peer were recorded.
fn profiling_name(
    entry: &Entry,
    signature: &Signature,
    backend: &str,
    own_rank: Option<u32>,
) -> String {
    // Readers take the text after the last colon as the operation, so the operation may not contain a colon.
    let op = op_name_for_torch(&signature.op_name).replace(':', "_");
    let ends = own_rank.and_then(|own| match entry.peer {
        Peer::Rank(peer) if entry.op == OpType::Send => Some(format!(" {own}->{peer}")),
        Peer::Rank(peer) if entry.op == OpType::Recv => Some(format!(" {own}<-{peer}")),
        Peer::Any if entry.op == OpType::Recv => Some(format!(" {own}<-?")),
        Peer::Rank(_) | Peer::Any | Peer::None => None,
    });
    format!("{backend}:{op}{}", ends.unwrap_or_default())
}

/// The spelling of an entry's state. PyTorch has three states: a failed operation is written as the state that it had
/// reached.
fn state(entry: &Entry) -> &'static str {
    match entry.state {
        EntryState::Completed => "completed",
        EntryState::Started => "started",
        EntryState::Failed if entry.time_discovered_started_ns != 0 => "started",
        EntryState::Scheduled | EntryState::Failed => "scheduled",
    }
}

fn shapes<E: Encoder>(out: &mut E, shapes: &[Vec<u64>]) {
    out.list(|out| shapes.iter().for_each(|shape| uints(out, shape)));
}

fn uints<E: Encoder>(out: &mut E, values: &[u64]) {
    out.list(|out| values.iter().for_each(|&value| out.uint(value)));
}

fn texts<E: Encoder>(out: &mut E, texts: &[String]) {
    out.list(|out| texts.iter().for_each(|text| out.text(text)));
}
