//! The decoders of this backend, for the fuzzer.

use super::hello::{HELLO_LEN, Hello, Identity};
use super::notice::{NOTICE_LEN, Notice, compare};
use super::registered;
use super::window;
use rcomm_core::Secret;

pub use super::p2p::fuzz::receive_any_bytes;

/// Reads `bytes` as each of the fixed heads that ranks send: the first words of a caller, a notice before
/// a collective, an offer of memory, and what is said and asked of a window.
pub fn read_first_words(bytes: &[u8]) {
    let identity = Identity::new(1, 4, "job", &Secret::from_text("secret"));
    if let Some(hello) = bytes.first_chunk::<HELLO_LEN>() {
        // What it says does not matter; that it says something does.
        let _ = Hello::decode(hello, &identity);
    }
    if let Some(notice) = bytes.first_chunk::<NOTICE_LEN>().and_then(Notice::decode) {
        assert_eq!(Notice::decode(&notice.encode()), Some(notice));
        let second = bytes[NOTICE_LEN..].first_chunk::<NOTICE_LEN>();
        if let Some(second) = second.and_then(Notice::decode) {
            let _ = compare(&[notice, second, notice]);
        }
    }
    registered::read_any_bytes(bytes);
    window::read_any_bytes(bytes);
}
