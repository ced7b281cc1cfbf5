//! Tests which rings stay after their ranks have ended, and which of them a new start of the job removes.

use super::*;

#[test]
fn file_and_directory_are_private_and_removed_on_close() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let path = path_of(&recorder);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    assert_eq!(
        fs::metadata(&path).unwrap().len(),
        recorder.size_bytes() as u64
    );
    let reader = RingReader::attach(&path).unwrap();
    recorder.close().unwrap();
    recorder.close().unwrap();
    assert!(!path.exists() && !path.parent().unwrap().exists());
    assert!(reader.is_closed() && !reader.is_alive());
    // Recording after the close does no harm.
    let world = world(&recorder);
    recorder.begin(&all_reduce(world, 1));
}

#[test]
fn rings_stay_until_all_ranks_of_the_host_have_ended_well() {
    let directory = tempfile::tempdir().unwrap();
    let make = |rank| FlightRecorder::create(&config(directory.path(), rank, 0)).unwrap();
    let ranks = [make(0), make(1), make(2)];
    let paths = ranks.each_ref().map(path_of);
    ranks[0].close().unwrap();
    let reader = RingReader::attach(&paths[0]).unwrap();
    assert!(reader.is_closed() && !reader.is_alive());
    ranks[2].close().unwrap();
    assert!(paths.iter().all(|path| path.exists()));
    // The name of a closed ring can be used again, by the same process too.
    let again = make(0);
    ranks[1].close().unwrap();
    assert!(paths.iter().all(|path| path.exists()));
    again.close().unwrap();
    assert!(!paths[0].parent().unwrap().exists());
}

#[test]
fn rings_of_ranks_that_ended_well_stay_beside_one_that_did_not() {
    let directory = tempfile::tempdir().unwrap();
    let make = |rank| FlightRecorder::create(&config(directory.path(), rank, 0)).unwrap();
    let [dead, failed, well] = [make(0), make(1), make(2)];
    let paths = [&dead, &failed, &well].map(path_of);
    drop(dead);
    failed.note_failure(&Failure::new(
        FailureKind::Backend,
        &[],
        1,
        "the link is down",
    ));
    failed.mark_closed();
    well.close().unwrap();
    assert!(paths.iter().all(|path| path.exists()));
    // The ring with the failure is reason enough, without that of the dead rank.
    fs::remove_file(&paths[0]).unwrap();
    make(3).close().unwrap();
    assert!(paths[1..].iter().all(|path| path.exists()));
}

#[test]
fn rings_of_ranks_that_ended_well_stay_beside_one_that_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let make = |rank| FlightRecorder::create(&config(directory.path(), rank, 0)).unwrap();
    let [damaged, well] = [make(0), make(1)];
    let paths = [&damaged, &well].map(path_of);
    drop(damaged);
    fs::write(&paths[0], "cut").unwrap();
    well.close().unwrap();
    assert!(paths.iter().all(|path| path.exists()));
}

#[test]
fn ring_of_a_dropped_recorder_is_kept_as_dead() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let path = path_of(&recorder);
    let world = world(&recorder);
    recorder.begin(&all_reduce(world, 1));
    drop(recorder);
    let reader = RingReader::attach(&path).unwrap();
    assert!(!reader.is_alive() && !reader.is_closed());
    let dump = reader.snapshot();
    assert_eq!(dump.entries.len(), 1);
    assert_eq!(dump.identity.reason, RingReader::OWNER_IS_DEAD);
    assert_eq!(dump.identity.dump_time_ns, dump.entries[0].time_created_ns);
}

#[test]
fn a_second_recorder_of_a_rank_is_refused_with_rank_and_job_in_the_error() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path(), 2, 0);
    let first = FlightRecorder::create(&config).unwrap();
    let error = FlightRecorder::create(&config).unwrap_err();
    assert!(matches!(error, Error::RankTaken { rank: 2, .. }), "{error}");
    let sentence = error.to_string();
    assert!(
        sentence.contains("rank 2") && sentence.contains("\"a job\""),
        "{sentence}"
    );
    let path = path_of(&first);
    let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(left, 1, "the second recorder left a file");
}

#[test]
fn the_rings_of_the_last_two_attempts_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let attempts = || -> Vec<(u32, bool)> {
        let rings = list_rings(directory.path()).unwrap();
        rings
            .into_iter()
            .map(|listing| {
                let ring = listing.ring.unwrap();
                (ring.identity.attempt, ring.alive)
            })
            .collect()
    };
    for attempt in 0..4 {
        drop(FlightRecorder::create(&config(directory.path(), 0, attempt)).unwrap());
        drop(FlightRecorder::create(&config(directory.path(), 1, attempt)).unwrap());
    }
    assert_eq!(attempts(), [(2, false), (3, false), (2, false), (3, false)]);
    // Another start of the same attempt keeps the previous ring.
    let _again = FlightRecorder::create(&config(directory.path(), 0, 3)).unwrap();
    assert_eq!(attempts(), [(3, false), (3, true), (2, false), (3, false)]);
    let removed = remove_stale_rings(directory.path(), Some("a job")).unwrap();
    assert_eq!(removed.len(), 3);
    assert_eq!(attempts(), [(3, true)]);
}
