//! Finds the processes of ranks on this node by their environments, and reads those without a ring as a source.
//!
//! A launcher sets each rank's number and the store's address (`MASTER_ADDR`, `MASTER_PORT`) in the process's
//! environment, which its user may read in `/proc`. If the store lists PyTorch's worker servers, their records
//! are read. Otherwise the source reports the state of each process, as the kernel shows it.

use super::rank_jobs::{RankJob, read_mappings};
use super::threads::threads_of_ranks;
use crate::live::source::{
    HostPort, JobChoice, Liveness, Observation, Poll, Seen, Source, SourceError, StackRequests,
    TakenStacks, WorkerServerSource,
};
use rcomm_recorder::launch::Launched;
use rcomm_recorder::model::Rank;
use rcomm_verdict::Problem;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::time::{Duration, Instant};

/// The time between two searches for processes.
const LIST_INTERVAL: Duration = Duration::from_secs(2);
/// The time between two searches of a store that listed no worker server: the job itself uses the store, too.
const STORE_INTERVAL: Duration = Duration::from_secs(10);
/// The longest time that a search of the store takes from a poll.
const STORE_LIMIT: Duration = Duration::from_secs(1);

/// Shells and other programs that start a rank, but are not the rank.
const STARTERS: [&str; 8] = [
    "bash", "dash", "sh", "zsh", "env", "numactl", "timeout", "time",
];

/// A process that a launcher started as a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankProcess {
    /// The process id.
    pub pid: u32,
    /// The rank and the job that the launcher gave the process.
    pub launched: Launched,
    /// The process's environment.
    pub variables: BTreeMap<String, String>,
}

impl RankProcess {
    /// The processes on this node whose environment this user may read, and in which a launcher has set a rank and
    /// `MASTER_ADDR`: by rank, then by process id. Shells and other programs that only start a rank are left out. So
    /// are processes whose parent is another process of the same rank and job, unless the parent only starts ranks.
    /// Blocks until all processes in `/proc` are read.
    pub fn list() -> Vec<Self> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let found: HashMap<u32, (Self, Option<u32>)> = entries
            .filter_map(|entry| {
                let pid = entry.file_name().to_str()?.parse().ok()?;
                let process = Self::read(pid, &entry.path())?;
                // The name is read after the environment, since both change when the process runs another program: a
                // name that was read earlier could be that of the process that started the shell.
                let name = status(pid, "Name")?;
                if STARTERS.contains(&name.as_str()) {
                    return None;
                }
                let parent = status(pid, "PPid").and_then(|parent| parent.parse().ok());
                Some((pid, (process, parent)))
            })
            .collect();
        let is_same_rank = |process: &Self, other: &Self| {
            let (launched, other) = (&process.launched, &other.launched);
            (launched.rank, &launched.job) == (other.rank, &other.job)
        };
        let inherited = |process: &Self, parent: &Option<u32>| {
            let parent = parent.and_then(|parent| found.get(&parent));
            parent.is_some_and(|(parent, _)| is_same_rank(process, parent))
        };
        let ranks = found.values();
        let ranks = ranks.filter(|(process, parent)| !inherited(process, parent));
        let mut ranks: Vec<Self> = ranks.map(|(process, _)| process.clone()).collect();
        ranks.sort_by_key(|process| (process.launched.rank, process.pid));
        ranks
    }

    /// The processes of [`list`](Self::list) that have no ring.
    fn without_rings() -> Vec<Self> {
        let mut found = Self::list();
        found.retain(|process| !process.has_ring());
        found
    }

    /// The processes without rings of the job that a view shows instead of rings; empty while it shows rings.
    pub(super) fn shown(choice: &JobChoice) -> Vec<Self> {
        let Some(shown) = choice.shown_processes() else {
            return Vec::new();
        };
        let mut found = Self::without_rings();
        found.retain(|process| ProcessJob::of(process) == shown);
        found
    }

    fn read(pid: u32, folder: &Path) -> Option<Self> {
        let bytes = std::fs::read(folder.join("environ")).ok()?;
        let variables: BTreeMap<String, String> = bytes
            .split(|&byte| byte == 0)
            .filter_map(|pair| std::str::from_utf8(pair).ok()?.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        variables.get("MASTER_ADDR")?;
        let launched = Launched::from_environment(|name| variables.get(name).cloned())?;
        Some(Self {
            pid,
            launched,
            variables,
        })
    }

    /// Whether the process has mapped a ring, from which more can be read than from the process; `false` also if its
    /// mappings cannot be read.
    pub fn has_ring(&self) -> bool {
        read_mappings(self.pid).1.is_some()
    }

    /// Whether this is a name of the process's job: the one under which the job keeps rings, or the launcher's.
    pub fn is_of(&self, job: &str) -> bool {
        self.job() == Some(job) || self.launched.job.as_deref() == Some(job)
    }

    /// The name under which the process's job keeps rings; `None` if the environment names no job.
    pub fn job(&self) -> Option<&str> {
        let named = self
            .variables
            .get("RCOMM_JOB")
            .filter(|job| !job.is_empty());
        named.or(self.launched.job.as_ref()).map(String::as_str)
    }

    /// What the process does, as the end of a sentence; `None` if it has ended.
    pub fn state(&self) -> Option<String> {
        state(self.pid)
    }

    /// The job's store; `None` if the environment does not name the store's port.
    pub fn store(&self) -> Option<HostPort> {
        Some(HostPort {
            host: self.variables.get("MASTER_ADDR")?.clone(),
            port: self.variables.get("MASTER_PORT")?.parse().ok()?,
        })
    }
}

/// One attempt of a job, as its processes' environments name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProcessJob {
    job: Option<String>,
    attempt: u32,
}

impl ProcessJob {
    pub(super) fn of(process: &RankProcess) -> Self {
        Self {
            job: process.launched.job.clone(),
            attempt: process.launched.attempt,
        }
    }
}

/// A field of a process's status; `None` if the process has ended.
fn status(pid: u32, field: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let mut fields = status.lines().filter_map(|line| line.split_once(':'));
    let value = fields.find_map(|(name, value)| (name == field).then_some(value))?;
    Some(value.trim().to_owned())
}

/// The state of a process, as the end of a sentence; `None` if it has ended.
fn state(pid: u32) -> Option<String> {
    let state = status(pid, "State")?;
    let function = std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
    // The kernel shows "0" to readers without permission, and for a process that runs.
    let within = match function.trim() {
        "" | "0" => String::new(),
        function => format!(" in {function}"),
    };
    match state.chars().next()? {
        'R' => Some("it runs".to_owned()),
        'S' => Some(format!("it sleeps{within}")),
        'D' => Some(format!("it waits in the kernel{within}")),
        'T' => Some("a signal has stopped it".to_owned()),
        't' => Some("a debugger has stopped it".to_owned()),
        'Z' | 'X' => None,
        _ => Some(format!("its state is {state}")),
    }
}

/// The ranks of a job on this node that have no ring; see the module.
#[derive(Default)]
pub struct ProcessSource {
    /// The processes of the shown job, including those that have ended.
    ranks: BTreeMap<Rank, RankProcess>,
    /// When the processes were last listed.
    listed: Option<Instant>,
    /// The worker servers of the job's store.
    servers: Option<WorkerServerSource>,
    /// Whether the store has listed worker servers.
    has_servers: bool,
    /// When the store was last asked for worker servers.
    searched: Option<Instant>,
    /// The name of the only job whose ranks are read; `None` if it may be any.
    named: Option<String>,
    /// The other jobs without rings when the shown job was chosen, one line each.
    others: Vec<String>,
}

impl ProcessSource {
    /// Reads the ranks of one attempt of one job, until all its processes have ended. It is the job that started last
    /// of those that run PyTorch or, if none does, of those that run Python, or else of all.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the ranks of the job with this name.
    pub fn named(job: String) -> Self {
        Self {
            named: Some(job),
            ..Self::default()
        }
    }

    /// Adds the found processes of the shown job. If none of that job's known processes was found, another job replaces
    /// it, chosen as in [`new`](Self::new); returns whether a job was replaced.
    fn update(&mut self, mut found: Vec<RankProcess>) -> bool {
        if let Some(named) = &self.named {
            found.retain(|process| process.is_of(named));
        }
        let alive: HashSet<u32> = found.iter().map(|process| process.pid).collect();
        let before = self.job();
        // A living process that was not found has a ring by now.
        let is_shown = |rank: &RankProcess| alive.contains(&rank.pid) || rank.state().is_none();
        self.ranks.retain(|_, rank| is_shown(rank));
        let is_job_alive = self.ranks.values().any(|rank| alive.contains(&rank.pid));
        let (shown, others) = match self.job() {
            Some(job) if is_job_alive => (job, std::mem::take(&mut self.others)),
            _ => {
                let jobs = RankJob::group(found.clone());
                let Some((first, others)) = jobs.split_first() else {
                    return false;
                };
                (ProcessJob::of(&first.processes[0]), RankJob::lines(others))
            }
        };
        let job_changed = before.is_some_and(|job| job != shown);
        if job_changed {
            *self = Self {
                listed: self.listed,
                named: self.named.take(),
                ..Self::default()
            };
        }
        self.others = others;
        for process in found {
            if ProcessJob::of(&process) == shown {
                self.ranks.entry(process.launched.rank).or_insert(process);
            }
        }
        job_changed
    }

    /// The shown job; `None` if no process was found.
    pub(super) fn job(&self) -> Option<ProcessJob> {
        self.ranks.values().next().map(ProcessJob::of)
    }

    /// The records of worker servers, if the job's store lists any.
    fn poll_servers(&mut self, deadline: Instant) -> Option<Poll> {
        let is_due = self
            .searched
            .is_none_or(|searched| searched.elapsed() >= STORE_INTERVAL);
        if !self.has_servers && !is_due {
            return None;
        }
        self.searched = Some(Instant::now());
        let rank = self.ranks.values().next()?;
        let store = rank.store()?;
        let world_size = Some(rank.launched.world_size);
        let servers = self
            .servers
            .get_or_insert_with(|| WorkerServerSource::in_store(store, world_size));
        let deadline = match self.has_servers {
            true => deadline,
            false => deadline.min(Instant::now() + STORE_LIMIT),
        };
        let poll = servers.poll(deadline).ok()?;
        self.has_servers = true;
        Some(poll)
    }
}

impl Source for ProcessSource {
    fn name(&self) -> String {
        "processes of this node".to_owned()
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        let is_due = self
            .listed
            .is_none_or(|listed| listed.elapsed() >= LIST_INTERVAL);
        let restart = is_due && {
            self.listed = Some(Instant::now());
            self.update(RankProcess::without_rings())
        };
        let Some(first) = self.ranks.values().next().map(|rank| rank.launched.clone()) else {
            return Err(no_process());
        };
        let world_size = Some(first.world_size);
        let had_servers = self.has_servers;
        if let Some(mut poll) = self.poll_servers(deadline) {
            poll.restart |= restart || !had_servers;
            return Ok(poll);
        }
        let observations = self.ranks.values().map(|rank| {
            let (pid, state) = (rank.pid, state(rank.pid));
            let (liveness, text) = match state {
                Some(state) => (
                    Liveness::Alive,
                    format!("process {pid} keeps no record that can be read; {state}"),
                ),
                None => (Liveness::Dead, format!("process {pid} has ended")),
            };
            Observation {
                rank: rank.launched.rank,
                part: 0,
                liveness,
                seen: Seen::Failed(text),
            }
        });
        let job = first.job.as_deref().unwrap_or("without a name");
        let mut sentence = "its ranks keep no record: start it with RCOMM_RECORD=1 and the Python package rcomm, or call \
                       torch.distributed.debug.start_debug_server() in every rank; for the job that runs now, \
                       `rcomm-fr` lists what can be done"
            .to_owned();
        if !self.others.is_empty() {
            sentence.push_str("; other jobs without a record here: ");
            sentence.push_str(&self.others.join("; "));
        }
        Ok(Poll {
            observations: observations.collect(),
            problems: vec![Problem::unreadable_dump(format!("job {job}"), sentence)],
            world_size,
            restart,
            ..Poll::default()
        })
    }
}

/// Takes the stacks of the ranks without rings that [`LocalSource`](super::LocalSource) shows: from PyTorch's worker
/// servers if the job's store lists any, else the states of their threads. Finds no rank while rings are shown.
#[derive(Debug)]
pub struct ProcessStacks(JobChoice);

impl ProcessStacks {
    /// Takes the stacks of the job whose processes a view with this choice shows instead of rings.
    pub fn new(choice: JobChoice) -> Self {
        Self(choice)
    }
}

impl StackRequests for ProcessStacks {
    fn take(&self, deadline: Instant) -> Result<TakenStacks, SourceError> {
        let processes = RankProcess::shown(&self.0);
        let Some(first) = processes.first() else {
            return Err(no_process());
        };
        if let Some(store) = first.store() {
            let mut servers = WorkerServerSource::in_store(store, Some(first.launched.world_size));
            let store_deadline = deadline.min(Instant::now() + STORE_LIMIT);
            if let Ok(answers) = servers.tracebacks(store_deadline) {
                return Ok(TakenStacks::merge(answers));
            }
        }
        let processes = processes.iter();
        let processes = processes.map(|process| (process.launched.rank, Some(process.pid)));
        Ok(threads_of_ranks(processes, deadline))
    }
}

/// The error if no process of a rank without a ring is found.
fn no_process() -> SourceError {
    SourceError::Nothing {
        what: "no process with RANK, WORLD_SIZE and MASTER_ADDR is visible on this node".to_owned(),
        hint: "look on a node of the job, as its user".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    /// A process that is killed at the end of a test.
    struct KilledOnDrop(Child);

    impl Drop for KilledOnDrop {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn start_rank(rank: u32, job: &str, command: &[&str]) -> KilledOnDrop {
        let process = Command::new(command[0])
            .args(&command[1..])
            .envs([("RANK", rank.to_string()), ("WORLD_SIZE", "3".to_owned())])
            .envs([("TORCHELASTIC_RUN_ID", job), ("MASTER_ADDR", "127.0.0.1")])
            .env("MASTER_PORT", "1")
            .spawn();
        KilledOnDrop(process.expect("the program is installed"))
    }

    fn wait_until<T>(mut find: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(found) = find() {
                return found;
            }
            assert!(Instant::now() < deadline, "not within a minute");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn ranks_are_listed_without_their_shells_and_a_newer_job_replaces_an_ended_one() {
        let job = format!("processes-{}", std::process::id());
        let first = start_rank(0, &job, &["sleep", "600"]);
        // A shell that starts the rank and waits for it.
        let mut second = start_rank(1, &job, &["sh", "-c", "sleep 600 & wait"]);
        let listed = wait_until(|| {
            let mut processes = RankProcess::list();
            processes.retain(|process| process.launched.job.as_deref() == Some(&job));
            (processes.len() == 2).then_some(processes)
        });
        let ranks: Vec<u32> = listed.iter().map(|process| process.launched.rank).collect();
        assert_eq!(ranks, [0, 1]);
        assert_eq!(listed[0].pid, first.0.id());
        assert_ne!(listed[1].pid, second.0.id(), "the shell is not the rank");
        assert_eq!(
            listed[0].store().map(|store| store.to_string()).as_deref(),
            Some("127.0.0.1:1")
        );

        let choice = JobChoice::default();
        choice.show_processes(Some(ProcessJob::of(&listed[0])));
        let taken = ProcessStacks::new(choice).take(Instant::now() + Duration::from_secs(20));
        assert_eq!(taken.expect("the processes can be listed").taken, [0, 1]);

        let mut source = ProcessSource::new();
        assert!(!source.update(listed.clone()));
        assert!(state(listed[0].pid).is_some());
        drop(first);
        assert_eq!(state(listed[0].pid), None);
        // A job is shown as long as one of its processes is alive; then a newer one replaces it.
        let mut newer = listed[1].clone();
        newer.launched.job = Some("newer".to_owned());
        newer.pid = u32::MAX;
        assert!(!source.update(vec![listed[1].clone(), newer.clone()]));
        assert_eq!(source.ranks.len(), 2);
        assert!(source.update(vec![newer]));
        assert_eq!(source.ranks.len(), 1);
        let killed = Command::new("kill").arg(listed[1].pid.to_string()).status();
        assert!(killed.expect("the program `kill` starts").success());
        second.0.wait().expect("waiting for a child does not fail");
    }
}
