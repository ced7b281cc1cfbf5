//! The waits of requests, and the peers for which they wait.

use super::channel::Incoming;
use super::messages::{P2p, lock};
use super::request::{Request, Stage};
use crate::transport::shm::Waits;
use crate::transport::{self, Channel, Interest};
use crate::wait::{Failure, WaitPolicy};
use rcomm_recorder::model::Rank;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// How long requests wait before they check whether peers without an open channel are still alive.
const LIVENESS_CHECK: Duration = Duration::from_millis(50);

impl P2p {
    /// Returns the ranks for which these requests wait, in order. A receive from any rank adds none.
    pub(crate) fn missing(&self, requests: &[Request]) -> Vec<Rank> {
        let mut missing: Vec<Rank> = requests
            .iter()
            .filter_map(|request| request.peer())
            .map(|peer| self.ranks[peer])
            .collect();
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// Whether a peer for which these requests wait was last seen on the processor on which this thread runs.
    pub(super) fn is_beside(&self, requests: &[Request]) -> bool {
        let peers = requests.iter().filter_map(Request::peer);
        let views = peers.filter_map(|peer| self.views[peer].get());
        // Each view is asked, since each peer is to see where this thread runs.
        views.fold(false, |found, view| view.is_beside() | found)
    }

    /// Fails with `Failure::Gone` if a peer that has not connected is gone. A receive from any rank checks none. Does
    /// nothing in a wait shorter than [`LIVENESS_CHECK`].
    pub(super) fn check_peers(
        &self,
        requests: &[Request],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        if policy.idle() < LIVENESS_CHECK {
            return Ok(());
        }
        self.check_peers_now(requests, policy)
    }

    /// Works like `check_peers`, however short the wait has been.
    pub(crate) fn check_peers_now(
        &self,
        requests: &[Request],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        for request in requests {
            let Some(index) = request.peer() else {
                continue;
            };
            if lock(&self.peers[index]).channel.is_some()
                || !self.mesh.is_gone(self.ranks[index], policy)?
            {
                continue;
            }
            // A channel that the peer has opened before it ended is valid, with all bytes that the peer has sent.
            let mut peer = lock(&self.peers[index]);
            if !self.open(index, &mut peer, policy)? {
                return Err(Failure::Gone(self.ranks[index], None));
            }
        }
        Ok(())
    }

    /// Sleeps until one of these requests may advance, `doorbell` is written to, or `time` has passed. If no socket
    /// shows when one of the requests may advance, sleeps for at most a millisecond.
    pub(crate) fn sleep<'r>(
        &self,
        requests: impl Iterator<Item = &'r Request>,
        doorbell: Option<&OwnedFd>,
        time: Duration,
    ) -> Result<(), Failure> {
        let mut sockets = Vec::new();
        let mut shortest = time;
        for request in requests {
            let peers = match (&request.stage, request.peer()) {
                (Stage::Done { .. }, _) => continue,
                (_, Some(peer)) => peer..peer + 1,
                (_, None) => 0..self.peers.len(),
            };
            for index in peers {
                if self.ranks[index] == self.mesh.rank() {
                    continue;
                }
                let mut peer = lock(&self.peers[index]);
                let peer = &mut *peer;
                let Some(channel) = &mut peer.channel else {
                    // There is no socket on which to wait for the peer to connect.
                    shortest = shortest.min(Duration::from_millis(1));
                    continue;
                };
                let is_of_another = matches!(
                    &peer.incoming,
                    Incoming::Message { receive, .. } if *receive != request.id
                );
                let is_queued = matches!(request.stage, Stage::SendQueued { .. });
                if is_of_another || is_queued {
                    // Another thread must go first, and no socket shows when it has.
                    shortest = shortest.min(Duration::from_micros(500));
                }
                let is_writing = matches!(request.stage, Stage::SendWriting { .. });
                let waits = Waits {
                    to_read: !is_of_another,
                    to_write: is_writing || !peer.replies.is_empty(),
                };
                if let Channel::Shm(stream) = channel {
                    // The doorbell, the only socket of a stream in memory, signals both bytes to read and space to
                    // write.
                    if stream.prepare_sleep(waits).map_err(Failure::Io)? {
                        return Ok(());
                    }
                    sockets.push((stream.socket().clone(), Interest::Read));
                    continue;
                }
                let Channel::Tcp(channel) = channel else {
                    continue;
                };
                for (is_wanted, interest) in [
                    (waits.to_read, Interest::Read),
                    (waits.to_write, Interest::Write),
                ] {
                    if is_wanted {
                        sockets.push((channel.stream(interest).clone(), interest));
                    }
                }
            }
        }
        let sockets = sockets
            .iter()
            .map(|(stream, interest)| (&**stream, *interest));
        transport::tcp::poll(sockets, doorbell, shortest).map_err(Failure::Io)
    }
}
