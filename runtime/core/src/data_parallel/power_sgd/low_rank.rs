//! [`LowRank`]: the state of one compressed matrix.

use super::super::gradient::Gradient;

/// Added to the norm of a column before the column is divided by it, so that a column of zeros stays zero.
const TINY: f32 = 1e-8;

/// The state of one compressed matrix M, of `rows` by `columns` elements.
pub(super) struct LowRank {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The part of the gradients so far that compression has lost, which later steps send. From
    /// [`project`](Self::project) to [`restore`](Self::restore) it is M.
    error: Vec<f32>,
    /// `columns` by rank: the right factor of the step before.
    pub(super) q: Vec<f32>,
    /// `rows` by rank: the left factor.
    pub(super) p: Vec<f32>,
}

impl LowRank {
    /// The state of a matrix before its first step: nothing is lost, and Q is that of [`restart`](Self::restart).
    pub(super) fn new(number: usize, rows: usize, columns: usize, rank: usize) -> Self {
        let mut state = Self {
            rows,
            columns,
            error: vec![0.0; rows * columns],
            q: vec![0.0; columns * rank],
            p: vec![0.0; rows * rank],
        };
        state.restart(number);
        state
    }

    /// Makes Q random: the same on every rank, and another one for each `number` of a matrix.
    pub(super) fn restart(&mut self, number: usize) {
        let mut random = 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(number as u64 + 1);
        self.q.fill_with(|| {
            // SplitMix64 (Steele, Lea, Flood, 2014).
            random = random.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = random;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        });
    }

    /// Adds the gradient to what was not sent, which gives M, and computes P = MQ. A gradient of fewer elements than M
    /// counts as followed by zeros.
    pub(super) fn project<T: Gradient>(&mut self, gradient: &[T], rank: usize) {
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
    pub(super) fn project_back(&mut self, p: &[f32], rank: usize) {
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

    /// Takes the averaged Q, writes the beginning of PQᵀ to `gradient`, and leaves in `error` what PQᵀ lacks.
    pub(super) fn restore<T: Gradient>(&mut self, q: &[f32], gradient: &mut [T], rank: usize) {
        self.q.copy_from_slice(q);
        for (row, p) in self.p.chunks_exact(rank).enumerate() {
            for (column, q) in self.q.chunks_exact(rank).enumerate() {
                let index = row * self.columns + column;
                let sent: f32 = p.iter().zip(q).map(|(p, q)| p * q).sum();
                if let Some(gradient) = gradient.get_mut(index) {
                    *gradient = T::from_f32(sent);
                }
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
}
