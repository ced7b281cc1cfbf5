//! Lanes of a group some of whose ranks share memory: streams in that memory to them, sockets to others.

use super::transport::Lane;
use super::transport::shm::Streams;
use super::transport::tcp::TcpLane;
use std::io;
use std::net::TcpStream;

/// Whom of a group this rank shares memory with. By default nobody.
#[derive(Default)]
pub(super) struct Neighbours {
    /// The streams, and for each rank of the group its place among those that have one.
    shared: Option<(Streams, Vec<Option<usize>>)>,
}

impl Neighbours {
    /// `ranks` of a group of `size` have these streams between them, in this order.
    pub(super) fn new(streams: Streams, ranks: &[usize], size: usize) -> Self {
        let mut places = vec![None; size];
        for (place, &rank) in ranks.iter().enumerate() {
            places[rank] = Some(place);
        }
        Self {
            shared: Some((streams, places)),
        }
    }

    /// The lane to `peer`, which has the other end of `socket`.
    pub(super) fn lane(&self, peer: usize, socket: TcpStream) -> io::Result<Lane> {
        let shared = self.shared.as_ref();
        match shared.and_then(|(streams, places)| Some((streams, places[peer]?))) {
            Some((streams, place)) => streams.open(place, socket).map(Lane::Shm),
            None => TcpLane::new(socket).map(Lane::Tcp),
        }
    }
}
