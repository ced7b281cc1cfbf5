//! Collectives of ranks that share memory: everybody writes its own slot, everybody reads the others'.
//!
//! Data go in *chunks*, one a phase, small enough that a chunk written by one rank is still in a cache
//! when the others read it. So the callers' buffers are the only memory that is read and written from
//! end to end. The notices are compared as signatures, in every phase: ranks that disagree find out in
//! the first, before anybody has looked at another's data.
//!
//! An all_reduce reads each rank's buffer once and writes it once: in phase c every rank puts what others
//! combine of chunk c into its slot, with its share of the result of chunk c - 1; then it takes over the
//! others' shares of chunk c - 1 and combines its own of chunk c.

use super::super::collective::{
    Collective, Combination, Data, Inputs, Outputs, Place, Step, compare_lists, has_lists,
};
use super::super::mesh::Failure;
use super::super::notice::{self, NOTICE_LEN, Notice};
use super::super::reduce::{self, HandOver, copy, copy_past_caches};
use super::super::transport::shm::{Board, BoardError, INLINE, SLOT, Slots};
use super::super::wait::Patience;
use super::part_of;
use crate::tuning::{Algorithm, Pattern, Plan};
use rcomm_recorder::model::Rank;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a chunk of an all_reduce; the rest of a slot is for a share of the result.
const CHUNK: usize = 128 << 10;
/// From this size on results are written past the caches.
const STREAMED: usize = 4 << 20;

/// One group's collectives over shared memory.
pub(crate) struct BoardRoad {
    board: Board,
    hand_over: HandOver,
    ranks: Arc<[Rank]>,
    /// Up to this size every rank combines all inputs of an all_reduce by itself, in one phase.
    whole: usize,
}

/// How an operation that combines is cut: in each chunk every rank combines one part of all inputs, its
/// share of the result.
///
/// In phase c a slot holds, for each other rank, the part of chunk c that it combines, and behind them
/// the writer's share of chunk c - 1. The last phase has shares only.
#[derive(Clone, Copy)]
struct Shares {
    len: usize,
    size: usize,
    element: usize,
}

impl Shares {
    fn chunks(self) -> usize {
        self.len.div_ceil(CHUNK)
    }

    /// The bytes of the whole that `rank` combines in this chunk.
    fn part(self, rank: usize, chunk: usize) -> Range<usize> {
        let start = (chunk * CHUNK).min(self.len);
        let len = (self.len - start).min(CHUNK);
        let part = part_of(rank, self.size, len, self.element);
        start + part.start..start + part.end
    }

    /// Bytes for a part of this chunk, whoever combines it.
    fn width(self, chunk: usize) -> usize {
        let parts = (0..self.size).map(|rank| self.part(rank, chunk).len());
        parts.max().unwrap_or(0).next_multiple_of(64)
    }

    /// Where `reader` finds its part of this chunk in the slot of `writer`.
    fn input_at(self, reader: usize, writer: usize, chunk: usize) -> usize {
        (reader - usize::from(reader > writer)) * self.width(chunk)
    }

    /// Where the share of the chunk before is in the slots of this phase.
    fn share_at(self, phase: usize) -> usize {
        if phase < self.chunks() {
            (self.size - 1) * self.width(phase)
        } else {
            0
        }
    }

    /// Bytes of a slot that are used in this phase.
    fn used(self, phase: usize) -> usize {
        let share = phase.checked_sub(1).map_or(0, |chunk| self.width(chunk));
        self.share_at(phase) + share
    }
}

/// What every step needs to go through its phases.
struct Walk<'a, 'p> {
    board: &'a mut Board,
    hand_over: &'a mut HandOver,
    ranks: &'a [Rank],
    place: Place,
    notice: Notice,
    signature: u64,
    whole: usize,
    patience: &'a mut Patience<'p>,
}

impl BoardRoad {
    pub(crate) fn new(board: Board, ranks: Arc<[Rank]>, plan: &Plan) -> Self {
        let whole = plan.most(Pattern::AllReduce, Algorithm::Whole).min(SLOT);
        Self {
            whole,
            board,
            hand_over: HandOver::default(),
            ranks,
        }
    }

    /// As [`LaneRoad::perform`](super::LaneRoad::perform).
    pub(crate) fn perform(
        &mut self,
        step: Step<'_>,
        place: Place,
        patience: &mut Patience<'_>,
    ) -> Result<(), Failure> {
        let Step {
            notice,
            lists,
            collective,
        } = step;
        let mut walk = Walk {
            board: &mut self.board,
            hand_over: &mut self.hand_over,
            ranks: &self.ranks,
            place,
            notice,
            signature: notice.signature(),
            whole: self.whole,
            patience,
        };
        let longest = if has_lists(notice.op) {
            walk.compare_lists(&lists)?
        } else {
            None
        };
        match collective {
            Collective::Barrier => walk.turn_with(&[]),
            Collective::AllReduce { data, by } => walk.all_reduce(data, by),
            Collective::Reduce { data, by, root } => walk.reduce(data, by, root),
            Collective::Broadcast { data, root } => walk.broadcast(data, root),
            Collective::AllGather { input, outputs } => walk.all_gather(input, outputs),
            Collective::ReduceScatter { inputs, output, by } => {
                walk.reduce_scatter(&inputs, output, by)
            }
            Collective::AllToAll { inputs, outputs } => {
                let longest = longest.unwrap_or_else(|| inputs.part(0).len());
                walk.all_to_all(Some(&inputs), Some(outputs), longest)
            }
            Collective::Gather {
                input,
                outputs,
                root,
            } => walk.gather(input, outputs, root, longest.unwrap_or(input.len())),
            Collective::Scatter {
                inputs,
                output,
                root,
            } => {
                let longest = longest.unwrap_or(output.len());
                walk.scatter(inputs.as_ref(), output, root, longest)
            }
        }
    }
}

impl Walk<'_, '_> {
    fn failure(&self, error: BoardError) -> Failure {
        match error {
            BoardError::Interrupted(why) => why.into(),
            BoardError::Late(rank) => Failure::Late(vec![self.ranks[rank]]),
            BoardError::Gone(rank) => Failure::Gone(self.ranks[rank], None),
            BoardError::Io(error) => Failure::Io(error),
        }
    }

    /// The next phase of this operation, in which slots of up to `used` bytes are shown.
    #[inline]
    fn turn(&mut self, used: usize) -> Result<(), Failure> {
        self.phase(&[], used)
    }

    /// The next phase, in which no slots are shown but these bytes.
    #[inline]
    fn turn_with(&mut self, inline: &[u8]) -> Result<(), Failure> {
        self.phase(inline, 0)
    }

    #[inline]
    fn phase(&mut self, inline: &[u8], used: usize) -> Result<(), Failure> {
        match self.board.turn(self.signature, inline, used, self.patience) {
            Ok(true) => {
                // Each phase of an operation has its own signature: no rank can be a phase behind.
                self.signature = self.signature.wrapping_add(1);
                Ok(())
            }
            Ok(false) => Err(self.disagree()),
            Err(error) => Err(self.failure(error)),
        }
    }

    /// Signatures differ: all ranks have seen that, so all show their notices now.
    #[cold]
    fn disagree(&mut self) -> Failure {
        let bytes = self.notice.encode();
        self.board.restart_slots();
        self.board.next_slot(NOTICE_LEN).copy_from_slice(&bytes);
        if let Err(error) = self.board.turn(0, &[], NOTICE_LEN, self.patience) {
            return self.failure(error);
        }
        let mut notices = Vec::with_capacity(self.place.size);
        for rank in 0..self.place.size {
            match self.board.slot(rank).first_chunk().and_then(Notice::decode) {
                Some(notice) => notices.push(notice),
                None => return Failure::Garbled(self.ranks[rank], "a notice that is none".into()),
            }
        }
        match notice::compare(&notices) {
            Err(found) => Failure::Mismatch(self.ranks[found.rank], found.message),
            Ok(()) => Failure::Garbled(
                self.ranks[self.place.rank],
                "a phase that belongs to another operation".into(),
            ),
        }
    }

    /// Shows notices with lists of counts; gives the bytes of the longest part of any rank.
    fn compare_lists(&mut self, lists: &[u64]) -> Result<Option<usize>, Failure> {
        let mut notice = self.notice;
        let len = lists.len() * 8;
        notice.inline = u32::try_from(len).unwrap_or(u32::MAX);
        if NOTICE_LEN + len > SLOT {
            let what = format!("{} counts, more than a slot holds", lists.len());
            return Err(Failure::Garbled(self.ranks[self.place.rank], what));
        }
        let slot = self.board.next_slot(SLOT);
        slot[..NOTICE_LEN].copy_from_slice(&notice.encode());
        for (place, count) in slot[NOTICE_LEN..].chunks_exact_mut(8).zip(lists) {
            place.copy_from_slice(&count.to_le_bytes());
        }
        // Some may have more counts than others, which shows only now.
        self.turn(SLOT)?;
        let (mut notices, mut all) = (Vec::new(), Vec::new());
        for rank in 0..self.place.size {
            let slot = self.board.slot(rank);
            let notice = slot.first_chunk().and_then(Notice::decode);
            let notice = notice.filter(|notice| notice.inline as usize <= SLOT - NOTICE_LEN);
            let notice = notice.ok_or_else(|| {
                Failure::Garbled(self.ranks[rank], "a notice that is none".into())
            })?;
            let bytes = &slot[NOTICE_LEN..NOTICE_LEN + notice.inline as usize];
            let counts = bytes.chunks_exact(8);
            let counts = counts
                .map(|b| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]));
            all.push(counts.collect());
            notices.push(notice);
        }
        compare_lists(&notices, &all)
            .map_err(|found| Failure::Mismatch(self.ranks[found.rank], found.message))?;
        let longest = all.iter().flatten().copied().max().unwrap_or(0);
        let element = self.notice.dtype.size().unwrap_or(1);
        Ok(Some(usize::try_from(longest).unwrap_or(0) * element))
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let Place { rank, size, .. } = self.place;
        (1..size).map(move |step| (rank + step) % size)
    }

    fn all_reduce(&mut self, data: &mut [u8], by: Combination) -> Result<(), Failure> {
        let Place { rank, size, .. } = self.place;
        let len = data.len();
        if len <= self.whole {
            let is_inline = len <= INLINE;
            if is_inline {
                self.turn_with(data)?;
            } else {
                self.hand_over.copy(self.board.next_slot(len), data);
                self.turn(len)?;
            }
            let board = &*self.board;
            let other = |at: usize| {
                let peer = at + usize::from(at >= rank);
                match is_inline {
                    true => board.inline(peer, len),
                    false => &board.slot(peer)[..len],
                }
            };
            with_inputs(size - 1, other, |others| {
                reduce::combine_in_place(by.op, by.dtype, data, rank, others, None);
            });
            return Ok(());
        }
        let shares = Shares {
            len,
            size,
            element: by.element(),
        };
        for phase in 0..=shares.chunks() {
            self.show_inputs(shares, phase, data);
            self.turn(shares.used(phase))?;
            let peers = self.others();
            let hand_over = &mut *self.hand_over;
            let (slots, next) = self.board.slots_and_next(shares.used(phase + 1));
            if let Some(chunk) = phase.checked_sub(1) {
                for peer in peers {
                    let range = shares.part(peer, chunk);
                    let share = &slots.of(peer)[shares.share_at(phase)..][..range.len()];
                    copy(&mut data[range], share);
                }
            }
            if phase < shares.chunks() {
                let mine = shares.part(rank, phase);
                let width = mine.len();
                let share = &mut next[shares.share_at(phase + 1)..][..width];
                let other = |at: usize| {
                    let peer = at + usize::from(at >= rank);
                    &slots.of(peer)[shares.input_at(rank, peer, phase)..][..width]
                };
                with_inputs(size - 1, other, |others| {
                    let out = &mut data[mine];
                    if hand_over.streams(width) {
                        reduce::combine_in_place(by.op, by.dtype, out, rank, others, None);
                        hand_over.copy(share, out);
                    } else {
                        reduce::combine_in_place(by.op, by.dtype, out, rank, others, Some(share));
                    }
                });
            }
        }
        Ok(())
    }

    /// Puts into the slot of this phase what the others combine in it.
    fn show_inputs(&mut self, shares: Shares, phase: usize, data: &[u8]) {
        if phase == shares.chunks() {
            return;
        }
        let peers = self.others();
        let slot = self.board.next_slot(shares.used(phase));
        for peer in peers {
            let piece = &data[shares.part(peer, phase)];
            let at = shares.input_at(peer, self.place.rank, phase);
            self.hand_over.copy(&mut slot[at..][..piece.len()], piece);
        }
    }

    /// As all_reduce, but only the root takes over the shares.
    fn reduce(&mut self, mut data: Data<'_>, by: Combination, root: usize) -> Result<(), Failure> {
        let Place { rank, size, .. } = self.place;
        let shares = Shares {
            len: data.bytes().len(),
            size,
            element: by.element(),
        };
        // Ranks meet even if there is nothing to combine.
        for phase in 0..=shares.chunks() {
            self.show_inputs(shares, phase, data.bytes());
            self.turn(shares.used(phase))?;
            let (slots, next) = self.board.slots_and_next(shares.used(phase + 1));
            if let Some(chunk) = phase.checked_sub(1)
                && let Data::Write(data) = &mut data
            {
                for peer in (0..size).filter(|&peer| peer != root) {
                    let range = shares.part(peer, chunk);
                    let share = &slots.of(peer)[shares.share_at(phase)..][..range.len()];
                    copy(&mut data[range], share);
                }
            }
            if phase < shares.chunks() {
                let mine = shares.part(rank, phase);
                let width = mine.len();
                let share = &mut next[shares.share_at(phase + 1)..][..width];
                let input = |peer: usize| match peer == rank {
                    true => &data.bytes()[mine.clone()],
                    false => &slots.of(peer)[shares.input_at(rank, peer, phase)..][..width],
                };
                with_inputs(size, input, |inputs| {
                    reduce::combine(by.op, by.dtype, inputs, share, None);
                });
                if let Data::Write(data) = &mut data {
                    copy(&mut data[mine], share);
                }
            }
        }
        Ok(())
    }

    fn broadcast(&mut self, mut data: Data<'_>, root: usize) -> Result<(), Failure> {
        let len = data.bytes().len();
        if len <= INLINE {
            let inline = match &data {
                Data::Read(bytes) => bytes,
                Data::Write(_) => &[][..],
            };
            self.turn_with(inline)?;
            if let Data::Write(bytes) = data {
                bytes.copy_from_slice(self.board.inline(root, len));
            }
            return Ok(());
        }
        for range in chunks(len, CHUNK) {
            if let Data::Read(bytes) = &data {
                let slot = self.board.next_slot(range.len());
                self.hand_over.copy(slot, &bytes[range.clone()]);
            }
            self.turn(range.len())?;
            if let Data::Write(bytes) = &mut data {
                let chunk = &self.board.slot(root)[..range.len()];
                deliver(&mut bytes[range], chunk, len);
            }
        }
        Ok(())
    }

    fn all_gather(&mut self, input: &[u8], mut outputs: Outputs<'_>) -> Result<(), Failure> {
        let Place { rank, size, .. } = self.place;
        let longest = (0..size).map(|r| outputs.part_mut(r).len()).max();
        let longest = longest.unwrap_or(0);
        if longest <= INLINE {
            self.turn_with(input)?;
            for peer in 0..size {
                let part = outputs.part_mut(peer);
                part.copy_from_slice(self.board.inline(peer, part.len()));
            }
            return Ok(());
        }
        for range in chunks(longest, CHUNK) {
            let own = clip(&range, input.len());
            let piece = &mut self.board.next_slot(range.len())[..own.len()];
            self.hand_over.copy(piece, &input[own.clone()]);
            // Its way into this rank's own output leads through the cache while it is there.
            let kept = &mut outputs.part_mut(rank)[own.clone()];
            deliver(kept, &input[own], longest * size);
            self.turn(range.len())?;
            for peer in self.others() {
                let part = outputs.part_mut(peer);
                let range = clip(&range, part.len());
                let chunk = &self.board.slot(peer)[..range.len()];
                deliver(&mut part[range], chunk, longest * size);
            }
        }
        Ok(())
    }

    fn reduce_scatter(
        &mut self,
        inputs: &Inputs<'_>,
        output: &mut [u8],
        by: Combination,
    ) -> Result<(), Failure> {
        let Place { rank, size, .. } = self.place;
        let longest = (0..size).map(|r| inputs.part(r).len()).max().unwrap_or(0);
        let lane = lane_len(size, longest);
        for range in chunks(longest, lane) {
            self.fill_lanes(inputs, &range, lane);
            self.turn(lane * size)?;
            let mine = clip(&range, output.len());
            let slots = self.slots();
            with_inputs(
                size,
                |peer| match peer == rank {
                    true => &inputs.part(rank)[mine.clone()],
                    false => &slots.of(peer)[rank * lane..rank * lane + mine.len()],
                },
                |all| reduce::combine(by.op, by.dtype, all, &mut output[mine.clone()], None),
            );
        }
        Ok(())
    }

    fn all_to_all(
        &mut self,
        inputs: Option<&Inputs<'_>>,
        mut outputs: Option<Outputs<'_>>,
        longest: usize,
    ) -> Result<(), Failure> {
        let Place { rank, size, .. } = self.place;
        let lane = lane_len(size, longest);
        if let (Some(inputs), Some(outputs)) = (inputs, &mut outputs) {
            deliver(outputs.part_mut(rank), inputs.part(rank), longest * size);
        }
        for range in chunks(longest, lane) {
            if let Some(inputs) = inputs {
                self.fill_lanes(inputs, &range, lane);
            }
            self.turn(lane * size)?;
            if let Some(outputs) = &mut outputs {
                for peer in self.others() {
                    let part = outputs.part_mut(peer);
                    let range = clip(&range, part.len());
                    let chunk = &self.board.slot(peer)[rank * lane..rank * lane + range.len()];
                    deliver(&mut part[range], chunk, longest * size);
                }
            }
        }
        Ok(())
    }

    fn gather(
        &mut self,
        input: &[u8],
        mut outputs: Option<Outputs<'_>>,
        root: usize,
        longest: usize,
    ) -> Result<(), Failure> {
        let rank = self.place.rank;
        if let Some(outputs) = &mut outputs {
            deliver(outputs.part_mut(rank), input, longest * self.place.size);
        }
        for range in chunks(longest, CHUNK) {
            if rank != root {
                let own = clip(&range, input.len());
                let piece = &mut self.board.next_slot(range.len())[..own.len()];
                self.hand_over.copy(piece, &input[own]);
            }
            self.turn(range.len())?;
            if let Some(outputs) = &mut outputs {
                for peer in self.others() {
                    let part = outputs.part_mut(peer);
                    let range = clip(&range, part.len());
                    let chunk = &self.board.slot(peer)[..range.len()];
                    deliver(&mut part[range], chunk, longest * self.place.size);
                }
            }
        }
        Ok(())
    }

    fn scatter(
        &mut self,
        inputs: Option<&Inputs<'_>>,
        output: &mut [u8],
        root: usize,
        longest: usize,
    ) -> Result<(), Failure> {
        let Place { rank, size, .. } = self.place;
        let lane = lane_len(size, longest);
        if let Some(inputs) = inputs {
            deliver(output, inputs.part(rank), longest);
        }
        for range in chunks(longest, lane) {
            if let Some(inputs) = inputs {
                self.fill_lanes(inputs, &range, lane);
            }
            self.turn(lane * size)?;
            if rank != root {
                let range = clip(&range, output.len());
                let chunk = &self.board.slot(root)[rank * lane..rank * lane + range.len()];
                deliver(&mut output[range], chunk, longest);
            }
        }
        Ok(())
    }

    /// Puts the chunk `range` of each part into the lane of its rank.
    fn fill_lanes(&mut self, inputs: &Inputs<'_>, range: &Range<usize>, lane: usize) {
        let peers = self.others();
        let slot = self.board.next_slot(lane * self.place.size);
        for peer in peers {
            let part = inputs.part(peer);
            let range = clip(range, part.len());
            let at = peer * lane;
            let piece = &mut slot[at..at + range.len()];
            self.hand_over.copy(piece, &part[range]);
        }
    }

    fn slots(&mut self) -> Slots<'_> {
        self.board.slots_and_next(0).0
    }
}

/// Takes over a piece of a result of `whole` bytes: past the caches where they would not hold it anyway.
fn deliver(to: &mut [u8], from: &[u8], whole: usize) {
    if whole < STREAMED {
        copy(to, from);
    } else {
        copy_past_caches(to, from);
    }
}

/// Bytes of a slot for each rank, where it has something for each: up to `longest`.
fn lane_len(size: usize, longest: usize) -> usize {
    ((SLOT / size) & !63).min(longest.max(1).next_multiple_of(64))
}

/// The chunks of so many bytes; one empty chunk if there are none, since ranks meet all the same.
fn chunks(len: usize, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(chunk).max(1);
    (0..count).map(move |at| at * chunk..((at + 1) * chunk).min(len))
}

/// As much of `range` as there is of a shorter part.
fn clip(range: &Range<usize>, len: usize) -> Range<usize> {
    range.start.min(len)..range.end.min(len)
}

/// Collects `count` inputs, on the stack as long as they are few.
#[inline]
fn with_inputs<'a>(
    count: usize,
    input: impl Fn(usize) -> &'a [u8],
    use_them: impl FnOnce(&[&'a [u8]]),
) {
    const FEW: usize = 8;
    if count <= FEW {
        let mut few: [&[u8]; FEW] = [&[]; FEW];
        for (at, place) in few[..count].iter_mut().enumerate() {
            *place = input(at);
        }
        use_them(&few[..count]);
    } else {
        let all: Vec<&[u8]> = (0..count).map(input).collect();
        use_them(&all);
    }
}
