//! Writes a dump file: complete or not at all, private, and never over another file. Removes what killed writers left.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The reason why a dump file could not be written.
#[derive(Debug, thiserror::Error)]
pub enum DumpFileError {
    /// The directory could not be created.
    #[error("failed to create dump directory {}: {source}", .folder.display())]
    Folder {
        /// The directory.
        folder: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file could not be written (disk full, no permission, ...). No part of the dump is left behind.
    #[error("failed to write dump {}: {source}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The name and all numbered names after it are taken.
    #[error(
        "failed to write dump {}: it exists, and so do {} numbered copies; move old dumps away",
        .path.display(), MAX_NUMBERED
    )]
    NoFreeName {
        /// The path that the caller passed.
        path: PathBuf,
    },
}

/// Maximum number of numbered files (`path.1`, ...) after the first dump of one name.
const MAX_NUMBERED: u32 = 1000;
/// The end of the name of a dump that is not complete.
const PART: &str = ".part";
/// An incomplete dump that is older than this and not locked belongs to a process that was killed.
const ABANDONED_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of folders of earlier runs that are searched for such files.
const FOLDERS_AT_ONCE: usize = 4096;

/// Writes `bytes` as a new file of mode 0600 and returns its path.
///
/// Missing folders are made with mode 0700, and incomplete dumps of this name that killed processes left are removed.
/// If `path` exists it is not changed, and the new file is `path.1`, `path.2`, ... . The file appears under its name
/// only once it is complete; on a file system without hard links, an empty file may be seen there first. Blocks for as
/// long as the file system takes; nothing is synced to disk, since a file outlives its process without that.
///
/// # Errors
/// See [`DumpFileError`].
pub fn write_dump_file(path: &Path, bytes: &[u8]) -> Result<PathBuf, DumpFileError> {
    let failed = |source| DumpFileError::Write {
        path: path.to_owned(),
        source,
    };
    let Some(name) = path.file_name() else {
        return Err(failed(io::Error::new(
            ErrorKind::InvalidInput,
            "the path has no file name",
        )));
    };
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|source| DumpFileError::Folder {
                folder: folder.to_owned(),
                source,
            })?;
    }
    remove_abandoned(folder.unwrap_or(Path::new(".")), name);
    let part = TempFile::create(path, name).map_err(failed)?;
    (&part.file).write_all(bytes).map_err(failed)?;
    for number in 0..=MAX_NUMBERED {
        let wanted = numbered(path, number);
        match part.publish(&wanted) {
            Ok(()) => return Ok(wanted),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Err(DumpFileError::NoFreeName {
        path: path.to_owned(),
    })
}

/// Removes the incomplete dumps of this name that killed processes left. Errors are ignored: such a file does no harm.
fn remove_abandoned(folder: &Path, name: &OsStr) {
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".");
    let prefix = prefix.as_encoded_bytes();
    remove_parts(folder, |found| found.starts_with(prefix));
}

/// Removes what processes that were killed left of their dumps in the folders of earlier runs, which are in
/// `directory`. Complete dumps stay, and so does what a living process is writing. Looks at a few thousand folders at
/// most. Errors are ignored: the remains of dumps harm no one.
///
/// # Blocking
/// For as long as the file system takes.
pub fn remove_abandoned_dumps(directory: &Path) {
    let folders = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for folder in folders.take(FOLDERS_AT_ONCE) {
        // A link is not followed: what it leads to belongs to someone else.
        if folder.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_parts(&folder.path(), is_part_of_rank);
        }
    }
}

/// Whether this is the name of an incomplete dump of a rank, such as `.rank_3.json.77.0.part`.
fn is_part_of_rank(name: &[u8]) -> bool {
    let name = std::str::from_utf8(name).ok();
    let rest = name.and_then(|name| name.strip_prefix(".rank_")?.strip_suffix(PART));
    let Some(rest) = rest else { return false };
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let mut parts = rest.split('.');
    let (rank, attempt, pid) = (parts.next(), parts.next_back(), parts.next_back());
    [rank, attempt, pid]
        .iter()
        .all(|part| part.is_some_and(is_number))
}

/// Removes the incomplete dumps in `folder` whose names `accepts` admits, if they are old and no process is writing
/// them.
fn remove_parts(folder: &Path, accepts: impl Fn(&[u8]) -> bool) {
    for file in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = file.file_name();
        let name = name.as_encoded_bytes();
        let is_part = name.ends_with(PART.as_bytes()) && accepts(name);
        let is_old = || {
            let metadata = file.metadata().ok().filter(std::fs::Metadata::is_file);
            let age = metadata.and_then(|metadata| metadata.modified().ok()?.elapsed().ok());
            age.is_some_and(|age| age > ABANDONED_AFTER)
        };
        let is_free = || File::open(file.path()).is_ok_and(|file| file.try_lock().is_ok());
        if is_part && is_old() && is_free() {
            let _ = std::fs::remove_file(file.path());
        }
    }
}

/// `path` for 0, else `path.<number>`.
fn numbered(path: &Path, number: u32) -> PathBuf {
    if number == 0 {
        return path.to_owned();
    }
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// A temporary file, which is removed when this value is dropped.
struct TempFile {
    path: PathBuf,
    file: File,
}

impl TempFile {
    /// Creates a hidden file, which readers do not read as a dump, in the directory of `path`.
    fn create(path: &Path, name: &OsStr) -> io::Result<Self> {
        let mut attempt = 0;
        loop {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            hidden.push(format!(".{}.{attempt}{PART}", std::process::id()));
            let path = path.with_file_name(hidden);
            match create_private(&path) {
                Ok(file) => {
                    // If files cannot be locked there, none counts as abandoned.
                    let _ = file.try_lock();
                    return Ok(Self { path, file });
                }
                // Another thread is writing, or a dead process with the same id left the file.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && attempt < 16 => {
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives the file its name; fails with `AlreadyExists` rather than replace another.
    fn publish(&self, wanted: &Path) -> io::Result<()> {
        match std::fs::hard_link(&self.path, wanted) {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Unsupported | ErrorKind::PermissionDenied
                ) =>
            {
                // The file system has no links: create an empty file of that name, then replace it by a
                // rename.
                create_private(wanted)?;
                std::fs::rename(&self.path, wanted).inspect_err(|_| {
                    // The rename's error is the one to report.
                    let _ = std::fs::remove_file(wanted);
                })
            }
            result => result,
        }
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        // The file does not exist any more if it was renamed.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn an_existing_dump_is_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job/rank_3");
        let first = write_dump_file(&path, b"one").unwrap();
        let second = write_dump_file(&path, b"two").unwrap();
        assert_eq!(first, path);
        assert_eq!(second, folder.path().join("job/rank_3.1"));
        assert_eq!(std::fs::read(first).unwrap(), b"one");
        assert_eq!(std::fs::read(second).unwrap(), b"two");
        let left = std::fs::read_dir(folder.path().join("job")).unwrap();
        assert_eq!(left.count(), 2);
    }

    #[test]
    fn only_the_owner_may_read_a_dump_and_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = write_dump_file(&folder.path().join("a/rank_0"), b"x").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(path.parent().unwrap()), 0o700);
    }

    #[test]
    fn a_folder_that_cannot_be_created_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let error = write_dump_file(&file.join("rank_0"), b"x").unwrap_err();
        assert!(matches!(error, DumpFileError::Folder { .. }), "{error}");
        assert!(error.to_string().contains("file"), "{error}");
    }

    #[test]
    fn a_symbolic_link_at_the_path_is_never_written_through() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, b"precious").unwrap();
        let part = format!(".rank_0.{}.0.part", std::process::id());
        for name in [&*part, "rank_0"] {
            std::os::unix::fs::symlink(&victim, folder.path().join(name)).unwrap();
        }
        let path = write_dump_file(&folder.path().join("rank_0"), b"x").unwrap();
        assert_eq!(path, folder.path().join("rank_0.1"));
        assert_eq!(std::fs::read(path).unwrap(), b"x");
        assert_eq!(std::fs::read(victim).unwrap(), b"precious");
    }

    #[test]
    fn incomplete_dumps_of_killed_writers_are_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let long_ago = std::time::SystemTime::now() - 2 * ABANDONED_AFTER;
        let old = |name: &str| {
            let file = File::create(folder.path().join(name)).unwrap();
            file.set_modified(long_ago).unwrap();
            file
        };
        old(".rank_3.77.0.part");
        old(".rank_30.77.0.part");
        let written = old(".rank_3.78.0.part");
        written.try_lock().unwrap();
        File::create(folder.path().join(".rank_3.79.0.part")).unwrap();
        write_dump_file(&folder.path().join("rank_3"), b"x").unwrap();
        let left = std::fs::read_dir(folder.path()).unwrap();
        let mut left: Vec<_> = left
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let expected = [
            ".rank_3.78.0.part",
            ".rank_3.79.0.part",
            ".rank_30.77.0.part",
            "rank_3",
        ];
        assert_eq!(left, expected);
    }

    #[test]
    fn what_killed_writers_left_in_earlier_runs_is_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let long_ago = std::time::SystemTime::now() - 2 * ABANDONED_AFTER;
        let old = |path: &str| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let file = File::create(path).unwrap();
            file.set_modified(long_ago).unwrap();
            file
        };
        old("job-1/.rank_3.json.77.0.part");
        old("job-2/.rank_30.77.0.part");
        let kept = [
            "job-1/rank_3.json",
            "job-1/.rank_x.json.77.0.part",
            "job-1/.rank_3.part",
            "job-1/.other.77.0.part",
            "job-1/deep/.rank_3.json.77.0.part",
        ];
        kept.iter().for_each(|path| drop(old(path)));
        let written = old("job-2/.rank_3.json.78.0.part");
        written.try_lock().unwrap();
        File::create(directory.path().join("job-2/.rank_3.json.79.0.part")).unwrap();
        std::os::unix::fs::symlink(
            directory.path().join("job-1/deep"),
            directory.path().join("linked"),
        )
        .unwrap();
        remove_abandoned_dumps(directory.path());
        let exists = |path: &str| directory.path().join(path).exists();
        assert!(!exists("job-1/.rank_3.json.77.0.part") && !exists("job-2/.rank_30.77.0.part"));
        assert!(kept.iter().all(|path| exists(path)));
        assert!(exists("job-2/.rank_3.json.78.0.part") && exists("job-2/.rank_3.json.79.0.part"));
    }
}
