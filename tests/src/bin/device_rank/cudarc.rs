//! Uses memory and streams of cudarc as buffers and streams of rcomm.

use super::{Gpu, all_reduce};
use ::cudarc::driver::{CudaContext, CudaSlice, CudaStream as TheirStream, DriverError};
use rcomm::backend::nccl::{CudaStream, DeviceBuffer};
use rcomm::{Result, World};
use std::sync::Arc;

/// Returns the value of a call of cudarc; panics with its error, which is not an error of rcomm.
fn expect_cudarc<T>(call: &str, result: std::result::Result<T, DriverError>) -> T {
    result.unwrap_or_else(|error| panic!("cudarc: {call}: {error:?}"))
}

/// Reduces a whole slice of cudarc and a part of it, and prints that a slice of another device is refused.
pub(super) fn all_reduce_slices(world: &World, gpu: &Gpu) -> Result<()> {
    const LEN: usize = 1000;
    let group = world.group();
    let ordinal = usize::from(gpu.device.ordinal());
    let context = expect_cudarc("a context", CudaContext::new(ordinal));
    let stream = expect_cudarc("a stream", context.new_stream());
    let value = group.rank() as f32 + 1.0;
    let sum: f32 = (1..=group.size()).map(|rank| rank as f32).sum();
    let slice: CudaSlice<f32> = expect_cudarc("a slice", stream.clone_htod(&vec![value; LEN]));
    let slice = Arc::new(slice);
    let read = |stream: &Arc<TheirStream>| expect_cudarc("a copy", stream.clone_dtoh(&*slice));

    // The whole slice is reduced. What cudarc enqueues on the stream afterwards runs after the operation: the host does
    // not wait.
    let ours = CudaStream::from_cudarc(&gpu.device, &stream)?;
    let whole = DeviceBuffer::from_cudarc(&gpu.device, &slice)?;
    let work = group.execute_async(all_reduce(&whole)?)?;
    work.wait_stream(&ours)?;
    assert_eq!(read(&stream), vec![sum; LEN]);

    // A part of the slice is reduced; the slice owns the memory.
    let view = slice.slice(100..200);
    // SAFETY: the view is of the slice's memory, and the slice is the owner.
    let part = unsafe { DeviceBuffer::from_cudarc_view(&gpu.device, &view, slice.clone())? };
    group.execute_async(all_reduce(&part)?)?.wait()?;
    let size = group.size() as f32;
    let expected = |index: usize| {
        if (100..200).contains(&index) {
            sum * size
        } else {
            sum
        }
    };
    let expected: Vec<f32> = (0..LEN).map(expected).collect();
    assert_eq!(read(&stream), expected);

    // The buffers kept the slice alive, and have released it.
    drop((whole, part, work));
    eprintln!("cudarc: sum {sum}, {} owners", Arc::strong_count(&slice));

    // A slice of another device is refused.
    let count = expect_cudarc("a count", CudaContext::device_count());
    if count > 1 {
        let next = (ordinal + 1) % usize::try_from(count).unwrap_or(1);
        let other_context = expect_cudarc("a context", CudaContext::new(next));
        let stream = expect_cudarc("a stream", other_context.new_stream());
        let other_slice = Arc::new(expect_cudarc("a slice", stream.clone_htod(&[1.0f32])));
        let refused = DeviceBuffer::from_cudarc(&gpu.device, &other_slice);
        let error = refused
            .map(|_| ())
            .expect_err("the slice is on another device");
        eprintln!("refused: {error}");
    }
    Ok(())
}
