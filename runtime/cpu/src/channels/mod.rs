//! All channels of one group and one kind, and the transfers that run over them at the same time.
//!
//! A *transfer* moves bytes to a peer, from a peer, or both. Transfers over one channel in one direction run in the
//! order of the list; all others proceed independently, so no order of the list can deadlock.

pub(crate) mod neighbors;
mod swap;

use crate::mesh::handshake::ChannelKind;
use crate::mesh::links::LONG_WAIT;
use crate::mesh::{ChannelRequest, Mesh};
use crate::transport::shm::Waits;
use crate::transport::{Channel, Interest, tcp};
use crate::wait::{Failure, Interrupted, Pause, WaitPolicy};
use neighbors::Neighbors;
use rcomm_recorder::model::Rank;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
pub(super) use swap::Swap;

/// Bytes that are being sent, received or both, and how many were sent or received so far.
pub(super) enum Transfer<'a> {
    /// To `peer`: `head`, then `bytes`.
    Send {
        peer: usize,
        head: &'a [u8],
        bytes: &'a [u8],
        done: usize,
    },
    /// From `peer`.
    Receive {
        peer: usize,
        bytes: &'a mut [u8],
        done: usize,
    },
    /// From one peer, forwarded to another as the bytes arrive, or only received if `to` is `None`.
    Relay {
        from: usize,
        to: Option<usize>,
        bytes: &'a mut [u8],
        received: usize,
        sent: usize,
    },
    /// To one peer, and the same number of bytes back from it.
    Swap(Swap<'a>),
}

impl<'a> Transfer<'a> {
    pub(super) fn send(peer: usize, bytes: &'a [u8]) -> Self {
        Self::send_rest(peer, bytes, 0)
    }

    /// Makes a send of which `done` bytes were sent already.
    pub(super) fn send_rest(peer: usize, bytes: &'a [u8], done: usize) -> Self {
        Self::send_with_head(peer, &[], bytes, done)
    }

    /// Makes a send of `head` followed by `bytes`, of which `done` bytes in all were sent already.
    pub(super) fn send_with_head(
        peer: usize,
        head: &'a [u8],
        bytes: &'a [u8],
        done: usize,
    ) -> Self {
        Self::Send {
            peer,
            head,
            bytes,
            done,
        }
    }

    /// Bytes sent so far.
    pub(super) fn sent(&self) -> usize {
        match self {
            Self::Send { done, .. } => *done,
            Self::Relay { sent, .. } => *sent,
            Self::Swap(swap) => swap.sent(),
            Self::Receive { .. } => 0,
        }
    }

    pub(super) fn receive(peer: usize, bytes: &'a mut [u8]) -> Self {
        Self::Receive {
            peer,
            bytes,
            done: 0,
        }
    }

    pub(super) fn relay(from: usize, to: Option<usize>, bytes: &'a mut [u8]) -> Self {
        Self::Relay {
            from,
            to,
            bytes,
            received: 0,
            sent: 0,
        }
    }

    /// The peer from which bytes are still expected.
    fn receives(&self) -> Option<usize> {
        match self {
            Self::Receive { peer, bytes, done } if *done < bytes.len() => Some(*peer),
            Self::Relay {
                from,
                bytes,
                received,
                ..
            } if *received < bytes.len() => Some(*from),
            Self::Swap(swap) if swap.receives() => Some(swap.peer()),
            _ => None,
        }
    }

    /// The peer to which bytes still have to be sent.
    fn sends(&self) -> Option<usize> {
        match self {
            Self::Send {
                peer,
                head,
                bytes,
                done,
            } if *done < head.len() + bytes.len() => Some(*peer),
            Self::Relay {
                to: Some(to),
                bytes,
                sent,
                ..
            } if *sent < bytes.len() => Some(*to),
            Self::Swap(swap) if swap.sends() => Some(swap.peer()),
            _ => None,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.receives().is_none() && self.sends().is_none()
    }
}

/// The channels to all members of a group; each is connected when it is first used.
pub(super) struct Channels {
    mesh: Arc<Mesh>,
    /// The group's number in the whole job.
    group: u64,
    kind: ChannelKind,
    /// Members by their ranks in the world.
    ranks: Arc<[Rank]>,
    channels: Vec<Option<Channel>>,
    neighbors: Neighbors,
    /// Every socket of this group, for [`cut`].
    sockets: Sockets,
    /// For each peer, whether an earlier transfer of the list occupies this direction in the current pass.
    receiving: Vec<bool>,
    sending: Vec<bool>,
}

/// The sockets of a group, each with the rank at its other end; reachable while the channels are in use.
pub(super) type Sockets = Arc<Mutex<Vec<(Rank, Arc<TcpStream>)>>>;

/// Shuts these sockets down, which ends every wait for them.
pub(super) fn cut(sockets: &Sockets) {
    let sockets = sockets.lock().unwrap_or_else(PoisonError::into_inner);
    for (_, socket) in &*sockets {
        // A socket that is already down needs no shutdown.
        let _ = socket.shutdown(Shutdown::Both);
    }
}

impl Channels {
    pub(super) fn new(
        mesh: Arc<Mesh>,
        group: u64,
        kind: ChannelKind,
        ranks: Arc<[Rank]>,
        sockets: Sockets,
    ) -> Self {
        let size = ranks.len();
        Self {
            mesh,
            group,
            kind,
            ranks,
            channels: std::iter::repeat_with(|| None).take(size).collect(),
            neighbors: Neighbors::default(),
            sockets,
            receiving: vec![false; size],
            sending: vec![false; size],
        }
    }

    /// Sets the members that share memory with this rank. No channel may be open yet.
    pub(super) fn with_neighbors(self, neighbors: Neighbors) -> Self {
        Self { neighbors, ..self }
    }

    /// The number of members.
    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Converts a rank of the group to a rank of the world.
    pub(super) fn global(&self, rank: usize) -> Rank {
        self.ranks[rank]
    }

    /// Returns the channel to `peer`, which is connected if it was not yet.
    pub(super) fn open(
        &mut self,
        peer: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<&mut Channel, Failure> {
        let slot = &mut self.channels[peer];
        if slot.is_none() {
            let rank = self.ranks[peer];
            let request = ChannelRequest {
                group: self.group,
                kind: self.kind,
                peer: rank,
                streams: self.neighbors.streams(peer, &self.mesh),
            };
            let streams = self.mesh.connect(request, policy)?;
            let mut channel = self.neighbors.channel(peer, streams).map_err(Failure::Io)?;
            self.mesh.links().add(rank, &mut channel);
            let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            sockets.extend(
                channel
                    .sockets()
                    .iter()
                    .map(|socket| (rank, socket.clone())),
            );
            *slot = Some(channel);
        }
        slot.as_mut().ok_or(Failure::Closed)
    }

    /// Works like [`drive_until`](Self::drive_until), until all transfers are done.
    pub(super) fn drive(
        &mut self,
        transfers: &mut [Transfer<'_>],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        self.drive_until(transfers, policy, |transfers| {
            transfers.iter().all(Transfer::is_done)
        })
    }

    /// Opens the channels of the transfers, and runs the transfers until `is_enough` returns true. Transfers that have
    /// not completed by then may be continued later.
    ///
    /// # Errors
    /// `Late` after the deadline, with the ranks that the transfers wait for; `Interrupted` if the group was stopped;
    /// `Gone` if a channel ended; `Io` if this rank cannot sleep on its sockets; those of opening a channel.
    pub(super) fn drive_until(
        &mut self,
        transfers: &mut [Transfer<'_>],
        policy: &mut WaitPolicy<'_>,
        is_enough: impl Fn(&[Transfer<'_>]) -> bool,
    ) -> Result<(), Failure> {
        for transfer in transfers.iter() {
            for peer in [transfer.receives(), transfer.sends()]
                .into_iter()
                .flatten()
            {
                self.open(peer, policy)?;
            }
        }
        // The ranks for which a wait is recorded.
        let mut noted = Vec::new();
        loop {
            if self.advance(transfers)? {
                policy.refresh();
                if !noted.is_empty() {
                    self.mesh.links().end_wait(&noted);
                    noted.clear();
                }
            }
            if is_enough(transfers) {
                return Ok(());
            }
            let pause = policy
                .pause()
                .map_err(|interruption| self.interrupted(interruption, transfers))?;
            match pause {
                Pause::Poll => {}
                Pause::Sleep(time) => {
                    if policy.idle() >= LONG_WAIT {
                        noted = self.missing(transfers);
                        let links = self.mesh.links();
                        links.note_wait(&noted, policy.idle(), policy.waiting());
                    }
                    self.sleep(transfers, time)?;
                }
            }
        }
    }

    /// Sleeps until one of the transfers may advance, or `time` has passed.
    fn sleep(&mut self, transfers: &[Transfer<'_>], time: Duration) -> Result<(), Failure> {
        let mut sockets = Vec::new();
        for transfer in transfers {
            let receives = transfer.receives().map(|peer| (peer, Interest::Read));
            let sends = match transfer {
                // There is nothing to forward yet: a writable socket would wake this rank needlessly.
                Transfer::Relay { received, sent, .. } if received == sent => None,
                other => other.sends().map(|peer| (peer, Interest::Write)),
            };
            for (peer, interest) in [receives, sends].into_iter().flatten() {
                match &mut self.channels[peer] {
                    // The doorbell, the only socket of a stream in memory, signals both bytes to read and space to
                    // write.
                    Some(Channel::Shm(stream)) => {
                        let waits = Waits {
                            to_read: interest == Interest::Read,
                            to_write: interest == Interest::Write,
                        };
                        if stream.prepare_sleep(waits).map_err(Failure::Io)? {
                            return Ok(());
                        }
                        sockets.push((stream.socket().clone(), Interest::Read));
                    }
                    Some(Channel::Tcp(channel)) => {
                        sockets.push((channel.stream(interest).clone(), interest))
                    }
                    None => {}
                }
            }
        }
        let sockets = sockets
            .iter()
            .map(|(socket, interest)| (&**socket, *interest));
        tcp::poll(sockets, None, time).map_err(Failure::Io)
    }

    /// Returns the failure for an interrupted wait; after the deadline, it names the ranks that were waited for.
    fn interrupted(&self, interruption: Interrupted, transfers: &[Transfer<'_>]) -> Failure {
        if !matches!(interruption, Interrupted::TimedOut) {
            return interruption.into();
        }
        Failure::Late(self.missing(transfers))
    }

    /// The ranks for which these transfers wait.
    fn missing(&self, transfers: &[Transfer<'_>]) -> Vec<Rank> {
        let missing = transfers
            .iter()
            .filter_map(|transfer| transfer.receives().or(transfer.sends()));
        let mut missing: Vec<Rank> = missing.map(|peer| self.ranks[peer]).collect();
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// Moves the bytes that can be moved now; returns whether any were moved.
    fn advance(&mut self, transfers: &mut [Transfer<'_>]) -> Result<bool, Failure> {
        let mut has_moved = false;
        self.receiving.fill(false);
        self.sending.fill(false);
        for transfer in transfers {
            if let Transfer::Swap(swap) = transfer {
                has_moved |= self.advance_swap(swap)?;
                continue;
            }
            if let Some(peer) = transfer.receives()
                && !std::mem::replace(&mut self.receiving[peer], true)
            {
                let (Transfer::Receive { bytes, done, .. }
                | Transfer::Relay {
                    bytes,
                    received: done,
                    ..
                }) = transfer
                else {
                    continue;
                };
                let channel = self.channels[peer].as_mut().ok_or(Failure::Closed)?;
                let count = channel
                    .read(&mut bytes[*done..])
                    .map_err(|error| Failure::Gone(self.ranks[peer], Some(error)))?;
                *done += count;
                has_moved |= count > 0;
                // If this transfer is done, the next one in the list may use the channel in this pass.
                self.receiving[peer] = *done < bytes.len();
            }
            if let Some(peer) = transfer.sends()
                && !std::mem::replace(&mut self.sending[peer], true)
            {
                let (head, ready, done): (&[u8], &[u8], &mut usize) = match transfer {
                    Transfer::Send {
                        head, bytes, done, ..
                    } => (head, bytes, done),
                    Transfer::Relay {
                        bytes,
                        received,
                        sent,
                        ..
                    } => (&[], &bytes[..*received], sent),
                    Transfer::Receive { .. } | Transfer::Swap(_) => continue,
                };
                let channel = self.channels[peer].as_mut().ok_or(Failure::Closed)?;
                let count = match done.checked_sub(head.len()) {
                    Some(done) => channel.write(&ready[done..]),
                    None => channel.write_both(&head[*done..], ready),
                };
                let count = count.map_err(|error| Failure::Gone(self.ranks[peer], Some(error)))?;
                *done += count;
                has_moved |= count > 0;
                self.sending[peer] = transfer.sends().is_some();
            }
        }
        Ok(has_moved)
    }

    /// Moves bytes in both directions, unless an earlier transfer of the list occupies the channel. Returns whether any
    /// were moved.
    fn advance_swap(&mut self, swap: &mut Swap<'_>) -> Result<bool, Failure> {
        let peer = swap.peer();
        let receiving = std::mem::replace(&mut self.receiving[peer], true);
        let sending = std::mem::replace(&mut self.sending[peer], true);
        if receiving || sending {
            return Ok(false);
        }
        let channel = self.channels[peer].as_mut().ok_or(Failure::Closed)?;
        let has_moved = swap
            .advance(channel)
            .map_err(|error| Failure::Gone(self.ranks[peer], Some(error)))?;
        self.receiving[peer] = swap.receives();
        self.sending[peer] = swap.sends();
        Ok(has_moved)
    }
}
