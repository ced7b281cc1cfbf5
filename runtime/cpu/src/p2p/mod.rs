//! Messages between two ranks of a group: their tags, their order, and the offer before a large message.
//! Messages use shared memory if the two ranks share it, and sockets otherwise.
//!
//! A message of up to [`MAX_EAGER_BYTES`](frame::MAX_EAGER_BYTES) bytes is sent at once; if no receive is posted for it
//! yet, the receiver keeps it. A larger message is *offered* first, and sent when the receiver has accepted the offer
//! (`Clear`). So a rank never has to keep a large message for which no receive is posted. A *request* is one send or
//! receive. Only its thread accesses its buffer, and advances the request whenever the channel is free for it. A thread
//! that reads bytes of another request from the channel (a message to be kept, an answer to an offer) stores them for
//! the other request.
//!
//! Sends to one peer start in the order in which they were posted. A receive takes the first message of its tag that
//! no earlier receive may take.
//!
//! | file | holds |
//! |---|---|
//! | `frame` | the header before a message on the wire |
//! | `channel` | one peer's channel, and the assignment of messages to requests |
//! | `request` | one send or receive |
//! | `messages` | the progress of requests |
//! | `direct` | a single request on a channel without other requests |
//! | `waiting` | the waits of requests, and the peers for which they wait |

mod channel;
mod direct;
mod frame;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod messages;
mod request;
mod waiting;

pub(super) use messages::P2p;
pub(super) use request::{Request, outcome};
