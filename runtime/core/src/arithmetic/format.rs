//! How elements are stored in memory, and in which type they are combined.

use super::narrow;

/// Conversions that a processor may have instructions for.
pub(super) trait Isa {
    /// Loads sixteen `f16` at `from` as `f32`.
    ///
    /// # Safety
    /// 32 bytes at `from` are readable, and the processor has this instruction set.
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> [f32; 16] {
        // SAFETY: the caller guarantees 32 readable bytes at `from`, the size of sixteen `u16`, of which every
        // bit pattern is a value; the read needs no alignment.
        let bits = unsafe { from.cast::<[u16; 16]>().read_unaligned() };
        bits.map(narrow::widen::<5, 10, false>)
    }

    /// Rounds sixteen values to `f16` and stores them at `to`.
    ///
    /// # Safety
    /// 32 bytes at `to` are writable, and the processor has this instruction set.
    #[inline(always)]
    unsafe fn store_f16(to: *mut u8, values: [f32; 16]) {
        let bits = values.map(narrow::narrow::<5, 10, false>);
        // SAFETY: the caller guarantees that 32 bytes at `to` can be written, which is sixteen `u16`; the
        // write needs no alignment.
        unsafe { to.cast::<[u16; 16]>().write_unaligned(bits) }
    }
}

/// The conversions without special instructions.
pub(super) struct Portable;
impl Isa for Portable {}

/// The conversions by F16C, eight at a time.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2;
#[cfg(target_arch = "x86_64")]
impl Isa for Avx2 {
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> [f32; 16] {
        use std::arch::x86_64::*;
        // SAFETY: the caller guarantees that 32 bytes at `from` can be read, which the two loads of 16 bytes
        // do without needing alignment, and the processor has AVX2 and F16C. Two registers of eight floats
        // have the size of an array of sixteen, and every bit pattern is a float.
        unsafe {
            let low = _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtph_ps(_mm_loadu_si128(from.add(16).cast()));
            std::mem::transmute::<[__m256; 2], [f32; 16]>([low, high])
        }
    }

    #[inline(always)]
    unsafe fn store_f16(to: *mut u8, values: [f32; 16]) {
        use std::arch::x86_64::*;
        // SAFETY: an array of sixteen floats has the size of two registers of eight. The caller guarantees
        // that 32 bytes at `to` can be written, which the two stores of 16 bytes do without needing
        // alignment, and the processor has AVX2 and F16C.
        unsafe {
            let [low, high] = std::mem::transmute::<[f32; 16], [__m256; 2]>(values);
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
            _mm_storeu_si128(to.cast(), low);
            _mm_storeu_si128(to.add(16).cast(), high);
        }
    }
}

/// The conversions by AVX-512 F, sixteen at a time.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx512;
#[cfg(target_arch = "x86_64")]
impl Isa for Avx512 {
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> [f32; 16] {
        use std::arch::x86_64::*;
        // SAFETY: the caller guarantees that 32 bytes at `from` can be read, which the load does without
        // needing alignment, and the processor has AVX-512 F. A register of sixteen floats has the size of an
        // array of sixteen, and every bit pattern is a float.
        unsafe {
            let wide = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
            std::mem::transmute::<__m512, [f32; 16]>(wide)
        }
    }

    #[inline(always)]
    unsafe fn store_f16(to: *mut u8, values: [f32; 16]) {
        use std::arch::x86_64::*;
        // SAFETY: an array of sixteen floats has the size of a register of sixteen. The caller guarantees
        // that 32 bytes at `to` can be written, which the store does without needing alignment, and the
        // processor has AVX-512 F.
        unsafe {
            let wide = std::mem::transmute::<[f32; 16], __m512>(values);
            let bits = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
            _mm256_storeu_si256(to.cast(), bits);
        }
    }
}

/// One element type in memory, and the type in which its elements are combined.
pub(super) trait Format {
    /// The type in which elements are combined.
    type Acc: Copy;
    /// The size of one element in bytes.
    const SIZE: usize;

    /// Loads one element at `from`, which need not be aligned.
    ///
    /// # Safety
    /// `SIZE` bytes at `from` are readable.
    unsafe fn load(from: *const u8) -> Self::Acc;

    /// Rounds one value to the element type and stores it at `to`, which need not be aligned.
    ///
    /// # Safety
    /// `SIZE` bytes at `to` are writable.
    unsafe fn store(to: *mut u8, value: Self::Acc);

    /// Loads `N` elements at `from`.
    ///
    /// # Safety
    /// `N * SIZE` bytes at `from` are readable, and the processor has `I`.
    #[inline(always)]
    unsafe fn load_block<I: Isa, const N: usize>(from: *const u8) -> [Self::Acc; N] {
        // SAFETY: `index` is less than `N`, so these `SIZE` bytes are among the `N * SIZE` that the caller
        // guarantees to be readable.
        std::array::from_fn(|index| unsafe { Self::load(from.add(index * Self::SIZE)) })
    }

    /// Rounds `N` values to the element type and stores them at `to`.
    ///
    /// # Safety
    /// `N * SIZE` bytes at `to` are writable, and the processor has `I`.
    #[inline(always)]
    unsafe fn store_block<I: Isa, const N: usize>(to: *mut u8, values: [Self::Acc; N]) {
        for (index, value) in values.into_iter().enumerate() {
            // SAFETY: `index` is less than `N`, so these `SIZE` bytes are among the `N * SIZE` that the caller
            // guarantees to be writable.
            unsafe { Self::store(to.add(index * Self::SIZE), value) }
        }
    }
}

/// A type that is combined in the form in which it is stored.
pub(super) struct Plain<T>(std::marker::PhantomData<T>);
impl<T: Copy> Format for Plain<T> {
    type Acc = T;
    const SIZE: usize = size_of::<T>();

    #[inline(always)]
    unsafe fn load(from: *const u8) -> T {
        // SAFETY: the caller guarantees that `SIZE` bytes at `from` can be read, the size of a `T`; the read
        // needs no alignment. `T` is always a number type here, of which every bit pattern is a value.
        unsafe { from.cast::<T>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut u8, value: T) {
        // SAFETY: the caller guarantees that `SIZE` bytes at `to` can be written, the size of a `T`; the
        // write needs no alignment.
        unsafe { to.cast::<T>().write_unaligned(value) }
    }
}

/// A boolean in one byte: anything but 0 is true and is written as 1.
pub(super) struct BoolByte;
impl Format for BoolByte {
    type Acc = u8;
    const SIZE: usize = 1;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> u8 {
        // SAFETY: the caller guarantees that one byte at `from` can be read. It is read as `u8`, of which every bit
        // pattern is a value, and not as `bool`.
        u8::from(unsafe { from.read() } != 0)
    }

    #[inline(always)]
    unsafe fn store(to: *mut u8, value: u8) {
        // SAFETY: the caller guarantees that one byte at `to` can be written.
        unsafe { to.write(u8::from(value != 0)) }
    }
}

macro_rules! widened {
    ($(#[$meta:meta])* $name:ident, $bits:ty, $widen:expr, $narrow:expr) => {
        $(#[$meta])*
        pub(super) struct $name;
        impl Format for $name {
            type Acc = f32;
            const SIZE: usize = size_of::<$bits>();

            #[inline(always)]
            unsafe fn load(from: *const u8) -> f32 {
                // SAFETY: the caller guarantees that `SIZE` bytes at `from` can be read, the size of `$bits`,
                // an integer; the read needs no alignment.
                let bits = unsafe { from.cast::<$bits>().read_unaligned() };
                $widen(bits.into())
            }

            #[inline(always)]
            unsafe fn store(to: *mut u8, value: f32) {
                let bits = $narrow(value) as $bits;
                // SAFETY: the caller guarantees that `SIZE` bytes at `to` can be written, the size of
                // `$bits`; the write needs no alignment.
                unsafe { to.cast::<$bits>().write_unaligned(bits) }
            }
        }
    };
}

widened!(/// `bf16`, combined in `f32`.
    Bf16, u16, narrow::widen_bf16, narrow::narrow_bf16);
widened!(/// fp8 e4m3fn, combined in `f32`.
    F8E4M3, u8, narrow::widen::<4, 3, true>, narrow::narrow::<4, 3, true>);
widened!(/// fp8 e5m2, combined in `f32`.
    F8E5M2, u8, narrow::widen::<5, 2, false>, narrow::narrow::<5, 2, false>);

/// `f16`, combined in `f32`. Blocks are converted by the processor's instructions where it has them.
pub(super) struct F16;
impl Format for F16 {
    type Acc = f32;
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> f32 {
        // SAFETY: the caller guarantees that two bytes at `from` can be read; the read needs no alignment.
        narrow::widen::<5, 10, false>(unsafe { from.cast::<u16>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(to: *mut u8, value: f32) {
        let bits = narrow::narrow::<5, 10, false>(value);
        // SAFETY: the caller guarantees that two bytes at `to` can be written; the write needs no alignment.
        unsafe { to.cast::<u16>().write_unaligned(bits) }
    }

    #[inline(always)]
    unsafe fn load_block<I: Isa, const N: usize>(from: *const u8) -> [f32; N] {
        const { assert!(N.is_multiple_of(16)) };
        let mut values = [0.0; N];
        for (index, chunk) in values.chunks_exact_mut(16).enumerate() {
            // SAFETY: the caller guarantees that `N` elements of two bytes at `from` can be read. `N` is a
            // multiple of 16 (checked), so the 32 bytes at `index * 32` are among them; and the processor has
            // `I`.
            chunk.copy_from_slice(&unsafe { I::load_f16(from.add(index * 32)) });
        }
        values
    }

    #[inline(always)]
    unsafe fn store_block<I: Isa, const N: usize>(to: *mut u8, values: [f32; N]) {
        const { assert!(N.is_multiple_of(16)) };
        for (index, chunk) in values.chunks_exact(16).enumerate() {
            let mut sixteen = [0.0; 16];
            sixteen.copy_from_slice(chunk);
            // SAFETY: the caller guarantees that `N` elements of two bytes at `to` can be written. `N` is a
            // multiple of 16 (checked), so the 32 bytes at `index * 32` are among them; and the processor has
            // `I`.
            unsafe { I::store_f16(to.add(index * 32), sixteen) }
        }
    }
}
