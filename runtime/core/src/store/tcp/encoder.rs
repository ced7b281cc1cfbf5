//! [`Encoder`]: writes the requests of a client.

use super::protocol::OpCode;

/// Writes requests, one after the other, into one buffer.
#[derive(Default)]
pub(super) struct Encoder(Vec<u8>);

impl Encoder {
    pub(super) fn op(mut self, op: OpCode) -> Self {
        self.0.push(op as u8);
        self
    }

    pub(super) fn string(mut self, string: &[u8]) -> Self {
        self.0
            .extend_from_slice(&(string.len() as u64).to_le_bytes());
        self.0.extend_from_slice(string);
        self
    }

    pub(super) fn strings(self, strings: &[Vec<u8>]) -> Self {
        let counted = self.i64(strings.len() as i64);
        strings.iter().fold(counted, |e, string| e.string(string))
    }

    pub(super) fn i64(mut self, number: i64) -> Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    pub(super) fn u32(mut self, number: u32) -> Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    /// The requests of `next` after these.
    pub(super) fn then(mut self, next: &Self) -> Self {
        self.0.extend_from_slice(&next.0);
        self
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
