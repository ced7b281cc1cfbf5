//! Tests of the exit code that a process notes in its ring.

use super::*;
use rcomm_recorder::publish::RingFollower;

#[test]
fn the_exit_code_is_read_from_the_ring_of_a_process_that_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let path = path_of(&recorder);
    let mut follower = RingFollower::new(RingReader::attach(&path).unwrap(), 16);
    follower.poll();
    let exit = |dump: &Dump| dump.status.as_ref().unwrap().exit;
    assert_eq!(exit(follower.dump()), None);
    assert!(follower.dump().identity.begun_ns > 0);
    recorder.note_exit(3);
    drop(recorder);
    assert!(follower.poll().changed);
    let noted = exit(follower.dump()).expect("the exit code was noted");
    assert_eq!(noted.code, 3);
    assert!(noted.time_ns >= follower.dump().identity.begun_ns);
    let read = RingReader::attach(&path).unwrap().snapshot();
    assert_eq!(exit(&read), Some(noted));
    // The exit code was the last thing that the dead process wrote.
    assert_eq!(read.identity.dump_time_ns, noted.time_ns);
}
