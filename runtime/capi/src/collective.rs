//! Operations on one buffer or two.

use crate::code::Reduction;
use crate::group::Group;
use crate::memory::{self, array, dtype_of};
use crate::status::{borrow, call};
use crate::work::{WorkHandle, issue};
use rcomm::Op;
use std::ffi::c_void;

/// Every rank's `buffer` ends as the reduction of all.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_reduce(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u8,
    reduction: Reduction,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let buffer = unsafe { memory::output(buffer, count, dtype)? };
        let op = reduction.read()?;
        let op = Op::AllReduce { buffer, op };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// The root's `buffer` ends as the reduction of all.
///
/// # Safety
/// As the head of the header says of handles and memory.
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
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let buffer = unsafe { memory::output(buffer, count, dtype)? };
        let op = reduction.read()?;
        let op = Op::Reduce { buffer, op, root };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// Every rank's `buffer` ends as the root's.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_broadcast(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u8,
    root: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let buffer = unsafe { memory::output(buffer, count, dtype)? };
        let op = Op::Broadcast { buffer, root };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// Nobody leaves before everybody has come.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_barrier(group: *const Group, work: *mut *mut WorkHandle) -> i32 {
    call(|| {
        let op = Op::Barrier;
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// `output` ends as the inputs of all ranks, `count` elements of each, one after the other.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_gather_single(
    group: *const Group,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        // SAFETY: by the contract.
        let input = unsafe { memory::input(input, count, dtype)? };
        // SAFETY: by the contract.
        let output = unsafe { memory::output(output, count.saturating_mul(size), dtype)? };
        let op = Op::AllGatherSingle { input, output };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// `output` ends as the reduction of everybody's part for this rank: `input` holds `count` elements for
/// each.
///
/// # Safety
/// As the head of the header says of handles and memory.
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
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        // SAFETY: by the contract.
        let input = unsafe { memory::input(input, count.saturating_mul(size), dtype)? };
        // SAFETY: by the contract.
        let output = unsafe { memory::output(output, count, dtype)? };
        let op = reduction.read()?;
        let op = Op::ReduceScatterSingle { input, output, op };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// Part r of `input`, of `count` elements, goes to rank r; part r of `output` comes from it.
///
/// # Safety
/// As the head of the header says of handles and memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_to_all_single(
    group: *const Group,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u8,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        let all = count.saturating_mul(size);
        // SAFETY: by the contract.
        let input = unsafe { memory::input(input, all, dtype)? };
        // SAFETY: by the contract.
        let output = unsafe { memory::output(output, all, dtype)? };
        let op = Op::AllToAllSingle { input, output };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}

/// As `rcomm_all_to_all_single`: `input_splits[r]` elements go to rank r, `output_splits[r]` come from it.
///
/// # Safety
/// As the head of the header says of handles and memory.
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
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let size = unsafe { borrow(group, "the group")? }.0.size() as usize;
        // SAFETY: by the contract.
        let input_splits = unsafe { array(input_splits, size, "the list of splits")? };
        // SAFETY: by the contract.
        let output_splits = unsafe { array(output_splits, size, "the list of splits")? };
        let sum = |splits: &[usize]| splits.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
        // SAFETY: by the contract.
        let input = unsafe { memory::input(input, sum(input_splits), dtype)? };
        // SAFETY: by the contract.
        let output = unsafe { memory::output(output, sum(output_splits), dtype)? };
        let op = Op::AllToAllVSingle {
            input,
            output,
            input_splits: input_splits.to_vec(),
            output_splits: output_splits.to_vec(),
        };
        // SAFETY: by the contract.
        unsafe { issue(group, op, work) }
    })
}
