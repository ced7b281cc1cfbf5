//! How a process and a job's store prove to each other that they know the secret.
//!
//! Two requests that PyTorch's TCPStore does not have follow the client's `VALIDATE`, before any other request:
//!
//! | from | bytes | what |
//! |---|---|---|
//! | client | 5 | `VALIDATE` and its magic number, as PyTorch's clients send it |
//! | client | 33 | opcode `0x70`, a nonce |
//! | server | 68 | `rst1`, the server's nonce, HMAC-SHA256 over a label and both nonces |
//! | client | 33 | opcode `0x71`, HMAC-SHA256 over another label and both nonces |
//! | server | 1 | 0 |
//!
//! In place of any reply the server may send a refusal: [`STORE_REFUSAL`], a line of text, and the end of the
//! connection. Both ends must know the secret; the labels keep one end's proof from being played back as the
//! other's. Without TLS, the later requests are neither encrypted nor authenticated: the proof keeps out clients
//! without the secret, but not an attacker who can read or change the traffic. Inside TLS the key of the proofs is tied
//! to the connection, so an attacker cannot pass proofs on over another connection.

use super::secret::{Secret, random};
use crate::error::Result;

/// The beginning of a refusal. The refusal ends with a line feed, after which the server closes the
/// connection.
pub const STORE_REFUSAL: [u8; 16] = *b"\xFFrcomm refuses: ";

/// The text of a refusal by a store that takes TLS only.
pub const STORE_TAKES_TLS: &str = "this store takes TLS only";

const MAGIC: [u8; 4] = *b"rst1";
/// `VALIDATE` and its magic number.
const VALIDATE: [u8; 5] = [0x00, 0xCE, 0xF7, 0x85, 0x3C];

/// Opcodes in addition to PyTorch's TCPStore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum StoreOpCode {
    /// A nonce follows.
    Hello = 0x70,
    /// A proof follows.
    Proof = 0x71,
}

/// The client's side of a proof.
#[derive(Debug)]
pub struct StoreCaller {
    key: Secret,
    nonce: [u8; 32],
}

impl StoreCaller {
    /// Bytes of the server's answer.
    pub const ANSWER_LEN: usize = 68;
    /// The first bytes of every server's answer.
    pub const ANSWER_START: [u8; 4] = MAGIC;

    /// A client that knows this secret.
    ///
    /// # Errors
    /// [`Io`](crate::Error::Io) if the system's random source cannot be read.
    pub fn new(secret: &Secret) -> Result<Self> {
        Ok(Self {
            key: secret.store_key(),
            nonce: random()?,
        })
    }

    /// A client whose key is the [`store_key`](Secret::store_key) of this secret, tied to this TLS connection.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    #[cfg(feature = "tls")]
    pub fn over_tls(secret: &Secret, tls: &super::tls::TlsSession) -> Result<Self> {
        Ok(Self {
            key: tls.bind(&secret.store_key()),
            nonce: random()?,
        })
    }

    /// The first bytes to send.
    pub fn hello(&self) -> Vec<u8> {
        [&VALIDATE[..], &[StoreOpCode::Hello as u8], &self.nonce].concat()
    }

    /// The bytes to send after the server's answer; `None` if the answer does not show that the server knows the
    /// secret.
    pub fn proof(&self, answer: &[u8; Self::ANSWER_LEN]) -> Option<Vec<u8>> {
        let (head, tag) = answer.split_at(36);
        let (magic, server_nonce) = head.split_at(4);
        let parts = |label| [label, &self.nonce[..], server_nonce];
        if magic != MAGIC || !self.key.verify(&parts(SERVER), tag) {
            return None;
        }
        let proof = self.key.tag(&parts(CLIENT));
        Some([&[StoreOpCode::Proof as u8], &proof[..]].concat())
    }
}

// The labels of the two ends.
const SERVER: &[u8] = b"store";
const CLIENT: &[u8] = b"caller";

/// The server's side: its challenge to one client.
#[derive(Clone, Debug)]
pub struct StoreChallenge {
    nonces: Box<[[u8; 32]; 2]>,
}

impl StoreChallenge {
    /// A challenge for the client that sent this nonce, and the answer to it. `key` is [`Secret::store_key`], tied to
    /// the TLS connection if there is one.
    ///
    /// # Errors
    /// [`Io`](crate::Error::Io) if the system's random source cannot be read.
    pub fn new(key: &Secret, client_nonce: &[u8; 32]) -> Result<(Self, Vec<u8>)> {
        let nonces = Box::new([*client_nonce, random()?]);
        let [client_nonce, server_nonce] = &*nonces;
        let proof = key.tag(&[SERVER, client_nonce, server_nonce]);
        let answer = [&MAGIC[..], server_nonce, &proof].concat();
        Ok((Self { nonces }, answer))
    }

    /// Whether `proof` comes from a client that knows the secret. Compares in constant time.
    pub fn is_met(&self, key: &Secret, proof: &[u8]) -> bool {
        let [client_nonce, server_nonce] = &*self.nonces;
        key.verify(&[CLIENT, client_nonce, server_nonce], proof)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange_proofs(client: &Secret, server: &Secret) -> (bool, bool) {
        let caller = StoreCaller::new(client).unwrap();
        let key = server.store_key();
        let nonce = *caller.hello().last_chunk().unwrap();
        let (challenge, answer) = StoreChallenge::new(&key, &nonce).unwrap();
        let proof = caller.proof(answer[..].try_into().unwrap());
        let server_is_accepted = proof.is_some();
        // A client that rejects the server's proof sends none; the test then sends a wrong one.
        let proof = proof.unwrap_or_else(|| answer[36..].to_vec());
        let client_is_accepted = challenge.is_met(&key, &proof[1..]);
        (server_is_accepted, client_is_accepted)
    }

    #[test]
    fn both_ends_must_know_the_secret() {
        let (one, two) = (Secret::from_text("one"), Secret::from_text("two"));
        assert_eq!(exchange_proofs(&one, &one), (true, true));
        assert_eq!(exchange_proofs(&one, &two), (false, false));
    }

    #[test]
    fn a_proof_is_invalid_for_the_other_end_and_for_another_connection() {
        let secret = Secret::from_text("one");
        let key = secret.store_key();
        let caller = StoreCaller::new(&secret).unwrap();
        let nonce = *caller.hello().last_chunk().unwrap();
        let (challenge, answer) = StoreChallenge::new(&key, &nonce).unwrap();
        assert!(!challenge.is_met(&key, &answer[36..]));
        let proof = caller.proof(answer[..].try_into().unwrap()).unwrap();
        assert!(challenge.is_met(&key, &proof[1..]));
        let (another, _) = StoreChallenge::new(&key, &nonce).unwrap();
        assert!(!another.is_met(&key, &proof[1..]));
    }
}
