//! The hub of a communicator's ranks. `ncclGetUniqueId` starts it in the process that calls it, as NCCL does with
//! its bootstrap root (`bootstrapCreateRoot`, bootstrap.cc:405), and it runs as long as this process exists.
//!
//! For a collective, the hub gathers one contribution of every rank, computes, and answers all of them. Ranks that
//! disagree on the kind, type, root or length of a collective are never answered: this is undefined in NCCL's
//! documentation, and a hang in practice.
//!
//! A kernel that is stopped by an abort or a revoke still posts its steps to its peers. Their kernels then end as if
//! they were done, with wrong data, even kernels that are launched later. This was seen on an H100 with NCCL 2.30.7: of
//! four ranks on one device, one never came, and an operation succeeded on a rank a moment after the rank before it in
//! the ring had aborted. Here the kernels of all peers in a collective end so. Kernels that hang because `RCOMM_SIM`
//! asks for it wait for no peer, and are not ended.

use crate::number::{self, Reduction};
use crate::stream::lock;
use crate::wire::{FAILED, Reply, Request, RequestKind};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex};

type Writer = Arc<Mutex<UnixStream>>;

const SUCCESS: i32 = 0;
const INVALID_USAGE: i32 = 5;
const REMOTE_ERROR: i32 = 6;

/// The value of each byte of wrong data.
const WRONG: u8 = 0x55;

/// Sender and receiver.
type Ends = (usize, usize);

/// What each rank contributed to a collective.
type Contributions = BTreeMap<usize, (Request, Vec<u8>)>;

/// The ranks of one communicator.
#[derive(Default)]
struct Communicator {
    size: usize,
    members: BTreeMap<usize, Member>,
    /// By the number of the collective: what each rank contributed.
    collectives: HashMap<u64, Contributions>,
    /// The collectives in which a rank has stopped its kernel.
    broken: HashSet<u64>,
    /// By sender and receiver: number of the request, and the message.
    sends: HashMap<Ends, VecDeque<(u64, Vec<u8>)>>,
    /// By sender and receiver: number of the request, and the length that is wanted.
    receives: HashMap<Ends, VecDeque<(u64, u64)>>,
    /// By the number of the split, shrink or exchange: what each rank contributed.
    derivations: HashMap<u64, Contributions>,
    failed: bool,
    /// The error text about the first rank that closed its connection without a destroy while no operation needed it.
    gone: Option<String>,
}

struct Member {
    writer: Writer,
    /// The id of the member's request to join.
    join: u64,
    device: i32,
}

#[derive(Default)]
struct State {
    /// By key; the communicator made from the unique id itself has key 0.
    communicators: HashMap<u64, Communicator>,
    last_key: u64,
}

/// The address of an abstract socket, which leaves no file behind.
pub(crate) fn address(name: &[u8]) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

/// Starts a hub under this name.
pub(crate) fn start(name: &[u8]) -> io::Result<()> {
    let listener = UnixListener::bind_addr(&address(name)?)?;
    let state = Arc::new(Mutex::new(State::default()));
    std::thread::Builder::new()
        .name("sim/hub".into())
        .spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let state = Arc::clone(&state);
                let serve = move || serve(stream, &state);
                if std::thread::Builder::new()
                    .name("sim/hub/rank".into())
                    .spawn(serve)
                    .is_err()
                {
                    return;
                }
            }
        })?;
    Ok(())
}

fn send_reply(writer: &Writer, id: u64, status: i32, payload: Vec<u8>) {
    // If the rank is gone, the thread that reads from it notices.
    let _ = Reply {
        id,
        status,
        payload,
    }
    .send(&mut lock(writer));
}

/// Handles the requests of one rank until its connection ends.
fn serve(mut stream: UnixStream, state: &Mutex<State>) {
    let Ok(writer) = stream
        .try_clone()
        .map(|stream| Arc::new(Mutex::new(stream)))
    else {
        return;
    };
    let mut joined = None;
    while let Ok((request, payload)) = Request::receive(&mut stream) {
        let mut state = lock(state);
        if request.kind == RequestKind::Join {
            joined = state.join(&request, &writer);
            continue;
        }
        let Some((key, rank)) = joined else { return };
        state.handle(key, rank, request, payload);
    }
    if let Some((key, rank)) = joined {
        lock(state).leave(key, rank);
    }
}

impl State {
    /// Adds a rank to a communicator, and answers all its ranks when the last one joins. Returns the communicator's key
    /// and the rank; `None` if the rank is refused, which fails the communicator, or its request is not valid.
    fn join(&mut self, request: &Request, writer: &Writer) -> Option<(u64, usize)> {
        let key = request.seq;
        let rank = usize::try_from(request.rank).ok()?;
        let communicator = self.communicators.entry(key).or_default();
        communicator.size = usize::try_from(request.op).ok()?;
        let taken = communicator
            .members
            .iter()
            .find(|(_, member)| member.device == request.data_type);
        // The device is compared with those of the ranks that joined before, as `initTransportsRank` (init.cc:1055)
        // compares hosts and UUIDs.
        let may_share = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
        if let Some((other, member)) = taken.filter(|_| !may_share) {
            let text = format!(
                "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable \
                 this configuration. (rank {rank} and rank {other}, device {})",
                member.device
            );
            send_reply(writer, request.id, INVALID_USAGE, text.clone().into_bytes());
            communicator.fail(INVALID_USAGE, &text);
            return None;
        }
        let member = Member {
            writer: Arc::clone(writer),
            join: request.id,
            device: request.data_type,
        };
        communicator.members.insert(rank, member);
        if communicator.members.len() == communicator.size {
            for member in communicator.members.values() {
                send_reply(&member.writer, member.join, SUCCESS, Vec::new());
            }
        }
        Some((key, rank))
    }

    /// Handles the end of a rank's connection, after a destroy or an abort, or because the rank died.
    fn leave(&mut self, key: u64, rank: usize) {
        let Some(communicator) = self.communicators.get_mut(&key) else {
            return;
        };
        if communicator.members.remove(&rank).is_some() {
            let text = format!("rank {rank} closed its connection");
            // A connection without an operation on it is not polled (`ncclProxyProgress`, proxy.cc, polls
            // those of active operations): the next operation that needs the rank fails.
            if communicator.needs(rank) {
                communicator.fail(REMOTE_ERROR, &text);
            } else {
                communicator.gone.get_or_insert(text);
            }
        }
        if communicator.members.is_empty() {
            self.communicators.remove(&key);
        }
    }

    /// Handles a request of a rank that has joined.
    fn handle(&mut self, key: u64, rank: usize, request: Request, payload: Vec<u8>) {
        let Some(communicator) = self.communicators.get_mut(&key) else {
            return;
        };
        match request.kind {
            RequestKind::Send => {
                communicator.send(rank, &request, payload);
                communicator.fail_if_gone();
            }
            RequestKind::Recv => {
                communicator.receive(rank, &request);
                communicator.fail_if_gone();
            }
            RequestKind::Leave => {
                communicator.members.remove(&rank);
            }
            RequestKind::Split | RequestKind::Shrink | RequestKind::Exchange => {
                let contributions = communicator.derivations.entry(request.seq).or_default();
                contributions.insert(rank, (request, payload));
                if let Some(all) = communicator.complete_derivation(request.seq) {
                    match request.kind {
                        RequestKind::Exchange => communicator.exchange(&all),
                        _ => communicator.derive(&all, &mut self.last_key),
                    }
                }
            }
            RequestKind::Stop => communicator.stop(rank),
            _ if communicator.broken.contains(&request.seq) => {
                communicator.end_broken(rank, request);
            }
            _ => {
                let contributions = communicator.collectives.entry(request.seq).or_default();
                contributions.insert(rank, (request, payload));
                if contributions.len() < communicator.size {
                    communicator.fail_if_gone();
                    return;
                }
                let all = communicator
                    .collectives
                    .remove(&request.seq)
                    .unwrap_or_default();
                communicator.compute(&all);
            }
        }
    }
}

impl Communicator {
    /// Whether an unfinished operation needs this rank.
    fn needs(&self, rank: usize) -> bool {
        let is_end = |ends: &Ends| ends.0 == rank || ends.1 == rank;
        let receives = self
            .receives
            .iter()
            .any(|(ends, receives)| is_end(ends) && !receives.is_empty());
        let sends = self
            .sends
            .iter()
            .any(|(ends, sends)| is_end(ends) && !sends.is_empty());
        receives || sends || !self.collectives.is_empty() || !self.derivations.is_empty()
    }

    /// Fails the communicator if an unfinished operation needs a rank that is gone.
    fn fail_if_gone(&mut self) {
        let missing = (0..self.size).filter(|rank| !self.members.contains_key(rank));
        let needed = missing.into_iter().any(|rank| self.needs(rank));
        if needed && let Some(text) = self.gone.clone() {
            self.fail(REMOTE_ERROR, &text);
        }
    }

    /// Reports an error to all ranks, unless one was reported before.
    fn fail(&mut self, status: i32, text: &str) {
        if !self.failed {
            self.failed = true;
            for member in self.members.values() {
                send_reply(&member.writer, FAILED, status, text.as_bytes().to_vec());
            }
        }
    }

    /// Sends a rank the result of a request, unless the rank has left.
    fn answer(&self, rank: usize, id: u64, payload: Vec<u8>) {
        if let Some(member) = self.members.get(&rank) {
            send_reply(&member.writer, id, SUCCESS, payload);
        }
    }

    /// Delivers a message to the receive that waits for it, or keeps it until there is one.
    fn send(&mut self, rank: usize, request: &Request, payload: Vec<u8>) {
        let Ok(to) = usize::try_from(request.rank) else {
            return;
        };
        let waiting = self.receives.entry((rank, to)).or_default();
        if let Some((id, length)) = waiting.pop_front() {
            self.deliver(rank, request.id, to, id, length, payload);
        } else {
            self.sends
                .entry((rank, to))
                .or_default()
                .push_back((request.id, payload));
        }
    }

    /// Answers a receive with the message that was kept for it, or keeps the receive until there is one.
    fn receive(&mut self, rank: usize, request: &Request) {
        let Ok(from) = usize::try_from(request.rank) else {
            return;
        };
        let waiting = self.sends.entry((from, rank)).or_default();
        if let Some((id, payload)) = waiting.pop_front() {
            self.deliver(from, id, rank, request.id, request.length, payload);
        } else {
            self.receives
                .entry((from, rank))
                .or_default()
                .push_back((request.id, request.length));
        }
    }

    /// Answers a send and its receive. If their lengths differ, neither is ever answered: this is undefined in
    /// NCCL, and a hang in practice.
    fn deliver(
        &self,
        from: usize,
        send: u64,
        to: usize,
        receive: u64,
        length: u64,
        payload: Vec<u8>,
    ) {
        if payload.len() as u64 == length {
            self.answer(from, send, Vec::new());
            self.answer(to, receive, payload);
        }
    }

    /// Removes and returns the contributions to a split, shrink or exchange, once those of all ranks that take
    /// part have arrived.
    fn complete_derivation(&mut self, seq: u64) -> Option<Contributions> {
        let contributions = self.derivations.get(&seq)?;
        let mut excluded = Vec::new();
        for (request, payload) in contributions.values() {
            if request.kind == RequestKind::Shrink {
                let ranks = payload.chunks_exact(4);
                let ranks =
                    ranks.map(|bytes| i32::from_le_bytes(bytes.try_into().expect("four bytes")));
                excluded = ranks
                    .filter_map(|rank| usize::try_from(rank).ok())
                    .collect();
            }
        }
        let awaited = (0..self.size).filter(|rank| !excluded.contains(rank));
        let is_complete = awaited
            .clone()
            .all(|rank| contributions.contains_key(&rank));
        if is_complete {
            self.derivations.remove(&seq)
        } else {
            None
        }
    }

    /// Sends all ranks the payloads of all ranks, in order of rank.
    fn exchange(&self, all: &Contributions) {
        let payloads: Vec<u8> = all
            .values()
            .flat_map(|(_, payload)| payload.clone())
            .collect();
        for (rank, (request, _)) in all {
            self.answer(*rank, request.id, payloads.clone());
        }
    }

    /// Sends each rank its new rank, and the size and key of its new communicator. The ranks of one color are ordered
    /// by the key that they passed to the split, then by rank. In a shrink all these colors and keys are 0, so that the
    /// remaining ranks keep their order. A rank of a negative color gets an empty answer.
    fn derive(&self, all: &Contributions, last_key: &mut u64) {
        let mut colors: BTreeMap<i32, Vec<(i32, usize)>> = BTreeMap::new();
        for (&rank, (request, _)) in all {
            colors
                .entry(request.rank)
                .or_default()
                .push((request.op, rank));
        }
        for (color, mut members) in colors {
            members.sort_unstable();
            *last_key += 1;
            for (new_rank, (_, rank)) in members.iter().enumerate() {
                let mut payload = Vec::new();
                if color >= 0 {
                    payload.extend((new_rank as u32).to_le_bytes());
                    payload.extend((members.len() as u32).to_le_bytes());
                    payload.extend(last_key.to_le_bytes());
                }
                self.answer(*rank, all[rank].0.id, payload);
            }
        }
    }

    /// Ends the collectives of the peers of a rank that has stopped its kernels, and makes the messages wrong that it
    /// has sent and no rank has received. Messages that a peer waits for stay missing.
    fn stop(&mut self, rank: usize) {
        if !self.members.contains_key(&rank) {
            return;
        }
        let joined = self.collectives.iter();
        let joined = joined.filter(|(_, contributions)| contributions.contains_key(&rank));
        let stopped: Vec<u64> = joined.map(|(seq, _)| *seq).collect();
        for seq in stopped {
            self.broken.insert(seq);
            for (peer, (request, _)) in self.collectives.remove(&seq).unwrap_or_default() {
                if peer != rank {
                    self.end_broken(peer, request);
                }
            }
        }
        for ((from, _), messages) in &mut self.sends {
            let messages = messages.iter_mut().filter(|_| *from == rank);
            messages.for_each(|(_, payload)| payload.fill(WRONG));
        }
    }

    /// Answers a rank's part in a collective whose peers have stopped, with wrong data.
    fn end_broken(&self, rank: usize, request: Request) {
        let length = usize::try_from(request.length).unwrap_or(0);
        let all = (0..self.size).map(|rank| (rank, (request, vec![WRONG; length])));
        let id = request.id;
        if let Some(result) = Self::results(&all.collect()).remove(&rank) {
            self.answer(rank, id, result);
        }
    }

    /// Computes a collective and answers all ranks; answers none if they disagree.
    fn compute(&self, all: &Contributions) {
        for (rank, result) in Self::results(all) {
            self.answer(rank, all[&rank].0.id, result);
        }
    }

    /// The result of each rank; none if the ranks disagree.
    fn results(all: &Contributions) -> BTreeMap<usize, Vec<u8>> {
        let Some((first, _)) = all.values().next() else {
            return BTreeMap::new();
        };
        let agree = all.values().all(|(request, payload)| {
            request.kind == first.kind
                && request.data_type == first.data_type
                && request.rank == first.rank
                && request.length == first.length
                && (payload.is_empty() || payload.len() as u64 == request.length)
        });
        if !agree {
            return BTreeMap::new();
        }
        let inputs: Vec<&[u8]> = all
            .values()
            .map(|(_, payload)| payload.as_slice())
            .collect();
        let reduced = || {
            let inputs: Vec<(&[u8], Reduction)> = all
                .values()
                .map(|(request, payload)| {
                    (
                        payload.as_slice(),
                        Reduction {
                            op: request.op,
                            factor: request.factor,
                        },
                    )
                })
                .collect();
            number::reduce(first.data_type, &inputs)
        };
        let root = usize::try_from(first.rank).unwrap_or(0);
        let part = |whole: &[u8], number: usize| {
            let length = whole.len() / all.len();
            whole[number * length..(number + 1) * length].to_vec()
        };
        let common = match first.kind {
            RequestKind::AllReduce | RequestKind::ReduceScatter | RequestKind::Reduce => reduced(),
            RequestKind::AllGather | RequestKind::Gather => inputs.concat(),
            RequestKind::Broadcast | RequestKind::Scatter => inputs
                .get(root)
                .map_or_else(Vec::new, |input| input.to_vec()),
            _ => Vec::new(),
        };
        let result = |rank: &usize| match first.kind {
            RequestKind::AllReduce | RequestKind::AllGather | RequestKind::Broadcast => {
                common.clone()
            }
            RequestKind::Reduce | RequestKind::Gather if *rank == root => common.clone(),
            RequestKind::ReduceScatter | RequestKind::Scatter => part(&common, *rank),
            RequestKind::AllToAll => inputs.iter().flat_map(|input| part(input, *rank)).collect(),
            _ => Vec::new(),
        };
        all.keys().map(|rank| (*rank, result(rank))).collect()
    }
}
