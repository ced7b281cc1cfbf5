//! The shapes of the operations that a thread reported last, with their signatures in the ring. With them, most
//! operations are recorded without a search of the ring's table of signatures.

use crate::process::Call;
use rcomm_recorder::record::SignatureId;
use std::cell::Cell;

/// The number of shapes that a thread keeps, which is a power of two.
const ROWS: usize = 32;

/// What determines the shape of an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Address of the process's state, which has the ring with the signatures.
    owner: usize,
    /// Number of ranks of the communicator (0 = unknown) | type of the operation << 32 | type of the elements << 40.
    key: u64,
    /// The number of elements.
    count: u64,
}

type Row = (Shape, SignatureId);

const EMPTY: Row = (
    Shape {
        owner: 0,
        key: 0,
        count: 0,
    },
    SignatureId::UNKNOWN,
);

thread_local! {
    static RECENT: [Cell<Row>; ROWS] = const { [const { Cell::new(EMPTY) }; ROWS] };
}

impl Shape {
    /// The shape of this call in a communicator of this size (0 = unknown). `owner` has the ring, and is never moved.
    pub(crate) fn of<T>(owner: &T, call: &Call, size: u32) -> Self {
        Self {
            owner: std::ptr::from_ref(owner).addr(),
            key: u64::from(size)
                | u64::from(call.op.code()) << 32
                | u64::from(call.dtype.code()) << 40,
            count: call.count,
        }
    }

    /// The signature of this shape in the ring's table: that of this thread's recent shapes, or else the one that
    /// `intern` returns. `None` if `intern` is called and returns `None`.
    #[inline]
    pub(crate) fn signature(
        self,
        intern: impl FnOnce() -> Option<SignatureId>,
    ) -> Option<SignatureId> {
        // The factor is 2^64 divided by the golden ratio. The upper bits of the product depend on all bits of the
        // number.
        let spread = (self.count ^ self.key.rotate_left(24)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let row = (spread >> (64 - ROWS.trailing_zeros())) as usize;
        // A thread that ends may still report events after its thread-local variables are gone.
        let recent = RECENT.try_with(|rows| rows[row].get());
        if let Ok((shape, id)) = recent
            && shape == self
        {
            return Some(id);
        }
        let id = intern()?;
        let _ = RECENT.try_with(|rows| rows[row].set((self, id)));
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::{DType, OpType};

    #[test]
    fn a_shape_is_looked_up_once_and_no_other_shape_gets_its_signature() {
        let owner = [0_u64; 2];
        let call = Call {
            op: OpType::AllReduce,
            dtype: DType::F32,
            count: 8,
            root: None,
            peer: None,
        };
        let id = |row| SignatureId::of_words([row, 8, 8]);
        let first = Shape::of(&owner[0], &call, 4);
        assert_eq!(first.signature(|| Some(id(1))), Some(id(1)));
        assert_eq!(first.signature(|| panic!("known")), Some(id(1)));
        let others = [
            Shape::of(&owner[1], &call, 4),
            Shape::of(&owner[0], &call, 5),
            Shape::of(&owner[0], &Call { count: 9, ..call }, 4),
            Shape::of(
                &owner[0],
                &Call {
                    dtype: DType::F16,
                    ..call
                },
                4,
            ),
            Shape::of(
                &owner[0],
                &Call {
                    op: OpType::Broadcast,
                    ..call
                },
                4,
            ),
        ];
        for (row, other) in (2..).zip(others) {
            assert_eq!(other.signature(|| None), None);
            assert_eq!(other.signature(|| Some(id(row))), Some(id(row)));
        }
    }
}
