//! A collector: a `rcomm-web` that watches a job and is asked for its report.
//!
//! It keeps the records; what comes from it is judged already.

use super::net::HttpAddress;
use super::{Collected, Poll, Source, SourceError};
use crate::report::Report;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{EndpointAddress, EndpointToken, HttpRequest};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Instant;

/// See the module.
pub struct CollectorSource {
    address: HttpAddress,
    token: Option<EndpointToken>,
    reached: Option<EndpointAddress>,
    last: Option<(u64, Arc<Report>)>,
}

/// What is read of the answer to `GET /api/v1/status`.
#[derive(Deserialize)]
struct Status {
    job: String,
    number: u64,
    silent_ranks: Vec<Rank>,
}

impl CollectorSource {
    /// The collector at this address; most want a token.
    pub fn new(address: HttpAddress, token: Option<EndpointToken>) -> Self {
        Self {
            address,
            token,
            reached: None,
            last: None,
        }
    }

    fn get<T: DeserializeOwned>(
        &mut self,
        path: &str,
        deadline: Instant,
    ) -> Result<T, SourceError> {
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
            200 => serde_json::from_slice(&answer.body)
                .map_err(|error| unusable(format!("its answer to {path} makes no sense: {error}"))),
            401 | 403 => Err(unusable(
                "it refused the token; give its own with --token".into(),
            )),
            503 => Err(unusable("it has looked at nothing yet".into())),
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
                    "its report is of form {:?}, this build reads {:?}",
                    report.schema,
                    Report::SCHEMA
                ),
            });
        }
        self.last = Some((status.number, report.clone()));
        let world_size = u32::try_from(report.input.ranks_expected).ok();
        Ok(Poll {
            collected: Some(Collected {
                job: status.job,
                report,
                silent: status.silent_ranks,
            }),
            world_size: world_size.filter(|&size| size > 0),
            ..Poll::default()
        })
    }
}
