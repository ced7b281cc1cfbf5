//! Which ranks are on this host, and how they get access to shared memory.
//!
//! Ranks are neighbors if they run under one kernel, in one network and process namespace, as one user, and have the
//! same [`Config::host_id`](rcomm_core::Config), if any. These properties together are their host's *name*. Each of
//! them listens on a unix socket and tries to write its rank and the socket's name under `cpu/host/<name>` in the
//! store. The first makes the segment. The others close their sockets and open the segment's file
//! ([`shortcut`](super::shortcut)). A rank that cannot open the file requests it at the first rank's socket, with the
//! same handshake as on any connection ([`handshake`](crate::mesh::handshake)). Every rank then publishes a [`Note`]
//! under `cpu/host_of/<rank>` with its host's name, or with `-` if it shares no memory, so that the others know with
//! which ranks it shares memory.

use super::fill_random;
use super::handshake::{ANSWER_LEN, ChannelKind, Decision, End, Handshake, Identity};
use super::layout::Layout;
use super::shortage::{Shortage, is_shortage};
use super::shortcut;
use crate::transport::fd_passing;
use crate::transport::shm::{Segment, ShmExchange, ShmExchangeError};
use crate::wait::processors::{self, Processors, own_processors, wait_mode_of};
use crate::wait::{Failure, Interrupted, WaitMode, WaitPolicy};
use rcomm_core::Deadline;
use rcomm_core::backend::{Agreement, WorldContext};
use rcomm_core::config::TransportChoice;
use rcomm_core::store::{Store, StoreQuery};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::{Rank, text};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The longest time-out of each read and write in the handshake with the rank that made the segment.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// The shortest time-out of a read or write, which a rank uses even if its deadline has passed.
const SHORTEST_TIME: Duration = Duration::from_millis(1);
/// How long to wait for ranks to enter the shared memory before looking for their notes in the store.
const ENTERING_TIME: Duration = Duration::from_millis(100);
/// How long before the deadline a rank checks which ranks have not published their host; also how long the store may
/// take to answer the check at the deadline.
const LOOK_TIME: Duration = Duration::from_millis(200);
/// How long the store may take in any case to tell which ranks have not published their host. On a busy host, the wait
/// for their notes may end only after the deadline, and an error must name them.
const NAMING_TIME: Duration = Duration::from_secs(1);
/// How often a rank that waits for others checks whether it can accept their connections.
const SHORTAGE_CHECK: Duration = Duration::from_millis(20);
/// How long after the time-out of a request the store may take to answer. The store over TCP gives up before, with an
/// error that names its server.
const STORE_GRACE: Duration = Duration::from_secs(3);
/// At most this many ranks that have not published their host are named.
const MAX_NAMED: usize = 8;
/// The host's name in the note of a rank that shares no memory.
const NONE: &str = "-";
/// Separates the parts of a host's name. The first part identifies the machine.
const SEPARATOR: char = ':';

/// What this rank has learned about its host.
pub(crate) struct Host {
    /// The host's name; [`NONE`] if this rank shares no memory.
    name: String,
    /// The note that the other ranks read: the name, and where this rank runs.
    note: Note,
    /// Number of ranks of this machine according to the launcher; the world's size if the launcher gave no number.
    local_ranks: usize,
    /// Whether it was reported that ranks of this machine cannot share memory; also set if no report is wanted.
    is_separation_reported: AtomicBool,
    /// The notes of other ranks that were read from the store.
    notes: Mutex<HashMap<Rank, Note>>,
    /// The memory that the ranks of this host share; `None` if this rank shares none.
    segment: Option<Arc<Segment>>,
    /// Whether all ranks are on one host, according to the launcher.
    is_single_host: bool,
    store: Arc<dyn Store>,
    /// Whether this rank can accept its callers.
    shortage: Arc<Shortage>,
}

/// What a rank publishes about its host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Note {
    /// The host's name; [`NONE`] if the rank shares no memory.
    name: String,
    /// The machine, and the processors on which the rank may run; `None` if the kernel's boot id cannot be
    /// read.
    machine: Option<(String, Processors)>,
}

impl Note {
    fn write(&self) -> String {
        match &self.machine {
            Some((machine, set)) => {
                format!("{} {machine} {}", self.name, processors::format(set))
            }
            None => self.name.clone(),
        }
    }

    fn read(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut words = text.split(' ');
        let name = words.next().unwrap_or(NONE).to_owned();
        let machine = words.next().zip(words.next().and_then(processors::parse));
        Self {
            name,
            machine: machine.map(|(machine, set)| (machine.to_owned(), set)),
        }
    }
}

/// The listener and the segment, on the rank that made the segment; `None` on the others.
type SegmentServer = Option<(UnixListener, Arc<Segment>)>;

impl Host {
    /// Makes the segment of this host, or gets it from the rank that made it, if the world's transport allows shared
    /// memory.
    ///
    /// # Errors
    /// `Store` if the store fails or has an invalid entry. Any other error, mostly `Io`, is returned only if the
    /// configuration requires shared memory; otherwise it is logged, and this rank uses sockets.
    pub(super) fn enter(
        world: &WorldContext,
        identity: &Identity,
        shortage: Arc<Shortage>,
    ) -> Result<(Self, SegmentServer)> {
        let boot = boot_id();
        let machine = boot.as_ref().ok();
        let machine = machine.map(|boot| (boot.clone(), own_processors()));
        let local_ranks = world.local_world_size.unwrap_or(world.world_size);
        let mut host = Self {
            name: NONE.into(),
            note: Note {
                name: NONE.into(),
                machine,
            },
            local_ranks: local_ranks as usize,
            // A configuration with host ids separates ranks on purpose, so no report is wanted.
            is_separation_reported: AtomicBool::new(world.config.host_id.is_some()),
            notes: Mutex::default(),
            segment: None,
            is_single_host: world.local_world_size == Some(world.world_size),
            store: world.store.clone(),
            shortage,
        };
        let mut segment_server = None;
        if world.config.transport != TransportChoice::Tcp {
            match host.share(world, identity, boot) {
                Ok(server) => segment_server = server,
                Err(error) if error.kind() == ErrorKind::Store => return Err(error),
                Err(error) if world.config.transport == TransportChoice::Shm => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "this rank uses sockets: it shares no memory on its host");
                    host.name = NONE.into();
                }
            }
        }
        host.note.name.clone_from(&host.name);
        Ok((host, segment_server))
    }

    /// The key and the value that this rank publishes in the store for the others.
    pub(crate) fn note(&self, rank: Rank) -> (String, String) {
        (host_key(rank), self.note.write())
    }

    /// Makes the segment, or gets it from the rank that made it. Sets `name` and `segment`.
    fn share(
        &mut self,
        world: &WorldContext,
        identity: &Identity,
        boot: io::Result<String>,
    ) -> Result<SegmentServer> {
        let id = world.config.host_id.as_deref();
        let name = boot.and_then(|boot| name(&boot, id));
        self.name = name.map_err(|error| Error::io("cannot tell this host from others", error))?;
        let maker_key = format!("cpu/host/{}", self.name);
        let sharing_error =
            |error| Error::io("cannot share memory with the ranks of this host", error);
        // Every rank listens before it writes to the store, so that the others can connect at once to the rank that
        // wrote first.
        let file = Segment::file_for_new().map_err(sharing_error)?;
        let (socket, listener) = listen(&file).map_err(sharing_error)?;
        let own_entry = format!("{} {socket}", world.rank);
        let stored = {
            let (key, entry) = (maker_key.clone(), own_entry.clone());
            let limit = world.deadline.remaining();
            let limit = limit.saturating_add(world.config.status_wait);
            StoreQuery::within(&self.store, limit, move |store| {
                store.compare_set(&key, b"", entry.as_bytes())
            })?
        };
        if stored == own_entry.as_bytes() {
            // If the segment cannot be made, this rank stops listening, and so the others share no memory either.
            let segment = shortcut::create(file, identity);
            let segment = Arc::new(segment.map_err(sharing_error)?);
            self.segment = Some(segment.clone());
            return Ok(Some((listener, segment)));
        }
        drop((file, listener));
        let stored = String::from_utf8_lossy(&stored);
        let (maker, socket) = stored.split_once(' ').unwrap_or_default();
        let maker: Rank = maker.parse().map_err(|_| {
            Error::new(
                ErrorKind::Store,
                format!(
                    "the store has {stored:?} under {maker_key}, instead of a rank and the name of \
                     its socket: check that no other program writes to the store"
                ),
            )
        })?;
        let limit = HANDSHAKE_TIME.min(world.deadline.remaining());
        let segment = match shortcut::attach(maker, socket, identity) {
            Ok(segment) => segment,
            Err(error) => {
                tracing::debug!(%error, maker, "requests the shared memory, as its file cannot be opened");
                segment_of(maker, identity, socket, limit)?
            }
        };
        self.segment = Some(Arc::new(segment));
        Ok(None)
    }

    /// Returns which of these ranks share memory; `rank` is this rank's index in `ranks`. Waits for ranks that have
    /// not published their host yet.
    ///
    /// # Errors
    /// Those of the store; `Timeout` if it does not answer, or if ranks do not publish their hosts in time; `Io` if
    /// this rank cannot accept the connections of others.
    pub(crate) fn layout(&self, ranks: &[Rank], rank: usize, deadline: Deadline) -> Result<Layout> {
        let known = || self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let segment = self.segment.as_ref();
        let is_here = |rank| segment.is_some_and(|segment| segment.has_entered(rank));
        let unknown = |rank: &Rank| !is_here(*rank) && !known().contains_key(rank);
        let mut unread: Vec<Rank> = ranks.iter().copied().filter(unknown).collect();
        if let (false, true, Some(segment)) =
            (unread.is_empty(), self.is_single_host, &self.segment)
        {
            segment.await_all(deadline.remaining().min(ENTERING_TIME));
            unread.retain(unknown);
        }
        if !unread.is_empty() {
            let keys: Vec<String> = unread.iter().map(|&rank| host_key(rank)).collect();
            let time_left = deadline.remaining();
            let first = time_left.saturating_sub(LOOK_TIME.min(time_left / 4));
            let notes = match self.read_notes(&keys, first) {
                Err(error) if error.kind() == ErrorKind::Timeout => {
                    // The wait ends before the deadline: at the deadline, the rank that serves the store may give up.
                    let Ok(absent) = self.ranks_without_notes(&unread, deadline) else {
                        return Err(error);
                    };
                    let notes = self.read_notes(&keys, deadline.remaining());
                    notes.map_err(|error| self.not_connected_error(error, absent, time_left))?
                }
                notes => notes?,
            };
            let notes = notes.iter().map(|bytes| Note::read(bytes));
            // Not locked until here: another thread that makes a group has a deadline of its own.
            known().extend(unread.into_iter().zip(notes));
        }
        let known = known();
        let name_of = |&rank: &Rank| {
            let name = match known.get(&rank) {
                Some(note) if !is_here(rank) => &note.name,
                _ => &self.name,
            };
            if *name != self.name {
                self.report_separate_memory(rank, name);
            }
            (name != NONE).then_some(name.as_str())
        };
        let names: Vec<Option<&str>> = ranks.iter().map(name_of).collect();
        Ok(Layout::new(&names, rank))
    }

    /// Reads the notes under these keys; waits for them for `limit` at most. A rank may publish its note only
    /// once the maker of the segment has answered it: so the wait ends early if this rank cannot accept callers.
    ///
    /// # Errors
    /// Those of the store; `Timeout` if it does not answer; `Io` if this rank cannot accept the connections of others.
    fn read_notes(&self, keys: &[String], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let end = Deadline::In(limit.saturating_add(STORE_GRACE)).started();
        let keys = keys.to_vec();
        let query = StoreQuery::put(&self.store, move |store| {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            store.multi_get(&keys, limit)
        })?;
        loop {
            if let Some(notes) = query.answer_within(SHORTAGE_CHECK) {
                return notes;
            }
            let short = self.shortage.check();
            short.map_err(|error| Error::io("cannot meet the other ranks", error))?;
            if end.has_passed() {
                let message = "the store did not answer a request for the hosts of other ranks";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
        }
    }

    /// The first of these ranks that have no note.
    ///
    /// # Errors
    /// That of the first request to which the store does not reply.
    fn ranks_without_notes(&self, ranks: &[Rank], deadline: Deadline) -> Result<Vec<Rank>> {
        let ranks = ranks.to_vec();
        let limit = deadline.remaining().max(NAMING_TIME);
        StoreQuery::within(&self.store, limit, move |store| {
            let mut absent = Vec::new();
            for rank in ranks {
                if absent.len() < MAX_NAMED && !store.check(&[&host_key(rank)])? {
                    absent.push(rank);
                }
            }
            Ok(absent)
        })
    }

    /// The error of a wait for notes that lasted `waited`. It names the ranks of `absent`, which had no note shortly
    /// before the end of the wait, unless their notes have come since.
    fn not_connected_error(&self, error: Error, mut absent: Vec<Rank>, waited: Duration) -> Error {
        // If the store no longer replies, the rank that serves it has given up before this one.
        if error.kind() == ErrorKind::Timeout {
            let ranks = absent.clone();
            let look = move |store: &dyn Store| {
                let has_note = |rank: &Rank| store.check(&[&host_key(*rank)]);
                ranks.iter().map(has_note).collect::<Result<Vec<bool>>>()
            };
            if let Ok(have_notes) = StoreQuery::within(&self.store, LOOK_TIME, look) {
                let mut have_notes = have_notes.into_iter();
                absent.retain(|_| have_notes.next() != Some(true));
            }
        }
        if absent.is_empty() {
            return error;
        }
        let message = format!(
            "{} met the others but did not connect to them within {}",
            text::ranks(&absent, MAX_NAMED),
            text::duration(waited)
        );
        Error::new(ErrorKind::Timeout, message).with_ranks(&absent)
    }

    /// Returns `CorePerRank` if each rank of this machine can have a processor to itself, according to the ranks'
    /// notes, else `Oversubscribed`. Returns `counted`, which is based on the number of ranks alone, if this rank
    /// shares memory, a quota limits its processors, the machine is not known, or the notes do not cover all of its
    /// ranks.
    pub(crate) fn wait_mode(&self, rank: Rank, counted: WaitMode) -> WaitMode {
        let Some((machine, own_set)) = self.note.machine.as_ref() else {
            return counted;
        };
        // A quota may leave fewer cores than the rank's processors.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let is_rationed = cores < own_set.iter().map(|word| word.count_ones() as usize).sum();
        if self.segment.is_some() || is_rationed {
            return counted;
        }
        let known = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let others = known.iter().filter(|(other, _)| **other != rank);
        let others = others.filter_map(|(_, note)| note.machine.as_ref());
        let here = others.filter(|(theirs, _)| theirs == machine);
        let mut sets: Vec<Processors> = here.map(|&(_, set)| set).collect();
        sets.push(*own_set);
        if sets.len() < self.local_ranks {
            return counted;
        }
        wait_mode_of(&sets)
    }

    /// Agrees with these ranks on `value` if all of them share memory and it has space for an agreement; otherwise
    /// returns `None` on all of them. Waits only for ranks whose host is not known yet.
    ///
    /// # Errors
    /// Those of [`layout`](Self::layout).
    pub(crate) fn agree(
        &self,
        number: u64,
        value: &[u8],
        ranks: &[Rank],
        rank: usize,
        deadline: Deadline,
    ) -> Result<Option<Agreement>> {
        let Some(segment) = &self.segment else {
            return Ok(None);
        };
        let layout = self.layout(ranks, rank, deadline)?;
        Ok(match layout.hosts() {
            1 => segment.agree(number, value),
            _ => None,
        })
    }

    /// Logs once that a rank of this machine shares no memory with this rank, since users may not expect that.
    fn report_separate_memory(&self, rank: Rank, other_name: &str) {
        let machine = self.name.split_inclusive(SEPARATOR).next();
        let is_here = machine.is_some_and(|machine| other_name.starts_with(machine));
        if is_here && !self.is_separation_reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                rank,
                "a rank of this machine is in another network or process namespace, runs as \
                 another user, or has another host id: no memory is shared with it"
            );
        }
    }

    /// Returns a number that ranks have in common if they share memory, and otherwise have in common only with a very
    /// small probability; 0 if this rank shares no memory.
    pub(crate) fn number(&self) -> u64 {
        if self.segment.is_none() {
            return 0;
        }
        let digest: [u8; 32] = Sha256::digest(self.name.as_bytes()).into();
        let start = digest.first_chunk().copied().unwrap_or_default();
        u64::from_le_bytes(start).max(1)
    }

    /// Returns the exchange area of these ranks of this host: the part of the segment over which they run their
    /// collectives. `rank` is this rank's index in `ranks`. Returns `None` on all of them if they share no memory, if
    /// there is only one rank, or if the segment has no space for another group.
    ///
    /// # Errors
    /// `Late` with the first of these ranks if it has not claimed the exchange area before the deadline; `Gone` if that
    /// rank is gone; why the wait was interrupted otherwise; `Io` if the memory cannot be mapped.
    pub(crate) fn shm_exchange(
        &self,
        key: u64,
        rank: usize,
        ranks: &Arc<[Rank]>,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Option<ShmExchange>, Failure> {
        let Some(segment) = self.segment.as_ref().filter(|_| ranks.len() > 1) else {
            return Ok(None);
        };
        match ShmExchange::of_group(segment, key, rank, ranks.clone(), policy) {
            Ok(Some(shm_exchange)) => Ok(Some(shm_exchange)),
            Ok(None) => {
                tracing::warn!("too many groups share memory already: this one uses sockets");
                Ok(None)
            }
            // The group's first rank makes the exchange area.
            Err(ShmExchangeError::Interrupted(Interrupted::TimedOut)) => {
                Err(Failure::Late(vec![ranks[0]]))
            }
            Err(error) => Err(error.into_failure(ranks)),
        }
    }
}

/// The key under which a rank publishes its note.
fn host_key(rank: Rank) -> String {
    format!("cpu/host_of/{rank}")
}

/// Returns an identifier that ranks have in common only if they run under the same kernel.
fn boot_id() -> io::Result<String> {
    // The file has 37 bytes.
    let mut bytes = [0; 64];
    let count = File::open("/proc/sys/kernel/random/boot_id")?.read(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..count]).trim().to_owned())
}

/// Returns a name that ranks have in common only if they can share memory and see each other's processes.
fn name(boot: &str, id: Option<&str>) -> io::Result<String> {
    use std::os::unix::fs::MetadataExt;
    let network = std::fs::metadata("/proc/self/ns/net")?.ino();
    let processes = std::fs::metadata("/proc/self/ns/pid")?.ino();
    let user = rustix::process::geteuid().as_raw();
    let mut name = format!("{boot}{SEPARATOR}{network}{SEPARATOR}{processes}{SEPARATOR}{user}");
    if let Some(id) = id {
        // The identifier is hashed, since it may contain any characters and the name is part of keys.
        let digest = Sha256::digest(id.as_bytes());
        name.push(SEPARATOR);
        name.push_str(&text::hex(&digest[..8]));
    }
    Ok(name)
}

/// Listens on an abstract unix socket with a new name, at which this rank gives out `file`, and returns both.
fn listen(file: &OwnedFd) -> io::Result<(String, UnixListener)> {
    let socket = shortcut::socket_name(file)?;
    let address = SocketAddr::from_abstract_name(&socket)?;
    let listener = UnixListener::bind_addr(&address)?;
    listener.set_nonblocking(true)?;
    Ok((socket, listener))
}

/// Requests the segment from the rank `maker`, which listens on this abstract unix socket. Each read and write takes
/// `limit` at most.
///
/// # Errors
/// `Io`. It blames the rank `maker`, unless this rank lacks descriptors or memory.
pub(crate) fn segment_of(
    maker: Rank,
    identity: &Identity,
    socket: &str,
    limit: Duration,
) -> Result<Segment> {
    request_segment(maker, identity, socket, limit).map_err(|error| {
        let is_own_fault = is_shortage(&error);
        let message = format!("cannot share memory with rank {maker} of this host");
        let error = Error::io(message, error);
        match is_own_fault {
            true => error,
            false => error.with_rank(maker),
        }
    })
}

fn request_segment(
    maker: Rank,
    identity: &Identity,
    socket: &str,
    limit: Duration,
) -> io::Result<Segment> {
    let address = SocketAddr::from_abstract_name(socket)?;
    let mut stream = UnixStream::connect_addr(&address)?;
    // The system refuses a time-out of zero.
    let limit = Some(limit.max(SHORTEST_TIME));
    stream.set_read_timeout(limit)?;
    stream.set_write_timeout(limit)?;
    let user = rustix::net::sockopt::socket_peercred(&stream)?.uid;
    if user != rustix::process::geteuid() {
        return Err(io::Error::other("the socket belongs to another user"));
    }
    let handshake = Handshake {
        kind: ChannelKind::Segment,
        from: identity.rank,
        to: maker,
        group: 0,
        stream: 0,
    };
    let mut nonce = [0; 32];
    fill_random(&mut nonce)?;
    let first = handshake.encode(identity, &nonce);
    stream.write_all(&first)?;
    let mut answer = [0; ANSWER_LEN];
    stream.read_exact(&mut answer)?;
    let refused = |decision| io::Error::other(Decision::reason_of(decision));
    match Decision::from_bytes([answer[0], answer[1], answer[2], answer[3]]) {
        Some(Decision::Welcome) => {}
        other => return Err(refused(other)),
    }
    let mut their_nonce = [0; 32];
    their_nonce.copy_from_slice(&answer[4..36]);
    if !identity.verifies(End::Acceptor, &first, &their_nonce, &answer[36..]) {
        return Err(refused(Some(Decision::WrongSecret)));
    }
    stream.write_all(&identity.prove(End::Dialer, &first, &their_nonce))?;
    let mut last = [0; 4];
    let file = fd_passing::receive(&stream, &mut last)?;
    match (Decision::from_bytes(last), file) {
        (Some(Decision::Welcome), Some(file)) => {
            Segment::attach(file, identity.rank, identity.world_size as usize)
        }
        (Some(Decision::Welcome), None) => Err(io::Error::other("it sent no shared memory")),
        (other, _) => Err(refused(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let stored = Note {
            name: "boot:1:2:3".into(),
            machine: Some(("boot".into(), own_processors())),
        };
        let without_machine = Note {
            name: NONE.into(),
            machine: None,
        };
        for note in [stored, without_machine] {
            assert_eq!(Note::read(note.write().as_bytes()), note);
        }
        assert_eq!(Note::read(b"name boot 1,2").machine, None);
        assert_eq!(Note::read(b"").name, "");
    }
}
