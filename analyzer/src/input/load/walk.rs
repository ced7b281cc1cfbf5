//! Lists the files below a folder.

use rcomm_recorder::publish::LaunchRecord;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The largest depth of folders below a named one.
const MAX_DEPTH: usize = 16;

/// Calls `found` with every regular file below `folder` that is neither hidden nor a launch record, in no particular
/// order. Hidden folders are not entered. A hidden file may be a dump that is still being written.
///
/// Links to folders are not followed, since they may form a cycle; links to files are. Pipes, sockets and devices are
/// skipped, since they would block the reader. Folders more than 16 levels down are not listed. `unlisted` is called
/// for these and for what could not be listed; the other files are found nevertheless.
pub fn walk(
    folder: &Path,
    found: &mut dyn FnMut(PathBuf),
    unlisted: &mut dyn FnMut(&Path, &io::Error),
) {
    descend(folder, 0, found, unlisted);
}

fn descend(
    folder: &Path,
    depth: usize,
    found: &mut dyn FnMut(PathBuf),
    unlisted: &mut dyn FnMut(&Path, &io::Error),
) {
    let items = match fs::read_dir(folder) {
        Ok(items) => items,
        Err(error) => return unlisted(folder, &error),
    };
    for item in items {
        let item = match item {
            Ok(item) => item,
            Err(error) => {
                unlisted(folder, &error);
                continue;
            }
        };
        if item.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = item.path();
        // Launch records hold no operations and are read separately.
        if LaunchRecord::has_record_name(&path) {
            continue;
        }
        match item.file_type() {
            Ok(kind) if kind.is_dir() && depth < MAX_DEPTH => {
                descend(&path, depth + 1, found, unlisted);
            }
            Ok(kind) if kind.is_dir() => {
                let why = format!(
                    "it is more than {MAX_DEPTH} folders below the named one: give its path as an argument, too"
                );
                unlisted(&path, &io::Error::other(why));
            }
            Ok(kind) if kind.is_file() => found(path),
            Ok(kind) if kind.is_symlink() && path.is_file() => found(path),
            Ok(_) => {}
            Err(error) => unlisted(&path, &error),
        }
    }
}
