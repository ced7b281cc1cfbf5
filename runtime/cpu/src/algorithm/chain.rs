//! Broadcast along a chain: each rank forwards received bytes while more arrive.
//!
//! The chain starts at the root and follows the ranks. Every rank but the last sends the data once, and all
//! channels of the chain are busy at the same time.

use crate::channels::{Channels, Transfer};
use crate::collective::{Data, Position};
use crate::wait::{Failure, WaitPolicy};

pub(super) fn broadcast(
    channels: &mut Channels,
    position: Position,
    data: Data<'_>,
    root: usize,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let Position { rank, size, .. } = position;
    let next = (rank + 1) % size;
    let next = (next != root).then_some(next);
    let transfer = match data {
        Data::Read(bytes) => match next {
            Some(next) => Transfer::send(next, bytes),
            None => return Ok(()),
        },
        Data::Write(bytes) => Transfer::relay((rank + size - 1) % size, next, bytes),
    };
    channels.drive(&mut [transfer], policy)
}
