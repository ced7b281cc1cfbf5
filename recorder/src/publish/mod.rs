//! How a record leaves its process: as a dump, as a ring file seen from outside, over an endpoint.

mod dump;

pub use dump::{Dump, DumpGroup, FormatVersion, Identity, Recorder, ThreadInfo};
