//! The state that the ranks of one test share, and their faults.

use super::backend::{FakeBackend, Ticket};
use crate::backend::{Backend, BackendFactory, GroupContext};
use crate::op::buffer::DeviceKind;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, Result};
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A fault of one rank at one collective of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FakeFault {
    /// The rank at fault, by its number in the world.
    pub rank: Rank,
    /// The name of the group.
    pub group: String,
    /// `collective_seq_id` of the operation.
    pub seq: u64,
    /// The kind of fault.
    pub kind: FakeFaultKind,
}

/// The kind of a rank's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeFaultKind {
    /// The rank's operation never starts.
    Stall,
    /// The rank's operation succeeds at once, and the other ranks wait for the rank.
    Skip,
    /// The other ranks see another operation than the one that was issued.
    Lie,
}

/// The state that the ranks of one test share.
#[derive(Default)]
pub struct FakeFabric {
    state: Mutex<FabricState>,
}

#[derive(Default)]
pub(super) struct FabricState {
    pub(super) faults: Vec<FakeFault>,
    pub(super) groups: HashMap<u64, FabricGroup>,
}

/// One group as the fabric sees it.
#[derive(Default)]
pub(super) struct FabricGroup {
    /// For each turn, the tickets by group rank; `None` for a member that has not issued its operation.
    pub(super) turns: BTreeMap<u64, Vec<Option<Arc<Ticket>>>>,
    /// Sends and receives that wait for their other half, in order of issue.
    pub(super) unmatched: Vec<Message>,
    /// The error with which each member left, by group rank.
    pub(super) left: HashMap<u32, Error>,
}

pub(super) struct Message {
    pub(super) owner: u32,
    pub(super) ticket: Arc<Ticket>,
    /// Which operation of a coalesced block it is; 0 otherwise.
    pub(super) part: usize,
}

impl FakeFabric {
    /// A fabric without faults.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Adds a fault.
    pub fn add_fault(&self, fault: FakeFault) {
        self.lock().faults.push(fault);
    }

    /// The factory for one rank of the world.
    pub fn factory(self: &Arc<Self>, rank: Rank) -> Arc<dyn BackendFactory> {
        Arc::new(FakeFactory {
            fabric: self.clone(),
            rank,
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, FabricState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct FakeFactory {
    fabric: Arc<FakeFabric>,
    rank: Rank,
}

impl BackendFactory for FakeFactory {
    fn name(&self) -> &'static str {
        FakeBackend::NAME
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn connect(&self, group: GroupContext, _: Deadline) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(FakeBackend {
            fabric: self.fabric.clone(),
            rank: self.rank,
            group,
        }))
    }
}
