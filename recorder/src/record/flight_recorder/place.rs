//! Where a ring is, which may change: a process may learn only later which job and rank it is.

use super::FlightRecorder;
use crate::error::Result;
use crate::model::Rank;
use crate::record::config::{RecorderConfig, Storage};
use crate::record::decode;
use crate::record::file::header::store_identity;
use crate::record::file::moving::move_ring;
use crate::record::file::names::{RingId, RingName};
use crate::record::layout::{halves, header};
use crate::record::process::ProcessIdentity;
use crate::record::sync::Memory;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

/// A ring's places so far, the newest last. All are kept, because callers may still hold a reference to one.
#[derive(Debug)]
pub(super) struct Place {
    storage: Storage,
    next: OnceLock<Box<Self>>,
}

impl Place {
    pub(super) fn of(storage: Storage) -> Self {
        let next = OnceLock::new();
        Self { storage, next }
    }

    fn newest(&self) -> &Self {
        let mut place = self;
        while let Some(next) = place.next.get() {
            place = next;
        }
        place
    }

    pub(super) fn storage(&self) -> &Storage {
        &self.newest().storage
    }
}

impl FlightRecorder {
    /// The rank and the size of the world that the ring states.
    pub fn identity(&self) -> (Rank, u32) {
        halves(self.map.words()[header::RANK].load(Ordering::Relaxed))
    }

    /// A text that identifies the process that made this ring among all processes, including those of other hosts and
    /// earlier runs; `None` if the system does not show enough of it.
    pub fn process_mark(&self) -> Option<String> {
        ProcessIdentity::of_ring(&self.map).mark()
    }

    /// The path of another rank's ring of this job and attempt, if that rank is on this host and keeps its ring in the
    /// same directory; `None` if this ring is in the process's own memory. That file may be a ring of an earlier run.
    pub fn ring_of(&self, rank: Rank) -> Option<PathBuf> {
        let path = self.storage().path()?;
        let name = path.file_name().and_then(|name| name.to_str());
        let own = name.and_then(RingName::parse)?;
        let ring = RingId {
            job: "",
            rank,
            attempt: own.attempt,
            part: own.part,
        };
        Some(path.with_file_name(ring.file_name()))
    }

    /// Moves the ring to another job and rank, for a process that learns only later which ones it has. Its contents
    /// stay, and so does the attempt. For a moment no file has the ring's name; a reader that has opened the ring keeps
    /// it. A ring in the process's own memory only states another identity. Calls must be made one at a time.
    ///
    /// Makes some system calls for files.
    ///
    /// # Errors
    /// If the name, rank or size is not valid, if another living process records as this rank of this job, and if the
    /// file cannot be moved. The ring then keeps its identity and its place.
    pub fn change_identity(&self, job: &str, rank: Rank, world_size: u32) -> Result<()> {
        RecorderConfig::new(job, rank, world_size).check()?;
        let words = self.map.words();
        let place = self.place.newest();
        let set_new = || store_identity(words, job, rank, world_size);
        let Some(path) = place.storage.path() else {
            set_new();
            return Ok(());
        };
        let (old_rank, old_size) = self.identity();
        let old_job = decode::job(&self.map);
        let set_old = || store_identity(words, &old_job, old_rank, old_size);
        let path = move_ring(path, (job, rank), set_new, set_old)?;
        let next = Box::new(Place::of(Storage::File(path)));
        let is_alone = place.next.set(next).is_ok();
        debug_assert!(is_alone, "two threads moved a ring at once");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::model::OpType;
    use crate::record::{Operation, Placement, SignatureId, SignatureRef};
    use std::path::Path;

    fn recorder(directory: &Path, job: &str, rank: Rank) -> FlightRecorder {
        let config = RecorderConfig {
            placement: Placement::Dir(directory.to_owned()),
            entries: 64,
            ..RecorderConfig::new(job, rank, 4)
        };
        FlightRecorder::create(&config).expect("a ring")
    }

    fn path(recorder: &FlightRecorder) -> PathBuf {
        recorder.storage().path().expect("a file").to_owned()
    }

    fn issue(recorder: &FlightRecorder) {
        let unknown = SignatureRef::Id(SignatureId::UNKNOWN);
        let group = crate::record::GroupHandle::of_row(0);
        recorder.begin(&Operation::new(group, OpType::AllReduce, unknown));
    }

    #[test]
    fn a_ring_that_moves_keeps_its_contents_and_ends_at_its_new_place() {
        let directory = tempfile::tempdir().expect("a folder");
        let recorder = recorder(directory.path(), "part", 1);
        issue(&recorder);
        let old = path(&recorder);
        for (job, rank, size) in [("half", 2, 8), ("whole", 11, 16)] {
            recorder.change_identity(job, rank, size).expect("it moves");
            issue(&recorder);
            let expected = directory.path().join(job).join(format!("{rank}.0.ring"));
            assert_eq!(path(&recorder), expected);
            assert!(expected.exists());
            assert_eq!(recorder.identity(), (rank, size));
            assert_eq!(recorder.snapshot().identity.job, job);
            let other = directory.path().join(job).join("7.0.ring");
            assert_eq!(recorder.ring_of(7), Some(other));
        }
        assert_eq!(recorder.snapshot().entries.len(), 3);
        assert!(!old.parent().expect("a folder").exists());
        recorder.close().expect("it closes");
        assert!(!path(&recorder).exists());
    }

    #[test]
    fn a_ring_stays_where_it_is_if_another_process_has_the_place() {
        let directory = tempfile::tempdir().expect("a folder");
        let other = recorder(directory.path(), "whole", 3);
        let recorder = recorder(directory.path(), "part", 1);
        issue(&recorder);
        let old = path(&recorder);
        let refused = recorder.change_identity("whole", 3, 8);
        assert!(
            matches!(refused, Err(Error::RankTaken { rank: 3, .. })),
            "{refused:?}"
        );
        assert!(old.exists() && path(&other).exists());
        assert_eq!((path(&recorder), recorder.identity()), (old, (1, 4)));
        assert_eq!(recorder.snapshot().identity.job, "part");
        assert!(recorder.change_identity("whole", 8, 8).is_err());
        // No file is left but the two rings.
        let files = ["part", "whole"].map(|job| {
            let files = std::fs::read_dir(directory.path().join(job)).expect("a folder");
            files.count()
        });
        assert_eq!(files, [1, 1]);
    }
}
