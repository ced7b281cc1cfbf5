//! The data model, as plain data: operations, groups, entries, failures and status, and what is recorded of
//! connections, NCCL's communicators and reducers. `text` writes values for people.

mod coded;
pub(crate) mod dump;
mod entry;
mod failure;
mod group;
mod nccl;
mod ops;
mod peer_link;
mod reducer;
mod status;
pub mod text;

pub use coded::{DType, ReduceOp};
pub use entry::{Entry, EntryState, Frame, Peer, Signature, Stack};
pub use failure::{FailedOperation, Failure, FailureKind};
pub use group::{GroupId, GroupPlace, ProcessGroupInfo, Rank};
pub use nccl::{Communicator, KernelProgress, LinkProgress, LinkWait};
pub use ops::{Bus, Layout, OpType, Parts, Pattern, WaitsFor};
pub use peer_link::{LinkEnd, PeerLink, WaitingOperation};
pub use reducer::{ReducerBucket, ReducerStep, ReducerSums, ReducerTimes};
pub use status::{ProcessExit, ProcessGroupStatus, ProcessorWait, RankStatus};
