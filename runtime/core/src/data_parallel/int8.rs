//! Sums whose elements travel as 8 bits: [`ProcessGroup::all_reduce_int8`] and [`Int8CompressHook`].
//!
//! Each rank sums one part of the elements: an `all_to_all` of quantized parts, a sum in `f32`, and an `all_gather` of
//! the quantized sums. So each element crosses the network twice in one byte, instead of twice in four, whatever the
//! number of ranks. PyTorch's quantization hooks (`torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py`)
//! gather the quantized elements of all ranks on each rank: what a rank receives then grows with the number of ranks.

use super::gradient::Gradient;
use super::hook::{Averaging, Bucket, CommHook};
use crate::group::process_group::ProcessGroup;
use crate::group::work::Work;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::ReduceOp;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// How many elements share a scale: the scales add 1.6 % to what is sent.
const BLOCK: usize = 256;
/// The largest magnitude of a quantized element.
const MAX_QUANTIZED: f32 = 127.0;
const SCALE_BYTES: usize = size_of::<f32>();

/// How elements are divided among ranks; the division is the same on every rank.
#[derive(Clone, Copy, Debug)]
struct Parts {
    len: usize,
    ranks: usize,
    /// How many elements a part has; the last parts have fewer, or none.
    part_len: usize,
}

impl Parts {
    fn new(len: usize, ranks: u32) -> Self {
        let ranks = ranks as usize;
        Self {
            len,
            ranks,
            part_len: len.div_ceil(ranks),
        }
    }

    /// The elements that a rank sums.
    fn range(&self, rank: usize) -> Range<usize> {
        let begin = (rank * self.part_len).min(self.len);
        begin..(begin + self.part_len).min(self.len)
    }

    /// The length of the message with one part, in bytes: its scales, then its elements. The same for all parts.
    fn message_len(&self) -> usize {
        self.part_len.div_ceil(BLOCK) * SCALE_BYTES + self.part_len
    }

    /// Quantizes `values`, the elements of one part, into `message`, and leaves the rounding errors in `values`. A
    /// block with a value that is not finite gets NaN as its scale, so that all its elements are read as NaN; zeros are
    /// left for it.
    fn quantize(&self, values: &mut [f32], message: &mut [u8]) {
        let scales = self.part_len.div_ceil(BLOCK) * SCALE_BYTES;
        let (scales, elements) = message.split_at_mut(scales);
        let blocks = values.chunks_mut(BLOCK).zip(elements.chunks_mut(BLOCK));
        for ((values, elements), scale_bytes) in blocks.zip(scales.chunks_exact_mut(SCALE_BYTES)) {
            let is_finite = values.iter().all(|value| value.is_finite());
            let magnitudes = values.iter().map(|value| value.abs());
            let largest = magnitudes.fold(0.0f32, f32::max);
            let scale = if is_finite {
                largest / MAX_QUANTIZED
            } else {
                f32::NAN
            };
            scale_bytes.copy_from_slice(&scale.to_le_bytes());
            for (value, element) in values.iter_mut().zip(elements) {
                // The conversion saturates, and makes 0 of NaN.
                let quantized = (*value / scale)
                    .round()
                    .clamp(-MAX_QUANTIZED, MAX_QUANTIZED) as i8;
                *element = quantized.cast_unsigned();
                *value = match is_finite {
                    true => *value - f32::from(quantized) * scale,
                    false => 0.0,
                };
            }
        }
    }

    /// Calls `each` with the position and the value of each of the first `count` elements of a message with one part.
    fn dequantize(&self, message: &[u8], count: usize, mut each: impl FnMut(usize, f32)) {
        let scales = self.part_len.div_ceil(BLOCK) * SCALE_BYTES;
        let (scales, elements) = message.split_at(scales);
        let (scales, _) = scales.as_chunks::<SCALE_BYTES>();
        for (index, &element) in elements.iter().take(count).enumerate() {
            let scale = f32::from_le_bytes(scales[index / BLOCK]);
            each(index, f32::from(element.cast_signed()) * scale);
        }
    }
}

/// The rounding errors of one rank, which are added to the values that this rank quantizes next.
#[derive(Default)]
struct RoundingErrors {
    /// The rounding errors of this rank's own elements.
    elements: Vec<f32>,
    /// The rounding errors of the sums of this rank's part.
    sums: Vec<f32>,
    /// This rank in the group and the group's size, by which the part of `sums` is chosen.
    place: (u32, u32),
}

/// The first half: own elements, quantized and sent to the ranks that sum them.
struct Scattered {
    parts: Parts,
    work: Work<(Vec<u8>, Vec<u8>)>,
}

/// Quantizes `values` and sends each part to the rank that sums it. Leaves the rounding errors in `values`.
#[track_caller]
fn scatter(group: &ProcessGroup, values: &mut [f32]) -> Result<Scattered> {
    let parts = Parts::new(values.len(), group.size());
    let mut messages = vec![0; parts.ranks * parts.message_len()];
    for (rank, message) in messages
        .chunks_exact_mut(parts.message_len().max(1))
        .enumerate()
    {
        parts.quantize(&mut values[parts.range(rank)], message);
    }
    let received = vec![0; messages.len()];
    let work = group.all_to_all_single_async(messages, received)?;
    Ok(Scattered { parts, work })
}

/// The second half: waits for the parts of all ranks, and adds `factor` times their sum to `lost`, which holds the
/// rounding errors of this rank's last sums. Sends the quantized result to all ranks, leaves the new rounding errors in
/// `lost`, and calls `each` with the position and the value of each element of all results.
fn gather(
    group: &ProcessGroup,
    scattered: Scattered,
    factor: f32,
    lost: &mut Vec<f32>,
    mut each: impl FnMut(usize, f32),
) -> Result<()> {
    let Scattered { parts, work } = scattered;
    let (mut messages, received) = work.wait()?;
    if messages.is_empty() {
        return Ok(());
    }
    let own_part = parts.range(group.rank() as usize);
    let mut sums = vec![0.0f32; own_part.len()];
    // The parts are added in the order of the ranks. Only this rank computes these sums, so all ranks get the same
    // bits.
    for message in received.chunks_exact(parts.message_len()) {
        parts.dequantize(message, own_part.len(), |index, value| sums[index] += value);
    }
    lost.resize(own_part.len(), 0.0);
    for (lost, sum) in lost.iter_mut().zip(&sums) {
        *lost += sum * factor;
    }
    let mut message = vec![0; parts.message_len()];
    parts.quantize(lost, &mut message);
    group.all_gather_single(&message, &mut messages)?;
    for (rank, message) in messages.chunks_exact(parts.message_len()).enumerate() {
        let range = parts.range(rank);
        parts.dequantize(message, range.len(), |index, value| {
            each(range.start + index, value)
        });
    }
    Ok(())
}

impl ProcessGroup {
    /// Every rank's `buffer` ends as the sum or the average of all ranks' buffers. Each element is sent in 8 bits, so
    /// this sends a quarter of the bytes of an `all_reduce` of `f32`. All ranks get the same bits.
    ///
    /// Each 256 elements share a scale, 1/127 of the largest magnitude among them. Each rank's elements, and then their
    /// sums, are rounded to multiples of that scale. So a sum is off by at most 1/254 of the largest element that
    /// shares its scale on each rank, summed over the ranks, plus 1/254 of the largest sum. If one of the elements that
    /// share a scale is infinite or NaN on any rank, all of them end as NaN. Records show an `all_to_all_single` and an
    /// `all_gather_single` of bytes.
    ///
    /// # Errors
    /// `InvalidArgument` if `op` is neither the sum nor the average, before anything is sent. Otherwise those of the
    /// two operations.
    ///
    /// # Blocking
    /// Until all ranks have called it and the result is there; each of the two operations has the handle's time-out.
    #[track_caller]
    pub fn all_reduce_int8<T: Gradient>(&self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        let factor = match op {
            ReduceOp::Sum => 1.0,
            ReduceOp::Avg => 1.0 / self.size() as f32,
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("all_reduce_int8 computes the sum or the average, not {other}"),
                ));
            }
        };
        let mut values: Vec<f32> = buffer.iter().map(|&value| value.to_f32()).collect();
        let scattered = scatter(self, &mut values)?;
        gather(self, scattered, factor, &mut Vec::new(), |index, value| {
            buffer[index] = T::from_f32(value);
        })
    }
}

/// Sends gradients in 8 bits, as [`ProcessGroup::all_reduce_int8`] does: a quarter of the bytes of `f32`.
///
/// The rounding errors of a step are added to the next step's gradients, each on the rank where it arose (error
/// feedback: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
/// of Speech DNNs", Interspeech 2014). So the sum over many steps is close to the sum of the averages. The hook keeps 4
/// bytes for each element, and 4 more for each element of this rank's part.
///
/// A hook belongs to one reducer. The [`Averaging`] of a bucket waits for the first operation, and issues the second,
/// when the reducer calls it at the end of the step.
#[derive(Default)]
pub struct Int8CompressHook {
    /// This rank's rounding errors, by bucket.
    lost: Arc<Mutex<HashMap<usize, RoundingErrors>>>,
}

impl<T: Gradient> CommHook<T> for Int8CompressHook {
    fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>> {
        let Bucket {
            index,
            mut gradients,
            ..
        } = bucket;
        let mut lost_of_all = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = lost_of_all.entry(index).or_default();
        lost.elements.resize(gradients.len(), 0.0);
        for (lost, gradient) in lost.elements.iter_mut().zip(&gradients) {
            *lost += gradient.to_f32();
        }
        let scattered = scatter(group, &mut lost.elements)?;
        drop(lost_of_all);
        let (group, lost) = (group.clone(), Arc::clone(&self.lost));
        let factor = 1.0 / group.size() as f32;
        Ok(Box::new(move || {
            let mut lost = lost.lock().unwrap_or_else(PoisonError::into_inner);
            let lost = lost.entry(index).or_default();
            let place = (group.rank(), group.size());
            if std::mem::replace(&mut lost.place, place) != place {
                lost.sums.clear();
            }
            gather(&group, scattered, factor, &mut lost.sums, |index, value| {
                gradients[index] = T::from_f32(value);
            })?;
            Ok(gradients)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn quantized_values_and_rounding_errors_add_up_to_the_values(
            values in proptest::collection::vec(-1e6f32..1e6, 0..700),
            ranks in 1u32..5,
        ) {
            let parts = Parts::new(values.len(), ranks);
            let mut covered = 0;
            for rank in 0..parts.ranks {
                let range = parts.range(rank);
                prop_assert_eq!(range.start, covered);
                covered = range.end;
                let mut lost = values[range.clone()].to_vec();
                let mut message = vec![0xFF; parts.message_len()];
                parts.quantize(&mut lost, &mut message);
                let mut read = Vec::new();
                parts.dequantize(&message, range.len(), |_, value| read.push(value));
                prop_assert_eq!(read.len(), range.len());
                let part = &values[range];
                for (index, (read, value)) in read.iter().zip(part).enumerate() {
                    let begin = index / BLOCK * BLOCK;
                    let block = &part[begin..(begin + BLOCK).min(part.len())];
                    let magnitudes = block.iter().map(|value| value.abs());
                    let largest = magnitudes.fold(0.0f32, f32::max);
                    prop_assert!((read - value).abs() <= largest / 254.0 * 1.001);
                    prop_assert!((read + lost[index] - value).abs() <= largest * 1e-6);
                }
            }
            prop_assert_eq!(covered, values.len());
        }
    }

    #[test]
    fn a_block_with_a_value_that_is_not_finite_is_nan() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0; BLOCK + 3];
            values[7] = bad;
            let parts = Parts::new(values.len(), 1);
            let mut message = vec![0; parts.message_len()];
            parts.quantize(&mut values, &mut message);
            let mut read = Vec::new();
            parts.dequantize(&message, values.len(), |_, value| read.push(value));
            assert!(read[..BLOCK].iter().all(|value| value.is_nan()));
            assert_eq!(read[BLOCK..], [1.0; 3]);
            let are_finite = values.iter().all(|value| value.is_finite());
            assert!(are_finite, "{values:?}");
        }
    }
}
