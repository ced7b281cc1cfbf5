//! Scenarios of operations in a CUDA graph, which are captured once and run as often as the graph is launched.

use super::{Gpu, all_reduce, count, print_communicators, stay_for};
use libloading::{Library, Symbol};
use rcomm::backend::nccl::{DeviceBuffer, NcclOptions};
use rcomm::{DType, Op, ReduceOp, Result, World};
use rcomm_tests::process::CULPRIT;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The driver calls of a program that captures graphs.
pub(super) struct Graphs {
    driver: Library,
}

type Handle = *mut c_void;

impl Graphs {
    pub(super) fn of(world: &World) -> Self {
        let options = NcclOptions::of(world.config());
        let path = options
            .expect("the options that the world was made with")
            .driver;
        let path = path.unwrap_or_else(|| "libcuda.so.1".into());
        // SAFETY: loading runs the library's initializers, which have run: the world has loaded this
        // library before.
        let driver = unsafe { Library::new(path) }.expect("the CUDA driver can be loaded");
        Self { driver }
    }

    /// Begins a capture of the stream.
    pub(super) fn begin(&self, stream: Handle) {
        const GLOBAL: c_int = 0;
        // SAFETY: this is the function's type in cuda.h, and the callers pass a stream that they hold.
        let status = unsafe {
            let begin: Symbol<'_, unsafe extern "C" fn(Handle, c_int) -> c_int> = self
                .driver
                .get(b"cuStreamBeginCapture_v2")
                .expect("cuStreamBeginCapture");
            begin(stream, GLOBAL)
        };
        assert_eq!(status, 0, "cuStreamBeginCapture");
    }

    /// Ends the capture; returns the driver's code, and the executable graph, which is null if the capture
    /// failed.
    pub(super) fn end(&self, stream: Handle) -> (c_int, Handle) {
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: these are the functions' types in cuda.h. The callers pass a stream that they hold;
        // handles are written to locals, and `graph` is not used after it is destroyed.
        unsafe {
            let end: Symbol<'_, unsafe extern "C" fn(Handle, *mut Handle) -> c_int> = self
                .driver
                .get(b"cuStreamEndCapture")
                .expect("cuStreamEndCapture");
            let status = end(stream, &mut graph);
            if status != 0 {
                return (status, null_mut());
            }
            let make: Symbol<'_, unsafe extern "C" fn(*mut Handle, Handle, u64) -> c_int> = self
                .driver
                .get(b"cuGraphInstantiateWithFlags")
                .expect("cuGraphInstantiateWithFlags");
            let status = make(&mut executable, graph, 0);
            let destroy: Symbol<'_, unsafe extern "C" fn(Handle) -> c_int> =
                self.driver.get(b"cuGraphDestroy").expect("cuGraphDestroy");
            assert_eq!(destroy(graph), 0, "cuGraphDestroy");
            (status, executable)
        }
    }

    fn destroy(&self, executable: Handle) {
        // SAFETY: this is the function's type in cuda.h; the callers have the graph from `end`, and do not
        // use it afterwards.
        let status = unsafe {
            let destroy: Symbol<'_, unsafe extern "C" fn(Handle) -> c_int> = self
                .driver
                .get(b"cuGraphExecDestroy")
                .expect("cuGraphExecDestroy");
            destroy(executable)
        };
        assert_eq!(status, 0, "cuGraphExecDestroy");
    }

    /// Launches the graph on the stream.
    pub(super) fn launch(&self, executable: Handle, stream: Handle) {
        // SAFETY: this is the function's type in cuda.h. The callers have the graph from `end` and hold the
        // stream; what the graph uses lives in them or is kept by the graph.
        let status = unsafe {
            let launch: Symbol<'_, unsafe extern "C" fn(Handle, Handle) -> c_int> =
                self.driver.get(b"cuGraphLaunch").expect("cuGraphLaunch");
            launch(executable, stream)
        };
        assert_eq!(status, 0, "cuGraphLaunch");
    }
}

/// Captures operations, launches the graph several times, and prints what a capture refuses.
pub(super) fn capture(world: &World, gpu: &Gpu) -> Result<()> {
    let (group, graphs) = (world.group(), Graphs::of(world));
    let stream = gpu.stream.as_raw();
    let size = i64::from(world.size());
    // The first operation does the communicator's work on the host, which must be over before the capture.
    count(group, gpu)?;
    let summed = gpu.buffer(&[1i64; 100])?;
    let gathered = gpu.buffer(&vec![0i64; 100 * world.size() as usize])?;

    let list = || -> Result<Vec<DeviceBuffer>> {
        let list = (0..group.size()).map(|_| gpu.buffer(&[0i64; 100]));
        list.collect()
    };
    let lists = [list()?, list()?];

    graphs.begin(stream);
    let work = group.execute_async(all_reduce(&summed)?)?;
    assert!(work.is_completed(), "a captured operation is not complete");
    let next = group.execute_async(Op::AllGatherSingle {
        input: summed.buffer()?,
        output: gathered.buffer()?,
    })?;
    let blocking = group.execute(Op::AllReduce {
        buffer: summed.buffer()?,
        op: ReduceOp::Sum.into(),
    });
    let refused = blocking.expect_err("a capture cannot be waited for");
    eprintln!("refused: {refused}");
    let zeroed = DeviceBuffer::zeroed(&gpu.stream, DType::I64, 100);
    let refused = zeroed
        .map(|_| ())
        .expect_err("the graph would fill the memory");
    eprintln!("refused: {refused}");
    // Each gather has separate memory for the parts of its list.
    for list in &lists {
        let outputs = list.iter().map(DeviceBuffer::buffer);
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        let op = Op::Gather {
            input: summed.buffer()?,
            outputs: if group.rank() == 0 {
                outputs
            } else {
                Vec::new()
            },
            root: 0,
        };
        drop(group.execute_async(op)?);
    }
    next.wait_stream(&gpu.stream)?;
    let (status, executable) = graphs.end(stream);
    assert_eq!(status, 0, "the capture failed");

    for round in 1..=3u32 {
        graphs.launch(executable, stream);
        assert_eq!(summed.to_vec::<i64>()?, vec![size.pow(round); 100]);
        let expected = vec![size.pow(round); 100 * world.size() as usize];
        assert_eq!(gathered.to_vec::<i64>()?, expected);
        for part in lists.iter().flatten().filter(|_| group.rank() == 0) {
            assert_eq!(part.to_vec::<i64>()?, vec![size.pow(round); 100]);
        }
    }
    // Only the graph holds the root's memory for the parts, and frees it when it is destroyed.
    graphs.destroy(executable);
    // The group stays usable.
    assert_eq!(count(group, gpu)?, world.size() as f32);

    keep_memory(world, gpu, &graphs)?;

    // A capture that does not join the group's stream again fails with the driver's error, as in its manual; the driver
    // 580.159.04 accepts it on an H100.
    graphs.begin(stream);
    drop(group.execute_async(all_reduce(&summed)?)?);
    let (status, executable) = graphs.end(stream);
    eprintln!("not joined: {status}");
    if !executable.is_null() {
        graphs.destroy(executable);
    }
    assert_eq!(count(group, gpu)?, world.size() as f32);
    print_communicators(world)
}

/// A graph that holds the last reference to memory keeps the memory alive for as long as the graph exists.
fn keep_memory(world: &World, gpu: &Gpu, graphs: &Graphs) -> Result<()> {
    let group = world.group();
    let stream = gpu.stream.as_raw();
    let owner = Arc::new(gpu.buffer(&[1i32; 64])?);
    let (at, dtype, len) = (owner.address(), owner.dtype(), owner.len());
    let weak_owner = Arc::downgrade(&owner);
    // SAFETY: `len` elements at `at` are all of the memory of `owner`, which the buffer keeps.
    let buffer = unsafe { DeviceBuffer::foreign(&gpu.stream, at, dtype, len, owner)? };
    graphs.begin(stream);
    let work = group.execute_async(all_reduce(&buffer)?)?;
    work.wait_stream(&gpu.stream)?;
    drop((work, buffer));
    let (status, executable) = graphs.end(stream);
    assert_eq!(status, 0, "the capture failed");
    for _ in 0..2 {
        graphs.launch(executable, stream);
    }
    gpu.stream.synchronize()?;
    assert!(
        weak_owner.upgrade().is_some(),
        "the graph's memory was freed"
    );
    graphs.destroy(executable);
    // The next use of the device frees the memory, once the watchdog has seen that the operation was issued. The ranks
    // leave the loop together.
    let start = Instant::now();
    loop {
        let left = gpu.buffer(&[i32::from(weak_owner.upgrade().is_some())])?;
        group.execute_async(all_reduce(&left)?)?.wait()?;
        if left.to_vec::<i32>()? == [0] {
            break;
        }
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "memory of the destroyed graph is still held"
        );
    }
    Ok(())
}

/// The culprit does not launch a graph that the others launch. The operation in it hangs on the others until they are
/// killed.
pub(super) fn replay_hung(world: &World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    let numbers = gpu.buffer(&[1i64; 100])?;
    let graphs = Graphs::of(world);
    let stream = gpu.stream.as_raw();
    graphs.begin(stream);
    let work = world.group().execute_async(all_reduce(&numbers)?)?;
    work.wait_stream(&gpu.stream)?;
    let (status, executable) = graphs.end(stream);
    assert_eq!(status, 0, "the capture failed");
    graphs.launch(executable, stream);
    gpu.stream.synchronize()?;
    if world.rank() != CULPRIT {
        graphs.launch(executable, stream);
    }
    // All ranks stay for a minute, or until they are killed: they wait for a rank that does not exist.
    stay_for(world, "hung", std::iter::once(world.size()));
    Ok(())
}
