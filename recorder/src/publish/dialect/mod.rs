//! Reads and writes the dump dialect of PyTorch's flight recorder, with rcomm's extensions.
//!
//! The reader looks at keys, not at versions, except that it refuses a major version newer than its own; it ignores
//! unknown keys. So the same code reads dumps of PyTorch's NCCL recorder, its gloo recorder, its backend-agnostic hook,
//! torchcomms, and this crate. From a truncated or damaged file it returns the complete entries and a [`ReadProblem`].
//! Input is untrusted: the module `pickle` limits what a pickle may do and how many values it may have, and
//! `serde_json` limits the depth of JSON.
//!
//! The keys and spellings of the dialect stay in this module: other modules see a [`Dump`], and what was lost in
//! reading it.

mod build;
mod intern;
mod keys;
mod names;
mod rank_lists;
mod read_json;
mod read_pickle;
mod recorder;
mod value;
mod write;
mod write_json;
mod write_pickle;

use super::pickle::Pickle;
use crate::model::Entry;
use crate::model::dump::{Dump, UnreadableVersion};
use build::Builder;
use rank_lists::RankLists;

/// The reason why nothing could be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// There are no bytes.
    #[error("the file is empty")]
    Empty,
    /// The input is neither a pickle nor JSON, or has no key of a dump.
    #[error("not a flight recorder dump: {what}")]
    NotADump {
        /// A description of the input.
        what: String,
    },
    /// The file is truncated or damaged before the first part that can be used.
    #[error("{cause} at byte {at} of {of}, before any complete entry")]
    Lost {
        /// Where reading stopped.
        at: usize,
        /// Bytes in all.
        of: usize,
        /// Why it stopped.
        cause: Cause,
    },
    /// The file is a pickle that would construct objects, call functions, or fetch something from outside.
    #[error(
        "refused: pickle instruction {opcode} at byte {at} would construct, call or fetch an object; no dump \
         contains it"
    )]
    Refused {
        /// The instruction, by its name in Python's `pickletools`.
        opcode: &'static str,
        /// Its position, in bytes.
        at: usize,
    },
    /// The file has more values than this reader accepts, or 4 GiB or more.
    #[error("too many values or bytes for a dump of one rank, at byte {at}")]
    TooLarge {
        /// Where the limit was reached, in bytes.
        at: usize,
    },
    /// The dump has a newer major version than this build reads.
    #[error(transparent)]
    Version(#[from] UnreadableVersion),
}

/// Why reading stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The file ends too early.
    Cut,
    /// The bytes are not valid pickle or JSON, or use a pickle instruction that dumps do not use; holds what was found.
    Damaged(String),
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cut => f.write_str("cut short"),
            Self::Damaged(what) => write!(f, "damaged ({what})"),
        }
    }
}

/// What was lost while the rest was read. The newest operations of the rank may be missing: they come after the point
/// where reading stopped, or were rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadProblem {
    /// Reading stopped early: the file is truncated or damaged.
    #[error(
        "{cause} at byte {at} of {of}; {} read",
        if *entries == 1 {
            "the 1 complete entry before that was".to_owned()
        } else {
            format!("the {entries} complete entries before that were")
        }
    )]
    Stopped {
        /// Where reading stopped.
        at: usize,
        /// Bytes in all.
        of: usize,
        /// Why it stopped.
        cause: Cause,
        /// Entries that were read.
        entries: usize,
    },
    /// Entries with missing or invalid values were skipped.
    #[error(
        "{} skipped; the first is entry {first}, {}",
        if *count == 1 { "1 entry was".to_owned() } else { format!("{count} entries were") },
        if *key == NOT_A_DICT { key.to_string() } else { format!("because of its `{key}`") }
    )]
    Rejected {
        /// The number of entries that were skipped.
        count: usize,
        /// Index of the first of these entries, from 0.
        first: usize,
        /// The key whose value is missing or invalid; `which is not a dict` if the entry has no keys.
        key: &'static str,
    },
    /// `entries` holds no list, so no operation could be read.
    #[error(
        "`entries` is {found} where a list is expected, so none of its operations could be read"
    )]
    NoList {
        /// The kind of value found instead.
        found: &'static str,
    },
}

/// The [`key`](ReadProblem::Rejected::key) of an entry without keys.
const NOT_A_DICT: &str = "which is not a dict";

/// Reads dumps one after another, and keeps its working memory from file to file.
#[derive(Default)]
pub struct DumpReader {
    pickle: Pickle,
    lists: RankLists,
    /// Memory for the entries of the next dump.
    entries: Vec<Entry>,
}

/// Maximum number of values of each large table of the pickle decoder whose memory is kept for the next file.
const KEPT_VALUES: usize = 1 << 20;

impl DumpReader {
    /// A reader that has allocated no working memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the entries of a dump that is no longer needed; the next dump reuses their memory. New memory would cost
    /// page faults, which add up over the files of a large job.
    pub fn reuse(&mut self, mut entries: Vec<Entry>) {
        entries.clear();
        self.entries = entries;
    }

    /// Reads a dump; its first bytes decide between pickle and JSON.
    ///
    /// Returns the dump and a list of what was lost. Executes nothing from the input, and limits the number of values
    /// that it takes: a small pickle can name one of its lists many times.
    ///
    /// # Errors
    /// If nothing usable can be read: see [`ReadError`].
    pub fn read(&mut self, bytes: &[u8]) -> Result<(Dump, Vec<ReadProblem>), ReadError> {
        if u32::try_from(bytes.len()).is_err() {
            return Err(ReadError::TooLarge {
                at: u32::MAX as usize,
            });
        }
        let encoding = Encoding::detect(bytes)?;
        let mut builder = Builder::default();
        builder.dump.entries = std::mem::take(&mut self.entries);
        let stopped = match encoding {
            Encoding::Pickle => {
                builder.lists = std::mem::take(&mut self.lists);
                let stopped = read_pickle::read(bytes, &mut self.pickle, &mut builder);
                self.pickle.shrink_to(KEPT_VALUES);
                self.lists = std::mem::take(&mut builder.lists);
                stopped?
            }
            Encoding::Json(text) => read_json::read(text, &mut builder),
        };
        if !builder.looks_like_dump {
            return Err(match stopped {
                Some(ReadProblem::Stopped { at, of, cause, .. }) => {
                    ReadError::Lost { at, of, cause }
                }
                _ => ReadError::NotADump {
                    what: "it has neither operations (entries) nor groups (pg_config)".to_owned(),
                },
            });
        }
        if let Some(version) = builder.version {
            version.check_readable()?;
        }
        let rejected = builder
            .first_rejected
            .map(|(first, key)| ReadProblem::Rejected {
                count: builder.rejected,
                first,
                key,
            });
        let no_list = builder
            .entries_kind_if_no_list
            .map(|found| ReadProblem::NoList { found });
        let problems = stopped.into_iter().chain(rejected).chain(no_list).collect();
        Ok((builder.finish(), problems))
    }
}

impl Dump {
    /// Reads a dump; its first bytes decide between pickle and JSON. See [`DumpReader::read`].
    ///
    /// # Errors
    /// If nothing usable can be read: see [`ReadError`].
    pub fn read(bytes: &[u8]) -> Result<(Self, Vec<ReadProblem>), ReadError> {
        DumpReader::new().read(bytes)
    }
}

/// The encoding of a dump.
enum Encoding<'a> {
    Pickle,
    /// The text, without a byte order mark.
    Json(&'a [u8]),
}

impl<'a> Encoding<'a> {
    /// Decides by the first bytes.
    fn detect(bytes: &'a [u8]) -> Result<Self, ReadError> {
        let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        let first = text.iter().find(|byte| !byte.is_ascii_whitespace());
        match (bytes, first) {
            ([], _) => Err(ReadError::Empty),
            // Instruction PROTO, with which every pickle since protocol 2 begins.
            ([0x80, ..], _) => Ok(Self::Pickle),
            (_, Some(b'{' | b'[')) => Ok(Self::Json(text)),
            _ => Err(ReadError::NotADump {
                what: format!("it begins with {}", beginning(bytes)),
            }),
        }
    }
}

/// The first bytes, as text if all are printable, else in hexadecimal digits.
fn beginning(bytes: &[u8]) -> String {
    let first = &bytes[..bytes.len().min(8)];
    if first
        .iter()
        .all(|byte| byte.is_ascii_graphic() || *byte == b' ')
    {
        format!("\"{}\"", String::from_utf8_lossy(first))
    } else {
        let digits: Vec<String> = first.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("the bytes {}", digits.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_of_a_foreign_file_are_shown_as_text_or_digits() {
        let shown = |bytes: &[u8]| Dump::read(bytes).unwrap_err().to_string();
        let text = "not a flight recorder dump: it begins with \"#!/bin/s\"";
        assert_eq!(shown(b"#!/bin/sh"), text);
        let digits = "not a flight recorder dump: it begins with the bytes 89 50 4e 47";
        assert_eq!(shown(b"\x89PNG"), digits);
    }

    #[test]
    fn one_complete_entry_is_not_called_entries() {
        let stopped = |entries| ReadProblem::Stopped {
            at: 7,
            of: 7,
            cause: Cause::Cut,
            entries,
        };
        let one = "cut short at byte 7 of 7; the 1 complete entry before that was read";
        assert_eq!(stopped(1).to_string(), one);
        let two = "cut short at byte 7 of 7; the 2 complete entries before that were read";
        assert_eq!(stopped(2).to_string(), two);
    }
}
