//! Reductions in several steps: partial results that travel from one host to the next.
//!
//! A reduction that stops after some ranks and continues elsewhere must give the same bits as one that does not
//! stop. So a partial result has the form that [`combine`](super::combine) keeps in registers: narrow floats are held
//! as `f32` and rounded once, at the end; an average is held as a sum and divided once.

use super::fold::{self, Conversion, FoldJob};
use super::{Level, combine};
use rcomm_recorder::model::{DType, ReduceOp};

/// The form of a partial result. Lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Partial {
    op: ReduceOp,
    dtype: DType,
}

impl Partial {
    /// The form for this reduction of elements of this type.
    pub fn new(op: ReduceOp, dtype: DType) -> Self {
        Self { op, dtype }
    }

    fn is_narrow(self) -> bool {
        matches!(
            self.dtype,
            DType::F16 | DType::Bf16 | DType::F8E4M3 | DType::F8E5M2
        )
    }

    /// The size in bytes of a partial result of `len` bytes of elements.
    pub fn len(self, len: usize) -> usize {
        match self.dtype.size() {
            Some(size) if self.is_narrow() => len / size * size_of::<f32>(),
            _ => len,
        }
    }

    /// Combines `before`, which is `None` in the first step, and then `inputs` in their order into `after`.
    ///
    /// `scratch` keeps its memory from call to call.
    ///
    /// # Panics
    /// If the lengths do not match, or there is nothing to combine.
    pub fn step(
        self,
        before: Option<&[u8]>,
        inputs: &[&[u8]],
        after: &mut [u8],
        scratch: &mut Vec<u8>,
    ) {
        let op = match self.op {
            ReduceOp::Avg => ReduceOp::Sum,
            op => op,
        };
        let mut terms: Vec<&[u8]> = Vec::with_capacity(inputs.len() + 1);
        terms.extend(before);
        if !self.is_narrow() {
            terms.extend(inputs);
            combine(op, self.dtype, &terms, after, None);
            return;
        }
        let width = after.len();
        scratch.resize(width * inputs.len(), 0);
        if width > 0 {
            for (wide, input) in scratch.chunks_exact_mut(width).zip(inputs) {
                self.convert(Conversion::Widen, input, wide);
            }
            terms.extend(scratch.chunks_exact(width));
            combine(op, DType::F32, &terms, after, None);
        }
    }

    /// Converts the partial result of `ranks` inputs into the final one. If the reduction is an average, `partial` is
    /// overwritten by the quotients.
    ///
    /// # Panics
    /// If the length of `out` does not match the number of elements in `partial`.
    pub fn finish(self, partial: &mut [u8], ranks: usize, out: &mut [u8]) {
        let dtype = if self.is_narrow() {
            DType::F32
        } else {
            self.dtype
        };
        if self.op == ReduceOp::Avg {
            divide(dtype, partial, ranks);
        }
        if self.is_narrow() {
            self.convert(Conversion::Narrow, partial, out);
        } else {
            out.copy_from_slice(partial);
        }
    }

    /// Converts elements between their narrow type and `f32`.
    ///
    /// # Panics
    /// If `from` and `to` hold different numbers of elements.
    fn convert(self, conversion: Conversion, from: &[u8], to: &mut [u8]) {
        let (narrow, wide) = match conversion {
            Conversion::Widen => (from.len(), to.len()),
            Conversion::Narrow => (to.len(), from.len()),
        };
        let size = self.dtype.size().unwrap_or(1);
        assert_eq!(
            self.len(narrow),
            wide,
            "the two sides differ in their number of elements"
        );
        // SAFETY: `from` and `to` are borrowed for reading and writing, so they do not overlap. The
        // assertion above has both hold `narrow / size` elements, one of the narrow type and one of `f32`.
        // The level is this processor's (`detect`).
        unsafe {
            fold::convert(
                Level::detect(),
                conversion,
                self.dtype,
                from.as_ptr(),
                to.as_mut_ptr(),
                narrow / size,
            );
        }
    }
}

/// Divides every element by `terms`, as an average does.
fn divide(dtype: DType, data: &mut [u8], terms: usize) {
    let Some(size) = dtype.size() else { return };
    // One pointer for reading and writing, since a reference would promise exclusive access.
    let start = data.as_mut_ptr();
    let job = FoldJob {
        sources: &[start.cast_const()],
        out: start,
        more_outs: &[],
        count: data.len() / size,
        terms,
    };
    // SAFETY: the one source is the output itself, by the same pointer, and `count` elements lie in `data`,
    // which is borrowed for writing. The level is this processor's (`detect`).
    unsafe { fold::run(Level::detect(), ReduceOp::Avg, dtype, &job) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arithmetic::is_supported;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn steps_give_the_bits_of_one_reduction(
            noise in proptest::collection::vec(any::<u8>(), 16 * 99),
            cut in 1..4usize,
        ) {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL.iter().filter(|&&op| is_supported(op, dtype)) {
                    let Some(size) = dtype.size() else { continue };
                    let len = noise.len() / 5 / size * size;
                    let inputs: Vec<&[u8]> = noise.chunks_exact(len).take(5).collect();
                    let mut expected = vec![0; len];
                    combine(op, dtype, &inputs, &mut expected, None);
                    let partial = Partial::new(op, dtype);
                    let mut scratch = Vec::new();
                    let mut first = vec![0; partial.len(len)];
                    partial.step(None, &inputs[..cut], &mut first, &mut scratch);
                    let mut second = vec![0; partial.len(len)];
                    partial.step(Some(&first), &inputs[cut..], &mut second, &mut scratch);
                    let mut result = vec![0; len];
                    partial.finish(&mut second, 5, &mut result);
                    prop_assert!(result == expected, "{op} of {dtype}");
                }
            }
        }
    }
}
