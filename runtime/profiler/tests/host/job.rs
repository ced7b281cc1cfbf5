//! A rank of a plain NCCL program, and jobs of such ranks as processes.

use crate::library::{Call, Comm, Handle, NONE, Plugin};
use rcomm_recorder::publish::{Dump, RingReader, list_rings};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

/// How far a rank gets with its last operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// It is not called.
    NotCalled,
    /// It is called, and the call stays inside NCCL.
    Called,
    /// It is in a plan, and the device does not reach it.
    Planned,
    /// All channels run.
    Running,
    /// All channels but the last are done; the last one waits for the network to send to the next rank.
    OneChannelLeft,
    /// As before, but the last channel has nothing to send: it waits for data from the previous rank.
    OneChannelStarves,
    /// It is done.
    Done,
}

const WORDS: [(&str, Until); 7] = [
    ("not_called", Until::NotCalled),
    ("called", Until::Called),
    ("planned", Until::Planned),
    ("running", Until::Running),
    ("one_channel_left", Until::OneChannelLeft),
    ("one_channel_starves", Until::OneChannelStarves),
    ("done", Until::Done),
];

impl Until {
    fn name(self) -> &'static str {
        WORDS
            .iter()
            .find(|(_, it)| *it == self)
            .expect("every variant has a name")
            .0
    }

    fn of(name: &str) -> Self {
        WORDS
            .iter()
            .find(|(it, _)| *it == name)
            .expect("the name of a variant")
            .1
    }
}

/// States of a waiting step: two of a send, one of a receive.
const SEND_GPU_WAIT: i32 = 8;
const SEND_WAIT: i32 = 9;
const RECV_WAIT: i32 = 10;

/// Reports one operation as NCCL of this version does: on the calling thread up to its plan, and on the proxy thread
/// after that.
pub(crate) fn operation(plugin: &Plugin, comm: &Comm, call: &Call, until: Until) {
    if until == Until::NotCalled {
        return;
    }
    let (mut group, mut called) = (NONE, NONE);
    if plugin.has_calls() {
        group = plugin.group_api(comm);
        called = plugin.call(comm, group, call, false);
        plugin.stop(called);
        if until == Until::Called {
            return;
        }
    }
    launch(plugin, comm, (group, called), call, until);
}

/// Reports that a graph replays a call that was captured: NCCL reports the plan and the device's progress again, but no
/// call.
fn replay(plugin: &Plugin, comm: &Comm, captured: Handle, call: &Call, until: Until) {
    if until != Until::NotCalled {
        launch(plugin, comm, (NONE, captured), call, until);
    }
}

fn launch(
    plugin: &Plugin,
    comm: &Comm,
    (group, called): (Handle, Handle),
    call: &Call,
    until: Until,
) {
    let task = plugin.task(comm, called, call);
    plugin.stop(task);
    plugin.stop(group);
    if until == Until::Planned {
        return;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| device(plugin, comm, call, task, until));
    });
}

fn device(plugin: &Plugin, comm: &Comm, call: &Call, task: Handle, until: Until) {
    let pid = std::process::id();
    let channels = 0..call.channels;
    let kernels: Vec<Handle> = channels
        .clone()
        .map(|channel| plugin.kernel(comm, task, channel, 1_000))
        .collect();
    if until == Until::Running {
        return;
    }
    let next = (comm.rank + 1) % comm.size;
    let before = (comm.rank + comm.size - 1) % comm.size;
    for (channel, kernel) in channels.zip(kernels) {
        let send = plugin.transfer(comm, task, (channel, next, true), pid);
        let receive = plugin.transfer(comm, task, (channel, before, false), pid);
        let is_last = channel + 1 == call.channels;
        let steps = match until {
            Until::OneChannelLeft if is_last => 5,
            Until::OneChannelStarves if is_last => 4,
            _ => 16,
        };
        for step in 0..steps {
            for (transfer, wait) in [(send, SEND_WAIT), (receive, RECV_WAIT)] {
                let step = plugin.step(comm, transfer, step);
                plugin.record(step, wait, 0, 0);
                plugin.stop(step);
            }
        }
        if steps < 16 {
            let wait = match until {
                Until::OneChannelLeft => SEND_WAIT,
                _ => SEND_GPU_WAIT,
            };
            let step = plugin.step(comm, send, steps);
            plugin.record(step, wait, 0, 0);
            let step = plugin.step(comm, receive, steps);
            plugin.record(step, RECV_WAIT, 0, 0);
            continue;
        }
        plugin.stop(send);
        plugin.stop(receive);
        plugin.kernel_ends(kernel, 2_000);
    }
}

/// Environment variable that makes the last operation one that a graph replays for the third time.
pub(crate) const GRAPH: &str = "RCOMM_TEST_GRAPH";

/// Environment variable with the behavior of a rank: `version until count`.
pub(crate) const SCRIPT: &str = "RCOMM_TEST_SCRIPT";

/// The body of a rank: a world and a pair in it (0, 1 and 2, 3), five rounds of operations on both, and a last
/// operation on the world.
pub(crate) fn rank() {
    let Ok(script) = std::env::var(SCRIPT) else {
        return;
    };
    let words: Vec<&str> = script.split(' ').collect();
    let [version, until, count] = words[..] else {
        panic!("a script has three words: {script}");
    };
    let number = |name: &str| -> i32 {
        let value = std::env::var(name).expect("the job sets it");
        value.parse().expect("a number")
    };
    let (rank, size) = (number("RANK"), number("WORLD_SIZE"));
    let plugin = Plugin::open(version.parse().expect("a number")).expect("this version");
    let world = plugin
        .init(Some("world"), 0xabc, rank, size)
        .expect("the world");
    let pair = plugin
        .init(None, 0xdef0 + (rank / 2) as u64, rank % 2, 2)
        .expect("the pair");
    for _ in 0..5 {
        operation(&plugin, &world, &Call::all_reduce(1 << 20, 4), Until::Done);
        operation(&plugin, &pair, &Call::all_reduce(64, 1), Until::Done);
        let exchange = match rank % 2 {
            0 => Call::message(c"Send", 8, 1),
            _ => Call::message(c"Recv", 8, 0),
        };
        operation(&plugin, &pair, &exchange, Until::Done);
    }
    let last = Call::all_reduce(count.parse().expect("a number"), 4);
    match std::env::var(GRAPH) {
        Err(_) => operation(&plugin, &world, &last, Until::of(until)),
        Ok(_) => {
            let group = plugin.group_api(&world);
            let captured = plugin.call(&world, group, &last, true);
            plugin.stop(captured);
            plugin.stop(group);
            for until in [Until::Done, Until::Done, Until::of(until)] {
                replay(&plugin, &world, captured, &last, until);
            }
        }
    }
    let mut out = std::io::stdout();
    out.write_all(b"ready\n").expect("the test reads it");
    out.flush().expect("the test reads it");
    // The test ends the wait by closing the pipe.
    let mut rest = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut rest);
    if rest == b"close" {
        plugin.finalize(&pair);
        plugin.finalize(&world);
        std::process::exit(0);
    }
    std::process::exit(3);
}

/// Processes that act as ranks. Those that still run are killed when the job is dropped.
pub(crate) struct Job {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) ranks: Vec<(Child, Option<ChildStdin>)>,
}

impl Job {
    /// Starts four ranks, each with how far it gets with its last operation and with the number of elements of that
    /// operation, and waits until all are ready.
    pub(crate) fn start(
        version: u32,
        last: [(Until, usize); 4],
        change: impl Fn(&mut Command),
    ) -> Self {
        let directory = tempfile::tempdir().expect("a folder");
        let mut ranks = Vec::new();
        for (rank, (until, count)) in last.into_iter().enumerate() {
            let mut command = Command::new(std::env::current_exe().expect("a file"));
            command
                .args(["--exact", "a_rank_of_a_job", "--nocapture", "--ignored"])
                .env(SCRIPT, format!("{version} {} {count}", until.name()))
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", "4")
                .env("TORCHELASTIC_RUN_ID", "plain")
                .env("RCOMM_RING_DIR", directory.path())
                .env("RCOMM_NCCL_EVENTS", "channels,steps,256")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            change(&mut command);
            let mut child = command.spawn().expect("this test program");
            let stdin = child.stdin.take();
            ranks.push((child, stdin));
        }
        for (child, _) in &mut ranks {
            let stdout = child.stdout.take().expect("a pipe");
            let mut lines = BufReader::new(stdout).lines();
            let ready = lines.any(|line| line.is_ok_and(|line| line.ends_with("ready")));
            assert!(ready, "a rank ended before it was ready");
            // The harness prints a line at the end, and must not fail because of a closed pipe.
            std::thread::spawn(move || lines.count());
        }
        Self { directory, ranks }
    }

    /// Kills a rank and waits for its end.
    pub(crate) fn kill(&mut self, rank: usize) {
        let (child, _) = &mut self.ranks[rank];
        child.kill().expect("it runs");
        child.wait().expect("it ends");
    }

    /// Lets all ranks destroy their communicators and exit.
    pub(crate) fn close(&mut self) {
        for (child, stdin) in &mut self.ranks {
            let mut stdin = stdin.take().expect("once");
            stdin.write_all(b"close").expect("it reads");
            drop(stdin);
            assert!(child.wait().expect("it ends").success());
        }
    }

    pub(crate) fn dumps(&self) -> Vec<Dump> {
        dumps(self.directory.path())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (child, _) in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The records of all rings below a directory.
pub(crate) fn dumps(directory: &Path) -> Vec<Dump> {
    let rings = list_rings(directory).expect("a folder").into_iter();
    rings
        .map(|listing| RingReader::attach(listing.path).expect("a ring").snapshot())
        .collect()
}
