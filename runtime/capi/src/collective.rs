//! Operations with one buffer or two.

use crate::code::Reduction;
use crate::group::Group;
use crate::operate::operate;
use crate::status::{borrow, call};
use crate::work::{WorkHandle, issue};
use rcomm::Op;
use std::ffi::c_void;

/// Every rank's `buffer` ends as the reduction of all ranks' buffers.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_reduce(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u8,
    reduction: Reduction,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `buffer` has
    // the length given, and is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let buffer = maker.output(buffer, count)?;
            let op = reduction.read()?;
            Ok(Op::AllReduce { buffer, op })
        })
    }
}

/// The root's `buffer` ends as the reduction of all ranks' buffers.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reduce(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u8,
    reduction: Reduction,
    root: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `buffer` has
    // the length given, and is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let buffer = maker.output(buffer, count)?;
            let op = reduction.read()?;
            Ok(Op::Reduce { buffer, op, root })
        })
    }
}

/// Every rank's `buffer` ends as a copy of the root's.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_broadcast(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u8,
    root: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `buffer` has
    // the length given, and is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let buffer = maker.output(buffer, count)?;
            Ok(Op::Broadcast { buffer, root })
        })
    }
}

/// A barrier: completes once all ranks have entered it.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_barrier(group: *const Group, work: *mut *mut WorkHandle) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        unsafe { issue(group, Op::Barrier, work) }
    })
}

/// `output` ends as the concatenation of all ranks' inputs, with `count` elements each.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_gather_single(
    group: *const Group,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `input` and
    // `output` have the lengths given, and the memory is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let input = maker.input(input, count)?;
            let output = maker.output(output, maker.total(count))?;
            Ok(Op::AllGatherSingle { input, output })
        })
    }
}

/// `output` ends as the reduction over all ranks of the part for this rank: `input` holds a part of `count` elements
/// for each rank.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_reduce_scatter_single(
    group: *const Group,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u8,
    reduction: Reduction,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `input` and
    // `output` have the lengths given, and the memory is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let input = maker.input(input, maker.total(count))?;
            let output = maker.output(output, count)?;
            let op = reduction.read()?;
            Ok(Op::ReduceScatterSingle { input, output, op })
        })
    }
}

/// Part r of `input`, with `count` elements, is sent to rank r; part r of `output` is received from rank r.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_to_all_single(
    group: *const Group,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `input` and
    // `output` have the lengths given, and the memory is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let input = maker.input(input, maker.total(count))?;
            let output = maker.output(output, maker.total(count))?;
            Ok(Op::AllToAllSingle { input, output })
        })
    }
}

/// Like `rcomm_all_to_all_single`, but `input_splits[r]` elements are sent to rank r, and `output_splits[r]` are
/// received from rank r.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_to_all_v_single(
    group: *const Group,
    input: *const c_void,
    input_splits: *const usize,
    output: *mut c_void,
    output_splits: *const usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `input_splits`
    // and `output_splits` hold a number for each rank; `input` and `output` have the lengths given, and
    // the memory is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let input_splits = maker.counts(input_splits)?;
            let output_splits = maker.counts(output_splits)?;
            let sum = |splits: &[usize]| {
                let counts = splits.iter();
                counts.fold(0usize, |sum, &count| sum.saturating_add(count))
            };
            let input = maker.input(input, sum(&input_splits))?;
            let output = maker.output(output, sum(&output_splits))?;
            Ok(Op::AllToAllVSingle {
                input,
                output,
                input_splits,
                output_splits,
            })
        })
    }
}
