//! [`PowerSgdHook`]: gradients compressed to matrices of low rank.

use super::consistency::Parameter;
use super::gradient::Gradient;
use super::hook::{Averaging, Bucket, CommHook};
use crate::group::process_group::ProcessGroup;
use crate::group::work::Work;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::ReduceOp;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A matrix is compressed only if both factors together have at most one `MIN_GAIN`-th of its elements.
const MIN_GAIN: usize = 2;
/// Added to the norm of a column before the column is divided by it, so that a column of zeros stays zero.
const TINY: f32 = 1e-8;

/// Sends the gradient of a parameter of two or more dimensions, a matrix M, as two thin matrices, each averaged over
/// the ranks: P = MQ, whose columns are then made orthonormal, and Q = MᵀP. The result is PQᵀ. Other parameters, and
/// those that this would not make half as large, are averaged as they are.
///
/// What the compression loses is added to the next step's gradient on each rank (error feedback), and Q is kept as the
/// start of the next step (warm start). So the result is not the average of a step, but the sum over many steps comes
/// close to that of the averages. The method is that of Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank
/// Gradient Compression for Distributed Optimization", NeurIPS 2019. Matrices are computed in `f32`. The hook keeps one
/// `f32` for each element of a compressed parameter, and its two factors.
///
/// A hook belongs to one reducer. The [`Averaging`] of a bucket issues the operation on Q, and waits for it, when the
/// reducer calls it at the end of the step.
pub struct PowerSgdHook {
    /// The rank of the matrices, not of the process.
    rank: usize,
    /// How many steps are averaged without compression.
    plain_steps: u64,
    /// The number of the current step, from 1.
    step: u64,
    /// The number of the bucket that was passed last.
    last_bucket: usize,
    /// The rows and columns of each parameter; `None` if it is not compressed.
    shapes: Vec<Option<(usize, usize)>>,
    /// The state of each parameter that was compressed so far, by its position.
    states: Arc<Mutex<HashMap<usize, LowRank>>>,
}

/// The state of one compressed parameter.
struct LowRank {
    rows: usize,
    columns: usize,
    /// The part of the gradients so far that compression has lost, to be sent in later steps.
    error: Vec<f32>,
    /// `columns` by rank: the right factor of the step before.
    q: Vec<f32>,
    /// `rows` by rank: the left factor.
    p: Vec<f32>,
}

impl PowerSgdHook {
    /// Compresses matrices to the matrix rank `rank` (1 to 4 in most uses) after `start` steps, in which gradients are
    /// averaged as they are. `parameters` are those of the reducer.
    ///
    /// # Errors
    /// `InvalidArgument` if `rank` is 0, or a shape does not fit in memory.
    pub fn new(rank: usize, start: u64, parameters: &[Parameter]) -> Result<Self> {
        let refuse = |message| Err(Error::new(ErrorKind::InvalidArgument, message));
        if rank == 0 {
            return refuse("a matrix cannot be compressed to rank 0".to_owned());
        }
        let mut shapes = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let Some(len) = parameter.len() else {
                return refuse(format!(
                    "parameter {} does not fit in memory",
                    parameter.name
                ));
            };
            let rows = match parameter.shape[..] {
                [rows, _, ..] if len > 0 => rows as usize,
                _ => {
                    shapes.push(None);
                    continue;
                }
            };
            let columns = len / rows;
            let sent = (rows + columns).saturating_mul(rank);
            let is_worth_it = sent.saturating_mul(MIN_GAIN) <= len;
            shapes.push(is_worth_it.then_some((rows, columns)));
        }
        Ok(Self {
            rank,
            plain_steps: start,
            step: 0,
            last_bucket: usize::MAX,
            shapes,
            states: Arc::default(),
        })
    }

    /// How many of the parameters the hook compresses.
    pub fn compressed(&self) -> usize {
        self.shapes.iter().flatten().count()
    }
}

impl LowRank {
    /// The state of a parameter before its first step: nothing is lost, and Q is random.
    fn new(parameter: usize, rows: usize, columns: usize, rank: usize) -> Self {
        // The same numbers on every rank, and different ones for each parameter.
        let mut random = 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(parameter as u64 + 1);
        let start = (0..columns * rank).map(|_| {
            // SplitMix64 (Steele, Lea, Flood, 2014).
            random = random.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = random;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        });
        Self {
            rows,
            columns,
            error: vec![0.0; rows * columns],
            q: start.collect(),
            p: vec![0.0; rows * rank],
        }
    }

    /// Adds the gradient to what was not sent, and computes P = MQ.
    fn project<T: Gradient>(&mut self, gradient: &[T], rank: usize) {
        for (element, gradient) in self.error.iter_mut().zip(gradient) {
            *element += gradient.to_f32();
        }
        self.p.fill(0.0);
        let rows = self.error.chunks_exact(self.columns);
        for (row, p) in rows.zip(self.p.chunks_exact_mut(rank)) {
            for (element, q) in row.iter().zip(self.q.chunks_exact(rank)) {
                p.iter_mut().zip(q).for_each(|(p, q)| *p += element * q);
            }
        }
    }

    /// Takes the averaged P, makes its columns orthonormal, and computes Q = MᵀP.
    fn project_back(&mut self, p: &[f32], rank: usize) {
        self.p.copy_from_slice(p);
        orthonormalize(&mut self.p, rank);
        self.q.fill(0.0);
        let rows = self.error.chunks_exact(self.columns);
        for (row, p) in rows.zip(self.p.chunks_exact(rank)) {
            for (element, q) in row.iter().zip(self.q.chunks_exact_mut(rank)) {
                q.iter_mut().zip(p).for_each(|(q, p)| *q += element * p);
            }
        }
    }

    /// Takes the averaged Q, writes PQᵀ to `gradient`, and leaves in `error` what PQᵀ lacks.
    fn restore<T: Gradient>(&mut self, q: &[f32], gradient: &mut [T], rank: usize) {
        self.q.copy_from_slice(q);
        for (row, p) in self.p.chunks_exact(rank).enumerate() {
            for (column, q) in self.q.chunks_exact(rank).enumerate() {
                let index = row * self.columns + column;
                let sent: f32 = p.iter().zip(q).map(|(p, q)| p * q).sum();
                gradient[index] = T::from_f32(sent);
                self.error[index] -= sent;
            }
        }
    }
}

/// Makes the columns of a matrix of `rank` columns orthonormal, by the modified Gram-Schmidt method.
fn orthonormalize(matrix: &mut [f32], rank: usize) {
    let rows = matrix.len() / rank;
    for column in 0..rank {
        for before in 0..column {
            let dot: f32 = (0..rows)
                .map(|row| matrix[row * rank + column] * matrix[row * rank + before])
                .sum();
            for row in 0..rows {
                matrix[row * rank + column] -= dot * matrix[row * rank + before];
            }
        }
        let squares: f32 = (0..rows)
            .map(|row| matrix[row * rank + column].powi(2))
            .sum();
        let length = squares.sqrt() + TINY;
        for row in 0..rows {
            matrix[row * rank + column] /= length;
        }
    }
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
        // A bucket that does not come after the one before begins a step. It need not be bucket 0: that may be one of a
        // sparse parameter, which is not passed to the hook.
        if bucket.index <= self.last_bucket {
            self.step += 1;
        }
        self.last_bucket = bucket.index;
        if self.step <= self.plain_steps {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_orthonormal() {
        let mut matrix: Vec<f32> = (0..12)
            .map(|index| ((index * 7) % 5) as f32 - 1.0)
            .collect();
        orthonormalize(&mut matrix, 2);
        let dot = |a: usize, b: usize| -> f32 { matrix.chunks(2).map(|row| row[a] * row[b]).sum() };
        assert!(dot(0, 1).abs() < 1e-5);
        assert!((dot(0, 0) - 1.0).abs() < 1e-5 && (dot(1, 1) - 1.0).abs() < 1e-5);
    }

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
