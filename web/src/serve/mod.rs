//! The server: its socket, TLS and routes, and serving from within a program.

mod embed;
mod routes;
mod server;

pub use embed::{Options, Page, ServeError, serve};
pub use server::{Server, Tls};
