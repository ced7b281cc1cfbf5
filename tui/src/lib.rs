//! Shows a job's collectives live in a terminal: whether it is stuck, because of which rank, and since when.
//!
//! An [`state::event::Event`] goes into [`state::update`], which changes the [`state::State`]; [`view::draw`] shows
//! it. Sources are read and analyzed on other threads ([`rcomm_analyzer::Watch`]), so a slow source never delays a
//! key press.
//!
//! ```no_run
//! use clap::Parser as _;
//! use rcomm_top::start::cli::Cli;
//! use rcomm_top::start::start;
//!
//! let cli = Cli::parse_from(["rcomm-top", "--once", "replay", "dumps"]);
//! let exit_code = start(cli, |name| std::env::var(name).ok())?;
//! # Ok::<(), anyhow::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod app;
pub mod keys;
pub mod page;
pub mod start;
pub mod state;
pub mod view;
