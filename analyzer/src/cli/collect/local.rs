//! Collects the records on this node: files, folders and rings.

use super::super::rings;
use super::archive::Archive;
use super::this_host;
use crate::cli::args::{CollectArgs, RingPlace};
use crate::cli::failure::Failure;
use crate::cli::progress::Meter;
use rcomm_analyzer::load::Absence;
use rcomm_analyzer::load::walk;
use rcomm_analyzer::ras::RasReport;
use rcomm_analyzer::rsum;
use rcomm_recorder::publish::{DumpReader, RingReader};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The largest file that is taken, bytes: the dump of a million operations is about a third of this size.
const MAX_FILE: u64 = 1 << 30;

/// Why a file is considered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    /// The user named the file: it is taken without a check.
    Named,
    /// The file is in a folder that the user named: it is taken if it is a record, and a ring is taken as a dump.
    Found,
}

/// Adds the named files and the records below the named folders. What cannot be read becomes an absence. Returns a
/// sentence on each link that was not followed: the job may be complete without what the link leads to, so that is no
/// absence. Fails if the archive cannot be written.
pub(super) fn collect(args: &CollectArgs, archive: &mut Archive) -> Result<Vec<String>, Failure> {
    let host = this_host();
    let absent =
        |path: &Path, reason: String| Absence::path(&host, &path.display().to_string(), reason);
    let mut files: Vec<(PathBuf, Origin)> = Vec::new();
    let mut notes = Vec::new();
    for path in &args.paths {
        match fs::metadata(path) {
            Err(error) => archive.add_absence(absent(path, error.to_string())),
            Ok(meta) if meta.is_dir() => {
                let before = files.len();
                walk(
                    path,
                    &mut |file| files.push((file, Origin::Found)),
                    &mut |left| match left.is_link {
                        true => notes.push(format!(
                            "the link {} was not followed: {}",
                            left.path.display(),
                            left.why
                        )),
                        false => archive.add_absence(absent(left.path, left.why.to_string())),
                    },
                );
                if files.len() == before {
                    archive.add_absence(absent(path, "the folder holds no file".to_owned()));
                }
            }
            Ok(_) => files.push((path.clone(), Origin::Named)),
        }
    }
    files.sort();
    // A file that was both named and found counts as named, which sorts first.
    files.dedup_by(|(path, _), (other_path, _)| path == other_path);

    let mut reader = DumpReader::new();
    let (meter, total) = (Meter::new("gathering", "files"), files.len());
    for (done, (path, origin)) in files.into_iter().enumerate() {
        meter.show(done, total);
        match read(&path) {
            Err(error) => archive.add_absence(absent(&path, error.to_string())),
            Ok((content, _)) if origin == Origin::Found && RingReader::begins(&content) => {
                add_ring(&host, &path, archive)?;
            }
            Ok((content, modified)) => {
                let is_record = rsum::begins(&content)
                    || RasReport::parse(&content).is_some()
                    || reader.read(&content).is_ok();
                if origin == Origin::Found && !is_record {
                    archive.count_left_out(1);
                    continue;
                }
                archive.add(&host, &path, modified, &content)?;
            }
        }
    }
    Ok(notes)
}

/// Adds the rings as dumps. Fails if the directory cannot be listed, or if the archive cannot be written.
pub(super) fn collect_rings(place: &RingPlace, archive: &mut Archive) -> Result<(), Failure> {
    let host = this_host();
    let listings = rings::find(place)?;
    if listings.is_empty() {
        let directory = rings::directory(place).display().to_string();
        let reason = "there are no rings".to_owned();
        archive.add_absence(Absence::path(&host, &directory, reason));
    }
    let (meter, total) = (Meter::new("gathering", "rings"), listings.len());
    for (done, listing) in listings.into_iter().enumerate() {
        meter.show(done, total);
        add_ring(&host, &listing.path, archive)?;
    }
    Ok(())
}

/// Adds a ring as a dump: a plain copy of a ring in use could be inconsistent. A ring that cannot be read is absent.
/// Fails if the archive cannot be written.
fn add_ring(host: &str, path: &Path, archive: &mut Archive) -> Result<(), Failure> {
    match RingReader::attach(path).and_then(|ring| ring.read()) {
        Err(error) => {
            let reason = error.to_string();
            archive.add_absence(Absence::path(host, &path.display().to_string(), reason));
        }
        Ok(dump) => {
            let taken_ns = u64::try_from(dump.identity.dump_time_ns).unwrap_or(0);
            archive.add(host, path, taken_ns / 1_000_000_000, &dump.to_pickle())?;
        }
    }
    Ok(())
}

/// The content of a file, and when it was last written, s since the epoch.
fn read(path: &Path) -> io::Result<(Vec<u8>, u64)> {
    let file = File::open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut content = Vec::new();
    // One byte more than allowed distinguishes a file that is too large from one that just fits.
    file.take(MAX_FILE + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_FILE {
        return Err(io::Error::other("it is larger than 1 GiB"));
    }
    let modified = meta
        .modified()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .map_or(0, |since| since.as_secs());
    Ok((content, modified))
}
