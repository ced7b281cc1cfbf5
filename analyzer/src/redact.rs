//! [`Redactor`]: pseudonyms in place of paths, hosts, addresses, users, the names of threads and the program's own
//! frames, so that a report or an archive can be shown to others.
//!
//! A redactor always gives a name the same pseudonym, so that a report can still be understood: what was on one host,
//! in one file or at one line, still is. Pseudonyms are keyed hashes; the key is random and is stored nowhere, so a
//! reader cannot find a name by trying names. Names of groups, operations, jobs and phases, ranks, times and sizes
//! stay, and so do the frames of packages and of the standard libraries, which everyone has.

use crate::load::LoadedDump;
use rcomm_recorder::model::{Frame, RankStatus, text};
use rcomm_recorder::publish::{Dump, LaunchRecord, Secret};
use rcomm_verdict::Problem;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};

/// Folders of packages: what follows them in a path says nothing about its user.
const PACKAGES: [&str; 3] = ["/site-packages/", "/dist-packages/", "/rustc/"];
/// The folder of Python's own modules, without the version that ends its name.
const PYTHON: &str = "/lib/python";

/// Where the folder of a package begins in a path; `None` if the path has none.
fn start_of_package(path: &str) -> Option<usize> {
    let is_version = |start: &usize| {
        let after = path[start + PYTHON.len()..].split('/').next();
        after.is_some_and(|version| {
            !version.is_empty() && version.chars().all(|c| c.is_ascii_digit() || c == '.')
        })
    };
    let packages = PACKAGES.iter().filter_map(|folder| path.find(folder));
    let python = path.match_indices(PYTHON).map(|(start, _)| start);
    packages.chain(python.filter(is_version)).min()
}

/// Replaces names with pseudonyms.
///
/// # Thread safety
/// A redactor may be shared between threads.
#[derive(Debug)]
pub struct Redactor {
    key: Secret,
    /// The hosts that are known; they are replaced in texts as well.
    hosts: Mutex<BTreeSet<String>>,
}

impl Redactor {
    /// A redactor with a new key.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn new() -> std::io::Result<Self> {
        let key = Secret::generate().map_err(std::io::Error::other)?;
        Ok(Self {
            key,
            hosts: Mutex::default(),
        })
    }

    /// Learns the hosts that a record names, so that they are replaced in the texts of every record. Pass all records
    /// before the first one is changed.
    pub fn learn(&self, dump: &Dump) {
        self.learn_host(&dump.identity.host);
        self.learn_from(&dump.identity.reason);
        if let Some(status) = &dump.status {
            self.learn_from(&status.phase);
        }
        for failure in &dump.failures {
            self.learn_from(&failure.text);
        }
        let facts = dump.nccl_comm_state.iter().flat_map(|(_, facts)| facts);
        for (_, value) in facts {
            self.learn_from(value);
        }
    }

    /// Learns the host that a launcher's record names, see [`learn`](Self::learn).
    pub fn learn_launch(&self, launch: &LaunchRecord) {
        self.learn_host(&launch.host);
    }

    /// Learns a host's name, in full and without its domain; an empty name is ignored.
    pub fn learn_host(&self, host: &str) {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        for name in [host, first_label(host)] {
            if !name.is_empty() && !hosts.contains(name) {
                hosts.insert(name.to_owned());
            }
        }
    }

    /// Learns the hosts that a sentence names in one of these forms: "at NAME port N", "to NAME port N", and "name NAME
    /// of the store".
    pub fn learn_from(&self, text: &str) {
        let words: Vec<&str> = text
            .split(|c: char| !is_part(c))
            .map(|word| word.trim_end_matches([':', '.']))
            .filter(|word| !word.is_empty())
            .collect();
        let is_number = |word: &str| word.parse::<u16>().is_ok();
        for (index, &word) in words.iter().enumerate() {
            let after = |distance: usize| words.get(index + distance).copied().unwrap_or_default();
            let before = index.checked_sub(1).map_or("", |index| words[index]);
            let has_port =
                ["at", "to"].contains(&before) && after(1) == "port" && is_number(after(2));
            let is_store =
                before == "name" && [after(1), after(2), after(3)] == ["of", "the", "store"];
            if (has_port || is_store) && is_host_name(word) {
                self.learn_host(word);
            }
        }
    }

    /// Replaces the names in a record and its path.
    pub fn record(&self, loaded: &mut LoadedDump) {
        loaded.path = self.path(&loaded.path);
        self.dump(&mut loaded.dump);
    }

    /// Replaces the names in a dump.
    pub fn dump(&self, dump: &mut Dump) {
        dump.identity.host = self.host(&dump.identity.host);
        dump.identity.reason = self.text(&dump.identity.reason);
        for frame in &mut dump.frames {
            self.frame(frame);
        }
        for thread in &mut dump.threads {
            thread.name = self.name("thread", &thread.name);
        }
        if let Some(raised) = raised(dump) {
            *raised = self.text(raised);
        }
        for failure in &mut dump.failures {
            failure.text = self.text(&failure.text);
        }
        let facts = dump.nccl_comm_state.iter_mut();
        for (_, value) in facts.flat_map(|(_, facts)| facts) {
            *value = self.text(value);
        }
    }

    /// Replaces the names in a launcher's record.
    pub fn launch(&self, launch: &mut LaunchRecord) {
        launch.host = self.host(&launch.host);
    }

    /// Replaces the names in a problem.
    pub fn problem(&self, problem: Problem) -> Problem {
        Problem {
            path: self.path(&problem.path),
            sentence: self.text(&problem.sentence),
            more_paths: problem
                .more_paths
                .iter()
                .map(|path| self.path(path))
                .collect(),
            ..problem
        }
    }

    /// The pseudonym of a host, which is learned, too; empty if the name is.
    pub fn host(&self, host: &str) -> String {
        self.learn_host(host);
        self.name("host", host)
    }

    /// The pseudonym of a path, with the file's extension; of an archive's member, those of both, separated by a colon.
    pub fn path(&self, path: &str) -> String {
        let parts: Vec<String> = path.split(':').map(|part| self.file(part)).collect();
        parts.join(":")
    }

    /// The pseudonym of a path without colons, with the file's extension if that is at most eight letters.
    fn file(&self, path: &str) -> String {
        let is_kept = |extension: &&str| {
            extension.len() <= 8 && extension.chars().all(|c| c.is_ascii_alphabetic())
        };
        let file = path.rsplit('/').next().unwrap_or(path);
        // All of a hidden file's name is behind its first dot.
        let parts = file.rsplit_once('.').filter(|(stem, _)| !stem.is_empty());
        let extension = parts.map(|(_, extension)| extension);
        let name = self.name("file", path);
        match extension.filter(is_kept) {
            Some(extension) if !name.is_empty() => format!("{name}.{extension}"),
            _ => name,
        }
    }

    /// Replaces the names in a frame of the user, and removes what is before the package in the path of any other.
    fn frame(&self, frame: &mut Frame) {
        match start_of_package(&frame.filename) {
            Some(start) => frame.filename.replace_range(..=start, ""),
            None => {
                frame.filename = self.path(&frame.filename);
                frame.name = self.name("function", &frame.name);
            }
        }
    }

    /// Replaces in a sentence what looks like a path, an address, or a host with a port, and also the hosts that are
    /// known by now, with the users before them (`user@host`).
    pub fn text(&self, text: &str) -> String {
        self.learn_from(text);
        let hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let mut redacted = String::with_capacity(text.len());
        let mut rest = text;
        while !rest.is_empty() {
            let between = rest.find(is_part).unwrap_or(rest.len());
            redacted.push_str(&rest[..between]);
            rest = &rest[between..];
            let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            let (token, after) = rest.split_at(end);
            rest = after;
            // Punctuation at the end of a clause is no part of a name.
            let name = token.trim_end_matches([':', '.']);
            match self.pseudonym(name, &hosts) {
                Some(pseudonym) => redacted.push_str(&pseudonym),
                None => redacted.push_str(name),
            }
            redacted.push_str(&token[name.len()..]);
        }
        redacted
    }

    /// The pseudonym of a part of a sentence; `None` if it is an ordinary word.
    fn pseudonym(&self, token: &str, hosts: &BTreeSet<String>) -> Option<String> {
        let is_known = |name: &str| hosts.contains(name) || hosts.contains(first_label(name));
        if is_known(token) {
            return Some(self.name("host", token));
        }
        if let Some((user, host)) = token.split_once('@')
            && is_known(host)
        {
            return Some(format!(
                "{}@{}",
                self.name("user", user),
                self.name("host", host)
            ));
        }
        if let Some((host, port)) = token.rsplit_once(':')
            && port.parse::<u16>().is_ok()
            && (is_known(host) || looks_like_host(host))
        {
            return Some(format!("{}:{port}", self.name("host", host)));
        }
        if let Ok(address) = token.parse::<SocketAddr>() {
            let host = self.name("address", &address.ip().to_string());
            return Some(format!("{host}:{}", address.port()));
        }
        if token.parse::<IpAddr>().is_ok() {
            return Some(self.name("address", token));
        }
        let is_path = token.starts_with('/') || token.starts_with("~/") || token.contains("./");
        (is_path && token.len() > 1).then(|| self.path(token))
    }

    /// The pseudonym of a name of this kind; empty if the name is.
    fn name(&self, kind: &str, name: &str) -> String {
        if name.is_empty() {
            return String::new();
        }
        let tag = self.key.tag(&[kind.as_bytes(), b"\0", name.as_bytes()]);
        format!("{kind}-{}", text::hex(&tag[..4]))
    }
}

/// What a record states in place of the program's phase after an exception, with the exception's text; `None` if the
/// phase is one that the program named.
fn raised(dump: &mut Dump) -> Option<&mut String> {
    let phase = &mut dump.status.as_mut()?.phase;
    phase.starts_with(RankStatus::RAISED).then_some(phase)
}

/// Whether a character may be a part of a path, an address or a host's name.
fn is_part(c: char) -> bool {
    c.is_alphanumeric() || "._-:/%~+@[]".contains(c)
}

/// The name of a host within its domain: all of it if it has none. Empty for an address.
fn first_label(host: &str) -> &str {
    match host.parse::<IpAddr>() {
        Ok(_) => "",
        Err(_) => host.split('.').next().unwrap_or(host),
    }
}

/// Whether a word has the form of a host's name and is none of the words that sentences have instead of a name.
fn is_host_name(word: &str) -> bool {
    const ORDINARY_WORDS: [&str; 6] = ["the", "a", "this", "that", "its", "localhost"];
    word.contains(|c: char| c.is_alphabetic())
        && word
            .chars()
            .all(|c| c.is_alphanumeric() || "._-".contains(c))
        && !ORDINARY_WORDS.contains(&word)
}

/// Whether a word before a colon and a port counts as the name of a host: it has a digit, a hyphen or a dot. A name
/// with a common extension is that of a file.
fn looks_like_host(word: &str) -> bool {
    let is_digit_or_mark = |c: char| c.is_ascii_digit() || c == '-' || c == '.';
    let is_file = [".py", ".rs", ".cpp", ".c", ".h", ".cu", ".json"]
        .iter()
        .any(|extension| word.ends_with(extension));
    is_host_name(word) && word.contains(is_digit_or_mark) && !is_file
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::{Failure, FailureKind};

    #[test]
    fn a_name_has_one_pseudonym_and_another_redactor_has_another() {
        let redactor = Redactor::new().unwrap();
        let pseudonym = redactor.host("gpu-17");
        assert_eq!(redactor.host("gpu-17"), pseudonym);
        assert_ne!(redactor.host("gpu-18"), pseudonym);
        assert_ne!(Redactor::new().unwrap().host("gpu-17"), pseudonym);
        assert_eq!(redactor.host(""), "");
        let path = redactor.path("/home/ann/dumps.tar:rank_3.json");
        assert!(path.ends_with(".json") && path.contains(".tar:"), "{path}");
        assert!(!path.contains("ann") && !path.contains("rank"), "{path}");
        let hidden = redactor.path("/home/x/.annsmith");
        assert!(!hidden.contains("ann"), "{hidden}");
    }

    #[test]
    fn only_folders_of_python_with_a_version_are_those_of_packages() {
        assert_eq!(start_of_package("/usr/lib/python3.12/abc.py"), Some(4));
        assert_eq!(
            start_of_package("/usr/lib/python3/dist-packages/a.py"),
            Some(4)
        );
        assert_eq!(start_of_package("/home/x/lib/python-secret/a.py"), None);
        assert_eq!(start_of_package("/home/x/lib/python"), None);
    }

    #[test]
    fn paths_addresses_and_known_hosts_in_sentences_are_replaced() {
        let redactor = Redactor::new().unwrap();
        let host = redactor.host("gpu-17");
        let text = "rank 2 on gpu-17 (10.0.0.7:29500, fe80::1) cannot open /home/zoe/a.json: 3 of 4, in step 1.5";
        let redacted = redactor.text(text);
        for secret in ["gpu-17", "10.0.0.7", "fe80", "zoe"] {
            assert!(!redacted.contains(secret), "{redacted}");
        }
        assert!(
            redacted.starts_with(&format!("rank 2 on {host} (address-")),
            "{redacted}"
        );
        assert!(
            redacted.ends_with(".json: 3 of 4, in step 1.5"),
            "{redacted}"
        );
        assert!(redacted.contains(":29500, address-"), "{redacted}");
    }

    #[test]
    fn hosts_that_only_sentences_or_later_records_name_are_replaced() {
        let redactor = Redactor::new().unwrap();
        let dump = |host: &str, text: &str| {
            let mut dump = Dump::default();
            dump.identity.host = host.to_owned();
            let failure = Failure::new(FailureKind::Backend, &[], 0, text);
            dump.failures.push(failure);
            dump
        };
        let mut dumps = [
            dump("", "rank 3 on node7 and on zoe@node7 did not answer"),
            dump("node7.example.org", "lost node7.example.org, not rank 7"),
            dump(
                "",
                "the store at master port 29500 did not answer: is master up?",
            ),
            dump(
                "",
                "the name \"head-1\" of the store has no address; head-1 is gone",
            ),
            dump("", "cannot reach gpu-9:29500 at step 3:4, train.py:12"),
        ];
        for dump in &dumps {
            redactor.learn(dump);
        }
        for dump in &mut dumps {
            redactor.dump(dump);
        }
        let texts: Vec<&str> = dumps.iter().map(|dump| &*dump.failures[0].text).collect();
        for secret in ["node7", "zoe", "example", "master", "head-1", "gpu-9"] {
            assert!(texts.iter().all(|text| !text.contains(secret)), "{texts:?}");
        }
        assert!(texts[1].ends_with(", not rank 7"), "{texts:?}");
        assert!(texts[2].starts_with("the store at host-"), "{texts:?}");
        assert!(
            texts[4].ends_with(":29500 at step 3:4, train.py:12"),
            "{texts:?}"
        );
    }

    #[test]
    fn the_text_of_an_exception_is_redacted_and_the_name_of_a_phase_is_not() {
        let redacted = |phase: &str| {
            let redactor = Redactor::new().unwrap();
            let status = RankStatus {
                phase: phase.to_owned(),
                ..RankStatus::default()
            };
            let mut dump = Dump {
                status: Some(status),
                ..Dump::default()
            };
            dump.identity.host = "gpu-17".to_owned();
            redactor.learn(&dump);
            redactor.dump(&mut dump);
            dump.status.unwrap().phase
        };
        let raised = redacted("raised OSError: gpu-17 cannot read /home/zoe/data.bin");
        assert!(raised.starts_with("raised OSError: host-"), "{raised}");
        assert!(raised.ends_with(".bin"), "{raised}");
        assert!(!raised.contains("zoe"), "{raised}");
        assert_eq!(redacted("load /data"), "load /data");
    }

    #[test]
    fn frames_of_packages_stay_and_those_of_the_user_do_not() {
        let redactor = Redactor::new().unwrap();
        let frame = |name: &str, filename: &str| {
            let mut frame = Frame {
                name: name.to_owned(),
                filename: filename.to_owned(),
                line: 7,
            };
            redactor.frame(&mut frame);
            frame
        };
        let of_user = frame("secret_step", "/home/ann/secret/train.py");
        assert!(of_user.name.starts_with("function-") && of_user.filename.ends_with(".py"));
        assert_eq!(of_user.line, 7);
        let path = "/home/ann/env/lib/python3.12/site-packages/torch/distributed/c10d.py";
        let package = frame("all_reduce", path);
        assert_eq!(package.name, "all_reduce");
        assert_eq!(
            package.filename,
            "lib/python3.12/site-packages/torch/distributed/c10d.py"
        );
    }
}
