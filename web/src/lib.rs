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
//!
//! The modules, each of which uses only those below it:
//!
//! | module | holds |
//! |---|---|
//! | [`program`], [`cli`] | the program `rcomm-web` and its command line |
//! | `serve` | the server and its routes |
//! | `api` | the handlers of the API |
//! | `http` | for all routes: access control, limits, time-outs, compression, errors, counters; the page's files |
//! | `otel` | traces, metrics and logs for OpenTelemetry |
//! | `state` | snapshots and their history, the jobs of the node |
//! | `metrics` | counters, and metrics for Prometheus |
//! | `nodes` | other `rcomm-web` instances as sources |
#![forbid(unsafe_code)]

mod api;
pub mod cli;
mod http;
mod metrics;
mod nodes;
mod otel;
pub mod program;
mod serve;
mod state;

pub use http::access::{Access, is_loopback};
pub use http::limits::Limits;
pub use metrics::{Exemplars, Form};
pub use nodes::{NodeSource, Nodes};
#[cfg(feature = "program-spans")]
pub use otel::{ProgramSpans, ProgramSpansLayer};
pub use otel::{Settings as OtelSettings, SettingsError as OtelSettingsError, Telemetry};
pub use serve::{Options, Page, ServeError, Server, Tls, serve};
pub use state::jobs::Jobs;
pub use state::store::SnapshotStore;
