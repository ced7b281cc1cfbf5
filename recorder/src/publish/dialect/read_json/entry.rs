//! One entry, field by field.

use super::FrameSeed;
use super::visit::{Each, Item, any_value, scalar_visits, skip_map, skip_seq};
use crate::publish::dialect::build::Builder;
use crate::publish::dialect::intern::Text;
use crate::publish::dialect::keys::Field;
use crate::publish::dialect::value::{self, Scalar};
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Whether a list element is a dict, which is read as an entry.
pub(super) enum Kind {
    Dict,
    Other,
}

/// Reads one entry into the draft.
pub(super) struct EntrySeed<'a>(pub(super) &'a mut Builder);

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = Kind;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Kind, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = Kind;
    scalar_visits!(|_, _| Kind::Other);
    skip_seq!('de, |_| Kind::Other);

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
        struct EntryKeyVisitor;
        impl Visitor<'_> for EntryKeyVisitor {
            type Value = FieldKey;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key of an entry")
            }
            fn visit_str<E: Error>(self, key: &str) -> Result<FieldKey, E> {
                Ok(FieldKey(Field::from_key(key.as_bytes())))
            }
        }
        deserializer.deserialize_str(EntryKeyVisitor)
    }
}

/// Reads one field into the draft.
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
        let stored = match field {
            Field::ProfilingName => {
                draft.fields.profiling_name = text(value);
                draft.fields.profiling_name.map(|_| ())
            }
            Field::State => match value {
                Scalar::Text(name) => {
                    value::state(name.as_bytes()).map(|state| draft.fields.state = state)
                }
                _ => None,
            },
            Field::ThreadId => {
                draft.fields.thread_id = text(value);
                Some(())
            }
            Field::ThreadName => {
                draft.fields.thread_name = text(value);
                Some(())
            }
            Field::OpName => {
                draft.fields.op_name = text(value);
                Some(())
            }
            Field::Backend => {
                draft.fields.backend = text(value);
                Some(())
            }
            Field::Unknown => Some(()),
            // `null` instead of the list means that it was not recorded; any other scalar is invalid.
            Field::InputSplits | Field::OutputSplits | Field::Frames => {
                (value == Scalar::None).then_some(())
            }
            Field::ProcessGroup
            | Field::InputSizes
            | Field::OutputSizes
            | Field::InputDtypes
            | Field::OutputDtypes => None,
            _ => value::set_scalar(&mut draft.fields, field, value),
        };
        if stored.is_none() {
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
        let mut is_invalid = false;
        match field {
            Field::InputSizes | Field::OutputSizes => {
                let sizes = match field {
                    Field::InputSizes => &mut draft.input_sizes,
                    _ => &mut draft.output_sizes,
                };
                while seq
                    .next_element_seed(Shape(sizes, &mut is_invalid))?
                    .is_some()
                {}
            }
            Field::InputSplits | Field::OutputSplits => {
                let splits = match field {
                    Field::InputSplits => &mut draft.input_splits,
                    _ => &mut draft.output_splits,
                };
                Each(|item: Item<'_>| match item {
                    Item::Scalar(value) => match value.int() {
                        Some(elements) => splits.push(elements),
                        None => is_invalid = true,
                    },
                    Item::Container => is_invalid = true,
                })
                .visit_seq(seq)?;
            }
            Field::InputDtypes | Field::OutputDtypes => {
                let dtypes = match field {
                    Field::InputDtypes => &mut draft.input_dtypes,
                    _ => &mut draft.output_dtypes,
                };
                Each(|item: Item<'_>| match item {
                    Item::Scalar(Scalar::Text(name)) => dtypes.push(texts.intern(name).0.into()),
                    _ => is_invalid = true,
                })
                .visit_seq(seq)?;
            }
            Field::ProcessGroup => {
                let mut parts = [None; 2];
                let mut index = 0;
                Each(|item: Item<'_>| {
                    if let (Item::Scalar(Scalar::Text(name)), Some(part)) =
                        (item, parts.get_mut(index))
                    {
                        *part = Some(texts.intern(name));
                    }
                    index += 1;
                })
                .visit_seq(seq)?;
                let empty = texts.intern("");
                draft.fields.group = parts[0].map(|name| (name, parts[1].unwrap_or(empty)));
                is_invalid = draft.fields.group.is_none();
            }
            Field::Frames => {
                builder.frames_of_stack.clear();
                while let Some(frame) = seq.next_element_seed(FrameSeed(builder))? {
                    builder.frames_of_stack.push(frame);
                }
                if !builder.frames_of_stack.is_empty() {
                    builder.draft.fields.stack = Some(builder.stack());
                }
            }
            _ => {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                is_invalid = field != Field::Unknown;
            }
        }
        if is_invalid {
            builder.draft.reject(field);
        }
        Ok(())
    }
}

/// One shape, appended as (number of dimensions, extents...); the flag is set if the shape is invalid.
struct Shape<'a>(&'a mut Vec<u64>, &'a mut bool);

impl<'de> DeserializeSeed<'de> for Shape<'_> {
    any_value!('de);
}

impl<'de> Visitor<'de> for Shape<'_> {
    type Value = ();
    scalar_visits!(|shape: Self, _| *shape.1 = true);
    skip_map!('de, |shape: Self| *shape.1 = true);

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        let Self(sizes, is_invalid) = self;
        let start = sizes.len();
        sizes.push(0);
        Each(|item: Item<'_>| match item {
            Item::Scalar(Scalar::Int(extent)) if extent >= 0 => sizes.push(extent as u64),
            _ => *is_invalid = true,
        })
        .visit_seq(seq)?;
        sizes[start] = (sizes.len() - start - 1) as u64;
        Ok(())
    }
}
