//! Sources against real sockets, with answers as real jobs gave them.
#![forbid(unsafe_code)]

mod collector;
mod server;
mod worker_servers;
