//! Windows by message, for ranks that cannot map a member's memory in the window, its *part*: the requests, and the
//! thread that answers them.
//!
//! A request begins with a head, a message that any member may send to the thread. The bytes of a put follow the
//! head, and the bytes of a get are sent back. Heads, bytes of puts and bytes of gets have different tags. A request
//! is for at most [`PIECE`] bytes, which limits the thread's memory; longer accesses are several requests. The thread
//! handles requests in the order in which they arrive, so the requests of one sender are carried out in the order in
//! which they were made. The thread ends when every other member has announced that it makes no more requests, when a
//! request fails, or when the window is aborted or dropped.

use super::WindowState;
use rcomm_core::Buffer;
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::RemoteMemory;
use rcomm_core::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

const HEAD_TAG: u32 = 1;
const PUT_TAG: u32 = 2;
const GET_TAG: u32 = 3;
/// Bytes of a head: kind, offset and length.
const HEAD: usize = 24;
/// The largest number of bytes of one request.
const PIECE: usize = 4 << 20;

/// A request to the service of a part; `End` announces that its sender makes no more requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WindowRequest {
    Put { offset: usize, len: usize },
    Get { offset: usize, len: usize },
    Signal,
    End,
}

impl WindowRequest {
    fn encode(self) -> [u8; HEAD] {
        let (kind, offset, len) = match self {
            Self::Put { offset, len } => (1u64, offset, len),
            Self::Get { offset, len } => (2, offset, len),
            Self::Signal => (3, 0, 0),
            Self::End => (4, 0, 0),
        };
        let mut bytes = [0; HEAD];
        for (index, word) in [kind, offset as u64, len as u64].into_iter().enumerate() {
            bytes[index * 8..(index + 1) * 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes a request for a part of `size` bytes; `None` if the bytes are not a request, or if the request reaches
    /// beyond the part or exceeds [`PIECE`].
    fn decode(bytes: &[u8; HEAD], size: usize) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let [kind, offset, len] = [0, 1, 2].map(|index| u64::from_le_bytes(words[index]));
        let offset = usize::try_from(offset).ok()?;
        let len = usize::try_from(len).ok()?;
        let is_inside = len <= PIECE && offset.checked_add(len)? <= size;
        match kind {
            1 if is_inside => Some(Self::Put { offset, len }),
            2 if is_inside => Some(Self::Get { offset, len }),
            3 => Some(Self::Signal),
            4 => Some(Self::End),
            _ => None,
        }
    }
}

/// Decodes `bytes` as a request for a part of some size, and checks that the request stays inside the part.
#[cfg(any(test, fuzzing))]
pub(super) fn read_any_bytes(bytes: &[u8]) {
    let size = bytes.len() << 10;
    if let Some(head) = bytes.first_chunk() {
        match WindowRequest::decode(head, size) {
            Some(WindowRequest::Put { offset, len } | WindowRequest::Get { offset, len }) => {
                assert!(len <= PIECE && offset + len <= size);
            }
            Some(WindowRequest::Signal | WindowRequest::End) | None => {}
        }
    }
}

/// Sends a message to a member.
fn send(shared: &WindowState, peer: u32, tag: u32, bytes: &[u8], deadline: Deadline) -> Result<()> {
    let buffer = Buffer::from_slice(bytes);
    shared.run(&mut Op::Send { buffer, peer, tag }, 0, deadline)?;
    Ok(())
}

/// Receives a message from `peer`, or from any member if `None`; returns the member that sent it.
fn receive(
    shared: &WindowState,
    peer: Option<u32>,
    tag: u32,
    bytes: &mut [u8],
    deadline: Deadline,
) -> Result<Option<u32>> {
    let buffer = Buffer::from_mut(bytes);
    let done = shared.run(&mut Op::Recv { buffer, peer, tag }, 0, deadline)?;
    Ok(done.source)
}

/// Sends bytes to a peer's service, which writes them into the peer's part. Returns once they are sent, which may be
/// before they are written.
pub(super) fn send_put(
    shared: &WindowState,
    peer: u32,
    offset: usize,
    bytes: &[u8],
    deadline: Deadline,
) -> Result<()> {
    for (index, piece) in bytes.chunks(PIECE).enumerate() {
        let request = WindowRequest::Put {
            offset: offset + index * PIECE,
            len: piece.len(),
        };
        send(shared, peer, HEAD_TAG, &request.encode(), deadline)?;
        send(shared, peer, PUT_TAG, piece, deadline)?;
    }
    Ok(())
}

/// Gets bytes of a peer's part from its service.
pub(super) fn fetch(
    shared: &WindowState,
    peer: u32,
    offset: usize,
    into: &mut [u8],
    deadline: Deadline,
) -> Result<()> {
    for (index, piece) in into.chunks_mut(PIECE).enumerate() {
        let request = WindowRequest::Get {
            offset: offset + index * PIECE,
            len: piece.len(),
        };
        send(shared, peer, HEAD_TAG, &request.encode(), deadline)?;
        receive(shared, Some(peer), GET_TAG, piece, deadline)?;
    }
    Ok(())
}

/// Sends a signal, which the peer's service counts after it has carried out this rank's earlier requests.
pub(super) fn send_signal(shared: &WindowState, peer: u32, deadline: Deadline) -> Result<()> {
    send(
        shared,
        peer,
        HEAD_TAG,
        &WindowRequest::Signal.encode(),
        deadline,
    )
}

/// Announces that this rank sends no more requests.
pub(super) fn send_end(shared: &WindowState, peer: u32, deadline: Deadline) -> Result<()> {
    send(
        shared,
        peer,
        HEAD_TAG,
        &WindowRequest::End.encode(),
        deadline,
    )
}

/// The thread that answers the other members' requests.
pub(super) struct Service {
    shared: Arc<WindowState>,
    /// This rank's part.
    part: RemoteMemory,
    /// Number of other members that have not announced that they make no more requests.
    remaining: usize,
    /// Holds the bytes of one request at a time.
    piece: Vec<u8>,
}

impl Service {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Io` if the system cannot start a thread.
    pub(super) fn start(
        shared: Arc<WindowState>,
        part: RemoteMemory,
        name: &str,
    ) -> Result<JoinHandle<()>> {
        let remaining = shared.ranks.len() - 1;
        let service = Self {
            shared,
            part,
            remaining,
            piece: Vec::new(),
        };
        std::thread::Builder::new()
            .name(format!("rcomm/win/{name}"))
            .spawn(move || service.work())
            .map_err(|error| Error::io("cannot start the thread of a window", error))
    }

    /// Answers requests until every other member has announced its end, or a request fails. Such a failure stops the
    /// window.
    fn work(mut self) {
        while self.remaining > 0 {
            if let Err(error) = self.answer() {
                if !self.shared.stop.is_raised() {
                    tracing::warn!(%error, "the thread of a window stopped");
                    self.shared.stop.raise(error);
                }
                return;
            }
        }
    }

    /// Waits for the next request, and carries it out.
    fn answer(&mut self) -> Result<()> {
        let shared = &self.shared;
        let no_deadline = Deadline::In(Duration::MAX);
        let mut head = [0; HEAD];
        let source = receive(shared, None, HEAD_TAG, &mut head, no_deadline)?;
        let peer = source.ok_or_else(|| {
            Error::new(ErrorKind::Backend, "a request for a window has no sender")
        })?;
        let rank = shared.ranks[peer as usize];
        let request = WindowRequest::decode(&head, self.part.len()).ok_or_else(|| {
            let message = format!("rank {rank} sent an invalid request for this rank's window");
            Error::new(ErrorKind::Backend, message).with_rank(rank)
        })?;
        match request {
            WindowRequest::Put { offset, len } => {
                self.piece.resize(len, 0);
                receive(shared, Some(peer), PUT_TAG, &mut self.piece, no_deadline)?;
                self.part.write(offset, &self.piece)
            }
            WindowRequest::Get { offset, len } => {
                self.piece.resize(len, 0);
                self.part.read(offset, &mut self.piece)?;
                send(shared, peer, GET_TAG, &self.piece, no_deadline)
            }
            WindowRequest::Signal => shared.count_signal(&shared.counters, peer as usize),
            WindowRequest::End => {
                self.remaining -= 1;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_to_none_or_to_a_request_inside_the_part(bytes: [u8; HEAD], size in 0usize..1 << 23) {
            match WindowRequest::decode(&bytes, size) {
                Some(WindowRequest::Put { offset, len } | WindowRequest::Get { offset, len }) => {
                    prop_assert!(len <= PIECE && offset + len <= size);
                }
                Some(WindowRequest::Signal | WindowRequest::End) | None => {}
            }
        }

        #[test]
        fn a_request_is_decoded_as_it_was_encoded(offset in 0usize..1000, len in 0usize..1000) {
            for request in [WindowRequest::Put { offset, len }, WindowRequest::Get { offset, len }] {
                prop_assert_eq!(WindowRequest::decode(&request.encode(), 2000), Some(request));
            }
        }
    }
}
