//! The archive: a tar file whose last member is `manifest.json`.
//!
//! Members are `<host>/<path>`. Everything that reads dumps reads these archives, compressed or not.

use crate::cli::failure::Failure;
use crate::cli::output::{self, is_stdout};
use rcomm_analyzer::format::{bytes, count};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Component, Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of the manifest in an archive, which comes last.
pub(super) const MANIFEST: &str = "manifest.json";

/// What the archive holds and what it lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// [`Manifest::SCHEMA`].
    pub(super) schema: String,
    /// Program and version.
    pub(super) made_by: String,
    /// When, wall clock, ns since the epoch.
    pub(super) made_ns: u64,
    /// Every member but this one.
    pub(super) files: Vec<Kept>,
    /// What should have been here, and why it is not.
    pub(super) absent: Vec<Absence>,
    /// Other files that lay next to the records.
    pub(super) left_out: u64,
}

/// One member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    /// Its name in the archive.
    pub(super) name: String,
    /// On which host it lay.
    pub(super) host: String,
    /// Where it lay.
    pub(super) path: String,
    /// How large it is.
    pub(super) bytes: u64,
}

/// One thing that is not there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Absence {
    /// On which host it was looked for; empty if that is not known.
    pub(super) host: String,
    /// The file or folder; empty if it is the host itself, or a rank.
    #[serde(default)]
    pub(super) path: String,
    /// The rank of which there is no record, if that is what is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rank: Option<u32>,
    /// Why it is not there.
    pub(super) reason: String,
}

impl Absence {
    pub(super) fn format(&self) -> String {
        match (self.rank, self.path.as_str()) {
            (Some(rank), _) => format!("rank {rank}: {}", self.reason),
            (None, "") => format!("host {}: {}", self.host, self.reason),
            (None, path) => format!("{path} on {}: {}", self.host, self.reason),
        }
    }

    /// A host that did not answer.
    pub(super) fn host(host: &str, reason: String) -> Self {
        Self::path(host, "", reason)
    }

    /// A file or folder that could not be had.
    pub(super) fn path(host: &str, path: &str, reason: String) -> Self {
        Self {
            host: host.to_owned(),
            path: path.to_owned(),
            rank: None,
            reason,
        }
    }
}

impl Manifest {
    /// Name and version of the form.
    pub(super) const SCHEMA: &'static str = "rcomm.capture/1";

    fn new() -> Self {
        Self {
            schema: Self::SCHEMA.to_owned(),
            made_by: concat!("rcomm-fr ", env!("CARGO_PKG_VERSION")).to_owned(),
            made_ns: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_nanos() as u64),
            files: Vec::new(),
            absent: Vec::new(),
            left_out: 0,
        }
    }

    pub(super) fn format_summary(&self, output: &Path) -> String {
        let all = self.files.iter().map(|file| file.bytes).sum();
        let target = if is_stdout(output) {
            "standard output".to_owned()
        } else {
            output.display().to_string()
        };
        format!(
            "{} ({}) in {target}",
            count(self.files.len() as u64, "record"),
            bytes(all)
        )
    }
}

/// An archive in progress: written next to its final name, which it gets in [`Archive::finish`].
///
/// What goes to standard output is written to a file first as well: it is looked at before its
/// manifest is written.
pub(super) struct Archive {
    tar: tar::Builder<BufWriter<File>>,
    target: PathBuf,
    partial: tempfile::TempPath,
    names: HashSet<String>,
    manifest: Manifest,
}

impl Archive {
    pub(super) fn create(target: &Path) -> Result<Self, Failure> {
        // Readable by its owner alone: records hold paths and names.
        let partial = if is_stdout(target) {
            tempfile::NamedTempFile::new()
        } else {
            output::partial_file(target)
        };
        let (file, partial) = partial
            .map_err(|source| Failure::Write {
                target: target.to_owned(),
                source,
            })?
            .into_parts();
        Ok(Self {
            tar: tar::Builder::new(BufWriter::new(file)),
            target: target.to_owned(),
            partial,
            names: HashSet::new(),
            manifest: Manifest::new(),
        })
    }

    /// What was gathered so far, as a file that can be read.
    pub(super) fn so_far(&mut self) -> Result<&Path, Failure> {
        match self.tar.get_mut().flush() {
            Ok(()) => Ok(&self.partial),
            Err(source) => Err(self.failed(source)),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.manifest.files.is_empty()
    }

    /// Adds a record. Two of one name get different names.
    pub(super) fn add(
        &mut self,
        host: &str,
        path: &Path,
        modified: u64,
        content: &[u8],
    ) -> Result<(), Failure> {
        let plain = member_name(host, path);
        let mut name = plain.clone();
        let mut again = 1;
        while !self.names.insert(name.clone()) {
            again += 1;
            name = format!("{plain}.{again}");
        }
        self.append(&name, modified, content)?;
        self.manifest.files.push(Kept {
            name,
            host: host.to_owned(),
            path: path.display().to_string(),
            bytes: content.len() as u64,
        });
        Ok(())
    }

    pub(super) fn absent(&mut self, absence: Absence) {
        self.manifest.absent.push(absence);
    }

    pub(super) fn left_out(&mut self, files: u64) {
        self.manifest.left_out += files;
    }

    /// Writes the manifest and gives the archive its name.
    pub(super) fn finish(mut self) -> Result<Manifest, Failure> {
        let text = serde_json::to_vec_pretty(&self.manifest)
            .map_err(io::Error::from)
            .map_err(|source| self.failed(source))?;
        let made = self.manifest.made_ns / 1_000_000_000;
        self.append(MANIFEST, made, &text)?;
        let Self {
            tar,
            target,
            partial,
            manifest,
            ..
        } = self;
        let done = (|| {
            tar.into_inner()?.flush()?;
            if is_stdout(&target) {
                let mut file = File::open(&partial)?;
                io::copy(&mut file, &mut io::stdout().lock())?;
                return Ok(());
            }
            partial.persist(&target).map_err(|failed| failed.error)
        })();
        done.map_err(|source| Failure::Write { target, source })?;
        Ok(manifest)
    }

    fn append(&mut self, name: &str, modified: u64, content: &[u8]) -> Result<(), Failure> {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(modified);
        self.tar
            .append_data(&mut header, name, content)
            .map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> Failure {
        Failure::Write {
            target: self.target.clone(),
            source,
        }
    }
}

/// `<host>/<path>` without a root and without steps upwards.
fn member_name(host: &str, path: &Path) -> String {
    let mut name = host.replace('/', "_");
    for part in path.components() {
        if let Component::Normal(part) = part {
            name.push('/');
            name.push_str(&part.to_string_lossy());
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_names_stay_inside_the_archive() {
        for (path, name) in [
            ("/tmp/dumps/rank_0", "n1/tmp/dumps/rank_0"),
            ("../../etc/rank_0", "n1/etc/rank_0"),
            ("./rank_0", "n1/rank_0"),
        ] {
            assert_eq!(member_name("n1", Path::new(path)), name);
        }
    }
}
