//! The reason why a client has no connection to a server, as far as the client knows it.

use crate::op::error::{Error, ErrorKind};
use rcomm_recorder::model::text;
use rcomm_recorder::publish::{STORE_TAKES_TLS, TlsError};
use std::io;

/// Why there is no connection yet.
pub(super) enum Obstacle {
    /// The host's name cannot be resolved to an address.
    NoAddress(io::Error),
    /// Nothing listens at the port.
    NoListener,
    /// The connection could not be made.
    Unreachable(io::Error),
    /// The connection was closed without a reply.
    Closed,
    /// The connection was accepted, and no reply came in time.
    Silent,
    /// The answer began as a store's does, and the connection was closed after this many of its bytes.
    ClosedAfter(usize),
    /// The answer began as a store's does, and after this many of its bytes no more came in time.
    SilentAfter(usize),
    /// What answered is not a store; its first bytes, for a message.
    Foreign(String),
    /// TLS could not be set up with what listens there.
    Tls(TlsError),
    /// A store refused, for this reason.
    Refusal(String),
    /// The store answered with a wrong proof of the secret.
    WrongProof,
    /// The server closed the connection when it was asked to prove the secret.
    ClosedAtProof,
}

impl Obstacle {
    /// The error for an obstacle that [is final](Self::is_final): client and store do not agree on secret or TLS.
    pub(super) fn unauthorized(self, host: &str, port: u16) -> Error {
        let message = match self {
            Obstacle::WrongProof => format!(
                "the store at {host} port {port} has a different job secret from this process's, or is \
                 another job's: set RCOMM_JOB_SECRET to the same value on all ranks, or on none"
            ),
            Obstacle::Refusal(reason) if reason == STORE_TAKES_TLS => format!(
                "the store at {host} port {port} takes TLS only, and this process has none: set RCOMM_TLS_CERT, \
                 RCOMM_TLS_KEY and RCOMM_TLS_CA on all ranks, or on none"
            ),
            Obstacle::Tls(why) => {
                format!("TLS with the store at {host} port {port} failed: {why}")
            }
            Obstacle::Refusal(reason) => format!(
                "the store at {host} port {port} refuses this process: {reason}. Set RCOMM_JOB_SECRET and \
                 RCOMM_STORE to the same values on all ranks, or on none"
            ),
            other => format!("the store at {host} port {port} cannot be used: {other}"),
        };
        Error::new(ErrorKind::Unauthorized, message)
    }

    /// The error for an obstacle on the way to a store that has answered this client before. Only a port without a
    /// listener shows that the store is gone.
    pub(super) fn of_known_store(self, host: &str, port: u16) -> Error {
        let store = format!("the store at {host} port {port}");
        let kind = match self.is_silence() {
            true => ErrorKind::Timeout,
            false => ErrorKind::Store,
        };
        let message = match self {
            Obstacle::NoListener => format!("{store} is gone: nothing listens there"),
            Obstacle::Silent => format!(
                "{store} accepts a connection and does not answer: its process may have stopped"
            ),
            Obstacle::Unreachable(error) => format!("{store} cannot be reached: {error}"),
            Obstacle::Closed | Obstacle::ClosedAtProof => {
                format!("{store} closes new connections without a reply")
            }
            other => format!("cannot connect again to {store}: {other}"),
        };
        Error::new(kind, message)
    }

    /// Whether another try would meet the same obstacle.
    pub(super) fn is_final(&self) -> bool {
        match self {
            Obstacle::Refusal(_) | Obstacle::WrongProof => true,
            // A store that has too many connections closes some, whatever these wanted.
            Obstacle::Tls(why) => !matches!(why, TlsError::Closed),
            _ => false,
        }
    }

    /// Whether the only obstacle is that no answer arrived in time.
    pub(super) fn is_silence(&self) -> bool {
        match self {
            Obstacle::Silent | Obstacle::SilentAfter(_) => true,
            Obstacle::Unreachable(error) => error.kind() == io::ErrorKind::TimedOut,
            _ => false,
        }
    }
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Obstacle::NoAddress(error) => {
                write!(f, "the name cannot be resolved to an address ({error})")
            }
            Obstacle::NoListener => f.write_str(
                "nothing listens there. Is rank 0 up, and do all ranks have its MASTER_ADDR and \
                 MASTER_PORT?",
            ),
            Obstacle::Unreachable(error) => write!(f, "it cannot be reached ({error})"),
            Obstacle::Closed => f.write_str(
                "what listens there closes the connection without a reply. Is MASTER_PORT another \
                 program's port?",
            ),
            Obstacle::ClosedAtProof => f.write_str(
                "what listens there closes the connection when it is asked to prove the job's secret. Is it \
                 PyTorch's store? RCOMM_STORE=open uses one without a proof",
            ),
            Obstacle::Refusal(reason) => write!(f, "it refuses: {reason}"),
            Obstacle::Tls(why) => write!(f, "{why}"),
            Obstacle::WrongProof => f.write_str("it does not know the job's secret"),
            Obstacle::Silent => f.write_str(
                "what listens there accepts the connection and does not answer. Is MASTER_PORT another \
                 program's port?",
            ),
            Obstacle::ClosedAfter(bytes) => write!(
                f,
                "what listens there closed the connection after {} of its answer, which began as a \
                 store's does. Is its process ending?",
                text::bytes(*bytes as u64)
            ),
            Obstacle::SilentAfter(bytes) => write!(
                f,
                "what listens there fell silent after {} of its answer, which began as a store's \
                 does: its process or the network to it may have stopped",
                text::bytes(*bytes as u64)
            ),
            Obstacle::Foreign(answer) => write!(
                f,
                "what listens there is not a store: it answered {answer}. Is MASTER_PORT another \
                 program's port?"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::access::StoreAccess;
    use super::super::client::Connection;
    use super::*;
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    fn dial_again(port: u16) -> Error {
        let limit = Duration::from_millis(200);
        match Connection::dial_again("127.0.0.1", port, limit, &StoreAccess::Open) {
            Ok(_) => panic!("no store listens there"),
            Err(error) => error,
        }
    }

    #[test]
    fn a_store_is_called_gone_only_if_nothing_listens_at_its_port() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = listener.local_addr().expect("it is bound").port();
        // It accepts, as the system does for a process that is stopped, and does not answer.
        let began = Instant::now();
        let error = dial_again(port);
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("accepts a connection and does not answer"),
            "{text}"
        );
        assert!(
            !text.contains("gone") && !text.contains("MASTER_PORT"),
            "{text}"
        );
        assert!(began.elapsed() >= Duration::from_millis(200));
        // It closes each connection.
        let closes = std::thread::spawn(move || {
            let accepted = listener.accept();
            drop(accepted);
            let accepted = listener.accept();
            drop((accepted, listener));
        });
        let text = dial_again(port).to_string();
        assert!(
            text.contains("closes new connections") && !text.contains("gone"),
            "{text}"
        );
        // The first connection that was accepted was that of the silent try.
        let _ = closes.join();
        let error = dial_again(port);
        assert_eq!(error.kind(), ErrorKind::Store, "{error}");
        assert!(
            error.to_string().contains("is gone: nothing listens there"),
            "{error}"
        );
    }
}
