//! Messages between two ranks of a group: tags, order, and the sending of large messages only when they are
//! expected. Messages use shared memory if the two ranks share it, and sockets otherwise.
//!
//! A message of up to [`EAGER`] bytes is sent at once; if no receive is posted for it yet, the receiver
//! keeps it. A larger message is *offered* first, and sent when the receiver has *cleared* it, so a rank
//! never has to keep a large message that it did not request. A *request* is one send or receive. Only its
//! thread accesses its buffer, and advances the request whenever the channel is free for it. If a request
//! reads something from the channel that belongs to another request (a message to be kept, a clearance), it
//! stores it where the other request finds it.
//!
//! Sends to one peer start in the order in which they were posted. A receive takes the first message of
//! its tag that no receive posted before it may take.
//!
//! | file | holds |
//! |---|---|
//! | `frame` | the header before a message on the wire |
//! | `channel` | one peer's channel, and the assignment of what arrives to requests |
//! | `request` | one send or receive |
//! | `messages` | how requests make progress |
//! | `direct` | one request that meets no other on its channel |
//! | `waiting` | how requests wait, and for which peers |

mod channel;
mod direct;
mod frame;
#[cfg(fuzzing)]
pub(crate) mod fuzz;
mod messages;
mod request;
mod waiting;

pub(super) use messages::P2p;
pub(super) use request::{Request, outcome};
