//! A single send or receive that completes at once if nothing else is in progress on its channel.
//!
//! A send of at most [`MAX_EAGER_BYTES`] bytes on an open channel writes its message if nothing else is being written
//! to that peer or waits to be. If the message does not fit completely, [`advance`](P2p::advance) writes the rest. A
//! receive on a channel through memory takes its message if the message is next and complete, and no earlier receive is
//! posted. While it looks for its message, the receive is queued like any other, so that other threads do not take that
//! message. A send or a receive that cannot complete in this way, such as every receive on a socket, continues as an
//! ordinary request.

use super::channel::{Incoming, Outgoing, PeerChannel, WaitingReceive};
use super::frame::{FRAME_BYTES, Frame, MAX_EAGER_BYTES};
use super::messages::{P2p, lock};
use super::request::{Request, Stage};
use crate::transport::fill::bytes_to_fill;
use crate::transport::shm::Found;
use crate::wait::{Failure, Pause, WaitPolicy};
use rcomm_core::Op;
use rcomm_recorder::model::DType;

impl PeerChannel {
    /// Reads a message with exactly this frame before it for the receive `id`, if the message is next on the channel,
    /// no earlier receive is posted, no message is kept for a later receive, and no reply has to be written.
    #[inline]
    fn take_next(&mut self, id: u64, frame: &[u8; FRAME_BYTES], into: &mut [u8]) -> Found {
        let first = self.waiting.front();
        let is_next = first.is_some_and(|waiting| waiting.receive == id)
            && self.kept.is_empty()
            && self.replies.is_empty()
            && matches!(self.incoming, Incoming::Frame { done: 0, .. });
        let Some(channel) = self.channel.as_mut().filter(|_| is_next) else {
            return Found::Other;
        };
        // An error is ignored here: it occurs again when the ordinary request reads the channel, and is reported.
        let found = channel.read_after(frame, into).unwrap_or(Found::Other);
        if found == Found::All {
            self.waiting.pop_front();
        }
        found
    }
}

impl P2p {
    /// Runs one send or receive to its end; returns the rank of the group from which a receive got its message, or
    /// `None` for a send.
    pub(crate) fn run_one(
        &self,
        op: &mut Op<'_>,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Option<usize>, Failure> {
        let mut rest = if let Op::Send { buffer, peer, tag } = op {
            let bytes = buffer.as_bytes().map_err(Failure::Argument)?;
            match self.send_at_once(*peer as usize, *tag, buffer.dtype(), bytes)? {
                None => return Ok(None),
                rest => rest,
            }
        } else if let Op::Recv {
            buffer,
            peer: Some(peer),
            tag,
        } = op
        {
            let (from, dtype) = (*peer as usize, buffer.dtype());
            let bytes = bytes_to_fill(buffer).map_err(Failure::Argument)?;
            match self.receive_at_once(from, *tag, dtype, bytes, policy) {
                None => return Ok(Some(from)),
                rest => rest,
            }
        } else {
            self.post_one(op)
        };
        let requests = rest.as_mut_slice();
        let outcome = self.run(op, requests, policy);
        outcome.inspect_err(|_| self.withdraw(requests))?;
        Ok(requests.iter().find_map(Request::source))
    }

    /// Sends a message as far as possible. Returns the request for the rest, which is queued if no byte was sent;
    /// `None` if the message was sent completely.
    #[inline]
    fn send_at_once(
        &self,
        to: usize,
        tag: u32,
        dtype: DType,
        bytes: &[u8],
    ) -> Result<Option<Request>, Failure> {
        let mut guard = lock(&self.peers[to]);
        let peer = &mut *guard;
        let is_free = peer.queued_sends.is_empty()
            && peer.replies.is_empty()
            && peer.outgoing == Outgoing::Free
            && bytes.len() <= MAX_EAGER_BYTES;
        let frame = Frame::eager(tag, dtype, bytes.len()).encode();
        let mut done = 0;
        if let Some(channel) = peer.channel.as_mut().filter(|_| is_free) {
            let written = channel.write_both(&frame, bytes);
            done = written.map_err(|error| Failure::Gone(self.ranks[to], Some(error)))?;
            if done == FRAME_BYTES + bytes.len() {
                return Ok(None);
            }
        }
        let id = self.next_id();
        let stage = if done == 0 {
            peer.queued_sends.push_back(id);
            Stage::SendQueued { peer: to }
        } else {
            peer.outgoing = Outgoing::Send(id);
            Stage::SendWriting {
                peer: to,
                frame,
                done,
                is_offer: false,
            }
        };
        Ok(Some(Request::new(id, tag, dtype, stage)))
    }

    /// Polls for a message and receives it, if the channel goes through memory and the message is next on it. Returns
    /// `None` if the message was received, and otherwise the queued request.
    #[inline]
    fn receive_at_once(
        &self,
        from: usize,
        tag: u32,
        dtype: DType,
        bytes: &mut [u8],
        policy: &mut WaitPolicy<'_>,
    ) -> Option<Request> {
        let id = self.next_id();
        let frame = Frame::eager(tag, dtype, bytes.len()).encode();
        let mut peer = lock(&self.peers[from]);
        peer.waiting.push_back(WaitingReceive {
            receive: id,
            tag,
            from_any: false,
        });
        loop {
            let empty = match peer.take_next(id, &frame, bytes) {
                Found::All => return None,
                Found::Nothing(empty) => empty,
                Found::Other => break,
            };
            drop(peer);
            let view = self.views[from].get();
            let has_come = view.is_some_and(|view| {
                loop {
                    if !matches!(policy.pause_beside(|| view.is_beside()), Ok(Pause::Poll)) {
                        return false;
                    }
                    if view.has_changed(empty) {
                        return true;
                    }
                }
            });
            if !has_come {
                break;
            }
            peer = lock(&self.peers[from]);
        }
        let stage = Stage::Receive { peer: Some(from) };
        Some(Request::new(id, tag, dtype, stage))
    }
}
