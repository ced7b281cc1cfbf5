//! Calls the CUDA driver and NCCL directly, without rcomm, for the bench.

use libloading::{Library, Symbol};
use rcomm::backend::nccl::{CudaDevice, CudaStream, DeviceBuffer, NcclOptions};
use rcomm::{DType, Result, World};
use std::ffi::{CString, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::Arc;

type Handle = *mut c_void;

/// A shared library whose functions are called by name.
struct SharedLibrary {
    library: Library,
    name: &'static str,
}

impl SharedLibrary {
    fn open(path: Option<PathBuf>, name: &'static str) -> Self {
        let path = path.unwrap_or_else(|| name.into());
        // SAFETY: loading runs the library's initializers, which have run: the world has loaded this
        // library before.
        let library = unsafe { Library::new(&path) };
        let library = library.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { library, name }
    }

    fn find<T>(&self, function: &str) -> Symbol<'_, T> {
        // SAFETY: each caller in this file names a type that has the function's C ABI in cuda.h or nccl.h; the
        // symbol borrows the library, so that it stays loaded.
        let found = unsafe { self.library.get(function.as_bytes()) };
        found.unwrap_or_else(|error| panic!("{}: {function}: {error}", self.name))
    }
}

fn check(call: &str, status: c_int) {
    assert_eq!(status, 0, "{call} failed with code {status}");
}

fn options(world: &World) -> NcclOptions {
    NcclOptions::of(world.config()).expect("the options that the world was made with")
}

fn driver_of(world: &World) -> SharedLibrary {
    SharedLibrary::open(options(world).driver, "libcuda.so.1")
}

/// Three events: two mark the start and the end of what is timed, and one makes a stream wait for another.
pub(super) struct Events {
    driver: SharedLibrary,
    marks: [Handle; 3],
}

impl Events {
    /// Makes the events, and makes the context of the stream's device current on this thread until the thread ends.
    pub(super) fn new(world: &World, stream: &CudaStream) -> Self {
        let driver = driver_of(world);
        let mut marks = [null_mut(); 3];
        let mut context: Handle = null_mut();
        let ordinal = c_int::from(stream.device().ordinal());
        // SAFETY: these are the functions' types in cuda.h. They write to local variables, and `set` gets the
        // context that `retain` returned.
        unsafe {
            let retain: Symbol<'_, unsafe extern "C" fn(*mut Handle, c_int) -> c_int> =
                driver.find("cuDevicePrimaryCtxRetain");
            check("cuDevicePrimaryCtxRetain", retain(&mut context, ordinal));
            let set: Symbol<'_, unsafe extern "C" fn(Handle) -> c_int> =
                driver.find("cuCtxSetCurrent");
            check("cuCtxSetCurrent", set(context));
            let create: Symbol<'_, unsafe extern "C" fn(*mut Handle, c_uint) -> c_int> =
                driver.find("cuEventCreate");
            for mark in &mut marks {
                check("cuEventCreate", create(mark, 0));
            }
        }
        Self { driver, marks }
    }

    fn record(&self, mark: usize, stream: &CudaStream) {
        let record: Symbol<'_, unsafe extern "C" fn(Handle, Handle) -> c_int> =
            self.driver.find("cuEventRecord");
        // SAFETY: the event lives until the process ends, and the stream is borrowed.
        check("cuEventRecord", unsafe {
            record(self.marks[mark], stream.as_raw())
        });
    }

    pub(super) fn start(&self, stream: &CudaStream) {
        self.record(0, stream);
    }

    pub(super) fn stop(&self, stream: &CudaStream) {
        self.record(1, stream);
    }

    /// Makes `to` wait for the work that is enqueued on `from`.
    pub(super) fn join(&self, from: &CudaStream, to: &CudaStream) {
        self.record(2, from);
        let wait: Symbol<'_, unsafe extern "C" fn(Handle, Handle, c_uint) -> c_int> =
            self.driver.find("cuStreamWaitEvent");
        // SAFETY: the event lives until the process ends, and the stream is borrowed.
        check("cuStreamWaitEvent", unsafe {
            wait(to.as_raw(), self.marks[2], 0)
        });
    }

    /// The device's time from [`start`](Self::start) to [`stop`](Self::stop) in ms. The device must have reached
    /// `stop`.
    pub(super) fn milliseconds(&self) -> f64 {
        let mut time = 0f32;
        let elapsed: Symbol<'_, unsafe extern "C" fn(*mut f32, Handle, Handle) -> c_int> =
            self.driver.find("cuEventElapsedTime");
        // SAFETY: both events live until the process ends; the call writes one float through a reference.
        let status = unsafe { elapsed(&mut time, self.marks[0], self.marks[1]) };
        check("cuEventElapsedTime", status);
        f64::from(time)
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

/// A communicator that rcomm does not manage. It is freed when the process ends.
pub(super) struct RawComm {
    /// `ncclAllReduce`, looked up once: a search by name would count as the cost of a raw call.
    call: AllReduce,
    comm: Handle,
    /// Keeps the library loaded.
    _nccl: SharedLibrary,
}

type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;

impl RawComm {
    pub(super) fn new(world: &World) -> Result<Self> {
        let nccl = SharedLibrary::open(options(world).library, "libnccl.so.2");
        let mut id = UniqueId([0; 128]);
        if world.rank() == 0 {
            let make: Symbol<'_, unsafe extern "C" fn(*mut UniqueId) -> c_int> =
                nccl.find("ncclGetUniqueId");
            // SAFETY: the call fills one id through a reference.
            check("ncclGetUniqueId", unsafe { make(&mut id) });
        }
        world.group().broadcast(&mut id.0, 0)?;
        let mut comm: Handle = null_mut();
        {
            type Init = unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, Handle) -> c_int;
            let init: Symbol<'_, Init> = nccl.find("ncclCommInitRankConfig");
            let (size, rank) = (world.size() as c_int, world.rank() as c_int);
            // SAFETY: the call writes one handle through a reference before it returns, since no
            // configuration means the default one, which blocks.
            let status = unsafe { init(&mut comm, size, id, rank, null_mut()) };
            check("ncclCommInitRankConfig", status);
        }
        let call = *nccl.find::<AllReduce>("ncclAllReduce");
        Ok(Self {
            call,
            comm,
            _nccl: nccl,
        })
    }

    /// Enqueues an all-reduce that replaces the buffer's floats with their sums over the ranks.
    pub(super) fn all_reduce(&self, buffer: &DeviceBuffer, stream: &CudaStream) {
        const FLOAT32: c_int = 7;
        const SUM: c_int = 0;
        let at = buffer.address() as *mut c_void;
        // SAFETY: the communicator lives until the process ends, stream and buffer are borrowed, and the callers
        // wait for the stream before they drop the buffer, which holds `len` floats.
        let status = unsafe {
            (self.call)(
                at,
                at,
                buffer.len(),
                FLOAT32,
                SUM,
                self.comm,
                stream.as_raw(),
            )
        };
        check("ncclAllReduce", status);
    }
}

/// A kernel that computes C = A B for square matrices of floats; each thread computes one element of C. The kernel
/// serves to keep the device busy: it need not be fast.
const GEMM: &str = r"
.version 6.0
.target sm_60
.address_size 64
.visible .entry rcomm_gemm(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 side)
{
    .reg .pred %p;
    .reg .f32 %f<4>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<16>;
    ld.param.u64 %rd0, [a];
    ld.param.u64 %rd1, [b];
    ld.param.u64 %rd2, [c];
    ld.param.u64 %rd3, [side];
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd4, %r0, %r1;
    cvt.u64.u32 %rd5, %r2;
    add.u64 %rd4, %rd4, %rd5;
    mul.lo.u64 %rd6, %rd3, %rd3;
    setp.ge.u64 %p, %rd4, %rd6;
    @%p bra done;
    div.u64 %rd7, %rd4, %rd3;
    rem.u64 %rd8, %rd4, %rd3;
    mul.lo.u64 %rd9, %rd7, %rd3;
    shl.b64 %rd9, %rd9, 2;
    add.u64 %rd9, %rd0, %rd9;
    shl.b64 %rd10, %rd8, 2;
    add.u64 %rd10, %rd1, %rd10;
    shl.b64 %rd11, %rd3, 2;
    mov.u64 %rd12, 0;
    mov.f32 %f0, 0f00000000;
next:
    setp.ge.u64 %p, %rd12, %rd3;
    @%p bra store;
    ld.global.f32 %f1, [%rd9];
    ld.global.f32 %f2, [%rd10];
    fma.rn.f32 %f0, %f1, %f2, %f0;
    add.u64 %rd9, %rd9, 4;
    add.u64 %rd10, %rd10, %rd11;
    add.u64 %rd12, %rd12, 1;
    bra next;
store:
    shl.b64 %rd13, %rd4, 2;
    add.u64 %rd13, %rd2, %rd13;
    st.global.f32 [%rd13], %f0;
done:
    ret;
}
";

/// A matrix product on the device.
pub(super) struct Gemm {
    driver: SharedLibrary,
    function: Handle,
    matrices: [DeviceBuffer; 3],
    side: usize,
}

impl Gemm {
    /// Loads the kernel, and checks it with a small product.
    pub(super) fn load(
        world: &World,
        device: &Arc<CudaDevice>,
        stream: &Arc<CudaStream>,
        side: usize,
    ) -> Result<Self> {
        let driver = driver_of(world);
        let (mut module, mut function): (Handle, Handle) = (null_mut(), null_mut());
        let (text, name) = (CString::new(GEMM), CString::new("rcomm_gemm"));
        let (text, name) = (text.expect("no NUL"), name.expect("no NUL"));
        // SAFETY: these are the functions' types in cuda.h. Both texts end with a NUL and outlive the
        // calls. Each call writes one handle through a reference.
        unsafe {
            let load: Symbol<'_, unsafe extern "C" fn(*mut Handle, *const c_void) -> c_int> =
                driver.find("cuModuleLoadData");
            check("cuModuleLoadData", load(&mut module, text.as_ptr().cast()));
            type Find = unsafe extern "C" fn(*mut Handle, Handle, *const std::ffi::c_char) -> c_int;
            let find: Symbol<'_, Find> = driver.find("cuModuleGetFunction");
            check(
                "cuModuleGetFunction",
                find(&mut function, module, name.as_ptr()),
            );
        }
        let small = Self {
            matrices: [
                DeviceBuffer::copy_of(stream, &[1f32, 2.0, 3.0, 4.0])?,
                DeviceBuffer::copy_of(stream, &[5f32, 6.0, 7.0, 8.0])?,
                DeviceBuffer::zeroed(stream, DType::F32, 4)?,
            ],
            driver,
            function,
            side: 2,
        };
        small.launch(stream);
        let product = small.matrices[2].to_vec::<f32>()?;
        assert_eq!(
            product,
            [19.0, 22.0, 43.0, 50.0],
            "the product on {device:?} is wrong"
        );
        let make = || DeviceBuffer::zeroed(stream, DType::F32, side * side);
        Ok(Self {
            matrices: [make()?, make()?, make()?],
            side,
            ..small
        })
    }

    pub(super) fn launch(&self, stream: &CudaStream) {
        const THREADS: usize = 256;
        let blocks = (self.side * self.side).div_ceil(THREADS) as c_uint;
        let mut words = [
            self.matrices[0].address(),
            self.matrices[1].address(),
            self.matrices[2].address(),
            self.side as u64,
        ];
        let mut parameters = [null_mut(); 4];
        for (parameter, word) in parameters.iter_mut().zip(&mut words) {
            *parameter = std::ptr::from_mut(word).cast::<c_void>();
        }
        type Launch = unsafe extern "C" fn(
            Handle,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            Handle,
            *mut Handle,
            *mut Handle,
        ) -> c_int;
        let launch: Symbol<'_, Launch> = self.driver.find("cuLaunchKernel");
        // SAFETY: the kernel takes four words, whose addresses `parameters` holds, and which the call
        // copies. It works on the matrices, which live as long as this value; the callers wait for the
        // stream before they drop it.
        let status = unsafe {
            launch(
                self.function,
                blocks,
                1,
                1,
                THREADS as c_uint,
                1,
                1,
                0,
                stream.as_raw(),
                parameters.as_mut_ptr(),
                null_mut(),
            )
        };
        check("cuLaunchKernel", status);
    }
}
