//! [`FlightRecorder`], from begin to snapshot. `create` makes it, `growth` grows its file, and `place` moves it.
//! `abandoned` ends operations that no event will end; `notes`, `peers` and `nccl` record what is not an operation.
//!
//! In steady state a record costs a few dozen stores and the clock: no lock, no allocation, no system call.
//! No recording call fails: records that cannot be kept are counted in [`Counters`].

mod abandoned;
mod counters;
mod create;
mod growth;
mod nccl;
mod notes;
mod peers;
mod place;

pub use self::counters::Counters;
pub use self::create::OnConflict;
use self::nccl::Links;
pub use self::nccl::{ChannelEvent, CommunicatorInfo, KernelPlan, LinkHandle, LinkPlace};
pub use self::peers::PeerHandle;
use self::peers::Peers;
use self::place::Place;
use super::clock::{Clock, Timestamp};
use super::config::Storage;
use super::decode;
use super::file::directory;
use super::file::map::Map;
use super::lap::{self, LapRange};
use super::layout::{
    self, NO_ROW, NO_THREAD, RingLayout, group, header, join, kernel, phase, slot,
};
use super::operation::{CallSite, CallSiteId, GroupHandle, Operation, SignatureRef, Start, Ticket};
use super::processor_wait::ProcessorWaits;
use super::progress::{duration_bits, end, fail, graph_bits, retire, start};
use super::ring::{LapRing, MAX_ID, Missed, SlotRing};
use super::signature::{SignatureId, SignatureKey};
use super::sync::Memory;
use super::tables::Tables;
use crate::error::{Error, Result};
use crate::model::dump::Dump;
use crate::model::{
    EntryState, Frame, GroupPlace, Peer, ProcessGroupInfo, ProcessGroupStatus, Rank, ReduceOp,
};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

/// Writes one rank's operations and status to its ring.
///
/// All methods take `&self` and may be called from any thread. Those that record operations never fail. They neither
/// block nor allocate in steady state: a new signature, call site or thread takes a lock for the time of a copy and may
/// allocate, and a record whose slot is not reserved yet waits for the system. Calls of [`begin`](Self::begin) for one
/// group must be made one at a time, in the order of issue.
///
/// A ring in a file outlives its process: the recorder removes the file only in [`close`](Self::close) and
/// [`discard`](Self::discard). A child made by `fork` without `exec` must not use its parent's recorder: the mapping is
/// not inherited.
#[derive(Debug)]
pub struct FlightRecorder {
    map: Map,
    layout: RingLayout,
    slots: SlotRing<{ slot::WORDS }>,
    phases: SlotRing<{ phase::WORDS }>,
    lap: LapRing,
    kernels: SlotRing<{ kernel::WORDS }>,
    links: Links,
    peers: Peers,
    tables: Tables,
    clock: Clock,
    place: Place,
    /// Number of words that were touched ahead: those from the first slot to the end of the ring, then those from its
    /// beginning.
    touched: AtomicUsize,
    /// Whether the system has refused to reserve more of the file.
    growth_stopped: AtomicBool,
    /// Held by the thread that measures how long threads wait for a processor.
    processor_waits: Mutex<ProcessorWaits>,
    /// The ring file, whose lock marks the owner as alive; `None` in the process's own memory.
    file: Option<OwnedFd>,
    /// Whether the ring was marked as closed.
    closed: AtomicBool,
}

impl FlightRecorder {
    /// Where the ring is.
    pub fn storage(&self) -> &Storage {
        self.place.storage()
    }

    /// The size of the ring with its tables, in bytes.
    pub fn size_bytes(&self) -> usize {
        self.layout.bytes
    }

    /// The number of operations that the ring can hold.
    pub fn entries(&self) -> usize {
        self.slots.slots()
    }

    /// The current time, on the clock of the records.
    #[inline]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Adds a group with all its members and its default time-out. If `info.ranks` is empty, the members are not known
    /// yet: [`set_group_members`](Self::set_group_members) sets them.
    ///
    /// A group beyond the table is counted; operations on it are recorded without their group.
    pub fn add_group(&self, info: &ProcessGroupInfo, timeout: Duration) -> GroupHandle {
        self.add_group_row(info, None, timeout)
    }

    /// Adds a group of which only this rank's position is known, as in a communicator whose members have no global
    /// ranks. `info.ranks` is ignored. A reader of all members' records can combine them by the group's name.
    pub fn add_group_by_place(
        &self,
        info: &ProcessGroupInfo,
        place: GroupPlace,
        timeout: Duration,
    ) -> GroupHandle {
        self.add_group_row(info, Some(place), timeout)
    }

    fn add_group_row(
        &self,
        info: &ProcessGroupInfo,
        place: Option<GroupPlace>,
        timeout: Duration,
    ) -> GroupHandle {
        match self.tables.add_group(&self.map, info, place, timeout, 0) {
            Some(row) => GroupHandle(row),
            None => {
                self.count(header::GROUPS_LOST);
                GroupHandle(NO_ROW)
            }
        }
    }

    /// Sets the members of a group that was added without them: global ranks in order of group rank. Takes a lock, like
    /// adding a group.
    ///
    /// Returns false and stores nothing if the ring has no row for the group, if the members are already set, if their
    /// number is 0 or differs from the recorded group size, or if the ring has no space for them.
    pub fn set_group_members(&self, group: GroupHandle, ranks: &[Rank]) -> bool {
        self.group_words(group.0)
            .is_some_and(|row| self.tables.set_members(&self.map, row, ranks))
    }

    /// Interns a location in a program's source, for [`CallSite::Id`]. Takes a lock the first time that a location is
    /// passed, and compares its text each time, so keep the id. `function` may be empty.
    ///
    /// A location beyond the table is counted as lost, and its id reads as no call site.
    pub fn intern_call_site(&self, file: &str, function: &str, line: u32) -> CallSiteId {
        let row = self.tables.source_site(&self.map, file, function, line);
        CallSiteId(row.unwrap_or_else(|| {
            self.count(header::CALL_SITES_LOST);
            NO_ROW
        }))
    }

    /// Interns a signature, for callers that keep the id; `None` if it does not fit in the table, in which case
    /// [`SignatureRef::Key`] still works.
    pub fn intern(&self, key: &SignatureKey<'_>) -> Option<SignatureId> {
        self.tables.signature(&self.map, key)
    }

    /// Records that the calling thread issues an operation now. Returns the ticket for later updates of the record.
    ///
    /// The function is inlined into its caller, so that the compiler need not build the [`Operation`] in memory.
    #[inline(always)]
    pub fn begin(&self, operation: &Operation<'_>) -> Ticket {
        self.begin_at(operation, self.clock.now())
    }

    /// Does the same as [`begin`](Self::begin), for an operation that the calling thread issued at this time.
    #[inline(always)]
    pub fn begin_at(&self, operation: &Operation<'_>, at: Timestamp) -> Ticket {
        // Invariant 4 of docs/ARCHITECTURE.md: in steady state nothing here waits or allocates.
        let words = self.map.words();
        // Invariant 2 of docs/ARCHITECTURE.md: record ids are given here and nowhere else.
        let id = words[header::LAST_ID].fetch_add(1, Ordering::Relaxed) + 1;
        let sequence = if operation.is_p2p {
            0
        } else {
            operation.collective_seq_id.wrapping_add(1)
        };
        let ticket = Ticket {
            id,
            sequence,
            group: operation.group.0,
        };
        let (signature, lap_range) = match operation.signature {
            SignatureRef::Id(known)
                if operation.input_splits.is_empty() && operation.output_splits.is_empty() =>
            {
                (known, LapRange::default())
            }
            _ => self.signature_and_range(id, operation),
        };
        let call_site = match operation.call_site {
            None => NO_ROW,
            Some(CallSite::Id(known)) => known.0,
            Some(CallSite::Location(site)) => {
                self.tables.call_site(&self.map, site).unwrap_or_else(|| {
                    self.count(header::CALL_SITES_LOST);
                    NO_ROW
                })
            }
        };
        let thread = self.tables.thread(&self.map).unwrap_or_else(|| {
            self.count(header::THREADS_LOST);
            NO_THREAD
        });
        let peer = match operation.peer {
            Peer::None => slot::NO_RANK,
            Peer::Any => slot::ANY_RANK,
            Peer::Rank(rank) => rank,
        };
        let root = operation.root.unwrap_or(slot::NO_RANK);
        let reduction = operation
            .reduce_op
            .map_or(slot::NO_REDUCTION, ReduceOp::code);
        let flags = if operation.is_p2p { slot::FLAG_P2P } else { 0 };
        let facts = u64::from(operation.op.code())
            | u64::from(reduction) << 8
            | flags << 16
            | u64::from(thread) << 32;
        let timeout_ms = u32::try_from(operation.timeout.as_millis()).unwrap_or(u32::MAX);
        let (started, state) = match operation.start {
            Start::InTurn => (0, EntryState::Scheduled),
            Start::AtOnce => (at.0, EntryState::Started),
        };
        let fill = |words: &[AtomicU64; slot::WORDS]| {
            let store = |word: usize, value| words[word].store(value, Ordering::Relaxed);
            store(slot::CREATED, at.0);
            store(slot::STARTED, started);
            store(slot::ENDED, 0);
            store(slot::COLLECTIVE_SEQ_ID, operation.collective_seq_id);
            store(slot::P2P_SEQ_ID, operation.p2p_seq_id);
            store(slot::OP_ID, operation.op_id);
            store(slot::TABLES, join(operation.group.0, signature.row));
            store(slot::WHAT, facts);
            store(slot::STATE, state as u64);
            store(slot::ENDS, join(peer, root));
            store(slot::CALL, join(timeout_ms, call_site));
            store(slot::LAP_POSITION, lap_range.position);
            store(slot::LAP_WORDS, lap_range.words);
            store(slot::INPUT_ELEMENTS, signature.input_elements);
            store(slot::OUTPUT_ELEMENTS, signature.output_elements);
        };
        let id = id & MAX_ID;
        let mut written = self.slots.write(&self.map, id, fill);
        if written == Err(Missed::Beyond) {
            written = self.write_beyond(id, &fill);
        }
        if written.is_err() {
            self.count(header::RECORDS_LOST);
        }
        self.raise_at_issue(ticket, operation.start);
        ticket
    }

    /// Raises the status of the group of an operation that is issued now. A group's operations are issued one at a
    /// time.
    #[inline]
    fn raise_at_issue(&self, ticket: Ticket, start: Start) {
        self.raise_in_turn(ticket, group::LAST_ENQUEUED);
        if start == Start::AtOnce {
            self.raise_in_turn(ticket, group::LAST_STARTED);
        }
    }

    /// Stores the signature if it is new, and the data specific to this record. Returns the id of the signature, and
    /// the range of the data in the lap ring.
    fn signature_and_range(&self, id: u64, operation: &Operation<'_>) -> (SignatureId, LapRange) {
        let splits = [operation.input_splits, operation.output_splits];
        let (signature, key) = match operation.signature {
            SignatureRef::Id(id) => (id, None),
            SignatureRef::Key(key) => match self.tables.signature(&self.map, key) {
                Some(id) => (id, None),
                None => (key.without_row(), Some(key)),
            },
        };
        if key.is_none() && splits.iter().all(|side| side.is_empty()) {
            return (signature, LapRange::default());
        }
        let lap = self.layout.lap;
        let is_reserved = self.reserve_to(lap.word + lap.rows);
        let range = is_reserved
            .then(|| lap::write(&self.map, &self.lap, id & MAX_ID, splits, key))
            .flatten();
        let range = range.unwrap_or_else(|| {
            self.count(header::SHAPES_LOST);
            LapRange::default()
        });
        (signature, range)
    }

    /// Records that an operation was seen to have started, now.
    pub fn started(&self, ticket: Ticket) {
        self.started_at(ticket, self.clock.now());
    }

    /// Records that an operation was seen at this time to have started.
    pub fn started_at(&self, ticket: Ticket, at: Timestamp) {
        self.update(ticket, |words| start(words, at));
        self.raise(ticket, group::LAST_STARTED);
    }

    /// Records the same as [`started`](Self::started), for a caller that reports the starts of a group's operations one
    /// at a time and only in this way: the group's status is then raised without an atomic exchange.
    #[inline]
    pub fn started_in_turn(&self, ticket: Ticket) {
        let at = self.clock.now();
        self.update(ticket, |words| start(words, at));
        self.raise_in_turn(ticket, group::LAST_STARTED);
    }

    /// Records that an operation was seen, now, to have completed.
    #[inline]
    pub fn completed(&self, ticket: Ticket) {
        self.completed_at(ticket, self.clock.now(), None);
    }

    /// Records that an operation was seen at this moment to have completed, with the run time measured
    /// by the backend. The first call counts: later calls change nothing.
    pub fn completed_at(&self, ticket: Ticket, at: Timestamp, duration: Option<Duration>) {
        self.update(ticket, |words| {
            let bits = duration_bits(duration);
            end(words, EntryState::Completed, at, bits);
        });
        self.raise(ticket, group::LAST_COMPLETED);
    }

    /// Records that an operation was captured at this time into the CUDA graph with this id: for an observer it has
    /// completed. An id of 2^53 or more is not stored and counts as a lost update.
    pub fn captured_at(&self, ticket: Ticket, at: Timestamp, graph_id: u64) {
        let bits = graph_bits(graph_id).unwrap_or_else(|| {
            self.count(header::UPDATES_LOST);
            0
        });
        self.update(ticket, |words| {
            end(words, EntryState::Completed, at, bits);
        });
        self.raise(ticket, group::LAST_COMPLETED);
    }

    /// Records the same as [`completed_at`](Self::completed_at), and that the operation is no longer watched.
    #[inline]
    pub fn completed_and_retired_at(
        &self,
        ticket: Ticket,
        at: Timestamp,
        duration: Option<Duration>,
    ) {
        self.update(ticket, |words| {
            let bits = duration_bits(duration);
            end(words, EntryState::Completed, at, bits);
            retire(words);
        });
        self.raise(ticket, group::LAST_COMPLETED);
    }

    /// Records that an operation ended, now, with an error or a time-out.
    pub fn failed(&self, ticket: Ticket) {
        self.failed_at(ticket, self.clock.now());
    }

    /// Records that an operation ended at this moment with an error or a time-out. One that completed stays completed.
    pub fn failed_at(&self, ticket: Ticket, at: Timestamp) {
        self.update(ticket, |words| fail(words, at));
    }

    /// Records that the operation is no longer watched.
    pub fn retired(&self, ticket: Ticket) {
        self.update(ticket, retire);
    }

    /// The group's progress; the default value if the ring has no row for the group.
    pub fn status(&self, group: GroupHandle) -> ProcessGroupStatus {
        let Some(row) = self.group_words(group.0) else {
            return ProcessGroupStatus::default();
        };
        let sequence = |word: usize| {
            let raised = row[word].load(Ordering::Relaxed);
            raised.cast_signed().saturating_sub(1)
        };
        let last_completed = sequence(group::LAST_COMPLETED);
        ProcessGroupStatus {
            last_enqueued: sequence(group::LAST_ENQUEUED),
            last_started: sequence(group::LAST_STARTED).max(last_completed),
            last_completed,
            timeout_ms: row[group::TIMEOUT_MS].load(Ordering::Relaxed),
        }
    }

    /// Records the time-out of a group's operations from now on.
    pub fn set_group_timeout(&self, group: GroupHandle, timeout: Duration) {
        if let Some(row) = self.group_words(group.0) {
            let ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
            row[group::TIMEOUT_MS].store(ms, Ordering::Relaxed);
        }
    }

    /// Sets the training step that the program is in.
    pub fn step(&self, step: i64) {
        self.map.words()[header::STEP].store(step.cast_unsigned(), Ordering::Relaxed);
    }

    /// Records a heartbeat of the watchdog, now, and how long the threads of operations have waited for a processor.
    ///
    /// Makes a few system calls for each thread that issues or runs operations: the path that records must not call it.
    pub fn heartbeat(&self) {
        self.map.words()[header::HEARTBEAT].store(self.clock.now().0, Ordering::Relaxed);
        self.measure_processor_waits();
    }

    /// Records that the calling thread runs operations, so that its waits for a processor count for this rank. A
    /// thread that issues operations is known without this call.
    pub fn note_thread(&self) {
        // A thread that does not fit in the table is counted as lost by `begin`, if it issues operations.
        let _ = self.tables.thread(&self.map);
    }

    /// Records how long the threads of operations have waited for a processor.
    fn measure_processor_waits(&self) {
        // If another thread measures at this moment, this one need not.
        let Ok(mut waits) = self.processor_waits.try_lock() else {
            return;
        };
        for thread in self.tables.threads_from(&self.map, waits.thread_count()) {
            waits.add(thread);
        }
        if let Some(window) = waits.measure(self.clock.now().0) {
            let words = self.map.words();
            // A reader between these stores finds a wait that is too short, never one that is too long.
            words[header::PROCESSOR_WAIT].store(0, Ordering::Relaxed);
            words[header::PROCESSOR_WAIT_SINCE].store(window.since_ns, Ordering::Release);
            words[header::PROCESSOR_WAIT].store(window.waited_ns, Ordering::Release);
        }
    }

    /// Whether the ring's file was found to be truncated by someone else. Records are then complete in this process
    /// only, and so in its dumps and at its endpoint.
    pub fn is_truncated(&self) -> bool {
        self.map.is_truncated()
    }

    /// The call site of an operation that was begun here; `None` if it was given without one, if the call site did not
    /// fit in the table, or if the record is not in the ring. Takes no lock; allocates; does not stop writers.
    pub fn call_site(&self, ticket: Ticket) -> Option<Frame> {
        decode::call_site(&self.map, &self.layout, ticket.record_id() & MAX_ID)
    }

    /// The ring's current contents. Takes no lock; allocates; does not stop writers.
    pub fn snapshot(&self) -> Dump {
        decode::dump(&self.map, &self.layout, self.now_ns())
    }

    /// The current time, on the clock of the records, ns since the epoch.
    pub(crate) fn now_ns(&self) -> i64 {
        layout::load_anchor(&self.map).now_ns()
    }

    /// The ring's memory, for repeated reads within this process.
    #[cfg(feature = "endpoint")]
    pub(crate) fn memory(&self) -> (&Map, &RingLayout) {
        (&self.map, &self.layout)
    }

    /// Marks the ring as closed and keeps its file: for a process that exits cleanly after a failure. Returns whether
    /// the ring was open.
    pub fn mark_closed(&self) -> bool {
        if self.closed.swap(true, Ordering::Relaxed) {
            return false;
        }
        let words = self.map.words();
        words[header::CLOSED_AT].store(self.clock.now().0, Ordering::Relaxed);
        words[header::STATE].store(layout::STATE_CLOSED, Ordering::Release);
        true
    }

    /// Marks the ring as closed, at the end of a rank that ends well. Once all rings of the job on this host are
    /// closed, the last rank removes their files, unless one holds a failure. Until then they show which ranks ended
    /// well. Also removes from the job's directory the rings that earlier attempts left: those of this rank, and those
    /// of processes that have ended. Recording continues to work, and another recorder of this process can take the
    /// name. Does nothing if the ring was closed before, also by [`mark_closed`](Self::mark_closed), which keeps the
    /// file.
    ///
    /// Reads the headers of the job's rings on this host.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn close(&self) -> Result<()> {
        let path = self.storage().path();
        if let Some(path) = path
            && !self.closed.load(Ordering::Relaxed)
        {
            directory::remove_earlier_attempts(path);
        }
        if !self.mark_closed() {
            return Ok(());
        }
        // Of two ranks that end at once, at least one sees that the other has closed its ring.
        fence(Ordering::SeqCst);
        if let Some(file) = &self.file {
            directory::unlock(file);
        }
        path.map_or(Ok(()), directory::remove_if_all_ended_well)
    }

    /// Marks the ring as closed and removes its file, but no files of other ranks or attempts. For an attempt that did
    /// not begin, or that another one continues.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn discard(&self) -> Result<()> {
        if !self.mark_closed() {
            return Ok(());
        }
        let Some(path) = self.storage().path() else {
            return Ok(());
        };
        match directory::remove(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format!("remove {}", path.display()), error))
            }
            _ => Ok(()),
        }
    }

    /// Changes a ticket's record in place, or counts why that was not possible.
    #[inline]
    fn update(&self, ticket: Ticket, change: impl FnOnce(&[AtomicU64; slot::WORDS])) {
        match self.slots.update(&self.map, ticket.id & MAX_ID, change) {
            Ok(()) => {}
            Err(Missed::Reused) => self.count(header::UPDATES_LATE),
            // A record that could not be written cannot be updated.
            Err(Missed::Held | Missed::Beyond) => self.count(header::UPDATES_LOST),
        }
    }

    /// Raises one of a group's status words to the ticket's sequence number.
    #[inline]
    fn raise(&self, ticket: Ticket, word: usize) {
        if ticket.sequence == 0 {
            return;
        }
        if let Some(row) = self.group_words(ticket.group) {
            row[word].fetch_max(ticket.sequence, Ordering::Relaxed);
        }
    }

    /// Like [`raise`](Self::raise), for a word that no other thread raises at the same time: a plain store suffices.
    #[inline]
    fn raise_in_turn(&self, ticket: Ticket, word: usize) {
        if ticket.sequence == 0 {
            return;
        }
        if let Some(row) = self.group_words(ticket.group)
            && row[word].load(Ordering::Relaxed) < ticket.sequence
        {
            row[word].store(ticket.sequence, Ordering::Relaxed);
        }
    }

    /// The words of a group's row; `None` if the table has no such row.
    #[inline]
    fn group_words(&self, row: u32) -> Option<&[AtomicU64; group::WORDS]> {
        if row as usize >= self.layout.groups.rows {
            return None;
        }
        let start = self.layout.groups.row(row as usize, group::WORDS);
        self.map.words().get(start..)?.first_chunk()
    }

    /// Adds 1 to this word of the header.
    #[cold]
    fn count(&self, word: usize) {
        self.map.words()[word].fetch_add(1, Ordering::Relaxed);
    }
}
