//! Partial summaries: what the verdict needs of many records in one small file (`.rsum`).
//!
//! On a fleet the dumps lie on thousands of nodes. Each node packs its own, and whoever judges reads
//! the packed files as it would read the dumps themselves: the report is the same. Nothing is
//! decided when packing, since what a rank did means nothing without its peers.
//!
//! # Format, version 1
//!
//! Eight bytes `rcommsum`, the version as `u16`, then a gzip stream of parts: the length as `u32`, and
//! so many bytes of `wire::Part` in postcard's encoding (<https://postcard.jamesmunns.com>).
//! Integers outside of postcard are little-endian. What ranks share (shapes, stacks, members of
//! groups) comes once, in a part before the first record that refers to it; operations are columns,
//! mostly of differences. The last part says how many records there are: without it the file is cut.
//!
//! Readers trust no length: parts, tables and what a record takes from the tables are bounded, and a
//! record is checked before it is handed over.

mod read;
mod wire;
mod write;

pub use read::{Piece, RsumError, begins, read};
pub use write::{SummarizeError, Writer};

/// The first bytes of every summary.
const MAGIC: &[u8; 8] = b"rcommsum";
/// Raised when a field of [`wire`] changes; older files are read as long as anybody has some.
const VERSION: u16 = 1;
/// The longest part, in bytes: a record of a million operations.
const MAX_PART: usize = 32 << 20;
