//! Reads lines of NCCL, and gloo's lines about connections and sizes.

use super::Line;
use super::scan::{between, leading_number, number_after, truncated};
use super::torch::{Events, MOST_RANKS};
use rcomm_recorder::model::Rank;
use rcomm_verdict::logs::Event;

/// The rank of a process in a communicator.
pub(super) struct Membership {
    /// The process, as `host:pid`.
    pub(super) process: String,
    /// Its rank in the communicator.
    pub(super) rank: Rank,
    /// The number of ranks of the communicator.
    pub(super) nranks: u32,
}

/// Reads `host:pid:tid [3] NCCL INFO ncclCommInitRank comm 0x55 rank 3 nranks 4 cudaDev 3 …`.
pub(super) fn communicator(text: &str) -> Option<Membership> {
    if !text.contains(" nranks ") || !text.contains("NCCL INFO") {
        return None;
    }
    let nranks = number_after(text, " nranks ").filter(|&n| n > 1 && n <= MOST_RANKS)?;
    let rank = number_after(text, " rank ").filter(|&rank: &Rank| rank < nranks)?;
    Some(Membership {
        process: process(text)?,
        rank,
        nranks,
    })
}

/// The `host:pid` of a line that begins with `host:pid:tid`.
fn process(text: &str) -> Option<String> {
    let word = text.trim_start().split(' ').next()?;
    let mut parts = word.rsplitn(3, ':');
    let (thread, pid, host) = (parts.next()?, parts.next()?, parts.next()?);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(thread) && is_number(pid)).then(|| truncated(&format!("{host}:{pid}"), 200))
}

/// Adds the event of a line of NCCL or gloo; returns the `host:pid` that the line begins with, if any.
pub(super) fn read_line(line: &Line<'_>, found: &mut Events) -> Option<String> {
    let text = line.text;
    let event = if text.contains("Connection closed by remote peer") {
        peer(text, "remote peer ").map(|peer| Event::PeerLost { peer })
    } else if text.contains("Connection closed by peer")
        || text.contains("Connection reset by peer")
    {
        gloo_peer(text).map(|peer| Event::PeerLost { peer })
    } else if text.contains("Received data size doesn't match expected size") {
        gloo_sizes(text)
    } else if let Some(event) = unreachable(text) {
        Some(event)
    } else if let Some(event) = same_device(text) {
        Some(event)
    } else if !text.contains("NCCL WARN") {
        None
    } else if text.contains("collective mismatch error") {
        sizes(text)
    } else if SEGMENT_FAILED.iter().any(|words| text.contains(words)) {
        Some(Event::NoSharedMemory {
            bytes: number_after(text, "(size ").or_else(|| extended_to(text)),
            is_full: text.contains("No space left on device"),
        })
    } else if text.contains("Got completion from peer") {
        completion(text)
    } else if let Some((_, error)) = text.split_once("Cuda failure ") {
        Some(Event::DeviceError(truncated(error.trim(), 200)))
    } else {
        None
    };
    found.extend(event.map(|event| (line.label.rank, event)));
    process(text)
}

/// Parts of the warnings that NCCL prints when it cannot create a segment of shared memory.
const SEGMENT_FAILED: &[&str] = &[
    "Call to posix_fallocate failed",
    "failed to extend /dev/shm/",
    "Error while creating shared memory segment",
];

/// The number in `failed to extend /dev/shm/nccl-a1 to 4096 bytes`.
fn extended_to(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once("failed to extend ")?;
    number_after(rest, " to ")
}

/// Reads `Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000`, which PyTorch repeats in its error.
fn same_device(text: &str) -> Option<Event> {
    let (_, rest) = text.split_once("Duplicate GPU detected : rank ")?;
    let (first, rest) = leading_number(rest)?;
    let (second, rest) = leading_number(rest.strip_prefix(" and rank ")?)?;
    let device = between(rest, " on CUDA device ", &[' ', ',', '.'])?;
    Some(Event::SameDevice {
        ranks: [first, second],
        device: truncated(device, 40),
    })
}

/// Errors of the operating system when a host cannot be reached over the network.
const UNREACHABLE: &[&str] = &[
    "No route to host",
    "Network is unreachable",
    "Connection timed out",
    "Host is down",
];

/// Reads `NCCL WARN … Connect to 10.0.0.7<43731> failed : No route to host`, or gloo's `… SO_ERROR: No route to host,
/// remote=[10.0.0.7]:25266`.
fn unreachable(text: &str) -> Option<Event> {
    let reason = UNREACHABLE.iter().find(|reason| text.contains(**reason))?;
    let peer = match text.split_once("remote=[") {
        Some((_, rest)) => truncated(rest.split(']').next()?, 200),
        // The `c` of `connect` may be a capital.
        None if text.contains("NCCL WARN") => peer(text, "onnect to ")?,
        None => return None,
    };
    (!peer.is_empty()).then(|| Event::Unreachable {
        peer,
        status: (*reason).to_owned(),
    })
}

/// The address after `before`, without its port.
fn peer(text: &str, before: &str) -> Option<String> {
    let address = between(text, before, &['<', ' ', ','])?;
    (!address.is_empty()).then(|| truncated(address, 200))
}

/// The peer in `Connection closed by peer [10.0.0.7]:28048` or `Read error [10.0.0.7]:25266: Connection reset by peer`.
fn gloo_peer(text: &str) -> Option<String> {
    let rest = match text.split_once("by peer [") {
        Some((_, rest)) => rest,
        None => text.split_once("error [")?.1,
    };
    let address = rest.split(']').next()?;
    (!address.is_empty()).then(|| truncated(address, 200))
}

/// Reads gloo's `op.preamble.length <= op.nbytes. 4196 vs 4. Received data size doesn't match expected size`, which
/// names no peer.
fn gloo_sizes(text: &str) -> Option<Event> {
    let there = number_after(text, "op.nbytes. ")?;
    let here = number_after(text, " vs ")?;
    let peer = String::new();
    (here != there).then_some(Event::SizesDiffer { peer, here, there })
}

/// Reads `peer 10.10.23.6<58683> collective mismatch error, local size 496640 remote size 65536`, or the older
/// form, `collective mismatch error local size 546816 remote 524288 addr 7ff7d1530000 rkey 2553d seq 14/1c`,
/// which names no peer.
///
/// The sender logs the line. A message may be shorter than what the receiver has room for. If it is, the older form has
/// another cause, such as a difference between its last two numbers.
fn sizes(text: &str) -> Option<Event> {
    let here: u64 = number_after(text, "local size ")?;
    let there = number_after(text, "remote size ").or_else(|| number_after(text, " remote "))?;
    let peer = peer(text, "peer ").unwrap_or_else(|| NO_ADDRESS.to_owned());
    (here > there).then_some(Event::SizesDiffer { peer, here, there })
}

/// The peer of a line that states no address. It is not empty, since an empty peer marks a line of gloo, which the
/// receiver logs.
const NO_ADDRESS: &str = "an address that is not logged";

/// Reads `Got completion from peer 10.0.0.7<5491> with status=12 …` and `… with error 12, …`.
fn completion(text: &str) -> Option<Event> {
    let (_, rest) = text.split_once(" with ")?;
    let number = rest
        .strip_prefix("status=")
        .or_else(|| rest.strip_prefix("error "))?;
    let (status, _) = leading_number::<u32>(number)?;
    let peer = peer(text, "from peer ")?;
    // Status 5: the queue was flushed because of an earlier error, so the peer is not the cause.
    (status != 5).then(|| Event::Unreachable {
        peer,
        status: format!("InfiniBand completion status {status}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::log::Label;

    fn event_of(text: &str) -> Option<Event> {
        let line = Line {
            label: Label::default(),
            text,
        };
        let mut found = Events::new();
        read_line(&line, &mut found);
        found.into_iter().next().map(|(_, event)| event)
    }

    #[test]
    fn sizes_differ_only_if_the_sender_has_more_than_the_receiver_takes() {
        let line = |sizes: &str| {
            let begin = "n1:15483:15645 [0] transport/net_ib.cc:665 NCCL WARN NET/IB : collective mismatch error";
            event_of(&format!(
                "{begin} {sizes} addr 7ff7d1530000 rkey 2553d seq 14/1c"
            ))
        };
        let expected = Event::SizesDiffer {
            peer: "an address that is not logged".to_owned(),
            here: 546_816,
            there: 524_288,
        };
        assert_eq!(line("local size 546816 remote 524288"), Some(expected));
        for other_cause in [
            "local size 4096 remote 524288",
            "local size 4096 remote 4096",
            "local size 4096 remote -1",
        ] {
            assert_eq!(line(other_cause), None, "{other_cause}");
        }
    }

    #[test]
    fn the_size_of_a_segment_that_cannot_be_extended_is_read() {
        let text = "n07:812:870 [3] NCCL WARN failed to extend /dev/shm/nccl-a1 to 33030532 bytes, error: No space left on device (28)";
        let after_another = format!("unable to go on: {text}");
        for text in [text, &after_another] {
            let line = Line {
                label: Label::default(),
                text,
            };
            let mut found = Events::new();
            read_line(&line, &mut found);
            let event = Event::NoSharedMemory {
                bytes: Some(33_030_532),
                is_full: true,
            };
            assert_eq!(found, [(None, event)]);
        }
    }
}
