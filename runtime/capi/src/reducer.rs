//! Reducers: gradients of a data-parallel training, averaged in buckets.

use crate::group::Group;
use crate::memory::{array, dtype_of};
use crate::object::give_json;
use crate::status::{borrow, call, free, give, put, refused, text};
use rcomm::data_parallel::{
    BucketSizes, Gradient, Parameter, Reducer as CoreReducer, ReducerOptions, UnusedParameters,
};
use rcomm::{DType, ProcessGroup, Result, bf16, f16};
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Averages the gradients of a model over the ranks of a group.
pub struct Reducer(Mutex<Box<dyn AnyReducer>>);

impl Reducer {
    fn core(&self) -> MutexGuard<'_, Box<dyn AnyReducer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reducer of any element type.
trait AnyReducer: Send {
    /// The address and the number of elements of a parameter's gradient.
    fn gradient(&mut self, parameter: usize) -> Result<(*mut c_void, usize)>;
    fn ready(&mut self, parameter: usize) -> Result<()>;
    fn finish(&mut self) -> Result<()>;
    /// As `gradient`, of the average; `None` if no rank has used the parameter.
    fn average(&mut self, parameter: usize) -> Option<(*mut c_void, usize)>;
    fn begin_forward(&mut self);
    fn regroup(&mut self, group: &ProcessGroup) -> Result<()>;
    fn statistics(&self) -> serde_json::Value;
}

impl<T: Gradient> AnyReducer for CoreReducer<T> {
    fn gradient(&mut self, parameter: usize) -> Result<(*mut c_void, usize)> {
        let part = self.gradient_mut(parameter)?;
        Ok((part.as_mut_ptr().cast(), part.len()))
    }

    fn ready(&mut self, parameter: usize) -> Result<()> {
        self.mark_ready(parameter)
    }

    fn finish(&mut self) -> Result<()> {
        self.finish_in_place()
    }

    fn average(&mut self, parameter: usize) -> Option<(*mut c_void, usize)> {
        let part = self.average_mut(parameter)?;
        Some((part.as_mut_ptr().cast(), part.len()))
    }

    fn begin_forward(&mut self) {
        Self::begin_forward(self);
    }

    fn regroup(&mut self, group: &ProcessGroup) -> Result<()> {
        Self::regroup(self, group)
    }

    fn statistics(&self) -> serde_json::Value {
        let step = Self::statistics(self);
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let buckets = step.buckets.iter().map(|bucket| {
            serde_json::json!({
                "parameters": bucket.parameters,
                "bytes": bucket.bytes,
                "ready_ms": ms(bucket.ready),
                "sent_ms": ms(bucket.sent),
                "communication_ms": ms(bucket.communication),
                "exposed_ms": ms(bucket.exposed),
            })
        });
        serde_json::json!({
            "step": step.step,
            "forward_ms": ms(step.forward),
            "backward_ms": ms(step.backward),
            "communication_ms": ms(step.communication),
            "hidden_ms": ms(step.hidden()),
            "exposed_ms": ms(step.exposed),
            "buckets": buckets.collect::<Vec<_>>(),
        })
    }
}

fn new_reducer<T: Gradient>(
    group: &ProcessGroup,
    parameters: Vec<Parameter>,
    buckets: BucketSizes,
    unused: UnusedParameters,
) -> Result<Box<dyn AnyReducer>> {
    let options = ReducerOptions {
        buckets,
        unused,
        ..ReducerOptions::default()
    };
    let reducer = CoreReducer::<T>::new(group, parameters, options)?;
    Ok(Box::new(reducer))
}

/// Makes a reducer for a model with `count` parameters: their names, and their numbers of elements. All have the
/// element type `dtype`: RCOMM_F32, RCOMM_F64, RCOMM_F16 or RCOMM_BF16. Gradients are averaged in buckets of
/// `bucket_bytes` at most, the first of `first_bytes`; 0 = the defaults. If `find_unused` is not 0, parameters may have
/// no gradient in a step. Waits until all ranks of the group have called this; give the reducer a group of its own.
///
/// # Safety
/// `group` is a valid handle; `names` holds `count` texts that end with a zero byte, `lens` holds `count` numbers;
/// `reducer` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_new(
    group: *const Group,
    names: *const *const c_char,
    lens: *const u64,
    count: usize,
    dtype: u8,
    first_bytes: usize,
    bucket_bytes: usize,
    find_unused: i32,
    reducer: *mut *mut Reducer,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        // SAFETY: `names` is NULL, or holds `count` addresses that stay unchanged during the call.
        let names = unsafe { array(names, count, "the list of names")? };
        // SAFETY: `lens` is NULL, or holds `count` values that stay unchanged during the call.
        let lens = unsafe { array(lens, count, "the list of lengths")? };
        let mut parameters = Vec::with_capacity(count);
        for (&name, &len) in names.iter().zip(lens) {
            // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
            let name = unsafe { text(name, "the name of a parameter")? };
            parameters.push(Parameter::new(name, &[len]));
        }
        let mut sizes = BucketSizes::default();
        for (size, given) in [
            (&mut sizes.first, first_bytes),
            (&mut sizes.rest, bucket_bytes),
        ] {
            if given > 0 {
                *size = given;
            }
        }
        let unused = match find_unused {
            0 => UnusedParameters::Refuse,
            _ => UnusedParameters::Find,
        };
        let of_type = match dtype_of(dtype)? {
            DType::F32 => new_reducer::<f32>,
            DType::F64 => new_reducer::<f64>,
            DType::F16 => new_reducer::<f16>,
            DType::Bf16 => new_reducer::<bf16>,
            other => return Err(refused(format!("there are no gradients of {other}"))),
        };
        let core = of_type(group, parameters, sizes, unused)?;
        if reducer.is_null() {
            return Err(refused("the pointer for the handle is NULL"));
        }
        // SAFETY: `reducer` is not NULL, so the caller lets a handle be written there.
        unsafe { give(reducer, Reducer(Mutex::new(core))) }
    })
}

/// Writes the address and the number of elements of a parameter's gradient in this step: a part of the memory that is
/// sent. It holds zeros at first. Write the gradient there before the next call with this reducer.
///
/// # Safety
/// `reducer` is a valid handle; `gradient` and `len` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_gradient(
    reducer: *const Reducer,
    parameter: usize,
    gradient: *mut *mut c_void,
    len: *mut usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        let (at, elements) = reducer.core().gradient(parameter)?;
        // SAFETY: `gradient` is NULL, which is refused, or the caller lets one address be written there.
        unsafe { put(gradient, at)? };
        // SAFETY: `len` is NULL, which is refused, or the caller lets one value be written there.
        unsafe { put(len, elements) }
    })
}

/// Says that a parameter's gradient is complete. Sends its bucket if that is full now, and all before it were sent;
/// does not wait for other ranks.
///
/// # Safety
/// `reducer` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_ready(reducer: *const Reducer, parameter: usize) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        reducer.core().ready(parameter)
    })
}

/// Waits for the averages of this step.
///
/// # Safety
/// `reducer` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_finish(reducer: *const Reducer) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        reducer.core().finish()
    })
}

/// Writes the address and the number of elements of a parameter's average in the last step; NULL and 0 if no rank has
/// used the parameter. The average may be read and changed until the next call with this reducer.
///
/// # Safety
/// `reducer` is a valid handle; `average` and `len` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_average(
    reducer: *const Reducer,
    parameter: usize,
    average: *mut *mut c_void,
    len: *mut usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        let part = reducer.core().average(parameter);
        let (at, elements) = part.unwrap_or((std::ptr::null_mut(), 0));
        // SAFETY: `average` is NULL, which is refused, or the caller lets one address be written there.
        unsafe { put(average, at)? };
        // SAFETY: `len` is NULL, which is refused, or the caller lets one value be written there.
        unsafe { put(len, elements) }
    })
}

/// Notes that the forward pass of the next step begins, for the statistics.
///
/// # Safety
/// `reducer` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_begin_forward(reducer: *const Reducer) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        reducer.core().begin_forward();
        Ok(())
    })
}

/// Writes to `*json` how long the last step took, in milliseconds: forward, backward, communication, how much of that
/// was hidden and exposed, and each bucket.
///
/// # Safety
/// `reducer` is a valid handle; `json` may be written, and its text is freed with `rcomm_text_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_statistics(
    reducer: *const Reducer,
    json: *mut *mut c_char,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        let statistics = reducer.core().statistics();
        // SAFETY: `json` is NULL, which is refused, or the caller lets one address be written there.
        unsafe { give_json(json, &statistics) }
    })
}

/// Goes on in another group, after ranks were lost or came: a step that is not finished is given up. All ranks of
/// `group` call this; it waits for them.
///
/// # Safety
/// `reducer` and `group` are valid handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_regroup(
    reducer: *const Reducer,
    group: *const Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        reducer.core().regroup(group)
    })
}

/// Frees a reducer. NULL has no effect.
///
/// # Safety
/// `reducer` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_free(reducer: *mut Reducer) {
    // SAFETY: `reducer` is NULL or a handle of this type that the caller gives up.
    unsafe { free(reducer) }
}
