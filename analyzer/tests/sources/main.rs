//! Tests sources against real sockets, with recorded answers of real jobs.
#![forbid(unsafe_code)]

mod attempts;
mod collector;
mod server;
mod worker_servers;
