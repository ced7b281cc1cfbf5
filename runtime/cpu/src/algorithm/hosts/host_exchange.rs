//! [`HostExchange`]: the phases of the ranks of one host, on their exchange area.

use crate::transport::shm::ShmExchange;
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic::AdaptiveCopy;
use rcomm_recorder::model::Rank;

/// The ranks of this host. A rank that is alone on its host has no exchange area, and its phases wait for no rank.
pub(super) struct HostExchange {
    shm_exchange: Option<ShmExchange>,
    copier: AdaptiveCopy,
    /// This host's members, by their ranks in the world.
    ranks: Vec<Rank>,
    index: usize,
    /// The next phase's signature, which is the same on all ranks of the host once they have agreed.
    signature: u64,
}

impl HostExchange {
    pub(super) fn new(shm_exchange: Option<ShmExchange>, ranks: Vec<Rank>, index: usize) -> Self {
        Self {
            shm_exchange,
            copier: AdaptiveCopy::default(),
            ranks,
            index,
            signature: 0,
        }
    }

    /// Number of the group's ranks on this host.
    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// This rank's index among the group's ranks on this host.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// The rank in the world of the rank at `index` on this host.
    pub(super) fn global(&self, index: usize) -> Rank {
        self.ranks[index]
    }

    /// Starts an operation; its phases have the signatures `signature`, `signature` + 1, and so on.
    pub(super) fn begin(&mut self, signature: u64) {
        self.signature = signature;
    }

    /// Restarts the slots at their first position, after a phase in which ranks disagreed about the slots' lengths.
    pub(super) fn restart_slots(&mut self) {
        if let Some(shm_exchange) = &mut self.shm_exchange {
            shm_exchange.restart_slots();
        }
    }

    /// Calls `fill` with the first `used` bytes of this rank's slot of the next phase; does nothing on a host
    /// with one rank.
    pub(super) fn fill(&mut self, used: usize, fill: impl FnOnce(&mut [u8], &mut AdaptiveCopy)) {
        if let Some(shm_exchange) = &mut self.shm_exchange {
            fill(shm_exchange.next_slot(used), &mut self.copier);
        }
    }

    /// Runs the next phase, which shows these bytes and the first `used` of each slot. Returns whether all
    /// ranks have the same signature.
    pub(super) fn run_phase(
        &mut self,
        inline: &[u8],
        used: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<bool, Failure> {
        let Some(shm_exchange) = &mut self.shm_exchange else {
            return Ok(true);
        };
        let run = shm_exchange.run_phase(self.signature, inline, used, policy);
        // Each phase of an operation has its own signature, so that a rank in another phase is detected.
        self.signature = self.signature.wrapping_add(1);
        run.map_err(|error| error.into_failure(&self.ranks))
    }

    /// Works like [`run_phase`](Self::run_phase) among ranks that have agreed. Fails if signatures differ.
    pub(super) fn run_agreed_phase(
        &mut self,
        inline: &[u8],
        used: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        if self.run_phase(inline, used, policy)? {
            return Ok(());
        }
        Err(Failure::different_phases())
    }

    /// The bytes that the rank at `index` shows in its slot; none on a host with one rank.
    pub(super) fn slot(&self, index: usize) -> &[u8] {
        self.shm_exchange
            .as_ref()
            .map_or(&[], |shm_exchange| shm_exchange.slot(index))
    }

    /// The first `len` bytes that the rank at `index` shows in its line; none on a host with one rank.
    pub(super) fn line(&self, index: usize, len: usize) -> &[u8] {
        self.shm_exchange
            .as_ref()
            .map_or(&[], |shm_exchange| shm_exchange.inline(index, len))
    }
}
