//! The client of an endpoint.
//!
//! Each request opens a new connection; one deadline covers connecting and the answer. Nothing in the answer is
//! trusted.

use super::answer::{
    CHANGE_HEADER, ENTRIES_HEADER, EndpointAddress, EndpointToken, PeerEndpoint, RankAnswer,
    SINCE_HEADER, WrittenDump,
};
use super::http::{AnswerBudget, HttpAnswer, HttpRequest};
#[cfg(feature = "tls")]
use super::tls::Tls;
use super::{Dump, ReadProblem};
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::Instant;

/// One answer to `GET /dump`.
#[derive(Debug)]
pub struct DumpAnswer {
    /// The record, or the part of it that changed.
    pub dump: Dump,
    /// What was lost in reading the record.
    pub problems: Vec<ReadProblem>,
    /// The number to pass to the next [`EndpointClient::dump`]; `None` if the endpoint sent none.
    pub change: Option<u64>,
    /// Whether `dump` contains only what changed since the answer whose number was passed.
    pub partial: bool,
    /// Capacity of the ring, in operations; `None` if the endpoint did not send it.
    pub entries: Option<u64>,
}

/// Maximum length of the part of an endpoint's error text that this client's errors quote, in characters.
const MAX_ERROR_TEXT: usize = 200;

/// A client of one endpoint.
///
/// Each request opens a connection and blocks until the answer is read, at most until the deadline. It fails with
/// [`Error::Endpoint`] if the endpoint cannot be reached in time, refuses the request, or sends an invalid answer.
#[derive(Clone, Debug)]
pub struct EndpointClient {
    address: EndpointAddress,
    token: Option<EndpointToken>,
    budget: Option<Arc<AnswerBudget>>,
    #[cfg(feature = "tls")]
    tls: Option<Tls>,
}

impl EndpointClient {
    /// A client of the endpoint at this address; TCP endpoints require a token.
    pub fn new(address: EndpointAddress, token: Option<EndpointToken>) -> Self {
        Self {
            address,
            token,
            budget: None,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Uses this TLS identity with an endpoint over TCP; `None` means no TLS.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(self, tls: Option<Tls>) -> Self {
        Self { tls, ..self }
    }

    /// Lets all answers count toward this budget, which other clients may share; `None` means no budget.
    #[must_use]
    pub fn with_budget(self, budget: Option<Arc<AnswerBudget>>) -> Self {
        Self { budget, ..self }
    }

    /// The endpoint's address.
    pub fn address(&self) -> &EndpointAddress {
        &self.address
    }

    /// The rank's status, without its record.
    pub fn status(&self, deadline: Instant) -> Result<RankAnswer> {
        let answer = self.get("/status", deadline)?;
        self.json(&answer.body)
    }

    /// The addresses of the other ranks' endpoints.
    pub fn peers(&self, deadline: Instant) -> Result<Vec<PeerEndpoint>> {
        let answer = self.get("/peers", deadline)?;
        self.json(&answer.body)
    }

    /// The rank's record; with the number of an earlier answer only the changes since that answer, if the endpoint
    /// still knows the number.
    pub fn dump(&self, since: Option<u64>, deadline: Instant) -> Result<DumpAnswer> {
        let path = match since {
            Some(since) => format!("/dump?since={since}"),
            None => "/dump".to_owned(),
        };
        let answer = self.get(&path, deadline)?;
        let (dump, problems) = Dump::read(&answer.body)
            .map_err(|error| self.error(format!("its answer is not a valid record: {error}")))?;
        let number = |name| answer.field(name).and_then(|text| text.parse().ok());
        let since_answered: Option<u64> = number(SINCE_HEADER);
        Ok(DumpAnswer {
            dump,
            problems,
            change: number(CHANGE_HEADER),
            partial: since_answered.is_some() && since_answered == since,
            entries: number(ENTRIES_HEADER),
        })
    }

    /// Asks the process to write its dump; returns the location that the process reports.
    pub fn write_dump(&self, deadline: Instant) -> Result<WrittenDump> {
        let answer = self.send(HttpRequest::post("/dump"), deadline)?;
        self.json(&answer.body)
    }

    fn error(&self, why: impl Into<String>) -> Error {
        Error::Endpoint {
            address: self.address.to_string(),
            why: why.into(),
        }
    }

    fn json<T: serde::de::DeserializeOwned>(&self, body: &[u8]) -> Result<T> {
        serde_json::from_slice(body)
            .map_err(|error| self.error(format!("its answer is invalid: {error}")))
    }

    fn get(&self, path: &str, deadline: Instant) -> Result<HttpAnswer> {
        self.send(HttpRequest::get(path), deadline)
    }

    /// Sends a request. Fails unless the answer's status is 200.
    fn send(&self, request: HttpRequest<'_>, deadline: Instant) -> Result<HttpAnswer> {
        let request = HttpRequest {
            token: self.token.as_ref(),
            budget: self.budget.as_deref(),
            ..request
        };
        #[cfg(feature = "tls")]
        let answer = match &self.tls {
            Some(tls) => request.send_with_tls(tls, &self.address, deadline),
            None => request.send(&self.address, deadline),
        };
        #[cfg(not(feature = "tls"))]
        let answer = request.send(&self.address, deadline);
        let answer = answer.map_err(|error| self.error(error.to_string()))?;
        match answer.status {
            200 => Ok(answer),
            401 if self.token.is_none() => Err(self.error("it requires a token")),
            401 => Err(self.error("it refused the token")),
            status => {
                let text = String::from_utf8_lossy(&answer.body);
                let text = text.trim().chars().filter(|c| !c.is_control());
                let text: String = text.take(MAX_ERROR_TEXT).collect();
                let colon = if text.is_empty() { "" } else { ": " };
                Err(self.error(format!(
                    "it answered with HTTP status {status}{colon}{text}"
                )))
            }
        }
    }
}
