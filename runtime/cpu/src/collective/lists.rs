//! Lists of counts that go with the notices where only their comparison shows a disagreement.

use crate::notice::{Disagreement, Notice};
use rcomm_recorder::model::OpType;

/// Whether lists of counts go with the notices of this operation.
pub(crate) fn has_lists(op: OpType) -> bool {
    matches!(
        op,
        OpType::AllToAll | OpType::AllToAllVSingle | OpType::GatherV | OpType::ScatterV
    )
}

/// Compares the lists that came with the notices. All ranks come to the same answer.
///
/// `lists[r]` is what rank r sent; notices were found to agree before.
pub(crate) fn compare_lists(notices: &[Notice], lists: &[Vec<u64>]) -> Result<(), Disagreement> {
    let Some(first) = notices.first() else {
        return Ok(());
    };
    let size = notices.len();
    match first.op {
        OpType::AllToAll | OpType::AllToAllVSingle => {
            for (from, sent) in lists.iter().enumerate() {
                for (to, expected) in lists.iter().enumerate() {
                    let sends = sent.get(to).copied();
                    let receives = expected.get(size + from).copied();
                    if sends != receives {
                        return Err(Disagreement {
                            rank: from,
                            message: format!(
                                "rank {from} of the group sends {} {} to rank {to}, \
                                 which expects {}",
                                sends.unwrap_or(0),
                                first.dtype,
                                receives.unwrap_or(0)
                            ),
                        });
                    }
                }
            }
            Ok(())
        }
        OpType::GatherV | OpType::ScatterV => {
            let root = first.root.unwrap_or(0) as usize;
            let Some(listed) = lists.get(root) else {
                return Ok(());
            };
            for (rank, notice) in notices.iter().enumerate() {
                let count = listed.get(rank).copied();
                if count != Some(notice.own) {
                    return Err(Disagreement {
                        rank,
                        message: format!(
                            "rank {rank} of the group has {} {} where root {root} has {} for it",
                            notice.own,
                            first.dtype,
                            count.unwrap_or(0)
                        ),
                    });
                }
            }
            Ok(())
        }
        _ => Ok(()),
    }
}
