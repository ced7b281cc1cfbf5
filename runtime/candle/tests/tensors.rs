//! Compares collectives on tensors with what candle computes.
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Tensor, Var};
use rcomm::{ErrorKind, Op, ReduceOp};
use rcomm_candle::{TensorGroup, copy_of, read, tensor_of, write};
use rcomm_tests::world::{Carrier, on_threads};

const TYPES: [DType; 9] = [
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
];

/// Six small numbers, different on each rank.
fn tensor(rank: u32, dtype: DType) -> Tensor {
    let numbers: Vec<f32> = (0..6).map(|index| (rank * 2 + index + 1) as f32).collect();
    let tensor = Tensor::from_vec(numbers, (2, 3), &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    let wide = tensor.to_dtype(DType::F64).unwrap();
    wide.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn tensors_of_every_shared_type_are_reduced_gathered_and_sent() {
    on_threads(
        2,
        &Carrier::Cpu,
        |_| {},
        |world| {
            let group = world.group();
            let rank = group.rank();
            for dtype in TYPES {
                let both = [tensor(0, dtype), tensor(1, dtype)];
                let sum = (&both[0] + &both[1]).unwrap();

                let own = tensor(rank, dtype);
                group.all_reduce_tensor(&own, ReduceOp::Sum).unwrap();
                assert_eq!(numbers(&own), numbers(&sum), "{dtype:?}");

                let own = tensor(rank, dtype);
                group.broadcast_tensor(&own, 1).unwrap();
                assert_eq!(numbers(&own), numbers(&both[1]), "{dtype:?}");

                let gathered = group.all_gather_tensor(&tensor(rank, dtype)).unwrap();
                assert_eq!(gathered.dims(), [2, 2, 3]);
                let stacked = Tensor::stack(&both, 0).unwrap();
                assert_eq!(numbers(&gathered), numbers(&stacked), "{dtype:?}");

                let own = tensor(rank, dtype);
                let part = group.reduce_scatter_tensor(&own, ReduceOp::Sum).unwrap();
                assert_eq!(part.dims(), [3]);
                let expected = sum.get(rank as usize).unwrap();
                assert_eq!(numbers(&part), numbers(&expected), "{dtype:?}");

                if rank == 0 {
                    group.send_tensor(&tensor(0, dtype), 1, 3).unwrap();
                } else {
                    let received = Tensor::zeros((2, 3), dtype, &Device::Cpu).unwrap();
                    group.recv_tensor(&received, 0, 3).unwrap();
                    assert_eq!(numbers(&received), numbers(&both[0]), "{dtype:?}");
                }
            }
            world.shutdown().unwrap();
        },
    );
}

#[test]
fn a_view_is_reduced_in_place_and_changes_the_tensor_that_shares_its_memory() {
    on_threads(
        2,
        &Carrier::Cpu,
        |_| {},
        |world| {
            let group = world.group();
            let var = Var::from_tensor(&tensor(group.rank(), DType::F32)).unwrap();
            // The second row's memory does not start where the tensor's does.
            let row = var.narrow(0, 1, 1).unwrap();
            group.all_reduce_tensor(&row, ReduceOp::Sum).unwrap();
            let own = numbers(&tensor(group.rank(), DType::F32));
            assert_eq!(numbers(var.as_tensor())[..3], own[..3]);
            assert_eq!(numbers(var.as_tensor())[3..], [10.0, 12.0, 14.0]);

            // Memory is lent, not copied.
            let start = read(var.as_tensor(), |buffer| Ok(buffer.as_ptr() as usize)).unwrap();
            let row_start = write(&row, |buffer| Ok(buffer.as_ptr() as usize)).unwrap();
            assert_eq!(row_start - start, 3 * size_of::<f32>());
            let signatures = world.snapshot().signatures;
            assert!(
                signatures
                    .iter()
                    .any(|signature| signature.input_sizes == [vec![1, 3]]),
                "{signatures:?}"
            );
            world.shutdown().unwrap();
        },
    );
}

#[test]
fn copies_of_tensors_are_reduced_asynchronously() {
    on_threads(
        2,
        &Carrier::Cpu,
        |_| {},
        |world| {
            let group = world.group();
            let own = tensor(group.rank(), DType::BF16);
            let op = Op::AllReduce {
                buffer: copy_of(&own).unwrap(),
                op: ReduceOp::Max.into(),
            };
            let (op, _) = group.execute_async(op).unwrap().wait().unwrap();
            let Op::AllReduce { buffer, .. } = op else {
                panic!("{op:?}");
            };
            let highest = tensor_of(buffer).unwrap();
            assert_eq!(
                (highest.dims(), highest.dtype()),
                (&[2, 3][..], DType::BF16)
            );
            assert_eq!(numbers(&highest), numbers(&tensor(1, DType::BF16)));
            world.shutdown().unwrap();
        },
    );
}

#[test]
fn strided_tensors_and_unsupported_types_are_refused() {
    let flipped = tensor(0, DType::F32).t().unwrap();
    for error in [
        read(&flipped, |_| Ok(())).unwrap_err(),
        write(&flipped, |_| Ok(())).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(
            error.to_string().contains("call contiguous() first"),
            "{error}"
        );
    }
    let tiny = tensor(0, DType::F32).to_dtype(DType::F8E4M3).unwrap();
    for error in [
        read(&tiny, |_| Ok(())).unwrap_err(),
        write(&tiny, |_| Ok(())).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    }
    let error = tensor_of(rcomm::Buffer::from_vec(vec![1u64])).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("cannot become a tensor of candle"),
        "{error}"
    );
}
