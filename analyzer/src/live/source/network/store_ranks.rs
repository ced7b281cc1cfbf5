//! Reads the ranks that a job's store lists, whether they have endpoints of rcomm or PyTorch's worker servers.

use super::address::HostPort;
use super::endpoints::{EndpointDumps, EndpointSource};
use super::worker_servers::{WorkerServerDumps, WorkerServerSource};
use crate::live::source::{DumpAnswers, DumpRequests, Poll, Source, SourceError};
use rcomm_recorder::publish::EndpointToken;
use std::time::Instant;

/// The ranks that a job's store lists: the endpoints of ranks of rcomm or, if there is none, PyTorch's worker servers.
///
/// The store is searched until it lists either. Then the source keeps to that kind, and searches for the other kind
/// only if no rank of its kind is listed any more.
pub struct StoreSource {
    store: HostPort,
    endpoints: EndpointSource,
    workers: WorkerServerSource,
    lists_workers: bool,
}

impl StoreSource {
    /// Reads the ranks that are listed in this store: worker servers of `world_size` ranks, or of all that it lists.
    /// Endpoints over TCP require a token.
    pub fn new(store: HostPort, token: Option<EndpointToken>, world_size: Option<u32>) -> Self {
        Self {
            endpoints: EndpointSource::in_store(store.clone(), token),
            workers: WorkerServerSource::in_store(store.clone(), world_size),
            store,
            lists_workers: false,
        }
    }
}

impl Source for StoreSource {
    fn name(&self) -> String {
        format!("ranks found in store {}", self.store)
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        let sources: [&mut dyn Source; 2] = match self.lists_workers {
            true => [&mut self.workers, &mut self.endpoints],
            false => [&mut self.endpoints, &mut self.workers],
        };
        let (result, is_second) = first_that_lists_any(sources, |source| source.poll(deadline));
        self.lists_workers ^= is_second;
        result
    }
}

/// Requests dumps from the ranks that a job's store lists.
pub struct StoreDumps {
    endpoints: EndpointDumps,
    workers: WorkerServerDumps,
}

impl StoreDumps {
    /// Requests dumps from the ranks of this source, on separate connections.
    pub fn new(source: StoreSource) -> Self {
        Self {
            endpoints: EndpointDumps::new(source.endpoints),
            workers: WorkerServerDumps::new(source.workers),
        }
    }
}

impl DumpRequests for StoreDumps {
    fn ask(&self, deadline: Instant) -> Result<DumpAnswers, SourceError> {
        let ranks: [&dyn DumpRequests; 2] = [&self.endpoints, &self.workers];
        first_that_lists_any(ranks, |ranks| ranks.ask(deadline)).0
    }
}

/// The answer of the first of two, or of the second if the first one finds no rank; and whether it is a successful
/// answer of the second. If neither finds any, the error names both.
fn first_that_lists_any<S, T>(
    [first, second]: [S; 2],
    mut ask: impl FnMut(S) -> Result<T, SourceError>,
) -> (Result<T, SourceError>, bool) {
    let (what, hint) = match ask(first) {
        Err(SourceError::Nothing { what, hint }) => (what, hint),
        answer => return (answer, false),
    };
    match ask(second) {
        Err(SourceError::Nothing {
            what: second_what,
            hint: second_hint,
        }) => {
            let neither = SourceError::Nothing {
                what: format!("{what}; {second_what}"),
                hint: format!("{hint}; or {second_hint}"),
            };
            (Err(neither), false)
        }
        answer => {
            let has_ranks = answer.is_ok();
            (answer, has_ranks)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(what: &str) -> SourceError {
        SourceError::Nothing {
            what: what.to_owned(),
            hint: format!("hint on {what}"),
        }
    }

    #[test]
    fn the_listed_kind_of_ranks_is_used_and_the_error_for_an_empty_store_names_both_kinds() {
        let ask =
            |answers: [Result<u8, SourceError>; 2]| first_that_lists_any(answers, |answer| answer);
        assert!(matches!(ask([Ok(1), Ok(2)]), (Ok(1), false)));
        assert!(matches!(ask([Err(nothing("a")), Ok(2)]), (Ok(2), true)));
        let (neither, _) = ask([Err(nothing("a")), Err(nothing("b"))]);
        let text = neither.expect_err("no rank is listed").to_string();
        assert_eq!(text, "a; b; hint on a; or hint on b");
        let refused = SourceError::Unusable {
            place: "store".to_owned(),
            reason: "no secret".to_owned(),
        };
        // A store that cannot be read is not searched for the other kind.
        let (error, _) = ask([Err(refused), Ok(2)]);
        assert!(matches!(error, Err(SourceError::Unusable { .. })));
    }
}
