//! The communication library's own state of its communicators, apart from what the ranks recorded.

use std::collections::BTreeMap;

/// One communicator, as far as the library reported it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Communicator {
    /// The library's name for it: NCCL's hash. Empty for processes without a communicator.
    pub name: String,
    /// How many ranks it has; 0 if unknown.
    pub size: u32,
    /// Its members: all of them, or those that differ from most.
    pub members: Vec<Member>,
    /// How many operations most members launched, by kind, where only those that differ are listed.
    pub others_launched: Vec<(String, u64)>,
}

/// One member of a communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Rank in the communicator; `None` where only the process is known.
    pub rank: Option<u32>,
    /// The process.
    pub process: Process,
    /// How it does.
    pub state: MemberState,
    /// Operations launched so far, by kind. A launch is no completion.
    pub launched: Vec<(String, u64)>,
}

/// A process as the library knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// Name or address of its host; empty if unknown.
    pub host: String,
    /// Process id; 0 if unknown.
    pub pid: u32,
    /// Its device's number on the host.
    pub device: Option<u32>,
}

/// How a member does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MemberState {
    /// Nothing is wrong, or nothing was reported.
    #[default]
    Running,
    /// It is being set up.
    Initialising,
    /// It is being taken down.
    Finalizing,
    /// It answered, and does not know the communicator: not yet, or no more.
    Absent,
    /// It was aborted, by its own program.
    Aborted,
    /// The library met an error; this is what the library calls it.
    Failed(String),
    /// It did not answer the library's question.
    Unresponsive,
    /// The library gave it up.
    Dead,
}

impl MemberState {
    /// In a word.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Initialising => "initialising",
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
    /// What most members launched.
    pub(crate) others: u64,
}

impl Communicator {
    /// Members that launched fewer operations of a kind than most; where two numbers are equally frequent, the
    /// larger counts.
    pub(crate) fn behind(&self) -> Vec<Behind<'_>> {
        let mut by_kind: BTreeMap<&str, Vec<(&Member, u64)>> = BTreeMap::new();
        for member in &self.members {
            // What a process that does not answer launched is not known.
            if matches!(member.state, MemberState::Dead | MemberState::Unresponsive) {
                continue;
            }
            for (kind, count) in &member.launched {
                by_kind.entry(kind).or_default().push((member, *count));
            }
        }
        let mut found = Vec::new();
        for (kind, counts) in by_kind {
            let told = self.others_launched.iter().find(|(known, _)| known == kind);
            let others = match told {
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

/// The value that most have; the largest of several.
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
