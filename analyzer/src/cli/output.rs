//! Writes results to standard output or to a file, with or without color.

use crate::cli::args::Color;
use crate::cli::failure::Failure;
use anstream::{AutoStream, ColorChoice};
use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The width of a page in columns if the output is not a terminal.
const DEFAULT_WIDTH: usize = 80;

/// Smaller values of `COLUMNS` are ignored: sentences would take too many lines.
const MIN_WIDTH: usize = 40;

/// The widest page: wider lines are hard to read.
const MAX_WIDTH: usize = 110;

impl From<Color> for ColorChoice {
    fn from(color: Color) -> Self {
        match color {
            Color::Auto => Self::Auto,
            Color::Always => Self::Always,
            Color::Never => Self::Never,
        }
    }
}

/// Writes output to `path`, or to standard output if that is `None` or `-`.
///
/// A reader that stops early (`rcomm-fr analyze ... | head -1`) is not an error: the exit code remains that of the
/// verdict.
///
/// A file is written under a temporary name first, so no reader ever sees a part of it. A pipe or a device, such as
/// `/dev/null`, is written directly.
///
/// # Errors
///
/// [`Failure::Write`] if the output cannot be written.
pub(crate) fn write_to(
    path: Option<&Path>,
    color: ColorChoice,
    print: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), Failure> {
    match path.filter(|path| !is_stdout(path)) {
        None => {
            let result = {
                // Standard output alone would flush after every line.
                let mut out = BufWriter::new(AutoStream::new(io::stdout().lock(), color));
                print(&mut out).and_then(|()| out.flush())
            };
            match result {
                Err(source) if source.kind() != io::ErrorKind::BrokenPipe => Err(Failure::Write {
                    target: PathBuf::from("standard output"),
                    source,
                }),
                _ => Ok(()),
            }
        }
        Some(path) => write_file(path, color, print).map_err(|source| Failure::Write {
            target: path.to_owned(),
            source,
        }),
    }
}

/// Writes a file under a temporary name, and renames it when it is complete. A link stays, and the file to which it
/// leads is replaced.
fn write_file(
    path: &Path,
    color: ColorChoice,
    print: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    if is_special(path) {
        let mut out = AutoStream::new(fs::OpenOptions::new().write(true).open(path)?, color);
        return print(&mut out).and_then(|()| out.flush());
    }
    let resolved = fs::canonicalize(path);
    let path = resolved.as_deref().unwrap_or(path);
    let (file, partial) = partial_file(path)?.into_parts();
    let mut out = BufWriter::new(AutoStream::new(file, color));
    print(&mut out)?;
    out.flush()?;
    drop(out);
    partial.persist(path).map_err(|failed| failed.error)
}

/// Whether there is a pipe, a device or a socket at this path, which a file must not replace.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|it| !it.is_file() && !it.is_dir())
}

/// The end of the name of a file that is not complete.
const PARTIAL: &str = ".partial";
/// A temporary file that is older than this and not locked belongs to a process that was killed.
const ABANDONED_AFTER: Duration = Duration::from_secs(60);

/// A temporary file next to `path` that only its owner can read; it is removed unless it is persisted as `path`. Also
/// removes the temporary files that killed processes left for the same path.
///
/// # Errors
///
/// If the folder does not exist, the file cannot be made there, or there is a pipe, a device or a socket at `path`.
pub(crate) fn partial_file(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    if is_special(path) {
        let why = "it is no regular file, and only one can be replaced (`-` is standard output)";
        return Err(io::Error::other(why));
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let name = path.file_name().unwrap_or_default();
    remove_abandoned(folder, name);
    let partial = tempfile::Builder::new()
        .prefix(name)
        .suffix(PARTIAL)
        .tempfile_in(folder)
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => io::Error::other("its folder does not exist"),
            kind => io::Error::new(kind, without_path(&error)),
        })?;
    // If files cannot be locked there, none counts as abandoned.
    let _ = partial.as_file().try_lock();
    Ok(partial)
}

/// The text of an error of `tempfile` without the path of the temporary file, which means nothing to the user.
fn without_path(error: &io::Error) -> String {
    let text = error.to_string();
    let end = text.find(" at path ").unwrap_or(text.len());
    text[..end].to_owned()
}

/// Removes the temporary files that killed processes left for this name. Errors are ignored: such a file does no harm.
fn remove_abandoned(folder: &Path, name: &OsStr) {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    for file in files {
        let file_name = file.file_name();
        let file_name = file_name.as_encoded_bytes();
        let is_partial = file_name.starts_with(name.as_encoded_bytes())
            && file_name.ends_with(PARTIAL.as_bytes());
        let is_old = || {
            let metadata = file.metadata().ok().filter(fs::Metadata::is_file);
            let age = metadata.and_then(|metadata| metadata.modified().ok()?.elapsed().ok());
            age.is_some_and(|age| age > ABANDONED_AFTER)
        };
        let is_unlocked = || fs::File::open(file.path()).is_ok_and(|file| file.try_lock().is_ok());
        if is_partial && is_old() && is_unlocked() {
            let _ = fs::remove_file(file.path());
        }
    }
}

/// Whether the path is `-`, which means standard output.
pub(crate) fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// The width of a page on standard output in columns: from `COLUMNS` if it is 40 or more, else from the terminal, else
/// 80; at most 110.
pub(crate) fn page_width() -> usize {
    let wanted = std::env::var("COLUMNS").ok();
    let wanted = wanted.and_then(|columns| columns.parse().ok());
    let terminal = || terminal_size::terminal_size_of(io::stdout());
    wanted
        .filter(|&columns| columns >= MIN_WIDTH)
        .or_else(|| terminal().map(|(width, _)| usize::from(width.0)))
        .unwrap_or(DEFAULT_WIDTH)
        .min(MAX_WIDTH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn error_states_why_a_file_cannot_be_made() {
        let folder = tempfile::tempdir().unwrap();
        let reason = |name: &str| {
            partial_file(&folder.path().join(name))
                .unwrap_err()
                .to_string()
        };
        let long = reason(&"x".repeat(300));
        assert!(long.starts_with("File name too long"), "{long}");
        assert!(!long.contains("xxx"), "{long}");
        assert_eq!(reason("none/job.tar"), "its folder does not exist");
        let a_file = folder.path().join("file");
        fs::write(&a_file, "").unwrap();
        let below = reason("file/job.tar");
        assert!(below.starts_with("Not a directory"), "{below}");
    }

    #[test]
    fn a_pipe_is_written_and_stays_a_pipe() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        use std::os::unix::fs::FileTypeExt as _;
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let from = pipe.clone();
        let reader = std::thread::spawn(move || fs::read_to_string(from).unwrap());
        write_to(Some(&pipe), ColorChoice::Never, |out| {
            out.write_all(b"text")
        })
        .unwrap();
        assert_eq!(reader.join().unwrap(), "text");
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
        let refused = partial_file(&pipe).unwrap_err().to_string();
        assert!(refused.contains("no regular file"), "{refused}");
    }

    #[test]
    fn a_link_stays_and_leads_to_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "before").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_to(Some(&link), ColorChoice::Never, |out| {
            out.write_all(b"text")
        })
        .unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "text");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn only_abandoned_temporary_files_of_the_output_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let long_ago = SystemTime::now() - 2 * ABANDONED_AFTER;
        let old = |name: &str| {
            let file = fs::File::create(folder.path().join(name)).unwrap();
            file.set_modified(long_ago).unwrap();
            file
        };
        old("job.tarAbCdEf.partial");
        old("other.tarAbCdEf.partial");
        let written = old("job.tarGhIjKl.partial");
        written.try_lock().unwrap();
        old("job.tar");
        let own = partial_file(&folder.path().join("job.tar")).unwrap();
        let left = fs::read_dir(folder.path()).unwrap();
        let mut left: Vec<_> = left
            .map(|entry| entry.unwrap().path())
            .filter(|path| path != own.path())
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        left.sort();
        let expected = [
            "job.tar",
            "job.tarGhIjKl.partial",
            "other.tarAbCdEf.partial",
        ];
        assert_eq!(left, expected);
        drop(own);
    }
}
