//! A follower of a ring has the same contents as a snapshot.

use super::*;

fn follow(recorder: &FlightRecorder, keep: usize) -> RingFollower {
    RingFollower::new(RingReader::attach(path_of(recorder)).unwrap(), keep)
}

#[test]
fn follower_reports_exactly_the_changes_of_a_snapshot() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let mut follower = follow(&recorder, usize::MAX);
    let mut differs = |what: &str| {
        assert!(follower.poll().changed, "{what}");
        recorder.heartbeat();
        let again = follower.poll();
        assert!(!again.changed && again.alive, "{what}");
        assert!(again.heartbeat_ns > 0 && again.as_of_ns >= again.heartbeat_ns);
    };
    differs("the ring was not read before");
    let world = world(&recorder);
    differs("a group was added");
    let ticket = recorder.begin(&all_reduce(world, 1));
    differs("an operation was issued");
    recorder.started(ticket);
    differs("the operation started");
    recorder.completed(ticket);
    differs("the operation completed");
    recorder.retired(ticket);
    differs("the operation was retired");
    recorder.phase("evaluate");
    differs("the phase was set");
    recorder.step(2);
    differs("the step was set");
    recorder.set_group_timeout(world, MINUTE * 2);
    differs("a time-out was set");
}

#[test]
fn follower_equals_a_snapshot_however_often_the_ring_wraps() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let groups = [
        world(&recorder),
        recorder.add_group(
            &ProcessGroupInfo {
                id: 1,
                name: "1".to_owned(),
                desc: "tp".to_owned(),
                ranks: [0, 1].into(),
            },
            MINUTE,
        ),
    ];
    let mut follower = follow(&recorder, usize::MAX);
    let reader = RingReader::attach(path_of(&recorder)).unwrap();
    let mut random = 7_u64;
    let mut open = Vec::new();
    for seq in 1..2_000 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let roll = (random >> 33) % 100;
        if roll < 40 {
            open.push(recorder.begin(&all_reduce(groups[seq as usize % 2], seq)));
        } else if let Some(at) = (roll as usize).checked_rem(open.len()) {
            match roll % 4 {
                0 => recorder.started(open[at]),
                1 => recorder.completed(open[at]),
                2 => recorder.failed(open[at]),
                _ => recorder.retired(open.swap_remove(at)),
            }
        }
        if roll.is_multiple_of(7) {
            recorder.step(seq as i64);
            assert!(follower.poll().changed);
            assert_eq!(
                content(follower.dump()),
                content(&reader.snapshot()),
                "{seq}"
            );
        }
    }
    assert!(
        recorder.snapshot().entries[0].record_id > 100,
        "the ring has not wrapped"
    );
}

#[test]
fn follower_keeps_the_newest_and_all_pending_operations() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let mut follower = follow(&recorder, 8);
    let run = |from: u64, to: u64| {
        for seq in from..to {
            let ticket = recorder.begin(&all_reduce(world, seq));
            recorder.completed(ticket);
            recorder.retired(ticket);
        }
    };
    let ids = |follower: &RingFollower| {
        let entries = &follower.dump().entries;
        (entries.len(), entries[0].record_id)
    };
    run(1, 21);
    follower.poll();
    assert_eq!(ids(&follower), (8, 13));
    let pending = recorder.begin(&all_reduce(world, 21));
    run(22, 41);
    follower.poll();
    assert_eq!(ids(&follower), (20, pending.record_id()));
    recorder.completed(pending);
    recorder.retired(pending);
    assert!(follower.poll().changed);
    assert_eq!(ids(&follower), (8, 33));
    recorder.close().unwrap();
    let poll = follower.poll();
    assert!(poll.changed && !poll.alive);
    assert_eq!(follower.dump().identity.reason, RingReader::CLOSED);
    assert!(!follower.poll().changed);
}
