//! Operations on lists of buffers: one for each rank, or several at once.
//!
//! If only the root has a list, the lists of the other ranks are ignored.

use crate::code::Reduction;
use crate::group::Group;
use crate::memory::array;
use crate::operate::operate;
use crate::work::WorkHandle;
use rcomm::Op;
use std::ffi::c_void;

/// `outputs[r]`, with `counts[r]` elements, ends as rank r's `input`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_gather_v(
    group: *const Group,
    input: *const c_void,
    outputs: *const *mut c_void,
    counts: *const usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `counts` holds
    // a number for each rank; `input` and `outputs` have the lengths given, and the memory is left to
    // the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = maker.counts(counts)?;
            let input = maker.input(input, maker.own_count(&counts))?;
            let outputs = maker.outputs(outputs, &counts)?;
            Ok(Op::AllGatherV { input, outputs })
        })
    }
}

/// `outputs[r]`, with `count` elements, ends as rank r's `input`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_gather(
    group: *const Group,
    input: *const c_void,
    outputs: *const *mut c_void,
    count: usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `input` and
    // `outputs` have the lengths given, and the memory is left to the operation until it is
    // released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = maker.same_counts(count);
            let input = maker.input(input, count)?;
            let outputs = maker.outputs(outputs, &counts)?;
            Ok(Op::AllGather { input, outputs })
        })
    }
}

/// `output` ends as the reduction, over all ranks, of `inputs[caller's rank]`; `inputs[r]` has `counts[r]` elements.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `counts` holds
    // a number for each rank; `inputs` and `output` have the lengths given, and the memory is left to
    // the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = maker.counts(counts)?;
            let inputs = maker.inputs(inputs, &counts)?;
            let output = maker.output(output, maker.own_count(&counts))?;
            let op = reduction.read()?;
            Ok(Op::ReduceScatterV { inputs, output, op })
        })
    }
}

/// `output`, with `count` elements, ends as the reduction, over all ranks, of `inputs[caller's rank]`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `inputs` and
    // `output` have the lengths given, and the memory is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = maker.same_counts(count);
            let inputs = maker.inputs(inputs, &counts)?;
            let output = maker.output(output, count)?;
            let op = reduction.read()?;
            Ok(Op::ReduceScatter { inputs, output, op })
        })
    }
}

/// `outputs[r]`, with `output_counts[r]` elements, ends as rank r's `inputs[caller's rank]`; `inputs[r]` has
/// `input_counts[r]` elements.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `input_counts`
    // and `output_counts` hold a number for each rank; `inputs` and `outputs` have the lengths given,
    // and the memory is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let input_counts = maker.counts(input_counts)?;
            let output_counts = maker.counts(output_counts)?;
            let inputs = maker.inputs(inputs, &input_counts)?;
            let outputs = maker.outputs(outputs, &output_counts)?;
            Ok(Op::AllToAll { inputs, outputs })
        })
    }
}

/// On the root, `outputs[r]`, with `counts[r]` elements, ends as rank r's `input`. All ranks pass all counts.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `counts` holds
    // a number for each rank; `input` and `outputs` have the lengths given, and the memory is left to
    // the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = maker.counts(counts)?;
            let input = maker.input(input, maker.own_count(&counts))?;
            let list = || maker.outputs(outputs, &counts);
            let outputs = maker.at_root(root, list)?;
            Ok(Op::GatherV {
                input,
                outputs,
                root,
            })
        })
    }
}

/// On the root, `outputs[r]`, with `count` elements, ends as rank r's `input`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `input` and
    // `outputs` have the lengths given, and the memory is left to the operation until it is
    // released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = maker.same_counts(count);
            let input = maker.input(input, count)?;
            let list = || maker.outputs(outputs, &counts);
            let outputs = maker.at_root(root, list)?;
            Ok(Op::Gather {
                input,
                outputs,
                root,
            })
        })
    }
}

/// `output` ends as the root's `inputs[caller's rank]`, with `counts[caller's rank]` elements. All ranks pass all
/// counts.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `counts` holds
    // a number for each rank; `inputs` and `output` have the lengths given, and the memory is left to
    // the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = maker.counts(counts)?;
            let list = || maker.inputs(inputs, &counts);
            let inputs = maker.at_root(root, list)?;
            let output = maker.output(output, maker.own_count(&counts))?;
            Ok(Op::ScatterV {
                inputs,
                output,
                root,
            })
        })
    }
}

/// `output`, with `count` elements, ends as the root's `inputs[caller's rank]`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `inputs` and
    // `output` have the lengths given, and the memory is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = maker.same_counts(count);
            let list = || maker.inputs(inputs, &counts);
            let inputs = maker.at_root(root, list)?;
            let output = maker.output(output, count)?;
            Ok(Op::Scatter {
                inputs,
                output,
                root,
            })
        })
    }
}

/// `buffers[i]`, with `counts[i]` elements, ends as the reduction of all ranks' `buffers[i]`, for each of `length`
/// buffers; as one operation.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `counts` holds
    // `length` numbers; `buffers` have the lengths given, and the memory is left to the operation until it
    // is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = array(counts, length, "the list of counts")?;
            let buffers = maker.outputs(buffers, counts)?;
            let op = reduction.read()?;
            Ok(Op::AllReduceCoalesced { buffers, op })
        })
    }
}

/// Like `rcomm_all_gather_single` for each of `length` pairs of buffers, as one operation.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `counts` holds
    // `length` numbers; `inputs` and `outputs` have the lengths given, and the memory is left to the
    // operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = array(counts, length, "the list of counts")?;
            let output_counts = counts.iter().map(|&count| maker.total(count));
            let output_counts: Vec<usize> = output_counts.collect();
            let inputs = maker.inputs(inputs, counts)?;
            let outputs = maker.outputs(outputs, &output_counts)?;
            Ok(Op::AllGatherCoalesced { inputs, outputs })
        })
    }
}

/// Like `rcomm_reduce_scatter_single` for each of `length` pairs of buffers, as one operation.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
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
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `counts` holds
    // `length` numbers; `inputs` and `outputs` have the lengths given, and the memory is left to the
    // operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let counts = array(counts, length, "the list of counts")?;
            let input_counts = counts.iter().map(|&count| maker.total(count));
            let input_counts: Vec<usize> = input_counts.collect();
            let inputs = maker.inputs(inputs, &input_counts)?;
            let outputs = maker.outputs(outputs, counts)?;
            let op = reduction.read()?;
            Ok(Op::ReduceScatterCoalesced {
                inputs,
                outputs,
                op,
            })
        })
    }
}
