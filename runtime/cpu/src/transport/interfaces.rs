//! The system's list of network interfaces, which `rustix` does not read.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// An address of a network interface. An interface without an IP address has at least one entry, too.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) is_up: bool,
    /// `None` if it is not an IP address.
    pub(crate) address: Option<IpAddr>,
}

/// Returns the entries in the kernel's order.
///
/// # Errors
/// The system's, if it does not give the list.
pub(crate) fn entries() -> io::Result<Vec<Entry>> {
    let list = List::new()?;
    let mut entries = Vec::new();
    let mut next = list.0;
    // SAFETY: the pointer is null, or leads to a node of the list, which is freed after this loop.
    while let Some(node) = unsafe { next.as_ref() } {
        // SAFETY: a node's name is a C string, freed with the list.
        let name = unsafe { CStr::from_ptr(node.ifa_name) };
        entries.push(Entry {
            name: name.to_string_lossy().into_owned(),
            is_up: node.ifa_flags & libc::IFF_UP as libc::c_uint != 0,
            // SAFETY: a node's address is null or complete, freed with the list.
            address: unsafe { ip_address(node.ifa_addr) },
        });
        next = node.ifa_next;
    }
    Ok(entries)
}

/// Returns the IP address; `None` if the pointer is null, or leads to an address of another family.
///
/// # Safety
/// The pointer is null, or leads to a complete socket address of the family that it names.
unsafe fn ip_address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: every socket address begins with its family.
    let family = unsafe { address.as_ref() }?.sa_family;
    match libc::c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: it is an address of this family.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: it is an address of this family.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// A list that the system has allocated.
struct List(*mut libc::ifaddrs);

impl List {
    fn new() -> io::Result<Self> {
        let mut first = ptr::null_mut();
        // SAFETY: the function writes the pointer to a list there.
        match unsafe { libc::getifaddrs(&raw mut first) } {
            0 => Ok(Self(first)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the list is the system's, and is freed once.
        unsafe { libc::freeifaddrs(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_has_the_address_at_which_this_host_reaches_itself() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap().ip();
        let entries = entries().unwrap();
        let holder = entries.iter().find(|entry| entry.address == Some(address));
        assert!(holder.is_some_and(|entry| entry.is_up && !entry.name.is_empty()));
    }
}
