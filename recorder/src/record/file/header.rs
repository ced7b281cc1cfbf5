//! The header of a new ring: its format, its rank and process, and the anchor of its clock.

use super::map::Map;
use crate::model::Rank;
use crate::record::bytes::words_of;
use crate::record::clock::Anchor;
use crate::record::config::RecorderConfig;
use crate::record::layout::{self, RingLayout, header, join};
use crate::record::process::ProcessIdentity;
use crate::record::signature::cut;
use crate::record::sync::Memory;
use std::sync::atomic::{AtomicU64, Ordering};

/// Writes the header into zeroed memory. The magic number comes last: a reader that finds it finds the rest.
pub(crate) fn initialize(map: &Map, layout: &RingLayout, config: &RecorderConfig) {
    let words = map.words();
    let store = |word: usize, value: u64| words[word].store(value, Ordering::Relaxed);
    let text = |word: usize, text: &str| store_text(words, word, text);
    let process = ProcessIdentity::of_self();
    let anchor = Anchor::take();
    store(header::VERSION, join(layout::MAJOR, layout::MINOR));
    store(header::STATE, layout::STATE_OPEN);
    store_identity(words, &config.job, config.rank, config.world_size);
    store(header::ATTEMPT, join(config.attempt, process.pid));
    store(header::PROCESS_START, process.start);
    store(header::PID_NAMESPACE, process.pid_namespace);
    store(header::BOOT_ID, process.boot_id[0]);
    store(header::BOOT_ID + 1, process.boot_id[1]);
    store(header::ANCHOR_MONOTONIC, anchor.monotonic_ns);
    store(header::ANCHOR_WALL, anchor.wall_ns.cast_unsigned());
    store(header::STEP, (-1_i64).cast_unsigned());
    store(header::PART, config.part.code());
    text(header::HOST, &config.host);
    text(header::WRITER, concat!("rcomm ", env!("CARGO_PKG_VERSION")));
    layout.store(store);
    words[header::MAGIC].store(layout::MAGIC, Ordering::Release);
}

/// Writes the job, the rank and the size of the world.
pub(crate) fn store_identity(words: &[AtomicU64], job: &str, rank: Rank, world_size: u32) {
    words[header::RANK].store(join(rank, world_size), Ordering::Relaxed);
    store_text(words, header::JOB, job);
}

/// Writes the length of a text in one word, then the text, of which at most 255 bytes are kept.
fn store_text(words: &[AtomicU64], word: usize, text: &str) {
    let text = cut(text, 255).as_bytes();
    words[word].store(text.len() as u64, Ordering::Relaxed);
    for (value, word) in words_of(text).zip(&words[word + 1..]) {
        word.store(value, Ordering::Relaxed);
    }
}
