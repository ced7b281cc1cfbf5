//! Reads a collector, which is an `rcomm-web` that watches a job, as a source of a report and of records.
//!
//! The collector has judged the records with all that its own sources know, so its report is shown. The records are for
//! views that show them. An older collector serves none: then only the report is read.

use super::address::HttpAddress;
use crate::live::source::{Collected, Observation, Poll, RecordsFollower, Source, SourceError};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{EndpointAddress, EndpointToken, HttpRequest};
use rcomm_verdict::{LaterAttempt, Report};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Instant;

/// The route of the records.
const RECORDS: &str = "/api/v1/records";

/// A collector as a source; see the module.
pub struct CollectorSource {
    address: HttpAddress,
    token: Option<EndpointToken>,
    /// The address that answered the last request; `None` if none did.
    reached: Option<EndpointAddress>,
    /// The newest report that was read, and the number of its snapshot.
    last: Option<(u64, Arc<Report>)>,
    records: RecordsFollower,
    /// Whether the collector serves records, as far as its answers have shown.
    serves_records: bool,
}

/// The fields that are read from the answer to `GET /api/v1/status`.
#[derive(Deserialize)]
struct Status {
    job: String,
    number: u64,
    silent_ranks: Vec<Rank>,
    /// Not in the answers of older collectors.
    #[serde(default)]
    later_attempt: Option<LaterAttempt>,
}

impl CollectorSource {
    /// Reads the collector at this address; most collectors require a token.
    pub fn new(address: HttpAddress, token: Option<EndpointToken>) -> Self {
        Self {
            address,
            token,
            reached: None,
            last: None,
            records: RecordsFollower::default(),
            serves_records: true,
        }
    }

    fn get<T: DeserializeOwned>(
        &mut self,
        path: &str,
        deadline: Instant,
    ) -> Result<T, SourceError> {
        let body = self.ask(path, deadline)?;
        serde_json::from_slice(&body).map_err(|error| SourceError::Unusable {
            place: self.name(),
            reason: format!("its answer to {path} is invalid: {error}"),
        })
    }

    /// The observations of all records that the collector serves; empty if it serves none.
    fn observe(&mut self, deadline: Instant) -> Result<Vec<Observation>, SourceError> {
        if !self.serves_records {
            return Ok(Vec::new());
        }
        let mut observations = Vec::new();
        for question in self.records.questions() {
            let (ranks, since) = (question.ranks_text(), &question.since);
            let path = format!("{RECORDS}?ranks={ranks}&since={since}");
            let taken = match self.ask(&path, deadline) {
                Err(SourceError::Nothing { .. }) => {
                    self.serves_records = false;
                    return Ok(Vec::new());
                }
                Err(error) => Err(error),
                Ok(body) => {
                    let taken = self.records.take(&question, &body, &mut observations);
                    taken.map_err(|reason| SourceError::Unusable {
                        place: self.name(),
                        reason,
                    })
                }
            };
            match taken {
                Ok(_) => {}
                Err(error) if observations.is_empty() => return Err(error),
                // Records that arrived before the failure are kept.
                Err(error) => {
                    let why = error.to_string();
                    self.records.break_off(&mut observations, &why);
                    break;
                }
            }
        }
        Ok(observations)
    }

    /// The body of the answer to a request for `path`; an error if the status is not 200.
    fn ask(&mut self, path: &str, deadline: Instant) -> Result<Vec<u8>, SourceError> {
        let place = self.name();
        let request = HttpRequest {
            token: self.token.as_ref(),
            ..HttpRequest::get(path)
        };
        let unusable = |reason: String| SourceError::Unusable {
            place: place.clone(),
            reason,
        };
        let answer = self.address.ask(&request, &mut self.reached, deadline);
        let answer = answer.map_err(unusable)?;
        match answer.status {
            200 => Ok(answer.body),
            404 if path.starts_with(RECORDS) => Err(SourceError::Nothing {
                what: format!("{place} serves no records"),
                hint: "only its report is shown".into(),
            }),
            401 | 403 => {
                let why = match self.token {
                    Some(_) => "it refused the token",
                    None => "it requires a token",
                };
                Err(unusable(format!(
                    "{why}; pass the collector's token with --token"
                )))
            }
            503 => Err(unusable("it has not read its sources yet".into())),
            status => Err(unusable(format!(
                "it answered {path} with HTTP status {status}"
            ))),
        }
    }
}

impl Source for CollectorSource {
    fn name(&self) -> String {
        format!("collector at {}", self.address)
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        let status: Status = self.get("/api/v1/status", deadline)?;
        let report = match &self.last {
            Some((number, report)) if *number == status.number => report.clone(),
            _ => Arc::new(self.get("/api/v1/report", deadline)?),
        };
        if report.schema != Report::SCHEMA {
            return Err(SourceError::Unusable {
                place: self.name(),
                reason: format!(
                    "its report has the schema {:?}, but this build reads {:?}",
                    report.schema,
                    Report::SCHEMA
                ),
            });
        }
        self.last = Some((status.number, report.clone()));
        let observations = self.observe(deadline)?;
        let world_size = u32::try_from(report.input.ranks_expected).ok();
        let is_stated = !report.input.may_have_more;
        Ok(Poll {
            collected: Some(Collected {
                job: status.job,
                report,
                silent: status.silent_ranks,
            }),
            world_size: world_size.filter(|&size| size > 0 && is_stated),
            later_attempt: status.later_attempt,
            observations,
            ..Poll::default()
        })
    }
}
