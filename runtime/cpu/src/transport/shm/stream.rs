//! A stream of bytes between two ranks of a group, through their shared memory.
//!
//! Each direction is a ring of bytes with one writer and one reader. The writer copies bytes in, then stores the
//! total number of bytes written; the reader copies them out, then stores the total number of bytes read.
//!
//! Few bytes take another path, which needs one or two cache lines instead of two or three: *cells* outside the
//! ring, used in turn. A cell has bytes, their position among the bytes of the ring, and its own number, which is
//! written last and completes the cell. The reader checks the count of the ring first and the next cell afterwards.
//! So if it sees bytes of the ring that were written after a cell, it sees the cell as well, and reads both in order.
//! If all cells are full, the bytes go through the ring.
//!
//! An end that has found the ring full (or empty) for so long that it is about to sleep sets a mark, then checks once
//! more. The other end reads (or writes), then checks the mark. Between the store and the check there is a full fence
//! on both sides, so at least one of the two sees the other's store.
//!
//! The pair also has a socket. It is the doorbell that wakes a sleeper, so that a thread can sleep on several
//! streams at once, and its end shows that the other rank has left or died.

use super::area::RING_HEAD;
use super::mapping::Mapping;
use crate::wait::processors;
use rcomm_core::arithmetic::{AdaptiveCopy, copy};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The maximum number of bytes that the writer copies before it stores its count, so that the reader can begin.
const PIECE: usize = 32 << 10;

/// Number of cells of a direction.
const CELLS: u64 = 16;
/// Bytes of a cell: two cache lines; the second is not used if the first is enough.
const CELL: usize = 128;
/// Maximum number of data bytes in a cell.
const CARRIED: usize = CELL - BYTES;
// Fields of a cell.
/// The cell's number, from 1, shifted by eight bits, and its number of data bytes in the lowest eight bits.
const NUMBER: usize = 0;
/// The number of bytes of the ring that precede the cell.
const PLACE: usize = 8;
/// The first of the cell's data bytes.
const BYTES: usize = 16;

// Fields in the head of a ring, each on its own cache lines.
const WRITTEN: usize = 0;
/// One more than the number of the processor on which the ring's writer ran when it last waited for long or woke a
/// sleeper; zero if it has done neither. Beside the count, since the writer writes it and the reader reads it, seldom.
const WRITER_PROCESSOR: usize = 8;
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
    /// The sleeper waits for bytes to read.
    pub(crate) to_read: bool,
    /// The sleeper waits for space to write.
    pub(crate) to_write: bool,
}

/// The result of [`read_after`](ShmStream::read_after).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The head and all bytes after it had arrived, and were read.
    All,
    /// No bytes have arrived yet.
    Nothing(EmptyStream),
    /// Other bytes, too few bytes, bytes that are not all in the ring or alone in one cell, or the end of the stream.
    /// No bytes were read.
    Other,
}

/// The counts of a stream that has no bytes to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EmptyStream {
    written: u64,
    cells_read: u64,
}

/// A view of the other end, separate from this rank's end. It only shows whether more bytes have arrived and where the
/// other end runs, so that one thread can wait for bytes while other threads use this rank's end.
pub(crate) struct StreamView {
    rings: Arc<Mapping>,
    out: usize,
    into: usize,
}

impl StreamView {
    /// Whether bytes were written since the stream was found empty with these counts.
    #[inline]
    pub(crate) fn has_changed(&self, since: EmptyStream) -> bool {
        let next = since.cells_read + 1;
        let number = self.rings.long(ShmStream::cell(self.into, next) + NUMBER);
        let written = self.rings.long(self.into + WRITTEN);
        // Relaxed loads suffice: a thread that sees a change locks the end and checks again.
        number.load(Ordering::Relaxed) >> 8 >= next
            || written.load(Ordering::Relaxed) != since.written
    }

    /// Whether the other end was last seen on the processor on which this thread runs, which is noted for the other
    /// end. It may have moved since, which costs this thread a sleep at most.
    pub(crate) fn is_beside(&self) -> bool {
        let here = processors::note(self.rings.word(self.out + WRITER_PROCESSOR));
        let there = self.rings.word(self.into + WRITER_PROCESSOR);
        there.load(Ordering::Relaxed) == here
    }
}

/// One rank's end of a stream.
pub(crate) struct ShmStream {
    socket: Arc<TcpStream>,
    rings: Arc<Mapping>,
    /// Size of each ring in bytes.
    ring_len: usize,
    /// Offset in the mapping of the ring that this rank writes.
    out: usize,
    /// Offset in the mapping of the ring that this rank reads.
    into: usize,
    /// Number of bytes that this rank has written to its ring.
    written: u64,
    /// The last known number of these bytes that the other rank has read.
    seen_read: u64,
    /// Number of bytes that this rank has read from the other's ring.
    read: u64,
    /// The last known number of bytes that the other rank has written to its ring.
    seen_written: u64,
    /// Number of cells that this rank has written.
    cells_written: u64,
    /// The last known number of these cells that the other rank has read.
    seen_cells_read: u64,
    /// Number of cells that this rank has read.
    cells_read: u64,
    /// Number of bytes that this rank has read of the next cell.
    cell_done: usize,
    copier: AdaptiveCopy,
    /// Whether [`prepare_sleep`](Self::prepare_sleep) has found that the other end was closed.
    is_closed: bool,
}

impl ShmStream {
    /// Makes an end of the stream with the two rings in `rings`, which have `ring_len` bytes each and are not used yet.
    /// The lower rank of the pair writes the first ring.
    pub(super) fn new(
        rings: Mapping,
        ring_len: usize,
        is_lower: bool,
        socket: TcpStream,
    ) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let (first, second) = (0, RING_HEAD + ring_len);
        let (out, into) = if is_lower {
            (first, second)
        } else {
            (second, first)
        };
        Ok(Self {
            socket: Arc::new(socket),
            rings: Arc::new(rings),
            ring_len,
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
            is_closed: false,
        })
    }

    /// The socket, on which a sleeping thread waits, and which another thread can shut down.
    pub(crate) fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// Returns a view of the other end, separate from this end.
    pub(crate) fn view(&self) -> StreamView {
        StreamView {
            rings: self.rings.clone(),
            out: self.out,
            into: self.into,
        }
    }

    /// A count in the head of the ring that begins at `ring`.
    fn count(&self, ring: usize, word: usize) -> &AtomicU64 {
        self.rings.long(ring + word)
    }

    /// The mark of a sleeper in the head of the ring that begins at `ring`.
    fn mark(&self, ring: usize, word: usize) -> &AtomicU32 {
        self.rings.word(ring + word)
    }

    /// The offset of the cell with this number, of the ring that begins at `ring`.
    fn cell(ring: usize, number: u64) -> usize {
        ring + FIRST_CELL + (number % CELLS) as usize * CELL
    }

    /// Returns which bytes can be read next: those of the ring up to the next cell, or the rest of that cell.
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
            // The ring's bytes up to this position were written before the cell.
            self.seen_written = self.seen_written.max(place);
            return Ok(Readable::Ring(before));
        }
        let carried = (number & 0xff) as usize;
        if carried <= self.cell_done || carried > CARRIED {
            return Err(invalid_counts());
        }
        Ok(Readable::Cell {
            start: cell + BYTES + self.cell_done,
            len: carried - self.cell_done,
        })
    }

    /// Returns the number of free bytes in the ring that this rank writes.
    fn writable(&mut self) -> io::Result<usize> {
        let mut taken = self.written.wrapping_sub(self.seen_read);
        if taken >= self.ring_len as u64 {
            self.seen_read = self.count(self.out, READ).load(Ordering::Acquire);
            taken = self.written.wrapping_sub(self.seen_read);
        }
        Ok(self.ring_len - self.within_ring(taken)?)
    }

    /// Reads bytes that have arrived, at most `into.len()`; 0 if there are none yet.
    ///
    /// # Errors
    /// `UnexpectedEof` once [`prepare_sleep`](Self::prepare_sleep) has found that the peer has closed its end, and all
    /// it sent was read. `Other` if the counts in shared memory are invalid.
    #[inline]
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = match self.readable()? {
            Readable::Cell { start, len } => return Ok(self.read_cell(start, len, into)),
            Readable::Ring(count) => count.min(into.len()),
        };
        if count == 0 {
            let is_end = self.is_closed && !into.is_empty();
            return if is_end {
                Err(io::ErrorKind::UnexpectedEof.into())
            } else {
                Ok(0)
            };
        }
        self.get(self.read, &mut into[..count]);
        self.pass(count);
        Ok(count)
    }

    /// Fills `into` with the bytes after this head, if the next bytes of the stream are exactly this head and all bytes
    /// of `into` have arrived, all in the ring or alone in one cell.
    ///
    /// # Errors
    /// `Other` if the counts in shared memory are invalid.
    #[inline]
    pub(crate) fn read_after<const HEAD: usize>(
        &mut self,
        head: &[u8; HEAD],
        into: &mut [u8],
    ) -> io::Result<Found> {
        let len = HEAD + into.len();
        match self.readable()? {
            Readable::Cell {
                start,
                len: available,
            } => {
                if available != len {
                    return Ok(Found::Other);
                }
                let from = self.rings.address(start, len);
                // SAFETY: `readable` has seen the cell's number, which the writer stored after the cell's bytes. The
                // writer writes them again only after `pass_cell` below has stored its count. `address` checks that
                // `len` bytes are inside the mapping.
                let from = unsafe { std::slice::from_raw_parts(from, len) };
                let (first, rest) = from.split_at(HEAD);
                if first != head {
                    return Ok(Found::Other);
                }
                into.copy_from_slice(rest);
                self.pass_cell();
            }
            Readable::Ring(0) if !self.is_closed => {
                return Ok(Found::Nothing(EmptyStream {
                    written: self.seen_written,
                    cells_read: self.cells_read,
                }));
            }
            Readable::Ring(available) => {
                let mut first = [0; HEAD];
                if available < len {
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

    /// Copies bytes of the ring that have arrived, from the byte at `position` on. Does not count them as read.
    fn get(&self, position: u64, into: &mut [u8]) {
        let start = (position % self.ring_len as u64) as usize;
        let first = into.len().min(self.ring_len - start);
        let (first, second) = into.split_at_mut(first);
        let data = self.into + RING_HEAD;
        for (piece, offset) in [(first, start), (second, 0)] {
            let from = self.rings.address(data + offset, piece.len());
            // SAFETY: the writer stored its count, which `readable` has seen, after it had written these bytes. It
            // writes here again only after `pass` has stored a count of read bytes that includes them.
            let from = unsafe { std::slice::from_raw_parts(from, piece.len()) };
            copy(piece, from);
        }
    }

    /// Records that this many bytes of the ring were read.
    fn pass(&mut self, count: usize) {
        self.read += count as u64;
        self.count(self.into, READ)
            .store(self.read, Ordering::Release);
        self.wake_if_asleep(self.into, WRITER_SLEEPS);
    }

    /// Reads from the next cell, whose unread `len` bytes are at `start`.
    #[inline]
    fn read_cell(&mut self, start: usize, len: usize, into: &mut [u8]) -> usize {
        let count = len.min(into.len());
        let from = self.rings.address(start, count);
        // SAFETY: `readable` has seen the cell's number, which the writer stored after the cell's bytes. The writer
        // writes them again only after `pass_cell` below has stored its count.
        let from = unsafe { std::slice::from_raw_parts(from, count) };
        into[..count].copy_from_slice(from);
        if count < len {
            self.cell_done += count;
            return count;
        }
        self.pass_cell();
        count
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

    /// Writes the first bytes of `head` followed by `rest`, at most [`PIECE`] at a time; returns how many, 0 if nothing
    /// fits.
    ///
    /// # Errors
    /// `BrokenPipe` once [`prepare_sleep`](Self::prepare_sleep) has found that the peer has closed its end. `Other` if
    /// the counts in shared memory are invalid.
    #[inline]
    pub(crate) fn write(&mut self, head: &[u8], rest: &[u8]) -> io::Result<usize> {
        if self.is_closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if (1..=CARRIED).contains(&(head.len() + rest.len())) && self.has_cell() {
            self.write_cell(head, rest);
            return Ok(head.len() + rest.len());
        }
        self.write_ring(head, rest)
    }

    /// Works like [`write`](Self::write), but to the ring.
    #[inline(never)]
    fn write_ring(&mut self, head: &[u8], rest: &[u8]) -> io::Result<usize> {
        let room = self.writable()?.min(PIECE);
        let head = &head[..room.min(head.len())];
        let rest = &rest[..rest.len().min(room - head.len())];
        let count = head.len() + rest.len();
        if count == 0 {
            return Ok(0);
        }
        self.put(self.written, head);
        self.put(self.written + head.len() as u64, rest);
        self.written += count as u64;
        let written = self.count(self.out, WRITTEN);
        written.store(self.written, Ordering::Release);
        self.wake_if_asleep(self.out, READER_SLEEPS);
        Ok(count)
    }

    /// Whether there is a free cell to write.
    #[inline]
    fn has_cell(&mut self) -> bool {
        // The difference wraps: with an invalid count, larger than the number of written cells, no cell is free.
        if self.cells_written.wrapping_sub(self.seen_cells_read) >= CELLS {
            self.seen_cells_read = self.count(self.out, CELLS_READ).load(Ordering::Acquire);
        }
        self.cells_written.wrapping_sub(self.seen_cells_read) < CELLS
    }

    /// Writes `head` and then `rest` to the next cell, which is free.
    #[inline]
    fn write_cell(&mut self, head: &[u8], rest: &[u8]) {
        self.cells_written += 1;
        let cell = Self::cell(self.out, self.cells_written);
        let to = self.rings.address(cell + BYTES, CARRIED);
        // SAFETY: this rank alone writes the cells of this ring, through `&mut self`. The reader has read this cell
        // (`has_cell` has seen its count), and reads it again only after it has seen the number that is stored below.
        let to = unsafe { std::slice::from_raw_parts_mut(to, CARRIED) };
        to[..head.len()].copy_from_slice(head);
        to[head.len()..head.len() + rest.len()].copy_from_slice(rest);
        let place = self.rings.long(cell + PLACE);
        place.store(self.written, Ordering::Relaxed);
        let carried = (head.len() + rest.len()) as u64;
        let number = self.rings.long(cell + NUMBER);
        number.store(self.cells_written << 8 | carried, Ordering::Release);
        self.wake_if_asleep(self.out, READER_SLEEPS);
    }

    /// Copies bytes to free space of the ring, from `position` on. Does not count them as written.
    fn put(&mut self, position: u64, bytes: &[u8]) {
        let start = (position % self.ring_len as u64) as usize;
        let (first, second) = bytes.split_at(bytes.len().min(self.ring_len - start));
        let data = self.out + RING_HEAD;
        for (piece, offset) in [(first, start), (second, 0)] {
            let to = self.rings.address(data + offset, piece.len());
            // SAFETY: this rank alone writes this ring, through `&mut self`. The reader has read the bytes that were
            // here (`writable` has seen its count), and reads here again only after it has seen a count of written
            // bytes that includes the new ones.
            let to = unsafe { std::slice::from_raw_parts_mut(to, piece.len()) };
            self.copier.copy(to, piece);
        }
    }

    /// Wakes the other rank if it has set its mark.
    #[inline]
    fn wake_if_asleep(&self, ring: usize, sleeper: usize) {
        fence(Ordering::SeqCst);
        let mark = self.mark(ring, sleeper);
        if mark.load(Ordering::Relaxed) != 0 {
            self.wake(mark);
        }
    }

    /// Removes the mark, and rings the doorbell if the mark was still set.
    #[cold]
    fn wake(&self, mark: &AtomicU32) {
        if mark.swap(0, Ordering::Relaxed) != 0 {
            processors::note(self.rings.word(self.out + WRITER_PROCESSOR));
            // An error is ignored: a full socket wakes the sleeper as well, and a closed socket has no sleeper.
            let _ = (&*self.socket).write(&[1]);
        }
    }

    /// Prepares for a sleep on the socket: reads the bytes of earlier wake-ups from the socket, and sets the marks.
    /// Returns true if the thread must not sleep, since it can read or write already, or the other end was closed.
    ///
    /// # Errors
    /// `Other` if the counts in shared memory are invalid.
    pub(crate) fn prepare_sleep(&mut self, waits: Waits) -> io::Result<bool> {
        let mut drained = [0; 64];
        loop {
            match (&*self.socket).read(&mut drained) {
                Ok(0) => {
                    self.is_closed = true;
                    return Ok(true);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.is_closed = true;
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
        let is_empty = matches!(self.readable()?, Readable::Ring(0));
        Ok(waits.to_read && !is_empty || waits.to_write && self.writable()? > 0)
    }

    /// Checks that the distance between two counts of one ring is at most the ring's size.
    fn within_ring(&self, distance: u64) -> io::Result<usize> {
        usize::try_from(distance)
            .ok()
            .filter(|&distance| distance <= self.ring_len)
            .ok_or_else(invalid_counts)
    }
}

fn invalid_counts() -> io::Error {
    io::Error::other("the counts in shared memory are invalid")
}

/// The bytes that can be read.
enum Readable {
    /// This many bytes of the ring.
    Ring(usize),
    /// The rest of the next cell.
    Cell {
        /// The offset in the mapping of the cell's unread bytes.
        start: usize,
        /// The number of these bytes.
        len: usize,
    },
}
