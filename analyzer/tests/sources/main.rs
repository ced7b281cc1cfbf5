//! Tests sources: worker servers and collectors on real sockets, and the rings of several attempts.
#![forbid(unsafe_code)]

mod attempts;
mod collector;
mod server;
mod worker_servers;
