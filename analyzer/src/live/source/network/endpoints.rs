//! Reads the endpoints of a job's ranks as a source. Each endpoint lists the others, and so does the job's store.
//!
//! A poll asks the ranks for the changes since the last poll, up to 32 at the same time, all until the same deadline.
//! If a rank does not answer, the others are shown nevertheless.

use super::address::HostPort;
use super::questions::{NO_ANSWER_YET, RankPoller, ask_all, unless_asked};
use super::store;
use crate::live::source::{
    DumpAnswers, DumpRequests, Liveness, Observation, Poll, Seen, Source, SourceError, is_same,
};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{
    AnswerBudget, Dump, EndpointAddress, EndpointClient, EndpointFollower, EndpointNotice,
    EndpointToken, Tls,
};
use rcomm_verdict::format::count;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time between two requests for further ranks.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// The most bytes that the answers of all endpoints to one poll may have together.
const MOST_ANSWERED: usize = 4 << 30;

/// The endpoints of a job as a source; see the module.
pub struct EndpointSource {
    /// The addresses that the user named.
    given: Vec<EndpointAddress>,
    store: Option<HostPort>,
    token: Option<EndpointToken>,
    /// The budget of bytes that all answers to one poll share.
    budget: Arc<AnswerBudget>,
    /// The identity with which endpoints over TCP are asked; read from the environment at the first poll.
    tls: Option<Tls>,
    is_tls_read: bool,
    ranks: BTreeMap<Rank, KnownEndpoint>,
    poller: RankPoller<Observation>,
    /// The number of ranks of the job: the largest that a record states.
    world_size: Option<u32>,
    /// When further ranks were last requested.
    asked_for_peers: Option<Instant>,
    /// The attempt of the job whose ranks were found in the store.
    attempt: u32,
    /// Whether the store has shown a later attempt than that of the ranks known before, and no poll has stated it yet.
    is_restarted: bool,
    /// Ranks in the store whose endpoints cannot be reached from this host.
    unreachable: Vec<Rank>,
}

/// The endpoint of one rank; a request in progress locks `followed`.
struct KnownEndpoint {
    address: EndpointAddress,
    followed: Arc<Mutex<Followed>>,
}

/// The endpoint of one rank with its last answer.
struct Followed {
    follower: EndpointFollower,
    last: Option<Dump>,
}

impl EndpointSource {
    /// Reads the ranks at these addresses and those that they list. TCP requires a token.
    pub fn new(given: Vec<EndpointAddress>, token: Option<EndpointToken>) -> Self {
        Self {
            given,
            store: None,
            token,
            budget: Arc::new(AnswerBudget::new(MOST_ANSWERED)),
            tls: None,
            is_tls_read: false,
            ranks: BTreeMap::new(),
            poller: RankPoller::new(),
            world_size: None,
            asked_for_peers: None,
            attempt: 0,
            is_restarted: false,
            unreachable: Vec::new(),
        }
    }

    /// Reads the ranks whose addresses are in a job's store. TCP requires a token.
    pub fn in_store(store: HostPort, token: Option<EndpointToken>) -> Self {
        Self {
            store: Some(store),
            ..Self::new(Vec::new(), token)
        }
    }

    fn client(&self, address: &EndpointAddress) -> EndpointClient {
        EndpointClient::new(address.clone(), self.token.clone())
            .with_budget(Some(self.budget.clone()))
            .with_tls(self.tls.clone())
    }

    /// Finds ranks in the store, at the given addresses and in the lists of ranks that these endpoints return. Fails if
    /// no rank is known, or if this process has a TLS identity that cannot be used.
    fn find(&mut self, deadline: Instant) -> Result<(), SourceError> {
        if !self.is_tls_read {
            self.tls = Tls::from_environment().map_err(|error| SourceError::Unusable {
                place: "the TLS identity of this process".to_owned(),
                reason: error.to_string(),
            })?;
            self.is_tls_read = true;
        }
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
                Err(error) => {
                    failure = failure.or(Some(SourceError::Nothing {
                        what: error.to_string(),
                        hint: "name the endpoint of any rank of a running job".into(),
                    }));
                }
            }
        }
        self.asked_for_peers = Some(Instant::now());
        match failure {
            Some(failure) if self.ranks.is_empty() => Err(failure),
            _ => Ok(()),
        }
    }

    /// Finds the ranks of the newest attempt in the store, if a store was named, and drops those of an earlier one.
    fn find_in_store(&mut self, deadline: Instant) -> Result<(), SourceError> {
        let Some(store) = self.store.clone() else {
            return Ok(());
        };
        let listed = store::endpoints(&store, self.attempt, deadline);
        let listed = listed.map_err(|source| SourceError::Io {
            place: format!("store {store}"),
            source,
        })?;
        if listed.attempt != self.attempt && !self.ranks.is_empty() {
            self.is_restarted = true;
            self.ranks.clear();
            self.world_size = None;
            // This also drops late answers of the earlier attempt.
            self.poller = RankPoller::new();
        }
        self.attempt = listed.attempt;
        let system = rustix::system::uname();
        let this_host = system.nodename().to_string_lossy();
        // The path of a socket is valid only on its own host.
        let is_reachable = |notice: &EndpointNotice| {
            matches!(notice.address, EndpointAddress::Tcp(_)) || *notice.host == *this_host
        };
        let listed_ranks = listed.notices.len();
        self.unreachable.clear();
        for (rank, notice) in listed.notices {
            if is_reachable(&notice) {
                self.follow(rank, &notice.address);
            } else {
                self.unreachable.push(rank);
            }
        }
        match (listed_ranks, self.ranks.is_empty()) {
            (0, _) => Err(store::no_endpoint(&store)),
            (_, true) => Err(SourceError::Nothing {
                what: format!(
                    "store {store} lists {}, each on a unix socket of another host",
                    count(listed_ranks as u64, "rank")
                ),
                hint: "give the job endpoints over TCP, or look on the ranks' own hosts".into(),
            }),
            _ => Ok(()),
        }
    }

    /// Adds the endpoint of a rank; an address that is already known keeps its state.
    fn follow(&mut self, rank: Rank, address: &EndpointAddress) {
        let known = self.ranks.get(&rank);
        if known.is_none_or(|known| known.address != *address) {
            let followed = Followed {
                follower: EndpointFollower::new(self.client(address)),
                last: None,
            };
            let known = KnownEndpoint {
                address: address.clone(),
                followed: Arc::new(Mutex::new(followed)),
            };
            self.ranks.insert(rank, known);
        }
    }
}

/// Requests dumps through endpoints and, from the ranks that give none in this way, through the job's store, if it is
/// known.
pub struct EndpointDumps(Mutex<EndpointSource>);

impl EndpointDumps {
    /// Requests dumps from the ranks of this source, on separate connections.
    pub fn new(source: EndpointSource) -> Self {
        Self(Mutex::new(source))
    }
}

impl DumpRequests for EndpointDumps {
    fn ask(&self, deadline: Instant) -> Result<DumpAnswers, SourceError> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = source.find(deadline);
        if source.unreachable.is_empty() {
            found?;
        }
        // Half of the time is left for the store.
        let left = deadline.saturating_duration_since(Instant::now());
        let endpoint_deadline = Instant::now() + left / 2;
        let ranks = source.ranks.iter();
        let ranks: Vec<(Rank, EndpointClient)> = ranks
            .map(|(&rank, known)| (rank, source.client(&known.address)))
            .collect();
        let answers = ask_all(&ranks, |(rank, client)| {
            let written = client.write_dump(endpoint_deadline);
            let place = written.map(|written| written.place);
            (*rank, place.map_err(|error| error.to_string()))
        });
        let mut answers = DumpAnswers::of_writers(answers);
        if let Some(store) = &source.store {
            let unreachable = source.unreachable.iter();
            let reason = "its endpoint is a unix socket of another host";
            answers
                .refused
                .extend(unreachable.map(|&rank| (rank, reason.to_owned())));
            answers.refused.sort();
            if !answers.refused.is_empty() {
                ask_through(store, source.attempt, deadline, &mut answers);
            }
        }
        Ok(answers)
    }
}

/// Raises the alarm in the store, so that all ranks write their dumps, and moves the ranks that refused to `requested`.
/// If the store does not take the alarm, its error is added to the reason of each.
fn ask_through(store: &HostPort, attempt: u32, deadline: Instant, answers: &mut DumpAnswers) {
    match store::ask_for_dumps(store, attempt, "asked for from outside", deadline) {
        Ok(()) => {
            let refused = std::mem::take(&mut answers.refused);
            answers.requested = refused.into_iter().map(|(rank, _)| rank).collect();
        }
        Err(error) => {
            for (_, reason) in &mut answers.refused {
                reason.push_str(&format!(
                    "; store {store} could not be asked either: {error}"
                ));
            }
        }
    }
}

impl Source for EndpointSource {
    fn name(&self) -> String {
        let store = self.store.iter().map(|store| format!("store {store}"));
        let given = self.given.iter().map(ToString::to_string);
        let origins: Vec<String> = store.chain(given).collect();
        format!("endpoints found through {}", origins.join(", "))
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        self.budget.refill();
        let is_due = self
            .asked_for_peers
            .is_none_or(|asked| asked.elapsed() >= SEARCH_INTERVAL);
        if is_due {
            self.find(deadline)?;
        }
        let ranks = self.ranks.iter();
        let ranks: Vec<(Rank, Arc<Mutex<Followed>>)> = ranks
            .map(|(&rank, known)| (rank, known.followed.clone()))
            .collect();
        let numbers: Vec<Rank> = ranks.iter().map(|&(rank, _)| rank).collect();
        let polled =
            self.poller.ask(
                ranks,
                deadline,
                move |(rank, followed)| match unless_asked(followed) {
                    Some(mut followed) => followed.poll(*rank, deadline),
                    None => unanswered(*rank),
                },
            );
        let mut observations = polled.answers;
        observations.extend(
            polled
                .missing
                .into_iter()
                .map(|index| unanswered(numbers[index])),
        );
        for observation in &observations {
            if let Seen::Changed(dump) = &observation.seen {
                self.world_size = self.world_size.max(dump.identity.world_size);
            }
        }
        Ok(Poll {
            world_size: self.world_size,
            observations,
            // While no rank is known, what is known of the earlier attempt stays.
            restart: !self.ranks.is_empty() && std::mem::take(&mut self.is_restarted),
            ..Poll::default()
        })
    }
}

fn unanswered(rank: Rank) -> Observation {
    Observation {
        rank,
        part: 0,
        liveness: Liveness::Unknown,
        seen: Seen::Failed(NO_ANSWER_YET.into()),
    }
}

impl Followed {
    /// Asks the rank for the changes of its record.
    fn poll(&mut self, rank: Rank, deadline: Instant) -> Observation {
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
    use rcomm_recorder::publish::{Endpoint, Listen, PeerEndpoint};
    use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
    use std::path::Path;
    use std::sync::Arc;

    fn serve(directory: &Path, rank: Rank) -> Endpoint {
        let mut config = RecorderConfig::new("job", rank, 2);
        config.placement = Placement::Dir(directory.to_owned());
        let recorder = Arc::new(FlightRecorder::create(&config).expect("a ring can be made"));
        let socket = directory.join(format!("{rank}.sock"));
        Endpoint::serve(recorder, Listen::Unix(socket)).expect("a socket can be made at the path")
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn one_endpoint_leads_to_all_and_one_that_dies_fails_alone() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
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
        let poll = source.poll(soon()).expect("the first endpoint answers");
        let ranks: Vec<Rank> = poll.observations.iter().map(|o| o.rank).collect();
        assert_eq!((ranks, poll.world_size), (vec![0, 1], Some(2)));
        let changed = |o: &Observation| matches!(o.seen, Seen::Changed(_));
        assert!(poll.observations.iter().all(changed));
        drop(second);
        let poll = source
            .poll(soon())
            .expect("the first endpoint still answers");
        assert!(matches!(poll.observations[0].seen, Seen::Unchanged { .. }));
        assert!(matches!(poll.observations[1].seen, Seen::Failed(_)));
    }

    #[test]
    fn the_answers_to_one_poll_share_a_budget() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let endpoints = [0, 1].map(|rank| serve(directory.path(), rank));
        let given = endpoints.iter().map(|endpoint| endpoint.address().clone());
        let mut source = EndpointSource::new(given.collect(), None);
        // Both are found before the budget becomes smaller than any record.
        source.find(soon()).expect("both endpoints answer");
        source.budget = Arc::new(AnswerBudget::new(8));
        source.ranks.clear();
        for (rank, endpoint) in (0..).zip(&endpoints) {
            source.follow(rank, endpoint.address());
        }
        let poll = source.poll(soon()).expect("the ranks are known");
        assert_eq!(poll.observations.len(), 2);
        for observation in &poll.observations {
            let why = "the answers that were asked for together have more than 8 bytes";
            assert!(
                matches!(&observation.seen, Seen::Failed(error) if error.contains(why)),
                "{:?}",
                observation.seen
            );
        }
        source.budget = Arc::new(AnswerBudget::new(MOST_ANSWERED));
        source.ranks.clear();
        for _ in 0..2 {
            source.asked_for_peers = None;
            let poll = source.poll(soon()).expect("both endpoints answer");
            let failed = |observation: &Observation| matches!(observation.seen, Seen::Failed(_));
            assert!(!poll.observations.iter().any(failed));
        }
    }

    #[test]
    fn an_endpoint_that_answers_garbage_fails_alone() {
        use std::io::{Read as _, Write as _};
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let first = serve(directory.path(), 0);
        let socket = directory.path().join("garbage.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket)
            .expect("a socket can be made at the path");
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                // The client may be gone; errors do not matter.
                let _ = stream.read(&mut [0; 1024]);
                let _ = stream
                    .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n\x80\xffgarbage...");
            }
        });
        let garbage = PeerEndpoint {
            rank: 1,
            address: EndpointAddress::Unix(socket),
        };
        first.set_peers(vec![garbage]);
        let mut source = EndpointSource::new(vec![first.address().clone()], None);
        for _ in 0..2 {
            let poll = source.poll(soon()).expect("the first endpoint answers");
            assert!(!matches!(poll.observations[0].seen, Seen::Failed(_)));
            assert!(matches!(&poll.observations[1].seen, Seen::Failed(why) if !why.is_empty()));
        }
    }

    #[test]
    fn an_endpoint_that_is_frozen_delays_no_other() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let first = serve(directory.path(), 0);
        let socket = directory.path().join("frozen.sock");
        // The system accepts connections for a stopped process, but it never answers.
        let _frozen = std::os::unix::net::UnixListener::bind(&socket)
            .expect("a socket can be made at the path");
        first.set_peers(vec![PeerEndpoint {
            rank: 1,
            address: EndpointAddress::Unix(socket),
        }]);
        let mut source = EndpointSource::new(vec![first.address().clone()], None);
        for _ in 0..2 {
            let deadline = Instant::now() + Duration::from_secs(12);
            let poll = source.poll(deadline).expect("the first endpoint answers");
            assert!(
                Instant::now() < deadline,
                "the poll lasted until its deadline"
            );
            assert!(!matches!(poll.observations[0].seen, Seen::Failed(_)));
            assert!(
                matches!(&poll.observations[1].seen, Seen::Failed(why) if why == NO_ANSWER_YET)
            );
        }
    }

    /// A key of a store with its value: the endpoint of a rank on a host.
    fn notice(
        attempt: u32,
        rank: Rank,
        address: &EndpointAddress,
        host: &str,
    ) -> (String, Vec<u8>) {
        let notice = EndpointNotice {
            address: address.clone(),
            host: host.to_owned(),
        };
        let key = format!("/{}", EndpointNotice::store_key(attempt, rank));
        (
            key,
            serde_json::to_vec(&notice).expect("the value can be written as JSON"),
        )
    }

    #[test]
    fn ranks_of_the_newest_attempt_are_found_through_the_store() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let endpoints = [0, 1].map(|rank| serve(directory.path(), rank));
        let system = rustix::system::uname();
        let this_host = system.nodename().to_string_lossy().into_owned();
        let gone = EndpointAddress::Unix("/of/an/earlier/attempt.sock".into());
        let mut keys = vec![
            notice(0, 0, &gone, &this_host),
            notice(0, 5, &gone, &this_host),
        ];
        for (rank, endpoint) in (0..).zip(&endpoints) {
            keys.push(notice(2, rank, endpoint.address(), &this_host));
        }
        // The socket of this notice is on another host.
        keys.push(notice(2, 2, endpoints[0].address(), "elsewhere"));
        let store = store::tests::serve(keys.into_iter().collect());
        let mut source = EndpointSource::in_store(store.clone(), None);
        let poll = source.poll(soon()).expect("the store answers");
        let ranks: Vec<Rank> = poll.observations.iter().map(|o| o.rank).collect();
        assert_eq!((ranks, poll.restart), (vec![0, 1], false));
        assert!(
            source.name().contains(&store.to_string()),
            "{}",
            source.name()
        );
        let hosts = store::hosts_in_store(&store, soon()).expect("the store answers");
        let mut wanted = [this_host, "elsewhere".to_owned()];
        wanted.sort();
        assert_eq!(hosts, wanted);
    }

    #[test]
    fn a_new_attempt_of_which_no_rank_could_be_reached_at_first_replaces_the_earlier_one() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let endpoints = [0, 1].map(|rank| serve(directory.path(), rank));
        let system = rustix::system::uname();
        let this_host = system.nodename().to_string_lossy().into_owned();
        let earlier = notice(0, 0, endpoints[0].address(), &this_host);
        // Of the later attempt, the store first lists a rank of another host only.
        let elsewhere = notice(1, 1, endpoints[1].address(), "elsewhere");
        let later = notice(1, 0, endpoints[0].address(), &this_host);
        let keys = [vec![earlier], vec![elsewhere], vec![later]];
        let stores = keys.map(|keys| store::tests::serve(keys.into_iter().collect()));
        let mut source = EndpointSource::in_store(stores[0].clone(), None);
        let mut poll = |store: &HostPort| {
            (source.store, source.asked_for_peers) = (Some(store.clone()), None);
            source.poll(soon()).map(|poll| poll.restart)
        };
        assert!(!poll(&stores[0]).expect("the rank can be reached"));
        poll(&stores[1]).expect_err("the rank is on another host");
        assert!(poll(&stores[2]).expect("the rank can be reached"));
        assert!(!poll(&stores[2]).expect("the rank can be reached"));
    }

    #[test]
    fn a_store_without_a_reachable_rank_is_an_error_with_the_reason() {
        let error = |keys: Vec<(String, Vec<u8>)>| {
            let store = store::tests::serve(keys.into_iter().collect());
            let mut source = EndpointSource::in_store(store, None);
            source
                .poll(soon())
                .expect_err("no rank can be reached")
                .to_string()
        };
        assert!(error(vec![]).contains("rcomm/endpoint/0/0"));
        let socket = EndpointAddress::Unix("/a.sock".into());
        let unreachable = error(vec![notice(0, 0, &socket, "elsewhere")]);
        assert!(unreachable.contains("of another host"), "{unreachable}");
        let key = EndpointNotice::store_key(0, 3);
        let invalid = error(vec![(format!("/{key}"), b"unix:/a.sock".to_vec())]);
        assert!(invalid.contains(&key), "{invalid}");
    }

    #[test]
    fn an_address_without_a_listener_is_an_error_that_names_it() {
        let address = EndpointAddress::Unix("/does/not/exist.sock".into());
        let error = EndpointSource::new(vec![address], None)
            .poll(soon())
            .expect_err("no server listens there");
        assert!(
            error.to_string().contains("/does/not/exist.sock"),
            "{error}"
        );
    }
}
