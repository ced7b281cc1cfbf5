//! Blocking sends and receives that share their channel with other requests.
//!
//! A single request on a channel takes a shorter path (`p2p::direct`); these tests cover the ordinary one.

use super::messages::{message, receive, send};
use super::*;
use rcomm_core::backend::Progress;
use std::sync::Barrier;

const ROUNDS: u32 = 300;

fn issue_receive(rig: &Rig, tag: u32, count: usize) -> Arc<dyn Pending> {
    rig.issue(Op::Recv {
        buffer: Buffer::from_vec(vec![0i32; count]),
        peer: Some(0),
        tag,
    })
}

fn issue_send(rig: &Rig, tag: u32, message: Vec<i32>) -> Arc<dyn Pending> {
    rig.issue(Op::Send {
        buffer: Buffer::from_vec(message),
        peer: 1,
        tag,
    })
}

/// Waits until the operation has completed, and returns its message.
fn end_of(pending: &Arc<dyn Pending>) -> Vec<i32> {
    let end = pending.wait(LONG.into());
    assert!(matches!(end, Progress::Completed(_)), "{end:?}");
    match pending.reclaim() {
        Some(Op::Recv { buffer, .. } | Op::Send { buffer, .. }) => buffer.into_vec().unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Receives a message of two equal numbers, and returns the number.
fn receive_one(rig: &Rig, from: Option<usize>, tag: u32) -> i32 {
    let mut into = [0; 2];
    rig.run(receive(from, tag, &mut into)).unwrap();
    assert_eq!(into[0], into[1]);
    into[0]
}

/// Sends a message of two equal numbers to rank 1.
fn send_one(rig: &Rig, tag: u32, value: i32) {
    rig.run(send(1, tag, &[value; 2])).unwrap();
}

/// Rank 0 sends numbers under one tag; two threads of rank 1 receive half of them each, one with the source
/// `first` and one with the source rank 0.
fn two_receivers(wiring: Wiring, first: Option<usize>) {
    world(2, wiring, |rig| {
        if rig.rank == 0 {
            for value in 0..2 * ROUNDS as i32 {
                send_one(rig, 8, value);
            }
            // Rank 0 waits until all messages were received: this test is about the assignment of messages to
            // receives, and not about ranks that end early.
            rig.run(Op::Barrier).unwrap();
            return;
        }
        let receive = |from| move || (0..ROUNDS).map(|_| receive_one(rig, from, 8)).collect();
        let mut numbers: Vec<i32> = std::thread::scope(|scope| {
            let receivers: [_; 2] = [first, Some(0)].map(|from| scope.spawn(receive(from)));
            let received = receivers.map(|receiver| -> Vec<i32> { receiver.join().unwrap() });
            for received in &received {
                assert!(received.is_sorted(), "{received:?}");
            }
            received.concat()
        });
        rig.run(Op::Barrier).unwrap();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..2 * ROUNDS as i32));
    });
}

#[test]
fn two_threads_that_receive_under_one_tag_share_its_messages_in_order() {
    for &wiring in WIRINGS {
        two_receivers(wiring, Some(0));
    }
}

#[test]
fn a_receive_from_any_rank_and_one_from_a_rank_share_the_messages_of_a_tag() {
    for &wiring in WIRINGS {
        two_receivers(wiring, None);
    }
}

#[test]
fn threads_that_receive_different_tags_get_only_their_own_messages() {
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            std::thread::scope(|scope| {
                for tag in 0..3 {
                    scope.spawn(move || {
                        for value in 0..ROUNDS as i32 {
                            if rig.rank == 0 {
                                send_one(rig, tag, value);
                            } else {
                                assert_eq!(receive_one(rig, Some(0), tag), value);
                            }
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn a_receive_issued_before_takes_the_first_message_of_its_tag() {
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            for round in 0..ROUNDS as i32 {
                if rig.rank == 0 {
                    send_one(rig, 1, round);
                    send_one(rig, 1, -round);
                } else {
                    let first = issue_receive(rig, 1, 2);
                    assert_eq!(receive_one(rig, Some(0), 1), -round);
                    assert_eq!(end_of(&first), [round; 2]);
                }
            }
        });
    }
}

#[test]
fn a_pending_receive_does_not_hold_up_receives_of_other_tags() {
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            let late = (rig.rank == 1).then(|| issue_receive(rig, 7, 3));
            for round in 0..ROUNDS as i32 {
                if rig.rank == 0 {
                    send_one(rig, 1, round);
                } else {
                    assert_eq!(receive_one(rig, Some(0), 1), round);
                }
            }
            if let Some(late) = late {
                assert_eq!(end_of(&late), [1, 2, 3]);
            } else {
                rig.run(send(1, 7, &[1, 2, 3])).unwrap();
            }
        });
    }
}

#[test]
fn kept_messages_of_a_tag_are_received_before_new_ones() {
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            for round in 0..ROUNDS as i32 {
                if rig.rank == 0 {
                    for (tag, value) in [(1, 10), (1, 11), (2, 20), (1, 12), (2, 21), (3, 30)] {
                        send_one(rig, tag, round + value);
                    }
                } else {
                    for (tag, value) in [(2, 20), (1, 10), (1, 11), (1, 12), (3, 30), (2, 21)] {
                        assert_eq!(receive_one(rig, Some(0), tag), round + value);
                    }
                }
            }
        });
    }
}

#[test]
fn a_blocking_send_follows_issued_sends_and_overtakes_an_offered_message() {
    /// Elements of each of the `MANY` messages that are sent before any receive is posted: together they are more than
    /// any channel holds.
    const EARLY: usize = 15_000;
    const MANY: u32 = 100;
    for &wiring in WIRINGS {
        let posted = Barrier::new(2);
        world(2, wiring, |rig| {
            if rig.rank == 0 {
                send_one(rig, 0, 0);
                let offered = issue_send(rig, 6, message(0, 6, 100_000));
                let early: Vec<_> = (0..MANY)
                    .map(|round| issue_send(rig, 5, message(0, round, EARLY)))
                    .collect();
                posted.wait();
                send_one(rig, 5, 77);
                for pending in early.iter().chain([&offered]) {
                    end_of(pending);
                }
            } else {
                receive_one(rig, Some(0), 0);
                posted.wait();
                for round in 0..MANY {
                    let mut into = vec![0; EARLY];
                    rig.run(receive(Some(0), 5, &mut into)).unwrap();
                    assert!(into == message(0, round, EARLY), "{round}");
                }
                assert_eq!(receive_one(rig, Some(0), 5), 77);
                let mut into = vec![0; 100_000];
                rig.run(receive(Some(0), 6, &mut into)).unwrap();
                assert!(into == message(0, 6, 100_000));
            }
        });
    }
}

#[test]
fn a_message_that_fits_the_channel_only_in_part_arrives_completely() {
    for &wiring in WIRINGS {
        let started = Barrier::new(2);
        world(2, wiring, |rig| {
            // With these lengths the channel is full once in the middle of a head, and often in the middle of a
            // message.
            let counts = || (0..400u32).map(|round| 5000 + 37 * round as usize % 900);
            if rig.rank == 0 {
                send_one(rig, 0, 0);
                started.wait();
                for (round, count) in (0..).zip(counts()) {
                    rig.run(send(1, 5, &message(0, round, count))).unwrap();
                }
            } else {
                receive_one(rig, Some(0), 0);
                started.wait();
                for (round, count) in (0..).zip(counts()) {
                    let mut into = vec![0; count];
                    rig.run(receive(Some(0), 5, &mut into)).unwrap();
                    assert!(into == message(0, round, count), "{round}");
                }
            }
        });
    }
}
