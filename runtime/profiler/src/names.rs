//! Translates NCCL's names of operations, types, algorithms and protocols to the recorder's values.

use rcomm_recorder::model::{DType, OpType};
use rcomm_recorder::record::{ALGORITHMS, PROTOCOLS};
use std::ffi::{CStr, c_char};

/// Returns the text at this address; empty for null.
///
/// # Safety
/// `at` is null, or points to a text that ends with a zero and stays unchanged for as long as the result is used.
pub(crate) unsafe fn text<'t>(at: *const c_char) -> &'t [u8] {
    if at.is_null() {
        return b"";
    }
    // SAFETY: not null (checked), so the text ends with a zero, and the caller leaves it as it is while the
    // result is used.
    unsafe { CStr::from_ptr(at) }.to_bytes()
}

/// Returns the operation type of this NCCL function; [`OpType::Other`] for an unknown one.
pub(crate) fn operation(function: &[u8]) -> OpType {
    match function {
        b"AllReduce" => OpType::AllReduce,
        b"AllGather" => OpType::AllGatherSingle,
        b"ReduceScatter" => OpType::ReduceScatterSingle,
        b"Broadcast" => OpType::Broadcast,
        b"Reduce" => OpType::Reduce,
        b"AlltoAll" => OpType::AllToAllSingle,
        b"Gather" => OpType::Gather,
        b"Scatter" => OpType::Scatter,
        b"AllGatherV" => OpType::AllGatherV,
        b"Send" => OpType::Send,
        b"Recv" => OpType::Recv,
        _ => OpType::Other,
    }
}

/// Returns the element type of this name; [`DType::Other`] for an unknown one.
pub(crate) fn dtype(name: &[u8]) -> DType {
    match name.strip_prefix(b"nccl").unwrap_or(name) {
        b"Float32" => DType::F32,
        b"Bfloat16" => DType::Bf16,
        b"Float16" => DType::F16,
        b"Float64" => DType::F64,
        b"Int8" => DType::I8,
        b"Uint8" => DType::U8,
        b"Int32" => DType::I32,
        b"Uint32" => DType::U32,
        b"Int64" => DType::I64,
        b"Uint64" => DType::U64,
        b"Float8e4m3" => DType::F8E4M3,
        b"Float8e5m2" => DType::F8E5M2,
        _ => DType::Other,
    }
}

/// The recorder's number of an algorithm; 0 if the algorithm is unknown.
pub(crate) fn algorithm(name: &[u8]) -> u8 {
    number(&ALGORITHMS, name)
}

/// Whether the transfers of an operation whose algorithm has this number are those of CollNet.
pub(crate) fn uses_collnet(number: u8) -> bool {
    let name = ALGORITHMS.get(usize::from(number));
    matches!(name, Some(&("COLLNET_DIRECT" | "COLLNET_CHAIN" | "NVLS")))
}

/// The recorder's number of a protocol; 0 if the protocol is unknown.
pub(crate) fn protocol(name: &[u8]) -> u8 {
    number(&PROTOCOLS, name)
}

/// The index of a name; 0 if the name is unknown.
fn number(names: &[&str], name: &[u8]) -> u8 {
    let index = names.iter().position(|known| known.as_bytes() == name);
    index.unwrap_or(0) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_other() {
        assert_eq!(operation(b"AllReduce"), OpType::AllReduce);
        assert_eq!(operation(b"Transmogrify"), OpType::Other);
        assert_eq!(dtype(b"ncclBfloat16"), DType::Bf16);
        assert_eq!(dtype(b""), DType::Other);
        assert_eq!((algorithm(b"RING"), algorithm(b"?")), (2, 0));
        assert!(uses_collnet(algorithm(b"COLLNET_CHAIN")) && uses_collnet(algorithm(b"NVLS")));
        assert!(!uses_collnet(algorithm(b"NVLS_TREE")) && !uses_collnet(0));
        assert_eq!((protocol(b"SIMPLE"), protocol(b"")), (3, 0));
    }
}
