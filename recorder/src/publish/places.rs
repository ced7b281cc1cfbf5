//! [`Places`]: the limited number of connections that a server serves at a time.
//!
//! A connection counts as a stranger's until it has made a request that the server admits. If all places are taken, the
//! oldest stranger makes room: half requests, however many, do not keep others out.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The places of one server.
#[derive(Debug)]
pub struct Places {
    limit: usize,
    open: Mutex<Open>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    /// The connections by number, so the oldest first; those of strangers with what tells them to end.
    connections: BTreeMap<u64, Option<Arc<Notify>>>,
}

impl Places {
    /// Places for this many connections.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            open: Mutex::default(),
            freed: Notify::new(),
        })
    }

    /// Takes a place, that of the oldest stranger if all are taken; `None` if no stranger has one.
    pub fn try_enter(self: &Arc<Self>) -> Option<Arc<Place>> {
        let mut open = self.open();
        if open.connections.len() >= self.limit {
            let mut all = open.connections.iter();
            let oldest = all.find_map(|(&number, ends)| Some((number, ends.clone()?)));
            let (number, ends) = oldest?;
            open.connections.remove(&number);
            ends.notify_one();
        }
        let number = open.next;
        open.next += 1;
        let ends = Arc::new(Notify::new());
        open.connections.insert(number, Some(ends.clone()));
        drop(open);
        Some(Arc::new(Place {
            places: self.clone(),
            number,
            ends,
        }))
    }

    /// As [`try_enter`](Self::try_enter), but waits for a place.
    pub async fn enter(self: &Arc<Self>) -> Arc<Place> {
        loop {
            // A place that is freed after the try still ends the wait.
            let freed = self.freed.notified();
            match self.try_enter() {
                Some(place) => return place,
                None => freed.await,
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one connection, freed when it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    number: u64,
    ends: Arc<Notify>,
}

impl Place {
    /// Notes that the server admits the client: it keeps its place from now on.
    pub fn admit(&self) {
        if let Some(ends) = self.places.open().connections.get_mut(&self.number) {
            *ends = None;
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
    fn the_oldest_stranger_makes_room_and_no_client_that_was_admitted() {
        let places = Places::new(3);
        let enter = || places.try_enter().unwrap();
        let (admitted, first, second) = (enter(), enter(), enter());
        admitted.admit();
        let third = enter();
        block_on(first.is_taken());
        third.admit();
        second.admit();
        assert!(places.try_enter().is_none());
        // The place was passed on, so its end frees none.
        drop(first);
        assert!(places.try_enter().is_none());
        drop(third);
        assert!(places.try_enter().is_some());
    }

    #[test]
    fn a_client_waits_for_a_place_that_is_freed() {
        let places = Places::new(1);
        let only = places.try_enter().unwrap();
        only.admit();
        block_on(async {
            let waiting = places.enter();
            let free = async {
                tokio::task::yield_now().await;
                drop(only);
            };
            tokio::join!(waiting, free);
        });
    }
}
