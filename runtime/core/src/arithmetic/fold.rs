//! The loop that all reductions share, and the table that picks its types; conversion and scaling.
//!
//! A *block* is as many elements as fit in a few vector registers. For each block, all inputs are combined in
//! registers, and the result is written once.

use super::Level;
use super::format::{Bf16, BoolByte, F8E4M3, F8E5M2, F16, Format, Isa, Plain, Portable};
use rcomm_recorder::model::{DType, ReduceOp};

/// A reduction: its inputs and its outputs.
pub(super) struct FoldJob<'a> {
    /// The addresses of the inputs, in the order of combination.
    pub(super) sources: &'a [*const u8],
    /// The address of the result, which may be one of the sources.
    pub(super) out: *mut u8,
    /// Further outputs for the result; they may be sources as well.
    pub(super) more_outs: &'a [*mut u8],
    /// The number of elements of each source and each output.
    pub(super) count: usize,
    /// The divisor of an average: the number of sources, unless these already hold sums.
    pub(super) terms: usize,
}

/// How two values are combined, and how the result is finished.
pub(super) trait Combine<A> {
    fn combine(left: A, right: A) -> A;

    #[inline(always)]
    fn finish(value: A, _terms: usize) -> A {
        value
    }
}

pub(super) struct Sum;
struct Avg;
struct Product;
pub(super) struct Min;
pub(super) struct Max;
struct BitAnd;
struct BitOr;
struct BitXor;
struct ComplexProduct;

macro_rules! combine_integers {
    ($($t:ty)*) => {$(
        impl Combine<$t> for Sum {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left.wrapping_add(right) }
        }
        impl Combine<$t> for Avg {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left.wrapping_add(right) }
            #[inline(always)]
            fn finish(value: $t, terms: usize) -> $t {
                // If the type cannot hold the number of ranks, the quotient is 0: no sum that the type can
                // hold is as large. (Only `MIN` over `MAX + 1` ranks is exactly -1, and becomes 0 too.)
                <$t>::try_from(terms).map_or(0, |terms| value.wrapping_div(terms))
            }
        }
        impl Combine<$t> for Product {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left.wrapping_mul(right) }
        }
        impl Combine<$t> for Min {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left.min(right) }
        }
        impl Combine<$t> for Max {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left.max(right) }
        }
        impl Combine<$t> for BitAnd {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left & right }
        }
        impl Combine<$t> for BitOr {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left | right }
        }
        impl Combine<$t> for BitXor {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left ^ right }
        }
    )*};
}
combine_integers!(i8 u8 i16 u16 i32 u32 i64 u64);

macro_rules! combine_floats {
    ($($t:ty)*) => {$(
        impl Combine<$t> for Sum {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left + right }
        }
        impl Combine<$t> for Avg {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left + right }
            #[inline(always)]
            fn finish(value: $t, terms: usize) -> $t { value / terms as $t }
        }
        impl Combine<$t> for Product {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left * right }
        }
        impl Combine<$t> for Min {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t {
                // A NaN on either side is kept: the comparison fails when `right` is one.
                if left.is_nan() | (left < right) { left } else { right }
            }
        }
        impl Combine<$t> for Max {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t {
                if left.is_nan() | (left > right) { left } else { right }
            }
        }
        impl Combine<[$t; 2]> for ComplexProduct {
            #[inline(always)]
            fn combine([a, b]: [$t; 2], [c, d]: [$t; 2]) -> [$t; 2] {
                [a * c - b * d, a * d + b * c]
            }
        }
    )*};
}
combine_floats!(f32 f64);

/// Combines the sources by `C`, a block of `N` elements at a time.
///
/// # Safety
/// The conditions of [`run`] hold, and the processor has `I`.
#[inline(always)]
unsafe fn fold<F: Format, C: Combine<F::Acc>, I: Isa, const N: usize>(job: &FoldJob<'_>) {
    let terms = job.terms;
    let mut start = 0;
    while start + N <= job.count {
        let offset = start * F::SIZE;
        // SAFETY: there is a source, and elements `start..start + N` lie inside every source, `out` and all of
        // `more_outs`, which the caller guarantees to be readable and writable over `count` elements; the
        // processor has `I`. A block is read from all sources before it is written, and a source that
        // overlaps an output is that output, so no write changes what is still to be read.
        unsafe {
            let mut block = F::load_block::<I, N>(job.sources[0].add(offset));
            for source in &job.sources[1..] {
                let next = F::load_block::<I, N>(source.add(offset));
                for lane in 0..N {
                    block[lane] = C::combine(block[lane], next[lane]);
                }
            }
            for lane in &mut block {
                *lane = C::finish(*lane, terms);
            }
            F::store_block::<I, N>(job.out.add(offset), block);
            for more_out in job.more_outs {
                F::store_block::<I, N>(more_out.add(offset), block);
            }
        }
        start += N;
    }
    while start < job.count {
        let offset = start * F::SIZE;
        // SAFETY: `start` is less than `count`, so this one element lies inside every source and output, as
        // the block above; it too is read from all sources before it is written.
        unsafe {
            let mut value = F::load(job.sources[0].add(offset));
            for source in &job.sources[1..] {
                value = C::combine(value, F::load(source.add(offset)));
            }
            value = C::finish(value, terms);
            F::store(job.out.add(offset), value);
            for more_out in job.more_outs {
                F::store(more_out.add(offset), value);
            }
        }
        start += 1;
    }
}

/// Calls [`fold`] with the types for `op` and `dtype`.
///
/// # Safety
/// The conditions of [`run`] hold, and the processor has `I`.
#[inline(always)]
unsafe fn pick<I: Isa>(op: ReduceOp, dtype: DType, job: &FoldJob<'_>) {
    macro_rules! arithmetic {
        ($format:ty, $lanes:literal) => {
            match op {
                ReduceOp::Sum | ReduceOp::PremulSum => fold::<$format, Sum, I, $lanes>(job),
                ReduceOp::Avg => fold::<$format, Avg, I, $lanes>(job),
                ReduceOp::Product => fold::<$format, Product, I, $lanes>(job),
                ReduceOp::Min => fold::<$format, Min, I, $lanes>(job),
                ReduceOp::Max => fold::<$format, Max, I, $lanes>(job),
                ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {}
            }
        };
    }
    macro_rules! integer {
        ($t:ty, $lanes:literal) => {
            match op {
                ReduceOp::BitAnd => fold::<Plain<$t>, BitAnd, I, $lanes>(job),
                ReduceOp::BitOr => fold::<Plain<$t>, BitOr, I, $lanes>(job),
                ReduceOp::BitXor => fold::<Plain<$t>, BitXor, I, $lanes>(job),
                _ => arithmetic!(Plain<$t>, $lanes),
            }
        };
    }
    macro_rules! complex {
        ($part:ty, $lanes:literal) => {
            match op {
                ReduceOp::Product => fold::<Plain<[$part; 2]>, ComplexProduct, I, $lanes>(job),
                _ => {
                    // Sums and averages treat both parts alike.
                    let parts = FoldJob {
                        sources: job.sources,
                        out: job.out,
                        more_outs: job.more_outs,
                        count: job.count * 2,
                        terms: job.terms,
                    };
                    match op {
                        ReduceOp::Avg => fold::<Plain<$part>, Avg, I, 32>(&parts),
                        _ => fold::<Plain<$part>, Sum, I, 32>(&parts),
                    }
                }
            }
        };
    }
    // The number in each row is how many elements a block has: 64 to 256 bytes in the type in which they are
    // combined, which fit in the vector registers.
    //
    // SAFETY: the caller guarantees that sources and outputs hold `count` elements of `dtype`, and the `SIZE` of
    // each row's format is the size of its `dtype`; `count` complex numbers are twice as many parts. What `fold`
    // requires of overlaps, sources and the processor, this function requires too.
    unsafe {
        match dtype {
            DType::F32 => arithmetic!(Plain<f32>, 64),
            DType::F64 => arithmetic!(Plain<f64>, 32),
            DType::F16 => arithmetic!(F16, 32),
            DType::Bf16 => arithmetic!(Bf16, 64),
            DType::F8E4M3 => arithmetic!(F8E4M3, 32),
            DType::F8E5M2 => arithmetic!(F8E5M2, 32),
            DType::I8 => integer!(i8, 128),
            DType::U8 => integer!(u8, 128),
            DType::I16 => integer!(i16, 64),
            DType::U16 => integer!(u16, 64),
            DType::I32 => integer!(i32, 64),
            DType::U32 => integer!(u32, 64),
            DType::I64 => integer!(i64, 32),
            DType::U64 => integer!(u64, 32),
            DType::Complex64 => complex!(f32, 8),
            DType::Complex128 => complex!(f64, 4),
            DType::Bool => match op {
                ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => {
                    fold::<BoolByte, BitAnd, I, 64>(job);
                }
                ReduceOp::BitXor => fold::<BoolByte, BitXor, I, 64>(job),
                _ => fold::<BoolByte, BitOr, I, 64>(job),
            },
            DType::Other => {}
        }
    }
}

/// # Safety
/// The conditions of [`run`] hold, and the processor has AVX-512 F, BW, DQ and VL, which imply AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
unsafe fn run_avx512(op: ReduceOp, dtype: DType, job: &FoldJob<'_>) {
    // SAFETY: `pick` asks what this function asks of its caller: the job's ranges, and AVX-512 F for
    // `Avx512`.
    unsafe { pick::<super::format::Avx512>(op, dtype, job) }
}

/// # Safety
/// The conditions of [`run`] hold, and the processor has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn run_avx2(op: ReduceOp, dtype: DType, job: &FoldJob<'_>) {
    // SAFETY: `pick` asks what this function asks of its caller: the job's ranges, and AVX2 and F16C for
    // `Avx2`.
    unsafe { pick::<super::format::Avx2>(op, dtype, job) }
}

/// Runs `job` with the loops of `level`.
///
/// # Safety
/// Every source is readable, `out` and all of `more_outs` writable, over `count` elements of `dtype`. A source
/// either overlaps no output or is exactly one; the outputs do not overlap. There is at least one source,
/// and the processor has `level`.
pub(super) unsafe fn run(level: Level, op: ReduceOp, dtype: DType, job: &FoldJob<'_>) {
    // SAFETY: the caller guarantees the job's ranges, and passes only a level that the processor has, so the
    // functions for AVX2 and AVX-512 are called only where these exist.
    unsafe {
        match level {
            Level::Portable => pick::<Portable>(op, dtype, job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => run_avx2(op, dtype, job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => run_avx512(op, dtype, job),
        }
    }
}

/// Multiplies `count` elements at `data` by `factor`. Integers are multiplied by the integer part of `factor`, limited
/// to the range of their type, floats of up to 32 bits in `f32`; `Bool` elements stay as they are.
///
/// # Safety
/// `count` elements of `dtype` at `data` are readable and writable, and nothing else accesses them.
pub(super) unsafe fn scale(dtype: DType, data: *mut u8, count: usize, factor: f64) {
    macro_rules! each {
        ($format:ty, $count:expr, $multiply:expr) => {
            for index in 0..$count {
                let element = data.add(index * <$format>::SIZE);
                <$format>::store(element, $multiply(<$format>::load(element)));
            }
        };
    }
    let narrow = factor as f32;
    // SAFETY: `each` visits the first `count` elements of `dtype` (of complex ones, twice as many parts), all
    // inside what the caller guarantees to be readable and writable; each element is read before it is written.
    unsafe {
        match dtype {
            DType::F32 => each!(Plain<f32>, count, |value: f32| value * narrow),
            DType::F64 => each!(Plain<f64>, count, |value: f64| value * factor),
            DType::F16 => each!(F16, count, |value: f32| value * narrow),
            DType::Bf16 => each!(Bf16, count, |value: f32| value * narrow),
            DType::F8E4M3 => each!(F8E4M3, count, |value: f32| value * narrow),
            DType::F8E5M2 => each!(F8E5M2, count, |value: f32| value * narrow),
            DType::Complex64 => each!(Plain<f32>, count * 2, |value: f32| value * narrow),
            DType::Complex128 => each!(Plain<f64>, count * 2, |value: f64| value * factor),
            DType::I8 => each!(Plain<i8>, count, |v: i8| v.wrapping_mul(factor as i8)),
            DType::U8 => each!(Plain<u8>, count, |v: u8| v.wrapping_mul(factor as u8)),
            DType::I16 => each!(Plain<i16>, count, |v: i16| v.wrapping_mul(factor as i16)),
            DType::U16 => each!(Plain<u16>, count, |v: u16| v.wrapping_mul(factor as u16)),
            DType::I32 => each!(Plain<i32>, count, |v: i32| v.wrapping_mul(factor as i32)),
            DType::U32 => each!(Plain<u32>, count, |v: u32| v.wrapping_mul(factor as u32)),
            DType::I64 => each!(Plain<i64>, count, |v: i64| v.wrapping_mul(factor as i64)),
            DType::U64 => each!(Plain<u64>, count, |v: u64| v.wrapping_mul(factor as u64)),
            DType::Bool | DType::Other => {}
        }
    }
}

/// The direction of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conversion {
    /// From a narrow float to `f32`.
    Widen,
    /// From `f32` to a narrow float, rounded to nearest even.
    Narrow,
}

/// Converts between the narrow format `F` and `f32`, a block of `N` elements at a time.
///
/// # Safety
/// The conditions of [`convert`] hold, and the processor has `I`.
#[inline(always)]
unsafe fn convert_all<F: Format<Acc = f32>, I: Isa, const N: usize>(
    conversion: Conversion,
    from: *const u8,
    to: *mut u8,
    count: usize,
) {
    let (narrow, wide) = (F::SIZE, <Plain<f32>>::SIZE);
    let mut start = 0;
    // SAFETY: in both loops all elements are below `count`, and the caller guarantees that `count` elements are
    // readable at `from` and writable at `to`, with the widths of the narrow type and of `f32`, that the two do
    // not overlap, and that the processor has `I`.
    unsafe {
        while start + N <= count {
            match conversion {
                Conversion::Widen => {
                    let block = F::load_block::<I, N>(from.add(start * narrow));
                    <Plain<f32>>::store_block::<I, N>(to.add(start * wide), block);
                }
                Conversion::Narrow => {
                    let block = <Plain<f32>>::load_block::<I, N>(from.add(start * wide));
                    F::store_block::<I, N>(to.add(start * narrow), block);
                }
            }
            start += N;
        }
        while start < count {
            match conversion {
                Conversion::Widen => {
                    <Plain<f32>>::store(to.add(start * wide), F::load(from.add(start * narrow)));
                }
                Conversion::Narrow => {
                    F::store(
                        to.add(start * narrow),
                        <Plain<f32>>::load(from.add(start * wide)),
                    );
                }
            }
            start += 1;
        }
    }
}

/// Calls [`convert_all`] with the format of `dtype`.
///
/// # Safety
/// The conditions of [`convert`] hold, and the processor has `I`.
#[inline(always)]
unsafe fn pick_convert<I: Isa>(
    conversion: Conversion,
    dtype: DType,
    from: *const u8,
    to: *mut u8,
    count: usize,
) {
    // SAFETY: the format of each row is that of its `dtype`. What `convert_all` asks of ranges and
    // processor, this function asks of its caller.
    unsafe {
        match dtype {
            DType::F16 => convert_all::<F16, I, 32>(conversion, from, to, count),
            DType::Bf16 => convert_all::<Bf16, I, 64>(conversion, from, to, count),
            DType::F8E4M3 => convert_all::<F8E4M3, I, 32>(conversion, from, to, count),
            DType::F8E5M2 => convert_all::<F8E5M2, I, 32>(conversion, from, to, count),
            _ => {}
        }
    }
}

/// # Safety
/// The conditions of [`convert`] hold, and the processor has AVX-512 F, BW, DQ and VL, which imply AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
unsafe fn convert_avx512(
    conversion: Conversion,
    dtype: DType,
    from: *const u8,
    to: *mut u8,
    count: usize,
) {
    // SAFETY: `pick_convert` asks what this function asks of its caller: both ranges, and AVX-512 F for
    // `Avx512`.
    unsafe { pick_convert::<super::format::Avx512>(conversion, dtype, from, to, count) }
}

/// # Safety
/// The conditions of [`convert`] hold, and the processor has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn convert_avx2(
    conversion: Conversion,
    dtype: DType,
    from: *const u8,
    to: *mut u8,
    count: usize,
) {
    // SAFETY: `pick_convert` asks what this function asks of its caller: both ranges, and AVX2 and F16C for
    // `Avx2`.
    unsafe { pick_convert::<super::format::Avx2>(conversion, dtype, from, to, count) }
}

/// Converts `count` elements between the narrow float `dtype` and `f32`, with the loops of `level`.
///
/// # Safety
/// `count` elements of the one type are readable at `from`, of the other writable at `to`; the two do not
/// overlap. The processor has `level`.
pub(super) unsafe fn convert(
    level: Level,
    conversion: Conversion,
    dtype: DType,
    from: *const u8,
    to: *mut u8,
    count: usize,
) {
    // SAFETY: the caller guarantees both ranges, and passes only a level that the processor has, so the functions
    // for AVX2 and AVX-512 are called only where these exist.
    unsafe {
        match level {
            Level::Portable => pick_convert::<Portable>(conversion, dtype, from, to, count),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => convert_avx2(conversion, dtype, from, to, count),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => convert_avx512(conversion, dtype, from, to, count),
        }
    }
}
