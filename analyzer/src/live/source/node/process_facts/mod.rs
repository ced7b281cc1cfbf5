//! Reads facts about a rank's process on this node: its state, the load of the host, its GPU, the kernel's log and the
//! end of the process's own log. The facts come from files and from `nvidia-smi`; no process of the job is asked,
//! stopped or traced.
//!
//! `nvidia-smi` is NVML's own program. NVML itself is not loaded: a statically linked program cannot load it, and a
//! call into a driver that hangs cannot be ended, while a program that hangs can be left behind.

mod gpu;
mod log;

use crate::live::source::node::rank_jobs::started;
use crate::live::source::node::threads::describe_state;
use crate::live::source::{RingSource, SourceError};
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text::bytes;
use rcomm_verdict::format::count;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time between the two readings of the processors' counters.
const INTERVAL: Duration = Duration::from_millis(200);
/// Shares of time, in percent, from which a figure is notable.
const NOTABLE_STEAL: f64 = 10.0;
const NOTABLE_PRESSURE: f64 = 25.0;
/// At most this many ranks are described at once.
const MOST_RANKS: usize = 4;

/// One fact about a process or its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// The subject, like `process`, `host` or `GPU`.
    pub about: &'static str,
    /// The fact.
    pub text: String,
    /// Whether the fact may be the cause of a delay.
    pub notable: bool,
}

impl Fact {
    fn new(about: &'static str, text: String, notable: bool) -> Self {
        Self {
            about,
            text,
            notable,
        }
    }
}

/// Facts about the process of one rank, its host and its GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFacts {
    /// The rank.
    pub rank: Rank,
    /// The facts, those about the process first.
    pub facts: Vec<Fact>,
    /// The last lines of the process's output, oldest first; empty if the output goes to no file.
    pub log: Vec<String>,
}

/// Reads facts about the processes of the ranks with rings on this node.
pub struct RingProcessFacts {
    source: Mutex<RingSource>,
    /// The folder of the kernel's files: `/proc`.
    proc: PathBuf,
    /// The program that is asked about the GPUs: `nvidia-smi`.
    program: PathBuf,
    /// Whether `nvidia-smi` failed to answer once. Then it is not started again, since it cannot always be ended.
    gpu_hangs: AtomicBool,
}

impl RingProcessFacts {
    /// Describes ranks of the job that this source shows.
    pub fn new(source: RingSource) -> Self {
        Self {
            source: Mutex::new(source),
            proc: "/proc".into(),
            program: "nvidia-smi".into(),
            gpu_hangs: AtomicBool::new(false),
        }
    }

    /// Describes the first four of these ranks whose processes are alive on this node.
    ///
    /// # Blocking
    ///
    /// About 200 ms, then as long as `nvidia-smi`, if it is installed, takes to answer, at most until the deadline.
    ///
    /// # Errors
    ///
    /// If there is no ring, or the directory of the rings cannot be read.
    pub fn take(
        &self,
        ranks: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<ProcessFacts>, SourceError> {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let processes = source.processes()?;
        drop(source);
        let process_of = |wanted: &Rank| {
            let (rank, pid) = processes.iter().find(|(rank, _)| rank == wanted)?;
            Some((*rank, (*pid)?))
        };
        let wanted = ranks.iter().filter_map(process_of);
        let wanted: Vec<(Rank, u32)> = wanted.take(MOST_RANKS).collect();
        if wanted.is_empty() {
            return Ok(vec![]);
        }
        let host = self.host();
        let messages = log::kernel();
        let gpus = self.gpus(deadline);
        let described = wanted.into_iter().map(|(rank, pid)| ProcessFacts {
            rank,
            facts: process(&self.proc, pid)
                .into_iter()
                .chain(gpu_of(&self.proc, pid, &gpus))
                .chain(host.iter().cloned())
                .chain(log::facts_of(&messages, started(pid)))
                .collect(),
            log: log::end_of(&self.proc, pid),
        });
        Ok(described.collect())
    }

    /// The GPUs of this node, none if `nvidia-smi` cannot be used; an error if it does not answer.
    fn gpus(&self, deadline: Instant) -> Result<gpu::Gpus, &'static str> {
        let hangs = "nvidia-smi does not answer: the driver or a GPU may hang";
        if self.gpu_hangs.load(Ordering::Relaxed) {
            return Err(hangs);
        }
        match gpu::Gpus::read(&self.program, deadline) {
            Ok(gpus) => Ok(gpus),
            Err(gpu::Unread::Absent) => Ok(gpu::Gpus::default()),
            Err(gpu::Unread::NoAnswer) => {
                self.gpu_hangs.store(true, Ordering::Relaxed);
                Err(hangs)
            }
        }
    }

    /// The facts about the host. Blocks for [`INTERVAL`].
    fn host(&self) -> Vec<Fact> {
        let read = |name: &str| fs::read_to_string(self.proc.join(name)).unwrap_or_default();
        let before = ProcessorTimes::parse(&read("stat"));
        std::thread::sleep(INTERVAL);
        let after = ProcessorTimes::parse(&read("stat"));
        let mut facts = Vec::new();
        facts.extend(load(&read("loadavg"), before.zip(after)));
        facts.extend(pressure(|resource| read(&format!("pressure/{resource}"))));
        facts.extend(memory(&read("meminfo")));
        facts
    }
}

/// The facts about the GPUs of a process, or the fact that `nvidia-smi` does not answer.
fn gpu_of(proc: &Path, pid: u32, gpus: &Result<gpu::Gpus, &'static str>) -> Vec<Fact> {
    match gpus {
        Ok(gpus) => {
            let environment = fs::read(proc.join(format!("{pid}/environ"))).unwrap_or_default();
            gpus.of_process(pid, &environment)
        }
        Err(reason) => vec![Fact::new("GPU", (*reason).to_owned(), true)],
    }
}

/// The state of a process, its threads and memory; `None` if it has ended.
fn process(proc: &Path, pid: u32) -> Option<Fact> {
    let read =
        |name: &str| fs::read_to_string(proc.join(format!("{pid}/{name}"))).unwrap_or_default();
    let (status, wchan) = (read("status"), read("wchan"));
    let field = |name: &str| {
        let mut fields = status.lines().filter_map(|line| line.split_once(':'));
        let value = fields.find_map(|(field, value)| (field == name).then_some(value))?;
        Some(value.trim())
    };
    let state = field("State")?;
    let mut text = format!("{pid} {}", describe_state(&status, &wchan));
    if let Some(threads) = field("Threads").and_then(|threads| threads.parse().ok()) {
        text.push_str(&format!("; {}", count(threads, "thread")));
    }
    let kib = |value: &str| value.strip_suffix(" kB")?.trim().parse::<u64>().ok();
    if let Some(resident) = field("VmRSS").and_then(kib) {
        text.push_str(&format!(
            ", {} resident",
            bytes(resident.saturating_mul(1024))
        ));
    }
    let notable = matches!(state.chars().next(), Some('D' | 'T' | 't' | 'Z'));
    Some(Fact::new("process", text, notable))
}

/// The counters of all processors together, in ticks.
#[derive(Clone, Copy)]
struct ProcessorTimes {
    total: u64,
    idle: u64,
    stolen: u64,
}

impl ProcessorTimes {
    /// Parses the first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal. The times of
    /// guests follow, which user and nice contain.
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> = line
            .split_whitespace()
            .map_while(|n| n.parse().ok())
            .collect();
        Some(Self {
            total: ticks.iter().take(8).fold(0, |a, b| a.saturating_add(*b)),
            idle: ticks.get(3)?.saturating_add(*ticks.get(4)?),
            stolen: *ticks.get(7)?,
        })
    }
}

/// The load of the host, from `/proc/loadavg` and two readings of the processors' counters.
fn load(loadavg: &str, times: Option<(ProcessorTimes, ProcessorTimes)>) -> Option<Fact> {
    let load: f64 = loadavg.split_whitespace().next()?.parse().ok()?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut text = format!(
        "load {load:.1} on {}",
        count(processors as u64, "processor")
    );
    let mut notable = load > 2.0 * processors as f64;
    if let Some((before, after)) = times
        && after.total > before.total
    {
        let total = (after.total - before.total) as f64;
        let busy = 100.0 - 100.0 * after.idle.saturating_sub(before.idle) as f64 / total;
        let stolen = 100.0 * after.stolen.saturating_sub(before.stolen) as f64 / total;
        text.push_str(&format!(", {busy:.0} % busy"));
        if stolen >= 1.0 {
            text.push_str(&format!(", {stolen:.0} % stolen by other virtual machines"));
        }
        notable |= stolen >= NOTABLE_STEAL;
    }
    Some(Fact::new("host", text, notable))
}

/// How much of the last ten seconds tasks of the host waited for processors, memory and disks (pressure stall
/// information); `None` if the kernel does not measure it.
fn pressure(read: impl Fn(&str) -> String) -> Option<Fact> {
    let names = [("cpu", "processors"), ("memory", "memory"), ("io", "disks")];
    let mut shares = Vec::new();
    for (resource, name) in names {
        let text = read(resource);
        let some = text.lines().find_map(|line| line.strip_prefix("some "));
        let average = some.and_then(|line| {
            line.split_whitespace()
                .find_map(|f| f.strip_prefix("avg10="))
        });
        if let Some(share) = average.and_then(|share| share.parse::<f64>().ok()) {
            shares.push((share, name));
        }
    }
    if shares.is_empty() {
        return None;
    }
    let notable = shares.iter().any(|(share, _)| *share >= NOTABLE_PRESSURE);
    let mut list: Vec<String> = Vec::new();
    // A share that would be written as 0 % is no fact to read.
    for (share, name) in shares.iter().filter(|(share, _)| *share >= 0.5) {
        let period = if list.is_empty() {
            " of the last 10 s"
        } else {
            ""
        };
        list.push(format!("{share:.0} %{period} for {name}"));
    }
    let text = match list.is_empty() {
        true => {
            let names: Vec<&str> = shares.iter().map(|(_, name)| *name).collect();
            format!("no task waited in the last 10 s for {}", names.join(", "))
        }
        false => format!("tasks waited {}", list.join(", ")),
    };
    Some(Fact::new("pressure", text, notable))
}

/// The memory of the host, from `/proc/meminfo`; notable if less than a twentieth is available.
fn memory(meminfo: &str) -> Option<Fact> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kib.saturating_mul(1024))
    };
    let (total, available) = (field("MemTotal:")?, field("MemAvailable:")?);
    let text = format!("{} of {} available", bytes(available), bytes(total));
    Some(Fact::new("memory", text, available < total / 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};

    #[test]
    fn a_rank_of_this_process_has_a_state_a_host_and_memory() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let mut config = RecorderConfig::new("job", 3, 4);
        config.placement = Placement::Dir(directory.path().to_owned());
        let _recorder =
            FlightRecorder::create(&config).expect("a ring can be made in a fresh directory");
        let source = RingSource::new(directory.path().to_owned(), None);
        let mut reader = RingProcessFacts::new(source);
        reader.program = directory.path().join("there-is-no-such-program");
        let deadline = Instant::now() + Duration::from_secs(60);
        let taken = reader.take(&[3], deadline).expect("there is a ring");
        let [described] = &taken[..] else {
            panic!("one rank: {taken:?}");
        };
        assert_eq!(described.rank, 3);
        let about: Vec<&str> = described.facts.iter().map(|fact| fact.about).collect();
        assert_eq!(about[0], "process");
        let text = &described.facts[0].text;
        let pid = std::process::id().to_string();
        assert!(
            text.starts_with(&pid) && text.contains("resident"),
            "{text}"
        );
        assert!(
            about.contains(&"host") && about.contains(&"memory"),
            "{about:?}"
        );
        assert!(!about.contains(&"GPU"), "{about:?}");
        let absent = reader.take(&[0], deadline).expect("there is a ring");
        assert_eq!(absent, []);
    }

    #[test]
    fn a_stopped_process_and_a_busy_host_are_notable() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let folder = directory.path().join("7");
        fs::create_dir(&folder).expect("the directory takes new files");
        let write = |name: &str, text: &str| {
            fs::write(folder.join(name), text).expect("the file can be written");
        };
        write(
            "status",
            "Name:\tpython\nState:\tT (stopped)\nVmRSS:\t  2048 kB\nThreads:\t1\n",
        );
        write("wchan", "do_signal_stop");
        let fact = process(directory.path(), 7).expect("the process has a status");
        assert_eq!(
            (fact.text.as_str(), fact.notable),
            (
                "7 is stopped in do_signal_stop; 1 thread, 2 MiB resident",
                true
            )
        );
        assert_eq!(process(directory.path(), 8), None);

        let times = |text| ProcessorTimes::parse(text).expect("the line has eight numbers");
        let before = times("cpu  100 0 0 100 0 0 0 0 0 0\ncpu0 1\n");
        let after = times("cpu  130 0 0 150 0 0 0 20 0 0\ncpu0 1\n");
        let fact = load("0.50 0 0 1/2 3\n", Some((before, after))).expect("the text states a load");
        assert!(
            fact.text.contains("50 % busy, 20 % stolen by other"),
            "{}",
            fact.text
        );
        assert!(fact.notable);
        let quiet = load("0.50 0 0 1/2 3\n", None).expect("the text states a load");
        assert!(!quiet.notable);
        assert_eq!(load("", None), None);
        assert!(ProcessorTimes::parse("cpu 1 2").is_none());

        let some = |share: &str| format!("some avg10={share} avg60=0.00 avg300=0.00 total=1\n");
        let fact = pressure(|resource| match resource {
            "cpu" => some("45.20"),
            "memory" => some("0.00"),
            _ => String::new(),
        });
        let fact = fact.expect("two resources state a pressure");
        assert_eq!(
            (fact.text.as_str(), fact.notable),
            ("tasks waited 45 % of the last 10 s for processors", true)
        );
        let calm = pressure(|_| some("0.00")).expect("three resources state a pressure");
        assert_eq!(
            (calm.text.as_str(), calm.notable),
            (
                "no task waited in the last 10 s for processors, memory, disks",
                false
            )
        );
        assert_eq!(pressure(|_| String::new()), None);

        let low = "MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\n";
        let fact = memory(low).expect("the text has both fields");
        assert_eq!(
            (fact.text.as_str(), fact.notable),
            ("1 MiB of 1 GiB available", true)
        );
    }
}
