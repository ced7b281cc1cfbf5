//! Reads NCCL's RAS service (2.24 and later) as a source. One process of a job answers for all processes of the job.
//!
//! The protocol is lines of text over a TCP connection, which the server closes after a report. Reports are requested
//! as JSON (2.28.7 and later) or else as text; [`ras`](crate::input::ras) reads both. A second connection receives
//! events (2.29 and later), which report the death of a process before the next report does. The service counts
//! launches, not completions, and knows ranks of communicators, not of the job: [`Live`](crate::Live) joins them by
//! host, process and device.

mod monitor;

use crate::input::ras::{Communicator, communicators};
use crate::live::source::network::address::{HostPort, Timed};
use crate::live::source::{Poll, Source, SourceError};
use monitor::Monitor;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::time::{Duration, Instant};

/// The time between two reports: each requires an answer of every process of the job.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
/// The longest report that is read, bytes.
const MOST_REPORT: u64 = 256 << 20;
/// The longest line outside of a report, bytes.
const MOST_LINE: u64 = 4096;
/// The default address of the service.
pub const RAS_ADDRESS: &str = "localhost:28028";

/// NCCL's RAS service as a source; see the module.
pub struct RasSource {
    address: HostPort,
    /// When the newest report was read, and its communicators.
    last: Option<(Instant, Vec<Communicator>)>,
    monitor: Option<Monitor>,
}

impl RasSource {
    /// Reads the service at this address.
    pub fn new(address: HostPort) -> Self {
        Self {
            address,
            last: None,
            monitor: None,
        }
    }

    /// Requests a report and reads it.
    fn report(&self, deadline: Instant) -> Result<Vec<Communicator>, SourceError> {
        let place = format!("NCCL RAS at {}", self.address);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::ConnectionRefused => SourceError::Nothing {
                what: format!("no process listens at {}", self.address),
                hint: "RAS is part of NCCL 2.24 and later; a job may have set NCCL_RAS_ADDR or \
                       NCCL_RAS_ENABLE=0"
                    .into(),
            },
            _ => SourceError::Io {
                place: place.clone(),
                source,
            },
        };
        let unusable = |reason: String| SourceError::Unusable {
            place: place.clone(),
            reason,
        };
        let mut stream = open(&self.address, deadline).map_err(failed)?;
        // The service waits this many seconds for a process before it reports the process as missing, instead of five.
        // A server that does not know the command waits five.
        ask(&mut stream, "TIMEOUT 1").map_err(failed)?;
        let reply = ask(&mut stream, "SET FORMAT json").map_err(failed)?;
        // An error means a version before 2.28.7, whose report is text.
        if reply != "OK" && !reply.starts_with("ERROR") {
            return Err(unusable(format!(
                "it answered {reply:?}: is it NCCL's RAS?"
            )));
        }
        let command = b"VERBOSE STATUS\n";
        stream.get_mut().write_all(command).map_err(failed)?;
        let mut report = Vec::new();
        let read = stream.take(MOST_REPORT).read_to_end(&mut report);
        read.map_err(failed)?;
        communicators(&report).map_err(|why| unusable(format!("its report is invalid: {why}")))
    }
}

/// Connects and does the handshake.
fn open(address: &HostPort, deadline: Instant) -> io::Result<BufReader<Timed>> {
    let mut stream = BufReader::new(address.connect(deadline)?);
    let reply = ask(&mut stream, "CLIENT PROTOCOL 2")?;
    if reply.starts_with("SERVER PROTOCOL") {
        return Ok(stream);
    }
    let text = format!("it greets with {reply:?}: is it NCCL's RAS?");
    Err(io::Error::new(io::ErrorKind::InvalidData, text))
}

/// Sends a line and reads the line that answers it.
fn ask(stream: &mut BufReader<Timed>, line: &str) -> io::Result<String> {
    stream.get_mut().write_all(format!("{line}\n").as_bytes())?;
    let mut reply = Vec::new();
    stream.take(MOST_LINE).read_until(b'\n', &mut reply)?;
    if reply.last() != Some(&b'\n') {
        let text = "it closed the connection, or sent a line without an end: is it NCCL's RAS?";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(String::from_utf8_lossy(&reply).trim().to_owned())
}

impl Source for RasSource {
    fn name(&self) -> String {
        format!("NCCL RAS at {}", self.address)
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        let is_due = self
            .last
            .as_ref()
            .is_none_or(|(read, _)| read.elapsed() >= REPORT_INTERVAL);
        if is_due {
            let communicators = self.report(deadline)?;
            self.last = Some((Instant::now(), communicators));
        }
        if self.monitor.as_ref().is_none_or(Monitor::is_over) {
            // A server without events is tried again only as often as a report is requested.
            if is_due {
                self.monitor = Monitor::start(&self.address, deadline);
            }
        }
        let mut communicators = self
            .last
            .as_ref()
            .map_or_else(Vec::new, |(_, communicators)| communicators.clone());
        if let Some(monitor) = &self.monitor {
            monitor.mark_troubled(&mut communicators);
        }
        let world_size = communicators.iter().map(|c| c.size).max();
        Ok(Poll {
            communicators,
            // A job has at least the ranks of its largest communicator.
            world_size: world_size.filter(|&size| size > 0),
            ..Poll::default()
        })
    }
}

#[cfg(test)]
mod tests;
