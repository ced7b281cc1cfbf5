//! The configuration of a world.

use crate::status::{borrow, call, free, give, refused, text};
use crate::store::{CallerStore, StoreCalls};
use crate::world::World;
use rcomm::backend::nccl::NcclOptions;
use rcomm::{Config, Rendezvous, Result, Store};
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Options of a world, and the store through which its ranks find each other.
#[derive(Default)]
pub struct Configuration(Mutex<Choices>);

#[derive(Default)]
struct Choices {
    /// The values by the environment variables that they replace.
    values: HashMap<String, String>,
    /// The caller's store.
    store: Option<Arc<dyn Store>>,
}

impl Configuration {
    /// The options, with this process's place in the job, and the caller's store, if one was set. What was not set
    /// comes from the environment.
    pub(crate) fn read(&self) -> Result<(Config, Option<Arc<dyn Store>>)> {
        let choices = self.choices();
        let look_up = |name: &str| look_up(&choices.values, name);
        let options = Config {
            rendezvous: Some(Rendezvous::from_environment(look_up)?),
            ..options_of(look_up)?
        };
        Ok((options, choices.store.clone()))
    }

    /// The caller's store, if one was set.
    pub(crate) fn store(&self) -> Option<Arc<dyn Store>> {
        self.choices().store.clone()
    }

    fn choices(&self) -> MutexGuard<'_, Choices> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a configuration, to be freed with `rcomm_config_free`. Options that are not set in it come from the
/// environment, which is read when a world is made with it.
///
/// # Safety
/// `config` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_config_new(config: *mut *mut Configuration) -> i32 {
    // SAFETY: `config` is NULL, which is refused, or the caller guarantees that a handle may be written there.
    call(|| unsafe { give(config, Configuration::default()) })
}

/// Sets an option by the name of its environment variable (`RCOMM_RING_DIR`, `RCOMM_TIMEOUT_MS`, `RANK`,
/// `MASTER_ADDR` and so on), in place of that variable. An empty text counts as a variable that is not set. A value
/// that the option cannot have, and a name that begins with `RCOMM_` and that no option has, are
/// `RCOMM_INVALID_ARGUMENT`.
///
/// With `TORCHELASTIC_USE_AGENT_STORE` = `True` all ranks are clients of a store that the launcher or another process
/// serves at `MASTER_ADDR` and `MASTER_PORT`; otherwise rank 0 serves a store there.
///
/// # Safety
/// `config` is a valid handle; `name` and `value` are texts that end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_config_set(
    config: *const Configuration,
    name: *const c_char,
    value: *const c_char,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `config` alive during the call.
        let config = unsafe { borrow(config, "the configuration")? };
        // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
        let name = unsafe { text(name, "the name of the option")? };
        // SAFETY: `value` is NULL, or ends with a zero byte and stays unchanged during the call.
        let value = unsafe { text(value, "the value of the option")? };
        if name.starts_with("RCOMM_") && !is_option(name)? {
            return Err(refused(format!("no option of the runtime is named {name}")));
        }
        let mut choices = config.choices();
        let before = choices.values.insert(name.to_owned(), value.to_owned());
        // A wrong value is refused here, where the caller still knows which one it was.
        if let Err(error) = options_of(|name| look_up(&choices.values, name)) {
            match before {
                Some(before) => choices.values.insert(name.to_owned(), before),
                None => choices.values.remove(name),
            };
            return Err(error);
        }
        Ok(())
    })
}

/// Uses the store of the caller, which `calls` describes, in place of one at `MASTER_ADDR` and `MASTER_PORT`. The store
/// must be the same on all ranks, and must answer until the world is shut down.
///
/// # Safety
/// `config` is a valid handle. The functions of `calls` may be called with its `context`, on any thread and on
/// several at once, until `release` is called with `context`: once, when neither the configuration nor a world uses the
/// store any more, or during this call if it fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_config_set_store(
    config: *const Configuration,
    calls: StoreCalls,
) -> i32 {
    call(|| {
        // SAFETY: the caller lets the functions be called until the store is dropped, which calls `release`.
        let store = unsafe { CallerStore::new(calls) }?;
        // SAFETY: the caller keeps the handle `config` alive during the call.
        let config = unsafe { borrow(config, "the configuration")? };
        config.choices().store = Some(Arc::new(store));
        Ok(())
    })
}

/// Frees a configuration; worlds that were made with it stay. NULL has no effect.
///
/// # Safety
/// `config` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_config_free(config: *mut Configuration) {
    // SAFETY: `config` is NULL or a handle of this type that the caller gives up.
    unsafe { free(config) }
}

/// Joins the job that the configuration describes. Returns once all ranks have joined.
///
/// # Safety
/// `config` is a valid handle; `world` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_init_with(
    config: *const Configuration,
    world: *mut *mut World,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `config` alive during the call.
        let config = unsafe { borrow(config, "the configuration")? };
        if world.is_null() {
            return Err(refused("the pointer for the handle is NULL"));
        }
        let (options, store) = config.read()?;
        let mut builder = rcomm::World::builder(options);
        if let Some(store) = store {
            builder = builder.store(store);
        }
        // SAFETY: `world` is not NULL, so the caller guarantees that a handle may be written there.
        unsafe { give(world, World::new(builder.init()?)) }
    })
}

/// The options of the runtime and of its NCCL backend, by their variables.
fn options_of(look_up: impl Fn(&str) -> Option<String>) -> Result<Config> {
    let mut options = Config::from_lookup(&look_up)?;
    options
        .backend_options
        .set(NcclOptions::from_lookup(&look_up)?);
    Ok(options)
}

/// Whether an option has a variable of this name.
fn is_option(name: &str) -> Result<bool> {
    let is_asked = Cell::new(false);
    options_of(|asked| {
        is_asked.set(is_asked.get() || asked == name);
        None
    })?;
    Ok(is_asked.get())
}

/// The value of a variable: the one that was set, else that of the environment. An empty text counts as not set.
fn look_up(values: &HashMap<String, String>, name: &str) -> Option<String> {
    match values.get(name) {
        Some(value) => Some(value.clone()).filter(|value| !value.is_empty()),
        None => std::env::var(name).ok(),
    }
}
