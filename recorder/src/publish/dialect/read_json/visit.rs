//! serde visitors for values of any kind, shared by the JSON readers.

use crate::publish::dialect::value::Scalar;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// A visited value: a scalar, or a list or map whose contents were skipped.
pub(super) enum Item<'a> {
    Scalar(Scalar<'a>),
    Container,
}

/// Visits scalars, which go to `$take`. The type defines the visits of lists and maps, by `skip_seq` and `skip_map` if
/// it ignores their contents.
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

/// Skips a list, which becomes the value of `$take`.
macro_rules! skip_seq {
    ($de:lifetime, $take:expr) => {
        fn visit_seq<A: SeqAccess<$de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            while seq.next_element::<IgnoredAny>()?.is_some() {}
            Ok($take(self))
        }
    };
}

/// Skips a map, which becomes the value of `$take`.
macro_rules! skip_map {
    ($de:lifetime, $take:expr) => {
        fn visit_map<A: MapAccess<$de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            Ok($take(self))
        }
    };
}

/// Passes a value of any kind to the type's own visitor.
macro_rules! any_value {
    ($de:lifetime) => {
        type Value = ();
        fn deserialize<D: Deserializer<$de>>(self, deserializer: D) -> Result<(), D::Error> {
            deserializer.deserialize_any(self)
        }
    };
}

/// Passes one value to a function; the contents of a list or map are skipped.
pub(super) struct One<F>(pub(super) F);

impl<'de, F: FnOnce(Item<'_>)> DeserializeSeed<'de> for One<F> {
    any_value!('de);
}

impl<'de, F: FnOnce(Item<'_>)> Visitor<'de> for One<F> {
    type Value = ();
    scalar_visits!(|one: Self, scalar: Scalar<'_>| (one.0)(Item::Scalar(scalar)));
    skip_seq!('de, |one: Self| (one.0)(Item::Container));
    skip_map!('de, |one: Self| (one.0)(Item::Container));
}

/// Passes every element of a list to a function, as in [`One`]; a value that is not a list is ignored.
pub(super) struct Each<F>(pub(super) F);

impl<'de, F: FnMut(Item<'_>)> DeserializeSeed<'de> for Each<F> {
    any_value!('de);
}

impl<'de, F: FnMut(Item<'_>)> Visitor<'de> for Each<F> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_map!('de, |_| ());

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(One(&mut self.0))?.is_some() {}
        Ok(())
    }
}

/// Passes every key and value of a map to a function, values as in [`One`]; a value that is not a map is ignored.
pub(super) struct EachPair<F>(pub(super) F);

impl<'de, F: FnMut(&str, Item<'_>)> DeserializeSeed<'de> for EachPair<F> {
    any_value!('de);
}

impl<'de, F: FnMut(&str, Item<'_>)> Visitor<'de> for EachPair<F> {
    type Value = ();
    scalar_visits!(|_, _| ());
    skip_seq!('de, |_| ());

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Key<'de>>()? {
            map.next_value_seed(One(|item: Item<'_>| (self.0)(&key.0, item)))?;
        }
        Ok(())
    }
}

/// A key: borrowed from the file unless it holds an escape.
pub(super) struct Key<'de>(pub(super) std::borrow::Cow<'de, str>);

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

pub(super) use {any_value, scalar_visits, skip_map, skip_seq};
