//! Worlds.

use crate::group::Group;
use crate::memory::array;
use crate::status::{borrow, call, consume, free, give, text};
use rcomm::{Config, GroupOptions, Rendezvous};
use std::ffi::c_char;
use std::time::Duration;

/// This process's membership in a job.
pub struct World(pub(crate) rcomm::World);

/// Joins the job that the environment describes (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, or the variables
/// of Slurm and MPI launchers; options from `RCOMM_*`). Returns once all ranks have joined.
///
/// # Safety
/// `world` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_init(world: *mut *mut World) -> i32 {
    call(|| {
        let made = rcomm::World::init(Config::from_environment()?)?;
        // SAFETY: `world` is NULL, which is refused, or the caller lets a handle be written there.
        unsafe { give(world, World(made)) }
    })
}

/// Joins the job at this address, without reading the environment. `timeout_ms` is the time-out of operations; 0 = the
/// default.
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
        // SAFETY: `world` is NULL, which is refused, or the caller lets a handle be written there.
        unsafe { give(world, World(made)) }
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
            // SAFETY: `rank` is not NULL, so the caller lets this function write to it.
            unsafe { rank.write(world.0.rank()) };
        }
        if !size.is_null() {
            // SAFETY: `size` is not NULL, so the caller lets this function write to it.
            unsafe { size.write(world.0.size()) };
        }
        Ok(())
    })
}

/// Makes a handle to the group of all ranks. Free it with `rcomm_group_free`.
///
/// # Safety
/// `world` is a valid handle; `group` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_world_group(world: *const World, group: *mut *mut Group) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `group` is NULL, which is refused, or the caller lets a handle be written there.
        unsafe { give(group, Group(world.0.group().clone())) }
    })
}

/// Makes a group of these ranks of the world, in this order, for this purpose. Its members call this, and no other rank
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
        let made = world.0.new_group(ranks, &GroupOptions::named(purpose))?;
        // SAFETY: `group` is NULL, which is refused, or the caller lets a handle be written there.
        unsafe { give(group, Group(made)) }
    })
}

/// Flushes and closes all groups and frees the world. All ranks call it, after they have freed their groups and works.
///
/// # Safety
/// `world` is a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_shutdown(world: *mut World) -> i32 {
    call(|| {
        // SAFETY: `world` is NULL or a handle of this type that the caller gives up.
        let world = unsafe { consume(world, "the world")? };
        world.0.shutdown()
    })
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
