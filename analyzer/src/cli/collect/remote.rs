//! Collects the records of other hosts: a command of the user runs once for each host and prints its archive.
//!
//! The command decides how to reach a host (ssh, kubectl, srun, ...). It is split into words as in a shell, but
//! started without one; `{host}` in a word becomes the name of the host. A host that does not answer in time, or whose
//! answer is not an archive, becomes an absence.

use super::archive::MANIFEST;
use super::archive::{Archive, Manifest};
use crate::cli::args::CollectArgs;
use crate::cli::failure::Failure;
use crate::cli::progress::Meter;
use rcomm_analyzer::load::Absence;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// The largest archive of one host, bytes.
const MAX_ANSWER: u64 = 16 << 30;

/// The largest member of one host's archive, bytes.
const MAX_MEMBER: u64 = 1 << 30;

/// The time between two polls of the running commands.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The command that runs for each host.
pub(super) struct RemoteCommand {
    words: Vec<String>,
}

impl RemoteCommand {
    /// Parses `--command`; `None` if it was not given. Fails if it is empty, a quote is not closed, or `{host}` is
    /// missing.
    pub(super) fn parse(args: &CollectArgs) -> Result<Option<Self>, Failure> {
        let Some(text) = &args.command else {
            return Ok(None);
        };
        let invalid = |fault: &str| Failure::Usage {
            sentence: format!("--command {text:?} {fault}"),
        };
        let words = shlex::split(text).ok_or_else(|| invalid("has a quote that is not closed"))?;
        if words.is_empty() {
            return Err(invalid("is empty"));
        }
        if !words.iter().any(|word| word.contains("{host}")) {
            return Err(invalid("has no place for the host name: add {host}"));
        }
        Ok(Some(Self { words }))
    }

    fn for_host(&self, host: &str) -> Vec<String> {
        self.words
            .iter()
            .map(|word| word.replace("{host}", host))
            .collect()
    }
}

/// The hosts of `--host` and then of `--hosts-from`, each once. In the file, `#` begins a comment. Fails if the file
/// cannot be read, or if a name is no host name.
pub(super) fn hosts(args: &CollectArgs) -> Result<Vec<String>, Failure> {
    let mut hosts: Vec<String> = Vec::new();
    let listed = match &args.hosts_from {
        None => String::new(),
        Some(path) => std::fs::read_to_string(path).map_err(|source| Failure::Read {
            path: path.clone(),
            source,
        })?,
    };
    let lines = listed
        .lines()
        .map(|line| line.split('#').next().unwrap_or("").trim());
    for host in args.host.iter().map(String::as_str).chain(lines) {
        if host.is_empty() || hosts.iter().any(|known| known == host) {
            continue;
        }
        if !is_host_name(host) {
            return Err(Failure::Usage {
                sentence: format!("{host:?} is not a host name"),
            });
        }
        hosts.push(host.to_owned());
    }
    Ok(hosts)
}

/// Whether this can be a name, an address, `user@name` or `pod/name`: all its characters occur in these, and no command
/// takes its beginning for that of an option.
fn is_host_name(text: &str) -> bool {
    let is_no_option =
        text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '[' || c == ':');
    is_no_option
        && text.len() <= 255
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._-:@%[]/".contains(c))
}

/// A running command.
struct Running {
    host: String,
    child: Child,
    stdout: File,
    stderr: File,
    deadline: Instant,
}

/// Runs the command for each host and adds the members of the archives that it prints. A host without a usable archive
/// becomes an absence. Fails if the archive cannot be written.
pub(super) fn collect(
    hosts: &[String],
    command: &RemoteCommand,
    args: &CollectArgs,
    archive: &mut Archive,
) -> Result<(), Failure> {
    let mut answers: HashMap<&str, Result<File, String>> = HashMap::new();
    let mut waiting = hosts.iter();
    let mut running: Vec<Running> = Vec::new();
    let meter = Meter::new("asking", "hosts");
    loop {
        meter.show(answers.len(), hosts.len());
        while running.len() < args.jobs.get() {
            let Some(host) = waiting.next() else { break };
            match start(host, command, args.timeout) {
                Ok(started) => running.push(started),
                Err(error) => {
                    let text = format!("cannot start {:?}: {error}", command.words[0]);
                    answers.insert(host, Err(text));
                }
            }
        }
        if running.is_empty() {
            break;
        }
        let mut still_running = Vec::new();
        for mut command in running {
            match command.poll() {
                None => still_running.push(command),
                Some(answer) => {
                    let host = hosts.iter().find(|host| **host == command.host);
                    if let Some(host) = host {
                        answers.insert(host, answer.map(|()| command.stdout));
                    }
                }
            }
        }
        running = still_running;
        if !running.is_empty() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
    drop(meter);
    // Merge in the order of the list, so the archive does not depend on the order of the answers.
    let meter = Meter::new("merging", "archives");
    for (done, host) in hosts.iter().enumerate() {
        meter.show(done, hosts.len());
        let merged = match answers.remove(host.as_str()) {
            Some(Ok(answer)) => merge(host, answer, archive)?,
            Some(Err(reason)) => Err(reason),
            None => Err("its command was not started".to_owned()),
        };
        if let Err(reason) = merged {
            archive.add_absence(Absence::host(host, reason));
        }
    }
    Ok(())
}

/// Starts the command. Its output goes to unnamed files, so it never blocks on a pipe.
fn start(host: &str, command: &RemoteCommand, timeout: Duration) -> io::Result<Running> {
    let (stdout, stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let words = command.for_host(host);
    let child = std::process::Command::new(&words[0])
        .args(&words[1..])
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        // In its own process group, it can be killed with its children at the deadline.
        .process_group(0)
        .spawn()?;
    Ok(Running {
        host: host.to_owned(),
        child,
        stdout,
        stderr,
        deadline: Instant::now() + timeout,
    })
}

impl Running {
    /// `None` while the command runs; then its success, or the reason for its failure. Kills a command that has reached
    /// its deadline or prints too much.
    fn poll(&mut self) -> Option<Result<(), String>> {
        match self.child.try_wait() {
            Err(error) => Some(Err(format!("cannot wait for its command: {error}"))),
            Ok(Some(status)) if status.success() => Some(Ok(())),
            // Exit code 1 means an archive that lists absences: merge it with them.
            Ok(Some(status)) if status.code() == Some(1) && self.printed() > 0 => Some(Ok(())),
            Ok(Some(status)) => Some(Err(format!("{status}{}", self.format_last_error()))),
            Ok(None) if Instant::now() >= self.deadline => {
                self.end();
                Some(Err(format!(
                    "no answer in time{}",
                    self.format_last_error()
                )))
            }
            Ok(None) if self.printed() > MAX_ANSWER => {
                self.end();
                Some(Err("it sent more than 16 GiB".to_owned()))
            }
            Ok(None) => None,
        }
    }

    /// The number of bytes that the command has printed.
    fn printed(&self) -> u64 {
        self.stdout.metadata().map_or(0, |meta| meta.len())
    }

    /// Kills the command with its children.
    fn end(&mut self) {
        let group = i32::try_from(self.child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        if let Some(group) = group {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The last line in the first 64 KiB of the command's standard error, after a colon; empty if there is none.
    fn format_last_error(&mut self) -> String {
        let mut text = Vec::new();
        let read = self
            .stderr
            .rewind()
            .and_then(|()| (&self.stderr).take(64 << 10).read_to_end(&mut text));
        let text = String::from_utf8_lossy(&text);
        match (read, text.lines().rfind(|line| !line.trim().is_empty())) {
            (Ok(_), Some(line)) => format!(": {}", line.trim()),
            _ => String::new(),
        }
    }
}

/// Adds the members of a host's archive. The outer error is a failure to write the archive, the inner one a fault of
/// the host's archive.
fn merge(
    host: &str,
    mut answer: File,
    archive: &mut Archive,
) -> Result<Result<(), String>, Failure> {
    if let Err(error) = answer.rewind() {
        return Ok(Err(error.to_string()));
    }
    let mut tar = tar::Archive::new(io::BufReader::new(answer));
    let mut manifest = None;
    let entries = match tar.entries() {
        Ok(entries) => entries,
        Err(error) => return Ok(Err(format!("its answer is no archive: {error}"))),
    };
    for (members, entry) in entries.enumerate() {
        let member = entry.and_then(|mut entry| {
            let path = entry.path()?.into_owned();
            let mut content = Vec::new();
            if entry.header().entry_type().is_file() {
                (&mut entry)
                    .take(MAX_MEMBER + 1)
                    .read_to_end(&mut content)?;
            }
            let modified = entry.header().mtime().unwrap_or(0);
            Ok((path, entry.header().entry_type(), modified, content))
        });
        let (path, kind, modified, content) = match member {
            Ok(member) => member,
            Err(error) if members == 0 => {
                return Ok(Err(format!("its answer is no archive: {error}")));
            }
            Err(error) => return Ok(Err(format!("its archive is cut short: {error}"))),
        };
        if path == Path::new(MANIFEST) {
            manifest = serde_json::from_slice::<Manifest>(&content).ok();
        } else if kind.is_file() {
            if content.len() as u64 > MAX_MEMBER {
                let reason = "it is larger than 1 GiB".to_owned();
                archive.add_absence(Absence::path(host, &path.display().to_string(), reason));
                continue;
            }
            archive.add(host, &without_host(&path), modified, &content)?;
        }
    }
    let Some(manifest) = manifest else {
        return Ok(Err(
            "its archive has no manifest: it may be incomplete".to_owned()
        ));
    };
    // Absent ranks are found over all hosts, not for one.
    let absent = manifest.absent.into_iter();
    for absence in absent.filter(|absence| absence.rank.is_none()) {
        archive.add_absence(Absence {
            host: host.to_owned(),
            ..absence
        });
    }
    archive.count_left_out(manifest.left_out);
    Ok(Ok(()))
}

/// The path of a member without the host's own name for itself, which the name given by the user replaces.
fn without_host(path: &Path) -> PathBuf {
    path.components().skip(1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_texts_with_other_characters_are_no_host_names() {
        for good in [
            "n001",
            "user@n001.cluster",
            "10.0.0.7",
            "[fe80::1%eth0]",
            "pod/worker-3",
        ] {
            assert!(is_host_name(good), "{good}");
        }
        for bad in ["-oProxyCommand=x", "", "a b", "n1;rm", "$(x)", "@n1"] {
            assert!(!is_host_name(bad), "{bad}");
        }
    }
}
