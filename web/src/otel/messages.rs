//! Numbers the messages of all ranks of a live view.

use crate::metrics::new_entries::{RecorderKey, recorder_key};
use rcomm_analyzer::{Message, MessageNumbers, Snapshot};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The numbered messages of each recorder, with its dump of the last call: the same dump is not counted twice.
#[derive(Debug, Default)]
pub(super) struct Messages {
    records: HashMap<RecorderKey, (MessageNumbers, Option<Arc<Dump>>)>,
}

impl Messages {
    /// Numbers the messages that are new in the snapshot.
    pub(super) fn take(&mut self, snapshot: &Snapshot) {
        let mut present = HashSet::new();
        for (rank, dump) in snapshot.ranks.iter().flat_map(|view| {
            let dumps = view.counted();
            dumps.map(|dump| (view.rank, dump))
        }) {
            let key = recorder_key(rank, dump);
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

    /// The message that the operation `record_id` of a dump sends or receives; `None` if its number is unknown.
    pub(super) fn of(&self, rank: Rank, dump: &Dump, record_id: u64) -> Option<Message> {
        let (counted, _) = self.records.get(&recorder_key(rank, dump))?;
        counted.of(record_id)
    }
}

#[cfg(test)]
mod tests {
    use super::super::operation::Operation;
    use super::*;
    use serde_json::json;

    /// The sends and receives of a member of a group of ranks 4, 5 and 6, numbered from `first`.
    fn record(first: u64, ops: &[&str]) -> Dump {
        let entry = |(id, op): (u64, &&str)| {
            json!({
                "record_id": id, "pg_id": 0, "process_group": ["pp_1", "pp"], "is_p2p": true,
                "profiling_name": format!("nccl:{op}"), "time_created_ns": 1, "state": "completed",
                "collective_seq_id": 0, "p2p_seq_id": id, "op_id": id, "retired": true, "frames": [],
                "input_sizes": [[1]], "output_sizes": [[1]],
                "input_dtypes": ["Float"], "output_dtypes": ["Float"],
            })
        };
        let entries: Vec<_> = (first..).zip(ops).map(entry).collect();
        let group = json!({"name": "pp_1", "desc": "pp", "ranks": "[4, 5, 6]"});
        let text = json!({"version": "2.10", "pg_config": {"0": group}, "entries": entries});
        let (dump, problems) = Dump::read(text.to_string().as_bytes()).expect("the text is a dump");
        assert!(problems.is_empty(), "{problems:?}");
        dump
    }

    #[test]
    fn both_ends_of_a_message_derive_one_trace_id_and_different_span_ids() {
        let four = record(0, &["send 0->2", "send 0->1", "send 0->1"]);
        let five = record(0, &["recv 1<-0", "recv 1<-0"]);
        let ids = |rank: Rank, dump: &Dump, index: usize| {
            let mut numbers = MessageNumbers::default();
            numbers.take(rank, dump);
            let entry = &dump.entries[index];
            let message = numbers.of(entry.record_id);
            let operation = Operation::new(rank, dump, entry, message);
            let shared = operation
                .shared("llama")
                .expect("the operation has a group");
            (shared.trace_id(), shared.span_id(rank, entry.record_id))
        };
        let ((sent, span), (received, other)) = (ids(4, &four, 2), ids(5, &five, 1));
        assert_eq!(sent, received);
        assert_ne!(span, other);
        assert_ne!(ids(4, &four, 1).0, sent, "two messages share a trace");
        // The number is unknown, so each end gets its own trace.
        let late_four = record(9, &["send 0->1"]);
        let late_five = record(9, &["recv 1<-0"]);
        assert_ne!(ids(4, &late_four, 0).0, ids(5, &late_five, 0).0);
    }
}
