//! Entries of the records as evidence of a finding.

use super::Context;
use crate::align::{GroupIx, Presence, RecordIx};
use crate::judge::waits::wait_graph::{Node, Place};
use crate::report::Evidence;
use rcomm_recorder::model::OpType;

impl Context<'_> {
    /// An entry as evidence. `group` is the group of the finding.
    pub(crate) fn evidence(&self, record: RecordIx, position: u32, group: GroupIx) -> Evidence {
        let op = self.aligned.op(record, position);
        let lane = &self.aligned.lanes[record][usize::from(op.group)];
        let full_record = &self.aligned.records[record];
        let seq = if op.kind.is_p2p() || op.is_p2p {
            u64::from(op.p2p_seq)
        } else {
            self.recorded_seq(lane.group, op.seq)
        };
        let call = self.aligned.shared.calls.get(op.call);
        let mut text = call.describe();
        if let Some(&peer) = self.aligned.groups[lane.group].ranks.get(op.peer as usize)
            && op.kind.is_p2p()
        {
            let towards = if op.kind == OpType::Send {
                "to"
            } else {
                "from"
            };
            text.push_str(&format!(" {towards} rank {peer}"));
        }
        Evidence {
            rank: full_record.rank,
            record_id: full_record.record_id(op),
            state: op.state,
            group: (lane.group != group).then(|| self.group_ref(lane.group)),
            seq,
            op: text,
        }
    }

    /// The entry of a rank for a collective, as evidence; `None` if its record does not hold it.
    pub(crate) fn evidence_of(&self, node: Node, group: GroupIx, seq: u32) -> Option<Evidence> {
        let rank = self.rank(node);
        let member = self.aligned.groups[group]
            .ranks
            .iter()
            .position(|&member_rank| member_rank == rank)?;
        let (record, lane) = self.aligned.lane(group, member)?;
        let Presence::Issued(index) = self.aligned.presence(group, member, seq) else {
            return None;
        };
        Some(self.evidence(record, lane.collectives[index], group))
    }

    /// The entries of the first `most` ranks that wait at a place, as evidence; for a batch, its first message.
    pub(crate) fn evidence_of_place(&self, place: usize, most: usize) -> Vec<Evidence> {
        match self.graph.places[place] {
            Place::Collective { group, seq } => {
                let arrived = self.graph.arrived[place].iter().take(most);
                arrived
                    .filter_map(|&node| self.evidence_of(node, group, seq))
                    .collect()
            }
            Place::Batch {
                group,
                record,
                pending,
            } => {
                vec![self.evidence(record, self.first_of_batch(record, pending), group)]
            }
        }
    }

    /// A rank's newest entry in a group, as evidence of how far it came; `None` if its record holds none there.
    pub(crate) fn evidence_of_newest(&self, record: RecordIx, group: GroupIx) -> Option<Evidence> {
        let lane = self.aligned.lanes[record]
            .iter()
            .find(|lane| lane.group == group)?;
        let newest = lane.collectives.last().max(lane.messages.last())?;
        Some(self.evidence(record, *newest, group))
    }
}
