//! [`PeerChannel`]: the channel to one peer, and the assignment of its messages to requests.

use super::frame::{FRAME_BYTES, Frame, FrameKind};
use super::request::{Request, Stage};
use crate::transport::Channel;
use crate::wait::Failure;
use rcomm_recorder::model::{DType, Rank};
use std::collections::VecDeque;

/// While more than this number of bytes from one peer are kept for later receives, no further frame is read from it.
pub(super) const MAX_KEPT_BYTES: usize = 64 << 20;

/// A message, or an offer of one, that is kept until its receive takes it.
pub(super) struct UnexpectedMessage {
    pub(super) frame: Frame,
    /// `None` for an offer.
    pub(super) message: Option<Vec<u8>>,
}

impl UnexpectedMessage {
    /// Number of bytes that the message counts toward [`MAX_KEPT_BYTES`].
    fn cost(&self) -> usize {
        FRAME_BYTES + self.message.as_ref().map_or(0, Vec::len)
    }
}

/// The meaning of the next bytes of a channel.
pub(super) enum Incoming {
    /// A frame.
    Frame {
        bytes: [u8; FRAME_BYTES],
        done: usize,
    },
    /// A message for this receive.
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
    /// A message that is discarded, since it did not fit its receive; `left` of its bytes have not arrived yet.
    Skip { left: u64 },
}

/// Which send is writing to the channel.
#[derive(PartialEq, Eq)]
pub(super) enum Outgoing {
    /// No message is partly written.
    Free,
    /// The send with this id is writing: no other bytes may be written until it has written its frame and message.
    Send(u64),
}

/// A receive that no message has matched yet.
#[derive(Clone, Copy)]
pub(super) struct WaitingReceive {
    pub(super) receive: u64,
    pub(super) tag: u32,
    /// Whether the receive is from any peer. Such a receive is in the queues of all peers, and only its own thread may
    /// match a message to it.
    pub(super) from_any: bool,
}

/// One peer's channel and all requests in progress on it.
pub(super) struct PeerChannel {
    pub(super) channel: Option<Channel>,
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
    /// Answers to the peer's offers, to be written before the next message or offer.
    pub(super) replies: VecDeque<[u8; FRAME_BYTES]>,
    /// Number of bytes of the first reply that were written.
    pub(super) replied: usize,
    /// Receives that no message has matched yet, in order.
    pub(super) waiting: VecDeque<WaitingReceive>,
    /// Offers of the peer that were accepted and whose messages have not arrived, each with its receive.
    pub(super) accepted: Vec<(Frame, u64)>,
    /// Messages and offers that no receive has taken yet, in order of arrival.
    pub(super) kept: VecDeque<UnexpectedMessage>,
    /// Number of bytes that `kept` counts toward [`MAX_KEPT_BYTES`].
    pub(super) kept_bytes: usize,
    /// Sends that have not started, in the order in which they were posted.
    pub(super) queued_sends: VecDeque<u64>,
    /// The message ids of this rank's offers that were not answered yet.
    pub(super) offered: Vec<u64>,
    /// Answers to this rank's offers.
    pub(super) answers: Vec<Frame>,
}

impl PeerChannel {
    /// Makes the state for a peer whose channel is not open yet.
    pub(super) fn new() -> Self {
        Self {
            channel: None,
            incoming: Incoming::Frame {
                bytes: [0; FRAME_BYTES],
                done: 0,
            },
            outgoing: Outgoing::Free,
            replies: VecDeque::new(),
            replied: 0,
            waiting: VecDeque::new(),
            accepted: Vec::new(),
            kept: VecDeque::new(),
            kept_bytes: 0,
            queued_sends: VecDeque::new(),
            offered: Vec::new(),
            answers: Vec::new(),
        }
    }

    /// Writes replies until none is left or the channel is full; none while a message is partly written. Returns
    /// whether bytes were written.
    pub(super) fn reply(&mut self) -> std::io::Result<bool> {
        let mut has_advanced = false;
        if self.outgoing != Outgoing::Free {
            return Ok(false);
        }
        while let (Some(frame), Some(channel)) = (self.replies.front(), self.channel.as_mut()) {
            let count = channel.write(&frame[self.replied..])?;
            if count == 0 {
                break;
            }
            has_advanced = true;
            self.replied += count;
            if self.replied == FRAME_BYTES {
                self.replied = 0;
                self.replies.pop_front();
            }
        }
        Ok(has_advanced)
    }

    /// Accepts an offer for this receive.
    fn accept(&mut self, offer: &Frame, receive: u64) {
        self.accepted.push((*offer, receive));
        let answer = Frame {
            kind: FrameKind::Clear,
            ..*offer
        };
        self.replies.push_back(answer.encode());
    }

    /// Refuses an offer, whose receive has this type and this length in bytes.
    fn refuse(&mut self, offer: &Frame, dtype: DType, len: u64) {
        let answer = Frame {
            kind: FrameKind::Refuse,
            dtype,
            len,
            ..*offer
        };
        self.replies.push_back(answer.encode());
    }

    /// Removes and returns the first kept message or offer that `request` may take.
    fn take_unexpected(&mut self, request: &Request) -> Option<UnexpectedMessage> {
        if self.kept.is_empty() || !self.is_first(request) {
            return None;
        }
        let found = self
            .kept
            .iter()
            .position(|kept| kept.frame.tag == request.tag)?;
        let kept = self.kept.remove(found)?;
        self.kept_bytes -= kept.cost();
        Some(kept)
    }

    /// Whether a message, not only an offer, is kept that a posted receive may take.
    fn has_match_for_waiting(&self) -> bool {
        let is_waited_for = |kept: &UnexpectedMessage| {
            let mut waiting = self.waiting.iter();
            waiting.any(|waiting| waiting.tag == kept.frame.tag)
        };
        self.kept
            .iter()
            .any(|kept| kept.message.is_some() && is_waited_for(kept))
    }

    /// Adds a message or an offer to those that no receive has taken yet.
    fn keep(&mut self, kept: UnexpectedMessage) {
        self.kept_bytes += kept.cost();
        self.kept.push_back(kept);
    }

    /// Whether `request` is the first posted receive of its tag.
    fn is_first(&self, request: &Request) -> bool {
        let mut waiting = self.waiting.iter();
        let first = waiting.find(|waiting| waiting.tag == request.tag);
        first.is_some_and(|first| first.receive == request.id)
    }

    /// Advances a receive as far as it can go now. Returns whether anything advanced, which may also be a reply, or a
    /// message that is kept for another receive. The peer is rank `peer` of the group, which is `rank` in the world.
    ///
    /// # Errors
    /// `Mismatch` if the message does not fit the receive. `Gone` if the receive's own reply cannot be written, or if
    /// the channel has ended or takes no reply, and neither bytes that have arrived nor a kept message are left that a
    /// posted receive may take. `Garbled` if the peer violates the protocol.
    pub(super) fn receive(
        &mut self,
        request: &mut Request,
        bytes: &mut [u8],
        peer: usize,
        rank: Rank,
    ) -> Result<bool, Failure> {
        let gone = |error| Failure::Gone(rank, Some(error));
        let replied = self.reply();
        let mut has_advanced = matches!(replied, Ok(true));
        if matches!(request.stage, Stage::Receive { .. })
            && let Some(kept) = self.take_unexpected(request)
        {
            self.waiting.retain(|waiting| waiting.receive != request.id);
            request.stage = Stage::Receiving { peer };
            let frame = kept.frame;
            let (dtype, len) = (request.dtype, bytes.len() as u64);
            let fits = frame.dtype == dtype && frame.len == len;
            match kept.message {
                _ if !fits => {
                    if frame.kind == FrameKind::Offer {
                        self.refuse(&frame, dtype, len);
                        self.reply().map_err(gone)?;
                    }
                    return Err(frame.misfits(dtype, len, peer, rank));
                }
                Some(message) => {
                    bytes.copy_from_slice(&message);
                    request.stage = Stage::Done { source: Some(peer) };
                }
                None => {
                    self.accept(&frame, request.id);
                    self.reply().map_err(gone)?;
                }
            }
            return Ok(true);
        }
        has_advanced |= match self.read_on(Some((request, &mut *bytes, peer)), rank) {
            // Other threads can still take the messages that are kept for them.
            Err(Failure::Gone(..)) if self.has_match_for_waiting() => return Ok(has_advanced),
            read => read?,
        };
        if let Stage::Receive { .. } | Stage::Receiving { .. } = request.stage
            && let Incoming::Message { receive, frame, .. } = &self.incoming
            && *receive == request.id
            && (frame.dtype != request.dtype || frame.len != bytes.len() as u64)
        {
            let frame = *frame;
            self.incoming = Incoming::Skip { left: frame.len };
            return Err(frame.misfits(request.dtype, bytes.len() as u64, peer, rank));
        }
        match replied {
            // What the peer has sent before its end can still be received, by other threads too.
            Err(error) if !has_advanced && !self.has_match_for_waiting() => Err(gone(error)),
            _ => Ok(has_advanced),
        }
    }

    /// Reads bytes that have arrived, for `mine` or for the requests to which they belong; returns whether anything
    /// advanced. Stops after a message for `mine` or one to be kept, at bytes that another request must read itself,
    /// and while more than [`MAX_KEPT_BYTES`] are kept. `mine` is the receive whose thread reads, with its buffer and
    /// the peer's rank in the group; `None` if a send's thread reads.
    ///
    /// # Errors
    /// `Gone` if the channel ended; `Garbled` if the peer violates the protocol.
    pub(super) fn read_on(
        &mut self,
        mut mine: Option<(&mut Request, &mut [u8], usize)>,
        rank: Rank,
    ) -> Result<bool, Failure> {
        let gone = |error| Failure::Gone(rank, Some(error));
        let mut has_advanced = false;
        loop {
            let Some(channel) = self.channel.as_mut() else {
                return Ok(has_advanced);
            };
            match &mut self.incoming {
                Incoming::Frame { bytes, done } => {
                    if self.kept_bytes > MAX_KEPT_BYTES {
                        return Ok(has_advanced);
                    }
                    let count = channel.read(&mut bytes[*done..]).map_err(gone)?;
                    *done += count;
                    if count == 0 {
                        return Ok(has_advanced);
                    }
                    has_advanced = true;
                    if *done == FRAME_BYTES {
                        let frame = Frame::decode(bytes);
                        let frame = frame.ok_or_else(|| {
                            Failure::Garbled(rank, "a message with an invalid header".into())
                        })?;
                        let reader = mine.as_ref().map(|(request, _, _)| request.id);
                        self.incoming = self.assign(frame, reader, rank)?;
                    }
                }
                Incoming::Message {
                    receive,
                    frame,
                    done,
                } => {
                    let Some((request, bytes, peer)) = &mut mine else {
                        return Ok(has_advanced);
                    };
                    if *receive != request.id {
                        return Ok(has_advanced);
                    }
                    if matches!(request.stage, Stage::Receive { .. }) {
                        if frame.dtype != request.dtype || frame.len != bytes.len() as u64 {
                            return Ok(true);
                        }
                        request.stage = Stage::Receiving { peer: *peer };
                    }
                    while *done < bytes.len() {
                        let count = channel.read(&mut bytes[*done..]).map_err(gone)?;
                        *done += count;
                        if count == 0 {
                            return Ok(has_advanced);
                        }
                        has_advanced = true;
                    }
                    request.stage = Stage::Done {
                        source: Some(*peer),
                    };
                    self.next_frame();
                    return Ok(true);
                }
                Incoming::Keep {
                    frame,
                    message,
                    done,
                } => {
                    while *done < message.len() {
                        let count = channel.read(&mut message[*done..]).map_err(gone)?;
                        *done += count;
                        if count == 0 {
                            return Ok(has_advanced);
                        }
                        has_advanced = true;
                    }
                    let (frame, message) = (*frame, std::mem::take(message));
                    self.keep(UnexpectedMessage {
                        frame,
                        message: Some(message),
                    });
                    self.next_frame();
                    // The kept message may be for this request.
                    return Ok(true);
                }
                Incoming::Skip { left } => {
                    let mut discarded = [0; 4096];
                    while *left > 0 {
                        let want = discarded
                            .len()
                            .min(usize::try_from(*left).unwrap_or(usize::MAX));
                        let count = channel.read(&mut discarded[..want]).map_err(gone)?;
                        *left -= count as u64;
                        if count == 0 {
                            return Ok(has_advanced);
                        }
                        has_advanced = true;
                    }
                    self.next_frame();
                }
            }
        }
    }

    /// Expects a frame as the next bytes of the channel.
    fn next_frame(&mut self) {
        self.incoming = Incoming::Frame {
            bytes: [0; FRAME_BYTES],
            done: 0,
        };
    }

    /// Assigns a frame that has arrived to a request, or keeps it; returns the meaning of the next bytes. `reader` is
    /// the receive whose thread read the frame; `None` if a send's thread did.
    fn assign(
        &mut self,
        frame: Frame,
        reader: Option<u64>,
        rank: Rank,
    ) -> Result<Incoming, Failure> {
        let next = Incoming::Frame {
            bytes: [0; FRAME_BYTES],
            done: 0,
        };
        match frame.kind {
            FrameKind::Eager => {
                let same_tag = |kept: &UnexpectedMessage| kept.frame.tag == frame.tag;
                let mut waiting = self.waiting.iter();
                let first = waiting.position(|waiting| waiting.tag == frame.tag);
                let first = first.filter(|&first| {
                    let WaitingReceive {
                        receive, from_any, ..
                    } = self.waiting[first];
                    !from_any || reader == Some(receive)
                });
                match first {
                    // A message of the same tag that was kept earlier comes first.
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
                self.keep(UnexpectedMessage {
                    frame,
                    message: None,
                });
                Ok(next)
            }
            FrameKind::Clear | FrameKind::Refuse => {
                let found = self.offered.iter().position(|&id| id == frame.id);
                let found = found.ok_or_else(|| {
                    Failure::Garbled(rank, "an answer to a message that was not offered".into())
                })?;
                self.offered.swap_remove(found);
                self.answers.push(frame);
                Ok(next)
            }
            FrameKind::Data => {
                let is_this = |offer: &Frame| {
                    (offer.id, offer.dtype, offer.len) == (frame.id, frame.dtype, frame.len)
                };
                let found = self.accepted.iter().position(|(offer, _)| is_this(offer));
                let found = found.ok_or_else(|| {
                    Failure::Garbled(rank, "a message whose offer was not accepted".into())
                })?;
                let (_, receive) = self.accepted.swap_remove(found);
                Ok(Incoming::Message {
                    receive,
                    frame,
                    done: 0,
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::TcpConnection;
    use crate::transport::tcp::TcpChannel;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    /// Makes a channel whose other end has sent each of these bytes as a message of tag 7, and then closed.
    fn channel_with_messages(messages: &[u8]) -> PeerChannel {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (here, _) = listener.accept().unwrap();
        here.set_nonblocking(true).unwrap();
        for &message in messages {
            let head = Frame::eager(7, DType::U8, 1).encode();
            there.write_all(&head).unwrap();
            there.write_all(&[message]).unwrap();
        }
        drop(there);
        let mut channel = PeerChannel::new();
        channel.channel = Some(Channel::Tcp(
            TcpChannel::new(vec![TcpConnection::plain(here)]).unwrap(),
        ));
        channel
    }

    fn post_receive(channel: &mut PeerChannel, id: u64, from_any: bool) -> Request {
        channel.waiting.push_back(WaitingReceive {
            receive: id,
            tag: 7,
            from_any,
        });
        let peer = (!from_any).then_some(0);
        Request::new(id, 7, DType::U8, Stage::Receive { peer })
    }

    #[test]
    fn a_message_that_is_kept_for_another_thread_outlives_its_sender() {
        let mut channel = channel_with_messages(&[5]);
        let mut any = post_receive(&mut channel, 1, true);
        let mut second = post_receive(&mut channel, 2, false);
        // The message belongs to the first receive, and only that receive's thread may match it.
        while channel.kept.is_empty() {
            channel.receive(&mut second, &mut [0], 0, 1).unwrap();
        }
        for _ in 0..3 {
            assert!(!channel.receive(&mut second, &mut [0], 0, 1).unwrap());
        }
        let mut into = [0];
        assert!(channel.receive(&mut any, &mut into, 0, 1).unwrap());
        assert_eq!((into, any.source()), ([5], Some(0)));
        // No message is left for the second receive.
        let end = channel.receive(&mut second, &mut [0], 0, 1);
        assert!(matches!(end, Err(Failure::Gone(1, Some(_)))));
    }

    #[test]
    fn a_kept_message_is_received_though_the_peer_takes_no_reply_any_more() {
        let mut channel = channel_with_messages(&[5]);
        let mut any = post_receive(&mut channel, 1, true);
        let mut second = post_receive(&mut channel, 2, false);
        while channel.kept.is_empty() {
            channel.receive(&mut second, &mut [0], 0, 1).unwrap();
        }
        // The peer has closed its end: it resets the connection at the first reply.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while channel.reply().is_ok() {
            assert!(std::time::Instant::now() < until, "replies are still taken");
            channel.replies.push_back([0; FRAME_BYTES]);
            std::thread::yield_now();
        }
        assert!(!channel.receive(&mut second, &mut [0], 0, 1).unwrap());
        let mut into = [0];
        assert!(channel.receive(&mut any, &mut into, 0, 1).unwrap());
        assert_eq!(into, [5]);
        let end = channel.receive(&mut second, &mut [0], 0, 1);
        assert!(matches!(end, Err(Failure::Gone(1, Some(_)))));
    }
}
