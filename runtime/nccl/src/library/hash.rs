//! Computes NCCL's own number of a communicator (`commHash`). NCCL's monitor and its profilers show the number; from
//! 2.26 on, its logs show the number of joined communicators too (`commId`). By this number, a dump can be matched with
//! the output of NCCL and of these tools.
//!
//! From 2.31 on the library states the number (`Comm::stated_hash`). For older ones it is computed here. The formulas
//! are those of `init.cc` (`commHash` in `ncclCommInitRankFunc`) and of `getHash` (`misc/utils.cc`, later
//! `include/bitops.h`): one formula up to 2.25.1, another from 2.26.2 on. The formula for children also changed with
//! 2.24; for children of older releases rcomm computes a number of its own, which is the same on all members.

use super::Version;
use super::sys::UniqueId;
use sha2::{Digest, Sha256};
use std::ffi::c_char;

/// The first release in which `getHash` mixes 64-bit words.
const MIXING_SINCE: Version = Version(22_600);
/// The first release in which the number of a child depends on the number of the split.
const NUMBERED_SINCE: Version = Version(22_400);

/// Computes the number of a communicator that was joined, from its first unique id.
pub(crate) fn of_joined(version: Version, first: &UniqueId) -> u64 {
    match version >= MIXING_SINCE {
        true => mix([&first.internal[..]]),
        false => fold(&first.internal),
    }
}

/// Computes the number of a communicator that was made from `parent`. `nth` is the number of the split, from 1; a
/// shrink has the number 0 and the color 0.
pub(crate) fn of_child(version: Version, parent: u64, (nth, color): (u32, u32)) -> u64 {
    if version >= MIXING_SINCE {
        let (parent, nth, color) = (parent.to_le_bytes(), nth.to_le_bytes(), color.to_le_bytes());
        return mix([&parent[..], &nth[..], &color[..]]);
    }
    if version >= NUMBERED_SINCE {
        // NCCL hashes this text, padded with zeros, like a unique id.
        let text = format!("{parent:016x}-{nth}-{color}");
        let mut id = [0; UniqueId::BYTES];
        id[..text.len()].copy_from_slice(text.as_bytes());
        return fold(&id);
    }
    let mut hash = Sha256::new();
    for word in [parent, u64::from(nth), u64::from(color)] {
        hash.update(word.to_le_bytes());
    }
    let digest: [u8; 32] = hash.finalize().into();
    digest[..8]
        .iter()
        .fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// The hash DJB2a, over characters of C: they are signed on `x86_64`, but not on `aarch64`.
fn fold(bytes: &[u8]) -> u64 {
    bytes.iter().fold(5381, |hash: u64, &byte| {
        let character = i64::from(c_char::from_ne_bytes([byte]));
        hash.wrapping_mul(33) ^ character.cast_unsigned()
    })
}

/// Applies `eatHash` to each part, then `digestHash`.
fn mix<const N: usize>(parts: [&[u8]; N]) -> u64 {
    let [mut first, mut second] = [1u64; 2];
    for part in parts {
        first ^= part.len() as u64;
        for word in part.chunks(8) {
            first = first.wrapping_add(second);
            second ^= first;
            first ^= first >> 31;
            first = first.wrapping_mul(0x9de6_2bbc_8cef_3ce3);
            second ^= second >> 32;
            second = second.wrapping_mul(0x485c_d631_1b59_9e79);
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            first = first.wrapping_add(u64::from_le_bytes(bytes));
        }
    }
    let mut hash = first;
    hash ^= hash >> 31;
    hash = hash.wrapping_mul(0xbac3_bd56_2846_de6b);
    hash = hash.wrapping_add(second);
    hash ^= hash >> 32;
    hash.wrapping_mul(0x995a_187a_14e7_b445)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The functions of NCCL's sources, compiled by a C++ compiler, return the expected numbers for these bytes.
    #[test]
    fn the_numbers_are_those_of_the_librarys_sources() {
        let internal = std::array::from_fn(|at| (at * 37 + 200) as u8);
        let id = UniqueId { internal };
        let [old, new] = [Version(22_501), Version(22_602)];
        assert_eq!(of_joined(new, &id), 0x130b_f80b_b2fc_3c2b);
        let child = of_child(new, 0x130b_f80b_b2fc_3c2b, (3, 2));
        assert_eq!(child, 0x76f0_133f_78da_9879);
        assert_eq!(of_joined(old, &id), 0x6d51_a6fa_7a62_0005);
        let child = of_child(old, 0x6d51_a6fa_7a62_0005, (3, 2));
        assert_eq!(child, 0x1862_f936_d250_b375);
    }
}
