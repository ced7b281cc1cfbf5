//! Collectives of ranks that share memory: each rank writes its own slot and reads the others'.
//!
//! Data is sent in *chunks*, one per phase, small enough that a chunk written by one rank is still in a
//! cache when the others read it. Signatures of the headers are compared in every phase: ranks that disagree
//! detect this in the first phase, before any rank has read another's data.
//!
//! An all_reduce in chunks reads each rank's buffer once and writes it once. In phase c every rank writes to its slot
//! the inputs of chunk c that other ranks combine, and its share of the result of chunk c - 1. Then it
//! copies the others' shares of chunk c - 1 from their slots and combines its own share of chunk c.
//!
//! | file | holds |
//! |---|---|
//! | `engine` | the choice between slots and registered buffers, for each operation |
//! | `phase` | one phase, and the handling of ranks that disagree |
//! | `shares` | all_reduce and reduce: every rank combines its share of each chunk |
//! | `parts` | all other operations: they move parts between ranks, and reduce_scatter combines them |
//! | `direct` | operations in registered buffers, without slots |

mod direct;
mod engine;
mod parts;
mod phase;
mod shares;

pub(crate) use engine::ShmEngine;

/// The maximum size of a chunk in bytes. In an all_reduce, the rest of a slot is for a share of the result.
const CHUNK: usize = 128 << 10;
