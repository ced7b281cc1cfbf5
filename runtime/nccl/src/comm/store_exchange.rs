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

/// How long the store is asked, after a deadline, which ranks are missing.
const NAMING_TIME: Duration = Duration::from_secs(2);

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
    pub(crate) fn publish(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.value_key(key, self.own_index), value)
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
        let values = self.try_gather(key, deadline).map_err(|error| {
            if error.kind() != ErrorKind::Timeout {
                return error;
            }
            let missing = self.missing(key);
            let message = format!("the ranks of the group did not all meet in time; {missing}");
            Error::new(ErrorKind::Timeout, message)
        })?;
        self.remove_gathered(key);
        Ok(values)
    }

    fn try_gather(&self, key: &str, deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let all = format!("{key}/all");
        let time_left = || deadline.remaining().max(Duration::from_millis(1));
        if self.own_index != 0 {
            let values = self.store.get(&all, time_left())?;
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
        let bytes = serde_json::to_vec(&values).map_err(|error| unreadable("written", error))?;
        self.store.set(&all, &bytes)?;
        Ok(values)
    }

    /// Removes this rank's value, which the first member has read. The last member to call this also removes
    /// the values that the first member has published.
    fn remove_gathered(&self, key: &str) {
        self.remove(&self.value_key(key, self.own_index));
        self.remove_as_last(&format!("{key}/read"), &[format!("{key}/all")]);
    }

    /// Says which ranks are known not to have published this value, as text for an error message.
    fn missing(&self, key: &str) -> String {
        let keys: Vec<String> = (0..self.size()).map(|at| self.value_key(key, at)).collect();
        let all = format!("{key}/all");
        let ask = move |store: &dyn Store| {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let missing = absent_among(store, &keys, Instant::now() + NAMING_TIME).at_least()?;
            // A member removes its value only after the first member has published all values under one key, and that
            // key stays until this rank has read it.
            Ok(match store.check(&[&all])? {
                true => Vec::new(),
                false => missing,
            })
        };
        match StoreQuery::here(&self.store, NAMING_TIME, ask) {
            Some(Ok(missing)) => {
                let missing = missing.into_iter().map(|at| at as u32).collect();
                format!("did not arrive: {}", self.name(missing))
            }
            None | Some(Err(_)) => "the store did not say which are missing".to_owned(),
        }
    }

    /// Publishes that this rank has arrived.
    pub(crate) fn arrive(&self) -> Result<()> {
        self.arrivals().note(self.own_index).map(drop)
    }

    /// Returns the ranks that are known not to have arrived, as text for an error message.
    pub(crate) fn not_arrived(&self) -> String {
        // If the store does not reply, no rank is known.
        let arrived = self.arrivals().read().unwrap_or_default();
        let absent = (0..).zip(arrived).filter(|(_, has_arrived)| !has_arrived);
        self.name(absent.map(|(at, _)| at).collect())
    }

    /// Notes that the step is over for this rank. To be called once all ranks have arrived. The last rank removes the
    /// arrivals, which no rank reads any more.
    pub(crate) fn remove_arrivals(&self) {
        self.remove_as_last("done", &self.arrivals().keys());
    }

    fn arrivals(&self) -> Arrivals<'_> {
        Arrivals {
            store: &*self.store,
            name: "here",
            ranks: self.size(),
        }
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

    /// Counts this rank, and removes the keys, with the counter, if all ranks were counted.
    fn remove_as_last(&self, counter: &str, keys: &[String]) {
        match self.store.add(counter, 1) {
            Ok(counted) if counted == i64::from(self.size()) => {
                keys.iter().for_each(|key| self.remove(key));
                self.remove(counter);
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, counter, "keys of a step stay in the store")
            }
        }
    }

    fn remove(&self, key: &str) {
        arrivals::remove(&*self.store, key);
    }

    /// Publishes that this rank gives up. The store keeps only the first error of this step.
    pub(crate) fn publish_failure(&self, failure: &Error) {
        let text = format!("rank {}: {failure}", self.ranks[self.own_index as usize]);
        if let Err(error) = self.store.compare_set("failed", b"", text.as_bytes()) {
            tracing::debug!(%error, "failed to publish the failure of this rank");
        }
    }

    /// Fails with `Mismatch` and the message of the first rank that gave up, if one did; with the store's error if the
    /// store cannot be read.
    pub(crate) fn check_failed(&self) -> Result<()> {
        if !self.store.check(&["failed"])? {
            return Ok(());
        }
        let text = self.store.get("failed", Duration::from_secs(10))?;
        let text = String::from_utf8_lossy(&text).into_owned();
        Err(Error::new(ErrorKind::Mismatch, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::counting_store::CountingStore;
    use rcomm_core::store::{HashStore, TcpStore};
    use std::io::{Read, Write};
    use std::net::TcpListener;

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
            exchange(rank).publish("part", &rank.to_le_bytes()).unwrap();
        }
        let expected = (0..RANKS).map(|rank| rank.to_le_bytes().to_vec());
        let expected: Vec<Vec<u8>> = expected.collect();
        for rank in 0..RANKS {
            let limit = Deadline::In(Duration::from_secs(60));
            assert_eq!(exchange(rank).gather("part", limit).unwrap(), expected);
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
            exchange(rank).publish("part", b"1").unwrap();
        }
        let limit = Deadline::In(Duration::from_secs(60));
        exchange(0).gather("part", limit).unwrap();
        exchange(2).gather("part", limit).unwrap();
        let missing = exchange(1).missing("part");
        assert_eq!(missing, "did not arrive: none that is known");
        exchange(1).gather("part", limit).unwrap();
        assert_eq!(store.num_keys().unwrap(), 0);
    }

    #[test]
    fn a_store_that_is_silent_is_not_asked_for_long_who_is_missing() {
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
        let own = Duration::from_secs(60);
        let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", port, own).unwrap());
        let _open = answers.join().unwrap();
        let exchange = StoreExchange {
            store: Arc::new(PrefixStore::new("window/0", store)),
            ranks: vec![4, 5, 6].into(),
            own_index: 0,
        };
        let begun = Instant::now();
        let gathered = exchange.gather("part", Deadline::In(Duration::from_millis(1)));
        let error = gathered.unwrap_err();
        assert!(begun.elapsed() < own / 2, "{:?}", begun.elapsed());
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().contains("did not say"), "{error}");
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
            exchange(rank).arrive().unwrap();
        }
        assert_eq!(exchange(3).not_arrived(), "rank 7, 60");
        exchange(7).arrive().unwrap();
        exchange(60).arrive().unwrap();
        for rank in 0..RANKS {
            assert_eq!(exchange(rank).not_arrived(), "none that is known");
            exchange(rank).remove_arrivals();
        }
        assert_eq!(store.num_keys().unwrap(), 0);
    }
}
