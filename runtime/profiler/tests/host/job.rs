//! A rank of an NCCL program without PyTorch, and jobs whose ranks are processes of this kind.

use crate::library::{Call, Comm, Handle, NONE, Plugin};
use crate::network::{STEPS, Transfer};
use rcomm_recorder::publish::{Dump, RingReader, list_rings};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

/// How far a rank gets with its last operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// The rank does not call the operation.
    NotCalled,
    /// The rank calls the operation, and the call stays inside NCCL.
    Called,
    /// The operation is in a plan, and its transfers wait. The device does not reach the operation.
    Planned,
    /// All channels run, and no data moves.
    Running,
    /// All channels but the last are done. The last channel waits for the network to send to the next rank.
    OneChannelLeft,
    /// All channels but the last are done. The last channel waits for data from the previous rank.
    OneChannelStarves,
    /// The operation is done, and NCCL reports no work of the device on the last channel.
    OneChannelUnreported,
    /// The operation is done, and NCCL does not report that the last channel has ended.
    OneEndUnreported,
    /// The operation is done.
    Done,
}

/// The word for each variant in a script.
const WORDS: [(&str, Until); 9] = [
    ("not_called", Until::NotCalled),
    ("called", Until::Called),
    ("planned", Until::Planned),
    ("running", Until::Running),
    ("one_channel_left", Until::OneChannelLeft),
    ("one_channel_starves", Until::OneChannelStarves),
    ("one_channel_unreported", Until::OneChannelUnreported),
    ("one_end_unreported", Until::OneEndUnreported),
    ("done", Until::Done),
];

impl Until {
    fn name(self) -> &'static str {
        WORDS
            .iter()
            .find(|(_, until)| *until == self)
            .expect("every variant has a name")
            .0
    }

    fn of(name: &str) -> Self {
        WORDS
            .iter()
            .find(|(word, _)| *word == name)
            .expect("the name of a variant")
            .1
    }
}

/// Reports one operation as NCCL does whose profiler interface has the version of `plugin`: on the calling thread until
/// its plan ends, and then on the proxy thread.
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

/// Reports a message of a rank to itself: a send and a receive in one group call. `has_task` is false for a message in
/// place, for which NCCL reports no plan (`scheduleP2pTasksToPlan`, enqueue.cc:1173 of 2.30.7).
pub(crate) fn copy(plugin: &Plugin, comm: &Comm, has_task: bool) {
    let halves = [c"Send", c"Recv"].map(|func| Call::message(func, 8, comm.rank));
    let (mut group, mut called) = (NONE, [NONE; 2]);
    if plugin.has_calls() {
        group = plugin.group_api(comm);
        called = halves.map(|half| {
            let called = plugin.call(comm, group, &half, false);
            plugin.stop(called);
            called
        });
    }
    if has_task {
        let plan = plugin.plan(comm);
        let halves = halves.iter().zip(called);
        let tasks: Vec<Handle> = halves
            .map(|(half, called)| plugin.task_of(comm, plan, called, half))
            .collect();
        tasks.into_iter().for_each(|task| plugin.stop(task));
        plugin.stop(plan);
    }
    plugin.stop(group);
}

/// Reports that a graph replays a call that was captured: NCCL reports the plan and the device's progress again, but no
/// call.
fn replay(plugin: &Plugin, comm: &Comm, captured: Handle, call: &Call, until: Until) {
    if until != Until::NotCalled {
        launch(plugin, comm, (NONE, captured), call, until);
    }
}

/// Reports the plan of an operation, and then the progress of the device up to `until`.
fn launch(
    plugin: &Plugin,
    comm: &Comm,
    (group, called): (Handle, Handle),
    call: &Call,
    until: Until,
) {
    // `hostStreamPlanTask`, enqueue.cc:1436 of 2.30.7.
    let plan = plugin.plan(comm);
    let task = plugin.task_of(comm, plan, called, call);
    plugin.stop(task);
    plugin.stop(plan);
    plugin.stop(group);
    // A message to the own rank has no work for the proxy thread (`addP2pToPlan`, 882 of 2.30.7).
    let is_copy = call.is_p2p() && call.peer == comm.rank;
    if is_copy {
        return;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| device(plugin, comm, call, task, until));
    });
}

/// Reports an operation behind one that does not end, so the device does not reach it. Since version 4 NCCL reports its
/// transfers as soon as it is launched (`ncclProxyOpToArgs`, proxy.cc:434 of 2.30.7). In version 3 NCCL reports them
/// only when the earlier ones have ended (`sendProxyProgress`, transport/net.cc:1104 of 2.26.2).
fn operation_behind(plugin: &Plugin, comm: &Comm, call: &Call) {
    let (mut group, mut called) = (NONE, NONE);
    if plugin.has_calls() {
        group = plugin.group_api(comm);
        called = plugin.call(comm, group, call, false);
        plugin.stop(called);
    }
    let plan = plugin.plan(comm);
    let task = plugin.task_of(comm, plan, called, call);
    if plugin.version > 3 {
        for channel in 0..call.channels {
            for (peer, is_send) in ends(comm, call) {
                plugin.transfer(comm, task, (channel, peer, is_send), std::process::id());
            }
        }
    }
    plugin.stop(task);
    plugin.stop(plan);
    plugin.stop(group);
}

/// Returns the peers of an operation's transfers on each channel, and whether the rank sends to each. A message has one
/// peer; a collective has two, which are the rank's neighbors in the ring.
fn ends(comm: &Comm, call: &Call) -> Vec<(i32, bool)> {
    let next = (comm.rank + 1) % comm.size;
    let previous = (comm.rank + comm.size - 1) % comm.size;
    match call.is_p2p() {
        true => vec![(call.peer, call.func == c"Send")],
        false => vec![(next, true), (previous, false)],
    }
}

/// Reports the transfers of an operation and its work on the device, as the proxy thread does. The transfers begin with
/// the launch, before the device reaches the operation.
fn device(plugin: &Plugin, comm: &Comm, call: &Call, task: Handle, until: Until) {
    let channels = 0..call.channels;
    let begin = |channel| {
        let ends = ends(comm, call).into_iter();
        ends.map(|(peer, is_send)| Transfer::begin(plugin, comm, task, (channel, peer, is_send)))
            .collect::<Vec<_>>()
    };
    let transfers: Vec<Vec<Transfer<'_>>> = channels.clone().map(begin).collect();
    if until == Until::Planned {
        return;
    }
    let kernels: Vec<Handle> = channels
        .clone()
        .map(|channel| {
            let is_last = channel + 1 == call.channels;
            match is_last && until == Until::OneChannelUnreported {
                true => NONE,
                false => plugin.kernel(comm, task, channel, 1_000),
            }
        })
        .collect();
    if until == Until::Running {
        return;
    }
    for ((channel, kernel), mut transfers) in channels.zip(kernels).zip(transfers) {
        let is_last = channel + 1 == call.channels;
        let (done, ahead) = match until {
            // The network also has the next two steps, and the later ones wait for the device.
            Until::OneChannelLeft if is_last => (5, 2),
            Until::OneChannelStarves if is_last => (4, 0),
            _ => (STEPS, 2),
        };
        for transfer in &mut transfers {
            transfer.progress(done, ahead);
        }
        if done < STEPS {
            continue;
        }
        if is_last && until == Until::OneEndUnreported {
            transfers.into_iter().for_each(Transfer::end);
            continue;
        }
        // The device has ended its work on a channel once the network has the last data, before they are sent.
        let ends_first = channel % 2 == 0;
        if ends_first {
            plugin.kernel_ends(kernel, 1_000 + call.device_ns);
        }
        transfers.into_iter().for_each(Transfer::end);
        if !ends_first {
            plugin.kernel_ends(kernel, 1_000 + call.device_ns);
        }
    }
}

/// Environment variable that makes the last operation one that a graph replays for the third time.
pub(crate) const GRAPH: &str = "RCOMM_TEST_GRAPH";

/// Environment variable that makes the last operation a message of the pair, on two channels.
pub(crate) const MESSAGE: &str = "RCOMM_TEST_MESSAGE";

/// The message of a pair: from its first rank to its second.
fn exchange(rank: i32) -> Call {
    match rank % 2 {
        0 => Call::message(c"Send", 8, 1),
        _ => Call::message(c"Recv", 8, 0),
    }
}

/// Environment variable with a rank, and how far NCCL reports its first operation on the world: `rank until`.
pub(crate) const FIRST: &str = "RCOMM_TEST_FIRST";

/// Environment variable that makes each rank issue one more operation on its pair, with a rank, and how far that one
/// gets: `rank until`.
pub(crate) const ON_PAIR: &str = "RCOMM_TEST_ON_PAIR";

/// Environment variable with the number of a signal that the rank sends itself once it is ready.
pub(crate) const SIGNAL: &str = "RCOMM_TEST_SIGNAL";

/// Environment variable that makes each rank launch two more operations on the world behind the last one.
pub(crate) const BEHIND: &str = "RCOMM_TEST_BEHIND";

/// Environment variable that makes the pair the first communicator, with operations before there is a world.
pub(crate) const PAIR_FIRST: &str = "RCOMM_TEST_PAIR_FIRST";

/// Environment variables with a rank and the size of its world, for a job without a launcher.
const PLACE: [&str; 2] = ["RCOMM_TEST_RANK", "RCOMM_TEST_WORLD_SIZE"];

/// Environment variable with the rank that comes late to each of many operations.
pub(crate) const LATE: &str = "RCOMM_TEST_LATE";

/// Reports operations to which one rank comes 2 ms late: the kernels of the other ranks wait for it, and run that much
/// longer than its own.
fn run_with_a_late_rank(plugin: &Plugin, comm: &Comm, is_late: bool) {
    let device_ns = if is_late { 100_000 } else { 2_100_000 };
    let call = Call {
        device_ns,
        ..Call::all_reduce(1 << 20, 4)
    };
    for _ in 0..100 {
        operation(plugin, comm, &call, Until::Done);
        std::thread::sleep(std::time::Duration::from_millis(3));
    }
}

/// Environment variable with the behavior of a rank: `version until count`.
pub(crate) const SCRIPT: &str = "RCOMM_TEST_SCRIPT";

/// The body of a rank: a world and a pair in it (0, 1 and 2, 3), five rounds of operations on both, and a last
/// operation on the world.
pub(crate) fn rank() {
    let Ok(script) = std::env::var(SCRIPT) else {
        return;
    };
    let words: Vec<&str> = script.split(' ').collect();
    if std::env::var_os(DEVICES).is_some() {
        let plugin = Plugin::open(words[0].parse().expect("a number")).expect("this version");
        devices(&plugin, &words[1..]);
        ready_and_wait();
        std::process::exit(3);
    }
    let [version, until, count] = words[..] else {
        panic!("a script has three words: {script}");
    };
    let number = |name: &str| -> i32 {
        let value = std::env::var(name).expect("the job sets it");
        value.parse().expect("a number")
    };
    let [rank, size] = PLACE.map(number);
    let plugin = Plugin::open(version.parse().expect("a number")).expect("this version");
    let world = || plugin.init(Some("world"), 0xabc, rank, size);
    let pair = || plugin.init(None, 0xdef0 + (rank / 2) as u64, rank % 2, 2);
    let (world, pair) = match std::env::var_os(PAIR_FIRST) {
        None => (world(), pair()),
        Some(_) => {
            let pair = pair().expect("the pair");
            operation(&plugin, &pair, &Call::all_reduce(64, 1), Until::Done);
            (world(), Ok(pair))
        }
    };
    let (world, pair) = (world.expect("the world"), pair.expect("the pair"));
    // How far a rank gets with an operation for which this variable may have `rank until`.
    let until_of = |name: &str| {
        let words = std::env::var(name).ok()?;
        let (named, until) = words.split_once(' ').expect("two words");
        Some(match named == rank.to_string() {
            true => Until::of(until),
            false => Until::Done,
        })
    };
    let mut first = until_of(FIRST).unwrap_or(Until::Done);
    for _ in 0..5 {
        let until = std::mem::replace(&mut first, Until::Done);
        operation(&plugin, &world, &Call::all_reduce(1 << 20, 4), until);
        operation(&plugin, &pair, &Call::all_reduce(64, 1), Until::Done);
        operation(&plugin, &pair, &exchange(rank), Until::Done);
        // An all-to-all sends to the own rank, too.
        copy(&plugin, &pair, true);
        copy(&plugin, &pair, false);
    }
    if let Ok(late) = std::env::var(LATE) {
        run_with_a_late_rank(&plugin, &world, late == rank.to_string());
    }
    if let Some(until) = until_of(ON_PAIR) {
        operation(&plugin, &pair, &Call::all_reduce(64, 1), until);
    }
    let last = Call::all_reduce(count.parse().expect("a number"), 4);
    match std::env::var(GRAPH) {
        Err(_) if std::env::var_os(MESSAGE).is_some() => {
            let call = Call {
                channels: 2,
                ..exchange(rank)
            };
            operation(&plugin, &pair, &call, Until::of(until));
        }
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
    if std::env::var_os(BEHIND).is_some() {
        (0..2).for_each(|_| operation_behind(&plugin, &world, &last));
    }
    if let Ok(signal) = std::env::var(SIGNAL) {
        ready();
        let signal: i32 = signal.parse().expect("a number");
        // SAFETY: `raise` takes an int, and this process has no handlers of its own.
        unsafe { libc::raise(signal) };
    }
    if ready_and_wait() == b"close" {
        plugin.finalize(&pair);
        plugin.finalize(&world);
        std::process::exit(0);
    }
    std::process::exit(3);
}

/// Reports to the test that this process is ready.
fn ready() {
    let mut out = std::io::stdout();
    out.write_all(b"ready\n").expect("the test reads it");
    out.flush().expect("the test reads it");
}

/// Reports to the test that this process is ready, and returns what the test writes before it closes the pipe.
fn ready_and_wait() -> Vec<u8> {
    ready();
    let mut rest = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut rest);
    rest
}

/// Environment variable that makes a process one with several devices; its script is then `version first size until`,
/// with the first rank, the size of the world, and the word `until` once for each device, with colons between.
pub(crate) const DEVICES: &str = "RCOMM_TEST_DEVICES";

/// The body of a process with several devices, each with a communicator of the same world: five operations on each
/// device, and a last one as the script says.
fn devices(plugin: &Plugin, words: &[&str]) {
    let [number, size] = words[..2] else {
        panic!("a script has the number of the first rank and the size of the world");
    };
    let first: i32 = number.parse().expect("a number");
    let last: Vec<Until> = words[2].split(':').map(Until::of).collect();
    let ranks = (first..).zip(&last);
    let comms: Vec<Comm> = ranks
        .map(|(rank, _)| {
            let size = size.parse().expect("a number");
            let comm = plugin.init(Some("world"), 0xabc, rank, size);
            comm.expect("a communicator of the world")
        })
        .collect();
    let call = Call::all_reduce(1 << 20, 4);
    for _ in 0..5 {
        for comm in &comms {
            operation(plugin, comm, &call, Until::Done);
        }
    }
    for (comm, &until) in comms.iter().zip(&last) {
        operation(plugin, comm, &call, until);
    }
}

/// Removes the variables that a launcher sets.
pub(crate) fn without_launcher(command: &mut Command) {
    for variable in ["RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"] {
        command.env_remove(variable);
    }
}

/// Processes that act as ranks. Those that still run are killed when the job is dropped.
pub(crate) struct Job {
    pub(crate) directory: tempfile::TempDir,
    /// The processes, each with its standard input until that is closed.
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
        let scripts = last.map(|(until, count)| format!("{version} {} {count}", until.name()));
        Self::of_scripts(&scripts, change)
    }

    /// Starts processes with several devices each. `processes` has for each device how far it gets with its last
    /// operation. Waits until all processes are ready.
    pub(crate) fn of_devices(
        version: u32,
        processes: &[&[Until]],
        change: impl Fn(&mut Command),
    ) -> Self {
        let size: usize = processes.iter().map(|devices| devices.len()).sum();
        let mut first = 0;
        let scripts = processes.iter().map(|last| {
            let words: Vec<&str> = last.iter().map(|until| until.name()).collect();
            let script = format!("{version} {first} {size} {}", words.join(":"));
            first += last.len();
            script
        });
        Self::of_scripts(&scripts.collect::<Vec<_>>(), |command| {
            command.env(DEVICES, "1");
            change(command);
        })
    }

    /// Starts a process for each script, and waits until all are ready.
    fn of_scripts(scripts: &[String], change: impl Fn(&mut Command)) -> Self {
        let directory = tempfile::tempdir().expect("a folder");
        let mut ranks = Vec::new();
        for (rank, script) in scripts.iter().enumerate() {
            let mut command = Command::new(std::env::current_exe().expect("a file"));
            command
                .args(["--exact", "a_rank_of_a_job", "--nocapture", "--ignored"])
                .env(SCRIPT, script)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", scripts.len().to_string())
                .env(PLACE[0], rank.to_string())
                .env(PLACE[1], scripts.len().to_string())
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

    /// Stops a rank by a signal, and waits until it has stopped.
    pub(crate) fn stop(&self, rank: usize) {
        let pid = Pid::from_raw(self.ranks[rank].0.id() as i32).expect("a process");
        kill_process(pid, Signal::STOP).expect("it runs");
        // This does not reap a child that has stopped.
        let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).expect("a child");
        assert!(stopped.is_some_and(|(_, status)| status.stopped()));
    }

    /// Lets all ranks destroy their communicators and exit.
    pub(crate) fn close(&mut self) {
        (0..self.ranks.len()).for_each(|rank| self.close_one(rank));
    }

    /// Lets a rank destroy its communicators and exit: an abort, if operations are in progress.
    pub(crate) fn close_one(&mut self, rank: usize) {
        let (child, stdin) = &mut self.ranks[rank];
        let mut stdin = stdin.take().expect("once");
        stdin.write_all(b"close").expect("it reads");
        drop(stdin);
        assert!(child.wait().expect("it ends").success());
    }

    /// Returns the records of all rings of the job.
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

/// Returns the records of all rings below a directory.
pub(crate) fn dumps(directory: &Path) -> Vec<Dump> {
    let rings = list_rings(directory).expect("a folder").into_iter();
    rings
        .map(|listing| RingReader::attach(listing.path).expect("a ring").snapshot())
        .collect()
}
