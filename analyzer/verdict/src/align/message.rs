//! Matches a send and a receive as the two ends of one message, and numbers messages.
//!
//! The two ends count their point-to-point operations independently and share no sequence number. But the n-th message
//! that a rank sends to another in a group is the n-th that the other receives from it: (group, source, destination, n)
//! is the same at both ends.
//!
//! There are two ways to find n; both use [`ends`]. [`MessageNumbers`] sees one record at a time and gives a number
//! only if it is certain. Its caller publishes the number before it reads the record of the other end, and an exported
//! span cannot be withdrawn. It therefore needs every operation from the first one on: it gives no number after a lost
//! entry, and none to a receive after one from any source. [`super::p2p`] has the records of both ends, and must judge
//! a waiting rank even if its ring has lost the beginning: it shifts one list against the other until they fit best.
//! The result may change with the next snapshot, and it is marked if it is not certain.

use rcomm_recorder::model::{OpType, Peer, Rank};
use rcomm_recorder::publish::Dump;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Sender and receiver, as group ranks, of a message that `member` of a group of `members` sends or receives.
///
/// `None` if `op` is neither a send nor a receive, or the record does not name one member at the other end.
pub(crate) fn ends(op: OpType, peer: Peer, member: Rank, members: usize) -> Option<(Rank, Rank)> {
    let peer = other_end(peer, member, members)?;
    if op == OpType::Send {
        Some((member, peer))
    } else {
        (op == OpType::Recv).then_some((peer, member))
    }
}

/// The member at the other end. `None` for a receive from any source, if the record names no peer and the group does
/// not have two members, or if the named peer is no member.
pub(crate) fn other_end(peer: Peer, member: Rank, members: usize) -> Option<Rank> {
    match peer {
        Peer::Any => None,
        // A recorder without peers: in a group of two, the other member is the peer.
        Peer::None if members == 2 => Some(1 - member.min(1)),
        Peer::None => None,
        Peer::Rank(peer) => ((peer as usize) < members).then_some(peer),
    }
}

/// One message of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Message {
    /// The global rank of the sender.
    pub source: Rank,
    /// The global rank of the receiver.
    pub destination: Rank,
    /// The index of the message among all from `source` to `destination` in this group, from 0.
    pub nth: u64,
}

/// Numbers the messages of one record, so that both ends give a message the same number.
#[derive(Debug, Default)]
pub struct MessageNumbers {
    /// Record ids below this were counted; `None` = none yet.
    next: Option<u64>,
    /// How many messages were counted, by group, source and destination.
    counts: HashMap<(u32, Rank, Rank), u64>,
    /// By record id: the messages of the newest dump whose numbers are certain.
    numbers: BTreeMap<u64, Message>,
    /// Whether operations are missing, so all further numbers are unknown.
    broken: bool,
    /// Groups in which a receive from any source occurred.
    with_any_source: HashSet<u32>,
}

impl MessageNumbers {
    /// Counts the new operations in `dump`, which is the newest state of the record of `rank`. Forgets the numbers of
    /// operations that the ring has dropped.
    pub fn take(&mut self, rank: Rank, dump: &Dump) {
        let Some(first) = dump.entries.first() else {
            return;
        };
        self.numbers = self.numbers.split_off(&first.record_id);
        // Record ids of rcomm begin at 1, PyTorch's at 0.
        let mut next = self.next.unwrap_or(dump.recorder.first_record_id());
        let fresh = dump.entries.partition_point(|entry| entry.record_id < next);
        for entry in &dump.entries[fresh..] {
            self.broken |= entry.record_id != next;
            next = entry.record_id + 1;
            if self.broken || !entry.op.is_p2p() {
                continue;
            }
            if entry.peer == Peer::Any {
                self.with_any_source.insert(entry.group);
            }
            let Some(group) = dump.groups.get(entry.group as usize) else {
                continue;
            };
            let ranks = &group.info.ranks;
            let index = ranks.iter().position(|&member| member == rank);
            let group_rank = index.and_then(|index| Rank::try_from(index).ok());
            let found =
                group_rank.and_then(|member| ends(entry.op, entry.peer, member, ranks.len()));
            let Some((source, destination)) = found else {
                continue;
            };
            let member = |rank: Rank| ranks.get(rank as usize).copied();
            let (Some(source), Some(destination)) = (member(source), member(destination)) else {
                continue;
            };
            let count = self
                .counts
                .entry((entry.group, source, destination))
                .or_default();
            let nth = *count;
            *count += 1;
            // After a receive from any source, further receives in the group have no certain number; sends do.
            if destination != rank || !self.with_any_source.contains(&entry.group) {
                let message = Message {
                    source,
                    destination,
                    nth,
                };
                self.numbers.insert(entry.record_id, message);
            }
        }
        self.next = Some(next);
    }

    /// The message that an operation sends or receives; `None` if it is not a message of the newest dump, or its number
    /// is not certain.
    pub fn of(&self, record_id: u64) -> Option<Message> {
        self.numbers.get(&record_id).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::{Entry, ProcessGroupInfo};
    use rcomm_recorder::publish::{DumpGroup, Recorder};

    /// The record of a member of a group of ranks 4, 5 and 6.
    fn record(first: u64, ops: &[(OpType, Peer)]) -> Dump {
        let entries = (first..).zip(ops).map(|(record_id, &(op, peer))| Entry {
            record_id,
            op,
            peer,
            ..entry()
        });
        Dump {
            recorder: Recorder::Rcomm,
            groups: vec![DumpGroup {
                info: ProcessGroupInfo {
                    id: 0,
                    name: "pp_1".into(),
                    desc: "pp".into(),
                    ranks: [4, 5, 6].into(),
                },
                place: None,
                status: None,
            }],
            entries: entries.collect(),
            ..Dump::default()
        }
    }

    fn entry() -> Entry {
        let text = r#"{"version":"2.10","entries":[{"record_id":1,"pg_id":0,"process_group":["0","x"],
            "collective_seq_id":1,"p2p_seq_id":0,"op_id":1,"profiling_name":"nccl:all_reduce",
            "time_created_ns":1,"state":"completed","is_p2p":false,"retired":true,"input_sizes":[[1]],
            "output_sizes":[[1]],"input_dtypes":["Float"],"output_dtypes":["Float"],"frames":[]}]}"#;
        let (dump, problems) = Dump::read(text.as_bytes()).expect("the text is a dump");
        assert!(problems.is_empty(), "{problems:?}");
        dump.entries[0].clone()
    }

    const fn send(to: u32) -> (OpType, Peer) {
        (OpType::Send, Peer::Rank(to))
    }

    const fn recv(from: u32) -> (OpType, Peer) {
        (OpType::Recv, Peer::Rank(from))
    }

    fn numbers(rank: Rank, dumps: &[Dump]) -> Vec<Option<(Rank, Rank, u64)>> {
        let mut counted = MessageNumbers::default();
        for dump in dumps {
            counted.take(rank, dump);
        }
        let last = dumps.last().expect("there is at least one dump");
        let ids = last.entries.iter().map(|entry| entry.record_id);
        let ends = |message: Message| (message.source, message.destination, message.nth);
        ids.map(|id| counted.of(id).map(ends)).collect()
    }

    #[test]
    fn both_ends_give_a_message_the_same_number_whatever_else_they_do() {
        let collective = (OpType::AllReduce, Peer::None);
        // Rank 4 sends two messages to rank 5 and one to rank 6, interleaved with other operations.
        let four = record(1, &[send(1), collective, send(2), send(1)]);
        let five = record(1, &[recv(2), recv(0), collective, recv(0)]);
        assert_eq!(
            numbers(4, &[four]),
            [Some((4, 5, 0)), None, Some((4, 6, 0)), Some((4, 5, 1))]
        );
        assert_eq!(
            numbers(5, &[five]),
            [Some((6, 5, 0)), Some((4, 5, 0)), None, Some((4, 5, 1))]
        );
    }

    #[test]
    fn counting_continues_with_the_next_snapshot_of_a_ring() {
        let first = record(1, &[send(1), send(1), send(1)]);
        let then = record(3, &[send(1), send(1)]);
        assert_eq!(
            numbers(4, &[first, then]),
            [Some((4, 5, 2)), Some((4, 5, 3))]
        );
    }

    #[test]
    fn messages_whose_number_is_not_certain_get_none() {
        let late = record(3, &[send(1)]);
        assert_eq!(numbers(4, std::slice::from_ref(&late)), [None]);
        let first = record(1, &[send(1)]);
        assert_eq!(numbers(4, &[first, late]), [None]);
        let any = (OpType::Recv, Peer::Any);
        let uncertain = record(1, &[recv(0), any, recv(0), send(0)]);
        assert_eq!(
            numbers(5, &[uncertain]),
            [Some((4, 5, 0)), None, None, Some((5, 4, 0))]
        );
    }
}
