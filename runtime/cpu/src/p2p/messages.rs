//! [`P2p`]: one group's messages, and the progress of requests.

use super::channel::{Outgoing, PeerChannel, WaitingReceive};
use super::frame::{FRAME_BYTES, Frame, FrameKind, MAX_EAGER_BYTES};
use super::request::{Request, Stage, outcome};
use crate::channels::Sockets;
use crate::channels::neighbors::Neighbors;
use crate::mesh::handshake::ChannelKind;
use crate::mesh::links::LONG_WAIT;
use crate::mesh::{ChannelRequest, Mesh};
use crate::transport::Channel;
use crate::transport::fill::bytes_to_fill;
use crate::transport::shm::StreamView;
use crate::wait::{Failure, Interrupted, Pause, WaitPolicy};
use rcomm_core::Op;
use rcomm_recorder::model::Rank;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The state of one group's messages: a channel to each peer, and the requests on it.
pub(crate) struct P2p {
    pub(super) mesh: Arc<Mesh>,
    pub(super) group: u64,
    pub(super) ranks: Arc<[Rank]>,
    pub(super) peers: Vec<Mutex<PeerChannel>>,
    pub(super) sockets: Sockets,
    pub(super) neighbors: Neighbors,
    /// A view of each peer's channel that needs no lock. It is set when a channel through memory is opened.
    pub(super) views: Vec<OnceLock<StreamView>>,
    /// The identifier of the next request.
    next: AtomicU64,
    /// This rank, as its index in the group.
    rank: usize,
}

pub(super) fn lock(peer: &Mutex<PeerChannel>) -> MutexGuard<'_, PeerChannel> {
    peer.lock().unwrap_or_else(PoisonError::into_inner)
}

impl P2p {
    pub(crate) fn new(mesh: Arc<Mesh>, group: u64, ranks: Arc<[Rank]>, sockets: Sockets) -> Self {
        let peers = ranks.iter().map(|_| Mutex::new(PeerChannel::new()));
        let rank = ranks.iter().position(|&rank| rank == mesh.rank());
        Self {
            rank: rank.unwrap_or(usize::MAX),
            mesh,
            group,
            peers: peers.collect(),
            views: ranks.iter().map(|_| OnceLock::new()).collect(),
            ranks,
            sockets,
            neighbors: Neighbors::default(),
            next: AtomicU64::new(1),
        }
    }

    /// Sets the ranks that share memory with this rank. No channel may be open yet.
    pub(crate) fn with_neighbors(self, neighbors: Neighbors) -> Self {
        Self { neighbors, ..self }
    }

    /// The place of `peer`, a rank of the group, among the ranks that share memory with this one; `None` if it does
    /// not.
    #[inline]
    pub(crate) fn place_in_memory(&self, peer: usize) -> Option<usize> {
        self.neighbors.place_of(peer).map(|(_, place)| place)
    }

    /// Queues each send or receive of `op`, in order, and appends their requests to `requests`.
    pub(crate) fn post(&self, op: &Op<'_>, requests: &mut Vec<Request>) {
        if let Op::Coalesced(ops) = op {
            ops.iter().for_each(|op| self.post(op, requests));
        }
        requests.extend(self.post_one(op));
    }

    /// Queues `op` and returns its request; `None` if `op` is not a single send or receive.
    pub(crate) fn post_one(&self, op: &Op<'_>) -> Option<Request> {
        let (buffer, tag, stage) = if let Op::Send { buffer, peer, tag } = op {
            let peer = *peer as usize;
            (buffer, *tag, Stage::SendQueued { peer })
        } else if let Op::Recv { buffer, peer, tag } = op {
            let peer = peer.map(|peer| peer as usize);
            (buffer, *tag, Stage::Receive { peer })
        } else {
            return None;
        };
        let id = self.next_id();
        match stage {
            // The core has already copied a message that this rank sends to itself. It passes the send and its receive
            // in one coalesced block only.
            Stage::SendQueued { peer } | Stage::Receive { peer: Some(peer) }
                if peer == self.rank =>
            {
                let source = matches!(stage, Stage::Receive { .. }).then_some(peer);
                let done = Stage::Done { source };
                return Some(Request::new(id, tag, buffer.dtype(), done));
            }
            Stage::SendQueued { peer } => lock(&self.peers[peer]).queued_sends.push_back(id),
            Stage::Receive { peer: Some(peer) } => {
                lock(&self.peers[peer]).waiting.push_back(WaitingReceive {
                    receive: id,
                    tag,
                    from_any: false,
                });
            }
            _ => {
                for peer in &self.peers {
                    lock(peer).waiting.push_back(WaitingReceive {
                        receive: id,
                        tag,
                        from_any: true,
                    });
                }
            }
        }
        Some(Request::new(id, tag, buffer.dtype(), stage))
    }

    /// Returns a new identifier for a request.
    #[inline]
    pub(super) fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Runs posted requests, and waits until all have ended, one has failed otherwise than by a mismatch, or `policy`
    /// ends the wait.
    ///
    /// # Errors
    /// The mismatch of the first request that has one; the other failure that ended the operation; `Late` after the
    /// deadline, with the ranks that requests wait for; why the wait was interrupted otherwise.
    pub(crate) fn run(
        &self,
        op: &mut Op<'_>,
        requests: &mut [Request],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        // The ranks for which a wait is recorded.
        let mut noted = Vec::new();
        loop {
            let has_advanced = self.advance(op, &mut requests.iter_mut(), policy)?;
            if has_advanced && !noted.is_empty() {
                self.mesh.links().end_wait(&noted);
                noted.clear();
            }
            if let Some(outcome) = outcome(requests) {
                return outcome;
            }
            if has_advanced {
                policy.refresh();
                continue;
            }
            match policy.pause_beside(|| self.is_beside(requests)) {
                Ok(Pause::Poll) => {}
                Ok(Pause::Sleep(time)) => {
                    self.check_peers(requests, policy)?;
                    if policy.idle() >= LONG_WAIT {
                        noted = self.missing(requests);
                        let links = self.mesh.links();
                        links.note_wait(&noted, policy.idle(), policy.waiting());
                    }
                    self.sleep(requests.iter(), None, time)?;
                }
                Err(Interrupted::TimedOut) => return Err(Failure::Late(self.missing(requests))),
                Err(interruption) => return Err(interruption.into()),
            }
        }
    }

    /// Advances the requests of `op`, in their order, as far as possible now; returns whether anything advanced, which
    /// may also be another request on their channels.
    pub(crate) fn advance(
        &self,
        op: &mut Op<'_>,
        requests: &mut std::slice::IterMut<'_, Request>,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<bool, Failure> {
        if let Op::Coalesced(ops) = op {
            let mut has_advanced = false;
            for op in ops {
                has_advanced |= self.advance(op, requests, policy)?;
            }
            return Ok(has_advanced);
        }
        if !op.op_type().is_p2p() {
            return Ok(false);
        }
        let Some(request) = requests.next() else {
            return Ok(false);
        };
        let result = if let Op::Recv { buffer, .. } = op {
            let bytes = bytes_to_fill(buffer).map_err(Failure::Argument)?;
            self.advance_receive(request, bytes, policy)
        } else if let Op::Send { buffer, .. } = op {
            let bytes = buffer.as_bytes().map_err(Failure::Argument)?;
            self.advance_send(request, bytes, policy)
        } else {
            return Ok(false);
        };
        request.keep_mismatch(result)
    }

    /// Removes requests that will not be continued from the queues of sends and of receives.
    pub(crate) fn withdraw(&self, requests: &[Request]) {
        for peer in &self.peers {
            let mut peer = lock(peer);
            for request in requests {
                peer.queued_sends.retain(|id| *id != request.id);
                peer.waiting.retain(|waiting| waiting.receive != request.id);
            }
        }
    }

    /// Opens the channel to a peer, unless the peer must dial and has not done so yet; returns whether the channel is
    /// open.
    pub(super) fn open(
        &self,
        index: usize,
        peer: &mut PeerChannel,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<bool, Failure> {
        if peer.channel.is_some() {
            return Ok(true);
        }
        let rank = self.ranks[index];
        let request = ChannelRequest {
            group: self.group,
            kind: ChannelKind::P2p,
            peer: rank,
            streams: self.neighbors.streams(index, &self.mesh),
        };
        let Some(streams) = self.mesh.try_connect(request, policy)? else {
            return Ok(false);
        };
        let mut channel = self
            .neighbors
            .channel(index, streams)
            .map_err(Failure::Io)?;
        self.mesh.links().add(rank, &mut channel);
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.extend(
            channel
                .sockets()
                .iter()
                .map(|socket| (rank, socket.clone())),
        );
        if let Channel::Shm(stream) = &channel {
            self.views[index].get_or_init(|| stream.view());
        }
        peer.channel = Some(channel);
        Ok(true)
    }

    /// Works like [`advance`](Self::advance) for one send.
    fn advance_send(
        &self,
        request: &mut Request,
        bytes: &[u8],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<bool, Failure> {
        let index = match request.stage {
            Stage::SendQueued { peer }
            | Stage::SendWriting { peer, .. }
            | Stage::SendOffered { peer } => peer,
            _ => return Ok(false),
        };
        let mut guard = lock(&self.peers[index]);
        let peer = &mut *guard;
        if !self.open(index, peer, policy)? {
            return Ok(false);
        }
        let gone = |error| Failure::Gone(self.ranks[index], Some(error));
        let mut has_advanced = peer.reply().map_err(gone)?;
        if matches!(request.stage, Stage::SendOffered { .. }) {
            has_advanced |= peer.read_on(None, self.ranks[index])?;
        }
        let mut frame = Frame::eager(request.tag, request.dtype, bytes.len());
        match request.stage {
            Stage::SendQueued { .. } => {
                let is_next = peer.queued_sends.front() == Some(&request.id);
                if !is_next || peer.outgoing != Outgoing::Free || !peer.replies.is_empty() {
                    return Ok(has_advanced);
                }
                peer.queued_sends.pop_front();
                peer.outgoing = Outgoing::Send(request.id);
                let is_offer = bytes.len() > MAX_EAGER_BYTES;
                if is_offer {
                    frame.kind = FrameKind::Offer;
                    frame.id = request.id;
                }
                request.stage = Stage::SendWriting {
                    peer: index,
                    frame: frame.encode(),
                    done: 0,
                    is_offer,
                };
            }
            Stage::SendOffered { .. } => {
                let mut answers = peer.answers.iter();
                let Some(found) = answers.position(|answer| answer.id == request.id) else {
                    return Ok(has_advanced);
                };
                if peer.answers[found].kind == FrameKind::Refuse {
                    let answer = peer.answers.swap_remove(found);
                    return Err(frame.refused(answer.dtype, answer.len, index, self.ranks[index]));
                }
                if peer.outgoing != Outgoing::Free || !peer.replies.is_empty() {
                    return Ok(has_advanced);
                }
                peer.answers.swap_remove(found);
                peer.outgoing = Outgoing::Send(request.id);
                frame.kind = FrameKind::Data;
                frame.id = request.id;
                request.stage = Stage::SendWriting {
                    peer: index,
                    frame: frame.encode(),
                    done: 0,
                    is_offer: false,
                };
            }
            _ => {}
        }
        let Stage::SendWriting {
            frame,
            done,
            is_offer,
            ..
        } = &mut request.stage
        else {
            return Ok(has_advanced);
        };
        let channel = peer.channel.as_mut().ok_or(Failure::Closed)?;
        let follows: &[u8] = if *is_offer { &[] } else { bytes };
        while *done < FRAME_BYTES {
            let count = channel.write_both(&frame[*done..], follows).map_err(gone)?;
            *done += count;
            if count == 0 {
                return Ok(has_advanced);
            }
            has_advanced = true;
        }
        if *is_offer {
            peer.outgoing = Outgoing::Free;
            peer.offered.push(request.id);
            request.stage = Stage::SendOffered { peer: index };
            return Ok(true);
        }
        while *done - FRAME_BYTES < bytes.len() {
            let count = channel.write(&bytes[*done - FRAME_BYTES..]).map_err(gone)?;
            *done += count;
            if count == 0 {
                return Ok(has_advanced);
            }
            has_advanced = true;
        }
        peer.outgoing = Outgoing::Free;
        request.stage = Stage::Done { source: None };
        Ok(true)
    }

    /// Works like [`advance`](Self::advance) for one receive.
    fn advance_receive(
        &self,
        request: &mut Request,
        bytes: &mut [u8],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<bool, Failure> {
        match request.stage {
            Stage::Receive { peer: Some(peer) } | Stage::Receiving { peer } => {
                self.receive_from(peer, request, bytes, policy)
            }
            Stage::Receive { peer: None } => {
                let mut has_advanced = false;
                for peer in 0..self.peers.len() {
                    if self.ranks[peer] == self.mesh.rank() {
                        continue;
                    }
                    has_advanced |= self.receive_from(peer, request, bytes, policy)?;
                    if !matches!(request.stage, Stage::Receive { peer: None }) {
                        break;
                    }
                }
                Ok(has_advanced)
            }
            _ => Ok(false),
        }
    }

    /// Advances a receive on the channel to one peer. A receive from any rank leaves the other peers' queues once it
    /// has matched a message, also one that does not fit.
    fn receive_from(
        &self,
        index: usize,
        request: &mut Request,
        bytes: &mut [u8],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<bool, Failure> {
        let mut guard = lock(&self.peers[index]);
        let peer = &mut *guard;
        if !self.open(index, peer, policy)? {
            return Ok(false);
        }
        let from_any = matches!(request.stage, Stage::Receive { peer: None });
        let outcome = peer.receive(request, bytes, index, self.ranks[index]);
        drop(guard);
        // A message that does not fit was matched too: it ends the receive.
        let has_matched = matches!(outcome, Err(Failure::Mismatch(..)))
            || !matches!(request.stage, Stage::Receive { .. });
        if from_any && has_matched {
            for peer in &self.peers {
                lock(peer)
                    .waiting
                    .retain(|waiting| waiting.receive != request.id);
            }
        }
        outcome
    }
}
