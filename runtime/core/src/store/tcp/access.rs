//! The clients that may use a store, and the limits on them.

use rcomm_recorder::publish::{Secret, Tls};
use std::time::Duration;

/// The clients that may use a store.
#[derive(Clone, Debug, Default)]
pub enum StoreAccess {
    /// Every client that reaches the store's port, as with PyTorch's TCPStore. This is needed where PyTorch's clients
    /// use the store, or PyTorch serves it.
    #[default]
    Open,
    /// Every client that proves that it knows this secret. The server proves the same to the client.
    Secret(Secret),
    /// Every client with a TLS certificate of the same CA that also proves the secret, if there is one. All that is
    /// sent is encrypted. PyTorch's clients cannot use such a store.
    Tls(Tls, Option<Secret>),
}

impl StoreAccess {
    /// The secret that clients must prove.
    pub(super) fn secret(&self) -> Option<&Secret> {
        match self {
            Self::Open => None,
            Self::Secret(secret) => Some(secret),
            Self::Tls(_, secret) => secret.as_ref(),
        }
    }

    /// The identity of this process, if connections use TLS.
    pub(super) fn tls(&self) -> Option<&Tls> {
        match self {
            Self::Open | Self::Secret(_) => None,
            Self::Tls(tls, _) => Some(tls),
        }
    }
}

/// The clients that may use the job's store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StoreChoice {
    /// Clients that prove the job's secret, where a rank or `rcomm-run` serves the store and the ranks were
    /// given a secret or are on one host. Elsewhere (torchrun's store, or no secret) every client that reaches the
    /// store's port; with TLS and no secret, every client with a certificate of the same CA.
    #[default]
    Auto,
    /// Clients that prove the job's secret.
    Secret,
    /// Every client that reaches the store's port, as PyTorch's clients require.
    Open,
}

/// Limits of a server on what its clients hold and how long they take. The limits on the size of a single
/// request are fixed ([`TcpStoreServer`](super::TcpStoreServer) lists them).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Bytes of all keys, values and pending waits together, with 64 more for each key, each queue and each value
    /// of a queue.
    pub stored_bytes: usize,
    /// The number of keys and queues.
    pub stored_keys: usize,
    /// Bytes of all requests together that have not arrived in full, or are not served yet.
    pub unfinished_bytes: usize,
    /// The number of connections of one host with a request that has not arrived in full.
    pub unfinished_per_host: usize,
    /// Bytes of all replies together that clients have not read.
    pub unread_bytes: usize,
    /// The number of connections.
    pub connections: usize,
    /// The number of connections that have not proved the secret (of an open store: not sent VALIDATE). If there
    /// are more, the oldest of them is closed.
    pub unproved: usize,
    /// The longest time from a request's first byte to its last.
    pub request_time: Duration,
    /// The longest time from the connection to the proof (of an open store: to VALIDATE).
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
