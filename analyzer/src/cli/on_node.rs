//! Finds further records on this node of the jobs that were read: launch records, and the rings of ranks that left no
//! dump.

use rcomm_analyzer::load::LoadedDump;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, LaunchRecord, RingReader, list_rings};
use rcomm_recorder::record::default_directory;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The launch records in these folders, of the newest attempt. They are all that is left of a job whose ranks closed
/// and removed their rings.
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

/// One attempt of a job.
#[derive(Default)]
struct Job {
    attempt: u32,
    /// The folders of its rings that were read.
    directories: BTreeSet<PathBuf>,
    ranks: BTreeSet<Rank>,
    /// When its earliest dump was taken, ns since the epoch; 0 if none was read.
    taken_ns: i64,
}

impl OnNode {
    /// Notes the job and the rank of a record that was read.
    pub(super) fn note(&mut self, loaded: &LoadedDump) {
        let identity = &loaded.dump.identity;
        if identity.job.is_empty() {
            return;
        }
        let job = self.jobs.entry(identity.job.clone()).or_default();
        job.attempt = job.attempt.max(identity.attempt);
        job.ranks.extend(identity.rank);
        let path = Path::new(&loaded.path);
        if path.extension().is_some_and(|it| it == "ring") {
            job.directories.extend(path.parent().map(Path::to_owned));
        } else if identity.dump_time_ns > 0 {
            job.taken_ns = match job.taken_ns {
                0 => identity.dump_time_ns,
                known => known.min(identity.dump_time_ns),
            };
        }
    }

    /// The launch records next to the rings of these jobs and in the default ring directory.
    pub(super) fn launches(&self) -> Vec<LaunchRecord> {
        let mut launches: Vec<LaunchRecord> = Vec::new();
        for (name, job) in &self.jobs {
            let near = job
                .directories
                .iter()
                .flat_map(|it| LaunchRecord::in_directory(it));
            let usual = LaunchRecord::of_job(&default_directory(), name);
            for launch in near.chain(usual) {
                let own = launch.job == *name && launch.attempt == job.attempt;
                if own && !launches.contains(&launch) {
                    launches.push(launch);
                }
            }
        }
        launches
    }

    /// Path and dump of the rings of ranks without a dump. A ring that was created after the dumps were taken belongs
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
            let missing = rank.is_some_and(|rank| !job.ranks.contains(&rank));
            let same_run =
                summary.identity.attempt == job.attempt && summary.created_ns <= job.taken_ns;
            if missing
                && same_run
                && let Ok(reader) = RingReader::attach(&listing.path)
            {
                rings.push((listing.path.display().to_string(), reader.snapshot()));
            }
        }
        rings
    }
}
