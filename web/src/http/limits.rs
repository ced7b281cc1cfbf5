//! Limits on what clients may use.

use std::time::Duration;

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of concurrent connections. Beyond it, a new connection takes the place of one that has not made
    /// an admitted request; if there is no such connection, the new connection is closed.
    pub connections: usize,
    /// Maximum number of concurrent connections of one host that have not made an admitted request. Beyond it, a new
    /// connection takes the place of the host's oldest.
    pub strangers_per_host: usize,
    /// How long a client may take to send a request's head, or to finish a TLS handshake.
    pub head: Duration,
    /// How long the server may take to begin an answer; ten times as long for an upload.
    pub answer: Duration,
    /// How long a client may leave an answer unread before the client is dropped.
    pub idle_timeout: Duration,
    /// Maximum size of an upload in bytes; also the maximum size of each file unpacked from it.
    pub upload: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            strangers_per_host: 256,
            head: Duration::from_secs(10),
            answer: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(20),
            upload: 256 << 20,
        }
    }
}
