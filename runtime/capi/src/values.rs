//! Collectives of small values over a store, which need no group.

use crate::config::Configuration;
use crate::memory::array;
use crate::status::{borrow, call, free, give, put, refused, text};
use crate::world::World;
use rcomm::store::StoreCollectives;
use rcomm::{PrefixStore, Result, Store};
use std::ffi::c_char;
use std::sync::Arc;
use std::time::Duration;

/// Collectives of small values over a store: for the control of a job, where no group is there yet, or none is usable.
/// Calls of the same handle run one after the other.
pub struct ValueCollectives {
    core: StoreCollectives,
    rank: u32,
}

/// Values that a collective over the store has returned, numbered from 0.
pub struct Values(Vec<Vec<u8>>);

/// Makes collectives of the ranks of `rcomm_world_group`, with their numbers there, over the store at which the ranks
/// found each other. All these ranks make collectives of the same name, and call the same functions with them in the
/// same order. The name distinguishes their keys from others in the store. They also have the number of the world's
/// attempt, so a name is used once in an attempt: a job that is started again may use it again. A call waits for
/// `timeout_ms` at most, and after a time-out for two seconds more to find out which ranks did not come: the error's
/// text names them.
///
/// # Safety
/// `world` is a valid handle; `name` is a text that ends with a zero byte; `made` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_store_collectives_new(
    world: *const World,
    name: *const c_char,
    made: *mut *mut ValueCollectives,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? }.core();
        // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
        let name = unsafe { text(name, "the name")? };
        let group = world.group();
        // A launcher's store outlives an attempt, and has the keys of its last calls.
        let prefix = format!("rcomm/{}/values", world.place().attempt);
        let store = Arc::new(PrefixStore::new(prefix, world.store().clone()));
        // SAFETY: `made` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give_collectives(store, name, group.rank(), group.size(), made) }
    })
}

/// Like `rcomm_store_collectives_new`, of `size` ranks, for rank `rank`, over the store that `rcomm_config_set_store`
/// has set: it needs no world. The keys have no number of an attempt: a name is used once in the life of the store, so
/// where the store outlives an attempt of the job, the program puts a number of the attempt into the name.
/// `RCOMM_INVALID_ARGUMENT` if no store was set.
///
/// # Safety
/// `config` is a valid handle; `name` is a text that ends with a zero byte; `made` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_store_collectives_with(
    config: *const Configuration,
    name: *const c_char,
    rank: u32,
    size: u32,
    made: *mut *mut ValueCollectives,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `config` alive during the call.
        let config = unsafe { borrow(config, "the configuration")? };
        // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
        let name = unsafe { text(name, "the name")? };
        let store = config.store();
        let store = store.ok_or_else(|| refused("the configuration has no store of the caller"))?;
        // SAFETY: `made` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give_collectives(store, name, rank, size, made) }
    })
}

/// Frees the handle; the store keeps the values of its last calls. NULL has no effect.
///
/// # Safety
/// `collectives` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_store_collectives_free(collectives: *mut ValueCollectives) {
    // SAFETY: `collectives` is NULL or a handle of this type that the caller gives up.
    unsafe { free(collectives) }
}

/// Returns once all ranks have called it.
///
/// # Safety
/// `collectives` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_store_barrier(
    collectives: *const ValueCollectives,
    timeout_ms: u64,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `collectives` alive during the call.
        let collectives = unsafe { borrow(collectives, "the collectives")? };
        collectives.core.barrier(Duration::from_millis(timeout_ms))
    })
}

/// Writes the sum of the numbers of all ranks, on all ranks; it wraps.
///
/// # Safety
/// `collectives` is a valid handle; `sum` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_store_all_sum(
    collectives: *const ValueCollectives,
    number: i64,
    timeout_ms: u64,
    sum: *mut i64,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `collectives` alive during the call.
        let collectives = unsafe { borrow(collectives, "the collectives")? };
        check_place(sum)?;
        let limit = Duration::from_millis(timeout_ms);
        let total = collectives.core.all_sum(number, limit)?;
        // SAFETY: `sum` is not NULL, so the caller guarantees that one value may be written there.
        unsafe { put(sum, total) }
    })
}

/// Writes the values of all ranks, by rank, on all ranks. Free them with `rcomm_values_free`.
///
/// # Safety
/// `collectives` is a valid handle; `length` bytes lie at `bytes`, which may be NULL if there are none; `values` may be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_store_all_gather(
    collectives: *const ValueCollectives,
    bytes: *const u8,
    length: usize,
    timeout_ms: u64,
    values: *mut *mut Values,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `collectives` alive during the call.
        let collectives = unsafe { borrow(collectives, "the collectives")? };
        // SAFETY: `bytes` is NULL, or holds `length` bytes that stay unchanged during the call.
        let value = unsafe { array(bytes, length, "the value's bytes")? };
        check_place(values)?;
        let limit = Duration::from_millis(timeout_ms);
        let all = collectives.core.all_gather(value, limit)?;
        // SAFETY: `values` is not NULL, so the caller guarantees that a handle may be written there.
        unsafe { give(values, Values(all)) }
    })
}

/// Writes one value, that of `root`, on all ranks. `root` does not wait; the bytes of the other ranks are ignored. Free
/// the value with `rcomm_values_free`.
///
/// # Safety
/// `collectives` is a valid handle; on `root` `length` bytes lie at `bytes`, which may be NULL if there are none;
/// `values` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_store_broadcast(
    collectives: *const ValueCollectives,
    bytes: *const u8,
    length: usize,
    root: u32,
    timeout_ms: u64,
    values: *mut *mut Values,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `collectives` alive during the call.
        let collectives = unsafe { borrow(collectives, "the collectives")? };
        let value = match collectives.rank == root {
            // SAFETY: `bytes` is NULL, or holds `length` bytes that stay unchanged during the call.
            true => Some(unsafe { array(bytes, length, "the value's bytes")? }),
            false => None,
        };
        check_place(values)?;
        let limit = Duration::from_millis(timeout_ms);
        let value = collectives.core.broadcast(value, root, limit)?;
        // SAFETY: `values` is not NULL, so the caller guarantees that a handle may be written there.
        unsafe { give(values, Values(vec![value])) }
    })
}

/// Writes the values of all ranks, by rank, on `root`, and NULL on the other ranks, which do not wait. Free them with
/// `rcomm_values_free`.
///
/// # Safety
/// `collectives` is a valid handle; `length` bytes lie at `bytes`, which may be NULL if there are none; `values` may be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_store_gather(
    collectives: *const ValueCollectives,
    bytes: *const u8,
    length: usize,
    root: u32,
    timeout_ms: u64,
    values: *mut *mut Values,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `collectives` alive during the call.
        let collectives = unsafe { borrow(collectives, "the collectives")? };
        // SAFETY: `bytes` is NULL, or holds `length` bytes that stay unchanged during the call.
        let value = unsafe { array(bytes, length, "the value's bytes")? };
        check_place(values)?;
        let limit = Duration::from_millis(timeout_ms);
        match collectives.core.gather(value, root, limit)? {
            // SAFETY: `values` is not NULL, so the caller guarantees that a handle may be written there.
            Some(all) => unsafe { give(values, Values(all)) },
            // SAFETY: as above.
            None => unsafe { put(values, std::ptr::null_mut()) },
        }
    })
}

/// Writes one value: this rank's of the `count` values that `root` passes, one for each rank, by rank. `root` does not
/// wait; the lists of the other ranks are ignored. Free the value with `rcomm_values_free`.
///
/// # Safety
/// `collectives` is a valid handle; on `root`, `list` and `lengths` have `count` members, and as many bytes as its
/// length says lie at each pointer of `list`, which may be NULL if there are none; `values` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_store_scatter(
    collectives: *const ValueCollectives,
    list: *const *const u8,
    lengths: *const usize,
    count: usize,
    root: u32,
    timeout_ms: u64,
    values: *mut *mut Values,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `collectives` alive during the call.
        let collectives = unsafe { borrow(collectives, "the collectives")? };
        check_place(values)?;
        let limit = Duration::from_millis(timeout_ms);
        let value = if collectives.rank == root {
            // SAFETY: the list is NULL, or has `count` pointers and stays unchanged during the call.
            let list = unsafe { array(list, count, "the list of values")? };
            // SAFETY: as above, for the lengths.
            let lengths = unsafe { array(lengths, count, "the list of lengths")? };
            let pairs = list.iter().zip(lengths);
            // SAFETY: each pointer is NULL, or holds as many bytes, which stay unchanged during the call.
            let parts = pairs.map(|(&at, &length)| unsafe { array(at, length, "a value") });
            let parts: Vec<&[u8]> = parts.collect::<Result<_>>()?;
            collectives.core.scatter(Some(&parts), root, limit)?
        } else {
            collectives.core.scatter(None, root, limit)?
        };
        // SAFETY: `values` is not NULL, so the caller guarantees that a handle may be written there.
        unsafe { give(values, Values(vec![value])) }
    })
}

/// Writes the number of the values.
///
/// # Safety
/// `values` is a valid handle; `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_values_count(values: *const Values, count: *mut usize) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `values` alive during the call.
        let values = unsafe { borrow(values, "the values")? };
        // SAFETY: `count` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(count, values.0.len()) }
    })
}

/// Writes where the value of this number is, and its length in bytes. The bytes are valid until the values are freed.
/// `RCOMM_INVALID_ARGUMENT` if there is no such value.
///
/// # Safety
/// `values` is a valid handle; `bytes` and `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_values_get(
    values: *const Values,
    number: usize,
    bytes: *mut *const u8,
    length: *mut usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `values` alive during the call.
        let values = unsafe { &borrow(values, "the values")?.0 };
        let value = values.get(number).ok_or_else(|| {
            let count = values.len();
            refused(format!(
                "there is no value {number}: the number of values is {count}"
            ))
        })?;
        // SAFETY: `bytes` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(bytes, value.as_ptr())? };
        // SAFETY: `length` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(length, value.len()) }
    })
}

/// Frees the values. NULL has no effect.
///
/// # Safety
/// `values` is NULL or a valid handle that is not used afterwards, nor are the bytes of its values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_values_free(values: *mut Values) {
    // SAFETY: `values` is NULL or a handle of this type that the caller gives up.
    unsafe { free(values) }
}

/// Writes a handle of the collectives of these ranks.
///
/// # Safety
/// `made` is NULL or may be written.
unsafe fn give_collectives(
    store: Arc<dyn Store>,
    name: &str,
    rank: u32,
    size: u32,
    made: *mut *mut ValueCollectives,
) -> Result<()> {
    let core = StoreCollectives::new(store, name, rank, size)?;
    // SAFETY: `made` is NULL, which is refused, or the caller guarantees that a handle may be written there.
    unsafe { give(made, ValueCollectives { core, rank }) }
}

/// Refuses NULL as the place of a result before the ranks exchange anything: a rank that has no result would be out of
/// step with the others.
fn check_place<T>(out: *mut T) -> Result<()> {
    match out.is_null() {
        true => Err(refused("the pointer for the result is NULL")),
        false => Ok(()),
    }
}
