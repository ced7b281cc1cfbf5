//! Tables of repeated data: groups, signatures, call sites and threads, each stored once.
//!
//! A look-up takes no lock; adding takes one for the time of a copy. A row is written before the count that admits it
//! and does not change afterwards, so readers need no stamp here. Only the row of a group changes later, in a few
//! words, each by its own store: the progress, the time-out, and, once they are known, the hash of NCCL's communicator
//! and the members of a group that was added without them. If a table is full, the caller gets `None` and counts the
//! loss.

use super::bytes::Packer;
use super::file::map::Map;
use super::layout::{self, RingLayout, Section, header, join};
use super::signature::{MAX_BYTES, OwnedKey, SignatureId, SignatureKey, cut};
use super::sync::{Memory, Read};
use crate::model::{GroupPlace, ProcessGroupInfo, Rank};
use std::cell::Cell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::Location;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// A hash index of the rows, which is read without a lock. Rows are only added.
///
/// The index has levels, each four times as long as the previous one and created when that is full: nearly all programs
/// use only the first, and memory for unused cells must be initialized too.
#[derive(Debug)]
struct HashIndex<K> {
    levels: [OnceLock<Level<K>>; LEVELS],
}

/// The number of levels: enough for the maximum number of rows of a table.
const LEVELS: usize = 6;
/// Rows of the first level.
const FIRST_LEVEL: usize = 128;

/// One level; at most half of its cells are in use.
#[derive(Debug)]
struct Level<K> {
    cells: Box<[OnceLock<(u64, K, u32)>]>,
    used: AtomicUsize,
}

impl<K> Level<K> {
    fn for_rows(rows: usize) -> Self {
        Self {
            cells: (0..rows * 2).map(|_| OnceLock::new()).collect(),
            used: AtomicUsize::new(0),
        }
    }

    fn is_full(&self) -> bool {
        self.used.load(Ordering::Relaxed) >= self.cells.len() / 2
    }

    /// The cells in which a key with this hash may be, in order.
    #[inline]
    fn probe(&self, hash: u64) -> impl Iterator<Item = &OnceLock<(u64, K, u32)>> {
        let mask = self.cells.len() - 1;
        let start = (hash >> 32) as usize;
        (0..self.cells.len()).map(move |offset| &self.cells[(start + offset) & mask])
    }
}

impl<K> HashIndex<K> {
    fn new() -> Self {
        let index = Self {
            levels: [const { OnceLock::new() }; LEVELS],
        };
        index.levels[0].get_or_init(|| Level::for_rows(FIRST_LEVEL));
        index
    }

    /// The row of the key with this hash that `matches` accepts.
    #[inline]
    fn find(&self, hash: u64, matches: impl Fn(&K) -> bool) -> Option<u32> {
        self.find_with_key(hash, matches).map(|(_, row)| row)
    }

    #[inline]
    fn find_with_key(&self, hash: u64, matches: impl Fn(&K) -> bool) -> Option<(&K, u32)> {
        for level in &self.levels {
            for cell in level.get()?.probe(hash) {
                match cell.get() {
                    Some((known, key, row)) if *known == hash && matches(key) => {
                        return Some((key, *row));
                    }
                    Some(_) => {}
                    None => break,
                }
            }
        }
        None
    }

    /// Adds a row. The caller holds the lock that orders additions.
    fn add(&self, hash: u64, key: K, row: u32) {
        let mut entry = (hash, key, row);
        for (nth, level) in self.levels.iter().enumerate() {
            let level = level.get_or_init(|| Level::for_rows(FIRST_LEVEL << (2 * nth)));
            if level.is_full() {
                continue;
            }
            for cell in level.probe(hash) {
                match cell.set(entry) {
                    Ok(()) => {
                        level.used.fetch_add(1, Ordering::Relaxed);
                        return;
                    }
                    Err(returned) => entry = returned,
                }
            }
            return;
        }
    }
}

/// Number of call sites in the fast cache; a power of two.
const RECENT_SITES: usize = 64;
/// Number of bits for a row in a [`site_word`].
const ROW_BITS: u32 = 16;

/// A call site's address and its row in one word, if they fit.
fn site_word(address: usize, row: u32) -> Option<u64> {
    let address = address as u64;
    let fits = address >> (64 - ROW_BITS) == 0 && row >> ROW_BITS == 0;
    fits.then_some(address << ROW_BITS | u64::from(row))
}

/// Spreads a number over 64 bits, by 2^64 divided by the golden ratio.
#[inline]
fn spread(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A location in the source of a program in any language.
#[derive(Debug)]
struct SourceSite {
    file: Box<str>,
    function: Box<str>,
    line: u32,
}

/// The tables of one ring.
#[derive(Debug)]
pub(super) struct Tables {
    layout: RingLayout,
    /// Boxed: nearly all cells stay empty, and each would have the size of a key.
    signatures: HashIndex<Box<OwnedKey>>,
    /// By the address of the location, which is a constant of the program.
    call_sites: HashIndex<usize>,
    /// Call sites of other languages than Rust, by their text.
    source_sites: HashIndex<Box<SourceSite>>,
    /// Recently used rows of `call_sites`, found in a few instructions: [`site_word`]s, 0 if empty.
    recent_sites: [AtomicU64; RECENT_SITES],
    /// By the kernel's id of the thread; the hash is also that of its name.
    threads: HashIndex<u32>,
    /// The number of these tables, by which a thread checks that its cached row belongs to them.
    id: u64,
    /// Bytes of the arena in use. Held by a thread that adds to a table.
    arena_used: Mutex<usize>,
}

impl Tables {
    pub(super) fn new(layout: RingLayout) -> Self {
        // An exception to invariant 9 of docs/ARCHITECTURE.md. It numbers the recorders of this process, so that a
        // thread's cached row (`OWN_ROW`) is not used with another recorder's tables; 0 means none. Relaxed suffices:
        // only uniqueness matters.
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self {
            layout,
            signatures: HashIndex::new(),
            call_sites: HashIndex::new(),
            source_sites: HashIndex::new(),
            recent_sites: [const { AtomicU64::new(0) }; RECENT_SITES],
            threads: HashIndex::new(),
            id: LAST.fetch_add(1, Ordering::Relaxed) + 1,
            arena_used: Mutex::new(0),
        }
    }

    /// Adds a group and returns its row; `None` if the table or the arena is full. `communicator` is NCCL's hash of the
    /// communicator; 0 if the group is none.
    pub(super) fn add_group(
        &self,
        map: &Map,
        info: &ProcessGroupInfo,
        place: Option<GroupPlace>,
        timeout: Duration,
        communicator: u64,
    ) -> Option<u32> {
        let mut used = self.lock();
        let row = free_row(map, header::GROUPS_USED, self.layout.groups)?;
        let mut arena = Arena::new(map, self.layout.arena, &mut used);
        let name = arena.keep_text(&info.name)?;
        let desc = arena.keep_text(&info.desc)?;
        // If the arena has no space for the ranks, the group is still added with its name.
        let (ranks, size, own_rank) = match place {
            None if info.ranks.is_empty() => (0, 0, 0),
            None => {
                let ranks = arena.keep_ranks(&info.ranks).unwrap_or(0);
                (ranks, info.ranks.len() as u64, 0)
            }
            Some(place) => (0, u64::from(place.size), u64::from(place.rank) + 1),
        };
        let start = self.layout.groups.row(row as usize, layout::group::WORDS);
        let words = &map.words()[start..start + layout::group::WORDS];
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        for (word, value) in [
            (layout::group::ID, u64::from(info.id)),
            (layout::group::NAME, name),
            (layout::group::DESC, desc),
            (layout::group::RANKS, ranks),
            (layout::group::SIZE, size),
            (layout::group::TIMEOUT_MS, timeout_ms),
            (layout::group::OWN_RANK, own_rank),
            (layout::group::COMM_HASH, communicator),
        ] {
            words[word].store(value, Ordering::Relaxed);
        }
        publish(map, header::GROUPS_USED, row);
        Some(row)
    }

    /// Sets the members in a group's row; see
    /// [`FlightRecorder::set_group_members`](super::FlightRecorder::set_group_members).
    pub(super) fn set_members(
        &self,
        map: &Map,
        row: &[AtomicU64; layout::group::WORDS],
        ranks: &[Rank],
    ) -> bool {
        let mut used = self.lock();
        let size = row[layout::group::SIZE].load(Ordering::Relaxed);
        let has_members = row[layout::group::RANKS].load(Ordering::Relaxed) != 0;
        if has_members || ranks.is_empty() || (size != 0 && size != ranks.len() as u64) {
            return false;
        }
        let mut arena = Arena::new(map, self.layout.arena, &mut used);
        let Some(reference) = arena.keep_ranks(ranks) else {
            return false;
        };
        // A reader that sees only one of these stores finds runs that do not sum to the size, and reports no
        // members yet.
        row[layout::group::RANKS].store(reference, Ordering::Release);
        row[layout::group::SIZE].store(ranks.len() as u64, Ordering::Release);
        true
    }

    /// The signature's id; `None` if it is new and does not fit.
    pub(super) fn signature(&self, map: &Map, key: &SignatureKey<'_>) -> Option<SignatureId> {
        let hash = key.hash_code();
        let known = self
            .signatures
            .find_with_key(hash, |owned| owned.matches(key));
        Some(match known {
            Some((owned, row)) => SignatureId {
                row,
                input_elements: owned.input_elements,
                output_elements: owned.output_elements,
            },
            None => SignatureId {
                row: self.add_signature(map, key, hash)?,
                input_elements: key.input_elements(),
                output_elements: key.output_elements(),
            },
        })
    }

    #[cold]
    fn add_signature(&self, map: &Map, key: &SignatureKey<'_>, hash: u64) -> Option<u32> {
        // If the table is full, the lock is not taken.
        free_row(map, header::SIGNATURES_USED, self.layout.signatures)?;
        let len = key.encoded_len();
        if len > MAX_BYTES {
            return None;
        }
        let mut used = self.lock();
        if let Some(row) = self.signatures.find(hash, |owned| owned.matches(key)) {
            return Some(row);
        }
        let row = free_row(map, header::SIGNATURES_USED, self.layout.signatures)?;
        let mut arena = Arena::new(map, self.layout.arena, &mut used);
        let reference = arena.keep(len, |byte| key.encode(byte))?;
        let word = self.layout.signatures.row(row as usize, 1);
        map.words()[word].store(reference, Ordering::Relaxed);
        publish(map, header::SIGNATURES_USED, row);
        self.signatures.add(hash, Box::new(OwnedKey::new(key)), row);
        Some(row)
    }

    /// The call site's row; `None` if it is new and the table or the arena is full.
    #[inline]
    pub(super) fn call_site(&self, map: &Map, site: &'static Location<'static>) -> Option<u32> {
        let address = std::ptr::from_ref(site).addr();
        let hash = spread(address as u64);
        let recent = &self.recent_sites[(hash >> (64 - RECENT_SITES.trailing_zeros())) as usize];
        let word = recent.load(Ordering::Relaxed);
        if word >> ROW_BITS == address as u64 {
            return Some((word & ((1 << ROW_BITS) - 1)) as u32);
        }
        let row = self.find_call_site(map, site, address, hash)?;
        if let Some(word) = site_word(address, row) {
            recent.store(word, Ordering::Relaxed);
        }
        Some(row)
    }

    #[inline(never)]
    fn find_call_site(
        &self,
        map: &Map,
        site: &'static Location<'static>,
        address: usize,
        hash: u64,
    ) -> Option<u32> {
        match self.call_sites.find(hash, |&known| known == address) {
            Some(row) => Some(row),
            None => self.add_call_site(map, site, address, hash),
        }
    }

    #[cold]
    fn add_call_site(
        &self,
        map: &Map,
        site: &'static Location<'static>,
        address: usize,
        hash: u64,
    ) -> Option<u32> {
        free_row(map, header::CALL_SITES_USED, self.layout.call_sites)?;
        let mut used = self.lock();
        if let Some(row) = self.call_sites.find(hash, |&known| known == address) {
            return Some(row);
        }
        let line = join(site.line(), site.column());
        let row = self.write_site(map, &mut used, site.file(), "", line)?;
        self.call_sites.add(hash, address, row);
        Some(row)
    }

    /// The row of a location given as text; `None` if it is new and the table or the arena is full.
    pub(super) fn source_site(
        &self,
        map: &Map,
        file: &str,
        function: &str,
        line: u32,
    ) -> Option<u32> {
        let mut hasher = DefaultHasher::new();
        (file, function, line).hash(&mut hasher);
        let hash = hasher.finish();
        let find = || {
            self.source_sites.find(hash, |site| {
                site.line == line && *site.file == *file && *site.function == *function
            })
        };
        if let Some(row) = find() {
            return Some(row);
        }
        let mut used = self.lock();
        if let Some(row) = find() {
            return Some(row);
        }
        let row = self.write_site(map, &mut used, file, function, line.into())?;
        let site = SourceSite {
            file: file.into(),
            function: function.into(),
            line,
        };
        self.source_sites.add(hash, Box::new(site), row);
        Some(row)
    }

    /// Adds a call site. `used` is the number of bytes of the arena in use, which the lock guards.
    fn write_site(
        &self,
        map: &Map,
        used: &mut usize,
        file: &str,
        function: &str,
        line: u64,
    ) -> Option<u32> {
        let row = free_row(map, header::CALL_SITES_USED, self.layout.call_sites)?;
        let mut arena = Arena::new(map, self.layout.arena, used);
        let file = arena.keep_text(file)?;
        // If the arena has no space for the function's name, the call site is still added with its line.
        let function = arena.keep_text(function).unwrap_or(0);
        let sites = self.layout.call_sites;
        let start = sites.row(row as usize, layout::call_site::WORDS);
        let functions = self.layout.functions;
        let function_word = functions.row(row as usize, layout::FUNCTION_WORDS);
        map.words()[start + layout::call_site::FILE].store(file, Ordering::Relaxed);
        map.words()[start + layout::call_site::LINE].store(line, Ordering::Relaxed);
        map.words()[function_word].store(function, Ordering::Relaxed);
        publish(map, header::CALL_SITES_USED, row);
        Some(row)
    }

    /// The row of the calling thread; `None` if it is new and the table or the arena is full.
    #[inline]
    pub(super) fn thread(&self, map: &Map) -> Option<u16> {
        let (tables, row) = OWN_ROW.get();
        if tables == self.id {
            return Some(row);
        }
        self.find_thread(map)
    }

    /// The kernel's ids of the threads in the rows from this one on.
    pub(super) fn threads_from(&self, map: &Map, first: usize) -> impl Iterator<Item = u32> {
        let section = self.layout.threads;
        let used = map.words()[header::THREADS_USED].load(Ordering::Acquire) as usize;
        (first..used.min(section.rows)).map(move |row| {
            let start = section.row(row, layout::thread::WORDS);
            map.words()[start + layout::thread::ID].load(Ordering::Relaxed) as u32
        })
    }

    #[inline(never)]
    fn find_thread(&self, map: &Map) -> Option<u16> {
        let id = own_thread_id();
        // The kernel gives the id of a thread that has ended to a later one, which may have another name.
        let hash = spread(u64::from(id)) ^ own_name_hash();
        let row = match self.threads.find(hash, |&known| known == id) {
            Some(row) => row,
            None => self.add_thread(map, id, hash)?,
        };
        let row = u16::try_from(row).ok()?;
        OWN_ROW.set((self.id, row));
        Some(row)
    }

    #[cold]
    fn add_thread(&self, map: &Map, id: u32, hash: u64) -> Option<u32> {
        free_row(map, header::THREADS_USED, self.layout.threads)?;
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("");
        let mut used = self.lock();
        let row = free_row(map, header::THREADS_USED, self.layout.threads)?;
        let name = Arena::new(map, self.layout.arena, &mut used).keep_text(name)?;
        let start = self.layout.threads.row(row as usize, layout::thread::WORDS);
        map.words()[start + layout::thread::ID].store(id.into(), Ordering::Relaxed);
        map.words()[start + layout::thread::NAME].store(name, Ordering::Relaxed);
        publish(map, header::THREADS_USED, row);
        self.threads.add(hash, id, row);
        Some(row)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, usize> {
        // A poisoned lock is harmless: counts are stored last, so the tables are never half-changed.
        self.arena_used
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

thread_local! {
    /// The kernel's id of this thread, read once.
    static THREAD_ID: Cell<u32> = const { Cell::new(0) };
    /// The hash of this thread's name, computed once; `None` before that.
    static NAME_HASH: Cell<Option<u64>> = const { Cell::new(None) };
    /// The id of the tables that this thread used last, and its row there.
    static OWN_ROW: Cell<(u64, u16)> = const { Cell::new((0, 0)) };
}

/// The hash of the name of this thread, which does not change while the thread runs. The first call of a thread that
/// Rust's library has not started allocates, since the library then makes its handle of the thread; no later call does.
fn own_name_hash() -> u64 {
    if let Some(hash) = NAME_HASH.get() {
        return hash;
    }
    let thread = std::thread::current();
    let mut hasher = DefaultHasher::new();
    thread.name().unwrap_or("").hash(&mut hasher);
    let hash = hasher.finish();
    NAME_HASH.set(Some(hash));
    hash
}

#[inline]
fn own_thread_id() -> u32 {
    THREAD_ID.with(|id| {
        if id.get() == 0 {
            id.set(
                rustix::thread::gettid()
                    .as_raw_nonzero()
                    .get()
                    .cast_unsigned(),
            );
        }
        id.get()
    })
}

/// The next row of a table; `None` if it is full.
fn free_row(map: &Map, used: usize, section: Section) -> Option<u32> {
    let used = map.load(used);
    (used < section.rows as u64).then_some(used as u32)
}

/// Makes the row that was just written visible to readers.
fn publish(map: &Map, used: usize, row: u32) {
    map.words()[used].store(u64::from(row) + 1, Ordering::Release);
}

/// Space for bytes, allocated from the front in whole words.
struct Arena<'a> {
    map: &'a Map,
    section: Section,
    used: &'a mut usize,
}

impl<'a> Arena<'a> {
    fn new(map: &'a Map, section: Section, used: &'a mut usize) -> Self {
        Self { map, section, used }
    }

    /// Stores `len` bytes, which `fill` passes in order. Returns their offset | len << 32; `None` if the arena is full.
    fn keep(&mut self, len: usize, fill: impl FnOnce(&mut dyn FnMut(u8))) -> Option<u64> {
        let offset = *self.used;
        let end = offset.checked_add(len)?.next_multiple_of(8);
        if end > self.section.rows {
            return None;
        }
        let start = self.section.word + offset / 8;
        let mut words = self.map.words()[start..start + (end - offset) / 8].iter();
        let mut packer = Packer::new(|value| {
            if let Some(word) = words.next() {
                word.store(value, Ordering::Relaxed);
            }
        });
        fill(&mut |byte| packer.byte(byte));
        packer.finish();
        *self.used = end;
        Some(join(offset as u32, len as u32))
    }

    /// Like [`keep`](Self::keep), for ranks as runs.
    fn keep_ranks(&mut self, ranks: &[Rank]) -> Option<u64> {
        let runs = runs_of(ranks);
        let bytes = || runs.iter().flatten().flat_map(|word| word.to_le_bytes());
        self.keep(runs.len() * 16, |byte| bytes().for_each(byte))
    }

    /// Like [`keep`](Self::keep), for at most [`MAX_TEXT_BYTES`] of a text.
    fn keep_text(&mut self, text: &str) -> Option<u64> {
        let text = cut(text, MAX_TEXT_BYTES);
        self.keep(text.len(), |byte| text.bytes().for_each(byte))
    }
}

/// Maximum length of a name, description or path, in bytes.
const MAX_TEXT_BYTES: usize = 4096;

/// Splits ranks into runs, each of two words (first | step << 32, length): nearly all groups are one run.
fn runs_of(ranks: &[Rank]) -> Vec<[u64; 2]> {
    let mut runs = Vec::new();
    let mut rest = ranks;
    while let Some((&first, others)) = rest.split_first() {
        let step = others.first().map_or(0, |next| next.wrapping_sub(first));
        let steps = rest
            .windows(2)
            .take_while(|pair| pair[1].wrapping_sub(pair[0]) == step)
            .count();
        let count = steps + 1;
        runs.push([join(first, step), count as u64]);
        rest = &rest[count..];
    }
    runs
}

#[cfg(test)]
mod tests;
