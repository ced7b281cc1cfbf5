//! Parses addresses, and connects with a deadline.

use rcomm_recorder::publish::{EndpointAddress, HttpRequest, Tls, TlsStream};
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A host, by name or IP address, and a port: `n001:29500`, `[::1]:29500`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPort {
    /// Name or IP address, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Why an address could not be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an address: {expected}")]
pub struct AddressError {
    text: String,
    expected: &'static str,
}

impl AddressError {
    fn new(text: &str, expected: &'static str) -> Self {
        Self {
            text: text.chars().take(200).collect(),
            expected,
        }
    }
}

impl FromStr for HostPort {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let invalid = || AddressError::new(text, "write a host and a port, as in n001:29500");
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let in_brackets = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = match in_brackets {
            Some(inner) => inner,
            // Further colons mean an IPv6 address without brackets, whose port is ambiguous.
            None if host.contains([':', '[', ']']) => return Err(invalid()),
            None => host,
        };
        let is_allowed = |c: char| c.is_ascii_graphic() && !"/?#@".contains(c);
        if host.is_empty() || !host.chars().all(is_allowed) {
            return Err(invalid());
        }
        Ok(Self {
            host: host.to_owned(),
            port: port.parse().map_err(|_| invalid())?,
        })
    }
}

impl HostPort {
    /// Resolves the name to socket addresses.
    ///
    /// The system's resolver has no deadline. It runs on its own thread, which ends when the resolver returns. At the
    /// deadline, this function returns an error.
    fn resolve(&self, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = self.host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, self.port)]);
        }
        let (sender, receiver) = channel();
        let wanted = (self.host.clone(), self.port);
        let builder = std::thread::Builder::new().name("rcomm/resolver".into());
        builder.spawn(move || {
            let found = wanted.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            // After the deadline the caller no longer waits.
            let _ = sender.send(found);
        })?;
        let name = &self.host;
        match receiver.recv_timeout(time_left(deadline)?) {
            Ok(Ok(found)) if found.is_empty() => {
                Err(io::Error::other(format!("the name {name} has no address")))
            }
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error)) => Err(io::Error::other(format!(
                "the name {name} cannot be resolved: {error}"
            ))),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let text = format!("the name {name} was not resolved in time");
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
        }
    }

    /// Connects to the first address that answers.
    pub(super) fn connect(&self, deadline: Instant) -> io::Result<Timed> {
        let mut failure = None;
        for address in self.resolve(deadline)? {
            match TcpStream::connect_timeout(&address, time_left(deadline)?) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(Timed { stream, deadline });
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()))
    }
}

/// The time until the deadline; an error if it has passed.
fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "it did not answer in time",
        ));
    }
    Ok(left)
}

/// A connection whose reads and writes all have one deadline.
pub(super) struct Timed {
    stream: TcpStream,
    deadline: Instant,
}

impl Timed {
    pub(super) fn into_stream(self) -> TcpStream {
        self.stream
    }
}

/// Replaces the error of a read or write that timed out with one that has a clear text.
fn clear_timeout(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time")
        }
        _ => error,
    }
}

impl Read for Timed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream
            .set_read_timeout(Some(time_left(self.deadline)?))?;
        self.stream.read(into).map_err(clear_timeout)
    }
}

impl Write for Timed {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream
            .set_write_timeout(Some(time_left(self.deadline)?))?;
        self.stream.write(from).map_err(clear_timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A connection to a job's store.
pub(super) enum StoreStream {
    /// Without TLS.
    Plain(Timed),
    /// With TLS, and the deadline of all reads and writes.
    Tls(TlsStream, Instant),
}

impl HostPort {
    /// Connects as [`connect`](Self::connect), with TLS if an identity is passed.
    pub(super) fn connect_with(
        &self,
        tls: Option<&Tls>,
        deadline: Instant,
    ) -> io::Result<StoreStream> {
        let plain = self.connect(deadline)?;
        Ok(match tls {
            None => StoreStream::Plain(plain),
            Some(tls) => StoreStream::Tls(TlsStream::call(tls, plain.stream, deadline)?, deadline),
        })
    }
}

impl Read for StoreStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(into),
            Self::Tls(stream, deadline) => stream.read(into, *deadline).map_err(clear_timeout),
        }
    }
}

impl Write for StoreStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(from),
            Self::Tls(stream, deadline) => {
                stream.write_all(from, *deadline).map_err(clear_timeout)?;
                Ok(from.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The address of an HTTP server: `http://n001:8080` or `unix:/run/worker.sock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HttpAddress {
    /// A host and a port.
    Tcp(HostPort),
    /// A socket file.
    Unix(PathBuf),
}

impl fmt::Display for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for HttpAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        const EXPECTED: &str = "write http://host:port, host:port or unix:/path/of/socket";
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err(AddressError::new(text, EXPECTED)),
                path => Ok(Self::Unix(path.into())),
            };
        }
        let rest = text.strip_prefix("http://").unwrap_or(text);
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        rest.parse()
            .map(Self::Tcp)
            .map_err(|_| AddressError::new(text, EXPECTED))
    }
}

impl HttpAddress {
    /// The host's name; empty for a socket file.
    pub(super) fn host(&self) -> &str {
        match self {
            Self::Tcp(address) => &address.host,
            Self::Unix(_) => "",
        }
    }

    /// Sends a request to the address in `known`; if that fails, forgets the address and returns the error. If no
    /// address is known, sends the request to each address of the host until one answers, and stores that one in
    /// `known`.
    pub(super) fn ask(
        &self,
        request: &HttpRequest<'_>,
        known: &mut Option<EndpointAddress>,
        deadline: Instant,
    ) -> Result<rcomm_recorder::publish::HttpAnswer, String> {
        if let Some(address) = known {
            let answer = request.send(address, deadline);
            // The name may resolve to another address the next time.
            return answer.map_err(|error| {
                *known = None;
                error.to_string()
            });
        }
        let candidates = match self {
            Self::Unix(path) => vec![EndpointAddress::Unix(path.clone())],
            Self::Tcp(address) => {
                let found = address
                    .resolve(deadline)
                    .map_err(|error| error.to_string())?;
                found.into_iter().map(EndpointAddress::Tcp).collect()
            }
        };
        let mut failure = "its name has no address".to_owned();
        for address in candidates {
            match request.send(&address, deadline) {
                Ok(answer) => {
                    *known = Some(address);
                    return Ok(answer);
                }
                Err(error) => failure = error.to_string(),
            }
        }
        Err(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_in_all_usual_forms() {
        for (text, shown) in [
            ("n001:29500", "n001:29500"),
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("[::1]:29500", "[::1]:29500"),
        ] {
            let address: HostPort = text.parse().expect(text);
            assert_eq!(address.to_string(), shown);
        }
        for text in [
            "",
            "n001",
            "::1:29500",
            "n001:x",
            ":1",
            "a/b:1",
            "n001:99999",
        ] {
            let error = text.parse::<HostPort>().expect_err(text);
            assert!(error.to_string().contains("n001:29500"), "{error}");
        }
        for (text, shown) in [
            ("http://n1:80/", "http://n1:80"),
            ("n1:80", "http://n1:80"),
            ("unix:/run/w.sock", "unix:/run/w.sock"),
        ] {
            let address: HttpAddress = text.parse().expect(text);
            assert_eq!(address.to_string(), shown);
        }
        assert!("https://n1:443".parse::<HttpAddress>().is_err());
        assert!("unix:".parse::<HttpAddress>().is_err());
    }

    #[test]
    fn the_error_of_an_unknown_name_contains_it() {
        let address: HostPort = "no-such-host.invalid:1"
            .parse()
            .expect("the text is an address");
        let deadline = Instant::now() + Duration::from_secs(20);
        let error = address
            .connect(deadline)
            .err()
            .expect("no server has this name");
        assert!(
            error.to_string().contains("no-such-host.invalid"),
            "{error}"
        );
    }
}
