//! A collector over many nodes: real servers and sockets; some nodes are dead, some slow.

use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{
    Liveness, Observation, Poll, Seen, SimulatedSource, Source, SourceError,
};
use rcomm_analyzer::{Code, LiveOptions, Pace, Snapshot, Verdict};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use rcomm_web::{Access, NodeSource, Nodes, Server, SnapshotStore};
use std::collections::HashMap;
use std::io::Write as _;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;

const TOKEN: &str = "0123456789abcdef";
const NODES: u32 = 64;
const RANKS_PER_NODE: u32 = 8;
/// Number of operations that each rank's ring holds.
const WINDOW: usize = 48;
/// Time limit for every awaited condition, on a slow machine too.
const DEADLINE: Duration = Duration::from_secs(300);
/// Delay of each request to a slow node.
const SLOW: Duration = Duration::from_millis(1500);

fn start_runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("the threads start")
}

fn options() -> LiveOptions {
    LiveOptions {
        // On a busy machine a read may come late.
        silent_after: Duration::from_secs(40),
        ..LiveOptions::default()
    }
}

fn pace() -> Pace {
    Pace {
        refresh: Duration::from_secs(1),
        timeout: Duration::from_secs(4),
    }
}

fn wall_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    i64::try_from(now.expect("it is after 1970").as_nanos()).expect("it is before 2262")
}

fn wait_until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The records of a whole job, made anew at most twice a second for all nodes together.
struct Job {
    simulation: Simulation,
    /// The newest records, by rank, and when they were made, ns since the epoch.
    made: Mutex<(i64, Arc<Vec<Dump>>)>,
}

impl Job {
    fn dumps(&self) -> (i64, Arc<Vec<Dump>>) {
        let mut made = self.made.lock().expect("no thread panicked");
        let now = wall_ns();
        if now - made.0 > 500_000_000 {
            *made = (now, Arc::new(self.simulation.dumps_at(now)));
        }
        made.clone()
    }
}

/// The rings of one node.
struct NodeRings {
    job: Arc<Job>,
    ranks: Range<u32>,
    /// The records of each rank as they were last returned.
    last: HashMap<Rank, Dump>,
}

impl Source for NodeRings {
    fn name(&self) -> String {
        format!("ranks {:?}", self.ranks)
    }

    fn poll(&mut self, _deadline: Instant) -> Result<Poll, SourceError> {
        let (now, dumps) = self.job.dumps();
        let observations = self.ranks.clone().map(|rank| {
            let dump = &dumps[rank as usize];
            let same = |last: &Dump| last.entries == dump.entries;
            let seen = if self.last.get(&rank).is_some_and(same) {
                Seen::Unchanged {
                    heartbeat_ns: now,
                    as_of_ns: now,
                }
            } else {
                self.last.insert(rank, dump.clone());
                Seen::Changed(Box::new(dump.clone()))
            };
            Observation {
                rank,
                part: 0,
                liveness: Liveness::Alive,
                seen,
            }
        });
        Ok(Poll {
            observations: observations.collect(),
            world_size: Some(self.job.simulation.ranks()),
            ..Poll::default()
        })
    }
}

/// Forwards connections to a node: delays requests, and counts the bytes of the answers.
async fn forward(
    listener: TcpListener,
    node: SocketAddr,
    delay: Duration,
    answered: Arc<AtomicU64>,
) {
    while let Ok((client, _)) = listener.accept().await {
        let answered = answered.clone();
        tokio::spawn(async move {
            let Ok(server) = TcpStream::connect(node).await else {
                return;
            };
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move {
                let mut question = vec![0; 64 * 1024];
                while let Ok(read @ 1..) = from_client.read(&mut question).await {
                    tokio::time::sleep(delay).await;
                    if to_server.write_all(&question[..read]).await.is_err() {
                        return;
                    }
                }
            });
            let mut answer = vec![0; 64 * 1024];
            while let Ok(read @ 1..) = from_server.read(&mut answer).await {
                answered.fetch_add(read as u64, Relaxed);
                if to_client.write_all(&answer[..read]).await.is_err() {
                    return;
                }
            }
        });
    }
}

/// How a node behaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Lives,
    /// Gets every request late.
    Slow,
    /// No process listens.
    Gone,
    /// Accepts connections and never answers.
    Frozen,
}

/// Of every ten nodes one is dead and one is slow; the node of the rank at fault is neither.
fn fate(node: u32) -> Fate {
    match (node % 10, node % 20) {
        (3, 3) => Fate::Gone,
        (3, _) => Fate::Frozen,
        (7, _) => Fate::Slow,
        _ => Fate::Lives,
    }
}

fn ranks_of(node: u32) -> Range<Rank> {
    node * RANKS_PER_NODE..(node + 1) * RANKS_PER_NODE
}

/// The nodes of a job that gets stuck, and a collector over all of them.
struct Cluster {
    // Dropped before the threads that serve it.
    collector: SnapshotStore,
    job: Arc<Job>,
    /// Bytes of all answers of the nodes.
    answered: Arc<AtomicU64>,
    _gone: Vec<TcpSocket>,
    _watches: Vec<rcomm_analyzer::Watch>,
    _runtime: Runtime,
}

impl Cluster {
    fn start() -> Self {
        let runtime = start_runtime();
        let ranks = NODES * RANKS_PER_NODE;
        let simulation =
            Simulation::new(Situation::StuckRank, ranks, wall_ns()).with_window(WINDOW);
        assert_eq!(simulation.ranks_per_host(), RANKS_PER_NODE);
        let job = Arc::new(Job {
            simulation,
            made: Mutex::default(),
        });
        let answered = Arc::<AtomicU64>::default();
        let (mut urls, mut watches, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        for node in 0..NODES {
            if fate(node) == Fate::Gone {
                // Bound without listening, so that no other program gets the port.
                let socket = TcpSocket::new_v4().expect("a socket can be made");
                socket.bind(any).expect("a port is free");
                let address = socket.local_addr().expect("the socket is bound");
                urls.push(format!("http://{address}"));
                gone.push(socket);
                continue;
            }
            let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"));
            let listener = listener.expect("a port is free");
            let address = listener.local_addr().expect("the socket is bound");
            urls.push(format!("http://{address}"));
            let delay = match fate(node) {
                Fate::Slow => SLOW,
                Fate::Lives | Fate::Gone => Duration::ZERO,
                Fate::Frozen => {
                    runtime.spawn(async move {
                        let mut held = Vec::new();
                        while let Ok((stream, _)) = listener.accept().await {
                            held.push(stream);
                        }
                    });
                    continue;
                }
            };
            let rings = NodeRings {
                job: job.clone(),
                ranks: ranks_of(node),
                last: HashMap::new(),
            };
            let (store, watch) = SnapshotStore::watch(vec![Box::new(rings)], options(), pace())
                .expect("the threads start");
            let server = Server::bind(any, store, Access::with_token(TOKEN));
            let server = runtime.block_on(server).expect("a port is free");
            runtime.spawn(forward(listener, server.address(), delay, answered.clone()));
            runtime.spawn(server.run(std::future::pending()));
            watches.push(watch);
        }
        let sources =
            NodeSource::all(Nodes::List(urls), Some(TOKEN)).expect("a list needs no look-up");
        let (collector, watch) =
            SnapshotStore::watch(sources, options(), pace()).expect("the threads start");
        watches.push(watch);
        Self {
            collector,
            job,
            answered,
            _gone: gone,
            _watches: watches,
            _runtime: runtime,
        }
    }
}

fn read_ranks(snapshot: &Snapshot) -> Vec<Rank> {
    let read = snapshot
        .ranks
        .iter()
        .filter(|view| view.first_dump().is_some());
    read.map(|view| view.rank).collect()
}

#[test]
fn a_collector_over_64_nodes_of_which_some_are_dead_and_some_slow_names_the_rank_at_fault() {
    let cluster = Cluster::start();
    let simulation = &cluster.job.simulation;
    let living: Vec<Rank> = (0..NODES)
        .filter(|&node| matches!(fate(node), Fate::Lives | Fate::Slow))
        .flat_map(ranks_of)
        .collect();
    let stuck = wait_until("the verdict", || {
        let snapshot = cluster.collector.newest()?;
        (read_ranks(&snapshot) == living && snapshot.report.verdict == Verdict::Stuck)
            .then_some(snapshot)
    });
    let findings = &stuck.report.findings;
    assert_eq!(findings[0].code, Code::E101, "{findings:#?}");
    assert_eq!(findings[0].culprit_ranks, [simulation.culprit()]);
    let causes = findings.iter().filter(|it| it.caused_by.is_none());
    let error_codes: Vec<Code> = causes
        .map(|it| it.code)
        .filter(|code| code.id().starts_with('E'))
        .collect();
    assert_eq!(
        error_codes,
        [Code::E101],
        "another finding is an error: {findings:#?}"
    );
    assert_eq!(stuck.ranks.len(), simulation.ranks() as usize);
    assert!(
        stuck.ranks.iter().all(|view| !view.silent),
        "a slow node counts as silent"
    );

    // Unreachable nodes are reported with the reason.
    let failing: Vec<bool> = stuck.sources.iter().map(|it| it.error.is_some()).collect();
    let dead: Vec<bool> = (0..NODES)
        .map(|node| matches!(fate(node), Fate::Gone | Fate::Frozen))
        .collect();
    assert_eq!(failing, dead);
    assert_eq!(dead.iter().filter(|dead| **dead).count(), 7);

    // The records are those of the nodes.
    let (_, truth) = cluster.job.dumps();
    for rank in living.iter().map(|&rank| rank as usize) {
        let ids = |dump: &Dump| -> Vec<_> {
            let entries = dump.entries.iter();
            entries
                .map(|entry| (entry.record_id, entry.state, entry.retired))
                .collect()
        };
        let collected = stuck.ranks[rank].first_dump().expect("it was read");
        assert_eq!(ids(collected), ids(&truth[rank]), "rank {rank}");
        assert_eq!(collected.groups.len(), truth[rank].groups.len());
        for (ours, theirs) in collected.groups.iter().zip(&truth[rank].groups) {
            assert_eq!(ours.info, theirs.info, "rank {rank}");
        }
    }
    assert_unchanged_records_cost_little(&cluster, living.len() as u64);
}

/// Checks that the nodes answer with less than 4 KiB per rank and second while no record changes.
fn assert_unchanged_records_cost_little(cluster: &Cluster, ranks: u64) {
    let newest_at = || cluster.collector.newest().map(|snapshot| snapshot.at);
    let (first, bytes_before) = (newest_at(), cluster.answered.load(Relaxed));
    let began = Instant::now();
    wait_until("another snapshot after four seconds", || {
        (began.elapsed() > Duration::from_secs(4) && newest_at() != first).then_some(())
    });
    let bytes = cluster.answered.load(Relaxed) - bytes_before;
    let seconds = began.elapsed().as_secs().max(1);
    let _ = writeln!(
        std::io::stderr(),
        "{ranks} ranks: {} bytes a rank and second",
        bytes / seconds / ranks
    );
    // The whole dump of a rank has about twenty thousand bytes.
    assert!(
        bytes / seconds / ranks < 4096,
        "{bytes} bytes in {seconds} s"
    );
}

#[test]
fn a_wrong_token_is_reported() {
    let runtime = start_runtime();
    let source = SimulatedSource::new(Simulation::new(Situation::Healthy, 4, 0), || 5_000_000_000);
    let (store, _watch) =
        SnapshotStore::watch(vec![Box::new(source)], LiveOptions::default(), pace())
            .expect("the threads start");
    let address = "127.0.0.1:0".parse().expect("the text is an address");
    let server = runtime.block_on(Server::bind(address, store, Access::with_token(TOKEN)));
    let server = server.expect("a port is free");
    let url = format!("http://{}", server.address());
    runtime.spawn(server.run(std::future::pending()));
    let mut sources =
        NodeSource::all(Nodes::List(vec![url]), Some("another")).expect("a list needs no look-up");
    let error = sources[0]
        .poll(Instant::now() + Duration::from_secs(20))
        .expect_err("the token is refused");
    assert!(
        error.to_string().contains("it refused the token"),
        "{error}"
    );
}
