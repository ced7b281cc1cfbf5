//! [`Hierarchy`]: whether the hosts of a group use their shared memory. Each host with several ranks of the group
//! publishes in the group's store whether it has an exchange area.

use crate::wait::{Failure, Interrupted, WaitPolicy};
use rcomm_core::store::{Store, StoreQuery, absent_among};
use rcomm_core::{Error, ErrorKind};
use rcomm_recorder::model::Rank;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest wait for the other hosts in one request to the store. Between two requests the deadline and the stop are
/// checked.
const STORE_TIME: Duration = Duration::from_millis(100);
/// How long a store that does not answer may delay the notice of a stop.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// How long before the deadline the store is asked which hosts are absent: an earlier answer is of no use.
const NAMING_TIME: Duration = Duration::from_secs(1);
/// How old the last answer may be at the deadline. If the store has been silent for longer, hosts may have published
/// since.
const ANSWER_AGE: Duration = Duration::from_millis(500);

/// Whether every host with several ranks of the group has an exchange area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hierarchy {
    /// No operation has asked the store yet.
    Unknown,
    /// Every host with several ranks of the group has an exchange area.
    Nested,
    /// A host with several ranks of the group has no exchange area, so all ranks use channels.
    Flat,
}

/// The store's answer to one request.
enum Answer {
    /// The value of each host.
    Values(Vec<Vec<u8>>),
    /// The positions of the hosts that have not published yet.
    Absent(Vec<usize>),
}

impl Hierarchy {
    /// Reads from the store what the hosts with several ranks have published: each is given with the first of its
    /// ranks. The first operation does so, since the making of a group must not wait for other hosts.
    ///
    /// # Errors
    /// After the deadline, without another request: `Late` with the first rank of each host that had not published when
    /// the store was last asked, or `Store` if the store has not said shortly before the deadline which hosts those
    /// are. `Interrupted` if the group was stopped; those of the store.
    pub(super) fn find(
        store: &Arc<dyn Store>,
        hosts: &[(usize, Rank)],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Self, Failure> {
        let keys: Arc<[String]> = hosts.iter().map(|&(host, _)| area_key(host)).collect();
        let mut absent = None;
        loop {
            match policy.check() {
                Err(Interrupted::TimedOut) => break,
                checked => checked?,
            }
            let left = policy.time_left();
            let is_naming = left <= NAMING_TIME;
            // Ever shorter waits before the deadline, so that little time passes between it and the last answer.
            let (wait, limit) = match is_naming {
                true => (left / 2, left),
                false => (left - NAMING_TIME, left - NAMING_TIME / 2),
            };
            let (wait, limit) = (wait.min(STORE_TIME), limit.min(ANSWER_TIME));
            let names_by = is_naming.then(|| Instant::now() + limit);
            let asked = keys.clone();
            let ask = move |store: &dyn Store| ask(store, &asked, wait, names_by);
            match StoreQuery::here(store, limit, ask) {
                Some(Ok(Answer::Values(values))) => {
                    return Ok(match values.iter().all(|value| value == b"1") {
                        true => Self::Nested,
                        false => Self::Flat,
                    });
                }
                Some(Ok(Answer::Absent(hosts))) => absent = Some((Instant::now(), hosts)),
                Some(Err(error)) if error.kind() != ErrorKind::Timeout => {
                    return Err(Failure::Store(error));
                }
                None | Some(Err(_)) => {}
            }
        }
        Err(match absent {
            Some((told, absent)) if !absent.is_empty() && told.elapsed() < ANSWER_AGE => {
                Failure::Late(absent.into_iter().map(|index| hosts[index].1).collect())
            }
            _ => Failure::Store(Error::new(
                ErrorKind::Timeout,
                "the store did not say before the deadline which hosts share memory",
            )),
        })
    }
}

/// Waits for the keys. If they do not all appear within `wait`, asks which are absent; does not ask if `names_by`, the
/// deadline of that answer, is `None`.
fn ask(
    store: &dyn Store,
    keys: &[String],
    wait: Duration,
    names_by: Option<Instant>,
) -> Result<Answer, Error> {
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    match (store.multi_get(&keys, wait), names_by) {
        (Ok(values), _) => Ok(Answer::Values(values)),
        (Err(error), Some(until)) if error.kind() == ErrorKind::Timeout => {
            absent_among(store, &keys, until)
                .at_least()
                .map(Answer::Absent)
        }
        (Err(error), _) => Err(error),
    }
}

/// The key under which a host's first rank publishes whether its host has an exchange area.
pub(super) fn area_key(host: usize) -> String {
    format!("shm_exchange/{host}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::{Stop, WaitMode};
    use rcomm_core::Deadline;
    use rcomm_core::store::TcpStore;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::{Sender, channel};

    const HOUR: Duration = Duration::from_secs(3600);
    /// Far more than a search takes after its deadline.
    const SOON: Duration = Duration::from_secs(30);
    /// How a request begins that waits for three keys.
    const WAIT: [u8; 9] = [6, 3, 0, 0, 0, 0, 0, 0, 0];
    const HOSTS: [(usize, Rank); 3] = [(0, 0), (1, 2), (2, 5)];

    fn find(store: &Arc<dyn Store>, timeout: Duration) -> Result<Hierarchy, Failure> {
        let stop = Stop::default();
        let mut policy = WaitPolicy::new(&stop, Deadline::In(timeout), WaitMode::Helper);
        Hierarchy::find(store, &HOSTS, &mut policy)
    }

    #[test]
    fn hosts_that_have_not_published_by_the_deadline_are_late() {
        let store: Arc<dyn Store> = Arc::new(TcpStore::host("127.0.0.1", 0, HOUR).unwrap());
        store.set(&area_key(1), b"1").unwrap();
        // A store that got no processor has named only some of them by the deadline, or has not answered.
        let late = (0..10).map(|_| match find(&store, Duration::from_secs(2)) {
            Err(Failure::Late(ranks)) => ranks,
            Err(Failure::Store(_)) => Vec::new(),
            found => panic!("{found:?}"),
        });
        let mut late =
            late.inspect(|ranks| assert!(ranks.iter().all(|rank| [0, 5].contains(rank))));
        assert!(late.any(|ranks| ranks == [0, 5]));
        store.set(&area_key(0), b"1").unwrap();
        store.set(&area_key(2), b"1").unwrap();
        assert_eq!(find(&store, HOUR).unwrap(), Hierarchy::Nested);
        store.set(&area_key(2), b"0").unwrap();
        assert_eq!(find(&store, HOUR).unwrap(), Hierarchy::Flat);
    }

    #[test]
    fn a_silent_store_is_not_asked_after_the_deadline() {
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
        let store = TcpStore::connect("127.0.0.1", port, HOUR).unwrap();
        let (mut client, server) = answers.join().unwrap();
        let store: Arc<dyn Store> = Arc::new(store);
        let begun = Instant::now();
        let found = find(&store, Duration::from_millis(300));
        let Err(Failure::Store(error)) = found else {
            panic!("{found:?}");
        };
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        drop(store);
        let mut requests = Vec::new();
        client.read_to_end(&mut requests).unwrap();
        let waits = requests.windows(WAIT.len()).filter(|part| *part == WAIT);
        assert_eq!(waits.count(), 1, "{requests:?}");
        server.set_nonblocking(true).unwrap();
        let later = server.accept().map(drop).unwrap_err();
        assert_eq!(later.kind(), std::io::ErrorKind::WouldBlock);
    }

    /// Listens in front of the store at `port`, and returns its own port. Passes on the first `passed` answers, then
    /// says so through `silent`, and passes on no more.
    fn stand_in_front_of(port: u16, passed: usize, silent: Sender<()>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own_port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let mut server = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let mut to_server = server.try_clone().unwrap();
            let mut requests = client.try_clone().unwrap();
            std::thread::spawn(move || std::io::copy(&mut requests, &mut to_server));
            let mut answer = [0; 4096];
            for _ in 0..passed {
                let received = server.read(&mut answer).unwrap();
                client.write_all(&answer[..received]).unwrap();
            }
            silent.send(()).unwrap();
            // Until the client is gone. Later connections are not even accepted.
            while matches!(server.read(&mut answer), Ok(1..)) {}
            drop((client, listener));
        });
        own_port
    }

    #[test]
    fn hosts_are_not_late_by_what_the_store_said_long_before_the_deadline() {
        let server = TcpStore::host("127.0.0.1", 0, HOUR).unwrap();
        let (silent, is_silent) = channel();
        let port = stand_in_front_of(server.port(), 30, silent);
        let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", port, HOUR).unwrap());
        let others = std::thread::spawn(move || {
            is_silent.recv().unwrap();
            for (host, _) in HOSTS {
                server.set(&area_key(host), b"1").unwrap();
            }
            server
        });
        let found = find(&store, Duration::from_secs(4));
        let _server = others.join().unwrap();
        assert!(matches!(found, Err(Failure::Store(_))), "{found:?}");
    }
}
