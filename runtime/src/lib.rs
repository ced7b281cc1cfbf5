//! ProcessGroup over CPU and NCCL backends, with a flight recorder that is always on.

mod error;
pub mod rendezvous;
pub mod store;

pub use error::{Error, ErrorKind, Result};
pub use rendezvous::Rendezvous;
pub use store::{FileStore, HashStore, PrefixStore, QueueStore, Store};
