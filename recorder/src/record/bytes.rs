//! Packs bytes into words and unpacks them: eight per word, little-endian, the last word padded with zeros.

use super::sync::Read;

/// Collects bytes and passes on each word as it fills.
pub(crate) struct Packer<F: FnMut(u64)> {
    word: u64,
    filled: u32,
    push: F,
}

impl<F: FnMut(u64)> Packer<F> {
    pub(crate) fn new(push: F) -> Self {
        Self {
            word: 0,
            filled: 0,
            push,
        }
    }

    pub(crate) fn byte(&mut self, byte: u8) {
        self.word |= u64::from(byte) << (8 * self.filled);
        self.filled += 1;
        if self.filled == 8 {
            (self.push)(self.word);
            (self.word, self.filled) = (0, 0);
        }
    }

    /// Passes on the last word, if it is not full.
    pub(crate) fn finish(mut self) {
        if self.filled > 0 {
            (self.push)(self.word);
        }
    }
}

/// The words of `bytes` in order.
pub(crate) fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    })
}

/// `len` bytes from word `start` on; zeros beyond the end of the memory.
pub(crate) fn load(memory: &impl Read, start: usize, len: usize) -> Vec<u8> {
    let words = (0..len.div_ceil(8)).map(|index| memory.load(start.saturating_add(index)));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(len);
    bytes
}
