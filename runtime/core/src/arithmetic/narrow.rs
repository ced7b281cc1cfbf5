//! Floats of 8 and 16 bits to `f32` and back, rounding to nearest even.
//!
//! `bf16` is the upper half of an `f32` and has functions of its own; one pair of functions serves all other
//! formats. A value below the smallest normal number of the narrow format is rounded by the processor's own
//! addition: a constant is added whose last mantissa bit is worth one unit of the narrow format's subnormals.
//!
//! In an `f32`, 0x7f80_0000 is infinity, larger magnitudes are NaN, and bit 22 marks a quiet NaN, as 0x40 does
//! in a `bf16`.

/// Converts from `EXP` bits of exponent and `MAN` bits of mantissa to `f32`. With `FINITE` the format has no
/// infinity, and only a magnitude of all ones is NaN. A NaN becomes quiet.
#[inline(always)]
pub(super) fn widen<const EXP: u32, const MAN: u32, const FINITE: bool>(bits: u16) -> f32 {
    let sign = u32::from(bits >> (EXP + MAN)) << 31;
    let magnitude = u32::from(bits) & ((1 << (EXP + MAN)) - 1);
    let infinity = ((1 << EXP) - 1) << MAN;
    let is_special = if FINITE {
        magnitude == (1 << (EXP + MAN)) - 1
    } else {
        magnitude >= infinity
    };
    let shifted = magnitude << (23 - MAN);
    let wide = if is_special {
        let quiet = u32::from(FINITE || magnitude > infinity) << 22;
        shifted | 0x7f80_0000 | quiet
    } else {
        // Times 2^(127 - bias): exact, and right for subnormals too.
        let bias = (1 << (EXP - 1)) - 1;
        let power = f32::from_bits((254 - bias) << 23);
        (f32::from_bits(shifted) * power).to_bits()
    };
    f32::from_bits(sign | wide)
}

/// Converts from `f32` to `EXP` bits of exponent and `MAN` bits of mantissa. A value that is too large
/// becomes infinity, or NaN where the format is `FINITE`. A NaN becomes quiet.
#[inline(always)]
pub(super) fn narrow<const EXP: u32, const MAN: u32, const FINITE: bool>(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 31) as u16) << (EXP + MAN);
    let magnitude = bits & 0x7fff_ffff;
    let bias = (1u32 << (EXP - 1)) - 1;
    let infinity = ((1u32 << EXP) - 1) << MAN;
    let all_ones = (1u32 << (EXP + MAN)) - 1;

    let rounded = if magnitude > 0x7f80_0000 {
        if FINITE {
            all_ones
        } else {
            infinity | (1 << (MAN - 1)) | ((magnitude >> (23 - MAN)) & ((1 << MAN) - 1))
        }
    } else if magnitude < (128 - bias) << 23 {
        let unit = (127 - bias + 1 + 23 - MAN) << 23;
        let sum = f32::from_bits(magnitude) + f32::from_bits(unit);
        sum.to_bits().wrapping_sub(unit)
    } else {
        let odd = (magnitude >> (23 - MAN)) & 1;
        let nearest = magnitude + (1 << (22 - MAN)) - 1 + odd;
        let nearest = (nearest - ((127 - bias) << 23)) >> (23 - MAN);
        nearest.min(if FINITE { all_ones } else { infinity })
    };
    sign | rounded as u16
}

/// Converts a `bf16`, the upper half of an `f32`, to `f32`. A NaN becomes quiet.
#[inline(always)]
pub(super) fn widen_bf16(bits: u16) -> f32 {
    let quiet = u32::from(bits & 0x7fff > 0x7f80) << 22;
    f32::from_bits((u32::from(bits) << 16) | quiet)
}

/// Converts an `f32` to `bf16`, its upper half, rounded to nearest even. A NaN becomes quiet.
#[inline(always)]
pub(super) fn narrow_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let odd = (bits >> 16) & 1;
    let nearest = (bits.wrapping_add(0x7fff + odd) >> 16) as u16;
    let nan = ((bits >> 16) | 0x40) as u16;
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        nan
    } else {
        nearest
    }
}
