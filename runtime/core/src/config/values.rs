//! Parses the values of variables, and makes the errors for values that an option cannot have.

use super::{Config, EndpointChoice};
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::record::RecorderConfig;
use std::net::SocketAddr;
use std::str::FromStr;

/// The largest value of the unsigned integer type `T`.
pub(super) fn largest<T>() -> u64 {
    u64::MAX >> (64 - 8 * size_of::<T>())
}

/// Reads a value of the unsigned integer type `T`.
pub(super) fn number<T: FromStr>(name: &str, value: &str) -> Result<T> {
    let digits = value.trim();
    digits.parse().map_err(|_| {
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        match is_number {
            true => wrong_value(name, value, &format!("at most {}", largest::<T>())),
            false => wrong_value(name, value, "a whole number without a sign"),
        }
    })
}

/// Reads a value that is on or off: `1`, `yes` and the like, or `0`, `no` and the like.
pub(super) fn is_on(name: &str, value: &str) -> Result<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "y" | "yes" | "true" | "on" => Ok(true),
        "0" | "n" | "no" | "false" | "off" => Ok(false),
        _ => Err(wrong_value(name, value, "0 or 1")),
    }
}

/// Reads the value of `RCOMM_ENDPOINT`.
pub(super) fn endpoint(value: &str) -> Result<EndpointChoice> {
    const NAME: &str = "RCOMM_ENDPOINT";
    match value.trim().to_ascii_lowercase().as_str() {
        "off" => return Ok(EndpointChoice::Off),
        "unix" => return Ok(EndpointChoice::Unix),
        _ => {}
    }
    let address = value.trim().strip_prefix("tcp:");
    let address: Option<SocketAddr> = address.and_then(|address| address.parse().ok());
    let address = address.ok_or_else(|| {
        wrong_value(
            NAME,
            value,
            "unix, off, or tcp:ADDRESS:PORT such as tcp:10.0.0.1:0",
        )
    })?;
    if address.ip().is_unspecified() {
        let expected = "the address of one interface, which the other ranks connect to";
        return Err(wrong_value(NAME, value, expected));
    }
    Ok(EndpointChoice::Tcp(address))
}

/// Reads the size of the ring into `config` from one of three variables, each in a unit of its own.
pub(super) fn ring_size(text: impl Fn(&str) -> Option<String>, config: &mut Config) -> Result<()> {
    const ENTRIES: &str = "RCOMM_RING_ENTRIES";
    const STEPS: &str = "RCOMM_RING_STEPS";
    const MIB: &str = "RCOMM_RING_MIB";
    let set: Vec<(&str, String)> = [ENTRIES, STEPS, MIB]
        .into_iter()
        .filter_map(|name| Some((name, text(name)?)))
        .collect();
    let (name, value) = match &set[..] {
        [] => return Ok(()),
        [(name, value)] => (*name, value),
        [(first, _), (second, _), ..] => {
            let message = format!(
                "{first} and {second} are both set: the ring has one size, so set one of them"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
    };
    if name == STEPS {
        let product = value.split_once('x').and_then(|(steps, operations)| {
            let factor = |text: &str| text.trim().parse::<u32>().ok().filter(|&factor| factor > 0);
            factor(steps)?.checked_mul(factor(operations)?)
        });
        let entries = product.filter(|&entries| entries <= RecorderConfig::MAX_ENTRIES);
        config.ring_entries = entries.ok_or_else(|| {
            let expected =
                "steps x operations of a step, as 8x1250, and no more than 1,048,576 operations";
            wrong_value(name, value, expected)
        })?;
        return Ok(());
    }
    let size: u32 = number(name, value)?;
    if size == 0 {
        return Err(wrong_value(name, value, "at least 1"));
    }
    match name {
        MIB => config.ring_mib = Some(size),
        _ => config.ring_entries = size,
    }
    Ok(())
}

/// Adds the name of the variable to the error.
pub(super) fn in_variable(error: Error, name: &str) -> Error {
    Error::new(error.kind(), format!("{name}: {}", error))
}

pub(super) fn wrong_value(name: &str, value: &str, expected: &str) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!("{name} is {value:?}: it must be {expected}"),
    )
}
