//! Why TLS failed, in a sentence that says what to do.

use rustls::{AlertDescription, CertificateError, Error as Rustls, PeerIncompatible};
use std::fmt;
use std::io;
use std::path::Path;

/// Why a connection has no TLS. In its text, "it" is the peer.
#[derive(Clone, Debug)]
pub enum TlsError {
    /// The peer sent bytes that are not TLS.
    Plain,
    /// The peer closed the connection before TLS was established.
    Closed,
    /// TLS failed.
    Failed(Rustls),
}

impl std::error::Error for TlsError {}

impl From<TlsError> for io::Error {
    fn from(error: TlsError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

impl TlsError {
    /// The failure of TLS that this error carries; `None` if it has another cause.
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }

    /// The failure for an error of the TLS library, before or after TLS was established.
    pub(super) fn from_rustls(error: Rustls, was_set_up: bool) -> Self {
        match error {
            // The peer's first bytes are not the head of a record.
            Rustls::InvalidMessage(_) if !was_set_up => Self::Plain,
            error => Self::Failed(error),
        }
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SAME: &str = "RCOMM_TLS_CA must be the same on all ranks";
        let error = match self {
            Self::Plain => {
                return f.write_str(
                    "it does not use TLS, and this process does: set RCOMM_TLS_CERT, RCOMM_TLS_KEY and RCOMM_TLS_CA \
                     for all processes of the job, or for none",
                );
            }
            Self::Closed => {
                return f.write_str(
                    "it closed the connection while TLS was set up: does it use TLS (RCOMM_TLS_CERT, RCOMM_TLS_KEY, \
                     RCOMM_TLS_CA)?",
                );
            }
            Self::Failed(error) => error,
        };
        match error {
            Rustls::InvalidCertificate(invalid) => match invalid {
                invalid if is_foreign(invalid) => write!(
                    f,
                    "its TLS certificate is not from the CA of this process: {SAME}"
                ),
                invalid if is_expired(invalid) => f.write_str("its TLS certificate has expired: renew it"),
                invalid if is_early(invalid) => f.write_str(
                    "its TLS certificate is not valid yet: compare the clocks of both hosts",
                ),
                invalid => write!(f, "its TLS certificate is not accepted: {invalid}"),
            },
            Rustls::NoCertificatesPresented => f.write_str("it has no TLS certificate"),
            Rustls::AlertReceived(alert) => match alert {
                // The peer sends the second one if its CA has the same name and another key.
                AlertDescription::UnknownCA | AlertDescription::DecryptError => write!(
                    f,
                    "it does not accept the TLS certificate of this process, which is not from its CA: {SAME}"
                ),
                AlertDescription::CertificateExpired => f.write_str(
                    "it does not accept the TLS certificate of this process, which is not valid now: has it expired, or is \
                     a clock wrong?",
                ),
                AlertDescription::CertificateRequired => {
                    f.write_str("it asks for a TLS certificate, and this process has none")
                }
                alert => write!(f, "it ended TLS with the alert {alert:?}"),
            },
            Rustls::PeerIncompatible(PeerIncompatible::Tls12NotOffered) => {
                f.write_str("it does not offer TLS 1.3")
            }
            error => write!(f, "TLS failed: {error}"),
        }
    }
}

/// Whether another CA signed the certificate. If that CA has the same name, the signature is wrong.
fn is_foreign(error: &CertificateError) -> bool {
    matches!(
        error,
        CertificateError::UnknownIssuer | CertificateError::BadSignature
    )
}

fn is_expired(error: &CertificateError) -> bool {
    matches!(
        error,
        CertificateError::Expired | CertificateError::ExpiredContext { .. }
    )
}

fn is_early(error: &CertificateError) -> bool {
    matches!(
        error,
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. }
    )
}

/// What is wrong with the certificate of this process, which its own CA does not accept.
pub(super) fn of_own_certificate(error: &Rustls, ca: &Path) -> String {
    match error {
        Rustls::InvalidCertificate(invalid) if is_foreign(invalid) => {
            format!("is not signed by the CA in {}", ca.display())
        }
        Rustls::InvalidCertificate(invalid) if is_expired(invalid) => {
            "has expired: renew it".to_owned()
        }
        Rustls::InvalidCertificate(invalid) if is_early(invalid) => {
            "is not valid yet: is the clock of this host right?".to_owned()
        }
        error => format!("is not a certificate that others accept: {error}"),
    }
}
