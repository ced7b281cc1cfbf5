//! The JSON form (`SET FORMAT json`, since NCCL 2.28.7).

use super::{Fact, RasReport, What, Who};
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Whole {
    #[serde(rename = "nccl_version")]
    _nccl_version: serde_json::Value,
    communicators: Vec<Communicator>,
}

#[derive(Deserialize)]
struct Communicator {
    #[serde(default)]
    size: u32,
    #[serde(default)]
    ranks: Vec<Member>,
    #[serde(default)]
    missing_ranks: Vec<Member>,
}

#[derive(Deserialize)]
struct Member {
    rank: u32,
    #[serde(default)]
    host: String,
    #[serde(default)]
    pid: u32,
    cuda_dev: Option<i64>,
    #[serde(default)]
    status: Status,
    #[serde(default)]
    collective_counts: BTreeMap<String, u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    init_state: i64,
    async_error: i64,
    unresponsive: bool,
    considered_dead: bool,
}

/// `ncclInProgress`: not an error.
const IN_PROGRESS: i64 = 7;

pub(super) fn parse(bytes: &[u8]) -> Option<RasReport> {
    // Only the keys at the top tell such a report from a dump, and a dump may be large.
    let head = &bytes[..bytes.len().min(4096)];
    let holds = |key: &[u8]| head.windows(key.len()).any(|part| part == key);
    if !holds(b"\"nccl_version\"") || !holds(b"\"communicators") {
        return None;
    }
    let whole: Whole = serde_json::from_slice(bytes).ok()?;
    let mut facts = Vec::new();
    for communicator in &whole.communicators {
        for member in &communicator.missing_ranks {
            let what = match &member.status {
                status if status.considered_dead => What::Dead,
                status if status.unresponsive => What::Unresponsive,
                // Answered, and does not know this communicator (yet, or any more).
                _ => continue,
            };
            facts.push(communicator.fact(member, what));
        }
        for member in &communicator.ranks {
            let status = &member.status;
            for (when, code) in [
                ("initializing", status.init_state),
                ("later", status.async_error),
            ] {
                if code != 0 && code != IN_PROGRESS {
                    let error = format!("{} ({when})", name(code));
                    facts.push(communicator.fact(member, What::Error(error)));
                }
            }
        }
        communicator.find_behind(&mut facts);
    }
    Some(RasReport { facts })
}

impl Communicator {
    fn fact(&self, member: &Member, what: What) -> Fact {
        Fact {
            who: Who {
                host: member.host.clone(),
                pid: member.pid,
                device: member
                    .cuda_dev
                    .map(|dev| dev.to_string())
                    .unwrap_or_default(),
                rank: Some((member.rank, self.size)),
            },
            what,
        }
    }

    /// Members that launched fewer operations of a function than most.
    fn find_behind(&self, facts: &mut Vec<Fact>) {
        let mut functions: Vec<&String> = Vec::new();
        for member in &self.ranks {
            functions.extend(member.collective_counts.keys());
        }
        functions.sort_unstable();
        functions.dedup();
        for function in functions {
            let count = |member: &Member| member.collective_counts.get(function).copied();
            let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
            for launched in self.ranks.iter().filter_map(count) {
                *votes.entry(launched).or_default() += 1;
            }
            let most = votes
                .iter()
                .max_by_key(|&(launched, votes)| (*votes, *launched));
            let Some((&others, &agree)) = most else {
                continue;
            };
            // Two halves that differ blame nobody.
            if agree * 2 <= self.ranks.len() {
                continue;
            }
            for member in &self.ranks {
                if let Some(launched) = count(member)
                    && launched < others
                {
                    let function = function.clone();
                    let what = What::Behind {
                        function,
                        launched,
                        others,
                    };
                    facts.push(self.fact(member, what));
                }
            }
        }
    }
}

/// NCCL's result codes, as its documentation names them.
fn name(code: i64) -> String {
    let known = match code {
        1 => "unhandled CUDA error",
        2 => "unhandled system error",
        3 => "internal error",
        4 => "invalid argument",
        5 => "invalid usage",
        6 => "remote error",
        _ => return format!("NCCL error {code}"),
    };
    known.to_owned()
}
