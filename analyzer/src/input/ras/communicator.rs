//! The state of communicators as NCCL itself reports it.

use std::collections::BTreeMap;

/// One communicator as NCCL reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Communicator {
    /// The hash by which NCCL names the communicator; empty for processes without a communicator.
    pub name: String,
    /// The number of ranks; 0 if unknown.
    pub size: u32,
    /// The members. A report in text form lists only some of them: those with other counts than most, with a fault, or
    /// missing.
    pub members: Vec<Member>,
    /// The number of operations that most members launched, by kind, if the report lists only some of the members.
    pub others_launched: Vec<(String, u64)>,
}

/// One member of a communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Rank in the communicator; `None` if only the process is known.
    pub rank: Option<u32>,
    /// The process.
    pub process: Process,
    /// The state of the member.
    pub state: MemberState,
    /// The number of operations launched so far, by kind. A launched operation may not have completed.
    pub launched: Vec<(String, u64)>,
}

/// A process as NCCL identifies it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// Name or address of the host; empty if unknown.
    pub host: String,
    /// Process id; 0 if unknown.
    pub pid: u32,
    /// The number of the process's device on the host; `None` if unknown.
    pub device: Option<u32>,
}

/// The state of a member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MemberState {
    /// No fault was reported.
    #[default]
    Running,
    /// The member is initializing the communicator.
    Initializing,
    /// The member is finalizing the communicator.
    Finalizing,
    /// The member answered, but does not know the communicator yet or any more.
    Absent,
    /// The member's program aborted the communicator.
    Aborted,
    /// NCCL reported this error.
    Failed(String),
    /// The member did not answer NCCL.
    Unresponsive,
    /// NCCL considers the member dead: the RAS network has not reached it for a minute.
    Dead,
}

impl MemberState {
    /// The name of the state.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Initializing => "initializing",
            Self::Finalizing => "finalizing",
            Self::Absent => "absent",
            Self::Aborted => "aborted",
            Self::Failed(_) => "failed",
            Self::Unresponsive => "unresponsive",
            Self::Dead => "dead",
        }
    }
}

/// A member that launched fewer operations of a kind than most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Behind<'a> {
    pub(crate) member: &'a Member,
    pub(crate) kind: &'a str,
    pub(crate) launched: u64,
    /// The number that most members launched.
    pub(crate) others: u64,
}

impl Communicator {
    /// The members that launched fewer operations of a kind than most, without those that are dead or do not answer. If
    /// two numbers are equally frequent, the larger one counts.
    pub(crate) fn behind(&self) -> Vec<Behind<'_>> {
        let mut by_kind: BTreeMap<&str, Vec<(&Member, u64)>> = BTreeMap::new();
        for member in &self.members {
            // The counts of a process that does not answer are unknown.
            if matches!(member.state, MemberState::Dead | MemberState::Unresponsive) {
                continue;
            }
            for (kind, count) in &member.launched {
                by_kind.entry(kind).or_default().push((member, *count));
            }
        }
        let mut found = Vec::new();
        for (kind, counts) in by_kind {
            let listed = self.others_launched.iter().find(|(known, _)| known == kind);
            let others = match listed {
                Some(&(_, count)) => count,
                None => most_frequent(counts.iter().map(|&(_, count)| count)),
            };
            let late = counts.into_iter().filter(|&(_, count)| count < others);
            found.extend(late.map(|(member, launched)| Behind {
                member,
                kind,
                launched,
                others,
            }));
        }
        found
    }
}

/// The most frequent value; in a tie, the largest; 0 if there are none.
fn most_frequent(values: impl Iterator<Item = u64>) -> u64 {
    let mut frequency: BTreeMap<u64, usize> = BTreeMap::new();
    for value in values {
        *frequency.entry(value).or_default() += 1;
    }
    let most = frequency
        .into_iter()
        .max_by_key(|&(value, count)| (count, value));
    most.map_or(0, |(value, _)| value)
}
