//! Tests the source of PyTorch's worker servers, with recorded answers and with a real job.

use crate::server::{Answers, serve, serve_shared};
use rcomm_analyzer::source::{
    DumpRequests as _, Poll, Seen, Source, WorkerServerDumps, WorkerServerSource,
};
use rcomm_analyzer::{Code, Live, LiveOptions, Moment, Verdict, analyze};
use rcomm_recorder::model::EntryState;
use rcomm_recorder::publish::{Dump, Recorder};
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const DEADLINE: Duration = Duration::from_secs(60);

fn fixture(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/worker_servers");
    std::fs::read(folder.join(name)).expect("fixtures are checked in")
}

/// The answers of one rank of the recorded job: four ranks over gloo, of which rank 2 never issues all_reduce #6.
fn recorded(rank: u32) -> Answers {
    let ring = fixture(&format!("fr_trace_rank{rank}.json"));
    [
        ("/handler/", (200, fixture("handlers.json"))),
        ("/handler/fr_trace_json", (200, ring)),
        (
            "/handler/dump_nccl_trace_pickle",
            (200, fixture("nccl_empty")),
        ),
    ]
    .into()
}

/// The source of the worker servers at these addresses.
fn source(addresses: &[SocketAddr]) -> WorkerServerSource {
    let addresses = addresses.iter().map(|address| {
        let text = format!("http://{address}");
        text.parse().expect("the text is an address")
    });
    WorkerServerSource::at(addresses.collect())
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// The number of observations of each kind: changed, unchanged, failed.
fn kinds(poll: &Poll) -> [usize; 3] {
    let mut kinds = [0; 3];
    for observation in &poll.observations {
        kinds[match observation.seen {
            Seen::Changed(_) => 0,
            Seen::Unchanged { .. } => 1,
            Seen::Failed(_) => 2,
        }] += 1;
    }
    kinds
}

/// The moment at which a job has been watched for 100 s and `after`.
fn moment(after: Duration) -> Moment {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("the clock shows a time after 1970");
    Moment {
        elapsed: Duration::from_secs(100) + after,
        wall_ns: (now + after).as_nanos() as i64,
    }
}

#[test]
fn both_recorders_of_every_rank_are_read_and_the_late_rank_is_named() {
    let addresses: Vec<SocketAddr> = (0..4).map(|rank| serve(recorded(rank))).collect();
    let mut source = source(&addresses);
    let poll = source.poll(soon()).expect("the servers answer");
    assert_eq!(kinds(&poll), [8, 0, 0], "two recorders of four ranks");
    let mut live = Live::new(LiveOptions::default(), analyze, vec![source.name()]);
    live.observe(0, Ok(poll), moment(Duration::ZERO));
    let snapshot = live
        .refresh(moment(Duration::ZERO))
        .expect("the poll gives a new snapshot");
    // NCCL's recorder was never used, so its empty ring is not shown beside the other.
    assert!(snapshot.ranks.iter().all(|view| view.dumps.len() == 1));
    assert_eq!(&*snapshot.ranks[1].host, "127.0.0.1");
    assert_eq!(
        snapshot.report.verdict,
        Verdict::Stuck,
        "{:?}",
        snapshot.report
    );
    let finding = &snapshot.report.findings[0];
    assert_eq!(
        (finding.code, finding.culprit_ranks.as_slice()),
        (Code::E101, &[2][..])
    );
    let again = source.poll(soon()).expect("the servers still answer");
    assert_eq!(kinds(&again), [0, 8, 0]);
}

#[test]
fn the_failure_of_a_rank_does_not_affect_the_others() {
    // This socket has the port but never listens, so no other process can get the port.
    let unheard =
        socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket can be made");
    bind(&unheard, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let mut broken = recorded(1);
    broken.insert("/handler/fr_trace_json", (500, b"it threw".to_vec()));
    let mut garbage = recorded(1);
    garbage.insert(
        "/handler/fr_trace_json",
        (200, b"\x80\x02garos\nsystem\n.".to_vec()),
    );
    let addresses = [
        serve(recorded(0)),
        getsockname(&unheard)
            .ok()
            .and_then(|address| address.try_into().ok())
            .expect("the socket has an address"),
        silent.local_addr().expect("the socket has an address"),
        serve(broken),
        serve(garbage),
        serve([("/handler/", (200, b"<html>".to_vec()))].into()),
    ];
    let deadline = Instant::now() + Duration::from_secs(5);
    let poll = source(&addresses)
        .poll(deadline)
        .expect("one server answers");
    drop(unheard);
    let failures: BTreeMap<u32, &str> = poll
        .observations
        .iter()
        .filter_map(|observation| match &observation.seen {
            Seen::Failed(reason) => Some((observation.rank, reason.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(
        failures.keys().copied().collect::<Vec<_>>(),
        [1, 2, 3, 4, 5],
        "{failures:?}"
    );
    for (rank, part) in [
        (1, "refused"),
        (2, "has not answered yet"),
        (3, "HTTP status 500: it threw"),
        (4, "is no record"),
        (5, "is it a PyTorch worker server?"),
    ] {
        assert!(
            failures[&rank].contains(part),
            "{rank}: {}",
            failures[&rank]
        );
    }
}

#[test]
fn ranks_are_asked_to_write_their_dumps_and_refusals_are_reported() {
    let mut agreeing = recorded(0);
    agreeing.insert("/handler/fr_dump_file", (200, b"dumping".to_vec()));
    let mut refusing = recorded(1);
    refusing.insert("/handler/fr_dump_file", (503, b"no rank".to_vec()));
    let addresses = [serve(agreeing), serve(refusing), serve(recorded(2))];
    let answers = WorkerServerDumps::new(source(&addresses))
        .ask(soon())
        .expect("ranks are known");
    assert_eq!(answers.agreed, [0]);
    let refused: Vec<u32> = answers.refused.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(refused, [1, 2]);
    assert!(answers.refused[0].1.contains("503: no rank"), "{answers:?}");
}

#[test]
fn a_pickle_of_the_nccl_recorder_brings_its_call_stacks() {
    let dumps = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/dumps/nccl-stuck-2x2x2/pickle");
    let mut files: Vec<PathBuf> = std::fs::read_dir(dumps)
        .expect("fixtures are checked in")
        .map(|entry| entry.expect("the file can be read").path())
        .collect();
    files.sort();
    let addresses: Vec<SocketAddr> = files
        .iter()
        .map(|file| {
            let mut answers = recorded(0);
            answers.remove("/handler/fr_trace_json");
            answers.insert(
                "/handler/",
                (200, br#"["dump_nccl_trace_pickle"]"#.to_vec()),
            );
            let ring = std::fs::read(file).expect("the file can be read");
            answers.insert("/handler/dump_nccl_trace_pickle", (200, ring));
            serve(answers)
        })
        .collect();
    let poll = source(&addresses).poll(soon()).expect("the servers answer");
    assert_eq!(poll.observations.len(), files.len());
    for observation in &poll.observations {
        let Seen::Changed(dump) = &observation.seen else {
            panic!("the first poll reads every ring: {observation:?}");
        };
        assert_eq!(dump.recorder, Recorder::Nccl);
        assert!(!dump.frames.is_empty());
    }
}

/// A process that is killed and waited for at the end of the test, with all processes that it started (such as the
/// debug server's page).
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let group = i32::try_from(self.0.id()).expect("the number is a process id");
        let group = rustix::process::Pid::from_raw(group).expect("the number is a process id");
        // An error means that the rank has ended on its own.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.0.wait();
    }
}

/// The program of a rank on gloo. Rank 1 waits for input, and so never issues the last all_reduce.
const JOB: &str = r#"
import sys, torch, torch.distributed as dist, torch.distributed.debug as debug
dist.init_process_group("gloo")
debug.start_debug_server(port=0)
data = torch.ones(4)
for _ in range(5):
    dist.all_reduce(data)
print("ready", flush=True)
if dist.get_rank() == 1:
    sys.stdin.read()
dist.all_reduce(data)
"#;

/// The request for the whole ring of NCCL's recorder.
const WHOLE: &str = "/handler/dump_nccl_trace_pickle?includecollectives=true&includestacktraces=true&onlyactive=false";
/// The request for its operations under way only.
const UNDER_WAY: &str = "/handler/dump_nccl_trace_pickle?includecollectives=true&includestacktraces=false&onlyactive=true";

/// The server of a rank on NCCL that is stuck in the last of `operations`: its whole ring, and only the operation under
/// way.
fn stuck_in_nccl(operations: u64) -> Answers {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let path = path.join("../tests/fixtures/dumps/nccl-stuck-2x2x2/pickle/rank_0");
    let bytes = std::fs::read(path).expect("fixtures are checked in");
    let (mut dump, _) = Dump::read(&bytes).expect("the bytes are a dump");
    let last = dump.entries.last().cloned().expect("the dump has entries");
    while (dump.entries.len() as u64) < operations {
        let mut entry = last.clone();
        entry.record_id = last.record_id + dump.entries.len() as u64;
        entry.op_id = entry.record_id;
        entry.collective_seq_id = last.collective_seq_id + dump.entries.len() as u64;
        entry.state = EntryState::Completed;
        entry.retired = true;
        entry.time_discovered_completed_ns = last.time_created_ns + 1;
        dump.entries.push(entry);
    }
    let end = dump.entries.last_mut().expect("the dump has entries");
    end.state = EntryState::Started;
    end.retired = false;
    end.time_discovered_completed_ns = 0;
    let whole = dump.to_pickle();
    dump.entries
        .retain(|entry| entry.time_discovered_completed_ns == 0);
    let under_way = dump.to_pickle();
    let handlers = br#"["dump_nccl_trace_pickle"]"#.to_vec();
    [
        ("/handler/", (200, handlers)),
        (WHOLE, (200, whole)),
        (UNDER_WAY, (200, under_way)),
    ]
    .into()
}

#[test]
fn of_a_ring_that_is_known_only_the_operations_under_way_are_read() {
    let answers = Arc::new(Mutex::new(stuck_in_nccl(200)));
    let mut source = source(&[serve_shared(answers.clone())]);
    let poll = source.poll(soon()).expect("the server answers");
    assert_eq!(kinds(&poll), [1, 0, 0]);
    // The server no longer has the whole ring: the second poll succeeds only if it does not ask for it.
    let whole = answers.lock().expect("no thread panics").remove(WHOLE);
    let poll = source.poll(soon()).expect("the server answers");
    assert_eq!(kinds(&poll), [0, 1, 0]);
    // The operation under way is another one now: the whole ring is read, and its answer is the same to the byte.
    let mut shared = answers.lock().expect("no thread panics");
    shared.insert(WHOLE, whole.expect("the server had this answer"));
    let under_way = stuck_in_nccl(201).remove(UNDER_WAY);
    shared.insert(UNDER_WAY, under_way.expect("the server had this answer"));
    drop(shared);
    let poll = source.poll(soon()).expect("the server answers");
    assert_eq!(kinds(&poll), [0, 1, 0]);
    *answers.lock().expect("no thread panics") = stuck_in_nccl(201);
    let poll = source.poll(soon()).expect("the server answers");
    assert_eq!(kinds(&poll), [1, 0, 0]);
}

/// Prints how long a poll of 1,024 worker servers takes. Each is of a rank on NCCL with 2,000 operations, one of which
/// is under way.
#[test]
#[ignore = "a measurement"]
fn time_of_polls_of_1024_worker_servers() {
    let answers = stuck_in_nccl(2_000);
    println!("a whole ring has {} bytes", answers[WHOLE].1.len());
    // Four servers answer for all ranks.
    let servers: Vec<SocketAddr> = (0..4).map(|_| serve(answers.clone())).collect();
    let addresses: Vec<SocketAddr> = servers.iter().copied().cycle().take(1024).collect();
    let mut source = source(&addresses);
    for round in 1..=5 {
        let start = Instant::now();
        let poll = source.poll(start + DEADLINE).expect("the servers answer");
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "poll {round}: {seconds:.2} s, changed, unchanged, failed: {:?}",
            kinds(&poll)
        );
    }
}

/// The lines that a process writes to standard output, as they come.
fn lines(child: &mut Child) -> Receiver<String> {
    let stdout = child.stdout.take().expect("standard output is a pipe");
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

#[test]
fn a_real_job_is_found_through_its_store_and_its_late_rank_named() {
    let Ok(python) = std::env::var("RCOMM_TEST_PYTHON") else {
        eprintln!("skipped: RCOMM_TEST_PYTHON names no Python with PyTorch");
        return;
    };
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port is free")
        .port();
    let mut ranks: Vec<Rank> = (0..2)
        .map(|rank| {
            let child = Command::new(&python)
                .args(["-c", JOB])
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", "2")
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("TORCH_FR_BUFFER_SIZE", "100")
                .process_group(0)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn();
            Rank(child.expect("the interpreter starts"))
        })
        .collect();
    for rank in &mut ranks {
        let lines = lines(&mut rank.0);
        let deadline = Instant::now() + DEADLINE;
        while lines
            .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            .expect("the rank prints that it is ready")
            != "ready"
        {}
    }
    let store = format!("127.0.0.1:{port}")
        .parse()
        .expect("the text is an address");
    let mut source = WorkerServerSource::in_store(store, None);
    let mut options = LiveOptions::default();
    options.policy.overdue = Duration::from_millis(200);
    let mut live = Live::new(options, analyze, vec![source.name()]);
    let deadline = Instant::now() + DEADLINE;
    let start = Instant::now();
    loop {
        let poll = source.poll(Instant::now() + Duration::from_secs(5));
        let now = Moment {
            elapsed: start.elapsed(),
            ..moment(Duration::ZERO)
        };
        live.observe(0, poll, now);
        let report = live.refresh(now).map(|snapshot| snapshot.report);
        let first = report.as_ref().and_then(|report| report.findings.first());
        if first.is_some_and(|first| first.code == Code::E101 && first.culprit_ranks == [1]) {
            return;
        }
        assert!(Instant::now() < deadline, "{report:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
