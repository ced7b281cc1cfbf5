//! The data of one operation's span, for the spans of rcomm-web and for those of a program.

use crate::metrics::new_entries::is_completed;
use crate::metrics::trace_id::SharedOp;
use rcomm_analyzer::{Message, seq_of};
use rcomm_recorder::model::{Entry, Rank};
use rcomm_recorder::publish::Dump;

/// One operation, as one rank recorded it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operation<'a> {
    pub(super) rank: Rank,
    pub(super) dump: &'a Dump,
    pub(super) entry: &'a Entry,
    /// The message that this operation sends or receives, if its number is known.
    pub(super) message: Option<Message>,
    /// Source and destination of the message, which identify its trace; for a collective, the group's ranks do. If
    /// `message` is `None`, `rank` twice.
    ends: [Rank; 2],
}

/// The value of a span's attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AttributeValue {
    Text(String),
    Number(u64),
}

impl<'a> Operation<'a> {
    pub(super) fn new(
        rank: Rank,
        dump: &'a Dump,
        entry: &'a Entry,
        message: Option<Message>,
    ) -> Self {
        let ends = message.map_or([rank; 2], |message| [message.source, message.destination]);
        Self {
            rank,
            dump,
            entry,
            message,
            ends,
        }
    }

    /// The identity that all members of a collective, or both ends of a message, derive alike. A send or receive
    /// whose message number is unknown, or the end of a batch of them, gets one that only this rank derives. `None` if
    /// the dump lacks the group.
    pub(super) fn shared<'s>(&'s self, job: &'s str) -> Option<SharedOp<'s>> {
        let group = &self.dump.groups.get(self.entry.group as usize)?.info;
        let (kind, ranks, seq) = match self.message {
            Some(message) => ("message", &self.ends[..], message.nth),
            None if self.entry.is_p2p || self.entry.op.is_p2p() => {
                ("p2p", &self.ends[..1], self.entry.p2p_seq_id)
            }
            None => ("collective", &*group.ranks, self.entry.collective_seq_id),
        };
        Some(SharedOp {
            job,
            group: &group.name,
            ranks,
            kind,
            seq,
        })
    }

    /// Name of the span: the operation and, if there is one, the description of the group.
    pub(super) fn name(&self) -> String {
        let group = self.dump.groups.get(self.entry.group as usize);
        let desc = group.map_or("", |group| group.info.desc.as_str());
        let name = format!("{} {desc}", self.entry.op.name());
        name.trim_end().to_owned()
    }

    /// Attributes of the span.
    pub(super) fn attributes(&self) -> Vec<(&'static str, AttributeValue)> {
        let (dump, entry) = (self.dump, self.entry);
        let text = |text: &str| AttributeValue::Text(text.to_owned());
        let mut attributes = vec![
            ("rcomm.op", text(entry.op.name())),
            ("rcomm.seq", AttributeValue::Number(seq_of(entry))),
            ("rcomm.rank", AttributeValue::Number(self.rank.into())),
            ("rcomm.state", text(entry.state.name())),
        ];
        if let Some(group) = dump.groups.get(entry.group as usize) {
            attributes.push(("rcomm.group.id", text(&group.info.name)));
            attributes.push(("rcomm.group.desc", text(&group.info.desc)));
        }
        if let Some(signature) = dump.signatures.get(entry.signature as usize) {
            attributes.push((
                "rcomm.bytes",
                AttributeValue::Number(signature.input_bytes()),
            ));
            attributes.push(("rcomm.backend", text(&signature.backend)));
            if let Some(dtype) = signature.input_dtypes.first() {
                attributes.push(("rcomm.dtype", text(dtype)));
            }
        }
        if let Some(size) = dump.identity.world_size {
            attributes.push(("rcomm.world_size", AttributeValue::Number(size.into())));
        }
        if let Some(message) = self.message {
            attributes.push((
                "rcomm.p2p.source",
                AttributeValue::Number(message.source.into()),
            ));
            attributes.push((
                "rcomm.p2p.destination",
                AttributeValue::Number(message.destination.into()),
            ));
            attributes.push(("rcomm.p2p.message", AttributeValue::Number(message.nth)));
        }
        attributes
    }

    /// Time of the issue, wall clock, ns since the epoch.
    pub(super) fn began_ns(&self) -> i64 {
        self.entry.time_created_ns
    }

    /// When the recorder noticed the end, wall clock, ns since the epoch; not before the issue. If no such time was
    /// recorded: the time of the issue plus the measured duration, or the time of the issue if none was measured.
    pub(super) fn ended_ns(&self) -> i64 {
        let entry = self.entry;
        match entry.time_discovered_completed_ns {
            0 => {
                let ms = entry.duration_ms.map_or(0.0, f64::from);
                entry.time_created_ns.saturating_add((ms * 1e6) as i64)
            }
            ns => ns.max(entry.time_created_ns),
        }
    }

    /// Duration in seconds: the backend's measurement if there is one, else from the issue to the noticed end.
    pub(super) fn wait_s(&self) -> f64 {
        let noted = self.ended_ns().saturating_sub(self.began_ns()) as f64 / 1e9;
        let measured = self.entry.duration_ms;
        measured.map_or(noted, |ms| f64::from(ms) / 1e3)
    }

    /// Error message for the span of an operation that has ended; `None` if it completed.
    pub(super) fn error(&self) -> Option<&'static str> {
        let failed = !is_completed(self.dump, self.entry);
        failed.then_some("ended with an error or a time-out")
    }
}
