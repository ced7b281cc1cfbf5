//! For how long the threads of a process wait, by the name of the wait: what `GET /waits` and `GET /metrics` of an
//! endpoint answer.

use serde::{Deserialize, Serialize};

/// The waits of one name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitStatistics {
    /// What is waited for. Names of rcomm's own waits begin with `rcomm.`.
    pub name: String,
    /// How many waits have ended.
    pub count: u64,
    /// How long the waits that have ended took together, in ns.
    pub total_ns: u64,
    /// How long the longest wait that has ended took, in ns.
    pub max_ns: u64,
    /// How many threads wait now.
    pub waiting: u32,
    /// For how long at least one thread has waited without a break, in ns; 0 if none waits. Read without a lock: while
    /// threads begin and end waits, it may be counted from an earlier wait.
    pub waiting_ns: u64,
}

/// Whether a wait may have this name: 1 to 64 lower-case letters, digits, `-`, `_` and `.`.
pub fn is_wait_name(name: &str) -> bool {
    let is_allowed = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_' | b'.')
    };
    (1..=64).contains(&name.len()) && name.bytes().all(is_allowed)
}
