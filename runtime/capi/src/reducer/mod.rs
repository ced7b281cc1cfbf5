//! Reducers: gradients of a data-parallel training, averaged in buckets.

mod options;

use crate::group::Group;
use crate::memory::{array, dtype_of, input, kept_by_caller};
use crate::object::give_json;
use crate::sparse::Sparse;
use crate::status::{borrow, call, free, give, put, refused, text};
use options::GivenOptions;
use rcomm::data_parallel::{Gradient, Joined, Parameter, Reducer as CoreReducer, UnusedParameters};
use rcomm::{Buffer, DType, ProcessGroup, Result, SparseTensor, bf16, f16};
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Averages the gradients of a model over the ranks of a group.
pub struct Reducer {
    core: Mutex<Box<dyn AnyReducer>>,
    dtype: DType,
}

impl Reducer {
    fn core(&self) -> MutexGuard<'_, Box<dyn AnyReducer>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reducer of any element type.
trait AnyReducer: Send {
    /// The address and the number of elements of a parameter's gradient.
    fn gradient(&mut self, parameter: usize) -> Result<(*mut c_void, usize)>;
    /// See `rcomm_reducer_ready`.
    fn ready(&mut self, parameter: usize) -> Result<()>;
    /// How many elements a row of a parameter has: the product of all its dimensions but the first.
    fn row(&self, parameter: usize) -> Result<usize>;
    /// See `rcomm_reducer_ready_sparse`. The values have the reducer's element type.
    fn ready_sparse(
        &mut self,
        parameter: usize,
        indices: Vec<i64>,
        values: &Buffer<'static>,
    ) -> Result<()>;
    /// See `rcomm_reducer_finish`.
    fn finish(&mut self) -> Result<()>;
    /// Like `gradient`, but of the average; `None` if no rank has used the parameter.
    fn average(&mut self, parameter: usize) -> Option<(*mut c_void, usize)>;
    /// The average of a sparse parameter's gradient; `None` if no rank has used the parameter.
    fn sparse_average(&self, parameter: usize) -> Option<Sparse>;
    /// See `rcomm_reducer_join`.
    fn join(&mut self) -> Result<Joined>;
    /// See `rcomm_reducer_begin_forward`.
    fn begin_forward(&mut self);
    /// See `rcomm_reducer_regroup`.
    fn regroup(&mut self, group: &ProcessGroup) -> Result<()>;
    /// The object that `rcomm_reducer_statistics` writes.
    fn statistics(&self) -> serde_json::Value;
}

/// A reducer of this element type, and the shapes of its parameters.
struct Typed<T> {
    core: CoreReducer<T>,
    shapes: Vec<Vec<u64>>,
}

impl<T: Gradient> Typed<T> {
    fn shape(&self, parameter: usize) -> Result<&[u64]> {
        let shape = self.shapes.get(parameter).map(Vec::as_slice);
        shape.ok_or_else(|| {
            let count = self.shapes.len();
            refused(format!("there is no parameter {parameter} of {count}"))
        })
    }
}

impl<T: Gradient> AnyReducer for Typed<T> {
    fn gradient(&mut self, parameter: usize) -> Result<(*mut c_void, usize)> {
        let part = self.core.gradient_mut(parameter)?;
        Ok((part.as_mut_ptr().cast(), part.len()))
    }

    fn ready(&mut self, parameter: usize) -> Result<()> {
        self.core.mark_ready(parameter)
    }

    fn row(&self, parameter: usize) -> Result<usize> {
        let rest = self.shape(parameter)?.get(1..).unwrap_or_default();
        // The reducer has checked that the whole shape fits in memory.
        Ok(rest.iter().product::<u64>() as usize)
    }

    fn ready_sparse(
        &mut self,
        parameter: usize,
        indices: Vec<i64>,
        values: &Buffer<'static>,
    ) -> Result<()> {
        let shape = self.shape(parameter)?.to_vec();
        let values = values.as_slice::<T>();
        let values = values.ok_or_else(|| refused("the values are misaligned"))?;
        let rows = SparseTensor::new(shape, 1, indices, values.to_vec())?;
        self.core.ready_sparse(parameter, rows)
    }

    fn finish(&mut self) -> Result<()> {
        self.core.finish_in_place()
    }

    fn average(&mut self, parameter: usize) -> Option<(*mut c_void, usize)> {
        let part = self.core.average_mut(parameter)?;
        Some((part.as_mut_ptr().cast(), part.len()))
    }

    fn sparse_average(&self, parameter: usize) -> Option<Sparse> {
        self.core.sparse_average(parameter).map(Sparse::of)
    }

    fn join(&mut self) -> Result<Joined> {
        self.core.join()
    }

    fn begin_forward(&mut self) {
        self.core.begin_forward();
    }

    fn regroup(&mut self, group: &ProcessGroup) -> Result<()> {
        self.core.regroup(group)
    }

    fn statistics(&self) -> serde_json::Value {
        let step = self.core.statistics();
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
    given: GivenOptions,
) -> Result<Box<dyn AnyReducer>> {
    let shapes = parameters
        .iter()
        .map(|parameter| parameter.shape.clone())
        .collect();
    let options = given.options::<T>(&parameters)?;
    let core = CoreReducer::<T>::new(group, parameters, options)?;
    Ok(Box::new(Typed { core, shapes }))
}

/// Makes a reducer of this element type.
///
/// # Safety
/// `group` is a valid handle; `reducer` may be written.
unsafe fn make(
    group: *const Group,
    parameters: Vec<Parameter>,
    dtype: u8,
    given: GivenOptions,
    reducer: *mut *mut Reducer,
) -> Result<()> {
    // SAFETY: the caller keeps the handle `group` alive during the call.
    let group = unsafe { &borrow(group, "the group")?.core };
    let dtype = dtype_of(dtype)?;
    let new_of_type = match dtype {
        DType::F32 => new_reducer::<f32>,
        DType::F64 => new_reducer::<f64>,
        DType::F16 => new_reducer::<f16>,
        DType::Bf16 => new_reducer::<bf16>,
        other => {
            return Err(refused(format!(
                "gradients are of type f32, f64, f16 or bf16, not {other}"
            )));
        }
    };
    if reducer.is_null() {
        return Err(refused("the pointer for the handle is NULL"));
    }
    let core = Mutex::new(new_of_type(group, parameters, given)?);
    // SAFETY: `reducer` is not NULL, so the caller guarantees that a handle may be written there.
    unsafe { give(reducer, Reducer { core, dtype }) }
}

/// The names and numbers of elements of the parameters that a caller has passed.
///
/// # Safety
/// `names` holds `count` texts that end with a zero byte, `lens` holds `count` numbers.
unsafe fn named<'a>(
    names: *const *const c_char,
    lens: *const u64,
    count: usize,
) -> Result<Vec<(&'a str, u64)>> {
    // SAFETY: `names` is NULL, or holds `count` addresses that stay unchanged during the call.
    let names = unsafe { array(names, count, "the list of names")? };
    // SAFETY: `lens` is NULL, or holds `count` values that stay unchanged during the call.
    let lens = unsafe { array(lens, count, "the list of lengths")? };
    let pairs = names.iter().zip(lens).map(|(&name, &len)| {
        // SAFETY: `name` is NULL, or ends with a zero byte and stays unchanged during the call.
        let name = unsafe { text(name, "the name of a parameter")? };
        Ok((name, len))
    });
    pairs.collect()
}

/// Makes a reducer for a model with `count` parameters, whose names and numbers of elements are in `names` and `lens`.
/// All have the element type `dtype`: RCOMM_F32, RCOMM_F64, RCOMM_F16 or RCOMM_BF16. Gradients are averaged in buckets
/// that take parameters until they have `bucket_bytes`, the first one `first_bytes`; 0 = the defaults. If `find_unused`
/// is not 0, parameters may have no gradient in a step. Waits until all ranks of the group have called this; give the
/// reducer a group of its own.
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
        // SAFETY: the caller passes `count` names and lengths.
        let named = unsafe { named(names, lens, count)? };
        let parameters = named
            .iter()
            .map(|&(name, len)| Parameter::new(name, &[len]));
        let mut given = GivenOptions::default();
        given.set_sizes(first_bytes, bucket_bytes);
        if find_unused != 0 {
            given.unused = UnusedParameters::Find;
        }
        // SAFETY: `group` is a valid handle, and the caller guarantees that a handle may be written to `reducer`.
        unsafe { make(group, parameters.collect(), dtype, given, reducer) }
    })
}

/// Like `rcomm_reducer_new`, with further options: a JSON object with any of these keys, the same on all ranks. NULL =
/// none.
///
/// `first_bytes`, `bucket_bytes`: the sizes of buckets. `unused`: `"find"` if parameters may have no gradient in a
/// step. `uneven`: `"divide_by_size"` or `"divide_by_active"` if ranks may run out of input before others: they then
/// call `rcomm_reducer_join`. `static_graph`: `true` if each rank uses the same parameters in each step.
/// `rebuild_buckets`: `false` if buckets are not formed anew after the first step. `wire`: `"f16"` or `"bf16"`, the
/// type in which gradients are sent. `hook`: `"int8"` sends them in 8 bits; `{"power_sgd": {"rank": 2, "start": 10}}`
/// sends, after the first `start` steps, two thin matrices in place of each gradient that is at least twice as large as
/// they are (`rank` is the rank of these matrices, not that of a process), and
/// `{"batched_power_sgd": {"rank": 1, "start": 10}}` sends two in place of each bucket;
/// `{"post_local_sgd": {"ranks": 4, "start": 100}}` averages, after the first `start` steps, only among each 4 ranks
/// that follow each other in the group (1 = each goes on alone), and the program averages the parameters over all ranks
/// every few steps. `shapes`: a list of a shape for each parameter, with as many elements as `lens` says; without it
/// each has one dimension. `sparse`: the positions of parameters whose gradients are given as rows
/// (`rcomm_reducer_ready_sparse`). `delayed`: the positions of parameters whose gradients are sent in one bucket behind
/// all others, or behind that of the parameter `delayed_until`.
///
/// # Safety
/// See `rcomm_reducer_new`; `options` is NULL, or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_new_with(
    group: *const Group,
    names: *const *const c_char,
    lens: *const u64,
    count: usize,
    dtype: u8,
    options: *const c_char,
    reducer: *mut *mut Reducer,
) -> i32 {
    call(|| {
        // SAFETY: the caller passes `count` names and lengths.
        let named = unsafe { named(names, lens, count)? };
        let given = match options.is_null() {
            true => GivenOptions::default(),
            // SAFETY: `options` is not NULL, so it ends with a zero byte, and stays unchanged during the call.
            false => GivenOptions::parse(unsafe { text(options, "the options")? })?,
        };
        let parameters = given.parameters(&named)?;
        // SAFETY: `group` is a valid handle, and the caller guarantees that a handle may be written to `reducer`.
        unsafe { make(group, parameters, dtype, given, reducer) }
    })
}

/// Writes the address and the number of elements of a parameter's gradient in this step: a part of the memory that is
/// sent, in which all elements are zero until they are written in this step. Write the gradient there before the next
/// call with this reducer. Fails for a gradient that is ready, and for a sparse parameter.
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
        let (address, elements) = reducer.core().gradient(parameter)?;
        // SAFETY: `gradient` is NULL, which is refused, or the caller guarantees that one address may be written there.
        unsafe { put(gradient, address)? };
        // SAFETY: `len` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(len, elements) }
    })
}

/// Says that a parameter's gradient is complete. Sends the gradient's bucket if all gradients of it are complete now
/// and all buckets before it were sent. Does not wait for other ranks, except for the groups that the hook
/// `post_local_sgd` makes in its first step after `start`.
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

/// Like `rcomm_reducer_ready`, for a parameter of the option `sparse`: gives `nnz` rows of the parameter's gradient;
/// the other rows are zero. A row that is named more than once counts as the sum.
///
/// # Safety
/// `reducer` is a valid handle; `indices` holds `nnz` numbers of rows, and `values` their elements, one row after the
/// other; both are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_ready_sparse(
    reducer: *const Reducer,
    parameter: usize,
    indices: *const i64,
    values: *const c_void,
    nnz: usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        let mut core = reducer.core();
        let count = core.row(parameter)?.checked_mul(nnz);
        let count = count.ok_or_else(|| refused(format!("the size of {nnz} rows overflows")))?;
        // SAFETY: `indices` is NULL, or holds `nnz` values that stay unchanged during the call, which copies them.
        let indices = unsafe { array(indices, nnz, "the list of rows")? }.to_vec();
        // SAFETY: `values` is NULL, or holds `count` elements that stay unchanged during the call, which copies them.
        let values = unsafe { input(values, count, reducer.dtype, &kept_by_caller())? };
        core.ready_sparse(parameter, indices, &values)
    })
}

/// Waits for the averages of this step, as long as the time-outs of the operations allow. Gradients that were written
/// and are not ready count as complete. Fails for a parameter without a gradient, unless unused parameters are allowed.
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
        let (address, elements) = part.unwrap_or((std::ptr::null_mut(), 0));
        // SAFETY: `average` is NULL, which is refused, or the caller guarantees that one address may be written there.
        unsafe { put(average, address)? };
        // SAFETY: `len` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(len, elements) }
    })
}

/// Writes to `*out` the average of a sparse parameter's gradient in the last step, with its rows in ascending order;
/// NULL if no rank has used the parameter.
///
/// # Safety
/// `reducer` is a valid handle; `out` may be written, and its tensor is freed with `rcomm_sparse_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_sparse_average(
    reducer: *const Reducer,
    parameter: usize,
    out: *mut *mut Sparse,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        let average = reducer.core().sparse_average(parameter);
        match average {
            // SAFETY: `out` is NULL, which is refused, or the caller guarantees that a handle may be written there.
            Some(average) => unsafe { give(out, average) },
            // SAFETY: as above, for an address.
            None => unsafe { put(out, std::ptr::null_mut()) },
        }
    })
}

/// Takes part in the steps of the others, with gradients of zero, until all ranks have called this: for a rank that has
/// no input left. Every rank calls this once at the end. Needs the option `uneven`. Writes to `*shadowed` in how many
/// steps this rank took part in that way, and to `*last` a rank of the group that had input in every step, the same on
/// all ranks: that rank's parameters are those after all steps, and the others take its parameters (`rcomm_broadcast`).
/// Waits for the others.
///
/// # Safety
/// `reducer` is a valid handle; `shadowed` and `last` are NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reducer_join(
    reducer: *const Reducer,
    shadowed: *mut u64,
    last: *mut u32,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `reducer` alive during the call.
        let reducer = unsafe { borrow(reducer, "the reducer")? };
        let joined = reducer.core().join()?;
        if !shadowed.is_null() {
            // SAFETY: `shadowed` is not NULL, so the caller guarantees that one value may be written there.
            unsafe { put(shadowed, joined.shadowed)? };
        }
        if !last.is_null() {
            // SAFETY: `last` is not NULL, so the caller guarantees that one value may be written there.
            unsafe { put(last, joined.last)? };
        }
        Ok(())
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

/// Writes to `*json` how long the last step took, in milliseconds: forward, backward, communication, how much of the
/// communication was hidden and exposed, and each bucket.
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
        // SAFETY: `json` is NULL, which is refused, or the caller guarantees that one address may be written there.
        unsafe { give_json(json, &statistics) }
    })
}

/// Continues in another group, after ranks were lost or have joined; a step that is not finished is given up. All ranks
/// of `group` call this and wait for each other; ranks that have joined instead call `rcomm_reducer_new` at the same
/// time.
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
