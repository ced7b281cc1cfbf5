//! `collect --ask`: takes the records of a running PyTorch job from its ranks.
//!
//! PyTorch's worker servers are asked first. A rank that gave no record there, and has no ring on this node, is then
//! asked to write a dump to a file: through the pipe of PyTorch's NCCL backend and, with `--exception-dump`, by a key
//! in the job's store. All steps have one deadline; only Python stacks may take up to five seconds beyond it. Native
//! stacks are taken later, with a time limit for each program. A rank that does not answer delays no other: the archive
//! lists why it is absent.

use super::archive::Archive;
use super::{native_stack, py_spy, this_host};
use crate::cli::args::{CollectArgs, RingPlace};
use crate::cli::failure::Failure;
use crate::cli::progress::Wait;
use rcomm_analyzer::Place;
use rcomm_analyzer::format::printable;
use rcomm_analyzer::source::{
    DumpOfProcess, HostPort, Observation, Program, RankJob, RankProcess, Seen, Source as _,
    WorkerServerSource, raise_exception_dump,
};
use rcomm_analyzer::stacks::{self, RankStacks};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, list_rings};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The time between two polls of the files that ranks were asked for.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time limit of a search for worker servers in a store that the user did not name. It is short, since most jobs have
/// none.
const SEARCH_LIMIT: Duration = Duration::from_secs(2);

/// Maximum number of ranks whose native stacks are taken.
const MAX_NATIVE_STACKS: usize = 4;

/// What is known of the job after its ranks were asked.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// The number of ranks of the job, as the environment of a process states it.
    stated_world_size: Option<NonZeroU32>,
    /// Why each of the ranks without a record gave none.
    pub(super) silent: BTreeMap<Rank, String>,
    /// Where the rings of the job are.
    pub(super) rings: Option<RingPlace>,
    /// What else could not be done, one sentence each.
    pub(super) notes: Vec<String>,
    /// Which job was taken, and which others are on this node, one line each.
    pub(super) job: Vec<String>,
    /// Where in their programs the ranks are now, according to their stacks.
    pub(super) places: Vec<Place>,
    /// The processes of the job on this node.
    processes: Vec<RankProcess>,
}

impl Asked {
    /// Adds to the archive the native stacks of at most [`MAX_NATIVE_STACKS`] ranks at fault that are processes of this
    /// node. Fails if the archive cannot be written.
    pub(super) fn take_native_stacks(
        &mut self,
        culprits: &BTreeSet<Rank>,
        archive: &mut Archive,
    ) -> Result<(), Failure> {
        let processes = self.processes.iter();
        let at_fault = processes.filter(|process| culprits.contains(&process.launched.rank));
        for process in at_fault.take(MAX_NATIVE_STACKS) {
            let rank = process.launched.rank;
            let (text, reasons) = native_stack::take(process.pid);
            archive.add(
                &this_host(),
                &native_stack_path(rank),
                now(),
                text.as_bytes(),
            )?;
            let note = |reason| format!("native stack of rank {rank}: {reason}");
            self.notes.extend(reasons.into_iter().map(note));
        }
        Ok(())
    }

    /// The number of ranks, if a process of this node states it.
    pub(super) fn world_size(&self) -> Option<NonZeroU32> {
        self.stated_world_size
    }
}

/// The records and stacks that ranks gave, and why others gave none.
struct Gathered<'a> {
    archive: &'a mut Archive,
    /// The name of this host.
    host: String,
    /// Ranks whose records are in the archive, or in a ring on this node.
    records: BTreeSet<Rank>,
    /// Ranks whose Python stacks are in the archive.
    stacks: BTreeSet<Rank>,
    /// The Python stacks and the kernel's stacks in the archive, parsed.
    parsed_stacks: Vec<RankStacks>,
    /// Why each rank gave no record or no stack.
    reasons: BTreeMap<Rank, Vec<String>>,
}

/// Asks the ranks for their records and Python stacks, and adds the answers to the archive. Blocks for at most
/// `--wait`, and five seconds more for stacks. Fails if the archive cannot be written.
pub(super) fn collect(args: &CollectArgs, archive: &mut Archive) -> Result<Asked, Failure> {
    let deadline = Instant::now() + args.wait;
    let mut asked = Asked::default();
    let job = match args.ask {
        true => job_to_ask(args.place.job.as_deref(), &mut asked),
        false => None,
    };
    asked.rings = job.as_ref().map(|job| place_of_rings(args, job));
    let processes = job.map_or(vec![], |job| job.processes);
    if args.ask && processes.is_empty() {
        asked.notes.push(
            "no process with RANK, WORLD_SIZE and MASTER_ADDR of the job is visible on this node: run this as the \
             job's user, in its container"
                .to_owned(),
        );
    }
    let first = processes.first();
    asked.stated_world_size =
        first.and_then(|process| NonZeroU32::new(process.launched.world_size));
    let mut gathered = Gathered {
        archive,
        host: this_host(),
        records: BTreeSet::new(),
        stacks: BTreeSet::new(),
        parsed_stacks: Vec::new(),
        reasons: BTreeMap::new(),
    };
    let with_ring = processes.iter().filter(|process| process.has_ring());
    gathered
        .records
        .extend(with_ring.map(|process| process.launched.rank));
    let limit = humantime::format_duration(args.wait);
    let wait = Wait::during(&format!("asking the ranks, for at most {limit}"));
    ask_servers(args, &processes, deadline, &mut gathered, &mut asked)?;
    ask_for_files(args, &processes, deadline, &mut gathered, &mut asked)?;
    take_stacks(&processes, deadline, &mut gathered, &mut asked)?;
    if gathered.records.is_empty() && !args.no_native_stack {
        take_kernel_stacks(&processes, &mut gathered)?;
    }
    drop(wait);
    for process in &processes {
        let rank = process.launched.rank;
        if !gathered.records.contains(&rank) {
            let state = process.state();
            let state = state.map_or("has ended".to_owned(), |state| format!("is alive: {state}"));
            let mut reason = format!("process {} {state}", process.pid);
            for part in gathered.reasons.remove(&rank).unwrap_or_default() {
                reason.push_str("; ");
                reason.push_str(&part);
            }
            asked.silent.insert(rank, reason);
        }
    }
    asked.places = stacks::places(&gathered.parsed_stacks);
    asked.processes = processes;
    for (rank, reasons) in gathered.reasons {
        if !gathered.records.contains(&rank) {
            asked.silent.insert(rank, reasons.join("; "));
        }
    }
    Ok(asked)
}

/// The job of this node to ask: see [`choose`]. Adds to `asked` which job that is, and which others there are.
fn job_to_ask(name: Option<&str>, asked: &mut Asked) -> Option<RankJob> {
    let allocation = std::env::var("SLURM_JOB_ID").ok();
    let (taken, others) = choose(RankJob::of_node(), name, allocation.as_deref());
    if let Some(taken) = &taken {
        let job = printable(taken.name().unwrap_or("without a name"));
        asked.job.push(format!("job {job}: {}", taken.describe()));
        if name.is_none() && taken.program != Program::PyTorch {
            let line = "no rank on this node has loaded PyTorch, as far as this user can see";
            asked.job.push(line.to_owned());
        }
    }
    let others = RankJob::lines(&others).into_iter();
    asked
        .job
        .extend(others.map(|line| format!("not asked: {line}")));
    taken
}

/// The named job or, without a name, the first of these jobs; and the others, of that name if one is given. Within an
/// allocation of Slurm, whose nodes may run other jobs as well, the jobs of the allocation come first, and none of
/// another allocation is taken.
fn choose(
    mut jobs: Vec<RankJob>,
    name: Option<&str>,
    allocation: Option<&str>,
) -> (Option<RankJob>, Vec<RankJob>) {
    let mut others = Vec::new();
    // A variable that is set to nothing names no allocation.
    match (name, allocation.filter(|id| !id.is_empty())) {
        (Some(name), _) => jobs.retain(|job| job.processes[0].is_of(name)),
        (None, Some(allocation)) => {
            let is_own = |job: &RankJob| {
                let stated = job.processes[0].variables.get("SLURM_JOB_ID");
                let stated = stated.filter(|id| !id.is_empty());
                stated.map(|stated| *stated == allocation)
            };
            others.extend(jobs.extract_if(.., |job| is_own(job) == Some(false)));
            jobs.sort_by_key(|job| is_own(job).is_none());
        }
        (None, None) => {}
    }
    let taken = (!jobs.is_empty()).then(|| jobs.remove(0));
    jobs.extend(others);
    (taken, jobs)
}

/// Where the rings of this job are: in the folder that the user names, else where its processes have them mapped, else
/// where the environment of its first process puts them.
fn place_of_rings(args: &CollectArgs, job: &RankJob) -> RingPlace {
    let mapped = job.rings.as_deref().and_then(place_of_folder);
    if let (None, Some(mapped)) = (&args.place.dir, mapped) {
        return mapped;
    }
    let process = &job.processes[0];
    let folder = process.variables.get("RCOMM_RING_DIR");
    let folder = folder.filter(|folder| !folder.is_empty() && *folder != "memory");
    RingPlace {
        dir: args.place.dir.clone().or_else(|| folder.map(PathBuf::from)),
        job: process.job().map(str::to_owned),
    }
}

/// The place of the rings in the folder of one job. A program may name its job otherwise than its environment does, so
/// the name is taken from a ring.
fn place_of_folder(folder: &Path) -> Option<RingPlace> {
    let dir = folder.parent()?;
    let rings = list_rings(dir).ok()?.into_iter();
    let mut of_job = rings.filter(|listing| listing.path.parent() == Some(folder));
    let job = of_job.find_map(|listing| Some(listing.ring.ok()?.identity.job));
    Some(RingPlace {
        dir: Some(dir.to_owned()),
        job: Some(job?),
    })
}

/// Takes records and stacks from the worker servers that the user named, or whose store the user named. If there are
/// none, takes them from the servers in the store of the processes.
fn ask_servers(
    args: &CollectArgs,
    processes: &[RankProcess],
    deadline: Instant,
    gathered: &mut Gathered<'_>,
    asked: &mut Asked,
) -> Result<(), Failure> {
    let world_size = args.world_size.map(NonZeroU32::get);
    let in_store = |store: &HostPort| WorkerServerSource::in_store(store.clone(), world_size);
    let named = args
        .torch_store
        .iter()
        .map(|store| (in_store(store), deadline));
    let addressed = (!args.worker_server.is_empty())
        .then(|| (WorkerServerSource::at(args.worker_server.clone()), deadline));
    let mut sources: Vec<_> = named.chain(addressed).collect();
    let is_named = !sources.is_empty();
    if !is_named && let Some(store) = processes.iter().find_map(RankProcess::store) {
        let limit = deadline.min(Instant::now() + SEARCH_LIMIT);
        sources.push((in_store(&store), limit));
    }
    for (mut source, deadline) in sources {
        let name = source.name();
        let poll = match source.poll(deadline) {
            Ok(poll) => poll,
            Err(error) if is_named => {
                asked.notes.push(format!("{name}: {error}"));
                continue;
            }
            Err(error) => {
                for process in processes {
                    gathered
                        .add_reason(process.launched.rank, format!("no worker server: {error}"));
                }
                continue;
            }
        };
        // A rank has two recorders, one of which is usually empty. An empty record counts only if the rank has no
        // other.
        let recorded_rank = |observation: &Observation| match &observation.seen {
            Seen::Changed(dump) if !dump.entries.is_empty() => Some(observation.rank),
            _ => None,
        };
        let recorded: BTreeSet<Rank> = poll.observations.iter().filter_map(recorded_rank).collect();
        for observation in poll.observations {
            let rank = observation.rank;
            match observation.seen {
                Seen::Changed(dump) if dump.entries.is_empty() && recorded.contains(&rank) => {}
                Seen::Changed(dump) => gathered.add_dump(rank, &dump, observation.part)?,
                Seen::Failed(reason) => gathered.add_reason(rank, reason),
                Seen::Unchanged { .. } => {}
            }
        }
        for (rank, answer) in source.tracebacks(deadline).unwrap_or_default() {
            match answer {
                Ok(text) => gathered.add_stack(rank, &text)?,
                Err(reason) => gathered.add_reason(rank, format!("no stack: {reason}")),
            }
        }
    }
    Ok(())
}

/// Asks the ranks without a record for dumps in files, and waits for these.
fn ask_for_files(
    args: &CollectArgs,
    processes: &[RankProcess],
    deadline: Instant,
    gathered: &mut Gathered<'_>,
    asked: &mut Asked,
) -> Result<(), Failure> {
    let silent = processes
        .iter()
        .filter(|process| !gathered.records.contains(&process.launched.rank));
    let mut waiting: Vec<DumpOfProcess> = silent.map(DumpOfProcess::of).collect();
    let mut is_raised = false;
    if args.exception_dump {
        let stores = args.torch_store.iter().cloned();
        match stores
            .chain(processes.iter().find_map(RankProcess::store))
            .next()
        {
            None => asked
                .notes
                .push("--exception-dump: no store is known; name it with --torch-store".to_owned()),
            Some(store) => match raise_exception_dump(&store, deadline) {
                Ok(()) => is_raised = true,
                Err(error) => asked.notes.push(format!("--exception-dump: {error}")),
            },
        }
    }
    waiting.retain(|dump| match dump.ask() {
        Ok(()) => true,
        Err(reason) => {
            gathered.add_reason(dump.rank, reason);
            // The key in the store asks the rank as well.
            is_raised
        }
    });
    loop {
        let mut still_waiting = Vec::new();
        for dump in waiting {
            match dump.read_new() {
                Some((path, content)) => gathered.add_file(dump.rank, &path, &content)?,
                None => still_waiting.push(dump),
            }
        }
        waiting = still_waiting;
        if waiting.is_empty() || Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    for dump in waiting {
        let limit = humantime::format_duration(args.wait);
        gathered.add_reason(
            dump.rank,
            format!("it was asked for a dump and wrote none within {limit}"),
        );
    }
    Ok(())
}

/// Takes the Python stacks of the processes whose worker server gave none, where `py-spy` is installed.
fn take_stacks(
    processes: &[RankProcess],
    deadline: Instant,
    gathered: &mut Gathered<'_>,
    asked: &mut Asked,
) -> Result<(), Failure> {
    let missing: Vec<(Rank, u32)> = processes
        .iter()
        .map(|process| (process.launched.rank, process.pid))
        .filter(|(rank, _)| !gathered.stacks.contains(rank))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    // Stacks get a few seconds, however long the dumps took.
    let deadline = deadline.max(Instant::now() + py_spy::MIN_TIME);
    match py_spy::dump(&missing, deadline) {
        None => asked.notes.push(
            "no Python stacks but those of worker servers: py-spy is not in PATH (pip install py-spy)".to_owned(),
        ),
        Some(answers) => {
            for (rank, answer) in answers {
                match answer {
                    Ok(text) => gathered.add_stack(rank, &text)?,
                    Err(reason) => asked.notes.push(format!("no Python stack of rank {rank}: {reason}")),
                }
            }
        }
    }
    Ok(())
}

/// Adds to the archive where in the kernel the processes without a Python stack wait. This is needed if no rank has a
/// record: a rank that waits elsewhere than all others is then the only sign. Fails if the archive cannot be written.
fn take_kernel_stacks(
    processes: &[RankProcess],
    gathered: &mut Gathered<'_>,
) -> Result<(), Failure> {
    for process in processes {
        let rank = process.launched.rank;
        if !gathered.stacks.contains(&rank)
            && let Some(text) = native_stack::kernel_stack(process.pid)
        {
            gathered.add_stack_at(rank, &native_stack_path(rank), &text)?;
        }
    }
    Ok(())
}

/// The name of the file with a rank's native stack.
fn native_stack_path(rank: Rank) -> PathBuf {
    PathBuf::from(format!("stacks/native_rank_{rank}.txt"))
}

impl Gathered<'_> {
    fn add_dump(&mut self, rank: Rank, dump: &Dump, part: u8) -> Result<(), Failure> {
        self.records.insert(rank);
        let recorder = if part == 0 { "nccl" } else { "generic" };
        let path = PathBuf::from(format!("worker_servers/{recorder}_rank_{rank}"));
        let host = match dump.identity.host.as_str() {
            "" => self.host.clone(),
            host => host.to_owned(),
        };
        self.archive.add(&host, &path, now(), &dump.to_pickle())
    }

    fn add_file(&mut self, rank: Rank, path: &Path, content: &[u8]) -> Result<(), Failure> {
        self.records.insert(rank);
        self.archive.add(&self.host, path, now(), content)
    }

    fn add_stack(&mut self, rank: Rank, text: &str) -> Result<(), Failure> {
        self.stacks.insert(rank);
        let path = PathBuf::from(format!("stacks/rank_{rank}.txt"));
        self.add_stack_at(rank, &path, text)
    }

    fn add_stack_at(&mut self, rank: Rank, path: &Path, text: &str) -> Result<(), Failure> {
        self.parsed_stacks.push(RankStacks::parse("", rank, text));
        self.archive.add(&self.host, path, now(), text.as_bytes())
    }

    fn add_reason(&mut self, rank: Rank, reason: String) {
        self.reasons.entry(rank).or_default().push(reason);
    }
}

/// The current time, s since the epoch.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::launch::Launched;

    /// A job of one rank, whose process does not exist. `allocation` is its `SLURM_JOB_ID`.
    fn job(name: &str, allocation: Option<&str>) -> RankJob {
        let variable = allocation.map(|id| ("SLURM_JOB_ID".to_owned(), id.to_owned()));
        let process = RankProcess {
            pid: u32::MAX,
            launched: Launched {
                rank: 0,
                world_size: 1,
                job: Some(name.to_owned()),
                attempt: 0,
            },
            variables: variable.into_iter().collect(),
        };
        RankJob::group(vec![process]).remove(0)
    }

    /// The names of the chosen job, empty if there is none, and of the others.
    fn chosen_names(jobs: &[RankJob], name: Option<&str>, allocation: Option<&str>) -> Vec<String> {
        let (taken, others) = choose(jobs.to_vec(), name, allocation);
        let name_of = |job: &RankJob| job.name().unwrap_or_default().to_owned();
        let taken = taken.as_ref().map_or_else(String::new, name_of);
        std::iter::once(taken)
            .chain(others.iter().map(name_of))
            .collect()
    }

    #[test]
    fn a_job_of_another_allocation_is_chosen_by_its_name_only() {
        let jobs = [job("first", Some("1")), job("second", Some("2"))];
        assert_eq!(chosen_names(&jobs, None, Some("2")), ["second", "first"]);
        assert_eq!(
            chosen_names(&jobs, None, Some("3")),
            ["", "first", "second"]
        );
        assert_eq!(chosen_names(&jobs, Some("first"), Some("3")), ["first"]);
        assert_eq!(chosen_names(&jobs, None, None), ["first", "second"]);
    }

    #[test]
    fn an_empty_variable_names_no_allocation() {
        let jobs = [
            job("without", None),
            job("empty", Some("")),
            job("own", Some("2")),
        ];
        let as_listed = ["without", "empty", "own"];
        assert_eq!(chosen_names(&jobs, None, Some("")), as_listed);
        assert_eq!(
            chosen_names(&jobs, None, Some("2")),
            ["own", "without", "empty"]
        );
        // Only the job that names another allocation is foreign.
        assert_eq!(chosen_names(&jobs, None, Some("3")), as_listed);
    }
}
