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
    let mut assert_changed = |cause: &str| {
        assert!(follower.poll().changed, "{cause}");
        recorder.heartbeat();
        let second = follower.poll();
        assert!(!second.changed && second.alive, "{cause}");
        assert!(second.heartbeat_ns > 0 && second.as_of_ns >= second.heartbeat_ns);
    };
    assert_changed("the ring was not read before");
    let world = world(&recorder);
    assert_changed("a group was added");
    let ticket = recorder.begin(&all_reduce(world, 1));
    assert_changed("an operation was issued");
    recorder.started(ticket);
    assert_changed("the operation started");
    recorder.completed(ticket);
    assert_changed("the operation completed");
    recorder.retired(ticket);
    assert_changed("the operation was retired");
    recorder.phase("evaluate");
    assert_changed("the phase was set");
    recorder.step(2);
    assert_changed("the step was set");
    recorder.set_group_timeout(world, MINUTE * 2);
    assert_changed("a time-out was set");
    let later = recorder.add_group(
        &ProcessGroupInfo {
            id: 1,
            name: "1".to_owned(),
            desc: "tp".to_owned(),
            ranks: [].into(),
        },
        MINUTE,
    );
    assert_changed("a group without members was added");
    assert!(recorder.set_group_members(later, &[0, 1]));
    assert_changed("its members were set");
    recorder.note_exit(3);
    assert_changed("the exit code was noted");
    assert_eq!(*follower.dump().groups[1].info.ranks, [0, 1]);
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
    let mut pending = Vec::new();
    for seq in 1..2_000 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let roll = (random >> 33) % 100;
        if roll < 40 {
            pending.push(recorder.begin(&all_reduce(groups[seq as usize % 2], seq)));
        } else if let Some(index) = (roll as usize).checked_rem(pending.len()) {
            match roll % 4 {
                0 => recorder.started(pending[index]),
                1 => recorder.completed(pending[index]),
                2 => recorder.failed(pending[index]),
                _ => recorder.retired(pending.swap_remove(index)),
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
    let complete = |from: u64, to: u64| {
        for seq in from..to {
            let ticket = recorder.begin(&all_reduce(world, seq));
            recorder.completed(ticket);
            recorder.retired(ticket);
        }
    };
    let count_and_oldest = |follower: &RingFollower| {
        let entries = &follower.dump().entries;
        (entries.len(), entries[0].record_id)
    };
    complete(1, 21);
    follower.poll();
    assert_eq!(count_and_oldest(&follower), (8, 13));
    let pending = recorder.begin(&all_reduce(world, 21));
    complete(22, 41);
    follower.poll();
    assert_eq!(count_and_oldest(&follower), (20, pending.record_id()));
    recorder.completed(pending);
    recorder.retired(pending);
    assert!(follower.poll().changed);
    assert_eq!(count_and_oldest(&follower), (8, 33));
    recorder.close().unwrap();
    let poll = follower.poll();
    assert!(poll.changed && !poll.alive);
    assert_eq!(follower.dump().identity.reason, RingReader::CLOSED);
    assert!(!follower.poll().changed);
}
