//! Reads the newest job of this node, with rings or without.

use super::processes::ProcessSource;
use super::rings::{KEPT_AFTER_END, RingSource};
use crate::live::source::{
    DumpAnswers, DumpRequests, JobChoice, Liveness, PipeDumps, Poll, RingDumps, Source, SourceError,
};
use std::path::PathBuf;
use std::time::Instant;

/// The newest job of this node: the rings that [`RingSource`] shows or, if no process of that job is alive, the living
/// processes of a job that keeps no rings ([`ProcessSource`]).
///
/// A shown job is not replaced at once. Rings are shown for five minutes after their last process ended, if one lived
/// while they were shown; processes are shown until all have ended. If the user has chosen a job, its rings are read
/// or, as long as it has none, its processes.
pub struct LocalSource {
    directory: PathBuf,
    choice: JobChoice,
    rings: RingSource,
    processes: ProcessSource,
    /// The job that `processes` was made for; `None` if it may show any job.
    named: Option<String>,
    /// Whether the last poll showed processes and not rings.
    shows_processes: bool,
    /// When a process with a ring was last seen alive.
    rings_last_alive: Option<Instant>,
}

impl LocalSource {
    /// Reads the rings in `directory` of the chosen job, or processes.
    pub fn new(directory: PathBuf, choice: JobChoice) -> Self {
        Self {
            rings: RingSource::showing(directory.clone(), choice.clone()),
            processes: ProcessSource::new(),
            named: None,
            directory,
            choice,
            shows_processes: false,
            rings_last_alive: None,
        }
    }
}

impl Source for LocalSource {
    fn name(&self) -> String {
        match self.shows_processes {
            true => self.processes.name(),
            false => self.rings.name(),
        }
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        let showed_processes = self.shows_processes;
        let chosen = self.choice.shown().filter(|(_, chosen)| *chosen);
        let chosen = chosen.map(|(job, _)| job);
        let other_is_chosen = chosen != self.named;
        if other_is_chosen {
            self.processes = match &chosen {
                Some(job) => ProcessSource::named(job.clone()),
                None => ProcessSource::new(),
            };
            self.named.clone_from(&chosen);
        }
        if showed_processes {
            if !other_is_chosen
                && let Ok(poll) = self.processes.poll(deadline)
                && has_living_process(&poll)
            {
                self.choice.show_processes(self.processes.job());
                return Ok(poll);
            }
            // A new source is made, since one that was polled before returns only what has changed since then.
            self.rings = RingSource::showing(self.directory.clone(), self.choice.clone());
        }
        let mut polled = self.rings.poll(deadline);
        let now = Instant::now();
        if polled.as_ref().is_ok_and(has_living_process) {
            self.rings_last_alive = Some(now);
        }
        self.shows_processes = false;
        let may_show_processes = match &chosen {
            // Rings, also those of ended processes, hold more than the processes show.
            Some(_) => matches!(polled, Err(SourceError::Nothing { .. })),
            None => self
                .rings_last_alive
                .is_none_or(|lived| now - lived >= KEPT_AFTER_END),
        };
        if may_show_processes
            && !showed_processes
            && let Ok(poll) = self.processes.poll(deadline)
            && has_living_process(&poll)
        {
            self.shows_processes = true;
            polled = Ok(poll);
        }
        let processes = self.shows_processes.then(|| self.processes.job());
        self.choice.show_processes(processes.flatten());
        let kind_changed = self.shows_processes != showed_processes;
        polled.map(|mut poll| {
            poll.restart |= kind_changed;
            poll
        })
    }
}

/// Whether a process of the job is alive.
fn has_living_process(poll: &Poll) -> bool {
    let mut ranks = poll.observations.iter();
    ranks.any(|rank| rank.liveness == Liveness::Alive)
}

/// Requests dumps from the job that [`LocalSource`] shows: from its processes without rings, through the pipes of
/// PyTorch's NCCL backend, or from its ranks with rings.
pub struct LocalDumps {
    choice: JobChoice,
    pipes: PipeDumps,
    rings: RingDumps,
}

impl LocalDumps {
    /// Requests dumps from the job that a view with this choice shows; `rings` shows the same choice.
    pub fn new(rings: RingSource, choice: JobChoice) -> Self {
        Self {
            pipes: PipeDumps::new(choice.clone()),
            choice,
            rings: RingDumps::new(rings),
        }
    }
}

impl DumpRequests for LocalDumps {
    fn ask(&self, deadline: Instant) -> Result<DumpAnswers, SourceError> {
        match self.choice.shown_processes() {
            Some(_) => self.pipes.ask(deadline),
            None => self.rings.ask(deadline),
        }
    }
}
