//! [`Places`]: the limited number of connections that a server serves at a time.
//!
//! A connection counts as a stranger's until it has made a request that the server admits. The strangers of each
//! host are limited in number. If all places are taken, the host with the most strangers loses its oldest one. So
//! unfinished requests, however many, lock out neither admitted clients nor the strangers of other hosts.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The places of one server.
#[derive(Debug)]
pub struct Places {
    limit: usize,
    strangers_per_host: usize,
    open: Mutex<OpenConnections>,
    freed: Notify,
}

/// The connections that have a place.
#[derive(Debug, Default)]
struct OpenConnections {
    /// The number of the next connection.
    next: u64,
    /// The connections by number, so the oldest first.
    connections: BTreeMap<u64, Connection>,
}

/// A connection that has a place.
#[derive(Debug)]
struct Connection {
    /// `None` for a unix socket.
    host: Option<IpAddr>,
    /// Ends a stranger's connection; `None` once the client is admitted.
    ends: Option<Arc<Notify>>,
}

impl OpenConnections {
    /// The hosts of all strangers, the oldest first, each with the connection's number.
    fn strangers(&self) -> impl DoubleEndedIterator<Item = (u64, Option<IpAddr>)> {
        let strangers = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.ends.is_some());
        strangers.map(|(&number, connection)| (number, connection.host))
    }

    /// The oldest stranger of the host that has the most.
    fn most_crowding(&self) -> Option<u64> {
        let mut counts = HashMap::new();
        for (_, host) in self.strangers() {
            *counts.entry(host).or_insert(0) += 1;
        }
        // Of equals, `max_by_key` returns the last.
        let newest_first = self.strangers().rev();
        let (number, _) = newest_first.max_by_key(|(_, host)| counts.get(host))?;
        Some(number)
    }

    /// Takes the place of a stranger's connection, which then ends.
    fn end(&mut self, number: u64) {
        let connection = self.connections.remove(&number);
        if let Some(ends) = connection.and_then(|connection| connection.ends) {
            ends.notify_one();
        }
    }
}

impl Places {
    /// Places for `limit` connections, and for `strangers_per_host` strangers of one host. The clients of a unix socket
    /// count as one host.
    pub fn new(limit: usize, strangers_per_host: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            strangers_per_host,
            open: Mutex::default(),
            freed: Notify::new(),
        })
    }

    /// Takes a place for a client of this host. If the host has as many strangers as it may have, its oldest stranger
    /// loses its place. Otherwise, if all places are taken, the host with the most strangers loses its oldest one.
    /// `None` if all places are taken by admitted clients.
    pub fn try_enter(self: &Arc<Self>, host: Option<IpAddr>) -> Option<Arc<Place>> {
        let mut open = self.open();
        let strangers_of_host = open.strangers().filter(|&(_, other)| other == host);
        let (count, oldest) = strangers_of_host.fold((0, None), |(count, oldest), (number, _)| {
            (count + 1, oldest.or(Some(number)))
        });
        if let Some(oldest) = oldest.filter(|_| count >= self.strangers_per_host) {
            open.end(oldest);
        } else if open.connections.len() >= self.limit {
            let number = open.most_crowding()?;
            open.end(number);
        }
        let number = open.next;
        open.next += 1;
        let ends = Arc::new(Notify::new());
        let connection = Connection {
            host,
            ends: Some(ends.clone()),
        };
        open.connections.insert(number, connection);
        drop(open);
        Some(Arc::new(Place {
            places: self.clone(),
            number,
            ends,
        }))
    }

    /// Like [`try_enter`](Self::try_enter), but waits for a place.
    pub async fn enter(self: &Arc<Self>, host: Option<IpAddr>) -> Arc<Place> {
        loop {
            // A place that is freed after the try still ends the wait.
            let freed = self.freed.notified();
            match self.try_enter(host) {
                Some(place) => return place,
                None => freed.await,
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, OpenConnections> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one connection. It is free again when this value is dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    number: u64,
    ends: Arc<Notify>,
}

impl Place {
    /// Notes that the server admits the client, who keeps the place from now on.
    pub fn admit(&self) {
        if let Some(connection) = self.places.open().connections.get_mut(&self.number) {
            connection.ends = None;
        }
    }

    /// Returns when another connection has taken this place, and this one must end.
    pub async fn is_taken(&self) {
        self.ends.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.open().connections.remove(&self.number);
        self.places.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(future)
    }

    #[test]
    fn the_oldest_stranger_makes_room_and_admitted_clients_stay() {
        let places = Places::new(3, 3);
        let enter = || places.try_enter(None).unwrap();
        let (admitted, first, second) = (enter(), enter(), enter());
        admitted.admit();
        let third = enter();
        block_on(first.is_taken());
        third.admit();
        second.admit();
        assert!(places.try_enter(None).is_none());
        // The place was passed on, so its end frees none.
        drop(first);
        assert!(places.try_enter(None).is_none());
        drop(third);
        assert!(places.try_enter(None).is_some());
    }

    #[test]
    fn strangers_of_one_host_leave_places_to_other_hosts() {
        let places = Places::new(4, 2);
        let enter = |last| places.try_enter(Some([10, 0, 0, last].into())).unwrap();
        let (first, second) = (enter(1), enter(1));
        // The host has as many strangers as it may have, so it ends its own and no other's.
        let third = enter(1);
        block_on(first.is_taken());
        let (other, another) = (enter(2), enter(3));
        // All places are taken: the host with two strangers makes room.
        let last = enter(4);
        block_on(second.is_taken());
        // Each of the others has one: the oldest makes room.
        let _more = enter(5);
        block_on(third.is_taken());
        for stays in [&other, &another, &last] {
            assert!(places.open().connections.contains_key(&stays.number));
        }
        assert_eq!(places.open().connections.len(), 4);
    }

    #[test]
    fn a_client_waits_for_a_place_that_is_freed() {
        let places = Places::new(1, 1);
        let only = places.try_enter(None).unwrap();
        only.admit();
        block_on(async {
            let waiting = places.enter(None);
            let free = async {
                tokio::task::yield_now().await;
                drop(only);
            };
            tokio::join!(waiting, free);
        });
    }
}
