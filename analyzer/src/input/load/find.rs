//! Turns the paths that the user names into a list of files.

use super::walk::walk;
use rcomm_verdict::Problem;
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
        /// The system's error.
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
pub(super) enum InputFile {
    File(PathBuf),
    Stdin,
}

impl InputFile {
    /// How it is called in problems.
    pub(super) fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Stdin => "standard input".to_owned(),
        }
    }
}

#[derive(Default)]
pub(super) struct Found {
    /// Sorted, each once.
    pub(super) inputs: Vec<InputFile>,
    /// Folders that could not be listed.
    pub(super) problems: Vec<Problem>,
}

/// What the paths name. One that names nothing is a problem, as long as another names something.
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
    let unnamed = missing.iter().map(|(path, error)| {
        // The job may well be whole without it: it is no damaged record.
        Problem::stale_dump(path.display().to_string(), format!("left aside: {error}"))
    });
    found.problems.extend(unnamed);
    found.inputs.sort();
    found.inputs.dedup();
    Ok(found)
}

impl Found {
    pub(super) fn extend(&mut self, more: Self) {
        self.inputs.extend(more.inputs);
        self.problems.extend(more.problems);
    }

    fn add_path(&mut self, path: &Path) -> Result<(), FindError> {
        if path.as_os_str() == "-" {
            self.inputs.push(InputFile::Stdin);
            return Ok(());
        }
        match fs::metadata(path) {
            Ok(about) => self.add(path, about.is_dir()),
            Err(source) => {
                // A file may have a star in its name, so patterns come second.
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

    fn add(&mut self, path: &Path, is_folder: bool) {
        if !is_folder {
            self.inputs.push(InputFile::File(path.to_owned()));
            return;
        }
        let Self { inputs, problems } = self;
        walk(
            path,
            &mut |file| inputs.push(InputFile::File(file)),
            &mut |folder, error| problems.push(unlisted(folder, error)),
        );
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
                Err(error) => self.problems.push(unlisted(error.path(), error.error())),
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
}

fn unlisted(folder: &Path, error: &std::io::Error) -> Problem {
    Problem::unreadable_dump(
        folder.display().to_string(),
        format!("the folder could not be listed: {error}"),
    )
}
