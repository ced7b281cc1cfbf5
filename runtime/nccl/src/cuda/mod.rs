//! The functions of the CUDA driver that the NCCL backend needs, found at run time.
//!
//! rcomm has its own table of functions instead of a crate's, so that every failure is an error and never a panic. The
//! types in the modules below own what the calls make: streams, events and memory.
//!
//! Source: `cuda.h` of CUDA 13. All drivers since CUDA 11.4 have every function that is used.

#[cfg(feature = "cudarc")]
mod cudarc;
pub(crate) mod device;
pub(crate) mod event;
pub(crate) mod graph;
pub(crate) mod memory;
pub(crate) mod nvlink;
pub(crate) mod stream;

use crate::library::sys::table;
use libloading::Library;
use rcomm_core::{Error, ErrorKind, Result};
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

const SONAME: &str = "libcuda.so.1";

/// `CUresult`.
pub(crate) type CuResult = c_int;
/// `CUdevice`.
pub(crate) type CuDevice = c_int;
/// `CUcontext`.
pub(crate) type CuContext = *mut c_void;
/// `CUstream`.
pub(crate) type CuStream = *mut c_void;
/// `CUevent`.
pub(crate) type CuEvent = *mut c_void;
/// `CUmodule`.
pub(crate) type CuModule = *mut c_void;
/// `CUfunction`.
pub(crate) type CuFunction = *mut c_void;
/// `CUgraph`.
pub(crate) type CuGraph = *mut c_void;
/// `CUuserObject`.
pub(crate) type CuUserObject = *mut c_void;
/// `CUhostFn`. It may not call the driver.
pub(crate) type CuHostFn = unsafe extern "C" fn(*mut c_void);
/// `CUmemGenericAllocationHandle`.
pub(crate) type CuAllocation = u64;
/// `CUdeviceptr`.
pub(crate) type CuDevicePtr = u64;

/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: CuResult = 0;
/// `CUDA_ERROR_NOT_READY`: the work is not complete.
pub(crate) const NOT_READY: CuResult = 600;
/// `CU_EVENT_DEFAULT`: with a time stamp.
pub(crate) const EVENT_TIMED: c_uint = 0;
/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const EVENT_UNTIMED: c_uint = 2;
/// `CU_STREAM_NON_BLOCKING`: the stream does not synchronize with the null stream.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const CAPTURE_MODE_RELAXED: c_int = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub(crate) const CAPTURE_STATUS_NONE: c_int = 0;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`: no call of the driver waits for the destructor.
pub(crate) const USER_OBJECT_NO_DESTRUCTOR_SYNC: c_uint = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the graph takes over the caller's references.
pub(crate) const GRAPH_USER_OBJECT_MOVE: c_uint = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
pub(crate) const POINTER_MEMORY_TYPE: c_int = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
pub(crate) const POINTER_DEVICE_ORDINAL: c_int = 9;
/// `CU_MEMORYTYPE_DEVICE`.
pub(crate) const MEMORY_TYPE_DEVICE: c_uint = 2;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
pub(crate) const ATTRIBUTE_CAPABILITY: c_int = 75;
/// `CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED`.
pub(crate) const ATTRIBUTE_MEMORY_POOLS: c_int = 115;

/// `CUuuid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct CuUuid {
    /// The sixteen bytes.
    pub(crate) bytes: [u8; 16],
}

table! {
    /// The functions of the CUDA driver that rcomm calls.
    pub(crate) struct CudaTable;
    required {
        /// `cuInit`
        init = "cuInit": fn(c_uint) -> CuResult;
        /// `cuGetErrorName`
        get_error_name = "cuGetErrorName": fn(CuResult, *mut *const c_char) -> CuResult;
        /// `cuGetErrorString`
        get_error_string = "cuGetErrorString": fn(CuResult, *mut *const c_char) -> CuResult;
        /// `cuDeviceGetCount`
        device_get_count = "cuDeviceGetCount": fn(*mut c_int) -> CuResult;
        /// `cuDeviceGet`
        device_get = "cuDeviceGet": fn(*mut CuDevice, c_int) -> CuResult;
        /// `cuDeviceGetUuid_v2`
        device_get_uuid = "cuDeviceGetUuid_v2": fn(*mut CuUuid, CuDevice) -> CuResult;
        /// `cuDevicePrimaryCtxRetain`
        primary_ctx_retain = "cuDevicePrimaryCtxRetain": fn(*mut CuContext, CuDevice) -> CuResult;
        /// `cuDevicePrimaryCtxRelease_v2`
        primary_ctx_release = "cuDevicePrimaryCtxRelease_v2": fn(CuDevice) -> CuResult;
        /// `cuCtxGetCurrent`
        ctx_get_current = "cuCtxGetCurrent": fn(*mut CuContext) -> CuResult;
        /// `cuCtxPushCurrent_v2`
        ctx_push_current = "cuCtxPushCurrent_v2": fn(CuContext) -> CuResult;
        /// `cuCtxPopCurrent_v2`
        ctx_pop_current = "cuCtxPopCurrent_v2": fn(*mut CuContext) -> CuResult;
        /// `cuCtxGetStreamPriorityRange`
        ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange": fn(*mut c_int, *mut c_int) -> CuResult;
        /// `cuStreamCreateWithPriority`
        stream_create_with_priority = "cuStreamCreateWithPriority": fn(*mut CuStream, c_uint, c_int) -> CuResult;
        /// `cuStreamDestroy_v2`
        stream_destroy = "cuStreamDestroy_v2": fn(CuStream) -> CuResult;
        /// `cuStreamSynchronize`
        stream_synchronize = "cuStreamSynchronize": fn(CuStream) -> CuResult;
        /// `cuStreamWaitEvent`
        stream_wait_event = "cuStreamWaitEvent": fn(CuStream, CuEvent, c_uint) -> CuResult;
        /// `cuStreamQuery`
        stream_query = "cuStreamQuery": fn(CuStream) -> CuResult;
        /// `cuStreamGetFlags`
        stream_get_flags = "cuStreamGetFlags": fn(CuStream, *mut c_uint) -> CuResult;
        /// `cuStreamGetCtx`
        stream_get_ctx = "cuStreamGetCtx": fn(CuStream, *mut CuContext) -> CuResult;
        /// `cuStreamGetCaptureInfo_v2`
        stream_get_capture_info = "cuStreamGetCaptureInfo_v2": fn(CuStream, *mut c_int, *mut u64, *mut *mut c_void, *mut *const c_void, *mut usize) -> CuResult;
        /// `cuThreadExchangeStreamCaptureMode`
        thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode": fn(*mut c_int) -> CuResult;
        /// `cuEventCreate`
        event_create = "cuEventCreate": fn(*mut CuEvent, c_uint) -> CuResult;
        /// `cuEventDestroy_v2`
        event_destroy = "cuEventDestroy_v2": fn(CuEvent) -> CuResult;
        /// `cuEventRecord`
        event_record = "cuEventRecord": fn(CuEvent, CuStream) -> CuResult;
        /// `cuEventQuery`
        event_query = "cuEventQuery": fn(CuEvent) -> CuResult;
        /// `cuEventElapsedTime`
        event_elapsed_time = "cuEventElapsedTime": fn(*mut f32, CuEvent, CuEvent) -> CuResult;
        /// `cuMemAlloc_v2`
        mem_alloc = "cuMemAlloc_v2": fn(*mut CuDevicePtr, usize) -> CuResult;
        /// `cuMemFree_v2`
        mem_free = "cuMemFree_v2": fn(CuDevicePtr) -> CuResult;
        /// `cuMemAllocAsync`
        mem_alloc_async = "cuMemAllocAsync": fn(*mut CuDevicePtr, usize, CuStream) -> CuResult;
        /// `cuMemFreeAsync`
        mem_free_async = "cuMemFreeAsync": fn(CuDevicePtr, CuStream) -> CuResult;
        /// `cuMemHostAlloc`
        mem_host_alloc = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint) -> CuResult;
        /// `cuMemFreeHost`
        mem_free_host = "cuMemFreeHost": fn(*mut c_void) -> CuResult;
        /// `cuDeviceGetAttribute`
        device_get_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, CuDevice) -> CuResult;
        /// `cuMemRetainAllocationHandle`
        mem_retain_allocation_handle = "cuMemRetainAllocationHandle": fn(*mut CuAllocation, *mut c_void) -> CuResult;
        /// `cuMemRelease`
        mem_release = "cuMemRelease": fn(CuAllocation) -> CuResult;
        /// `cuMemsetD8Async`
        memset = "cuMemsetD8Async": fn(CuDevicePtr, c_uchar, usize, CuStream) -> CuResult;
        /// `cuMemsetD32Async`
        memset_u32 = "cuMemsetD32Async": fn(CuDevicePtr, c_uint, usize, CuStream) -> CuResult;
        /// `cuMemcpyHtoDAsync_v2`
        memcpy_to_device = "cuMemcpyHtoDAsync_v2": fn(CuDevicePtr, *const c_void, usize, CuStream) -> CuResult;
        /// `cuMemcpyDtoHAsync_v2`
        memcpy_to_host = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, CuDevicePtr, usize, CuStream) -> CuResult;
        /// `cuMemcpyDtoDAsync_v2`
        memcpy_on_device = "cuMemcpyDtoDAsync_v2": fn(CuDevicePtr, CuDevicePtr, usize, CuStream) -> CuResult;
        /// `cuUserObjectCreate`
        user_object_create = "cuUserObjectCreate": fn(*mut CuUserObject, *mut c_void, CuHostFn, c_uint, c_uint) -> CuResult;
        /// `cuUserObjectRelease`
        user_object_release = "cuUserObjectRelease": fn(CuUserObject, c_uint) -> CuResult;
        /// `cuGraphRetainUserObject`
        graph_retain_user_object = "cuGraphRetainUserObject": fn(CuGraph, CuUserObject, c_uint, c_uint) -> CuResult;
        /// `cuModuleLoadData`
        module_load_data = "cuModuleLoadData": fn(*mut CuModule, *const c_void) -> CuResult;
        /// `cuModuleUnload`
        module_unload = "cuModuleUnload": fn(CuModule) -> CuResult;
        /// `cuModuleGetFunction`
        module_get_function = "cuModuleGetFunction": fn(*mut CuFunction, CuModule, *const c_char) -> CuResult;
        /// `cuLaunchKernel`
        launch_kernel = "cuLaunchKernel": fn(CuFunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CuStream, *mut *mut c_void, *mut *mut c_void) -> CuResult;
        /// `cuPointerGetAttribute`
        pointer_get_attribute = "cuPointerGetAttribute": fn(*mut c_void, c_int, CuDevicePtr) -> CuResult;
    }
    optional {}
}

/// A loaded CUDA driver.
///
/// # Thread safety
/// Any thread may use it; each thread has a current context of its own.
pub struct CudaDriver {
    table: CudaTable,
    // The driver is never unloaded, since it leaves threads behind.
    _library: Option<ManuallyDrop<Library>>,
}

impl CudaDriver {
    /// Loads the driver and initializes it; `explicit` names a file to load instead of `libcuda.so.1`.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if the driver is not found, or if it does not initialize (for example, without a device).
    pub fn load(explicit: Option<&Path>) -> Result<Self> {
        let path = explicit.map_or_else(|| PathBuf::from(SONAME), Path::to_path_buf);
        let absent = |reason: String| {
            Error::new(
                ErrorKind::Backend,
                format!(
                    "no usable CUDA driver was found; tried {} ({reason}); set RCOMM_CUDA_LIB to the path of {SONAME}",
                    path.display()
                ),
            )
        };
        // SAFETY: loading runs the library's initializers. The file is the CUDA driver by its name, or the
        // user named it as such.
        let library = unsafe { Library::new(&path) }.map_err(|error| absent(error.to_string()))?;
        let library = ManuallyDrop::new(library);
        // SAFETY: the names and signatures are those of cuda.h; the library is never unloaded.
        let table = unsafe { CudaTable::find(&library) }
            .map_err(|name| absent(format!("no symbol {name}")))?;
        let mut driver = Self::from_table(table)?;
        driver._library = Some(library);
        Ok(driver)
    }

    /// Makes and initializes a driver from these functions.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if `cuInit` fails.
    fn from_table(table: CudaTable) -> Result<Self> {
        let driver = Self {
            table,
            _library: None,
        };
        // SAFETY: the flags of `cuInit` must be 0, and it may be called first and more than once.
        let status = unsafe { (driver.table.init)(0) };
        driver.check("cuInit", status)?;
        Ok(driver)
    }

    /// The table of functions.
    pub(crate) fn table(&self) -> &CudaTable {
        &self.table
    }

    /// The number of devices that this process can use.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] with the driver's message.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the call writes one int to a local that outlives it.
        let status = unsafe { (self.table.device_get_count)(&mut count) };
        self.check("cuDeviceGetCount", status)?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Turns a code into an error with the driver's own message.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] unless `status` is `CUDA_SUCCESS`.
    pub(crate) fn check(&self, call: &str, status: CuResult) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let name = self.error_text(self.table.get_error_name, status);
        let text = self.error_text(self.table.get_error_string, status);
        Err(Error::new(
            ErrorKind::Backend,
            format!(
                "{call} failed: {} (code {status}): {}",
                name.as_deref().unwrap_or("unknown result"),
                text.as_deref().unwrap_or("the driver has no text for it")
            ),
        ))
    }

    /// Returns the driver's text for a code, by one of two functions; `None` if the driver has none.
    fn error_text(
        &self,
        get: unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult,
        status: CuResult,
    ) -> Option<String> {
        let mut at: *const c_char = std::ptr::null();
        // SAFETY: the call writes one pointer to a local that outlives it; the pointer is null for an unknown code.
        let asked = unsafe { get(status, &mut at) };
        if asked != SUCCESS || at.is_null() {
            return None;
        }
        // SAFETY: the pointer is not null, and the driver's strings are static.
        Some(unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
    }
}
