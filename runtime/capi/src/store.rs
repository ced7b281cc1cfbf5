//! Stores of the caller: maps that C's functions read and write.

use crate::status::{borrow, call, refused};
use rcomm::{Error, ErrorKind, Result, Store};
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long each further key of a list is looked for once the time for the whole list has passed.
const MIN_KEY_TIMEOUT: Duration = Duration::from_millis(1);
/// How many times `append` tries to set the key: a try fails if another rank has changed the key meanwhile.
const APPEND_TRIES: usize = 10_000;
/// Maximum size in bytes of a value, or of a handler's answer.
const MAX_VALUE_BYTES: usize = 64 << 20;

/// The place for the value that a function of a store has read, or for a handler's answer: see `rcomm_value_set`.
pub struct Value(Mutex<Option<Vec<u8>>>);

impl Value {
    pub(crate) fn empty() -> Self {
        Self(Mutex::default())
    }

    pub(crate) fn take(&self) -> Option<Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The functions of a store of the caller, and the argument that each of them gets first. Keys are texts that end with
/// a zero byte; values are any bytes. A function returns 0, or another number if the store failed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StoreCalls {
    /// Passed to each function.
    pub context: *mut c_void,
    /// Sets a key.
    pub set: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            value: *const u8,
            length: usize,
        ) -> i32,
    >,
    /// Waits until a key is there, for `timeout_ms` at most (0 = does not wait), and puts the key's value into `value`;
    /// nothing, if the key is not there by then.
    pub get: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            timeout_ms: u64,
            value: *const Value,
        ) -> i32,
    >,
    /// Adds to a counter (0 if the key is not there) and writes the counter's new value. A counter is stored as a
    /// decimal text.
    pub add: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            delta: i64,
            sum: *mut i64,
        ) -> i32,
    >,
    /// In one step: sets a key to `desired` if it holds `expected`, or if it is not there and `expected` is empty; puts
    /// the value that the key then holds into `value`, or nothing if the key is not there.
    pub compare_set: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            expected: *const u8,
            expected_length: usize,
            desired: *const u8,
            desired_length: usize,
            value: *const Value,
        ) -> i32,
    >,
    /// Removes a key; writes 1 to `*was_there` if the key was there, else 0.
    pub remove: Option<
        unsafe extern "C" fn(context: *mut c_void, key: *const c_char, was_there: *mut i32) -> i32,
    >,
    /// Called once, when no function is called any more. May be NULL.
    pub release: Option<unsafe extern "C" fn(context: *mut c_void)>,
}

/// Puts `length` bytes, which are copied, into the value that a function of a store, or a handler, was given.
///
/// # Safety
/// `value` is the pointer that the function got, and the function has not returned; `length` bytes lie at `bytes`,
/// which may be NULL if there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_value_set(
    value: *const Value,
    bytes: *const u8,
    length: usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller of the function keeps the value alive until the function returns.
        let value = unsafe { borrow(value, "the value")? };
        if length > MAX_VALUE_BYTES {
            return Err(refused(format!(
                "the value has {length} bytes, and may have {MAX_VALUE_BYTES} at most"
            )));
        }
        // SAFETY: `bytes` is NULL, or holds `length` bytes that stay unchanged during the call.
        let bytes = unsafe { crate::memory::array(bytes, length, "the value's bytes")? };
        *value.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes.to_vec());
        Ok(())
    })
}

/// A store of the caller.
pub(crate) struct CallerStore(StoreCalls);

// SAFETY: the caller of `new` lets the functions be called with their context on any thread.
unsafe impl Send for CallerStore {}
// SAFETY: the caller of `new` lets several threads call the functions at once.
unsafe impl Sync for CallerStore {}

impl Drop for CallerStore {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            // SAFETY: the caller of `new` allows this call, after which no function is called any more.
            unsafe { release(self.0.context) }
        }
    }
}

impl CallerStore {
    /// A store of these functions. If one of them is NULL, calls `release` and fails.
    ///
    /// # Safety
    /// The functions may be called with their context, on any thread and on several at once, until this is dropped,
    /// which calls `release`.
    pub(crate) unsafe fn new(calls: StoreCalls) -> Result<Self> {
        // Dropped on an error, so that `release` is called then, too.
        let store = Self(calls);
        let named = [
            ("set", calls.set.is_some()),
            ("get", calls.get.is_some()),
            ("add", calls.add.is_some()),
            ("compare_set", calls.compare_set.is_some()),
            ("remove", calls.remove.is_some()),
        ];
        match named.iter().find(|(_, is_there)| !is_there) {
            Some((name, _)) => Err(refused(format!("the store's function {name} is NULL"))),
            None => Ok(store),
        }
    }

    /// Returns the value of a key; `None` if the key does not appear within this time.
    fn look(&self, key: &str, within: Duration) -> Result<Option<Vec<u8>>> {
        let (name, value) = (c_key(key)?, Value(Mutex::default()));
        let ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: the caller of `new` allows the call; the key and the value outlive it.
        let code = unsafe {
            self.0
                .get
                .map(|get| get(self.0.context, name.as_ptr(), ms, &raw const value))
        };
        self.check_code("get", key, code)?;
        Ok(taken(value))
    }

    /// Returns an error unless a function of the store returned 0.
    fn check_code(&self, function: &str, key: &str, code: Option<i32>) -> Result<()> {
        match code {
            Some(0) => Ok(()),
            other => Err(Error::new(
                ErrorKind::Store,
                format!(
                    "the caller's store failed: {function} of the key {key:?} returned {}",
                    other.unwrap_or(-1)
                ),
            )),
        }
    }
}

/// The key as a text of C; an error if it holds a zero byte.
fn c_key(key: &str) -> Result<CString> {
    CString::new(key).map_err(|_| refused(format!("the key {key:?} holds a zero byte")))
}

/// The bytes that a function of the store has put into the value, if it has.
fn taken(value: Value) -> Option<Vec<u8>> {
    value.0.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The error for keys that did not appear in time.
fn absent(keys: &[&str], within: Duration) -> Error {
    let keys: Vec<String> = keys.iter().map(|key| format!("\"{key}\"")).collect();
    let (keys, ms) = (keys.join(", "), within.as_millis());
    let message = format!("the caller's store did not have {keys} within {ms} ms");
    Error::new(ErrorKind::Timeout, message)
}

impl Store for CallerStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let name = c_key(key)?;
        // SAFETY: the caller of `new` allows the call; key and bytes outlive it.
        let code = unsafe {
            self.0
                .set
                .map(|set| set(self.0.context, name.as_ptr(), value.as_ptr(), value.len()))
        };
        self.check_code("set", key, code)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let value = self.look(key, timeout)?;
        value.ok_or_else(|| absent(&[key], timeout))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let (name, mut sum) = (c_key(key)?, 0);
        // SAFETY: the caller of `new` allows the call; key and sum outlive it.
        let code = unsafe {
            self.0
                .add
                .map(|add| add(self.0.context, name.as_ptr(), delta, &raw mut sum))
        };
        self.check_code("add", key, code)?;
        Ok(sum)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let (name, value) = (c_key(key)?, Value(Mutex::default()));
        // SAFETY: the caller of `new` allows the call; its arguments outlive it.
        let code = unsafe {
            self.0.compare_set.map(|compare_set| {
                compare_set(
                    self.0.context,
                    name.as_ptr(),
                    expected.as_ptr(),
                    expected.len(),
                    desired.as_ptr(),
                    desired.len(),
                    &raw const value,
                )
            })
        };
        self.check_code("compare_set", key, code)?;
        Ok(taken(value).unwrap_or_else(|| expected.to_vec()))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.multi_get(keys, timeout).map(drop)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        for key in keys {
            if self.look(key, Duration::ZERO)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        let (name, mut was_there) = (c_key(key)?, 0);
        // SAFETY: the caller of `new` allows the call; key and flag outlive it.
        let code = unsafe {
            self.0
                .remove
                .map(|remove| remove(self.0.context, name.as_ptr(), &raw mut was_there))
        };
        self.check_code("remove", key, code)?;
        Ok(was_there != 0)
    }

    fn num_keys(&self) -> Result<u64> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "a store of the caller does not count its keys",
        ))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "a store of the caller does not list its keys",
        ))
    }

    /// The caller's store does not say which rank has set a key: of two ranks that append equal values at once, one
    /// value may be lost. What the runtime appends names the group that it is from, and no two groups append the same.
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let mut before = self.look(key, Duration::ZERO)?.unwrap_or_default();
        for _ in 0..APPEND_TRIES {
            let after = [&before[..], value].concat();
            let held = self.compare_set(key, &before, &after)?;
            if held == after {
                return Ok(());
            }
            before = held;
        }
        Err(Error::new(
            ErrorKind::Store,
            format!("the key {key:?} of the caller's store changed too often to append to it"),
        ))
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let started = Instant::now();
        let value_of = |&key: &&str| {
            let left = timeout
                .saturating_sub(started.elapsed())
                .max(MIN_KEY_TIMEOUT);
            self.look(key, left)?.ok_or_else(|| absent(&[key], timeout))
        };
        keys.iter().map(value_of).collect()
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs
            .iter()
            .try_for_each(|(key, value)| self.set(key, value))
    }

    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        let done = format!("{key}/done");
        if self.add(key, 1)? == i64::from(world_size) {
            self.set(&done, b"1")?;
        }
        self.wait(&[&done], timeout)
    }
}
