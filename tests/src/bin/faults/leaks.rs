//! Finds what a job leaves behind outside its ranks.

use crate::job::{Job, SLACK};
use crate::processes::{POLL_INTERVAL, processes_of};
use crate::rank::EventKind;
use crate::scenario::{Act, Fault, Start};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Instant;

impl Job<'_> {
    /// The processes of the job that are left although they should have ended, as text.
    pub(crate) fn processes_left(&self) -> Vec<String> {
        let mut expected: Vec<u32> = self.observers.iter().map(std::process::Child::id).collect();
        let loses_launcher = matches!(
            self.scenario.fault,
            Fault::Launcher(Act::Freeze, Some(_)) | Fault::Store
        );
        if self.scenario.start != Start::Launcher || loses_launcher {
            let events = self.events();
            let culprits = self.scenario.culprits;
            let theirs = events.iter().filter(|event| culprits.contains(&event.rank));
            expected.extend(theirs.map(|event| event.pid));
        }
        if loses_launcher {
            expected.extend(self.children.iter().map(std::process::Child::id));
        }
        let until = Instant::now() + SLACK;
        loop {
            let left = processes_of(&self.folder).into_iter();
            let left: Vec<u32> = left.filter(|pid| !expected.contains(pid)).collect();
            if left.is_empty() || Instant::now() >= until {
                return left.iter().map(|pid| format!("process {pid}")).collect();
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// What is left after all processes of the job have ended, and it has started again and ended cleanly:
    /// processes, sockets, temporary files, and files in `/dev/shm`; and whether its port is in use.
    pub(crate) fn rest(&self) -> Vec<String> {
        let mut left: Vec<String> = processes_of(&self.folder)
            .into_iter()
            .filter(|&pid| self.observers.iter().all(|observer| observer.id() != pid))
            .map(|pid| format!("process {pid} after the restart"))
            .collect();
        if let Err(error) = TcpListener::bind(("127.0.0.1", self.port)) {
            left.push(format!("port {}: {error}", self.port));
        }
        // The socket of a process that has just been killed is removed by the next start.
        let is_killed = self.scenario.with_orphans;
        let is_record = |path: &Path| {
            let extension = path.extension().unwrap_or_default();
            extension == "ring" || extension == "json" || (is_killed && extension == "sock")
        };
        let mut files = files_below(&self.folder.join("tmp"));
        for folder in self.ring_folders() {
            files.extend(files_below(&folder.join(&self.name)));
        }
        files.retain(|path| !is_record(path));
        files.extend(files_below(&self.dump_folder()).into_iter().filter(|path| {
            let name = path.file_name().unwrap_or_default();
            name.as_encoded_bytes().starts_with(b".")
        }));
        let names_job = |path: &PathBuf| path.to_string_lossy().contains(&self.name);
        let in_memory = files_below(Path::new("/dev/shm")).into_iter();
        files.extend(in_memory.filter(|path| names_job(path) && !is_record(path)));
        files.sort();
        files.dedup();
        left.extend(files.iter().map(|path| path.display().to_string()));
        left
    }

    /// How many ranks have ended cleanly.
    pub(crate) fn ended(&self) -> usize {
        let events = self.events();
        let ended = events.iter().filter(|event| event.kind == EventKind::Ended);
        ended.count()
    }
}

/// All files below a folder, without the folders; none if it cannot be read.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => files.extend(files_below(&entry.path())),
            _ => files.push(entry.path()),
        }
    }
    files
}
