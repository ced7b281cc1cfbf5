//! Reads the manifest that `rcomm-fr collect` writes into an archive: what is absent, and how many ranks the job has.
//! [`Absence`] is also the form in which that program writes it.

use rcomm_verdict::format::{count, format_ranks};
use serde::{Deserialize, Serialize};

/// At most this many processes are listed for the ranks that are absent for one reason.
const MOST_PROCESSES: usize = 8;

#[derive(Deserialize)]
pub(super) struct Manifest {
    schema: String,
    /// The number of ranks of the job; absent if it was not known.
    pub(super) world_size: Option<u32>,
    #[serde(default)]
    pub(super) absent: Vec<Absence>,
}

/// A file, folder, host or rank that is not in an archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absence {
    /// The host where it was expected; empty if unknown.
    pub host: String,
    /// The file or folder; empty for a host or a rank.
    #[serde(default)]
    pub path: String,
    /// The rank without a record, if a rank is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Why it is absent.
    pub reason: String,
}

impl Manifest {
    /// Reads a manifest; `None` for any other text.
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let manifest: Self = serde_json::from_slice(text).ok()?;
        manifest
            .schema
            .starts_with("rcomm.capture/")
            .then_some(manifest)
    }
}

impl Absence {
    /// A host without an archive.
    pub fn host(host: &str, reason: String) -> Self {
        Self::path(host, "", reason)
    }

    /// A file or folder that is not there, cannot be read, or holds nothing to take.
    pub fn path(host: &str, path: &str, reason: String) -> Self {
        Self {
            host: host.to_owned(),
            path: path.to_owned(),
            rank: None,
            reason,
        }
    }

    /// One sentence for each host and each file that is absent, and then one for each reason for which ranks are
    /// absent. A sentence on ranks also has the states of at most eight of their processes, if their reasons begin with
    /// these.
    pub fn sentences(absent: &[Self]) -> Vec<String> {
        let mut sentences = Vec::new();
        // The reasons in the order of their first rank, with the ranks and the states of their processes.
        let mut by_reason: Vec<(&str, Vec<(u32, &str)>)> = Vec::new();
        for absent in absent {
            let (host, reason) = (&absent.host, absent.reason.as_str());
            match (absent.rank, absent.path.as_str()) {
                (Some(rank), _) => {
                    let (state, reason) = match reason.split_once("; ") {
                        Some((state, rest)) if state.starts_with("process ") => (state, rest),
                        _ => ("", reason),
                    };
                    match by_reason.iter_mut().find(|(known, _)| *known == reason) {
                        Some((_, ranks)) => ranks.push((rank, state)),
                        None => by_reason.push((reason, vec![(rank, state)])),
                    }
                }
                (None, "") => sentences.push(format!("host {host}: {reason}")),
                (None, path) => sentences.push(format!("{path} on {host}: {reason}")),
            }
        }
        let of_ranks = by_reason.into_iter();
        sentences.extend(of_ranks.map(|(reason, ranks)| match ranks[..] {
            [(rank, "")] => format!("rank {rank}: {reason}"),
            [(rank, state)] => format!("rank {rank}: {state}; {reason}"),
            _ => format_several(reason, &ranks),
        }));
        sentences
    }
}

/// The sentence on several ranks that are absent for one reason.
fn format_several(reason: &str, ranks: &[(u32, &str)]) -> String {
    let mut numbers: Vec<u32> = ranks.iter().map(|(rank, _)| *rank).collect();
    numbers.sort_unstable();
    let mut sentence = format!("{}: {reason}", format_ranks(&numbers));
    let states = ranks.iter().filter(|(_, state)| !state.is_empty());
    for (rank, state) in states.clone().take(MOST_PROCESSES) {
        sentence.push_str(&format!("; rank {rank}: {state}"));
    }
    if let Some(rest) = states.count().checked_sub(MOST_PROCESSES + 1) {
        let rest = count(rest as u64 + 1, "more rank");
        sentence.push_str(&format!("; and {rest}"));
    }
    sentence
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_that_several_ranks_have_is_stated_once() {
        let absent = |(rank, reason): (u32, &str)| Absence {
            host: String::new(),
            path: String::new(),
            rank: Some(rank),
            reason: reason.to_owned(),
        };
        let reasons = [
            "process 7 is alive: it sleeps; no worker server; no pipe",
            "process 8 has ended; no worker server; no pipe",
            "process 9 is alive: it runs; no pipe",
            "no record",
            "no record",
        ];
        let absent: Vec<Absence> = (0..).zip(reasons).map(absent).collect();
        assert_eq!(
            Absence::sentences(&absent),
            [
                "ranks 0 and 1: no worker server; no pipe; rank 0: process 7 is alive: it sleeps; rank 1: process 8 \
                 has ended",
                "rank 2: process 9 is alive: it runs; no pipe",
                "ranks 3 and 4: no record",
            ]
        );
    }
}
