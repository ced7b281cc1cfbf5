//! A stream of bytes between two ranks of a group, through their shared memory.
//!
//! Each direction is a ring of bytes with one writer and one reader. The writer copies bytes in, then
//! stores how many it has written in all; the reader copies them out, then stores how many it has read in
//! all.
//!
//! A small number of bytes takes another path, which needs one or two cache lines instead of two or three:
//! *cells* outside the ring, used in turn. A cell has bytes, their position among the bytes of the ring,
//! and last of all its own number, whose arrival completes the cell. The reader checks the count of the
//! ring first and the next cell afterwards. So if it sees bytes of the ring that were written after a cell,
//! it sees the cell as well, and keeps their order. If all cells are full, the bytes go through the ring.
//!
//! An end that finds the ring full (or empty) for so long that it sleeps sets a mark first and checks once
//! more; the other end makes room (or writes), and checks the mark afterwards. Between the store and the
//! check there is a full fence on both sides, so at least one of the two sees the other's store.
//!
//! The pair has a socket too. It is the doorbell that wakes a sleeper, so that a thread can sleep on
//! several streams at once; and the end of the socket shows that the other rank has left or died.

use super::area::RING_HEAD;
use super::mapping::Mapping;
use rcomm_core::arithmetic::{AdaptiveCopy, copy};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The writer publishes its count after each piece of this many bytes, so that the reader can
/// begin.
const PIECE: usize = 32 << 10;

/// How many cells a direction has.
const CELLS: u64 = 16;
/// Bytes of a cell: two cache lines, of which the second is not used if the first is enough.
const CELL: usize = 128;
/// Bytes of data that a cell carries.
const CARRIED: usize = CELL - BYTES;
// Fields of a cell.
/// The cell's number, counted from 1, with the count of bytes that it carries in the lowest eight bits.
const NUMBER: usize = 0;
/// How many bytes of the ring precede the cell.
const PLACE: usize = 8;
const BYTES: usize = 16;

// Fields in the head of a ring, each on its own cache lines.
const WRITTEN: usize = 0;
const READ: usize = 128;
const READER_SLEEPS: usize = 256;
const WRITER_SLEEPS: usize = 384;
const CELLS_READ: usize = 512;
const FIRST_CELL: usize = 640;
const _: () = assert!(FIRST_CELL + CELLS as usize * CELL <= RING_HEAD);
const _: () = assert!(CARRIED <= 0xff);

/// What a sleeper waits for on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waits {
    /// It waits for bytes.
    pub(crate) to_read: bool,
    /// It waits for room.
    pub(crate) to_write: bool,
}

/// The result of a check for certain bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// All of them were there, and were read.
    All,
    /// No bytes have arrived yet.
    Nothing(EmptyStream),
    /// Other bytes, or not all of them, or the end; no bytes were read.
    Other,
}

/// The counts of a stream that has no bytes to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EmptyStream {
    written: u64,
    cells_read: u64,
}

/// A view of what arrives from the other end, separate from this rank's end. It only shows that more has
/// arrived, so that one thread may wait for that while others use the end.
pub(crate) struct StreamView {
    rings: Arc<Mapping>,
    into: usize,
}

impl StreamView {
    /// Whether any bytes were written since the stream was found empty with these counts.
    #[inline]
    pub(crate) fn has_changed(&self, since: EmptyStream) -> bool {
        let next = since.cells_read + 1;
        let number = self.rings.long(ShmStream::cell(self.into, next) + NUMBER);
        let written = self.rings.long(self.into + WRITTEN);
        // A thread that sees this takes the end's lock to read, and checks again under the lock.
        number.load(Ordering::Relaxed) >> 8 >= next
            || written.load(Ordering::Relaxed) != since.written
    }
}

/// One rank's end of a stream.
pub(crate) struct ShmStream {
    socket: Arc<TcpStream>,
    rings: Arc<Mapping>,
    /// Bytes that each ring holds.
    ring: usize,
    /// Offsets of the rings in the mapping: the one that this rank writes, and the one that it reads.
    out: usize,
    into: usize,
    /// Bytes written by this rank, and how many of them are known to be read.
    written: u64,
    seen_read: u64,
    /// Bytes read by this rank, and how many are known to have been written.
    read: u64,
    seen_written: u64,
    /// Cells written by this rank, and how many of them are known to be read.
    cells_written: u64,
    seen_cells_read: u64,
    /// Cells read by this rank, and how many bytes of the next one.
    cells_read: u64,
    cell_done: usize,
    copier: AdaptiveCopy,
    /// Whether the other end is gone.
    closed: bool,
}

impl ShmStream {
    /// Makes an end of the stream whose two rings, of `ring` bytes each and not used yet, are `rings`; the
    /// lower rank of the pair writes the first.
    pub(super) fn new(
        rings: Mapping,
        ring: usize,
        is_lower: bool,
        socket: TcpStream,
    ) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let (first, second) = (0, RING_HEAD + ring);
        let (out, into) = if is_lower {
            (first, second)
        } else {
            (second, first)
        };
        Ok(Self {
            socket: Arc::new(socket),
            rings: Arc::new(rings),
            ring,
            out,
            into,
            written: 0,
            seen_read: 0,
            read: 0,
            seen_written: 0,
            cells_written: 0,
            seen_cells_read: 0,
            cells_read: 0,
            cell_done: 0,
            copier: AdaptiveCopy::default(),
            closed: false,
        })
    }

    /// The socket: another thread can shut it down, and a sleeping thread waits on it.
    pub(crate) fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// Returns a view of what arrives, separate from this end.
    pub(crate) fn view(&self) -> StreamView {
        StreamView {
            rings: self.rings.clone(),
            into: self.into,
        }
    }

    fn count(&self, ring: usize, word: usize) -> &AtomicU64 {
        self.rings.long(ring + word)
    }

    fn mark(&self, ring: usize, word: usize) -> &AtomicU32 {
        self.rings.word(ring + word)
    }

    /// Where a cell of this ring is.
    fn cell(ring: usize, number: u64) -> usize {
        ring + FIRST_CELL + (number % CELLS) as usize * CELL
    }

    /// The bytes that can be read now.
    #[inline]
    fn readable(&mut self) -> io::Result<Readable> {
        if self.seen_written == self.read {
            self.seen_written = self.count(self.into, WRITTEN).load(Ordering::Acquire);
        }
        // The number is loaded after the count; see the documentation of this module.
        let next = self.cells_read + 1;
        let cell = Self::cell(self.into, next);
        let number = self.rings.long(cell + NUMBER).load(Ordering::Acquire);
        if number >> 8 != next {
            return Ok(Readable::Ring(
                self.within_ring(self.seen_written.wrapping_sub(self.read))?,
            ));
        }
        let place = self.rings.long(cell + PLACE).load(Ordering::Relaxed);
        let before = self.within_ring(place.wrapping_sub(self.read))?;
        if before > 0 {
            // The ring's bytes up to this position were written before the cell was.
            self.seen_written = self.seen_written.max(place);
            return Ok(Readable::Ring(before));
        }
        let carried = (number & 0xff) as usize;
        if carried <= self.cell_done || carried > CARRIED {
            return Err(nonsense());
        }
        Ok(Readable::Cell {
            start: cell + BYTES + self.cell_done,
            len: carried - self.cell_done,
        })
    }

    /// Bytes of room in the ring that this rank writes.
    fn writable(&mut self) -> io::Result<usize> {
        let mut taken = self.written.wrapping_sub(self.seen_read);
        if taken >= self.ring as u64 {
            self.seen_read = self.count(self.out, READ).load(Ordering::Acquire);
            taken = self.written.wrapping_sub(self.seen_read);
        }
        Ok(self.ring - self.within_ring(taken)?)
    }

    /// Reads the bytes that have arrived, up to `into.len()`; 0 if there are none yet.
    ///
    /// # Errors
    /// `UnexpectedEof` once the peer has closed its end and all it sent was read.
    #[inline]
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let some = match self.readable()? {
            Readable::Cell { start, len } => return Ok(self.read_cell(start, len, into)),
            Readable::Ring(some) => some.min(into.len()),
        };
        if some == 0 {
            let is_end = self.closed && !into.is_empty();
            return if is_end {
                Err(io::ErrorKind::UnexpectedEof.into())
            } else {
                Ok(0)
            };
        }
        self.get(self.read, &mut into[..some]);
        self.pass(some);
        Ok(some)
    }

    /// Fills `into` with the bytes that follow exactly this head, if the head is next and all of these
    /// bytes have arrived.
    #[inline]
    pub(crate) fn read_behind<const HEAD: usize>(
        &mut self,
        head: &[u8; HEAD],
        into: &mut [u8],
    ) -> io::Result<Found> {
        let len = HEAD + into.len();
        match self.readable()? {
            Readable::Cell { start, len: there } => {
                if there != len {
                    return Ok(Found::Other);
                }
                let from = self.rings.at(start, len);
                // SAFETY: `readable` has seen the cell's number, which the writer stored after its bytes,
                // and the count that `pass_cell` stores below lets it write them again. `at` finds `len`
                // bytes inside the mapping.
                let from = unsafe { std::slice::from_raw_parts(from, len) };
                let (first, rest) = from.split_at(HEAD);
                if first != head {
                    return Ok(Found::Other);
                }
                into.copy_from_slice(rest);
                self.pass_cell();
            }
            Readable::Ring(0) if !self.closed => {
                return Ok(Found::Nothing(EmptyStream {
                    written: self.seen_written,
                    cells_read: self.cells_read,
                }));
            }
            Readable::Ring(there) => {
                let mut first = [0; HEAD];
                if there < len {
                    return Ok(Found::Other);
                }
                self.get(self.read, &mut first);
                if first != *head {
                    return Ok(Found::Other);
                }
                self.get(self.read + HEAD as u64, into);
                self.pass(len);
            }
        }
        Ok(Found::All)
    }

    /// Copies bytes of the ring that have arrived.
    fn get(&self, position: u64, into: &mut [u8]) {
        let start = (position % self.ring as u64) as usize;
        let first = into.len().min(self.ring - start);
        let (first, second) = into.split_at_mut(first);
        let data = self.into + RING_HEAD;
        for (piece, at) in [(first, start), (second, 0)] {
            let from = self.rings.at(data + at, piece.len());
            // SAFETY: the writer stored its count after writing these bytes, which `readable` has seen,
            // and writes here again only when the count of bytes read, stored in `pass`, has passed them.
            let from = unsafe { std::slice::from_raw_parts(from, piece.len()) };
            copy(piece, from);
        }
    }

    /// Records that this many bytes of the ring were read.
    fn pass(&mut self, some: usize) {
        self.read += some as u64;
        self.count(self.into, READ)
            .store(self.read, Ordering::Release);
        self.ring(self.into, WRITER_SLEEPS);
    }

    /// Reads from the next cell, of which `len` bytes at `start` are left.
    #[inline]
    fn read_cell(&mut self, start: usize, len: usize, into: &mut [u8]) -> usize {
        let some = len.min(into.len());
        let from = self.rings.at(start, some);
        // SAFETY: as for the ring: `readable` has seen the cell's number, which was stored after its bytes,
        // and the count stored below lets it be written again.
        let from = unsafe { std::slice::from_raw_parts(from, some) };
        into[..some].copy_from_slice(from);
        if some < len {
            self.cell_done += some;
            return some;
        }
        self.pass_cell();
        some
    }

    /// Records that the next cell was read to its end.
    #[inline]
    fn pass_cell(&mut self) {
        self.cell_done = 0;
        self.cells_read += 1;
        // No thread sleeps until a cell is free: bytes that find no free cell go through the ring.
        self.count(self.into, CELLS_READ)
            .store(self.cells_read, Ordering::Release);
    }

    /// Writes as much of both, one after the other, as fits now; 0 if nothing fits.
    #[inline]
    pub(crate) fn write(&mut self, head: &[u8], rest: &[u8]) -> io::Result<usize> {
        if self.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if (1..=CARRIED).contains(&(head.len() + rest.len())) && self.has_cell() {
            self.write_cell(head, rest);
            return Ok(head.len() + rest.len());
        }
        self.write_ring(head, rest)
    }

    /// Works as [`write`](Self::write), but to the ring.
    #[inline(never)]
    fn write_ring(&mut self, head: &[u8], rest: &[u8]) -> io::Result<usize> {
        let room = self.writable()?.min(PIECE);
        let head = &head[..room.min(head.len())];
        let rest = &rest[..rest.len().min(room - head.len())];
        let some = head.len() + rest.len();
        if some == 0 {
            return Ok(0);
        }
        self.put(self.written, head);
        self.put(self.written + head.len() as u64, rest);
        self.written += some as u64;
        let written = self.count(self.out, WRITTEN);
        written.store(self.written, Ordering::Release);
        self.ring(self.out, READER_SLEEPS);
        Ok(some)
    }

    /// Whether there is a free cell to write.
    #[inline]
    fn has_cell(&mut self) -> bool {
        // With an invalid count, larger than what was written, no cell is free.
        if self.cells_written.wrapping_sub(self.seen_cells_read) >= CELLS {
            self.seen_cells_read = self.count(self.out, CELLS_READ).load(Ordering::Acquire);
        }
        self.cells_written.wrapping_sub(self.seen_cells_read) < CELLS
    }

    /// Writes both, one after the other, to a cell that is free.
    #[inline]
    fn write_cell(&mut self, head: &[u8], rest: &[u8]) {
        self.cells_written += 1;
        let cell = Self::cell(self.out, self.cells_written);
        let to = self.rings.at(cell + BYTES, CARRIED);
        // SAFETY: this rank alone writes the cells of this ring, through `&mut self`; the reader is done
        // with this one (`has_cell` has seen its count) and reads it again only when it has seen the number
        // that is stored below. `head` and `rest` together are not longer than `CARRIED` (`write`).
        let to = unsafe { std::slice::from_raw_parts_mut(to, CARRIED) };
        to[..head.len()].copy_from_slice(head);
        to[head.len()..head.len() + rest.len()].copy_from_slice(rest);
        let place = self.rings.long(cell + PLACE);
        place.store(self.written, Ordering::Relaxed);
        let carried = (head.len() + rest.len()) as u64;
        let number = self.rings.long(cell + NUMBER);
        number.store(self.cells_written << 8 | carried, Ordering::Release);
        self.ring(self.out, READER_SLEEPS);
    }

    /// Copies bytes to free space of the ring.
    fn put(&mut self, position: u64, bytes: &[u8]) {
        let start = (position % self.ring as u64) as usize;
        let (first, second) = bytes.split_at(bytes.len().min(self.ring - start));
        let data = self.out + RING_HEAD;
        for (piece, at) in [(first, start), (second, 0)] {
            let to = self.rings.at(data + at, piece.len());
            // SAFETY: this rank alone writes this ring, through `&mut self`; the reader has read what was
            // here (`writable` has seen its count) and reads here again only when it has seen the count
            // of bytes written pass it.
            let to = unsafe { std::slice::from_raw_parts_mut(to, piece.len()) };
            self.copier.copy(to, piece);
        }
    }

    /// Wakes the other rank if it has set its mark.
    #[inline]
    fn ring(&self, ring: usize, sleeper: usize) {
        fence(Ordering::SeqCst);
        let mark = self.mark(ring, sleeper);
        if mark.load(Ordering::Relaxed) != 0 {
            self.wake(mark);
        }
    }

    #[cold]
    fn wake(&self, mark: &AtomicU32) {
        if mark.swap(0, Ordering::Relaxed) != 0 {
            // A full socket wakes the sleeper as well, and a closed socket has no sleeper.
            let _ = (&*self.socket).write(&[1]);
        }
    }

    /// Sets marks before the thread sleeps on the socket. Returns true if the thread need not sleep, since it
    /// can read or write already, or the other end is gone.
    pub(crate) fn prepare_sleep(&mut self, waits: Waits) -> io::Result<bool> {
        let mut drained = [0; 64];
        loop {
            match (&*self.socket).read(&mut drained) {
                Ok(0) => {
                    self.closed = true;
                    return Ok(true);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.closed = true;
                    return Ok(true);
                }
            }
        }
        if waits.to_read {
            self.mark(self.into, READER_SLEEPS)
                .store(1, Ordering::Relaxed);
        }
        if waits.to_write {
            self.mark(self.out, WRITER_SLEEPS)
                .store(1, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        let is_nothing = matches!(self.readable()?, Readable::Ring(0));
        Ok(waits.to_read && !is_nothing || waits.to_write && self.writable()? > 0)
    }

    /// Checks a distance between two counts of one ring.
    fn within_ring(&self, distance: u64) -> io::Result<usize> {
        usize::try_from(distance)
            .ok()
            .filter(|&distance| distance <= self.ring)
            .ok_or_else(nonsense)
    }
}

fn nonsense() -> io::Error {
    io::Error::other("the counts in shared memory make no sense")
}

/// What can be read.
enum Readable {
    /// This many bytes of the ring.
    Ring(usize),
    /// The rest of the next cell.
    Cell {
        /// Its offset in the mapping.
        start: usize,
        /// The number of bytes that are left.
        len: usize,
    },
}
