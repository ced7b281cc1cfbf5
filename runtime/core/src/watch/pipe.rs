//! A FIFO by which users request a dump: any write to it is a request.

use crate::op::error::{Error, Result};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A FIFO of mode 0600, removed when dropped.
pub(crate) struct DumpPipe {
    path: PathBuf,
    fd: OwnedFd,
}

impl DumpPipe {
    /// Makes `<stem><rank>.pipe`, which is PyTorch's name for it. A FIFO that an earlier run left behind is
    /// replaced; any other file of this name is not changed, and is an error.
    ///
    /// # Errors
    /// `Io` names the path.
    pub(crate) fn create(stem: &Path, rank: u32) -> Result<Self> {
        let mut name = OsString::from(stem);
        name.push(format!("{rank}.pipe"));
        let path = PathBuf::from(name);
        let failed = |error| Error::io(format!("cannot make the FIFO {}", path.display()), error);
        if let Ok(stat) = rustix::fs::lstat(&path)
            && FileType::from_raw_mode(stat.st_mode) == FileType::Fifo
        {
            rustix::fs::unlink(&path).map_err(failed)?;
        }
        let private = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, private, 0).map_err(failed)?;
        // The FIFO is opened for writing too, so that reading never returns the end of the file when a writer
        // closes it.
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed)?;
        Ok(Self { path, fd })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether anything was written since the last call. Reads what was written, and does not wait.
    pub(crate) fn was_written(&self) -> bool {
        let mut bytes = [0; 256];
        let mut written = false;
        while let Ok(1..) = rustix::io::read(&self.fd, &mut bytes) {
            written = true;
        }
        written
    }
}

impl Drop for DumpPipe {
    fn drop(&mut self) {
        // The FIFO may already have been removed; an error cannot be handled here.
        let _ = rustix::fs::unlink(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_write_is_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = DumpPipe::create(&dir.path().join("dump_"), 3).unwrap();
        let path = dir.path().join("dump_3.pipe");
        assert_eq!(pipe.path(), path);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(!pipe.was_written());
        let mut writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        writer.write_all(b"x").unwrap();
        assert!(pipe.was_written());
        assert!(!pipe.was_written());
        drop(pipe);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_fifo_is_replaced_and_a_file_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let stem = dir.path().join("dump_");
        std::mem::forget(DumpPipe::create(&stem, 0).unwrap());
        DumpPipe::create(&stem, 0).unwrap();
        std::fs::write(dir.path().join("dump_1.pipe"), "mine").unwrap();
        assert!(DumpPipe::create(&stem, 1).is_err());
        assert_eq!(
            std::fs::read(dir.path().join("dump_1.pipe")).unwrap(),
            b"mine"
        );
    }
}
