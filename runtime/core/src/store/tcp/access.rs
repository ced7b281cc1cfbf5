//! Who may use a store, and how much of it.

use rcomm_recorder::publish::Secret;
use std::time::Duration;

/// Who may use a store.
#[derive(Clone, Debug, Default)]
pub enum StoreAccess {
    /// Whoever reaches its port, as with PyTorch's TCPStore: needed where PyTorch's clients use the store, or
    /// PyTorch serves it.
    #[default]
    Open,
    /// Whoever proves to know this secret; and the server proves it, too.
    Secret(Secret),
}

/// Who may use the job's store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StoreChoice {
    /// Those who prove the job's secret, where a rank or `rcomm-run` serves the store and the ranks were given
    /// a secret or are on one host. Elsewhere (torchrun's store, or no secret) whoever reaches its port.
    #[default]
    Auto,
    /// Those who prove the job's secret.
    Secret,
    /// Whoever reaches its port, as PyTorch's clients need it.
    Open,
}

/// How much a server takes. The limits of one key, value and request are those of PyTorch's server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Bytes of all keys, values and waits together, with 64 for each key.
    pub stored_bytes: usize,
    /// Keys and queues.
    pub stored_keys: usize,
    /// Bytes of all requests together whose end has not come, or that are not served yet.
    pub unfinished_bytes: usize,
    /// Connections of one host with a request whose end has not come.
    pub unfinished_per_host: usize,
    /// Bytes of all replies together that clients have not read.
    pub unread_bytes: usize,
    /// Connections.
    pub connections: usize,
    /// Connections that have not proved the secret (of an open store: not sent VALIDATE). One more, and the
    /// oldest of them is closed.
    pub unproved: usize,
    /// From a request's first byte to its last.
    pub request_time: Duration,
    /// From the connection to the proof (of an open store: to VALIDATE).
    pub proof_time: Duration,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self {
            stored_bytes: 512 << 20,
            stored_keys: 1 << 20,
            unfinished_bytes: 512 << 20,
            unfinished_per_host: 1024,
            unread_bytes: 512 << 20,
            connections: 65_536,
            unproved: 4096,
            request_time: Duration::from_secs(60),
            proof_time: Duration::from_secs(10),
        }
    }
}
