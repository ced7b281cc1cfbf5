//! Corrects the sequence numbers of collectives where the recorder counted batches of messages among them.

use crate::align::record::{LocalGroup, Op};

/// Renumbers the collectives of groups in which batches of messages took numbers of collectives. In PyTorch 2.4 and 2.5
/// each batch adds 1 to `collective_seq_id` and nothing to `p2p_seq_id`. Members may have different numbers of batches,
/// so the recorded numbers do not match across ranks.
pub(crate) fn number_without_batches(ops: &mut [Op], groups: &mut [LocalGroup]) {
    /// What was counted in one group.
    #[derive(Clone, Copy, Default)]
    struct Count {
        /// The collective number and the `p2p_seq_id` of the first message; `None` before it.
        first: Option<(u32, u32)>,
        /// Whether messages have different `p2p_seq_id`s: then they take no numbers of collectives.
        counts_messages: bool,
        /// Whether messages have different collective numbers.
        counts_batches: bool,
        /// The highest collective number so far.
        highest: u32,
        /// How many of the numbers up to `highest` are those of batches.
        of_batches: u32,
    }
    let mut counts = vec![Count::default(); groups.len()];
    for op in ops.iter().filter(|op| op.is_p2p) {
        let count = &mut counts[usize::from(op.group)];
        let (seq, p2p_seq) = *count.first.get_or_insert((op.seq, op.p2p_seq));
        count.counts_messages |= p2p_seq != op.p2p_seq;
        count.counts_batches |= seq != op.seq;
    }
    for op in ops {
        let count = &mut counts[usize::from(op.group)];
        if count.counts_messages || !count.counts_batches {
            continue;
        }
        if op.is_p2p {
            count.of_batches += op.seq.saturating_sub(count.highest);
        }
        count.highest = op.seq.max(count.highest);
        op.seq -= count.of_batches;
    }
    for (local, count) in groups.iter_mut().zip(counts) {
        if count.of_batches > 0 {
            // The numbers in the recorded status count the batches, too.
            local.status = None;
        }
    }
}
