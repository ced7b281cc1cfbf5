//! Shows a job's collectives live in a terminal: whether it is stuck, because of which rank, and since when.
//!
//! An [`state::event::Event`] goes into [`state::update`], which changes the [`state::State`]; [`view::draw`]
//! shows it. Sources are read and judged on threads of their own
//! ([`rcomm_analyzer::Watch`]), so that no source ever holds up a key.
#![forbid(unsafe_code)]

pub mod app;
pub mod keys;
pub mod page;
pub mod start;
pub mod state;
pub mod view;
