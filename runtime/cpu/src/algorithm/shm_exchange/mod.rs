//! Collectives of ranks that share memory: each rank writes its own slot and reads the others'.
//!
//! Data is sent in *chunks*, one per phase, small enough that a chunk written by one rank is still in a
//! cache when the others read it. Only the callers' buffers are read and written in full. The headers are
//! compared as signatures in every phase: ranks that disagree detect this in the first phase, before any
//! rank has read another's data.
//!
//! An all_reduce reads each rank's buffer once and writes it once. In phase c every rank writes to its slot
//! the inputs of chunk c that other ranks combine, and its share of the result of chunk c - 1. Then it
//! copies the others' shares of chunk c - 1 from their slots and combines its own share of chunk c.
//!
//! | file | holds |
//! |---|---|
//! | `engine` | which phases each operation goes through |
//! | `phase` | one phase, and what happens when ranks disagree |
//! | `shares` | operations that combine: all_reduce, reduce |
//! | `parts` | operations that move parts between ranks: all the others |
//! | `direct` | all of these operations without slots, in registered buffers |

mod direct;
mod engine;
mod parts;
mod phase;
mod shares;

pub(crate) use engine::ShmEngine;

/// The longest chunk, in bytes. In an all_reduce, the rest of a slot is for a share of the result.
const CHUNK: usize = 128 << 10;
