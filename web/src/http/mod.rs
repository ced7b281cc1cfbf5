//! What the routes share: access control, limits, the idle time-out of streams, compression, errors, and the
//! counters of connections and requests; and the page's files.

pub(crate) mod access;
pub(crate) mod assets;
pub(crate) mod compress;
pub(crate) mod error;
pub(crate) mod idle_timeout;
pub(crate) mod limits;
pub(crate) mod traffic;
