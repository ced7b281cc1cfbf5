//! Sends and receives: sizes, tags, order, sources and mismatches.

use super::*;
use rcomm_core::ErrorKind;
use rcomm_core::backend::Progress;

const COUNTS: &[usize] = &[0, 1, 1000, 1024, 16_384, 16_385, 300_007];

/// Elements that differ by sender, tag and position.
pub(super) fn message(from: usize, tag: u32, count: usize) -> Vec<i32> {
    (0..count)
        .map(|index| (from * 1_000_003 + tag as usize * 7919 + index) as i32)
        .collect()
}

pub(super) fn send(to: usize, tag: u32, message: &[i32]) -> Op<'_> {
    Op::Send {
        buffer: Buffer::from_slice(message),
        peer: to as u32,
        tag,
    }
}

pub(super) fn receive(from: Option<usize>, tag: u32, into: &mut [i32]) -> Op<'_> {
    Op::Recv {
        buffer: Buffer::from_mut(into),
        peer: from.map(|from| from as u32),
        tag,
    }
}

#[test]
fn messages_of_all_sizes_arrive_completely_and_in_order() {
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            for &count in COUNTS {
                for round in 0..3 {
                    let mut into = vec![0; count];
                    if rig.rank == 0 {
                        rig.run(send(1, 5, &message(0, round, count))).unwrap();
                        rig.run(receive(Some(1), 6, &mut into)).unwrap();
                        assert!(into == message(1, round, count));
                    } else {
                        rig.run(receive(Some(0), 5, &mut into)).unwrap();
                        assert!(into == message(0, round, count));
                        rig.run(send(0, 6, &message(1, round, count))).unwrap();
                    }
                }
            }
        });
    }
}

#[test]
fn short_and_long_messages_keep_their_order_while_none_is_received() {
    // More short messages than a stream in shared memory has cells for.
    let count = |round: u32| if round.is_multiple_of(4) { 100 } else { 2 };
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            let rounds = 0..200;
            // The first message opens both ends of a channel.
            if rig.rank == 0 {
                rig.run(send(1, 4, &[1])).unwrap();
            } else {
                rig.run(receive(Some(0), 4, &mut [0])).unwrap();
            }
            if rig.rank == 0 {
                for round in rounds.clone() {
                    rig.run(send(1, 5, &message(0, round, count(round))))
                        .unwrap();
                }
            }
            rig.run(Op::Barrier).unwrap();
            if rig.rank == 1 {
                for round in rounds {
                    let mut into = vec![0; count(round)];
                    rig.run(receive(Some(0), 5, &mut into)).unwrap();
                    assert!(into == message(0, round, count(round)), "{round}");
                }
            }
        });
    }
}

#[test]
fn tags_are_received_in_any_order() {
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            for count in [10, 60_000] {
                if rig.rank == 0 {
                    let pending: Vec<_> = (0..4)
                        .map(|tag| {
                            rig.issue(Op::Send {
                                buffer: Buffer::from_vec(message(0, tag, count)),
                                peer: 1,
                                tag,
                            })
                        })
                        .collect();
                    for pending in pending {
                        let end = pending.wait(LONG.into());
                        assert!(matches!(end, Progress::Completed(_)), "{end:?}");
                    }
                } else {
                    for tag in [2, 0, 3, 1] {
                        let mut into = vec![0; count];
                        rig.run(receive(Some(0), tag, &mut into)).unwrap();
                        assert!(into == message(0, tag, count));
                    }
                }
            }
        });
    }
}

#[test]
fn a_coalesced_batch_completes_in_any_order_of_its_operations() {
    for &wiring in WIRINGS {
        for size in [2, 3, 5] {
            world(size, wiring, |rig| {
                for count in [3, 100_000] {
                    let others = (0..rig.size).filter(|&rank| rank != rig.rank);
                    let others: Vec<usize> = others.collect();
                    let out: Vec<_> = others
                        .iter()
                        .map(|&to| message(rig.rank, to as u32, count))
                        .collect();
                    let mut into = vec![vec![0; count]; others.len()];
                    {
                        let mut ops = Vec::new();
                        for (&to, out) in others.iter().zip(&out) {
                            ops.push(send(to, 1, out));
                        }
                        for (&from, into) in others.iter().zip(&mut into) {
                            ops.push(receive(Some(from), 1, into));
                        }
                        if rig.rank % 2 == 1 {
                            ops.reverse();
                        }
                        rig.run(Op::Coalesced(ops)).unwrap();
                    }
                    for (&from, into) in others.iter().zip(&into) {
                        assert!(*into == message(from, rig.rank as u32, count));
                    }
                }
            });
        }
    }
}

#[test]
fn issued_receives_of_one_tag_take_messages_in_order() {
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            if rig.rank == 0 {
                for round in 0..20 {
                    let count = if round % 3 == 0 { 50_000 } else { 5 };
                    rig.run(send(1, 9, &message(0, round, count))).unwrap();
                }
            } else {
                let pending: Vec<_> = (0..20)
                    .map(|round| {
                        let count = if round % 3 == 0 { 50_000 } else { 5 };
                        rig.issue(Op::Recv {
                            buffer: Buffer::from_vec(vec![0i32; count]),
                            peer: Some(0),
                            tag: 9,
                        })
                    })
                    .collect();
                for (round, pending) in pending.into_iter().enumerate() {
                    let end = pending.wait(LONG.into());
                    assert!(matches!(end, Progress::Completed(_)), "{end:?}");
                    let Some(Op::Recv { buffer, .. }) = pending.reclaim() else {
                        panic!("the buffer was not returned");
                    };
                    let received = buffer.into_vec::<i32>().unwrap();
                    assert!(received == message(0, round as u32, received.len()));
                }
            }
        });
    }
}

#[test]
fn a_receive_from_any_rank_returns_the_sender() {
    for &wiring in WIRINGS {
        world(4, wiring, |rig| {
            for count in [4, 40_000] {
                if rig.rank == 2 {
                    let mut seen = Vec::new();
                    for _ in 0..3 {
                        let mut into = vec![0; count];
                        let done = rig.run(receive(None, 3, &mut into)).unwrap();
                        let from = done.source.unwrap() as usize;
                        assert!(into == message(from, 3, count));
                        seen.push(from);
                    }
                    seen.sort_unstable();
                    assert_eq!(seen, [0, 1, 3]);
                } else {
                    rig.run(send(2, 3, &message(rig.rank, 3, count))).unwrap();
                }
                rig.run(Op::Barrier).unwrap();
            }
        });
    }
}

#[test]
fn a_message_of_the_wrong_size_fails_its_receive_and_the_next_one_arrives() {
    for &wiring in WIRINGS {
        for count in [10, 100_000] {
            world(2, wiring, |rig| {
                if rig.rank == 0 {
                    let sent = rig.run(send(1, 1, &message(0, 1, count)));
                    if count > 16_384 {
                        assert_eq!(sent.unwrap_err().kind(), ErrorKind::Mismatch);
                    }
                    rig.run(send(1, 1, &message(0, 2, count))).unwrap();
                } else {
                    let mut short = vec![0; count - 1];
                    let error = rig.run(receive(Some(0), 1, &mut short)).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Mismatch);
                    assert_eq!(error.rank(), Some(0));
                    let text = error.to_string();
                    assert!(text.contains(&format!("{count} elements of Int")), "{text}");
                    assert!(
                        text.contains(&format!("{} elements of Int", count - 1)),
                        "{text}"
                    );
                    let mut into = vec![0; count];
                    rig.run(receive(Some(0), 1, &mut into)).unwrap();
                    assert!(into == message(0, 2, count));
                }
            });
        }
    }
}

#[test]
fn a_receive_from_any_rank_that_ends_with_a_mismatch_leaves_the_queues_of_all_ranks() {
    const COUNT: usize = 100_000;
    for &wiring in WIRINGS {
        world(3, wiring, |rig| match rig.rank {
            0 => {
                let (mut short, mut into) = (vec![0; COUNT - 1], vec![0; COUNT]);
                let block = vec![receive(None, 1, &mut short), receive(Some(2), 1, &mut into)];
                let error = rig.run(Op::Coalesced(block)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Mismatch);
                assert_eq!(error.rank(), Some(1));
                assert!(into == message(2, 1, COUNT));
            }
            1 => {
                // Rank 0 has refused the message once the send fails. Only then may rank 2 send: its message would be
                // for the receive from any rank otherwise.
                let sent = rig.run(send(0, 1, &message(1, 1, COUNT)));
                assert_eq!(sent.unwrap_err().kind(), ErrorKind::Mismatch);
                rig.run(send(2, 2, &[1])).unwrap();
            }
            _ => {
                rig.run(receive(Some(1), 2, &mut [0])).unwrap();
                rig.run(send(0, 1, &message(2, 1, COUNT))).unwrap();
            }
        });
    }
}

#[test]
fn threads_of_one_rank_share_a_channel() {
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            std::thread::scope(|scope| {
                for tag in 0..4 {
                    scope.spawn(move || {
                        for round in 0..25 {
                            let count = if round % 2 == 0 { 30 } else { 20_000 };
                            let peer = 1 - rig.rank;
                            let mut into = vec![0; count];
                            let out = message(rig.rank, tag + round * 10, count);
                            rig.run(Op::Coalesced(vec![
                                send(peer, tag, &out),
                                receive(Some(peer), tag, &mut into),
                            ]))
                            .unwrap();
                            assert!(into == message(peer, tag + round * 10, count));
                        }
                    });
                }
            });
        });
    }
}
