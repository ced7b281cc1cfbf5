//! The source of a rank's job secret, and whether the store of the job requires a proof of it.
//!
//! | `RCOMM_JOB_SECRET` | all ranks on one host | other jobs |
//! |---|---|---|
//! | set | the given secret | the given secret |
//! | not set | derived from the [user's secret](Secret::of_user), in a file of mode 0600 | rank 0 generates a secret and seals it for each other rank |
//!
//! The store never holds the secret itself. To *seal* it is to encrypt it with a key that rank 0 and one
//! other rank agree on (X25519, RFC 7748): an attacker who reads the store does not learn the secret. An
//! attacker who *writes* to the store while the job starts can replace the ranks' public keys, and so learn or choose
//! the sealed secret; a given secret is safe from that attack.

use crate::config::Config;
use crate::config::rendezvous::Rendezvous;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{Store, StoreAccess, StoreChoice, TcpStore};
use rcomm_recorder::model::{Rank, text};
use rcomm_recorder::publish::{Secret, Tls};
use std::time::Duration;
use x25519_dalek::{PublicKey, StaticSecret};

/// Bytes of a sealed secret: the encrypted secret, then a tag over it.
const SEALED: usize = 32 + Secret::TAG_LEN;

/// The source of a rank's job secret.
pub(crate) enum JobSecret {
    /// The secret comes from the configuration.
    Given(Secret),
    /// The user's secret on this host, which clients prove to the store, and the job's secret, which is derived
    /// from it.
    OfUser { user: Secret, job: Secret },
    /// No secret yet: rank 0 generates one and seals it once all ranks have arrived. Holds this rank's
    /// private key.
    ToAgree(Box<StaticSecret>),
}

impl JobSecret {
    /// Determines the source for this rank: the configuration, the user's secret, or an agreement of the
    /// ranks.
    ///
    /// # Errors
    /// `Io` if the user's secret can neither be read nor generated, or if the system's random source cannot
    /// be read.
    pub(crate) fn of(config: &Config, place: &Rendezvous) -> Result<Self> {
        if let Some(secret) = &config.secret {
            return Ok(Self::Given(secret.clone()));
        }
        if !place.is_on_one_host() {
            let random = *generate_secret()?.as_bytes();
            return Ok(Self::ToAgree(Box::new(StaticSecret::from(random))));
        }
        let user = Secret::of_user().map_err(|error| {
            let message = "the ranks of this host share their secret in a file, which cannot be used: set \
                        RCOMM_JOB_SECRET to the same value on all ranks";
            Error::new(ErrorKind::Io, message).with_source(error)
        })?;
        let job = user.derive(&format!("job {}", place.job));
        Ok(Self::OfUser { user, job })
    }

    /// How this rank protects the store if it serves it, or connects to it as a client.
    ///
    /// # Errors
    /// `InvalidArgument` if the configuration requires a proof and the ranks have yet to agree on a secret.
    fn store_access(
        &self,
        config: &Config,
        tls: Option<&Tls>,
        place: &Rendezvous,
    ) -> Result<StoreAccess> {
        let known = match self {
            Self::Given(secret) => Some(secret),
            Self::OfUser { user, .. } => Some(user),
            Self::ToAgree(_) => None,
        };
        let access_with = |secret: Option<&Secret>| match (tls, secret.cloned()) {
            (Some(tls), secret) => StoreAccess::Tls(tls.clone(), secret),
            (None, Some(secret)) => StoreAccess::Secret(secret),
            (None, None) => StoreAccess::Open,
        };
        match (config.store, known) {
            // PyTorch's protocol has no TLS.
            (StoreChoice::Open, _) => Ok(StoreAccess::Open),
            // The launcher's agent (such as torchrun's) or the program provides the store, which asks for no proof.
            (StoreChoice::Auto, _) if place.uses_agent_store => Ok(StoreAccess::Open),
            (StoreChoice::Auto, None) => Ok(access_with(None)),
            (_, Some(secret)) => Ok(access_with(Some(secret))),
            (StoreChoice::Secret, None) => Err(Error::new(
                ErrorKind::InvalidArgument,
                "RCOMM_STORE is \"secret\", but no secret is set and the ranks are not known to be on one host: set \
                 RCOMM_JOB_SECRET to the same value on all ranks",
            )),
        }
    }

    /// Connects to the store at the rendezvous, and serves it if this rank has to. Warns on standard error if this rank
    /// serves an open store and, on rank 0, if a job with TLS uses an open store.
    ///
    /// # Errors
    /// Those of [`store_access`](Self::store_access) and [`Rendezvous::connect_store`].
    pub(crate) fn connect_store(
        &self,
        config: &Config,
        tls: Option<&Tls>,
        place: &Rendezvous,
        timeout: Duration,
    ) -> Result<TcpStore> {
        let access = self.store_access(config, tls, place)?;
        let store = place.connect_store(&access, timeout)?;
        if place.serves_store() && matches!(access, StoreAccess::Open) {
            warn_open(&place.master_addr, store.port());
        }
        if tls.is_some() && place.rank == 0 && matches!(access, StoreAccess::Open) {
            warn_without_tls(&place.master_addr, store.port());
        }
        Ok(store)
    }

    /// Connects to the store at the rendezvous, which another process serves, and reads the counter under `key` there,
    /// as [`TcpStore::connect_to_counter`] does. Once connected, the counter may take until `deadline`, and at least
    /// `least_wait`, but never longer than was left when the call began.
    ///
    /// # Errors
    /// Those of [`store_access`](Self::store_access) and [`TcpStore::connect_with`].
    pub(crate) fn connect_to_counter(
        &self,
        config: &Config,
        tls: Option<&Tls>,
        place: &Rendezvous,
        deadline: Deadline,
        (key, least_wait): (&str, Duration),
    ) -> Result<(TcpStore, Result<i64>)> {
        let access = self.store_access(config, tls, place)?;
        let address = (place.master_addr.as_str(), place.master_port);
        // A try that has no time left may still find a store that answers at once.
        let left = || deadline.remaining().max(least_wait);
        TcpStore::connect_to_counter(address, deadline.remaining(), &access, key, left)
    }

    /// This rank's statement about its secret, which it writes to the store, so that the ranks can detect different
    /// secrets: a fingerprint of a given secret; `user ` and the fingerprint of a derived one; or, without a secret,
    /// `none ` and this rank's public key.
    pub(crate) fn statement(&self, place: &Rendezvous) -> String {
        let fingerprint =
            |secret: &Secret| text::hex(&secret.derive("fingerprint").tag(&[place.job.as_bytes()]));
        match self {
            Self::Given(secret) => fingerprint(secret),
            Self::OfUser { job, .. } => format!("user {}", fingerprint(job)),
            Self::ToAgree(own_key) => {
                format!("none {}", text::hex(PublicKey::from(&**own_key).as_bytes()))
            }
        }
    }

    /// The job's secret. Called once all ranks have arrived and their statements have been found to agree.
    /// `statement_keys` are the keys in the store under which the ranks' [statements](Self::statement) are, by rank;
    /// `sealed_key` returns the key under which rank 0 publishes the secret sealed for a rank.
    ///
    /// # Blocking
    /// If the ranks have yet to agree on the secret: until rank 0 has sealed it, or the deadline.
    ///
    /// # Errors
    /// Those of the store. On rank 0, `Rendezvous` if another rank's statement holds no public key, and `Io` if the
    /// system's random source cannot be read; on others, `Unauthorized` if rank 0's statement holds no public key or
    /// the sealed secret cannot be opened.
    pub(crate) fn agree(
        self,
        notes: &dyn Store,
        place: &Rendezvous,
        statement_keys: &[String],
        sealed_key: impl Fn(Rank) -> String,
        deadline: Deadline,
    ) -> Result<Secret> {
        let own_key = match self {
            Self::Given(secret) | Self::OfUser { job: secret, .. } => return Ok(secret),
            Self::ToAgree(own_key) => own_key,
        };
        if place.rank > 0 {
            let keys = [statement_keys[0].as_str(), &sealed_key(place.rank)];
            let values = notes.multi_get(&keys, deadline.remaining())?;
            let opened = match &values[..] {
                [statement, sealed] => public_key(statement)
                    .and_then(|their_key| open(&own_key, &their_key, place.rank, sealed)),
                _ => None,
            };
            return opened.ok_or_else(|| {
                let message = "the secret that rank 0 sealed for this rank cannot be opened: another process \
                            may have written to the store. Set RCOMM_JOB_SECRET to the same value on all ranks";
                Error::new(ErrorKind::Unauthorized, message)
            });
        }
        let secret = generate_secret()?;
        let keys: Vec<&str> = statement_keys.iter().map(String::as_str).collect();
        let values = notes.multi_get(&keys, deadline.remaining())?;
        let mut sealed_secrets = Vec::new();
        for (rank, statement) in (0..).zip(&values).skip(1) {
            let their_key = public_key(statement).ok_or_else(|| {
                let message = format!("rank {rank} left no public key in the store");
                Error::new(ErrorKind::Rendezvous, message)
            })?;
            sealed_secrets.push((sealed_key(rank), seal(&own_key, &their_key, rank, &secret)));
        }
        let sealed_secrets: Vec<(&str, &[u8])> = sealed_secrets
            .iter()
            .map(|(key, sealed)| (key.as_str(), &sealed[..]))
            .collect();
        if !sealed_secrets.is_empty() {
            notes.multi_set(&sealed_secrets)?;
        }
        Ok(secret)
    }
}

/// Warns on standard error that this rank serves an open store, which requires no proof.
#[expect(
    clippy::print_stderr,
    reason = "users must know this, with or without a subscriber of the log"
)]
fn warn_open(host: &str, port: u16) {
    eprintln!(
        "rcomm: the store at {host} port {port} is open: whoever reaches that port can read and change what the \
         job keeps in it. RCOMM_JOB_SECRET, the same on all ranks, closes it to others unless RCOMM_STORE is \"open\""
    );
}

/// Warns on standard error that the store of a job with TLS is used without TLS.
#[expect(
    clippy::print_stderr,
    reason = "users must know this, with or without a subscriber of the log"
)]
fn warn_without_tls(host: &str, port: u16) {
    eprintln!(
        "rcomm: the store at {host} port {port} is used without TLS, since PyTorch's protocol has none; data \
         connections and endpoints use TLS"
    );
}

/// Generates a secret from the system's random source.
fn generate_secret() -> Result<Secret> {
    Secret::generate().map_err(|error| {
        Error::new(ErrorKind::Io, "no secret can be made for the job").with_source(error)
    })
}

/// The public key in the statement of a rank without a secret; `None` for any other statement.
fn public_key(statement: &[u8]) -> Option<PublicKey> {
    let text = std::str::from_utf8(statement).ok()?;
    Some(PublicKey::from(from_hex(text.strip_prefix("none ")?)?))
}

/// The 32 bytes that `text` holds as 64 hexadecimal digits; `None` if it is anything else.
fn from_hex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(bytes)
}

/// The key that rank 0 and `rank` share, computed by either of them; `None` if the public key of the other is
/// invalid.
fn shared(own_key: &StaticSecret, their_key: &PublicKey, rank: Rank) -> Option<Secret> {
    let shared = own_key.diffie_hellman(their_key);
    // With a public key of small order, the shared key would be publicly known.
    let shared = shared
        .was_contributory()
        .then(|| Secret::from_bytes(shared.to_bytes()))?;
    Some(shared.derive(&format!("sealed for rank {rank}")))
}

/// Encrypts or decrypts 32 bytes: XORs them with a pad derived from `key`. Secure because each key encrypts
/// only one secret.
fn xor_pad(key: &Secret, bytes: &[u8]) -> [u8; 32] {
    let mut output = *key.derive("pad").as_bytes();
    output
        .iter_mut()
        .zip(bytes)
        .for_each(|(pad, byte)| *pad ^= byte);
    output
}

/// Encrypts `secret` with the key that rank 0 (`own_key`) and `rank` (`their_key`) share.
fn seal(own_key: &StaticSecret, their_key: &PublicKey, rank: Rank, secret: &Secret) -> Vec<u8> {
    // A rank whose public key is invalid could not open the secret, and gets zeros instead.
    let Some(key) = shared(own_key, their_key, rank) else {
        return vec![0; SEALED];
    };
    let encrypted = xor_pad(&key, secret.as_bytes());
    [encrypted, key.derive("whole").tag(&[&encrypted])].concat()
}

/// Decrypts what [`seal`] returned for `rank`; `None` if a key or the sealed secret is invalid.
fn open(
    own_key: &StaticSecret,
    their_key: &PublicKey,
    rank: Rank,
    sealed: &[u8],
) -> Option<Secret> {
    let key = shared(own_key, their_key, rank)?;
    let sealed: &[u8; SEALED] = sealed.try_into().ok()?;
    let (encrypted, tag) = sealed.split_at(32);
    key.derive("whole")
        .verify(&[encrypted], tag)
        .then(|| Secret::from_bytes(xor_pad(&key, encrypted)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_sealed_for_a_rank_is_opened_by_that_rank_only() {
        let keys = [1, 2, 3].map(|byte| StaticSecret::from([byte; 32]));
        let public = keys.each_ref().map(PublicKey::from);
        let secret = Secret::from_text("the job's");
        let sealed = seal(&keys[0], &public[1], 1, &secret);
        assert_eq!(sealed.len(), SEALED);
        let opened = open(&keys[1], &public[0], 1, &sealed).unwrap();
        assert_eq!(opened.as_bytes(), secret.as_bytes());
        assert!(!sealed.windows(32).any(|bytes| bytes == secret.as_bytes()));
        assert!(open(&keys[2], &public[0], 1, &sealed).is_none());
        assert!(open(&keys[1], &public[0], 2, &sealed).is_none());
        let mut changed = sealed.clone();
        changed[3] ^= 1;
        assert!(open(&keys[1], &public[0], 1, &changed).is_none());
        assert!(open(&keys[1], &public[0], 1, &sealed[1..]).is_none());
        // This public key is a point of small order: everyone could compute the shared key.
        let known = PublicKey::from([0; 32]);
        assert!(shared(&keys[0], &known, 1).is_none());
        assert!(open(&keys[1], &known, 1, &seal(&keys[0], &known, 1, &secret)).is_none());
    }
}
