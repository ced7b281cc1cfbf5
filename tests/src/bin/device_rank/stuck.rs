//! A device stream never progresses: an operation that waits for it times out, and is dumped and aborted.

use super::{Gpu, all_reduce};
use libloading::{Library, Symbol};
use rcomm::backend::nccl::NcclOptions;
use rcomm::{ErrorKind, Result, World};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Blocks a stream until it is opened: the device waits for a word in the host's memory.
pub(super) struct Gate {
    word: &'static AtomicU32,
}

impl Gate {
    /// Shuts the rank's stream: what is enqueued on it from now on waits until the gate is opened. This thread must
    /// have a current context.
    pub(super) fn shut(world: &World, gpu: &Gpu) -> Result<Self> {
        type Allocate = unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_int;
        type Wait = unsafe extern "C" fn(*mut c_void, u64, c_uint, c_uint) -> c_int;
        const PORTABLE_AND_MAPPED: c_uint = 3;
        const AT_LEAST: c_uint = 0;
        let path = NcclOptions::of(world.config())?.driver;
        // SAFETY: loading runs the library's initializers, which have run: the world has loaded this
        // library before.
        let driver = unsafe { Library::new(path.unwrap_or_else(|| "libcuda.so.1".into())) };
        let driver = driver.expect("the CUDA driver can be loaded");
        let mut word = std::ptr::null_mut();
        // SAFETY: these are the functions' types in cuda.h. The address is written to a local; the word gets its first
        // value before the device reads it, and stays as long as the process. The stream is live.
        let status = unsafe {
            let allocate: Symbol<'_, Allocate> =
                driver.get(b"cuMemHostAlloc").expect("cuMemHostAlloc");
            let wait: Symbol<'_, Wait> = (driver.get(b"cuStreamWaitValue32_v2"))
                .expect("the driver has stream memory operations");
            let allocated = allocate(&mut word, size_of::<u32>(), PORTABLE_AND_MAPPED);
            assert!(
                allocated == 0 && !word.is_null(),
                "cuMemHostAlloc: {allocated}"
            );
            AtomicU32::from_ptr(word.cast()).store(0, Ordering::Release);
            // With unified addressing, which 64-bit Linux has, the device knows the word by the same address.
            wait(
                gpu.stream.as_raw(),
                word.expose_provenance() as u64,
                1,
                AT_LEAST,
            )
        };
        assert_eq!(status, 0, "cuStreamWaitValue32");
        // SAFETY: the memory is aligned for any type and never freed; host and device access it atomically.
        let word = unsafe { AtomicU32::from_ptr(word.cast()) };
        Ok(Self { word })
    }

    /// Lets the stream go on.
    pub(super) fn open(&self) {
        self.word.store(1, Ordering::Release);
    }
}

/// An operation waits behind a shut gate until its deadline.
pub(super) fn stuck(world: World, gpu: &Gpu) -> Result<()> {
    let numbers = gpu.buffer(&[1.0f32; 1 << 20])?;
    let gate = Gate::shut(&world, gpu)?;
    let start = Instant::now();
    let error = world.group().execute_async(all_reduce(&numbers)?)?.wait();
    let error = error.map(|_| ()).expect_err("the stream is blocked");
    let waited = start.elapsed();
    eprintln!("stuck: {error}");
    assert!(error.to_string().contains("dump: "), "{error}");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let latest = world.config().timeout + world.config().status_wait + Duration::from_secs(10);
    assert!(waited < latest, "{waited:?}");
    // The gate is opened so that the device can finish its work.
    gate.open();
    gpu.stream.synchronize()
}
