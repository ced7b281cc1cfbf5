//! A device stream that never progresses: an operation that waits for it times out, is dumped and aborted.

use super::{Gpu, all_reduce};
use libloading::{Library, Symbol};
use rcomm::backend::nccl::{CudaStream, DeviceBuffer, NcclOptions, Priority};
use rcomm::{ErrorKind, Result, World};
use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

/// Blocks a stream until it is opened.
pub(super) struct Gate {
    driver: Library,
    word: DeviceBuffer,
    opener: std::sync::Arc<CudaStream>,
}

type OnWord = unsafe extern "C" fn(*mut c_void, u64, c_uint, c_uint) -> c_int;

impl Gate {
    /// Makes what is enqueued on the rank's stream from now on wait until the gate is opened.
    pub(super) fn shut(world: &World, gpu: &Gpu) -> Result<Self> {
        const AT_LEAST: c_uint = 0;
        let path = NcclOptions::of(world.config())?.driver;
        // SAFETY: loading runs the library's initializers, which have run: the world has loaded this
        // library before.
        let driver = unsafe { Library::new(path.unwrap_or_else(|| "libcuda.so.1".into())) };
        let gate = Self {
            driver: driver.expect("the CUDA driver can be loaded"),
            word: gpu.buffer(&[0u32])?,
            opener: CudaStream::new(&gpu.device, Priority::Normal)?,
        };
        gate.call(b"cuStreamWaitValue32_v2", &gpu.stream, AT_LEAST);
        Ok(gate)
    }

    pub(super) fn open(&self) {
        self.call(b"cuStreamWriteValue32_v2", &self.opener, 0);
    }

    fn call(&self, name: &[u8], stream: &CudaStream, flags: c_uint) {
        // SAFETY: both functions have this signature in cuda.h; stream and word are live, and the word stays
        // as long as the device may wait for it: the code that shuts a gate opens it.
        let status = unsafe {
            let call: Symbol<'_, OnWord> = self
                .driver
                .get(name)
                .expect("the driver has stream memory operations");
            call(stream.as_raw(), self.word.address(), 1, flags)
        };
        assert_eq!(status, 0, "{}", String::from_utf8_lossy(name));
    }
}

pub(super) fn stuck(world: World, gpu: &Gpu) -> Result<()> {
    let numbers = gpu.buffer(&[1.0f32; 1 << 20])?;
    let gate = Gate::shut(&world, gpu)?;
    let begun = Instant::now();
    let error = world.group().execute_async(all_reduce(&numbers)?)?.wait();
    let error = error.map(|_| ()).expect_err("the stream is blocked");
    let waited = begun.elapsed();
    eprintln!("stuck: {error}");
    assert!(error.to_string().contains("dump: "), "{error}");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let latest = world.config().timeout + world.config().status_wait + Duration::from_secs(10);
    assert!(waited < latest, "{waited:?}");
    // Opened, so that the device can finish its work.
    gate.open();
    gpu.stream.synchronize()
}
