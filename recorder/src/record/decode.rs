//! Decodes the words of a ring into a [`Dump`], for the owner's snapshot and for readers outside.
//!
//! The contents are untrusted: every index is checked, every length is bounded by the section it points into,
//! and the lengths together by that section's size (twice that size for the lap ring), since valid rows do not overlap.

use super::bytes;
use super::clock::Anchor;
use super::config::RingPart;
use super::failures;
use super::lap::{self, LapRange};
use super::layout::{self, NO_THREAD, RingLayout, group, halves, header, phase, slot};
use super::nccl;
use super::peers;
use super::reducer;
use super::ring::Found;
use super::rings;
use super::signature;
use super::sync::Read;
use crate::model::dump::{Dump, DumpGroup, FormatVersion, Identity, Recorder, ThreadInfo};
use crate::model::{
    Entry, EntryState, Frame, GroupPlace, OpType, Peer, ProcessExit, ProcessGroupInfo,
    ProcessGroupStatus, ProcessorWait, Rank, RankStatus, ReduceOp, Signature,
};
use std::collections::HashMap;
use std::sync::Arc;

/// How often a slot is read at most while it changes: for well over the time of one update.
const TRIES: u32 = 1_000;

/// Maximum number of ranks in all groups of one ring together.
const MAX_RANKS: usize = 1 << 24;

/// Decodes the record of a ring. `dump_time_ns` is its time, wall clock, ns since the epoch.
pub(crate) fn dump(memory: &impl Read, layout: &RingLayout, dump_time_ns: i64) -> Dump {
    dump_of(
        memory,
        layout,
        dump_time_ns,
        0..rings::slots(layout).slots(),
    )
}

/// Like [`dump`], with only the entries of these slots.
pub(crate) fn dump_of(
    memory: &impl Read,
    layout: &RingLayout,
    dump_time_ns: i64,
    picked: impl IntoIterator<Item = usize>,
) -> Dump {
    let dump = Dump {
        version: FormatVersion::WRITTEN,
        recorder: match RingPart::from_code(memory.load(header::PART)) {
            RingPart::Program => Recorder::Rcomm,
            RingPart::NcclProfiler => Recorder::NcclProfiler,
        },
        identity: identity(memory, dump_time_ns),
        comm_lib_version: header_text(memory, header::WRITER),
        ..Dump::default()
    };
    let mut decoder = Decoder::new(memory, layout, dump);
    decoder.groups();
    decoder.threads();
    let unreadable = decoder.entries(picked);
    decoder.status(unreadable);
    decoder.dump.failures = failures::read(memory, layout, decoder.anchor);
    decoder.dump.peers = peers::read(memory, layout, decoder.anchor);
    decoder.dump.reducer_steps = reducer::read(memory, layout, decoder.anchor);
    decoder.dump.closed_ns = failures::closed_ns(memory, decoder.anchor);
    decoder.dump.processor_wait = processor_wait(memory, decoder.anchor);
    let mut dump = decoder.dump;
    nccl::put_into(&mut dump, memory, layout);
    dump
}

/// The call site of the record with this id; `None` if the record has none that fitted in the table, or is not in the
/// ring.
pub(crate) fn call_site(memory: &impl Read, layout: &RingLayout, id: u64) -> Option<Frame> {
    let ring = rings::slots(layout);
    match ring.read(memory, ring.index_of(id), TRIES) {
        Found::Record { id: found, words } if found == id => {
            let (_, row) = halves(words[slot::CALL]);
            Decoder::new(memory, layout, Dump::default()).frame(row)
        }
        Found::Empty | Found::Record { .. } | Found::Unreadable { .. } => None,
    }
}

/// The rank and process of the ring.
pub(crate) fn identity(memory: &impl Read, dump_time_ns: i64) -> Identity {
    let (rank, world_size) = halves(memory.load(header::RANK));
    let (attempt, pid) = halves(memory.load(header::ATTEMPT));
    Identity {
        rank: Some(rank),
        world_size: Some(world_size),
        host: header_text(memory, header::HOST),
        job: job(memory),
        attempt,
        pid,
        dump_time_ns,
        begun_ns: layout::load_anchor(memory).wall_ns,
        reason: String::new(),
    }
}

/// How long the threads of operations have waited for a processor; `None` if the ring does not count that.
fn processor_wait(memory: &impl Read, anchor: Anchor) -> Option<ProcessorWait> {
    let since = memory.load(header::PROCESSOR_WAIT_SINCE);
    (since != 0).then(|| ProcessorWait {
        since_ns: anchor.wall_of(since),
        waited_ns: memory.load(header::PROCESSOR_WAIT),
    })
}

/// The job that the ring states.
pub(crate) fn job(memory: &impl Read) -> String {
    header_text(memory, header::JOB)
}

/// How the process exited; `None` if it noted no exit code.
fn exit(memory: &impl Read, anchor: Anchor) -> Option<ProcessExit> {
    let exited_at = memory.load(header::EXITED_AT);
    (exited_at != 0).then(|| ProcessExit {
        time_ns: anchor.wall_of(exited_at),
        code: u8::try_from(memory.load(header::EXIT_CODE)).unwrap_or(u8::MAX),
    })
}

/// The text of the header that begins with its length at this word.
fn header_text(memory: &impl Read, word: usize) -> String {
    let len = memory.load(word).min(255) as usize;
    String::from_utf8_lossy(&bytes::load(memory, word + 1, len)).into_owned()
}

/// Builds a dump from the words of a ring.
struct Decoder<'a, R> {
    memory: &'a R,
    layout: &'a RingLayout,
    anchor: Anchor,
    /// Bytes of the arena that further valid rows can refer to.
    arena_left: usize,
    /// The number of ranks that further groups can have.
    ranks_left: usize,
    /// Words of the lap ring that valid records can still refer to: all of them, and as many again for
    /// words written during the read.
    lap_left: usize,
    /// The index in the dump of the signature in each row that was read; `None` if the row is not valid.
    signature_rows: HashMap<u32, Option<u32>>,
    /// The signatures that are not in the ring's table or have splits, each with its index in the dump.
    other_signatures: HashMap<Signature, u32>,
    /// The index in the dump of the stack for each row of call sites that was read.
    stack_rows: HashMap<u32, u32>,
    /// The index in the dump of the group that has the operations of all groups beyond the table.
    lost_group: Option<u32>,
    dump: Dump,
}

impl<'a, R: Read> Decoder<'a, R> {
    fn new(memory: &'a R, layout: &'a RingLayout, dump: Dump) -> Self {
        Self {
            memory,
            layout,
            anchor: layout::load_anchor(memory),
            arena_left: layout.arena.rows,
            ranks_left: MAX_RANKS,
            signature_rows: HashMap::new(),
            other_signatures: HashMap::new(),
            stack_rows: HashMap::new(),
            lap_left: layout.lap.rows.saturating_mul(2),
            lost_group: None,
            dump,
        }
    }

    /// The number of rows in use according to this word of the header, at most `rows`.
    fn used(&self, word: usize, rows: usize) -> usize {
        let used = self.memory.load(word).min(rows as u64) as usize;
        // The rows must be loaded after their count.
        self.memory.fence_acquire();
        used
    }

    /// The bytes of the arena at a reference; `None` if it is invalid.
    fn arena_bytes(&mut self, reference: u64) -> Option<Vec<u8>> {
        let (offset, len) = halves(reference);
        let (offset, len) = (offset as usize, len as usize);
        let fits = offset.is_multiple_of(8)
            && offset.saturating_add(len) <= self.layout.arena.rows
            && len <= self.arena_left;
        if !fits {
            return None;
        }
        self.arena_left -= len;
        let start = self.layout.arena.word + offset / 8;
        Some(bytes::load(self.memory, start, len))
    }

    /// The text of the arena at a reference; empty if it is invalid.
    fn text(&mut self, reference: u64) -> String {
        let bytes = self.arena_bytes(reference).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Adds the groups to the dump.
    fn groups(&mut self) {
        let section = self.layout.groups;
        for row in 0..self.used(header::GROUPS_USED, section.rows) {
            let start = section.row(row, group::WORDS);
            let word = |offset: usize| self.memory.load(start.saturating_add(offset));
            let id = word(group::ID) as u32;
            let (name, desc, ranks) = (word(group::NAME), word(group::DESC), word(group::RANKS));
            let (size, own_rank) = (word(group::SIZE), word(group::OWN_RANK));
            // Members may be stored after the row was admitted; their bytes are stored before the
            // reference.
            self.memory.fence_acquire();
            let sequence = |offset| word(offset).cast_signed().saturating_sub(1);
            let last_completed = sequence(group::LAST_COMPLETED);
            let status = ProcessGroupStatus {
                last_enqueued: sequence(group::LAST_ENQUEUED),
                // An operation that completed had started, even if the start was not seen.
                last_started: sequence(group::LAST_STARTED).max(last_completed),
                last_completed,
                timeout_ms: word(group::TIMEOUT_MS),
            };
            let info = ProcessGroupInfo {
                id,
                name: self.text(name),
                desc: self.text(desc),
                ranks: self.ranks(ranks, size).into(),
            };
            let place = info.ranks.is_empty().then(|| place_of(own_rank, size));
            self.dump.groups.push(DumpGroup {
                info,
                place: place.flatten(),
                status: Some(status),
            });
        }
    }

    /// The members, if the runs yield exactly `size` of them; else an empty list.
    fn ranks(&mut self, reference: u64, size: u64) -> Vec<Rank> {
        let Some(size) = usize::try_from(size)
            .ok()
            .filter(|&size| size <= self.ranks_left)
        else {
            return Vec::new();
        };
        let bytes = self.arena_bytes(reference).unwrap_or_default();
        let (words, _) = bytes.as_chunks::<8>();
        let (runs, _) = words.as_chunks::<2>();
        let runs = runs
            .iter()
            .map(|[run, count]| (u64::from_le_bytes(*run), u64::from_le_bytes(*count)));
        // The counts come first: every row of a damaged ring may state millions of members that do not add up.
        let total = runs
            .clone()
            .try_fold(0_u64, |sum, (_, count)| sum.checked_add(count));
        if total != Some(size as u64) {
            return Vec::new();
        }
        self.ranks_left -= size;
        let ranks = runs.flat_map(|(run, count)| {
            let (first, step) = halves(run);
            (0..count as u32).map(move |nth| first.wrapping_add(step.wrapping_mul(nth)))
        });
        ranks.collect()
    }

    /// Adds the threads to the dump.
    fn threads(&mut self) {
        let section = self.layout.threads;
        for row in 0..self.used(header::THREADS_USED, section.rows) {
            let start = section.row(row, layout::thread::WORDS);
            let id = self.memory.load(start + layout::thread::ID);
            let name = self.memory.load(start + layout::thread::NAME);
            let name = self.text(name);
            self.dump.threads.push(ThreadInfo {
                id: id.to_string(),
                name,
            });
        }
    }

    /// Reads the entries. Returns the number of slots that could not be read.
    fn entries(&mut self, picked: impl IntoIterator<Item = usize>) -> u64 {
        let ring = rings::slots(self.layout);
        let mut unreadable = 0;
        for index in picked {
            match ring.read(self.memory, index, TRIES) {
                Found::Empty => {}
                Found::Record { id, words } if ring.index_of(id) == index && id > 0 => {
                    let entry = self.entry(id, &words);
                    self.dump.entries.push(entry);
                }
                Found::Record { .. } | Found::Unreadable { .. } => unreadable += 1,
            }
        }
        self.dump
            .entries
            .sort_unstable_by_key(|entry| entry.record_id);
        unreadable
    }

    /// Makes the entry for record `id`, and adds to the dump's tables what the entry refers to.
    fn entry(&mut self, id: u64, words: &[u64; slot::WORDS]) -> Entry {
        let (group, signature) = halves(words[slot::TABLES]);
        let [op, reduction, flags, _, thread_low, thread_high, ..] =
            words[slot::WHAT].to_le_bytes();
        let thread = u16::from_le_bytes([thread_low, thread_high]);
        let flags = u64::from(flags);
        let state = words[slot::STATE];
        let (peer, root) = halves(words[slot::ENDS]);
        let (timeout_ms, call_site) = halves(words[slot::CALL]);
        let op = OpType::from_code(op).unwrap_or(OpType::Other);
        let created = words[slot::CREATED];
        let ended = words[slot::ENDED];
        let entry_state = match state as u8 {
            0 => EntryState::Scheduled,
            1 => EntryState::Started,
            2 => EntryState::Completed,
            _ => EntryState::Failed,
        };
        let completed = entry_state == EntryState::Completed;
        let in_graph = state & slot::IN_GRAPH != 0;
        let timed = state & slot::HAS_DURATION != 0 && !in_graph;
        Entry {
            record_id: id,
            collective_seq_id: words[slot::COLLECTIVE_SEQ_ID],
            p2p_seq_id: words[slot::P2P_SEQ_ID],
            op_id: words[slot::OP_ID],
            group: self.group(group),
            signature: self.signature(id, op, signature, words),
            stack: self.stack(call_site),
            op,
            state: entry_state,
            retired: state & slot::RETIRED != 0,
            is_p2p: flags & slot::FLAG_P2P != 0,
            peer: match peer {
                slot::NO_RANK => Peer::None,
                slot::ANY_RANK => Peer::Any,
                rank => Peer::Rank(rank),
            },
            root: (root != slot::NO_RANK).then_some(root),
            reduce_op: ReduceOp::from_code(reduction),
            time_created_ns: self.anchor.wall_of(created),
            time_discovered_started_ns: self.anchor.wall_of(words[slot::STARTED]),
            time_discovered_completed_ns: if completed {
                self.anchor.wall_of(ended)
            } else {
                0
            },
            duration_ms: timed.then(|| f32::from_bits((state >> 32) as u32)),
            graph_id: in_graph.then_some(state >> slot::GRAPH_SHIFT),
            timeout_ms: timeout_ms.into(),
            thread: (thread != NO_THREAD && usize::from(thread) < self.dump.threads.len())
                .then_some(thread.into()),
        }
    }

    /// The index of a group's row; references to missing rows share one placeholder group.
    fn group(&mut self, row: u32) -> u32 {
        let groups = &mut self.dump.groups;
        let rows = self.lost_group.map_or(groups.len(), |lost| lost as usize);
        if (row as usize) < rows {
            return row;
        }
        *self.lost_group.get_or_insert_with(|| {
            groups.push(DumpGroup {
                info: ProcessGroupInfo {
                    id: layout::NO_ROW,
                    name: String::from("?"),
                    desc: String::from("groups beyond the ring's table"),
                    ranks: Arc::default(),
                },
                place: None,
                status: None,
            });
            rows as u32
        })
    }

    /// The index in the dump of a record's signature, from the ring's table (`row`), the lap ring, or both.
    fn signature(&mut self, id: u64, op: OpType, row: u32, words: &[u64; slot::WORDS]) -> u32 {
        let range = LapRange {
            position: words[slot::LAP_POSITION],
            words: words[slot::LAP_WORDS],
        };
        let from_table = self.table_signature(row);
        let facts = if range.words > 0 {
            self.lap_facts(id, range)
        } else {
            None
        };
        let (mut signature, splits) = match (facts, from_table) {
            (None, Some(index)) => return index,
            (Some(facts), table) => {
                let splits = Some((facts.input_splits, facts.output_splits));
                let table = table.map(|index| self.dump.signatures[index as usize].clone());
                (facts.signature.or(table), splits)
            }
            (None, None) => (None, None),
        };
        // Only the numbers of elements are known: they become the sizes, and there are no types.
        let mut signature = signature.take().unwrap_or_else(|| Signature {
            op_name: op.name().to_owned(),
            input_sizes: vec![vec![words[slot::INPUT_ELEMENTS]]],
            output_sizes: vec![vec![words[slot::OUTPUT_ELEMENTS]]],
            ..Signature::default()
        });
        if let Some((inputs, outputs)) = splits {
            signature.input_splits = inputs;
            signature.output_splits = outputs;
        }
        let signatures = &mut self.dump.signatures;
        *self
            .other_signatures
            .entry(signature)
            .or_insert_with_key(|signature| push(signatures, signature.clone()))
    }

    /// What the lap ring holds for record `id`; `None` if newer records have replaced it, or if it is not valid.
    fn lap_facts(&mut self, id: u64, range: LapRange) -> Option<lap::LapFacts> {
        let ring = rings::lap_ring(self.layout);
        let words = usize::try_from(range.words).ok()?;
        if !ring.holds(self.memory, range.position, words) {
            return None;
        }
        self.lap_left = self.lap_left.checked_sub(words)?;
        lap::read(self.memory, &ring, id, range)
    }

    /// The index in the dump of the signature in this row of the ring's table; `None` if the row is not valid.
    fn table_signature(&mut self, row: u32) -> Option<u32> {
        if let Some(&known) = self.signature_rows.get(&row) {
            return known;
        }
        let section = self.layout.signatures;
        if row as usize >= self.used(header::SIGNATURES_USED, section.rows) {
            return None;
        }
        let reference = self.memory.load(section.row(row as usize, 1));
        let signature = self
            .arena_bytes(reference)
            .and_then(|bytes| signature::decode(&bytes));
        let index = signature.map(|signature| push(&mut self.dump.signatures, signature));
        self.signature_rows.insert(row, index);
        index
    }

    /// The call site of this row; `None` if the table has no such row.
    fn frame(&mut self, row: u32) -> Option<Frame> {
        let section = self.layout.call_sites;
        if row as usize >= self.used(header::CALL_SITES_USED, section.rows) {
            return None;
        }
        let start = section.row(row as usize, layout::call_site::WORDS);
        let file = self.memory.load(start + layout::call_site::FILE);
        let (line, _) = halves(self.memory.load(start + layout::call_site::LINE));
        let functions = self.layout.functions;
        let function = if (row as usize) < functions.rows {
            let start = functions.row(row as usize, layout::FUNCTION_WORDS);
            self.memory.load(start)
        } else {
            0
        };
        Some(Frame {
            name: self.text(function),
            filename: self.text(file),
            line,
        })
    }

    /// The index in the dump of the stack that consists of this row's call site; `None` if the table has no such row.
    fn stack(&mut self, row: u32) -> Option<u32> {
        if let Some(&known) = self.stack_rows.get(&row) {
            return Some(known);
        }
        let frame = self.frame(row)?;
        let frame = push(&mut self.dump.frames, frame);
        let stack = push(&mut self.dump.stacks, vec![frame]);
        self.stack_rows.insert(row, stack);
        Some(stack)
    }

    /// Adds the rank's status to the dump; `unreadable` entries count as dropped.
    fn status(&mut self, unreadable: u64) {
        let lost = self.memory.load(header::RECORDS_LOST);
        let mut status = RankStatus {
            step: self.memory.load(header::STEP).cast_signed(),
            heartbeat_ns: self.anchor.wall_of(self.memory.load(header::HEARTBEAT)),
            dropped: lost.saturating_add(unreadable),
            exit: exit(self.memory, self.anchor),
            ..RankStatus::default()
        };
        let ring = rings::phases(self.layout);
        let last = self.memory.load(header::LAST_PHASE);
        let oldest = last.saturating_sub(ring.slots() as u64 - 1).max(1);
        for id in (oldest..=last).rev() {
            let index = ring.index_of(id);
            if let Found::Record { words, .. } = ring.read(self.memory, index, TRIES) {
                let len = words[phase::BYTES].min(phase::MAX_BYTES as u64) as usize;
                let text: Vec<u8> = words[phase::TEXT..]
                    .iter()
                    .flat_map(|word| word.to_le_bytes())
                    .take(len)
                    .collect();
                status.phase = String::from_utf8_lossy(&text).into_owned();
                status.phase_since_ns = self.anchor.wall_of(words[phase::SINCE]);
                break;
            }
        }
        self.dump.status = Some(status);
    }
}

/// The rank's position in a group, if its row holds it.
fn place_of(own_rank: u64, size: u64) -> Option<GroupPlace> {
    let rank = u32::try_from(own_rank.checked_sub(1)?).ok()?;
    let size = u32::try_from(size).ok()?;
    (rank < size).then_some(GroupPlace { rank, size })
}

/// Appends a value and returns its index. Tables are bounded far below 2^32 rows.
fn push<T>(table: &mut Vec<T>, value: T) -> u32 {
    table.push(value);
    (table.len() - 1) as u32
}
