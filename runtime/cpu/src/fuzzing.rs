//! The decoders of this backend, for the fuzzer.

use crate::collective::op_header::{OP_HEADER_LEN, OpHeader, compare};
use crate::mesh::handshake::{HANDSHAKE_LEN, Handshake, Identity};
use crate::registered;
use crate::window;
use rcomm_core::Secret;

pub use crate::p2p::fuzz::receive_any_bytes;

/// Reads `bytes` as each of the messages of fixed length that ranks send: a handshake, a header before a collective, an
/// offer of memory, and the description of a part and the request of a window.
pub fn read_fixed_messages(bytes: &[u8]) {
    let identity = Identity::new(1, 4, "job", &Secret::from_text("secret"));
    if let Some(handshake) = bytes.first_chunk::<HANDSHAKE_LEN>() {
        // Any result is accepted, but the decoder must not panic.
        let _ = Handshake::decode(handshake, &identity);
    }
    if let Some(op_header) = bytes
        .first_chunk::<OP_HEADER_LEN>()
        .and_then(OpHeader::decode)
    {
        assert_eq!(OpHeader::decode(&op_header.encode()), Some(op_header));
        let second = bytes[OP_HEADER_LEN..].first_chunk::<OP_HEADER_LEN>();
        if let Some(second) = second.and_then(OpHeader::decode) {
            let _ = compare(&[op_header, second, op_header]);
        }
    }
    registered::read_any_bytes(bytes);
    window::read_any_bytes(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// The fuzz target `read_messages` goes further.
    #[test]
    fn no_message_of_the_corpus_and_no_variant_of_one_panics() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus");
        let files = fs::read_dir(corpus.join("read_messages"));
        let files: Vec<_> = files.expect("the corpus is checked in").flatten().collect();
        assert!(files.len() >= 4, "{} inputs in the corpus", files.len());
        for file in files {
            let input = fs::read(file.path()).expect("the input can be read");
            println!("{}", file.path().display());
            for offset in 0..=input.len() {
                let mut changed = input.clone();
                if let Some(byte) = changed.get_mut(offset) {
                    *byte ^= 0x81;
                }
                for bytes in [&changed[..], &input[..offset]] {
                    read_fixed_messages(bytes);
                    receive_any_bytes(bytes).expect("a connection over the loopback interface");
                }
            }
        }
    }
}
