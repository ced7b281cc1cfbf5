//! Uploaded dumps: analyzed once, kept under an unguessable address.
//!
//! Files are written to a private directory, under names without path separators, and removed after the
//! analysis. The reports and records of the newest uploads stay in memory.

use crate::http::error::Refusal;
use crate::state::snapshot::Records;
use crate::state::store::Frame;
use axum::extract::Multipart;
use rcomm_analyzer::load::{LoadOptions, load};
use rcomm_analyzer::source::Poll;
use rcomm_analyzer::{Anchor, Live, LiveOptions, Problem, Snapshot, analyze};
use rcomm_recorder::model::text::hex;
use std::collections::VecDeque;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::Semaphore;

/// Maximum number of uploads that are kept; the oldest is dropped first.
const MAX_KEPT: usize = 8;
/// Maximum number of files in one upload.
const MAX_FILES: usize = 16 * 1024;
/// Maximum number of operations of one upload that are held in memory, over all ranks; dumps beyond it are reported
/// as skipped.
const MAX_ENTRIES: usize = 8_000_000;
/// The field of a form that states when the file of the next field was written, ms since the epoch. Browsers do
/// not send the time of a file themselves.
const WRITTEN: &str = "written_ms";
/// Maximum length of a stored file name, in bytes.
const LONGEST_NAME: usize = 200;

/// The newest uploads, analyzed.
pub(crate) struct Uploads {
    kept: Mutex<VecDeque<(String, Arc<Frame>)>>,
    folder: tempfile::TempDir,
    /// The lock on the folder, by which other servers know that it is in use.
    _in_use: File,
    max_bytes: u64,
    /// One permit: uploads are received and analyzed one at a time.
    turn: Semaphore,
}

impl Uploads {
    /// Creates an empty store that accepts uploads of at most `max_bytes` bytes each. Removes the directories of
    /// servers that were killed.
    ///
    /// # Errors
    /// If no private directory can be created or locked.
    pub(crate) fn new(max_bytes: u64) -> io::Result<Self> {
        Self::below(&std::env::temp_dir(), max_bytes)
    }

    fn below(directory: &Path, max_bytes: u64) -> io::Result<Self> {
        let folder = private_directory().tempdir_in(directory)?;
        let in_use = File::open(folder.path())?;
        in_use.try_lock()?;
        remove_abandoned(directory, in_use.metadata()?.uid());
        Ok(Self {
            kept: Mutex::default(),
            folder,
            _in_use: in_use,
            max_bytes,
            turn: Semaphore::new(1),
        })
    }

    /// The report and records of an upload; `None` if it is not kept.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Frame>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter()
            .find(|(known, _)| known == id)
            .map(|(_, frame)| frame.clone())
    }

    /// Analyzes the files of a form and stores the report under the returned id.
    pub(crate) async fn take(&self, form: Multipart) -> Result<String, Refusal> {
        let _turn = self.turn.acquire().await.map_err(|_| Refusal::Stopping)?;
        let folder = private_directory()
            .tempdir_in(self.folder.path())
            .map_err(Refusal::Disk)?;
        self.write(form, folder.path()).await?;
        let max_bytes = self.max_bytes;
        let analysis = tokio::task::spawn_blocking(move || {
            let snapshot = analyze_files(folder.path(), max_bytes);
            (snapshot, folder.close())
        });
        let (snapshot, closed) = analysis.await.map_err(|_| Refusal::Stopping)?;
        closed.map_err(Refusal::Disk)?;
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(Refusal::NoRandom)?;
        let id = hex(&id);
        let frame = Arc::new(Frame::of(Arc::new(snapshot?), Records::Written));
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back((id.clone(), frame));
        if kept.len() > MAX_KEPT {
            kept.pop_front();
        }
        Ok(id)
    }

    /// Writes the files of a form to `folder`, under plain names. A field [`WRITTEN`] states when the file of the next
    /// field was written; the other files get [`UNIX_EPOCH`] as their time, since the time of the upload says nothing
    /// about them.
    async fn write(&self, mut form: Multipart, folder: &Path) -> Result<(), Refusal> {
        let (mut files, mut rest) = (0, self.max_bytes);
        let mut written = UNIX_EPOCH;
        let broken = |error: axum::extract::multipart::MultipartError| {
            Refusal::Upload(format!("the form cannot be read: {error}"))
        };
        while let Some(mut field) = form.next_field().await.map_err(broken)? {
            if field.name() == Some(WRITTEN) && field.file_name().is_none() {
                let mut text = Vec::new();
                while let Some(chunk) = field.chunk().await.map_err(broken)? {
                    rest = rest
                        .checked_sub(chunk.len() as u64)
                        .ok_or(Refusal::TooLarge(self.max_bytes))?;
                    text.extend_from_slice(&chunk);
                }
                written = time_of(&text).ok_or_else(|| {
                    Refusal::Upload(format!(
                        "the field `{WRITTEN}` is no time in ms since the epoch"
                    ))
                })?;
                continue;
            }
            files += 1;
            if files > MAX_FILES {
                return Err(Refusal::Upload(format!("more than {MAX_FILES} files")));
            }
            let name = plain_name(field.file_name().unwrap_or_default(), files);
            let mut options = tokio::fs::File::options();
            let file = options.write(true).create_new(true).mode(0o600);
            let opened = file.open(folder.join(&name)).await;
            let mut file = opened.map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    Refusal::Upload(format!("two files are named {name:?}"))
                }
                _ => Refusal::Disk(error),
            })?;
            while let Some(chunk) = field.chunk().await.map_err(broken)? {
                rest = rest
                    .checked_sub(chunk.len() as u64)
                    .ok_or(Refusal::TooLarge(self.max_bytes))?;
                file.write_all(&chunk).await.map_err(Refusal::Disk)?;
            }
            file.flush().await.map_err(Refusal::Disk)?;
            let file = file.into_std().await;
            let written = std::mem::replace(&mut written, UNIX_EPOCH);
            file.set_modified(written).map_err(Refusal::Disk)?;
        }
        if files == 0 {
            return Err(Refusal::Upload("it contains no file".into()));
        }
        Ok(())
    }
}

/// A server locks its new directory within much less than this time. A younger directory may belong to a server that
/// has not locked it yet, so it is not removed.
const UNLOCKED_TIME: Duration = Duration::from_secs(60);

/// Removes the directories that killed servers of the user with this id left. Errors are ignored: another server may be
/// removing the same directory.
fn remove_abandoned(directory: &Path, user: u32) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_ours = entry.metadata().is_ok_and(|metadata| {
            let age = metadata
                .modified()
                .ok()
                .and_then(|then| then.elapsed().ok());
            metadata.is_dir()
                && metadata.uid() == user
                && age.is_some_and(|age| age > UNLOCKED_TIME)
        });
        if !is_ours || !name.to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let unused = File::open(entry.path()).is_ok_and(|folder| folder.try_lock().is_ok());
        if unused {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// The time that the field [`WRITTEN`] states; `None` if it states none.
fn time_of(text: &[u8]) -> Option<SystemTime> {
    let ms: u64 = std::str::from_utf8(text).ok()?.trim().parse().ok()?;
    UNIX_EPOCH.checked_add(Duration::from_millis(ms))
}

/// The beginning of the names of directories for uploads.
const PREFIX: &str = "rcomm-web-";

/// Returns a builder of directories that only this user can read, whatever the umask.
fn private_directory() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder
        .prefix(PREFIX)
        .permissions(Permissions::from_mode(0o700));
    builder
}

/// A file name that keeps the rank: the parts of the path joined, unusual characters replaced. A file
/// without a name gets a number.
fn plain_name(path: &str, number: usize) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let name: String = path
        .split(['/', '\\'])
        .filter(|part| !part.chars().all(|c| c == '.'))
        .collect::<Vec<_>>()
        .join("_")
        .chars()
        .map(|c| if plain(c) { c } else { '_' })
        .collect();
    // The end of a name distinguishes ranks.
    let name = &name[name.len().saturating_sub(LONGEST_NAME)..];
    let name = name.trim_start_matches('.');
    if name.is_empty() {
        format!("file_{number}")
    } else {
        name.to_owned()
    }
}

/// An upload may unpack to this many times its size, or to the maximum size of an upload if that is more. `rcomm-fr`
/// analyzes larger archives.
const MAX_UNPACKED_RATIO: u64 = 20;

/// Reads and analyzes the files in the directory.
fn analyze_files(folder: &Path, max_bytes: u64) -> Result<Snapshot, Refusal> {
    let options = LoadOptions {
        max_file_bytes: max_bytes,
        max_unpacked: (max_bytes, MAX_UNPACKED_RATIO),
        ..LoadOptions::default()
    };
    let (mut dumps, mut unusable) = (Vec::new(), Vec::new());
    let mut entries = 0;
    // Do not expose the temporary path.
    let root = format!("{}/", folder.display());
    let loaded = load(&[folder.to_owned()], &options, |mut loaded| {
        loaded.path = loaded.path.replace(&root, "");
        loaded.written_ns = loaded.written_ns.filter(|&written_ns| written_ns != 0);
        entries += loaded.dump.entries.len();
        if entries > MAX_ENTRIES {
            unusable.push(Problem::unreadable_dump(
                loaded.path,
                format!("skipped: the upload has more than {MAX_ENTRIES} operations; use rcomm-fr"),
            ));
            return;
        }
        dumps.push(loaded);
    });
    let loaded = loaded.map_err(|error| Refusal::Upload(error.to_string().replace(&root, "")))?;
    let mut problems = loaded.problems;
    for problem in &mut problems {
        for path in std::iter::once(&mut problem.path).chain(&mut problem.more_paths) {
            *path = path.replace(&root, "");
        }
        problem.sentence = problem.sentence.replace(&root, "");
    }
    problems.extend(unusable);
    if dumps.is_empty() {
        let why = problems.first();
        let why = why.map_or_else(String::new, |problem| {
            format!(": {}: {}", problem.path, problem.sentence)
        });
        return Err(Refusal::Upload(format!("no dump in it can be read{why}")));
    }
    let poll = Poll::of_files(dumps, problems);
    let at = Anchor::now().moment();
    let name = "an upload".to_owned();
    let mut live = Live::new(LiveOptions::post_mortem(), analyze, vec![name]);
    live.observe(0, Ok(poll), at);
    live.refresh(at)
        .ok_or_else(|| Refusal::Upload("nothing was read".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_killed_servers_are_removed_by_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let make_old = |path: &Path| {
            let long_ago = std::time::SystemTime::now() - 2 * UNLOCKED_TIME;
            File::open(path).unwrap().set_modified(long_ago).unwrap();
        };
        let path = |name: &str| directory.path().join(name);
        for name in ["rcomm-web-killed", "rcomm-web-young", "another"] {
            std::fs::create_dir(path(name)).unwrap();
            std::fs::write(path(name).join("rank_0"), "x").unwrap();
        }
        make_old(&path("rcomm-web-killed"));
        make_old(&path("another"));
        let running = Uploads::below(directory.path(), 1).unwrap();
        make_old(running.folder.path());
        let next = Uploads::below(directory.path(), 1).unwrap();
        let exists = |path: &Path| path.exists();
        assert!(!exists(&path("rcomm-web-killed")));
        assert!(exists(&path("rcomm-web-young")) && exists(&path("another")));
        assert!(exists(running.folder.path()) && exists(next.folder.path()));
    }

    #[test]
    fn no_path_of_a_report_shows_the_temporary_folder() {
        let folder = tempfile::tempdir().unwrap();
        // Neither the dumps nor their names state the rank; the groups show it.
        for (rank, pair) in [(1, "[1, 2]"), (2, "[2, 3]")] {
            let dump = format!(
                r#"{{"version":"2.10","entries":[{{"record_id":0,"pg_id":0,"process_group":["{rank}","x"],
                "collective_seq_id":1,"op_id":1,"profiling_name":"nccl:all_reduce","time_created_ns":1,
                "state":"completed"}}],"pg_config":{{"a":{{"name":"{rank}","desc":"x","ranks":"{pair}"}},
                "b":{{"name":"b","desc":"x","ranks":"[{rank}]"}}}}}}"#
            );
            std::fs::write(
                folder.path().join(format!("dump_{}", ["", "x", "y"][rank])),
                dump,
            )
            .unwrap();
        }
        let snapshot = analyze_files(folder.path(), 1 << 20).unwrap();
        let problems = &snapshot.report.problems;
        let problem_of_both = problems
            .iter()
            .find(|problem| !problem.more_paths.is_empty());
        let problem_of_both = problem_of_both.unwrap_or_else(|| panic!("{problems:?}"));
        let paths: Vec<&str> = problem_of_both.paths().collect();
        assert_eq!(paths, ["dump_x", "dump_y"], "{problems:?}");
        let root = folder.path().display().to_string();
        assert!(!format!("{problems:?}").contains(&root), "{problems:?}");
    }

    #[test]
    fn names_stay_in_the_folder_and_still_distinguish_ranks() {
        for (path, name) in [
            ("nccl_trace_rank_3", "nccl_trace_rank_3"),
            ("dumps/rank0/trace.json", "dumps_rank0_trace.json"),
            ("../../etc/passwd", "etc_passwd"),
            ("..\\..\\boot.ini", "boot.ini"),
            ("/absolute", "absolute"),
            ("a b\0c\n", "a_b_c_"),
            ("...", "file_7"),
            ("", "file_7"),
            (".hidden", "hidden"),
        ] {
            assert_eq!(plain_name(path, 7), name, "{path:?}");
        }
        assert!(plain_name(&"x/".repeat(5000), 1).len() <= LONGEST_NAME);
    }
}
