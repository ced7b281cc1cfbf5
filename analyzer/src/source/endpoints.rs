//! The endpoints of a job's ranks: any one of them tells where the others are, and so does the job's
//! store.
//!
//! Every rank is asked for what changed since it was asked last, at the same time as the others and
//! until the same deadline: one that does not answer is its own failure, never a stall of the whole.

use super::net::{HostPort, ask_all};
use super::{Liveness, Observation, Poll, Seen, Source, SourceError, is_same, store};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{
    Dump, EndpointAddress, EndpointClient, EndpointFollower, EndpointToken, PeerEndpoint,
};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the ranks that are known are asked for others.
const PEERS: Duration = Duration::from_secs(10);

/// See the module.
pub struct EndpointSource {
    given: Vec<EndpointAddress>,
    store: Option<HostPort>,
    token: Option<EndpointToken>,
    ranks: BTreeMap<Rank, Mutex<Followed>>,
    asked_for_peers: Option<Instant>,
}

/// One rank's endpoint, and what it said last.
struct Followed {
    follower: EndpointFollower,
    last: Option<Dump>,
}

impl EndpointSource {
    /// The ranks behind these addresses, and those that they know of. Over TCP a token is needed.
    pub fn new(given: Vec<EndpointAddress>, token: Option<EndpointToken>) -> Self {
        Self {
            given,
            store: None,
            token,
            ranks: BTreeMap::new(),
            asked_for_peers: None,
        }
    }

    /// The ranks whose addresses are in a job's store. Over TCP a token is needed.
    pub fn in_store(store: HostPort, token: Option<EndpointToken>) -> Self {
        Self {
            store: Some(store),
            ..Self::new(Vec::new(), token)
        }
    }

    fn client(&self, address: &EndpointAddress) -> EndpointClient {
        EndpointClient::new(address.clone(), self.token.clone())
    }

    /// Finds ranks: in the store, behind the addresses given, and those that one of them knows of.
    fn find(&mut self, deadline: Instant) -> Result<(), SourceError> {
        let mut failure = self.find_in_store(deadline).err();
        for address in self.given.clone() {
            let client = self.client(&address);
            let peers = client.status(deadline).and_then(|status| {
                let own = status.identity.rank.map(|rank| (rank, address.clone()));
                let others = client.peers(deadline)?;
                let others = others.into_iter().map(|peer| (peer.rank, peer.address));
                Ok(others.chain(own).collect::<Vec<_>>())
            });
            match peers {
                Ok(peers) => {
                    for (rank, address) in peers {
                        self.follow(rank, &address);
                    }
                }
                Err(error) => failure = failure.or(Some(error.to_string())),
            }
        }
        self.asked_for_peers = Some(Instant::now());
        match failure {
            Some(what) if self.ranks.is_empty() => Err(SourceError::Nothing {
                what,
                hint: "name the endpoint of any rank of a running job".into(),
            }),
            _ => Ok(()),
        }
    }

    fn find_in_store(&mut self, deadline: Instant) -> Result<(), String> {
        let Some(store) = self.store.clone() else {
            return Ok(());
        };
        let found = store::read_by_rank(&store, PeerEndpoint::STORE_KEY, None, deadline)
            .map_err(|error| format!("failed to read store {store}: {error}"))?;
        if found.is_empty() {
            let key = PeerEndpoint::STORE_KEY;
            return Err(format!("store {store} holds no endpoint ({key}0, ...)"));
        }
        for (rank, text) in found {
            let address = text
                .parse()
                .map_err(|error| format!("store {store}: {error}"))?;
            self.follow(rank, &address);
        }
        Ok(())
    }

    fn follow(&mut self, rank: Rank, address: &EndpointAddress) {
        let known = self.ranks.get_mut(&rank).is_some_and(|followed| {
            let followed = followed.get_mut().unwrap_or_else(PoisonError::into_inner);
            followed.follower.client().address() == address
        });
        if !known {
            let followed = Followed {
                follower: EndpointFollower::new(self.client(address)),
                last: None,
            };
            self.ranks.insert(rank, Mutex::new(followed));
        }
    }
}

impl Source for EndpointSource {
    fn name(&self) -> String {
        let store = self.store.iter().map(|store| format!("store {store}"));
        let given = self.given.iter().map(ToString::to_string);
        let through: Vec<String> = store.chain(given).collect();
        format!("endpoints found through {}", through.join(", "))
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        if self
            .asked_for_peers
            .is_none_or(|asked| asked.elapsed() >= PEERS)
        {
            self.find(deadline)?;
        }
        let ranks: Vec<(&Rank, &Mutex<Followed>)> = self.ranks.iter().collect();
        let observations = ask_all(&ranks, |(rank, followed)| {
            let mut followed = followed.lock().unwrap_or_else(PoisonError::into_inner);
            followed.look(**rank, deadline)
        });
        let last = self.ranks.values_mut().filter_map(|followed| {
            let followed = followed.get_mut().unwrap_or_else(PoisonError::into_inner);
            followed.last.as_ref()?.identity.world_size
        });
        Ok(Poll {
            world_size: last.max(),
            observations,
            ..Poll::default()
        })
    }
}

impl Followed {
    fn look(&mut self, rank: Rank, deadline: Instant) -> Observation {
        let seen = match self.follower.poll(deadline) {
            Err(error) => Seen::Failed(error.to_string()),
            Ok(_) => {
                let dump = self.follower.dump();
                if self.last.as_ref().is_some_and(|last| is_same(last, dump)) {
                    Seen::Unchanged {
                        heartbeat_ns: dump.status.as_ref().map_or(0, |s| s.heartbeat_ns),
                        as_of_ns: dump.identity.dump_time_ns,
                    }
                } else {
                    self.last = Some(dump.clone());
                    Seen::Changed(Box::new(dump.clone()))
                }
            }
        };
        let liveness = match seen {
            Seen::Failed(_) => Liveness::Unknown,
            _ => Liveness::Alive,
        };
        Observation {
            rank,
            part: 0,
            liveness,
            seen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::publish::{Endpoint, Listen};
    use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
    use std::path::Path;
    use std::sync::Arc;

    fn serve(directory: &Path, rank: Rank) -> Endpoint {
        let mut config = RecorderConfig::new("job", rank, 2);
        config.placement = Placement::Dir(directory.to_owned());
        let recorder = Arc::new(FlightRecorder::create(&config).expect("a ring"));
        let socket = directory.join(format!("{rank}.sock"));
        Endpoint::serve(recorder, Listen::Unix(socket)).expect("a free path")
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn one_endpoint_leads_to_all_and_one_that_dies_fails_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let endpoints = [0, 1].map(|rank| serve(directory.path(), rank));
        let peers: Vec<PeerEndpoint> = (0..)
            .zip(&endpoints)
            .map(|(rank, endpoint)| PeerEndpoint {
                rank,
                address: endpoint.address().clone(),
            })
            .collect();
        let [first, second] = endpoints;
        first.set_peers(peers);
        let mut source = EndpointSource::new(vec![first.address().clone()], None);
        let poll = source.poll(soon()).expect("the first answers");
        let ranks: Vec<Rank> = poll.observations.iter().map(|o| o.rank).collect();
        assert_eq!((ranks, poll.world_size), (vec![0, 1], Some(2)));
        let changed = |o: &Observation| matches!(o.seen, Seen::Changed(_));
        assert!(poll.observations.iter().all(changed));
        drop(second);
        let poll = source.poll(soon()).expect("the first still answers");
        assert!(matches!(poll.observations[0].seen, Seen::Unchanged { .. }));
        assert!(matches!(poll.observations[1].seen, Seen::Failed(_)));
    }

    #[test]
    fn ranks_are_found_through_the_store() {
        let directory = tempfile::tempdir().expect("a directory");
        let endpoints = [0, 1].map(|rank| serve(directory.path(), rank));
        let keys = (0..).zip(&endpoints).map(|(rank, endpoint)| {
            let key = format!("/{}{rank}", PeerEndpoint::STORE_KEY);
            (key, endpoint.address().to_string().into_bytes())
        });
        let store = store::tests::serve(keys.collect());
        let mut source = EndpointSource::in_store(store.clone(), None);
        let poll = source.poll(soon()).expect("the store answers");
        let ranks: Vec<Rank> = poll.observations.iter().map(|o| o.rank).collect();
        assert_eq!(ranks, [0, 1]);
        assert!(
            source.name().contains(&store.to_string()),
            "{}",
            source.name()
        );
        let empty = store::tests::serve([].into());
        let error = EndpointSource::in_store(empty, None)
            .poll(soon())
            .expect_err("no rank");
        assert!(error.to_string().contains("rcomm/endpoint/0"), "{error}");
    }

    #[test]
    fn an_address_where_nobody_listens_is_an_error_that_names_it() {
        let address = EndpointAddress::Unix("/does/not/exist.sock".into());
        let error = EndpointSource::new(vec![address], None)
            .poll(soon())
            .expect_err("nobody");
        assert!(
            error.to_string().contains("/does/not/exist.sock"),
            "{error}"
        );
    }
}
