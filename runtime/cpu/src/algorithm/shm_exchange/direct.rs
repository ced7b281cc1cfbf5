//! Runs long operations in registered buffers, without slots: each rank accesses the others' memory.
//!
//! | operation | buffers that must be registered | what each rank does |
//! |---|---|---|
//! | all_reduce | of all ranks | combines its share of all buffers, and writes the result to all |
//! | reduce | of all ranks | combines its share of all buffers into the root's |
//! | broadcast | of all ranks | copies its share of the root's buffer to all |
//! | broadcast | of the root | copies all of the root's buffer to its own |
//! | all_gather, all_to_all | the inputs of all ranks | copies the parts for this rank |
//! | reduce_scatter | the inputs of all ranks | combines the parts for this rank |
//!
//! Elements are combined in order of ranks, as in all algorithms here.

use super::parts::copy_result;
use super::phase::PhaseContext;
use super::shares::with_inputs;
use crate::collective::{Collective, Combination, Data, Inputs, Outputs, Position};
use crate::registered::{AccessOutcome, AccessTerms, DirectAccess, Exposed, Need, Phases, Rule};
use crate::transport::shm::INLINE;
use crate::wait::Failure;
use rcomm_core::Access;
use rcomm_core::arithmetic;
use rcomm_core::tuning::{Algorithm, Pattern, Plan};
use std::ops::Range;

/// After this many bytes a rank checks whether its deadline has passed or its group was stopped.
const PIECE: usize = 1 << 20;

/// Returns the pattern and the size in bytes if the operation can run in registered buffers. Ranks whose headers agree
/// get the same values.
#[inline]
pub(super) fn extent(collective: &Collective<'_>, size: usize) -> Option<(Pattern, usize)> {
    match collective {
        Collective::AllReduce { data, .. } => Some((Pattern::AllReduce, data.len())),
        Collective::Reduce { data, .. } => Some((Pattern::Reduce, data.bytes().len())),
        Collective::Broadcast { data, .. } => Some((Pattern::Broadcast, data.bytes().len())),
        Collective::AllGather { outputs, .. } => {
            let bytes = match outputs {
                Outputs::Even(bytes, _) => bytes.len(),
                Outputs::List(_) => (0..size).map(|rank| outputs.len(rank)).sum(),
            };
            Some((Pattern::AllGather, bytes))
        }
        // Only inputs in one buffer: the buffers of a list may or may not be registered.
        Collective::ReduceScatter {
            inputs: Inputs::Even(bytes, _),
            ..
        } => Some((Pattern::ReduceScatter, bytes.len())),
        Collective::AllToAll {
            inputs: Inputs::Even(bytes, _),
            ..
        } => Some((Pattern::AllToAll, bytes.len())),
        _ => None,
    }
}

/// The sizes, in bytes, for which the ranks check whether the buffers that the operation needs are registered.
pub(super) struct DirectSizes(Vec<(Pattern, Range<usize>)>);

impl DirectSizes {
    pub(super) fn new(plan: &Plan) -> Self {
        let patterns = Pattern::ALL.iter().copied();
        let spans = patterns.map(|pattern| (pattern, plan.span(pattern, Algorithm::Direct)));
        Self(spans.filter(|(_, span)| !span.is_empty()).collect())
    }

    /// The smallest of these sizes, over all patterns.
    pub(super) fn least(&self) -> usize {
        let starts = self.0.iter().map(|(_, span)| span.start);
        starts.min().unwrap_or(usize::MAX)
    }

    /// Whether the ranks check an operation of this pattern and size.
    pub(super) fn contains(&self, pattern: Pattern, bytes: usize) -> bool {
        let mut spans = self.0.iter();
        spans.any(|(checked, span)| *checked == pattern && span.contains(&bytes))
    }
}

impl Phases for PhaseContext<'_, '_> {
    fn show(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.run_inline_phase(bytes)
    }

    fn shown(&self, rank: usize) -> &[u8; INLINE] {
        self.shm_exchange
            .inline(rank, INLINE)
            .first_chunk()
            .expect("`inline` returns as many bytes as requested")
    }
}

impl PhaseContext<'_, '_> {
    /// Runs the collective in registered buffers and returns `None`; returns the collective unchanged if the ranks'
    /// buffers are not registered as it requires.
    pub(super) fn run_direct<'a>(
        &mut self,
        collective: Collective<'a>,
    ) -> Result<Option<Collective<'a>>, Failure> {
        let Position { rank, size, .. } = self.position;
        let same_needs = |len: usize, access| vec![Some(Need { len, access }); size];
        match collective {
            Collective::AllReduce { data, by } => {
                let terms = AccessTerms {
                    needs: same_needs(data.len(), Access::Write),
                    rule: Rule::Share,
                };
                match self.agree(Data::Write(data), &[terms])? {
                    Agreed::Slots(data) => Ok(Some(Collective::AllReduce {
                        data: written(data),
                        by,
                    })),
                    Agreed::Direct(_, access) => self.combine_shares(access, by),
                }
            }
            Collective::Reduce { data, by, root } => {
                let mut needs = same_needs(data.bytes().len(), Access::Read);
                needs[root] = needs[root].map(|need| Need {
                    access: Access::Write,
                    ..need
                });
                let rule = Rule::Share;
                match self.agree(data, &[AccessTerms { needs, rule }])? {
                    Agreed::Slots(data) => Ok(Some(Collective::Reduce { data, by, root })),
                    Agreed::Direct(_, access) => self.combine_shares_into_root(access, by, root),
                }
            }
            Collective::Broadcast { data, root } => {
                let len = data.bytes().len();
                let need = |access| Some(Need { len, access });
                let mut all_ranks = same_needs(len, Access::Write);
                all_ranks[root] = need(Access::Read);
                let mut root_alone = vec![None; size];
                root_alone[root] = need(Access::Read);
                let terms = [
                    AccessTerms {
                        needs: all_ranks,
                        rule: Rule::Share,
                    },
                    AccessTerms {
                        needs: root_alone,
                        rule: Rule::Read,
                    },
                ];
                match self.agree(data, &terms)? {
                    Agreed::Slots(data) => Ok(Some(Collective::Broadcast { data, root })),
                    Agreed::Direct(0, access) => self.copy_shares(access, root),
                    Agreed::Direct(_, mut access) => {
                        if rank != root {
                            let (from, to) = access.bytes_of_and_own(root);
                            self.take(to, from, len)?;
                        }
                        self.end(access)
                    }
                }
            }
            Collective::AllGather { input, mut outputs } => {
                let needs = (0..size).map(|rank| {
                    Some(Need {
                        len: outputs.len(rank),
                        access: Access::Read,
                    })
                });
                let terms = AccessTerms {
                    needs: needs.collect(),
                    rule: Rule::Read,
                };
                match self.agree(Data::Read(input), &[terms])? {
                    Agreed::Slots(data) => Ok(Some(Collective::AllGather {
                        input: read(data),
                        outputs,
                    })),
                    Agreed::Direct(_, access) => {
                        let result_len = (0..size).map(|rank| outputs.len(rank)).sum();
                        for peer in std::iter::once(rank).chain(self.others()) {
                            self.take(outputs.part_mut(peer), access.bytes_of(peer), result_len)?;
                        }
                        self.end(access)
                    }
                }
            }
            Collective::ReduceScatter {
                inputs: Inputs::Even(bytes, _),
                output,
                by,
            } => {
                let terms = AccessTerms {
                    needs: same_needs(bytes.len(), Access::Read),
                    rule: Rule::Read,
                };
                match self.agree(Data::Read(bytes), &[terms])? {
                    Agreed::Slots(data) => Ok(Some(Collective::ReduceScatter {
                        inputs: Inputs::Even(read(data), size),
                        output,
                        by,
                    })),
                    Agreed::Direct(_, access) => self.combine_part(access, output, by),
                }
            }
            Collective::AllToAll {
                inputs: Inputs::Even(bytes, _),
                outputs,
            } => {
                let terms = AccessTerms {
                    needs: same_needs(bytes.len(), Access::Read),
                    rule: Rule::Read,
                };
                match self.agree(Data::Read(bytes), &[terms])? {
                    Agreed::Slots(data) => Ok(Some(Collective::AllToAll {
                        inputs: Inputs::Even(read(data), size),
                        outputs,
                    })),
                    Agreed::Direct(_, access) => self.take_parts(access, outputs),
                }
            }
            other => Ok(Some(other)),
        }
    }

    /// Offers this rank's data to the other ranks, and agrees with them on the first of `terms` that all offers allow.
    fn agree<'a>(&mut self, data: Data<'a>, terms: &[AccessTerms]) -> Result<Agreed<'a>, Failure> {
        let Some(regions) = self.regions.take() else {
            return Ok(Agreed::Slots(data));
        };
        let exposed = Exposed::of(regions.registry(), data);
        let outcome = regions.agree(exposed, terms, self);
        self.regions = Some(regions);
        Ok(match outcome? {
            AccessOutcome::Declined(exposed) => Agreed::Slots(exposed.take_back()),
            AccessOutcome::Agreed(number, access) => Agreed::Direct(number, access),
        })
    }

    fn combine_shares<'a>(
        &mut self,
        mut access: DirectAccess<'_>,
        by: Combination,
    ) -> Result<Option<Collective<'a>>, Failure> {
        for piece in pieces(access.share()) {
            let shares = access.shares(piece).into_iter();
            let mut shares: Vec<&mut [u8]> = shares.map(written).collect();
            arithmetic::combine_everywhere(by.op, by.dtype, &mut shares);
            self.check_stop()?;
        }
        self.end(access)
    }

    fn combine_shares_into_root<'a>(
        &mut self,
        mut access: DirectAccess<'_>,
        by: Combination,
        root: usize,
    ) -> Result<Option<Collective<'a>>, Failure> {
        for piece in pieces(access.share()) {
            let mut shares = access.shares(piece);
            let out = written(shares.remove(root));
            let others: Vec<&[u8]> = shares.iter().map(Data::bytes).collect();
            arithmetic::combine_in_place(by.op, by.dtype, out, root, &others, None);
            self.check_stop()?;
        }
        self.end(access)
    }

    fn combine_part<'a>(
        &mut self,
        access: DirectAccess<'_>,
        output: &mut [u8],
        by: Combination,
    ) -> Result<Option<Collective<'a>>, Failure> {
        let Position { rank, size, .. } = self.position;
        let start = rank * output.len();
        for piece in pieces(0..output.len()) {
            let from = start + piece.start..start + piece.end;
            with_inputs(
                size,
                |peer| &access.bytes_of(peer)[from.clone()],
                |inputs| {
                    arithmetic::combine(by.op, by.dtype, inputs, &mut output[piece.clone()], None)
                },
            );
            self.check_stop()?;
        }
        self.end(access)
    }

    fn copy_shares<'a>(
        &mut self,
        mut access: DirectAccess<'_>,
        root: usize,
    ) -> Result<Option<Collective<'a>>, Failure> {
        let result_len = access.share().len() * self.position.size;
        for piece in pieces(access.share()) {
            let mut shares = access.shares(piece);
            let from = shares.remove(root);
            for to in shares {
                copy_result(written(to), from.bytes(), result_len);
            }
            self.check_stop()?;
        }
        self.end(access)
    }

    fn take_parts<'a>(
        &mut self,
        access: DirectAccess<'_>,
        mut outputs: Outputs<'_>,
    ) -> Result<Option<Collective<'a>>, Failure> {
        let Position { rank, size, .. } = self.position;
        for peer in std::iter::once(rank).chain(self.others()) {
            let to = outputs.part_mut(peer);
            let len = to.len();
            let from = &access.bytes_of(peer)[rank * len..][..len];
            self.take(to, from, len * size)?;
        }
        self.end(access)
    }

    /// Copies bytes of a result of `result_len` bytes, piece by piece.
    fn take(&mut self, to: &mut [u8], from: &[u8], result_len: usize) -> Result<(), Failure> {
        for piece in pieces(0..to.len()) {
            copy_result(&mut to[piece.clone()], &from[piece], result_len);
            self.check_stop()?;
        }
        Ok(())
    }

    /// Fails if the deadline has passed or the group was stopped.
    fn check_stop(&mut self) -> Result<(), Failure> {
        Ok(self.policy.check()?)
    }

    /// Ends the ranks' access to each other's memory. Returns `None`, since no collective is left to run.
    fn end<'a>(&mut self, access: DirectAccess<'_>) -> Result<Option<Collective<'a>>, Failure> {
        access.end(self).map(|()| None)
    }
}

/// The ranks' decision between registered buffers and slots.
enum Agreed<'a> {
    /// The ranks access each other's memory, by the terms with this index.
    Direct(usize, DirectAccess<'a>),
    /// The ranks use slots; the data is unchanged.
    Slots(Data<'a>),
}

/// Returns the bytes of data that the terms allow this rank to write.
fn written(data: Data<'_>) -> &mut [u8] {
    match data {
        Data::Write(bytes) => bytes,
        Data::Read(_) => unreachable!("a buffer to read, but the terms let ranks write"),
    }
}

/// Returns the bytes of data that is only read.
fn read(data: Data<'_>) -> &[u8] {
    match data {
        Data::Read(bytes) => bytes,
        Data::Write(bytes) => bytes,
    }
}

/// Cuts a range into pieces. If the range begins at a cache line, the cuts are between cache lines, and so
/// between elements.
fn pieces(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let count = range.len().div_ceil(PIECE);
    (0..count).map(move |index| {
        let start = range.start + index * PIECE;
        start..(start + PIECE).min(range.end)
    })
}
