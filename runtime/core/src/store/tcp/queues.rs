//! The client's queues.

use super::checks::{checked_value, name_of};
use super::client::{Connection, GRACE};
use super::encoder::Encoder;
use super::protocol::OpCode;
use super::tcp_store::TcpStore;
use crate::op::error::{ErrorKind, Result};
use crate::store::limit::{after, with_limit};
use crate::store::{QueueStore, Store, timed_out};
use std::time::{Duration, Instant};

impl QueueStore for TcpStore {
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let request = Encoder::default()
            .op(OpCode::QueuePush)
            .string(&name_of(key)?)
            .string(checked_value(value)?);
        self.send_and_confirm(&format!("queue_push to {key:?}"), request)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = after(timeout);
        // For all requests together, however often another client takes the value that has ended a wait.
        with_limit(after(timeout.saturating_add(GRACE)), || {
            loop {
                if let Some(value) = self.try_queue_pop(key)? {
                    return Ok(value);
                }
                let left = deadline.saturating_duration_since(Instant::now());
                match self.wait(&[key], left) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::Timeout => {
                        return Err(timed_out([key], timeout));
                    }
                    Err(error) => return Err(error),
                }
            }
        })
    }

    fn try_queue_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let request = Encoder::default()
            .op(OpCode::QueuePop)
            .string(&name_of(key)?);
        self.ask(
            &format!("queue_pop from {key:?}"),
            request,
            |connection, deadline| match connection.read_i64(deadline)? {
                0 => Ok(None),
                _ => connection.read_string(deadline).map(Some),
            },
        )
    }

    fn queue_len(&self, key: &str) -> Result<u64> {
        let request = Encoder::default()
            .op(OpCode::QueueLen)
            .string(&name_of(key)?);
        let name = format!("queue_len of {key:?}");
        let length = self.ask(&name, request, Connection::read_i64)?;
        Ok(length.unsigned_abs())
    }
}
