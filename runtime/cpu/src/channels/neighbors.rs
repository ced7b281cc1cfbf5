//! Channels of a group some of whose ranks share memory with this rank: streams in that memory to those ranks, sockets
//! to the others.

use crate::mesh::Mesh;
use crate::transport::shm::Streams;
use crate::transport::tcp::TcpChannel;
use crate::transport::{Channel, TcpConnection};
use std::io;

/// The ranks of a group that share memory with this rank; none by default.
#[derive(Default)]
pub(crate) struct Neighbors {
    /// The streams, and for each rank of the group its index among the ranks that share memory, if it is one of them.
    shared: Option<(Streams, Vec<Option<usize>>)>,
}

impl Neighbors {
    /// Makes the neighbors of a group of `size` ranks: `ranks`, in the order of their places in `streams`.
    pub(crate) fn new(streams: Streams, ranks: &[usize], size: usize) -> Self {
        let mut places = vec![None; size];
        for (place, &rank) in ranks.iter().enumerate() {
            places[rank] = Some(place);
        }
        Self {
            shared: Some((streams, places)),
        }
    }

    /// The streams, and the place of `peer` among the ranks that have one; `None` if `peer` shares no memory with this
    /// rank.
    #[inline]
    pub(crate) fn place_of(&self, peer: usize) -> Option<(&Streams, usize)> {
        let (streams, places) = self.shared.as_ref()?;
        Some((streams, places[peer]?))
    }

    /// Number of sockets of the channel to `peer`. A channel through memory needs one as its doorbell, by which the
    /// two ranks wake each other.
    pub(crate) fn streams(&self, peer: usize, mesh: &Mesh) -> usize {
        match self.place_of(peer) {
            Some(_) => 1,
            None => mesh.tuning().streams(),
        }
    }

    /// Makes the channel to `peer` over these sockets.
    pub(crate) fn channel(
        &self,
        peer: usize,
        mut sockets: Vec<TcpConnection>,
    ) -> io::Result<Channel> {
        match (self.place_of(peer), sockets.pop()) {
            // A doorbell carries no data, so it needs no TLS after the handshake.
            (Some((streams, place)), Some(doorbell)) => {
                streams.open(place, doorbell.socket).map(Channel::Shm)
            }
            (_, last) => {
                sockets.extend(last);
                TcpChannel::new(sockets).map(Channel::Tcp)
            }
        }
    }
}
