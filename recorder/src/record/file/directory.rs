//! Paths, ownership and life cycle of ring files.
//!
//! A ring is `<dir>/<job>/<rank>.<attempt>.ring`, or `<rank>.<attempt>.nccl.ring` for the plug-in for NCCL. Its owner
//! holds an exclusive `flock` on it while the process lives, so a file whose lock is free belongs to a dead process. A
//! new ring gets its name only when it is complete and locked, so readers never see half of one. A dead ring of the
//! same name is renamed to `<rank>.<attempt>.previous.ring`. Of all older rings of the rank, this one included, only
//! the newest is kept. A rank that ends well closes its ring, and the last of the job on this host removes them all if
//! every rank has ended well.

use crate::error::{Error, Result};
use crate::record::file::names::{RingId, RingName, job_directory_name};
use crate::record::file::space::reserve;
use crate::record::layout::{self, header};
use crate::record::process::ProcessIdentity;
use rustix::fs::{self as rfs, FlockOperation, Mode, OFlags};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The directory of this user's rings, unless another one is configured.
pub fn default_directory() -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    PathBuf::from(format!("/dev/shm/rcomm-{uid}"))
}

/// The directory of this user's rings where [`default_directory`] cannot be used: below the system's directory for
/// temporary files, which may be on a disk.
pub fn fallback_directory() -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    std::env::temp_dir().join(format!("rcomm-{uid}"))
}

/// A new ring file that has only a temporary name.
#[derive(Debug)]
pub(crate) struct Unnamed {
    pub(crate) file: OwnedFd,
    temporary: Temporary,
    directory: PathBuf,
}

impl Unnamed {
    /// Creates a locked file of `bytes` zero bytes below `directory`, and reserves space for the first `reserved` of
    /// them. Fails if the file system has less space than the whole file needs.
    pub(crate) fn create(
        directory: &Path,
        ring: RingId<'_>,
        reserved: usize,
        bytes: usize,
    ) -> Result<Self> {
        let job = directory.join(job_directory_name(ring.job));
        let temporary = temporary(&job, ring);
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let mut tries = 0;
        let file = loop {
            ensure_private(&job)?;
            match rfs::open(&temporary.0, flags, mode) {
                Ok(file) => break file,
                // A dead process with this process's id left the file, or the last rank of an earlier attempt
                // removed the directory when it closed.
                Err(error) if tries < 10 => {
                    tries += 1;
                    if error == rustix::io::Errno::EXIST {
                        let _ = fs::remove_file(&temporary.0);
                    } else if error != rustix::io::Errno::NOENT {
                        return Err(Error::io(
                            format!("create {}", temporary.0.display()),
                            error,
                        ));
                    }
                }
                Err(error) => {
                    return Err(Error::io(
                        format!("create {}", temporary.0.display()),
                        error,
                    ));
                }
            }
        };
        let unnamed = Self {
            file,
            temporary,
            directory: job,
        };
        if let Err(error) = unnamed.lock_and_reserve(reserved, bytes) {
            // Where no rank of this start finds room, no ring that gets its name removes what killed processes left.
            let files: Vec<PathBuf> = files(&unnamed.directory).collect();
            remove_leftovers(&files);
            return Err(error);
        }
        Ok(unnamed)
    }

    /// Locks the file, gives it its size, and reserves its first `reserved` bytes.
    fn lock_and_reserve(&self, reserved: usize, bytes: usize) -> Result<()> {
        let file = self.file.as_fd();
        rfs::flock(file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|error| Error::io(format!("lock {}", self.temporary.0.display()), error))?;
        let sized = rfs::ftruncate(file, bytes as u64).map_err(io::Error::from);
        sized
            .and_then(|()| self.check_space(bytes))
            .map_err(|error| (bytes, error))
            .and_then(|()| {
                reserve(&self.file, 0, reserved).map_err(|error| (reserved, error.into()))
            })
            .map_err(|(bytes, error)| {
                let action = format!("reserve {bytes} bytes in {}", self.directory.display());
                Error::io(action, error)
            })
    }

    /// Fails if there is no space now for the whole ring: where only its beginning is reserved, the owner could not
    /// choose another directory later.
    fn check_space(&self, bytes: usize) -> io::Result<()> {
        let system = rfs::fstatvfs(&self.file)?;
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        // A file system without a limit reports zero blocks.
        if system.f_blocks > 0 && free < bytes as u64 {
            return Err(rustix::io::Errno::NOSPC.into());
        }
        Ok(())
    }

    /// Gives the ring its name and returns the file with its lock. Fails if a living owner has the name; the ring of a
    /// dead one is kept under another name.
    pub(crate) fn publish(self, ring: RingId<'_>) -> Result<(PathBuf, OwnedFd)> {
        let path = name(&self.temporary.0, &self.directory, ring)?;
        Ok((path, self.file))
    }
}

/// Gives a file in a job's directory the name of a ring, and removes what earlier processes left there. A dead ring
/// that has the name is renamed.
pub(super) fn name(temporary: &Path, directory: &Path, ring: RingId<'_>) -> Result<PathBuf> {
    let path = directory.join(ring.file_name());
    for _ in 0..10 {
        match fs::hard_link(temporary, &path) {
            Ok(()) => {
                tidy(directory, ring);
                return Ok(path);
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                keep_previous(&path, ring)?;
            }
            Err(error) => return Err(Error::io(format!("create {}", path.display()), error)),
        }
    }
    Err(ring.taken_error(path))
}

/// The name of a ring's file before it has the name of a ring.
pub(super) fn temporary(directory: &Path, ring: RingId<'_>) -> Temporary {
    Temporary(directory.join(format!(
        ".{}.{}.{}{}.new",
        ring.rank,
        ring.attempt,
        ring.part.name(),
        std::process::id()
    )))
}

/// The temporary name of a file; the name is removed when this value is dropped.
#[derive(Debug)]
pub(super) struct Temporary(pub(super) PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Renames a dead process's ring, so that its name is free.
fn keep_previous(path: &Path, ring: RingId<'_>) -> Result<()> {
    let file = match open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::io(format!("open {}", path.display()), error)),
    };
    // A reader that checks whether the owner is alive holds the lock for an instant, on a busy host for longer. Another
    // world of this process holds it for as long as it lives: a process may make many, which need not wait each time.
    let mut tries = 0;
    while !try_lock(&file, FlockOperation::NonBlockingLockExclusive) {
        if tries == 500 || (tries == 20 && is_locked_here(&file)) {
            return Err(ring.taken_error(path.to_owned()));
        }
        tries += 1;
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // The file is still locked here, so only one of several processes that want the name moves it.
    let previous = path.with_extension("previous.ring");
    match fs::rename(path, &previous) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::io(format!("rename {}", path.display()), error))
        }
        _ => Ok(()),
    }
}

/// Removes what earlier processes have left in a job's directory.
fn tidy(directory: &Path, ring: RingId<'_>) {
    let files: Vec<PathBuf> = files(directory).collect();
    prune(&files, ring);
    remove_leftovers(&files);
}

/// Removes this rank's rings of the same part except the new one, the newest other one, and those of living processes.
fn prune(files: &[PathBuf], ring: RingId<'_>) {
    let mut others: Vec<_> = files
        .iter()
        .filter_map(|path| Some((name_of(path)?, path)))
        .filter(|(name, _)| name.rank == ring.rank && name.part == ring.part)
        .filter(|(name, _)| (name.attempt, name.is_newest) != (ring.attempt, true))
        .collect();
    others.sort_by_key(|(name, path)| (modified(path), *name));
    others.pop();
    for (_, path) in others {
        let _ = remove_if_dead(path);
    }
}

/// A new ring gets its name and its lock within much less than this time.
const UNNAMED_TIME: Duration = Duration::from_secs(60);

/// Of these files of a job's directory, removes those that killed processes left: rings that never got their names, and
/// sockets whose rings are gone or not locked. Errors are ignored: such files do no harm.
fn remove_leftovers(files: &[PathBuf]) {
    for path in files {
        let name = path.file_name().and_then(|name| name.to_str());
        let is_old = || modified(path).elapsed().is_ok_and(|age| age > UNNAMED_TIME);
        match name {
            // The owner of a ring has locked it, except in the first moments.
            Some(name) if name.starts_with('.') && name.ends_with(".new") && is_old() => {
                let is_free = |file| try_lock(&file, FlockOperation::NonBlockingLockExclusive);
                if open(path).is_ok_and(is_free) {
                    let _ = fs::remove_file(path);
                }
            }
            // A ring has its name and its lock before its owner listens.
            Some(name) if name.ends_with(".sock") => {
                let inode = |path: &Path| fs::symlink_metadata(path).map(|stat| stat.ino()).ok();
                let found = inode(path);
                let is_free = |file| try_lock(&file, FlockOperation::NonBlockingLockShared);
                let ring = path.with_extension("ring");
                let has_owner = ring.exists() && !open(&ring).is_ok_and(is_free);
                // The owner of a new ring may have replaced the socket since.
                if !has_owner && is_refused(path) && inode(path) == found {
                    let _ = fs::remove_file(path);
                }
            }
            _ => {}
        }
    }
}

/// Whether this is a socket on which no process listens.
fn is_refused(socket: &Path) -> bool {
    UnixStream::connect(socket).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// When the file was last modified; the epoch if that cannot be found out.
fn modified(path: &Path) -> SystemTime {
    fs::metadata(path)
        .and_then(|metadata| metadata.modified())
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Every file of a directory.
fn files(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path()))
}

fn name_of(path: &Path) -> Option<RingName> {
    RingName::parse(path.file_name()?.to_str()?)
}

/// Every file of one job's directory whose name is a ring's.
pub(crate) fn ring_files(directory: &Path) -> impl Iterator<Item = (RingName, PathBuf)> + use<> {
    files(directory).filter_map(|path| Some((name_of(&path)?, path)))
}

/// Opens a file for reading, never through a link, and without waiting, for example for the writer of a pipe. The file
/// may be something other than a regular file.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    Ok(rfs::open(path, flags, Mode::empty())?)
}

/// Whether this process holds an exclusive lock on the file; false also where the kernel does not tell.
fn is_locked_here(file: &OwnedFd) -> bool {
    let Ok(stat) = rfs::fstat(file) else {
        return false;
    };
    let (major, minor) = (rfs::major(stat.st_dev), rfs::minor(stat.st_dev));
    let place = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let process = std::process::id().to_string();
    // A line is `1: FLOCK ADVISORY WRITE 4711 00:1b:429284 0 EOF`.
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    locks.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        matches!(words[..], [_, "FLOCK", _, "WRITE", owner, at, ..] if owner == process && at == place)
    })
}

/// Takes the lock if it is free, until the caller unlocks or closes `file`. Returns whether it was free.
fn try_lock(file: &OwnedFd, operation: FlockOperation) -> bool {
    rfs::flock(file, operation).is_ok()
}

/// Whether the process that made this ring is alive.
///
/// If the lock is free, the process is dead. A forked child keeps its parent's lock, so if the lock is taken and the
/// process can be looked up, the look-up decides.
pub(crate) fn owner_is_alive(file: &OwnedFd, owner: &ProcessIdentity) -> bool {
    if try_lock(file, FlockOperation::NonBlockingLockShared) {
        let _ = rfs::flock(file, FlockOperation::Unlock);
        return false;
    }
    owner.exists().unwrap_or(true)
}

/// Removes a ring file as [`remove`] does if its lock is free. Returns whether it did.
pub(crate) fn remove_if_dead(path: &Path) -> io::Result<bool> {
    let file = open(path)?;
    if !try_lock(&file, FlockOperation::NonBlockingLockExclusive) {
        return Ok(false);
    }
    remove(path)?;
    Ok(true)
}

/// Removes a ring file and its owner's socket, and their directory if that is then empty.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path)?;
    let _ = fs::remove_file(path.with_extension("sock"));
    if let Some(directory) = path.parent() {
        let _ = fs::remove_dir(directory);
    }
    Ok(())
}

/// Removes the job's rings on this host that have the attempt and the world size of the ring at `path`, if all of them
/// are closed and none holds a failure. Rings of that attempt and size that were replaced are removed too. A ring of
/// the attempt that cannot be read may hold a failure, so it keeps all.
pub(crate) fn remove_if_all_ended_well(path: &Path) -> Result<()> {
    let name = path.file_name().and_then(|name| name.to_str());
    let (Some(name), Some(directory)) = (name.and_then(RingName::parse), path.parent()) else {
        return Ok(());
    };
    let size = world_size_in(path);
    let rings_of_attempt = ring_files(directory).filter(|(other, _)| other.attempt == name.attempt);
    let mut rings: Vec<(bool, PathBuf)> = Vec::new();
    for (other, ring) in rings_of_attempt {
        match world_size_in(&ring) {
            Ok(found) if size.as_ref().is_ok_and(|size| *size == found) => {
                rings.push((other.is_newest, ring));
            }
            // An earlier run under this name may have had more ranks.
            Ok(_) => {}
            // Another rank that ends at the same time has removed it.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(_) if other.is_newest => return Ok(()),
            Err(_) => {}
        }
    }
    let mut newest = rings.iter().filter(|(is_newest, _)| *is_newest);
    if !newest.all(|(_, ring)| has_ended_well(ring)) {
        return Ok(());
    }
    for (is_newest, ring) in rings {
        let Ok(file) = open(&ring) else { continue };
        // The owner may have created a new ring of this name since: that one is locked.
        let is_free = try_lock(&file, FlockOperation::NonBlockingLockExclusive);
        if !is_free || (is_newest && !is_closed_well(&file)) {
            continue;
        }
        match remove(&ring) {
            // Another rank that ends at the same time removes them, too.
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Error::io(format!("remove {}", ring.display()), error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether a ring is closed and holds no failure, or is gone.
fn has_ended_well(path: &Path) -> bool {
    match open(path) {
        Ok(file) => is_closed_well(&file),
        Err(error) => error.kind() == ErrorKind::NotFound,
    }
}

/// Whether a ring is closed and holds no failure.
fn is_closed_well(ring: &OwnedFd) -> bool {
    let is_closed = word(ring, header::STATE) == Some(layout::STATE_CLOSED);
    is_closed && word(ring, header::LAST_FAILURE) == Some(0)
}

/// The size of the world in a ring's header.
///
/// # Errors
/// If the file cannot be opened, or has no header.
fn world_size_in(path: &Path) -> io::Result<u64> {
    let file = open(path)?;
    let rank = word(&file, header::RANK).ok_or(ErrorKind::UnexpectedEof)?;
    Ok(rank >> u32::BITS)
}

/// A word of a ring's header; `None` if it cannot be read.
fn word(ring: &OwnedFd, index: usize) -> Option<u64> {
    const BYTES: usize = size_of::<u64>();
    let mut bytes = [0; BYTES];
    let read = rustix::io::pread(ring, &mut bytes, (index * BYTES) as u64).ok()?;
    (read == BYTES).then_some(u64::from_ne_bytes(bytes))
}

/// Lets the name of a closed ring be used again by the process that made it.
pub(crate) fn unlock(file: &OwnedFd) {
    let _ = rfs::flock(file, FlockOperation::Unlock);
}

/// Removes the rings of earlier attempts than that of the ring at `path`: those of its rank, and those of dead
/// processes. Errors are ignored: they leave a file that the next start removes.
pub(crate) fn remove_earlier_attempts(path: &Path) {
    let name = path.file_name().and_then(|name| name.to_str());
    let (Some(kept), Some(directory)) = (name.and_then(RingName::parse), path.parent()) else {
        return;
    };
    for (name, path) in ring_files(directory).filter(|(name, _)| name.attempt < kept.attempt) {
        let _ = match name.rank == kept.rank {
            true => remove(&path),
            false => remove_if_dead(&path).map(drop),
        };
    }
}

/// Creates the directory if it is missing, and checks that it belongs to this user and only this user may write to it.
pub(crate) fn ensure_private(directory: &Path) -> Result<()> {
    let shown = directory.display();
    let stat = match fs::symlink_metadata(directory) {
        Ok(stat) => stat,
        Err(_) => {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(directory)
                .map_err(|error| Error::io(format!("create directory {shown}"), error))?;
            fs::symlink_metadata(directory)
                .map_err(|error| Error::io(format!("stat {shown}"), error))?
        }
    };
    let is_own_directory = stat.is_dir() && stat.uid() == rustix::process::geteuid().as_raw();
    if is_own_directory && stat.mode() & 0o022 == 0 {
        return Ok(());
    }
    let problem = "it is not a directory that only this user may write to";
    Err(Error::io(
        format!("use {shown} for rings"),
        io::Error::new(ErrorKind::PermissionDenied, problem),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_of_this_process_is_told_from_no_lock_and_from_another_file() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = |name: &str| -> OwnedFd {
            let path = directory.path().join(name);
            let options = &mut fs::File::options();
            let file = options.write(true).create(true).truncate(false).open(path);
            file.unwrap().into()
        };
        let (owner, other) = (file("1.0.ring"), file("2.0.ring"));
        assert!(!is_locked_here(&file("1.0.ring")));
        rfs::flock(&owner, FlockOperation::LockExclusive).unwrap();
        assert!(is_locked_here(&file("1.0.ring")));
        assert!(!is_locked_here(&other));
        drop(owner);
        assert!(!is_locked_here(&file("1.0.ring")));
    }

    #[test]
    fn leftovers_of_killed_processes_are_removed_and_nothing_else() {
        use std::os::unix::net::UnixListener;
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let long_ago = SystemTime::now() - 2 * UNNAMED_TIME;
        let old = |name: &str| {
            let file = fs::File::create(path(name)).unwrap();
            file.set_modified(long_ago).unwrap();
            file
        };
        old(".1.0.77.new");
        let locked = old(".2.0.77.new");
        rfs::flock(&locked, FlockOperation::LockExclusive).unwrap();
        fs::write(path(".3.0.77.new"), "").unwrap();
        drop(UnixListener::bind(path("4.0.sock")).unwrap());
        let _listens = UnixListener::bind(path("5.0.sock")).unwrap();
        drop(UnixListener::bind(path("6.0.sock")).unwrap());
        let owned = fs::File::create(path("6.0.ring")).unwrap();
        rfs::flock(&owned, FlockOperation::LockExclusive).unwrap();
        // The ring of a killed process is kept.
        drop(UnixListener::bind(path("7.0.sock")).unwrap());
        fs::write(path("7.0.ring"), "").unwrap();
        old("other");
        let found: Vec<PathBuf> = files(directory.path()).collect();
        remove_leftovers(&found);
        let mut left: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let expected = [
            ".2.0.77.new",
            ".3.0.77.new",
            "5.0.sock",
            "6.0.ring",
            "6.0.sock",
            "7.0.ring",
            "other",
        ];
        assert_eq!(left, expected);
    }

    #[test]
    fn sockets_of_killed_processes_are_removed_where_no_new_ring_has_room() {
        let directory = tempfile::tempdir().unwrap();
        let job = directory.path().join(job_directory_name("job"));
        ensure_private(&job).unwrap();
        let socket = job.join("2.0.sock");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let ring = RingId {
            job: "job",
            rank: 2,
            attempt: 0,
            part: Default::default(),
        };
        let largest = usize::try_from(i64::MAX).unwrap();
        assert!(Unnamed::create(directory.path(), ring, 0, largest).is_err());
        assert!(!socket.exists());
    }
}
