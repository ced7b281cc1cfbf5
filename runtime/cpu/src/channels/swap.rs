//! A transfer in which two ranks send each other the same number of bytes, and each combines the bytes that it
//! receives with those that it has sent.

use crate::transport::Channel;
use std::io;

/// Received bytes are combined in multiples of this many, except for the last ones: in whole elements.
const BLOCK: usize = 4 << 10;
/// How many bytes sending may be ahead of receiving: enough that few calls are needed, and few enough that
/// the bytes are still in the caches when the peer reads them.
const MAX_AHEAD: usize = 1 << 20;

/// Bytes that are sent to a peer and combined in place with those that the peer sends.
///
/// The two ranks cannot block each other: one whose `scratch` is full has received more than it has sent, and one that
/// may not send has sent more than it has received. So at most one of them has a full `scratch`, and at most one may
/// not send; the latter has space for what the former sends.
pub(crate) struct Swap<'a> {
    peer: usize,
    bytes: &'a mut [u8],
    /// Combines the received bytes (second argument) into the first argument.
    combine: &'a dyn Fn(&mut [u8], &[u8]),
    sent: usize,
    received: usize,
    /// Number of bytes that were combined. No byte is combined before it was sent, since the peer needs the original.
    combined: usize,
    /// Received bytes; those from `start` on are not combined yet.
    scratch: &'a mut [u8],
    start: usize,
}

impl<'a> Swap<'a> {
    /// Makes a transfer whose first `sent` bytes were sent already. `scratch`, for received bytes, has the size of at
    /// least two blocks, or of all bytes.
    pub(crate) fn new(
        peer: usize,
        bytes: &'a mut [u8],
        sent: usize,
        scratch: &'a mut [u8],
        combine: &'a dyn Fn(&mut [u8], &[u8]),
    ) -> Self {
        assert!(
            scratch.len() >= bytes.len().min(2 * BLOCK),
            "scratch is too small"
        );
        Self {
            peer,
            bytes,
            combine,
            sent,
            received: 0,
            combined: 0,
            scratch,
            start: 0,
        }
    }

    pub(super) fn peer(&self) -> usize {
        self.peer
    }

    /// Bytes sent so far.
    pub(super) fn sent(&self) -> usize {
        self.sent
    }

    /// Where the next received bytes go in `scratch`.
    fn end(&self) -> usize {
        self.start + self.received - self.combined
    }

    /// Whether more can be received now: bytes are missing, and `scratch` is not full. `scratch` is full only while
    /// bytes can be sent ([`sends`](Self::sends)).
    pub(super) fn receives(&self) -> bool {
        self.received < self.bytes.len() && self.end() < self.scratch.len()
    }

    /// Number of bytes, from the first, that may be sent before more are received.
    fn may_send(&self) -> usize {
        self.bytes.len().min(self.received + MAX_AHEAD)
    }

    /// Whether more can be sent now, before more are received.
    pub(super) fn sends(&self) -> bool {
        self.sent < self.may_send()
    }

    /// Sends, receives and combines as many bytes as possible now; returns whether any were sent or received.
    pub(super) fn advance(&mut self, channel: &mut Channel) -> io::Result<bool> {
        let len = self.bytes.len();
        let sent_now = channel.write(&self.bytes[self.sent..self.may_send()])?;
        self.sent += sent_now;
        let end = self.end();
        let space = (len - self.received).min(self.scratch.len() - end);
        let received_now = channel.read(&mut self.scratch[end..end + space])?;
        self.received += received_now;
        self.combine();
        Ok(sent_now + received_now > 0)
    }

    fn combine(&mut self) {
        let mut ready = self.sent.min(self.received);
        if ready < self.bytes.len() {
            ready -= ready % BLOCK;
        }
        let count = ready.saturating_sub(self.combined);
        if count > 0 {
            let theirs = &self.scratch[self.start..self.start + count];
            (self.combine)(&mut self.bytes[self.combined..ready], theirs);
            self.combined = ready;
            self.start += count;
        }
        let end = self.end();
        let is_little = end - self.start < BLOCK;
        if self.start > 0 && (is_little || end == self.scratch.len()) {
            self.scratch.copy_within(self.start..end, 0);
            self.start = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::TcpConnection;
    use crate::transport::tcp::TcpChannel;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn both_ends_get_the_sum_also_with_a_slow_end_and_a_small_scratch() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let there = listener.accept().unwrap().0;
        let mut channels = [here, there]
            .map(|end| Channel::Tcp(TcpChannel::new(vec![TcpConnection::plain(end)]).unwrap()));
        let add = |ours: &mut [u8], theirs: &[u8]| {
            assert_eq!(ours.len(), theirs.len());
            for (ours, theirs) in ours.iter_mut().zip(theirs) {
                *ours = ours.wrapping_add(*theirs);
            }
        };
        for (len, space, slow) in [
            (3 * MAX_AHEAD + 5, 2 * BLOCK, 0),
            (3 * MAX_AHEAD + 5, MAX_AHEAD, 1),
            (2 * BLOCK + 1, 2 * BLOCK, 1),
            (7, 7, 0),
        ] {
            let mut ends: [Vec<u8>; 2] = [3usize, 5].map(|step| {
                let bytes = (0..len).map(|index| (index * step / 2) as u8);
                bytes.collect()
            });
            let sum: Vec<u8> = (0..len)
                .map(|index| ends[0][index].wrapping_add(ends[1][index]))
                .collect();
            let mut scratch = [vec![0; space], vec![0; space]];
            let [first, second] = &mut ends;
            let [left, right] = &mut scratch;
            let mut swaps = [
                Swap::new(1, first, 0, left, &add),
                Swap::new(0, second, 0, right, &add),
            ];
            for turn in 0.. {
                let end = if turn % 7 == 0 { slow } else { 1 - slow };
                swaps[end].advance(&mut channels[end]).unwrap();
                if !swaps.iter().any(|swap| swap.receives() || swap.sends()) {
                    break;
                }
                assert!(turn < 10_000_000, "{len} bytes by {space} never end");
            }
            assert!(ends.iter().all(|end| *end == sum), "{len} bytes by {space}");
        }
    }
}
