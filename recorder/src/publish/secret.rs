//! The job's secret, which a process must know to connect to the ranks of a job and to its store.
//!
//! The launcher makes the secret (`RCOMM_JOB_SECRET`), or it is derived from the [secret of the user](Secret::of_user),
//! or the ranks agree on one. A handshake does not send the secret: it carries an HMAC-SHA256, keyed with the secret,
//! over values that both ends have. Tokens for other uses are derived from the secret under a label.

use super::answer::EndpointToken;
use crate::error::{Error, Result};
use crate::model::text;
use crate::record::file::directory::{self, default_directory};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Name of the file with the user's secret, in a folder that only the user may write to.
const FILE: &str = "secret";

/// The job's secret. Cheap to clone; `Debug` does not print it.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Bytes of a [`tag`](Self::tag).
    pub const TAG_LEN: usize = 32;

    /// The secret derived from this text, of any length; a short text can be guessed.
    pub fn from_text(text: &str) -> Self {
        let mut hmac = keyed(b"rcomm job secret");
        hmac.update(text.as_bytes());
        Self(hmac.finalize().into_bytes().into())
    }

    /// The secret with these bytes, as [`as_bytes`](Self::as_bytes) gave them.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Generates a new secret from the operating system's random source.
    ///
    /// # Errors
    /// `Io` if `/dev/urandom` cannot be read.
    pub fn generate() -> Result<Self> {
        random().map(Self)
    }

    /// The secret of this user on this host, generated at the first call: 32 bytes in a file of mode 0600,
    /// `/dev/shm/rcomm-<uid>/secret`. If that folder cannot be used (another user may have taken its name),
    /// `/run/user/<uid>/rcomm/secret`, for which systemd usually makes `/run/user/<uid>`.
    ///
    /// All processes of the user get the same secret. Jobs derive theirs from it.
    ///
    /// # Errors
    /// `Io` names the file or folder that could not be used, and why.
    pub fn of_user() -> Result<Self> {
        let [usual, other] = folders();
        Self::in_folder(&usual).or_else(|error| Self::in_folder(&other).map_err(|_| error))
    }

    /// Like [`of_user`](Self::of_user), in this folder, which is created if it is missing.
    fn in_folder(folder: &Path) -> Result<Self> {
        directory::ensure_private(folder)?;
        let path = folder.join(FILE);
        if let Some(secret) = read(&path)? {
            return Ok(secret);
        }
        // The file is complete before it gets its name. If two processes make one, the first to link it wins.
        let new = folder.join(format!(
            ".{FILE}.{}.{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let written = write(&new, &random()?).and_then(|()| match fs::hard_link(&new, &path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        });
        let _ = fs::remove_file(&new);
        written.map_err(|error| Error::io(format!("write {}", path.display()), error))?;
        read(&path)?.ok_or_else(|| {
            let not_found = io::Error::from(ErrorKind::NotFound);
            Error::io(format!("read {}", path.display()), not_found)
        })
    }

    /// The bytes, to pass to other ranks over a trusted connection.
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

    /// The key by which a process and a store prove to each other that they know the secret.
    pub fn store_key(&self) -> Self {
        self.derive("store")
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

    /// The HMAC over these parts.
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

/// The folders of the user's secret, in the order in which they are tried.
fn folders() -> [PathBuf; 2] {
    let uid = rustix::process::geteuid().as_raw();
    let runtime = format!("/run/user/{uid}/rcomm");
    [default_directory(), PathBuf::from(runtime)]
}

/// The secret in this file; `None` if there is no such file.
fn read(path: &Path) -> Result<Option<Secret>> {
    let failed = |error| Error::io(format!("read {}", path.display()), error);
    let no_follow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    let mut file = match OpenOptions::new()
        .read(true)
        .custom_flags(no_follow)
        .open(path)
    {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let metadata = file.metadata().map_err(failed)?;
    let is_own_file = metadata.is_file() && metadata.uid() == rustix::process::geteuid().as_raw();
    if !is_own_file || metadata.mode() & 0o077 != 0 || metadata.len() != 32 {
        let problem = "it is not a file of 32 bytes that only this user may read: remove it";
        return Err(failed(io::Error::new(ErrorKind::PermissionDenied, problem)));
    }
    let mut bytes = [0; 32];
    file.read_exact(&mut bytes).map_err(failed)?;
    Ok(Some(Secret(bytes)))
}

/// Writes these bytes to a file of mode 0600.
fn write(path: &Path, bytes: &[u8; 32]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    // If a file has that name, a process that was killed has left it: no other process has this id now.
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)?.write_all(bytes)
}

/// 32 random bytes, from the operating system.
pub(crate) fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| Error::io("read /dev/urandom", error))?;
    Ok(bytes)
}

/// An HMAC with this key, over nothing yet.
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
    fn a_tag_is_valid_for_its_parts_and_its_secret_only() {
        let secret = Secret::from_text("one");
        let tag = secret.tag(&[b"ab", b"c"]);
        assert!(secret.verify(&[b"ab", b"c"], &tag));
        assert!(!secret.verify(&[b"a", b"bc"], &tag));
        assert!(!secret.verify(&[b"ab", b"c"], &tag[..31]));
        assert!(!Secret::from_text("two").verify(&[b"ab", b"c"], &tag));
    }

    #[test]
    fn generated_and_derived_secrets_differ_and_debug_output_hides_them() {
        let (one, two) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        assert_ne!(one.as_bytes(), two.as_bytes());
        assert_ne!(one.as_bytes(), one.derive("endpoint").as_bytes());
        assert_eq!(format!("{one:?}"), "Secret(..)");
    }

    #[test]
    fn the_secret_of_the_user_is_made_once_and_read_by_the_user_only() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("rcomm-7");
        let secrets: Vec<[u8; 32]> = std::thread::scope(|scope| {
            let one = || *Secret::in_folder(&folder).unwrap().as_bytes();
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(secrets.iter().all(|secret| *secret == secrets[0]));
        let path = folder.join(FILE);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        fs::set_permissions(&path, open).unwrap();
        let error = Secret::in_folder(&folder).unwrap_err().to_string();
        assert!(error.contains("only this user may read"), "{error}");
    }
}
