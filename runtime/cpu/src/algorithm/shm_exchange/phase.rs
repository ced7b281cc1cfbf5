//! [`PhaseContext`]: runs the phases of one step, and handles ranks that disagree.

use crate::collective::op_header::{self, OP_HEADER_LEN, OpHeader};
use crate::collective::{Position, compare_lists};
use crate::registered::MappedRegions;
use crate::transport::shm::{SLOT, ShmExchange, ShmExchangeError, Slots};
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic::AdaptiveCopy;
use rcomm_recorder::model::Rank;

/// The state with which one step runs its phases on the exchange area.
pub(super) struct PhaseContext<'a, 'p> {
    pub(super) shm_exchange: &'a mut ShmExchange,
    pub(super) copier: &'a mut AdaptiveCopy,
    /// The members by their ranks in the world.
    pub(super) ranks: &'a [Rank],
    pub(super) position: Position,
    pub(super) op_header: &'a OpHeader,
    /// The signature of the next phase.
    pub(super) signature: u64,
    /// The largest number of bytes of an all_reduce in which every rank combines all inputs.
    pub(super) max_whole: usize,
    /// The registered memory of the ranks; `None` while the ranks negotiate access to it.
    pub(super) regions: Option<&'a mut MappedRegions>,
    pub(super) policy: &'a mut WaitPolicy<'p>,
}

impl PhaseContext<'_, '_> {
    fn failure(&self, error: ShmExchangeError) -> Failure {
        error.into_failure(self.ranks)
    }

    /// Runs the next phase of this operation, in which each rank shows the first `used` bytes of its slot.
    #[inline]
    pub(super) fn run_phase(&mut self, used: usize) -> Result<(), Failure> {
        self.phase(&[], used)
    }

    /// Runs the next phase, in which this rank shows only these bytes, in its line.
    #[inline]
    pub(super) fn run_inline_phase(&mut self, inline: &[u8]) -> Result<(), Failure> {
        self.phase(inline, 0)
    }

    #[inline]
    fn phase(&mut self, inline: &[u8], used: usize) -> Result<(), Failure> {
        match self
            .shm_exchange
            .run_phase(self.signature, inline, used, self.policy)
        {
            Ok(true) => {
                // Each phase of an operation has its own signature, so that a rank in another phase is detected.
                self.signature = self.signature.wrapping_add(1);
                Ok(())
            }
            Ok(false) => Err(self.disagreement()),
            Err(error) => Err(self.failure(error)),
        }
    }

    /// Returns the failure of a step for which ranks have different signatures. All ranks have seen the difference, so
    /// all show their headers in this phase.
    #[cold]
    fn disagreement(&mut self) -> Failure {
        let bytes = self.op_header.encode();
        self.shm_exchange.restart_slots();
        self.shm_exchange
            .next_slot(OP_HEADER_LEN)
            .copy_from_slice(&bytes);
        if let Err(error) = self
            .shm_exchange
            .run_phase(0, &[], OP_HEADER_LEN, self.policy)
        {
            return self.failure(error);
        }
        let mut op_headers = Vec::with_capacity(self.position.size);
        for rank in 0..self.position.size {
            match self
                .shm_exchange
                .slot(rank)
                .first_chunk()
                .and_then(OpHeader::decode)
            {
                Some(op_header) => op_headers.push(op_header),
                None => return Failure::Garbled(self.ranks[rank], "a malformed op header".into()),
            }
        }
        match op_header::compare(&op_headers) {
            Err(found) => Failure::Mismatch(self.ranks[found.rank], found.message),
            Ok(()) => Failure::different_phases(),
        }
    }

    /// Exchanges headers with lists of counts, and compares the lists. Returns the length in bytes of the longest part
    /// of any rank.
    pub(super) fn exchange_lists(&mut self, lists: &[u64]) -> Result<usize, Failure> {
        let mut op_header = *self.op_header;
        let len = lists.len() * 8;
        op_header.inline = u32::try_from(len).unwrap_or(u32::MAX);
        if OP_HEADER_LEN + len > SLOT {
            return Err(Failure::TooManyCounts {
                counts: lists.len(),
                most: (SLOT - OP_HEADER_LEN) / 8,
            });
        }
        let slot = self.shm_exchange.next_slot(SLOT);
        slot[..OP_HEADER_LEN].copy_from_slice(&op_header.encode());
        for (bytes, count) in slot[OP_HEADER_LEN..].chunks_exact_mut(8).zip(lists) {
            bytes.copy_from_slice(&count.to_le_bytes());
        }
        // The lists may have different lengths, which the ranks do not know yet, so this phase shows whole slots.
        self.run_phase(SLOT)?;
        let (mut op_headers, mut all_counts) = (Vec::new(), Vec::new());
        for rank in 0..self.position.size {
            let slot = self.shm_exchange.slot(rank);
            let op_header = slot.first_chunk().and_then(OpHeader::decode);
            let op_header =
                op_header.filter(|op_header| op_header.inline as usize <= SLOT - OP_HEADER_LEN);
            let op_header = op_header.ok_or_else(|| {
                Failure::Garbled(self.ranks[rank], "a malformed op header".into())
            })?;
            let bytes = &slot[OP_HEADER_LEN..OP_HEADER_LEN + op_header.inline as usize];
            let (counts, _) = bytes.as_chunks::<8>();
            let counts = counts.iter().map(|count| u64::from_le_bytes(*count));
            all_counts.push(counts.collect());
            op_headers.push(op_header);
        }
        compare_lists(&op_headers, &all_counts)
            .map_err(|found| Failure::Mismatch(self.ranks[found.rank], found.message))?;
        let longest = all_counts.iter().flatten().copied().max().unwrap_or(0);
        let element = self.op_header.dtype.size().unwrap_or(1);
        Ok(usize::try_from(longest).unwrap_or(0) * element)
    }

    /// The other ranks, starting with the next one, so that not all ranks start with rank 0.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let Position { rank, size, .. } = self.position;
        (1..size).map(move |step| (rank + step) % size)
    }

    /// The slots of all ranks as the last phase shows them.
    pub(super) fn slots(&mut self) -> Slots<'_> {
        self.shm_exchange.slots_and_next(0).0
    }
}
