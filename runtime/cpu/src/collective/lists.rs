//! Lists of counts, which are sent with the headers if only the lists can show whether the ranks agree.

use super::op_header::{Disagreement, OpHeader};
use rcomm_recorder::model::{OpType, Parts};

/// Whether lists of counts are sent with the headers of this operation.
pub(crate) fn has_lists(op: OpType) -> bool {
    match (op.pattern(), op.parts()) {
        (_, Parts::PerPair) => true,
        // Only the root has the list of all parts.
        (pattern, Parts::PerRank) => pattern.is_rooted(),
        (_, Parts::Equal) => false,
    }
}

/// Compares the lists that came with the headers. All ranks get the same result.
///
/// `lists[r]` is the list of rank `r`, in elements. For an operation with a part per pair, it has the counts that `r`
/// sends to each rank, then those that it expects from each rank. For a rooted operation with a part per rank, the
/// root's list has the count of each rank. The caller has compared the headers, which agree.
pub(crate) fn compare_lists(
    op_headers: &[OpHeader],
    lists: &[Vec<u64>],
) -> Result<(), Disagreement> {
    let Some(first) = op_headers.first() else {
        return Ok(());
    };
    let size = op_headers.len();
    match first.op.parts() {
        Parts::PerPair => {
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
        Parts::PerRank => {
            let root = first.root.unwrap_or(0) as usize;
            let Some(listed) = lists.get(root) else {
                return Ok(());
            };
            for (rank, op_header) in op_headers.iter().enumerate() {
                let count = listed.get(rank).copied();
                if count != Some(op_header.own_count) {
                    return Err(Disagreement {
                        rank,
                        message: format!(
                            "rank {rank} of the group has {} {}, but root {root} lists {} for it",
                            op_header.own_count,
                            first.dtype,
                            count.unwrap_or(0)
                        ),
                    });
                }
            }
            Ok(())
        }
        Parts::Equal => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sent_where_not_every_rank_knows_all_counts() {
        let ops = OpType::ALL.iter().copied();
        let names: Vec<&str> = ops.filter(|&op| has_lists(op)).map(OpType::name).collect();
        assert_eq!(
            names,
            ["all_to_all", "all_to_all_v_single", "gather_v", "scatter_v"]
        );
    }
}
