//! What a running job is asked and told: the program's handlers on the rank's endpoint, its waits, the debug level.

use crate::code::RCOMM_OK;
use crate::status::{borrow, call, free, give, put, refused, text};
use crate::store::Value;
use crate::world::World;
use rcomm::config::DebugLevel;
use rcomm::{HandlerParameters, OwnedWaiting};
use std::ffi::{CString, c_char, c_void};

type Answer = unsafe extern "C" fn(
    context: *mut c_void,
    names: *const *const c_char,
    values: *const *const c_char,
    count: usize,
    answer: *const Value,
) -> i32;

/// The argument of C's functions, until it is released.
struct Context {
    release: Option<unsafe extern "C" fn(context: *mut c_void)>,
    context: *mut c_void,
}

// SAFETY: only C's functions use the pointer, and the caller of `rcomm_handle` allows that on any thread.
unsafe impl Send for Context {}
// SAFETY: as above, also at the same time.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the caller of `rcomm_handle` allows this call, once, when no other call is made any more.
            unsafe { release(self.context) }
        }
    }
}

struct Handler {
    answer: Answer,
    context: Context,
}

impl Handler {
    fn call(&self, parameters: &HandlerParameters) -> Result<String, String> {
        let c_text = |text: &String| {
            CString::new(text.as_bytes()).map_err(|_| "a parameter has a zero byte\n".to_owned())
        };
        let names: Vec<CString> = parameters.keys().map(c_text).collect::<Result<_, _>>()?;
        let values: Vec<CString> = parameters.values().map(c_text).collect::<Result<_, _>>()?;
        let pointers = |texts: &[CString]| -> Vec<*const c_char> {
            texts.iter().map(|text| text.as_ptr()).collect()
        };
        let (name_list, value_list) = (pointers(&names), pointers(&values));
        let value = Value::empty();
        // SAFETY: the caller of `rcomm_handle` allows this call with its context; all else is valid until it returns.
        let code = unsafe {
            (self.answer)(
                self.context.context,
                name_list.as_ptr(),
                value_list.as_ptr(),
                names.len(),
                &raw const value,
            )
        };
        let text = value.take().unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        match code {
            RCOMM_OK => Ok(text),
            _ => Err(text),
        }
    }
}

/// Lets this rank's endpoint answer `POST /handlers/NAME?key=value` by a function of the program's: it gets the `count`
/// pairs of the query as texts, in the order of their names, and puts a text into `answer` with `rcomm_value_set`. It
/// returns 0, or another number if it failed: the text then says why. It is called on a thread of the endpoint, which
/// waits for it at the end of the world: it must not wait for other ranks, which may be stuck. `release(context)` is
/// called once, when the function is no longer called; `release` may be NULL.
///
/// The name has 1 to 64 lower-case letters, digits, `-` and `_`, and `timeouts` is taken. `RCOMM_UNSUPPORTED` if this
/// rank has no endpoint. After an error, `release` was called. A world that was made anew by `rcomm_grow` has no
/// handlers of the program's.
///
/// # Safety
/// `world` is a valid handle; `name` is a text that ends with a zero byte; `handler` and `release` may be called with
/// `context` on any thread, `handler` on several at once, until `release` was called or the world has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_handle(
    world: *const World,
    name: *const c_char,
    handler: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            names: *const *const c_char,
            values: *const *const c_char,
            count: usize,
            answer: *const Value,
        ) -> i32,
    >,
    release: Option<unsafe extern "C" fn(context: *mut c_void)>,
    context: *mut c_void,
) -> i32 {
    call(|| {
        // It is dropped after every error, which calls `release`.
        let context = Context { release, context };
        let answer = handler.ok_or_else(|| refused("the function that answers is NULL"))?;
        let handler = Handler { answer, context };
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
        let name = unsafe { text(name, "the name")? };
        let answer = move |parameters: &HandlerParameters| handler.call(parameters);
        world.core().handle(name, answer)
    })
}

/// A wait of the program's, which is counted from its begin to its end.
pub struct Wait {
    #[allow(dead_code, reason = "dropped when the wait ends")]
    waiting: OwnedWaiting,
}

/// Counts a wait of the program's, for a data loader, say, or for a disk, from now until `rcomm_wait_end`:
/// `rcomm_waits` and the rank's endpoint show it under this name. The name has 1 to 64 lower-case letters, digits, `-`,
/// `_` and `.`, and does not begin with `rcomm.`; a world has 256 names at most. The wait may end on another thread.
///
/// # Safety
/// `world` is a valid handle; `name` is a text that ends with a zero byte; `wait` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_wait_begin(
    world: *const World,
    name: *const c_char,
    wait: *mut *mut Wait,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
        let name = unsafe { text(name, "the name")? };
        let waiting = world.core().wait_counter(name)?.begin_owned();
        // SAFETY: `wait` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(wait, Wait { waiting }) }
    })
}

/// Ends the wait and frees the handle. NULL has no effect.
///
/// # Safety
/// `wait` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_wait_end(wait: *mut Wait) {
    // SAFETY: `wait` is NULL or a handle of this type that the caller gives up.
    unsafe { free(wait) }
}

/// Sets whether ranks compare what they issue (1) or not (0) in the groups that are made from now on. All members of a
/// group must have set the same when they make it.
///
/// # Safety
/// `world` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_set_debug_level(world: *const World, level: i32) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        let level = match level {
            0 => DebugLevel::Off,
            1 => DebugLevel::Detail,
            _ => return Err(refused(format!("no debug level has the number {level}"))),
        };
        world.core().set_debug_level(level);
        Ok(())
    })
}

/// Writes 1 if ranks compare what they issue in the groups that are made from now on, else 0.
///
/// # Safety
/// `world` is a valid handle; `level` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_debug_level(world: *const World, level: *mut i32) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        let is_detail = world.core().debug_level() == DebugLevel::Detail;
        // SAFETY: `level` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(level, i32::from(is_detail)) }
    })
}
