//! The faults that a test can inject into one rank of a job.

use std::str::FromStr;

/// What the culprit does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It works as the other ranks do: the job is healthy.
    None,
    /// It does not come back from loading data.
    StopJoining,
    /// It is killed (SIGKILL).
    Kill,
    /// It is frozen (SIGSTOP).
    Freeze,
    /// It gives up with an error, and hangs in its own clean-up.
    StickInTeardown,
    /// It shuts its world down and exits, while the others continue.
    Leave,
}

impl Fault {
    /// Every fault, with [`Fault::None`].
    pub const ALL: [Self; 6] = [
        Self::None,
        Self::StopJoining,
        Self::Kill,
        Self::Freeze,
        Self::StickInTeardown,
        Self::Leave,
    ];

    /// The fault's name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::StopJoining => "stop-joining",
            Self::Kill => "kill",
            Self::Freeze => "freeze",
            Self::StickInTeardown => "stick-in-teardown",
            Self::Leave => "leave",
        }
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|fault| fault.name() == name);
        found.ok_or_else(|| format!("no fault is called {name:?}"))
    }
}
