//! The destination of a rank's dumps: [`DumpWriter`], and [`FileDumpWriter`], which writes files.
//!
//! If a dump cannot be written, that is logged or returned as an error, and the job continues. The recorder
//! decides what a dump holds. The watchdog, its monitor and the failure broadcast make dumps, and so do the
//! program and the endpoint on request.

use crate::config::DumpFormat;
use crate::op::error::{Error, ErrorKind, Result};
use crate::watch::watchdog::Watch;
use rcomm_recorder::publish::{Dump, write_dump_file};
use rcomm_recorder::record::FlightRecorder;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Writes a rank's dumps.
///
/// # Thread safety
/// The threads that make dumps call it, possibly at the same time: those of the library, and those of the
/// program that call [`World::dump`](crate::World::dump).
pub trait DumpWriter: Send + Sync {
    /// Writes one dump and returns its location, for a log line or an error.
    ///
    /// # Errors
    /// The error names what could not be written and why.
    fn write(&self, dump: &Dump) -> Result<String>;
}

/// Writes `rank_<n>.json`, `rank_<n>.pickle` or both to a directory. A world passes a different directory for
/// each run ([`World::dump_dir`](crate::World::dump_dir)).
///
/// A file is complete or absent, has mode 0600, and never replaces another: further dumps get the endings
/// `.1`, `.2` and so on.
#[derive(Clone, Debug)]
pub struct FileDumpWriter {
    dir: PathBuf,
    format: DumpFormat,
}

impl FileDumpWriter {
    /// A writer of files in `dir`, which is created for the first one.
    pub fn new(dir: impl Into<PathBuf>, format: DumpFormat) -> Self {
        Self {
            dir: dir.into(),
            format,
        }
    }

    /// The directory of the files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl DumpWriter for FileDumpWriter {
    fn write(&self, dump: &Dump) -> Result<String> {
        let rank = dump.identity.rank.unwrap_or(0);
        let write = |extension: &str, bytes: &[u8]| {
            let path = self.dir.join(format!("rank_{rank}.{extension}"));
            write_dump_file(&path, bytes)
                .map(|path| path.display().to_string())
                .map_err(|error| Error::new(ErrorKind::Io, error.to_string()))
        };
        match self.format {
            DumpFormat::Json => write("json", &dump.to_json()),
            DumpFormat::Pickle => write("pickle", &dump.to_pickle()),
            DumpFormat::Both => {
                let json = write("json", &dump.to_json())?;
                Ok(format!("{json}, {}", write("pickle", &dump.to_pickle())?))
            }
        }
    }
}

/// Makes dumps of a world: a handle for threads that do not hold the world, also while another one changes it
/// ([`World::shrink`](crate::World::shrink)).
///
/// # Thread safety
/// May be shared between threads; clones make dumps of the same world.
#[derive(Clone)]
pub struct DumpHandle(pub(crate) Arc<Dumps>);

impl DumpHandle {
    /// Makes a dump now and returns its location. After the end of the world the dump has the records of its end.
    ///
    /// # Errors
    /// The error names what could not be written and why.
    pub fn dump(&self) -> Result<String> {
        self.0.try_make("requested by the program")
    }

    /// This rank's records as they are now, like [`World::snapshot`](crate::World::snapshot).
    pub fn snapshot(&self) -> Dump {
        self.0.recorder.snapshot()
    }
}

impl std::fmt::Debug for DumpHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DumpHandle").finish_non_exhaustive()
    }
}

/// Makes this rank's dumps.
pub(crate) struct Dumps {
    recorder: Arc<FlightRecorder>,
    watch: Arc<Watch>,
    writer: Box<dyn DumpWriter>,
    /// When [`make_for_fault`](Self::make_for_fault) last tried to make a dump, and what it returned.
    last: Mutex<Option<(Instant, String)>>,
    /// Number of announced dumps that are not written yet.
    under_way: Mutex<usize>,
    written: Condvar,
}

/// A dump that is being made, or is about to be: [`Dumps::wait`] waits until it is dropped.
pub(crate) struct UnderWay(Arc<Dumps>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        *self.0.under_way() -= 1;
        self.0.written.notify_all();
    }
}

impl Dumps {
    /// Faults within this time of a dump count as the same fault: several threads of a rank notice one fault
    /// at about the same time.
    const ONE_FAULT: Duration = Duration::from_secs(10);
    /// The most announced dumps that may be under way. Each has a thread, which a disk that does not respond blocks.
    const MAX_UNDER_WAY: usize = 8;

    pub(crate) fn new(
        recorder: Arc<FlightRecorder>,
        watch: Arc<Watch>,
        writer: Box<dyn DumpWriter>,
    ) -> Self {
        Self {
            recorder,
            watch,
            writer,
            last: Mutex::new(None),
            under_way: Mutex::new(0),
            written: Condvar::new(),
        }
    }

    /// Announces a dump, which another thread may make; `None` if [`MAX_UNDER_WAY`](Self::MAX_UNDER_WAY) are not
    /// written yet.
    pub(crate) fn announce(self: &Arc<Self>) -> Option<UnderWay> {
        let mut under_way = self.under_way();
        if *under_way >= Self::MAX_UNDER_WAY {
            return None;
        }
        *under_way += 1;
        drop(under_way);
        Some(UnderWay(self.clone()))
    }

    /// Waits until no dump is under way, for at most `limit`; returns whether none is under way now.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let under_way = self.under_way();
        let waited = self
            .written
            .wait_timeout_while(under_way, limit, |under_way| *under_way > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }

    fn under_way(&self) -> MutexGuard<'_, usize> {
        self.under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a dump now; returns its location, or `None` if it could not be written, which is logged.
    pub(crate) fn make(&self, reason: &str) -> Option<String> {
        self.write(reason).ok()
    }

    /// Makes a dump now; returns its location.
    ///
    /// # Errors
    /// The error names what could not be written and why.
    pub(crate) fn try_make(&self, reason: &str) -> Result<String> {
        let mut dump = self.recorder.snapshot();
        reason.clone_into(&mut dump.identity.reason);
        // The ring has the communicators' numbers; the backends have their state too.
        let ring_states = std::mem::take(&mut dump.nccl_comm_state);
        let states = &mut dump.nccl_comm_state;
        for group in self.watch.groups().iter() {
            for state in group.comm_state() {
                // Two groups may report the same communicator.
                if states.iter().all(|(id, _)| *id != state.id) {
                    states.push((state.id, state.facts));
                }
            }
        }
        for (id, facts) in ring_states {
            if states.iter().all(|(known, _)| *known != id) {
                states.push((id, facts));
            }
        }
        self.writer.write(&dump)
    }

    /// Makes a dump, unless one was made, or could not be written, for the same fault. Returns text for an error
    /// message: the location of the dump, or why there is none.
    pub(crate) fn make_for_fault(&self, reason: &str) -> String {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, result)) = &*last
            && at.elapsed() < Self::ONE_FAULT
        {
            return result.clone();
        }
        let result = match self.write(reason) {
            Ok(location) => format!("dump: {location}"),
            Err(error) => format!("no dump: {error}"),
        };
        *last = Some((Instant::now(), result.clone()));
        result
    }

    /// Works like [`try_make`](Self::try_make), and logs the result.
    fn write(&self, reason: &str) -> Result<String> {
        let written = self.try_make(reason);
        match &written {
            Ok(place) => tracing::info!(reason, place, "dump written"),
            Err(error) => tracing::error!(reason, %error, "the dump could not be written"),
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::record::{Placement, RecorderConfig};

    fn dumps(dir: &Path) -> Dumps {
        let config = RecorderConfig {
            placement: Placement::Memory,
            entries: 16,
            ..RecorderConfig::new("job", 3, 4)
        };
        let recorder = Arc::new(FlightRecorder::create(&config).unwrap());
        let writer = FileDumpWriter::new(dir, DumpFormat::Json);
        Dumps::new(recorder, Arc::default(), Box::new(writer))
    }

    #[test]
    fn one_fault_makes_one_dump() {
        let dir = tempfile::tempdir().unwrap();
        let dumps = dumps(dir.path());
        let first = dumps.make_for_fault("time-out");
        assert_eq!(dumps.make_for_fault("signal of rank 0"), first);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        dumps.make("requested").unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        let bytes = std::fs::read(dir.path().join("rank_3.json")).unwrap();
        let (dump, _) = Dump::read(&bytes).unwrap();
        assert_eq!(dump.identity.rank, Some(3));
        assert_eq!(dump.identity.reason, "time-out");
    }

    #[test]
    fn a_dump_that_cannot_be_written_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a file");
        std::fs::write(&file, "").unwrap();
        let dumps = dumps(&file);
        assert!(dumps.make("requested").is_none());
        assert!(dumps.try_make("requested").is_err());
        let printed = dumps.make_for_fault("time-out");
        assert!(
            printed.starts_with("no dump: failed to create"),
            "{printed}"
        );
    }
}
