//! Tests events in random orders, on several threads.

use crate::library::Plugin;
use crate::life::{all_events, assert_passes, job_rings};
use crate::orders::play;

#[test]
fn events_in_random_order_leave_nothing_pending_once_all_communicators_have_ended() {
    for version in [3, 4, 5, 6] {
        assert_passes(&format!("random-{version}"), all_events);
    }
}

/// Plays the fuzz target's corpus and long pseudo-random orders, on three threads.
pub(crate) fn random(plugin: &Plugin) {
    std::thread::scope(|scope| {
        for seed in 1..=3 {
            scope.spawn(move || play_events(plugin, seed));
        }
    });
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    assert!(ring.entries.len() > 1_000);
    for entry in &ring.entries {
        assert!(entry.retired, "{entry:?}");
    }
    for communicator in ring.communicators() {
        assert_eq!(communicator.links, [], "{}", communicator.group);
    }
}

/// Plays the corpus and one pseudo-random order, and ends all communicators.
fn play_events(plugin: &Plugin, seed: u64) {
    let mut number = 0;
    let mut comm = || {
        number += 1;
        let hash = seed * 1_000 + number;
        plugin.init(None, hash, 0, 4).ok()
    };
    let mut comms: Vec<_> = (0..4).filter_map(|_| comm()).collect();
    let corpus = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fuzz/corpus/profiler_events"
    );
    for file in std::fs::read_dir(corpus).expect("a folder") {
        let bytes = std::fs::read(file.expect("a file").path()).expect("a file");
        let mut bytes = bytes.into_iter();
        play(plugin, &mut comms, || bytes.next(), &mut comm);
    }
    let mut word = seed;
    let mut left = 200_000;
    let next = || {
        left -= 1;
        word = word
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (left > 0).then_some((word >> 33) as u8)
    };
    play(plugin, &mut comms, next, &mut comm);
    for comm in &comms {
        plugin.finalize(comm);
    }
}
