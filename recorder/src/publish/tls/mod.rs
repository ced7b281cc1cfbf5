//! TLS between the processes of a job: its store, data connections and endpoints, and the readers of the endpoints.
//!
//! All processes have the same kind of identity: a certificate, its key, and the CA that signed the certificates of
//! all. Both ends of a connection prove theirs (TLS 1.3, by the crates `rustls` and `ring`). The names in the
//! certificates are not compared with host names: ranks reach each other by addresses that the job finds out while it
//! starts. What is compared is the CA, so it should be one that signs for this job, or for these users, only. Where a
//! connection also proves the job's secret, that proof is tied to the TLS connection ([`TlsSession::bind`]): the holder
//! of another certificate of the same CA cannot be a man in the middle between two ranks.
//!
//! A session holds the state of one connection and no socket: a store's server, a channel of a rank and a client that
//! blocks have different sockets.

mod files;
mod reason;
mod session;
mod stream;

pub use reason::TlsError;
pub use session::{Handshake, TlsSession};
pub use stream::TlsStream;

use crate::error::{Error, Result};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, DigitallySignedStruct, PeerIncompatible, RootCertStore, ServerConfig,
    SignatureScheme,
};
use std::path::PathBuf;
use std::sync::Arc;

/// The variables that name the three files.
const VARIABLES: [&str; 3] = ["RCOMM_TLS_CERT", "RCOMM_TLS_KEY", "RCOMM_TLS_CA"];

/// The files of one process's identity, all in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by the intermediate certificates up to the CA. If the certificate limits its use
    /// (extended key usage), it must allow use by a server and by a client.
    pub certificate: PathBuf,
    /// The certificate's private key, in a file that only its owner can use; if that is root, its group may read it.
    pub key: PathBuf,
    /// The certificates of the CA that signed those of all processes of the job.
    pub ca: PathBuf,
}

impl TlsFiles {
    /// The files that `RCOMM_TLS_CERT`, `RCOMM_TLS_KEY` and `RCOMM_TLS_CA` name, as `lookup` finds the variables;
    /// `None` if none of them is set. The path of one that is missing is empty, which [`Tls::from_files`] refuses.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let [certificate, key, ca] = VARIABLES.map(|name| lookup(name).unwrap_or_default());
        let paths = [certificate, key, ca].map(|path| PathBuf::from(path.trim()));
        let is_empty = |path: &PathBuf| path.as_os_str().is_empty();
        let [certificate, key, ca] = paths;
        let named = Self {
            certificate,
            key,
            ca,
        };
        let is_set = named.paths().into_iter().any(|path| !is_empty(path));
        is_set.then_some(named)
    }

    /// The paths, in the order of [`VARIABLES`].
    fn paths(&self) -> [&PathBuf; 3] {
        [&self.certificate, &self.key, &self.ca]
    }
}

/// The TLS identity of a process: its certificate, and the CA of all others. Cheap to clone; `Debug` prints no key.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls(..)")
    }
}

impl Tls {
    /// Reads these files, and checks that the key belongs to the certificate, and that the CA has signed the
    /// certificate, which is valid now.
    ///
    /// # Errors
    /// [`Error::Tls`] names the file and the problem: the file cannot be read, is not PEM, or holds a key that others
    /// can read or a certificate that no other process would accept.
    pub fn from_files(files: &TlsFiles) -> Result<Self> {
        let missing = files.paths().into_iter().zip(VARIABLES);
        let mut missing = missing.filter(|(path, _)| path.as_os_str().is_empty());
        if let Some((_, name)) = missing.next() {
            return Err(Error::Tls(format!(
                "{name} is not set, and TLS needs {}: set all three on every rank, or none",
                VARIABLES.join(", ")
            )));
        }
        let chain = files::certificates(&files.certificate)?;
        let key = files::private_key(&files.key)?;
        let roots = files::roots(&files.ca)?;
        let provider = Arc::new(ring::default_provider());
        let verifier = Arc::new(SameCa::new(roots.clone(), &provider));
        let invalid = |path: &PathBuf, why: String| {
            Error::Tls(format!("the TLS file {} {why}", path.display()))
        };
        let refused = |error: rustls::Error| {
            let why = reason::of_own_certificate(&error, &files.ca);
            invalid(&files.certificate, why)
        };
        let [certificate, intermediates @ ..] = &chain[..] else {
            return Err(invalid(&files.certificate, "holds no certificate".into()));
        };
        verifier
            .verify(certificate, intermediates, UnixTime::now())
            .map_err(refused)?;
        let unusable = |error: rustls::Error| {
            let why = format!("does not fit {}: {error}", files.certificate.display());
            invalid(&files.key, why)
        };
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(chain.clone(), key.clone_key());
        let mut client = client.map_err(unusable)?;
        client.enable_sni = false;
        // Connections are few and long: every one proves both identities.
        client.resumption = Resumption::disabled();
        let client_verifier =
            WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build();
        let client_verifier =
            client_verifier.map_err(|error| invalid(&files.ca, format!("is no CA: {error}")))?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .with_client_cert_verifier(client_verifier)
            .with_single_cert(chain, key);
        let mut server = server.map_err(unusable)?;
        // Nothing follows the handshake that the peer did not ask for, so a socket can be used without TLS after it.
        server.send_tls13_tickets = 0;
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// The identity whose files the environment names; `None` if it names none.
    ///
    /// # Errors
    /// Those of [`from_files`](Self::from_files).
    pub fn from_environment() -> Result<Option<Self>> {
        let files = TlsFiles::from_lookup(|name| std::env::var(name).ok());
        files.map(|files| Self::from_files(&files)).transpose()
    }

    /// The configuration of a server, for servers with an asynchronous runtime.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }
}

/// Accepts the certificates that one CA has signed, whatever names they hold.
#[derive(Debug)]
struct SameCa {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl SameCa {
    fn new(roots: Arc<RootCertStore>, provider: &CryptoProvider) -> Self {
        Self {
            roots,
            algorithms: provider.signature_verification_algorithms,
        }
    }

    /// Checks that the CA has signed the certificate, and that the certificate is valid at this time.
    fn verify(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let certificate = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(
            &certificate,
            &self.roots,
            intermediates,
            now,
            algorithms,
        )
    }
}

impl ServerCertVerifier for SameCa {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verify(certificate, intermediates, now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        // TLS 1.2 is not offered.
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
