//! The rank's endpoint: where it listens, and how clients and other ranks find it.
//!
//! | key, in the root store | holds | writer |
//! |---|---|---|
//! | `rcomm/endpoint/<attempt>/<rank>` | address and host, in JSON: `{"address":"unix:/...","host":"node1"}` | every rank that has one |
//!
//! The recorder defines the routes and the thread ([`Endpoint`]). The thread reads the ring and takes no lock
//! of an operation, so it answers while the program is stuck. If an endpoint cannot be opened, that is
//! logged, and the job continues.

use crate::backend::WorldContext;
use crate::config::EndpointChoice;
use crate::config::rendezvous::Rendezvous;
use crate::op::error::{Error, ErrorKind};
use crate::store::{Store, which_are_set};
use crate::watch::dump_writer::Dumps;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Endpoint, EndpointAddress, EndpointNotice, Listen, PeerEndpoint};
use rcomm_recorder::record::FlightRecorder;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The longest time to find out which other ranks have published endpoints.
const LOOKUP_TIME: Duration = Duration::from_secs(1);
/// The most addresses that are read in one call to the store.
const CHUNK: usize = 256;

/// Opens the rank's endpoint, as configured, and returns it with the key and value by which others find it. Clients can
/// connect from now on; they are answered once [`WorldContext::later`] has started the endpoint's thread. The caller
/// writes the key and value to the store. `None` if no endpoint is configured, if it cannot be opened, or if a Unix
/// socket is configured and the ring has no directory.
pub(crate) fn serve(
    rendezvous: &Rendezvous,
    world: &WorldContext,
    recorder: &Arc<FlightRecorder>,
    dumps: &Arc<Dumps>,
    root: &Arc<dyn Store>,
) -> Option<(Endpoint, Announcement)> {
    let config = &*world.config;
    let listen = match config.endpoint {
        EndpointChoice::Off => return None,
        // A ring in memory has no directory in which readers on this host could find the socket.
        EndpointChoice::Unix => Ok(Listen::beside(recorder)?),
        EndpointChoice::Tcp(address) => {
            let token = config.endpoint_token.clone();
            let token = token.unwrap_or_else(|| world.secret.endpoint_token());
            own_port(address, rendezvous).map(|address| match &world.tls {
                Some(tls) => Listen::Tls(address, token, tls.clone()),
                None => Listen::Tcp(address, token),
            })
        }
    };
    let served = listen
        .and_then(|listen| {
            Endpoint::bind(recorder.clone(), listen)
                .map_err(|error| Error::new(ErrorKind::Io, error.to_string()))
        })
        .map(|(endpoint, start)| {
            world.later.add(move || {
                if let Err(error) = start() {
                    tracing::warn!(%error, "cannot start the thread rcomm/endpoint: this rank has no endpoint");
                }
            });
            let dumps = dumps.clone();
            endpoint.write_dumps(move || {
                let written = dumps.try_make("requested at its endpoint");
                written.map_err(|error| error.to_string())
            });
            let announcement = announce(&endpoint, rendezvous, root);
            (endpoint, announcement)
        });
    match served {
        Ok(served) => Some(served),
        Err(error) => {
            tracing::warn!(%error, "this rank has no endpoint; its ring can still be read if it is a file");
            None
        }
    }
}

/// The address with this rank's port. All ranks of a host have the same address in their configuration: each adds
/// its local rank to the port, if the launcher sets local ranks. Port 0, for which the kernel chooses one, stays.
///
/// # Errors
/// `InvalidArgument` if the sum is more than the largest port.
fn own_port(mut address: SocketAddr, rendezvous: &Rendezvous) -> Result<SocketAddr, Error> {
    if let (port @ 1.., Some(local)) = (address.port(), rendezvous.local_rank) {
        let own = u64::from(port) + u64::from(local);
        let own = u16::try_from(own).map_err(|_| {
            let message = format!(
                "the endpoint's address {address} and local rank {local} give port {own}, which is more than {}; \
                 set a smaller port, or port 0 for any free one",
                u16::MAX
            );
            Error::new(ErrorKind::InvalidArgument, message)
        })?;
        address.set_port(own);
    }
    Ok(address)
}

/// A key of the root store, and the value that a rank writes there so that others find it.
pub(crate) type Announcement = (String, Vec<u8>);

/// Lets `endpoint` find the endpoints of the other ranks, and returns the key and value by which those find
/// it.
fn announce(endpoint: &Endpoint, rendezvous: &Rendezvous, root: &Arc<dyn Store>) -> Announcement {
    let notice = EndpointNotice {
        address: endpoint.address().clone(),
        host: own_host(),
    };
    let text = serde_json::to_vec(&notice).unwrap_or_default();
    let peers = Peers {
        rendezvous: rendezvous.clone(),
        host: notice.host,
        root: root.clone(),
        known: Mutex::default(),
    };
    endpoint.find_peers(move || peers.find());
    (key(rendezvous, rendezvous.rank), text)
}

fn key(rendezvous: &Rendezvous, rank: Rank) -> String {
    EndpointNotice::store_key(rendezvous.attempt, rank)
}

fn own_host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// Finds the endpoints of the other ranks when a client asks for them.
struct Peers {
    rendezvous: Rendezvous,
    host: String,
    root: Arc<dyn Store>,
    /// The endpoints that earlier requests have found: they do not change.
    known: Mutex<BTreeMap<Rank, EndpointNotice>>,
}

impl Peers {
    /// The endpoints of the other ranks, except Unix sockets on other hosts.
    fn find(&self) -> Vec<PeerEndpoint> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + LOOKUP_TIME;
        let ranks: Vec<Rank> = (0..self.rendezvous.world_size)
            .filter(|rank| *rank != self.rendezvous.rank && !known.contains_key(rank))
            .collect();
        let keys: Vec<String> = ranks
            .iter()
            .map(|&rank| key(&self.rendezvous, rank))
            .collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let present = which_are_set(&*self.root, &keys, until);
        let present = ranks.into_iter().zip(keys).zip(present);
        let (ranks, keys): (Vec<Rank>, Vec<&str>) = present
            .filter_map(|(rank_and_key, present)| present.then_some(rank_and_key))
            .unzip();
        for (ranks, keys) in ranks.chunks(CHUNK).zip(keys.chunks(CHUNK)) {
            // The keys exist, so this does not wait.
            let soon = Duration::from_millis(1);
            let values = self.root.multi_get(keys, soon).unwrap_or_default();
            for (&rank, value) in ranks.iter().zip(values) {
                if let Ok(notice) = serde_json::from_slice(&value) {
                    known.insert(rank, notice);
                }
            }
        }
        let reachable = known.iter().filter(|(_, notice)| {
            // The path of a Unix socket is valid on its host only.
            matches!(notice.address, EndpointAddress::Tcp(_)) || notice.host == self.host
        });
        reachable
            .map(|(&rank, notice)| PeerEndpoint {
                rank,
                address: notice.address.clone(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::HashStore;

    fn rendezvous(rank: Rank) -> Rendezvous {
        let mut rendezvous = Rendezvous::explicit(rank, 4, "127.0.0.1", 1).unwrap();
        rendezvous.local_rank = Some(rank);
        rendezvous
    }

    #[test]
    fn find_returns_the_peers_that_this_host_can_reach() {
        let root: Arc<dyn Store> = Arc::new(HashStore::new());
        let peers = Peers {
            rendezvous: rendezvous(0),
            host: "here".to_owned(),
            root: root.clone(),
            known: Mutex::default(),
        };
        assert_eq!(peers.find(), []);
        for (rank, notice) in [
            (1, r#"{"address":"unix:/a","host":"here"}"#),
            (2, r#"{"address":"unix:/b","host":"there"}"#),
            (3, r#"{"address":"tcp:10.0.0.1:7003","host":"there"}"#),
        ] {
            root.set(&key(&rendezvous(0), rank), notice.as_bytes())
                .unwrap();
        }
        let found: Vec<(Rank, String)> = peers
            .find()
            .into_iter()
            .map(|peer| (peer.rank, peer.address.to_string()))
            .collect();
        let expected = [(1, "unix:/a"), (3, "tcp:10.0.0.1:7003")];
        assert_eq!(
            found,
            expected.map(|(rank, address)| (rank, address.to_owned()))
        );
    }

    #[test]
    fn ranks_of_one_host_get_different_ports() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let given = own_port(address("10.0.0.1:7000"), &rendezvous(3)).unwrap();
        assert_eq!(given, address("10.0.0.1:7003"));
        let any = own_port(address("10.0.0.1:0"), &rendezvous(3)).unwrap();
        assert_eq!(any, address("10.0.0.1:0"));
    }

    #[test]
    fn a_port_that_would_be_too_large_is_an_error() {
        let base = "10.0.0.1:65534".parse::<SocketAddr>().unwrap();
        let last = own_port(base, &rendezvous(1)).unwrap();
        assert_eq!(last.port(), 65_535);
        for local in [2, 3] {
            let error = own_port(base, &rendezvous(local)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let expected = format!(
                "the endpoint's address 10.0.0.1:65534 and local rank {local} give port {}, which is more than 65535; \
                 set a smaller port, or port 0 for any free one",
                65_534 + local
            );
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }
}
