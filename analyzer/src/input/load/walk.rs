//! Lists the files below a folder.

use rcomm_recorder::publish::LaunchRecord;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The largest depth of folders below a named one.
const MAX_DEPTH: usize = 16;

/// A path below a folder that was not searched for files.
#[derive(Debug)]
pub struct Unsearched<'a> {
    /// The path, which begins with that of the folder.
    pub path: &'a Path,
    /// Whether the path is a link: one that leads nowhere, or to a folder that is not searched.
    pub is_link: bool,
    /// Why the path was not searched.
    pub why: &'a io::Error,
}

/// Calls `found` with every regular file below `folder` that is neither hidden nor a launch record, in no particular
/// order. Blocks until all folders are listed. Hidden folders are not entered. A hidden file may be a dump that is
/// still being written.
///
/// Links to folders are not followed, since they may form a cycle; links to files are. Pipes, sockets and devices are
/// skipped, since they would block the reader. Folders more than 16 levels down are not listed. `unsearched` is called
/// for these, for what could not be listed, and for links that lead nowhere or to a folder that is not searched. A
/// folder is not searched if it is not below `folder`, is hidden, or lies more than 16 levels down. The other files are
/// found nevertheless.
pub fn walk(
    folder: &Path,
    found: &mut dyn FnMut(PathBuf),
    unsearched: &mut dyn FnMut(Unsearched<'_>),
) {
    let mut walk = Walk {
        folder,
        found,
        unsearched,
    };
    walk.descend(folder, 0);
}

struct Walk<'a> {
    /// The folder that the caller names.
    folder: &'a Path,
    found: &'a mut dyn FnMut(PathBuf),
    unsearched: &'a mut dyn FnMut(Unsearched<'_>),
}

impl Walk<'_> {
    fn descend(&mut self, folder: &Path, depth: usize) {
        let items = match fs::read_dir(folder) {
            Ok(items) => items,
            Err(error) => return self.leave_out(folder, &error),
        };
        for item in items {
            let item = match item {
                Ok(item) => item,
                Err(error) => {
                    self.leave_out(folder, &error);
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
                Ok(kind) if kind.is_dir() && depth < MAX_DEPTH => self.descend(&path, depth + 1),
                Ok(kind) if kind.is_dir() => {
                    let why = format!(
                        "it is more than {MAX_DEPTH} folders below the named one: give its path as an argument, too"
                    );
                    self.leave_out(&path, &io::Error::other(why));
                }
                Ok(kind) if kind.is_file() => (self.found)(path),
                Ok(kind) if kind.is_symlink() => self.add_target(path),
                Ok(_) => {}
                Err(error) => self.leave_out(&path, &error),
            }
        }
    }

    /// Adds the file that a link leads to.
    fn add_target(&mut self, link: PathBuf) {
        let why = match fs::metadata(&link) {
            Ok(target) if target.is_file() => return (self.found)(link),
            // A folder below the named one, such as that of the newest run, is listed under its own path.
            Ok(target) if target.is_dir() && !self.lists_target(&link) => io::Error::other(
                "it leads to a folder that is not searched: give its path as an argument, too",
            ),
            Ok(_) => return,
            Err(error) => error,
        };
        (self.unsearched)(Unsearched {
            path: &link,
            is_link: true,
            why: &why,
        });
    }

    /// Whether a link leads to the named folder or to one below it that is listed.
    fn lists_target(&self, link: &Path) -> bool {
        let resolved = self.folder.canonicalize().ok();
        let Some((folder, target)) = resolved.zip(link.canonicalize().ok()) else {
            return false;
        };
        target.strip_prefix(folder).is_ok_and(|below| {
            let mut names = below.iter();
            below.iter().count() <= MAX_DEPTH
                && !names.any(|name| name.as_encoded_bytes().starts_with(b"."))
        })
    }

    /// Reports a path that is not a link and was not searched.
    fn leave_out(&mut self, path: &Path, why: &io::Error) {
        (self.unsearched)(Unsearched {
            path,
            is_link: false,
            why,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_to_folders_that_are_not_searched_and_to_nothing_are_named() {
        let named = tempfile::tempdir().expect("a temporary directory can be made");
        let elsewhere = tempfile::tempdir().expect("a temporary directory can be made");
        let below = |name: &str| named.path().join(name);
        let deep = below("run7").join("x/".repeat(MAX_DEPTH - 1));
        fs::create_dir_all(deep.join("x")).expect("directories can be made");
        fs::create_dir_all(below(".hidden/run8")).expect("directories can be made");
        fs::write(below("run7/rank_0"), "").expect("a file can be written");
        fs::write(elsewhere.path().join("rank_1"), "").expect("a file can be written");
        for (target, link) in [
            (below("run7"), "newest"),
            (named.path().to_owned(), "run7/up"),
            (elsewhere.path().join("rank_1"), "rank_1"),
            (elsewhere.path().to_owned(), "other"),
            (elsewhere.path().join("rank_2"), "rank_2"),
            (below(".hidden/run8"), "hidden"),
            (deep.clone(), "deepest"),
            (deep.join("x"), "too_deep"),
        ] {
            symlink(target, below(link)).expect("a link can be made");
        }
        let (mut found, mut unsearched) = (Vec::new(), Vec::new());
        walk(named.path(), &mut |file| found.push(file), &mut |left| {
            assert!(left.is_link || left.path == deep.join("x"), "{left:?}");
            unsearched.push((left.path.to_owned(), left.why.kind()));
        });
        found.sort();
        unsearched.sort();
        assert_eq!(found, [below("rank_1"), below("run7/rank_0")]);
        let expected = [
            (below("hidden"), io::ErrorKind::Other),
            (below("other"), io::ErrorKind::Other),
            (below("rank_2"), io::ErrorKind::NotFound),
            (deep.join("x"), io::ErrorKind::Other),
            (below("too_deep"), io::ErrorKind::Other),
        ];
        assert_eq!(unsearched, expected);
    }
}
