//! Finds the nodes of a collector: from a list, a DNS name, or the job's store.
//!
//! The number of nodes is determined once. The address of a node is looked up again whenever the node
//! does not answer, since a restarted instance may have another address.

use rcomm_analyzer::source::{HostPort, hosts_in_store};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for reading the hosts from the job's store.
const STORE_TIME: Duration = Duration::from_secs(5);

/// How a collector finds the nodes.
#[derive(Clone, Debug)]
pub enum Nodes {
    /// The URLs of the nodes, such as `http://n07:8765`.
    List(Vec<String>),
    /// A DNS name that resolves to the addresses of all nodes (a headless service, for example).
    Dns {
        /// The name.
        name: String,
        /// The port of all nodes.
        port: u16,
        /// `http` or `https`.
        scheme: String,
    },
    /// The hosts of a job's ranks, as listed in the job's store.
    Store {
        /// The address of the store (a TCPStore).
        store: HostPort,
        /// The port of all nodes.
        port: u16,
        /// `http` or `https`.
        scheme: String,
    },
}

/// Where node addresses are looked up.
#[derive(Debug)]
pub(crate) enum Directory {
    Dns(String),
    Store(HostPort),
}

impl Directory {
    /// `host:port` of each node, sorted, without duplicates.
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
                let address = |host| HostPort { host, port }.to_string();
                Ok(hosts.map(address).collect())
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

/// How to find one node.
#[derive(Debug)]
pub(crate) enum NodeAddress {
    Url(String),
    /// The node at this index in the sorted list of a directory.
    Nth {
        directory: Arc<Directory>,
        port: u16,
        scheme: String,
        index: usize,
    },
}

impl NodeAddress {
    /// One address for each node.
    ///
    /// # Blocking
    ///
    /// Until the name is resolved, which has no time limit here, or the store has answered: at most [`STORE_TIME`].
    ///
    /// # Errors
    ///
    /// If the name cannot be resolved, or the store cannot be read or lists no hosts.
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
        let nth = |index| Self::Nth {
            directory: directory.clone(),
            port,
            scheme: scheme.clone(),
            index,
        };
        Ok((0..count).map(nth).collect())
    }

    /// Name of the node's source: the URL, or the node's index in the directory.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Url(url) => format!("node {url}"),
            Self::Nth {
                directory, index, ..
            } => format!("node {index} of {}", directory.name()),
        }
    }

    /// The current URL of the node. Looked up in the directory at each call, which blocks as [`Self::all`] does.
    pub(crate) fn url(&self) -> io::Result<String> {
        match self {
            Self::Url(url) => Ok(url.clone()),
            Self::Nth {
                directory,
                port,
                scheme,
                index,
            } => {
                let found = directory.look_up(*port)?;
                let address = found.get(*index).ok_or_else(|| {
                    let text = format!("{} now lists only {} nodes", directory.name(), found.len());
                    io::Error::new(io::ErrorKind::NotFound, text)
                })?;
                Ok(format!("{scheme}://{address}"))
            }
        }
    }
}
