//! The report as JSON.

use crate::source::communicator::{Communicator, Member, MemberState, Process};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Report {
    communicators: Vec<Comm>,
}

#[derive(Deserialize)]
struct Comm {
    hash: String,
    #[serde(default)]
    size: u32,
    #[serde(default)]
    ranks: Vec<Ranked>,
    #[serde(default)]
    missing_ranks: Vec<Ranked>,
}

#[derive(Deserialize)]
struct Ranked {
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

impl Ranked {
    /// A flag or a code of its status, written as a number or as a truth.
    fn status(&self, name: &str) -> i64 {
        match self.status.get(name) {
            Some(Value::Bool(flag)) => i64::from(*flag),
            Some(value) => value.as_i64().unwrap_or(0),
            None => 0,
        }
    }

    fn state(&self, missing: bool) -> MemberState {
        /// NCCL's code for "still at it".
        const IN_PROGRESS: i64 = 7;
        let (init, error) = (self.status("init_state"), self.status("async_error"));
        if self.status("considered_dead") != 0 {
            MemberState::Dead
        } else if missing || self.status("unresponsive") != 0 {
            MemberState::Unresponsive
        } else if self.status("abort_flag") != 0 {
            MemberState::Aborted
        } else if error != 0 && error != IN_PROGRESS {
            MemberState::Failed(error)
        } else if init == IN_PROGRESS {
            MemberState::Initialising
        } else if init != 0 {
            MemberState::Failed(init)
        } else if self.status("finalize_called") != 0 || self.status("destroy_flag") != 0 {
            MemberState::Finalizing
        } else {
            MemberState::Running
        }
    }

    fn member(self, missing: bool) -> Member {
        // The number on the host, whatever part of the devices the process was given to see.
        let device = self.nvml_dev.or(self.cuda_dev);
        Member {
            rank: self.rank,
            state: self.state(missing),
            process: Process {
                host: self.host,
                pid: self.pid,
                device: device.and_then(|device| u32::try_from(device).ok()),
            },
            launched: self.collective_counts.into_iter().collect(),
        }
    }
}

pub(super) fn read(bytes: &[u8]) -> Result<Vec<Communicator>, String> {
    let report: Report = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let communicators = report.communicators.into_iter().map(|comm| {
        let ranks = comm.ranks.into_iter().map(|ranked| ranked.member(false));
        let missing = comm.missing_ranks.into_iter();
        let mut members: Vec<Member> = ranks.chain(missing.map(|m| m.member(true))).collect();
        members.sort_by_key(|member| member.rank);
        Communicator {
            name: comm.hash,
            size: comm.size,
            members,
            others_launched: None,
        }
    });
    Ok(communicators.collect())
}
