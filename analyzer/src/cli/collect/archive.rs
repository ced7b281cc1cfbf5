//! The archive: a tar file whose last member is `manifest.json`.
//!
//! Members are named `<host>/<path>`. Every command that reads dumps reads these archives, compressed or not.

use crate::cli::failure::Failure;
use crate::cli::output::{self, is_stdout};
use rcomm_analyzer::format::{bytes, count};
use rcomm_analyzer::load::Absence;
use rcomm_analyzer::redact::Redactor;
use rcomm_recorder::publish::DumpReader;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, Write};
use std::num::NonZeroU32;
use std::path::{Component, Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of the manifest, which is the last member of an archive.
pub(super) const MANIFEST: &str = "manifest.json";

/// Lists the members of an archive and what is absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// [`Manifest::SCHEMA`].
    pub(super) schema: String,
    /// The program that made the archive, and its version.
    pub(super) made_by: String,
    /// When it was made, wall clock, ns since the epoch.
    pub(super) made_ns: u64,
    /// The number of ranks of the job, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) world_size: Option<NonZeroU32>,
    /// Every member except the manifest.
    pub(super) files: Vec<Member>,
    /// Files, folders, hosts and ranks that should be in the archive, with the reason why they are not.
    pub(super) absent: Vec<Absence>,
    /// The number of other files in the folders: those that are no dump, ring, summary or RAS report. Compressed files
    /// and archives count here, too.
    pub(super) left_out: u64,
}

/// A member of the archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    /// The name of the member in the archive.
    pub(super) name: String,
    /// The host that the member comes from.
    pub(super) host: String,
    /// The path on that host.
    pub(super) path: String,
    /// The size, bytes.
    pub(super) bytes: u64,
}

impl Manifest {
    /// Name and version of the JSON form.
    pub(super) const SCHEMA: &'static str = "rcomm.capture/1";

    fn new() -> Self {
        Self {
            schema: Self::SCHEMA.to_owned(),
            made_by: concat!("rcomm-fr ", env!("CARGO_PKG_VERSION")).to_owned(),
            made_ns: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_nanos() as u64),
            world_size: None,
            files: Vec::new(),
            absent: Vec::new(),
            left_out: 0,
        }
    }

    /// The archive as text for the user: the number and size of its files, and where it is.
    pub(super) fn format_summary(&self, output: &Path) -> String {
        let total = self.files.iter().map(|file| file.bytes).sum();
        let target = if is_stdout(output) {
            "standard output".to_owned()
        } else {
            output.display().to_string()
        };
        format!(
            "{} ({}) in {target}",
            count(self.files.len() as u64, "file"),
            bytes(total)
        )
    }
}

/// A file's name with `x` in place of every word but `rank`. PyTorch's dumps state their rank only in the numbers of
/// the file's name.
fn name_without_words(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut plain = String::new();
    let mut rest = &name[..];
    while let Some(c) = rest.chars().next() {
        let end = rest
            .find(|c: char| !c.is_alphabetic())
            .unwrap_or(rest.len());
        let (word, after) = rest.split_at(end.max(c.len_utf8()));
        plain.push_str(match word.to_ascii_lowercase().as_str() {
            "rank" => "rank",
            _ if c.is_alphabetic() => "x",
            _ => word,
        });
        rest = after;
    }
    plain
}

/// An archive that is being written, to a temporary file that [`Archive::finish`] renames.
///
/// For standard output it is a temporary file as well, since the records are analyzed before the manifest is written.
pub(super) struct Archive {
    tar: tar::Builder<BufWriter<File>>,
    /// Where the finished archive goes; `-` is standard output.
    target: PathBuf,
    /// The path of the temporary file.
    partial: tempfile::TempPath,
    /// The names of the members.
    names: HashSet<String>,
    manifest: Manifest,
    /// Replaces names in the records and the manifest with pseudonyms; `None` if the names stay.
    redactor: Option<Redactor>,
    reader: DumpReader,
    /// The files in which names are replaced later, once all names are known: when the archive is read or finished.
    to_redact: Vec<Unredacted>,
    /// The contents of the files in `to_redact`, one after the other in an unnamed file.
    contents: Option<File>,
}

/// A file in which names are yet to be replaced by pseudonyms.
struct Unredacted {
    host: String,
    path: PathBuf,
    modified: u64,
    bytes: usize,
}

impl Archive {
    /// Creates the temporary file. Fails if that is not possible.
    pub(super) fn create(target: &Path, redactor: Option<Redactor>) -> Result<Self, Failure> {
        // Only the owner can read the file: records hold paths and names.
        let partial = match is_stdout(target) {
            true => output::partial_file(&std::env::temp_dir().join("rcomm-fr-archive")),
            false => output::partial_file(target),
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
            redactor,
            reader: DumpReader::new(),
            to_redact: Vec::new(),
            contents: None,
        })
    }

    /// Writes the records added so far and returns the path of the temporary file, which has no manifest yet.
    pub(super) fn flush_records(&mut self) -> Result<&Path, Failure> {
        self.add_redacted()?;
        match self.tar.get_mut().flush() {
            Ok(()) => Ok(&self.partial),
            Err(source) => Err(self.write_failure(source)),
        }
    }

    /// Whether no file was added.
    pub(super) fn is_empty(&self) -> bool {
        self.manifest.files.is_empty() && self.to_redact.is_empty()
    }

    /// Adds a file; if its name is taken, a number is appended. `modified` is in s since the epoch. With a redactor, a
    /// file that is no dump becomes an absence instead.
    pub(super) fn add(
        &mut self,
        host: &str,
        path: &Path,
        modified: u64,
        content: &[u8],
    ) -> Result<(), Failure> {
        let Some(redactor) = &self.redactor else {
            return self.add_as(host, path, modified, content);
        };
        redactor.learn_host(host);
        let Ok((dump, _)) = self.reader.read(content) else {
            let reason = "it is no dump, and only dumps are redacted".to_owned();
            let file = path.display().to_string();
            self.add_absence(Absence::path(host, &file, reason));
            return Ok(());
        };
        redactor.learn(&dump);
        self.keep_content(content)
            .map_err(|source| self.write_failure(source))?;
        self.to_redact.push(Unredacted {
            host: host.to_owned(),
            path: path.to_owned(),
            modified,
            bytes: content.len(),
        });
        Ok(())
    }

    /// Appends the content of a file to `contents`.
    fn keep_content(&mut self, content: &[u8]) -> io::Result<()> {
        let file = match &mut self.contents {
            Some(file) => file,
            none => none.insert(tempfile::tempfile()?),
        };
        file.write_all(content)
    }

    /// Adds the files that waited, with pseudonyms for all names that are known by now.
    fn add_redacted(&mut self) -> Result<(), Failure> {
        let Some(mut file) = self.contents.take() else {
            return Ok(());
        };
        let Some(redactor) = self.redactor.take() else {
            return Ok(());
        };
        let waiting = std::mem::take(&mut self.to_redact);
        file.rewind().map_err(|source| self.write_failure(source))?;
        for unredacted in waiting {
            let mut content = vec![0; unredacted.bytes];
            file.read_exact(&mut content)
                .map_err(|source| self.write_failure(source))?;
            let Ok((mut dump, _)) = self.reader.read(&content) else {
                continue;
            };
            redactor.dump(&mut dump);
            let folder = redactor.path(&unredacted.path.display().to_string());
            let path = PathBuf::from(folder).join(name_without_words(&unredacted.path));
            let host = redactor.host(&unredacted.host);
            self.add_as(&host, &path, unredacted.modified, &dump.to_pickle())?;
        }
        self.redactor = Some(redactor);
        Ok(())
    }

    /// Adds a file with its names as they are; if the member's name is taken, a number is appended.
    fn add_as(
        &mut self,
        host: &str,
        path: &Path,
        modified: u64,
        content: &[u8],
    ) -> Result<(), Failure> {
        let plain = member_name(host, path);
        let mut name = plain.clone();
        let mut number = 1;
        while !self.names.insert(name.clone()) {
            number += 1;
            name = format!("{plain}.{number}");
        }
        self.append(&name, modified, content)?;
        self.manifest.files.push(Member {
            name,
            host: host.to_owned(),
            path: path.display().to_string(),
            bytes: content.len() as u64,
        });
        Ok(())
    }

    pub(super) fn add_absence(&mut self, absence: Absence) {
        if let Some(redactor) = &self.redactor {
            redactor.learn_host(&absence.host);
            redactor.learn_from(&absence.reason);
        }
        self.manifest.absent.push(absence);
    }

    pub(super) fn count_left_out(&mut self, files: u64) {
        self.manifest.left_out += files;
    }

    /// Writes the manifest and moves the archive to its target, or copies it to standard output.
    pub(super) fn finish(mut self, world_size: Option<NonZeroU32>) -> Result<Manifest, Failure> {
        self.manifest.world_size = world_size;
        self.add_redacted()?;
        if let Some(redactor) = &self.redactor {
            for absence in &mut self.manifest.absent {
                absence.host = redactor.host(&absence.host);
                absence.path = redactor.path(&absence.path);
                absence.reason = redactor.text(&absence.reason);
            }
        }
        let text = serde_json::to_vec_pretty(&self.manifest)
            .map_err(io::Error::from)
            .map_err(|source| self.write_failure(source))?;
        let made_s = self.manifest.made_ns / 1_000_000_000;
        self.append(MANIFEST, made_s, &text)?;
        let Self {
            tar,
            target,
            partial,
            manifest,
            ..
        } = self;
        let result = (|| {
            tar.into_inner()?.flush()?;
            if is_stdout(&target) {
                let mut file = File::open(&partial)?;
                io::copy(&mut file, &mut io::stdout().lock())?;
                return Ok(());
            }
            partial.persist(&target).map_err(|failed| failed.error)
        })();
        result.map_err(|source| Failure::Write { target, source })?;
        Ok(manifest)
    }

    /// Writes a member.
    fn append(&mut self, name: &str, modified: u64, content: &[u8]) -> Result<(), Failure> {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(modified);
        self.tar
            .append_data(&mut header, name, content)
            .map_err(|source| self.write_failure(source))
    }

    fn write_failure(&self, source: io::Error) -> Failure {
        Failure::Write {
            target: self.target.clone(),
            source,
        }
    }
}

/// The name `<host>/<path>` of a member, without a root and without `..`.
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
