//! Parses the values of variables, and makes the errors for values that an option cannot have.

use super::EndpointChoice;
use crate::op::error::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use std::str::FromStr;

pub(super) fn number<T: FromStr>(name: &str, value: &str) -> Result<T> {
    let parsed = value.trim().parse();
    parsed.map_err(|_| wrong_value(name, value, "a whole number that is not too large"))
}

pub(super) fn is_on(name: &str, value: &str) -> Result<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "y" | "yes" | "true" | "on" => Ok(true),
        "0" | "n" | "no" | "false" | "off" => Ok(false),
        _ => Err(wrong_value(name, value, "0 or 1")),
    }
}

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
