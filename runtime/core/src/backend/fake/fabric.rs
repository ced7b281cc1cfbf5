//! The state that the ranks of one test share, and their faults.

use super::backend::{FakeBackend, FakeOp};
use crate::backend::{Backend, BackendFactory, GroupContext};
use crate::op::buffer::DeviceKind;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::{Rank, text};
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
    /// The other ranks see a barrier instead of the operation that was issued.
    Lie,
}

/// The state that the ranks of one test share.
#[derive(Default)]
pub struct FakeFabric {
    state: Mutex<FabricState>,
}

#[derive(Default)]
pub(super) struct FabricState {
    faults: Vec<FakeFault>,
    /// For each fault, whether it has happened.
    happened: Vec<bool>,
    /// The ranks of each group that was made, by its name.
    ranks_by_group: BTreeMap<String, Arc<[Rank]>>,
    /// The state of each group, by its [`wire_id`](GroupContext::wire_id).
    pub(super) groups: HashMap<u64, FabricGroup>,
}

impl FabricState {
    /// Checks that one of the groups has this fault's name and rank; before any group is made, any fault is accepted.
    fn check(&self, fault: &FakeFault) -> Result<()> {
        let refuse = |message| Err(Error::new(ErrorKind::InvalidArgument, message));
        let (rank, group) = (fault.rank, &fault.group);
        match self.ranks_by_group.get(group) {
            None if self.ranks_by_group.is_empty() => Ok(()),
            Some(ranks) if ranks.contains(&rank) => Ok(()),
            Some(ranks) => refuse(format!(
                "a fault of rank {rank} in group {group:?} would never happen: the group has {}",
                text::ranks(ranks, 64)
            )),
            None => {
                let names: Vec<&str> = self.ranks_by_group.keys().map(String::as_str).collect();
                refuse(format!(
                    "a fault in group {group:?} would never happen: the groups are {}",
                    names.join(", ")
                ))
            }
        }
    }

    /// Marks the fault of a rank at a collective as having happened, and returns its kind; `None` if the rank has no
    /// fault there.
    pub(super) fn take_fault(
        &mut self,
        rank: Rank,
        group: &str,
        seq: u64,
    ) -> Option<FakeFaultKind> {
        let mut faults = self.faults.iter();
        let index = faults
            .position(|fault| fault.rank == rank && fault.group == group && fault.seq == seq)?;
        self.happened[index] = true;
        Some(self.faults[index].kind)
    }
}

/// One group as the fabric sees it.
#[derive(Default)]
pub(super) struct FabricGroup {
    /// For each turn, the operations by group rank; `None` for a member that has not issued its operation.
    pub(super) turns: BTreeMap<u64, Vec<Option<Arc<FakeOp>>>>,
    /// Sends and receives that wait for their other half, in order of issue.
    pub(super) unmatched: Vec<Message>,
    /// The error with which each member left, by group rank.
    pub(super) left: HashMap<u32, Error>,
}

/// A send or a receive that waits for its other half.
pub(super) struct Message {
    /// The rank in the group that issued it.
    pub(super) owner: u32,
    pub(super) fake_op: Arc<FakeOp>,
    /// Which operation of a coalesced block it is; 0 otherwise.
    pub(super) part: usize,
}

impl FakeFabric {
    /// A fabric without faults.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Adds a fault. Before any group is made, the fault may name any group.
    ///
    /// # Errors
    /// `InvalidArgument` if groups were made and none has this name, or if the rank is not in the group: the fault
    /// would never happen. The message lists the groups, or the ranks of this group.
    pub fn add_fault(&self, fault: FakeFault) -> Result<()> {
        let mut state = self.lock();
        state.check(&fault)?;
        state.faults.push(fault);
        state.happened.push(false);
        Ok(())
    }

    /// The faults that have not happened yet. At the end of a test there should be none: a fault of a group that was
    /// never made has not happened.
    pub fn faults_left(&self) -> Vec<FakeFault> {
        let state = self.lock();
        let faults = state.faults.iter().zip(&state.happened);
        faults
            .filter(|(_, happened)| !**happened)
            .map(|(fault, _)| fault.clone())
            .collect()
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
        let (name, ranks) = (group.info.name.clone(), group.info.ranks.clone());
        self.fabric.lock().ranks_by_group.insert(name, ranks);
        Ok(Arc::new(FakeBackend {
            fabric: self.fabric.clone(),
            rank: self.rank,
            group,
        }))
    }
}
