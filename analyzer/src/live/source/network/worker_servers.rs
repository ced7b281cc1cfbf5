//! Reads PyTorch's worker servers as a source: HTTP servers in the ranks of a job that called
//! `torch.distributed.debug.start_debug_server()`.
//!
//! Their addresses are in the job's store (key `debug_server/rank<R>`), or the user gives them. Both recorders of each
//! rank are read, NCCL's and PyTorch's recorder for other backends (gloo), which are different rings of one process;
//! pickles are parsed without executing anything. If a rank does not answer, the others are shown nevertheless.
//!
//! A whole ring is about 1 MB. So from the second poll on, NCCL's recorder is asked only for the operations under way.
//! If these and the progress of the groups have not changed, no collective was issued. Otherwise, and once 10 to 16.3
//! seconds have passed, depending on the rank, the whole ring is read again. An answer with the same bytes is not
//! parsed again.

use super::address::{HostPort, HttpAddress};
use super::questions::{NO_ANSWER_YET, RankPoller, ask_all, unless_asked};
use super::store;
use crate::live::source::{
    DumpAnswers, DumpRequests, Liveness, Observation, Poll, Seen, Source, SourceError, is_same,
};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, EndpointAddress, HttpRequest};
use rcomm_verdict::Problem;
use rcomm_verdict::format::count;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher as _};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The time between two searches of the store for ranks that joined.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);
/// The least time after which a whole ring is read again, though its operations under way are the same: a message may
/// have been issued and completed, which NCCL's counters leave out. Up to 6.3 seconds are added by rank.
const WHOLE_RING_INTERVAL: Duration = Duration::from_secs(10);
/// The prefix of the keys with the servers' addresses; the rank follows.
const KEY: &str = "debug_server/rank";

/// The handlers that return the ring of a recorder; the first one that exists is used.
type RecorderPaths = &'static [&'static str];
/// NCCL's recorder, then that for other backends.
const RECORDERS: [RecorderPaths; 2] = [
    &[
        // This form has call stacks, which the JSON form lacks.
        "dump_nccl_trace_pickle?includecollectives=true&includestacktraces=true&onlyactive=false",
        "dump_nccl_trace_json?includecollectives=true&onlyactive=false",
    ],
    &["fr_trace_json"],
];

/// A worker server that the user names: `[RANK=]ADDRESS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerAddress {
    /// The rank of the server's process; `None` if the user did not state it: then the server's index in the list
    /// counts.
    pub rank: Option<Rank>,
    /// The server's address.
    pub address: HttpAddress,
}

impl FromStr for WorkerAddress {
    type Err = super::address::AddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let given = text.split_once('=');
        let rank = given.and_then(|(rank, rest)| Some((rank.parse().ok()?, rest)));
        let (rank, address) = match rank {
            Some((rank, rest)) => (Some(rank), rest),
            None => (None, text),
        };
        Ok(Self {
            rank,
            address: address.parse()?,
        })
    }
}

/// A rank's Python stacks as text, or why there are none.
pub type RankStacksText = (Rank, Result<String, String>);

/// The answer of each rank, or why there is none, by rank.
type RankReplies = Vec<(Rank, Result<Vec<u8>, String>)>;

/// PyTorch's worker servers as a source; see the module.
pub struct WorkerServerSource {
    store: Option<HostPort>,
    world_size: Option<u32>,
    workers: BTreeMap<Rank, KnownWorker>,
    poller: RankPoller<WorkerPoll>,
    /// When the store was last searched.
    searched: Option<Instant>,
}

/// The observations of one rank, and the parts that could not be used.
type WorkerPoll = (Vec<Observation>, Vec<Problem>);

/// The server of one rank; a request in progress locks `state`.
struct KnownWorker {
    address: HttpAddress,
    state: Arc<Mutex<WorkerState>>,
}

/// The server of one rank with its last answers.
struct WorkerState {
    address: HttpAddress,
    /// The address that answered the last request; `None` if none did.
    reached: Option<EndpointAddress>,
    /// The names of the server's handlers; `None` if they must be requested.
    handlers: Option<Vec<String>>,
    /// The last ring of each of [`RECORDERS`].
    last: [Option<LastRing>; RECORDERS.len()],
}

/// A ring that was read as a whole.
struct LastRing {
    dump: Dump,
    /// The hash of the answer's bytes.
    hash: u64,
    /// The parts of the ring that could not be used.
    unusable_parts: Vec<String>,
    /// When the ring was last read as a whole.
    read: Instant,
}

impl LastRing {
    /// Whether the operations under way can show that nothing was issued since: only soon after the ring was read as a
    /// whole, and only for a recorder that counts progress.
    fn can_show_no_change(&self, rank: Rank) -> bool {
        // The intervals of the ranks differ, so that the whole rings are not all read in one poll.
        let interval = WHOLE_RING_INTERVAL + Duration::from_millis(u64::from(rank % 64) * 100);
        let counts_progress = self.dump.groups.iter().any(|group| group.status.is_some());
        counts_progress && self.read.elapsed() < interval
    }

    /// Whether the operations under way and the progress of the groups are still those of this ring.
    fn shows_no_change(&self, under_way: &Dump) -> bool {
        let operations = |dump: &Dump| {
            let pending = dump.entries.iter();
            let pending = pending.filter(|entry| entry.time_discovered_completed_ns == 0);
            pending
                .map(|entry| {
                    let started_ns = entry.time_discovered_started_ns;
                    (entry.record_id, entry.state, entry.retired, started_ns)
                })
                .collect::<Vec<_>>()
        };
        let progress = |dump: &Dump| -> BTreeMap<(String, String), _> {
            let groups = dump.groups.iter();
            let counted = groups.filter_map(|group| {
                let name = (group.info.name.clone(), group.info.desc.clone());
                Some((name, group.status?))
            });
            counted.collect()
        };
        operations(&self.dump) == operations(under_way)
            && progress(&self.dump) == progress(under_way)
    }
}

impl KnownWorker {
    fn new(address: HttpAddress) -> Self {
        let state = WorkerState {
            address: address.clone(),
            reached: None,
            handlers: None,
            last: Default::default(),
        };
        Self {
            address,
            state: Arc::new(Mutex::new(state)),
        }
    }
}

impl WorkerServerSource {
    /// A source of the servers whose addresses are in a job's store: those of `world_size` ranks, or of all that it
    /// lists.
    pub fn in_store(store: HostPort, world_size: Option<u32>) -> Self {
        Self {
            store: Some(store),
            world_size,
            workers: BTreeMap::new(),
            poller: RankPoller::new(),
            searched: None,
        }
    }

    /// A source of the servers at these addresses.
    pub fn at(given: Vec<WorkerAddress>) -> Self {
        let workers = (0..).zip(given).map(|(index, worker)| {
            let rank = worker.rank.unwrap_or(index);
            (rank, KnownWorker::new(worker.address))
        });
        Self {
            store: None,
            world_size: None,
            workers: workers.collect(),
            poller: RankPoller::new(),
            searched: None,
        }
    }

    /// Searches the store for ranks if a search is due; known ranks remain if it does not answer. An error if no rank
    /// is known.
    fn search(
        &mut self,
        deadline: Instant,
        problems: &mut Vec<Problem>,
    ) -> Result<(), SourceError> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let is_due = self
            .searched
            .is_none_or(|searched| searched.elapsed() >= SEARCH_INTERVAL);
        if !is_due && !self.workers.is_empty() {
            return Ok(());
        }
        let place = format!("store {store}");
        let found = match store::read_by_rank(store, KEY, self.world_size, deadline) {
            Ok(found) => found,
            Err(source) if self.workers.is_empty() => {
                return Err(SourceError::Io { place, source });
            }
            Err(error) => {
                problems.push(unusable(&place, format!("can no longer be read: {error}")));
                return Ok(());
            }
        };
        self.searched = Some(Instant::now());
        for (rank, text) in found {
            match text.parse::<HttpAddress>() {
                Ok(address) => self.add_worker(rank, address),
                Err(error) => problems.push(unusable(&format!("{place}, key {KEY}{rank}"), error)),
            }
        }
        if self.workers.is_empty() {
            return Err(SourceError::Nothing {
                what: format!("{place} holds no address of a worker server ({KEY}0, ...)"),
                hint: "call torch.distributed.debug.start_debug_server() in every rank, or name \
                       the servers with --worker-server"
                    .into(),
            });
        }
        Ok(())
    }

    /// The Python stacks of every rank, as text that [`parse`](crate::stacks::parse) reads, or why there are none.
    ///
    /// # Blocking
    ///
    /// At most until `deadline`.
    ///
    /// # Errors
    ///
    /// [`SourceError`] if no rank is known: the store cannot be read or lists none.
    pub fn tracebacks(&mut self, deadline: Instant) -> Result<Vec<RankStacksText>, SourceError> {
        let answers = self.ask_each("/handler/dump_traceback", deadline)?;
        let text = |body: Vec<u8>| String::from_utf8_lossy(&body).into_owned();
        let answers = answers.into_iter();
        Ok(answers
            .map(|(rank, answer)| (rank, answer.map(text)))
            .collect())
    }

    /// Runs a handler in every rank and returns the answers.
    fn ask_each(&mut self, handler: &str, deadline: Instant) -> Result<RankReplies, SourceError> {
        self.search(deadline, &mut Vec::new())?;
        let workers: Vec<(&Rank, &KnownWorker)> = self.workers.iter().collect();
        Ok(ask_all(&workers, |(rank, worker)| {
            let mut state = worker.state.lock().unwrap_or_else(PoisonError::into_inner);
            (**rank, state.run(handler, deadline))
        }))
    }

    /// Adds the server of a rank; an address that is already known keeps its state.
    fn add_worker(&mut self, rank: Rank, address: HttpAddress) {
        let known = self.workers.get(&rank);
        if known.is_none_or(|known| known.address != address) {
            self.workers.insert(rank, KnownWorker::new(address));
        }
    }
}

/// Asks every rank to write a dump file (`TORCH_FR_DUMP_TEMP_FILE` sets where).
///
/// The request names no backend: PyTorch then dumps its recorder for gloo, not NCCL's. The files are written after the
/// answers; a rank refuses if no group has registered with that recorder.
pub struct WorkerServerDumps(Mutex<WorkerServerSource>);

impl WorkerServerDumps {
    /// Will request dumps from the ranks of this source, on separate connections.
    pub fn new(source: WorkerServerSource) -> Self {
        Self(Mutex::new(source))
    }
}

impl DumpRequests for WorkerServerDumps {
    fn ask(&self, deadline: Instant) -> Result<DumpAnswers, SourceError> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut answers = DumpAnswers::default();
        for (rank, answer) in source.ask_each("/handler/fr_dump_file", deadline)? {
            match answer {
                Ok(_) => answers.agreed.push(rank),
                Err(reason) => answers.refused.push((rank, reason)),
            }
        }
        Ok(answers)
    }
}

fn failed(rank: Rank, part: u8, reason: String) -> Observation {
    Observation {
        rank,
        part,
        liveness: Liveness::Unknown,
        seen: Seen::Failed(reason),
    }
}

fn unusable(place: &str, sentence: impl ToString) -> Problem {
    Problem::unreadable_dump(place, sentence.to_string())
}

impl Source for WorkerServerSource {
    fn name(&self) -> String {
        match &self.store {
            Some(store) => format!("PyTorch worker servers found in store {store}"),
            None => count(self.workers.len() as u64, "PyTorch worker server"),
        }
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        let mut problems = Vec::new();
        self.search(deadline, &mut problems)?;
        let world_size = self.world_size;
        let workers = self.workers.iter();
        let workers: Vec<(Rank, Arc<Mutex<WorkerState>>)> = workers
            .map(|(&rank, worker)| (rank, worker.state.clone()))
            .collect();
        let ranks: Vec<Rank> = workers.iter().map(|&(rank, _)| rank).collect();
        let polled =
            self.poller.ask(
                workers,
                deadline,
                move |(rank, worker)| match unless_asked(worker) {
                    Some(mut worker) => worker.poll(*rank, world_size, deadline),
                    None => (vec![failed(*rank, 0, NO_ANSWER_YET.into())], vec![]),
                },
            );
        let mut observations = Vec::new();
        for (observed, more_problems) in polled.answers {
            observations.extend(observed);
            problems.extend(more_problems);
        }
        let missing = polled.missing.into_iter();
        observations.extend(missing.map(|index| failed(ranks[index], 0, NO_ANSWER_YET.into())));
        Ok(Poll {
            observations,
            problems,
            world_size,
            ..Poll::default()
        })
    }
}

impl WorkerState {
    /// Reads both recorders of one rank.
    fn poll(&mut self, rank: Rank, world_size: Option<u32>, deadline: Instant) -> WorkerPoll {
        let mut problems = Vec::new();
        if let Err(reason) = self.ask_for_handlers(deadline) {
            let reason = format!("{}: {reason}", self.address);
            return (vec![failed(rank, 0, reason)], problems);
        }
        let mut observations = Vec::new();
        for (part, recorder) in (0u8..).zip(RECORDERS) {
            let Some(handler) = self.handler(recorder) else {
                continue;
            };
            let place = format!("{}, {}", self.address, handler_name(handler));
            let seen = match self.read_recorder(rank, world_size, part, handler, deadline) {
                Ok(seen) => seen,
                Err(reason) => {
                    let reason = format!("{place}: {reason}");
                    observations.push(failed(rank, part, reason));
                    continue;
                }
            };
            let last = self.last[usize::from(part)].iter();
            let reasons = last.flat_map(|ring| &ring.unusable_parts);
            problems.extend(reasons.map(|reason| unusable(&place, reason)));
            observations.push(Observation {
                rank,
                part,
                liveness: Liveness::Alive,
                seen,
            });
        }
        (observations, problems)
    }

    /// Reads one recorder: only its operations under way if these show that it has not changed, else its whole ring.
    fn read_recorder(
        &mut self,
        rank: Rank,
        world_size: Option<u32>,
        part: u8,
        handler: &str,
        deadline: Instant,
    ) -> Result<Seen, String> {
        let part = usize::from(part);
        let unchanged = || Seen::Unchanged {
            heartbeat_ns: 0,
            as_of_ns: now_ns(),
        };
        let last = self.last[part].as_ref();
        if last.is_some_and(|last| last.can_show_no_change(rank))
            && let Some(under_way) = only_under_way(handler)
            && let Ok(answer) = self.read_ring(&under_way, deadline)
            && let Ok((dump, _)) = Dump::read(&answer)
            && let Some(last) = &self.last[part]
            && last.shows_no_change(&dump)
        {
            return Ok(unchanged());
        }
        let answer = self.read_ring(handler, deadline)?;
        let mut hasher = DefaultHasher::new();
        hasher.write(&answer);
        let hash = hasher.finish();
        if let Some(last) = &mut self.last[part]
            && last.hash == hash
        {
            last.read = Instant::now();
            return Ok(unchanged());
        }
        let (mut dump, unusable_parts) =
            Dump::read(&answer).map_err(|error| format!("its answer is no record: {error}"))?;
        dump.identity.rank = Some(rank);
        dump.identity.world_size = dump.identity.world_size.or(world_size);
        dump.identity.dump_time_ns = now_ns();
        if dump.identity.host.is_empty() {
            self.address.host().clone_into(&mut dump.identity.host);
        }
        let before = self.last[part].replace(LastRing {
            dump: dump.clone(),
            hash,
            unusable_parts: unusable_parts.iter().map(ToString::to_string).collect(),
            read: Instant::now(),
        });
        Ok(match before {
            Some(before) if is_same(&before.dump, &dump) => unchanged(),
            _ => Seen::Changed(Box::new(dump)),
        })
    }

    /// Requests the list of handlers if it is not known: those of NCCL exist only if PyTorch was built with NCCL.
    fn ask_for_handlers(&mut self, deadline: Instant) -> Result<(), String> {
        if self.handlers.is_some() {
            return Ok(());
        }
        let request = HttpRequest::get("/handler/");
        let answer = self.address.ask(&request, &mut self.reached, deadline)?;
        let handlers = serde_json::from_slice(&answer.body);
        match (answer.status, handlers) {
            (200, Ok(handlers)) => {
                self.handlers = Some(handlers);
                Ok(())
            }
            (200, Err(error)) => Err(format!(
                "its list of handlers is invalid ({error}): is it a PyTorch worker server?"
            )),
            (status, _) => Err(format!(
                "it answered with HTTP status {status}: is it a PyTorch worker server?"
            )),
        }
    }

    /// Runs a handler and returns the body of its answer.
    fn run(&mut self, handler: &str, deadline: Instant) -> Result<Vec<u8>, String> {
        let request = HttpRequest::post(handler);
        let answer = self.address.ask(&request, &mut self.reached, deadline)?;
        match answer.status {
            200 => Ok(answer.body),
            status => Err(format!(
                "HTTP status {status}: {}",
                error_text(&answer.body)
            )),
        }
    }

    /// The first handler of a recorder that the server has.
    fn handler(&self, recorder: RecorderPaths) -> Option<&'static str> {
        let known = self.handlers.as_deref().unwrap_or_default();
        let is_known = |handler: &&&str| known.iter().any(|known| known == handler_name(handler));
        recorder.iter().find(is_known).copied()
    }

    /// Runs a handler of a recorder, and returns the body of its answer. If the handler fails, the list of handlers is
    /// forgotten.
    fn read_ring(&mut self, handler: &str, deadline: Instant) -> Result<Vec<u8>, String> {
        let path = format!("/handler/{handler}");
        let request = HttpRequest::post(&path);
        let answer = self.address.ask(&request, &mut self.reached, deadline)?;
        if answer.status != 200 {
            // The server may be another build by now.
            self.handlers = None;
            let text = error_text(&answer.body);
            return Err(format!("HTTP status {}: {text}", answer.status));
        }
        Ok(answer.body)
    }
}

/// The handler with the parameters that leave out completed operations and call stacks; `None` if it has no such
/// parameters.
fn only_under_way(handler: &str) -> Option<String> {
    let stacks = ("includestacktraces=true", "includestacktraces=false");
    let under_way = handler.replace("onlyactive=false", "onlyactive=true");
    (under_way != handler).then(|| under_way.replace(stacks.0, stacks.1))
}

/// A server's error message on one line, at most 120 characters.
fn error_text(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let printable = text.chars().filter(|c| !c.is_control());
    printable.take(120).collect()
}

/// The name of a handler without its parameters.
fn handler_name(handler: &str) -> &str {
    handler.split_once('?').map_or(handler, |(name, _)| name)
}

fn now_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| i64::try_from(now.as_nanos()).unwrap_or(i64::MAX))
}
