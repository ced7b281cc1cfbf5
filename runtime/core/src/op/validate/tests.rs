use super::*;

fn floats(len: usize) -> Buffer<'static> {
    Buffer::from_vec(vec![0f32; len])
}

fn refusal(op: Op<'_>) -> String {
    op.validate(0, 2).unwrap_err().to_string()
}

#[test]
fn the_refusal_names_operation_and_argument() {
    let op = Op::Broadcast {
        buffer: floats(1),
        root: 2,
    };
    assert_eq!(
        refusal(op),
        "broadcast: root 2 is not in a group of 2 ranks"
    );
    let op = Op::AllReduce {
        buffer: floats(1),
        op: ReduceOp::BitAnd.into(),
    };
    let error = op.validate(0, 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(
        error.to_string(),
        "all_reduce: band is not defined for elements of type Float"
    );
}

#[test]
fn a_factor_is_one_element_of_the_type_in_host_memory_or_on_the_buffers_device() {
    use crate::op::buffer::{Access, Device};
    let scaled = |buffer: Buffer<'static>, scale: Buffer<'static>| Op::AllReduce {
        buffer,
        op: Reduction::premul_sum_by(scale),
    };
    assert!(scaled(floats(3), floats(1)).validate(0, 2).is_ok());
    let mut lent = [1f32; 3];
    let op = Op::AllReduce {
        buffer: Buffer::from_mut(&mut lent),
        op: Reduction::premul_sum_by(floats(2)),
    };
    assert_eq!(
        refusal(op),
        "all_reduce: the factor Float[2] is not one element"
    );
    let double = Buffer::from_vec(vec![2f64]);
    let text = refusal(scaled(floats(3), double));
    assert!(
        text.contains("the factor Double[1] is of another type than Float[3]"),
        "{text}"
    );
    let memory = std::sync::Arc::new([2f32; 1]);
    let address = std::ptr::NonNull::from(&*memory).cast();
    // SAFETY: nothing reads this memory, which `memory` keeps alive.
    let device_factor = unsafe {
        Buffer::from_raw(
            address,
            1,
            DType::F32,
            Device::Cuda(0),
            Access::Read,
            memory,
        )
        .unwrap()
    };
    let text = refusal(scaled(floats(3), device_factor));
    assert!(
        text.contains("is on another device than Float[3]: cuda:0, not cpu"),
        "{text}"
    );
    // Other reductions do not use the factor.
    let op = Op::AllReduce {
        buffer: floats(3),
        op: Reduction {
            op: ReduceOp::Sum,
            ..Reduction::premul_sum_by(floats(2))
        },
    };
    assert!(op.validate(0, 2).is_ok());
}

#[test]
fn the_full_check_accepts_all_that_the_cheap_check_accepts() {
    let sizes = [0, 1, 2, 4];
    let mut accepted = 0;
    for (size, other) in sizes
        .into_iter()
        .flat_map(|size| sizes.map(|other| (size, other)))
    {
        let (input, ints) = (vec![0f32; size], vec![0i32; size]);
        let numbers = vec![0f32; other];
        let mut outputs = [(); 6].map(|()| numbers.clone());
        let [first, second, third, fourth, fifth, sixth] = &mut outputs;
        let tag = 0;
        let gather = |input, output| Op::AllGatherSingle { input, output };
        let scatter = |input, output, op: ReduceOp| Op::ReduceScatterSingle {
            input,
            output,
            op: op.into(),
        };
        let reduce = |buffer, op: ReduceOp| Op::AllReduce {
            buffer,
            op: op.into(),
        };
        let lent = || Buffer::from_slice(&input);
        let ops = [
            Op::Barrier,
            reduce(lent(), ReduceOp::Sum),
            reduce(Buffer::from_mut(first), ReduceOp::Sum),
            reduce(floats(size), ReduceOp::BitOr),
            gather(lent(), Buffer::from_mut(second)),
            gather(Buffer::from_slice(&ints), Buffer::from_mut(third)),
            gather(lent(), Buffer::from_slice(&numbers)),
            scatter(lent(), Buffer::from_mut(fourth), ReduceOp::Max),
            scatter(lent(), floats(other), ReduceOp::BitXor),
            Op::AllToAllSingle {
                input: lent(),
                output: Buffer::from_mut(fifth),
            },
            Op::Send {
                buffer: lent(),
                peer: other as u32,
                tag,
            },
            Op::Recv {
                buffer: Buffer::from_mut(sixth),
                peer: Some(size as u32),
                tag,
            },
        ];
        for op in ops {
            if op.is_plain(0, 2) {
                accepted += 1;
                let in_full = op.check(0, 2).and_then(|()| op.check_overlaps(0));
                assert!(in_full.is_ok(), "{op:?}");
            }
        }
    }
    assert_eq!(accepted, 16 + 16 + 3 + 3 + 3 + 4 + 4);
}

#[test]
fn parts_that_do_not_fill_the_output_are_refused() {
    let gather = |input, output| Op::AllGatherSingle {
        input: floats(input),
        output: floats(output),
    };
    assert!(gather(3, 6).validate(0, 2).is_ok());
    assert!(gather(0, 0).validate(0, 2).is_ok());
    assert!(refusal(gather(3, 7)).contains("Float[7] does not hold 2 parts like Float[3]"));
}

#[test]
fn an_output_that_may_only_be_read_is_refused() {
    let numbers = [1f32];
    let op = |root| Op::Broadcast {
        buffer: Buffer::from_slice(&numbers),
        root,
    };
    assert!(op(0).validate(0, 2).is_ok());
    assert!(op(1).validate(0, 2).is_err());
}

#[test]
fn wrong_splits_are_refused() {
    let op = |input_splits: &[usize], output_splits: &[usize]| Op::AllToAllVSingle {
        input: floats(3),
        output: floats(4),
        input_splits: input_splits.to_vec(),
        output_splits: output_splits.to_vec(),
    };
    assert!(op(&[1, 2], &[1, 3]).validate(0, 2).is_ok());
    assert!(op(&[1, 1], &[1, 3]).validate(0, 2).is_err());
    assert!(op(&[3], &[1, 3]).validate(0, 2).is_err());
    assert!(op(&[usize::MAX, 4], &[1, 3]).validate(0, 2).is_err());
    assert!(refusal(op(&[2, 1], &[1, 3])).contains("2 as input, 1 as output"));
}

#[test]
fn a_send_to_this_rank_itself_or_outside_the_group_is_refused() {
    let op = |peer| Op::Send {
        buffer: floats(1),
        peer,
        tag: 0,
    };
    assert!(op(1).validate(0, 2).is_ok());
    assert!(refusal(op(0)).contains("this rank itself"));
    assert!(refusal(op(2)).contains("not in a group of 2 ranks"));
}

#[test]
fn memory_that_is_written_and_used_by_another_buffer_is_refused() {
    use crate::op::buffer::{Access, Device};
    use std::ptr::NonNull;
    use std::sync::Arc;
    let memory = Arc::new([0u64; 8]);
    let part = |at: usize, len: usize, access| {
        let start = NonNull::from(&memory[at]).cast();
        // SAFETY: the part lies inside the array, which `memory` keeps alive; the buffer is only validated, never
        // accessed.
        let part = unsafe {
            Buffer::from_raw(start, len, DType::U64, Device::Cpu, access, memory.clone())
        };
        part.unwrap()
    };
    let gather = |at: usize| Op::AllGatherSingle {
        input: part(at, 2, Access::Read),
        output: part(0, 4, Access::Write),
    };
    assert!(gather(4).validate(0, 2).is_ok());
    let text = refusal(gather(3));
    assert!(
        text.contains("UInt64[4] and UInt64[2] overlap by 8 bytes, and one is written"),
        "{text}"
    );
    // Memory may be read twice but not written twice, not even by two members of a block.
    let swap = |second: usize| Op::AllToAll {
        inputs: vec![part(0, 2, Access::Read), part(1, 2, Access::Read)],
        outputs: vec![part(4, 2, Access::Write), part(second, 2, Access::Write)],
    };
    assert!(swap(6).validate(0, 2).is_ok());
    assert!(refusal(swap(5)).contains("overlap by 8 bytes"));
    let sum = |at: usize| Op::AllReduce {
        buffer: part(at, 2, Access::Write),
        op: ReduceOp::Sum.into(),
    };
    assert!(Op::Coalesced(vec![sum(0), sum(2)]).validate(0, 2).is_ok());
    assert!(refusal(Op::Coalesced(vec![sum(0), sum(1)])).contains("overlap"));
    assert!(
        Op::Coalesced(vec![sum(0), sum(8 - 2)])
            .validate(0, 2)
            .is_ok()
    );
}

#[test]
fn a_coalesced_block_is_of_one_kind() {
    let send = || Op::Send {
        buffer: floats(1),
        peer: 1,
        tag: 0,
    };
    assert!(Op::Coalesced(vec![send(), send()]).validate(0, 2).is_ok());
    assert!(refusal(Op::Coalesced(vec![send(), Op::Barrier])).contains("both"));
    assert!(refusal(Op::Coalesced(vec![Op::Coalesced(vec![])])).contains("another"));
}
