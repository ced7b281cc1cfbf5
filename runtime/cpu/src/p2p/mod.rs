//! Messages between two ranks of a group: tags, order, and large ones only when they are expected. They go
//! through shared memory where all ranks of the group share it, over a socket elsewhere.
//!
//! A message of up to [`EAGER`] bytes is sent at once; if no receive is posted for it yet it is kept. A
//! larger one is *offered* first, and sent when the receiver has *cleared* it, so a rank never has to keep
//! what it did not ask for. A *request* is one send or receive; its thread alone touches its buffer, and
//! moves it on whenever the channel is free for it. Whatever a request meets on the channel that belongs to
//! another (a message to be kept, a clearance) it puts where that one finds it.
//!
//! Sends to one peer start in the order in which they were posted. A receive takes the first message of
//! its tag that no receive posted before it may take.
//!
//! | file | holds |
//! |---|---|
//! | `frame` | the header before a message on the wire |
//! | `channel` | one peer's channel, and the requests that what came on it belongs to |
//! | `request` | one send or receive |
//! | `messages` | how requests move on |
//! | `alone` | one request that meets no other |
//! | `waiting` | how they wait, and for which peers |

mod alone;
mod channel;
mod frame;
#[cfg(fuzzing)]
pub(crate) mod fuzz;
mod messages;
mod request;
mod waiting;

pub(super) use messages::P2p;
pub(super) use request::{Request, outcome};
