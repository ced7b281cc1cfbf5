//! Chooses the addresses of this host that the rank publishes to the others.
//!
//! By default the rank publishes the source address of this host's route to the store: an interface that leads to
//! the store most likely leads to the other ranks too, and a job whose store is on the loopback interface stays
//! there. If other hosts of the job cannot reach that address, the rank publishes the host's first address that is
//! not a loopback address. If the configuration names network interfaces, the rank publishes an address of each.
//! If the configuration has neither network interfaces nor the store's address, the rank publishes 127.0.0.1.

use crate::transport::interfaces;
use rcomm_core::backend::support::addresses_of;
use rcomm_core::config::Config;
use rcomm_core::rendezvous::Rendezvous;
use rcomm_core::{Error, ErrorKind, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The most addresses of one rank. A longer list in the store is not a rank's.
pub(super) const MAX_ADDRESSES: usize = 64;

/// Returns the addresses to listen on and to publish: one for each network interface that the configuration names, else
/// one.
///
/// # Errors
/// `InvalidArgument` if an interface that the configuration names cannot be used, or if more are named than a rank may
/// have addresses. `Rendezvous` if there is no route to the store, or if the store's name does not resolve. `Io` if the
/// interfaces cannot be listed. All but the last two list the host's interfaces.
pub(crate) fn choose(config: &Config) -> Result<Vec<IpAddr>> {
    let names = config.socket_ifname.as_deref().unwrap_or_default();
    let names = names.split(',').map(str::trim);
    let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
    if !names.is_empty() {
        let rendezvous = config.rendezvous.as_ref();
        let route = rendezvous.and_then(|rendezvous| route_to_store(rendezvous).ok());
        return Interfaces::of_host()?.addresses_on(&names, route);
    }
    let address = match &config.rendezvous {
        Some(rendezvous) => default_address(rendezvous)?,
        // Without a rendezvous address, the other hosts are unknown.
        None => Ipv4Addr::LOCALHOST.into(),
    };
    Ok(vec![address])
}

fn default_address(rendezvous: &Rendezvous) -> Result<IpAddr> {
    let master: Option<IpAddr> = rendezvous.master_addr.parse().ok();
    let is_wildcard = master.is_some_and(|master| master.is_unspecified());
    if rendezvous.hides_behind_loopback()? || is_wildcard && !rendezvous.is_single_host() {
        // This is the store's own host, and other hosts may not reach the address that it uses for the store.
        let interfaces = Interfaces::of_host()?;
        if let Some((interface, address)) = interfaces.first_beyond_loopback() {
            tracing::warn!(
                "{} gives no address at which other hosts reach this one: using {address}, of the \
                 network interface {interface}. Set RCOMM_SOCKET_IFNAME to choose another",
                rendezvous.master_addr
            );
            return Ok(address);
        }
    }
    route_to_store(rendezvous)
}

fn route_to_store(rendezvous: &Rendezvous) -> Result<IpAddr> {
    let mut targets = addresses_of(&rendezvous.master_addr)?;
    // Sorted, so that all hosts use the same address family, whatever the order of their resolvers' answers.
    targets.sort_by_key(|target| (target.is_loopback(), target.is_ipv6()));
    let mut cause = None;
    for target in targets {
        match address_towards(SocketAddr::new(target, rendezvous.master_port)) {
            Ok(address) if is_usable_by_others(address) => return Ok(address),
            Ok(_) => {}
            Err(error) => cause = Some(error),
        }
    }
    let message = format!(
        "no address of this host leads to the store at {}: name a network interface with \
         RCOMM_SOCKET_IFNAME. There are {}",
        rendezvous.master_addr,
        Interfaces::of_host()?
    );
    let error = Error::new(ErrorKind::Rendezvous, message);
    Err(match cause {
        Some(cause) => error.with_source(cause),
        None => error,
    })
}

/// The source address that the kernel would use towards `target`. Sends nothing.
fn address_towards(target: SocketAddr) -> io::Result<IpAddr> {
    let family = match target {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
    rustix::net::connect(&socket, &target)?;
    let local = rustix::net::getsockname(&socket)?;
    Ok(SocketAddr::try_from(local)?.ip())
}

/// Whether the address may be published. Unspecified addresses are not usable, nor are link-local addresses of IPv6:
/// these need the number of an interface, and each host numbers its own interfaces.
fn is_usable_by_others(address: IpAddr) -> bool {
    !address.is_unspecified()
        && match address {
            IpAddr::V4(_) => true,
            IpAddr::V6(address) => !address.is_unicast_link_local(),
        }
}

/// A network interface, with those of its addresses that [may be published](is_usable_by_others).
struct Interface {
    name: String,
    is_up: bool,
    addresses: Vec<IpAddr>,
}

/// The network interfaces of this host, in the kernel's order.
struct Interfaces(Vec<Interface>);

impl Interfaces {
    fn of_host() -> Result<Self> {
        let found = interfaces::entries()
            .map_err(|error| Error::io("cannot list the network interfaces", error))?;
        let mut interfaces: Vec<Interface> = Vec::new();
        for entry in found {
            let known = interfaces.iter().position(|known| known.name == entry.name);
            let index = known.unwrap_or_else(|| {
                interfaces.push(Interface {
                    name: entry.name,
                    is_up: entry.is_up,
                    addresses: Vec::new(),
                });
                interfaces.len() - 1
            });
            let address = entry
                .address
                .filter(|&address| is_usable_by_others(address));
            interfaces[index].addresses.extend(address);
        }
        Ok(Self(interfaces))
    }

    /// Returns an address of each of these interfaces, in this order, each address once.
    fn addresses_on(&self, names: &[&str], route: Option<IpAddr>) -> Result<Vec<IpAddr>> {
        let mut addresses = Vec::new();
        for name in names {
            let address = self.address_on(name, route)?;
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if addresses.len() > MAX_ADDRESSES {
            let message = format!(
                "{} network interfaces are named, but a rank may have at most {MAX_ADDRESSES} addresses: name \
                 fewer with RCOMM_SOCKET_IFNAME. There are {self}",
                addresses.len()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        Ok(addresses)
    }

    /// Returns an address of the interface `name`: `route`, the address that leads to the store, if the interface has
    /// it; else the first of the same family; else the first. Without a route, IPv4 comes before IPv6.
    fn address_on(&self, name: &str, route: Option<IpAddr>) -> Result<IpAddr> {
        let refuse = |reason: &str| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("cannot use the network interface {name:?}: {reason}. There are {self}"),
            )
        };
        let interface = self.0.iter().find(|interface| interface.name == name);
        let interface = interface.ok_or_else(|| refuse("this host has none of that name"))?;
        if !interface.is_up {
            return Err(refuse("it is down"));
        }
        let addresses = &interface.addresses;
        let best = addresses.iter().min_by_key(|&&address| match route {
            Some(route) => (address != route, address.is_ipv4() != route.is_ipv4()),
            None => (true, address.is_ipv6()),
        });
        best.copied()
            .ok_or_else(|| refuse("it has no address that other hosts could use"))
    }

    /// The first address that is not a loopback address, IPv4 before IPv6, and its interface.
    fn first_beyond_loopback(&self) -> Option<(&str, IpAddr)> {
        let up = self.0.iter().filter(|interface| interface.is_up);
        up.flat_map(|interface| {
            let addresses = interface.addresses.iter();
            addresses.map(|&address| (interface.name.as_str(), address))
        })
        .filter(|(_, address)| !address.is_loopback())
        .min_by_key(|(_, address)| address.is_ipv6())
    }
}

impl fmt::Display for Interfaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, interface) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{} (", interface.name)?;
            if !interface.is_up {
                f.write_str("down")?;
            } else if interface.addresses.is_empty() {
                f.write_str("no address")?;
            }
            for (index, address) in interface.addresses.iter().enumerate() {
                let comma = if index == 0 && interface.is_up {
                    ""
                } else {
                    ", "
                };
                write!(f, "{comma}{address}")?;
            }
            f.write_str(")")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn interface(name: &str, is_up: bool, addresses: &[&str]) -> Interface {
        Interface {
            name: name.into(),
            is_up,
            addresses: addresses.iter().map(|text| ip(text)).collect(),
        }
    }

    fn host() -> Interfaces {
        Interfaces(vec![
            interface("lo", true, &["127.0.0.1", "::1"]),
            interface("ib0", true, &["2001:db8::7"]),
            interface("eth0", true, &["10.0.0.5", "10.0.0.6", "2001:db8::5"]),
            interface("eth1", false, &["10.1.0.5"]),
            interface("eth2", true, &[]),
        ])
    }

    fn config_with_store_at(master_addr: &str) -> Config {
        let rendezvous = Rendezvous::explicit(0, 2, master_addr, 29500).unwrap();
        Config {
            rendezvous: Some(rendezvous),
            ..Config::default()
        }
    }

    #[test]
    fn named_interface_gives_the_address_of_the_route_or_one_of_its_family() {
        let on = |name: &str, route: Option<&str>| host().address_on(name, route.map(ip)).unwrap();
        assert_eq!(on("eth0", Some("10.0.0.6")), ip("10.0.0.6"));
        assert_eq!(on("eth0", Some("10.9.0.1")), ip("10.0.0.5"));
        assert_eq!(on("eth0", Some("2001:db8:9::1")), ip("2001:db8::5"));
        assert_eq!(on("eth0", None), ip("10.0.0.5"));
        assert_eq!(on("ib0", Some("10.0.0.5")), ip("2001:db8::7"));
    }

    #[test]
    fn each_interface_of_a_list_gives_one_address() {
        let on = |names: &[&str]| host().addresses_on(names, Some(ip("10.0.0.6")));
        let expected = [ip("10.0.0.6"), ip("2001:db8::7")];
        assert_eq!(on(&["eth0", "ib0", "eth0"]).unwrap(), expected);
        assert_eq!(
            on(&["ib0", "eth9"]).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
        let interfaces = (0..=MAX_ADDRESSES).map(|at| Interface {
            name: format!("eth{at}"),
            is_up: true,
            addresses: vec![ip(&format!("10.0.0.{at}"))],
        });
        let many = Interfaces(interfaces.collect());
        let names: Vec<&str> = many.0.iter().map(|interface| &*interface.name).collect();
        assert_eq!(many.addresses_on(&names[1..], None).unwrap().len(), 64);
        let error = many.addresses_on(&names, None).unwrap_err().to_string();
        assert!(error.contains("65 network interfaces are named"), "{error}");
        let config = Config {
            socket_ifname: Some(" lo , lo,".to_owned()),
            ..Config::default()
        };
        assert_eq!(choose(&config).unwrap(), [ip("127.0.0.1")]);
    }

    #[test]
    fn unusable_interface_is_refused_with_a_list_of_all_interfaces() {
        let refusal = |name| {
            let error = host().address_on(name, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        assert_eq!(
            refusal("eth9"),
            "cannot use the network interface \"eth9\": this host has none of that name. There are \
             lo (127.0.0.1, ::1), ib0 (2001:db8::7), eth0 (10.0.0.5, 10.0.0.6, 2001:db8::5), \
             eth1 (down, 10.1.0.5), eth2 (no address)"
        );
        assert!(refusal("eth1").contains("it is down"));
        assert!(refusal("eth2").contains("it has no address that other hosts could use"));
    }

    #[test]
    fn first_address_beyond_loopback_is_of_ipv4_if_there_is_one() {
        let mut host = host();
        assert_eq!(host.first_beyond_loopback(), Some(("eth0", ip("10.0.0.5"))));
        host.0.remove(2);
        assert_eq!(
            host.first_beyond_loopback(),
            Some(("ib0", ip("2001:db8::7")))
        );
        host.0.truncate(1);
        assert_eq!(host.first_beyond_loopback(), None);
    }

    #[test]
    fn job_whose_store_is_on_the_loopback_interface_uses_that_interface() {
        assert_eq!(choose(&Config::default()).unwrap(), [ip("127.0.0.1")]);
        assert_eq!(
            choose(&config_with_store_at("127.0.0.1")).unwrap(),
            [ip("127.0.0.1")]
        );
        assert_eq!(
            choose(&config_with_store_at("localhost")).unwrap(),
            [ip("127.0.0.1")]
        );
    }

    #[test]
    fn wildcard_store_address_gives_an_address_beyond_the_loopback_interface() {
        let interfaces = Interfaces::of_host().unwrap();
        let beyond = interfaces.first_beyond_loopback();
        let expected = beyond.map_or(ip("127.0.0.1"), |(_, address)| address);
        assert_eq!(
            choose(&config_with_store_at("0.0.0.0")).unwrap(),
            [expected]
        );
    }

    #[test]
    fn this_host_lists_its_loopback_interface() {
        let interfaces = Interfaces::of_host().unwrap();
        assert_eq!(interfaces.address_on("lo", None).unwrap(), ip("127.0.0.1"));
    }
}
