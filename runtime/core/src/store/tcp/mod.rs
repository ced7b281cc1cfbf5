//! A store over TCP, wire-compatible with PyTorch's `TCPStore` in both directions.
//!
//! [`TcpStoreServer`] serves rcomm's clients and PyTorch's; [`TcpStore`] connects to rcomm's server and to
//! PyTorch's (libuv and legacy). A store that only rcomm uses can ask its clients for the job's secret first
//! ([`StoreAccess`]). `protocol` holds the wire format of both ends.

mod access;
mod addresses;
mod checks;
mod client;
mod counted;
mod encoder;
mod obstacle;
mod protocol;
mod queues;
mod server;
#[cfg(test)]
mod silent_tests;
mod spin;
mod tcp_store;

pub use access::{StoreAccess, StoreChoice, StoreLimits};
pub use addresses::addresses_of;
pub use server::TcpStoreServer;
pub use tcp_store::TcpStore;
