//! Computes for the tests what the reductions must return, one element at a time.

use half::{bf16, f16};
use rcomm_recorder::model::{DType, ReduceOp};

fn fold_float(op: ReduceOp, values: &[f64], round: impl Fn(f64) -> f64) -> f64 {
    let mut result = values[0];
    for &value in &values[1..] {
        result = match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => round(result + value),
            ReduceOp::Product => round(result * value),
            ReduceOp::Min if result.is_nan() || result < value => result,
            ReduceOp::Max if result.is_nan() || result > value => result,
            ReduceOp::Min | ReduceOp::Max => value,
            _ => unreachable!("floats have no {op}"),
        };
    }
    if op == ReduceOp::Avg {
        result = round(result / values.len() as f64);
    }
    result
}

/// Folds in `f32` arithmetic. Computing in `f64` and rounding each step to `f32` is exact for this: 53 significant bits
/// are at least 2 · 24 + 2.
fn fold_f32(op: ReduceOp, values: &[f32]) -> f32 {
    let wide: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
    fold_float(op, &wide, |value| f64::from(value as f32)) as f32
}

fn fold_integer(op: ReduceOp, values: &[i128], bits: u32, is_signed: bool) -> i128 {
    let wrap = |value: i128| {
        let value = value & ((1i128 << bits) - 1);
        if is_signed && value >> (bits - 1) != 0 {
            value - (1i128 << bits)
        } else {
            value
        }
    };
    let mut result = values[0];
    for &value in &values[1..] {
        result = wrap(match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => result + value,
            ReduceOp::Product => result.wrapping_mul(value),
            ReduceOp::Min => result.min(value),
            ReduceOp::Max => result.max(value),
            ReduceOp::BitAnd => result & value,
            ReduceOp::BitOr => result | value,
            ReduceOp::BitXor => result ^ value,
        });
    }
    if op == ReduceOp::Avg {
        result /= values.len() as i128;
    }
    result
}

/// Every finite non-negative value of an fp8 format, computed from the format's definition, with its bit pattern.
fn fp8_values(dtype: DType) -> Vec<(f64, u8)> {
    let (mantissa_bits, bias, max_code) = match dtype {
        DType::F8E4M3 => (3, 7, 0x7e),
        DType::F8E5M2 => (2, 15, 0x7b),
        _ => unreachable!("{dtype} is not fp8"),
    };
    (0..=max_code)
        .map(|code: u8| {
            let exponent = i32::from(code >> mantissa_bits);
            let mantissa = f64::from(code & ((1 << mantissa_bits) - 1));
            let mantissa_steps = f64::from(1 << mantissa_bits);
            let value = if exponent == 0 {
                mantissa / mantissa_steps * 2f64.powi(1 - bias)
            } else {
                (1.0 + mantissa / mantissa_steps) * 2f64.powi(exponent - bias)
            };
            (value, code)
        })
        .collect()
}

fn decode_fp8(dtype: DType, code: u8) -> f32 {
    let values = fp8_values(dtype);
    let magnitude = match values.iter().find(|(_, known)| *known == code & 0x7f) {
        Some((value, _)) => *value as f32,
        None if dtype == DType::F8E5M2 && code & 0x7f == 0x7c => f32::INFINITY,
        None => f32::NAN,
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// Rounds to the nearest value, ties to even; beyond the largest, E4M3 becomes NaN and E5M2 infinity.
fn encode_fp8(dtype: DType, value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let values = fp8_values(dtype);
    let largest = values[values.len() - 1].0;
    let step = largest - values[values.len() - 2].0;
    let magnitude = f64::from(value.abs());
    let code = if value.is_nan() {
        0x7f
    } else if magnitude > largest + step / 2.0
        || (magnitude == largest + step / 2.0 && values[values.len() - 1].1 & 1 == 1)
    {
        if dtype == DType::F8E4M3 { 0x7f } else { 0x7c }
    } else {
        values
            .iter()
            .min_by(|left, right| {
                let distance = |value: f64| (value - magnitude).abs();
                let nearer = distance(left.0).total_cmp(&distance(right.0));
                nearer.then((left.1 & 1).cmp(&(right.1 & 1)))
            })
            .expect("an fp8 format without values")
            .1
    };
    sign | code
}

/// Reduces one element per rank; returns the result's little-endian bytes.
pub(super) fn combine_element(op: ReduceOp, dtype: DType, elements: &[&[u8]]) -> Vec<u8> {
    macro_rules! integer {
        ($t:ty) => {{
            let values: Vec<i128> = elements
                .iter()
                .map(|element| i128::from(<$t>::from_le_bytes((*element).try_into().unwrap())))
                .collect();
            let result = fold_integer(op, &values, <$t>::BITS, <$t>::MIN != 0);
            (result as $t).to_le_bytes().to_vec()
        }};
    }
    let f32_at = |element: &[u8]| f32::from_le_bytes(element.try_into().unwrap());
    let f64_at = |element: &[u8]| f64::from_le_bytes(element.try_into().unwrap());
    let fold_as_f32 = |decode: &dyn Fn(&[u8]) -> f32| {
        fold_f32(
            op,
            &elements
                .iter()
                .map(|element| decode(element))
                .collect::<Vec<_>>(),
        )
    };
    let u16_at = |element: &[u8]| u16::from_le_bytes(element.try_into().unwrap());
    match dtype {
        DType::F32 => fold_as_f32(&f32_at).to_le_bytes().to_vec(),
        DType::F64 => {
            let values: Vec<f64> = elements.iter().map(|element| f64_at(element)).collect();
            fold_float(op, &values, |value| value)
                .to_le_bytes()
                .to_vec()
        }
        DType::F16 => {
            let result = fold_as_f32(&|element| f16::from_bits(u16_at(element)).to_f32());
            f16::from_f32(result).to_le_bytes().to_vec()
        }
        DType::Bf16 => {
            let result = fold_as_f32(&|element| bf16::from_bits(u16_at(element)).to_f32());
            bf16::from_f32(result).to_le_bytes().to_vec()
        }
        DType::F8E4M3 | DType::F8E5M2 => {
            vec![encode_fp8(
                dtype,
                fold_as_f32(&|element| decode_fp8(dtype, element[0])),
            )]
        }
        DType::I8 => integer!(i8),
        DType::U8 => integer!(u8),
        DType::I16 => integer!(i16),
        DType::U16 => integer!(u16),
        DType::I32 => integer!(i32),
        DType::U32 => integer!(u32),
        DType::I64 => integer!(i64),
        DType::U64 => integer!(u64),
        DType::Bool => {
            let all = elements.iter().all(|element| element[0] != 0);
            let any = elements.iter().any(|element| element[0] != 0);
            let odd = elements.iter().filter(|element| element[0] != 0).count() % 2 == 1;
            vec![u8::from(match op {
                ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => all,
                ReduceOp::BitXor => odd,
                _ => any,
            })]
        }
        DType::Complex64 | DType::Complex128 => {
            let part_size = dtype.size().unwrap() / 2;
            let part_dtype = if part_size == 4 {
                DType::F32
            } else {
                DType::F64
            };
            if op != ReduceOp::Product {
                let reduced_part = |from: usize| {
                    let parts: Vec<&[u8]> = elements
                        .iter()
                        .map(|element| &element[from..from + part_size])
                        .collect();
                    combine_element(op, part_dtype, &parts)
                };
                return [reduced_part(0), reduced_part(part_size)].concat();
            }
            let round = |v: f64| {
                if part_size == 4 {
                    f64::from(v as f32)
                } else {
                    v
                }
            };
            let number = |element: &[u8]| {
                if part_size == 4 {
                    f64::from(f32_at(element))
                } else {
                    f64_at(element)
                }
            };
            let mut result = (
                number(&elements[0][..part_size]),
                number(&elements[0][part_size..]),
            );
            for element in &elements[1..] {
                let (real, imag) = result;
                let next_real = number(&element[..part_size]);
                let next_imag = number(&element[part_size..]);
                result = (
                    round(round(real * next_real) - round(imag * next_imag)),
                    round(round(real * next_imag) + round(imag * next_real)),
                );
            }
            let bytes = |v: f64| {
                if part_size == 4 {
                    (v as f32).to_le_bytes().to_vec()
                } else {
                    v.to_le_bytes().to_vec()
                }
            };
            [bytes(result.0), bytes(result.1)].concat()
        }
        DType::Other => unreachable!("no arithmetic on an unknown type"),
    }
}
