//! Receives events, which show the processes that died or stopped answering since the last report.
//!
//! An event is a JSON object over several lines; objects end at their closing brace. Every server with events can send
//! them in JSON.

use super::{ask, open};
use crate::input::ras::{Communicator, MemberState, Process};
use crate::live::source::network::address::HostPort;
use serde::Deserialize;
use std::io::{BufReader, Read};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// The longest event that is read, bytes.
const MOST_EVENT: usize = 1 << 20;

/// Receives events on its own thread, `rcomm/ras-monitor`, until it is dropped or the server closes the connection.
pub(super) struct Monitor {
    stream: TcpStream,
    shared: Arc<MonitorState>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread shares with its [`Monitor`].
#[derive(Default)]
struct MonitorState {
    is_over: AtomicBool,
    /// Processes that events report as dead or unresponsive.
    troubled: Mutex<Vec<(Process, MemberState)>>,
}

#[derive(Deserialize)]
struct RasEvent {
    event: String,
    peer: Option<Peer>,
}

#[derive(Deserialize)]
struct Peer {
    #[serde(default)]
    host: String,
    #[serde(default)]
    pid: u32,
    #[serde(default)]
    nvml_devs: Vec<u32>,
}

impl Monitor {
    /// Subscribes to events; `None` if the server has none or does not answer.
    pub(super) fn start(address: &HostPort, deadline: Instant) -> Option<Self> {
        let mut stream = open(address, deadline).ok()?;
        // A server without JSON has no events either.
        for line in ["SET FORMAT json", "MONITOR all"] {
            if ask(&mut stream, line).ok()? != "OK" {
                return None;
            }
        }
        // Events that arrived together with the last reply.
        let buffered = stream.buffer().to_vec();
        let event_stream = stream.into_inner().into_stream();
        event_stream.set_read_timeout(None).ok()?;
        let stream = event_stream.try_clone().ok()?;
        let shared = Arc::new(MonitorState::default());
        let state = shared.clone();
        let builder = std::thread::Builder::new().name("rcomm/ras-monitor".into());
        let thread = builder.spawn(move || {
            listen(&buffered, event_stream, &state);
            state.is_over.store(true, Ordering::SeqCst);
        });
        Some(Self {
            stream,
            shared,
            thread: Some(thread.ok()?),
        })
    }

    /// Whether no further events will arrive.
    pub(super) fn is_over(&self) -> bool {
        self.shared.is_over.load(Ordering::SeqCst)
    }

    /// Sets the state of the members that events report as dead or unresponsive; a dead member stays dead.
    pub(super) fn mark_troubled(&self, communicators: &mut [Communicator]) {
        let troubled = self.shared.troubled.lock();
        for (process, state) in troubled.unwrap_or_else(PoisonError::into_inner).iter() {
            let members = communicators.iter_mut().flat_map(|c| &mut c.members);
            for member in members {
                let is_same =
                    (member.process.pid, &member.process.host) == (process.pid, &process.host);
                if is_same && member.state != MemberState::Dead {
                    member.state = state.clone();
                }
            }
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // Ends the thread's read. An error means that the connection is already closed.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.thread.take().map(JoinHandle::join);
    }
}

/// Applies the events in `buffered` and then in `stream`, until the stream ends.
fn listen(buffered: &[u8], stream: TcpStream, shared: &MonitorState) {
    let mut objects = Objects::default();
    for &byte in buffered {
        objects.take(byte, shared);
    }
    for byte in BufReader::new(stream).bytes() {
        // Stop at an event that is too long.
        match byte {
            Ok(byte) if objects.text.len() < MOST_EVENT => objects.take(byte, shared),
            _ => return,
        }
    }
}

/// Splits a stream into JSON objects.
#[derive(Default)]
struct Objects {
    text: Vec<u8>,
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Objects {
    /// Takes the next byte of the stream, and applies the event that it completes, if any.
    fn take(&mut self, byte: u8, shared: &MonitorState) {
        if self.depth == 0 && byte != b'{' {
            return;
        }
        self.text.push(byte);
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_string => self.escaped = true,
            b'"' => self.in_string = !self.in_string,
            b'{' if !self.in_string => self.depth += 1,
            b'}' if !self.in_string => self.depth -= 1,
            _ => {}
        }
        if self.depth == 0 {
            // Events of unknown form are ignored.
            if let Ok(event) = serde_json::from_slice::<RasEvent>(&self.text) {
                shared.apply(event);
            }
            self.text.clear();
        }
    }
}

impl MonitorState {
    /// Stores the state of the process that an event is about, or removes it if the process has recovered.
    fn apply(&self, event: RasEvent) {
        let Some(peer) = event.peer else { return };
        let process = Process {
            host: peer.host,
            pid: peer.pid,
            device: peer.nvml_devs.first().copied(),
        };
        let state = match event.event.as_str() {
            "PEER_DEAD" | "PEER_TIMEOUT_DEAD" => Some(MemberState::Dead),
            "PEER_UNRESPONSIVE" | "PEER_SEND_STUCK" | "PEER_KEEPALIVE_TIMEOUT" => {
                Some(MemberState::Unresponsive)
            }
            "PEER_RECOVERED" | "PEER_CONNECTED" | "PEER_NEW" => None,
            _ => return,
        };
        let troubled = self.troubled.lock();
        let mut troubled = troubled.unwrap_or_else(PoisonError::into_inner);
        troubled.retain(|(known, _)| (&known.host, known.pid) != (&process.host, process.pid));
        troubled.extend(state.map(|state| (process, state)));
    }
}
