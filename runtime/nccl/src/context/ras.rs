//! The report of NCCL's own monitor (RAS, in the library since 2.24), for a dump.
//!
//! Each process of a job has a monitor, a thread of the library that knows all other processes. A monitor that is
//! queried collects a report on the whole job, so only two ranks of the job send queries: the first and the last. The
//! protocol consists of lines of text over TCP. Sources: `src/ras/client_support.cc` of NCCL, and "RAS" in its user
//! guide.

use crate::library::foreign_call::ForeignCall;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Queries the monitor, but not within [`FRESH`](Self::FRESH) after a query has ended.
pub(crate) struct Ras {
    /// `None` if this rank sends no queries: the monitor is off, or other ranks of the job query it.
    address: Option<String>,
    timeouts: QueryTimeouts,
    resolver: Arc<Resolver>,
    last: Mutex<LastReport>,
}

/// How long to wait for the monitor's answer.
#[derive(Clone, Copy)]
pub(crate) struct QueryTimeouts {
    /// How long a dump waits.
    pub(crate) dump: Duration,
    /// How long the background thread waits, including the look-up of the monitor's name. The monitor waits five
    /// seconds for a node that does not answer (`RAS_COLLECTIVE_LEG_TIMEOUT`).
    pub(crate) answer: Duration,
}

/// The state of the latest query.
#[derive(Default)]
enum LastReport {
    /// No query was sent.
    #[default]
    None,
    /// The query was sent, and a thread waits for the answer.
    Pending(ForeignCall<Option<String>>),
    /// When the query ended, and the report if there was one.
    Answered(Instant, Option<String>),
}

impl Ras {
    pub(crate) const TIMEOUTS: QueryTimeouts = QueryTimeouts {
        dump: Duration::from_secs(1),
        answer: Duration::from_secs(8),
    };
    /// The age up to which an answer is reused: by the other groups of a dump, and by dumps soon after it.
    const FRESH: Duration = Duration::from_secs(5);
    /// The largest number of bytes that are read of a report.
    const MAX_BYTES: u64 = 1 << 20;

    pub(crate) fn new(address: Option<String>, timeouts: QueryTimeouts) -> Self {
        Self {
            address,
            timeouts,
            resolver: Arc::new(Resolver::new(look_up)),
            last: Mutex::default(),
        }
    }

    /// Returns the report, if the monitor exists and answers in time. A later answer is logged, and included in the
    /// next dump, if it comes before the background thread's deadline.
    ///
    /// # Blocking
    /// For at most the time-out for dumps, after the calls of other threads.
    pub(crate) fn report(&self) -> Option<String> {
        let address = self.address.as_ref()?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut answer = match std::mem::take(&mut *last) {
            LastReport::Answered(at, report) if at.elapsed() < Self::FRESH => {
                *last = LastReport::Answered(at, report.clone());
                return report;
            }
            LastReport::Pending(answer) => answer,
            LastReport::None | LastReport::Answered(..) => self.query_on_thread(address)?,
        };
        match answer.wait(self.timeouts.dump) {
            Ok(None) => {
                *last = LastReport::Pending(answer);
                None
            }
            answered => {
                let report = answered.ok().flatten().flatten();
                *last = LastReport::Answered(Instant::now(), report.clone());
                report
            }
        }
    }

    /// Sends the query on a separate thread.
    fn query_on_thread(&self, address: &str) -> Option<ForeignCall<Option<String>>> {
        let (resolver, address, timeouts) =
            (self.resolver.clone(), address.to_owned(), self.timeouts);
        let work = move || {
            let start = Instant::now();
            let deadline = start + timeouts.answer;
            let addresses = resolver.find(&address, deadline);
            let report = addresses
                .and_then(|addresses| query(&addresses, deadline))
                .inspect_err(
                    |error| tracing::debug!(address, %error, "no report of NCCL's monitor"),
                )
                .ok();
            if let Some(report) = report.as_ref().filter(|_| start.elapsed() > timeouts.dump) {
                tracing::warn!(
                    report,
                    "NCCL's monitor has answered after the dump was made"
                );
            }
            report
        };
        ForeignCall::begin("rcomm/nccl-ras", work)
            .inspect_err(
                |error| tracing::debug!(%error, "cannot start a thread to query NCCL's monitor"),
            )
            .ok()
    }
}

/// Resolves a name with the system's resolver.
fn look_up(name: &str) -> io::Result<Vec<SocketAddr>> {
    Ok(name.to_socket_addrs()?.collect())
}

/// A function that resolves a name.
type LookUp = fn(&str) -> Found;
/// The result of a look-up.
type Found = io::Result<Vec<SocketAddr>>;

/// Resolves names. The system's resolver has no deadline, so it is called on a separate thread, one call at a time. A
/// look-up that misses its deadline is left running, and the next call waits for it.
struct Resolver {
    look_up: LookUp,
    /// The pending result of a look-up that missed its deadline.
    late: Mutex<Option<ForeignCall<Found>>>,
}

impl Resolver {
    fn new(look_up: LookUp) -> Self {
        let late = Mutex::default();
        Self { look_up, late }
    }

    /// Returns the addresses of the monitor: `address` itself, or those to which its name resolves.
    ///
    /// # Errors
    /// `TimedOut` if the name is not resolved by the deadline; the resolver's error.
    fn find(&self, address: &str, deadline: Instant) -> Found {
        if let Ok(address) = address.parse() {
            return Ok(vec![address]);
        }
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        // All calls have the same name, so a late answer serves as well as a new one.
        let mut found = match late.take() {
            Some(found) => found,
            None => self.begin(address)?,
        };
        match found.wait(deadline.saturating_duration_since(Instant::now())) {
            Ok(Some(addresses)) => addresses,
            Ok(None) => {
                *late = Some(found);
                let message = format!("{address} was not looked up in time");
                Err(io::Error::new(ErrorKind::TimedOut, message))
            }
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn begin(&self, address: &str) -> io::Result<ForeignCall<Found>> {
        let (look_up, address) = (self.look_up, address.to_owned());
        ForeignCall::begin("rcomm/nccl-ras", move || look_up(&address)).map_err(io::Error::other)
    }
}

/// Connects to the first of these addresses that accepts. `remaining` returns the time until the deadline.
fn connect(addresses: &[SocketAddr], remaining: impl Fn() -> Duration) -> io::Result<TcpStream> {
    let mut refused = io::Error::from(ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpStream::connect_timeout(address, remaining()) {
            Ok(stream) => return Ok(stream),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

/// Queries the monitor at one of these addresses; returns its report, as JSON or, from an older release, as text.
fn query(addresses: &[SocketAddr], deadline: Instant) -> io::Result<String> {
    let remaining = || {
        let remaining = deadline.saturating_duration_since(Instant::now());
        // The system interprets 0 as no limit.
        remaining.max(Duration::from_millis(1))
    };
    let stream = connect(addresses, remaining)?;
    stream.set_write_timeout(Some(remaining()))?;
    let mut lines = BufReader::new(DeadlineStream { stream, deadline });
    let mut reply = String::new();
    // Releases before 2.28.7 report only text, and answer `SET FORMAT` with an error line.
    for line in ["CLIENT PROTOCOL 2\n", "TIMEOUT 5\n", "SET FORMAT json\n"] {
        lines.get_mut().stream.write_all(line.as_bytes())?;
        reply.clear();
        lines.by_ref().take(4096).read_line(&mut reply)?;
    }
    lines.get_mut().stream.write_all(b"VERBOSE STATUS\n")?;
    let mut report = Vec::new();
    lines.take(Ras::MAX_BYTES).read_to_end(&mut report)?;
    Ok(String::from_utf8_lossy(&report).into_owned())
}

/// A connection whose reads fail after the deadline, even if data keep arriving.
struct DeadlineStream {
    stream: TcpStream,
    deadline: Instant,
}

impl Read for DeadlineStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(remaining))?;
        self.stream.read(into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
    use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
    use std::sync::Condvar;

    /// Starts a monitor that answers once; returns its address.
    fn monitor(answer: impl FnOnce(TcpStream) + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || answer(listener.accept().unwrap().0));
        address
    }

    fn timeouts(dump: Duration) -> QueryTimeouts {
        let answer = Duration::from_secs(60);
        QueryTimeouts { dump, answer }
    }

    #[test]
    fn a_report_that_arrives_after_a_dump_is_in_the_next_dump() {
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let address = monitor(move |mut stream| {
            // The monitor waits until the first dump is made.
            let _ = wait.recv();
            stream
                .write_all(b"SERVER PROTOCOL 2\nOK\nOK\nlate\n")
                .unwrap();
            let mut requests = String::new();
            let mut lines = BufReader::new(stream);
            while lines.read_line(&mut requests).unwrap() > 0 && !requests.contains("STATUS") {}
        });
        let mut ras = Ras::new(Some(address), timeouts(Duration::from_millis(50)));
        assert_eq!(ras.report(), None);
        release.send(()).unwrap();
        ras.timeouts.dump = Duration::from_secs(60);
        // The monitor accepts no second connection, so it was queried once.
        assert_eq!(ras.report().as_deref(), Some("late\n"));
    }

    #[test]
    fn the_report_is_the_text_after_the_replies_to_the_settings() {
        let address = monitor(|stream| {
            let mut lines = BufReader::new(stream);
            for answer in [
                "SERVER PROTOCOL 2\n",
                "OK\n",
                "ERROR: Unknown command\n",
                "all is well\n",
            ] {
                let mut request = String::new();
                lines.read_line(&mut request).unwrap();
                lines.get_mut().write_all(answer.as_bytes()).unwrap();
            }
        });
        let ras = Ras::new(Some(address), timeouts(Duration::from_secs(60)));
        assert_eq!(ras.report().as_deref(), Some("all is well\n"));
        // The listener is gone: this is the report that was kept.
        assert_eq!(ras.report().as_deref(), Some("all is well\n"));
    }

    #[test]
    fn a_dump_does_not_wait_longer_than_its_time_out_for_a_silent_monitor() {
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let address = monitor(move |stream| {
            // The monitor waits until the test is over.
            let _ = wait.recv();
            drop(stream);
        });
        let (brief, start) = (Duration::from_millis(100), Instant::now());
        assert_eq!(Ras::new(Some(address), timeouts(brief)).report(), None);
        assert!(start.elapsed() < Duration::from_secs(30));
        drop(release);
        assert_eq!(Ras::new(None, timeouts(brief)).report(), None);
    }

    /// The number of look-ups, and whether they may end.
    static LOOK_UPS: Mutex<(u32, bool)> = Mutex::new((0, false));
    static MAY_END: Condvar = Condvar::new();

    fn look_up_when_allowed(_: &str) -> Found {
        let mut look_ups = LOOK_UPS.lock().unwrap();
        look_ups.0 += 1;
        let (_guard, waited) = MAY_END
            .wait_timeout_while(look_ups, Duration::from_secs(60), |look_ups| !look_ups.1)
            .unwrap();
        assert!(!waited.timed_out());
        Ok(vec![SocketAddr::from(([127, 0, 0, 1], 28_028))])
    }

    #[test]
    fn a_name_that_is_not_resolved_in_time_is_looked_up_only_once() {
        let resolver = Resolver::new(look_up_when_allowed);
        let soon = || Instant::now() + Duration::from_millis(50);
        for _ in 0..3 {
            let late = resolver.find("monitor:28028", soon()).unwrap_err();
            assert_eq!(late.kind(), ErrorKind::TimedOut);
        }
        // An address is not a name.
        let address = resolver.find("127.0.0.1:1", soon()).unwrap();
        assert_eq!(address, [SocketAddr::from(([127, 0, 0, 1], 1))]);
        LOOK_UPS.lock().unwrap().1 = true;
        MAY_END.notify_all();
        let soon_enough = Instant::now() + Duration::from_secs(60);
        let found = resolver.find("monitor:28028", soon_enough).unwrap();
        assert_eq!(found, [SocketAddr::from(([127, 0, 0, 1], 28_028))]);
        assert_eq!(LOOK_UPS.lock().unwrap().0, 1);
    }

    #[test]
    fn all_addresses_of_a_name_are_tried() {
        // This socket is bound and never listens, so its port refuses connections, and no other process gets it.
        let bound = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&bound, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        let bound_address = getsockname(&bound).unwrap().try_into().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = [bound_address, listener.local_addr().unwrap()];
        let stream = connect(&addresses, || Duration::from_secs(60)).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), addresses[1]);
        drop(bound);
    }
}
