//! Shared by all routes: access control, limits, compression, errors, the page's files, and request counters.

pub(crate) mod access;
pub(crate) mod assets;
pub(crate) mod compress;
pub(crate) mod error;
pub(crate) mod idle_timeout;
pub(crate) mod limits;
pub(crate) mod traffic;
