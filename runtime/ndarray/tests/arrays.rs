//! Compares collectives on arrays of every layout with what ndarray computes.
#![allow(clippy::unwrap_used)]

use ndarray::{Array1, Array2, Array3, Array4, Axis, array, s};
use rcomm::{Buffer, DType, ErrorKind, Op, ReduceOp, World, f16};
use rcomm_ndarray::{ArrayGroup, array_of, buffer_of, read, write};
use rcomm_tests::world::{Carrier, on_threads};

fn on_two(body: impl Fn(World) + Sync) {
    on_threads(2, &Carrier::Cpu, |_| {}, body);
}

/// Numbers that differ by rank and by index.
fn image(rank: u32) -> Array4<f32> {
    Array4::from_shape_fn((2, 3, 4, 5), |(n, c, h, w)| {
        (n * 1000 + c * 100 + h * 10 + w) as f32 + rank as f32 * 0.25
    })
}

#[test]
fn arrays_whose_strides_differ_between_ranks_are_combined_by_index() {
    on_two(|world| {
        let group = world.group();
        let rank = group.rank();
        let sum = image(0) + image(1);
        // One rank has the channels last in memory.
        let own_image = || match rank {
            0 => image(0),
            _ => {
                let channels_last = image(1).permuted_axes([0, 2, 3, 1]);
                let channels_last = channels_last.as_standard_layout().into_owned();
                channels_last.permuted_axes([0, 3, 1, 2])
            }
        };
        assert_eq!(own_image(), image(rank));
        assert_eq!(own_image().is_standard_layout(), rank == 0);

        let mut reduced = own_image();
        group.all_reduce_array(&mut reduced, ReduceOp::Sum).unwrap();
        assert_eq!(reduced, sum);
        assert_eq!(reduced.strides(), own_image().strides());

        let mut sent = own_image();
        group.broadcast_array(&mut sent, 1).unwrap();
        assert_eq!(sent, image(1));

        let gathered = group.all_gather_array(&own_image()).unwrap();
        assert_eq!(gathered.shape(), [2, 2, 3, 4, 5]);
        assert_eq!(gathered.index_axis(Axis(0), 0), image(0));
        assert_eq!(gathered.index_axis(Axis(0), 1), image(1));

        let part = group
            .reduce_scatter_array(&own_image(), ReduceOp::Sum)
            .unwrap();
        assert_eq!(part, sum.index_axis(Axis(0), rank as usize));

        if rank == 1 {
            group.send_array(&own_image(), 0, 3).unwrap();
        } else {
            let mut received = Array4::<f32>::zeros((5, 4, 3, 2)).reversed_axes();
            group.recv_array(&mut received, 1, 3).unwrap();
            assert_eq!(received, image(1));
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn a_slice_of_an_array_is_written_and_the_rest_is_not() {
    on_two(|world| {
        let mut array = Array2::<i64>::ones((4, 6));
        let mut every_other = array.slice_mut(s![..;-2, ..;2]);
        world
            .group()
            .all_reduce_array(&mut every_other, ReduceOp::Sum)
            .unwrap();
        let expected = Array2::from_shape_fn((4, 6), |(row, column)| {
            1 + i64::from(row % 2 == 1 && column % 2 == 0)
        });
        assert_eq!(array, expected);
        world.shutdown().unwrap();
    });
}

#[test]
fn arrays_without_dimensions_or_elements_are_taken() {
    on_two(|world| {
        let group = world.group();
        let mut number = ndarray::arr0(f64::from(group.rank()) + 0.5);
        group.all_reduce_array(&mut number, ReduceOp::Max).unwrap();
        assert_eq!(number.into_scalar(), 1.5);
        let gathered = group
            .all_gather_array(&ndarray::arr0(group.rank()))
            .unwrap();
        assert_eq!(gathered, array![0, 1]);
        let mut empty = Array3::<f16>::default((3, 0, 2));
        group.all_reduce_array(&mut empty, ReduceOp::Sum).unwrap();
        let gathered = group.all_gather_array(&empty).unwrap();
        assert_eq!(gathered.shape(), [2, 3, 0, 2]);
        world.shutdown().unwrap();
    });
}

#[test]
fn a_wrong_length_is_an_error_of_both_ranks_and_leaves_a_strided_array_as_it_was() {
    on_two(|world| {
        let rank = world.rank() as usize;
        let before = Array2::<f32>::ones((3, 2 + rank)).reversed_axes();
        let mut array = before.clone();
        let error = world.group().all_reduce_array(&mut array, ReduceOp::Sum);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Mismatch);
        assert_eq!(array, before);
    });
}

#[test]
fn arrays_become_buffers_and_buffers_become_arrays() {
    let sliced = {
        let mut numbers = Array1::from_iter(0..10u32);
        numbers.slice_collapse(s![3..7]);
        numbers
    };
    let buffer = buffer_of(sliced).unwrap();
    assert_eq!((buffer.dtype(), buffer.shape()), (DType::U32, &[4][..]));
    assert_eq!(
        array_of::<u32>(buffer).unwrap(),
        array![3, 4, 5, 6].into_dyn()
    );
    let turned = array![[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]].reversed_axes();
    let buffer = buffer_of(turned.clone()).unwrap();
    assert_eq!(array_of::<f32>(buffer).unwrap(), turned.clone().into_dyn());
    let error = array_of::<f64>(buffer_of(turned.clone()).unwrap());
    assert!(error.unwrap_err().to_string().contains("f64"));

    on_two(|world| {
        let group = world.group();
        let buffer = buffer_of(turned.clone()).unwrap();
        let op = ReduceOp::Sum.into();
        let work = group.execute_async(Op::AllReduce { buffer, op }).unwrap();
        let (Op::AllReduce { buffer, .. }, _) = work.wait().unwrap() else {
            panic!("another operation came back");
        };
        assert_eq!(array_of::<f32>(buffer).unwrap(), (&turned * 2.0).into_dyn());
        // One operation reads an array and writes another.
        let mut out = Array2::<f32>::zeros((3, 4)).reversed_axes();
        let gathered = read(&turned, |input| {
            write(&mut out, |output| {
                group.execute(Op::AllGatherSingle { input, output })
            })
        });
        gathered.unwrap();
        // The caller keeps the operation, with the result in its buffer.
        let mut op = Op::AllReduce {
            buffer: Buffer::from_vec(vec![3i32; 2]),
            op: ReduceOp::Sum.into(),
        };
        group.execute_in_place(&mut op).unwrap();
        let Op::AllReduce { buffer, .. } = op else {
            panic!("another operation was left");
        };
        assert_eq!(buffer.into_vec::<i32>().unwrap(), [6, 6]);
        let flat: Vec<f32> = turned.iter().chain(turned.iter()).copied().collect();
        assert_eq!(out.iter().copied().collect::<Vec<_>>(), flat);
        world.shutdown().unwrap();
    });
}
