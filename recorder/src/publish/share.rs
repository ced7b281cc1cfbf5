//! [`Share`]: how much of the rank's processor time an endpoint takes.
//!
//! The endpoint's thread runs on a core that a rank may need, and one answer can take tens of milliseconds. So the
//! processor time of its answers is measured: clients that ask without pause get at most a hundredth of a core
//! together. A request beyond that waits until the time is saved up, and is answered late. A client that pauses between
//! its requests, as every view does, does not wait: after a pause of [`PAUSE`] since its last request it is answered at
//! once, however much time others have used.

use super::places::Place;
use rustix::time::{ClockId, clock_gettime};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::task::JoinError;

/// Maximum time for which a request waits for its turn. Then it is refused.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// With the first request after a pause of this length, a remembered client begins a look: a series of requests that do
/// not wait.
const PAUSE: Duration = Duration::from_millis(400);
/// A look's further requests wait once its answers have taken this much processor time.
const LOOK: Duration = Duration::from_millis(5);
/// The number of clients whose last requests are remembered.
const REMEMBERED: usize = 64;

/// How much processor time answers may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// One part in so many of a core's time.
    pub(super) part: u32,
    /// The most that is saved up while no request comes.
    pub(super) saved: Duration,
    /// The most that answers may have overdrawn: it limits the wait that one expensive answer causes.
    pub(super) overdrawn: Duration,
}

/// A hundredth of a core. After the most expensive answer the next one waits for five seconds.
pub(super) const RULES: Rules = Rules {
    part: 100,
    saved: Duration::from_millis(50),
    overdrawn: Duration::from_millis(50),
};

/// The client, as far as the system identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Client {
    /// The process at the other end of a unix socket; `None` if the system does not report it.
    Process(Option<i32>),
    /// The host at the other end of a TCP connection.
    Host(IpAddr),
}

/// The processor time that this thread has used.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let ns = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(seconds, ns)
}

/// The processor time of one endpoint's answers.
#[derive(Debug)]
pub(super) struct Share {
    ledger: Mutex<Ledger>,
    /// Held by the request that is next, so that requests are answered in the order of their arrival.
    next: tokio::sync::Mutex<()>,
}

impl Share {
    pub(super) fn new(rules: Rules) -> Arc<Self> {
        Arc::new(Self {
            ledger: Mutex::new(Ledger::new(rules, Instant::now())),
            next: tokio::sync::Mutex::default(),
        })
    }

    /// Waits until a request of this client may be answered. `false` if that takes longer than [`LONGEST_WAIT`].
    async fn turn(&self, client: Client) -> bool {
        if self.ledger().arrives(client, Instant::now()) {
            return true;
        }
        let waiting = async {
            let _next = self.next.lock().await;
            loop {
                let left = self.ledger().until_balanced(Instant::now());
                if left.is_zero() {
                    return;
                }
                tokio::time::sleep(left).await;
            }
        };
        tokio::time::timeout(LONGEST_WAIT, waiting).await.is_ok()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The client of one connection, for as long as the connection lasts.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) place: Arc<Place>,
    client: Client,
    share: Arc<Share>,
    is_admitted: AtomicBool,
    /// Whether the connection's request waits for its turn.
    is_waiting: AtomicBool,
}

impl Visitor {
    pub(super) fn new(place: Arc<Place>, client: Client, share: Arc<Share>) -> Arc<Self> {
        Arc::new(Self {
            place,
            client,
            share,
            is_admitted: AtomicBool::new(false),
            is_waiting: AtomicBool::new(false),
        })
    }

    /// Notes that a request is admitted, and waits for its turn. `false` if that takes too long.
    pub(super) async fn admit(&self) -> bool {
        self.place.admit();
        // A client that is not admitted neither waits nor makes others wait.
        self.is_admitted.store(true, Ordering::Relaxed);
        self.is_waiting.store(true, Ordering::Relaxed);
        let is_its_turn = self.share.turn(self.client).await;
        self.is_waiting.store(false, Ordering::Relaxed);
        is_its_turn
    }

    /// Runs `work`, which may block, on another thread. Counts that thread's processor time toward this client's
    /// answer, even if `work` panics or the client has gone.
    ///
    /// # Errors
    /// If it panics.
    pub(super) async fn elsewhere<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let (client, share) = (self.client, self.share.clone());
        let counted = move || {
            let _meter = Meter {
                client,
                share,
                before: thread_time(),
            };
            work()
        };
        tokio::task::spawn_blocking(counted).await
    }

    /// Runs the connection on this thread, and counts the processor time that it takes from its first admitted request
    /// on: reading requests, making answers, and writing them. Checking whether a request's turn has come is not
    /// counted: on a slow machine a check takes more than is saved up until the next check, and the turn would never
    /// come.
    pub(super) async fn counting<T>(&self, connection: impl Future<Output = T>) -> T {
        let mut connection = pin!(connection);
        std::future::poll_fn(|context| {
            let is_waiting = || self.is_waiting.load(Ordering::Relaxed);
            let (before, was_waiting) = (thread_time(), is_waiting());
            let polled: Poll<T> = connection.as_mut().poll(context);
            if self.is_admitted.load(Ordering::Relaxed) && !(was_waiting && is_waiting()) {
                let used = thread_time().saturating_sub(before);
                let mut ledger = self.share.ledger();
                ledger.spend(self.client, used, Instant::now());
            }
            polled
        })
        .await
    }
}

/// Counts the processor time that this thread uses until the meter is dropped.
struct Meter {
    client: Client,
    share: Arc<Share>,
    before: Duration,
}

impl Drop for Meter {
    fn drop(&mut self) {
        let used = thread_time().saturating_sub(self.before);
        let mut ledger = self.share.ledger();
        ledger.spend(self.client, used, Instant::now());
    }
}

/// The balance of processor time, and the clients that have asked.
#[derive(Debug)]
struct Ledger {
    rules: Rules,
    /// In nanoseconds of processor time; below zero if overdrawn.
    balance: i64,
    /// The moment for which `balance` was computed.
    as_of: Instant,
    clients: Vec<Known>,
}

/// A client that is remembered.
#[derive(Debug)]
struct Known {
    client: Client,
    /// The moment of the client's last request, or of the last work for the client.
    last: Instant,
    /// Whether the client paused before this look.
    has_paused: bool,
    /// The processor time of the answers of this look.
    used: Duration,
}

fn in_ns(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

impl Ledger {
    fn new(rules: Rules, now: Instant) -> Self {
        Self {
            rules,
            balance: in_ns(rules.saved),
            as_of: now,
            clients: Vec::new(),
        }
    }

    /// Adds what was saved up since the balance was computed.
    fn save_until(&mut self, now: Instant) {
        // A time that was taken on another thread may be a little older.
        let passed = now.saturating_duration_since(self.as_of);
        self.as_of = self.as_of.max(now);
        let saved = in_ns(passed / self.rules.part);
        let most = in_ns(self.rules.saved);
        self.balance = self.balance.saturating_add(saved).min(most);
    }

    /// Notes a request; returns whether it is answered without a wait, because its client pauses between looks.
    fn arrives(&mut self, client: Client, now: Instant) -> bool {
        let known = self.clients.iter_mut().find(|it| it.client == client);
        let Some(known) = known else {
            if self.clients.len() >= REMEMBERED {
                let oldest = (0..self.clients.len()).min_by_key(|&at| self.clients[at].last);
                oldest.map(|at| self.clients.swap_remove(at));
            }
            self.clients.push(Known {
                client,
                last: now,
                has_paused: false,
                used: Duration::ZERO,
            });
            return false;
        };
        if now.saturating_duration_since(known.last) >= PAUSE {
            (known.has_paused, known.used) = (true, Duration::ZERO);
        }
        known.last = known.last.max(now);
        known.has_paused && known.used < LOOK
    }

    /// The time until nothing is overdrawn, if nothing more is spent.
    fn until_balanced(&mut self, now: Instant) -> Duration {
        self.save_until(now);
        let overdrawn = u64::try_from(-self.balance).unwrap_or(0);
        Duration::from_nanos(overdrawn) * self.rules.part
    }

    /// Takes processor time from the balance, and counts it for the client, if it is remembered.
    fn spend(&mut self, client: Client, used: Duration, now: Instant) {
        self.save_until(now);
        let least = -in_ns(self.rules.overdrawn);
        self.balance = self.balance.saturating_sub(in_ns(used)).max(least);
        let known = self.clients.iter_mut();
        for known in known.filter(|it| it.client == client) {
            known.used += used;
            known.last = known.last.max(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{OpType, ProcessGroupInfo};
    use crate::publish::endpoint::{Endpoint, Listen};
    use crate::publish::http::HttpRequest;
    use crate::record::{
        FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    };

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    const VIEW: Client = Client::Process(Some(1));
    const HAMMER: Client = Client::Process(Some(2));

    #[test]
    fn who_asks_without_pause_gets_a_hundredth_of_a_core() {
        let began = Instant::now();
        let mut ledger = Ledger::new(RULES, began);
        let (mut now, mut used) = (began, Duration::ZERO);
        for _ in 0..100 {
            assert!(!ledger.arrives(HAMMER, now));
            now += ledger.until_balanced(now);
            assert_eq!(ledger.until_balanced(now), Duration::ZERO);
            now += ms(20);
            used += ms(20);
            ledger.spend(HAMMER, ms(20), now);
        }
        let most = (now - began) / 100 + RULES.saved + ms(20);
        assert!(used <= most, "{used:?} in {:?}", now - began);
    }

    /// The rules hold for the thread of a real endpoint: what it used is compared with what time allows.
    #[test]
    fn the_thread_of_an_endpoint_uses_its_part_and_answers_all() {
        let rules = Rules {
            part: 10,
            saved: ms(2),
            overdrawn: Duration::from_secs(1),
        };
        let directory = tempfile::tempdir().unwrap();
        let mut config = RecorderConfig::new("job", 0, 1);
        config.placement = Placement::Dir(directory.path().to_owned());
        let recorder = Arc::new(FlightRecorder::create(&config).unwrap());
        let info = ProcessGroupInfo {
            id: 0,
            name: "0".to_owned(),
            desc: "default_pg".to_owned(),
            ranks: [0].into(),
        };
        let group = recorder.add_group(&info, Duration::ZERO);
        let key = SignatureKey {
            backend: "cpu",
            op_name: "barrier",
            inputs: &[],
            outputs: &[],
        };
        for seq in 0..256 {
            recorder.begin(&Operation {
                collective_seq_id: seq,
                ..Operation::new(group, OpType::Barrier, SignatureRef::Key(&key))
            });
        }
        let listen = Listen::beside(&recorder).unwrap();
        let endpoint = Endpoint::serve_within(recorder, listen, rules).unwrap();
        let used = Arc::new(Mutex::new(Duration::ZERO));
        let noted = used.clone();
        // It runs on the endpoint's thread.
        endpoint.list_waits(move || {
            *noted.lock().unwrap() = thread_time();
            Vec::new()
        });
        let deadline = Instant::now() + Duration::from_secs(120);
        let ask = |path| {
            let answer = HttpRequest::get(path).send(endpoint.address(), deadline);
            assert_eq!(answer.unwrap().status, 200);
        };
        let began = Instant::now();
        let (mut before, mut largest) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..20 {
            ask("/dump");
            ask("/waits");
            let now = *used.lock().unwrap();
            largest = largest.max(now - before);
            before = now;
        }
        // Accepting connections and waking up is not counted as answering; it may take as much again.
        let most = 2 * began.elapsed() / rules.part + rules.saved + 2 * largest;
        assert!(before <= most, "{before:?} used, {most:?} allowed");
        assert!(before > 4 * largest, "too few requests to tell");
    }

    /// An endpoint of a recorder without operations, in this directory.
    fn endpoint(directory: &tempfile::TempDir, rules: Rules) -> Endpoint {
        let mut config = RecorderConfig::new("job", 0, 1);
        config.placement = Placement::Dir(directory.path().to_owned());
        let recorder = Arc::new(FlightRecorder::create(&config).unwrap());
        let listen = Listen::beside(&recorder).unwrap();
        Endpoint::serve_within(recorder, listen, rules).unwrap()
    }

    /// Here less is saved up between two checks of the balance than one check takes.
    #[test]
    fn a_request_does_not_pay_for_waiting() {
        let rules = Rules {
            part: 5_000,
            saved: Duration::ZERO,
            overdrawn: ms(1),
        };
        let directory = tempfile::tempdir().unwrap();
        let endpoint = endpoint(&directory, rules);
        let deadline = Instant::now() + Duration::from_secs(120);
        for _ in 0..2 {
            let answer = HttpRequest::get("/ping").send(endpoint.address(), deadline);
            assert_eq!(answer.unwrap().status, 200);
        }
    }

    /// Posts to a handler that takes 3 ms: once, then after a pause again and again without one. What these runs used
    /// is compared with what time allows.
    fn posts_after_a_pause_keep_the_part(status: u16, handler_panics: bool) {
        let rules = Rules {
            part: 10,
            saved: ms(2),
            overdrawn: Duration::from_secs(1),
        };
        let directory = tempfile::tempdir().unwrap();
        let endpoint = endpoint(&directory, rules);
        // What the runs used since this was taken, and the longest one.
        let used = Arc::new(Mutex::new([Duration::ZERO; 2]));
        let noted = used.clone();
        let handler = move |_: &crate::publish::HandlerParameters| {
            let before = thread_time();
            while thread_time().saturating_sub(before) < ms(3) {}
            let used = thread_time().saturating_sub(before);
            {
                let mut noted = noted.lock().unwrap();
                *noted = [noted[0] + used, noted[1].max(used)];
            }
            assert!(!handler_panics, "on purpose");
            Ok(String::new())
        };
        endpoint.handle("work", handler).unwrap();
        let deadline = Instant::now() + Duration::from_secs(120);
        let ask = || {
            let answer = HttpRequest::post("/handlers/work").send(endpoint.address(), deadline);
            assert_eq!(answer.unwrap().status, status);
        };
        ask();
        std::thread::sleep(PAUSE);
        *used.lock().unwrap() = [Duration::ZERO; 2];
        let began = Instant::now();
        for _ in 0..20 {
            ask();
        }
        let [used, longest] = *used.lock().unwrap();
        let most = began.elapsed() / rules.part + rules.saved + 2 * longest;
        assert!(used <= most, "{used:?} used, {most:?} allowed");
    }

    #[test]
    fn the_program_s_handlers_use_the_part_of_the_endpoint() {
        posts_after_a_pause_keep_the_part(200, false);
    }

    #[test]
    fn a_handler_that_panics_uses_the_part_of_the_endpoint() {
        posts_after_a_pause_keep_the_part(500, true);
    }

    #[test]
    fn after_idleness_the_first_request_does_not_wait() {
        let began = Instant::now();
        let mut ledger = Ledger::new(RULES, began);
        assert_eq!(ledger.until_balanced(began), Duration::ZERO);
        // However expensive an answer was, it delays the next one by five seconds at most.
        ledger.spend(HAMMER, Duration::from_secs(60), began);
        assert_eq!(ledger.until_balanced(began), Duration::from_secs(5));
        let later = began + Duration::from_secs(5);
        assert_eq!(ledger.until_balanced(later), Duration::ZERO);
        // No more is saved up in a day than in a few seconds.
        let later = later + Duration::from_secs(86_400);
        ledger.save_until(later);
        assert_eq!(ledger.balance, in_ns(RULES.saved));
    }

    #[test]
    fn a_view_that_pauses_does_not_wait_for_one_that_does_not() {
        let mut now = Instant::now();
        let mut ledger = Ledger::new(RULES, now);
        ledger.arrives(VIEW, now);
        for _ in 0..10 {
            now += Duration::from_secs(1);
            ledger.spend(HAMMER, ms(40), now);
            assert!(!ledger.arrives(HAMMER, now));
            // It asks for small answers first, and then for the record.
            for used in [1, 1, 40] {
                assert!(ledger.arrives(VIEW, now));
                now += ms(used);
                ledger.spend(VIEW, ms(used), now);
            }
            assert!(!ledger.arrives(VIEW, now), "the look has no end");
        }
    }

    #[test]
    fn the_clients_that_are_remembered_are_limited() {
        let mut now = Instant::now();
        let mut ledger = Ledger::new(RULES, now);
        for process in 0..1000 {
            ledger.arrives(Client::Process(Some(process)), now);
            now += ms(1);
        }
        assert_eq!(ledger.clients.len(), REMEMBERED);
        now += PAUSE;
        assert!(ledger.arrives(Client::Process(Some(999)), now));
        assert!(!ledger.arrives(Client::Process(Some(0)), now));
    }
}
