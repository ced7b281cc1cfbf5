//! Lists the files below a folder, by one rule for all that read folders.

use rcomm_recorder::publish::LaunchRecord;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folders below a named one that are looked into.
const MAX_DEPTH: usize = 16;

/// Every regular file below `folder` that is not hidden, in no particular order: hidden files are
/// unfinished ones.
///
/// Links to folders are not followed, since they may form a cycle; links to files are. Pipes, sockets
/// and devices are passed over: they would block the reader. `unlisted` receives what could not be
/// listed; the other files are found nevertheless.
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
        // It has no operations: what it knows is read apart.
        if LaunchRecord::is_named_so(&path) {
            continue;
        }
        match item.file_type() {
            Ok(kind) if kind.is_dir() && depth < MAX_DEPTH => {
                descend(&path, depth + 1, found, unlisted);
            }
            Ok(kind) if kind.is_file() => found(path),
            Ok(kind) if kind.is_symlink() && path.is_file() => found(path),
            Ok(_) => {}
            Err(error) => unlisted(&path, &error),
        }
    }
}
