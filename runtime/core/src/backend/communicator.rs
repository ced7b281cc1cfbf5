//! What a backend reports about its communicators.

/// The state of one of a backend's communicators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommState {
    /// Identifies the communicator: all its ranks report the same value.
    pub id: String,
    /// What the backend's library reports about the communicator, as names and values.
    pub facts: Vec<(String, String)>,
}

/// The device memory of a group's communicators on one rank, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommMemory {
    /// All device memory that the library counts.
    pub total: u64,
    /// What [`suspend`](super::Backend::suspend) keeps.
    pub persistent: u64,
    /// What [`suspend`](super::Backend::suspend) releases, or has released.
    pub releasable: u64,
    /// Whether the releasable memory is released now.
    pub is_released: bool,
}
