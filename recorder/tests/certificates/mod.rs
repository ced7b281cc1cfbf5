//! Certificates for tests and benchmarks of TLS: a CA, and the identities that it issues.
#![allow(clippy::unwrap_used, dead_code, missing_docs, unreachable_pub)]

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use rcomm_recorder::publish::TlsFiles;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A CA.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Ca {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    /// Writes the three files of an identity, whose names begin with `name`, to this folder.
    pub fn issue(&self, folder: &Path, name: &str) -> TlsFiles {
        let century = Duration::from_secs(100 * 365 * 86_400);
        self.issue_until(folder, name, SystemTime::now() + century)
    }

    /// Like [`issue`](Self::issue), with a certificate that is valid from the year 2000 to this time, in whole seconds.
    pub fn issue_until(&self, folder: &Path, name: &str, end: SystemTime) -> TlsFiles {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = end.into();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let write = |end: &str, text: &str| {
            let path = folder.join(format!("{name}.{end}"));
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            path
        };
        TlsFiles {
            certificate: write("cert.pem", &certificate.pem()),
            key: write("key.pem", &key.serialize_pem()),
            ca: write("ca.pem", &self.pem),
        }
    }
}
