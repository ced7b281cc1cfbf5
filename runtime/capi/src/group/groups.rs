//! The groups of a world: in a mesh, shared by purpose, merged, found by name, and changed together.

use crate::config::Configuration;
use crate::group::Group;
use crate::memory::array;
use crate::status::{borrow, call, give, put, refused, text};
use crate::world::World;
use rcomm::{Config, GroupOptions, ProcessGroup, Rendezvous, Store, Timing};
use std::ffi::c_char;
use std::sync::Arc;
use std::time::Duration;

/// Makes a group along each of `count` named dimensions of all ranks, in row-major order: along the last dimension
/// ranks are consecutive. Writes `count` handles to `groups`, to be freed. Records and errors describe a group as `tp
/// of pp 3, dp 0`. All ranks call this with the same dimensions.
///
/// # Safety
/// `world` is a valid handle; `names` holds `count` texts that end with a zero byte, `sizes` holds `count` numbers;
/// `count` handles may be written to `groups`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_device_mesh(
    world: *const World,
    names: *const *const c_char,
    sizes: *const u32,
    count: usize,
    groups: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `names` is NULL, or holds `count` addresses that stay unchanged during the call.
        let names = unsafe { array(names, count, "the list of names")? };
        // SAFETY: `sizes` is NULL, or holds `count` values that stay unchanged during the call.
        let sizes = unsafe { array(sizes, count, "the list of sizes")? };
        if groups.is_null() {
            return Err(refused("the pointer for the handles is NULL"));
        }
        let mut dimensions = Vec::with_capacity(count);
        for (&name, &size) in names.iter().zip(sizes) {
            // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
            dimensions.push((unsafe { text(name, "the name of a dimension")? }, size));
        }
        let mesh = world.core().device_mesh(&dimensions)?;
        for (index, (name, _)) in dimensions.iter().enumerate() {
            let group = mesh.group(name).cloned();
            let group = group.ok_or_else(|| refused(format!("there is no dimension {name}")))?;
            // SAFETY: `groups` is not NULL, and the caller guarantees that `count` handles may be written there;
            // `index` is less than that.
            unsafe { give(groups.add(index), Group::new(group))? };
        }
        Ok(())
    })
}

/// Like `rcomm_new_group`, but all calls with the same list and purpose return the same group.
///
/// # Safety
/// See `rcomm_new_group`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_shared_group(
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
        let options = GroupOptions::named(unsafe { text(purpose, "the purpose")? });
        let made = world.core().shared_group(ranks, &options)?;
        // SAFETY: `group` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(group, Group::new(made)) }
    })
}

/// Makes one group of the members of several groups that do not know each other. All members of these groups call this,
/// each with its own group, the same purpose, and the number of all members. Waits for them, for the time-out of
/// `group` at most.
///
/// # Safety
/// `world` and `group` are valid handles; `purpose` is a text that ends with a zero byte; `merged` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_merge(
    world: *const World,
    group: *const Group,
    size: u32,
    purpose: *const c_char,
    merged: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        // SAFETY: `purpose` is NULL, or ends with a zero byte and stays unchanged during the call.
        let options = GroupOptions::named(unsafe { text(purpose, "the purpose")? });
        let made = world.core().merge(group, size, &options)?;
        // SAFETY: `merged` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(merged, Group::new(made)) }
    })
}

/// Makes a world of the members of several groups, which may be of different jobs: a job of its own, named by the
/// purpose, with the options of `config`. All members of these groups call this, each with its own group, the same
/// purpose, the number of all members, and the same store: that of `rcomm_config_set_store`, or else, as its client,
/// the TCPStore at `MASTER_ADDR` and `MASTER_PORT` (with `RCOMM_STORE` = `secret` if it asks for a proof of the
/// secret), which must be served by a process that outlives the new world. Waits for all members, for the time-out of
/// `group` at most, then for the time-out of the start at most. `rcomm_world_group` then gives the group of all
/// members, in which the old groups follow each other by the names of their jobs. Old worlds and groups stay open.
///
/// # Safety
/// `world`, `group` and `config` are valid handles; `purpose` is a text that ends with a zero byte; `merged` may be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_merge_remote(
    world: *const World,
    group: *const Group,
    size: u32,
    purpose: *const c_char,
    config: *const Configuration,
    merged: *mut *mut World,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        // SAFETY: the caller keeps the handle `config` alive during the call.
        let config = unsafe { borrow(config, "the configuration")? };
        // SAFETY: `purpose` is NULL, or ends with a zero byte and stays unchanged during the call.
        let purpose = unsafe { text(purpose, "the purpose")? };
        if merged.is_null() {
            return Err(refused("the pointer for the handle is NULL"));
        }
        let (options, store) = config.read()?;
        let store = match store {
            Some(store) => store,
            None => {
                let as_client = |place: Rendezvous| Rendezvous {
                    uses_agent_store: true,
                    ..place
                };
                let options = Config {
                    rendezvous: options.rendezvous.clone().map(as_client),
                    ..options.clone()
                };
                let store = rcomm::World::connect_store(&options, options.init_timeout)?;
                Arc::new(store) as Arc<dyn Store>
            }
        };
        let builder = rcomm::World::builder(options);
        let made = world
            .core()
            .merge_remote_with(group, size, purpose, store, builder)?;
        // SAFETY: `merged` is not NULL, so the caller guarantees that a handle may be written there.
        unsafe { give(merged, World::new(made)) }
    })
}

/// Makes a handle to the group with this name, to be freed; `*group` is NULL if there is none.
///
/// # Safety
/// `world` is a valid handle; `name` is a text that ends with a zero byte; `group` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_named(
    world: *const World,
    name: *const c_char,
    group: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
        let found = world.core().group_named(unsafe { text(name, "the name")? });
        match found {
            // SAFETY: `group` is NULL, which is refused, or the caller guarantees that a handle may be written there.
            Some(found) => unsafe { give(group, Group::new(found)) },
            // SAFETY: `group` is NULL, which is refused, or the caller guarantees that one value may be written there.
            None => unsafe { put(group, std::ptr::null_mut()) },
        }
    })
}

/// Divides the group into groups of `size` members with consecutive ranks, and writes this rank's group to `*part`.
/// All members call this.
///
/// # Safety
/// `group` is a valid handle; `purpose` is a text that ends with a zero byte; `part` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_new_subgroups(
    group: *const Group,
    size: u32,
    purpose: *const c_char,
    part: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        // SAFETY: `purpose` is NULL, or ends with a zero byte and stays unchanged during the call.
        let options = GroupOptions::named(unsafe { text(purpose, "the purpose")? });
        let made = group.new_subgroups(size, &options)?;
        // SAFETY: `part` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(part, Group::new(made)) }
    })
}

/// Sets the time-out of operations issued from now on, on this rank, in all groups that exist.
///
/// # Safety
/// `world` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_set_timeouts(world: *const World, timeout_ms: u64) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        world.core().set_timeouts(Duration::from_millis(timeout_ms));
        Ok(())
    })
}

/// Extends the time-out of the next operations in all groups that exist, like `rcomm_group_extend_timeout`.
///
/// # Safety
/// `world` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_extend_timeouts(world: *const World, extra_ms: u64) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        world
            .core()
            .extend_timeouts(Duration::from_millis(extra_ms));
        Ok(())
    })
}

/// Measures from now on how long the operations of all groups that exist run (`duration_ms` in records); stops
/// measuring if `on` is 0. The NCCL backend measures on the device. Fails with `RCOMM_UNSUPPORTED` if a group's backend
/// can be timed neither on the host nor by itself.
///
/// # Safety
/// `world` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_set_timing(world: *const World, on: i32) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        world.core().set_timing(timing(on))
    })
}

/// Like `rcomm_set_timing`, for one group.
///
/// # Safety
/// `group` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_set_timing(group: *const Group, on: i32) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group: &ProcessGroup = unsafe { &borrow(group, "the group")?.core };
        group.set_timing(timing(on))
    })
}

fn timing(on: i32) -> Timing {
    match on {
        0 => Timing::Off,
        _ => Timing::On,
    }
}

/// Waits until no operation that was called with a `work` is pending in any group, for `timeout_ms` at most.
///
/// # Safety
/// `world` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_wait_for_pending(world: *const World, timeout_ms: u64) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        let timeout = Duration::from_millis(timeout_ms);
        world.core().wait_for_pending(timeout)
    })
}

/// Aborts all groups, the newest first, with this reason.
///
/// # Safety
/// `world` is a valid handle; `reason` is a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_abort_groups(world: *const World, reason: *const c_char) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `reason` is NULL, or ends with a zero byte and stays unchanged during the call.
        let reason = unsafe { text(reason, "the reason")? };
        world.core().abort_groups(reason);
        Ok(())
    })
}
