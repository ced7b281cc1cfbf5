//! Moves a ring file to another job and rank.

use super::directory::{ensure_private, name, temporary};
use super::names::{RingId, RingName, job_directory_name};
use crate::error::{Error, Result};
use crate::model::Rank;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Moves the ring at `path`, whose lock the caller holds, to another job and rank below the same directory, and returns
/// its new path. `set_new` is called while the file has no ring's name; `set_old` reverts that if the ring then cannot
/// get its new name and keeps its old one.
pub(crate) fn move_ring(
    path: &Path,
    (job, rank): (&str, Rank),
    set_new: impl FnOnce(),
    set_old: impl FnOnce(),
) -> Result<PathBuf> {
    let failed = |error: io::Error| Error::io(format!("move {}", path.display()), error);
    let file_name = path.file_name().and_then(|name| name.to_str());
    let old = file_name.and_then(RingName::parse);
    let (Some(old), Some(from)) = (old, path.parent()) else {
        return Err(failed(ErrorKind::InvalidInput.into()));
    };
    let ring = RingId {
        job,
        rank,
        attempt: old.attempt,
        part: old.part,
    };
    let base = from.parent().unwrap_or(from);
    let directory = base.join(job_directory_name(job));
    let temporary = temporary(&directory, ring);
    let mut tries = 0;
    loop {
        ensure_private(&directory)?;
        match fs::hard_link(path, &temporary.0) {
            Ok(()) => break,
            Err(error) if tries == 10 => return Err(failed(error)),
            // A dead process with this process's id left the file.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let _ = fs::remove_file(&temporary.0);
            }
            // The last rank of an earlier attempt removed the directory when it closed.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        tries += 1;
    }
    fs::remove_file(path).map_err(failed)?;
    set_new();
    match name(&temporary.0, &directory, ring) {
        Ok(path) => {
            // Other ranks may still have rings there.
            let _ = fs::remove_dir(from);
            Ok(path)
        }
        Err(error) => {
            set_old();
            fs::hard_link(&temporary.0, path).map_err(failed)?;
            Err(error)
        }
    }
}
