//! Numbers the messages between two ranks, so that both ends get the same number.
//!
//! The two ends count their point-to-point operations independently and share no sequence number. But
//! the n-th message that a rank of a group sends to another is the n-th that the other receives from
//! it. Counting needs every operation from the first one on: after a lost entry, or after a receive
//! from any source, the number is unknown.

use rcomm_analyzer::Snapshot;
use rcomm_recorder::model::{Peer, Rank};
use rcomm_recorder::publish::{Dump, Recorder};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// The sender's rank in the world.
    pub(super) source: Rank,
    /// The receiver's rank in the world.
    pub(super) destination: Rank,
    /// Which of all messages from the one to the other in this group, from 0.
    pub(super) nth: u64,
}

/// One recorder of one process.
type RecordKey = (Rank, Recorder, u32, u32);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Messages {
    records: HashMap<RecordKey, (MessageCounts, Option<Arc<Dump>>)>,
}

impl Messages {
    /// Counts what is new.
    pub(super) fn take(&mut self, snapshot: &Snapshot) {
        let mut present = HashSet::new();
        for (rank, dump) in snapshot.ranks.iter().flat_map(|view| {
            let dumps = view.dumps.iter();
            dumps.map(|dump| (view.rank, dump))
        }) {
            let key = key(rank, dump);
            present.insert(key);
            let (counted, last) = self.records.entry(key).or_default();
            let same = |last: &Arc<Dump>| Arc::ptr_eq(last, dump);
            if !last.as_ref().is_some_and(same) {
                counted.take(rank, dump);
                *last = Some(dump.clone());
            }
        }
        self.records.retain(|key, _| present.contains(key));
    }

    /// The message of an operation of a record, if its number is known.
    pub(super) fn of(&self, rank: Rank, dump: &Dump, record_id: u64) -> Option<Message> {
        let (counted, _) = self.records.get(&key(rank, dump))?;
        counted.of(record_id)
    }
}

fn key(rank: Rank, dump: &Dump) -> RecordKey {
    let id = &dump.identity;
    (rank, dump.recorder, id.attempt, id.pid)
}

/// Message counts of one record.
#[derive(Debug, Default)]
pub(super) struct MessageCounts {
    /// Ids below this were counted; `None` = none yet.
    next: Option<u64>,
    /// By group, source and destination.
    counts: HashMap<(u32, Rank, Rank), u64>,
    numbers: BTreeMap<u64, Message>,
    /// Operations are missing: numbers are unknown from here on.
    broken: bool,
    /// Groups in which a receive from any source occurred.
    vague: HashSet<u32>,
}

impl MessageCounts {
    /// Counts what is new in the record.
    pub(super) fn take(&mut self, rank: Rank, dump: &Dump) {
        let Some(first) = dump.entries.first() else {
            return;
        };
        self.numbers = self.numbers.split_off(&first.record_id);
        // Our own ids begin at 1, PyTorch's at 0.
        let mut next = self.next.unwrap_or(dump.recorder.first_record_id());
        let fresh = dump.entries.partition_point(|entry| entry.record_id < next);
        for entry in &dump.entries[fresh..] {
            self.broken |= entry.record_id != next;
            next = entry.record_id + 1;
            if self.broken || !entry.op.is_p2p() {
                continue;
            }
            if entry.peer == Peer::Any {
                self.vague.insert(entry.group);
            }
            let Some(group) = dump.groups.get(entry.group as usize) else {
                continue;
            };
            let ranks = &group.info.ranks;
            let own = ranks.iter().position(|&member| member == rank);
            let own = own.and_then(|own| Rank::try_from(own).ok());
            let Some((source, destination)) = own.and_then(|own| entry.p2p_ends(own)) else {
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
            // Receives from any source are not counted; sends are.
            if destination != rank || !self.vague.contains(&entry.group) {
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

    /// The message of an operation.
    pub(super) fn of(&self, record_id: u64) -> Option<Message> {
        self.numbers.get(&record_id).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::super::operation::Operation;
    use super::*;
    use rcomm_recorder::model::OpType;
    use rcomm_recorder::model::{Entry, ProcessGroupInfo};
    use rcomm_recorder::publish::DumpGroup;

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
        let (dump, problems) = Dump::read(text.as_bytes()).expect("a dump");
        assert!(problems.is_empty(), "{problems:?}");
        dump.entries[0].clone()
    }

    const fn send(to: u32) -> (OpType, Peer) {
        (OpType::Send, Peer::Rank(to))
    }

    const fn recv(from: u32) -> (OpType, Peer) {
        (OpType::Recv, Peer::Rank(from))
    }

    fn numbers(rank: Rank, looks: &[Dump]) -> Vec<Option<(Rank, Rank, u64)>> {
        let mut counted = MessageCounts::default();
        for dump in looks {
            counted.take(rank, dump);
        }
        let last = looks.last().expect("a look");
        let ids = last.entries.iter().map(|entry| entry.record_id);
        let ends = |message: Message| (message.source, message.destination, message.nth);
        ids.map(|id| counted.of(id).map(ends)).collect()
    }

    #[test]
    fn both_ends_give_a_message_the_same_number_whatever_else_they_do() {
        let ring = (OpType::AllReduce, Peer::None);
        // Rank 4 sends two messages to rank 5 and one to rank 6, interleaved with other operations.
        let four = record(1, &[send(1), ring, send(2), send(1)]);
        let five = record(1, &[recv(2), recv(0), ring, recv(0)]);
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
    fn both_ends_of_a_message_meet_in_one_trace() {
        let four = record(1, &[send(2), send(1), send(1)]);
        let five = record(1, &[recv(0), recv(0)]);
        let ids = |rank: Rank, dump: &Dump, at: usize| {
            let mut counted = MessageCounts::default();
            counted.take(rank, dump);
            let entry = &dump.entries[at];
            let message = counted.of(entry.record_id);
            let operation = Operation::new(rank, dump, entry, message);
            let shared = operation.shared("llama").expect("a group");
            (shared.trace_id(), shared.span_id(rank, entry.record_id))
        };
        let ((sent, span), (received, other)) = (ids(4, &four, 2), ids(5, &five, 1));
        assert_eq!(sent, received);
        assert_ne!(span, other);
        assert_ne!(ids(4, &four, 1).0, sent, "another message");
        // The number is unknown, so each end gets its own trace.
        let (late_four, late_five) = (record(9, &[send(1)]), record(9, &[recv(0)]));
        assert_ne!(ids(4, &late_four, 0).0, ids(5, &late_five, 0).0);
    }

    #[test]
    fn a_ring_that_goes_on_is_counted_on() {
        let first = record(1, &[send(1), send(1), send(1)]);
        let then = record(3, &[send(1), send(1)]);
        assert_eq!(
            numbers(4, &[first, then]),
            [Some((4, 5, 2)), Some((4, 5, 3))]
        );
    }

    #[test]
    fn where_operations_are_missing_nothing_is_made_up() {
        let late = record(3, &[send(1)]);
        assert_eq!(numbers(4, std::slice::from_ref(&late)), [None]);
        let first = record(1, &[send(1)]);
        assert_eq!(numbers(4, &[first, late]), [None]);
        let any = (OpType::Recv, Peer::Any);
        let vague = record(1, &[recv(0), any, recv(0), send(0)]);
        assert_eq!(
            numbers(5, &[vague]),
            [Some((4, 5, 0)), None, None, Some((5, 4, 0))]
        );
    }
}
