//! One send or receive.

use super::frame::FRAME_BYTES;
use crate::wait::Failure;
use rcomm_recorder::model::DType;

/// One send or receive in progress.
pub(crate) struct Request {
    pub(super) id: u64,
    pub(super) tag: u32,
    pub(super) dtype: DType,
    pub(super) stage: Stage,
    /// The mismatch that ended this request. The other requests of its operation continue; any other failure ends the
    /// whole operation instead.
    pub(super) failure: Option<Failure>,
}

/// How far a request got.
pub(super) enum Stage {
    /// The send is in the queue for its peer.
    SendQueued { peer: usize },
    /// The frame and, unless the frame is an offer, the message are being written; `done` counts the bytes of both that
    /// were written.
    SendWriting {
        peer: usize,
        frame: [u8; FRAME_BYTES],
        done: usize,
        /// Whether the frame is an offer, without the message.
        is_offer: bool,
    },
    /// The message was offered, and the send waits for the answer.
    SendOffered { peer: usize },
    /// The receive waits for a message from this peer, or from any peer if `None`.
    Receive { peer: Option<usize> },
    /// A message is arriving, or its offer was accepted and it will arrive.
    Receiving { peer: usize },
    /// The request is done; `source` is the sender of the message that a receive got.
    Done { source: Option<usize> },
}

/// Returns the result of the operation that consists of these requests: the failure of the first that has one. Takes
/// that failure, so a second call does not return it again. `None` if a request has not ended.
pub(crate) fn outcome(requests: &mut [Request]) -> Option<Result<(), Failure>> {
    let has_ended = |request: &Request| matches!(request.stage, Stage::Done { .. });
    if !requests.iter().all(has_ended) {
        return None;
    }
    let failure = requests
        .iter_mut()
        .find_map(|request| request.failure.take());
    Some(failure.map_or(Ok(()), Err))
}

impl Request {
    pub(super) fn new(id: u64, tag: u32, dtype: DType, stage: Stage) -> Self {
        Self {
            id,
            tag,
            dtype,
            stage,
            failure: None,
        }
    }

    /// If `result` is a mismatch, stores it as this request's failure, ends the request and returns `Ok(true)`: a
    /// message that does not fit ends its own request only. Returns any other result unchanged. The value in `Ok`
    /// states whether anything advanced.
    pub(super) fn keep_mismatch(&mut self, result: Result<bool, Failure>) -> Result<bool, Failure> {
        match result {
            Err(failure @ Failure::Mismatch(..)) => {
                self.failure = Some(failure);
                self.stage = Stage::Done { source: None };
                Ok(true)
            }
            other => other,
        }
    }

    /// The rank of the group that sent the message, once a receive is done; `None` for a send, and for a receive that
    /// ended with a mismatch.
    pub(crate) fn source(&self) -> Option<usize> {
        match self.stage {
            Stage::Done { source } => source,
            _ => None,
        }
    }

    /// The rank of the group for which the request waits; `None` for a receive from any rank, and once the request is
    /// done.
    pub(super) fn peer(&self) -> Option<usize> {
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
