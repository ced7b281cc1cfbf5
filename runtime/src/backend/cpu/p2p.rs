//! Messages between two ranks of a group: tags, order, and large ones only when they are expected. They go
//! through shared memory where all ranks of the group share it, over a socket elsewhere.
//!
//! A message of up to [`EAGER`] bytes is sent at once; if nobody receives it yet it is kept. A larger
//! one is *offered* first, and sent when the receiver has *cleared* it, so a rank never has to keep what
//! it did not ask for. A *request* is one send or receive; its thread alone touches its buffer, and
//! moves it on whenever the lane is free for it. Whatever a request meets on the lane that belongs to
//! another (a message to be kept, a clearance) it puts where that one finds it.
//!
//! Sends to one peer start in the order in which they were posted. A receive takes the first message of
//! its tag that no receive posted before it may take.

use super::hello::LaneKind;
use super::lanes::Sockets;
use super::mesh::{Failure, Mesh};
use super::transport::shm::{Streams, Waits};
use super::transport::tcp::TcpLane;
use super::transport::{self, Interest, Lane};
use super::wait::{Interrupted, Patience, Pause};
use crate::op::Op;
use rcomm_recorder::model::{DType, Rank};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The largest message that is sent before anybody asked for it, in bytes.
const EAGER: usize = 64 << 10;
/// Bytes of messages from one peer that are kept for receives to come.
const MAX_KEPT: usize = 64 << 20;
const FRAME: usize = 40;
const MAGIC: u32 = 0x7263_7031;
/// How often a request whose lane is not there yet asks whether the peer still lives.
const DOUBT: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameKind {
    /// The message follows.
    Eager = 1,
    /// A message is ready.
    Offer = 2,
    /// Send the message offered under this id.
    Clear = 3,
    /// The message offered under this id follows.
    Data = 4,
    /// The message offered under this id does not fit: type and length are the receiver's.
    Refuse = 5,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Frame {
    kind: FrameKind,
    tag: u32,
    dtype: DType,
    /// The sender's name for the message.
    id: u64,
    /// Bytes of the message.
    len: u64,
}

impl Frame {
    fn encode(self) -> [u8; FRAME] {
        let mut bytes = [0; FRAME];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[5] = self.dtype.code();
        bytes[8..12].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.id.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; FRAME]) -> Option<Self> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if word(0) != MAGIC {
            return None;
        }
        let frame = Self {
            kind: match bytes[4] {
                1 => FrameKind::Eager,
                2 => FrameKind::Offer,
                3 => FrameKind::Clear,
                4 => FrameKind::Data,
                5 => FrameKind::Refuse,
                _ => return None,
            },
            dtype: DType::from_code(bytes[5])?,
            tag: word(8),
            id: long(16),
            len: long(24),
        };
        if frame.kind == FrameKind::Eager && frame.len > EAGER as u64 {
            return None;
        }
        Some(frame)
    }
}

/// A message, or the offer of one, that came before its receive.
struct Kept {
    frame: Frame,
    /// `None` for an offer.
    message: Option<Vec<u8>>,
}

/// What the next bytes of a lane belong to.
enum Incoming {
    /// A frame.
    Frame { bytes: [u8; FRAME], done: usize },
    /// A message, for this receive.
    Message {
        receive: u64,
        frame: Frame,
        done: usize,
    },
    /// A message to be kept.
    Keep {
        frame: Frame,
        message: Vec<u8>,
        done: usize,
    },
    /// A message that did not fit its receive.
    Skip { left: u64 },
}

/// Which request, if any, is in the middle of writing.
#[derive(PartialEq, Eq)]
enum Outgoing {
    Free,
    Send(u64),
}

/// A receive not yet met by a message.
#[derive(Clone, Copy)]
struct Waiting {
    receive: u64,
    tag: u32,
    /// From any peer: it stands in the lines of all, and only its own thread may pick one.
    from_any: bool,
}

/// One peer's lane and all that is under way on it.
struct PeerLane {
    lane: Option<Lane>,
    incoming: Incoming,
    outgoing: Outgoing,
    /// Frames to be written before anything else, and how much of the first is written.
    replies: VecDeque<[u8; FRAME]>,
    replied: usize,
    /// Receives not yet met by a message, in order.
    waiting: VecDeque<Waiting>,
    /// Offers that were cleared, and the receive that each is for.
    cleared: Vec<(u64, u64)>,
    kept: VecDeque<Kept>,
    kept_bytes: usize,
    /// Sends that have not started, in order.
    queue: VecDeque<u64>,
    /// Answers to our offers: the message's id, and the frame.
    answers: Vec<Frame>,
}

/// One group's messages.
pub(super) struct P2p {
    mesh: Arc<Mesh>,
    group: u64,
    ranks: Arc<[Rank]>,
    peers: Vec<Mutex<PeerLane>>,
    sockets: Sockets,
    /// Where all ranks share memory.
    streams: Option<Streams>,
    next: AtomicU64,
}

/// One send or receive under way.
pub(super) struct Request {
    id: u64,
    tag: u32,
    dtype: DType,
    stage: Stage,
    /// Why it ended without its message, where the others of its batch may go on.
    failure: Option<Failure>,
}

enum Stage {
    /// In the queue of its peer.
    SendQueued { peer: usize },
    /// Writing frame and message: this much is written.
    SendWriting {
        peer: usize,
        frame: [u8; FRAME],
        done: usize,
        /// Only the frame: an offer.
        offer: bool,
    },
    /// Offered, waiting to be cleared.
    SendOffered { peer: usize },
    /// Waiting for a message, from this peer or any.
    Receive { peer: Option<usize> },
    /// A message is coming in, or was cleared and will.
    Receiving { peer: usize },
    /// Done; receives say who sent.
    Done { source: Option<usize> },
}

fn lock(peer: &Mutex<PeerLane>) -> MutexGuard<'_, PeerLane> {
    peer.lock().unwrap_or_else(PoisonError::into_inner)
}

impl P2p {
    pub(super) fn new(mesh: Arc<Mesh>, group: u64, ranks: Arc<[Rank]>, sockets: Sockets) -> Self {
        let peers = ranks.iter().map(|_| {
            Mutex::new(PeerLane {
                lane: None,
                incoming: Incoming::Frame {
                    bytes: [0; FRAME],
                    done: 0,
                },
                outgoing: Outgoing::Free,
                replies: VecDeque::new(),
                replied: 0,
                waiting: VecDeque::new(),
                cleared: Vec::new(),
                kept: VecDeque::new(),
                kept_bytes: 0,
                queue: VecDeque::new(),
                answers: Vec::new(),
            })
        });
        Self {
            mesh,
            group,
            peers: peers.collect(),
            ranks,
            sockets,
            streams: None,
            next: AtomicU64::new(1),
        }
    }

    /// As [`new`](Self::new), of ranks that share memory.
    pub(super) fn over_memory(self, streams: Streams) -> Self {
        Self {
            streams: Some(streams),
            ..self
        }
    }

    /// Takes a place in the order of sends or receives, for each of `op`'s in order.
    pub(super) fn post(&self, op: &Op<'_>, requests: &mut Vec<Request>) {
        let (buffer, tag, stage) = match op {
            Op::Coalesced(ops) => {
                for op in ops {
                    self.post(op, requests);
                }
                return;
            }
            Op::Send { buffer, peer, tag } => {
                let peer = *peer as usize;
                (buffer, *tag, Stage::SendQueued { peer })
            }
            Op::Recv { buffer, peer, tag } => {
                let peer = peer.map(|peer| peer as usize);
                (buffer, *tag, Stage::Receive { peer })
            }
            _ => return,
        };
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        match stage {
            Stage::SendQueued { peer } => lock(&self.peers[peer]).queue.push_back(id),
            Stage::Receive { peer: Some(peer) } => {
                lock(&self.peers[peer]).waiting.push_back(Waiting {
                    receive: id,
                    tag,
                    from_any: false,
                });
            }
            _ => {
                for peer in &self.peers {
                    lock(peer).waiting.push_back(Waiting {
                        receive: id,
                        tag,
                        from_any: true,
                    });
                }
            }
        }
        requests.push(Request {
            id,
            tag,
            dtype: buffer.dtype(),
            stage,
            failure: None,
        });
    }

    /// Runs posted requests to their end.
    pub(super) fn run(
        &self,
        op: &mut Op<'_>,
        requests: &mut [Request],
        patience: &mut Patience<'_>,
    ) -> Result<(), Failure> {
        loop {
            let moved = self.advance(op, &mut requests.iter_mut(), patience)?;
            if let Some(outcome) = outcome(requests) {
                return outcome;
            }
            if moved {
                patience.refresh();
                continue;
            }
            match patience.pause() {
                Ok(Pause::Look) => {}
                Ok(Pause::Sleep(time)) => {
                    self.check_peers(requests, patience)?;
                    self.sleep(requests.iter(), None, time)?;
                }
                Err(Interrupted::TimedOut) => return Err(Failure::Late(self.missing(requests))),
                Err(why) => return Err(why.into()),
            }
        }
    }

    /// Moves each request on as far as it goes now; says whether anything moved.
    pub(super) fn advance(
        &self,
        op: &mut Op<'_>,
        requests: &mut std::slice::IterMut<'_, Request>,
        patience: &mut Patience<'_>,
    ) -> Result<bool, Failure> {
        match op {
            Op::Coalesced(ops) => {
                let mut moved = false;
                for op in ops {
                    moved |= self.advance(op, requests, patience)?;
                }
                Ok(moved)
            }
            Op::Send { buffer, .. } => {
                let Some(request) = requests.next() else {
                    return Ok(false);
                };
                let bytes = buffer.as_bytes().map_err(Failure::Argument)?;
                let result = self.advance_send(request, bytes, patience);
                request.keep_mismatch(result)
            }
            Op::Recv { buffer, .. } => {
                let Some(request) = requests.next() else {
                    return Ok(false);
                };
                let bytes = buffer.as_bytes_mut().map_err(Failure::Argument)?;
                let result = self.advance_receive(request, bytes, patience);
                request.keep_mismatch(result)
            }
            _ => Ok(false),
        }
    }

    /// Takes requests that will not be run on out of all queues.
    pub(super) fn withdraw(&self, requests: &[Request]) {
        for peer in &self.peers {
            let mut peer = lock(peer);
            for request in requests {
                peer.queue.retain(|id| *id != request.id);
                peer.waiting.retain(|waiting| waiting.receive != request.id);
            }
        }
    }

    fn open(
        &self,
        at: usize,
        peer: &mut PeerLane,
        patience: &mut Patience<'_>,
    ) -> Result<bool, Failure> {
        if peer.lane.is_some() {
            return Ok(true);
        }
        let rank = self.ranks[at];
        let stream = self
            .mesh
            .try_connect(self.group, LaneKind::P2p, rank, patience)?;
        let Some(stream) = stream else {
            return Ok(false);
        };
        let lane = match &self.streams {
            Some(streams) => streams.open(at, stream).map(Lane::Shm),
            None => TcpLane::new(stream).map(Lane::Tcp),
        };
        let lane = lane.map_err(Failure::Io)?;
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.push(lane.socket().clone());
        peer.lane = Some(lane);
        Ok(true)
    }

    fn advance_send(
        &self,
        request: &mut Request,
        bytes: &[u8],
        patience: &mut Patience<'_>,
    ) -> Result<bool, Failure> {
        let at = match request.stage {
            Stage::SendQueued { peer }
            | Stage::SendWriting { peer, .. }
            | Stage::SendOffered { peer } => peer,
            _ => return Ok(false),
        };
        let mut guard = lock(&self.peers[at]);
        let peer = &mut *guard;
        if !self.open(at, peer, patience)? {
            return Ok(false);
        }
        let gone = |error| Failure::Gone(self.ranks[at], Some(error));
        let mut moved = peer.reply().map_err(gone)?;
        if matches!(request.stage, Stage::SendOffered { .. }) {
            moved |= peer.read_on(None, self.ranks[at])?;
        }
        let mut frame = Frame {
            kind: FrameKind::Eager,
            tag: request.tag,
            dtype: request.dtype,
            id: request.id,
            len: bytes.len() as u64,
        };
        match request.stage {
            Stage::SendQueued { .. } => {
                let is_next = peer.queue.front() == Some(&request.id);
                if !is_next || peer.outgoing != Outgoing::Free || !peer.replies.is_empty() {
                    return Ok(moved);
                }
                peer.queue.pop_front();
                peer.outgoing = Outgoing::Send(request.id);
                let offer = bytes.len() > EAGER;
                if offer {
                    frame.kind = FrameKind::Offer;
                }
                request.stage = Stage::SendWriting {
                    peer: at,
                    frame: frame.encode(),
                    done: 0,
                    offer,
                };
            }
            Stage::SendOffered { .. } => {
                let Some(found) = peer.answers.iter().position(|a| a.id == request.id) else {
                    return Ok(moved);
                };
                if peer.answers[found].kind == FrameKind::Refuse {
                    let answer = peer.answers.swap_remove(found);
                    return Err(self.misfit(at, &frame, answer.dtype, answer.len, "receives"));
                }
                if peer.outgoing != Outgoing::Free || !peer.replies.is_empty() {
                    return Ok(moved);
                }
                peer.answers.swap_remove(found);
                peer.outgoing = Outgoing::Send(request.id);
                frame.kind = FrameKind::Data;
                request.stage = Stage::SendWriting {
                    peer: at,
                    frame: frame.encode(),
                    done: 0,
                    offer: false,
                };
            }
            _ => {}
        }
        let Stage::SendWriting {
            frame, done, offer, ..
        } = &mut request.stage
        else {
            return Ok(moved);
        };
        let lane = peer.lane.as_mut().ok_or(Failure::Closed)?;
        let follows: &[u8] = if *offer { &[] } else { bytes };
        while *done < FRAME {
            let some = lane.write_both(&frame[*done..], follows).map_err(gone)?;
            *done += some;
            if some == 0 {
                return Ok(moved);
            }
            moved = true;
        }
        if *offer {
            peer.outgoing = Outgoing::Free;
            request.stage = Stage::SendOffered { peer: at };
            return Ok(true);
        }
        while *done - FRAME < bytes.len() {
            let some = lane.write(&bytes[*done - FRAME..]).map_err(gone)?;
            *done += some;
            if some == 0 {
                return Ok(moved);
            }
            moved = true;
        }
        peer.outgoing = Outgoing::Free;
        request.stage = Stage::Done { source: None };
        Ok(true)
    }

    fn advance_receive(
        &self,
        request: &mut Request,
        bytes: &mut [u8],
        patience: &mut Patience<'_>,
    ) -> Result<bool, Failure> {
        match request.stage {
            Stage::Receive { peer: Some(peer) } | Stage::Receiving { peer } => {
                self.receive_from(peer, request, bytes, patience)
            }
            Stage::Receive { peer: None } => {
                let mut moved = false;
                for peer in 0..self.peers.len() {
                    if self.ranks[peer] == self.mesh.rank() {
                        continue;
                    }
                    moved |= self.receive_from(peer, request, bytes, patience)?;
                    if !matches!(request.stage, Stage::Receive { peer: None }) {
                        break;
                    }
                }
                Ok(moved)
            }
            _ => Ok(false),
        }
    }

    fn receive_from(
        &self,
        at: usize,
        request: &mut Request,
        bytes: &mut [u8],
        patience: &mut Patience<'_>,
    ) -> Result<bool, Failure> {
        let rank = self.ranks[at];
        let gone = |error| Failure::Gone(rank, Some(error));
        let mut guard = lock(&self.peers[at]);
        let peer = &mut *guard;
        if !self.open(at, peer, patience)? {
            return Ok(false);
        }
        let mut moved = peer.reply().map_err(gone)?;
        let from_any = matches!(request.stage, Stage::Receive { peer: None });
        if matches!(request.stage, Stage::Receive { .. })
            && let Some(kept) = peer.take_kept(request)
        {
            peer.waiting.retain(|waiting| waiting.receive != request.id);
            request.stage = Stage::Receiving { peer: at };
            moved = true;
            let frame = kept.frame;
            let fits = frame.dtype == request.dtype && frame.len == bytes.len() as u64;
            match kept.message {
                _ if !fits => {
                    if frame.kind == FrameKind::Offer {
                        peer.refuse(&frame, request.dtype, bytes.len() as u64);
                        peer.reply().map_err(gone)?;
                    }
                    return Err(self.misfit(
                        at,
                        &frame,
                        request.dtype,
                        bytes.len() as u64,
                        "is received",
                    ));
                }
                Some(message) => {
                    bytes.copy_from_slice(&message);
                    request.stage = Stage::Done { source: Some(at) };
                }
                None => {
                    peer.clear(&frame, request.id);
                    peer.reply().map_err(gone)?;
                }
            }
        } else {
            moved |= peer.read_on(Some((request, &mut *bytes, at)), rank)?;
            if let Stage::Receive { .. } | Stage::Receiving { .. } = request.stage
                && let Incoming::Message { receive, frame, .. } = &peer.incoming
                && *receive == request.id
                && (frame.dtype != request.dtype || frame.len != bytes.len() as u64)
            {
                let frame = *frame;
                peer.incoming = Incoming::Skip { left: frame.len };
                let len = bytes.len() as u64;
                return Err(self.misfit(at, &frame, request.dtype, len, "is received"));
            }
        }
        drop(guard);
        if from_any && !matches!(request.stage, Stage::Receive { .. }) {
            for peer in &self.peers {
                lock(peer)
                    .waiting
                    .retain(|waiting| waiting.receive != request.id);
            }
        }
        Ok(moved)
    }

    fn misfit(&self, at: usize, frame: &Frame, dtype: DType, len: u64, verb: &str) -> Failure {
        let count = |dtype: DType, len: u64| len / dtype.size().unwrap_or(1) as u64;
        let (sent, expected) = (count(frame.dtype, frame.len), count(dtype, len));
        let message = if verb == "receives" {
            format!(
                "{sent} {} are sent with tag {}, but rank {at} of the group receives {expected} \
                 {dtype}",
                frame.dtype, frame.tag
            )
        } else {
            format!(
                "rank {at} of the group sent {sent} {} with tag {}, but {expected} {dtype} are \
                 received",
                frame.dtype, frame.tag
            )
        };
        Failure::Mismatch(self.ranks[at], message)
    }

    pub(super) fn missing(&self, requests: &[Request]) -> Vec<Rank> {
        let mut missing: Vec<Rank> = requests
            .iter()
            .filter_map(|request| request.peer())
            .map(|peer| self.ranks[peer])
            .collect();
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// Asks whether peers that have not connected still live.
    fn check_peers(
        &self,
        requests: &[Request],
        patience: &mut Patience<'_>,
    ) -> Result<(), Failure> {
        if patience.idle() < DOUBT {
            return Ok(());
        }
        self.check_peers_now(requests, patience)
    }

    /// As `check_peers`, however short the wait has been.
    pub(super) fn check_peers_now(
        &self,
        requests: &[Request],
        patience: &mut Patience<'_>,
    ) -> Result<(), Failure> {
        for request in requests {
            let Some(at) = request.peer() else { continue };
            if lock(&self.peers[at]).lane.is_none()
                && self.mesh.is_gone(self.ranks[at], patience)?
            {
                return Err(Failure::Gone(self.ranks[at], None));
            }
        }
        Ok(())
    }

    /// Sleeps until a request of these may move on, `bell` rings, or `time` has passed.
    pub(super) fn sleep<'r>(
        &self,
        requests: impl Iterator<Item = &'r Request>,
        bell: Option<&OwnedFd>,
        time: Duration,
    ) -> Result<(), Failure> {
        let mut sockets = Vec::new();
        let mut shortest = time;
        for request in requests {
            let peers = match (&request.stage, request.peer()) {
                (Stage::Done { .. }, _) => continue,
                (_, Some(peer)) => peer..peer + 1,
                (_, None) => 0..self.peers.len(),
            };
            for at in peers {
                if self.ranks[at] == self.mesh.rank() {
                    continue;
                }
                let mut peer = lock(&self.peers[at]);
                let peer = &mut *peer;
                let Some(lane) = &mut peer.lane else {
                    shortest = shortest.min(Duration::from_millis(1));
                    continue;
                };
                let is_of_another = matches!(
                    &peer.incoming,
                    Incoming::Message { receive, .. } if *receive != request.id
                );
                let is_queued = matches!(request.stage, Stage::SendQueued { .. });
                if is_of_another || is_queued {
                    // It is another thread's move: the socket says nothing about it.
                    shortest = shortest.min(Duration::from_micros(500));
                }
                let writes = matches!(request.stage, Stage::SendWriting { .. });
                let waits = Waits {
                    to_read: !is_of_another,
                    to_write: writes || !peer.replies.is_empty(),
                };
                if let Lane::Shm(stream) = lane {
                    // Bytes and room alike are told by the doorbell.
                    if stream.prepare_sleep(waits).map_err(Failure::Io)? {
                        return Ok(());
                    }
                    sockets.push((stream.socket().clone(), Interest::Read));
                    continue;
                }
                if waits.to_read {
                    sockets.push((lane.socket().clone(), Interest::Read));
                }
                if waits.to_write {
                    sockets.push((lane.socket().clone(), Interest::Write));
                }
            }
        }
        let sockets = sockets
            .iter()
            .map(|(stream, interest)| (&**stream, *interest));
        transport::tcp::poll(sockets, bell, shortest).map_err(Failure::Io)
    }
}

/// How a batch ended, once all of it has.
pub(super) fn outcome(requests: &mut [Request]) -> Option<Result<(), Failure>> {
    let done = |request: &Request| matches!(request.stage, Stage::Done { .. });
    if !requests.iter().all(done) {
        return None;
    }
    let failure = requests.iter_mut().find_map(|r| r.failure.take());
    Some(failure.map_or(Ok(()), Err))
}

impl Request {
    /// A message that does not fit ends its own request only.
    fn keep_mismatch(&mut self, result: Result<bool, Failure>) -> Result<bool, Failure> {
        match result {
            Err(failure @ Failure::Mismatch(..)) => {
                self.failure = Some(failure);
                self.stage = Stage::Done { source: None };
                Ok(true)
            }
            other => other,
        }
    }

    /// Who sent, once a receive is done.
    pub(super) fn source(&self) -> Option<usize> {
        match self.stage {
            Stage::Done { source } => source,
            _ => None,
        }
    }

    fn peer(&self) -> Option<usize> {
        match self.stage {
            Stage::SendQueued { peer }
            | Stage::SendWriting { peer, .. }
            | Stage::SendOffered { peer }
            | Stage::Receiving { peer } => Some(peer),
            Stage::Receive { peer } => peer,
            Stage::Done { .. } => None,
        }
    }
}

impl PeerLane {
    /// Writes replies as far as they go; says whether any moved.
    fn reply(&mut self) -> std::io::Result<bool> {
        let mut moved = false;
        if self.outgoing != Outgoing::Free {
            return Ok(false);
        }
        while let (Some(frame), Some(lane)) = (self.replies.front(), self.lane.as_mut()) {
            let some = lane.write(&frame[self.replied..])?;
            if some == 0 {
                break;
            }
            moved = true;
            self.replied += some;
            if self.replied == FRAME {
                self.replied = 0;
                self.replies.pop_front();
            }
        }
        Ok(moved)
    }

    fn clear(&mut self, offer: &Frame, receive: u64) {
        self.cleared.push((offer.id, receive));
        let answer = Frame {
            kind: FrameKind::Clear,
            ..*offer
        };
        self.replies.push_back(answer.encode());
    }

    fn refuse(&mut self, offer: &Frame, dtype: DType, len: u64) {
        let answer = Frame {
            kind: FrameKind::Refuse,
            dtype,
            len,
            ..*offer
        };
        self.replies.push_back(answer.encode());
    }

    /// The first kept message that `request` may take.
    fn take_kept(&mut self, request: &Request) -> Option<Kept> {
        if self.kept.is_empty() || !self.is_first(request) {
            return None;
        }
        let found = self
            .kept
            .iter()
            .position(|kept| kept.frame.tag == request.tag)?;
        let kept = self.kept.remove(found)?;
        self.kept_bytes -= kept.message.as_ref().map_or(0, Vec::len);
        Some(kept)
    }

    /// Whether no receive of the same tag was posted before `request`.
    fn is_first(&self, request: &Request) -> bool {
        let first = self.waiting.iter().find(|w| w.tag == request.tag);
        first.is_some_and(|first| first.receive == request.id)
    }

    /// Reads what there is, for `mine` or for whom it belongs to; stops at what another request must
    /// read itself.
    fn read_on(
        &mut self,
        mut mine: Option<(&mut Request, &mut [u8], usize)>,
        rank: Rank,
    ) -> Result<bool, Failure> {
        let gone = |error| Failure::Gone(rank, Some(error));
        let mut moved = false;
        loop {
            let Some(lane) = self.lane.as_mut() else {
                return Ok(moved);
            };
            match &mut self.incoming {
                Incoming::Frame { bytes, done } => {
                    if self.kept_bytes > MAX_KEPT {
                        return Ok(moved);
                    }
                    let some = lane.read(&mut bytes[*done..]).map_err(gone)?;
                    *done += some;
                    if some == 0 {
                        return Ok(moved);
                    }
                    moved = true;
                    if *done == FRAME {
                        let frame = Frame::decode(bytes);
                        let frame = frame.ok_or_else(|| {
                            Failure::Garbled(rank, "a message without a proper head".into())
                        })?;
                        let reader = mine.as_ref().map(|(request, _, _)| request.id);
                        self.incoming = self.meet(frame, reader, rank)?;
                    }
                }
                Incoming::Message {
                    receive,
                    frame,
                    done,
                } => {
                    let Some((request, bytes, at)) = &mut mine else {
                        return Ok(moved);
                    };
                    if *receive != request.id {
                        return Ok(moved);
                    }
                    if matches!(request.stage, Stage::Receive { .. }) {
                        if frame.dtype != request.dtype || frame.len != bytes.len() as u64 {
                            return Ok(true);
                        }
                        request.stage = Stage::Receiving { peer: *at };
                    }
                    while *done < bytes.len() {
                        let some = lane.read(&mut bytes[*done..]).map_err(gone)?;
                        *done += some;
                        if some == 0 {
                            return Ok(moved);
                        }
                        moved = true;
                    }
                    request.stage = Stage::Done { source: Some(*at) };
                    self.next_frame();
                    return Ok(true);
                }
                Incoming::Keep {
                    frame,
                    message,
                    done,
                } => {
                    while *done < message.len() {
                        let some = lane.read(&mut message[*done..]).map_err(gone)?;
                        *done += some;
                        if some == 0 {
                            return Ok(moved);
                        }
                        moved = true;
                    }
                    let (frame, message) = (*frame, std::mem::take(message));
                    self.kept_bytes += message.len();
                    self.kept.push_back(Kept {
                        frame,
                        message: Some(message),
                    });
                    self.next_frame();
                    // It may be just what this request waits for.
                    return Ok(true);
                }
                Incoming::Skip { left } => {
                    let mut waste = [0; 4096];
                    while *left > 0 {
                        let want = waste
                            .len()
                            .min(usize::try_from(*left).unwrap_or(usize::MAX));
                        let some = lane.read(&mut waste[..want]).map_err(gone)?;
                        *left -= some as u64;
                        if some == 0 {
                            return Ok(moved);
                        }
                        moved = true;
                    }
                    self.next_frame();
                }
            }
        }
    }

    fn next_frame(&mut self) {
        self.incoming = Incoming::Frame {
            bytes: [0; FRAME],
            done: 0,
        };
    }

    /// Decides whom the frame that just came is for.
    fn meet(&mut self, frame: Frame, reader: Option<u64>, rank: Rank) -> Result<Incoming, Failure> {
        let next = Incoming::Frame {
            bytes: [0; FRAME],
            done: 0,
        };
        match frame.kind {
            FrameKind::Eager => {
                let same_tag = |kept: &Kept| kept.frame.tag == frame.tag;
                let first = self.waiting.iter().position(|w| w.tag == frame.tag);
                let first = first.filter(|&first| {
                    let Waiting {
                        receive, from_any, ..
                    } = self.waiting[first];
                    !from_any || reader == Some(receive)
                });
                match first {
                    // What was kept earlier goes first.
                    Some(first) if !self.kept.iter().any(same_tag) => {
                        let receive = self.waiting[first].receive;
                        self.waiting.remove(first);
                        Ok(Incoming::Message {
                            receive,
                            frame,
                            done: 0,
                        })
                    }
                    _ => Ok(Incoming::Keep {
                        frame,
                        message: vec![0; frame.len as usize],
                        done: 0,
                    }),
                }
            }
            FrameKind::Offer => {
                self.kept.push_back(Kept {
                    frame,
                    message: None,
                });
                Ok(next)
            }
            FrameKind::Clear | FrameKind::Refuse => {
                self.answers.push(frame);
                Ok(next)
            }
            FrameKind::Data => {
                let found = self.cleared.iter().position(|(id, _)| *id == frame.id);
                let found = found.ok_or_else(|| {
                    Failure::Garbled(rank, "a message that was not cleared".into())
                })?;
                let (_, receive) = self.cleared.swap_remove(found);
                Ok(Incoming::Message {
                    receive,
                    frame,
                    done: 0,
                })
            }
        }
    }
}
