//! Turns the paths that the user names into a list of files.

use super::walk::walk;
use rcomm_verdict::Problem;
use std::fs;
use std::path::{Path, PathBuf};

/// Why a path or a pattern gives no file.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The file or folder does not exist or cannot be accessed.
    #[error("{}: {source}", .path.display())]
    Path {
        /// The path, as it was given.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// No file matches the pattern.
    #[error("{}: no file matches", .pattern)]
    NoMatch {
        /// The pattern, as it was given.
        pattern: String,
    },
    /// The pattern is not valid.
    #[error("{pattern}: {why}")]
    Pattern {
        /// The pattern, as it was given.
        pattern: String,
        /// The reason why it is not valid.
        why: String,
    },
}

/// An input to read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum InputFile {
    File(PathBuf),
    Stdin,
}

impl InputFile {
    /// The input's name in messages: the path, or `standard input`.
    pub(super) fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Stdin => "standard input".to_owned(),
        }
    }
}

/// The inputs that paths name, and what is wrong with the paths.
#[derive(Default)]
pub(super) struct Found {
    /// The inputs. When [`find`] returns them, they are sorted and each occurs once.
    pub(super) inputs: Vec<InputFile>,
    /// Folders that could not be listed, links that were not followed, paths that cannot be accessed, and patterns
    /// without a match.
    pub(super) problems: Vec<Problem>,
    /// The number of paths that cannot be accessed, of patterns without a match, and of links that were not followed.
    pub(super) unfound: usize,
}

/// Finds the files that the paths name. A folder may be empty. A path that cannot be accessed and a pattern without a
/// match become problems.
///
/// # Errors
/// If a pattern is not valid; or if no path can be accessed and no pattern has a match, then the error of the last.
pub(super) fn find(paths: &[PathBuf]) -> Result<Found, FindError> {
    let mut found = Found::default();
    let mut missing = Vec::new();
    for path in paths {
        if let Err(error) = found.add_path(path) {
            if matches!(error, FindError::Pattern { .. }) {
                return Err(error);
            }
            missing.push((path, error));
        }
    }
    if missing.len() == paths.len()
        && let Some((_, error)) = missing.pop()
    {
        return Err(error);
    }
    let missing_paths = missing.iter().map(|(path, error)| {
        // The job may be complete without this path, so the problem is not that of a damaged record.
        Problem::stale_dump(path.display().to_string(), format!("left aside: {error}"))
    });
    found.problems.extend(missing_paths);
    found.unfound += missing.len();
    found.inputs.sort();
    found.inputs.dedup();
    Ok(found)
}

impl Found {
    pub(super) fn extend(&mut self, more: Self) {
        self.inputs.extend(more.inputs);
        self.problems.extend(more.problems);
        self.unfound += more.unfound;
    }

    /// Adds what a path names; if it cannot be accessed, what it matches as a pattern.
    fn add_path(&mut self, path: &Path) -> Result<(), FindError> {
        if path.as_os_str() == "-" {
            self.inputs.push(InputFile::Stdin);
            return Ok(());
        }
        match fs::metadata(path) {
            Ok(metadata) => self.add(path, metadata.is_dir()),
            Err(source) => {
                // The name of a file may contain a star, so patterns are tried second.
                let pattern = path.to_string_lossy();
                if !pattern.contains(['*', '?', '[']) {
                    return Err(FindError::Path {
                        path: path.to_owned(),
                        source,
                    });
                }
                self.add_matches(&pattern)?;
            }
        }
        Ok(())
    }

    /// Adds a file, or the files below a folder.
    fn add(&mut self, path: &Path, is_folder: bool) {
        if !is_folder {
            self.inputs.push(InputFile::File(path.to_owned()));
            return;
        }
        let Self {
            inputs,
            problems,
            unfound,
        } = self;
        walk(
            path,
            &mut |file| inputs.push(InputFile::File(file)),
            &mut |left| {
                *unfound += usize::from(left.is_link);
                problems.push(match left.is_link {
                    true => not_followed(left.path, left.why),
                    false => unlisted(left.path, left.why),
                });
            },
        );
    }

    fn add_matches(&mut self, pattern: &str) -> Result<(), FindError> {
        let matches = glob::glob(pattern).map_err(|error| FindError::Pattern {
            pattern: pattern.to_owned(),
            why: error.to_string(),
        })?;
        let mut has_match = false;
        for path in matches {
            has_match = true;
            match path {
                Ok(path) => self.add(&path, path.is_dir()),
                Err(error) => self.problems.push(unlisted(error.path(), error.error())),
            }
        }
        if has_match {
            Ok(())
        } else {
            Err(FindError::NoMatch {
                pattern: pattern.to_owned(),
            })
        }
    }
}

/// The job may be complete without what the link leads to, so the problem is not that of a damaged record.
fn not_followed(link: &Path, error: &std::io::Error) -> Problem {
    Problem::stale_dump(
        link.display().to_string(),
        format!("left aside: the link was not followed: {error}"),
    )
}

fn unlisted(folder: &Path, error: &std::io::Error) -> Problem {
    Problem::unreadable_dump(
        folder.display().to_string(),
        format!("the folder could not be listed: {error}"),
    )
}
