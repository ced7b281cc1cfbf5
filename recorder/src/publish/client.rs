//! Reads one endpoint.
//!
//! Blocking, without threads or a runtime of its own: one request, one connection, one deadline over
//! both. What comes back is limited in size and trusted in nothing.

use super::answer::{
    CHANGE_HEADER, ENTRIES_HEADER, EndpointAddress, EndpointToken, PeerEndpoint, RankAnswer,
    SINCE_HEADER,
};
use super::{Dump, ReadProblem};
use crate::error::{Error, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest head of an answer, bytes.
const MOST_HEAD: usize = 16 * 1024;
/// The longest body of an answer, bytes: a full ring of the largest size takes about half.
const MOST_BODY: usize = 1 << 30;

/// One answer to `GET /dump`.
#[derive(Debug)]
pub struct DumpAnswer {
    /// The record, or the part of it that changed.
    pub dump: Dump,
    /// What was lost in reading it.
    pub problems: Vec<ReadProblem>,
    /// The number to ask with the next time.
    pub change: Option<u64>,
    /// Whether the entries are only those that changed since the number that was asked with.
    pub partial: bool,
    /// Operations that the ring holds at most.
    pub entries: Option<u64>,
}

/// Asks one endpoint. Each call makes a connection and ends by its deadline.
#[derive(Clone, Debug)]
pub struct EndpointClient {
    address: EndpointAddress,
    token: Option<EndpointToken>,
}

impl EndpointClient {
    /// A client of the endpoint at this address; TCP endpoints want a token.
    pub fn new(address: EndpointAddress, token: Option<EndpointToken>) -> Self {
        Self { address, token }
    }

    /// The endpoint.
    pub fn address(&self) -> &EndpointAddress {
        &self.address
    }

    /// Where the rank stands.
    pub fn status(&self, deadline: Instant) -> Result<RankAnswer> {
        let answer = self.get("/status", deadline)?;
        self.json(&answer.body)
    }

    /// Where the other ranks answer.
    pub fn peers(&self, deadline: Instant) -> Result<Vec<PeerEndpoint>> {
        let answer = self.get("/peers", deadline)?;
        self.json(&answer.body)
    }

    /// The rank's record; with the number of an earlier answer only what changed since, if the endpoint
    /// still knows that number.
    pub fn dump(&self, since: Option<u64>, deadline: Instant) -> Result<DumpAnswer> {
        let path = match since {
            Some(since) => format!("/dump?since={since}"),
            None => "/dump".to_owned(),
        };
        let answer = self.get(&path, deadline)?;
        let (dump, problems) = Dump::read(&answer.body)
            .map_err(|error| self.error(format!("its answer is no record: {error}")))?;
        Ok(DumpAnswer {
            dump,
            problems,
            change: answer.change,
            partial: answer.since.is_some() && answer.since == since,
            entries: answer.entries,
        })
    }

    fn error(&self, why: impl Into<String>) -> Error {
        Error::Endpoint {
            address: self.address.to_string(),
            why: why.into(),
        }
    }

    fn json<T: serde::de::DeserializeOwned>(&self, body: &[u8]) -> Result<T> {
        serde_json::from_slice(body)
            .map_err(|error| self.error(format!("its answer makes no sense: {error}")))
    }

    fn get(&self, path: &str, deadline: Instant) -> Result<Answer> {
        let failed = |error: std::io::Error| self.error(sentence(&error));
        let mut stream = Stream::connect(&self.address, deadline).map_err(failed)?;
        let host = match &self.address {
            EndpointAddress::Unix(_) => "localhost".to_owned(),
            EndpointAddress::Tcp(address) => address.to_string(),
        };
        let token = self.token.as_ref().map_or(String::new(), |token| {
            format!("Authorization: Bearer {}\r\n", token.as_str())
        });
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n{token}Connection: close\r\n\r\n");
        stream
            .write_all(request.as_bytes(), deadline)
            .map_err(failed)?;
        let (head, body) = self.read_head(&mut stream, deadline)?;
        if head.status != 200 {
            let why = match head.status {
                401 => "it refused the token".to_owned(),
                status => format!("it answered with HTTP status {status}"),
            };
            return Err(self.error(why));
        }
        let body = stream
            .read_rest(body, head.length, deadline)
            .map_err(failed)?;
        Ok(Answer {
            body,
            ..head.answer
        })
    }

    /// Reads up to the end of the head, and what came of the body with it.
    fn read_head(&self, stream: &mut Stream, deadline: Instant) -> Result<(Head, Vec<u8>)> {
        let failed = |error: std::io::Error| self.error(sentence(&error));
        let mut bytes = Vec::new();
        loop {
            let read = stream.read(&mut bytes, 4096, deadline).map_err(failed)?;
            let mut fields = [httparse::EMPTY_HEADER; 64];
            let mut response = httparse::Response::new(&mut fields);
            match response.parse(&bytes) {
                Ok(httparse::Status::Complete(end)) => {
                    let head = Head::of(&response);
                    if head.length.is_none_or(|length| length > MOST_BODY) {
                        return Err(self.error("its answer tells no length, or one too great"));
                    }
                    let body = bytes.split_off(end);
                    return Ok((head, body));
                }
                Ok(httparse::Status::Partial) if read > 0 && bytes.len() < MOST_HEAD => {}
                Ok(httparse::Status::Partial) => {
                    return Err(self.error("its answer ended within the head"));
                }
                Err(error) => return Err(self.error(format!("it does not speak HTTP: {error}"))),
            }
        }
    }
}

struct Answer {
    body: Vec<u8>,
    change: Option<u64>,
    since: Option<u64>,
    entries: Option<u64>,
}

struct Head {
    status: u16,
    length: Option<usize>,
    answer: Answer,
}

impl Head {
    fn of(response: &httparse::Response<'_, '_>) -> Self {
        let field = |name: &str| {
            let field = response
                .headers
                .iter()
                .find(|field| field.name.eq_ignore_ascii_case(name))?;
            std::str::from_utf8(field.value).ok()?.trim().parse().ok()
        };
        Self {
            status: response.code.unwrap_or(0),
            length: field("content-length").and_then(|length| usize::try_from(length).ok()),
            answer: Answer {
                body: Vec::new(),
                change: field(CHANGE_HEADER),
                since: field(SINCE_HEADER),
                entries: field(ENTRIES_HEADER),
            },
        }
    }
}

fn sentence(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => {
            "it did not answer in time".to_owned()
        }
        std::io::ErrorKind::UnexpectedEof => "it closed before the end of its answer".to_owned(),
        _ => format!("it cannot be asked: {error}"),
    }
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// The time left, or the error that none is.
fn left(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(std::io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

impl Stream {
    fn connect(address: &EndpointAddress, deadline: Instant) -> std::io::Result<Self> {
        match address {
            EndpointAddress::Unix(path) => connect_unix(path, deadline).map(Self::Unix),
            EndpointAddress::Tcp(address) => {
                TcpStream::connect_timeout(address, left(deadline)?).map(Self::Tcp)
            }
        }
    }

    fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> std::io::Result<()> {
        while !bytes.is_empty() {
            let left = Some(left(deadline)?);
            let written = match self {
                Self::Unix(stream) => {
                    stream.set_write_timeout(left)?;
                    stream.write(bytes)
                }
                Self::Tcp(stream) => {
                    stream.set_write_timeout(left)?;
                    stream.write(bytes)
                }
            };
            match written {
                Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Appends at most `most` bytes; 0 at the end.
    fn read(
        &mut self,
        bytes: &mut Vec<u8>,
        most: usize,
        deadline: Instant,
    ) -> std::io::Result<usize> {
        let start = bytes.len();
        bytes.resize(start + most, 0);
        let into = &mut bytes[start..];
        let read = loop {
            let left = Some(left(deadline)?);
            let read = match self {
                Self::Unix(stream) => {
                    stream.set_read_timeout(left)?;
                    stream.read(into)
                }
                Self::Tcp(stream) => {
                    stream.set_read_timeout(left)?;
                    stream.read(into)
                }
            };
            match read {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        bytes.truncate(start + read.as_ref().copied().unwrap_or(0));
        read
    }

    /// Reads on until there are `length` bytes. Memory grows with what came, not with what was announced.
    fn read_rest(
        &mut self,
        mut body: Vec<u8>,
        length: Option<usize>,
        deadline: Instant,
    ) -> std::io::Result<Vec<u8>> {
        let length = length.unwrap_or(0);
        while body.len() < length {
            let most = (length - body.len()).min(256 * 1024);
            if self.read(&mut body, most, deadline)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        body.truncate(length);
        Ok(body)
    }
}

/// Connects without waiting longer than the deadline for a place in the queue of a stuck server.
fn connect_unix(path: &Path, deadline: Instant) -> std::io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    while let Err(error) = connect(&socket, &address) {
        if error != Errno::AGAIN && error != Errno::INTR {
            return Err(error.into());
        }
        // The queue is full, and no event tells when it is not.
        std::thread::sleep(left(deadline)?.min(Duration::from_millis(5)));
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
