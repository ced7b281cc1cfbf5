//! Opening and ending a ring; groups, call sites and signatures.

use crate::guarded::ForkGuarded;
use crate::status::{RCOMM_RECORDER_NONE, call, quietly, text};
use rcomm_recorder::model::{DType, GroupPlace, ProcessGroupInfo};
use rcomm_recorder::record::{
    FlightRecorder, Placement, RecorderConfig, SignatureId, SignatureKey, Tensor,
};
use std::ffi::c_char;
use std::time::Duration;

/// A ring that is open.
pub struct Handle(ForkGuarded);

impl Handle {
    /// The recorder, in the process that opened it.
    ///
    /// # Safety
    /// `handle` is NULL or a living handle.
    #[inline]
    pub(crate) unsafe fn recorder<'a>(handle: *const Self) -> Option<&'a FlightRecorder> {
        // SAFETY: by the contract.
        unsafe { handle.as_ref() }?.0.get()
    }
}

/// Whose ring to open.
#[repr(C)]
pub struct Config {
    /// A folder below which the ring is made; NULL = `/dev/shm/rcomm-<uid>`, where the views look, or
    /// the process's own memory if no ring can be made there.
    pub directory: *const c_char,
    /// The job's name, at most 255 bytes, equal on all ranks.
    pub job: *const c_char,
    /// This process's rank in the world.
    pub rank: u32,
    /// How many ranks the world has.
    pub world_size: u32,
    /// How often the job was restarted.
    pub attempt: u32,
    /// How many operations the ring holds, rounded up to a power of two; 0 = 16,384.
    pub entries: u32,
}

/// A group as this process knows it.
#[repr(C)]
pub struct Group {
    /// Its number in this process, in the order of creation.
    pub id: u32,
    /// Its name, equal on all members.
    pub name: *const c_char,
    /// What it is for.
    pub description: *const c_char,
    /// Its members, global ranks in order of group rank; NULL = not known yet.
    pub ranks: *const u32,
    /// How many members it has; 0 = not known yet.
    pub size: u32,
    /// This process's rank in the group: counts only where `ranks` is NULL and `size` is known.
    pub own_rank: u32,
    /// How long its operations may take, in ms; 0 = not known.
    pub timeout_ms: u64,
}

/// A tensor, as far as members can disagree on it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CallTensor {
    /// The code of its elements' type, as `RCOMM_F32` and so on in rcomm.h; 255 = another.
    pub dtype: u8,
    /// How many dimensions it has.
    pub dimensions: u32,
    /// Its extents; may be NULL if it has no dimensions.
    pub shape: *const u64,
}

/// The number of a signature.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SignatureNumber {
    /// For the recorder.
    pub words: [u64; 3],
}

/// Opens the ring of this rank and attempt. Blocks for the milliseconds that it takes to make a file of some
/// MiB. A living process that records as the same rank of the same attempt is an error.
///
/// # Safety
/// `config` points to a configuration whose texts are NULL or end with a zero byte; `recorder` may be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_open(
    config: *const Config,
    recorder: *mut *mut Handle,
) -> i32 {
    call(|| {
        // SAFETY: by the contract.
        let asked = unsafe { config.as_ref() }.ok_or("the configuration is NULL")?;
        if recorder.is_null() {
            return Err("the place for the handle is NULL".to_owned());
        }
        // SAFETY: by the contract.
        let (job, directory) = unsafe { (text(asked.job), text(asked.directory)) };
        let mut config = RecorderConfig::new(job, asked.rank, asked.world_size);
        config.attempt = asked.attempt;
        if asked.entries > 0 {
            config.entries = asked.entries;
        }
        if !directory.is_empty() {
            config.placement = Placement::Dir(directory.as_ref().into());
        }
        let made = FlightRecorder::create(&config).map_err(|error| error.to_string())?;
        let made = ForkGuarded::new(made).map_err(
            |_| "this kernel cannot clear memory in forked children (Linux 4.14 and later can)",
        )?;
        // SAFETY: by the contract.
        unsafe { recorder.write(Box::into_raw(Box::new(Handle(made)))) };
        Ok(())
    })
}

/// Closes the ring, removes its file and frees the handle: the rank ended in order. NULL is nothing.
///
/// # Safety
/// `recorder` is NULL or a living handle that no thread uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_close(recorder: *mut Handle) -> i32 {
    call(|| {
        if recorder.is_null() {
            return Ok(());
        }
        // SAFETY: by the contract, and it was made by Box::into_raw.
        let handle = unsafe { Box::from_raw(recorder) };
        match handle.0.get() {
            Some(recorder) => recorder.close().map_err(|error| error.to_string()),
            None => Ok(()),
        }
    })
}

/// Frees the handle and leaves the ring's file for readers, as a rank's that is gone. NULL is nothing.
///
/// # Safety
/// `recorder` is NULL or a living handle that no thread uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_leave(recorder: *mut Handle) {
    quietly((), || {
        // SAFETY: by the contract, and it was made by Box::into_raw.
        (!recorder.is_null()).then(|| drop(unsafe { Box::from_raw(recorder) }))
    });
}

/// Writes the path of the ring's file with a zero byte into `buffer`, as far as it fits, and returns the
/// bytes that it needs; 0 = the ring is in the process's own memory.
///
/// # Safety
/// `recorder` is NULL or a living handle; `buffer` may be written for `size` bytes, or `size` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_path(
    recorder: *const Handle,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    quietly(0, || {
        // SAFETY: by the contract.
        let recorder = unsafe { Handle::recorder(recorder)? };
        let path = recorder.storage().path()?.as_os_str().as_encoded_bytes();
        if size > 0 && !buffer.is_null() {
            let fits = path.len().min(size - 1);
            // SAFETY: by the contract; `fits` and the zero byte are within `size`.
            unsafe {
                std::ptr::copy_nonoverlapping(path.as_ptr(), buffer.cast(), fits);
                buffer.add(fits).write(0);
            }
        }
        Some(path.len() + 1)
    })
}

/// Adds a group, and returns its number.
///
/// # Safety
/// `recorder` is NULL or a living handle; `group` points to a group whose texts are NULL or end with a zero
/// byte and whose ranks are NULL or as many as its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_group(recorder: *const Handle, group: *const Group) -> u32 {
    quietly(RCOMM_RECORDER_NONE, || {
        // SAFETY: by the contract.
        let (recorder, group) = unsafe { (Handle::recorder(recorder)?, group.as_ref()?) };
        // SAFETY: by the contract.
        let (name, desc) = unsafe { (text(group.name), text(group.description)) };
        // SAFETY: by the contract.
        let ranks = unsafe { list(group.ranks, group.size as usize) };
        let info = ProcessGroupInfo {
            id: group.id,
            name: name.into_owned(),
            desc: desc.into_owned(),
            ranks: ranks.into(),
        };
        let timeout = Duration::from_millis(group.timeout_ms);
        let by_place = group.ranks.is_null() && group.own_rank < group.size;
        let added = match by_place {
            true => {
                let (rank, size) = (group.own_rank, group.size);
                recorder.add_group_by_place(&info, GroupPlace { rank, size }, timeout)
            }
            false => recorder.add_group(&info, timeout),
        };
        Some(added.row())
    })
}

/// Gives a group that was added without them its members, once. Fails if they are known, or not as many as
/// the group's size, or if the ring has no room for them.
///
/// # Safety
/// `recorder` is NULL or a living handle; `ranks` holds `count` ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_group_members(
    recorder: *const Handle,
    group: u32,
    ranks: *const u32,
    count: usize,
) -> i32 {
    call(|| {
        // SAFETY: by the contract.
        let Some(recorder) = (unsafe { Handle::recorder(recorder) }) else {
            return Ok(());
        };
        // SAFETY: by the contract.
        let ranks = unsafe { list(ranks, count) };
        let group = rcomm_recorder::record::GroupHandle::of_row(group);
        match recorder.set_group_members(group, ranks) {
            true => Ok(()),
            false => Err(format!(
                "the {count} members were not kept: the group has its members, or another size, or the \
                 ring has no room"
            )),
        }
    })
}

/// The number of a place in the program's source, from line 1.
///
/// # Safety
/// `recorder` is NULL or a living handle; the texts are NULL or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_call_site(
    recorder: *const Handle,
    file: *const c_char,
    function: *const c_char,
    line: u32,
) -> u32 {
    quietly(RCOMM_RECORDER_NONE, || {
        // SAFETY: by the contract.
        let recorder = unsafe { Handle::recorder(recorder)? };
        // SAFETY: by the contract.
        let (file, function) = unsafe { (text(file), text(function)) };
        Some(recorder.intern_call_site(&file, &function, line).row())
    })
}

/// The number of what an operation looks like: its backend, its name, and its tensors. Without room in the
/// table, operations with it are recorded by their numbers of elements.
///
/// # Safety
/// `recorder` is NULL or a living handle; the texts are NULL or end with a zero byte; `inputs` and
/// `outputs` hold as many tensors as their counts, each with as many extents as it has dimensions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_signature(
    recorder: *const Handle,
    backend: *const c_char,
    name: *const c_char,
    inputs: *const CallTensor,
    input_count: usize,
    outputs: *const CallTensor,
    output_count: usize,
) -> SignatureNumber {
    let unknown = SignatureNumber {
        words: SignatureId::UNKNOWN.to_words(),
    };
    quietly(unknown, || {
        // SAFETY: by the contract.
        let recorder = unsafe { Handle::recorder(recorder)? };
        // SAFETY: by the contract.
        let (backend, op_name) = unsafe { (text(backend), text(name)) };
        // SAFETY: by the contract.
        let (inputs, outputs) =
            unsafe { (tensors(inputs, input_count), tensors(outputs, output_count)) };
        let key = SignatureKey {
            backend: &backend,
            op_name: &op_name,
            inputs: &inputs,
            outputs: &outputs,
        };
        let id = recorder.intern(&key).unwrap_or(key.without_row());
        Some(SignatureNumber {
            words: id.to_words(),
        })
    })
}

/// # Safety
/// `tensors` holds `count` tensors, each with as many extents as it has dimensions.
unsafe fn tensors<'a>(tensors: *const CallTensor, count: usize) -> Vec<Tensor<'a>> {
    // SAFETY: by the contract.
    let tensors = unsafe { list(tensors, count) };
    let tensor = |tensor: &CallTensor| Tensor {
        dtype: DType::from_code(tensor.dtype).unwrap_or(DType::Other),
        // SAFETY: by the contract.
        shape: unsafe { list(tensor.shape, tensor.dimensions as usize) },
    };
    tensors.iter().map(tensor).collect()
}

/// # Safety
/// `start` is NULL, or `count` values from it stay as they are.
pub(crate) unsafe fn list<'a, T>(start: *const T, count: usize) -> &'a [T] {
    if start.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: by the contract.
    unsafe { std::slice::from_raw_parts(start, count) }
}
