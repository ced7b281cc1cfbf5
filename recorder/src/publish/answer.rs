//! Addresses, tokens and answers of an endpoint, shared by server and client.

use super::Identity;
use crate::error::Error;
use crate::model::{Failure, GroupId, ProcessGroupStatus, Rank, RankStatus};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The address of an endpoint. Written `unix:/path/of/socket` or `tcp:10.0.0.1:7000`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum EndpointAddress {
    /// The path of a unix socket on the endpoint's host.
    Unix(PathBuf),
    /// An IP address and a TCP port.
    Tcp(SocketAddr),
}

impl fmt::Display for EndpointAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl FromStr for EndpointAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(PathBuf::from(path)));
        }
        let tcp = text.strip_prefix("tcp:").and_then(|text| text.parse().ok());
        tcp.map(Self::Tcp).ok_or_else(|| Error::Endpoint {
            address: text.to_owned(),
            why: "not an address; expected unix:/path/of/socket or tcp:10.0.0.1:7000".to_owned(),
        })
    }
}

impl From<EndpointAddress> for String {
    fn from(address: EndpointAddress) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for EndpointAddress {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

/// The token that a client of a TCP endpoint must send. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct EndpointToken(String);

impl EndpointToken {
    /// Takes a text as a token.
    ///
    /// # Errors
    /// If the text has fewer than 16 characters, or one that is not a visible ASCII character.
    pub fn new(token: impl Into<String>) -> Result<Self, Error> {
        let token = token.into();
        if token.len() < 16 || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::InvalidConfig(
                "an endpoint token must have at least 16 characters, all of them visible ASCII and no spaces"
                    .to_owned(),
            ));
        }
        Ok(Self(token))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for EndpointToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EndpointToken(..)")
    }
}

/// The address of another rank's endpoint: one element of the answer to `GET /peers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerEndpoint {
    /// Rank in the world.
    pub rank: Rank,
    /// The address of the rank's endpoint.
    pub address: EndpointAddress,
}

/// The address that a rank publishes in the job's store, in JSON, so that every client of the store
/// finds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointNotice {
    /// The address of the rank's endpoint.
    pub address: EndpointAddress,
    /// The rank's host, as reported by the rank: the path of a unix socket is valid on that host only.
    pub host: String,
}

impl EndpointNotice {
    /// The prefix of the store keys of all ranks of an attempt.
    pub fn store_prefix(attempt: u32) -> String {
        format!("rcomm/endpoint/{attempt}/")
    }

    /// The store key of one rank's notice.
    pub fn store_key(attempt: u32, rank: Rank) -> String {
        format!("{}{rank}", Self::store_prefix(attempt))
    }
}

/// The answer to `POST /dump`: the process has written its dump.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenDump {
    /// The dump's location as its writer reports it: a path on the rank's host, for example.
    pub place: String,
}

/// The answer to `GET /status`: the rank's progress, without its record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankAnswer {
    /// The rank and process; `dump_time_ns` is the time of the request.
    pub identity: Identity,
    /// What the rank reports about itself.
    pub status: RankStatus,
    /// The progress of each group.
    pub groups: Vec<GroupAnswer>,
    /// The number of operations begun so far.
    pub records: u64,
    /// The capacity of the ring, in operations.
    pub entries: u64,
    /// Failures of this process: the first ones and the newest.
    #[serde(default)]
    pub failures: Vec<Failure>,
}

/// One group in a [`RankAnswer`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupAnswer {
    /// The group's number in this process.
    pub id: GroupId,
    /// The group's name.
    pub name: String,
    /// The group's purpose.
    pub desc: String,
    /// Number of the group's members; 0 if the record does not list them.
    pub size: u64,
    /// The group's progress on this rank.
    #[serde(flatten)]
    pub status: ProcessGroupStatus,
}

/// Header of the answer to `GET /dump`: the number that a later request sends as `since` to get only the changes.
pub(super) const CHANGE_HEADER: &str = "rcomm-change";
/// Header of the answer to `GET /dump?since=N`: N, if the answer contains only what changed since
/// answer N; absent if it contains the whole record.
pub(super) const SINCE_HEADER: &str = "rcomm-since";
/// Header of the answer to `GET /dump`: the capacity of the ring, in operations.
pub(super) const ENTRIES_HEADER: &str = "rcomm-entries";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_and_read_back() {
        for text in [
            "unix:/dev/shm/rcomm-0/job/0.0.sock",
            "tcp:[::1]:7000",
            "tcp:10.0.0.1:1",
        ] {
            let address: EndpointAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
        }
        for text in ["", "unix:", "10.0.0.1:1", "tcp:host", "http://x"] {
            let error = text.parse::<EndpointAddress>().unwrap_err();
            assert!(error.to_string().contains("unix:/path"), "{error}");
        }
    }

    #[test]
    fn short_tokens_are_refused_and_debug_output_hides_tokens() {
        assert!(EndpointToken::new("short").is_err());
        assert!(EndpointToken::new("sixteen chars or\r\nmore").is_err());
        let token = EndpointToken::new("0123456789abcdef").unwrap();
        assert!(!format!("{token:?}").contains("0123"));
    }
}
