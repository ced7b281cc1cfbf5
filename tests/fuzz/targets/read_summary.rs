//! Reads any bytes as the parts of a summary. It must not panic, must use no index out of range, must bound its memory,
//! and must be able to write what it has read and to read that again.
#![no_main]

use flate2::Compression;
use flate2::write::GzEncoder;
use libfuzzer_sys::fuzz_target;
use rcomm_analyzer::load::{Loaded, LoadedDump};
use rcomm_analyzer::rsum::{Piece, Writer, read};
use rcomm_recorder::publish::Dump;
use std::io::Write;

fn records(file: &[u8]) -> Vec<(String, Dump)> {
    let mut records = Vec::new();
    let _ = read(file, |piece| {
        if let Piece::Record { dump, path, .. } = piece {
            records.push((path, *dump));
        }
    });
    records
}

fuzz_target!(|bytes: &[u8]| {
    // The input as a whole file: this reaches the header and the decompression.
    let _ = records(bytes);
    // The input as the compressed content: arbitrary bytes alone never pass the checksum.
    let mut file = b"rcommsum\x01\x00".to_vec();
    let mut packer = GzEncoder::new(&mut file, Compression::none());
    packer.write_all(bytes).expect("memory is writable");
    packer.finish().expect("memory is writable");
    let read = records(&file);
    let mut writer = Writer::new(Vec::new()).expect("memory is writable");
    for (path, dump) in &read {
        for entry in &dump.entries {
            assert!((entry.group as usize) < dump.groups.len());
            assert!((entry.signature as usize) < dump.signatures.len());
            assert!(entry.stack.is_none_or(|at| (at as usize) < dump.stacks.len()));
            assert!(entry.thread.is_none_or(|at| (at as usize) < dump.threads.len()));
        }
        for &frame in dump.stacks.iter().flatten() {
            assert!((frame as usize) < dump.frames.len());
        }
        let loaded = LoadedDump {
            dump: dump.clone(),
            path: path.clone(),
            cut: false,
            written_ns: None,
        };
        writer.add(&loaded).expect("what was read can be written");
    }
    let again = writer.finish(&Loaded::default()).expect("memory is writable");
    assert_eq!(records(&again).len(), read.len());
});
