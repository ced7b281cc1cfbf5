//! Writes results to standard output or to a file, with or without color.

use crate::cli::failure::Failure;
use anstream::{AutoStream, ColorChoice};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The width of a page in columns if the output is not a terminal.
const DEFAULT_WIDTH: usize = 80;

/// Smaller values of `COLUMNS` are ignored: sentences would take too many lines.
const MIN_WIDTH: usize = 40;

/// The widest page: wider lines are hard to read.
const MAX_WIDTH: usize = 110;

/// Writes output to `path` (`None` or `-` = standard output).
///
/// A reader that stops early (`rcomm-fr analyze ... | head -1`) is not an error: the exit code remains that of the
/// verdict.
///
/// A file is written under a temporary name first, so no reader ever sees a part of it.
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

fn write_file(
    path: &Path,
    color: ColorChoice,
    print: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let (file, partial) = partial_file(path)?.into_parts();
    let mut out = BufWriter::new(AutoStream::new(file, color));
    print(&mut out)?;
    out.flush()?;
    drop(out);
    partial.persist(path).map_err(|failed| failed.error)
}

/// A temporary file next to `path` that only its owner can read; it is removed unless it is persisted as `path`.
pub(crate) fn partial_file(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    tempfile::Builder::new()
        .prefix(path.file_name().unwrap_or_default())
        .suffix(".partial")
        .tempfile_in(folder)
        // Without the temporary file's name, which means nothing to the user.
        .map_err(|error| error.kind().into())
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
