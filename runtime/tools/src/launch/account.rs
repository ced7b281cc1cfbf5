//! The launcher's record of its ranks, for readers of the job's records: how the ranks ended, and the signals that the
//! launcher received and sent.

use super::nodes::Job;
use super::output::Sinks;
use rcomm::Config;
use rcomm::config::RingDir;
use rcomm_recorder::publish::{LaunchRecord, LaunchSignal, LaunchedRank, RankEnd};
use rcomm_recorder::record::default_directory;
use rustix::process::Signal;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{SystemTime, UNIX_EPOCH};

/// How many launch records of ended jobs are kept, if their directories hold nothing else. The records take a few
/// hundred KiB together.
const KEPT: usize = 64;

/// The launcher's record, written at every change.
pub(super) struct Account {
    /// `None` if the rings are in memory, if the configuration is invalid, or if the file could not be written.
    directory: Option<PathBuf>,
    record: LaunchRecord,
    /// The place in the record of each process, in the order in which they were started.
    places: Vec<usize>,
    /// Processes that are to join in place of others: the index of each, and its process id. The record is of one
    /// attempt, so these processes enter the record once the ranks have begun an attempt with them.
    joining: Vec<(usize, u32)>,
    has_changed: bool,
    kills: OutOfMemoryKills,
}

impl Account {
    /// Creates a record without ranks, for the directory of the ranks' rings, and removes old records from there.
    pub(super) fn open(job: &Job, attempt: u32) -> Self {
        // If the environment is invalid, the ranks report that.
        let ring_dir = Config::from_environment().map(|config| config.ring_dir);
        let directory = match ring_dir {
            Ok(RingDir::Shared) => Some(default_directory()),
            Ok(RingDir::Dir(directory)) => Some(directory),
            Ok(RingDir::Memory) | Err(_) => None,
        };
        if let Some(directory) = &directory {
            LaunchRecord::remove_oldest(directory, KEPT);
        }
        let system = rustix::system::uname();
        Self {
            directory,
            record: LaunchRecord {
                schema: LaunchRecord::SCHEMA.to_owned(),
                job: job.id.clone(),
                attempt,
                host: system.nodename().to_string_lossy().into_owned(),
                node: job.node,
                world_size: job.world_size,
                launcher_pid: std::process::id(),
                started_ns: now_ns(),
                ..LaunchRecord::default()
            },
            places: Vec::new(),
            joining: Vec::new(),
            has_changed: true,
            kills: OutOfMemoryKills::begin(),
        }
    }

    /// Records that a rank was started. Ranks must be passed in order.
    pub(super) fn started(&mut self, rank: u32, pid: u32) {
        self.places.push(self.record.ranks.len());
        self.record.ranks.push(LaunchedRank {
            rank,
            pid,
            ..LaunchedRank::default()
        });
    }

    /// Records that a process was started which is to join in place of the ended process at this index.
    pub(super) fn replaced(&mut self, index: usize, pid: u32) {
        if let Some(&place) = self.places.get(index) {
            self.joining.push((self.places.len(), pid));
            self.places.push(place);
        }
    }

    /// Records that the ranks have begun this attempt themselves, with the processes that joined.
    pub(super) fn attempt_begun(&mut self, attempt: u32) {
        if attempt <= self.record.attempt {
            return;
        }
        self.record.attempt = attempt;
        for (index, pid) in std::mem::take(&mut self.joining) {
            let place = self.places.get(index);
            if let Some(rank) = place.and_then(|&place| self.record.ranks.get_mut(place)) {
                *rank = LaunchedRank {
                    rank: rank.rank,
                    pid,
                    ..LaunchedRank::default()
                };
            }
        }
        self.has_changed = true;
    }

    /// The entry of the process at this index in the record; `None` if the process has not joined, so that the entry is
    /// still that of the process before it.
    fn entry_of(&mut self, index: usize) -> Option<&mut LaunchedRank> {
        if self.joining.iter().any(|&(joining, _)| joining == index) {
            return None;
        }
        self.record.ranks.get_mut(*self.places.get(index)?)
    }

    /// Records that the launcher received a signal.
    pub(super) fn received(&mut self, signal: Signal) {
        self.record.received.push(signal_now(signal));
        self.has_changed = true;
    }

    /// Records that the launcher sent a signal to the process at this index.
    pub(super) fn sent(&mut self, index: usize, signal: Signal) {
        if let Some(rank) = self.entry_of(index) {
            rank.sent.push(signal_now(signal));
            self.has_changed = true;
        }
    }

    /// Records that the process at this index has ended; if it was the last one, also that all ranks have.
    pub(super) fn ended(&mut self, index: usize, status: ExitStatus) {
        let kill = Signal::KILL.as_raw();
        let was_killed = status.signal() == Some(kill);
        let Some(rank) = self.entry_of(index) else {
            return;
        };
        let by_launcher = rank.sent.iter().any(|sent| sent.signal == kill);
        let out_of_memory = match was_killed && !by_launcher {
            true => self.kills.has_grown(),
            false => Some(false),
        };
        let end = RankEnd {
            time_ns: now_ns(),
            exit_code: status.code(),
            signal: status.signal(),
            out_of_memory,
        };
        if let Some(rank) = self.entry_of(index) {
            rank.end = Some(end);
        }
        if self.record.ranks.iter().all(|rank| rank.end.is_some()) {
            self.record.ended_ns = now_ns();
        }
        self.has_changed = true;
    }

    /// Writes the changes. A failure is reported once: the job continues without the record.
    pub(super) fn write(&mut self, sinks: &mut Sinks) {
        if !std::mem::take(&mut self.has_changed) {
            return;
        }
        let Some(directory) = &self.directory else {
            return;
        };
        if let Err(error) = self.record.write(directory) {
            sinks.print_message(&format!("how the ranks end is not recorded: {error}"));
            self.directory = None;
        }
    }
}

fn signal_now(signal: Signal) -> LaunchSignal {
    LaunchSignal {
        signal: signal.as_raw(),
        time_ns: now_ns(),
    }
}

fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    })
}

/// Counts the processes that the kernel has killed because memory ran out: in the control group of this process and the
/// ranks, or on the whole host if the group's count is not readable.
struct OutOfMemoryKills {
    /// The file with the group's count, if it is readable.
    events: Option<PathBuf>,
    /// The group's kills that earlier calls have counted.
    group_kills: Option<u64>,
    /// The host's kills when the ranks were started.
    host_kills: Option<u64>,
}

/// The file with the host's count.
const OF_HOST: &str = "/proc/vmstat";

impl OutOfMemoryKills {
    /// Reads the counts as they are before the ranks are started.
    fn begin() -> Self {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let events = counters(&groups).find(|path| count_in(path).is_some());
        Self {
            group_kills: events.as_deref().and_then(count_in),
            host_kills: count_in(OF_HOST.as_ref()),
            events,
        }
    }

    /// Whether the kernel has killed a process of the group that no earlier call has counted: each kill counts for one
    /// rank. `None` if unknown.
    fn has_grown(&mut self) -> Option<bool> {
        if let Some(before) = &mut self.group_kills {
            let has_grown = self.events.as_deref().and_then(count_in)? > *before;
            *before += u64::from(has_grown);
            return Some(has_grown);
        }
        let has_grown = count_in(OF_HOST.as_ref())? > self.host_kills?;
        // If the host's count has grown, the killed process may be any process of the host.
        (!has_grown).then_some(false)
    }
}

/// The number of kills in a file of `name value` lines; `None` if it has none.
fn count_in(path: &std::path::Path) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count?.trim().parse().ok()
}

/// Returns the files that may hold the count of kills in the control groups that `groups` lists, the most specific
/// first. `groups` is the text of `/proc/<pid>/cgroup`.
fn counters(groups: &str) -> impl Iterator<Item = PathBuf> {
    let mount = PathBuf::from("/sys/fs/cgroup");
    // Each line is `number:controllers:path`; in the line of version 2 the controllers are empty.
    let path_where = |matches: fn(&str) -> bool| {
        let mut lines = groups.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            rest.split_once(':')
        });
        let found = lines.find(|(controllers, _)| matches(controllers));
        found.map(|(_, path)| path.trim_start_matches('/').to_owned())
    };
    let version_2_path = path_where(str::is_empty);
    let version_2_file = version_2_path.map(|path| mount.join(path).join("memory.events"));
    let version_1_mount = mount.join("memory");
    let version_1_path = path_where(|controllers| {
        let mut controllers = controllers.split(',');
        controllers.any(|controller| controller == "memory")
    });
    let version_1_files = version_1_path.map(|path| {
        // In a container the path may be the one on the host, while the container's group is mounted at the top.
        ["", path.as_str()].map(|path| version_1_mount.join(path).join("memory.oom_control"))
    });
    let version_1_files = version_1_files
        .into_iter()
        .flat_map(|[top, exact]| [exact, top]);
    version_2_file.into_iter().chain(version_1_files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter_paths(groups: &str) -> Vec<String> {
        let counter_paths = counters(groups);
        counter_paths
            .map(|path| path.display().to_string())
            .collect()
    }

    #[test]
    fn the_count_of_kills_is_looked_for_in_both_versions_of_control_groups() {
        assert_eq!(
            counter_paths("0::/user.slice/job\n"),
            ["/sys/fs/cgroup/user.slice/job/memory.events"]
        );
        assert_eq!(
            counter_paths("9:name=systemd:/\n4:cpu,memory:/docker/7f\n0::/\n"),
            [
                "/sys/fs/cgroup/memory.events",
                "/sys/fs/cgroup/memory/docker/7f/memory.oom_control",
                "/sys/fs/cgroup/memory/memory.oom_control",
            ]
        );
        assert_eq!(counter_paths("no groups"), [""; 0]);
    }
}
