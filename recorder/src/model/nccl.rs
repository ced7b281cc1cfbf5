//! The state of NCCL communicators that the profiler interface reports in addition to operations.
//!
//! A ring stores it in separate tables. A [`Dump`](crate::publish::Dump) carries it as text in
//! [`nccl_comm_state`](crate::publish::Dump::nccl_comm_state), the section of PyTorch's dumps for NCCL's report on its
//! communicators: every format and tool that preserves that section preserves this state.

use std::fmt::Write as _;

/// One communicator in one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Communicator {
    /// Name of the communicator's group in the record.
    pub group: String,
    /// NCCL's own number for the communicator, equal on all members.
    pub hash: u64,
    /// The communicator's operations that have not ended.
    pub kernels: Vec<KernelProgress>,
    /// The communicator's network transfers in progress.
    pub links: Vec<LinkProgress>,
    /// How many transfers of the process, of any communicator, could not be recorded since its ring was made: `links`
    /// may lack some.
    pub links_lost: u64,
}

/// The progress of one operation on its channels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelProgress {
    /// The number of the operation's record.
    pub record_id: u64,
    /// Number of channels that the operation uses; 0 if unknown.
    pub channels: u8,
    /// NCCL's name of the algorithm; empty if unknown.
    pub algorithm: String,
    /// NCCL's name of the protocol; empty if unknown.
    pub protocol: String,
    /// When NCCL reported that the operation is in a plan, wall clock, ns since the epoch; 0 if not seen.
    pub enqueued_ns: i64,
    /// When the operation's kernel was launched, wall clock, ns since the epoch; 0 until NCCL has reported the end of
    /// the launch. NCCL reports the plan right after the launch, so the plug-in gives the time of that report here,
    /// too.
    pub launched_ns: i64,
    /// Channels that the device has started, one bit each.
    pub started: u64,
    /// Channels that the device has finished, one bit each.
    pub finished: u64,
}

/// The progress of one network transfer: one channel, one peer, one direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkProgress {
    /// The channel.
    pub channel: u8,
    /// The other end, as a rank of the communicator.
    pub peer: u32,
    /// Whether the transfer sends; otherwise it receives.
    pub is_send: bool,
    /// The record id of the transfer's operation; 0 if unknown.
    pub record_id: u64,
    /// Number of completed steps.
    pub step: u32,
    /// Total number of steps; 0 if unknown.
    pub steps: u32,
    /// The resource that the transfer waits for.
    pub wait: LinkWait,
    /// When the transfer last made progress, wall clock, ns since the epoch. Without any progress so far: when its
    /// operation was put into a plan; the transfer was posted then, or later if it follows other transfers of its link.
    pub since_ns: i64,
}

/// The resource that a network transfer waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LinkWait {
    /// Nothing: no transfer is in progress.
    Idle,
    /// Unknown: the transfer was given to the proxy thread.
    #[default]
    Posted,
    /// The device of this process: data to send, or free memory for received data.
    Device,
    /// The peer's permission to send.
    Peer,
    /// The network, to send.
    Send,
    /// The network, to receive.
    Receive,
    /// The network card, to make received data visible to the device.
    Flush,
}

impl LinkWait {
    const NAMES: [(Self, &'static str); 7] = [
        (Self::Idle, "idle"),
        (Self::Posted, "posted"),
        (Self::Device, "device"),
        (Self::Peer, "peer"),
        (Self::Send, "send"),
        (Self::Receive, "receive"),
        (Self::Flush, "flush"),
    ];

    /// The value's number in a ring.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The value with this number in a ring; `None` if there is none.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::NAMES.get(usize::from(code)).map(|&(wait, _)| wait)
    }

    /// The value's name in dumps.
    pub fn name(self) -> &'static str {
        Self::NAMES[usize::from(self.code())].1
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::NAMES
            .iter()
            .find(|(_, known)| *known == name)
            .map(|&(wait, _)| wait)
    }
}

impl KernelProgress {
    /// Channels that the device has started and not finished, ascending.
    pub fn unfinished(&self) -> impl Iterator<Item = u8> + use<> {
        let (started, finished) = (self.started, self.finished);
        // Only channels on which the operation has started are known to be used by it.
        (0..64).filter(move |&channel| started & !finished & (1 << channel) != 0)
    }
}

// Keys of facts; those that end with a colon are prefixes.
const HASH: &str = "commHash";
const KERNEL: &str = "kernel:";
const LINK: &str = "link:";
const LINKS_LOST: &str = "linksLost";

impl Communicator {
    /// Converts the state to a section of [`nccl_comm_state`](crate::publish::Dump::nccl_comm_state): name and facts.
    pub fn to_facts(&self) -> (String, Vec<(String, String)>) {
        let mut facts = vec![(HASH.to_owned(), format!("{:#x}", self.hash))];
        for kernel in &self.kernels {
            let KernelProgress {
                record_id,
                channels,
                algorithm,
                protocol,
                enqueued_ns,
                launched_ns,
                started,
                finished,
            } = kernel;
            let mut text = format!(
                "channels={channels} started={started:x} finished={finished:x} \
                 enqueued_ns={enqueued_ns} launched_ns={launched_ns}"
            );
            for (key, value) in [("algorithm", algorithm), ("protocol", protocol)] {
                if !value.is_empty() {
                    let _ = write!(text, " {key}={value}");
                }
            }
            facts.push((format!("{KERNEL}{record_id}"), text));
        }
        for link in &self.links {
            let direction = if link.is_send { "send" } else { "recv" };
            facts.push((
                format!("{LINK}{}:{direction}:{}", link.channel, link.peer),
                format!(
                    "step={} steps={} wait={} since_ns={} record={}",
                    link.step,
                    link.steps,
                    link.wait.name(),
                    link.since_ns,
                    link.record_id
                ),
            ));
        }
        if self.links_lost > 0 {
            facts.push((LINKS_LOST.to_owned(), self.links_lost.to_string()));
        }
        (self.group.clone(), facts)
    }

    /// Converts the state back from a section of [`nccl_comm_state`](crate::publish::Dump::nccl_comm_state); `None` if
    /// the section has no valid hash. Unknown and malformed facts are ignored.
    pub fn from_facts(name: &str, facts: &[(String, String)]) -> Option<Self> {
        let find = |wanted: &str| {
            let found = facts.iter().find(|(key, _)| key == wanted);
            found.map(|(_, value)| value.trim())
        };
        let hash = find(HASH)?;
        let hash = match hash.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok()?,
            None => hash.parse().ok()?,
        };
        let mut communicator = Self {
            group: name.to_owned(),
            hash,
            links_lost: find(LINKS_LOST)
                .and_then(|count| count.parse().ok())
                .unwrap_or(0),
            ..Self::default()
        };
        for (key, value) in facts {
            if let Some(id) = key.strip_prefix(KERNEL) {
                communicator.kernels.extend(kernel_of(id, value));
            } else if let Some(id) = key.strip_prefix(LINK) {
                communicator.links.extend(link_of(id, value));
            }
        }
        Some(communicator)
    }
}

/// The value of `key` in a text of `key=value` pairs with white space between them.
fn field<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    let mut fields = text.split_ascii_whitespace();
    fields.find_map(|field| field.strip_prefix(key)?.strip_prefix('='))
}

/// Reads a fact whose key is [`KERNEL`] and `id`; `None` if it is malformed.
fn kernel_of(id: &str, text: &str) -> Option<KernelProgress> {
    let name = |key| field(text, key).unwrap_or_default().to_owned();
    let bits = |key| u64::from_str_radix(field(text, key)?, 16).ok();
    Some(KernelProgress {
        record_id: id.parse().ok()?,
        channels: field(text, "channels")?.parse().ok()?,
        algorithm: name("algorithm"),
        protocol: name("protocol"),
        enqueued_ns: field(text, "enqueued_ns")?.parse().ok()?,
        launched_ns: field(text, "launched_ns")?.parse().ok()?,
        started: bits("started")?,
        finished: bits("finished")?,
    })
}

/// Reads a fact whose key is [`LINK`] and `id`; `None` if it is malformed.
fn link_of(id: &str, text: &str) -> Option<LinkProgress> {
    let mut id = id.split(':');
    Some(LinkProgress {
        channel: id.next()?.parse().ok()?,
        is_send: match id.next()? {
            "send" => true,
            "recv" => false,
            _ => return None,
        },
        peer: id.next()?.parse().ok()?,
        record_id: field(text, "record")?.parse().ok()?,
        step: field(text, "step")?.parse().ok()?,
        steps: field(text, "steps")?.parse().ok()?,
        wait: LinkWait::from_name(field(text, "wait")?)?,
        since_ns: field(text, "since_ns")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Communicator {
        Communicator {
            group: "nccl-00000000000000ab".to_owned(),
            hash: 0xab,
            kernels: vec![KernelProgress {
                record_id: 9,
                channels: 2,
                algorithm: "RING".to_owned(),
                protocol: String::new(),
                enqueued_ns: 5,
                launched_ns: 0,
                started: 0b11,
                finished: 0b01,
            }],
            links: vec![LinkProgress {
                channel: 1,
                peer: 2,
                is_send: true,
                record_id: 9,
                step: 3,
                steps: 16,
                wait: LinkWait::Peer,
                since_ns: 7,
            }],
            links_lost: 4,
        }
    }

    #[test]
    fn facts_are_converted_back_to_the_communicator() {
        let (name, facts) = example().to_facts();
        assert_eq!(Communicator::from_facts(&name, &facts), Some(example()));
        let channels: Vec<u8> = example().kernels[0].unfinished().collect();
        assert_eq!(channels, [1]);
    }

    #[test]
    fn unknown_facts_are_ignored_and_a_section_without_a_hash_is_none() {
        let (name, mut facts) = example().to_facts();
        for (key, value) in [
            (
                "link:1:up:2",
                "step=1 steps=1 wait=peer since_ns=1 record=1",
            ),
            (
                "link:300:send:2",
                "step=1 steps=1 wait=peer since_ns=1 record=1",
            ),
            ("kernel:x", "channels=1"),
            ("kernel:4", ""),
            ("else", "7"),
        ] {
            facts.push((key.to_owned(), value.to_owned()));
        }
        assert_eq!(Communicator::from_facts(&name, &facts), Some(example()));
        facts.remove(0);
        assert_eq!(Communicator::from_facts(&name, &facts), None);
    }

    #[test]
    fn waits_have_unique_numbers_and_names() {
        for (wait, name) in LinkWait::NAMES {
            assert_eq!(LinkWait::from_code(wait.code()), Some(wait));
            assert_eq!(LinkWait::from_name(name), Some(wait));
        }
        assert_eq!(LinkWait::from_code(7), None);
    }
}
