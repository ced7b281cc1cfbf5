//! What a communication library says of its own communicators, beside what the ranks recorded.

/// One communicator, as far as the library told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Communicator {
    /// The library's name for it: NCCL's hash.
    pub name: String,
    /// How many ranks it has; 0 if unknown.
    pub size: u32,
    /// Its members: all of them, or those that stand out.
    pub members: Vec<Member>,
    /// How many operations the other members launched, where only those that stand out are listed.
    pub others_launched: Option<(String, u64)>,
}

/// One member of a communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Rank in the communicator.
    pub rank: u32,
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
    /// Nothing is wrong, or nothing was said.
    #[default]
    Running,
    /// It is being set up.
    Initialising,
    /// It is being taken down.
    Finalizing,
    /// It was aborted.
    Aborted,
    /// The library met an error of this code.
    Failed(i64),
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
            Self::Aborted => "aborted",
            Self::Failed(_) => "failed",
            Self::Unresponsive => "unresponsive",
            Self::Dead => "dead",
        }
    }
}
