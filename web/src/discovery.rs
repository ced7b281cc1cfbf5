//! Where the nodes of a collector are: named one by one, behind a name, or in the job's store.
//!
//! How many there are is found out once; where one is, again whenever it does not answer, since an
//! instance that was moved comes back under another address.

use rcomm_analyzer::source::{HostPort, hosts_in_store};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the job's store may take to tell its hosts.
const STORE_TIME: Duration = Duration::from_secs(5);

/// Where the nodes are.
#[derive(Clone, Debug)]
pub enum Nodes {
    /// Addresses: `http://n07:8765`.
    List(Vec<String>),
    /// A name that stands for the addresses of all nodes (a headless service, say).
    Dns {
        /// The name.
        name: String,
        /// On which port all of them listen.
        port: u16,
        /// `http` or `https`.
        scheme: String,
    },
    /// The hosts that a job's ranks are on, as the job's store tells them.
    Store {
        /// The address of the store (a TCPStore).
        store: HostPort,
        /// On which port all of them listen.
        port: u16,
        /// `http` or `https`.
        scheme: String,
    },
}

/// Who can say where nodes are.
#[derive(Debug)]
pub(crate) enum Directory {
    Dns(String),
    Store(HostPort),
}

impl Directory {
    /// Hosts with their port, as they stand in an address; sorted, each once.
    fn look_up(&self, port: u16) -> io::Result<Vec<String>> {
        match self {
            Self::Dns(name) => {
                let mut found: Vec<SocketAddr> = (name.as_str(), port).to_socket_addrs()?.collect();
                found.sort();
                found.dedup();
                Ok(found.iter().map(ToString::to_string).collect())
            }
            Self::Store(store) => {
                let hosts = hosts_in_store(store, Instant::now() + STORE_TIME);
                let hosts = hosts.map_err(io::Error::other)?.into_iter();
                let place = |host| HostPort { host, port }.to_string();
                Ok(hosts.map(place).collect())
            }
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Dns(name) => name.clone(),
            Self::Store(store) => format!("store {store}"),
        }
    }
}

/// Where one node is found.
#[derive(Debug)]
pub(crate) enum NodeAddress {
    Url(String),
    /// The one at this place among those that a directory names, in order.
    Nth {
        directory: Arc<Directory>,
        port: u16,
        scheme: String,
        place: usize,
    },
}

impl NodeAddress {
    /// One for each node.
    ///
    /// # Blocking
    ///
    /// Until a name is looked up, or the store has answered.
    ///
    /// # Errors
    ///
    /// If they stand for nothing.
    pub(crate) fn all(nodes: Nodes) -> io::Result<Vec<Self>> {
        let (directory, port, scheme) = match nodes {
            Nodes::List(urls) => return Ok(urls.into_iter().map(Self::Url).collect()),
            Nodes::Dns { name, port, scheme } => (Directory::Dns(name), port, scheme),
            Nodes::Store {
                store,
                port,
                scheme,
            } => (Directory::Store(store), port, scheme),
        };
        let directory = Arc::new(directory);
        let count = directory.look_up(port)?.len();
        let nth = |place| Self::Nth {
            directory: directory.clone(),
            port,
            scheme: scheme.clone(),
            place,
        };
        Ok((0..count).map(nth).collect())
    }

    /// What it is called before it is found.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Url(url) => format!("node {url}"),
            Self::Nth {
                directory, place, ..
            } => format!("node {place} of {}", directory.name()),
        }
    }

    /// Where it is now.
    pub(crate) fn url(&self) -> io::Result<String> {
        match self {
            Self::Url(url) => Ok(url.clone()),
            Self::Nth {
                directory,
                port,
                scheme,
                place,
            } => {
                let found = directory.look_up(*port)?;
                let there = found.get(*place).ok_or_else(|| {
                    let text = format!("{} now lists {} nodes", directory.name(), found.len());
                    io::Error::new(io::ErrorKind::NotFound, text)
                })?;
                Ok(format!("{scheme}://{there}"))
            }
        }
    }
}
