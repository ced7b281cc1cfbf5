//! One-sided windows: memory of each member that the other members read and write without a call of that member.
//!
//! A window has a second backend of the same members, for its messages and collectives only. When it is opened, the
//! members exchange where their memory is. A member maps the memory of another member of its host if the group
//! allocated that memory ([`Backend::allocate`]). Otherwise it sends requests by message, and a thread on each rank
//! (`rcomm/win/<group>`, started only if a member needs it) answers them ([`service`]). Signals are counters, one for
//! each sender: a sender that has mapped the member's memory increments its counter there; other senders send a
//! message.

mod service;
#[allow(unsafe_code)]
mod shared;
mod waiting;

use crate::mesh::Mesh;
use crate::registered::{Backing, RegionHandle};
use crate::wait::{Stop, WaitMode};
use rcomm_core::Buffer;
use rcomm_core::Deadline;
use rcomm_core::Hints;
use rcomm_core::Op;
use rcomm_core::RemoteMemory;
use rcomm_core::backend::{AbortReason, Backend, BackendWindow, Call, Done, Observer};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, Rank};
use rustix::thread::futex;
use service::{Service, fetch, send_end, send_put, send_signal};
use shared::{SharedMemory, WindowBuffer};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;

/// Bytes of the encoded description of a rank's part.
const DESCRIPTION_LEN: usize = 64;

/// Decodes `bytes` as the description of a rank's part, and as a request for a part.
#[cfg(any(test, fuzzing))]
pub(super) fn read_any_bytes(bytes: &[u8]) {
    if let Some(description) = PartDescription::decode(bytes) {
        assert_eq!(
            PartDescription::decode(&description.encode()),
            Some(description)
        );
    }
    service::read_any_bytes(bytes);
}

/// A rank's description of its part, for the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PartDescription {
    /// Ranks with the same number share memory; 0 means that the rank shares memory with no other.
    host: u64,
    pid: u32,
    dtype: DType,
    bytes: u64,
    /// Where the part's memory is, if other ranks can map it.
    data: Option<RegionHandle>,
    /// Where the rank's counters are, if other ranks can map them.
    counters: Option<RegionHandle>,
}

impl PartDescription {
    fn encode(&self) -> [u8; DESCRIPTION_LEN] {
        let mut bytes = [0; DESCRIPTION_LEN];
        bytes[..8].copy_from_slice(&self.host.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.pid.to_le_bytes());
        bytes[12] = self.dtype.code();
        bytes[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        for (offset, region) in [(24, self.data), (44, self.counters)] {
            let (number, id, len) =
                region.map_or((-1, 0, 0), |region| (region.number, region.id, region.len));
            bytes[offset..offset + 4].copy_from_slice(&number.to_le_bytes());
            bytes[offset + 4..offset + 12].copy_from_slice(&id.to_le_bytes());
            bytes[offset + 12..offset + 20].copy_from_slice(&(len as u64).to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |offset: usize| {
            Some(u32::from_le_bytes(
                bytes.get(offset..offset + 4)?.try_into().ok()?,
            ))
        };
        let long =
            |offset: usize| Some(u64::from(word(offset)?) | u64::from(word(offset + 4)?) << 32);
        let pid = word(8)?;
        let region = |offset: usize| {
            let number = word(offset)?.cast_signed();
            let (id, len) = (long(offset + 4)?, usize::try_from(long(offset + 12)?).ok()?);
            (number >= 0).then_some(RegionHandle {
                pid,
                number,
                id,
                len,
            })
        };
        Some(Self {
            host: long(0)?,
            pid,
            // A part whose element type is unknown is invalid.
            dtype: DType::from_code(*bytes.get(12)?).filter(|&dtype| dtype != DType::Other)?,
            bytes: long(16)?,
            data: region(24),
            counters: region(44),
        })
    }
}

/// How this rank reaches the part of a member.
struct PeerPart {
    bytes: usize,
    /// The member's memory, if it is mapped here.
    data: Option<RemoteMemory>,
    /// The member's counters, if they are mapped here.
    counters: Option<RemoteMemory>,
    /// Held during a request by message, so that one thread at a time exchanges messages with the member.
    exchange: Mutex<()>,
}

/// The state that the caller's threads and the service share.
struct WindowState {
    /// Carries only this window's messages and collectives.
    messages: Box<dyn Backend>,
    mesh: Arc<Mesh>,
    rank: usize,
    ranks: Arc<[Rank]>,
    /// One counter of signals for each member.
    counters: RemoteMemory,
    stop: Stop,
    wait_mode: WaitMode,
}

impl WindowState {
    /// Runs an operation of the window's backend. `turn` is its number among the window's collectives, from
    /// 1; 0 for a message.
    fn run(&self, op: &mut Op<'_>, turn: u64, deadline: Deadline) -> Result<Done> {
        let call = Call {
            seq: turn,
            turn,
            deadline,
            hints: Hints::NONE,
        };
        self.messages.run(op, call, &NoObserver)
    }

    /// Returns the counter of `rank`'s signals in this memory.
    fn counter<'a>(&self, memory: &'a RemoteMemory, rank: usize) -> Result<&'a AtomicU32> {
        memory
            .word(rank * 4)
            .ok_or_else(|| Error::new(ErrorKind::Backend, "a window's counters are misaligned"))
    }

    /// Counts a signal from the rank `from`, and wakes the threads that wait for it.
    fn count_signal(&self, memory: &RemoteMemory, from: usize) -> Result<()> {
        let counter = self.counter(memory, from)?;
        counter.fetch_add(1, Ordering::Release);
        // The result is only the number of threads that slept on this counter.
        let _ = futex::wake(counter, futex::Flags::empty(), i32::MAX as u32);
        Ok(())
    }
}

/// Decrements the counter unless it is zero; returns whether it was decremented.
fn take_one(counter: &AtomicU32) -> bool {
    let take = |count: u32| count.checked_sub(1);
    let taken = counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
    taken.is_ok()
}

struct NoObserver;

impl Observer for NoObserver {
    fn started(&self) {}

    fn ended(&self) {}
}

/// The ranks of a window, and how they reach each other.
pub(super) struct Members {
    /// A backend of these ranks for the window alone.
    pub(super) messages: Box<dyn Backend>,
    pub(super) mesh: Arc<Mesh>,
    pub(super) rank: usize,
    pub(super) ranks: Arc<[Rank]>,
    pub(super) wait_mode: WaitMode,
}

/// The CPU backend's [`BackendWindow`].
pub(super) struct CpuWindow {
    shared: Arc<WindowState>,
    /// The parts of all members, until the window is closed.
    peer_parts: RwLock<Vec<PeerPart>>,
    /// This rank's part, until it is returned to the caller.
    memory: Mutex<Option<Arc<WindowBuffer>>>,
    service: Mutex<Option<JoinHandle<()>>>,
}

impl CpuWindow {
    /// Opens a window over `memory`, and waits until all members have done so; `name` is the group's name.
    pub(super) fn open(
        members: Members,
        name: &str,
        memory: Buffer<'static>,
        deadline: Deadline,
    ) -> Result<Self> {
        let deadline = deadline.started();
        let (rank, size) = (members.rank, members.ranks.len());
        let data = Backing::for_window(&memory);
        let bytes = memory.size_bytes();
        let dtype = memory.dtype();
        let (kept, part) = WindowBuffer::from_buffer(memory)?;
        let counters = SharedMemory::create(size * 4)
            .map_err(|error| Error::io("cannot allocate a window's counters", error))?;
        let counters = Arc::new(counters);
        let description = PartDescription {
            host: members.mesh.host().number(),
            pid: std::process::id(),
            dtype,
            bytes: bytes as u64,
            data,
            counters: Some(counters.handle()),
        };
        let shared = Arc::new(WindowState {
            messages: members.messages,
            mesh: members.mesh,
            rank,
            ranks: members.ranks,
            counters: counters.access(),
            stop: Stop::default(),
            wait_mode: members.wait_mode,
        });
        let mut gathered = Op::AllGatherSingle {
            input: Buffer::from_vec(description.encode().to_vec()),
            output: Buffer::from_vec(vec![0u8; size * DESCRIPTION_LEN]),
        };
        shared.run(&mut gathered, 1, deadline)?;
        let peer_parts = map_parts(
            &shared,
            &part,
            &description,
            gathered.outputs()[0].as_bytes()?,
        )?;
        let needs_messages = peer_parts
            .iter()
            .any(|part| part.data.is_none() || part.counters.is_none());
        let mut needs_service = [u8::from(needs_messages)];
        let mut op = Op::AllReduce {
            buffer: Buffer::from_mut(&mut needs_service),
            op: rcomm_recorder::model::ReduceOp::Max.into(),
        };
        shared.run(&mut op, 2, deadline)?;
        drop(op);
        let service = match needs_service {
            [0] => None,
            _ => Some(Service::start(shared.clone(), part, name)?),
        };
        Ok(Self {
            shared,
            peer_parts: RwLock::new(peer_parts),
            memory: Mutex::new(Some(kept)),
            service: Mutex::new(service),
        })
    }

    /// Makes every use of the window fail with this reason.
    pub(super) fn abort(&self, reason: &AbortReason) {
        self.shared.stop.raise(reason.error.clone());
        self.shared.messages.abort(reason);
    }

    fn parts(&self) -> RwLockReadGuard<'_, Vec<PeerPart>> {
        self.peer_parts
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes all parts: later accesses fail, since the window is closed.
    fn take_parts(&self) -> Vec<PeerPart> {
        let mut peer_parts = self
            .peer_parts
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *peer_parts)
    }

    fn refuse_if_stopped(&self) -> Result<()> {
        match self.shared.stop.reason() {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }

    /// Fails if the window was stopped, or `peer` is not one of its ranks.
    fn check_peer(&self, peer: u32) -> Result<()> {
        self.refuse_if_stopped()?;
        let size = self.shared.ranks.len();
        if (peer as usize) < size {
            return Ok(());
        }
        let message = format!("peer {peer} is not in a group of {size} ranks");
        Err(Error::new(ErrorKind::InvalidArgument, message))
    }
}

/// Returns the part of a peer, if it contains these bytes.
fn range(parts: &[PeerPart], peer: u32, offset: usize, len: usize) -> Result<&PeerPart> {
    let part = part(parts, peer)?;
    if offset.checked_add(len).is_none_or(|end| end > part.bytes) {
        let message = format!(
            "{len} bytes at {offset} reach beyond the {} bytes of the part of group rank {peer}",
            part.bytes
        );
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    Ok(part)
}

/// Returns the part of a peer; fails once the window is closed, since it then has no parts.
fn part(parts: &[PeerPart], peer: u32) -> Result<&PeerPart> {
    let closed = || Error::new(ErrorKind::Closed, "the window was closed");
    parts.get(peer as usize).ok_or_else(closed)
}

/// Maps all parts that can be mapped; `memory` and `own_description` are this rank's part and its description. Fails
/// with the same error on all ranks if element types differ.
fn map_parts(
    shared: &WindowState,
    memory: &RemoteMemory,
    own_description: &PartDescription,
    gathered: &[u8],
) -> Result<Vec<PeerPart>> {
    let mut peer_parts = Vec::new();
    for (index, bytes) in gathered.chunks_exact(DESCRIPTION_LEN).enumerate() {
        let rank = shared.ranks[index];
        let description = PartDescription::decode(bytes).ok_or_else(|| {
            let message =
                format!("rank {rank} sent a malformed description of its part of the window");
            Error::new(ErrorKind::Backend, message).with_rank(rank)
        })?;
        let bytes = usize::try_from(description.bytes).unwrap_or(usize::MAX);
        let is_here = description.host != 0 && description.host == own_description.host;
        let map = |region: Option<RegionHandle>, min_len: usize| {
            let region = region.filter(|region| is_here && region.len >= min_len);
            match region.map(|region| SharedMemory::attach(&region)) {
                Some(Ok(mapped)) => Some(Arc::new(mapped).access()),
                Some(Err(error)) => {
                    tracing::debug!(rank, %error, "cannot map a window of this host: using messages");
                    None
                }
                None => None,
            }
        };
        let (data, counters) = if index == shared.rank {
            (Some(memory.clone()), Some(shared.counters.clone()))
        } else {
            let data = map(description.data, bytes).and_then(|memory| memory.part(0, bytes).ok());
            let counters = map(description.counters, shared.ranks.len() * 4);
            // A signal must not overtake earlier puts, so both take the same path.
            match (data, counters) {
                (Some(data), Some(counters)) => (Some(data), Some(counters)),
                _ => (None, None),
            }
        };
        peer_parts.push((
            description,
            PeerPart {
                bytes,
                data,
                counters,
                exchange: Mutex::new(()),
            },
        ));
    }
    let first = peer_parts.first().map(|(description, _)| description.dtype);
    if let Some(index) = peer_parts
        .iter()
        .position(|(description, _)| Some(description.dtype) != first)
    {
        let message = format!(
            "the parts of a window differ: rank {} has elements of type {}, rank {} of {}",
            shared.ranks[0], peer_parts[0].0.dtype, shared.ranks[index], peer_parts[index].0.dtype
        );
        return Err(Error::new(ErrorKind::Mismatch, message).with_rank(shared.ranks[index]));
    }
    Ok(peer_parts
        .into_iter()
        .map(|(_, peer_part)| peer_part)
        .collect())
}

impl BackendWindow for CpuWindow {
    fn size_bytes(&self, group_rank: u32) -> usize {
        let parts = self.parts();
        parts.get(group_rank as usize).map_or(0, |part| part.bytes)
    }

    fn put(&self, peer: u32, offset: usize, from: &Buffer<'_>, deadline: Deadline) -> Result<()> {
        let bytes = from.as_bytes()?;
        self.check_peer(peer)?;
        let parts = self.parts();
        let part = range(&parts, peer, offset, bytes.len())?;
        match &part.data {
            Some(memory) => memory.write(offset, bytes),
            None => {
                let _exchange = lock(&part.exchange);
                send_put(&self.shared, peer, offset, bytes, deadline.started())
            }
        }
    }

    fn get(
        &self,
        peer: u32,
        offset: usize,
        into: &mut Buffer<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        self.check_peer(peer)?;
        let parts = self.parts();
        let part = range(&parts, peer, offset, into.size_bytes())?;
        into.fill(|bytes| match &part.data {
            Some(memory) => memory.read(offset, bytes),
            None => {
                let _exchange = lock(&part.exchange);
                fetch(&self.shared, peer, offset, bytes, deadline.started())
            }
        })
    }

    fn signal(&self, peer: u32, deadline: Deadline) -> Result<()> {
        self.check_peer(peer)?;
        let parts = self.parts();
        let part = part(&parts, peer)?;
        match &part.counters {
            Some(counters) => self.shared.count_signal(counters, self.shared.rank),
            None => {
                let _exchange = lock(&part.exchange);
                send_signal(&self.shared, peer, deadline.started())
            }
        }
    }

    fn wait_signal(&self, peer: u32, deadline: Deadline) -> Result<()> {
        self.check_peer(peer)?;
        let shared = &self.shared;
        let counter = shared.counter(&shared.counters, peer as usize)?;
        let attempt = || match take_one(counter) {
            true => Ok(()),
            false => Err(0),
        };
        let awaited = format_args!("send a signal");
        self.wait_for_peer(peer, counter, deadline, awaited, attempt)
    }

    fn exchange_word(
        &self,
        peer: u32,
        word: &AtomicU32,
        (from, to): (u32, u32),
        awaited: fmt::Arguments<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        self.check_peer(peer)?;
        let attempt = || {
            let changed = word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
            changed.map(drop)
        };
        self.wait_for_peer(peer, word, deadline, awaited, attempt)?;
        // The result is only the number of threads that slept on this word.
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
        Ok(())
    }

    fn take_signal(&self, peer: u32) -> Result<bool> {
        self.check_peer(peer)?;
        let shared = &self.shared;
        let counter = shared.counter(&shared.counters, peer as usize)?;
        Ok(take_one(counter))
    }

    fn map_remote(&self, peer: u32) -> Result<RemoteMemory> {
        self.check_peer(peer)?;
        let parts = self.parts();
        part(&parts, peer)?.data.clone().ok_or_else(|| {
            let rank = self.shared.ranks[peer as usize];
            let message = format!(
                "the part of rank {rank} cannot be mapped here: it is on another host, is not a \
                 buffer that the group allocated, or could not be mapped; use put and get"
            );
            Error::new(ErrorKind::Unsupported, message).with_rank(rank)
        })
    }

    fn close(&self, deadline: Deadline) -> Result<Option<Buffer<'static>>> {
        self.refuse_if_stopped()?;
        let deadline = deadline.started();
        let shared = &self.shared;
        // From here on this rank issues no puts or gets.
        let peer_parts = self.take_parts();
        if lock(&self.service).is_some() {
            for peer in (0..shared.ranks.len()).filter(|&peer| peer != shared.rank) {
                send_end(shared, peer as u32, deadline)?;
            }
        }
        // Each member learns whether its part is still mapped here; if it is, its caller does not get the memory back.
        let still_mapped = |(peer, part): (usize, &PeerPart)| {
            let data = part.data.as_ref().filter(|_| peer != shared.rank);
            u8::from(data.is_some_and(|data| !data.is_alone()))
        };
        let mut exchanged = Op::AllToAllSingle {
            input: Buffer::from_vec(peer_parts.iter().enumerate().map(still_mapped).collect()),
            output: Buffer::from_vec(vec![0u8; shared.ranks.len()]),
        };
        drop(peer_parts);
        // No member completes this operation before this rank has started it.
        shared.run(&mut exchanged, 3, deadline)?;
        let is_mapped = exchanged.outputs()[0]
            .as_bytes()?
            .iter()
            .any(|&still_mapped| still_mapped != 0);
        if let Some(service) = lock(&self.service).take() {
            // The thread ends when the last member has announced that it closes, which all have done by
            // now. A panic in the thread was already reported.
            let _ = service.join();
        }
        let closed = Error::new(ErrorKind::Closed, "the window was closed");
        shared.stop.raise(closed);
        shared.messages.shutdown(deadline)?;
        let kept = lock(&self.memory).take().filter(|_| !is_mapped);
        Ok(kept.and_then(WindowBuffer::into_buffer))
    }

    fn give_up(&self) {
        let error = Error::new(ErrorKind::Closed, "the window was dropped");
        if self.shared.stop.raise(error.clone()) {
            let timeout = None;
            self.shared.messages.abort(&AbortReason { error, timeout });
        }
        if let Some(service) = lock(&self.service).take() {
            // A panic in the thread was already reported where it happened.
            let _ = service.join();
        }
        // Taking the parts waits for copies that are in progress.
        drop(self.take_parts());
        drop(lock(&self.memory).take());
    }
}

impl Drop for CpuWindow {
    fn drop(&mut self) {
        self.give_up();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_decoded_as_it_was_encoded() {
        let description = PartDescription {
            host: 7 << 40,
            pid: 4_000_000_000,
            dtype: DType::Bf16,
            bytes: 1 << 41,
            data: None,
            counters: Some(RegionHandle {
                pid: 4_000_000_000,
                number: 12,
                id: 1 << 42,
                len: 1 << 40,
            }),
        };
        assert_eq!(
            PartDescription::decode(&description.encode()),
            Some(description)
        );
        assert_eq!(PartDescription::decode(&[0xff; DESCRIPTION_LEN]), None);
        assert_eq!(PartDescription::decode(&[0; 10]), None);
    }
}
