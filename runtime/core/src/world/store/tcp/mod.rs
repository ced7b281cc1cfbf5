//! A store over TCP, wire-compatible with PyTorch's `TCPStore` in both directions.
//!
//! [`TcpStoreServer`] serves our clients and PyTorch's, [`TcpStore`] talks to our server and to
//! PyTorch's (libuv and legacy). `protocol` holds the wire format of both ends.

mod client;
mod protocol;
mod server;
mod spin;
mod tcp_store;

pub use server::TcpStoreServer;
pub use tcp_store::TcpStore;
pub use tcp_store::addresses_of;
