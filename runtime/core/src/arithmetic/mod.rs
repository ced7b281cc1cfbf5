//! Element-wise reductions: several inputs combined in one pass over memory.
//!
//! The order of combination is always the order of the inputs, and narrow floats (`f16`, `bf16`, fp8) are widened to
//! `f32`, combined there over all inputs, and rounded once. So the same inputs give the same bits on every rank, on
//! every processor, over every transport. The exception: which of two NaNs a sum or a product keeps depends on the
//! processor.
//!
//! Loops are written once (`fold`) and compiled for AVX-512, for AVX2 with F16C, and for any processor; the choice
//! is made at run time. Two short inputs are combined without these loops (`few`). `copy` copies bytes without
//! combining them. This module moves no data between ranks.

mod copy;
mod few;
mod fold;
mod format;
mod narrow;
mod partial;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use copy::{AdaptiveCopy, copy, copy_past_caches};
use fold::FoldJob;
pub use partial::Partial;
use rcomm_recorder::model::{DType, ReduceOp};

/// The instruction sets that the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The instruction set of the build's target.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The best level that this processor has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if std::is_x86_feature_detected!("avx512f")
                && std::is_x86_feature_detected!("avx512bw")
                && std::is_x86_feature_detected!("avx512dq")
                && std::is_x86_feature_detected!("avx512vl")
            {
                return Self::Avx512;
            }
            if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }
}

impl Level {
    /// The level to use for this many bytes: `Portable` for a few, since detection would take longer than the
    /// reduction.
    #[inline]
    fn for_len(bytes: usize) -> Self {
        if bytes <= few::MAX_BYTES {
            Self::Portable
        } else {
            Self::detect()
        }
    }
}

/// Whether this module can combine elements of type `dtype` by `op`.
///
/// Complex numbers have no order, floats and complex numbers have no bitwise reductions, and booleans have neither an
/// average nor a scaled sum.
pub const fn is_supported(op: ReduceOp, dtype: DType) -> bool {
    use DType::*;
    match op {
        ReduceOp::Sum | ReduceOp::Product => !matches!(dtype, Other),
        ReduceOp::Avg | ReduceOp::PremulSum => !matches!(dtype, Other | Bool),
        ReduceOp::Min | ReduceOp::Max => !matches!(dtype, Other | Complex64 | Complex128),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
            matches!(dtype, I8 | U8 | I16 | U16 | I32 | U32 | I64 | U64 | Bool)
        }
    }
}

/// Combines `inputs` in their order into `out`, and into `second_out` where there is one.
///
/// Lengths are in bytes, equal, and a multiple of the element's size. `PremulSum` is combined as `Sum`: the caller
/// [scales](scale) the inputs first.
///
/// # Panics
/// If lengths differ or are not a multiple of the element's size, if there is no input, or if the reduction
/// is not [supported](is_supported).
#[inline]
pub fn combine(
    op: ReduceOp,
    dtype: DType,
    inputs: &[&[u8]],
    out: &mut [u8],
    second_out: Option<&mut [u8]>,
) {
    if let (&[first, second], None) = (inputs, &second_out)
        && out.len() <= few::MAX_BYTES
    {
        assert_eq!(
            second.len(),
            out.len(),
            "an input and the output differ in length"
        );
        out.copy_from_slice(first);
        if few::combine(op, dtype, out, second, true) {
            return;
        }
    }
    combine_by_loops(op, dtype, inputs, out, second_out);
}

/// Carries out [`combine`] for any number of inputs of any length.
fn combine_by_loops(
    op: ReduceOp,
    dtype: DType,
    inputs: &[&[u8]],
    out: &mut [u8],
    second_out: Option<&mut [u8]>,
) {
    let mut sources = Sources::new(inputs.len());
    for input in inputs {
        assert_eq!(
            input.len(),
            out.len(),
            "an input and the output differ in length"
        );
        sources.push(input.as_ptr());
    }
    let second_out = second_out_ptr(second_out, out.len());
    // SAFETY: every input was checked to be as long as `out`, and `second_out_ptr` checks the second output. `out`
    // and `second_out` are borrowed for writing, so neither overlaps the other or an input. The level is this
    // processor's (`for_len`).
    unsafe {
        run(
            Level::for_len(out.len()),
            op,
            dtype,
            sources.as_slice(),
            out,
            second_out.as_slice(),
        )
    }
}

/// Like [`combine`], with `out` itself as one more input, at position `own_index` in the order of inputs: from 0 to the
/// number of `others`.
///
/// # Panics
/// Same as [`combine`], and if `own_index` is more than the number of `others`.
#[inline]
pub fn combine_in_place(
    op: ReduceOp,
    dtype: DType,
    out: &mut [u8],
    own_index: usize,
    others: &[&[u8]],
    second_out: Option<&mut [u8]>,
) {
    assert!(
        own_index <= others.len(),
        "the output's own position is beyond the inputs"
    );
    if let (&[other], None) = (others, &second_out)
        && out.len() <= few::MAX_BYTES
    {
        assert_eq!(
            other.len(),
            out.len(),
            "an input and the output differ in length"
        );
        if few::combine(op, dtype, out, other, own_index == 0) {
            return;
        }
    }
    combine_in_place_by_loops(op, dtype, out, own_index, others, second_out);
}

/// Carries out [`combine_in_place`] for any number of inputs of any length.
fn combine_in_place_by_loops(
    op: ReduceOp,
    dtype: DType,
    out: &mut [u8],
    own_index: usize,
    others: &[&[u8]],
    second_out: Option<&mut [u8]>,
) {
    // One pointer for reading and writing, since a reference would promise exclusive access.
    let out: *mut [u8] = out;
    let mut sources = Sources::new(others.len() + 1);
    for (index, input) in others.iter().enumerate() {
        assert_eq!(
            input.len(),
            out.len(),
            "an input and the output differ in length"
        );
        if index == own_index {
            sources.push(out.cast::<u8>());
        }
        sources.push(input.as_ptr());
    }
    if own_index == others.len() {
        sources.push(out.cast::<u8>());
    }
    let second_out = second_out_ptr(second_out, out.len());
    // SAFETY: every other input was checked to be as long as `out`, and `second_out_ptr` checks the second output.
    // `out` and `second_out` are borrowed for writing, so the one source that overlaps an output is `out` itself,
    // by the same pointer. The level is this processor's (`for_len`).
    unsafe {
        run(
            Level::for_len(out.len()),
            op,
            dtype,
            sources.as_slice(),
            out,
            second_out.as_slice(),
        )
    }
}

/// Combines the contents of `buffers`, in their order, and writes the result to all of them. Does nothing if there
/// are no buffers.
///
/// Lengths are in bytes, equal, and a multiple of the element's size.
///
/// # Panics
/// If lengths differ or are not a multiple of the element's size, or if the reduction is not
/// [supported](is_supported).
pub fn combine_everywhere(op: ReduceOp, dtype: DType, buffers: &mut [&mut [u8]]) {
    let len = buffers.first().map_or(0, |buffer| buffer.len());
    let mut sources = Sources::new(buffers.len());
    let mut outputs = Vec::with_capacity(buffers.len());
    for buffer in buffers {
        assert_eq!(buffer.len(), len, "the buffers differ in length");
        // Read and written by one pointer, as in `combine_in_place`.
        let start = buffer.as_mut_ptr();
        sources.push(start);
        outputs.push(start);
    }
    let Some((&first, more_outs)) = outputs.split_first() else {
        return;
    };
    let out = std::ptr::slice_from_raw_parts_mut(first, len);
    // SAFETY: all buffers were checked to have one length. They are borrowed for writing, so no two overlap, and
    // each source is one of the outputs, by the same pointer. The level is this processor's (`detect`).
    unsafe {
        run(
            Level::detect(),
            op,
            dtype,
            sources.as_slice(),
            out,
            more_outs,
        )
    }
}

/// The address of the second output, if there is one. Checks that it is as long as the first.
fn second_out_ptr(second_out: Option<&mut [u8]>, len: usize) -> Option<*mut u8> {
    second_out.map(|second_out| {
        assert_eq!(second_out.len(), len, "the two outputs differ in length");
        second_out.as_mut_ptr()
    })
}

/// Multiplies every element by `factor`. Integers are multiplied by the integer part of `factor`, limited to the range
/// of their type, floats of up to 32 bits in `f32`; `Bool` elements stay as they are.
pub fn scale(dtype: DType, data: &mut [u8], factor: f64) {
    let Some(size) = dtype.size() else { return };
    // SAFETY: `data` is borrowed for writing, and `len / size` elements of `dtype` are not longer than it.
    unsafe { fold::scale(dtype, data.as_mut_ptr(), data.len() / size, factor) }
}

/// The addresses of the inputs; on the stack if they are few.
struct Sources {
    few: [*const u8; Self::FEW],
    many: Vec<*const u8>,
    count: usize,
}

impl Sources {
    const FEW: usize = 8;

    fn new(expected: usize) -> Self {
        Self {
            few: [std::ptr::null(); Self::FEW],
            many: if expected > Self::FEW {
                Vec::with_capacity(expected)
            } else {
                Vec::new()
            },
            count: 0,
        }
    }

    fn push(&mut self, source: *const u8) {
        if self.many.capacity() > 0 {
            self.many.push(source);
        } else {
            self.few[self.count] = source;
        }
        self.count += 1;
    }

    fn as_slice(&self) -> &[*const u8] {
        if self.many.capacity() > 0 {
            &self.many
        } else {
            &self.few[..self.count]
        }
    }
}

/// Combines the elements at `sources` into `out`, and into all of `more_outs`.
///
/// # Safety
/// Every source is readable over as many bytes as `out` has; `out` and all of `more_outs` are writable over them. A
/// source either overlaps no output or begins where one does; the outputs do not overlap. The processor has
/// `level`.
unsafe fn run(
    level: Level,
    op: ReduceOp,
    dtype: DType,
    sources: &[*const u8],
    out: *mut [u8],
    more_outs: &[*mut u8],
) {
    assert!(is_supported(op, dtype), "{op} is not supported for {dtype}");
    assert!(!sources.is_empty(), "the reduction has no input");
    let Some(size) = dtype.size() else { return };
    assert_eq!(
        out.len() % size,
        0,
        "the length is not a multiple of the element size"
    );
    let job = FoldJob {
        sources,
        out: out.cast(),
        more_outs,
        count: out.len() / size,
        terms: sources.len(),
    };
    // SAFETY: the caller guarantees that all sources can be read and all outputs be written over the bytes of
    // `out`, which are `count` elements (a multiple of `size`, checked). There is a source (checked). All are of
    // one length, so a source that begins where an output does is that output. The caller guarantees that the
    // processor has the level.
    unsafe { fold::run(level, op, dtype, &job) }
}
