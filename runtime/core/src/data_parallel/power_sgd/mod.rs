//! [`PowerSgdHook`] and [`BatchedPowerSgdHook`]: gradients compressed to matrices of low rank.

mod batched;
mod low_rank;

pub use batched::BatchedPowerSgdHook;

use super::consistency::Parameter;
use super::gradient::Gradient;
use super::hook::{Averaging, Bucket, CommHook, StepCount};
use crate::group::process_group::ProcessGroup;
use crate::group::work::Work;
use crate::op::error::{Error, ErrorKind, Result};
use low_rank::LowRank;
use rcomm_recorder::model::ReduceOp;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A matrix is compressed only if both factors together have at most one `MIN_GAIN`-th of its elements.
const MIN_GAIN: usize = 2;

/// Sends the gradient of a parameter of two or more dimensions, a matrix M, as two thin matrices, each averaged over
/// the ranks: P = MQ, whose columns are then made orthonormal, and Q = MᵀP. The result is PQᵀ. Other parameters, and
/// those that this would not make half as large, are averaged as they are.
///
/// What the compression loses is added to the next step's gradient on each rank (error feedback), and Q is kept as the
/// start of the next step (warm start). So the result is not the average of a step, but the sum over many steps is
/// close to the sum of the averages. The method is that of Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank
/// Gradient Compression for Distributed Optimization", NeurIPS 2019. Matrices are computed in `f32`. The hook keeps one
/// `f32` for each element of a compressed parameter, and its two factors.
///
/// A hook belongs to one reducer. The [`Averaging`] of a bucket issues the operation on Q, and waits for it, when the
/// reducer calls it at the end of the step. After [`Reducer::regroup`](super::Reducer::regroup) steps are counted from
/// 0, and Q starts over; what was lost is kept.
pub struct PowerSgdHook {
    /// The rank of the matrices, not of the process.
    rank: usize,
    /// How many steps are averaged without compression.
    plain_steps: u64,
    steps: StepCount,
    /// The rows and columns of each parameter; `None` if it is not compressed.
    shapes: Vec<Option<(usize, usize)>>,
    /// The state of each parameter that was compressed so far, by its position.
    states: Arc<Mutex<HashMap<usize, LowRank>>>,
}

impl PowerSgdHook {
    /// Compresses matrices to the matrix rank `rank` (1 to 4 in most uses) after `start` steps, in which gradients are
    /// averaged as they are. `parameters` are those of the reducer.
    ///
    /// # Errors
    /// `InvalidArgument` if `rank` is 0, or a shape does not fit in memory.
    pub fn new(rank: usize, start: u64, parameters: &[Parameter]) -> Result<Self> {
        check_rank(rank)?;
        let mut shapes = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let Some(len) = parameter.len() else {
                let message = format!("parameter {} does not fit in memory", parameter.name);
                return Err(Error::new(ErrorKind::InvalidArgument, message));
            };
            let rows = match parameter.shape[..] {
                [rows, _, ..] if len > 0 => rows as usize,
                _ => {
                    shapes.push(None);
                    continue;
                }
            };
            let columns = len / rows;
            shapes.push(is_worth_it(rows, columns, rank, len).then_some((rows, columns)));
        }
        Ok(Self {
            rank,
            plain_steps: start,
            steps: StepCount::default(),
            shapes,
            states: Arc::default(),
        })
    }

    /// How many of the parameters the hook compresses.
    pub fn compressed(&self) -> usize {
        self.shapes.iter().flatten().count()
    }
}

/// Refuses the rank 0 of a matrix.
fn check_rank(rank: usize) -> Result<()> {
    if rank == 0 {
        let message = "a matrix cannot be compressed to rank 0";
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    Ok(())
}

/// Whether two factors of this rank are so much smaller than `len` elements that sending them is worth it. Without
/// elements there is no matrix.
fn is_worth_it(rows: usize, columns: usize, rank: usize, len: usize) -> bool {
    let sent = (rows + columns).saturating_mul(rank);
    len > 0 && sent.saturating_mul(MIN_GAIN) <= len
}

/// Takes the first `len` elements out of `values`, or all of them if there are fewer.
fn split_front<'a, T>(values: &mut &'a [T], len: usize) -> &'a [T] {
    let (front, rest) = values.split_at(len.min(values.len()));
    *values = rest;
    front
}

/// Starts to average `values` over the ranks. Without values no operation is issued, and the result is `None`: on all
/// ranks, since all have the same parameters.
fn average<T: Gradient>(group: &ProcessGroup, values: Vec<T>) -> Result<Option<Work<Vec<T>>>> {
    if values.is_empty() {
        return Ok(None);
    }
    group.all_reduce_async(values, ReduceOp::Avg).map(Some)
}

impl<T: Gradient> CommHook<T> for PowerSgdHook {
    fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>> {
        if self.steps.count(bucket.index) <= self.plain_steps {
            let work = group.all_reduce_async(bucket.gradients, ReduceOp::Avg)?;
            return Ok(Box::new(move || work.wait()));
        }
        let rank = self.rank;
        let Bucket {
            parameters,
            mut gradients,
            ..
        } = bucket;
        let shapes: Vec<Option<(usize, usize)>> = parameters
            .iter()
            .map(|&(parameter, _)| self.shapes.get(parameter).copied().flatten())
            .collect();
        let (mut plain, mut left) = (Vec::new(), Vec::new());
        let mut rest = gradients.as_slice();
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        for (&(parameter, len), shape) in parameters.iter().zip(&shapes) {
            let gradient = split_front(&mut rest, len);
            if let Some((rows, columns)) = *shape {
                let state = states
                    .entry(parameter)
                    .or_insert_with(|| LowRank::new(parameter, rows, columns, rank));
                state.project(gradient, rank);
                left.extend_from_slice(&state.p);
            } else {
                plain.extend_from_slice(gradient);
            }
        }
        drop(states);
        let plain = average(group, plain)?;
        let left = average(group, left)?;
        let (group, states) = (group.clone(), self.states.clone());
        Ok(Box::new(move || {
            let left = left.map_or(Ok(Vec::new()), Work::wait)?;
            let mut states = states.lock().unwrap_or_else(PoisonError::into_inner);
            let mut left = left.as_slice();
            let mut right = Vec::new();
            for &(parameter, _) in parameters.iter() {
                if let Some(state) = states.get_mut(&parameter) {
                    let p = split_front(&mut left, state.rows * rank);
                    state.project_back(p, rank);
                    right.extend_from_slice(&state.q);
                }
            }
            let right = average(&group, right)?.map_or(Ok(Vec::new()), Work::wait)?;
            let plain = plain.map_or(Ok(Vec::new()), Work::wait)?;
            let (mut right, mut plain) = (right.as_slice(), plain.as_slice());
            let mut rest = gradients.as_mut_slice();
            for &(parameter, len) in parameters.iter() {
                let gradient;
                (gradient, rest) = rest.split_at_mut(len);
                match states.get_mut(&parameter) {
                    Some(state) => {
                        let q = split_front(&mut right, state.columns * rank);
                        state.restore(q, gradient, rank);
                    }
                    None => gradient.copy_from_slice(split_front(&mut plain, len)),
                }
            }
            Ok(gradients)
        }))
    }

    fn allows_rebuild(&self) -> bool {
        true
    }

    fn regrouped(&mut self) -> Result<()> {
        self.steps = StepCount::default();
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        for (&parameter, state) in states.iter_mut() {
            state.restart(parameter);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_matrices_that_become_half_as_large_are_compressed() {
        let shapes: [&[u64]; 5] = [&[100, 100], &[100], &[2, 2], &[64, 3, 3, 3], &[0, 9]];
        let parameters: Vec<Parameter> = shapes
            .iter()
            .map(|shape| Parameter::new("p", shape))
            .collect();
        let hook = PowerSgdHook::new(1, 0, &parameters).unwrap();
        assert_eq!(
            hook.shapes,
            [Some((100, 100)), None, None, Some((64, 27)), None]
        );
        assert!(PowerSgdHook::new(0, 0, &parameters).is_err());
    }
}
