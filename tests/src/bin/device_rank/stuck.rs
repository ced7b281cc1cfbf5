//! A stream of the device's that never goes on: an operation behind it times out, is dumped and aborted.

use super::{Gpu, all_reduce};
use libloading::{Library, Symbol};
use rcomm::backend::nccl::{CudaStream, Priority};
use rcomm::{ErrorKind, Result, World};
use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

pub(super) fn stuck(world: World, gpu: &Gpu) -> Result<()> {
    const AT_LEAST: c_uint = 0;
    type OnWord = unsafe extern "C" fn(*mut c_void, u64, c_uint, c_uint) -> c_int;
    let path = world.config().nccl.driver.clone();
    // SAFETY: the library that the world has loaded already.
    let driver = unsafe { Library::new(path.unwrap_or_else(|| "libcuda.so.1".into())) };
    let driver = driver.expect("the CUDA driver");
    // SAFETY: the signatures are those of cuda.h.
    let (wait, write) = unsafe {
        let wait: Symbol<'_, OnWord> = driver
            .get(b"cuStreamWaitValue32_v2")
            .expect("a wait for a value");
        let write: Symbol<'_, OnWord> = driver
            .get(b"cuStreamWriteValue32_v2")
            .expect("a write of a value");
        (wait, write)
    };
    let gate = gpu.buffer(&[0u32])?;
    let numbers = gpu.buffer(&[1.0f32; 1 << 20])?;
    // SAFETY: stream and word are live until the gate is opened below.
    let status = unsafe { wait(gpu.stream.as_raw(), gate.address(), 1, AT_LEAST) };
    assert_eq!(status, 0, "cuStreamWaitValue32");
    let begun = Instant::now();
    let error = world.group().execute_async(all_reduce(&numbers)?)?.wait();
    let error = error.map(|_| ()).expect_err("the stream never goes on");
    let waited = begun.elapsed();
    eprintln!("stuck: {error}");
    assert!(error.to_string().contains("dump: "), "{error}");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let latest = world.config().timeout + world.config().status_wait + Duration::from_secs(10);
    assert!(waited < latest, "{waited:?}");
    // Open the gate, so that the device is as it was.
    let other = CudaStream::new(&gpu.device, Priority::Normal)?;
    // SAFETY: as above.
    let status = unsafe { write(other.as_raw(), gate.address(), 1, 0) };
    assert_eq!(status, 0, "cuStreamWriteValue32");
    gpu.stream.synchronize()
}
