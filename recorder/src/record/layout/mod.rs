//! The memory layout of a ring: the only definition of the format in code.
//!
//! `docs/FORMAT.md` documents it. All numbers are little-endian 64-bit words, so the file is a `[u64]`;
//! offsets in the header count bytes. The header holds every section's offset and size, so a later
//! minor version can grow sections or use words that are zero today.

use super::clock::Anchor;
use super::config::RecorderConfig;
use super::sync::Read;

#[cfg(not(target_endian = "little"))]
compile_error!("ring files are little-endian and mapped as they are");

/// The first word of every ring: the bytes of `RCOMMRNG`.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"RCOMMRNG");
/// Raised when a word changes its meaning; readers refuse any other major version.
pub(crate) const MAJOR: u32 = 1;
/// Raised when a word that was zero gets a meaning.
pub(crate) const MINOR: u32 = 9;

/// Bytes of the header.
pub(crate) const HEADER_BYTES: usize = 4096;

/// Words of the header.
pub(crate) mod header {
    pub(crate) const MAGIC: usize = 0;
    /// major | minor << 32.
    pub(crate) const VERSION: usize = 1;
    pub(crate) const FILE_BYTES: usize = 2;
    /// 1 = in use, 2 = closed cleanly.
    pub(crate) const STATE: usize = 3;
    /// rank | world size << 32.
    pub(crate) const RANK: usize = 4;
    /// attempt | pid << 32.
    pub(crate) const ATTEMPT: usize = 5;
    pub(crate) const PROCESS_START: usize = 6;
    pub(crate) const PID_NAMESPACE: usize = 7;
    /// Two words.
    pub(crate) const BOOT_ID: usize = 8;
    pub(crate) const ANCHOR_MONOTONIC: usize = 10;
    pub(crate) const ANCHOR_WALL: usize = 11;
    /// Number of bytes of the file that are reserved; 0 = all.
    pub(crate) const RESERVED: usize = 12;
    /// Which of the process's rings this is. Since 1.4.
    pub(crate) const PART: usize = 13;

    /// A section like those below, since 1.3.
    pub(crate) const FUNCTIONS: usize = 14;
    /// Sections: offset in bytes, then how many rows (bytes for the arena, words for the lap ring).
    pub(crate) const GROUPS: usize = 16;
    pub(crate) const SIGNATURES: usize = 18;
    pub(crate) const CALL_SITES: usize = 20;
    pub(crate) const THREADS: usize = 22;
    pub(crate) const ARENA: usize = 24;
    pub(crate) const PHASES: usize = 26;
    pub(crate) const SLOTS: usize = 28;
    pub(crate) const LAP: usize = 30;

    /// This text and the next two: a length in bytes, then 32 words.
    pub(crate) const HOST: usize = 32;
    pub(crate) const JOB: usize = 65;
    pub(crate) const WRITER: usize = 98;

    // Each of these five words is written often by some thread, so each is alone in its cache line.
    /// The newest record id assigned.
    pub(crate) const LAST_ID: usize = 136;
    /// How many words of the lap ring were ever reserved.
    pub(crate) const LAP_HEAD: usize = 144;
    pub(crate) const LAST_PHASE: usize = 152;
    pub(crate) const HEARTBEAT: usize = 160;
    /// Two's complement; -1 = never set.
    pub(crate) const STEP: usize = 168;

    // Numbers of rows in use; each is stored after the row that it admits.
    pub(crate) const GROUPS_USED: usize = 176;
    pub(crate) const SIGNATURES_USED: usize = 177;
    pub(crate) const CALL_SITES_USED: usize = 178;
    pub(crate) const THREADS_USED: usize = 179;

    // Counts of data that could not be kept.
    pub(crate) const RECORDS_LOST: usize = 184;
    pub(crate) const UPDATES_LOST: usize = 185;
    pub(crate) const UPDATES_LATE: usize = 186;
    pub(crate) const GROUPS_LOST: usize = 187;
    pub(crate) const SHAPES_LOST: usize = 188;
    pub(crate) const CALL_SITES_LOST: usize = 189;
    pub(crate) const THREADS_LOST: usize = 190;
    pub(crate) const PHASES_LOST: usize = 191;

    // Since 1.4: data of NCCL communicators in addition to groups. Sections as above; no rows = not kept.
    pub(crate) const KERNELS: usize = 192;
    pub(crate) const LINKS: usize = 194;
    pub(crate) const LINKS_USED: usize = 196;
    pub(crate) const LINKS_LOST: usize = 197;

    // Since 1.5: how operations, groups and the process ended.
    /// A section like those above; no rows = not kept.
    pub(crate) const FAILURES: usize = 198;
    /// The number of the newest failure.
    pub(crate) const LAST_FAILURE: usize = 200;
    /// When the owner closed the ring; 0 = it did not, or the writer did not note it.
    pub(crate) const CLOSED_AT: usize = 201;

    /// A section like those above, since 1.6; no rows = not kept.
    pub(crate) const PEERS: usize = 202;

    // Since 1.7: the waits for a processor.
    /// Since when the waits are counted; 0 = they are not counted.
    pub(crate) const PROCESSOR_WAIT_SINCE: usize = 204;
    /// How long the threads of operations have waited since then, ns.
    pub(crate) const PROCESSOR_WAIT: usize = 205;

    // Since 1.8: the steps of reducers.
    /// A section like those above; no rows = not kept.
    pub(crate) const REDUCER: usize = 206;
    /// The number of the newest step.
    pub(crate) const LAST_REDUCER_STEP: usize = 208;

    // Since 1.9: how the process itself ended.
    /// When it noted its exit code; 0 = it did not.
    pub(crate) const EXITED_AT: usize = 209;
    /// Its exit code, 0 to 255.
    pub(crate) const EXIT_CODE: usize = 210;
}

/// Value of [`header::STATE`]: in use.
pub(crate) const STATE_OPEN: u64 = 1;
/// Value of [`header::STATE`]: closed cleanly.
pub(crate) const STATE_CLOSED: u64 = 2;

/// Words of one group's row. The progress words, which change often, are in the second cache line.
pub(crate) mod group {
    pub(crate) const WORDS: usize = 16;
    pub(crate) const ID: usize = 0;
    /// This word and the next two are references to bytes of the arena: offset | number of bytes << 32.
    pub(crate) const NAME: usize = 1;
    pub(crate) const DESC: usize = 2;
    /// The bytes are runs of ranks, of two words each: first | step << 32, then how many.
    pub(crate) const RANKS: usize = 3;
    pub(crate) const SIZE: usize = 4;
    pub(crate) const TIMEOUT_MS: usize = 5;
    /// The owner's rank in the group + 1; 0 = see the members. Since 1.3.
    pub(crate) const OWN_RANK: usize = 6;
    /// NCCL's hash of a communicator; 0 = the group has none, or not yet. Since 1.4.
    pub(crate) const COMM_HASH: usize = 7;
    /// This word and the next two: a sequence number + 1; 0 = none yet.
    pub(crate) const LAST_ENQUEUED: usize = 8;
    pub(crate) const LAST_STARTED: usize = 9;
    pub(crate) const LAST_COMPLETED: usize = 10;
}

/// A signature's row: a reference to its bytes in the arena.
pub(crate) const SIGNATURE_WORDS: usize = 1;

/// Words of one call site's row.
pub(crate) mod call_site {
    pub(crate) const WORDS: usize = 2;
    pub(crate) const FILE: usize = 0;
    /// line | column << 32.
    pub(crate) const LINE: usize = 1;
}

/// A function's row, since 1.3: a reference to the name of the function of the call site in the same row.
pub(crate) const FUNCTION_WORDS: usize = 1;

/// Words of one thread's row.
pub(crate) mod thread {
    pub(crate) const WORDS: usize = 2;
    pub(crate) const ID: usize = 0;
    pub(crate) const NAME: usize = 1;
}

/// Words of one phase's slot. Here and in the modules below, word 0 of a slot or row is its stamp (`ring`).
pub(crate) mod phase {
    pub(crate) const WORDS: usize = 16;
    pub(crate) const SINCE: usize = 1;
    pub(crate) const BYTES: usize = 2;
    pub(crate) const TEXT: usize = 3;
    /// Maximum length of the text, in bytes.
    pub(crate) const MAX_BYTES: usize = (WORDS - TEXT) * 8;
}

/// Words of one operation's slot.
pub(crate) mod slot {
    pub(crate) const WORDS: usize = 16;
    pub(crate) const CREATED: usize = 1;
    pub(crate) const STARTED: usize = 2;
    /// When it completed or failed.
    pub(crate) const ENDED: usize = 3;
    pub(crate) const COLLECTIVE_SEQ_ID: usize = 4;
    pub(crate) const P2P_SEQ_ID: usize = 5;
    pub(crate) const OP_ID: usize = 6;
    /// group row | signature row << 32.
    pub(crate) const TABLES: usize = 7;
    /// operation | reduction << 8 | flags << 16 | thread row << 32.
    pub(crate) const WHAT: usize = 8;
    /// state | retired << 8 | has a duration << 9 | is in a graph << 10, then the duration in ms as f32 << 32, or the
    /// graph's id << 11: an operation in a graph has no duration.
    pub(crate) const STATE: usize = 9;
    /// peer | root << 32.
    pub(crate) const ENDS: usize = 10;
    /// time-out in ms | call site row << 32.
    pub(crate) const CALL: usize = 11;
    /// Position in the lap ring.
    pub(crate) const LAP_POSITION: usize = 12;
    /// Number of words of this record in the lap ring; may be 0.
    pub(crate) const LAP_WORDS: usize = 13;
    pub(crate) const INPUT_ELEMENTS: usize = 14;
    pub(crate) const OUTPUT_ELEMENTS: usize = 15;

    pub(crate) const RETIRED: u64 = 1 << 8;
    pub(crate) const HAS_DURATION: u64 = 1 << 9;
    /// Since 1.1.
    pub(crate) const IN_GRAPH: u64 = 1 << 10;
    pub(crate) const GRAPH_SHIFT: u32 = 11;
    /// The largest id of a graph that the word can hold.
    pub(crate) const MAX_GRAPH: u64 = u64::MAX >> GRAPH_SHIFT;

    pub(crate) const FLAG_P2P: u64 = 1;

    /// Value of the reduction's byte: the operation has none.
    pub(crate) const NO_REDUCTION: u8 = 0xff;
    /// Value of peer and root: none.
    pub(crate) const NO_RANK: u32 = u32::MAX;
    /// Value of the peer: any source.
    pub(crate) const ANY_RANK: u32 = u32::MAX - 1;
}

/// Words of one operation's progress on its channels: the slot with the same number as that of its record.
pub(crate) mod kernel {
    pub(crate) const WORDS: usize = 8;
    /// number of channels | algorithm << 8 | protocol << 16, by their numbers.
    pub(crate) const PLAN: usize = 1;
    pub(crate) const ENQUEUED: usize = 2;
    pub(crate) const LAUNCHED: usize = 3;
    /// One bit per channel.
    pub(crate) const STARTED: usize = 4;
    pub(crate) const FINISHED: usize = 5;
}

/// Words of one link's progress.
pub(crate) mod link {
    pub(crate) const WORDS: usize = 8;
    /// group row | channel << 16 | whether it sends << 24 | what it waits for << 25 | peer << 32.
    pub(crate) const PLACE: usize = 1;
    pub(crate) const RECORD: usize = 2;
    /// completed | total << 32.
    pub(crate) const STEPS: usize = 3;
    pub(crate) const SINCE: usize = 4;

    pub(crate) const CHANNEL_SHIFT: u32 = 16;
    pub(crate) const SEND: u64 = 1 << 24;
    pub(crate) const WAIT_SHIFT: u32 = 25;
}

/// Words of one failure's slot. Half of the slots hold the first failures, half the newest.
pub(crate) mod failure {
    use crate::model::Failure;

    pub(crate) const WORDS: usize = 128;
    /// Number of slots for the first failures, and for the newest.
    pub(crate) const EACH: usize = 8;
    pub(crate) const WHEN: usize = 1;
    /// kind | has an operation << 8 | is point-to-point << 16 | operation << 24 | the rank that detected it << 32.
    pub(crate) const WHAT: usize = 2;
    /// The group's number, all ones = none | number of ranks << 32.
    pub(crate) const GROUP: usize = 3;
    pub(crate) const SEQ: usize = 4;
    pub(crate) const RECORD: usize = 5;
    /// Number of ranks that follow | bytes of the text << 32.
    pub(crate) const LENGTHS: usize = 6;
    /// Two ranks per word.
    pub(crate) const RANKS: usize = 7;
    pub(crate) const TEXT: usize = RANKS + Failure::MAX_RANKS / 2;

    const _: () = assert!(TEXT + Failure::MAX_TEXT / 8 <= WORDS);
}

/// Words of the row of the connections to one other end. Since 1.6.
pub(crate) mod peer {
    pub(crate) const WORDS: usize = 16;
    /// rank | kind of end << 32; see [`LinkEnd`](crate::model::LinkEnd).
    pub(crate) const END: usize = 1;
    pub(crate) const HEARD: usize = 2;
    pub(crate) const SAMPLED: usize = 3;
    pub(crate) const WAITED_SINCE: usize = 4;
    /// group number of the waiting operation | is point-to-point << 32 | an operation waits << 33.
    pub(crate) const WAITING: usize = 5;
    pub(crate) const SEQ: usize = 6;
    pub(crate) const RECEIVED: usize = 7;
    pub(crate) const SENT: usize = 8;
    /// unacknowledged packets | errno << 32.
    pub(crate) const UNACKNOWLEDGED_AND_ERRNO: usize = 9;
    pub(crate) const INTERVAL_MS: usize = 10;

    pub(crate) const IS_P2P: u64 = 1 << 32;
    pub(crate) const HAS_OPERATION: u64 = 1 << 33;
    /// Kinds of ends.
    pub(crate) const RANK: u32 = 1;
    pub(crate) const STORE_AT_RANK: u32 = 2;
    pub(crate) const STORE: u32 = 3;
    /// Maximum number of rows: other ends beyond them are not kept.
    pub(crate) const MAX_ROWS: usize = 1024;
}

/// Words of one step of a reducer. Since 1.8. Durations are in ns.
pub(crate) mod reducer {
    use crate::model::ReducerStep;

    pub(crate) const WORDS: usize = 128;
    /// Number of slots.
    pub(crate) const ROWS: usize = 16;
    pub(crate) const ENDED: usize = 1;
    /// The step's number in its reducer.
    pub(crate) const STEP: usize = 2;
    /// The group's number | number of buckets << 32.
    pub(crate) const GROUP: usize = 3;
    /// Number of buckets that follow.
    pub(crate) const KEPT: usize = 4;
    /// Four words: forward, backward, communication, exposed.
    pub(crate) const TIMES: usize = 5;
    pub(crate) const BYTES: usize = 9;
    /// Five words: the number of steps of the reducer, the sums of the four times.
    pub(crate) const SUMS: usize = 10;
    pub(crate) const BUCKETS: usize = 16;
    /// index | number of parameters << 32, bytes, ready, sent, how long it was under way, how long it was waited for.
    pub(crate) const BUCKET_WORDS: usize = 6;

    const _: () = assert!(BUCKETS + ReducerStep::MAX_BUCKETS * BUCKET_WORDS <= WORDS);
}

/// Index of a missing row.
pub(crate) const NO_ROW: u32 = u32::MAX;
/// Index of a missing row of the table of threads.
pub(crate) const NO_THREAD: u16 = u16::MAX;

/// Maximum number of slots of a ring, for readers too.
pub(crate) const MAX_SLOTS: usize = 1 << 20;
/// Maximum number of rows of the other sections, for readers too.
const MAX_ROWS: usize = 1 << 16;
/// Maximum size of the arena, in bytes.
const MAX_ARENA: usize = 1 << 23;
/// Maximum size of the lap ring, in words.
const MAX_LAP: usize = 1 << 22;
const PHASE_SLOTS: usize = 16;
const THREAD_ROWS: usize = 256;

/// One section: its first word and its number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    pub(crate) word: usize,
    pub(crate) rows: usize,
}

impl Section {
    /// The first word of a row, each `words` long.
    pub(crate) fn row(&self, index: usize, words: usize) -> usize {
        self.word.saturating_add(index.saturating_mul(words))
    }
}

/// The position and size of every section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingLayout {
    pub(crate) bytes: usize,
    pub(crate) groups: Section,
    pub(crate) signatures: Section,
    pub(crate) call_sites: Section,
    /// No rows in a ring of version 1.2 or older.
    pub(crate) functions: Section,
    pub(crate) threads: Section,
    /// Rows are bytes.
    pub(crate) arena: Section,
    pub(crate) phases: Section,
    pub(crate) slots: Section,
    /// Rows are words.
    pub(crate) lap: Section,
    /// No rows, or as many as `slots` has.
    pub(crate) kernels: Section,
    pub(crate) links: Section,
    /// No rows before version 1.5.
    pub(crate) failures: Section,
    /// No rows before version 1.6.
    pub(crate) peers: Section,
    /// No rows before version 1.8.
    pub(crate) reducer: Section,
}

const NO_SECTION: Section = Section { word: 0, rows: 0 };

impl RingLayout {
    /// The layout for this configuration.
    pub(crate) fn plan(config: &RecorderConfig) -> Self {
        let slots = (config.entries as usize).next_power_of_two();
        // Names and signatures are short and the ranks of most groups are one run. There is additional space
        // for one group of the whole world whose ranks are in arbitrary order.
        let many_groups = (config.groups as usize).saturating_sub(1024) * 64;
        let arena = (192 * 1024 + config.world_size as usize * 16 + many_groups)
            .next_multiple_of(4096)
            .min(MAX_ARENA);
        let lap = (slots * 4).max(8 * 1024);
        let mut end = HEADER_BYTES;
        let mut place = |rows: usize, bytes_each: usize| {
            let word = end / 8;
            end = (end + rows * bytes_each).next_multiple_of(64);
            Section { word, rows }
        };
        let mut layout = Self {
            groups: place(config.groups as usize, group::WORDS * 8),
            signatures: place(config.signatures as usize, SIGNATURE_WORDS * 8),
            call_sites: place(config.call_sites as usize, call_site::WORDS * 8),
            functions: place(config.call_sites as usize, FUNCTION_WORDS * 8),
            threads: place(THREAD_ROWS, thread::WORDS * 8),
            arena: place(arena, 1),
            phases: place(PHASE_SLOTS, phase::WORDS * 8),
            kernels: match config.links {
                0 => NO_SECTION,
                _ => place(slots, kernel::WORDS * 8),
            },
            links: match config.links {
                0 => NO_SECTION,
                links => place((links as usize).next_power_of_two(), link::WORDS * 8),
            },
            failures: place(2 * failure::EACH, failure::WORDS * 8),
            // A row for each other rank, and one for the store.
            peers: place(
                (config.world_size as usize)
                    .clamp(2, peer::MAX_ROWS)
                    .next_power_of_two(),
                peer::WORDS * 8,
            ),
            reducer: place(reducer::ROWS, reducer::WORDS * 8),
            slots: place(slots, slot::WORDS * 8),
            lap: place(lap, 8),
            bytes: 0,
        };
        layout.bytes = end.next_multiple_of(4096);
        layout
    }

    /// Each section with its word in the header, the bytes of a row, and the maximum number of rows.
    fn sections(&mut self) -> [(&mut Section, usize, usize, usize); 14] {
        [
            (&mut self.groups, header::GROUPS, group::WORDS * 8, MAX_ROWS),
            (
                &mut self.signatures,
                header::SIGNATURES,
                SIGNATURE_WORDS * 8,
                MAX_ROWS,
            ),
            (
                &mut self.call_sites,
                header::CALL_SITES,
                call_site::WORDS * 8,
                MAX_ROWS,
            ),
            (
                &mut self.functions,
                header::FUNCTIONS,
                FUNCTION_WORDS * 8,
                MAX_ROWS,
            ),
            (
                &mut self.threads,
                header::THREADS,
                thread::WORDS * 8,
                MAX_ROWS,
            ),
            (&mut self.arena, header::ARENA, 1, MAX_ARENA),
            (&mut self.phases, header::PHASES, phase::WORDS * 8, MAX_ROWS),
            (&mut self.slots, header::SLOTS, slot::WORDS * 8, MAX_SLOTS),
            (&mut self.lap, header::LAP, 8, MAX_LAP),
            (
                &mut self.kernels,
                header::KERNELS,
                kernel::WORDS * 8,
                MAX_SLOTS,
            ),
            (&mut self.links, header::LINKS, link::WORDS * 8, MAX_ROWS),
            (
                &mut self.failures,
                header::FAILURES,
                failure::WORDS * 8,
                MAX_ROWS,
            ),
            (&mut self.peers, header::PEERS, peer::WORDS * 8, MAX_ROWS),
            (
                &mut self.reducer,
                header::REDUCER,
                reducer::WORDS * 8,
                MAX_ROWS,
            ),
        ]
    }

    /// Calls `store(word, value)` for every header word that defines the layout.
    pub(crate) fn store(mut self, mut store: impl FnMut(usize, u64)) {
        store(header::FILE_BYTES, self.bytes as u64);
        for (section, word, ..) in self.sections() {
            store(word, section.word as u64 * 8);
            store(word + 1, section.rows as u64);
        }
    }

    /// Reads the layout from a header. The error is the reason why the layout is invalid: a truncated file; a section
    /// that begins in the header or not at a word, reaches beyond the file, or has more rows than its limit; or a ring
    /// whose number of rows is not a power of two.
    pub(crate) fn load(memory: &impl Read) -> Result<Self, String> {
        let available = memory.len().saturating_mul(8);
        let bytes = usize::try_from(memory.load(header::FILE_BYTES)).unwrap_or(usize::MAX);
        if bytes > available {
            return Err(format!("it is truncated: {available} of {bytes} bytes"));
        }
        let mut layout = Self {
            bytes,
            groups: NO_SECTION,
            signatures: NO_SECTION,
            call_sites: NO_SECTION,
            functions: NO_SECTION,
            threads: NO_SECTION,
            arena: NO_SECTION,
            phases: NO_SECTION,
            slots: NO_SECTION,
            lap: NO_SECTION,
            kernels: NO_SECTION,
            links: NO_SECTION,
            failures: NO_SECTION,
            peers: NO_SECTION,
            reducer: NO_SECTION,
        };
        for (section, word, row_bytes, max) in layout.sections() {
            let start = memory.load(word);
            let rows = memory.load(word + 1);
            let may_lack = [
                header::FUNCTIONS,
                header::KERNELS,
                header::LINKS,
                header::FAILURES,
                header::PEERS,
                header::REDUCER,
            ];
            if may_lack.contains(&word) && rows == 0 {
                continue;
            }
            let end = rows
                .checked_mul(row_bytes as u64)
                .and_then(|size| size.checked_add(start));
            let fits = end.is_some_and(|end| end <= bytes as u64)
                && start >= HEADER_BYTES as u64
                && start.is_multiple_of(8)
                && rows <= max as u64;
            if !fits {
                return Err(format!(
                    "its header puts {rows} rows at byte {start} of {bytes} (word {word})"
                ));
            }
            *section = Section {
                word: (start / 8) as usize,
                rows: rows as usize,
            };
        }
        for (name, rows) in [
            ("slots", layout.slots.rows),
            ("phases", layout.phases.rows),
            ("words in its lap ring", layout.lap.rows),
            ("kernels", layout.kernels.rows.max(1)),
            ("links", layout.links.rows.max(1)),
            ("failures", layout.failures.rows.max(1)),
            ("peers", layout.peers.rows.max(1)),
            ("steps of reducers", layout.reducer.rows.max(1)),
        ] {
            if !rows.is_power_of_two() {
                return Err(format!("it has {rows} {name}, not a power of two"));
            }
        }
        Ok(layout)
    }
}

/// Reads the anchor of the ring's times.
pub(crate) fn load_anchor(memory: &impl Read) -> Anchor {
    Anchor {
        monotonic_ns: memory.load(header::ANCHOR_MONOTONIC),
        wall_ns: memory.load(header::ANCHOR_WALL) as i64,
    }
}

/// Two 32-bit halves of a word, the lower first.
pub(crate) const fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// A word of two 32-bit halves, the lower first.
#[inline]
pub(crate) const fn join(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

#[cfg(test)]
mod tests;
