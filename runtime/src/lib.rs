//! ProcessGroup over CPU and NCCL backends, with a flight recorder that is always on.
#![deny(unsafe_code)]

pub mod backend;
#[allow(unsafe_code)]
mod buffer;
pub mod config;
mod deadline;
mod element;
mod error;
mod float8;
mod op;
pub mod rendezvous;
mod secret;
pub mod store;

pub use backend::{Backend, BackendFactory, Done, Pending, Progress};
pub use buffer::{Access, Buffer, Device, DeviceKind};
pub use config::Config;
pub use deadline::Deadline;
pub use element::Element;
pub use error::{Error, ErrorKind, Result};
pub use float8::{F8E4M3, F8E5M2};
pub use half::{bf16, f16};
pub use num_complex::Complex;
pub use op::{Op, Reduction};
pub use rcomm_recorder::model::{DType, OpType, Peer, ProcessGroupInfo, Rank, ReduceOp};
pub use rendezvous::Rendezvous;
pub use secret::Secret;
pub use store::{FileStore, HashStore, PrefixStore, QueueStore, Store, TcpStore, TcpStoreServer};
