//! The first bytes on a data connection: which rank calls which, for which group, with proof of the secret.
//!
//! | from | bytes | contents |
//! |---|---|---|
//! | dialer | 88 | [`Handshake`]: magic, version, kind, world size, ranks, stream, group, job, nonce |
//! | acceptor | 68 | [`Decision`], the acceptor's nonce, HMAC over the handshake and this nonce |
//! | dialer | 32 | HMAC over the same bytes with another label |
//! | acceptor | 4 | [`Decision`] |
//!
//! Numbers are little-endian. Both ends prove that they know the job's secret before either trusts the
//! other; the labels prevent one end's proof from being replayed as the other's. Without TLS the bytes that
//! follow are neither encrypted nor authenticated: the secret only restricts who can connect. With TLS all of these
//! bytes are sent inside the TLS session, and the key of the proofs is tied to that session.

use rcomm_core::tuning::MAX_STREAMS;
use rcomm_core::{ErrorKind, Secret};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::TlsSession;
use sha2::{Digest, Sha256};
use std::borrow::Cow;

const MAGIC: [u8; 8] = *b"rcommcpu";
const VERSION: u32 = 3;

/// Bytes of a [`Handshake`] on the wire.
pub(crate) const HANDSHAKE_LEN: usize = 88;
/// Bytes of the acceptor's answer.
pub(crate) const ANSWER_LEN: usize = 68;
/// Bytes of a proof.
pub(crate) const PROOF_LEN: usize = 32;

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub(crate) enum ChannelKind {
    /// Collectives of one group.
    Collective = 1,
    /// Messages between two ranks of one group.
    P2p = 2,
    /// No data: the connection only shows when the acceptor drops its mesh or its process ends.
    Watch = 3,
    /// A request for the host's shared memory, over a unix socket.
    Segment = 4,
}

impl ChannelKind {
    fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::Collective),
            2 => Some(Self::P2p),
            3 => Some(Self::Watch),
            4 => Some(Self::Segment),
            _ => None,
        }
    }
}

/// The acceptor's decision on a handshake or a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Decision {
    /// The handshake may continue; as the last message: the connection is accepted.
    Welcome = 0,
    /// The caller uses another protocol or another version of this protocol, or names a kind or stream that does not
    /// exist.
    OtherProtocol = 1,
    /// The caller belongs to another job.
    OtherJob = 2,
    /// The dialed rank is not this rank, the caller is not a rank of the world, or the worlds have different sizes.
    OtherRank = 3,
    /// The proof was wrong.
    WrongSecret = 4,
    /// The caller does not use TLS, which this job does.
    NeedsTls = 5,
}

impl Decision {
    pub(crate) fn from_bytes(bytes: [u8; 4]) -> Option<Self> {
        Some(match u32::from_le_bytes(bytes) {
            0 => Self::Welcome,
            1 => Self::OtherProtocol,
            2 => Self::OtherJob,
            3 => Self::OtherRank,
            4 => Self::WrongSecret,
            5 => Self::NeedsTls,
            _ => return None,
        })
    }

    pub(crate) fn to_bytes(self) -> [u8; 4] {
        (self as u32).to_le_bytes()
    }

    /// Returns the reason for a refusal, for an error message. A `decision` of `None` means that the answer was
    /// not a valid decision.
    pub(crate) fn reason_of(decision: Option<Self>) -> &'static str {
        match decision {
            None => "its answer is not that of a rank",
            Some(Self::Welcome) => "it accepted",
            Some(Self::OtherProtocol) => {
                "it speaks another protocol, or another version of this one"
            }
            Some(Self::OtherJob) => "it belongs to another job",
            Some(Self::OtherRank) => "it is another rank, or its world has another size",
            Some(Self::WrongSecret) => "the two do not know the same job secret",
            Some(Self::NeedsTls) => {
                "it takes TLS only, and this rank has none: set RCOMM_TLS_CERT, RCOMM_TLS_KEY and RCOMM_TLS_CA on all \
                 ranks, or on none"
            }
        }
    }

    /// Returns the kind of the error for a refusal; `decision` as in [`reason_of`](Self::reason_of).
    pub(crate) fn kind_of(decision: Option<Self>) -> ErrorKind {
        match decision {
            Some(Self::WrongSecret | Self::NeedsTls) => ErrorKind::Unauthorized,
            None | Some(Self::Welcome | Self::OtherProtocol | Self::OtherJob | Self::OtherRank) => {
                ErrorKind::Rendezvous
            }
        }
    }
}

/// What this rank claims in a handshake (its rank, the world's size, a hash of the job's name), and the
/// secret by which it proves that it belongs to the job.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    job: [u8; 16],
    secret: Secret,
}

impl Identity {
    pub(crate) fn new(rank: Rank, world_size: u32, job: &str, secret: &Secret) -> Self {
        let digest = Sha256::new()
            .chain_update(b"rcomm job\0")
            .chain_update(job)
            .finalize();
        let mut job_hash = [0; 16];
        job_hash.copy_from_slice(&digest[..16]);
        Self {
            rank,
            world_size,
            job: job_hash,
            secret: secret.derive("data connections"),
        }
    }

    /// The identity whose proofs are valid on this connection only, if it uses TLS.
    pub(crate) fn tied_to(&self, tls: Option<&TlsSession>) -> Cow<'_, Self> {
        match tls {
            None => Cow::Borrowed(self),
            Some(session) => Cow::Owned(Self {
                secret: session.bind(&self.secret),
                ..self.clone()
            }),
        }
    }

    /// Returns the HMAC by which `end` proves that it knows the secret.
    pub(crate) fn prove(
        &self,
        end: End,
        handshake: &[u8; HANDSHAKE_LEN],
        nonce: &[u8; 32],
    ) -> [u8; 32] {
        self.secret.tag(&[end.label(), handshake, nonce])
    }

    /// Returns the HMAC by which the rank `maker`, which has made a host's segment, shows ranks that open it without a
    /// handshake that it knows the secret.
    pub(crate) fn prove_segment(&self, maker: Rank, nonce: &[u8; 32]) -> [u8; 32] {
        let (label, maker) = (&b"segment"[..], maker.to_le_bytes());
        self.secret.tag(&[label, &maker, &self.job, nonce])
    }

    /// Whether `proof` is the one of the rank that has made the segment; compared in constant time.
    pub(crate) fn verifies_segment(&self, maker: Rank, nonce: &[u8; 32], proof: &[u8]) -> bool {
        let (label, maker) = (&b"segment"[..], maker.to_le_bytes());
        self.secret
            .verify(&[label, &maker, &self.job, nonce], proof)
    }

    /// Whether `proof` is the one that `end` must send; compared in constant time.
    pub(crate) fn verifies(
        &self,
        end: End,
        handshake: &[u8; HANDSHAKE_LEN],
        nonce: &[u8; 32],
        proof: &[u8],
    ) -> bool {
        self.secret.verify(&[end.label(), handshake, nonce], proof)
    }
}

/// One end of a connection.
#[derive(Clone, Copy)]
pub(crate) enum End {
    Dialer,
    Acceptor,
}

impl End {
    fn label(self) -> &'static [u8] {
        match self {
            Self::Dialer => b"dialer",
            Self::Acceptor => b"acceptor",
        }
    }
}

/// The first message of a dialer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handshake {
    pub(crate) kind: ChannelKind,
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) group: u64,
    /// Index of this socket among those of the channel.
    pub(crate) stream: u32,
}

impl Handshake {
    pub(crate) fn encode(&self, identity: &Identity, nonce: &[u8; 32]) -> [u8; HANDSHAKE_LEN] {
        let mut bytes = [0; HANDSHAKE_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[16..20].copy_from_slice(&identity.world_size.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.from.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.to.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.stream.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.group.to_le_bytes());
        bytes[40..56].copy_from_slice(&identity.job);
        bytes[56..].copy_from_slice(nonce);
        bytes
    }

    /// Reads a handshake addressed to `identity`, or returns the decision with which it is refused.
    pub(crate) fn decode(
        bytes: &[u8; HANDSHAKE_LEN],
        identity: &Identity,
    ) -> Result<Self, Decision> {
        let word = |offset: usize| {
            u32::from_le_bytes([
                bytes[offset],
                bytes[offset + 1],
                bytes[offset + 2],
                bytes[offset + 3],
            ])
        };
        if bytes[..8] != MAGIC || word(8) != VERSION {
            return Err(Decision::OtherProtocol);
        }
        let kind = ChannelKind::from_code(word(12)).ok_or(Decision::OtherProtocol)?;
        if bytes[40..56] != identity.job {
            return Err(Decision::OtherJob);
        }
        let (from, to) = (word(20), word(24));
        if word(16) != identity.world_size || to != identity.rank || from >= identity.world_size {
            return Err(Decision::OtherRank);
        }
        let stream = word(28);
        if stream as usize >= MAX_STREAMS {
            return Err(Decision::OtherProtocol);
        }
        let group = u64::from(word(32)) | u64::from(word(36)) << 32;
        Ok(Self {
            kind,
            from,
            to,
            group,
            stream,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn secret() -> Secret {
        Secret::from_text("secret")
    }

    fn handshake() -> Handshake {
        Handshake {
            kind: ChannelKind::P2p,
            from: 3,
            to: 1,
            group: 0x0123_4567_89ab_cdef,
            stream: 2,
        }
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_handshake_for_this_rank_or_are_refused(
            random in proptest::collection::vec(any::<u8>(), HANDSHAKE_LEN),
            kept in 0..HANDSHAKE_LEN,
        ) {
            // The noise begins with a valid head, so that it passes the first checks.
            let dialer = Identity::new(3, 4, "job", &secret());
            let mut bytes = handshake().encode(&dialer, &[7; 32]);
            bytes[kept..].copy_from_slice(&random[kept..]);
            let acceptor = Identity::new(1, 4, "job", &secret());
            if let Ok(read) = Handshake::decode(&bytes, &acceptor) {
                prop_assert!(read.to == 1 && read.from < 4);
            }
        }
    }

    #[test]
    fn a_handshake_is_accepted_only_by_its_rank_world_and_job() {
        let dialer = Identity::new(3, 4, "job", &secret());
        let bytes = handshake().encode(&dialer, &[7; 32]);
        let read =
            |rank, size, job| Handshake::decode(&bytes, &Identity::new(rank, size, job, &secret()));
        assert_eq!(read(1, 4, "job"), Ok(handshake()));
        assert_eq!(read(2, 4, "job"), Err(Decision::OtherRank));
        assert_eq!(read(1, 5, "job"), Err(Decision::OtherRank));
        assert_eq!(read(1, 4, "other"), Err(Decision::OtherJob));
        let mut corrupted = bytes;
        corrupted[0] ^= 1;
        let acceptor = Identity::new(1, 4, "job", &secret());
        assert_eq!(
            Handshake::decode(&corrupted, &acceptor),
            Err(Decision::OtherProtocol)
        );
    }

    #[test]
    fn a_proof_is_valid_for_one_end_one_secret_and_one_nonce() {
        let dialer = Identity::new(3, 4, "job", &secret());
        let bytes = handshake().encode(&dialer, &[7; 32]);
        let proof = dialer.prove(End::Dialer, &bytes, &[9; 32]);
        let acceptor = Identity::new(1, 4, "job", &secret());
        assert!(acceptor.verifies(End::Dialer, &bytes, &[9; 32], &proof));
        assert!(!acceptor.verifies(End::Acceptor, &bytes, &[9; 32], &proof));
        assert!(!acceptor.verifies(End::Dialer, &bytes, &[8; 32], &proof));
        assert!(!acceptor.verifies(End::Dialer, &bytes, &[9; 32], &proof[..31]));
        let outsider = Identity::new(1, 4, "job", &Secret::from_text("other"));
        assert!(!outsider.verifies(End::Dialer, &bytes, &[9; 32], &proof));
    }
}
