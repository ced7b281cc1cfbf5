//! Combines two short inputs without the loops of [`fold`](super::fold): setting these up would take longer than
//! the work.
//!
//! This is for small reductions such as a loss, a count or a flag.

use super::fold::{Combine, Max, Min, Sum};
use rcomm_recorder::model::{DType, ReduceOp};

/// The longest input, in bytes, that is combined in this way.
pub(super) const MAX_BYTES: usize = 64;

/// Combines `other` into `out`, which is the first or the second of the two operands, if the reduction is the sum,
/// min or max of 32- or 64-bit floats or signed integers. Returns `false` for every other reduction, and if the
/// length is not a multiple of the element's size; `out` is then left as it was.
///
/// `out` and `other` have the same length.
#[inline]
pub(super) fn combine(
    op: ReduceOp,
    dtype: DType,
    out: &mut [u8],
    other: &[u8],
    out_is_first: bool,
) -> bool {
    macro_rules! each {
        ($t:ty, $combine:ty) => {{
            let (mine, rest) = out.as_chunks_mut::<{ size_of::<$t>() }>();
            if !rest.is_empty() {
                return false;
            }
            let (theirs, _) = other.as_chunks();
            for (mine, theirs) in mine.iter_mut().zip(theirs) {
                let own = <$t>::from_ne_bytes(*mine);
                let other = <$t>::from_ne_bytes(*theirs);
                let (first, second) = if out_is_first {
                    (own, other)
                } else {
                    (other, own)
                };
                *mine = <$combine as Combine<$t>>::combine(first, second).to_ne_bytes();
            }
        }};
    }
    macro_rules! usual {
        ($t:ty) => {
            match op {
                ReduceOp::Sum => each!($t, Sum),
                ReduceOp::Min => each!($t, Min),
                ReduceOp::Max => each!($t, Max),
                _ => return false,
            }
        };
    }
    match dtype {
        DType::F32 => usual!(f32),
        DType::F64 => usual!(f64),
        DType::I32 => usual!(i32),
        DType::I64 => usual!(i64),
        _ => return false,
    }
    true
}
