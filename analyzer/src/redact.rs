//! [`Redactor`]: pseudonyms in place of paths, hosts and frames, so that a report or an archive can be shown to others.
//!
//! A redactor always gives a name the same pseudonym, so that a report can still be understood: what was on one host,
//! in one file or at one line still is. Pseudonyms are keyed hashes; the key is random and is stored nowhere, so a
//! reader cannot find a name by trying names. Names of groups, operations, jobs and phases, ranks, times and sizes
//! stay, and so do the frames of packages and of the standard libraries, which everyone has.

use crate::load::LoadedDump;
use rcomm_recorder::model::{Frame, text};
use rcomm_recorder::publish::{Dump, LaunchRecord, Secret};
use rcomm_verdict::Problem;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};

/// Folders of packages: what follows them in a path says nothing about its user.
const PACKAGES: [&str; 4] = [
    "/site-packages/",
    "/dist-packages/",
    "/lib/python",
    "/rustc/",
];

/// Replaces names by pseudonyms.
///
/// # Thread safety
/// It may be shared between threads.
#[derive(Debug)]
pub struct Redactor {
    key: Secret,
    /// The hosts that were replaced, which are replaced in later texts too.
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

    /// The pseudonym of a host; empty if it has no name.
    pub fn host(&self, host: &str) -> String {
        if !host.is_empty() {
            let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
            if !hosts.contains(host) {
                hosts.insert(host.to_owned());
            }
        }
        self.name("host", host)
    }

    /// The pseudonym of a path, with the file's extension; of an archive's member, those of both, separated by a colon.
    pub fn path(&self, path: &str) -> String {
        let parts: Vec<String> = path.split(':').map(|part| self.file(part)).collect();
        parts.join(":")
    }

    fn file(&self, path: &str) -> String {
        let plain = |kind: &&str| kind.len() <= 8 && kind.chars().all(|c| c.is_ascii_alphabetic());
        let file = path.rsplit('/').next().unwrap_or(path);
        let kind = file.rsplit_once('.').map(|(_, kind)| kind).filter(plain);
        let name = self.name("file", path);
        match kind {
            Some(kind) if !name.is_empty() => format!("{name}.{kind}"),
            _ => name,
        }
    }

    fn frame(&self, frame: &mut Frame) {
        let package = PACKAGES
            .iter()
            .filter_map(|folder| frame.filename.find(folder))
            .min();
        match package {
            Some(at) => frame.filename.replace_range(..=at, ""),
            None => {
                frame.filename = self.path(&frame.filename);
                frame.name = self.name("function", &frame.name);
            }
        }
    }

    /// Replaces what looks like a path or an address in a sentence, and the hosts that were replaced before.
    pub fn text(&self, text: &str) -> String {
        let hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let is_part = |c: char| c.is_alphanumeric() || "._-:/%~+@[]".contains(c);
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
        if hosts.contains(token) {
            return Some(self.name("host", token));
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

    fn name(&self, kind: &str, name: &str) -> String {
        if name.is_empty() {
            return String::new();
        }
        let tag = self.key.tag(&[kind.as_bytes(), b"\0", name.as_bytes()]);
        format!("{kind}-{}", text::hex(&tag[..4]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_pseudonym_and_another_redactor_has_another() {
        let one = Redactor::new().unwrap();
        assert_eq!(one.host("gpu-17"), one.host("gpu-17"));
        assert_ne!(one.host("gpu-17"), one.host("gpu-18"));
        assert_ne!(one.host("gpu-17"), Redactor::new().unwrap().host("gpu-17"));
        assert_eq!(one.host(""), "");
        let path = one.path("/home/ann/dumps.tar:rank_3.json");
        assert!(path.ends_with(".json") && path.contains(".tar:"), "{path}");
        assert!(!path.contains("ann") && !path.contains("rank"), "{path}");
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
