//! Collectives and messages of values that are no arrays: anything that serde can write and read.
//!
//! For settings, names and small tables, not for data: values travel as JSON, and one may have
//! [`MAX_OBJECT_BYTES`] at most. Lengths travel first, so that every rank refuses what is too long, and
//! none is left waiting. Each is one operation of the group, made of two: two collectives, or two
//! messages. Some ranks may run one and others issue it. A value that is not of the reader's type is an
//! error on that rank alone, after which the group stays usable.

mod collective;
mod encoding;
mod message;

pub use encoding::MAX_OBJECT_BYTES;
