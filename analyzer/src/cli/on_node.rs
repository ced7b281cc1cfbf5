//! For the jobs whose records were read, finds further records on this node: launch records, and the rings of ranks
//! that left no dump.

use rcomm_analyzer::load::LoadedDump;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, Identity, LaunchRecord, RingReader, list_rings};
use rcomm_recorder::record::default_directory;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The launch records of the newest attempt in these folders. A job whose ranks closed and removed their rings leaves
/// nothing else.
pub(super) fn launches_in(paths: &[PathBuf]) -> Vec<LaunchRecord> {
    let found = paths
        .iter()
        .flat_map(|path| LaunchRecord::in_directory(path));
    let mut found: Vec<LaunchRecord> = found.collect();
    let newest = found.iter().map(|launch| launch.attempt).max();
    found.retain(|launch| Some(launch.attempt) == newest);
    found
}

/// The jobs whose records were read.
#[derive(Default)]
pub(super) struct OnNode {
    jobs: BTreeMap<String, Job>,
}

/// The newest attempt of a job, and what was read of it.
#[derive(Default)]
struct Job {
    attempt: u32,
    /// The folders with the records that were read, of any attempt.
    directories: BTreeSet<PathBuf>,
    /// The ranks whose records were read.
    ranks: BTreeSet<Rank>,
    /// When the earliest dump was taken, ns since the epoch; 0 if no dump states it.
    taken_ns: i64,
    /// The newest time in a dump or a ring, ns since the epoch; 0 if none states one.
    newest_ns: i64,
}

impl OnNode {
    /// Notes the job and the rank of a dump that was read, in any order of attempts; a dump without a job's name is
    /// ignored.
    pub(super) fn note(&mut self, loaded: &LoadedDump) {
        self.note_record(&loaded.dump.identity, Path::new(&loaded.path));
    }

    fn note_record(&mut self, identity: &Identity, path: &Path) {
        if identity.job.is_empty() {
            return;
        }
        let job = self.jobs.entry(identity.job.clone()).or_default();
        let is_ring = path.extension().is_some_and(|ending| ending == "ring");
        job.directories.extend(path.parent().map(Path::to_owned));
        if identity.attempt > job.attempt {
            job.attempt = identity.attempt;
            job.ranks.clear();
            job.taken_ns = 0;
            job.newest_ns = 0;
        } else if identity.attempt < job.attempt {
            return;
        }
        job.ranks.extend(identity.rank);
        job.newest_ns = job.newest_ns.max(identity.dump_time_ns);
        if !is_ring && identity.dump_time_ns > 0 {
            job.taken_ns = match job.taken_ns {
                0 => identity.dump_time_ns,
                known => known.min(identity.dump_time_ns),
            };
        }
    }

    /// The launch records of the jobs' newest attempts, from the folders of the records that were read and from the
    /// default ring directory.
    ///
    /// A launch that began after all records of its job belongs to a later run of the same name, of any attempt. It
    /// counts if it lies in a folder among `paths` or below one, where the newest run is wanted. If only files of the
    /// earlier run were passed, that run is wanted, and the launch is left out.
    pub(super) fn launches(&self, paths: &[PathBuf]) -> Vec<LaunchRecord> {
        let mut launches: Vec<LaunchRecord> = Vec::new();
        for (name, job) in &self.jobs {
            let is_passed = |folder: &Path| {
                let mut folders = paths.iter().filter(|path| path.is_dir());
                folders.any(|path| folder.starts_with(path))
            };
            let next_to_records = job.directories.iter().flat_map(|folder| {
                let passed = is_passed(folder);
                let launches = LaunchRecord::in_directory(folder).into_iter();
                launches.map(move |launch| (launch, passed))
            });
            let in_default_directory = LaunchRecord::of_job(&default_directory(), name);
            let elsewhere = in_default_directory.into_iter();
            let elsewhere = elsewhere.map(|launch| (launch, false));
            for (launch, passed) in next_to_records.chain(elsewhere) {
                let is_of_later_run = job.newest_ns > 0 && launch.started_ns > job.newest_ns;
                let is_wanted = match is_of_later_run {
                    true => passed,
                    false => launch.attempt == job.attempt,
                };
                if launch.job == *name && is_wanted && !launches.contains(&launch) {
                    launches.push(launch);
                }
            }
        }
        launches
    }

    /// The rings in the default ring directory of ranks whose records were not read, each with its path; only for jobs
    /// of which a dump that states its time was read. A ring that was created after the earliest dump was taken belongs
    /// to another run of the same name and is left out.
    pub(super) fn rings(&self) -> Vec<(String, Dump)> {
        if self.jobs.values().all(|job| job.taken_ns == 0) {
            return Vec::new();
        }
        let mut rings = Vec::new();
        for listing in list_rings(&default_directory()).unwrap_or_default() {
            let Ok(summary) = &listing.ring else { continue };
            let Some(job) = self.jobs.get(&summary.identity.job) else {
                continue;
            };
            let rank = summary.identity.rank;
            let is_unread = rank.is_some_and(|rank| !job.ranks.contains(&rank));
            let is_same_run =
                summary.identity.attempt == job.attempt && summary.created_ns <= job.taken_ns;
            if is_unread
                && is_same_run
                && let Ok(dump) = RingReader::attach(&listing.path).and_then(|ring| ring.read())
            {
                rings.push((listing.path.display().to_string(), dump));
            }
        }
        rings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_older_attempts_do_not_count_for_the_newest() {
        let record = |attempt, rank, dump_time_ns| Identity {
            job: "train".into(),
            attempt,
            rank: Some(rank),
            dump_time_ns,
            ..Identity::default()
        };
        // The order in which the records are read must not matter.
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let records = [record(0, 0, 100), record(0, 1, 100), record(1, 1, 900)];
            let mut on_node = OnNode::default();
            for index in order {
                on_node.note_record(&records[index], Path::new("dumps/rank.json"));
            }
            let job = &on_node.jobs["train"];
            assert_eq!((job.attempt, job.taken_ns), (1, 900));
            assert_eq!(job.ranks, BTreeSet::from([1]));
        }
    }
}
