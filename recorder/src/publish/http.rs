//! A minimal blocking HTTP client, for ranks' endpoints and similar servers.
//!
//! Each request opens a new connection; one deadline covers connecting and the answer. No threads are started. Answers
//! must have a Content-Length, which is limited.

use super::answer::{EndpointAddress, EndpointToken};
#[cfg(feature = "tls")]
use super::tls::{Tls, TlsError, TlsStream};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Maximum length of an answer's head, in bytes.
const MAX_HEAD: usize = 16 * 1024;
/// Maximum length of an answer's body, in bytes: a full ring of the largest size takes about half.
const MAX_BODY: usize = 1 << 30;

/// A request without a body.
#[derive(Clone, Copy, Debug)]
pub struct HttpRequest<'a> {
    /// `GET` or `POST`.
    pub method: &'a str,
    /// Path and query, as they are sent: the path begins with `/`.
    pub path: &'a str,
    /// The token, which is sent as `Authorization: Bearer ...`.
    pub token: Option<&'a EndpointToken>,
    /// The budget that the answer's body counts toward, together with other answers; `None` for no budget.
    pub budget: Option<&'a AnswerBudget>,
}

/// A number of bytes that several answers together may have.
///
/// # Thread safety
/// A budget may be shared between threads.
#[derive(Debug)]
pub struct AnswerBudget {
    limit: usize,
    left: AtomicUsize,
}

impl AnswerBudget {
    /// A budget of this many bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            left: AtomicUsize::new(limit),
        }
    }

    /// Makes the whole budget available again.
    pub fn refill(&self) {
        self.left.store(self.limit, Ordering::Relaxed);
    }

    /// Takes this many bytes; returns whether there were as many.
    fn take(&self, bytes: usize) -> bool {
        let take = |left: usize| left.checked_sub(bytes);
        let order = Ordering::Relaxed;
        self.left.fetch_update(order, order, take).is_ok()
    }
}

/// An answer, of any status.
#[derive(Clone, Debug)]
pub struct HttpAnswer {
    /// The status; 200 is success.
    pub status: u16,
    /// The whole body.
    pub body: Vec<u8>,
    /// The fields of the head: names and values.
    fields: Vec<(String, String)>,
}

/// Why no complete answer was received.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The deadline passed.
    #[error("it did not answer in time")]
    Late,
    /// The answer ended too early.
    #[error("it closed the connection before the end of its answer")]
    Cut,
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(std::io::Error),
    /// TLS with the server could not be set up, or failed.
    #[cfg(feature = "tls")]
    #[error("{0}")]
    Tls(TlsError),
    /// The answer is not HTTP.
    #[error("it does not speak HTTP: {0}")]
    NotHttp(httparse::Error),
    /// The answer ended, or exceeded the limit of 16 KiB, before the end of its head.
    #[error("its answer's head ends too early or is too long")]
    Head,
    /// The Content-Length is missing or above the limit.
    #[error("its answer has a missing or oversized Content-Length")]
    Length,
    /// The answers that share a budget are longer together than the budget.
    #[error("the answers that were asked for together have more than {0} bytes")]
    Budget(usize),
}

impl From<std::io::Error> for HttpError {
    fn from(error: std::io::Error) -> Self {
        #[cfg(feature = "tls")]
        if let Some(why) = TlsError::of(&error) {
            return Self::Tls(why.clone());
        }
        match error.kind() {
            std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => Self::Late,
            std::io::ErrorKind::UnexpectedEof => Self::Cut,
            _ => Self::Io(error),
        }
    }
}

impl<'a> HttpRequest<'a> {
    /// `GET` of this path.
    pub fn get(path: &'a str) -> Self {
        Self {
            method: "GET",
            path,
            token: None,
            budget: None,
        }
    }

    /// `POST` to this path.
    pub fn post(path: &'a str) -> Self {
        Self {
            method: "POST",
            ..Self::get(path)
        }
    }

    /// Sends the request and reads the answer.
    ///
    /// # Blocking
    ///
    /// Until the deadline at the latest.
    ///
    /// # Errors
    ///
    /// If no complete answer arrived. An HTTP error status is not an error here.
    pub fn send(
        &self,
        address: &EndpointAddress,
        deadline: Instant,
    ) -> Result<HttpAnswer, HttpError> {
        self.send_over(Stream::connect(address, deadline)?, address, deadline)
    }

    /// Like [`send`](Self::send), with TLS if `address` is a TCP address.
    ///
    /// # Errors
    ///
    /// Same as [`send`](Self::send).
    #[cfg(feature = "tls")]
    pub fn send_with_tls(
        &self,
        tls: &Tls,
        address: &EndpointAddress,
        deadline: Instant,
    ) -> Result<HttpAnswer, HttpError> {
        let stream = match Stream::connect(address, deadline)? {
            Stream::Tcp(stream) => Stream::Tls(TlsStream::call(tls, stream, deadline)?),
            other => other,
        };
        self.send_over(stream, address, deadline)
    }

    fn send_over(
        &self,
        mut stream: Stream,
        address: &EndpointAddress,
        deadline: Instant,
    ) -> Result<HttpAnswer, HttpError> {
        let host = match address {
            EndpointAddress::Unix(_) => "localhost".to_owned(),
            EndpointAddress::Tcp(address) => address.to_string(),
        };
        let token = self.token.map_or(String::new(), |token| {
            format!("Authorization: Bearer {}\r\n", token.as_str())
        });
        // Servers expect a POST without a body to carry Content-Length: 0.
        let length = if self.method == "POST" {
            "Content-Length: 0\r\n"
        } else {
            ""
        };
        let (method, path) = (self.method, self.path);
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\n{token}{length}Connection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes(), deadline)?;
        let (head, body) = read_head(&mut stream, deadline)?;
        let body = stream.read_rest(body, head.length, self.budget, deadline)?;
        Ok(HttpAnswer {
            body,
            ..head.answer
        })
    }
}

impl HttpAnswer {
    /// The value of the first field of this name in the head, in upper or lower case; `None` if there is none.
    pub fn field(&self, name: &str) -> Option<&str> {
        let field = self
            .fields
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))?;
        Some(field.1.as_str())
    }
}

/// The head of an answer: the length of the body, and the answer without its body.
struct Head {
    length: usize,
    answer: HttpAnswer,
}

/// Reads up to the end of the head; returns the head and the part of the body that was received with it.
fn read_head(stream: &mut Stream, deadline: Instant) -> Result<(Head, Vec<u8>), HttpError> {
    let mut bytes = Vec::new();
    loop {
        let read = stream.read(&mut bytes, 4096, deadline)?;
        let mut fields = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut fields);
        match response.parse(&bytes) {
            Ok(httparse::Status::Complete(end)) => {
                let head = Head::of(&response)?;
                let body = bytes.split_off(end);
                return Ok((head, body));
            }
            Ok(httparse::Status::Partial) if read > 0 && bytes.len() < MAX_HEAD => {}
            Ok(httparse::Status::Partial) => return Err(HttpError::Head),
            Err(error) => return Err(HttpError::NotHttp(error)),
        }
    }
}

impl Head {
    fn of(response: &httparse::Response<'_, '_>) -> Result<Self, HttpError> {
        let fields = response.headers.iter().filter_map(|field| {
            let value = std::str::from_utf8(field.value).ok()?;
            Some((field.name.to_owned(), value.trim().to_owned()))
        });
        let answer = HttpAnswer {
            status: response.code.unwrap_or(0),
            body: Vec::new(),
            fields: fields.collect(),
        };
        let length = answer.field("content-length");
        let length = length.and_then(|length| length.parse().ok());
        match length.filter(|&length| length <= MAX_BODY) {
            Some(length) => Ok(Self { length, answer }),
            None => Err(HttpError::Length),
        }
    }
}

/// The connection of one request.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
    #[cfg(feature = "tls")]
    Tls(TlsStream),
}

/// The time left, or an error if there is none.
fn time_left(deadline: Instant) -> std::io::Result<Duration> {
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
                TcpStream::connect_timeout(address, time_left(deadline)?).map(Self::Tcp)
            }
        }
    }

    fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> std::io::Result<()> {
        while !bytes.is_empty() {
            let left = Some(time_left(deadline)?);
            let written = match self {
                Self::Unix(stream) => {
                    stream.set_write_timeout(left)?;
                    stream.write(bytes)
                }
                Self::Tcp(stream) => {
                    stream.set_write_timeout(left)?;
                    stream.write(bytes)
                }
                #[cfg(feature = "tls")]
                Self::Tls(stream) => return stream.write_all(bytes, deadline),
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

    /// Appends at most `max_len` bytes to `bytes` and returns how many; 0 at the end of the stream.
    fn read(
        &mut self,
        bytes: &mut Vec<u8>,
        max_len: usize,
        deadline: Instant,
    ) -> std::io::Result<usize> {
        let start = bytes.len();
        bytes.resize(start + max_len, 0);
        let into = &mut bytes[start..];
        let read = loop {
            let left = Some(time_left(deadline)?);
            let read = match self {
                Self::Unix(stream) => {
                    stream.set_read_timeout(left)?;
                    stream.read(into)
                }
                Self::Tcp(stream) => {
                    stream.set_read_timeout(left)?;
                    stream.read(into)
                }
                #[cfg(feature = "tls")]
                Self::Tls(stream) => stream.read(into, deadline),
            };
            match read {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        bytes.truncate(start + read.as_ref().copied().unwrap_or(0));
        read
    }

    /// Reads until there are `length` bytes. The buffer grows with the bytes received, not with the
    /// announced length.
    fn read_rest(
        &mut self,
        mut body: Vec<u8>,
        length: usize,
        budget: Option<&AnswerBudget>,
        deadline: Instant,
    ) -> Result<Vec<u8>, HttpError> {
        let spend = |bytes| match budget {
            Some(budget) if !budget.take(bytes) => Err(HttpError::Budget(budget.limit)),
            _ => Ok(()),
        };
        spend(body.len())?;
        while body.len() < length {
            let max_len = (length - body.len()).min(256 * 1024);
            let read = self.read(&mut body, max_len, deadline)?;
            if read == 0 {
                return Err(HttpError::Cut);
            }
            spend(read)?;
        }
        body.truncate(length);
        Ok(body)
    }
}

/// Connects without waiting past the deadline for a slot in a stuck server's backlog.
fn connect_unix(path: &Path, deadline: Instant) -> std::io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    while let Err(error) = connect(&socket, &address) {
        if error != Errno::AGAIN && error != Errno::INTR {
            return Err(error.into());
        }
        // The backlog is full, and the kernel reports no event when it drains.
        std::thread::sleep(time_left(deadline)?.min(Duration::from_millis(5)));
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
