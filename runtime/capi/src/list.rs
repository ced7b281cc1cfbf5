//! Operations on lists of buffers: one for each rank, or several at once.
//!
//! Where a root alone gives or gets a list, the others' list is not looked at.

use crate::code::Reduction;
use crate::group::Group;
use crate::memory::array;
use crate::operate::{Maker, operate};
use crate::work::WorkHandle;
use rcomm::Op;
use std::ffi::c_void;

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
    let make = |it: &Maker<'_>| {
        // SAFETY: by the contract.
        let counts = unsafe { it.counts(counts)? };
        // SAFETY: by the contract.
        let input = unsafe { it.input(input, it.own(&counts))? };
        // SAFETY: by the contract.
        let outputs = unsafe { it.outputs(outputs, &counts)? };
        Ok(Op::AllGatherV { input, outputs })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        let counts = it.even(count);
        // SAFETY: by the contract.
        let input = unsafe { it.input(input, count)? };
        // SAFETY: by the contract.
        let outputs = unsafe { it.outputs(outputs, &counts)? };
        Ok(Op::AllGather { input, outputs })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        // SAFETY: by the contract.
        let counts = unsafe { it.counts(counts)? };
        // SAFETY: by the contract.
        let inputs = unsafe { it.inputs(inputs, &counts)? };
        // SAFETY: by the contract.
        let output = unsafe { it.output(output, it.own(&counts))? };
        let op = reduction.read()?;
        Ok(Op::ReduceScatterV { inputs, output, op })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        let counts = it.even(count);
        // SAFETY: by the contract.
        let inputs = unsafe { it.inputs(inputs, &counts)? };
        // SAFETY: by the contract.
        let output = unsafe { it.output(output, count)? };
        let op = reduction.read()?;
        Ok(Op::ReduceScatter { inputs, output, op })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        // SAFETY: by the contract.
        let input_counts = unsafe { it.counts(input_counts)? };
        // SAFETY: by the contract.
        let output_counts = unsafe { it.counts(output_counts)? };
        // SAFETY: by the contract.
        let inputs = unsafe { it.inputs(inputs, &input_counts)? };
        // SAFETY: by the contract.
        let outputs = unsafe { it.outputs(outputs, &output_counts)? };
        Ok(Op::AllToAll { inputs, outputs })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        // SAFETY: by the contract.
        let counts = unsafe { it.counts(counts)? };
        // SAFETY: by the contract.
        let input = unsafe { it.input(input, it.own(&counts))? };
        // SAFETY: by the contract.
        let list = || unsafe { it.outputs(outputs, &counts) };
        let outputs = it.at_root(root, list)?;
        Ok(Op::GatherV {
            input,
            outputs,
            root,
        })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        let counts = it.even(count);
        // SAFETY: by the contract.
        let input = unsafe { it.input(input, count)? };
        // SAFETY: by the contract.
        let list = || unsafe { it.outputs(outputs, &counts) };
        let outputs = it.at_root(root, list)?;
        Ok(Op::Gather {
            input,
            outputs,
            root,
        })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        // SAFETY: by the contract.
        let counts = unsafe { it.counts(counts)? };
        // SAFETY: by the contract.
        let list = || unsafe { it.inputs(inputs, &counts) };
        let inputs = it.at_root(root, list)?;
        // SAFETY: by the contract.
        let output = unsafe { it.output(output, it.own(&counts))? };
        Ok(Op::ScatterV {
            inputs,
            output,
            root,
        })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        let counts = it.even(count);
        // SAFETY: by the contract.
        let list = || unsafe { it.inputs(inputs, &counts) };
        let inputs = it.at_root(root, list)?;
        // SAFETY: by the contract.
        let output = unsafe { it.output(output, count)? };
        Ok(Op::Scatter {
            inputs,
            output,
            root,
        })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        // SAFETY: by the contract.
        let counts = unsafe { array(counts, length, "the list of counts")? };
        // SAFETY: by the contract.
        let buffers = unsafe { it.outputs(buffers, counts)? };
        let op = reduction.read()?;
        Ok(Op::AllReduceCoalesced { buffers, op })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        // SAFETY: by the contract.
        let counts = unsafe { array(counts, length, "the list of counts")? };
        let all: Vec<usize> = counts.iter().map(|&n| it.of_all(n)).collect();
        // SAFETY: by the contract.
        let inputs = unsafe { it.inputs(inputs, counts)? };
        // SAFETY: by the contract.
        let outputs = unsafe { it.outputs(outputs, &all)? };
        Ok(Op::AllGatherCoalesced { inputs, outputs })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
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
    let make = |it: &Maker<'_>| {
        // SAFETY: by the contract.
        let counts = unsafe { array(counts, length, "the list of counts")? };
        let all: Vec<usize> = counts.iter().map(|&n| it.of_all(n)).collect();
        // SAFETY: by the contract.
        let inputs = unsafe { it.inputs(inputs, &all)? };
        // SAFETY: by the contract.
        let outputs = unsafe { it.outputs(outputs, counts)? };
        let op = reduction.read()?;
        Ok(Op::ReduceScatterCoalesced {
            inputs,
            outputs,
            op,
        })
    };
    // SAFETY: by the contract.
    unsafe { operate(group, dtype, work, make) }
}
