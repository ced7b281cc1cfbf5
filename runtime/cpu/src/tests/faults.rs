//! Errors name a rank that disagrees, is silent or ends; garbage from a rank ends in an error that names it, or in a
//! time-out. An abort ends a group's operations. Callers without the job's secret are refused.

use super::*;
use crate::mesh::ChannelRequest;
use crate::mesh::handshake::ChannelKind;
use crate::wait::{Stop, WaitMode, WaitPolicy};
use rcomm_core::backend::AbortReason;
use rcomm_core::{Error, ErrorKind};
use rcomm_recorder::model::ReduceOp;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

#[test]
fn all_ranks_get_the_same_mismatch_and_the_group_stays_usable() {
    for &wiring in WIRINGS.iter().chain(&[Wiring::Nested(2)]) {
        for size in [2, 3, 5] {
            let errors = world(size, wiring, |rig| {
                let differs = rig.rank == 1;
                let mut errors = Vec::new();
                // Another length, small and large.
                for count in [4, 50_000] {
                    let mut data = vec![1f32; if differs { count + 1 } else { count }];
                    errors.push(rig.run(Op::AllReduce {
                        buffer: Buffer::from_mut(&mut data),
                        op: ReduceOp::Sum.into(),
                    }));
                }
                // Another type.
                let (mut floats, mut integers) = ([1f32; 4], [1i32; 4]);
                errors.push(rig.run(Op::AllReduce {
                    buffer: if differs {
                        Buffer::from_mut(&mut integers)
                    } else {
                        Buffer::from_mut(&mut floats)
                    },
                    op: ReduceOp::Sum.into(),
                }));
                // Another reduction, another root, another operation.
                errors.push(
                    rig.run(Op::AllReduce {
                        buffer: Buffer::from_mut(&mut floats),
                        op: if differs {
                            ReduceOp::Max
                        } else {
                            ReduceOp::Sum
                        }
                        .into(),
                    }),
                );
                errors.push(rig.run(Op::Broadcast {
                    buffer: Buffer::from_mut(&mut floats),
                    root: u32::from(differs),
                }));
                errors.push(rig.run(if differs {
                    Op::Barrier
                } else {
                    Op::Broadcast {
                        buffer: Buffer::from_mut(&mut floats),
                        root: 0,
                    }
                }));
                // Splits that do not match.
                let out = [0u8; 16];
                let mut into = [0u8; 16];
                let mut splits = vec![1; rig.size];
                let mut wrong_splits = splits.clone();
                if differs {
                    wrong_splits[0] = 2;
                }
                let total = wrong_splits.iter().sum::<usize>();
                errors.push(rig.run(Op::AllToAllVSingle {
                    input: Buffer::from_slice(&out[..total]),
                    output: Buffer::from_mut(&mut into[..rig.size]),
                    input_splits: wrong_splits,
                    output_splits: std::mem::take(&mut splits),
                }));
                // A part whose size is not the one that the root lists.
                let own = vec![1f32; if differs { 3 } else { 2 }];
                let mut parts = vec![[0f32; 2]; if rig.rank == 0 { rig.size } else { 0 }];
                let outputs = parts.iter_mut().map(|part| Buffer::from_mut(&mut part[..]));
                errors.push(rig.run(Op::GatherV {
                    input: Buffer::from_slice(&own),
                    outputs: outputs.collect(),
                    root: 0,
                }));
                // The group must still work.
                rig.run(Op::Barrier).unwrap();
                let mut data = [rig.rank as i32];
                rig.run(Op::AllReduce {
                    buffer: Buffer::from_mut(&mut data),
                    op: ReduceOp::Max.into(),
                })
                .unwrap();
                assert_eq!(data, [rig.size as i32 - 1]);
                errors
                    .into_iter()
                    .map(Result::unwrap_err)
                    .collect::<Vec<_>>()
            });
            for rank_errors in &errors {
                for (error, first) in rank_errors.iter().zip(&errors[0]) {
                    assert_eq!(error.kind(), ErrorKind::Mismatch);
                    assert_eq!(error.to_string(), first.to_string());
                    assert_eq!(error.rank(), Some(1), "{error}");
                }
            }
            assert!(
                errors[0][0].to_string().contains("of 5 Float"),
                "{}",
                errors[0][0]
            );
            assert!(
                errors[0][0].to_string().contains("of 4 Float"),
                "{}",
                errors[0][0]
            );
        }
    }
}

#[test]
fn a_silent_rank_is_named_when_the_deadline_passes() {
    for &wiring in WIRINGS {
        let results = world(2, wiring, |rig| {
            rig.run(Op::Barrier).unwrap();
            if rig.rank == 1 {
                // This operation starts when rank 0 has given up, and must fail with rank 0's error.
                rig.store.wait(&["gave up"], LONG).unwrap();
                // Rank 0 began this barrier before it gave up, so the barrier may succeed here, but no later one.
                let first = rig.run(Op::Barrier);
                return first.and_then(|_| rig.run(Op::Barrier)).unwrap_err();
            }
            let began = Instant::now();
            let error = rig
                .run_for(&mut Op::Barrier, Duration::from_millis(100))
                .unwrap_err();
            assert!(began.elapsed() >= Duration::from_millis(100));
            rig.store.set("gave up", b"").unwrap();
            let later = rig.run(Op::Barrier).unwrap_err();
            assert_eq!(later.kind(), ErrorKind::Timeout);
            error
        });
        assert_eq!(results[0].kind(), ErrorKind::Timeout);
        assert_eq!(results[0].rank(), Some(1));
        assert_eq!(results[1].rank(), Some(0), "{}", results[1]);
        assert_eq!(results[1].kind(), ErrorKind::Aborted, "{}", results[1]);
    }
}

#[test]
fn a_rank_that_leaves_is_named_by_all_the_others() {
    for &wiring in WIRINGS {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let store = store.clone();
                scope.spawn(move || {
                    let rig = Rig::new(store, rank, 4, wiring);
                    rig.run(Op::Barrier).unwrap();
                    if rank == 2 {
                        // The rank's mesh and channels end with it, as those of a dead process do.
                        return;
                    }
                    let error = rig.run(Op::Barrier).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::PeerLost, "rank {rank}: {error}");
                    assert_eq!(error.rank(), Some(2), "rank {rank}: {error}");
                });
            }
        });
    }
}

#[test]
fn a_rank_whose_connections_end_while_it_answers_is_not_called_gone() {
    // On a busy machine, the answer may come too late to be in the error.
    let is_said = (0..10).any(|_| {
        let text = error_of_ended_connections();
        let rest = text.strip_prefix("the connection to rank 1 ended");
        let rest = rest.unwrap_or_else(|| panic!("{text}"));
        rest.starts_with(", but its process still runs")
    });
    assert!(is_said);
}

/// The error of rank 0 where the connections of rank 1 end without a reason, and the mesh of rank 1 still answers.
fn error_of_ended_connections() -> String {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let there = store.clone();
        scope.spawn(move || {
            let rig = Rig::new(there, 1, 2, Wiring::Tcp);
            rig.run(Op::Barrier).unwrap();
            drop(rig.backend);
            rig.store.wait(&["failed"], LONG).unwrap();
        });
        let rig = Rig::new(store.clone(), 0, 2, Wiring::Tcp);
        rig.run(Op::Barrier).unwrap();
        let error = rig.run(Op::Barrier).unwrap_err();
        store.set("failed", b"").unwrap();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)));
        error.to_string()
    })
}

#[test]
fn an_abort_ends_pending_operations_and_refuses_later_ones() {
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            if rig.rank == 1 {
                rig.store.wait(&["aborted"], LONG).unwrap();
                return;
            }
            let pending = rig.issue(Op::Barrier);
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    let mut data = [0i32; 3];
                    rig.run(Op::Recv {
                        buffer: Buffer::from_mut(&mut data),
                        peer: Some(1),
                        tag: 0,
                    })
                });
                let error = Error::new(ErrorKind::Aborted, "aborted by the test");
                let timeout = None;
                rig.backend.abort(&AbortReason { error, timeout });
                assert_eq!(
                    waiting.join().unwrap().unwrap_err().kind(),
                    ErrorKind::Aborted
                );
            });
            assert!(pending.wait(LONG.into()).has_ended());
            assert!(pending.reclaim().is_some());
            let later = rig.run(Op::Barrier).unwrap_err();
            assert_eq!(later.to_string(), "aborted by the test");
            rig.store.set("aborted", b"").unwrap();
        });
    }
}

#[test]
fn a_rank_that_met_the_others_and_did_not_connect_is_named() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    for wiring in [Wiring::Tcp, Wiring::Shm] {
        let store: Arc<dyn Store> =
            Arc::new(PrefixStore::new(format!("{wiring:?}/"), store.clone()));
        let context = world_context(store, 0, 2, wiring);
        let factory = CpuFactory::open(&context).unwrap();
        let group = group_context(&context.store, "world", 1, &[0, 1], 0);
        // Long enough for a loaded machine to come as far as the connections.
        let timeout = Duration::from_secs(2);
        let error = factory.connect(group, timeout.into()).err().unwrap();
        assert_eq!(
            (error.kind(), error.ranks()),
            (ErrorKind::Timeout, &[1][..])
        );
        let text = error.to_string();
        assert!(
            text.contains("rank 1 met the others but did not connect to them within"),
            "{text}"
        );
    }
}

#[test]
fn callers_without_the_secret_are_refused_and_counted_and_do_not_affect_ranks() {
    world(2, Wiring::Tcp, |rig| {
        rig.run(Op::Barrier).unwrap();
        // A connection that sends no bytes must not delay those that follow.
        let mut silent = None;
        if rig.rank == 1 {
            let address = rig.store.get("cpu/addr/0", LONG).unwrap();
            let address = String::from_utf8(address).unwrap();
            // Garbage.
            let mut caller = TcpStream::connect(&address).unwrap();
            caller.write_all(&[0x5a; 500]).unwrap();
            let mut answer = Vec::new();
            // The caller is refused with an answer or a reset; in both cases the connection ends.
            let _ = caller.read_to_end(&mut answer);
            // A valid handshake without the secret.
            let mut context = world_context(rig.store.clone(), 1, 2, Wiring::Tcp);
            context.secret = Secret::from_text("guessed");
            context.store = Arc::new(PrefixStore::new("nowhere/", rig.store.clone()));
            context.store.set("cpu/addr/0", address.as_bytes()).unwrap();
            context.store.set("cpu/host_of/0", b"-").unwrap();
            let outsider = CpuFactory::open(&context).unwrap();
            let group = group_context(&context.store, "world", 1, &[0, 1], 1);
            let backend = outsider.connect(group, LONG.into()).unwrap();
            let call = Call {
                seq: 1,
                turn: 1,
                deadline: LONG.into(),
                hints: Hints::NONE,
            };
            let error = backend
                .run(&mut Op::Barrier, call, &NoObserver)
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unauthorized, "{error}");
            assert_eq!(error.rank(), Some(0));
            silent = Some(TcpStream::connect(&address).unwrap());
            rig.store.set("refused", b"").unwrap();
        } else {
            rig.store.wait(&["refused"], LONG).unwrap();
            let deadline = Instant::now() + LONG;
            while rig.factory.refused() < 2 {
                assert!(Instant::now() < deadline, "{}", rig.factory.refused());
                std::thread::yield_now();
            }
        }
        rig.run(Op::Barrier).unwrap();
        let mut data = [1i32];
        rig.run(Op::Coalesced(vec![if rig.rank == 0 {
            Op::Send {
                buffer: Buffer::from_slice(&[7i32]),
                peer: 1,
                tag: 0,
            }
        } else {
            Op::Recv {
                buffer: Buffer::from_mut(&mut data),
                peer: Some(0),
                tag: 0,
            }
        }]))
        .unwrap();
        assert_eq!(data, [if rig.rank == 0 { 1 } else { 7 }]);
        drop(silent);
    });
}

/// Runs a rank 1 that has the secret and then sends arbitrary bytes. The operation of rank 0 must fail with an error
/// that names rank 1, or with a time-out.
fn rank_1_sends_noise(kind: ChannelKind, noise: &[u8]) {
    world(2, Wiring::Tcp, |rig| {
        if rig.rank == 1 {
            let stop = Stop::default();
            let mut policy = WaitPolicy::new(&stop, LONG.into(), WaitMode::Oversubscribed);
            let request = ChannelRequest {
                group: 1,
                kind,
                peer: 0,
                streams: 1,
            };
            let channel = rig.factory.mesh.connect(request, &mut policy);
            let mut channel = channel.unwrap_or_else(|_| panic!("no channel to rank 0"));
            let mut channel = channel.remove(0).socket;
            channel.set_nonblocking(false).unwrap();
            // An error is ignored: the peer may close the channel before it has read all bytes.
            let _ = channel.write_all(noise);
            rig.store.wait(&["read"], LONG).unwrap();
            return;
        }
        let mut data = [0u8; 64];
        let error = match kind {
            ChannelKind::Collective => rig.run_for(&mut Op::Barrier, Duration::from_secs(5)),
            _ => {
                let buffer = Buffer::from_mut(&mut data);
                let (peer, tag) = (Some(1), 0);
                rig.run_for(&mut Op::Recv { buffer, peer, tag }, Duration::from_secs(5))
            }
        };
        rig.store.set("read", b"").unwrap();
        let error = error.unwrap_err();
        // Noise that happens to begin a valid message ends in a time-out.
        let is_expected = error.rank() == Some(1) || error.kind() == ErrorKind::Timeout;
        assert!(is_expected, "{error}");
    });
}

#[test]
fn garbage_ends_in_an_error_that_names_its_sender_or_in_a_time_out() {
    use rand_bytes::Noise;
    for kind in [ChannelKind::Collective, ChannelKind::P2p] {
        for seed in 0..12 {
            let noise: Vec<u8> = Noise(seed).take(4096).collect();
            rank_1_sends_noise(kind, &noise);
        }
        // The magic numbers of an agreement, an operation's header and a message's frame, followed by absurd lengths.
        for magic in [0x7263_6d31u32, 0x7263_6e31, 0x7263_7031] {
            let mut noise = vec![0xff; 4096];
            noise[..4].copy_from_slice(&magic.to_le_bytes());
            rank_1_sends_noise(kind, &noise);
            for code in 1..=5 {
                noise[4] = code;
                noise[5] = 0;
                rank_1_sends_noise(kind, &noise);
            }
        }
    }
}

mod rand_bytes {
    /// Bytes that look random and are the same in every run.
    pub(super) struct Noise(pub(super) u64);

    impl Iterator for Noise {
        type Item = u8;

        fn next(&mut self) -> Option<u8> {
            let step = self.0.wrapping_mul(6_364_136_223_846_793_005);
            self.0 = step.wrapping_add(1_442_695_040_888_963_407);
            Some((self.0 >> 56) as u8)
        }
    }
}
