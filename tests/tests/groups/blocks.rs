//! Blocks with messages of a rank to itself, blocks without operations, and faults of the fake backend in groups that
//! do not exist.

use super::run;
use rcomm::{
    Buffer, Config, ErrorKind, FakeFabric, FakeFault, FakeFaultKind, Op, ProcessGroup, ReduceOp,
    World,
};
use rcomm_tests::world::{Carrier, on_threads};

fn send(values: Vec<u32>, peer: u32, tag: u32) -> Op<'static> {
    let buffer = Buffer::from_vec(values);
    Op::Send { buffer, peer, tag }
}

fn recv(len: usize, peer: u32, tag: u32) -> Op<'static> {
    let (buffer, peer) = (Buffer::from_vec(vec![0u32; len]), Some(peer));
    Op::Recv { buffer, peer, tag }
}

/// The values of the receives, in their order.
fn received(ops: Vec<Op<'static>>) -> Vec<Vec<u32>> {
    let received = ops.into_iter().filter_map(|op| match op {
        Op::Recv { buffer, .. } => Some(buffer.into_vec().unwrap()),
        _ => None,
    });
    received.collect()
}

/// A batch with messages of the rank to itself, two with one tag and an empty one with another, and one to its
/// neighbor.
fn batch(group: &ProcessGroup) -> Vec<Op<'static>> {
    let (this_rank, size) = (group.rank(), group.size());
    let (next, before) = ((this_rank + 1) % size, (this_rank + size - 1) % size);
    let mut ops = vec![
        recv(2, this_rank, 7),
        send(vec![this_rank, 1], this_rank, 7),
        send(vec![this_rank, 2], this_rank, 7),
        recv(2, this_rank, 7),
        send(vec![], this_rank, 8),
        recv(0, this_rank, 8),
    ];
    if size > 1 {
        ops.push(send(vec![this_rank, 3], next, 7));
        ops.push(recv(2, before, 7));
    }
    ops
}

/// Runs blocks with messages of a rank to itself, and checks what arrives.
fn check(world: &World) {
    let group = world.group();
    let (this_rank, size) = (group.rank(), group.size());
    let mut expected = vec![vec![this_rank, 1], vec![this_rank, 2], vec![]];
    if size > 1 {
        expected.push(vec![(this_rank + size - 1) % size, 3]);
    }
    for _ in 0..3 {
        let got = group.batch_isend_irecv(batch(group)).unwrap();
        assert_eq!(received(got.wait().unwrap()), expected);
    }
    // The blocking form, over the caller's memory.
    let (sent, mut got) = ([this_rank, 5], [0; 2]);
    group
        .coalesce(|block| {
            block.recv(&mut got, this_rank, 1);
            block.send(&sent, this_rank, 1);
        })
        .unwrap();
    assert_eq!(got, sent);
}

#[test]
fn a_batch_may_hold_both_halves_of_messages_of_a_rank_to_itself() {
    let no_change = |_: &mut Config| {};
    for size in [1, 3] {
        for carrier in [Carrier::Cpu, Carrier::Fake(FakeFabric::new())] {
            on_threads(size, &carrier, no_change, |world| {
                check(&world);
                world.shutdown().unwrap();
            });
        }
    }
}

#[test]
fn half_a_message_of_a_rank_to_itself_is_refused() {
    run(2, |world| {
        let group = world.group();
        let this_rank = group.rank();
        for (ops, expected) in [
            (vec![send(vec![1], this_rank, 4)], "does not receive it"),
            (vec![recv(1, this_rank, 4)], "does not send to it"),
            (
                vec![send(vec![1], this_rank, 4), recv(1, this_rank, 5)],
                "under tag 4",
            ),
            (
                vec![send(vec![1], this_rank, 4), recv(2, this_rank, 4)],
                "receives UInt32[2]",
            ),
        ] {
            let error = group.batch_isend_irecv(ops).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(expected), "{error}");
        }
        let error = group.send(&[1u32], this_rank, 0).unwrap_err();
        assert!(error.to_string().contains("in one batch"), "{error}");
        check(&world);
        world.shutdown().unwrap();
    });
}

#[test]
fn a_block_without_operations_is_no_operation() {
    run(2, |world| {
        let group = world.group();
        // Only rank 0 issues them: if they were operations, it would wait for rank 1.
        if group.rank() == 0 {
            group.coalesce(|_| {}).unwrap();
            let empty = group.coalesce_async(|_| {}).unwrap();
            assert!(empty.is_success() && empty.wait().unwrap().is_empty());
            let empty = group.batch_isend_irecv(Vec::new()).unwrap();
            assert!(empty.wait().unwrap().is_empty());
        }
        group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
        assert_eq!(world.snapshot().entries.len(), 1);
        world.shutdown().unwrap();
    });
}

#[test]
fn a_fault_of_a_group_that_does_not_exist_is_refused_or_listed_as_left() {
    let fault = |rank: u32, group: &str| FakeFault {
        rank,
        group: group.to_owned(),
        seq: 1,
        kind: FakeFaultKind::Skip,
    };
    let fabric = FakeFabric::new();
    fabric.add_fault(fault(0, "default_pg")).unwrap();
    let carrier = Carrier::Fake(fabric.clone());
    on_threads(
        2,
        &carrier,
        |_: &mut Config| {},
        |world| {
            world.group().barrier().unwrap();
            world.shutdown().unwrap();
        },
    );
    assert_eq!(fabric.faults_left(), [fault(0, "default_pg")]);
    let error = fabric.add_fault(fault(0, "default_pg")).unwrap_err();
    assert!(error.to_string().contains("the groups are 0"), "{error}");
    let error = fabric.add_fault(fault(2, "0")).unwrap_err();
    assert!(
        error.to_string().contains("the group has ranks 0, 1"),
        "{error}"
    );
}
