//! Collectives and messages of values that are not arrays: anything that serde can serialize and deserialize.
//!
//! They are for settings, names and small tables, not for data: a value is sent as JSON of at most
//! [`MAX_OBJECT_BYTES`]. The lengths are sent first, so that every rank refuses a value that is too long and no
//! rank waits for it. Each call is one operation of the group, which consists of two collectives or two messages.
//! Some ranks may call the blocking form and others the asynchronous one. A value that is not of the reader's type
//! is an error on that rank alone, after which the group stays usable.

mod collective;
mod encoding;
mod message;

pub use encoding::MAX_OBJECT_BYTES;
