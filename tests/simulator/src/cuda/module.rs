//! Runs kernels. Only the names of the entries are read from a PTX text; the entries whose names are known here are
//! executed by code of this file ("Module Management", "Execution Control" in the driver's manual).

use super::{INVALID_PTX, INVALID_VALUE, NOT_FOUND, SUCCESS, put, stream_of};
use crate::handles::Handles;
use crate::stream::Work;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

/// The names of the entries of a PTX text.
struct Module {
    entries: Vec<String>,
}

/// A kernel.
#[derive(Clone, Copy)]
enum Function {
    /// Looks for NaNs among elements of this many bytes.
    FindNan(usize),
    /// A product of two square matrices.
    Gemm,
}

static MODULES: Handles<Module> = Handles::new("module");
static FUNCTIONS: Handles<Function> = Handles::new("function");

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> c_int {
    crate::calls::note();
    if image.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null (checked), and the caller's image is PTX, a text that ends with a NUL and stays as
    // it is during this call, which copies what it needs.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    if !text.contains(".version") || !text.contains(".target") {
        return INVALID_PTX;
    }
    let entries = text
        .split(".entry ")
        .skip(1)
        .filter_map(|rest| rest.split(['(', ' ', '\n']).next())
        .map(str::to_owned);
    let entries = entries.collect();
    // SAFETY: `module` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(module, MODULES.insert(Arc::new(Module { entries }))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: *mut c_void) -> c_int {
    crate::calls::note();
    MODULES.remove(module).map_or(INVALID_VALUE, |_| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> c_int {
    crate::calls::note();
    let Some(module) = MODULES.get(module) else {
        return INVALID_VALUE;
    };
    // SAFETY: the caller's `name` is not null, ends with a NUL and stays as it is during this call, which
    // keeps nothing of it.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    if !module.entries.iter().any(|entry| *entry == name) {
        return NOT_FOUND;
    }
    let kernel = match &*name {
        "rcomm_find_nan_8" => Function::FindNan(1),
        "rcomm_find_nan_16" => Function::FindNan(2),
        "rcomm_find_nan_32" => Function::FindNan(4),
        "rcomm_find_nan_64" => Function::FindNan(8),
        "rcomm_gemm" => Function::Gemm,
        _ => return NOT_FOUND,
    };
    // SAFETY: `function` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(function, FUNCTIONS.insert(Arc::new(kernel))) }
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "as cuda.h has it")]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    crate::calls::note();
    let sides = [grid_x, grid_y, grid_z, block_x, block_y, block_z];
    if sides.contains(&0) || parameters.is_null() {
        return INVALID_VALUE;
    }
    let Some(function) = FUNCTIONS.get(function) else {
        return INVALID_VALUE;
    };
    let work: Work = match *function {
        Function::FindNan(width) => {
            // SAFETY: this kernel has five parameters of eight bytes each, and the caller passes the
            // address of each in a list that is not null (checked).
            let words = unsafe { words(parameters) };
            Arc::new(move || find_nan(words, width))
        }
        Function::Gemm => {
            // SAFETY: this kernel has four parameters of eight bytes each, and the caller passes the
            // address of each in a list that is not null (checked).
            let words = unsafe { words(parameters) };
            Arc::new(move || multiply(words))
        }
    };
    stream_of(stream).push(work);
    SUCCESS
}

/// Reads the parameters of a kernel, which have eight bytes each.
///
/// # Safety
/// `parameters` holds `N` addresses of eight readable bytes each.
unsafe fn words<const N: usize>(parameters: *mut *mut c_void) -> [u64; N] {
    // SAFETY: `nth` is less than `N`, so the caller has an address there, at which eight bytes are readable; the read
    // asks for no alignment.
    std::array::from_fn(|nth| unsafe { (*parameters.add(nth)).cast::<u64>().read_unaligned() })
}

/// Finds the first of `len` elements at `at` whose bits under `mask` exceed `limit`, and writes the element's index to
/// `found` if a larger index is there.
fn find_nan([at, len, mask, limit, found]: [u64; 5], width: usize) {
    let is_nan = |nth: u64| {
        let mut bits = [0; 8];
        let from = at as usize + nth as usize * width;
        // SAFETY: `nth` is less than `len`, so these `width` bytes are of an element that the caller of the
        // launch keeps live and unchanged until the work is done; device memory is the host's here. `bits`
        // has eight bytes, and `width` is at most that.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, bits.as_mut_ptr(), width) };
        u64::from_le_bytes(bits) & mask > limit
    };
    if let Some(first) = (0..len).find(|&nth| is_nan(nth)) {
        // SAFETY: the caller of the launch keeps eight bytes at `found` for this kernel until the work is
        // done; neither access asks for alignment. Work on one stream runs one at a time.
        unsafe {
            let found = found as *mut u64;
            found.write_unaligned(found.read_unaligned().min(first));
        }
    }
}

/// Multiplies two square matrices. The parameters are the addresses of both and of the product, and the number
/// of elements of a side.
fn multiply([a, b, product, side]: [u64; 4]) {
    let side = side as usize;
    let element = |matrix: u64, row: usize, column: usize| {
        // SAFETY: row and column are less than `side`, so the element lies in a matrix of aligned floats
        // that the caller of the launch keeps live and unchanged until the work is done; device memory is
        // the host's here.
        unsafe { (matrix as *const f32).add(row * side + column).read() }
    };
    for row in 0..side {
        for column in 0..side {
            let sum = (0..side)
                .map(|k| element(a, row, k) * element(b, k, column))
                .sum();
            // SAFETY: row and column are less than `side`, so the element lies in the product, aligned
            // floats that the caller of the launch keeps for this kernel until the work is done.
            unsafe { (product as *mut f32).add(row * side + column).write(sum) };
        }
    }
}
