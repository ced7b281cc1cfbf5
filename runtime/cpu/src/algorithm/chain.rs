//! Broadcast along a chain: each rank passes on what it has received so far while more comes.
//!
//! The chain starts at the root and follows the ranks. Every rank sends the data once, and all lanes
//! of the chain are busy at the same time.

use crate::collective::{Data, Place};
use crate::lanes::{Lanes, Transfer};
use crate::wait::{Failure, WaitPolicy};

pub(super) fn broadcast(
    lanes: &mut Lanes,
    place: Place,
    data: Data<'_>,
    root: usize,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let Place { rank, size, .. } = place;
    let next = (rank + 1) % size;
    let next = (next != root).then_some(next);
    let transfer = match data {
        Data::Read(bytes) => match next {
            Some(next) => Transfer::send(next, bytes),
            None => return Ok(()),
        },
        Data::Write(bytes) => Transfer::relay((rank + size - 1) % size, next, bytes),
    };
    lanes.drive(&mut [transfer], policy)
}
