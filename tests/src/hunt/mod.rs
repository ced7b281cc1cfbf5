//! A hunt for false verdicts: jobs whose truth is known before they are judged.
//!
//! A seed gives a job: its ranks, groups, program, backend, recorder and clocks, its faults (at most two, except in
//! [`Class::Odds`]), and the moment at which its records are taken. The job is run against a clock with the semantics
//! of its backend, up to the time-outs and ends of the other processes. Its records are then judged, and the report is
//! compared with what happened.
//!
//! `generator` makes records of jobs that stand still after a fault, in the manner of every recorder; here jobs have a
//! life: what is seen depends on when one looks.

mod class;
mod job;
mod judge;
mod program;
mod record;
mod run;

pub use class::Class;
pub use job::{Backend, Fault, Group, Job, Records, Wrong};
pub use judge::{Grade, Truth};

use crate::generator::Random;
use anyhow::Context;
use job::{MS, SECOND};
use rcomm_analyzer::{Analysis, Extent, Policy, RecordFile, Report, logs};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use record::{START_NS, Writer};
use run::History;
use std::fmt;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// When and how the records of a job are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// A live view reads the rings while the job runs or ends.
    Live,
    /// The rings are read later, when nothing more happens.
    After,
    /// Every process is asked for a dump, some later than others. Those that are stopped or gone write none.
    Asked,
    /// The dumps that processes have written by themselves, at a time-out or another failure.
    Left,
}

/// A job, what happened in it, and its records.
pub struct Case {
    /// The class that the job was drawn from.
    pub class: Class,
    /// The job.
    pub job: Job,
    /// The faults that have a place in the job.
    pub faults: Vec<Fault>,
    /// How the records are taken.
    pub look: Look,
    /// When the last of them is taken, ns since the start of the job.
    pub moment: i64,
    /// What is true then.
    pub truth: Truth,
    /// The records.
    pub dumps: Vec<Dump>,
    /// The names of their files.
    pub names: Vec<String>,
    /// The logs, each with the name of its file.
    pub logs: Vec<(String, String)>,
    /// The settings of the analysis, with the files' times.
    pub policy: Policy,
    /// The rank whose record is lost, if one is.
    pub lost: Option<Rank>,
    history: History,
}

impl Case {
    /// The case of this seed, of a job of any kind.
    pub fn make(seed: u64) -> Self {
        Self::of(Class::Any, seed)
    }

    /// The case of this seed in a class.
    pub fn of(class: Class, seed: u64) -> Self {
        let random = &mut Random::new(seed ^ class.salt() ^ 0x7275_6e00);
        let mut case = Self::of_job(class.job(seed), class, random);
        class.change_records(&mut case, random);
        case
    }

    fn of_job(job: Job, class: Class, random: &mut Random) -> Self {
        let (programs, faults) = program::programs(&job, random);
        // A run without the signal shows how long the job takes, and so when the signal comes.
        let asked = job.cancelled_at.map(|share| {
            let unasked = run::run(&job, programs.clone(), &faults, None, &mut random.clone());
            (unasked.last as f64 * share) as i64
        });
        let mut history = run::run(&job, programs, &faults, asked, random);
        class.change_history(&mut history, random);
        let mut case = Self {
            class,
            job,
            faults,
            look: Look::Live,
            moment: 0,
            truth: Truth::default(),
            dumps: Vec::new(),
            names: Vec::new(),
            logs: Vec::new(),
            policy: Policy::default(),
            lost: None,
            history,
        };
        case.take(random);
        case
    }

    /// Takes the records.
    fn take(&mut self, random: &mut Random) {
        let (job, history) = (&self.job, &self.history);
        let world = job.world();
        let struck = history.struck.iter().flatten().min().copied();
        let left = history.lives.iter().any(|life| life.dumped.is_some());
        let (look, moment) = match job.records {
            Records::Dumps if left && random.chance(0.6) => (Look::Left, history.last),
            Records::Own if left => (Look::Left, history.last),
            Records::Rings if random.chance(0.4) => (Look::After, history.last + SECOND),
            records => {
                let moment = match struck {
                    Some(struck) if random.chance(0.9) => {
                        struck
                            + *random.pick(&[300, 2_000, 8_000, 15_000, 18_000, 45_000, 150_000])
                                * MS
                    }
                    _ => history.last * random.between(3, 110) as i64 / 100,
                };
                let look = match records {
                    Records::Dumps | Records::Own => Look::Asked,
                    Records::Rings => Look::Live,
                };
                (look, moment)
            }
        };
        let spread = *random.pick(&[0, 200, 3_000, 20_000]) * MS;
        let mut moments: Vec<i64> = (0..world)
            .map(|rank| match look {
                Look::Left => history.lives[rank as usize].dumped.unwrap_or(i64::MAX),
                Look::Asked => moment + (random.draw() % (spread + 1) as u64) as i64,
                Look::Live | Look::After => moment,
            })
            .collect();
        let can_write = |rank: Rank, at: i64| {
            let life = &history.lives[rank as usize];
            life.gone.is_none_or(|gone| gone.at > at)
                && life.stopped.is_none_or(|stopped| stopped > at)
        };
        let mut seen: Vec<Rank> = (0..world)
            .filter(|&rank| match job.records {
                Records::Own if look == Look::Left => history.lives[rank as usize].dumped.is_some(),
                Records::Dumps | Records::Own => can_write(rank, moments[rank as usize]),
                Records::Rings => true,
            })
            .collect();
        if look != Look::Live && seen.len() > 2 && random.chance(0.1) {
            self.lost = Some(seen.remove((random.draw() % seen.len() as u64) as usize));
        }
        // A rank whose record was not taken is judged as it is when the last of the other records is taken.
        let latest = seen.iter().map(|&rank| moments[rank as usize]).max();
        let latest = latest.unwrap_or(moment);
        for rank in 0..world {
            if !seen.contains(&rank) {
                moments[rank as usize] = latest;
            }
        }
        let writer = Writer::new(job, history, random);
        let write = |&rank: &Rank| writer.write(rank, moments[rank as usize]);
        self.dumps = seen.iter().map(write).collect();
        self.names = seen.iter().map(|&rank| name(job, rank)).collect();
        let written = |&rank: &Rank| RecordFile {
            written_ns: Some(writer.wall(rank, moments[rank as usize] + 5 * MS)),
            extent: Extent::Whole,
        };
        let files = match job.records {
            Records::Dumps => seen.iter().map(written).collect(),
            // Rings and rcomm's dumps state their time.
            Records::Rings | Records::Own => Vec::new(),
        };
        let launches = match job.records {
            Records::Rings if job.is_launched && job.launcher_notes => writer.launches(latest),
            _ => Vec::new(),
        };
        self.policy = Policy {
            snapshot: look == Look::Live,
            now_ns: (look == Look::Live).then_some(START_NS + moment),
            snapshot_of_rings: look == Look::After,
            files,
            launches,
            ..Policy::default()
        };
        self.look = look;
        self.moment = latest;
        self.truth = Truth::of(self, &moments);
        // The times of the files show how long the operations in them had been pending. Some cases lack them.
        if self.truth.waited >= 12 * SECOND && random.chance(0.15) {
            self.policy.files.clear();
        }
    }

    /// The analyzer's report on the records.
    pub fn report(&self) -> Report {
        let mut policy = self.policy.clone();
        let files = std::mem::take(&mut policy.files);
        let mut analysis = Analysis::new(policy);
        for (index, dump) in self.dumps.iter().enumerate() {
            analysis.note_written(files.get(index).and_then(|file| file.written_ns));
            analysis.add_from(&self.names[index], dump, Extent::Whole);
        }
        let mut report = analysis.finish();
        let logs = self.logs.iter();
        let logs: Vec<_> = logs
            .filter_map(|(name, text)| class::read_log(name, text))
            .collect();
        logs::join(&mut report, &logs);
        report
    }

    /// Judges the case: the report, its grade, and the reason.
    pub fn judge(&self) -> (Report, Grade, String) {
        let report = self.report();
        let (grade, why) = self.truth.grade(&report);
        (report, grade, why)
    }

    /// Writes the records, the logs and the launchers' records to a folder, as `rcomm-fr analyze` reads them.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, folder: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        for (index, dump) in self.dumps.iter().enumerate() {
            let path = folder.join(&self.names[index]);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
            }
            let bytes = match self.job.records {
                Records::Dumps => dump.to_pickle(),
                Records::Rings | Records::Own => dump.to_json(),
            };
            std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
            let written = self
                .policy
                .files
                .get(index)
                .and_then(|file| file.written_ns);
            if let Some(written) = written {
                let at = UNIX_EPOCH + Duration::from_nanos(written as u64);
                let file = std::fs::File::options().append(true).open(&path);
                file.and_then(|file| file.set_modified(at))
                    .with_context(|| path.display().to_string())?;
            }
        }
        for (name, text) in &self.logs {
            let path = folder.join(name);
            std::fs::write(&path, text).with_context(|| path.display().to_string())?;
        }
        for launch in &self.policy.launches {
            let path = folder.join(format!("launch.{}.json", launch.node));
            let bytes = serde_json::to_vec_pretty(launch)?;
            std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}

/// The name of the file of a rank's record.
fn name(job: &Job, rank: Rank) -> String {
    match job.records {
        Records::Dumps => format!("nccl_trace_rank_{rank}"),
        Records::Rings | Records::Own => format!("rank_{rank}.json"),
    }
}

impl fmt::Display for Case {
    /// What the case is, in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let job = &self.job;
        write!(
            f,
            "{:?} {:?} tp {} pp {} dp {}, {:?} at {:.1} s",
            job.backend,
            job.records,
            job.tp,
            job.pp,
            job.dp,
            self.look,
            self.moment as f64 / 1e9
        )?;
        for (fault, at) in self.faults.iter().zip(&self.history.struck) {
            let at = at.map_or("never".to_owned(), |at| {
                format!("at {:.1} s", at as f64 / 1e9)
            });
            write!(f, ", rank {} {:?} {at}", fault.rank, fault.wrong)?;
        }
        if let Some(asked) = self.history.asked {
            write!(f, ", cancelled at {:.1} s", asked as f64 / 1e9)?;
        }
        if let Some(lost) = self.lost {
            write!(f, ", record of rank {lost} lost")?;
        }
        if self.class == Class::Logs || self.class == Class::Attempts {
            write!(
                f,
                ", {} dumps and {} logs",
                self.dumps.len(),
                self.logs.len()
            )?;
        }
        write!(f, ", waited {:.1} s", self.truth.waited as f64 / 1e9)
    }
}
