//! [`HostExchange`]: the ranks of one host, which go through phases together on their exchange area.

use crate::transport::shm::ShmExchange;
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic::AdaptiveCopy;
use rcomm_recorder::model::Rank;

/// The ranks of this host. A rank that is alone on its host waits for no other, and has no exchange
/// area.
pub(super) struct HostExchange {
    shm_exchange: Option<ShmExchange>,
    copier: AdaptiveCopy,
    /// This host's members, by their ranks in the world.
    ranks: Vec<Rank>,
    place: usize,
    /// The next phase's signature; all ranks of the host have the same once they have agreed.
    signature: u64,
}

impl HostExchange {
    pub(super) fn new(shm_exchange: Option<ShmExchange>, ranks: Vec<Rank>, place: usize) -> Self {
        Self {
            shm_exchange,
            copier: AdaptiveCopy::default(),
            ranks,
            place,
            signature: 0,
        }
    }

    /// Number of the group's ranks on this host.
    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// This rank's place among the group's ranks on this host.
    pub(super) fn place(&self) -> usize {
        self.place
    }

    /// The rank in the world of the rank at `place` on this host.
    pub(super) fn global(&self, place: usize) -> Rank {
        self.ranks[place]
    }

    /// Starts an operation; `signature` and the numbers after it identify its phases.
    pub(super) fn begin(&mut self, signature: u64) {
        self.signature = signature;
    }

    /// Restarts the slots at their first place, after a phase in which ranks disagreed about the slots'
    /// lengths.
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
        // Each phase of an operation has its own signature, so no rank can be a phase behind.
        self.signature = self.signature.wrapping_add(1);
        run.map_err(|error| error.into_failure(&self.ranks))
    }

    /// Works as [`run_phase`](Self::run_phase) among ranks that have agreed: different signatures are an error.
    pub(super) fn run_agreed_phase(
        &mut self,
        inline: &[u8],
        used: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        if self.run_phase(inline, used, policy)? {
            return Ok(());
        }
        let what = "a phase that belongs to another operation";
        Err(Failure::Garbled(self.ranks[self.place], what.into()))
    }

    /// The bytes that the rank at `place` shows in its slot; none on a host with one rank.
    pub(super) fn slot(&self, place: usize) -> &[u8] {
        self.shm_exchange
            .as_ref()
            .map_or(&[], |shm_exchange| shm_exchange.slot(place))
    }

    /// The first `len` bytes that the rank at `place` shows in its line; none on a host with one rank.
    pub(super) fn line(&self, place: usize, len: usize) -> &[u8] {
        self.shm_exchange
            .as_ref()
            .map_or(&[], |shm_exchange| shm_exchange.inline(place, len))
    }
}
