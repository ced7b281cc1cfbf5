//! The checks that a client makes before it sends: the server would close the connection without a reply.

use super::encoder::Encoder;
use super::protocol::{MAX_KEY, MAX_KEYS, MAX_MESSAGE, MAX_VALUE};
use crate::op::error::{Error, ErrorKind, Result};

/// PyTorch's clients put this before every key of the user.
pub(super) const PREFIX: u8 = b'/';

fn over_limit(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

/// The name under which the server stores a key of the user. Checks its length.
pub(super) fn name_of(key: &str) -> Result<Vec<u8>> {
    let name = [&[PREFIX], key.as_bytes()].concat();
    if name.len() as u64 > MAX_KEY {
        return Err(over_limit(format!(
            "a store key of {} bytes is above the limit of {}",
            key.len(),
            MAX_KEY - 1
        )));
    }
    Ok(name)
}

/// Like [`name_of`] for each of several keys. Checks their number, too.
pub(super) fn names_of(keys: &[&str]) -> Result<Vec<Vec<u8>>> {
    checked_number(keys.len())?;
    keys.iter().map(|key| name_of(key)).collect()
}

/// Checks how many keys one request names.
pub(super) fn checked_number(keys: usize) -> Result<()> {
    if keys as u64 > MAX_KEYS {
        return Err(over_limit(format!(
            "{} keys in one call to the store are above the limit of {MAX_KEYS}",
            keys
        )));
    }
    Ok(())
}

/// Returns the value if it is not too long.
pub(super) fn checked_value(value: &[u8]) -> Result<&[u8]> {
    if value.len() as u64 > MAX_VALUE {
        return Err(over_limit(format!(
            "a store value of {} bytes is above the limit of {MAX_VALUE}",
            value.len()
        )));
    }
    Ok(value)
}

/// Returns the request if it is not too long.
pub(super) fn checked_request(request: Encoder) -> Result<Encoder> {
    if request.bytes().len() > MAX_MESSAGE {
        return Err(over_limit(format!(
            "a store request of {} bytes is above the limit of {MAX_MESSAGE}",
            request.bytes().len()
        )));
    }
    Ok(request)
}
