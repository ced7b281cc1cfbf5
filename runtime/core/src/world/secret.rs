//! The job's secret: what a process must know to speak to the ranks of a job.
//!
//! The launcher makes it (`RCOMM_JOB_SECRET`), or rank 0 does and leaves it in the store. It never
//! goes over a data connection itself: handshakes carry an HMAC-SHA256 of what both ends know, and tokens
//! for other uses are derived from it under a label.

use crate::op::error::{Error, Result};
use hmac::{Hmac, KeyInit, Mac};
use rcomm_recorder::model::text;
use rcomm_recorder::publish::EndpointToken;
use sha2::Sha256;
use std::fmt;
use std::io::Read;

/// The job's secret. Cheap to clone, never printed.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Bytes of a [`tag`](Self::tag).
    pub const TAG_LEN: usize = 32;

    /// The secret derived from this text. Any length will do; longer than 32 bytes is better.
    pub fn from_text(text: &str) -> Self {
        let mut hmac = keyed(b"rcomm job secret");
        hmac.update(text.as_bytes());
        Self(hmac.finalize().into_bytes().into())
    }

    /// The secret with these bytes, as [`as_bytes`](Self::as_bytes) gave them.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// A new one, from the operating system's random source.
    ///
    /// # Errors
    /// `Io` if `/dev/urandom` cannot be read.
    pub fn generate() -> Result<Self> {
        let mut bytes = [0; 32];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut file| file.read_exact(&mut bytes))
            .map_err(|error| Error::io("cannot read /dev/urandom", error))?;
        Ok(Self(bytes))
    }

    /// The bytes, to hand to other ranks over a channel that is trusted.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The bytes as 64 hexadecimal digits, as `RCOMM_JOB_SECRET` has them.
    pub fn to_hex(&self) -> String {
        text::hex(&self.0)
    }

    /// A key for another use, which does not reveal the secret.
    pub fn derive(&self, label: &str) -> Self {
        Self(self.tag(&[b"derive", label.as_bytes()]))
    }

    /// The token that a reader sends to a rank's endpoint over TCP, unless the job was given another.
    pub fn endpoint_token(&self) -> EndpointToken {
        let key = self.derive("endpoint token");
        EndpointToken::new(key.to_hex()).expect("64 hexadecimal digits are a token")
    }

    /// A proof of knowing the secret, over these parts in this order.
    pub fn tag(&self, parts: &[&[u8]]) -> [u8; Self::TAG_LEN] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Whether `tag` is the proof over these parts. Takes the same time wherever the first wrong
    /// byte is.
    pub fn verify(&self, parts: &[&[u8]], tag: &[u8]) -> bool {
        self.mac(parts).verify_slice(tag).is_ok()
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut hmac = keyed(&self.0);
        for part in parts {
            // The length in front keeps ("ab", "c") and ("a", "bc") apart.
            hmac.update(&(part.len() as u64).to_le_bytes());
            hmac.update(part);
        }
        hmac
    }
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes a key of any length")
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_holds_for_its_parts_and_its_secret_only() {
        let secret = Secret::from_text("one");
        let tag = secret.tag(&[b"ab", b"c"]);
        assert!(secret.verify(&[b"ab", b"c"], &tag));
        assert!(!secret.verify(&[b"a", b"bc"], &tag));
        assert!(!secret.verify(&[b"ab", b"c"], &tag[..31]));
        assert!(!Secret::from_text("two").verify(&[b"ab", b"c"], &tag));
    }

    #[test]
    fn a_new_secret_is_like_no_other() {
        let (one, two) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        assert_ne!(one.as_bytes(), two.as_bytes());
        assert_ne!(one.as_bytes(), one.derive("endpoint").as_bytes());
        assert_eq!(format!("{one:?}"), "Secret(..)");
    }
}
