//! Connects to a store and reads a counter there. If the store has a secret, this takes no more round trips than
//! connecting alone; otherwise it takes one more.

use super::access::StoreAccess;
use super::checks::{checked_request, name_of};
use super::encoder::Encoder;
use super::protocol::OpCode;
use super::tcp_store::TcpStore;
use crate::op::error::Result;
use std::time::Duration;

impl TcpStore {
    /// Like [`connect_with`](Self::connect_with); also returns the counter under `key`, 0 if there is none, or the
    /// error of the request for it. `left` is called once this client has connected, and returns how long the counter
    /// may take.
    ///
    /// # Errors
    /// Those of [`connect_with`](Self::connect_with).
    pub(crate) fn connect_to_counter(
        (host, port): (&str, u16),
        timeout: Duration,
        access: &StoreAccess,
        key: &str,
        left: impl FnOnce() -> Duration,
    ) -> Result<(Self, Result<i64>)> {
        let request = Encoder::default()
            .op(OpCode::Add)
            .string(&name_of(key)?)
            .i64(0);
        let request = checked_request(request)?;
        let store = Self::dial(
            host.to_owned(),
            port,
            timeout,
            access,
            None,
            request.bytes(),
        )?;
        // The store has one connection, on which the request was sent.
        let counted = store.try_call_within(left().min(timeout), |connection, deadline| {
            connection.read_i64(deadline)
        });
        let name = format!("add of 0 to {key:?}");
        let counted = counted.and_then(|count| count.map_err(|broken| store.broken(&name, broken)));
        Ok((store, counted))
    }
}
