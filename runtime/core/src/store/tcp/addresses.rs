//! The addresses of a store's host.

use crate::op::error::{Error, ErrorKind, Result};
use std::net::{IpAddr, ToSocketAddrs};

/// The addresses to which the name or address `host` resolves.
///
/// # Errors
/// [`ErrorKind::Rendezvous`] if it does not resolve.
pub fn addresses_of(host: &str) -> Result<Vec<IpAddr>> {
    let found = (host, 0).to_socket_addrs().map_err(|error| {
        Error::new(
            ErrorKind::Rendezvous,
            format!("the name {host:?} of the store cannot be resolved to an address"),
        )
        .with_source(error)
    })?;
    let mut addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    addresses.dedup();
    Ok(addresses)
}
