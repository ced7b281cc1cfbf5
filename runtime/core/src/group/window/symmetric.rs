//! [`SymmetricMemory`]: memory of the same size on each rank of a host, which all of them use in place.

use super::{Window, op_record};
use crate::backend::memory::RemoteMemory;
use crate::group::process_group::ProcessGroup;
use crate::op::buffer::{Buffer, DeviceKind};
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::{OpType, Rank, text};
use std::fmt;
use std::panic::Location;
use std::sync::atomic::Ordering;

/// The memory of a signal pad begins and ends at a multiple of this, and so the buffer behind it begins at a page.
const PAD_ALIGNMENT: usize = 4096;
/// Bytes of a signal's word.
const WORD: usize = 4;
/// The most ranks that a message lists.
const MAX_RANKS: usize = 16;
/// A rank reports this to the others if it has its memory, and has mapped that of all others.
const USABLE: u64 = 0;
/// A rank reports this if it cannot map the memory of all others.
const NOT_MAPPED: u64 = 1;
/// A rank reports this if it has no memory itself.
const NOT_ALLOCATED: u64 = 2;

/// Memory of the same size on each rank of a group whose ranks share memory: each rank has a buffer, and maps the
/// buffers of all others. It is what PyTorch calls symmetric memory, but on the host.
///
/// Beside its buffer each rank has a *signal pad*: for each of [`CHANNELS`](Self::CHANNELS) channels a word for each
/// other rank, 0 or 1. A signal sets the word to 1, and waiting for it sets it to 0 again. Parts of a program that use
/// different channels do not take each other's signals. What a rank wrote before a signal is seen by the rank that has
/// waited for the signal.
///
/// ```no_run
/// # fn step(group: &rcomm::ProcessGroup, next: u32, previous: u32) -> rcomm::Result<()> {
/// let memory = group.symmetric_memory(4096)?;
/// memory.buffer(next)?.write(0, b"from the rank before")?;
/// memory.put_signal(next, 0)?;
/// memory.wait_signal(previous, 0)?;
/// let mut got = [0; 20];
/// memory.buffer(group.rank())?.read(0, &mut got)?;
/// memory.barrier(0)?;
/// memory.close()?;
/// # Ok(()) }
/// ```
///
/// Signals and waits are recorded as those of a [`Window`], a barrier as the signals and waits that it consists of.
/// Their time-out is that of the handle which made the memory ([`ProcessGroup::within`]).
///
/// # Errors
/// Calls fail with `InvalidArgument`, and have no effect, if there is no such peer or channel. After an error that is
/// not [recoverable](Error::is_recoverable), the group is aborted, as after the error of any operation.
///
/// # Thread safety
/// May be used by several threads at once. Threads that use one channel to the same peer at the same time cannot tell
/// whose signal they get.
pub struct SymmetricMemory {
    group: ProcessGroup,
    window: Window,
    /// The signal pad of each rank, and its buffer behind it.
    parts: Vec<(RemoteMemory, RemoteMemory)>,
}

impl ProcessGroup {
    /// Makes symmetric memory of `bytes` bytes on each rank, all zero. All members call this, with the same size.
    ///
    /// # Blocking
    /// See [`new_window`](Self::new_window).
    ///
    /// # Errors
    /// `Unsupported`, on all members, names the ranks that cannot map the memory of all others: they are on several
    /// hosts, or cannot share memory. `Unsupported` also if the group has no backend for the host's memory: symmetric
    /// memory is not on devices. `Mismatch`, on all members, names the ranks whose size differs from that of rank 0.
    /// `InvalidArgument` if the size, the same on all members, is beyond what can be addressed. `Io` if a member has no
    /// memory left: on the other members it names that one. Otherwise as [`new_window`](Self::new_window), and as
    /// [`all_gather_single`](Self::all_gather_single), by which the members learn of each other's outcome.
    #[track_caller]
    pub fn symmetric_memory(&self, bytes: usize) -> Result<SymmetricMemory> {
        let with_group = |error: Error| error.in_group(self.desc());
        if self.backend(DeviceKind::Cpu).is_none() {
            let message = "symmetric memory is in the host's memory, and the group has no backend for it: device memory \
                           has windows";
            return Err(with_group(Error::new(ErrorKind::Unsupported, message)));
        }
        let pad = (SymmetricMemory::CHANNELS as usize * self.size() as usize * WORD)
            .next_multiple_of(PAD_ALIGNMENT);
        let whole = pad.checked_add(bytes).ok_or_else(|| {
            let message = format!("symmetric memory of {bytes} bytes is too large");
            with_group(Error::new(ErrorKind::InvalidArgument, message))
        });
        // A rank that gets no memory takes part without any, and so the others do not wait for it.
        let (memory, refused) = match whole.and_then(|whole| self.allocate::<u8>(whole)) {
            Ok(memory) => (memory, None),
            // The group's backend has no windows: that is so on all ranks.
            Err(error) if error.kind() == ErrorKind::Unsupported => return Err(error),
            Err(error) => (Buffer::from_vec(Vec::<u8>::new()), Some(error)),
        };
        let window = self.new_window(memory)?;
        let mapped: Result<Vec<_>> = (0..self.size())
            .map(|peer| {
                let part = window.map_remote(peer)?;
                Ok((part.part(0, pad)?, part.part(pad, bytes)?))
            })
            .collect();
        let outcome = match (&refused, &mapped) {
            (Some(_), _) => NOT_ALLOCATED,
            (None, Err(_)) => NOT_MAPPED,
            (None, Ok(_)) => USABLE,
        };
        // All members learn the outcome on each member: otherwise some would use the memory, and others not. No rank
        // may drop its window before this, since others may still be making theirs.
        let mut answers = vec![0u64; 2 * self.size() as usize];
        self.all_gather_single(&[bytes as u64, outcome], &mut answers)?;
        let ranks_where = |is: &dyn Fn(u64, u64) -> bool| -> Vec<Rank> {
            let answers = answers.chunks_exact(2).zip(self.ranks());
            answers
                .filter_map(|(answer, &rank)| is(answer[0], answer[1]).then_some(rank))
                .collect()
        };
        let differing = ranks_where(&|bytes, _| bytes != answers[0]);
        if !differing.is_empty() {
            let message = format!(
                "the sizes of symmetric memory differ: rank {} asks for {} bytes, {} for another size",
                self.ranks()[0],
                answers[0],
                text::ranks(&differing, MAX_RANKS)
            );
            let error = Error::new(ErrorKind::Mismatch, message).with_ranks(&differing);
            return Err(with_group(match refused {
                Some(cause) => error.with_source(cause),
                None => error,
            }));
        }
        if let Some(error) = refused {
            return Err(error);
        }
        let not_allocated = ranks_where(&|_, outcome| outcome == NOT_ALLOCATED);
        if !not_allocated.is_empty() {
            let message = format!(
                "{} cannot allocate {bytes} bytes of symmetric memory",
                text::ranks(&not_allocated, MAX_RANKS)
            );
            let error = Error::new(ErrorKind::Io, message).with_ranks(&not_allocated);
            return Err(with_group(error));
        }
        let not_mapped = ranks_where(&|_, outcome| outcome == NOT_MAPPED);
        if !not_mapped.is_empty() {
            let message = format!(
                "symmetric memory needs a group whose ranks are on one host and share memory: {} cannot map the memory of \
                 all others",
                text::ranks(&not_mapped, MAX_RANKS)
            );
            let error = Error::new(ErrorKind::Unsupported, message).with_ranks(&not_mapped);
            return Err(with_group(match mapped {
                Err(cause) => error.with_source(cause),
                Ok(_) => error,
            }));
        }
        Ok(SymmetricMemory {
            group: self.clone(),
            window,
            parts: mapped?,
        })
    }
}

impl SymmetricMemory {
    /// The number of channels.
    pub const CHANNELS: u32 = 64;

    /// The size in bytes of each rank's buffer.
    pub fn size_bytes(&self) -> usize {
        self.parts.first().map_or(0, |(_, buffer)| buffer.len())
    }

    /// The buffer of `peer`, or of the caller itself.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such peer.
    pub fn buffer(&self, peer: u32) -> Result<RemoteMemory> {
        self.part(peer).map(|(_, buffer)| buffer.clone())
    }

    /// The signal pad of `peer`, or of the caller itself, for a synchronization of the program's own: the word of
    /// channel `c` and sender `s` is at `4 * (c * size + s)`. It must be zero again where a channel is used by
    /// [`put_signal`](Self::put_signal), [`wait_signal`](Self::wait_signal) or [`barrier`](Self::barrier).
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such peer.
    pub fn signal_pad(&self, peer: u32) -> Result<RemoteMemory> {
        self.part(peer).map(|(pad, _)| pad.clone())
    }

    /// Signals to `peer` on this channel.
    ///
    /// # Blocking
    /// Until `peer` has waited for this rank's earlier signal on the channel, or the time-out has passed.
    #[track_caller]
    pub fn put_signal(&self, peer: u32, channel: u32) -> Result<()> {
        self.exchange(Action::Signal, peer, channel)
    }

    /// Waits for a signal of `peer` on this channel, and takes it.
    ///
    /// # Blocking
    /// Until there is a signal, or the time-out has passed.
    #[track_caller]
    pub fn wait_signal(&self, peer: u32, channel: u32) -> Result<()> {
        self.exchange(Action::Wait, peer, channel)
    }

    /// Returns once all ranks have called this on this channel: signals to each other rank, then waits for the signal
    /// of each.
    ///
    /// # Blocking
    /// Until all ranks have called this, or the time-out of one of the signals and waits has passed.
    #[track_caller]
    pub fn barrier(&self, channel: u32) -> Result<()> {
        let own = self.group.rank();
        for action in [Action::Signal, Action::Wait] {
            for peer in (0..self.group.size()).filter(|&peer| peer != own) {
                self.exchange(action, peer, channel)?;
            }
        }
        Ok(())
    }

    /// Sets `count` words of four bytes of this rank's buffer, from the word `offset` on, to `value`. It is not
    /// recorded; other ranks see it after a signal.
    ///
    /// # Errors
    /// `InvalidArgument` if the words end beyond the buffer.
    pub fn fill(&self, offset: usize, value: u32, count: usize) -> Result<()> {
        let (_, buffer) = self.part(self.group.rank())?;
        let start = offset.saturating_mul(WORD);
        // Checks the whole range before the first word is set.
        let range = buffer.part(start, count.saturating_mul(WORD))?;
        for index in 0..count {
            let word = range.word(index * WORD).ok_or_else(misaligned)?;
            word.store(value, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether one write can reach all ranks. Never: only switches of NVLink do that, and this memory is the host's.
    pub fn has_multicast(&self) -> bool {
        false
    }

    /// The address by which one write reaches all ranks.
    ///
    /// # Errors
    /// Always `Unsupported`: see [`has_multicast`](Self::has_multicast).
    pub fn multicast(&self) -> Result<RemoteMemory> {
        let message = "symmetric memory of the host has no multicast, which is a feature of NVLink's switches: write to \
                       the buffer of each rank";
        Err(Error::new(ErrorKind::Unsupported, message).in_group(self.group.desc()))
    }

    /// Frees the memory, once all members have called this. Copies of [`buffer`](Self::buffer) and
    /// [`signal_pad`](Self::signal_pad) stay valid.
    ///
    /// # Blocking
    /// Until all members have called this, or the time-out has passed.
    ///
    /// # Errors
    /// Those of [`Window::close`].
    pub fn close(self) -> Result<()> {
        let Self { window, parts, .. } = self;
        drop(parts);
        window.close().map(drop)
    }

    #[track_caller]
    fn exchange(&self, action: Action, peer: u32, channel: u32) -> Result<()> {
        let own = self.group.rank();
        let (op, pad_of, sender, change, awaited) = match action {
            Action::Signal => (OpType::Signal, peer, own, (0, 1), "take the earlier signal"),
            Action::Wait => (OpType::WaitSignal, own, peer, (1, 0), "send a signal"),
        };
        let refuse = |error: Error| error.in_group(self.group.desc()).during(op);
        if channel >= Self::CHANNELS {
            let message = format!(
                "there is no channel {channel}: the last is {}",
                Self::CHANNELS - 1
            );
            return Err(refuse(Error::new(ErrorKind::InvalidArgument, message)));
        }
        // A peer that does not exist is refused in either case.
        self.part(peer).map_err(refuse)?;
        let (pad, _) = self.part(pad_of).map_err(refuse)?;
        let offset = WORD * (channel as usize * self.group.size() as usize + sender as usize);
        let word = pad.word(offset).ok_or_else(misaligned).map_err(refuse)?;
        let record = op_record(op, peer, None);
        self.group
            .run_recorded(&record, Location::caller(), |share| {
                let window = &self.window.inner;
                // Formatted only for an error: signals are frequent.
                let awaited = format_args!("{awaited} on channel {channel}");
                window.exchange_word(peer, word, change, awaited, share.deadline())
            })
    }

    fn part(&self, peer: u32) -> Result<&(RemoteMemory, RemoteMemory)> {
        self.parts.get(peer as usize).ok_or_else(|| {
            let size = self.group.size();
            let message = format!("peer {peer} is not in a group of {size} ranks");
            Error::new(ErrorKind::InvalidArgument, message)
        })
    }
}

/// What a rank does with the word of a channel in a signal pad.
#[derive(Clone, Copy)]
enum Action {
    Signal,
    Wait,
}

fn misaligned() -> Error {
    Error::new(
        ErrorKind::Backend,
        "the words of symmetric memory are misaligned",
    )
}

impl fmt::Debug for SymmetricMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SymmetricMemory")
            .field("group", &self.group.desc())
            .field("size_bytes", &self.size_bytes())
            .finish()
    }
}
