//! Reads the JSON form of RAS reports (`SET FORMAT json`, since NCCL 2.28.7).

use super::communicator::{Communicator, Member, MemberState, Process};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct RasDocument {
    communicators: Vec<Comm>,
}

#[derive(Deserialize)]
struct Comm {
    hash: String,
    #[serde(default)]
    size: u32,
    #[serde(default)]
    ranks: Vec<ListedRank>,
    #[serde(default)]
    missing_ranks: Vec<ListedRank>,
}

#[derive(Deserialize)]
struct ListedRank {
    rank: u32,
    #[serde(default)]
    host: String,
    #[serde(default)]
    pid: u32,
    nvml_dev: Option<i64>,
    cuda_dev: Option<i64>,
    #[serde(default)]
    status: BTreeMap<String, Value>,
    #[serde(default)]
    collective_counts: BTreeMap<String, u64>,
}

/// The list of a report that holds a rank.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Listed {
    Present,
    Missing,
}

impl ListedRank {
    /// A flag or a code in the rank's status, where it may be a number or a Boolean; 0 if it is missing.
    fn status(&self, name: &str) -> i64 {
        match self.status.get(name) {
            Some(Value::Bool(flag)) => i64::from(*flag),
            Some(value) => value.as_i64().unwrap_or(0),
            None => 0,
        }
    }

    /// The state of the rank. Of several that apply, the first below counts.
    fn state(&self, listed: Listed) -> MemberState {
        /// NCCL's code for "in progress".
        const IN_PROGRESS: i64 = 7;
        let failed = |code: i64| code != 0 && code != IN_PROGRESS;
        let (init, error) = (self.status("init_state"), self.status("async_error"));
        if self.status("considered_dead") != 0 {
            MemberState::Dead
        } else if self.status("unresponsive") != 0 {
            MemberState::Unresponsive
        } else if listed == Listed::Missing {
            MemberState::Absent
        } else if failed(error) {
            MemberState::Failed(error_name(error))
        } else if failed(init) {
            MemberState::Failed(format!("{} while initializing", error_name(init)))
        } else if self.status("abort_flag") != 0 {
            MemberState::Aborted
        } else if init == IN_PROGRESS {
            MemberState::Initializing
        } else if self.status("finalize_called") != 0 || self.status("destroy_flag") != 0 {
            MemberState::Finalizing
        } else {
            MemberState::Running
        }
    }

    fn member(self, listed: Listed) -> Member {
        // The device's number on the host, even if the process can see only a part of the devices.
        let device = self.nvml_dev.or(self.cuda_dev);
        Member {
            rank: Some(self.rank),
            state: self.state(listed),
            process: Process {
                host: self.host,
                pid: self.pid,
                device: device.and_then(|device| u32::try_from(device).ok()),
            },
            launched: self.collective_counts.into_iter().collect(),
        }
    }
}

/// The words for an NCCL result code (`ncclResult_t`).
fn error_name(code: i64) -> String {
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

/// Whether these bytes look like a RAS report in JSON. Only the first 4 KiB are searched for its keys, since the bytes
/// may be a large dump.
pub(super) fn is_report(bytes: &[u8]) -> bool {
    let head = &bytes[..bytes.len().min(4096)];
    let holds = |key: &[u8]| head.windows(key.len()).any(|part| part == key);
    holds(b"\"nccl_version\"") && holds(b"\"communicators")
}

/// The communicators of a report, or why these bytes are not a report.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<Communicator>, String> {
    let report: RasDocument = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let communicators = report.communicators.into_iter().map(|comm| {
        let present = comm.ranks.into_iter();
        let present = present.map(|rank| rank.member(Listed::Present));
        let missing = comm.missing_ranks.into_iter();
        let missing = missing.map(|rank| rank.member(Listed::Missing));
        let mut members: Vec<Member> = present.chain(missing).collect();
        members.sort_by_key(|member| member.rank);
        Communicator {
            name: comm.hash,
            size: comm.size,
            members,
            others_launched: Vec::new(),
        }
    });
    Ok(communicators.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(status: &str, listed: Listed) -> MemberState {
        let text = format!(r#"{{"rank": 1, "status": {{{status}}}}}"#);
        let ranked: ListedRank =
            serde_json::from_str(&text).expect("the text is a member of a report");
        ranked.state(listed)
    }

    #[test]
    fn an_error_takes_precedence_over_the_abort_that_follows_it() {
        let status = r#""init_state": 0, "async_error": 6, "abort_flag": true"#;
        let failed = MemberState::Failed("remote error".into());
        assert_eq!(state(status, Listed::Present), failed);
        let status = r#""init_state": 0, "async_error": 7, "abort_flag": 1"#;
        assert_eq!(state(status, Listed::Present), MemberState::Aborted);
    }

    #[test]
    fn a_missing_rank_that_answers_is_not_silent() {
        let status = r#""unresponsive": false, "considered_dead": false"#;
        assert_eq!(state(status, Listed::Missing), MemberState::Absent);
        let status = r#""unresponsive": true, "considered_dead": false"#;
        assert_eq!(state(status, Listed::Missing), MemberState::Unresponsive);
    }
}
