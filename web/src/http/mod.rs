//! What all answers need: who may ask, limits, errors, files of the page, counts of requests.

pub(crate) mod access;
pub(crate) mod assets;
pub(crate) mod error;
pub(crate) mod idle_timeout;
pub(crate) mod limits;
pub(crate) mod traffic;
