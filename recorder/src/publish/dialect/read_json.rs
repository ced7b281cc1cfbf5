//! The dialect as JSON.
//!
//! Entries are taken over one by one as the parser meets them, so what came before a cut is kept and
//! nothing is held twice. A value of a kind that makes no sense costs its entry, not the file.

use super::build::{Builder, ConfigGroup};
use super::intern::Text;
use super::keys::{Field, config, frame, status, top};
use super::value::{self, Scalar};
use super::{Cause, ReadProblem};
use crate::model::{ProcessGroupStatus, RankStatus};
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Reads `bytes` into `builder`.
pub(super) fn read(bytes: &[u8], builder: &mut Builder) -> Option<ReadProblem> {
    let mut parser = serde_json::Deserializer::from_slice(bytes);
    let result = Whole(builder)
        .deserialize(&mut parser)
        .and_then(|()| parser.end());
    let error = result.err()?;
    let (at, cause) = if error.is_eof() {
        (bytes.len(), Cause::Cut)
    } else {
        let at = offset(bytes, error.line(), error.column());
        // The parser's own words, without its position: we give the byte.
        let what = error.to_string();
        let what = what.split(" at line ").next().unwrap_or_default();
        (at, Cause::Damaged(what.to_owned()))
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

/// Which container a visitor met, if any.
enum Met<'a> {
    Scalar(Scalar<'a>),
    Container,
}

/// Visits any value: scalars go to `scalar`, containers to whatever the type overrides.
macro_rules! scalar_visits {
    ($take:expr) => {
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a value of a flight recorder dump")
        }
        fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
            Ok($take(self, Scalar::Bool(value)))
        }
        fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
            Ok($take(self, Scalar::Int(value)))
        }
        fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            Ok($take(self, Scalar::Int(value)))
        }
        fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
            Ok($take(self, Scalar::Float(value)))
        }
        fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
            Ok($take(self, Scalar::Text(value)))
        }
        fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
            Ok($take(self, Scalar::None))
        }
    };
}

macro_rules! skip_seq {
    ($de:lifetime, $take:expr) => {
        fn visit_seq<A: SeqAccess<$de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            while seq.next_element::<IgnoredAny>()?.is_some() {}
            Ok($take(self))
        }
    };
}

macro_rules! skip_map {
    ($de:lifetime, $take:expr) => {
        fn visit_map<A: MapAccess<$de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            Ok($take(self))
        }
    };
}

macro_rules! any_value {
    ($de:lifetime) => {
        type Value = ();
        fn deserialize<D: Deserializer<$de>>(self, deserializer: D) -> Result<(), D::Error> {
            deserializer.deserialize_any(self)
        }
    };
}

/// Hands one scalar, or the fact that it was a container, to a function.
struct One<F>(F);

impl<'de, F: FnOnce(Met<'_>)> DeserializeSeed<'de> for One<F> {
    any_value!('de);
}

impl<'de, F: FnOnce(Met<'_>)> Visitor<'de> for One<F> {
    type Value = ();
    scalar_visits!(|one: Self, scalar: Scalar<'_>| (one.0)(Met::Scalar(scalar)));
    skip_seq!('de, |one: Self| (one.0)(Met::Container));
    skip_map!('de, |one: Self| (one.0)(Met::Container));
}

/// Hands every element of a list to a function; anything but a list is passed over.
struct Each<F>(F);

impl<'de, F: FnMut(Met<'_>)> DeserializeSeed<'de> for Each<F> {
    any_value!('de);
}

impl<'de, F: FnMut(Met<'_>)> Visitor<'de> for Each<F> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(One(&mut self.0))?.is_some() {}
        Ok(())
    }
}

/// Hands every key and scalar of a map to a function; anything but a map is passed over.
struct EachPair<F>(F);

impl<'de, F: FnMut(&str, Met<'_>)> DeserializeSeed<'de> for EachPair<F> {
    any_value!('de);
}

impl<'de, F: FnMut(&str, Met<'_>)> Visitor<'de> for EachPair<F> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_seq!('de, |_| ());

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Key<'de>>()? {
            map.next_value_seed(One(|met: Met<'_>| (self.0)(&key.0, met)))?;
        }
        Ok(())
    }
}

/// A key: borrowed from the file unless it holds an escape.
struct Key<'de>(std::borrow::Cow<'de, str>);

impl<'de> serde::Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }
            fn visit_borrowed_str<E: Error>(self, key: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(key.into()))
            }
            fn visit_str<E: Error>(self, key: &str) -> Result<Key<'de>, E> {
                Ok(Key(key.to_owned().into()))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

/// The whole file: a dict, or before version 2.0 a bare list of entries.
struct Whole<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for Whole<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for Whole<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        Entries(self.0).visit_seq(seq)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let builder = self.0;
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            match &*key {
                top::ENTRIES => map.next_value_seed(Entries(builder))?,
                top::PG_CONFIG => map.next_value_seed(PgConfig(builder))?,
                top::PG_STATUS => map.next_value_seed(PgStatus(builder))?,
                top::NCCL_COMM_STATE => map.next_value_seed(CommState(builder))?,
                top::FRAMES => map.next_value_seed(FrameTable(builder))?,
                top::STACKS => map.next_value_seed(StackTable(builder))?,
                top::STATUS => {
                    let mut known = RankStatus::default();
                    let mut any = false;
                    map.next_value_seed(EachPair(|key: &str, met: Met<'_>| {
                        if let Met::Scalar(value) = met {
                            value::set_rank_status(&mut known, key, value);
                            any = true;
                        }
                    }))?;
                    builder.dump.status = any.then_some(known);
                }
                key => map.next_value_seed(One(|met: Met<'_>| {
                    if let Met::Scalar(value) = met {
                        value::set_top(builder, key, value);
                    }
                }))?,
            }
        }
        Ok(())
    }
}

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

/// One group: a dict, or in version 1 the list of its ranks.
struct Config<'a>(&'a mut Builder, &'a mut ConfigGroup);

impl<'de> DeserializeSeed<'de> for Config<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for Config<'_> {
    type Value = ();
    scalar_visits!(|_, _| ());

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        Ranks(&mut self.1.ranks).visit_seq(seq)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self(builder, group) = self;
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            if key == config::RANKS {
                map.next_value_seed(Ranks(&mut group.ranks))?;
                continue;
            }
            map.next_value_seed(One(|met: Met<'_>| match (&*key, met) {
                (config::NAME, Met::Scalar(Scalar::Text(text))) => {
                    group.name = builder.texts.intern(text);
                }
                (config::DESC, Met::Scalar(Scalar::Text(text))) => {
                    group.desc = builder.texts.intern(text);
                }
                (config::PG_ID, Met::Scalar(value)) => group.id = value.int(),
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
            *ranks.0 = value::ranks(text);
        }
    });
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        Each(|met: Met<'_>| {
            if let Met::Scalar(value) = met {
                self.0.extend(value.int::<u32>());
            }
        })
        .visit_seq(seq)
    }
}

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
            map.next_value_seed(EachPair(|key: &str, met: Met<'_>| {
                let Met::Scalar(value) = met else { return };
                let Some(value) = value.int() else { return };
                match key {
                    status::ENQUEUED => known.last_enqueued = value,
                    status::STARTED => known.last_started = value,
                    status::COMPLETED => known.last_completed = value,
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
            map.next_value_seed(EachPair(|key: &str, met: Met<'_>| {
                if let Met::Scalar(value) = met {
                    facts.push((key.to_owned(), value.to_string()));
                }
            }))?;
            self.0.dump.nccl_comm_state.push((key.into_owned(), facts));
        }
        Ok(())
    }
}

/// Our table of frames.
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

/// One frame; its value is our number for it.
struct FrameSeed<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for FrameSeed<'_> {
    type Value = u32;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u32, D::Error> {
        let texts = &mut self.0.texts;
        let empty = texts.intern("");
        let (mut name, mut filename, mut line) = (empty, empty, 0);
        EachPair(|key: &str, met: Met<'_>| match (key, met) {
            (frame::NAME, Met::Scalar(Scalar::Text(text))) => name = texts.intern(text),
            (frame::FILENAME, Met::Scalar(Scalar::Text(text))) => filename = texts.intern(text),
            (frame::LINE, Met::Scalar(value)) => line = value.int().unwrap_or(0),
            _ => {}
        })
        .deserialize(deserializer)?;
        Ok(self.0.frame(name, filename, line))
    }
}

/// Our table of stacks: lists of indices into the table of frames.
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
            let each = Each(|met: Met<'_>| {
                if let Met::Scalar(value) = met {
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

struct Entries<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for Entries<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for Entries<'_> {
    type Value = ();
    scalar_visits!(|entries: Self, value: Scalar<'_>| {
        entries.0.no_list = Some(value.kind());
    });
    skip_map!('de, |entries: Self| entries.0.no_list = Some("a dict"));

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let builder = self.0;
        // An empty list of entries is a dump's as soon as anything else is.
        while let Some(kind) = seq.next_element_seed(EntrySeed(builder))? {
            match kind {
                Kind::Dict => builder.push(),
                Kind::Else => builder.reject_entry("(not a dict)"),
            }
            builder.looks_like_dump |= !builder.dump.entries.is_empty();
        }
        Ok(())
    }
}

enum Kind {
    Dict,
    Else,
}

/// One entry, into the draft.
struct EntrySeed<'a>(&'a mut Builder);

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = Kind;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Kind, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = Kind;
    scalar_visits!(|_, _| Kind::Else);
    skip_seq!('de, |_| Kind::Else);

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Kind, A::Error> {
        let builder = self.0;
        while let Some(field) = map.next_key::<FieldKey>()? {
            map.next_value_seed(FieldSeed(builder, field.0))?;
        }
        Ok(Kind::Dict)
    }
}

struct FieldKey(Field);

impl<'de> serde::Deserialize<'de> for FieldKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl Visitor<'_> for KeyVisitor {
            type Value = FieldKey;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key of an entry")
            }
            fn visit_str<E: Error>(self, key: &str) -> Result<FieldKey, E> {
                Ok(FieldKey(Field::of(key.as_bytes())))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

/// One field of the draft.
struct FieldSeed<'a>(&'a mut Builder, Field);

impl FieldSeed<'_> {
    fn scalar(self, value: Scalar<'_>) {
        let Self(builder, field) = self;
        let texts = &mut builder.texts;
        let draft = &mut builder.draft;
        let mut text = |value: Scalar<'_>| -> Option<Text> {
            match value {
                Scalar::Text(text) => Some(texts.intern(text)),
                Scalar::Int(number) => Some(texts.intern(&number.to_string())),
                _ => None,
            }
        };
        let taken = match field {
            Field::ProfilingName => {
                draft.profiling_name = text(value);
                draft.profiling_name.map(|_| ())
            }
            Field::State => match value {
                Scalar::Text(name) => value::state(name.as_bytes()).map(|it| draft.state = it),
                _ => None,
            },
            Field::ThreadId => {
                draft.thread_id = text(value);
                Some(())
            }
            Field::ThreadName => {
                draft.thread_name = text(value);
                Some(())
            }
            Field::OpName => {
                draft.op_name = text(value);
                Some(())
            }
            Field::Unknown => Some(()),
            // Lists that are none are lists that were not recorded.
            Field::InputSplits | Field::OutputSplits | Field::Frames => {
                (value == Scalar::None).then_some(())
            }
            Field::ProcessGroup
            | Field::InputSizes
            | Field::OutputSizes
            | Field::InputDtypes
            | Field::OutputDtypes => None,
            _ => value::set_scalar(draft, field, value),
        };
        if taken.is_none() {
            draft.reject(field);
        }
    }
}

impl<'de> DeserializeSeed<'de> for FieldSeed<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for FieldSeed<'_> {
    type Value = ();
    scalar_visits!(FieldSeed::scalar);

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        if self.1 != Field::Unknown {
            self.0.draft.reject(self.1);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Self(builder, field) = self;
        let Builder { draft, texts, .. } = &mut *builder;
        let mut bad = false;
        match field {
            Field::InputSizes | Field::OutputSizes => {
                let sizes = match field {
                    Field::InputSizes => &mut draft.input_sizes,
                    _ => &mut draft.output_sizes,
                };
                while seq.next_element_seed(Shape(sizes, &mut bad))?.is_some() {}
            }
            Field::InputSplits | Field::OutputSplits => {
                let splits = match field {
                    Field::InputSplits => &mut draft.input_splits,
                    _ => &mut draft.output_splits,
                };
                Each(|met: Met<'_>| match met {
                    Met::Scalar(value) => match value.int() {
                        Some(elements) => splits.push(elements),
                        None => bad = true,
                    },
                    Met::Container => bad = true,
                })
                .visit_seq(seq)?;
            }
            Field::InputDtypes | Field::OutputDtypes => {
                let dtypes = match field {
                    Field::InputDtypes => &mut draft.input_dtypes,
                    _ => &mut draft.output_dtypes,
                };
                Each(|met: Met<'_>| match met {
                    Met::Scalar(Scalar::Text(name)) => dtypes.push(texts.intern(name).0.into()),
                    _ => bad = true,
                })
                .visit_seq(seq)?;
            }
            Field::ProcessGroup => {
                let mut parts = [None; 2];
                let mut at = 0;
                Each(|met: Met<'_>| {
                    if let (Met::Scalar(Scalar::Text(name)), Some(part)) = (met, parts.get_mut(at))
                    {
                        *part = Some(texts.intern(name));
                    }
                    at += 1;
                })
                .visit_seq(seq)?;
                let empty = texts.intern("");
                draft.group = parts[0].map(|name| (name, parts[1].unwrap_or(empty)));
                bad = draft.group.is_none();
            }
            Field::Frames => {
                builder.frames_of_stack.clear();
                while let Some(frame) = seq.next_element_seed(FrameSeed(builder))? {
                    builder.frames_of_stack.push(frame);
                }
                if !builder.frames_of_stack.is_empty() {
                    builder.draft.stack = Some(builder.stack());
                }
            }
            _ => {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                bad = field != Field::Unknown;
            }
        }
        if bad {
            builder.draft.reject(field);
        }
        Ok(())
    }
}

/// One shape, appended as (dimensions, extents...).
struct Shape<'a>(&'a mut Vec<u64>, &'a mut bool);

impl<'de> DeserializeSeed<'de> for Shape<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for Shape<'_> {
    type Value = ();
    scalar_visits!(|shape: Self, _| *shape.1 = true);
    skip_map!('de, |shape: Self| *shape.1 = true);

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        let Self(sizes, bad) = self;
        let at = sizes.len();
        sizes.push(0);
        Each(|met: Met<'_>| match met {
            Met::Scalar(Scalar::Int(extent)) if extent >= 0 => sizes.push(extent as u64),
            _ => *bad = true,
        })
        .visit_seq(seq)?;
        sizes[at] = (sizes.len() - at - 1) as u64;
        Ok(())
    }
}
