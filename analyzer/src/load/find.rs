//! From what the user names to a list of files.

use crate::finding::Code;
use crate::report::Problem;
use std::fs;
use std::path::{Path, PathBuf};

/// A path that names nothing.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// No such file, and no such pattern.
    #[error("{}: {source}", .path.display())]
    Path {
        /// As given.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A pattern that matches nothing.
    #[error("{}: no file matches", .pattern)]
    NoMatch {
        /// As given.
        pattern: String,
    },
    /// A pattern that cannot be one.
    #[error("{pattern}: {why}")]
    Pattern {
        /// As given.
        pattern: String,
        /// What is wrong with it.
        why: String,
    },
}

/// Something to read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Input {
    File(PathBuf),
    Stdin,
}

impl Input {
    /// How it is called in problems.
    pub(super) fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Stdin => "standard input".to_owned(),
        }
    }
}

pub(super) struct Found {
    /// Sorted, each once.
    pub(super) inputs: Vec<Input>,
    /// Folders that could not be listed.
    pub(super) problems: Vec<Problem>,
}

/// Folders below a named one that are looked into.
const MAX_DEPTH: usize = 16;

pub(super) fn find(paths: &[PathBuf]) -> Result<Found, FindError> {
    let mut found = Found {
        inputs: Vec::new(),
        problems: Vec::new(),
    };
    for path in paths {
        if path.as_os_str() == "-" {
            found.inputs.push(Input::Stdin);
            continue;
        }
        match fs::metadata(path) {
            Ok(about) => found.add(path, about.is_dir()),
            Err(source) => {
                // A file may have a star in its name, so patterns come second.
                let pattern = path.to_string_lossy();
                if !pattern.contains(['*', '?', '[']) {
                    return Err(FindError::Path {
                        path: path.clone(),
                        source,
                    });
                }
                found.add_matches(&pattern)?;
            }
        }
    }
    found.inputs.sort();
    found.inputs.dedup();
    Ok(found)
}

impl Found {
    fn add(&mut self, path: &Path, is_folder: bool) {
        if is_folder {
            self.walk(path, 0);
        } else {
            self.inputs.push(Input::File(path.to_owned()));
        }
    }

    fn add_matches(&mut self, pattern: &str) -> Result<(), FindError> {
        let matches = glob::glob(pattern).map_err(|error| FindError::Pattern {
            pattern: pattern.to_owned(),
            why: error.to_string(),
        })?;
        let mut any = false;
        for path in matches {
            any = true;
            match path {
                Ok(path) => self.add(&path, path.is_dir()),
                Err(error) => self.unlisted(error.path(), error.error()),
            }
        }
        if any {
            Ok(())
        } else {
            Err(FindError::NoMatch {
                pattern: pattern.to_owned(),
            })
        }
    }

    fn unlisted(&mut self, folder: &Path, error: &std::io::Error) {
        self.problems.push(Problem {
            code: Code::N301,
            path: folder.display().to_string(),
            sentence: format!("the folder could not be listed: {error}"),
        });
    }

    /// Every regular file below `folder` that is not hidden: hidden files are unfinished ones.
    ///
    /// Links to folders are not followed, for they may close a circle; links to files are.
    fn walk(&mut self, folder: &Path, depth: usize) {
        let items = match fs::read_dir(folder) {
            Ok(items) => items,
            Err(error) => return self.unlisted(folder, &error),
        };
        for item in items {
            let item = match item {
                Ok(item) => item,
                Err(error) => {
                    self.unlisted(folder, &error);
                    continue;
                }
            };
            if item.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let path = item.path();
            match item.file_type() {
                Ok(kind) if kind.is_dir() && depth < MAX_DEPTH => self.walk(&path, depth + 1),
                Ok(kind) if kind.is_file() => self.inputs.push(Input::File(path)),
                Ok(kind) if kind.is_symlink() && path.is_file() => {
                    self.inputs.push(Input::File(path));
                }
                // Pipes, sockets and devices would have us wait.
                Ok(_) => {}
                Err(error) => self.unlisted(&path, &error),
            }
        }
    }
}
