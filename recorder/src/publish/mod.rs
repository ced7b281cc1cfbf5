//! How a record leaves its process: as a dump, as a ring file seen from outside, over an endpoint.

mod dialect;
mod dump;
mod dump_file;
mod pickle;
mod ring_reader;

pub use dialect::{Cause, DumpReader, ReadError, ReadProblem};
pub use dump::{Dump, DumpGroup, FormatVersion, Identity, Recorder, ThreadInfo, UnreadableVersion};
pub use dump_file::{DumpFileError, write_dump_file};
pub use ring_reader::{RingListing, RingReader, RingSummary, list_rings, remove_stale_rings};
