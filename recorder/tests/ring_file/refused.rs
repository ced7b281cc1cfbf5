//! Tests which files, directories and configurations are refused, each with one sentence.

use super::*;
use crate::indices::check_indices;

#[test]
fn list_of_a_missing_directory_is_empty() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    assert!(list_rings(&missing).unwrap().is_empty());
}

#[test]
fn directory_that_cannot_hold_a_ring_is_named_in_the_error() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let error = FlightRecorder::create(&config(&file, 0, 0)).unwrap_err();
    assert!(
        error.to_string().contains(file.to_str().unwrap()),
        "{error}"
    );
}

#[test]
fn rank_outside_the_world_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let error = FlightRecorder::create(&config(directory.path(), 4, 0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "recorder configuration: rank 4 is not less than the world size 4"
    );
}

/// Writes the bytes of a valid ring, modified by `change`, to a file; returns the error of attaching to it.
fn attach_error(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let mut bytes = fs::read(path_of(&recorder)).unwrap();
    change(&mut bytes);
    let path = directory.path().join("changed");
    fs::write(&path, bytes).unwrap();
    RingReader::attach(&path).unwrap_err().to_string()
}

#[test]
fn foreign_truncated_and_newer_files_are_refused_with_one_sentence() {
    assert!(
        attach_error(|bytes| bytes.clear()).ends_with("it has 0 bytes, less than a ring's header")
    );
    assert!(
        attach_error(|bytes| bytes[0] = b'X')
            .ends_with("it does not start with a ring's magic number")
    );
    let half = attach_error(|bytes| bytes.truncate(bytes.len() / 2));
    assert!(half.contains("it is truncated"), "{half}");
    let newer = attach_error(|bytes| bytes[8] = 9);
    assert!(
        newer.ends_with("layout 9, and this reader supports layout 1: use a newer reader"),
        "{newer}"
    );
    // A section beyond the end of the file: the offset of the slots is in word 28.
    let beyond = attach_error(|bytes| bytes[28 * 8 + 5] = 1);
    assert!(beyond.contains("its header puts"), "{beyond}");
}

#[test]
fn links_pipes_and_directories_are_refused_without_waiting() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(path_of(&recorder), &link).unwrap();
    assert!(RingReader::attach(&link).is_err());
    let pipe = directory.path().join("pipe");
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    assert!(RingReader::attach(&pipe).is_err());
    assert!(RingReader::attach(directory.path()).is_err());
    let missing = RingReader::attach(directory.path().join("missing")).unwrap_err();
    assert!(
        missing.to_string().starts_with("failed to open ring "),
        "{missing}"
    );
}

#[test]
fn ring_with_any_word_damaged_is_refused_or_read_without_harm() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path(), 0, 0);
    config.groups = 4;
    config.signatures = 4;
    config.call_sites = 4;
    let recorder = FlightRecorder::create(&config).unwrap();
    let world = world(&recorder);
    recorder.phase("load data");
    for seq in 1..=3 {
        recorder.begin(&Operation {
            input_splits: &[1, 2, 3],
            ..all_reduce(world, seq)
        });
    }
    let good = fs::read(path_of(&recorder)).unwrap();
    let path = directory.path().join("damaged");
    let mut read_count = 0;
    for word in 0..good.len() / 8 {
        let range = word * 8..word * 8 + 8;
        // Of the words after the first 2 KiB, only those in use are damaged.
        if word >= 256 && good[range.clone()] == [0; 8] {
            continue;
        }
        for damage in [[0xff; 8], [0, 0, 0, 0x80, 0, 0, 0, 0x7f], [1; 8]] {
            let mut bytes = good.clone();
            bytes[range.clone()].copy_from_slice(&damage);
            fs::write(&path, bytes).unwrap();
            if let Ok(reader) = RingReader::attach(&path) {
                let dump = reader.snapshot();
                check_indices(&dump);
                read_count += 1;
            }
        }
    }
    assert!(
        read_count > 500,
        "only {read_count} damaged rings were readable"
    );
}
