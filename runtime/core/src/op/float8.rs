//! The two 8-bit floats: storage, and conversion from and to `f32`.
//!
//! The formats are those of "FP8 Formats for Deep Learning" (arXiv 2209.05433) and of ATen's `Float8_e4m3fn` and
//! `Float8_e5m2`. A value is rounded to the nearest one, ties to even. A value that is too large becomes NaN in E4M3,
//! which has no infinity, and infinity in E5M2.

/// One sign bit, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, largest value 448.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F8E4M3(u8);

/// One sign bit, 5 bits of exponent (bias 15), 2 of mantissa; largest finite value 57,344.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F8E5M2(u8);

impl F8E4M3 {
    /// The value with these bits.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// The bits.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// The nearest value, ties to even; NaN for NaN and for magnitudes above 464.
    pub fn from_f32(value: f32) -> Self {
        let magnitude = round::<3>(value.abs(), -6);
        // 0x7F is NaN; `min` turns every magnitude that rounds above the largest value into it.
        Self(
            sign(value)
                | if value.is_nan() {
                    0x7F
                } else {
                    magnitude.min(0x7F) as u8
                },
        )
    }

    /// The same value as an `f32`, which can hold every value of this type.
    pub fn to_f32(self) -> f32 {
        if self.0 & 0x7F == 0x7F {
            return f32::NAN.copysign(if self.0 >= 0x80 { -1.0 } else { 1.0 });
        }
        expand::<3>(self.0, -6)
    }
}

impl F8E5M2 {
    /// The value with these bits.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// The bits.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// The nearest value, ties to even; infinite for magnitudes from 61,440 on, NaN for NaN.
    pub fn from_f32(value: f32) -> Self {
        let magnitude = round::<2>(value.abs(), -14);
        // 0x7C is infinity; `min` turns every magnitude that rounds above the largest value into it. 0x7F is NaN.
        Self(
            sign(value)
                | if value.is_nan() {
                    0x7F
                } else {
                    magnitude.min(0x7C) as u8
                },
        )
    }

    /// The same value as an `f32`, which can hold every value of this type.
    pub fn to_f32(self) -> f32 {
        let magnitude = match self.0 & 0x7F {
            0x7C => f32::INFINITY,
            0x7D.. => f32::NAN,
            _ => return expand::<2>(self.0, -14),
        };
        magnitude.copysign(if self.0 >= 0x80 { -1.0 } else { 1.0 })
    }
}

fn sign(value: f32) -> u8 {
    if value.is_sign_negative() { 0x80 } else { 0 }
}

/// The bit pattern of `magnitude` in a format with `MANTISSA` bits of mantissa, whose smallest normal value has the
/// exponent `min_exponent`. Exponent and mantissa are one number, so that rounding may carry from the mantissa into
/// the exponent. For a magnitude that is too large, the result exceeds the bit patterns of the format.
fn round<const MANTISSA: u32>(magnitude: f32, min_exponent: i32) -> u32 {
    let bits = magnitude.to_bits();
    // An `f32` has 23 bits of mantissa, and its exponent has a bias of 127.
    let exponent = (bits >> 23) as i32 - 127;
    if exponent < min_exponent {
        // Subnormal: count in units of the smallest value. Scaling by a power of two is exact here.
        let units =
            magnitude * f32::from_bits(((MANTISSA as i32 - min_exponent + 127) as u32) << 23);
        return units.round_ties_even() as u32;
    }
    // Adding half a unit less one, and one more if the last bit that is kept is odd, rounds ties to even.
    let shift = 23 - MANTISSA;
    let half = (1u32 << (shift - 1)) - 1 + ((bits >> shift) & 1);
    let rounded = (bits + half) >> shift;
    // From the bias of `f32` to that of the format.
    rounded - ((min_exponent - 1 + 127) as u32) * (1 << MANTISSA)
}

/// The value of a bit pattern that is neither infinite nor NaN; `MANTISSA` and `min_exponent` as for [`round`].
fn expand<const MANTISSA: u32>(bits: u8, min_exponent: i32) -> f32 {
    let magnitude = u32::from(bits & 0x7F);
    let exponent = magnitude >> MANTISSA;
    let mantissa = magnitude & ((1 << MANTISSA) - 1);
    let (significand, scale) = if exponent == 0 {
        (mantissa, min_exponent)
    } else {
        (
            mantissa | (1 << MANTISSA),
            min_exponent + exponent as i32 - 1,
        )
    };
    let unit = f32::from_bits(((scale - MANTISSA as i32 + 127) as u32) << 23);
    let value = significand as f32 * unit;
    if bits >= 0x80 { -value } else { value }
}

impl std::fmt::Debug for F8E4M3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.to_f32().fmt(f)
    }
}

impl std::fmt::Debug for F8E5M2 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.to_f32().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bit pattern of the value nearest to `target`, ties to even; `values[bits]` is the value of the bit pattern
    /// `bits`.
    fn nearest(values: &[f32], target: f32) -> usize {
        let distance = |bits: usize| (f64::from(values[bits]) - f64::from(target)).abs();
        (0..values.len())
            .min_by(|&a, &b| {
                distance(a)
                    .total_cmp(&distance(b))
                    .then((a & 1).cmp(&(b & 1)))
            })
            .unwrap()
    }

    #[test]
    fn every_bit_pattern_comes_back_from_f32_and_nan_stays_nan() {
        for bits in 0..=u8::MAX {
            let e4m3 = F8E4M3::from_bits(bits);
            let e5m2 = F8E5M2::from_bits(bits);
            if e4m3.to_f32().is_nan() {
                assert!(F8E4M3::from_f32(e4m3.to_f32()).to_f32().is_nan());
            } else {
                assert_eq!(F8E4M3::from_f32(e4m3.to_f32()).to_bits(), bits);
            }
            if e5m2.to_f32().is_nan() {
                assert!(F8E5M2::from_f32(e5m2.to_f32()).to_f32().is_nan());
            } else {
                assert_eq!(F8E5M2::from_f32(e5m2.to_f32()).to_bits(), bits);
            }
        }
    }

    #[test]
    fn known_bit_patterns_have_the_values_that_the_formats_define() {
        assert_eq!(F8E4M3::from_bits(0x7E).to_f32(), 448.0);
        assert_eq!(F8E4M3::from_bits(0x01).to_f32(), 2f32.powi(-9));
        assert_eq!(F8E4M3::from_f32(1.0).to_bits(), 0x38);
        assert_eq!(F8E5M2::from_bits(0x7B).to_f32(), 57_344.0);
        assert_eq!(F8E5M2::from_bits(0x01).to_f32(), 2f32.powi(-16));
        assert_eq!(F8E5M2::from_f32(-1.0).to_bits(), 0xBC);
        assert_eq!(F8E4M3::from_f32(464.0).to_f32(), 448.0);
        assert!(F8E4M3::from_f32(465.0).to_f32().is_nan());
        assert!(F8E4M3::from_f32(f32::INFINITY).to_f32().is_nan());
        assert!(F8E5M2::from_f32(61_440.0).to_f32().is_infinite());
        assert_eq!(F8E5M2::from_f32(61_439.0).to_f32(), 57_344.0);
        assert_eq!(F8E5M2::from_f32(f32::MIN_POSITIVE).to_bits(), 0);
    }

    #[test]
    fn rounding_finds_the_nearest_value() {
        let e4m3: Vec<f32> = (0..0x7F).map(|b| F8E4M3::from_bits(b).to_f32()).collect();
        let e5m2: Vec<f32> = (0..0x7C).map(|b| F8E5M2::from_bits(b).to_f32()).collect();
        let mut value = 1.0e-6f32;
        while value < 440.0 {
            assert_eq!(
                usize::from(F8E4M3::from_f32(value).to_bits()),
                nearest(&e4m3, value),
                "{value}"
            );
            assert_eq!(
                usize::from(F8E5M2::from_f32(value).to_bits()),
                nearest(&e5m2, value),
                "{value}"
            );
            value *= 1.001;
        }
        for pair in e4m3.windows(2) {
            let tie = (pair[0] + pair[1]) / 2.0;
            assert_eq!(
                usize::from(F8E4M3::from_f32(tie).to_bits()),
                nearest(&e4m3, tie)
            );
        }
    }
}
