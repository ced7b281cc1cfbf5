//! Makes hosts, which are network namespaces, joined by a bridge in another namespace.
//!
//! A direction is cut by a wrong permanent neighbor entry: packets go to no machine, and both ends observe
//! the same as with a cut cable.

use crate::relay::{self, Relay};
use crate::scenario::Cut;
use anyhow::{Context, ensure};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A hardware address that no host has.
const UNUSED_ADDRESS: &str = "02:00:00:00:00:99";

/// The ends of the link between the bridge and a relay.
const BRIDGE_END: &str = "relay0";
const RELAY_END: &str = "relay1";

/// Several hosts in one network. They are removed when the value is dropped.
pub(crate) struct Hosts {
    names: Vec<String>,
    switch: String,
    /// The host behind a relay, and the relay.
    relay: Mutex<Option<(usize, Relay)>>,
}

impl Hosts {
    /// Makes this many hosts.
    ///
    /// # Errors
    /// The reason why this system cannot make them: a missing privilege, or a missing program.
    pub(crate) fn make(count: u32) -> anyhow::Result<Self> {
        let prefix = format!("rcf{}", std::process::id());
        let hosts = Self {
            names: (0..count).map(|host| format!("{prefix}h{host}")).collect(),
            switch: format!("{prefix}sw"),
            relay: Mutex::default(),
        };
        let switch = hosts.switch.as_str();
        ip(&["netns", "add", switch])?;
        ip(&["-n", switch, "link", "add", "name", "br0", "type", "bridge"])?;
        ip(&["-n", switch, "link", "set", "br0", "up"])?;
        for (at, name) in hosts.names.iter().enumerate() {
            let port = format!("p{at}");
            ip(&["netns", "add", name])?;
            let pair = ["-n", switch, "link", "add", "name", &port, "type", "veth"];
            ip(&[&pair[..], &["peer", "name", "eth0", "netns", name]].concat())?;
            ip(&["-n", switch, "link", "set", &port, "master", "br0", "up"])?;
            let address = format!("{}/24", Self::address(at));
            ip(&["-n", name, "addr", "add", &address, "dev", "eth0"])?;
            ip(&["-n", name, "link", "set", "eth0", "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(hosts)
    }

    pub(crate) fn address(host: usize) -> String {
        format!("10.77.0.{}", host + 1)
    }

    /// A command that runs on this host.
    pub(crate) fn command(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host], program]);
        command
    }

    /// Applies a fault to a host's network. A temporary fault is over when this returns.
    pub(crate) fn apply(&self, host: usize, cut: Cut, timeout: Duration) -> anyhow::Result<()> {
        match cut {
            Cut::BothWays | Cut::Vanished => self.sever(host, true, true),
            Cut::Inward => self.sever(host, true, false),
            Cut::Outward => self.sever(host, false, true),
            Cut::LinkDown => ip(&[
                "-n",
                &self.switch,
                "link",
                "set",
                &format!("p{host}"),
                "down",
            ]),
            Cut::Reset => {
                let name = &self.names[host];
                run("ip", &["netns", "exec", name, "ss", "-K", "-t"])
            }
            Cut::Connections => {
                let (name, other) = (&self.names[host - 1], Self::address(host));
                let before = connections(name, &other)?;
                let close = ["netns", "exec", name, "ss", "-K", "-t", "dst", &other];
                run("ip", &close)?;
                let left = connections(name, &other)?;
                ensure!(
                    !before.is_empty() && before.iter().all(|pair| !left.contains(pair)),
                    "this kernel closes no connection for `ss -K`"
                );
                Ok(())
            }
            Cut::Pair => self.sever_from(host, host - 1, true, true),
            Cut::Healed => {
                self.sever(host, true, true)?;
                std::thread::sleep(timeout / 2);
                self.heal(host)
            }
            Cut::Loss => {
                let until = Instant::now() + timeout;
                while Instant::now() < until {
                    self.sever(host, true, true)?;
                    std::thread::sleep(Duration::from_millis(50));
                    self.heal(host)?;
                    std::thread::sleep(Duration::from_millis(150));
                }
                Ok(())
            }
            Cut::Delay => {
                let netem = [
                    "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "40ms",
                ];
                let name = ["netns", "exec", &self.names[host], "tc"];
                // Not every kernel has netem.
                run("ip", &[&name[..], &netem[..]].concat())
                    .or_else(|_| self.put_behind_relay(host))
            }
        }
    }

    /// Puts a relay, which passes each packet on late, between a host and the bridge.
    fn put_behind_relay(&self, host: usize) -> anyhow::Result<()> {
        // A packet that the system would complete only in hardware cannot be passed on.
        for name in &self.names {
            relay::complete_packets(name)?;
        }
        let (switch, port) = (self.switch.as_str(), format!("p{host}"));
        let pair = [
            "-n", switch, "link", "add", "name", BRIDGE_END, "type", "veth",
        ];
        ip(&[&pair[..], &["peer", "name", RELAY_END]].concat())?;
        ip(&[
            "-n", switch, "link", "set", BRIDGE_END, "master", "br0", "up",
        ])?;
        ip(&["-n", switch, "link", "set", RELAY_END, "up"])?;
        let relay = Relay::start(switch, [&port, RELAY_END])?;
        *self.relay() = Some((host, relay));
        ip(&["-n", switch, "link", "set", &port, "nomaster"])
    }

    fn relay(&self) -> MutexGuard<'_, Option<(usize, Relay)>> {
        self.relay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all cuts of a host.
    fn heal(&self, host: usize) -> anyhow::Result<()> {
        for other in (0..self.names.len()).filter(|&other| other != host) {
            for (at, to) in [(host, other), (other, host)] {
                let address = Self::address(to);
                ip(&[
                    "-n",
                    &self.names[at],
                    "neigh",
                    "del",
                    &address,
                    "dev",
                    "eth0",
                ])?;
            }
        }
        Ok(())
    }

    /// Ends all cuts and puts all links up.
    pub(crate) fn join_again(&self) -> anyhow::Result<()> {
        if let Some((host, relay)) = self.relay().take() {
            drop(relay);
            let (switch, port) = (self.switch.as_str(), format!("p{host}"));
            ip(&["-n", switch, "link", "del", BRIDGE_END])?;
            ip(&["-n", switch, "link", "set", &port, "master", "br0"])?;
        }
        for (at, name) in self.names.iter().enumerate() {
            let port = format!("p{at}");
            ip(&["-n", &self.switch, "link", "set", &port, "up"])?;
            ip(&["-n", name, "neigh", "flush", "nud", "permanent"])?;
        }
        Ok(())
    }

    /// Cuts a host off from all others, for packets to it (`inward`) or from it (`outward`).
    fn sever(&self, host: usize, inward: bool, outward: bool) -> anyhow::Result<()> {
        for other in (0..self.names.len()).filter(|&other| other != host) {
            self.sever_from(host, other, inward, outward)?;
        }
        Ok(())
    }

    /// Cuts a host off from one other.
    fn sever_from(
        &self,
        host: usize,
        other: usize,
        inward: bool,
        outward: bool,
    ) -> anyhow::Result<()> {
        let directions = [(other, host, inward), (host, other, outward)];
        for (at, to, _) in directions.into_iter().filter(|(.., cut)| *cut) {
            let address = Self::address(to);
            let entry = ["replace", &address, "lladdr", UNUSED_ADDRESS, "dev", "eth0"];
            let namespace = ["-n", &self.names[at], "neigh"];
            ip(&[&namespace[..], &entry[..], &["nud", "permanent"]].concat())?;
        }
        Ok(())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        drop(self.relay().take());
        for name in self.names.iter().chain([&self.switch]) {
            // The namespace may not have been made.
            let _ = ip(&["netns", "del", name]);
        }
    }
}

/// Both ends of each of the TCP connections from a namespace to an address.
fn connections(name: &str, to: &str) -> anyhow::Result<Vec<String>> {
    let list = ["netns", "exec", name, "ss", "-H", "-t", "dst", to];
    let listed = Command::new("ip").args(list).output();
    let listed = listed.context("cannot run ip")?;
    let text = String::from_utf8_lossy(&listed.stdout);
    let ends = |line: &str| {
        line.split_whitespace()
            .skip(3)
            .collect::<Vec<_>>()
            .join(" ")
    };
    Ok(text.lines().map(ends).collect())
}

fn ip(arguments: &[&str]) -> anyhow::Result<()> {
    run("ip", arguments)
}

fn run(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let done = Command::new(program).args(arguments).output();
    let done = done.with_context(|| format!("cannot run {program}"))?;
    let text = arguments.join(" ");
    let error = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{program} {text}: {}", error.trim());
    Ok(())
}
