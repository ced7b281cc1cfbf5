//! Every reader of bytes from outside ([`readers::READERS`]) gets the inputs of its corpus, and each of them cut in
//! half and with one byte changed, as an ordinary test. The fuzz targets next to the corpora go further. The corpora of
//! `read_messages`, `query_sql` and `profiler_events` are read by tests of the crates that have these readers.

#![allow(clippy::unwrap_used)]

#[path = "../fuzz/targets/readers/mod.rs"]
mod readers;

use std::fs;
use std::path::{Path, PathBuf};

/// The inputs of a reader's corpus, with their paths.
fn inputs(reader: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    let files = fs::read_dir(corpus.join(reader)).unwrap().flatten();
    let inputs = files.map(|file| (file.path(), fs::read(file.path()).unwrap()));
    inputs.collect()
}

/// The input, each of its halves, and copies with one byte changed.
fn variants(input: &[u8]) -> Vec<Vec<u8>> {
    let (first, second) = input.split_at(input.len() / 2);
    let mut variants = vec![input.to_vec(), first.to_vec(), second.to_vec()];
    for at in [0, input.len() / 3, input.len().saturating_sub(1)] {
        let mut changed = input.to_vec();
        if let Some(byte) = changed.get_mut(at) {
            *byte ^= 0x81;
            variants.push(changed);
        }
    }
    variants
}

#[test]
fn every_corpus_is_read_by_a_test() {
    let elsewhere = ["read_messages", "query_sql", "profiler_events"];
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for corpus in fs::read_dir(corpora).unwrap().flatten() {
        let name = corpus.file_name().into_string().unwrap();
        let mut readers = readers::READERS.iter().map(|(reader, _)| *reader);
        assert!(
            readers.any(|reader| reader == name) || elsewhere.contains(&name.as_str()),
            "no test reads the corpus {name}"
        );
    }
}

#[test]
fn no_reader_panics_on_its_corpus_or_on_variants_of_it() {
    for (name, reader) in readers::READERS {
        let inputs = inputs(name);
        let count = inputs.len();
        assert!(
            count >= 4,
            "{count} inputs in the corpus of {name}, at least 4 expected"
        );
        for (path, input) in inputs {
            for variant in variants(&input) {
                println!("{}: {} bytes", path.display(), variant.len());
                reader(&variant);
            }
        }
    }
}
