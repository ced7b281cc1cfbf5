//! The readers of files and texts that the user gives, and of the answers of another `rcomm-web`.

#[path = "../../../../recorder/tests/indices/mod.rs"]
mod indices;

use flate2::Compression;
use flate2::write::GzEncoder;
use indices::check_indices;
use rcomm_analyzer::filter::{Filter, Subject, parse_duration_ms};
use rcomm_analyzer::load::{LoadOptions, Loaded, LoadedDump, load};
use rcomm_analyzer::ras::RasReport;
use rcomm_analyzer::rsum::{Piece, Writer, read};
use rcomm_analyzer::source::{RecordsFollower, Seen};
use rcomm_analyzer::{Policy, analyze};
use rcomm_recorder::model::{DType, OpType, ProcessGroupInfo};
use rcomm_recorder::publish::{Dump, LaunchRecord, RingFollower, RingReader};
use rcomm_recorder::record::{
    FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef, Tensor,
};
use std::fs;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

/// Reads a dump. What was read can be written and read again.
pub(crate) fn read_dump(bytes: &[u8]) {
    let Ok((dump, _)) = Dump::read(bytes) else {
        return;
    };
    check_indices(&dump);
    for written in [dump.to_json(), dump.to_pickle()] {
        let (reread, problems) = Dump::read(&written).expect("what we write is readable");
        assert!(problems.is_empty(), "{problems:?}");
        check_indices(&reread);
        assert_eq!(reread.entries.len(), dump.entries.len());
        // A group that entries name with and without a description may become one.
        assert!(reread.groups.len() <= dump.groups.len());
        for (entry, reread_entry) in dump.entries.iter().zip(&reread.entries) {
            assert_eq!(entry.record_id, reread_entry.record_id);
            assert_eq!(entry.state, reread_entry.state);
            assert_eq!(entry.peer, reread_entry.peer);
            assert_eq!(
                dump.signatures[entry.signature as usize],
                reread.signatures[reread_entry.signature as usize]
            );
        }
    }
}

/// Loads a file of any kind: an archive, a compressed file, or a file of another reader of this module. The loader
/// recognizes the kind by the content. Every file is read or reported as a problem.
pub(crate) fn read_file(bytes: &[u8]) {
    let path = format!("/dev/shm/rcomm-fuzz-{}_rank_0", std::process::id());
    fs::write(&path, bytes).expect("memory is writable");
    let options = LoadOptions {
        jobs: NonZeroUsize::new(1),
        ..LoadOptions::default()
    };
    let mut dumps = 0;
    let loaded = load(&[path.clone().into()], &options, |_| dumps += 1).expect("the file exists");
    assert!(dumps + loaded.problems.len() + loaded.ras.len() + loaded.logs.len() > 0);
    fs::remove_file(&path).expect("the file is removed");
}

/// A small ring that holds the last 16 of 32 operations.
static RING: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let directory = PathBuf::from(format!("/dev/shm/rcomm-fuzz-{}", std::process::id()));
    let config = RecorderConfig {
        placement: Placement::Dir(directory.clone()),
        entries: 16,
        groups: 4,
        signatures: 4,
        call_sites: 4,
        ..RecorderConfig::new("job", 1, 2)
    };
    let recorder = FlightRecorder::create(&config).expect("a ring in memory");
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0, 1].into(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(60));
    recorder.phase("train");
    for seq in 1..=32 {
        let shape = [1024, seq];
        let tensors = [Tensor {
            dtype: DType::Bf16,
            shape: &shape,
        }];
        let key = SignatureKey {
            backend: "cpu",
            op_name: "all_reduce",
            inputs: &tensors,
            outputs: &tensors,
        };
        let ticket = recorder.begin(&Operation {
            collective_seq_id: seq,
            call_site: Some(std::panic::Location::caller().into()),
            ..Operation::new(group, OpType::AllReduce, SignatureRef::Key(&key))
        });
        recorder.completed(ticket);
    }
    let path = recorder.storage().path().expect("a file").to_owned();
    let ring = fs::read(path).expect("the ring can be read");
    drop(recorder);
    fs::remove_dir_all(directory).expect("the folder is removed");
    ring
});

/// Reads a ring whose words were changed. The input is a list of changes: the index of a word in the file (4 bytes,
/// modulo the number of words) and its new content (8 bytes).
pub(crate) fn read_ring(changes: &[u8]) {
    let mut ring = RING.clone();
    let (words, _) = ring.as_chunks_mut::<8>();
    for change in changes.chunks_exact(12) {
        let (index, word) = change.split_at(4);
        let index = u32::from_le_bytes(index.try_into().expect("four bytes")) as usize;
        words[index % words.len()].copy_from_slice(word);
    }
    let path = format!("/dev/shm/rcomm-fuzz-{}.ring", std::process::id());
    fs::write(&path, ring).expect("memory is writable");
    if let Ok(ring) = RingReader::attach(&path) {
        let _ = (
            ring.is_alive(),
            ring.is_closed(),
            ring.heartbeat_ns(),
            ring.records(),
        );
        let _ = ring.identity();
        let dump = ring.snapshot();
        let mut follower = RingFollower::new(ring, 8);
        follower.poll();
        follower.poll();
        for dump in [&dump, follower.dump()] {
            check_indices(dump);
            let _ = dump.to_json();
        }
    }
    fs::remove_file(&path).expect("the file is removed");
}

/// Reads a report of NCCL's RAS.
pub(crate) fn read_ras(bytes: &[u8]) {
    let _ = RasReport::parse(bytes);
}

/// The dumps in a summary, each with its path; those before the first error.
fn records(file: &[u8]) -> Vec<(String, Dump)> {
    let mut records = Vec::new();
    let _ = read(file, |piece| {
        if let Piece::Record { dump, path, .. } = piece {
            records.push((path, *dump));
        }
    });
    records
}

/// Reads a summary. What was read can be written and read again.
pub(crate) fn read_summary(bytes: &[u8]) {
    // Reading the input as a whole file reaches the header and the decompression.
    let _ = records(bytes);
    // The input is also read as the compressed content, since arbitrary bytes never pass the checksum.
    let mut file = b"rcommsum\x01\x00".to_vec();
    let mut packer = GzEncoder::new(&mut file, Compression::none());
    packer.write_all(bytes).expect("memory is writable");
    packer.finish().expect("memory is writable");
    let read = records(&file);
    let mut writer = Writer::new(Vec::new()).expect("memory is writable");
    for (path, dump) in &read {
        check_indices(dump);
        let loaded = LoadedDump {
            dump: dump.clone(),
            path: path.clone(),
            cut: false,
            written_ns: None,
        };
        writer.add(&loaded).expect("what was read can be written");
    }
    let rewritten = writer
        .finish(&Loaded::default())
        .expect("memory is writable");
    assert_eq!(records(&rewritten).len(), read.len());
}

/// Reads a launcher's record, in the folder of a job of two ranks that is over: every report on the job can be made.
pub(crate) fn launch_record(bytes: &[u8]) {
    let folder = PathBuf::from(format!("/dev/shm/rcomm-fuzz-{}-job", std::process::id()));
    fs::create_dir_all(&folder).expect("memory is writable");
    fs::write(folder.join("launch.0.json"), bytes).expect("memory is writable");
    let launches = LaunchRecord::in_directory(&folder);
    fs::remove_dir_all(&folder).expect("the folder is removed");
    for launch in &launches {
        let _ = launch.end_of(1).map(|end| end.is_success());
    }
    let dumps = [0, 1].map(|rank| {
        let mut dump = Dump::default();
        dump.identity.rank = Some(rank);
        dump.identity.world_size = Some(2);
        dump.identity.host = "n0".to_owned();
        dump.identity.pid = 100 + rank;
        dump.identity.reason = RingReader::OWNER_IS_DEAD.to_owned();
        dump.identity.dump_time_ns = 1_700_000_000_000_000_000;
        dump
    });
    for snapshot in [false, true] {
        let policy = Policy {
            launches: launches.clone(),
            snapshot,
            ..Policy::default()
        };
        let _ = analyze(&dumps, &policy);
    }
}

/// Takes answers of another `rcomm-web`, between which is a zero byte: the dumps that are kept have valid indices.
pub(crate) fn node_answers(bytes: &[u8]) {
    let mut follower = RecordsFollower::default();
    for answer in bytes.split(|&byte| byte == 0) {
        let questions = follower.questions();
        let mut observations = Vec::new();
        let _ = follower.take(&questions[0], answer, &mut observations);
        for observation in observations {
            if let Seen::Changed(dump) = observation.seen {
                check_indices(&dump);
            }
        }
    }
}

/// Parses a filter: the text of a parsed filter parses to a filter with the same answers. Skips bytes that are no text.
pub(crate) fn parse_filter(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let _ = parse_duration_ms(text);
    match Filter::parse(text) {
        Ok(filter) => {
            let reparsed = Filter::parse(filter.text()).expect("what was read can be read again");
            let subject = Subject {
                ranks: &[0, 7],
                op: Some("all_reduce"),
                age_ms: Some(5e3),
                lag_ms: Some(f64::NAN),
                seq: Some(41),
                bytes: Some(1 << 20),
                text,
                ..Subject::default()
            };
            assert_eq!(filter.matches(&subject), reparsed.matches(&subject));
        }
        Err(error) => assert!(error.column >= 1, "{error}"),
    }
}
