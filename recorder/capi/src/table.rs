//! Opening and closing a ring, and its path; groups, call sites and signatures.

use crate::guarded::ForkGuarded;
use crate::outcome::{RCOMM_RECORDER_NONE, call, quietly, text};
use rcomm_recorder::model::{DType, GroupPlace, ProcessGroupInfo};
use rcomm_recorder::publish::{KeptJobs, remove_jobs_beside};
use rcomm_recorder::record::{
    FlightRecorder, Placement, RecorderConfig, SignatureId, SignatureKey, Tensor,
};
use std::ffi::c_char;
use std::time::Duration;

/// An open ring.
pub struct Handle(ForkGuarded);

impl Handle {
    /// The recorder, in the process that opened it; `None` in a forked child, or if `handle` is NULL.
    ///
    /// # Safety
    /// `handle` is NULL or a valid handle, and lives for as long as the result is used.
    #[inline]
    pub(crate) unsafe fn recorder<'a>(handle: *const Self) -> Option<&'a FlightRecorder> {
        // SAFETY: `handle` is NULL or came from `rcomm_recorder_open`, and the caller neither closes nor
        // leaves it while the result is used. No `&mut Handle` is ever made of it.
        unsafe { handle.as_ref() }?.0.get()
    }
}

/// The configuration of a ring.
#[repr(C)]
pub struct Config {
    /// Folder below which the ring is created; NULL = `/dev/shm/rcomm-<uid>`, where the views look for it, or the
    /// process's own memory if no ring can be created there.
    pub directory: *const c_char,
    /// Name of the job, at most 255 bytes, equal on all ranks.
    pub job: *const c_char,
    /// This process's rank in the world.
    pub rank: u32,
    /// Number of ranks in the world.
    pub world_size: u32,
    /// Number of times that the job was restarted.
    pub attempt: u32,
    /// Capacity of the ring in operations, rounded up to a power of two; 0 = 16,384.
    pub entries: u32,
}

/// A group, as known to this process.
#[repr(C)]
pub struct Group {
    /// The group's number in this process, in the order of creation.
    pub id: u32,
    /// The group's name, equal on all members.
    pub name: *const c_char,
    /// The group's purpose.
    pub description: *const c_char,
    /// Global ranks of the group's members in order of group rank; NULL = not known yet.
    pub ranks: *const u32,
    /// Number of the group's members; 0 = not known yet.
    pub size: u32,
    /// This process's rank in the group; used only if `ranks` is NULL and `size` is known.
    pub own_rank: u32,
    /// Time-out of the group's operations in ms; 0 = unknown.
    pub timeout_ms: u64,
}

/// The properties of a tensor on which members can disagree.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CallTensor {
    /// The code of the element type, as `RCOMM_F32` and so on in rcomm.h; 255 = another type.
    pub dtype: u8,
    /// Number of dimensions.
    pub dimensions: u32,
    /// Sizes of the dimensions; may be NULL if there are none.
    pub shape: *const u64,
}

/// Identifies a signature.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SignatureNumber {
    /// For the recorder's use only.
    pub words: [u64; 3],
}

/// Opens the ring of this rank and attempt, and removes the rings of dead jobs from its directory, except the newest
/// (32 jobs, 1 GiB). Blocks for a few milliseconds while it creates a file of a few MiB. Fails if another living
/// process records as the same rank of the same attempt, if the configuration is not valid, if no ring can be created
/// in `directory`, and on Linux before 4.14.
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
        // SAFETY: `config` is NULL (refused here) or points to a configuration that the caller does not
        // change during this call.
        let settings = unsafe { config.as_ref() }.ok_or("the configuration is NULL")?;
        if recorder.is_null() {
            return Err("the pointer for the handle is NULL".to_owned());
        }
        // SAFETY: both texts of the configuration are NULL or end with a zero byte, and the caller does not
        // change them during this call, which copies them.
        let (job, directory) = unsafe { (text(settings.job), text(settings.directory)) };
        let mut config = RecorderConfig::new(job, settings.rank, settings.world_size);
        config.attempt = settings.attempt;
        if settings.entries > 0 {
            config.entries = settings.entries;
        }
        if !directory.is_empty() {
            config.placement = Placement::Dir(directory.as_ref().into());
        }
        let created = FlightRecorder::create(&config).map_err(|error| error.to_string())?;
        remove_jobs_beside(created.storage(), &KeptJobs::default());
        let created = ForkGuarded::new(created).map_err(|error| error.to_string())?;
        // SAFETY: `recorder` is not NULL (checked above), so the caller guarantees that this function may write one
        // pointer there.
        unsafe { recorder.write(Box::into_raw(Box::new(Handle(created)))) };
        Ok(())
    })
}

/// Closes the ring, removes the rings that earlier attempts left, and frees the handle: for a rank that ends cleanly.
/// Once all rings of the job on this host are closed, the last rank removes their files. NULL has no effect. Fails if
/// a file cannot be removed; the handle is freed even then.
///
/// # Safety
/// `recorder` is NULL or a valid handle that no thread uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_close(recorder: *mut Handle) -> i32 {
    call(|| {
        if recorder.is_null() {
            return Ok(());
        }
        // SAFETY: not NULL (checked above), so it came from `Box::into_raw` in `rcomm_recorder_open`. No
        // thread uses it any more, and the caller gives it up: it is freed once.
        let handle = unsafe { Box::from_raw(recorder) };
        match handle.0.get() {
            Some(recorder) => recorder.close().map_err(|error| error.to_string()),
            None => Ok(()),
        }
    })
}

/// Frees the handle and leaves the ring's file for readers, which treat the rank as ended without closing its ring.
/// NULL has no effect.
///
/// # Safety
/// `recorder` is NULL or a valid handle that no thread uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_leave(recorder: *mut Handle) {
    quietly((), || {
        // SAFETY: where it is not NULL, it came from `Box::into_raw` in `rcomm_recorder_open`. No thread
        // uses it any more, and the caller gives it up: it is freed once.
        (!recorder.is_null()).then(|| drop(unsafe { Box::from_raw(recorder) }))
    });
}

/// Writes the path of the ring's file with a terminating zero byte into `buffer`, truncated to its size. Returns the
/// size that it needs in bytes; 0 if the ring is in the process's own memory, and if the call does nothing.
///
/// # Safety
/// `recorder` is NULL or a valid handle; `buffer` may be written for `size` bytes, or `size` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_path(
    recorder: *const Handle,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    quietly(0, || {
        // SAFETY: `recorder` is NULL or a valid handle, which the caller keeps alive during this call.
        let recorder = unsafe { Handle::recorder(recorder)? };
        let path = recorder.storage().path()?.as_os_str().as_encoded_bytes();
        if size > 0 && !buffer.is_null() {
            let fits = path.len().min(size - 1);
            // SAFETY: `buffer` is not NULL, so `size` bytes there may be written. `fits` is less than
            // `size`, so that the text and its zero byte lie within; the path is memory of the recorder's
            // and does not overlap `buffer`.
            unsafe {
                std::ptr::copy_nonoverlapping(path.as_ptr(), buffer.cast(), fits);
                buffer.add(fits).write(0);
            }
        }
        Some(path.len() + 1)
    })
}

/// Adds a group. Returns its number; `RCOMM_RECORDER_NONE` if it was not added.
///
/// # Safety
/// `recorder` is NULL or a valid handle; `group` points to a group whose texts are NULL or end with a zero
/// byte and whose ranks are NULL or as many as its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_group(recorder: *const Handle, group: *const Group) -> u32 {
    quietly(RCOMM_RECORDER_NONE, || {
        // SAFETY: `recorder` is NULL or a valid handle, and `group` is NULL or points to a group that the
        // caller does not change; both for the time of this call.
        let (recorder, group) = unsafe { (Handle::recorder(recorder)?, group.as_ref()?) };
        // SAFETY: both texts of the group are NULL or end with a zero byte and stay unchanged during this
        // call, which copies them.
        let (name, desc) = unsafe { (text(group.name), text(group.description)) };
        // SAFETY: the caller's `ranks` is NULL or holds `size` ranks, unchanged during this call, which
        // copies them.
        let ranks = unsafe { list(group.ranks, group.size as usize) };
        let info = ProcessGroupInfo {
            id: group.id,
            name: name.into_owned(),
            desc: desc.into_owned(),
            ranks: ranks.into(),
        };
        let timeout = Duration::from_millis(group.timeout_ms);
        let is_by_place = group.ranks.is_null() && group.own_rank < group.size;
        let added = match is_by_place {
            true => {
                let (rank, size) = (group.own_rank, group.size);
                recorder.add_group_by_place(&info, GroupPlace { rank, size }, timeout)
            }
            false => recorder.add_group(&info, timeout),
        };
        Some(added.row())
    })
}

/// Sets the members of a group that was added without them, once. Fails if the ring has no such group, if the members
/// are already set, if their number is 0 or differs from the group's size, or if the ring has no space for them.
///
/// # Safety
/// `recorder` is NULL or a valid handle; `ranks` holds `count` ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_group_members(
    recorder: *const Handle,
    group: u32,
    ranks: *const u32,
    count: usize,
) -> i32 {
    call(|| {
        // SAFETY: `recorder` is NULL or a valid handle, which the caller keeps alive during this call.
        let Some(recorder) = (unsafe { Handle::recorder(recorder) }) else {
            return Ok(());
        };
        // SAFETY: `ranks` is NULL or holds `count` ranks, which the caller does not change during this
        // call.
        let ranks = unsafe { list(ranks, count) };
        let group = rcomm_recorder::record::GroupHandle::of_row(group);
        match recorder.set_group_members(group, ranks) {
            true => Ok(()),
            false => Err(format!(
                "the {count} members were not stored: the ring has no such group or no space for them, \
                 or the group already has members or another size"
            )),
        }
    })
}

/// Returns the number of a call site: a location in the program's source; lines count from 1. `RCOMM_RECORDER_NONE` if
/// it does not fit in its table.
///
/// # Safety
/// `recorder` is NULL or a valid handle; the texts are NULL or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_call_site(
    recorder: *const Handle,
    file: *const c_char,
    function: *const c_char,
    line: u32,
) -> u32 {
    quietly(RCOMM_RECORDER_NONE, || {
        // SAFETY: `recorder` is NULL or a valid handle, which the caller keeps alive during this call.
        let recorder = unsafe { Handle::recorder(recorder)? };
        // SAFETY: both texts are NULL or end with a zero byte, and the caller does not change them during
        // this call, which copies them.
        let (file, function) = unsafe { (text(file), text(function)) };
        Some(recorder.intern_call_site(&file, &function, line).row())
    })
}

/// Returns the id of an operation's signature: its backend, its name, and its tensors. If it does not fit in its table,
/// operations with it are recorded with their numbers of elements only.
///
/// # Safety
/// `recorder` is NULL or a valid handle; the texts are NULL or end with a zero byte; `inputs` and
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
        // SAFETY: `recorder` is NULL or a valid handle, which the caller keeps alive during this call.
        let recorder = unsafe { Handle::recorder(recorder)? };
        // SAFETY: both texts are NULL or end with a zero byte, and the caller does not change them during
        // this call, which copies them.
        let (backend, op_name) = unsafe { (text(backend), text(name)) };
        // SAFETY: each list is NULL or holds as many tensors as its count, with their extents, and the
        // caller changes none of it during this call; the tensors borrowed here do not leave it.
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

/// The tensors that a caller passed; none for NULL.
///
/// # Safety
/// `tensors` is NULL or holds `count` tensors, and the `shape` of each is NULL or holds as many extents as
/// it has dimensions. All of it stays unchanged while the result is used.
unsafe fn tensors<'a>(tensors: *const CallTensor, count: usize) -> Vec<Tensor<'a>> {
    // SAFETY: the caller's `tensors` is NULL or holds `count` tensors, which stay unchanged while the
    // result is used.
    let tensors = unsafe { list(tensors, count) };
    let tensor = |tensor: &CallTensor| Tensor {
        dtype: DType::from_code(tensor.dtype).unwrap_or(DType::Other),
        // SAFETY: the caller's `shape` is NULL or holds `dimensions` extents, which stay unchanged while
        // the result is used.
        shape: unsafe { list(tensor.shape, tensor.dimensions as usize) },
    };
    tensors.iter().map(tensor).collect()
}

/// The `count` values at `start`; none for NULL.
///
/// # Safety
/// `start` is NULL, or points to `count` aligned values that stay unchanged while the result is used.
pub(crate) unsafe fn list<'a, T>(start: *const T, count: usize) -> &'a [T] {
    if start.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: not NULL (checked above), so `count` values lie there, aligned, and nothing changes them
    // while the result is used.
    unsafe { std::slice::from_raw_parts(start, count) }
}
