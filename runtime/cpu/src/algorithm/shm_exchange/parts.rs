//! Operations that move parts between ranks, chunk by chunk. In a reduce_scatter each rank also combines them.

use super::CHUNK;
use super::phase::PhaseContext;
use super::shares::with_inputs;
use crate::collective::{Combination, Data, Inputs, Outputs, Position};
use crate::transport::shm::{INLINE, SLOT, Traffic};
use crate::wait::Failure;
use rcomm_core::arithmetic::{self, copy, copy_past_caches};
use std::ops::Range;

/// Results of at least this many bytes are written past the caches.
const STREAMED: usize = 4 << 20;

impl PhaseContext<'_, '_> {
    pub(super) fn broadcast(&mut self, mut data: Data<'_>, root: usize) -> Result<(), Failure> {
        let len = data.bytes().len();
        if len <= INLINE {
            let inline = match &data {
                Data::Read(bytes) => bytes,
                Data::Write(_) => &[][..],
            };
            self.run_inline_phase(inline)?;
            if let Data::Write(bytes) = data {
                bytes.copy_from_slice(self.shm_exchange.inline(root, len));
            }
            return Ok(());
        }
        self.shm_exchange.expect(Traffic::OneWay);
        for range in chunks(len, CHUNK) {
            if let Data::Read(bytes) = &data {
                let slot = self.shm_exchange.next_slot(range.len());
                self.copier.copy(slot, &bytes[range.clone()]);
            }
            self.run_phase(range.len())?;
            if let Data::Write(bytes) = &mut data {
                let chunk = &self.shm_exchange.slot(root)[..range.len()];
                copy_result(&mut bytes[range], chunk, len);
            }
        }
        Ok(())
    }

    pub(super) fn all_gather(
        &mut self,
        input: &[u8],
        mut outputs: Outputs<'_>,
    ) -> Result<(), Failure> {
        let Position { rank, size, .. } = self.position;
        let longest = (0..size).map(|peer| outputs.part_mut(peer).len()).max();
        let longest = longest.unwrap_or(0);
        if longest <= INLINE {
            self.run_inline_phase(input)?;
            for peer in 0..size {
                let part = outputs.part_mut(peer);
                part.copy_from_slice(self.shm_exchange.inline(peer, part.len()));
            }
            return Ok(());
        }
        self.shm_exchange.expect(Traffic::Exchange);
        for range in chunks(longest, CHUNK) {
            let mine = clip(&range, input.len());
            let piece = &mut self.shm_exchange.next_slot(range.len())[..mine.len()];
            self.copier.copy(piece, &input[mine.clone()]);
            // This rank's own part is copied to the output now, while the bytes are still in the cache.
            let kept = &mut outputs.part_mut(rank)[mine.clone()];
            copy_result(kept, &input[mine], longest * size);
            self.run_phase(range.len())?;
            for peer in self.others() {
                let part = outputs.part_mut(peer);
                let range = clip(&range, part.len());
                let chunk = &self.shm_exchange.slot(peer)[..range.len()];
                copy_result(&mut part[range], chunk, longest * size);
            }
        }
        Ok(())
    }

    pub(super) fn reduce_scatter(
        &mut self,
        inputs: &Inputs<'_>,
        output: &mut [u8],
        by: Combination,
    ) -> Result<(), Failure> {
        let Position { rank, size, .. } = self.position;
        let longest = (0..size).map(|peer| inputs.part(peer).len()).max();
        let longest = longest.unwrap_or(0);
        if self.parts_fit_line(longest) {
            self.run_parts_phase(inputs, longest)?;
            let len = output.len();
            with_inputs(
                size,
                |peer| match peer == rank {
                    true => inputs.part(rank),
                    false => &self.part_in_line(peer, longest)[..len],
                },
                |inputs| arithmetic::combine(by.op, by.dtype, inputs, output, None),
            );
            return Ok(());
        }
        let section = section_len(size, longest);
        self.shm_exchange.expect(Traffic::Exchange);
        for range in chunks(longest, section) {
            self.fill_sections(inputs, &range, section);
            self.run_phase(section * (size - 1))?;
            let mine = clip(&range, output.len());
            let slots = self.slots();
            with_inputs(
                size,
                |peer| match peer == rank {
                    true => &inputs.part(rank)[mine.clone()],
                    false => &slots.slot(peer)[section_of(rank, peer) * section..][..mine.len()],
                },
                |inputs| {
                    arithmetic::combine(by.op, by.dtype, inputs, &mut output[mine.clone()], None)
                },
            );
        }
        Ok(())
    }

    pub(super) fn all_to_all(
        &mut self,
        inputs: &Inputs<'_>,
        mut outputs: Outputs<'_>,
        longest: usize,
    ) -> Result<(), Failure> {
        let Position { rank, size, .. } = self.position;
        copy_result(outputs.part_mut(rank), inputs.part(rank), longest * size);
        if self.parts_fit_line(longest) {
            self.run_parts_phase(inputs, longest)?;
            for peer in self.others() {
                let part = outputs.part_mut(peer);
                part.copy_from_slice(&self.part_in_line(peer, longest)[..part.len()]);
            }
            return Ok(());
        }
        let section = section_len(size, longest);
        self.shm_exchange.expect(Traffic::Exchange);
        for range in chunks(longest, section) {
            self.fill_sections(inputs, &range, section);
            self.run_phase(section * (size - 1))?;
            for peer in self.others() {
                let part = outputs.part_mut(peer);
                let range = clip(&range, part.len());
                let chunk = &self.shm_exchange.slot(peer)[section_of(rank, peer) * section..];
                let chunk = &chunk[..range.len()];
                copy_result(&mut part[range], chunk, longest * size);
            }
        }
        Ok(())
    }

    pub(super) fn gather(
        &mut self,
        input: &[u8],
        mut outputs: Option<Outputs<'_>>,
        root: usize,
        longest: usize,
    ) -> Result<(), Failure> {
        let rank = self.position.rank;
        if let Some(outputs) = &mut outputs {
            copy_result(outputs.part_mut(rank), input, longest * self.position.size);
        }
        self.shm_exchange.expect(Traffic::OneWay);
        for range in chunks(longest, CHUNK) {
            if rank != root {
                let mine = clip(&range, input.len());
                let piece = &mut self.shm_exchange.next_slot(range.len())[..mine.len()];
                self.copier.copy(piece, &input[mine]);
            }
            self.run_phase(range.len())?;
            if let Some(outputs) = &mut outputs {
                for peer in self.others() {
                    let part = outputs.part_mut(peer);
                    let range = clip(&range, part.len());
                    let chunk = &self.shm_exchange.slot(peer)[..range.len()];
                    copy_result(&mut part[range], chunk, longest * self.position.size);
                }
            }
        }
        Ok(())
    }

    pub(super) fn scatter(
        &mut self,
        inputs: Option<&Inputs<'_>>,
        output: &mut [u8],
        root: usize,
        longest: usize,
    ) -> Result<(), Failure> {
        let Position { rank, size, .. } = self.position;
        let section = section_len(size, longest);
        if let Some(inputs) = inputs {
            copy_result(output, inputs.part(rank), longest);
        }
        self.shm_exchange.expect(Traffic::OneWay);
        for range in chunks(longest, section) {
            if let Some(inputs) = inputs {
                self.fill_sections(inputs, &range, section);
            }
            self.run_phase(section * (size - 1))?;
            if rank != root {
                let range = clip(&range, output.len());
                let chunk = &self.shm_exchange.slot(root)[section_of(rank, root) * section..];
                let chunk = &chunk[..range.len()];
                copy_result(&mut output[range], chunk, longest);
            }
        }
        Ok(())
    }

    /// Whether a line is large enough for a part of `longest` bytes for each other rank.
    fn parts_fit_line(&self, longest: usize) -> bool {
        longest <= INLINE / (self.position.size - 1).max(1)
    }

    /// Runs a phase in which each rank shows the parts for the others in its line.
    fn run_parts_phase(&mut self, inputs: &Inputs<'_>, longest: usize) -> Result<(), Failure> {
        let Position { rank, size, .. } = self.position;
        let mut line = [0; INLINE];
        for peer in self.others() {
            let part = inputs.part(peer);
            line[section_of(peer, rank) * longest..][..part.len()].copy_from_slice(part);
        }
        self.run_inline_phase(&line[..longest * (size - 1)])
    }

    /// The part for this rank in the line of `peer`.
    fn part_in_line(&self, peer: usize, longest: usize) -> &[u8] {
        let Position { rank, size, .. } = self.position;
        let line = self.shm_exchange.inline(peer, longest * (size - 1));
        &line[section_of(rank, peer) * longest..][..longest]
    }

    /// Puts the chunk `range` of the part for each other rank into the section of this rank's slot that the other rank
    /// reads.
    fn fill_sections(&mut self, inputs: &Inputs<'_>, range: &Range<usize>, section: usize) {
        let peers = self.others();
        let Position { rank, size, .. } = self.position;
        let slot = self.shm_exchange.next_slot(section * (size - 1));
        for peer in peers {
            let part = inputs.part(peer);
            let range = clip(range, part.len());
            let start = section_of(peer, rank) * section;
            let piece = &mut slot[start..start + range.len()];
            self.copier.copy(piece, &part[range]);
        }
    }
}

/// Copies a piece of a result of `result_len` bytes, past the caches if it has [`STREAMED`] bytes or more: it would not
/// stay in them.
pub(super) fn copy_result(to: &mut [u8], from: &[u8], result_len: usize) {
    if result_len < STREAMED {
        copy(to, from);
    } else {
        copy_past_caches(to, from);
    }
}

/// Length of a slot's sections, one for each other rank: whole cache lines of 64 bytes, and at most `longest` rounded
/// up to whole cache lines.
fn section_len(size: usize, longest: usize) -> usize {
    let max_len = (SLOT / (size - 1)).min(CHUNK) & !63;
    max_len.min(longest.max(1).next_multiple_of(64))
}

/// Index of the section of `writer`'s slot that `reader` reads. A rank has no section for itself, so that
/// each rank of a group of two writes exactly where it has read.
fn section_of(reader: usize, writer: usize) -> usize {
    reader - usize::from(reader > writer)
}

/// Splits `len` bytes into chunks. For 0 bytes there is one empty chunk, since the ranks run a phase in any case.
fn chunks(len: usize, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(chunk).max(1);
    (0..count).map(move |index| index * chunk..((index + 1) * chunk).min(len))
}

/// Limits `range` to the bytes that a shorter part has.
fn clip(range: &Range<usize>, len: usize) -> Range<usize> {
    range.start.min(len)..range.end.min(len)
}
