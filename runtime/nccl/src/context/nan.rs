//! Searches device memory for NaNs with small kernels. The kernels are loaded as PTX text, so that the build needs no
//! CUDA, and the driver compiles them for the device.
//!
//! A float is a NaN if its bit pattern without the sign, as an integer, is greater than the pattern of infinity, or of
//! the largest number in the 8-bit type without infinities: IEEE 754, and "FP8 Formats for Deep Learning" (arXiv
//! 2209.05433). So one kernel for each width serves all types.

use crate::cuda::device::CudaDevice;
use crate::cuda::event::{EventPool, Mark};
use crate::cuda::memory::{DeviceBuffer, stream_of};
use crate::cuda::stream::CudaStream;
use crate::cuda::{CuFunction, CuModule};
use rcomm_core::Buffer;
use rcomm_core::{Error, Result};
use rcomm_recorder::model::DType;
use std::ffi::{CString, c_void};
use std::fmt::Write;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The width of a float type, and the bit patterns of its NaNs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Format {
    /// The width.
    bits: u32,
    /// All bits except the sign.
    mask: u64,
    /// The largest value of the masked bits that is not a NaN.
    limit: u64,
    /// The number of floats in one element.
    floats: u64,
}

impl Format {
    /// Returns the format of an element type; `None` if the type has no NaN.
    fn of(dtype: DType) -> Option<Self> {
        let format = |bits, mask, limit, floats| Self {
            bits,
            mask,
            limit,
            floats,
        };
        Some(match dtype {
            DType::F8E4M3 => format(8, 0x7f, 0x7e, 1),
            DType::F8E5M2 => format(8, 0x7f, 0x7c, 1),
            DType::F16 => format(16, 0x7fff, 0x7c00, 1),
            DType::Bf16 => format(16, 0x7fff, 0x7f80, 1),
            DType::F32 => format(32, 0x7fff_ffff, 0x7f80_0000, 1),
            DType::Complex64 => format(32, 0x7fff_ffff, 0x7f80_0000, 2),
            DType::F64 => format(64, u64::MAX >> 1, 0x7ff0_0000_0000_0000, 1),
            DType::Complex128 => format(64, u64::MAX >> 1, 0x7ff0_0000_0000_0000, 2),
            _ => return None,
        })
    }
}

/// The widths, in bits, for which there is a kernel.
const WIDTHS: [u32; 4] = [8, 16, 32, 64];
/// The number of threads per block.
const THREADS: u32 = 256;
/// The largest number of blocks of a launch. If the buffer would need more, each thread checks several floats.
const MAX_BLOCKS: u64 = 1024;

/// Generates a kernel for each width. A kernel lowers the number at `found` to the lowest index of a NaN, if that is
/// less.
fn ptx() -> String {
    let mut text = String::from(".version 6.0\n.target sm_50\n.address_size 64\n");
    for bits in WIDTHS {
        let shift = (bits / 8).trailing_zeros();
        let load = match bits {
            64 => "ld.global.u64 %d9, [%d8];".to_owned(),
            _ => format!("ld.global.u{bits} %r4, [%d8];\n    cvt.u64.u32 %d9, %r4;"),
        };
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "
.visible .entry rcomm_find_nan_{bits}(
    .param .u64 at, .param .u64 len, .param .u64 mask, .param .u64 limit, .param .u64 found)
{{
    .reg .pred %p<2>;
    .reg .b32 %r<5>;
    .reg .b64 %d<10>;
    ld.param.u64 %d0, [at];
    cvta.to.global.u64 %d0, %d0;
    ld.param.u64 %d1, [len];
    ld.param.u64 %d2, [mask];
    ld.param.u64 %d3, [limit];
    ld.param.u64 %d4, [found];
    cvta.to.global.u64 %d4, %d4;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %nctaid.x;
    mul.wide.u32 %d5, %r0, %r1;
    cvt.u64.u32 %d6, %r2;
    add.u64 %d5, %d5, %d6;
    mul.wide.u32 %d7, %r1, %r3;
next:
    setp.ge.u64 %p0, %d5, %d1;
    @%p0 bra done;
    shl.b64 %d8, %d5, {shift};
    add.u64 %d8, %d0, %d8;
    {load}
    and.b64 %d9, %d9, %d2;
    setp.gt.u64 %p1, %d9, %d3;
    @%p1 red.global.min.u64 [%d4], %d5;
    add.u64 %d5, %d5, %d7;
    bra next;
done:
    ret;
}}
"
        );
    }
    text
}

/// The kernels on one device, loaded at the first use, and the memory for their results.
#[derive(Default)]
pub(crate) struct NanFinder {
    kernels: Mutex<Option<Arc<Kernels>>>,
    /// The slots that no check uses.
    slots: Mutex<Vec<Slot>>,
}

/// Memory for the result of one check: 64 bits on the device, and 64 pinned bits on the host, so that the copy to
/// the host does not block the thread that enqueues it.
struct Slot {
    device: Arc<CudaDevice>,
    word: DeviceBuffer,
    host: *mut u64,
}

// SAFETY: only the slot has the pointer `host`, and any thread may use the driver's memory.
unsafe impl Send for Slot {}

impl Slot {
    /// Makes a slot. The context must be current, and no work on `stream` may wait for a kernel.
    fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        let device = stream.device();
        let word = DeviceBuffer::uninitialized(stream, DType::U64, 1)?;
        // Other streams use the memory from now on.
        stream.synchronize()?;
        let mut host: *mut c_void = null_mut();
        // SAFETY: the call writes one address to a local that outlives it.
        let status =
            unsafe { (device.driver().table().mem_host_alloc)(&mut host, size_of::<u64>(), 0) };
        device.driver().check("cuMemHostAlloc", status)?;
        let device = device.clone();
        Ok(Self {
            device,
            word,
            host: host.cast(),
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let free = || -> Result<()> {
            let _entered = self.device.enter()?;
            // SAFETY: `new` got this memory from the driver, and it is freed once, here. The last check that used
            // it is over: `find` leaks a slot whose check may still run.
            let status = unsafe { (self.device.driver().table().mem_free_host)(self.host.cast()) };
            self.device.driver().check("cuMemFreeHost", status)
        };
        if let Err(error) = free() {
            tracing::warn!(%error, "memory of the host could not be freed");
        }
    }
}

/// The streams and events that a search uses besides the stream of the buffer.
pub(crate) struct SearchStreams<'a> {
    /// The stream for a buffer that names none.
    pub(crate) default: &'a Arc<CudaStream>,
    /// A stream whose work waits for no kernel, for the memory of results.
    pub(crate) copies: &'a Arc<CudaStream>,
    /// Events that mark the end of the search.
    pub(crate) sync_events: &'a Arc<EventPool>,
}

impl NanFinder {
    /// Returns the index of the first NaN of a buffer of this device, after the work that is enqueued on the
    /// buffer's stream. `None` if there is no NaN, if the elements are not floats, and, without a check, while that
    /// stream is being captured.
    ///
    /// # Blocking
    /// Until the buffer's stream has finished its pending work, or the group is aborted. Other streams of the device
    /// are not waited for.
    ///
    /// # Errors
    /// `Backend` with the driver's message; the error of the abort.
    pub(crate) fn find(
        &self,
        buffer: &Buffer<'_>,
        streams: &SearchStreams<'_>,
        aborted: &OnceLock<Error>,
    ) -> Result<Option<u64>> {
        let Some(format) = Format::of(buffer.dtype()).filter(|_| !buffer.is_empty()) else {
            return Ok(None);
        };
        let stream = stream_of(buffer).unwrap_or(streams.default);
        let device = stream.device();
        let _entered = device.enter()?;
        if stream.graph()?.is_some() {
            return Ok(None);
        }
        let kernels = self.kernels(device)?;
        let slot = lock(&self.slots).pop();
        let slot = slot.map_or_else(|| Slot::new(streams.copies), Ok)?;
        let checked = Self::check(&kernels, format, buffer, &slot, stream)
            .and_then(|()| streams.sync_events.mark(stream));
        let waited = checked.and_then(|mark| wait_for(&mark, aborted));
        if let Err(error) = waited {
            // The device may still read the buffer, write to the slot, and use the kernels.
            std::mem::forget((buffer.share_owner(), slot, kernels));
            return Err(error);
        }
        // SAFETY: `host` is the address of eight aligned bytes of the slot. The copy has written them, since the event
        // after the copy was waited for, and nothing else writes them.
        let first = unsafe { slot.host.read_volatile() };
        lock(&self.slots).push(slot);
        Ok((first != u64::MAX).then(|| first / format.floats))
    }

    /// Returns the kernels; the first call loads them. The context must be current.
    fn kernels(&self, device: &Arc<CudaDevice>) -> Result<Arc<Kernels>> {
        let mut kernels = lock(&self.kernels);
        if let Some(kernels) = &*kernels {
            return Ok(kernels.clone());
        }
        let loaded = Arc::new(Kernels::load(device)?);
        *kernels = Some(loaded.clone());
        Ok(loaded)
    }

    /// Enqueues the check. The context must be current.
    fn check(
        kernels: &Kernels,
        format: Format,
        buffer: &Buffer<'_>,
        slot: &Slot,
        stream: &CudaStream,
    ) -> Result<()> {
        let (driver, at) = (stream.device().driver(), slot.word.address());
        // A result of all ones means that there is no NaN: every index is lower.
        // SAFETY: the write is to the slot's eight bytes, which stay until the stream is done with them: `find`
        // waits for that, or leaks the slot.
        let status = unsafe { (driver.table().memset)(at, 0xff, size_of::<u64>(), stream.raw()) };
        driver.check("cuMemsetD8Async", status)?;
        kernels.launch(format, buffer, at, stream)?;
        // SAFETY: the copy reads the slot's eight bytes on the device and writes its eight bytes on the host. Both
        // stay until the stream is done with them: `find` waits for that, or leaks the slot.
        let status = unsafe {
            (driver.table().memcpy_to_host)(slot.host.cast(), at, size_of::<u64>(), stream.raw())
        };
        driver.check("cuMemcpyDtoHAsync", status)
    }
}

/// Waits until an event of the buffer's stream is complete, and for no other work of the device. The context must be
/// current.
fn wait_for(mark: &Mark, aborted: &OnceLock<Error>) -> Result<()> {
    let mut pause = Duration::from_micros(10);
    while !mark.is_done()? {
        if let Some(error) = aborted.get() {
            return Err(error.clone());
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(1));
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The kernels as the driver has compiled them for a device.
struct Kernels {
    device: Arc<CudaDevice>,
    module: CuModule,
    /// The kernels, in the order of their widths in `WIDTHS`.
    functions: [CuFunction; 4],
}

// SAFETY: a module and its functions are handles of the driver, which any thread in their context may use
// and unload.
unsafe impl Send for Kernels {}
// SAFETY: the driver lets several threads use a module and its functions at once, and nothing changes them
// after `load`.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the kernels. The context must be current.
    fn load(device: &Arc<CudaDevice>) -> Result<Self> {
        let (driver, table) = (device.driver(), device.driver().table());
        let text = CString::new(ptx()).unwrap_or_default();
        let mut module: CuModule = null_mut();
        // SAFETY: the image is text with a NUL at its end, which the driver copies; the call writes one handle.
        let status = unsafe { (table.module_load_data)(&mut module, text.as_ptr().cast()) };
        driver.check("cuModuleLoadData", status)?;
        let mut kernels = Self {
            device: device.clone(),
            module,
            functions: [null_mut(); 4],
        };
        for (bits, function) in WIDTHS.iter().zip(&mut kernels.functions) {
            let name = CString::new(format!("rcomm_find_nan_{bits}")).unwrap_or_default();
            // SAFETY: the module is loaded, and the name has a NUL at its end; the call writes one handle.
            let status = unsafe { (table.module_get_function)(function, module, name.as_ptr()) };
            driver.check("cuModuleGetFunction", status)?;
        }
        Ok(kernels)
    }

    /// Enqueues the kernel for the buffer's format, which writes to the address `found`. The context must be
    /// current.
    fn launch(
        &self,
        format: Format,
        buffer: &Buffer<'_>,
        mut found: u64,
        stream: &CudaStream,
    ) -> Result<()> {
        let width = WIDTHS.iter().position(|&bits| bits == format.bits);
        let function = self.functions[width.unwrap_or_default()];
        let mut at = buffer.as_ptr().addr() as u64;
        let mut len = buffer.len() as u64 * format.floats;
        let (mut mask, mut limit) = (format.mask, format.limit);
        let blocks = len.div_ceil(u64::from(THREADS)).min(MAX_BLOCKS) as u32;
        let mut parameters: [*mut c_void; 5] =
            [&mut at, &mut len, &mut mask, &mut limit, &mut found]
                .map(|parameter| std::ptr::from_mut::<u64>(parameter).cast());
        // SAFETY: the kernel takes five 64-bit parameters, which the call copies before it returns. It reads `len`
        // floats at `at`, the buffer's own memory, and writes 64 bits at `found`. `find` keeps both until the kernel
        // has ended, or leaks them: device memory has an owner.
        let status = unsafe {
            (self.device.driver().table().launch_kernel)(
                function,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream.raw(),
                parameters.as_mut_ptr(),
                null_mut(),
            )
        };
        self.device.driver().check("cuLaunchKernel", status)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let unload = || -> Result<()> {
            let _entered = self.device.enter()?;
            // SAFETY: `load` loaded the module, and it is unloaded once. No kernel of it is running: `find` waits for
            // each launch, or leaks the kernels.
            let status = unsafe { (self.device.driver().table().module_unload)(self.module) };
            self.device.driver().check("cuModuleUnload", status)
        };
        if let Err(error) = unload() {
            tracing::warn!(%error, "kernels could not be unloaded");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Computes on the host what the kernels compute.
    fn is_nan(dtype: DType, bits: u64) -> bool {
        let format = Format::of(dtype).unwrap();
        bits & format.mask > format.limit
    }

    #[test]
    fn exactly_the_bit_patterns_of_nans_are_recognized() {
        for bits in 0..=u16::MAX {
            let wide = u64::from(bits);
            assert_eq!(is_nan(DType::F16, wide), f16::from_bits(bits).is_nan());
            assert_eq!(is_nan(DType::Bf16, wide), bf16::from_bits(bits).is_nan());
        }
        for bits in 0..=u8::MAX {
            let e4m3 = rcomm_core::F8E4M3::from_bits(bits).to_f32().is_nan();
            let e5m2 = rcomm_core::F8E5M2::from_bits(bits).to_f32().is_nan();
            assert_eq!(is_nan(DType::F8E4M3, u64::from(bits)), e4m3);
            assert_eq!(is_nan(DType::F8E5M2, u64::from(bits)), e5m2);
        }
        for number in [0.0, -1.5, f32::INFINITY, f32::MAX, f32::NAN, -f32::NAN] {
            assert_eq!(is_nan(DType::F32, number.to_bits().into()), number.is_nan());
            let wide = f64::from(number);
            assert_eq!(is_nan(DType::F64, wide.to_bits()), number.is_nan());
        }
        assert_eq!(Format::of(DType::I32), None);
    }

    /// `RCOMM_TEST_PTXAS` names NVIDIA's assembler. On a device the driver compiles the kernels itself.
    #[test]
    #[allow(clippy::print_stderr, reason = "a skipped test is reported")]
    fn the_assembler_accepts_the_kernels() {
        let Some(ptxas) = std::env::var_os("RCOMM_TEST_PTXAS") else {
            eprintln!("skipped: RCOMM_TEST_PTXAS names no ptxas");
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("nan.ptx");
        std::fs::write(&source, ptx()).unwrap();
        for device in ["sm_70", "sm_80", "sm_90", "sm_100"] {
            let mut command = std::process::Command::new(&ptxas);
            command.args(["--gpu-name", device, "--output-file"]);
            command.arg(folder.path().join("nan.cubin")).arg(&source);
            let output = command.output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{device}: {errors}");
        }
    }
}
