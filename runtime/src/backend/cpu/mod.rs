//! The CPU backend: collectives and messages between processes, over shared memory and sockets.
//!
//! | room | holds |
//! |---|---|
//! | `address` | which address of this host the other ranks are told |
//! | `mesh`, `hello` | how ranks find each other, and how strangers are kept out |
//! | `host`, `layout`, `neighbours` | who shares memory with whom |
//! | `transport` | streams of bytes between two ranks; memory shared by those of a host |
//! | `lanes` | all streams of a group, and transfers that run over them at once |
//! | `notice` | what ranks compare before data moves |
//! | `collective`, `algorithm` | operations taken apart, and what goes to whom |
//! | `reduce` | element-wise arithmetic |
//! | `p2p` | tagged messages |
//! | `executor`, `wait` | turns, threads, and how to wait |
//! | `window` | memory that the others read and write |
//!
//! A blocking collective runs on its caller's thread as soon as it is its turn. Issued ones run on the
//! group's thread `rcomm/cpu/<group>`, issued sends and receives on `rcomm/p2p/<group>`; both start
//! with the first operation that needs them.

mod address;
mod algorithm;
mod collective;
mod executor;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod hello;
mod host;
mod lanes;
mod layout;
mod mesh;
mod neighbours;
mod notice;
mod p2p;
#[allow(unsafe_code)]
pub(crate) mod reduce;
#[cfg(test)]
mod tests;
mod transport;
mod wait;
mod window;

use crate::backend::{
    AbortReason, Backend, BackendFactory, Call, Done, GroupContext, Observer, Pending, Window,
    WorldContext,
};
use crate::buffer::{Buffer, DeviceKind};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::op::Op;
use crate::store::{PrefixStore, Store};
use crate::tuning::Topology;
use algorithm::{BoardRoad, Boards, HostsRoad, LaneRoad};
use collective::{Place, Step, for_each_step};
use executor::{Executor, ExecutorKind, Turns};
use hello::{LaneKind, Verdict};
use lanes::{Lanes, Sockets, cut};
use layout::Layout;
use mesh::{Failure, Mesh};
use neighbours::Neighbours;
use p2p::{P2p, Request};
use rcomm_recorder::model::{DType, Rank};
use sha2::{Digest, Sha256};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use transport::shm::Farewell;
use wait::{Crowding, Interrupted, Patience, Stop};
use window::CpuWindow;

/// How long a rank whose peer has closed its lanes looks for that peer's reason.
const REASON_TIME: Duration = Duration::from_millis(500);

/// Makes the CPU backends of a world's groups, which share one mesh of connections.
pub struct CpuFactory {
    mesh: Arc<Mesh>,
    crowding: Crowding,
}

impl CpuFactory {
    /// Opens this rank's port and leaves its address in the store. Nothing is connected yet.
    ///
    /// It listens on one address: that of the interface [`Config::socket_ifname`](crate::Config), else
    /// the one from which this host reaches the place of the configuration's rendezvous, else that of
    /// the loopback interface.
    ///
    /// # Errors
    /// `InvalidArgument` names an interface that is of no use, and what there is; `Rendezvous` if
    /// nothing leads to the store; `Io` if no port can be opened; `Store` if the store cannot be told.
    pub fn open(world: &WorldContext) -> Result<Self> {
        let address = address::choose(&world.config)?;
        let local_ranks = world.local_world_size.unwrap_or(world.world_size);
        Ok(Self {
            mesh: Mesh::open(world, address)?,
            crowding: Crowding::of(local_ranks as usize),
        })
    }

    /// Callers on this rank's port that did not know the job's secret, or were of another job.
    pub fn refused(&self) -> u64 {
        self.mesh.refused()
    }
}

impl BackendFactory for CpuFactory {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        let stop = Stop::default();
        let backend = CpuBackend::new(self.mesh.clone(), group, self.crowding, &stop, deadline)?;
        Ok(Arc::new(backend))
    }
}

/// One group's operations on the CPU.
///
/// # Thread safety
/// As [`Backend`] says.
pub struct CpuBackend {
    group: Arc<CpuGroup>,
    collectives: Executor,
    messages: Executor,
    context: GroupContext,
    windows: Mutex<Windows>,
}

/// The windows that were opened beside a group.
#[derive(Default)]
struct Windows {
    opened: u64,
    /// What those were given that may not be open yet.
    opening: Vec<Weak<CpuGroup>>,
    open: Vec<Weak<CpuWindow>>,
}

/// What the threads of a group share.
struct CpuGroup {
    name: String,
    rank: usize,
    ranks: Arc<[Rank]>,
    mesh: Arc<Mesh>,
    store: Arc<dyn Store>,
    crowding: Crowding,
    stop: Stop,
    turns: Turns,
    road: Mutex<Road>,
    /// Ends the waits of those who share memory with this rank.
    farewell: Option<Farewell>,
    p2p: P2p,
    sockets: Sockets,
}

/// Which way the collectives of a group go.
enum Road {
    /// All its ranks share memory.
    Board(BoardRoad),
    /// None of them do.
    Lanes(Box<LaneRoad>),
    /// Those of each host do.
    Hosts(Box<HostsRoad>),
}

impl Road {
    fn perform(
        &mut self,
        step: Step<'_>,
        place: Place,
        patience: &mut Patience<'_>,
    ) -> Result<(), Failure> {
        match self {
            Self::Board(road) => road.perform(step, place, patience),
            Self::Lanes(road) => road.perform(step, place, patience),
            Self::Hosts(road) => road.perform(step, place, patience),
        }
    }
}

impl CpuBackend {
    fn new(
        mesh: Arc<Mesh>,
        group: GroupContext,
        crowding: Crowding,
        stop: &Stop,
        deadline: Deadline,
    ) -> Result<Self> {
        let context = group.clone();
        let ranks = group.info.ranks;
        let rank = group.group_rank as usize;
        let deadline = deadline.started();
        let layout = mesh.host().layout(&ranks, rank, deadline)?;
        let mut patience = Patience::new(stop, deadline, crowding);
        let sockets = Sockets::default();
        let id = group.wire_id;
        let plan = mesh.tuning().plan(Topology::Sockets, ranks.len());
        let lanes = |sockets: &Sockets| {
            let kind = LaneKind::Collective;
            Lanes::new(mesh.clone(), id, kind, ranks.clone(), sockets.clone())
        };
        let mut group = CpuGroup {
            name: group.info.name,
            rank,
            store: group.store,
            crowding,
            stop: Stop::default(),
            turns: Turns::new(),
            road: Mutex::new(Road::Lanes(Box::new(LaneRoad::new(lanes(&sockets), plan)))),
            farewell: None,
            p2p: P2p::new(mesh.clone(), id, ranks.clone(), sockets.clone()),
            mesh: mesh.clone(),
            ranks: ranks.clone(),
            sockets: sockets.clone(),
        };
        let shared = group.share(id, layout, lanes(&sockets), &mut patience);
        if let Some((road, neighbours)) = shared.map_err(|failure| group.explain(failure))? {
            group.road = Mutex::new(road);
            group.p2p = group.p2p.among(neighbours);
        }
        Ok(Self {
            group: Arc::new(group),
            collectives: Executor::new(ExecutorKind::Collective)?,
            messages: Executor::new(ExecutorKind::P2p)?,
            context,
            windows: Mutex::default(),
        })
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        let executor = if op.is_p2p() {
            &self.messages
        } else {
            &self.collectives
        };
        executor.issue(&self.group, op, call, observer)
    }

    fn run(&self, op: &mut Op<'_>, call: Call, observer: &dyn Observer) -> Result<Done> {
        if op.is_p2p() {
            self.group.run_p2p(op, call)
        } else {
            self.group.run_collective(op, call, |waited| {
                if waited {
                    observer.started();
                }
            })
        }
    }

    fn abort(&self, reason: &AbortReason) {
        self.group.give_up(reason);
        let windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        for side in windows.opening.iter().filter_map(Weak::upgrade) {
            side.give_up(reason);
        }
        for window in windows.open.iter().filter_map(Weak::upgrade) {
            window.abort(reason);
        }
    }

    fn shutdown(&self, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        for executor in [&self.collectives, &self.messages] {
            if !executor.drain(deadline) {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "issued operations have not ended",
                ));
            }
        }
        let closed = Error::new(ErrorKind::Closed, "the group was shut down");
        self.group.stop.raise(closed);
        self.collectives.close();
        self.messages.close();
        Ok(())
    }

    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer<'static>> {
        window::allocate(dtype, len)
    }

    fn new_window(&self, memory: Buffer<'static>, deadline: Deadline) -> Result<Arc<dyn Window>> {
        self.group.refuse_if_stopped()?;
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.opened += 1;
        let number = windows.opened;
        drop(windows);
        let side = self.beside(number, deadline)?;
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.opening.retain(|side| side.strong_count() > 0);
        windows.opening.push(Arc::downgrade(&side.group));
        drop(windows);
        // An abort before that has not seen it.
        self.group.refuse_if_stopped()?;
        let name = &self.context.info.name;
        let window = Arc::new(CpuWindow::open(side, name, memory, deadline)?);
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.open.retain(|window| window.strong_count() > 0);
        windows.open.push(Arc::downgrade(&window));
        Ok(window)
    }
}

impl CpuBackend {
    /// A backend of the same members for their window of this number.
    fn beside(&self, number: u64, deadline: Deadline) -> Result<Self> {
        let mut side = self.context.clone();
        side.wire_id = derived_id("window", side.wire_id, number);
        side.info.name = format!("{}/window{number}", side.info.name);
        side.store = Arc::new(PrefixStore::new(format!("window{number}"), side.store));
        let group = &self.group;
        let mesh = group.mesh.clone();
        Self::new(mesh, side, group.crowding, &group.stop, deadline)
    }
}

impl Drop for CpuBackend {
    fn drop(&mut self) {
        let dropped = Error::new(ErrorKind::Closed, "the group was dropped");
        if self.group.stop.raise(dropped) {
            self.group.hang_up();
        }
        self.collectives.close();
        self.messages.close();
    }
}

impl CpuGroup {
    /// What becomes of the group where some of its ranks share memory with this one, or with each other:
    /// the road of its collectives, and whom its messages reach through memory. `None` if none do.
    fn share(
        &mut self,
        id: u64,
        layout: Layout,
        lanes: Lanes,
        patience: &mut Patience<'_>,
    ) -> Result<Option<(Road, Neighbours)>, Failure> {
        if layout.hosts() > 1 && !layout.is_nested() {
            return Ok(None);
        }
        let here = layout.neighbours().to_vec();
        let ranks: Arc<[Rank]> = here.iter().map(|&at| self.ranks[at]).collect();
        let mut board = |key| {
            let host = self.mesh.host();
            host.board(key, layout.place(), &ranks, patience)
        };
        let phases = board(id)?;
        let streams = match &phases {
            Some(_) if layout.is_nested() => board(derived_id("streams", id, 0))?,
            _ => None,
        };
        let mut neighbours = Neighbours::default();
        if let Some(board) = &phases {
            self.crowding = board.crowding();
            neighbours = Neighbours::new(board.streams(), &here, self.ranks.len());
            self.farewell = Some(board.farewell().map_err(Failure::Io)?);
        }
        if layout.is_nested() {
            let lanes = match &streams {
                Some(board) => {
                    let streams = board.streams();
                    lanes.among(Neighbours::new(streams, &here, self.ranks.len()))
                }
                None => lanes,
            };
            let boards = Boards { phases, streams };
            let tuning = self.mesh.tuning();
            let size = self.ranks.len();
            let road = LaneRoad::new(lanes, tuning.plan(Topology::Sockets, size));
            let plan = tuning.plan(Topology::Hosts, size);
            let road = HostsRoad::new(layout, boards, road, plan, self.store.clone())?;
            return Ok(Some((Road::Hosts(Box::new(road)), neighbours)));
        }
        let plan = self.mesh.tuning().plan(Topology::Memory, ranks.len());
        let road = |board| Road::Board(BoardRoad::new(board, ranks, &plan));
        Ok(phases.map(|board| (road(board), neighbours)))
    }

    fn patience(&self, call: &Call) -> Patience<'_> {
        let crowding = self.crowding.hinted(call.hints.wait);
        Patience::new(&self.stop, call.deadline, crowding)
    }

    /// Makes everything pending, and everything later, fail with this reason.
    fn give_up(&self, reason: &AbortReason) {
        self.stop.raise(reason.error.clone());
        self.hang_up();
    }

    /// How a thread of the group looks for more to do. It gives way meanwhile, since the rank's own thread
    /// may need its processor.
    fn idle_looks(&self) -> Patience<'_> {
        Patience::new(&self.stop, Deadline::In(Duration::MAX), Crowding::Crowded)
    }

    fn refuse_if_stopped(&self) -> Result<()> {
        if !self.stop.is_raised() {
            return Ok(());
        }
        match self.stop.reason() {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }

    /// Runs a collective in its turn; `started` is told when that has come, and whether it took time.
    fn run_collective(
        &self,
        op: &mut Op<'_>,
        call: Call,
        started: impl FnOnce(bool),
    ) -> Result<Done> {
        self.refuse_if_stopped()?;
        let mut patience = self.patience(&call);
        let taken = self.turns.take(call.turn, &mut patience);
        let waited = taken.map_err(|why| self.fail(why.into()))?;
        started(waited);
        let place = Place {
            rank: self.rank,
            size: self.ranks.len(),
            seq: call.seq,
        };
        let mut road = self.road.lock().unwrap_or_else(PoisonError::into_inner);
        let result = for_each_step(op, place, &mut |step| {
            road.perform(step, place, &mut patience)
        });
        drop(road);
        let result = result.map_err(|failure| self.fail(failure));
        self.turns.pass();
        result.map(|()| Done::default())
    }

    /// Runs sends and receives on this thread.
    fn run_p2p(&self, op: &mut Op<'_>, call: Call) -> Result<Done> {
        self.refuse_if_stopped()?;
        let mut patience = self.patience(&call);
        let (mut one, mut many) = (self.p2p.post_one(op), Vec::new());
        let requests = match &mut one {
            Some(request) => std::slice::from_mut(request),
            None => {
                self.p2p.post(op, &mut many);
                &mut many
            }
        };
        let outcome = self.p2p.run(op, requests, &mut patience);
        self.finish_p2p(requests, outcome)
    }

    fn finish_p2p(&self, requests: &[Request], outcome: Result<(), Failure>) -> Result<Done> {
        outcome.map_err(|failure| {
            self.p2p.withdraw(requests);
            self.fail(failure)
        })?;
        let source = requests.iter().find_map(Request::source);
        // Ranks are `u32`.
        let source = source.map(|source| source as u32);
        Ok(Done {
            source,
            ..Done::default()
        })
    }

    /// Turns a failure into the error for the caller. Unless the ranks are still in step, the group is
    /// stopped, and the others learn why.
    fn fail(&self, failure: Failure) -> Error {
        let in_step = matches!(failure, Failure::Mismatch(..) | Failure::Argument(_));
        let error = self.explain(failure);
        if in_step {
            return error;
        }
        if self.stop.raise(error.clone()) {
            let note = format!(
                "{} {}",
                error.rank().map_or("-".into(), |rank| rank.to_string()),
                error
            );
            if let Err(unheard) = self.store.set(&note_key(self.mesh.rank()), note.as_bytes()) {
                tracing::debug!(%unheard, "the others were not told why this rank gave up");
            }
        }
        self.hang_up();
        error
    }

    /// Whoever waits for this rank in this group need not any more.
    fn hang_up(&self) {
        cut(&self.sockets);
        if let Some(farewell) = &self.farewell {
            farewell.leave();
        }
    }

    fn explain(&self, failure: Failure) -> Error {
        let list = |ranks: &[Rank]| {
            let ranks: Vec<String> = ranks.iter().map(Rank::to_string).collect();
            match ranks.len() {
                1 => format!("rank {}", ranks[0]),
                _ => format!("ranks {}", ranks.join(", ")),
            }
        };
        match failure {
            Failure::Interrupted(Interrupted::TimedOut) => {
                Error::new(ErrorKind::Timeout, "no end before the deadline")
            }
            Failure::Late(ranks) => {
                let error = Error::new(
                    ErrorKind::Timeout,
                    format!("waited for {} until the deadline", list(&ranks)),
                );
                match ranks[..] {
                    [rank] => error.with_rank(rank),
                    _ => error,
                }
            }
            Failure::Interrupted(Interrupted::Stopped(reason)) => reason,
            Failure::Gone(rank, cause) => self.explain_gone(rank, cause),
            Failure::Refused {
                peer,
                address,
                verdict,
            } => {
                let kind = match verdict {
                    Some(Verdict::WrongSecret) => ErrorKind::Unauthorized,
                    _ => ErrorKind::Rendezvous,
                };
                let why = verdict.map_or("it is no rank", Verdict::reason);
                let message = format!("{address}, the address of rank {peer}, refused: {why}");
                Error::new(kind, message).with_rank(peer)
            }
            Failure::Address { peer, text } => Error::new(
                ErrorKind::Store,
                format!("the store has {text:?} for the address of rank {peer}"),
            )
            .with_rank(peer),
            Failure::Garbled(rank, what) => {
                Error::new(ErrorKind::Backend, format!("rank {rank} sent {what}")).with_rank(rank)
            }
            Failure::Mismatch(rank, message) => {
                Error::new(ErrorKind::Mismatch, message).with_rank(rank)
            }
            Failure::Store(error) | Failure::Argument(error) => error,
            Failure::Io(error) => Error::io("cannot use a socket", error),
            Failure::Closed => Error::new(ErrorKind::Closed, "the world was shut down"),
        }
    }

    /// A peer's lane has ended: because its process did, or because it gave up and said why.
    fn explain_gone(&self, rank: Rank, cause: Option<std::io::Error>) -> Error {
        let stop = Stop::default();
        let deadline = Instant::now() + REASON_TIME;
        let mut patience = Patience::new(&stop, Deadline::At(deadline), self.crowding);
        let key = note_key(rank);
        loop {
            if self.store.check(&[&key]).unwrap_or(false)
                && let Ok(note) = self.store.get(&key, REASON_TIME)
            {
                let note = String::from_utf8_lossy(&note);
                let (culprit, why) = note.split_once(' ').unwrap_or(("-", &note));
                return match culprit.parse() {
                    // It is about this very rank, or about the one that tells it: no news.
                    Ok(culprit) if culprit != rank && culprit != self.mesh.rank() => {
                        Error::new(ErrorKind::PeerLost, format!("{why} (as rank {rank} found)"))
                            .with_rank(culprit)
                    }
                    _ => Error::new(ErrorKind::Aborted, format!("rank {rank} gave up: {why}"))
                        .with_rank(rank),
                };
            }
            match self.mesh.is_gone(rank, &mut patience) {
                Ok(false) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Ok(false) => {
                    let message = format!("rank {rank} closed its connection and still runs");
                    return Error::new(ErrorKind::PeerLost, message).with_rank(rank);
                }
                _ => {
                    let message = format!("rank {rank} is gone: its connection ended");
                    let error = Error::new(ErrorKind::PeerLost, message).with_rank(rank);
                    return match cause {
                        Some(cause) => error.with_source(cause),
                        None => error,
                    };
                }
            }
        }
    }
}

/// The number of something beside a group, most likely nobody else's.
fn derived_id(what: &str, group: u64, number: u64) -> u64 {
    let digest: [u8; 32] = Sha256::new()
        .chain_update(what)
        .chain_update(group.to_le_bytes())
        .chain_update(number.to_le_bytes())
        .finalize()
        .into();
    let start = digest.first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(start)
}

/// Where a rank leaves its reason for giving up.
fn note_key(rank: Rank) -> String {
    format!("gave_up/{rank}")
}
