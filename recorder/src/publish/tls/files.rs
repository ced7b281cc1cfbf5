//! Reads the files of an identity.

use crate::error::{Error, Result};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// Maximum number of bytes that are read from a file; the rest is ignored.
const MAX_FILE: u64 = 1 << 20;

/// The error for a file that cannot be used, for this reason.
fn invalid(path: &Path, reason: impl std::fmt::Display) -> Error {
    Error::Tls(format!("the TLS file {} {reason}", path.display()))
}

/// Reads an opened file. The error names the file.
fn read(path: &Path, file: io::Result<File>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.and_then(|file| file.take(MAX_FILE).read_to_end(&mut bytes))
        .map_err(|error| invalid(path, format!("cannot be read: {error}")))?;
    Ok(bytes)
}

/// The certificates in this file, in its order: at least one.
pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = read(path, File::open(path))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| invalid(path, format!("is not PEM: {error}")))?;
    match found.is_empty() {
        true => Err(invalid(path, "holds no certificate in PEM")),
        false => Ok(found),
    }
}

/// The private key in this file.
pub(super) fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    let file = File::open(path);
    if let Ok(file) = &file
        && let Ok(metadata) = file.metadata()
    {
        // A key that root owns may be readable by its group: keys that a cluster mounts into containers often are.
        let allowed = if metadata.uid() == 0 { 0o740 } else { 0o700 };
        let mode = metadata.mode() & 0o777;
        if mode & !allowed != 0 {
            let reason = format!(
                "holds a private key and has mode {mode:03o}, so others than its owner can use it: chmod 600 it"
            );
            return Err(invalid(path, reason));
        }
    }
    let bytes = read(path, file)?;
    PrivateKeyDer::from_pem_slice(&bytes)
        .map_err(|error| invalid(path, format!("holds no private key in PEM: {error}")))
}

/// The certificates of the CA in this file.
pub(super) fn roots(path: &Path) -> Result<Arc<RootCertStore>> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots
            .add(certificate)
            .map_err(|error| invalid(path, format!("holds no certificate of a CA: {error}")))?;
    }
    Ok(Arc::new(roots))
}
