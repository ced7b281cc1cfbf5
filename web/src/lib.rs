//! A live view of a job in a browser, and its metrics for Prometheus and OpenTelemetry.
//!
//! `rcomm-web` is this library with a command line. A program can serve its own page:
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let page = rcomm_web::serve(rcomm_web::Options::default())?;
//! println!("{}", page.url());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod access;
mod api;
mod app_state;
mod assets;
pub mod cli;
mod counters;
mod discovery;
mod embed;
mod error;
mod history;
mod idle_timeout;
mod limits;
mod metrics;
mod new_entries;
mod nodes;
mod otel;
mod routes;
mod server;
mod snapshot;
mod store;
mod trace_id;
mod traffic;
mod uploads;

pub use access::{Access, is_loopback};
pub use discovery::Nodes;
pub use embed::{Options, Page, ServeError, serve};
pub use limits::Limits;
pub use metrics::{Exemplars, Form};
pub use nodes::NodeSource;
#[cfg(feature = "program-spans")]
pub use otel::{ProgramSpans, ProgramSpansLayer};
pub use otel::{Settings as OtelSettings, SettingsError as OtelSettingsError, Telemetry};
pub use server::{Server, Tls};
pub use store::SnapshotStore;
