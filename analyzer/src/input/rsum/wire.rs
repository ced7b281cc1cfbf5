//! Defines the parts of a summary. The order of variants and fields is the format: a new order raises
//! [`VERSION`](super::VERSION).

use crate::input::ras::RasReport;
use rcomm_recorder::model::{
    Entry, EntryState, Failure, Frame, GroupPlace, OpType, Peer, PeerLink, ProcessExit,
    ProcessGroupInfo, ProcessGroupStatus, ProcessorWait, Rank, RankStatus, ReduceOp, Signature,
};
use rcomm_recorder::publish::{Dump, DumpGroup, FormatVersion, Identity, Recorder, ThreadInfo};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// A part of a summary.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Part {
    /// Rows of the tables, before the first record that needs them.
    WireTables(WireTables),
    Record(Box<Record>),
    /// A problem of an input: code, paths, sentence. Several paths are separated by [`BETWEEN_PATHS`].
    Problem(String, String, String),
    End(End),
    /// The name of a file and the report of NCCL's RAS in it.
    Ras(String, RasReport),
    /// A record, and the index and the graph of each operation that was captured into a CUDA graph (since version 2).
    Captured(Box<Record>, Vec<(u32, u64)>),
    /// The failures of the next record, and when its process closed its ring, ns since the epoch or 0 (since version
    /// 3).
    Ended(Vec<Failure>, i64),
    /// The connections of the next record (since version 4).
    Peers(Vec<PeerLink>),
    /// How long the threads of the next record waited for a processor (since version 5).
    ProcessorWait(ProcessorWait),
    /// By index of a group of the next record: its rank there and the group's size, for a group whose members the
    /// record does not have (since version 6).
    Places(Vec<(u32, GroupPlace)>),
    /// When the next record was begun, ns since the epoch or 0, and how its process exited (since version 7).
    Process(i64, Option<ProcessExit>),
    /// Rows of the table of members, before the first record that needs them (since version 8; before, in
    /// [`WireTables`]).
    Members(Vec<Vec<Run>>),
    /// When the file of the next record was written, ns since the epoch, if the record states no time (since version
    /// 9).
    Written(i64),
}

/// What separates the paths of a problem: no path holds it. Older readers, which know only one path, print it escaped.
pub(super) const BETWEEN_PATHS: char = '\0';

/// Ranks at equal distances: the first, the distance, and how many. The members of most groups are one run. Listed one
/// by one, they would be most of the summary of a node of a large job.
pub(super) type Run = (Rank, i64, u32);

/// A list of ranks as runs.
pub(super) fn runs(ranks: &[Rank]) -> Vec<Run> {
    let distance = |pair: &[Rank]| i64::from(pair[1]) - i64::from(pair[0]);
    let mut runs = Vec::new();
    let mut rest = ranks;
    while let Some(&first) = rest.first() {
        let step = rest.get(..2).map_or(0, distance);
        let alike = rest.windows(2).take_while(|pair| distance(pair) == step);
        let len = 1 + alike.count();
        runs.push((first, step, len as u32));
        rest = &rest[len..];
    }
    runs
}

/// The number of ranks in runs.
pub(super) fn ranks_in(runs: &[Run]) -> u64 {
    runs.iter().map(|&(.., len)| u64::from(len)).sum()
}

/// The ranks in runs; `None` if one is negative or has more than 32 bits.
pub(super) fn ranks(runs: &[Run]) -> Option<Arc<[Rank]>> {
    let list = runs.iter().flat_map(|&(first, step, len)| {
        (0..i64::from(len)).map(move |nth| {
            let rank = nth.checked_mul(step)?.checked_add(i64::from(first))?;
            Rank::try_from(rank).ok()
        })
    });
    list.collect()
}

/// Rows that are appended to the tables of earlier parts.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct WireTables {
    pub(super) signatures: Vec<Signature>,
    pub(super) frames: Vec<Frame>,
    /// Indices of `frames`, innermost first.
    pub(super) stacks: Vec<Vec<u32>>,
    /// Members of groups.
    pub(super) members: Vec<Arc<[Rank]>>,
}

impl WireTables {
    pub(super) fn is_empty(&self) -> bool {
        self.signatures.is_empty()
            && self.frames.is_empty()
            && self.stacks.is_empty()
            && self.members.is_empty()
    }
}

/// The last part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct End {
    /// The number of records before this part.
    pub(super) records: u64,
    /// The number of files that were read.
    pub(super) files: u64,
}

/// The record of one rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) path: String,
    /// Whether operations may be missing.
    pub(super) cut: bool,
    /// The major and the minor version of the dump's format.
    version: (u32, u32),
    recorder: String,
    identity: Identity,
    status: Option<RankStatus>,
    comm_lib_version: String,
    groups: Vec<Group>,
    /// The record's signatures in its own order, as indices of rows of their table. Also in the next two fields, for
    /// frames and stacks.
    signatures: Vec<u32>,
    frames: Vec<u32>,
    stacks: Vec<u32>,
    /// The id and the name of each thread.
    threads: Vec<(String, String)>,
    nccl_comm_state: Vec<(String, Vec<(String, String)>)>,
    columns: Columns,
}

#[derive(Debug, Serialize, Deserialize)]
struct Group {
    id: u32,
    name: String,
    desc: String,
    /// Index of a row of the table of members.
    members: u32,
    status: Option<ProcessGroupStatus>,
}

/// The operations, as a column for each field.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Columns {
    /// The difference from the previous operation.
    record_id: Vec<i64>,
    /// Index of a group of the record.
    group: Vec<u32>,
    /// The difference from the previous operation of the same group; also in the next two columns.
    collective_seq_id: Vec<i64>,
    p2p_seq_id: Vec<i64>,
    op_id: Vec<i64>,
    /// Index of a signature of the record; the next column, of a stack.
    signature: Vec<u32>,
    stack: Vec<Option<u32>>,
    /// The code of the operation; the next column, of its state.
    op: Vec<u8>,
    state: Vec<u8>,
    /// Bits: [`RETIRED`], [`IS_P2P`].
    flags: Vec<u8>,
    /// 0 = none, 1 = any, else the rank plus 2.
    peer: Vec<u64>,
    root: Vec<Option<u32>>,
    /// 0 = none, else the code of the reduction plus 1.
    reduce_op: Vec<u16>,
    /// The time of issue: the difference from the previous operation, ns.
    created: Vec<i64>,
    /// The time of the start, ns after the issue; `None` if unknown. Also in the next column, for the end.
    started: Vec<Option<i64>>,
    completed: Vec<Option<i64>>,
    duration_ms: Vec<Option<f32>>,
    timeout_ms: Vec<u64>,
    /// Index of a thread of the record.
    thread: Vec<Option<u32>>,
}

/// The bit in [`Columns::flags`] for [`Entry::retired`].
const RETIRED: u8 = 1;
/// The bit in [`Columns::flags`] for [`Entry::is_p2p`].
const IS_P2P: u8 = 2;

/// Indices of the rows of the tables that a record refers to, in the record's own order.
pub(super) struct Rows {
    pub(super) signatures: Vec<u32>,
    pub(super) frames: Vec<u32>,
    pub(super) stacks: Vec<u32>,
    /// One for each group.
    pub(super) members: Vec<u32>,
}

const NO_SUCH_ROW: &str = "a record refers to a row that no table has";

/// The largest number of items of the tables in one record: without this limit, repeated references to large rows could
/// fill the memory.
const MAX_ITEMS: usize = 1 << 25;

/// The number of items to which a record may still refer.
struct Budget(usize);

impl Budget {
    /// A row of a table; an error if the table lacks it or the budget is exceeded.
    fn take<'a, T>(
        &mut self,
        table: &'a [T],
        row: u32,
        items: impl Fn(&T) -> usize,
    ) -> Result<&'a T, &'static str> {
        let row = table.get(row as usize).ok_or(NO_SUCH_ROW)?;
        let left = self.0.checked_sub(1 + items(row));
        self.0 = left.ok_or("a record that refers to more than a rank can have")?;
        Ok(row)
    }
}

/// The number of items of a signature, for a [`Budget`].
fn signature_items(signature: &Signature) -> usize {
    let shapes = signature.input_sizes.iter().chain(&signature.output_sizes);
    let types = signature.input_dtypes.iter();
    let types = types.chain(&signature.output_dtypes);
    let splits = signature.input_splits.len() + signature.output_splits.len();
    splits
        + shapes.map(|shape| shape.len() + 1).sum::<usize>()
        + types.map(|name| name.len() + 1).sum::<usize>()
}

/// The indices of a dump's captured operations, each with its graph.
pub(super) fn captured(dump: &Dump) -> Vec<(u32, u64)> {
    let entries = (0..).zip(&dump.entries);
    let captured = entries.filter_map(|(index, entry)| Some((index, entry.graph_id?)));
    captured.collect()
}

/// The difference from `last` to `value`, which then is the new `last`. The difference wraps, so that
/// [`decode_difference`] restores any two values.
fn encode_difference(value: u64, last: &mut u64) -> i64 {
    value.wrapping_sub(std::mem::replace(last, value)) as i64
}

/// The value at this difference from `last`; it then is the new `last`.
fn decode_difference(difference: i64, last: &mut u64) -> u64 {
    *last = last.wrapping_add(difference as u64);
    *last
}

/// The time from `created` to `then`, ns; `None` if `then` is 0, which means unknown.
fn after(then: i64, created: i64) -> Option<i64> {
    (then != 0).then(|| then.wrapping_sub(created))
}

impl Record {
    pub(super) fn new(path: &str, cut: bool, dump: &Dump, rows: Rows) -> Self {
        let groups = dump.groups.iter().zip(rows.members);
        let threads = dump.threads.iter();
        Self {
            path: path.to_owned(),
            cut,
            version: (dump.version.major, dump.version.minor),
            recorder: dump.recorder.name().to_owned(),
            identity: dump.identity.clone(),
            status: dump.status.clone(),
            comm_lib_version: dump.comm_lib_version.clone(),
            groups: groups
                .map(|(group, members)| Group {
                    id: group.info.id,
                    name: group.info.name.clone(),
                    desc: group.info.desc.clone(),
                    members,
                    status: group.status,
                })
                .collect(),
            signatures: rows.signatures,
            frames: rows.frames,
            stacks: rows.stacks,
            threads: threads
                .map(|thread| (thread.id.clone(), thread.name.clone()))
                .collect(),
            nccl_comm_state: dump.nccl_comm_state.clone(),
            columns: Columns::of(&dump.entries, dump.groups.len()),
        }
    }

    /// Restores the dump; `captured` are its operations in CUDA graphs. The error states why the record is not valid.
    pub(super) fn into_dump(
        self,
        captured: &[(u32, u64)],
        tables: &WireTables,
    ) -> Result<Dump, &'static str> {
        let mut budget = Budget(MAX_ITEMS);
        let mut signatures = Vec::new();
        for &row in &self.signatures {
            signatures.push(
                budget
                    .take(&tables.signatures, row, signature_items)?
                    .clone(),
            );
        }
        let mut frames = Vec::new();
        for &row in &self.frames {
            let items = |frame: &Frame| frame.name.len() + frame.filename.len();
            frames.push(budget.take(&tables.frames, row, items)?.clone());
        }
        let frame_of_row: HashMap<u32, u32> = self.frames.iter().copied().zip(0..).collect();
        let mut stacks = Vec::new();
        for &row in &self.stacks {
            let stack = budget.take(&tables.stacks, row, Vec::len)?;
            let stack = stack.iter().map(|row| frame_of_row.get(row).copied());
            stacks.push(stack.collect::<Option<Vec<u32>>>().ok_or(NO_SUCH_ROW)?);
        }
        let mut groups = Vec::new();
        for group in self.groups {
            groups.push(DumpGroup {
                info: ProcessGroupInfo {
                    id: group.id,
                    name: group.name,
                    desc: group.desc,
                    ranks: budget
                        .take(&tables.members, group.members, |ranks| ranks.len())?
                        .clone(),
                },
                place: None,
                status: group.status,
            });
        }
        let threads = self.threads.into_iter();
        let threads: Vec<ThreadInfo> = threads.map(|(id, name)| ThreadInfo { id, name }).collect();
        let mut entries = self.columns.into_entries(groups.len())?;
        for &(index, graph) in captured {
            let entry = entries.get_mut(index as usize);
            entry
                .ok_or("a graph of an operation that the record does not have")?
                .graph_id = Some(graph);
        }
        let fits =
            |index: Option<u32>, len: usize| index.is_none_or(|index| (index as usize) < len);
        let is_valid = entries.iter().all(|entry| {
            fits(Some(entry.signature), signatures.len())
                && fits(entry.stack, stacks.len())
                && fits(entry.thread, threads.len())
        });
        if !is_valid {
            return Err(NO_SUCH_ROW);
        }
        Ok(Dump {
            version: FormatVersion {
                major: self.version.0,
                minor: self.version.1,
            },
            recorder: Recorder::from_name(&self.recorder).ok_or("an unknown recorder")?,
            identity: self.identity,
            status: self.status,
            comm_lib_version: self.comm_lib_version,
            groups,
            signatures,
            frames,
            stacks,
            threads,
            entries,
            nccl_comm_state: self.nccl_comm_state,
            failures: Vec::new(),
            closed_ns: 0,
            peers: Vec::new(),
            processor_wait: None,
            // No finding depends on the steps of reducers, so a summary has none.
            reducer_steps: Vec::new(),
        })
    }
}

impl Columns {
    fn of(entries: &[Entry], groups: usize) -> Self {
        let mut columns = Self::default();
        let (mut record_id, mut created) = (0, 0);
        let mut counts = vec![[0u64; 3]; groups];
        for entry in entries {
            let [collectives, messages, operations] = &mut counts[entry.group as usize];
            columns
                .record_id
                .push(encode_difference(entry.record_id, &mut record_id));
            columns.group.push(entry.group);
            let seq = encode_difference(entry.collective_seq_id, collectives);
            columns.collective_seq_id.push(seq);
            let seq = encode_difference(entry.p2p_seq_id, messages);
            columns.p2p_seq_id.push(seq);
            let op_id = encode_difference(entry.op_id, operations);
            columns.op_id.push(op_id);
            columns.signature.push(entry.signature);
            columns.stack.push(entry.stack);
            columns.op.push(entry.op.code());
            columns.state.push(entry.state as u8);
            let retired = if entry.retired { RETIRED } else { 0 };
            columns
                .flags
                .push(retired | if entry.is_p2p { IS_P2P } else { 0 });
            columns.peer.push(match entry.peer {
                Peer::None => 0,
                Peer::Any => 1,
                Peer::Rank(rank) => u64::from(rank) + 2,
            });
            columns.root.push(entry.root);
            let reduce_op = entry.reduce_op.map_or(0, |op| u16::from(op.code()) + 1);
            columns.reduce_op.push(reduce_op);
            let created_ns = entry.time_created_ns;
            let difference = encode_difference(created_ns as u64, &mut created);
            columns.created.push(difference);
            columns
                .started
                .push(after(entry.time_discovered_started_ns, created_ns));
            columns
                .completed
                .push(after(entry.time_discovered_completed_ns, created_ns));
            columns.duration_ms.push(entry.duration_ms);
            columns.timeout_ms.push(entry.timeout_ms);
            columns.thread.push(entry.thread);
        }
        columns
    }

    fn lengths(&self) -> [usize; 19] {
        [
            self.record_id.len(),
            self.group.len(),
            self.collective_seq_id.len(),
            self.p2p_seq_id.len(),
            self.op_id.len(),
            self.signature.len(),
            self.stack.len(),
            self.op.len(),
            self.state.len(),
            self.flags.len(),
            self.peer.len(),
            self.root.len(),
            self.reduce_op.len(),
            self.created.len(),
            self.started.len(),
            self.completed.len(),
            self.duration_ms.len(),
            self.timeout_ms.len(),
            self.thread.len(),
        ]
    }

    fn into_entries(self, groups: usize) -> Result<Vec<Entry>, &'static str> {
        let len = self.record_id.len();
        if self.lengths().iter().any(|&other| other != len) {
            return Err("columns of unequal length");
        }
        let (mut record_id, mut created) = (0, 0);
        let mut counts = vec![[0u64; 3]; groups];
        let mut entries = Vec::with_capacity(len);
        for at in 0..len {
            let group = self.group[at];
            let [collectives, messages, operations] = counts
                .get_mut(group as usize)
                .ok_or("an operation of a group that the record does not have")?;
            let time_created_ns = decode_difference(self.created[at], &mut created) as i64;
            let time = |after: Option<i64>| after.map_or(0, |ns| time_created_ns.wrapping_add(ns));
            entries.push(Entry {
                record_id: decode_difference(self.record_id[at], &mut record_id),
                collective_seq_id: decode_difference(self.collective_seq_id[at], collectives),
                p2p_seq_id: decode_difference(self.p2p_seq_id[at], messages),
                op_id: decode_difference(self.op_id[at], operations),
                group,
                signature: self.signature[at],
                stack: self.stack[at],
                op: OpType::from_code(self.op[at]).ok_or("an unknown operation")?,
                state: state(self.state[at]).ok_or("an unknown state")?,
                retired: self.flags[at] & RETIRED != 0,
                is_p2p: self.flags[at] & IS_P2P != 0,
                peer: match self.peer[at] {
                    0 => Peer::None,
                    1 => Peer::Any,
                    rank => Peer::Rank(u32::try_from(rank - 2).map_err(|_| "a peer beyond 2^32")?),
                },
                root: self.root[at],
                reduce_op: match self.reduce_op[at].checked_sub(1) {
                    None => None,
                    Some(code) => Some(reduce_op(code).ok_or("an unknown reduction")?),
                },
                time_created_ns,
                time_discovered_started_ns: time(self.started[at]),
                time_discovered_completed_ns: time(self.completed[at]),
                duration_ms: self.duration_ms[at],
                graph_id: None,
                timeout_ms: self.timeout_ms[at],
                thread: self.thread[at],
            });
        }
        Ok(entries)
    }
}

fn state(code: u8) -> Option<EntryState> {
    use EntryState::{Completed, Failed, Scheduled, Started};
    let states = [Scheduled, Started, Completed, Failed];
    states.into_iter().find(|state| *state as u8 == code)
}

fn reduce_op(code: u16) -> Option<ReduceOp> {
    ReduceOp::from_code(u8::try_from(code).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_become_runs_and_ranks_again() {
        for (list, length) in [
            (vec![], 0),
            (vec![7], 1),
            ((0..100_000).collect(), 1),
            ((3..100_000).step_by(8).collect(), 1),
            ((0..8).rev().collect(), 1),
            (vec![5, 5, 5], 1),
            (vec![0, 1, 2, 9, 11, 13, 4], 3),
            (vec![Rank::MAX, 0, Rank::MAX], 2),
        ] {
            let runs = runs(&list);
            assert_eq!(runs.len(), length, "{list:?}");
            assert_eq!(ranks_in(&runs), list.len() as u64);
            assert_eq!(ranks(&runs).as_deref(), Some(&list[..]));
        }
        assert_eq!(ranks(&[(1, -1, 3)]), None);
        assert_eq!(ranks(&[(1, i64::MAX, 3)]), None);
    }
}
