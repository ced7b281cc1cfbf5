//! A collector over many nodes, some of which are dead and some slow: real servers, real sockets.

use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{
    Liveness, Observation, Poll, Seen, SimulatedSource, Source, SourceError,
};
use rcomm_analyzer::{Anchor, Code, LiveOptions, Pace, Snapshot, Watch};
use rcomm_recorder::publish::Dump;
use rcomm_web::{Access, Board, NodeSource, Nodes, Server};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const NODES: usize = 64;
const DEAD: usize = 6;
const SLOW: usize = 6;
const TOKEN: &str = "0123456789abcdef";

/// A job that all nodes run, as it stood when it was looked at last.
struct Job {
    simulation: Simulation,
    anchor: Anchor,
    seen: Mutex<(i64, Vec<Dump>)>,
}

impl Job {
    /// The record of a rank, not much older than now.
    fn record(&self, rank: usize) -> Dump {
        let now = self.anchor.moment().wall_ns;
        let mut seen = self.seen.lock().expect("no test panics in it");
        if now - seen.0 > 500_000_000 {
            *seen = (now, self.simulation.dumps_at(now));
        }
        seen.1[rank].clone()
    }
}

/// The part of the job that runs on one node: two ranks.
struct Part {
    job: Arc<Job>,
    node: usize,
}

impl Source for Part {
    fn name(&self) -> String {
        format!("node {}", self.node)
    }

    fn poll(&mut self, _: Instant) -> Result<Poll, SourceError> {
        let observation = |rank| Observation {
            rank: rank as u32,
            part: 0,
            liveness: Liveness::Alive,
            seen: Seen::Changed(Box::new(self.job.record(rank))),
        };
        Ok(Poll {
            observations: [2 * self.node, 2 * self.node + 1].map(observation).into(),
            world_size: Some(2 * NODES as u32),
            ..Poll::default()
        })
    }
}

fn pace() -> Pace {
    Pace {
        refresh: Duration::from_millis(500),
        timeout: Duration::from_secs(2),
    }
}

fn wait_for(board: &Board, what: &str, look: impl Fn(&Snapshot) -> bool) -> Arc<Snapshot> {
    let began = Instant::now();
    loop {
        if let Some(snapshot) = board.newest().filter(|snapshot| look(snapshot)) {
            return snapshot;
        }
        assert!(
            began.elapsed() < Duration::from_secs(120),
            "waited for {what}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_collector_judges_the_job_although_nodes_are_dead_or_slow() {
    let anchor = Anchor::now();
    let began = anchor.moment().wall_ns - 5_000_000_000;
    let simulation = Simulation::new(Situation::StuckRank, 2 * NODES as u32, began).with_window(48);
    let culprit = simulation.culprit();
    let job = Arc::new(Job {
        simulation,
        anchor,
        seen: Mutex::default(),
    });
    // Eight ranks are a host of the job, and one of every host is in the group that is stuck. What does
    // not answer is elsewhere, or the verdict would rightly be another.
    let others = (0..NODES).filter(|node| node % 4 == 0 && node / 4 != culprit as usize / 8);
    let others: Vec<usize> = others.take(DEAD + SLOW).collect();
    let (dead, slow) = others.split_at(DEAD);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("threads");
    let mut urls = Vec::new();
    let mut watches: Vec<Watch> = Vec::new();
    let mut held = Vec::new();
    let mut stops = Vec::new();
    for node in 0..NODES {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
        if dead.contains(&node) || slow.contains(&node) {
            urls.push(format!("http://{}", silent.local_addr().expect("bound")));
            // A listener that nobody accepts from is slow for ever; one that is closed is dead.
            held.extend(slow.contains(&node).then_some(silent));
            continue;
        }
        drop(silent);
        let part = Part {
            job: job.clone(),
            node,
        };
        let (board, watch) =
            Board::watch(vec![Box::new(part)], LiveOptions::default(), pace()).expect("threads");
        watches.push(watch);
        let address = "127.0.0.1:0".parse().expect("an address");
        let access = Access::with_token(TOKEN);
        let server = runtime
            .block_on(Server::bind(address, board, access))
            .expect("a free port");
        urls.push(format!("http://{}", server.address()));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        stops.push((node, stop));
        runtime.spawn(server.run(async move {
            let _ = stopped.await;
        }));
    }
    let sources = NodeSource::all(Nodes::List(urls), Some(TOKEN)).expect("a list is no name");
    let (board, watch) = Board::watch(sources, LiveOptions::default(), pace()).expect("threads");

    // Whoever does not answer is under suspicion too; the rank at fault is among the accused.
    wait_for(&board, "the rank at fault", |it| {
        let mut findings = it.report.findings.iter();
        findings.any(|it| (it.code, &it.culprit_ranks[..]) == (Code::E101, &[culprit][..]))
    });
    let answered = 2 * (NODES - DEAD - SLOW);
    let snapshot = wait_for(&board, "all that answer", |it| {
        it.report.input.ranks_read == answered
    });
    let failing = snapshot.sources.iter().filter(|it| it.error.is_some());
    assert_eq!(failing.count(), DEAD + SLOW);

    // A node that dies while it is watched: its ranks fall silent, and are still shown.
    let (node, stop) = stops.remove(0);
    drop(stop);
    let snapshot = wait_for(&board, "silent ranks", |it| {
        it.ranks.iter().any(|rank| rank.silent)
    });
    let silent: Vec<usize> = snapshot
        .ranks
        .iter()
        .filter(|rank| rank.silent)
        .map(|rank| rank.rank as usize)
        .collect();
    assert_eq!(silent, [2 * node, 2 * node + 1]);
    drop(watch);
    drop(held);
}

#[test]
fn a_wrong_token_is_told_as_such() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("threads");
    let whole = SimulatedSource::new(Simulation::new(Situation::Healthy, 4, 0), || 5_000_000_000);
    let (board, _watch) =
        Board::watch(vec![Box::new(whole)], LiveOptions::default(), pace()).expect("threads");
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = runtime.block_on(Server::bind(address, board, Access::with_token(TOKEN)));
    let server = server.expect("a free port");
    let url = format!("http://{}", server.address());
    runtime.spawn(server.run(std::future::pending()));
    let mut sources = NodeSource::all(Nodes::List(vec![url]), Some("another")).expect("a list");
    let error = sources[0]
        .poll(Instant::now() + Duration::from_secs(20))
        .expect_err("refused");
    assert!(
        error.to_string().contains("it refused the token"),
        "{error}"
    );
}
