//! The values that the members of a group publish for each other in the store when all members must take a step
//! together. So a rank that times out can name the ranks that did not arrive.

use super::arrivals::{self, Arrivals};
use super::peer_info::{MAX_KEYS_PER_READ, unreadable};
use rcomm_core::Deadline;
use rcomm_core::backend::GroupContext;
use rcomm_core::store::{PrefixStore, Store, StoreQuery, absent_among};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::Rank;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the store may take for what is asked or noted beside the wait of a step, also after its deadline: which
/// ranks are missing, that this rank gives up, what may be removed.
const STORE_TIME: Duration = Duration::from_secs(2);

/// What a message has in place of the missing ranks if the store does not reply.
const NOT_TOLD: &str = "the store did not say which are missing";

/// The key of the message of the first rank that gives up.
const FAILED: &str = "failed";

/// The values of one step that all members take.
pub(crate) struct StoreExchange {
    store: Arc<dyn Store>,
    ranks: Arc<[Rank]>,
    own_index: u32,
}

impl StoreExchange {
    /// Makes the exchange of one step. All members pass the same `prefix`, with which the keys begin.
    pub(crate) fn new(group: &GroupContext, prefix: String) -> Self {
        Self {
            store: Arc::new(PrefixStore::new(prefix, group.store.clone())),
            ranks: group.info.ranks.clone(),
            own_index: group.group_rank,
        }
    }

    /// Publishes this rank's value with the name `key`.
    ///
    /// # Blocking
    /// Until the store has it, for at most 2 s after the deadline.
    ///
    /// # Errors
    /// Those of the store; `Timeout` if it does not reply.
    pub(crate) fn publish(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.set(
            self.value_key(key, self.own_index),
            value.to_vec(),
            deadline,
        )
    }

    /// Sets a key. A rank that comes late does so, too: the others may still wait.
    fn set(&self, key: String, value: Vec<u8>, deadline: Deadline) -> Result<()> {
        let limit = deadline.remaining().max(STORE_TIME);
        StoreQuery::within(&self.store, limit, move |store| store.set(&key, &value))
    }

    /// Returns the values of all members, in order of rank. The first member reads all values and publishes them under
    /// one key for the others, so that N ranks read O(N) keys in total. Once all members have read the values, no key
    /// stays.
    ///
    /// # Blocking
    /// Until all members have published a value, or the deadline; then for up to 2 s to find out which have not.
    ///
    /// # Errors
    /// `Timeout` names the ranks that have not published a value, if the store says which; `Rendezvous` if the values
    /// cannot be read; the error of the store.
    pub(crate) fn gather(&self, key: &str, deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let deadline = deadline.started();
        let all = format!("{key}/all");
        let values = self.read_values(key, &all, deadline).map_err(|error| {
            if error.kind() != ErrorKind::Timeout {
                return error;
            }
            let missing = self.missing(key);
            let message = format!("the ranks of the group did not all meet in time; {missing}");
            Error::new(ErrorKind::Timeout, message)
        })?;
        if self.own_index == 0 {
            let bytes =
                serde_json::to_vec(&values).map_err(|error| unreadable("written", error))?;
            self.set(all, bytes, deadline)?;
        }
        self.remove_gathered(key);
        Ok(values)
    }

    /// Reads the values of all members: the first member each one, the others what it has published under the key
    /// `all`.
    fn read_values(&self, key: &str, all: &str, deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let time_left = || deadline.remaining().max(Duration::from_millis(1));
        if self.own_index != 0 {
            let values = self.store.get(all, time_left())?;
            return serde_json::from_slice(&values).map_err(|error| unreadable("read", error));
        }
        let ranks: Vec<u32> = (0..self.size()).collect();
        let mut values = Vec::with_capacity(ranks.len());
        for ranks in ranks.chunks(MAX_KEYS_PER_READ) {
            let keys = ranks.iter().map(|&rank| self.value_key(key, rank));
            let keys: Vec<String> = keys.collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            values.extend(self.store.multi_get(&keys, time_left())?);
        }
        Ok(values)
    }

    /// Removes this rank's value, which the first member has read. The last member to call this also removes
    /// the values that the first member has published.
    fn remove_gathered(&self, key: &str) {
        let own = self.value_key(key, self.own_index);
        self.remove(Some(own), format!("{key}/read"), vec![format!("{key}/all")]);
    }

    /// Says which ranks are known not to have published this value, as text for an error message.
    fn missing(&self, key: &str) -> String {
        let keys: Vec<String> = (0..self.size()).map(|at| self.value_key(key, at)).collect();
        let all = format!("{key}/all");
        let ask = move |store: &dyn Store| {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let missing = absent_among(store, &keys, Instant::now() + STORE_TIME).at_least()?;
            // A member removes its value only after the first member has published all values under one key, and that
            // key stays until this rank has read it.
            Ok(match store.check(&[&all])? {
                true => Vec::new(),
                false => missing,
            })
        };
        match StoreQuery::here(&self.store, STORE_TIME, ask) {
            Some(Ok(missing)) => {
                let missing = missing.into_iter().map(|at| at as u32).collect();
                format!("did not arrive: {}", self.name(missing))
            }
            None | Some(Err(_)) => NOT_TOLD.to_owned(),
        }
    }

    /// Publishes that this rank has arrived.
    ///
    /// # Blocking
    /// Until the store has it, for at most 2 s after the deadline.
    ///
    /// # Errors
    /// Those of the store; `Timeout` if it does not reply.
    pub(crate) fn arrive(&self, deadline: Deadline) -> Result<()> {
        let (ranks, own) = (self.size(), self.own_index);
        let limit = deadline.remaining().max(STORE_TIME);
        StoreQuery::within(&self.store, limit, move |store| {
            arrivals_in(store, ranks).note(own).map(drop)
        })
    }

    /// Returns the ranks that are known not to have arrived, as text for an error message.
    ///
    /// # Blocking
    /// For up to 2 s.
    pub(crate) fn not_arrived(&self) -> String {
        let ranks = self.size();
        let read = move |store: &dyn Store| arrivals_in(store, ranks).read();
        match StoreQuery::here(&self.store, STORE_TIME, read) {
            Some(Ok(arrived)) => {
                let absent = (0..).zip(arrived).filter(|(_, has_arrived)| !has_arrived);
                self.name(absent.map(|(at, _)| at).collect())
            }
            None | Some(Err(_)) => NOT_TOLD.to_owned(),
        }
    }

    /// Notes that the step is over for this rank. To be called once all ranks have arrived. The last rank removes the
    /// arrivals, which no rank reads any more.
    ///
    /// # Blocking
    /// For up to 2 s.
    pub(crate) fn remove_arrivals(&self) {
        let keys = arrivals_in(&*self.store, self.size()).keys();
        self.remove(None, "done".to_owned(), keys);
    }

    fn size(&self) -> u32 {
        self.ranks.len() as u32
    }

    fn value_key(&self, key: &str, index: u32) -> String {
        format!("{key}/{index}")
    }

    /// Returns the members with these indices, as text for an error message.
    fn name(&self, indices: Vec<u32>) -> String {
        let ranks = indices.iter().map(|&at| self.ranks[at as usize]);
        let ranks: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
        match ranks.is_empty() {
            true => "none that is known".to_owned(),
            false => format!("rank {}", ranks.join(", ")),
        }
    }

    /// Removes the key `own`. Counts this rank, and removes the keys `shared`, with the counter, if all ranks were
    /// counted.
    fn remove(&self, own: Option<String>, counter: String, shared: Vec<String>) {
        let ranks = i64::from(self.size());
        let removed = StoreQuery::here(&self.store, STORE_TIME, move |store| {
            own.iter().for_each(|key| arrivals::remove(store, key));
            if store.add(&counter, 1)? == ranks {
                shared.iter().for_each(|key| arrivals::remove(store, key));
                arrivals::remove(store, &counter);
            }
            Ok(())
        });
        if !matches!(removed, Some(Ok(()))) {
            tracing::debug!(?removed, "keys of a step stay in the store");
        }
    }

    /// Publishes that this rank gives up. The store keeps only the first error of this step.
    ///
    /// # Blocking
    /// For up to 2 s.
    pub(crate) fn publish_failure(&self, failure: &Error) {
        let text = format!("rank {}: {failure}", self.ranks[self.own_index as usize]);
        let published = StoreQuery::here(&self.store, STORE_TIME, move |store| {
            store.compare_set(FAILED, b"", text.as_bytes())
        });
        if !matches!(published, Some(Ok(_))) {
            tracing::debug!(?published, "failed to publish the failure of this rank");
        }
    }

    /// Fails with `Mismatch` and the message of the first rank that gave up, if one is known to have done so.
    ///
    /// # Blocking
    /// For up to 2 s, and not after the deadline.
    ///
    /// # Errors
    /// That, or the store's. A store that does not reply is none: the rank waits on.
    pub(crate) fn check_failed(&self, deadline: Deadline) -> Result<()> {
        let read = |store: &dyn Store| match store.check(&[FAILED])? {
            true => store.get(FAILED, STORE_TIME).map(Some),
            false => Ok(None),
        };
        let limit = deadline.remaining().min(STORE_TIME);
        match StoreQuery::here(&self.store, limit, read) {
            None | Some(Ok(None)) => Ok(()),
            Some(Ok(Some(text))) => {
                let text = String::from_utf8_lossy(&text).into_owned();
                Err(Error::new(ErrorKind::Mismatch, text))
            }
            Some(Err(error)) => Err(error),
        }
    }
}

/// The ranks of the step that have arrived.
fn arrivals_in(store: &dyn Store, ranks: u32) -> Arrivals<'_> {
    Arrivals {
        store,
        name: "here",
        ranks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::counting_store::CountingStore;
    use rcomm_core::store::{HashStore, TcpStore};
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// More than any call takes.
    const LIMIT: Deadline = Deadline::In(Duration::from_secs(60));
    /// The time-out of a store that is silent.
    const OWN: Duration = Duration::from_secs(30);

    #[test]
    fn the_number_of_keys_that_are_gathered_grows_linearly_with_the_number_of_ranks() {
        const RANKS: u32 = 1024;
        let store = Arc::new(CountingStore::default());
        let shared: Arc<dyn Store> = store.clone();
        let ranks: Arc<[Rank]> = (0..RANKS).collect();
        let exchange = |own_index| StoreExchange {
            store: Arc::new(PrefixStore::new("window/0", shared.clone())),
            ranks: ranks.clone(),
            own_index,
        };
        for rank in 0..RANKS {
            let value = rank.to_le_bytes();
            exchange(rank).publish("part", &value, LIMIT).unwrap();
        }
        let expected = (0..RANKS).map(|rank| rank.to_le_bytes().to_vec());
        let expected: Vec<Vec<u8>> = expected.collect();
        for rank in 0..RANKS {
            assert_eq!(exchange(rank).gather("part", LIMIT).unwrap(), expected);
        }
        // The first rank reads each value, the others one key; each counts itself.
        assert_eq!(store.keys(), u64::from(3 * RANKS - 1));
        assert_eq!(store.num_keys().unwrap(), 0);
        let missing = exchange(1).gather("closed", Deadline::In(Duration::from_millis(1)));
        let error = missing.unwrap_err().to_string();
        assert!(error.contains("did not arrive: rank 0, 1, 2, "), "{error}");
    }

    #[test]
    fn values_that_were_gathered_and_removed_are_not_missing() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let exchange = |own_index| StoreExchange {
            store: Arc::new(PrefixStore::new("window/0", store.clone())),
            ranks: vec![4, 5, 6].into(),
            own_index,
        };
        for rank in 0..3 {
            exchange(rank).publish("part", b"1", LIMIT).unwrap();
        }
        exchange(0).gather("part", LIMIT).unwrap();
        exchange(2).gather("part", LIMIT).unwrap();
        let missing = exchange(1).missing("part");
        assert_eq!(missing, "did not arrive: none that is known");
        exchange(1).gather("part", LIMIT).unwrap();
        assert_eq!(store.num_keys().unwrap(), 0);
    }

    #[test]
    fn a_store_that_is_silent_is_asked_and_told_nothing_for_long() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let answers = std::thread::spawn(move || {
            let (mut client, _) = server.accept().unwrap();
            // VALIDATE and PING, then silence; later connections are not even accepted.
            let mut hello = [0; 10];
            client.read_exact(&mut hello).unwrap();
            client.write_all(&hello[6..]).unwrap();
            (client, server)
        });
        let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", port, OWN).unwrap());
        let _open = answers.join().unwrap();
        let exchange = StoreExchange {
            store: Arc::new(PrefixStore::new("window/0", store)),
            ranks: vec![4, 5, 6].into(),
            own_index: 0,
        };
        let over = Deadline::In(Duration::from_millis(1));
        type Call<'a> = Box<dyn FnOnce() -> String + Send + 'a>;
        let of_result = |result: Result<()>| match result {
            Ok(()) => "no error".to_owned(),
            Err(error) => format!("{:?}: {error}", error.kind()),
        };
        let calls: Vec<(&str, Call<'_>)> = vec![
            (
                "did not say",
                Box::new(|| of_result(exchange.gather("part", over).map(drop))),
            ),
            (
                "Timeout: the store",
                Box::new(|| of_result(exchange.publish("part", b"1", over))),
            ),
            (
                "Timeout: the store",
                Box::new(|| of_result(exchange.arrive(over))),
            ),
            ("did not say", Box::new(|| exchange.not_arrived())),
            (
                "no error",
                Box::new(|| of_result(exchange.check_failed(LIMIT))),
            ),
            (
                "no error",
                Box::new(|| {
                    exchange.publish_failure(&Error::new(ErrorKind::Backend, "it failed"));
                    of_result(Ok(()))
                }),
            ),
            (
                "no error",
                Box::new(|| {
                    exchange.remove_arrivals();
                    of_result(Ok(()))
                }),
            ),
            (
                "no error",
                Box::new(|| {
                    exchange.remove_gathered("part");
                    of_result(Ok(()))
                }),
            ),
        ];
        std::thread::scope(|scope| {
            for (expected, call) in calls {
                scope.spawn(move || {
                    let begun = Instant::now();
                    let outcome = call();
                    assert!(outcome.contains(expected), "{outcome}, not {expected}");
                    assert!(
                        begun.elapsed() < OWN / 2,
                        "{expected}: {:?}",
                        begun.elapsed()
                    );
                });
            }
        });
    }

    #[test]
    fn arrivals_are_removed_by_the_last_rank_for_which_the_step_is_over() {
        const RANKS: u32 = 100;
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let exchange = |own_index| StoreExchange {
            store: Arc::new(PrefixStore::new("split/0", store.clone())),
            ranks: (0..RANKS).collect(),
            own_index,
        };
        for rank in (0..RANKS).filter(|rank| ![7, 60].contains(rank)) {
            exchange(rank).arrive(LIMIT).unwrap();
        }
        assert_eq!(exchange(3).not_arrived(), "rank 7, 60");
        exchange(7).arrive(LIMIT).unwrap();
        exchange(60).arrive(LIMIT).unwrap();
        for rank in 0..RANKS {
            assert_eq!(exchange(rank).not_arrived(), "none that is known");
            exchange(rank).remove_arrivals();
        }
        assert_eq!(store.num_keys().unwrap(), 0);
    }
}
