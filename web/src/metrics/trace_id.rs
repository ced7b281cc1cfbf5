//! Derives trace ids, so that all ranks agree on them without communication.
//!
//! The id is a hash of job, group, ranks, kind and sequence number: the spans of all members of one collective get the
//! same trace id although no context is propagated.

use rcomm_recorder::model::Rank;
use sha2::{Digest, Sha256};

/// An operation shared by members of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedOp<'a> {
    /// Name of the job.
    pub(crate) job: &'a str,
    /// Name of the group.
    pub(crate) group: &'a str,
    /// Global ranks: of a collective, the members of the group; of a message, source and destination; of a `p2p`
    /// operation, its rank.
    pub(crate) ranks: &'a [Rank],
    /// `collective`, `message` (a send or receive whose number is known) or `p2p` (any other send or receive, and the
    /// end of a batch of them); `seq` counts each kind separately.
    pub(crate) kind: &'static str,
    /// Sequence number.
    pub(crate) seq: u64,
}

impl SharedOp<'_> {
    /// The trace id; never all zero, since that is not a valid id.
    pub(crate) fn trace_id(&self) -> [u8; 16] {
        let mut hash = Sha256::new();
        for text in ["rcomm", self.job, self.group, self.kind] {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        for rank in self.ranks {
            hash.update(rank.to_le_bytes());
        }
        hash.update(self.seq.to_le_bytes());
        let mut id = [0; 16];
        id.copy_from_slice(&hash.finalize()[..16]);
        id[15] |= u8::from(id == [0; 16]);
        id
    }

    /// The id of one rank's span in the trace; never all zero, since that is not a valid id.
    pub(crate) fn span_id(&self, rank: Rank, record_id: u64) -> [u8; 8] {
        let mut hash = Sha256::new();
        hash.update(self.trace_id());
        hash.update(rank.to_le_bytes());
        hash.update(record_id.to_le_bytes());
        let mut id = [0; 8];
        id.copy_from_slice(&hash.finalize()[..8]);
        id[7] |= u8::from(id == [0; 8]);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_ids_depend_on_job_group_ranks_kind_and_number_and_span_ids_on_the_rank_too() {
        let shared = SharedOp {
            job: "llama",
            group: "dp_5",
            ranks: &[1, 9],
            kind: "collective",
            seq: 41,
        };
        assert_eq!(shared.trace_id(), { shared }.trace_id());
        for other in [
            SharedOp {
                job: "llam",
                group: "adp_5",
                ..shared
            },
            SharedOp {
                ranks: &[1, 8],
                ..shared
            },
            SharedOp { seq: 42, ..shared },
            SharedOp {
                kind: "p2p",
                ..shared
            },
        ] {
            assert_ne!(shared.trace_id(), other.trace_id(), "{other:?}");
        }
        assert_ne!(shared.span_id(1, 7), shared.span_id(9, 7));
    }
}
