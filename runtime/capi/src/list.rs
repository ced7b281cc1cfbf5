//! Operations on lists of buffers: one for each rank, or several at once.
//!
//! Where a root alone gives or gets a list, the others' list is not looked at.

use crate::code::Reduction;
use crate::group::Group;
use crate::memory::{self, array, dtype_of};
use crate::status::{borrow, call};
use crate::work::{WorkHandle, issue};
use rcomm::{Op, Result};
use std::ffi::c_void;

/// How many elements each rank has.
///
/// # Safety
/// `group` is a living handle; `counts` holds one number for each rank.
unsafe fn counts_of(group: *const Group, counts: *const usize) -> Result<Vec<usize>> {
    // SAFETY: by the contract.
    let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
    // SAFETY: by the contract.
    Ok(unsafe { array(counts, size, "the list of counts")? }.to_vec())
}

/// # Safety
/// `group` is a living handle.
unsafe fn own_count(group: *const Group, counts: &[usize]) -> Result<usize> {
    // SAFETY: by the contract.
    let rank = unsafe { borrow(group, "the group")? }.0.rank() as usize;
    Ok(counts[rank])
}

/// The list that the root alone has.
///
/// # Safety
/// `group` is a living handle.
unsafe fn of_root<T>(
    group: *const Group,
    root: u32,
    list: impl FnOnce() -> Result<Vec<T>>,
) -> Result<Vec<T>> {
    // SAFETY: by the contract.
    let rank = unsafe { borrow(group, "the group")? }.0.rank();
    if rank == root { list() } else { Ok(Vec::new()) }
}

/// `outputs[r]`, of `counts[r]` elements, ends as rank r's `input`.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_gather_v(
    group: *const Group,
    input: *const c_void,
    outputs: *const *mut c_void,
    counts: *const usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let counts = unsafe { counts_of(group, counts)? };
        // SAFETY: by the contract.
        let own = unsafe { own_count(group, &counts)? };
        // SAFETY: by the contract.
        let input = unsafe { memory::input(input, own, dtype)? };
        // SAFETY: by the contract.
        let outputs = unsafe { memory::outputs(outputs, &counts, dtype)? };
        let op = Op::AllGatherV { input, outputs };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// `output` ends as the reduction of everybody's `inputs[own rank]`; `inputs[r]` has `counts[r]` elements.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reduce_scatter_v(
    group: *const Group,
    inputs: *const *const c_void,
    output: *mut c_void,
    counts: *const usize,
    dtype: u8,
    reduction: Reduction,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let counts = unsafe { counts_of(group, counts)? };
        // SAFETY: by the contract.
        let own = unsafe { own_count(group, &counts)? };
        // SAFETY: by the contract.
        let inputs = unsafe { memory::inputs(inputs, &counts, dtype)? };
        // SAFETY: by the contract.
        let output = unsafe { memory::output(output, own, dtype)? };
        let op = reduction.read()?;
        let op = Op::ReduceScatterV { inputs, output, op };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// `outputs[r]` ends as rank r's `inputs[own rank]`.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_to_all(
    group: *const Group,
    inputs: *const *const c_void,
    input_counts: *const usize,
    outputs: *const *mut c_void,
    output_counts: *const usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let input_counts = unsafe { counts_of(group, input_counts)? };
        // SAFETY: by the contract.
        let output_counts = unsafe { counts_of(group, output_counts)? };
        // SAFETY: by the contract.
        let inputs = unsafe { memory::inputs(inputs, &input_counts, dtype)? };
        // SAFETY: by the contract.
        let outputs = unsafe { memory::outputs(outputs, &output_counts, dtype)? };
        let op = Op::AllToAll { inputs, outputs };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// On the root, `outputs[r]`, of `counts[r]` elements, ends as rank r's `input`. All ranks give all
/// counts.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_gather_v(
    group: *const Group,
    input: *const c_void,
    outputs: *const *mut c_void,
    counts: *const usize,
    dtype: u8,
    root: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let counts = unsafe { counts_of(group, counts)? };
        // SAFETY: by the contract.
        let own = unsafe { own_count(group, &counts)? };
        // SAFETY: by the contract.
        let input = unsafe { memory::input(input, own, dtype)? };
        // SAFETY: by the contract.
        let list = || unsafe { memory::outputs(outputs, &counts, dtype) };
        // SAFETY: by the contract.
        let outputs = unsafe { of_root(group, root, list)? };
        let op = Op::GatherV {
            input,
            outputs,
            root,
        };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// `output` ends as the root's `inputs[own rank]`, of `counts[own rank]` elements. All ranks give all
/// counts.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_scatter_v(
    group: *const Group,
    inputs: *const *const c_void,
    output: *mut c_void,
    counts: *const usize,
    dtype: u8,
    root: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let counts = unsafe { counts_of(group, counts)? };
        // SAFETY: by the contract.
        let own = unsafe { own_count(group, &counts)? };
        // SAFETY: by the contract.
        let list = || unsafe { memory::inputs(inputs, &counts, dtype) };
        // SAFETY: by the contract.
        let inputs = unsafe { of_root(group, root, list)? };
        // SAFETY: by the contract.
        let output = unsafe { memory::output(output, own, dtype)? };
        let op = Op::ScatterV {
            inputs,
            output,
            root,
        };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// Each of `buffers` (there are `length`, of `counts[i]` elements) ends as the reduction of everybody's, as
/// one operation.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_reduce_coalesced(
    group: *const Group,
    buffers: *const *mut c_void,
    counts: *const usize,
    length: usize,
    dtype: u8,
    reduction: Reduction,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let counts = unsafe { array(counts, length, "the list of counts")? };
        // SAFETY: by the contract.
        let buffers = unsafe { memory::outputs(buffers, counts, dtype)? };
        let op = reduction.read()?;
        let op = Op::AllReduceCoalesced { buffers, op };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// As `rcomm_all_gather_single` for each of `length` pairs, as one operation.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_gather_coalesced(
    group: *const Group,
    inputs: *const *const c_void,
    outputs: *const *mut c_void,
    counts: *const usize,
    length: usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        // SAFETY: by the contract.
        let counts = unsafe { array(counts, length, "the list of counts")? };
        let all: Vec<usize> = counts.iter().map(|n| n.saturating_mul(size)).collect();
        // SAFETY: by the contract.
        let inputs = unsafe { memory::inputs(inputs, counts, dtype)? };
        // SAFETY: by the contract.
        let outputs = unsafe { memory::outputs(outputs, &all, dtype)? };
        let op = Op::AllGatherCoalesced { inputs, outputs };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// As `rcomm_reduce_scatter_single` for each of `length` pairs, as one operation.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reduce_scatter_coalesced(
    group: *const Group,
    inputs: *const *const c_void,
    outputs: *const *mut c_void,
    counts: *const usize,
    length: usize,
    dtype: u8,
    reduction: Reduction,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        // SAFETY: by the contract.
        let counts = unsafe { array(counts, length, "the list of counts")? };
        let all: Vec<usize> = counts.iter().map(|n| n.saturating_mul(size)).collect();
        // SAFETY: by the contract.
        let inputs = unsafe { memory::inputs(inputs, &all, dtype)? };
        // SAFETY: by the contract.
        let outputs = unsafe { memory::outputs(outputs, counts, dtype)? };
        let op = reduction.read()?;
        let op = Op::ReduceScatterCoalesced {
            inputs,
            outputs,
            op,
        };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// `outputs[r]`, of `count` elements, ends as rank r's `input`.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_gather(
    group: *const Group,
    input: *const c_void,
    outputs: *const *mut c_void,
    count: usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        let counts = vec![count; size];
        // SAFETY: by the contract.
        let input = unsafe { memory::input(input, count, dtype)? };
        // SAFETY: by the contract.
        let outputs = unsafe { memory::outputs(outputs, &counts, dtype)? };
        let op = Op::AllGather { input, outputs };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// `output`, of `count` elements, ends as the reduction of everybody's `inputs[own rank]`.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reduce_scatter(
    group: *const Group,
    inputs: *const *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u8,
    reduction: Reduction,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        let counts = vec![count; size];
        // SAFETY: by the contract.
        let inputs = unsafe { memory::inputs(inputs, &counts, dtype)? };
        // SAFETY: by the contract.
        let output = unsafe { memory::output(output, count, dtype)? };
        let op = reduction.read()?;
        let op = Op::ReduceScatter { inputs, output, op };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// On the root, `outputs[r]`, of `count` elements, ends as rank r's `input`.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_gather(
    group: *const Group,
    input: *const c_void,
    outputs: *const *mut c_void,
    count: usize,
    dtype: u8,
    root: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        let counts = vec![count; size];
        // SAFETY: by the contract.
        let input = unsafe { memory::input(input, count, dtype)? };
        // SAFETY: by the contract.
        let list = || unsafe { memory::outputs(outputs, &counts, dtype) };
        // SAFETY: by the contract.
        let outputs = unsafe { of_root(group, root, list)? };
        let op = Op::Gather {
            input,
            outputs,
            root,
        };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// `output`, of `count` elements, ends as the root's `inputs[own rank]`.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_scatter(
    group: *const Group,
    inputs: *const *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u8,
    root: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        let counts = vec![count; size];
        // SAFETY: by the contract.
        let list = || unsafe { memory::inputs(inputs, &counts, dtype) };
        // SAFETY: by the contract.
        let inputs = unsafe { of_root(group, root, list)? };
        // SAFETY: by the contract.
        let output = unsafe { memory::output(output, count, dtype)? };
        let op = Op::Scatter {
            inputs,
            output,
            root,
        };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}
