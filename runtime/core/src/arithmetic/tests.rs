use super::*;
use std::io::Write as _;
use std::sync::OnceLock;

/// The levels that this processor has. Those that it lacks are named once.
fn levels() -> Vec<Level> {
    static LEVELS: OnceLock<Vec<Level>> = OnceLock::new();
    LEVELS.get_or_init(find_levels).clone()
}

fn find_levels() -> Vec<Level> {
    let mut levels = vec![Level::Portable];
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c") {
            levels.push(Level::Avx2);
        } else {
            let _ = writeln!(std::io::stderr(), "skipped: this processor has no AVX2");
        }
        if Level::detect() == Level::Avx512 {
            levels.push(Level::Avx512);
        } else {
            let _ = writeln!(std::io::stderr(), "skipped: this processor has no AVX-512");
        }
    }
    levels
}

/// Pseudo-random bytes (xorshift), so that elements of small formats take all bit patterns, NaN and infinity among
/// them.
fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

fn is_nan(dtype: DType, bytes: &[u8]) -> bool {
    match dtype {
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F64 => f64::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F16 => half::f16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::Bf16 => half::bf16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F8E4M3 => bytes[0] & 0x7f == 0x7f,
        DType::F8E5M2 => bytes[0] & 0x7f > 0x7c,
        DType::Complex64 => is_nan(DType::F32, &bytes[..4]) || is_nan(DType::F32, &bytes[4..]),
        DType::Complex128 => is_nan(DType::F64, &bytes[..8]) || is_nan(DType::F64, &bytes[8..]),
        _ => false,
    }
}

#[test]
fn every_operation_on_every_type_equals_the_scalar_reference() {
    let mut cases = 0;
    for &dtype in DType::ALL {
        for &op in ReduceOp::ALL {
            if !is_supported(op, dtype) {
                continue;
            }
            let size = dtype.size().unwrap();
            for (inputs, count) in [
                (1, 5),
                (2, 0),
                (2, 1),
                (2, 131),
                (3, 257),
                (5, 67),
                (40, 70),
            ] {
                let data: Vec<Vec<u8>> = (0..inputs)
                    .map(|input| random_bytes(1 + input as u64 * 77 + count as u64, count * size))
                    .collect();
                let slices: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
                let expected: Vec<u8> = (0..count)
                    .flat_map(|index| {
                        let element: Vec<&[u8]> = slices
                            .iter()
                            .map(|slice| &slice[index * size..(index + 1) * size])
                            .collect();
                        reference::combine_element(op, dtype, &element)
                    })
                    .collect();
                for level in levels() {
                    let pointers: Vec<*const u8> =
                        slices.iter().map(|slice| slice.as_ptr()).collect();
                    let mut out = vec![0xa5; count * size];
                    let mut second_out = vec![0x5a; count * size];
                    let outputs = [second_out.as_mut_ptr()];
                    // SAFETY: inputs and both outputs are vectors of `count * size` bytes, which do not
                    // overlap, and `levels` returns only levels that this processor has.
                    unsafe { run(level, op, dtype, &pointers, &mut out[..], &outputs) };
                    assert_eq!(out, second_out);
                    for index in 0..count {
                        let range = index * size..(index + 1) * size;
                        let (got, want) = (&out[range.clone()], &expected[range]);
                        // Which of two NaNs survives an addition is the processor's choice.
                        let both_nan = is_nan(dtype, got) && is_nan(dtype, want);
                        assert!(
                            got == want || both_nan,
                            "{op} of {dtype}, {inputs} inputs, element {index} of {count}, {level:?}: \
                             {got:02x?}, expected {want:02x?}"
                        );
                    }
                    cases += 1;
                }
            }
        }
    }
    assert!(cases > 500, "only {cases} cases ran");
}

#[test]
fn two_short_inputs_give_the_result_of_the_loops() {
    for &dtype in DType::ALL {
        for &op in ReduceOp::ALL.iter().filter(|&&op| is_supported(op, dtype)) {
            let size = dtype.size().unwrap();
            for count in (0..=few::MAX_BYTES / size).chain([few::MAX_BYTES / size + 1]) {
                let pair = [3, 4].map(|seed| random_bytes(seed + count as u64, count * size));
                let [first, second] = &pair;
                let pointers = [first.as_ptr(), second.as_ptr()];
                let mut expected = vec![0; count * size];
                // SAFETY: both inputs and the output are `count * size` bytes, which do not overlap, and
                // every processor has the portable level.
                unsafe {
                    run(
                        Level::Portable,
                        op,
                        dtype,
                        &pointers,
                        &mut expected[..],
                        &[],
                    )
                };
                let mut apart = vec![0; count * size];
                combine(op, dtype, &[first, second], &mut apart, None);
                let (mut left, mut right) = (first.clone(), second.clone());
                combine_in_place(op, dtype, &mut left, 0, &[second], None);
                combine_in_place(op, dtype, &mut right, 1, &[first], None);
                for (got, output) in [(apart, "apart"), (left, "as first"), (right, "as second")] {
                    let mut elements = got.chunks(size).zip(expected.chunks(size));
                    let are_equal = elements.all(|(got, want)| {
                        got == want || is_nan(dtype, got) && is_nan(dtype, want)
                    });
                    assert!(are_equal, "{op} of {dtype}, {count} elements, {output}");
                }
            }
        }
    }
}

#[test]
fn combine_in_place_uses_its_own_input_at_its_position_in_the_order() {
    for own_index in 0..3 {
        let values = [[1e8f32; 70], [1.0; 70], [-1e8; 70]];
        let bytes: Vec<Vec<u8>> = values
            .iter()
            .map(|value| value.iter().flat_map(|f| f.to_le_bytes()).collect())
            .collect();
        let mut out = bytes[own_index].clone();
        let others: Vec<&[u8]> = (0..3)
            .filter(|&index| index != own_index)
            .map(|index| bytes[index].as_slice())
            .collect();
        combine_in_place(
            ReduceOp::Sum,
            DType::F32,
            &mut out,
            own_index,
            &others,
            None,
        );
        // (1e8 + 1) - 1e8 is 0 in f32; adding -1e8 to 1e8 first would give 1.
        assert!(out.iter().all(|&b| b == 0), "own input at {own_index}");
    }
}

#[test]
fn combine_in_place_refuses_a_position_beyond_the_inputs() {
    // The first is short enough for the short path, the second is not.
    for len in [8, 4_096] {
        let refused = std::panic::catch_unwind(|| {
            let (mut out, other) = (vec![1; len], vec![2; len]);
            combine_in_place(ReduceOp::Sum, DType::I32, &mut out, 2, &[&other], None);
        });
        assert!(refused.is_err(), "{len} bytes");
    }
}

#[test]
fn combine_everywhere_writes_the_result_of_combine_to_every_buffer() {
    for ranks in [1, 2, 3, 9, 40] {
        let data: Vec<Vec<u8>> = (0..ranks)
            .map(|rank| random_bytes(rank + 5, 4 * 333))
            .collect();
        let inputs: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        let mut expected = vec![0; 4 * 333];
        combine(ReduceOp::Sum, DType::I32, &inputs, &mut expected, None);
        let mut buffers = data.clone();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        combine_everywhere(ReduceOp::Sum, DType::I32, &mut slices);
        assert!(buffers.iter().all(|buffer| *buffer == expected), "{ranks}");
    }
}

#[test]
fn narrow_floats_round_once_over_all_inputs() {
    // 2048 + 1 rounds back to 2048 in f16 every time, but 2048 + 4 ones is 2052.
    let large = half::f16::from_f32(2048.0).to_le_bytes();
    let one = half::f16::from_f32(1.0).to_le_bytes();
    let mut out = [0; 2];
    let inputs: [&[u8]; 5] = [&large, &one, &one, &one, &one];
    combine(ReduceOp::Sum, DType::F16, &inputs, &mut out, None);
    assert_eq!(half::f16::from_le_bytes(out).to_f32(), 2052.0);
}

#[test]
fn every_16_bit_float_keeps_its_bits_through_f32_and_a_nan_becomes_quiet() {
    for bits in 0..=u16::MAX {
        for (dtype, quiet) in [(DType::F16, 0x0200u16), (DType::Bf16, 0x0040)] {
            let input = bits.to_le_bytes();
            for level in levels() {
                let block: Vec<u8> = input.repeat(64);
                let mut out = vec![0; block.len()];
                let max = ReduceOp::Max;
                // SAFETY: the input and the output are vectors of one length, which do not overlap, and
                // `levels` returns only levels that this processor has.
                unsafe { run(level, max, dtype, &[block.as_ptr()], &mut out[..], &[]) };
                let got = u16::from_le_bytes([out[0], out[1]]);
                let want = if is_nan(dtype, &input) {
                    bits | quiet
                } else {
                    bits
                };
                assert_eq!(got, want, "{dtype} {bits:04x} at {level:?}");
                assert!(out.chunks(2).all(|pair| pair == &out[..2]));
            }
        }
    }
}

#[test]
fn scaling_uses_the_factor_for_floats_and_its_whole_part_for_integers() {
    let mut halves: Vec<u8> = [1.5f32, -2.0]
        .iter()
        .flat_map(|&value| half::f16::from_f32(value).to_le_bytes())
        .collect();
    scale(DType::F16, &mut halves, 0.5);
    let scaled: Vec<f32> = halves
        .chunks(2)
        .map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())
        .collect();
    assert_eq!(scaled, [0.75, -1.0]);

    let mut integers: Vec<u8> = [3i32, -4]
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    scale(DType::I32, &mut integers, 2.9);
    assert_eq!(
        integers,
        [6i32, -8]
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect::<Vec<_>>()
    );
}
