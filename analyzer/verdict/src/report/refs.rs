//! References to groups, sequence numbers and source lines that findings contain.

use rcomm_recorder::model::Rank;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The counter that a sequence number belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SeqKind {
    /// Collectives of a group.
    CollectiveSeqId,
    /// Point-to-point operations of a group on one rank.
    P2pSeqId,
}

/// A group as findings name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupRef {
    /// Name, equal on all members.
    pub name: String,
    /// Description: what the program uses the group for.
    pub desc: String,
    /// Global ranks of the members, in order of group rank.
    pub ranks: Arc<[Rank]>,
}

/// A place in the source where a rank is or was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameRef {
    /// Global rank.
    pub rank: Rank,
    /// What the rank did there: `last_seen` (its last recorded call), `waiting` (the call that it is in), `failed` (the
    /// call that ended with an error), `there` (the call that differs from the others'), `now` (by a stack taken live)
    /// or `native` (by that stack, below Python).
    pub when: String,
    /// Name of the function.
    pub name: String,
    /// Path of the source file; of a native frame, name of the library.
    pub filename: String,
    /// Line number; 0 if unknown.
    pub line: u32,
}
