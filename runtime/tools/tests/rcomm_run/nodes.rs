//! Tests jobs over several hosts, each with a launcher of its own.

use super::output::{content_of, end_of_unread};
use super::*;
use rcomm_recorder::publish::LaunchRecord;

/// A port without a listener, below the usual range of ephemeral ports. It is one of sixteen ports that follow from the
/// process id: test processes that run at the same time rarely take the same one.
fn free_port() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut candidates = (0..16).map(|_| {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed) % 16;
        10_000 + ((std::process::id() * 16 + offset) % 20_000) as u16
    });
    let is_free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    candidates.find(is_free).unwrap().to_string()
}

/// Starts the launcher of one of two hosts, with this number of ranks.
fn node(ranks: u32, node_rank: &str, port: &str, script: &str) -> Running {
    let options = [
        "--nnodes",
        "2",
        "--node-rank",
        node_rank,
        "--master-port",
        port,
    ];
    let mut command = shell(ranks, &options, script);
    command.env("RCOMM_JOB_SECRET", "of all nodes");
    Running::start(command)
}

#[test]
fn two_nodes_make_one_job() {
    let port = free_port();
    let script = "echo $WORLD_SIZE $LOCAL_WORLD_SIZE $LOCAL_RANK $GROUP_RANK $TORCHELASTIC_RUN_ID";
    let second = node(1, "1", &port, script);
    let first = node(2, "0", &port, script);
    let (out, err, code) = first.finish();
    assert_eq!(code, 0, "{err}");
    let (more, err, code) = second.finish();
    assert_eq!(code, 0, "{err}");
    let all = out + &more;
    let ranks = by_rank(all.as_bytes());
    let job = ranks[&0][0].rsplit(' ').next().unwrap();
    assert!(job.starts_with("rcomm-"), "{job}");
    assert_eq!(ranks[&0], [format!("3 2 0 0 {job}")]);
    assert_eq!(ranks[&1], [format!("3 2 1 0 {job}")]);
    assert_eq!(ranks[&2], [format!("3 1 0 1 {job}")]);
}

#[test]
fn failure_on_one_node_ends_the_other() {
    let port = free_port();
    let first = node(1, "0", &port, "sleep 1000");
    let second = node(1, "1", &port, "exit 6");
    let (_, err, code) = second.finish();
    assert_eq!(code, 6, "{err}");
    let (_, err, code) = first.finish();
    assert_eq!(code, 6, "{err}");
    assert!(err.contains("on another host, rank 1"), "{err}");
}

/// The beginning of a script. It writes the rank's process id to the file `pid`, and leaves a process that writes more
/// than all queues hold. While the test does not read that, the launcher's attempt is not over, although the rank has
/// ended.
const LEAVE_OUTPUT: &str = "echo $$ > $MARKS/new; mv $MARKS/new $MARKS/pid; seq 3000000 &";

#[test]
fn a_signal_after_the_ranks_of_a_node_have_ended_ends_the_other_nodes() {
    let (port, marks) = (free_port(), tempfile::tempdir().unwrap());
    let first = node(1, "0", &port, "sleep 1000");
    let script = format!("MARKS={}; {LEAVE_OUTPUT}", marks.path().display());
    let second = node(1, "1", &port, &script);
    assert!(ends(content_of(marks.path(), "pid").trim()));
    second.signal(Signal::TERM);
    assert_eq!(end_of_unread(second), 143);
    let (_, err, code) = first.finish();
    assert_eq!(code, 143, "{err}");
    assert!(err.contains("on another host, stopped by SIGTERM"), "{err}");
}

#[test]
fn a_signal_while_a_launcher_waits_for_the_other_nodes_ends_them() {
    let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
    let first = node(1, "0", &port, "sleep 1000");
    let options = [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-port",
        port.as_str(),
    ];
    let mut command = shell(1, &options, "echo $TORCHELASTIC_RUN_ID");
    command
        .env("RCOMM_JOB_SECRET", "of all nodes")
        .env("RCOMM_RING_DIR", folder.path());
    let mut second = Running::start(command);
    let line = second.line();
    let job = line.strip_prefix("[rank 1] ").unwrap().trim();
    let access = StoreAccess::Secret(Secret::from_text("of all nodes"));
    let port = port.parse().unwrap();
    let store = TcpStore::connect_with("127.0.0.1", port, LONG, &access).unwrap();
    // The launcher of host 1 notes that its ranks have ended, and then waits.
    store.wait(&["rcomm-run/finished/0"], LONG).unwrap();
    second.signal(Signal::TERM);
    let (_, err, code) = second.finish();
    assert_eq!(code, 143, "{err}");
    assert!(
        err.contains("SIGTERM: the ranks of this host have ended"),
        "{err}"
    );
    assert!(!err.contains("on another host"), "{err}");
    let (_, err, code) = first.finish();
    assert_eq!(code, 143, "{err}");
    assert!(err.contains("on another host, stopped by SIGTERM"), "{err}");
    let record = LaunchRecord::of_job(folder.path(), job).pop().unwrap();
    let received = record.received.iter().map(|received| received.signal);
    assert_eq!(received.collect::<Vec<_>>(), [Signal::TERM.as_raw()]);
}

#[test]
fn a_rank_that_is_ended_because_it_was_stopped_fails_the_job_on_all_nodes_once_the_others_have_finished()
 {
    for (stopped_node, other_node) in [("0", "1"), ("1", "0")] {
        let (port, marks) = (free_port(), tempfile::tempdir().unwrap());
        let start = |node_rank: &str, script: &str| {
            let options = [
                "--nnodes",
                "2",
                "--node-rank",
                node_rank,
                "--master-port",
                port.as_str(),
                "--stop-timeout",
                "0.5",
            ];
            let mut command = shell(1, &options, script);
            command
                .env("RCOMM_JOB_SECRET", "of all nodes")
                .env("MARKS", marks.path());
            Running::start(command)
        };
        let stopped = start(stopped_node, "kill -STOP $$");
        // As if it saved a checkpoint.
        let saves = "until [ -e $MARKS/go ]; do sleep 0.01; done; echo saved";
        let mut other = start(other_node, saves);
        let access = StoreAccess::Secret(Secret::from_text("of all nodes"));
        let number = port.parse().unwrap();
        let store = TcpStore::connect_with("127.0.0.1", number, LONG, &access).unwrap();
        // The launcher whose rank was stopped notes that its ranks have ended.
        store.wait(&["rcomm-run/finished/0"], LONG).unwrap();
        // The other launcher says once that the rank was ended, while its own rank runs.
        let reported = format!("on another host, rank {stopped_node} (process ");
        let mut stderr = BufReader::new(other.process.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains(&reported) {
            assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "{said}");
        }
        other.process.stderr = Some(stderr.into_inner());
        std::fs::write(marks.path().join("go"), "").unwrap();
        let (_, err, code) = stopped.finish();
        assert_eq!(code, 124, "{err}");
        assert!(err.contains("waits for the other hosts"), "{err}");
        let (out, err, code) = other.finish();
        assert_eq!(code, 124, "{said}{err}");
        assert!(!err.contains(&reported), "{said}{err}");
        assert_eq!(out, format!("[rank {other_node}] saved\n"));
    }
}

#[test]
fn all_nodes_start_their_ranks_again_after_a_failure_on_one() {
    let (port, marks) = (free_port(), tempfile::tempdir().unwrap());
    let start = |node_rank: &str, script: &str| {
        let options = [
            "--nnodes",
            "2",
            "--node-rank",
            node_rank,
            "--master-port",
            port.as_str(),
            "--max-restarts",
            "2",
            "--linger",
            "0",
        ];
        let mut command = shell(1, &options, script);
        command
            .env("RCOMM_JOB_SECRET", "of all nodes")
            .env("MARKS", marks.path());
        Running::start(command)
    };
    // Rank 1 fails in the first attempt, and rank 0 in the second, each once the other one has printed its line.
    let first = start(
        "0",
        "attempt=$TORCHELASTIC_RESTART_COUNT; echo attempt $attempt; : >$MARKS/0.$attempt; \
        [ $attempt != 1 ] || { until [ -e $MARKS/1.1 ]; do sleep 0.01; done; exit 3; }",
    );
    let second = start(
        "1",
        "attempt=$TORCHELASTIC_RESTART_COUNT; echo up; : >$MARKS/1.$attempt; \
        [ $attempt != 0 ] || { until [ -e $MARKS/0.0 ]; do sleep 0.01; done; exit 4; }",
    );
    let (out, err, code) = first.finish();
    assert_eq!(code, 0, "{err}");
    let ranks = by_rank(out.as_bytes());
    assert_eq!(ranks[&0], ["attempt 0", "attempt 1", "attempt 2"]);
    assert!(
        err.contains("on another host, rank 1") && err.contains("restart 2 of 2"),
        "{err}"
    );
    let (out, err, code) = second.finish();
    assert_eq!(code, 0, "{err}");
    assert_eq!(by_rank(out.as_bytes())[&1], ["up"; 3]);
}

#[test]
fn a_signal_while_a_launcher_waits_to_start_again_ends_the_job() {
    let (port, marks) = (free_port(), tempfile::tempdir().unwrap());
    let start = |node_rank: &str, script: &str| {
        let options = [
            "--nnodes",
            "2",
            "--node-rank",
            node_rank,
            "--master-port",
            port.as_str(),
            "--max-restarts",
            "1",
            "--linger",
            "0",
            "--grace",
            "100",
        ];
        let mut command = shell(1, &options, script);
        command
            .env("RCOMM_JOB_SECRET", "of all nodes")
            .env("MARKS", marks.path());
        Running::start(command)
    };
    // Rank 1 does not end when it is asked to, so the launcher of host 0 waits for that of host 1.
    let first = start("0", "until [ -e $MARKS/up ]; do sleep 0.01; done; exit 3");
    let mut second = start(
        "1",
        "trap '' TERM; : >$MARKS/up; echo up; while :; do sleep 0.05; done",
    );
    second.line();
    let access = StoreAccess::Secret(Secret::from_text("of all nodes"));
    let number = port.parse().unwrap();
    let store = TcpStore::connect_with("127.0.0.1", number, LONG, &access).unwrap();
    store.wait(&["rcomm-run/restart/0/ready"], LONG).unwrap();
    first.signal(Signal::TERM);
    let decision = store.get("rcomm-run/restart/0", LONG).unwrap();
    assert_eq!(text(&decision), "no");
    let (_, err, code) = first.finish();
    assert_eq!(code, 3, "{err}");
    assert!(
        err.contains("SIGTERM: the ranks of this host have ended") && !err.contains("start again"),
        "{err}"
    );
    // Rank 1 has ignored the SIGTERM that the failure of rank 0 caused. This signal kills it at once.
    second.signal(Signal::TERM);
    let (_, err, code) = second.finish();
    assert_ne!(code, 0, "{err}");
}

/// Whether a process is running; a zombie is not.
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    let state = stat.ok().and_then(|stat| {
        let (_, rest) = stat.rsplit_once(')')?;
        rest.trim().chars().next()
    });
    state.is_some_and(|state| state != 'Z')
}

#[test]
fn launcher_of_node_0_that_is_killed_ends_the_other_node() {
    let port = free_port();
    let mut first = node(1, "0", &port, "echo $$; exec sleep 1000");
    let mut second = node(1, "1", &port, "echo up; sleep 1000");
    let line = first.line();
    second.line();
    first.process.kill().unwrap();
    let (_, err, code) = second.finish();
    assert_eq!(code, 125, "{err}");
    assert!(
        err.contains("the store of host 0's launcher failed"),
        "{err}"
    );
    first.process.wait().unwrap();
    // The kernel kills the launcher's rank.
    let rank: u32 = line.trim().rsplit(' ').next().unwrap().parse().unwrap();
    let deadline = Instant::now() + LONG;
    while is_alive(rank) {
        assert!(Instant::now() < deadline, "process {rank} still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn node_rank_given_twice_is_refused() {
    let port = free_port();
    let mut first = node(1, "0", &port, "echo up; sleep 1000");
    let mut second = node(1, "1", &port, "echo up; sleep 1000");
    first.line();
    second.line();
    let third = node(1, "1", &port, "true");
    let (_, err, code) = third.finish();
    assert_eq!(code, 125);
    assert!(err.contains("started 2 times"), "{err}");
    first.signal(Signal::TERM);
    let (_, _, code) = second.finish();
    assert_eq!(code, 143);
    let (_, _, code) = first.finish();
    assert_eq!(code, 143);
}

/// Launchers of a job whose number of hosts may change.
struct Elastic {
    port: String,
    marks: tempfile::TempDir,
}

impl Elastic {
    fn new() -> Self {
        Self {
            port: free_port(),
            marks: tempfile::tempdir().unwrap(),
        }
    }

    /// Starts a launcher with one rank, which prints the world size, its host's number and the attempt, and runs until
    /// [`end`](Self::end) is called.
    fn start(&self, options: &[&str]) -> Running {
        let script = "echo $WORLD_SIZE $GROUP_RANK $TORCHELASTIC_RESTART_COUNT; \
                      until [ -e $MARKS/end ]; do sleep 0.05; done";
        self.run(options, script)
    }

    /// Starts a launcher with one rank, which runs this script.
    fn run(&self, options: &[&str], script: &str) -> Running {
        let common = ["--master-port", &self.port, "--linger", "0"];
        let mut command = shell(1, &[&common, options].concat(), script);
        command
            .env("RCOMM_JOB_SECRET", "of all nodes")
            .env("MARKS", self.marks.path());
        Running::start(command)
    }

    fn end(&self) {
        std::fs::write(self.marks.path().join("end"), "").unwrap();
    }
}

/// The numbers in the next line of a launcher's rank.
fn numbers(launcher: &mut Running) -> String {
    let line = launcher.line();
    let numbers = line.trim_end().split_once("] ");
    numbers.unwrap_or_else(|| panic!("{line:?}")).1.to_owned()
}

#[test]
fn a_job_goes_on_with_fewer_hosts_when_one_is_lost_and_with_more_when_one_comes() {
    let job = Elastic::new();
    let options = [
        "--nnodes",
        "1:2",
        "--last-call",
        "60",
        "--node-timeout",
        "4",
    ];
    let mut first = job.start(&[&options[..], &["--node-rank", "0"]].concat());
    let mut second = job.start(&[&options[..], &["--node-rank", "1"]].concat());
    assert_eq!(numbers(&mut first), "2 0 0");
    assert_eq!(numbers(&mut second), "2 1 0");
    second.process.kill().unwrap();
    second.process.wait().unwrap();
    assert_eq!(numbers(&mut first), "1 0 1");
    let mut third = job.start(&[&options[..], &["--node-rank", "1"]].concat());
    assert_eq!(numbers(&mut first), "2 0 2");
    assert_eq!(numbers(&mut third), "2 1 2");
    job.end();
    let (_, err, code) = third.finish();
    assert_eq!(code, 0, "{err}");
    let (_, err, code) = first.finish();
    assert_eq!(code, 0, "{err}");
    assert!(
        err.contains("the launcher of host 1 (") && err.contains("was silent for 4 s"),
        "{err}"
    );
    assert!(
        err.contains("again on 1 host: the hosts have changed"),
        "{err}"
    );
    assert!(err.contains("another host has joined"), "{err}");
}

#[test]
fn a_host_that_is_not_needed_waits_for_the_place_of_one_that_leaves() {
    let job = Elastic::new();
    let options = ["--nnodes", "1:2", "--last-call", "60"];
    // Without a number, the first launcher that can listen has the store.
    let mut first = job.start(&options);
    let deadline = Instant::now() + LONG;
    while std::net::TcpStream::connect(format!("127.0.0.1:{}", job.port)).is_err() {
        assert!(Instant::now() < deadline, "no launcher has the store");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut second = job.start(&options);
    assert_eq!(numbers(&mut first), "2 0 0");
    assert_eq!(numbers(&mut second), "2 1 0");
    let mut third = job.start(&[&options[..], &["--node-rank", "1"]].concat());
    second.signal(Signal::TERM);
    let (_, err, code) = second.finish();
    assert_eq!(code, 143, "{err}");
    while !numbers(&mut third).starts_with("2 1 ") {}
    while !numbers(&mut first).starts_with("2 0 ") {}
    job.end();
    let (_, err, code) = first.finish();
    assert_eq!(code, 0, "{err}");
    assert!(
        err.contains("a launcher leaves the job: stopped by SIGTERM"),
        "{err}"
    );
    let (_, err, code) = third.finish();
    assert_eq!(code, 0, "{err}");
}

#[test]
fn a_launcher_that_gets_a_signal_after_its_rank_has_failed_leaves_the_job() {
    let job = Elastic::new();
    let options = [
        "--nnodes",
        "1:2",
        "--last-call",
        "60",
        "--max-restarts",
        "1",
    ];
    let first = job.run(
        &[&options[..], &["--node-rank", "0"]].concat(),
        "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; sleep 1000",
    );
    let script =
        format!("[ $TORCHELASTIC_RESTART_COUNT = 0 ] || touch $MARKS/again; {LEAVE_OUTPUT} exit 3");
    let second = job.run(&[&options[..], &["--node-rank", "1"]].concat(), &script);
    assert!(ends(content_of(job.marks.path(), "pid").trim()));
    second.signal(Signal::TERM);
    assert_eq!(end_of_unread(second), 3);
    let (_, err, code) = first.finish();
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("again on 1 host: restart 1 of 1"), "{err}");
    assert!(!job.marks.path().join("again").exists());
}

#[test]
fn failures_of_ranks_are_counted_where_the_number_of_hosts_may_change() {
    let job = Elastic::new();
    let options = [
        "--nnodes",
        "1:2",
        "--last-call",
        "60",
        "--max-restarts",
        "1",
    ];
    let first = job.run(
        &[&options[..], &["--node-rank", "0"]].concat(),
        "sleep 1000",
    );
    let second = job.run(&[&options[..], &["--node-rank", "1"]].concat(), "exit 3");
    let (_, err, code) = second.finish();
    assert_eq!(code, 3, "{err}");
    let (_, err, code) = first.finish();
    assert_eq!(code, 3, "{err}");
    assert!(
        err.contains("all ranks start again on 2 hosts: restart 1 of 1"),
        "{err}"
    );
    assert!(!err.contains("restart 2"), "{err}");
}

#[test]
fn a_job_without_enough_hosts_says_which_came() {
    let job = Elastic::new();
    let options = ["--nnodes", "2:3", "--timeout", "1"];
    let (_, err, code) = job.run(&options, "true").finish();
    assert_eq!(code, 125, "{err}");
    let expected = "the job needs 2 hosts, and within 1 s there were only 1: ";
    assert!(err.contains(expected), "{err}");
}
