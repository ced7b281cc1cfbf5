//! The flight recorder: it writes a rank's operations into a ring that outlives the process, and reads
//! such records back.
//!
//! [`record`] holds [`FlightRecorder`](record::FlightRecorder), which records operations without locks or
//! allocation. [`publish`] serves and writes records, and reads them into a [`Dump`](publish::Dump): from a ring
//! file, from an endpoint, or from dump files of this crate and of PyTorch. [`model`] defines the operations, groups
//! and entries that [`record`] and [`publish`] use. [`launch`] holds what a rank knows from its launcher.
//!
//! ```
//! use rcomm_recorder::model::{EntryState, OpType, ProcessGroupInfo};
//! use rcomm_recorder::record::{
//!     FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
//! };
//! use std::time::Duration;
//!
//! # fn main() -> rcomm_recorder::Result<()> {
//! let mut config = RecorderConfig::new("job", 0, 2);
//! config.placement = Placement::Memory;
//! let recorder = FlightRecorder::create(&config)?;
//! let world = ProcessGroupInfo {
//!     id: 0,
//!     name: "0".to_owned(),
//!     desc: "default_pg".to_owned(),
//!     ranks: (0..2).collect(),
//! };
//! let world = recorder.add_group(&world, Duration::from_secs(600));
//! let key = SignatureKey { backend: "cpu", op_name: "barrier", inputs: &[], outputs: &[] };
//! let barrier = Operation {
//!     collective_seq_id: 1,
//!     ..Operation::new(world, OpType::Barrier, SignatureRef::Key(&key))
//! };
//! let ticket = recorder.begin(&barrier);
//! recorder.completed(ticket);
//! let dump = recorder.snapshot();
//! assert_eq!(dump.entries[0].state, EntryState::Completed);
//! # Ok(())
//! # }
//! ```

// Invariant 8 of docs/ARCHITECTURE.md: `unsafe` only where that document lists it.
#![deny(unsafe_code)]

mod error;
pub mod launch;
pub mod model;
pub mod publish;
pub mod record;

pub use error::{Error, Result};
