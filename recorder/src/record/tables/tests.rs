use super::*;
use crate::record::{FlightRecorder, Placement, RecorderConfig};

#[test]
fn ranks_in_steps_are_one_run_and_others_are_several() {
    let every_eighth: Vec<Rank> = (0..64).map(|i| 3 + 8 * i).collect();
    assert_eq!(runs_of(&every_eighth), [[join(3, 8), 64]]);
    assert_eq!(
        runs_of(&[5, 4, 3, 9]),
        [[join(5, u32::MAX), 3], [join(9, 0), 1]]
    );
    assert_eq!(runs_of(&[]), [[0; 2]; 0]);
}

#[test]
fn site_word_is_none_if_the_address_or_the_row_does_not_fit() {
    assert_eq!(site_word(0x7fff_1234, 5), Some(0x7fff_1234_0005));
    assert_eq!(site_word(1 << 48, 5), None);
    assert_eq!(site_word(0x7fff_1234, 1 << 16), None);
}

#[test]
fn a_thread_with_the_id_of_one_that_has_ended_is_recorded_with_its_own_name() {
    let config = RecorderConfig {
        placement: Placement::Memory,
        entries: 64,
        ..RecorderConfig::new("job", 0, 2)
    };
    let recorder = FlightRecorder::create(&config).expect("memory for a ring");
    let note = |name: &str| {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name(name.to_owned());
            let note = || {
                THREAD_ID.set(7);
                recorder.note_thread();
            };
            let thread = thread.spawn_scoped(scope, note);
            thread
                .expect("a thread can be made")
                .join()
                .expect("it ends");
        });
    };
    for name in ["loader", "loader", "trainer"] {
        note(name);
    }
    let dump = recorder.snapshot();
    let names: Vec<&str> = dump.threads.iter().map(|thread| &*thread.name).collect();
    assert_eq!(names, ["loader", "trainer"]);
    assert!(dump.threads.iter().all(|thread| thread.id == "7"));
}

#[test]
fn known_rows_are_found_through_collisions_and_on_every_level() {
    let index = HashIndex::new();
    for (key, row) in [("a", 0), ("b", 1), ("c", 2)] {
        index.add(7, key, row);
    }
    assert_eq!(index.find(7, |key| *key == "c"), Some(2));
    assert_eq!(index.find(7, |key| *key == "d"), None);
    assert_eq!(index.find(8, |key| *key == "a"), None);

    let index = HashIndex::new();
    let rows = 3_000;
    for row in 0..rows {
        index.add(spread(u64::from(row)), row, row);
    }
    for row in 0..rows {
        let found = index.find(spread(u64::from(row)), |key| *key == row);
        assert_eq!(found, Some(row));
    }
    let levels = index.levels.iter().map_while(OnceLock::get);
    let used: Vec<usize> = levels
        .map(|level| level.used.load(Ordering::Relaxed))
        .collect();
    assert_eq!(used, [128, 512, 2048, 312]);
}
