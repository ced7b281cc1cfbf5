//! [`Links`]: the state of this rank's connections to the others, recorded while operations wait.
//!
//! The systems at both ends of an idle connection exchange keep-alive packets, whatever their processes do. So packets
//! still arrive from the host of a frozen process, but not from a host that is cut off. While an operation waits longer
//! than [`LONG_WAIT`], and when it fails, all connections are sampled into the ring.

use super::lock;
use crate::transport::Channel;
use crate::transport::health::{SocketHealth, health, last_sign};
use crate::transport::tcp::{Counts, keep_alive};
use rcomm_core::backend::WorldContext;
use rcomm_recorder::model::{LinkEnd, Rank, WaitingOperation};
use rcomm_recorder::record::{FlightRecorder, PeerFacts, PeerHandle, Timestamp};
use rustix::io::Errno;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// A wait that is shorter than this is not recorded. During a longer wait, connections are sampled at most
/// this often.
pub(crate) const LONG_WAIT: Duration = Duration::from_millis(250);

/// The connections of one rank, of all groups.
///
/// # Thread safety
/// Every method may be called from any thread. None blocks on a peer.
pub(crate) struct Links {
    recorder: Option<Arc<FlightRecorder>>,
    /// The interval of keep-alive packets on an idle connection.
    interval: Duration,
    /// How long the system keeps a connection on which the peer acknowledges nothing.
    patience: Duration,
    peers: Mutex<HashMap<Rank, Peer>>,
    /// Time of the recorder at which all connections were last sampled, in nanoseconds; 0 if never.
    sampled: AtomicU64,
}

/// The connections to one peer.
struct Peer {
    /// The peer's row in the ring.
    row: PeerHandle,
    /// How many bytes the connections have carried.
    counts: Arc<Counts>,
    sockets: Vec<Weak<TcpStream>>,
    /// Whether this host's own system has ended one of the connections.
    is_aborted: bool,
}

impl Peer {
    /// Writes an error of the system on a connection into the peer's row.
    ///
    /// The connection may have ended long before this process noticed: the process may have been stopped, or have used
    /// the connection for nothing. So the last sign of life that the system knows of counts, and the time from then to
    /// now is no silence of the peer, unless the error says that the system gave up because nothing came.
    fn record_error(&self, recorder: &FlightRecorder, errno: i32) {
        let now = recorder.now();
        let sockets = self.sockets.iter().filter_map(Weak::upgrade);
        let heard = sockets.filter_map(|socket| last_sign(&socket)).min();
        recorder.update_peer(self.row, |facts| {
            facts.errno = errno.unsigned_abs();
            if let Some(ago) = heard {
                facts.heard = facts.heard.max(before(now, ago));
            }
            let since_heard = now.as_ns().saturating_sub(facts.heard.as_ns());
            // A connection that was never sampled has no interval, and shows no silence.
            let is_recent = since_heard <= 2 * nanoseconds(facts.interval);
            facts.sampled = match is_recent || facts.interval.is_zero() || is_silence(errno) {
                true => now,
                false => facts.sampled.max(facts.heard),
            };
        });
    }
}

impl Links {
    pub(super) fn new(world: &WorldContext) -> Self {
        let timeout = world.config.timeout;
        let interval = (timeout / 6).clamp(Duration::from_secs(1), Duration::from_secs(60));
        Self {
            recorder: world.recorder.clone(),
            interval: Duration::from_secs(interval.as_secs()),
            // Longer than the configured time-out of operations, so that the operation fails first, with an error
            // that names the group and the ranks.
            patience: timeout
                .saturating_mul(2)
                .saturating_add(Duration::from_secs(60)),
            peers: Mutex::default(),
            sampled: AtomicU64::new(0),
        }
    }

    /// Sets the keep-alive times of a new channel to `peer`, and includes its sockets in later samples. Does nothing
    /// for a channel over shared memory.
    pub(crate) fn add(&self, peer: Rank, channel: &mut Channel) {
        let Channel::Tcp(channel) = channel else {
            return;
        };
        for socket in channel.streams() {
            if let Err(error) = keep_alive(socket, self.interval, self.patience) {
                tracing::debug!(%error, peer, "cannot set the keep-alive times of a connection");
            }
        }
        let Some(recorder) = &self.recorder else {
            return;
        };
        let mut peers = lock(&self.peers);
        let Some(peer) = peer_with_row(&mut peers, peer, recorder) else {
            return;
        };
        peer.sockets.retain(|socket| socket.strong_count() > 0);
        peer.sockets
            .extend(channel.streams().iter().map(Arc::downgrade));
        channel.count_in(peer.counts.clone());
    }

    /// Records that an operation has waited for these peers for this long, and samples all connections. Does nothing
    /// if the connections were sampled less than [`LONG_WAIT`] ago.
    pub(crate) fn note_wait(
        &self,
        ranks: &[Rank],
        waited: Duration,
        waiting: Option<WaitingOperation>,
    ) {
        let Some(recorder) = self.recorder.as_deref() else {
            return;
        };
        let now = recorder.now();
        let last = self.sampled.load(Ordering::Relaxed);
        if now.as_ns().saturating_sub(last) < nanoseconds(LONG_WAIT) {
            return;
        }
        self.record_wait(recorder, ranks, before(now, waited), waiting);
        self.sample(recorder, now);
    }

    /// Clears the recorded wait for these peers, since an operation that waited for them has advanced. If it or another
    /// one waits on, [`note_wait`](Self::note_wait) records that again.
    pub(crate) fn end_wait(&self, ranks: &[Rank]) {
        if let Some(recorder) = self.recorder.as_deref() {
            self.record_wait(recorder, ranks, Timestamp::default(), None);
        }
    }

    /// Whether a noted error shows that this host's own system has ended a connection to this peer. Returns `false` if
    /// this rank has no recorder: errors are then not noted.
    pub(crate) fn is_aborted(&self, rank: Rank) -> bool {
        lock(&self.peers)
            .get(&rank)
            .is_some_and(|peer| peer.is_aborted)
    }

    /// Records an error of the system on a connection to this peer.
    pub(crate) fn note_error(&self, rank: Rank, error: &std::io::Error) {
        let (Some(recorder), Some(errno)) = (self.recorder.as_deref(), error.raw_os_error()) else {
            return;
        };
        if let Some(peer) = lock(&self.peers).get_mut(&rank) {
            peer.is_aborted |= is_abort(error);
            peer.record_error(recorder, errno);
        }
    }

    /// Samples all connections now, since an operation has failed, and records for each peer the first error
    /// that is pending on its sockets.
    pub(crate) fn sample_now(&self) {
        let Some(recorder) = self.recorder.as_deref() else {
            return;
        };
        let now = recorder.now();
        self.sample(recorder, now);
        for peer in lock(&self.peers).values_mut() {
            let mut sockets = peer.sockets.iter().filter_map(Weak::upgrade);
            let error = sockets.find_map(|socket| socket.take_error().ok()?);
            // The system reports an error only once, so a later read of the socket sees only its end.
            peer.is_aborted |= error.as_ref().is_some_and(is_abort);
            if let Some(errno) = error.and_then(|error| error.raw_os_error()) {
                peer.record_error(recorder, errno);
            }
        }
    }

    /// Writes into the peers' rows since when, and in which operation, this rank waits for them.
    fn record_wait(
        &self,
        recorder: &FlightRecorder,
        ranks: &[Rank],
        since: Timestamp,
        waiting: Option<WaitingOperation>,
    ) {
        let mut peers = lock(&self.peers);
        for &rank in ranks {
            // A peer that shares memory with this rank has no connection; it gets a row at the first long wait for it.
            let Some(peer) = peer_with_row(&mut peers, rank, recorder) else {
                continue;
            };
            recorder.update_peer(peer.row, |facts| {
                (facts.waited_since, facts.waiting) = (since, waiting);
            });
        }
    }

    /// Writes the state of every open connection into its peer's row.
    fn sample(&self, recorder: &FlightRecorder, now: Timestamp) {
        self.sampled.store(now.as_ns(), Ordering::Relaxed);
        for peer in lock(&self.peers).values() {
            let sockets = peer.sockets.iter().filter_map(Weak::upgrade);
            // A closed socket is skipped; without an open socket, the last sample remains.
            let open: Vec<SocketHealth> = sockets.filter_map(|socket| health(&socket)).collect();
            let Some(silent_for) = open.iter().map(|socket| socket.silent_for).min() else {
                continue;
            };
            let sample = |facts: &mut PeerFacts| {
                facts.heard = facts.heard.max(before(now, silent_for));
                facts.sampled = now;
                facts.interval = self.interval;
                facts.unacknowledged = open.iter().map(|socket| socket.unacknowledged).sum();
                (facts.received, facts.sent) = peer.counts.bytes();
            };
            recorder.update_peer(peer.row, sample);
        }
    }
}

/// The connections to a peer, for which a row of the ring is reserved at the first call; `None` if no row is left.
fn peer_with_row<'a>(
    peers: &'a mut HashMap<Rank, Peer>,
    rank: Rank,
    recorder: &FlightRecorder,
) -> Option<&'a mut Peer> {
    match peers.entry(rank) {
        Entry::Occupied(known) => Some(known.into_mut()),
        Entry::Vacant(vacant) => Some(vacant.insert(Peer {
            row: recorder.peer(LinkEnd::Rank(rank))?,
            counts: Arc::default(),
            sockets: Vec::new(),
            is_aborted: false,
        })),
    }
}

/// Whether this host's own system ended the connection: a reset or an end by the peer is reported otherwise.
pub(crate) fn is_abort(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(Errno::CONNABORTED.raw_os_error())
}

/// Whether the error says that the system gave up a connection because nothing came from the other end.
fn is_silence(errno: i32) -> bool {
    let gave_up = [Errno::TIMEDOUT, Errno::HOSTUNREACH, Errno::NETUNREACH];
    gave_up.iter().any(|error| error.raw_os_error() == errno)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The time that lies `ago` before `now`.
fn before(now: Timestamp, ago: Duration) -> Timestamp {
    // 0 would mean "never".
    Timestamp::from_ns(now.as_ns().saturating_sub(nanoseconds(ago)).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::PeerLink;
    use rcomm_recorder::record::{Placement, RecorderConfig};
    use rustix::net::sockopt::set_socket_linger;
    use std::io::Read;
    use std::net::TcpListener;

    /// Links with one connection to rank 1, heard and sampled for the last time this long ago; and its other end.
    fn heard_and_sampled(ago: Duration) -> (Links, Arc<TcpStream>, TcpStream) {
        let config = RecorderConfig {
            placement: Placement::Memory,
            ..RecorderConfig::new("job", 0, 2)
        };
        let recorder = Arc::new(FlightRecorder::create(&config).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, (far, _)) = (Arc::new(near), listener.accept().unwrap());
        let mut peers = HashMap::new();
        let peer = peer_with_row(&mut peers, 1, &recorder).unwrap();
        peer.sockets.push(Arc::downgrade(&near));
        recorder.update_peer(peer.row, |facts| {
            let then = before(recorder.now(), ago);
            (facts.heard, facts.sampled) = (then, then);
            facts.interval = Duration::from_secs(1);
        });
        let links = Links {
            recorder: Some(recorder),
            interval: Duration::from_secs(1),
            patience: Duration::from_secs(60),
            peers: Mutex::new(peers),
            sampled: AtomicU64::new(0),
        };
        (links, near, far)
    }

    fn recorded(links: &Links) -> PeerLink {
        links.recorder.as_ref().unwrap().snapshot().peers.remove(0)
    }

    fn reset(near: &TcpStream, far: TcpStream) -> std::io::Error {
        set_socket_linger(&far, Some(Duration::ZERO)).unwrap();
        drop(far);
        (&*near).read(&mut [0]).unwrap_err()
    }

    #[test]
    fn a_connection_that_breaks_after_a_long_time_without_a_sample_was_not_silent() {
        let (links, near, far) = heard_and_sampled(Duration::from_secs(10));
        let before_reset = recorded(&links).heard_ns;
        links.note_error(1, &reset(&near, far));
        let link = recorded(&links);
        assert_eq!(link.errno, Errno::CONNRESET.raw_os_error().unsigned_abs());
        assert!(!link.is_silent(), "{link:?}");
        // The system knows of the packets since the last sample.
        assert!(link.heard_ns > before_reset, "{link:?}");
    }

    #[test]
    fn an_error_that_is_noticed_late_makes_no_silence() {
        let (links, near, far) = heard_and_sampled(Duration::from_secs(10));
        let error = reset(&near, far);
        // The connection is closed, and what the system knew of it is gone.
        drop(near);
        links.note_error(1, &error);
        let link = recorded(&links);
        assert!(link.errno != 0 && !link.is_silent(), "{link:?}");
    }

    #[test]
    fn a_connection_that_the_system_gave_up_was_silent() {
        let (links, near, _far) = heard_and_sampled(Duration::from_secs(10));
        drop(near);
        links.note_error(1, &Errno::TIMEDOUT.into());
        assert!(recorded(&links).is_silent());
    }

    #[test]
    fn an_error_does_not_end_a_silence_that_was_sampled() {
        let (links, near, far) = heard_and_sampled(Duration::from_secs(10));
        let error = reset(&near, far);
        drop(near);
        let recorder = links.recorder.as_ref().unwrap();
        let row = lock(&links.peers)[&1].row;
        recorder.update_peer(row, |facts| {
            facts.sampled = before(recorder.now(), Duration::from_secs(5))
        });
        assert!(recorded(&links).is_silent());
        links.note_error(1, &error);
        assert!(recorded(&links).is_silent());
    }
}
