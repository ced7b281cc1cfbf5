//! Reads a dump in PyTorch's dialect from JSON.
//!
//! The parser passes entries on one by one, so the complete entries of a truncated file are read, and the file is
//! never held as a tree of JSON values. An entry with an invalid value is skipped; for some optional fields, only
//! the value is skipped. The rest of the file is read.

mod entry;
mod visit;

use super::build::{Builder, ConfigGroup};
use super::keys::{config, failure, frame, reducer, status, top};
use super::value::{self, FailureDraft, PeerDraft, Scalar};
use super::{Cause, NOT_A_DICT, ReadProblem};
use crate::model::{ProcessGroupStatus, RankStatus, ReducerBucket, ReducerStep};
use entry::{EntrySeed, Kind};
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use visit::{Each, EachPair, Item, Key, One, any_value, scalar_visits, skip_map, skip_seq};

/// Reads `bytes` into `builder`. Returns where and why reading stopped early; `None` if it reached the end.
pub(super) fn read(bytes: &[u8], builder: &mut Builder) -> Option<ReadProblem> {
    let mut parser = serde_json::Deserializer::from_slice(bytes);
    let result = DumpSeed(builder)
        .deserialize(&mut parser)
        .and_then(|()| parser.end());
    let error = result.err()?;
    let (at, cause) = if error.is_eof() {
        (bytes.len(), Cause::Cut)
    } else {
        let at = offset(bytes, error.line(), error.column());
        // The parser's message without its position, since `ReadProblem` gives that in bytes.
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or_default();
        (at, Cause::Damaged(message.to_owned()))
    };
    Some(ReadProblem::Stopped {
        at,
        of: bytes.len(),
        cause,
        entries: builder.dump.entries.len(),
    })
}

/// The byte at a line and column, both from 1.
fn offset(bytes: &[u8], line: usize, column: usize) -> usize {
    let mut start = 0;
    for _ in 1..line {
        match bytes[start..].iter().position(|&byte| byte == b'\n') {
            Some(end) => start += end + 1,
            None => break,
        }
    }
    (start + column.saturating_sub(1)).min(bytes.len())
}

/// The whole file: a dict, or in version 1.x of the dialect a bare list of entries.
struct DumpSeed<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for DumpSeed<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for DumpSeed<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        EntriesSeed(self.0).visit_seq(seq)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let builder = self.0;
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            match &*key {
                top::ENTRIES => map.next_value_seed(EntriesSeed(builder))?,
                top::PG_CONFIG => map.next_value_seed(PgConfig(builder))?,
                top::PG_STATUS => map.next_value_seed(PgStatus(builder))?,
                top::NCCL_COMM_STATE => map.next_value_seed(CommState(builder))?,
                top::FRAMES => map.next_value_seed(FrameTable(builder))?,
                top::STACKS => map.next_value_seed(StackTable(builder))?,
                top::FAILURES => map.next_value_seed(Failures(builder))?,
                top::PEERS => map.next_value_seed(Peers(builder))?,
                top::REDUCER_STEPS => map.next_value_seed(ReducerSteps(builder))?,
                top::STATUS => {
                    let mut known = RankStatus::default();
                    let mut has_any = false;
                    map.next_value_seed(EachPair(|key: &str, item: Item<'_>| {
                        if let Item::Scalar(value) = item {
                            value::set_rank_status(&mut known, key, value);
                            has_any = true;
                        }
                    }))?;
                    builder.dump.status = has_any.then_some(known);
                }
                key => map.next_value_seed(One(|item: Item<'_>| {
                    if let Item::Scalar(value) = item {
                        value::set_top(builder, key, value);
                    }
                }))?,
            }
        }
        Ok(())
    }
}

/// The table of groups, by their names. A file that has this table is a dump.
struct PgConfig<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for PgConfig<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for PgConfig<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_seq!('de, |_| ());

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let builder = self.0;
        builder.looks_like_dump = true;
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            let name = builder.texts.intern(&key);
            let mut group = ConfigGroup {
                name,
                ..ConfigGroup::default()
            };
            map.next_value_seed(Config(builder, &mut group))?;
            builder.config.push(group);
        }
        Ok(())
    }
}

/// One group: a dict, or in version 1.x of the dialect the list of its ranks.
struct Config<'a>(&'a mut Builder, &'a mut ConfigGroup);

impl<'de> DeserializeSeed<'de> for Config<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for Config<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        let mut ranks = Vec::new();
        Ranks(&mut ranks).visit_seq(seq)?;
        self.1.ranks = ranks.into();
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self(builder, group) = self;
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            if key == config::RANKS {
                let mut ranks = Vec::new();
                map.next_value_seed(Ranks(&mut ranks))?;
                group.ranks = ranks.into();
                continue;
            }
            map.next_value_seed(One(|item: Item<'_>| match (&*key, item) {
                (config::NAME, Item::Scalar(Scalar::Text(text))) => {
                    group.name = builder.texts.intern(text);
                }
                (config::DESC, Item::Scalar(Scalar::Text(text))) => {
                    group.desc = builder.texts.intern(text);
                }
                (config::PG_ID, Item::Scalar(value)) => group.id = value.int(),
                (config::GROUP_RANK, Item::Scalar(value)) => group.own_rank = value.int(),
                (config::GROUP_SIZE, Item::Scalar(value)) => group.size = value.int(),
                _ => {}
            }))?;
        }
        Ok(())
    }
}

/// Ranks, as a string or as a list.
struct Ranks<'a>(&'a mut Vec<u32>);

impl<'de> DeserializeSeed<'de> for Ranks<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for Ranks<'_> {
    type Value = ();
    scalar_visits!(|ranks: Self, value: Scalar<'_>| {
        if let Scalar::Text(text) = value {
            *ranks.0 = value::ranks(text.as_bytes());
        }
    });
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        Each(|item: Item<'_>| {
            if let Item::Scalar(value) = item {
                self.0.extend(value.int::<u32>());
            }
        })
        .visit_seq(seq)
    }
}

/// The progress of each group, by the group's id.
struct PgStatus<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for PgStatus<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for PgStatus<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_seq!('de, |_| ());

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            let mut known = ProcessGroupStatus::default();
            map.next_value_seed(EachPair(|key: &str, item: Item<'_>| {
                let Item::Scalar(value) = item else { return };
                let Some(value) = value.int() else { return };
                match key {
                    status::ENQUEUED => known.last_enqueued = value,
                    status::STARTED => known.last_started = value,
                    status::COMPLETED => known.last_completed = value,
                    status::TIMEOUT => known.timeout_ms = u64::try_from(value).unwrap_or(0),
                    _ => {}
                }
            }))?;
            if let Ok(id) = key.trim().parse() {
                self.0.group_status.push((id, known));
            }
        }
        Ok(())
    }
}

/// What NCCL reported of each of its communicators.
struct CommState<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for CommState<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for CommState<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_seq!('de, |_| ());

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            let mut facts = Vec::new();
            map.next_value_seed(EachPair(|key: &str, item: Item<'_>| {
                if let Item::Scalar(value) = item {
                    facts.push((key.to_owned(), value.to_string()));
                }
            }))?;
            self.0.dump.nccl_comm_state.push((key.into_owned(), facts));
        }
        Ok(())
    }
}

/// rcomm's list of connections.
struct Peers<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for Peers<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for Peers<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        loop {
            let mut draft = PeerDraft::default();
            let pairs = EachPair(|key: &str, item: Item<'_>| {
                if let Item::Scalar(value) = item {
                    draft.set(key, value);
                }
            });
            if seq.next_element_seed(pairs)?.is_none() {
                return Ok(());
            }
            draft.finish(self.0);
        }
    }
}

/// rcomm's list of steps of reducers.
struct ReducerSteps<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for ReducerSteps<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for ReducerSteps<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        loop {
            let mut step = ReducerStep::default();
            if seq.next_element_seed(OneReducerStep(&mut step))?.is_none() {
                return Ok(());
            }
            value::add_reducer_step(self.0, step);
        }
    }
}

/// One step of a reducer: a dict.
struct OneReducerStep<'a>(&'a mut ReducerStep);

impl<'de> DeserializeSeed<'de> for OneReducerStep<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for OneReducerStep<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_seq!('de, |_| ());

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let step = self.0;
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            match &*key {
                reducer::BUCKETS => map.next_value_seed(ReducerBuckets(step))?,
                key => map.next_value_seed(One(|item: Item<'_>| {
                    if let Item::Scalar(value) = item {
                        value::set_reducer_step(step, key, value);
                    }
                }))?,
            }
        }
        Ok(())
    }
}

/// The buckets of a reducer's step, a list.
struct ReducerBuckets<'a>(&'a mut ReducerStep);

impl<'de> DeserializeSeed<'de> for ReducerBuckets<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for ReducerBuckets<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        loop {
            let mut bucket = ReducerBucket::default();
            let pairs = EachPair(|key: &str, item: Item<'_>| {
                if let Item::Scalar(value) = item {
                    value::set_reducer_bucket(&mut bucket, key, value);
                }
            });
            if seq.next_element_seed(pairs)?.is_none() {
                return Ok(());
            }
            value::add_reducer_bucket(self.0, bucket);
        }
    }
}

/// rcomm's list of failures.
struct Failures<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for Failures<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for Failures<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        loop {
            let mut draft = FailureDraft::default();
            if seq.next_element_seed(OneFailure(&mut draft))?.is_none() {
                return Ok(());
            }
            draft.finish(self.0);
        }
    }
}

/// One failure: a dict. The ranks and the operation it names are containers of their own.
struct OneFailure<'a>(&'a mut FailureDraft);

impl<'de> DeserializeSeed<'de> for OneFailure<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for OneFailure<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_seq!('de, |_| ());

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let draft = self.0;
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            match &*key {
                failure::RANKS => map.next_value_seed(Ranks(&mut draft.ranks))?,
                failure::OPERATION => {
                    map.next_value_seed(EachPair(|key: &str, item: Item<'_>| {
                        if let Item::Scalar(value) = item {
                            draft.set_operation(key, value);
                        }
                    }))?;
                }
                key => map.next_value_seed(One(|item: Item<'_>| {
                    if let Item::Scalar(value) = item {
                        draft.set(key, value);
                    }
                }))?,
            }
        }
        Ok(())
    }
}

/// rcomm's table of frames.
struct FrameTable<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for FrameTable<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for FrameTable<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let builder = self.0;
        while let Some(frame) = seq.next_element_seed(FrameSeed(builder))? {
            builder.frame_table.push(frame);
        }
        Ok(())
    }
}

/// Reads one frame and returns its index in the dump.
struct FrameSeed<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for FrameSeed<'_> {
    type Value = u32;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u32, D::Error> {
        let texts = &mut self.0.texts;
        let empty = texts.intern("");
        let (mut name, mut filename, mut line) = (empty, empty, 0);
        EachPair(|key: &str, item: Item<'_>| match (key, item) {
            (frame::NAME, Item::Scalar(Scalar::Text(text))) => name = texts.intern(text),
            (frame::FILENAME, Item::Scalar(Scalar::Text(text))) => filename = texts.intern(text),
            (frame::LINE, Item::Scalar(value)) => line = value.int().unwrap_or(0),
            _ => {}
        })
        .deserialize(deserializer)?;
        Ok(self.0.frame(name, filename, line))
    }
}

/// rcomm's table of stacks: lists of indices into the table of frames.
struct StackTable<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for StackTable<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for StackTable<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let builder = self.0;
        loop {
            let mut indices: Vec<u32> = Vec::new();
            let each = Each(|item: Item<'_>| {
                if let Item::Scalar(value) = item {
                    indices.extend(value.int::<u32>());
                }
            });
            if seq.next_element_seed(each)?.is_none() {
                return Ok(());
            }
            builder.stack_rows.push(indices);
        }
    }
}

/// The list of entries. If it is not a list, its kind is noted instead.
struct EntriesSeed<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for EntriesSeed<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for EntriesSeed<'_> {
    type Value = ();
    scalar_visits!(|entries: Self, value: Scalar<'_>| {
        entries.0.entries_kind_if_no_list = Some(value.kind());
    });
    skip_map!('de, |entries: Self| entries.0.entries_kind_if_no_list = Some("a dict"));

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let builder = self.0;
        // An empty list of entries does not show that the file is a dump; `pg_config` does.
        while let Some(kind) = seq.next_element_seed(EntrySeed(builder))? {
            match kind {
                Kind::Dict => builder.push(),
                Kind::Other => builder.reject_entry(NOT_A_DICT),
            }
            builder.looks_like_dump |= !builder.dump.entries.is_empty();
        }
        Ok(())
    }
}
