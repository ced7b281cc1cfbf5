//! Sends messages of more than 2 GiB. The test needs 9 GB of memory, so it runs only on request: `cargo test --release
//! -p rcomm-tests --test long -- --ignored`.
#![allow(clippy::unwrap_used)]

use rcomm::ReduceOp;
use rcomm::config::TransportChoice;
use rcomm_tests::world::{Carrier, on_threads};
use std::time::Duration;

/// The bytes of a message: a few more than a signed 32-bit number can express.
const LEN: usize = (1 << 31) + 4099;

/// A message of zeros with the rank's mark in some places.
fn marked(rank: u32) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    for at in [0, 1 << 20, (1 << 31) - 1, 1 << 31, LEN - 1] {
        bytes[at] = rank as u8 + 1;
    }
    bytes
}

/// The bytes in these places, and one in a place without a mark.
fn marks(bytes: &[u8]) -> [u8; 6] {
    [0, 1 << 20, (1 << 31) - 1, 1 << 31, LEN - 1, LEN / 3].map(|at| bytes[at])
}

#[test]
#[ignore = "needs 9 GB of memory"]
fn messages_beyond_two_gibibytes_arrive() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let change = |config: &mut rcomm::Config| {
            config.transport = transport;
            config.timeout = Duration::from_secs(600);
        };
        on_threads(2, &Carrier::Cpu, change, |world| {
            let (group, rank) = (world.group(), world.rank());
            let mut bytes = marked(rank);
            group.all_reduce(&mut bytes, ReduceOp::Max).unwrap();
            assert_eq!(marks(&bytes), [2, 2, 2, 2, 2, 0]);
            if rank == 0 {
                bytes[LEN - 1] = 77;
                group.send(&bytes, 1, 0).unwrap();
            } else {
                group.recv(&mut bytes, 0, 0).unwrap();
                assert_eq!(marks(&bytes), [2, 2, 2, 2, 77, 0]);
            }
            world.shutdown().unwrap();
        });
    }
}
