//! A collector's sources: the records of a whole job, read from the rcomm-web instances on its nodes.
//!
//! Every node is one source, which a separate thread queries for changes. A dead or slow node affects only its own
//! ranks, which fall silent. The first answer holds all entries of each rank, a later one only those from the oldest on
//! that had not ended at the previous answer.

mod discovery;

pub use discovery::Nodes;

use discovery::NodeAddress;
use rcomm_analyzer::source::{Observation, Poll, RecordsFollower, Source, SourceError};
use std::io::{self, Read as _};
use std::time::Instant;

/// Maximum size of a node's answer, in bytes; the rest is not read.
const MAX_BYTES: u64 = 1 << 30;

/// One node of a job, as a source of the records of its ranks.
pub struct NodeSource {
    address: NodeAddress,
    /// The last known URL; `None` if the address must be looked up.
    url: Option<String>,
    token: Option<String>,
    agent: ureq::Agent,
    records: RecordsFollower,
}

impl NodeSource {
    /// Creates a source for each node; `token` is sent to all of them.
    ///
    /// # Blocking
    ///
    /// Until the name is resolved, for as long as the system's resolver takes, or the job's store has answered: at
    /// most five seconds.
    ///
    /// # Errors
    ///
    /// If the name cannot be resolved, or the job's store cannot be read or lists no hosts.
    pub fn all(nodes: Nodes, token: Option<&str>) -> io::Result<Vec<Box<dyn Source>>> {
        let addresses = NodeAddress::all(nodes)?;
        let source = |address| -> Box<dyn Source> {
            let config = ureq::Agent::config_builder()
                .http_status_as_error(false)
                .max_redirects(0)
                .build();
            Box::new(Self {
                address,
                url: None,
                token: token.map(str::to_owned),
                agent: config.into(),
                records: RecordsFollower::default(),
            })
        };
        Ok(addresses.into_iter().map(source).collect())
    }
}

impl Source for NodeSource {
    fn name(&self) -> String {
        self.address.name()
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        let url = match &self.url {
            Some(url) => url.clone(),
            None => {
                let url = self.address.url().map_err(|source| SourceError::Io {
                    place: self.name(),
                    source,
                })?;
                self.url.insert(url).clone()
            }
        };
        let mut observations = Vec::new();
        let token = self.token.as_deref();
        let records = &mut self.records;
        let result = query_node(
            records,
            &self.agent,
            &url,
            token,
            deadline,
            &mut observations,
        );
        let world_size = match result {
            Ok(world_size) => Some(world_size),
            Err(why) => {
                self.url = None;
                if records.known().next().is_none() {
                    return Err(SourceError::Unusable {
                        place: url,
                        reason: why,
                    });
                }
                // Keep the records received before the connection broke.
                records.break_off(&mut observations, &format!("{url}: {why}"));
                None
            }
        };
        Ok(Poll {
            observations,
            // A node that does not know how many ranks the job has states 0.
            world_size: world_size.filter(|&size| size > 0),
            later_attempt: records.later_attempt().cloned(),
            ..Poll::default()
        })
    }
}

/// Queries one node; adds its records to `observations`. Returns the world size, or why the query failed.
fn query_node(
    records: &mut RecordsFollower,
    agent: &ureq::Agent,
    url: &str,
    token: Option<&str>,
    deadline: Instant,
    observations: &mut Vec<Observation>,
) -> Result<u32, String> {
    let mut world_size = 0;
    for question in records.questions() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("it was not queried: the time-out of the poll is over".into());
        }
        let mut request = agent
            .get(format!("{}/api/v1/records", url.trim_end_matches('/')))
            .query("ranks", question.ranks_text())
            .query("since", &question.since)
            .config()
            .timeout_global(Some(left))
            .build();
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut answer = request.call().map_err(|error| error.to_string())?;
        match answer.status().as_u16() {
            200 => {}
            401 if token.is_none() => {
                return Err("it requires a token: pass --nodes-token-file".into());
            }
            401 => return Err("it refused the token".into()),
            503 => return Err("it has not read its records yet".into()),
            status => return Err(format!("it answered with HTTP status {status}")),
        }
        let mut body = Vec::new();
        let reader = answer.body_mut().as_reader();
        let read = reader.take(MAX_BYTES).read_to_end(&mut body);
        read.map_err(|error| format!("its answer was cut off: {error}"))?;
        let size = records.take(&question, &body, observations)?;
        world_size = size.max(world_size);
    }
    Ok(world_size)
}
