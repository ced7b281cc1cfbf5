//! A request to a store that may not reply: it runs on a separate thread, or within a time limit.

use super::Store;
use super::limit::{after, with_limit};
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::text;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A request that was sent to a store.
///
/// The request runs on the thread `rcomm/notice`, which ends when the store has replied or the store's own time-out has
/// passed. Dropping the query does not wait for the thread. A store's own time-out is as long as a job may take to
/// start, which is too long for a rank that must report to its caller why an operation failed. [`here`](Self::here) and
/// [`within`](Self::within) start no thread if the store can do without one.
pub struct StoreQuery<T>(Receiver<Result<T>>);

impl<T: Send + 'static> StoreQuery<T> {
    /// Starts the request. Does not block.
    ///
    /// # Errors
    /// `Io` if no thread can be started.
    pub fn put(
        store: &Arc<dyn Store>,
        ask: impl FnOnce(&dyn Store) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let (answers, answer) = channel();
        let store = store.clone();
        let ask = move || {
            // The caller may have continued without the reply.
            let _ = answers.send(ask(&*store));
        };
        let thread = std::thread::Builder::new().name("rcomm/notice".to_owned());
        match thread.spawn(ask) {
            Ok(_) => Ok(Self(answer)),
            Err(error) => Err(Error::io("cannot start the thread rcomm/notice", error)),
        }
    }

    /// The reply, or the store's error; `None` if neither arrives within `limit`. A `Store` error if there will be
    /// none: the store has panicked, or an earlier call has returned the reply.
    pub fn answer_within(&self, limit: Duration) -> Option<Result<T>> {
        match self.0.recv_timeout(limit) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                let message = "the request to the store has ended without an answer";
                Some(Err(Error::new(ErrorKind::Store, message)))
            }
        }
    }

    /// Starts the request and waits for the reply, for at most `limit`; `None` if there is none by then. A `Store`
    /// error if the store panics, an `Io` error if no thread can be started.
    pub fn ask_within(
        store: &Arc<dyn Store>,
        limit: Duration,
        ask: impl FnOnce(&dyn Store) -> Result<T> + Send + 'static,
    ) -> Option<Result<T>> {
        match Self::put(store, ask) {
            Ok(query) => query.answer_within(limit),
            Err(error) => Some(Err(error)),
        }
    }

    /// Like [`ask_within`](Self::ask_within), but on the caller's thread if the store [obeys](Store::obeys_limits) the
    /// limit: to start a thread for each request would take a considerable part of a rank's start. Requests that are
    /// under way at the limit are given up, where a thread would continue with them.
    pub fn here(
        store: &Arc<dyn Store>,
        limit: Duration,
        ask: impl FnOnce(&dyn Store) -> Result<T> + Send + 'static,
    ) -> Option<Result<T>> {
        if !store.obeys_limits() {
            return Self::ask_within(store, limit, ask);
        }
        let until = after(limit);
        let answer = with_limit(until, || ask(&**store));
        let is_late = |error: &Error| error.kind() == ErrorKind::Timeout && Instant::now() >= until;
        (!answer.as_ref().is_err_and(is_late)).then_some(answer)
    }

    /// Like [`here`](Self::here), for a caller that cannot continue without the reply.
    ///
    /// # Errors
    /// Those of the request; `Timeout` if there is no reply within `limit`; `Store` if the store panics on another
    /// thread; `Io` if a thread is needed and none can be started.
    pub fn within(
        store: &Arc<dyn Store>,
        limit: Duration,
        ask: impl FnOnce(&dyn Store) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        Self::here(store, limit, ask).unwrap_or_else(|| {
            let server = store.server();
            let place = server.map_or(String::new(), |server| format!(" at {server}"));
            let limit = text::duration(limit);
            let message = format!(
                "the store{place} did not answer within {limit}: its process or the network to it may have stopped"
            );
            Err(Error::new(ErrorKind::Timeout, message))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{HashStore, PrefixStore};

    #[test]
    fn a_store_that_obeys_a_limit_is_asked_on_the_callers_thread() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let (stop, stopped) = channel::<()>();
        let answers = std::thread::spawn(move || {
            use std::io::{Read, Write};
            let (mut client, _) = server.accept().unwrap();
            // VALIDATE and PING, then silence.
            let mut hello = [0; 10];
            client.read_exact(&mut hello).unwrap();
            client.write_all(&hello[6..]).unwrap();
            let _ = stopped.recv();
        });
        let hour = Duration::from_secs(3600);
        let store = crate::store::TcpStore::connect("127.0.0.1", port, hour).unwrap();
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new("part", Arc::new(store)));
        let here = std::thread::current().id();
        let ask = move |store: &dyn Store| {
            assert_eq!(std::thread::current().id(), here);
            store.get("never", hour)
        };
        let begun = Instant::now();
        assert!(StoreQuery::here(&store, Duration::from_millis(20), ask).is_none());
        let error = StoreQuery::within(&store, Duration::ZERO, |store| store.check(&["key"]));
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Timeout);
        assert!(begun.elapsed() < hour / 2);
        stop.send(()).unwrap();
        answers.join().unwrap();
    }

    #[test]
    fn a_query_without_a_reply_takes_no_longer_than_its_limit() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let short = Duration::from_millis(5);
        let waits = |store: &dyn Store| store.get("never", Duration::from_secs(60));
        let query = StoreQuery::put(&store, waits).unwrap();
        assert!(query.answer_within(short).is_none());
        // The thread still waits, and the key that it waits for may be set.
        store.set("never", b"now").unwrap();
        let answer = query.answer_within(Duration::from_secs(60));
        assert_eq!(answer.unwrap().unwrap(), b"now");
        let error = query.answer_within(Duration::from_secs(60));
        assert_eq!(error.unwrap().unwrap_err().kind(), ErrorKind::Store);
        let waits = |store: &dyn Store| store.get("never set", Duration::from_secs(5));
        let error = StoreQuery::within(&store, short, waits).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let text = error.to_string();
        assert!(
            text.starts_with("the store did not answer within 5"),
            "{text}"
        );
    }
}
