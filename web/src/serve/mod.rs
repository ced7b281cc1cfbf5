//! The server: addresses, TLS, and which path leads to which answer.

mod embed;
mod routes;
mod server;

pub use embed::{Options, Page, ServeError, serve};
pub use server::{Server, Tls};
