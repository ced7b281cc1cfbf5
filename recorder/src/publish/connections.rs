//! The socket of a rank's status server and its connections: limits, time limits and TLS.

use super::answer::{EndpointAddress, EndpointToken};
use super::endpoint::{CONNECTION_TIME, HEADER_TIME, MAX_CONNECTIONS, STRANGERS_PER_HOST};
use super::places::Places;
use super::share::{Client, Share, Visitor};
use super::tls::Tls;
use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// A socket that listens, its address, and the token that its clients need.
pub(super) type Bound = (Listener, EndpointAddress, Option<EndpointToken>);

/// Makes a TCP socket that listens at this address (port 0: any free one). An error comes with the address.
pub(super) fn bind_tcp(
    wanted: std::net::SocketAddr,
    token: EndpointToken,
    tls: Option<Tls>,
) -> std::result::Result<Bound, (EndpointAddress, io::Error)> {
    let bound = TcpListener::bind(wanted).and_then(|listener| {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    let (listener, address) = bound.map_err(|error| (EndpointAddress::Tcp(wanted), error))?;
    let listener = Listener::Tcp(listener, tls);
    Ok((listener, EndpointAddress::Tcp(address), Some(token)))
}

/// Makes a unix socket of mode 0600 at this path. Replaces a socket file that no process serves.
pub(super) fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let is_socket =
        fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err() {
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The socket of an endpoint.
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener, Option<Tls>),
}

impl Listener {
    /// Waits for a connection. Returns `false` if the other end of `stopped` was dropped first, or if waiting failed.
    pub(super) fn wait_for_connection(&self, stopped: &UnixStream) -> bool {
        let listener = match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener, _) => listener.as_fd(),
        };
        loop {
            let mut fds =
                [listener, stopped.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut fds, None) {
                Ok(_) if !fds[1].revents().is_empty() => return false,
                Ok(_) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

/// Serves connections until the other end of `stopped` is dropped.
pub(super) fn serve(
    listener: Listener,
    router: Router,
    share: Arc<Share>,
    stopped: UnixStream,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // The threads for callbacks and for `GET /threads`, which may block.
        .thread_name("rcomm/endpoint")
        .max_blocking_threads(2)
        .build()?;
    runtime.block_on(accept(listener, router, share, stopped))
}

/// Accepts connections, and serves each in its own task.
async fn accept(
    listener: Listener,
    router: Router,
    share: Arc<Share>,
    stopped: UnixStream,
) -> io::Result<()> {
    let stopped = tokio::net::UnixStream::from_std(stopped)?;
    let places = Places::new(MAX_CONNECTIONS, STRANGERS_PER_HOST);
    let accepting = async {
        match listener {
            Listener::Unix(listener) => {
                let listener = tokio::net::UnixListener::from_std(listener)?;
                loop {
                    match listener.accept().await {
                        Ok((stream, _)) => {
                            let process = stream.peer_cred().ok().and_then(|it| it.pid());
                            let client = Client::Process(process);
                            let place = places.enter(None).await;
                            start(stream, &router, Visitor::new(place, client, share.clone()));
                        }
                        Err(_) => pause().await,
                    }
                }
            }
            Listener::Tcp(listener, tls) => {
                let listener = tokio::net::TcpListener::from_std(listener)?;
                let acceptor = tls.map(|tls| TlsAcceptor::from(tls.server_config()));
                loop {
                    match listener.accept().await {
                        Ok((stream, client)) => {
                            let place = places.enter(Some(client.ip())).await;
                            let client = Client::Host(client.ip());
                            let visitor = Visitor::new(place, client, share.clone());
                            match &acceptor {
                                None => start(stream, &router, visitor),
                                Some(acceptor) => {
                                    start_with_tls(stream, acceptor.clone(), &router, visitor);
                                }
                            }
                        }
                        Err(_) => pause().await,
                    }
                }
            }
        }
    };
    tokio::select! {
        result = accepting => result,
        _ = stopped.readable() => Ok(()),
    }
}

/// Waits before the next accept: most likely the process has no free file descriptor until a connection ends.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(50)).await;
}

/// Serves one connection in a new task, as [`serve_connection`] does.
fn start<S>(stream: S, router: &Router, visitor: Arc<Visitor>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    tokio::spawn(serve_connection(stream, router.clone(), visitor));
}

/// Works like [`start`], once TLS is set up with the client.
fn start_with_tls(
    stream: tokio::net::TcpStream,
    acceptor: TlsAcceptor,
    router: &Router,
    visitor: Arc<Visitor>,
) {
    let router = router.clone();
    tokio::spawn(async move {
        let secured = tokio::select! {
            secured = tokio::time::timeout(HEADER_TIME, secure(stream, acceptor)) => secured,
            () = visitor.place.is_taken() => return,
        };
        // A client that is slow, or whose TLS fails (TLS itself tells it why), ends only its own task.
        if let Ok(Ok(Some(stream))) = secured {
            serve_connection(stream, router, visitor).await;
        }
    });
}

/// Sets TLS up; `None` for a client that does not use it, after an answer that says so.
async fn secure(
    stream: tokio::net::TcpStream,
    acceptor: TlsAcceptor,
) -> io::Result<Option<TlsStream<tokio::net::TcpStream>>> {
    const TLS_HANDSHAKE: u8 = 0x16;
    const TEXT: &str = "this endpoint takes TLS only: set RCOMM_TLS_CERT, RCOMM_TLS_KEY and RCOMM_TLS_CA, as the ranks \
                       have them\n";
    let mut first = [0];
    stream.peek(&mut first).await?;
    if first == [TLS_HANDSHAKE] {
        return acceptor.accept(stream).await.map(Some);
    }
    // A connection that is closed with bytes unread is reset, and the answer is lost.
    let _ = stream.try_read(&mut [0; 4096]);
    let answer = format!(
        "HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.3\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{TEXT}",
        TEXT.len()
    );
    stream.writable().await?;
    // The answer fits into the send buffer of a new socket.
    stream.try_write(answer.as_bytes())?;
    Ok(None)
}

/// Serves one connection, until it ends, has lasted for [`CONNECTION_TIME`], or its place is taken.
async fn serve_connection<S>(stream: S, router: Router, visitor: Arc<Visitor>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(router);
    let visitor_of_requests = visitor.clone();
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(visitor_of_requests.clone());
        service.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_headers(64)
        .serve_connection(TokioIo::new(stream), service);
    let connection = visitor.counting(connection);
    // A client that disconnects early ends only its own task.
    tokio::select! {
        _ = tokio::time::timeout(CONNECTION_TIME, connection) => {}
        () = visitor.place.is_taken() => {}
    }
}
