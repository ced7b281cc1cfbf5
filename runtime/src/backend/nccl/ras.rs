//! The report of NCCL's own monitor (RAS, in the library since 2.24), for a dump.
//!
//! Each process of a job has one, on a thread of the library's that knows of all the others; whichever of
//! this host's answers tells of the whole job. Plain lines over TCP: source `src/ras/client_support.cc` of
//! NCCL, and "RAS" in its user guide.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Asks the monitor, and not too often.
pub(super) struct Ras {
    /// `None` if this rank does not ask: one of each host does.
    address: Option<String>,
    last: Mutex<Option<(Instant, Option<String>)>>,
}

impl Ras {
    /// A dump is not held up for longer.
    const PATIENCE: Duration = Duration::from_secs(1);
    /// One answer serves for all groups of a dump, and for dumps of one fault.
    const FRESH: Duration = Duration::from_secs(5);
    const MOST_BYTES: u64 = 1 << 20;

    pub(super) fn new(address: Option<String>) -> Self {
        Self {
            address,
            last: Mutex::default(),
        }
    }

    /// The report, if the monitor is there and answers in time.
    ///
    /// # Blocking
    /// For a second at most.
    pub(super) fn report(&self) -> Option<String> {
        let address = self.address.as_ref()?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, report)) = &*last
            && at.elapsed() < Self::FRESH
        {
            return report.clone();
        }
        let report = ask(address, Instant::now() + Self::PATIENCE);
        let report = report
            .inspect_err(|error| tracing::debug!(address, %error, "no report of NCCL's monitor"))
            .ok();
        *last = Some((Instant::now(), report.clone()));
        report
    }
}

fn ask(address: &str, deadline: Instant) -> std::io::Result<String> {
    let left = || {
        let left = deadline.saturating_duration_since(Instant::now());
        // The system takes 0 for no limit.
        left.max(Duration::from_millis(1))
    };
    let mut places = address.to_socket_addrs()?;
    let place = places.next().ok_or(std::io::ErrorKind::AddrNotAvailable)?;
    let stream = TcpStream::connect_timeout(&place, left())?;
    stream.set_write_timeout(Some(left()))?;
    let mut lines = BufReader::new(Timed { stream, deadline });
    let mut said = String::new();
    // A release before 2.28.7 has no other form than text, and says so.
    for line in ["CLIENT PROTOCOL 2\n", "TIMEOUT 1\n", "SET FORMAT json\n"] {
        lines.get_mut().stream.write_all(line.as_bytes())?;
        said.clear();
        lines.by_ref().take(4096).read_line(&mut said)?;
    }
    lines.get_mut().stream.write_all(b"VERBOSE STATUS\n")?;
    let mut report = Vec::new();
    lines.take(Ras::MOST_BYTES).read_to_end(&mut report)?;
    Ok(String::from_utf8_lossy(&report).into_owned())
}

/// A connection that is given up at a deadline, however slowly it speaks.
struct Timed {
    stream: TcpStream,
    deadline: Instant,
}

impl Read for Timed {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A monitor that answers once.
    fn monitor(answer: impl FnOnce(TcpStream) + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || answer(listener.accept().unwrap().0));
        address
    }

    #[test]
    fn the_report_is_what_follows_the_answers() {
        let address = monitor(|stream| {
            let mut lines = BufReader::new(stream);
            for answer in [
                "SERVER PROTOCOL 2\n",
                "OK\n",
                "ERROR: Unknown command\n",
                "all is well\n",
            ] {
                let mut asked = String::new();
                lines.read_line(&mut asked).unwrap();
                lines.get_mut().write_all(answer.as_bytes()).unwrap();
            }
        });
        let ras = Ras::new(Some(address));
        assert_eq!(ras.report().as_deref(), Some("all is well\n"));
        // It is not asked again: nobody listens any more.
        assert_eq!(ras.report().as_deref(), Some("all is well\n"));
    }

    #[test]
    fn a_monitor_that_does_not_answer_holds_nobody_up() {
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let address = monitor(move |stream| {
            // Until the test is over.
            let _ = wait.recv();
            drop(stream);
        });
        assert_eq!(Ras::new(Some(address)).report(), None);
        drop(release);
        assert_eq!(Ras::new(None).report(), None);
    }
}
