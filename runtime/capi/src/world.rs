//! Worlds.

use crate::group::Group;
use crate::memory::array;
use crate::status::{borrow, call, consume, free, give, put, refused, text};
use rcomm::{Config, DumpHandle, GroupOptions, Rendezvous};
use std::ffi::{CString, c_char};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

/// This process's membership in a job.
pub struct World {
    core: RwLock<rcomm::World>,
    /// For dumps while a thread changes the world.
    dumps: Mutex<DumpHandle>,
}

impl World {
    pub(crate) fn new(world: rcomm::World) -> Self {
        Self {
            dumps: Mutex::new(world.dump_handle()),
            core: RwLock::new(world),
        }
    }

    pub(crate) fn core(&self) -> RwLockReadGuard<'_, rcomm::World> {
        self.core.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the world, once no other thread uses it.
    fn change(
        &self,
        operation: impl FnOnce(&mut rcomm::World) -> rcomm::Result<()>,
    ) -> rcomm::Result<()> {
        let mut world = self.core.write().unwrap_or_else(PoisonError::into_inner);
        let changed = operation(&mut world);
        // The operation may have made the world anew.
        *self.dumps.lock().unwrap_or_else(PoisonError::into_inner) = world.dump_handle();
        changed
    }

    fn dumps(&self) -> DumpHandle {
        self.dumps
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Joins the job that the environment describes (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, or the variables
/// of Slurm and MPI launchers; options from `RCOMM_*`). Returns once all ranks have joined.
///
/// # Safety
/// `world` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_init(world: *mut *mut World) -> i32 {
    call(|| {
        let made = rcomm::World::init(Config::from_environment()?)?;
        // SAFETY: `world` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(world, World::new(made)) }
    })
}

/// Joins the job at this address, with the defaults of all options: of the environment, only the NCCL backend's options
/// are read. `timeout_ms` is the time-out of operations; 0 = the default.
///
/// # Safety
/// `address` is a text that ends with a zero byte; `world` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_init_at(
    rank: u32,
    world_size: u32,
    address: *const c_char,
    port: u16,
    timeout_ms: u64,
    world: *mut *mut World,
) -> i32 {
    call(|| {
        // SAFETY: `address` is NULL, or ends with a zero byte and stays unchanged during the call.
        let address = unsafe { text(address, "the address")? };
        let rendezvous = Rendezvous::explicit(rank, world_size, address, port)?;
        let mut config = Config {
            rendezvous: Some(rendezvous),
            ..Config::default()
        };
        if timeout_ms > 0 {
            config.timeout = Duration::from_millis(timeout_ms);
        }
        let made = rcomm::World::init(config)?;
        // SAFETY: `world` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(world, World::new(made)) }
    })
}

/// Writes this process's rank, and the number of ranks. Either pointer may be NULL.
///
/// # Safety
/// `world` is a valid handle; `rank` and `size` are NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_world_place(
    world: *const World,
    rank: *mut u32,
    size: *mut u32,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        if !rank.is_null() {
            // SAFETY: `rank` is not NULL, so the caller guarantees that this function may write to it.
            unsafe { rank.write(world.core().rank()) };
        }
        if !size.is_null() {
            // SAFETY: `size` is not NULL, so the caller guarantees that this function may write to it.
            unsafe { size.write(world.core().size()) };
        }
        Ok(())
    })
}

/// Makes a handle to the group of all ranks, or after `rcomm_shrink` of those that are left. Free it with
/// `rcomm_group_free`.
///
/// # Safety
/// `world` is a valid handle; `group` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_world_group(world: *const World, group: *mut *mut Group) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `group` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(group, Group::new(world.core().group().clone())) }
    })
}

/// Makes a group of these ranks of the world, in this order, for this purpose. These ranks call this, and no other rank
/// does.
///
/// # Safety
/// `world` is a valid handle, `ranks` holds `count` ranks, `purpose` is a text that ends with a zero
/// byte; `group` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_new_group(
    world: *const World,
    ranks: *const u32,
    count: usize,
    purpose: *const c_char,
    group: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `ranks` is NULL, or holds `count` values that stay unchanged during the call.
        let ranks = unsafe { array(ranks, count, "the list of ranks")? };
        // SAFETY: `purpose` is NULL, or ends with a zero byte and stays unchanged during the call.
        let purpose = unsafe { text(purpose, "the purpose")? };
        let made = world
            .core()
            .new_group(ranks, &GroupOptions::named(purpose))?;
        // SAFETY: `group` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(group, Group::new(made)) }
    })
}

/// Waits for pending operations and then for the other ranks, closes all groups, and frees the world, also after an
/// error. All ranks call this, after they have freed their groups and works.
///
/// # Safety
/// `world` is a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_shutdown(world: *mut World) -> i32 {
    call(|| {
        // SAFETY: `world` is NULL or a handle of this type that the caller gives up.
        let world = unsafe { consume(world, "the world")? };
        let world = world.core.into_inner();
        world.unwrap_or_else(PoisonError::into_inner).shutdown()
    })
}

/// Like `rcomm_shutdown`, but waits for pending operations, and then for the other ranks, for `timeout_ms` at most
/// each: for programs in which not every rank shuts down at the same time.
///
/// # Safety
/// `world` is a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_shutdown_within(world: *mut World, timeout_ms: u64) -> i32 {
    call(|| {
        // SAFETY: `world` is NULL or a handle of this type that the caller gives up.
        let world = unsafe { consume(world, "the world")? };
        let world = world.core.into_inner();
        let world = world.unwrap_or_else(PoisonError::into_inner);
        world.shutdown_within(Duration::from_millis(timeout_ms))
    })
}

/// Continues without these ranks, after they were lost: `rcomm_world_group` then gives the group of the others, and
/// groups with a lost member are aborted. All ranks that are left call this with the same list. Waits for them, for the
/// time-out of the group of all ranks at most; meanwhile other calls with this world wait, except `rcomm_dump` and
/// `rcomm_snapshot`. Ranks keep their numbers.
///
/// # Safety
/// `world` is a valid handle; `without` holds `count` ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_shrink(
    world: *const World,
    without: *const u32,
    count: usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `without` is NULL, or holds `count` values that stay unchanged during the call.
        let without = unsafe { array(without, count, "the list of ranks")? };
        world.change(|world| world.shrink(without))
    })
}

/// Makes the world anew with `size` ranks: those that are left keep their numbers, and processes that join
/// (`RCOMM_JOIN=1`) take the other numbers below `size`. All ranks that are left call this with the same size and the
/// same list of lost ranks. Waits for all `size` ranks, for the time-out of the start at most; meanwhile other calls
/// with this world wait, except `rcomm_dump` and `rcomm_snapshot`. `rcomm_world_group` then gives the group of all
/// ranks; all other groups have ended.
///
/// # Safety
/// `world` is a valid handle; `lost` holds `count` ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_grow(
    world: *const World,
    lost: *const u32,
    count: usize,
    size: u32,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `lost` is NULL, or holds `count` values that stay unchanged during the call.
        let lost = unsafe { array(lost, count, "the list of ranks")? };
        world.change(|world| world.grow(lost, size))
    })
}

/// Records what the program does from now on (such as `load data`), cut to 104 bytes; the empty text ends a phase.
///
/// # Safety
/// `world` is a valid handle; `name` is a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_phase(world: *const World, name: *const c_char) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
        world.core().phase(unsafe { text(name, "the phase")? });
        Ok(())
    })
}

/// Records which step the program is in.
///
/// # Safety
/// `world` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_step(world: *const World, step: i64) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        world.core().step(step);
        Ok(())
    })
}

/// Writes this rank's dump to a file, and the file's path to `*path`, which `rcomm_text_free` frees. `path` may be
/// NULL.
///
/// # Safety
/// `world` is a valid handle; `path` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_dump(world: *const World, path: *mut *mut c_char) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        let written = world.dumps().dump()?;
        match path.is_null() {
            true => Ok(()),
            // SAFETY: `path` is not NULL, so the caller guarantees that one address may be written there.
            false => unsafe { give_text(path, written) },
        }
    })
}

/// Writes this rank's record, as it is now, to `*json`: what a dump has, as a text that `rcomm_text_free` frees.
///
/// # Safety
/// `world` is a valid handle; `json` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_snapshot(world: *const World, json: *mut *mut c_char) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        let record = world.dumps().snapshot();
        // SAFETY: `json` is NULL, which is refused, or the caller lets one address be written there.
        unsafe { give_text(json, record.to_json()) }
    })
}

/// Writes to `*json`, for each name of a wait, how often and for how long threads of this process have waited, and wait
/// now: a list of objects with `name`, `count`, `total_ns`, `max_ns`, `waiting` and `waiting_ns`, like the answer to
/// `GET /waits` of the rank's endpoint. `rcomm_text_free` frees the text.
///
/// # Safety
/// `world` is a valid handle; `json` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_waits(world: *const World, json: *mut *mut c_char) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        let waits = serde_json::to_vec(&world.core().waits());
        let waits = waits.map_err(|error| refused(error.to_string()))?;
        // SAFETY: `json` is NULL, which is refused, or the caller guarantees that one address may be written there.
        unsafe { give_text(json, waits) }
    })
}

/// Writes to `*out` a text that C frees.
///
/// # Safety
/// `out` is NULL or may be written.
unsafe fn give_text(out: *mut *mut c_char, text: impl Into<Vec<u8>>) -> rcomm::Result<()> {
    if out.is_null() {
        return Err(refused("the pointer for the text is NULL"));
    }
    let text = CString::new(text).map_err(|error| refused(error.to_string()))?;
    // SAFETY: `out` is not NULL (checked above), so the caller guarantees that one address may be written there.
    unsafe { put(out, text.into_raw()) }
}

/// Aborts all groups and frees the world: for use after an error. NULL has no effect.
///
/// # Safety
/// `world` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_world_free(world: *mut World) {
    // SAFETY: `world` is NULL or a handle of this type that the caller gives up.
    unsafe { free(world) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm::HashStore;
    use rcomm::config::RingDir;
    use std::ptr;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    #[test]
    fn a_dump_can_be_made_while_a_thread_changes_the_world() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            rendezvous: Some(Rendezvous::explicit(0, 1, "127.0.0.1", 1).unwrap()),
            ring_dir: RingDir::Memory,
            dump_dir: folder.path().to_owned(),
            ..Config::default()
        };
        let world = World::new(
            rcomm::World::builder(config)
                .store(Arc::new(HashStore::new()))
                .init()
                .unwrap(),
        );
        let (begun, has_begun) = channel();
        let (end, may_end) = channel();
        let shared = &world;
        std::thread::scope(|threads| {
            threads.spawn(move || {
                shared.change(|_| {
                    begun.send(()).unwrap();
                    // An error is the end of the other thread, which has failed.
                    let _ = may_end.recv_timeout(Duration::from_secs(120));
                    Ok(())
                })
            });
            has_begun.recv().unwrap();
            let mut path = ptr::null_mut();
            let mut json = ptr::null_mut();
            // SAFETY: the handle is valid during both calls, and the pointers may be written.
            let codes = unsafe {
                (
                    rcomm_dump(&world, &mut path),
                    rcomm_snapshot(&world, &mut json),
                )
            };
            // The other thread still changes the world: it waits for this.
            end.send(()).expect("the dump came only after the change");
            assert_eq!(codes, (0, 0));
            for text in [path, json] {
                // SAFETY: the calls have written texts that the caller frees.
                drop(unsafe { CString::from_raw(text) });
            }
        });
    }
}
