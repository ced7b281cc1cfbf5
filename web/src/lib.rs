//! The live view of a job in a browser, and its numbers for Prometheus.
//!
//! `rcomm-web` is this library with a command line; a program can serve its own page:
//!
//! ```no_run
//! use rcomm_analyzer::source::RingSource;
//! use rcomm_analyzer::{LiveOptions, Pace};
//! use rcomm_web::{Access, Board, Server};
//!
//! # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
//! let rings = RingSource::new("/dev/shm/rcomm-1000".into(), None);
//! let (board, _watch) = Board::watch(vec![Box::new(rings)], LiveOptions::default(), Pace::default())?;
//! let server = Server::bind("127.0.0.1:0".parse()?, board, Access::with_token(Access::random_token()?)).await?;
//! println!("{}", server.address());
//! server.run(std::future::pending()).await?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod access;
mod assets;
mod board;
mod error;
mod metrics;
mod routes;
mod server;

pub use access::{Access, is_loopback};
pub use board::Board;
pub use metrics::{Form, write as write_metrics};
pub use routes::router;
pub use server::Server;
