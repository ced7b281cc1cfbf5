//! A reader's access to a ring's file.
//!
//! The file is read, not mapped: whoever truncates it cannot end a reader with `SIGBUS`, and reading a part that is not
//! reserved yet allocates nothing. Missing bytes read as zero; [`View::is_whole`] tells whether any are missing.

use crate::record::sync::{self, Read};
use rustix::fs::fstat;
use rustix::io::{Errno, pread};
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

/// The number of words that are read at a time.
const BLOCK: usize = 128;

/// A ring's file.
#[derive(Debug)]
pub(crate) struct View {
    file: OwnedFd,
    words: usize,
}

impl View {
    /// A view of the first `bytes` bytes of an open file.
    pub(crate) fn new(file: OwnedFd, bytes: usize) -> Self {
        Self {
            file,
            words: bytes / 8,
        }
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Whether the file still has all bytes of the view.
    pub(crate) fn is_whole(&self) -> bool {
        let size = fstat(&self.file).map_or(0, |status| status.st_size);
        usize::try_from(size / 8).is_ok_and(|words| words >= self.words)
    }

    /// The words, read again from the file.
    pub(crate) fn words(&self) -> Words<'_> {
        // Orders the reads through earlier `Words` before those through this one.
        sync::fence(Ordering::Acquire);
        Words {
            view: self,
            block: RefCell::new(Block {
                first: None,
                bytes: [0; BLOCK * 8],
            }),
        }
    }
}

/// The words of a ring's file, read in blocks. The block that was read last is kept until the next fence.
pub(crate) struct Words<'a> {
    view: &'a View,
    block: RefCell<Block>,
}

/// Consecutive words of the file, aligned as in the file's pages, so that the kernel copies whole words.
#[repr(align(64))]
struct Block {
    /// The index of the block's first word; `None` if no words are kept.
    first: Option<usize>,
    bytes: [u8; BLOCK * 8],
}

impl Block {
    /// Reads the words from `first` on. Words that cannot be read become 0.
    fn fill(&mut self, file: &OwnedFd, first: usize) {
        let mut filled = 0;
        while filled < self.bytes.len() {
            match pread(file, &mut self.bytes[filled..], (first * 8 + filled) as u64) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        self.bytes[filled..].fill(0);
        self.first = Some(first);
    }
}

impl Read for Words<'_> {
    fn len(&self) -> usize {
        self.view.words
    }

    fn load(&self, index: usize) -> u64 {
        if index >= self.view.words {
            return 0;
        }
        let first = index - index % BLOCK;
        let mut block = self.block.borrow_mut();
        if block.first != Some(first) {
            block.fill(&self.view.file, first);
        }
        let start = (index - first) * 8;
        let word = block.bytes[start..].first_chunk().copied();
        u64::from_ne_bytes(word.unwrap_or_default())
    }

    fn fence_acquire(&self) {
        self.block.borrow_mut().first = None;
        sync::fence(Ordering::Acquire);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_word_is_read_again_after_a_fence() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 16]).unwrap();
        let view = View::new(file.try_clone().unwrap().into(), 16);
        let words = view.words();
        assert_eq!(words.load(1), u64::from_ne_bytes([1; 8]));
        rustix::io::pwrite(&file, &[2; 8], 8).unwrap();
        words.fence_acquire();
        assert_eq!(words.load(1), u64::from_ne_bytes([2; 8]));
    }

    #[test]
    fn bytes_beyond_the_end_read_as_zero() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 4096]).unwrap();
        let view = View::new(file.try_clone().unwrap().into(), 4096);
        assert!(view.is_whole());
        file.set_len(12).unwrap();
        assert!(!view.is_whole());
        let words = view.words();
        assert_eq!(words.load(0), u64::from_ne_bytes([7; 8]));
        assert_eq!(words.load(1), u64::from_ne_bytes([7, 7, 7, 7, 0, 0, 0, 0]));
        assert_eq!((words.load(2), words.load(512)), (0, 0));
    }
}
