//! The server: one thread for all clients.

mod connection;
mod event_loop;
mod open_files;
mod quota;
mod state;

use super::access::{StoreAccess, StoreLimits};
use crate::op::error::{Error, ErrorKind, Result};
use event_loop::EventLoop;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;

/// How many connections may wait to be accepted; the kernel lowers it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// A server that speaks the protocol of PyTorch's TCPStore.
///
/// One thread, `rcomm/store`, serves every connection. Dropping the server stops the thread, joins it
/// and closes all connections: clients then get an error. The server looks up no names.
///
/// # Security
/// With [`StoreAccess::Secret`] clients must prove that they know the job's secret before anything else, and
/// the server proves it to them. With [`StoreAccess::Open`], PyTorch's protocol, any client that reaches the
/// port may use every key. In both cases what is sent is not encrypted. With [`StoreAccess::Tls`] it is, and
/// clients need a certificate of the same CA. The server listens on the addresses that it is given and on no
/// other; [`bind_any`](Self::bind_any) gives it all addresses of the host.
///
/// # Limits
/// A key has at most 8 KiB, a value 8 MiB, and a request 131,072 keys and 256 MiB; the values in one reply have at most
/// 256 MiB. [`StoreLimits`] are for all clients together. A client that breaks a limit, or the protocol, is
/// disconnected. Once more than 1 MiB of a client's replies is unsent, its requests wait until half of that is left. A
/// client that has proved the secret, or still had to, gets the reason in its error. If file descriptors run out,
/// the soft limit of the process is raised to the hard one; beyond that, new connections wait until others have gone.
#[derive(Debug)]
pub struct TcpStoreServer {
    /// The first address, with the port that was chosen.
    bound: SocketAddr,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Listens on `port` of each address, or on a port that the kernel chooses if it is 0.
    ///
    /// An address that this host does not have is skipped as long as another one is left.
    /// `::` takes IPv4 as well.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] if the port is taken or none of the addresses is this host's,
    /// [`ErrorKind::Io`] if the system refuses sockets or a thread.
    pub fn bind(addresses: &[IpAddr], port: u16) -> Result<Self> {
        Self::bind_with(addresses, port, &StoreAccess::Open, StoreLimits::default())
    }

    /// Like [`bind`](Self::bind), for the clients of `access`, within these limits.
    ///
    /// # Errors
    /// Those of [`bind`](Self::bind).
    pub fn bind_with(
        addresses: &[IpAddr],
        port: u16,
        access: &StoreAccess,
        limits: StoreLimits,
    ) -> Result<Self> {
        let mut listeners = Vec::new();
        let mut bound = None;
        let mut not_local = Vec::new();
        for &address in addresses {
            let port = bound.map_or(port, |bound: SocketAddr| bound.port());
            match listen_on(SocketAddr::new(address, port)) {
                Ok((listener, address)) => {
                    listeners.push(listener);
                    bound.get_or_insert(address);
                }
                Err(Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT) => {
                    not_local.push(address.to_string())
                }
                Err(error) => return Err(refused(address, port, error)),
            }
        }
        let Some(bound) = bound else {
            return Err(Error::new(
                ErrorKind::Rendezvous,
                format!(
                    "the store server cannot listen: this host does not have the address {}. Is it \
                     the host of MASTER_ADDR?",
                    not_local.join(" or ")
                ),
            ));
        };
        Self::start(listeners, bound, access, limits)
    }

    /// Like [`bind_with`](Self::bind_with), on all addresses of this host, IPv6 and IPv4.
    ///
    /// # Errors
    /// Those of [`bind`](Self::bind).
    pub fn bind_any(port: u16, access: &StoreAccess, limits: StoreLimits) -> Result<Self> {
        let unspecified: SocketAddr = (Ipv6Addr::UNSPECIFIED, port).into();
        match listen_on(unspecified) {
            Ok((listener, bound)) => Self::start(vec![listener], bound, access, limits),
            Err(Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT) => {
                Self::bind_with(&[Ipv4Addr::UNSPECIFIED.into()], port, access, limits)
            }
            Err(error) => Err(refused(unspecified.ip(), port, error)),
        }
    }

    fn start(
        listeners: Vec<OwnedFd>,
        bound: SocketAddr,
        access: &StoreAccess,
        limits: StoreLimits,
    ) -> Result<Self> {
        let start = || -> std::io::Result<Self> {
            let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
            let event_loop = EventLoop::new(listeners, stop.clone(), access, limits)?;
            let thread = std::thread::Builder::new()
                .name("rcomm/store".to_owned())
                .spawn(move || event_loop.run())?;
            Ok(Self {
                bound,
                stop,
                thread: Some(thread),
            })
        };
        start().map_err(|error| Error::io("the store server cannot start", error))
    }

    /// The port on which the server listens.
    pub fn port(&self) -> u16 {
        self.bound.port()
    }

    /// The address at which this host reaches the server.
    pub fn local_addr(&self) -> SocketAddr {
        let ip = match self.bound.ip() {
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            ip => ip,
        };
        SocketAddr::new(ip, self.bound.port())
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        // An eventfd refuses a write only when its counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the store server's thread panicked");
        }
    }
}

fn refused(address: IpAddr, port: u16, error: Errno) -> Error {
    if error != Errno::ADDRINUSE {
        let message = format!("the store server cannot listen on {address} port {port}");
        return Error::io(message, error);
    }
    Error::new(
        ErrorKind::Rendezvous,
        format!(
            "port {port} of {address} is taken: another program, perhaps an earlier run of this job, \
             listens there. Choose another MASTER_PORT"
        ),
    )
}

/// A listening socket, and its address with the port that the kernel chose if `address` has port 0.
fn listen_on(address: SocketAddr) -> rustix::io::Result<(OwnedFd, SocketAddr)> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    // A port whose last connections are in TIME_WAIT can be taken again at once.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
    Ok((socket, bound))
}
