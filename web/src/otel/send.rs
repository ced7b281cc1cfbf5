//! Sends one request and reads one answer, within one deadline.

use super::settings::Destination;
use prost::Message;
use std::io::Read as _;

/// Why a request was not exported.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    /// The connection failed, or no answer arrived in time.
    #[error("{url}: {source}")]
    Failed {
        url: String,
        source: Box<ureq::Error>,
    },
    /// The OTLP collector answered with a status other than success.
    #[error("{url} answered with HTTP status {status}: {text}")]
    Refused {
        url: String,
        status: u16,
        text: String,
    },
}

/// Sends requests over HTTP, in connections that it keeps.
pub(super) struct Sender {
    agent: ureq::Agent,
}

impl Sender {
    pub(super) fn new() -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("rcomm-web/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: config.into(),
        }
    }

    /// Sends a request. Blocks until it is answered, at most for the destination's time-out.
    pub(super) fn send(
        &self,
        destination: &Destination,
        message: &impl Message,
    ) -> Result<(), SendError> {
        let url = || destination.url.clone();
        let mut request = self
            .agent
            .post(&destination.url)
            .config()
            .timeout_global(Some(destination.timeout))
            .build()
            .header("content-type", "application/x-protobuf");
        for (name, value) in &destination.headers {
            request = request.header(name, value);
        }
        let answer = request.send(message.encode_to_vec());
        let mut answer = answer.map_err(|error| SendError::Failed {
            url: url(),
            source: Box::new(error),
        })?;
        if answer.status().is_success() {
            return Ok(());
        }
        let mut text = String::new();
        // The body is only a hint for people: its first 200 bytes are enough, and errors of reading it do not matter.
        let _ = answer
            .body_mut()
            .as_reader()
            .take(200)
            .read_to_string(&mut text);
        Err(SendError::Refused {
            url: url(),
            status: answer.status().as_u16(),
            text: text.escape_debug().to_string(),
        })
    }
}
