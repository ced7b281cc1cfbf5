//! Summaries: a summary is one small file (`.rsum`) with the parts of many records that the verdict needs.
//!
//! In a fleet the dumps are on thousands of nodes. Each node packs its own dumps, and the analysis reads the summaries
//! like the dumps themselves: the report is the same. A node that packs judges nothing, since a rank's record cannot be
//! judged without those of its peers.
//!
//! # Format, version 9
//!
//! Eight bytes `rcommsum`, the version as `u16`, then a gzip stream of parts: the length as `u32`, and that many bytes
//! of `wire::Part` in postcard's encoding (<https://postcard.jamesmunns.com>). Integers outside of postcard are
//! little-endian. Data that ranks share (shapes, stacks, members of groups) is stored once, in a part before the first
//! record that refers to it; operations are columns, mostly of differences. The last part holds the number of records:
//! without it the file is cut.
//!
//! Each later version adds one kind of part:
//!
//! | version | part |
//! |---|---|
//! | 2 | a record with operations in CUDA graphs |
//! | 3 | the failures of the record that follows, and when its process closed it |
//! | 4 | the connections of that record |
//! | 5 | its waits for a processor |
//! | 6 | its rank in groups whose members it does not have |
//! | 7 | its beginning, and the exit of its process |
//! | 8 | the members of groups as runs of ranks |
//! | 9 | the time at which the file of the record that follows was written |
//!
//! Readers trust no length: parts, tables and the references of a record to the tables are bounded, and a record is
//! checked before it is passed on.

mod read;
mod wire;
mod write;

pub(crate) use read::read_within;
pub use read::{Piece, RsumError, begins, read};
pub use write::{SummarizeError, Writer};

/// The first bytes of every summary.
const MAGIC: &[u8; 8] = b"rcommsum";
/// The version that is written. It is raised when the parts in [`wire`] change; older files remain readable.
const VERSION: u16 = 9;
/// The oldest version that is read.
const OLDEST: u16 = 1;
/// The longest part, bytes: enough for a record of some 900,000 operations.
const MAX_PART: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::wire::{BETWEEN_PATHS, Part};
    use super::*;
    use crate::input::load::{Loaded, LoadedDump};
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use rcomm_recorder::model::{
        Failure, FailureKind, GroupPlace, LinkEnd, PeerLink, ProcessExit, ProcessorWait, RankStatus,
    };
    use rcomm_recorder::publish::Dump;
    use rcomm_verdict::Problem;
    use std::io::Write as _;

    fn dump(more: &str) -> Dump {
        let entry = |id: u32, more: &str| {
            format!(
                r#"{{"record_id":{id},"pg_id":0,"process_group":["0","x"],"collective_seq_id":{id},"op_id":{id},
                "profiling_name":"nccl:all_reduce","time_created_ns":{id},"state":"completed"{more}}}"#
            )
        };
        let entries = [entry(1, ""), entry(2, more), entry(3, "")].join(",");
        let text = format!(r#"{{"version":"2.10","rank":0,"entries":[{entries}]}}"#);
        let (dump, problems) = Dump::read(text.as_bytes()).expect("the text is a dump");
        assert!(problems.is_empty(), "{problems:?}");
        dump
    }

    fn pack(dump: &Dump) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new()).expect("writing to memory does not fail");
        let loaded = LoadedDump {
            dump: dump.clone(),
            path: "rank_0.json".to_owned(),
            cut: false,
            written_ns: None,
        };
        writer
            .add(&loaded)
            .expect("writing to memory does not fail");
        writer
            .finish(&Loaded::default())
            .expect("writing to memory does not fail")
    }

    fn unpack(bytes: &[u8]) -> Vec<Dump> {
        let mut dumps = Vec::new();
        let take = |piece| {
            if let Piece::Record { dump, .. } = piece {
                dumps.push(*dump);
            }
        };
        read(bytes, take).expect("the bytes are a summary");
        dumps
    }

    #[test]
    fn operations_in_graphs_keep_their_graph() {
        let captured = dump(r#","graph_id":7"#);
        let graphs: Vec<_> = captured
            .entries
            .iter()
            .map(|entry| entry.graph_id)
            .collect();
        assert_eq!(graphs, [None, Some(7), None]);
        assert_eq!(unpack(&pack(&captured)), [captured]);
    }

    #[test]
    fn failures_and_ends_stay_with_their_record() {
        let mut failed = dump("");
        let failure = Failure::new(FailureKind::PeerGone, &[1], 0, "rank 1 is gone");
        failed.failures.push(failure);
        failed.closed_ns = 9;
        failed.peers.push(PeerLink::to(LinkEnd::Rank(1)));
        failed.processor_wait = Some(ProcessorWait {
            since_ns: 3,
            waited_ns: 8,
        });
        failed.identity.begun_ns = 2;
        failed.status = Some(RankStatus {
            exit: Some(ProcessExit {
                time_ns: 9,
                code: 3,
            }),
            ..RankStatus::default()
        });
        failed.groups[0].place = Some(GroupPlace { rank: 3, size: 8 });
        assert_eq!(unpack(&pack(&failed)), [failed]);
    }

    #[test]
    fn a_problem_keeps_all_its_paths() {
        let mut of_several = Problem::stale_dump("a/rank_1", "was given its rank by its groups");
        of_several.more_paths = vec!["b/rank_2".to_owned(), "c".to_owned()];
        let problems = vec![
            Problem::unreadable_dump("", "concerns no file"),
            Problem::unreadable_dump("x", "could not be read"),
            of_several,
        ];
        let loaded = Loaded {
            problems: problems.clone(),
            ..Loaded::default()
        };
        let writer = Writer::new(Vec::new()).expect("writing to memory does not fail");
        let bytes = writer
            .finish(&loaded)
            .expect("writing to memory does not fail");
        let mut found = Vec::new();
        let take = |piece| {
            if let Piece::Problem(problem) = piece {
                found.push(problem);
            }
        };
        read(bytes.as_slice(), take).expect("the bytes are a summary");
        assert_eq!(found, problems);
    }

    #[test]
    fn problems_with_too_many_paths_are_neither_written_nor_read() {
        let bytes_of = |more: &[usize]| {
            let problem = |&more: &usize| {
                let mut problem = Problem::stale_dump("a", "left aside");
                problem.more_paths = vec![String::new(); more];
                problem
            };
            let loaded = Loaded {
                problems: more.iter().map(problem).collect(),
                ..Loaded::default()
            };
            let writer = Writer::new(Vec::new()).expect("writing to memory does not fail");
            writer.finish(&loaded)
        };
        let half = read::MAX_MORE_PATHS / 2;
        let fitting = bytes_of(&[half, half]).expect("as many paths are written");
        read(fitting.as_slice(), |_| {}).expect("as many paths are read");
        let refused = bytes_of(&[half, half, 1]).map_err(|error| error.to_string());
        let why = refused.expect_err("one path more is not written");
        assert!(why.contains("more than 262144 files"), "{why}");

        // A file that another program wrote: one problem whose path is nothing but separators.
        let mut paths = 0;
        let hostile = Part::Problem(
            "N300".to_owned(),
            BETWEEN_PATHS.to_string().repeat(8 << 20),
            String::new(),
        );
        let hostile = postcard::to_allocvec(&hostile).expect("a part can be encoded");
        let mut bytes = [MAGIC.as_slice(), &VERSION.to_le_bytes()].concat();
        let mut stream = GzEncoder::new(&mut bytes, Compression::fast());
        let len = u32::try_from(hostile.len()).expect("the part is short");
        stream
            .write_all(&[&len.to_le_bytes(), hostile.as_slice()].concat())
            .expect("writing to memory does not fail");
        stream.finish().expect("writing to memory does not fail");
        let outcome = read(bytes.as_slice(), |piece| {
            if let Piece::Problem(problem) = piece {
                paths += problem.paths().count();
            }
        });
        let why = outcome.expect_err("so many paths are refused").to_string();
        assert!(
            why.contains("more paths than its problems can have"),
            "{why}"
        );
        assert_eq!(paths, 0);
    }

    #[test]
    fn the_time_at_which_a_file_was_written_stays_with_its_record() {
        let mut writer = Writer::new(Vec::new()).expect("writing to memory does not fail");
        for written_ns in [None, Some(5), None] {
            let loaded = LoadedDump {
                dump: dump(""),
                path: "rank_0".to_owned(),
                cut: false,
                written_ns,
            };
            writer
                .add(&loaded)
                .expect("writing to memory does not fail");
        }
        let bytes = writer
            .finish(&Loaded::default())
            .expect("writing to memory does not fail");
        let mut read_back = Vec::new();
        let take = |piece| {
            if let Piece::Record { written_ns, .. } = piece {
                read_back.push(written_ns);
            }
        };
        read(&*bytes, take).expect("the bytes are a summary");
        assert_eq!(read_back, [None, Some(5), None]);
    }

    #[test]
    fn a_summary_that_states_version_one_is_read() {
        let plain = dump("");
        let mut bytes = pack(&plain);
        let version = &mut bytes[MAGIC.len()..][..2];
        assert_eq!(version, VERSION.to_le_bytes());
        version.copy_from_slice(&1u16.to_le_bytes());
        assert_eq!(unpack(&bytes), [plain]);
    }
}
