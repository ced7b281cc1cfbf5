//! Finds the nodes of a collector: from a list, a DNS name, or the job's store.
//!
//! The number of nodes is determined once. Unless the URLs are given, the address of a node is looked up again after
//! every query that failed, since a restarted instance may have another address: the node keeps its address if that is
//! still listed, or else gets a listed one that no other node has.

use rcomm_analyzer::source::{HostPort, hosts_in_store};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time limit for reading the hosts from the job's store.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// How a collector finds the nodes.
#[derive(Clone, Debug)]
pub enum Nodes {
    /// The URLs of the nodes, such as `http://n07:8765`.
    List(Vec<String>),
    /// A DNS name that resolves to the addresses of all nodes (a headless service, for example). If it resolves to IPv4
    /// and IPv6 addresses, only the family with more addresses is used, on a tie IPv4: a node usually has an address of
    /// each, and would be read twice.
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

/// Where the addresses of nodes are looked up.
#[derive(Debug)]
pub(crate) enum AddressSource {
    Dns(String),
    Store(HostPort),
}

impl AddressSource {
    /// `host:port` of each node, sorted, without duplicates.
    ///
    /// # Blocking
    ///
    /// Until the system's resolver has answered, without a limit; at most [`STORE_TIMEOUT`] for a store.
    fn look_up(&self, port: u16) -> io::Result<Vec<String>> {
        match self {
            Self::Dns(name) => {
                let found = (name.as_str(), port).to_socket_addrs()?;
                let found = of_one_family(found.collect());
                Ok(found.iter().map(ToString::to_string).collect())
            }
            Self::Store(store) => {
                let hosts = hosts_in_store(store, Instant::now() + STORE_TIMEOUT);
                // As text: the sentence of the error contains that of its source.
                let hosts = hosts.map_err(|error| io::Error::other(error.to_string()))?;
                let hosts = hosts.into_iter();
                let address = |host| HostPort { host, port }.to_string();
                Ok(hosts.map(address).collect())
            }
        }
    }

    /// The place where the addresses are listed, for names of sources and errors.
    fn name(&self) -> String {
        match self {
            Self::Dns(name) => name.clone(),
            Self::Store(store) => format!("store {store}"),
        }
    }
}

/// The addresses of the family, IPv4 or IPv6, that has more of them; on a tie IPv4. Sorted, without duplicates.
///
/// A node of a network with both families has an address of each, and would be read twice.
fn of_one_family(mut found: Vec<SocketAddr>) -> Vec<SocketAddr> {
    found.sort();
    found.dedup();
    let (ipv4, ipv6): (Vec<_>, Vec<_>) = found.into_iter().partition(SocketAddr::is_ipv4);
    if ipv6.len() > ipv4.len() { ipv6 } else { ipv4 }
}

/// The nodes of a collector whose addresses are looked up.
#[derive(Debug)]
pub(crate) struct ListedNodes {
    source: AddressSource,
    port: u16,
    scheme: String,
    /// The address of each node, `host:port`.
    addresses: Mutex<Vec<String>>,
}

/// The address of the node at `index`, given those that are listed now: its own address if that is listed; else a
/// listed one that no node has, which becomes its own. `None` if there is none.
fn assign(addresses: &mut [String], index: usize, listed: Vec<String>) -> Option<String> {
    let own = addresses.get(index)?;
    let address = match listed.contains(own) {
        true => own.clone(),
        false => listed
            .into_iter()
            .find(|address| !addresses.contains(address))?,
    };
    addresses[index].clone_from(&address);
    Some(address)
}

/// How to find one node.
#[derive(Debug)]
pub(crate) enum NodeAddress {
    Url(String),
    /// The node at this index of the list.
    Listed {
        nodes: Arc<ListedNodes>,
        index: usize,
    },
}

impl NodeAddress {
    /// One address for each node.
    ///
    /// # Blocking
    ///
    /// Until the name is resolved, which has no time limit here, or the store has answered: at most [`STORE_TIMEOUT`].
    ///
    /// # Errors
    ///
    /// If the name cannot be resolved, or the store cannot be read or lists no hosts.
    pub(crate) fn all(nodes: Nodes) -> io::Result<Vec<Self>> {
        let (source, port, scheme) = match nodes {
            Nodes::List(urls) => return Ok(urls.into_iter().map(Self::Url).collect()),
            Nodes::Dns { name, port, scheme } => (AddressSource::Dns(name), port, scheme),
            Nodes::Store {
                store,
                port,
                scheme,
            } => (AddressSource::Store(store), port, scheme),
        };
        let addresses = source.look_up(port)?;
        let count = addresses.len();
        let nodes = Arc::new(ListedNodes {
            source,
            port,
            scheme,
            addresses: Mutex::new(addresses),
        });
        let listed = |index| Self::Listed {
            nodes: nodes.clone(),
            index,
        };
        Ok((0..count).map(listed).collect())
    }

    /// Name of the node's source: the URL, or the number of the node and where its address is listed.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Url(url) => format!("node {url}"),
            Self::Listed { nodes, index } => format!("node {index} of {}", nodes.source.name()),
        }
    }

    /// The current URL of the node. Its address is looked up at each call, which blocks as [`Self::all`] does.
    ///
    /// # Errors
    ///
    /// Same as [`Self::all`]; `NotFound` if neither its address nor a new one is listed.
    pub(crate) fn url(&self) -> io::Result<String> {
        match self {
            Self::Url(url) => Ok(url.clone()),
            Self::Listed { nodes, index } => {
                let listed = nodes.source.look_up(nodes.port)?;
                let addresses = nodes.addresses.lock();
                let mut addresses = addresses.unwrap_or_else(PoisonError::into_inner);
                let address = assign(&mut addresses, *index, listed).ok_or_else(|| {
                    let text = format!(
                        "{} lists neither its last address, {}, nor a new one: start rcomm-web on that node again, or, \
                         if the job has fewer nodes now, this collector",
                        nodes.source.name(),
                        addresses[*index],
                    );
                    io::Error::new(io::ErrorKind::NotFound, text)
                })?;
                Ok(format!("{}://{address}", nodes.scheme))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(addresses: &[&str]) -> Vec<String> {
        addresses
            .iter()
            .map(|&address| address.to_owned())
            .collect()
    }

    #[test]
    fn a_node_that_moved_gets_the_new_address_and_the_others_keep_theirs() {
        let mut addresses = listed(&["10.0.0.3:1", "10.0.0.5:1", "10.0.0.7:1"]);
        // The node at 5 was started anew at 1, which is now the first of the list.
        let now = || listed(&["10.0.0.1:1", "10.0.0.3:1", "10.0.0.7:1"]);
        let moved = assign(&mut addresses, 1, now());
        assert_eq!(moved.as_deref(), Some("10.0.0.1:1"));
        for (index, own) in ["10.0.0.3:1", "10.0.0.1:1", "10.0.0.7:1"]
            .iter()
            .enumerate()
        {
            assert_eq!(assign(&mut addresses, index, now()).as_deref(), Some(*own));
        }
    }

    #[test]
    fn a_node_that_is_gone_gets_the_address_of_no_other() {
        let mut addresses = listed(&["10.0.0.3:1", "10.0.0.5:1"]);
        assert_eq!(assign(&mut addresses, 1, listed(&["10.0.0.3:1"])), None);
        assert_eq!(addresses, ["10.0.0.3:1", "10.0.0.5:1"]);
    }

    #[test]
    fn a_node_with_an_address_of_each_kind_is_one_node() {
        let parse = |texts: &[&str]| -> Vec<SocketAddr> {
            let addresses = texts.iter().map(|text| text.parse());
            addresses
                .collect::<Result<_, _>>()
                .expect("addresses are valid")
        };
        let both = parse(&["[fd00::2]:1", "10.0.0.2:1", "[fd00::1]:1", "10.0.0.1:1"]);
        assert_eq!(of_one_family(both), parse(&["10.0.0.1:1", "10.0.0.2:1"]));
        let ipv6 = parse(&["[fd00::2]:1", "[fd00::1]:1", "10.0.0.1:1"]);
        assert_eq!(of_one_family(ipv6), parse(&["[fd00::1]:1", "[fd00::2]:1"]));
    }
}
