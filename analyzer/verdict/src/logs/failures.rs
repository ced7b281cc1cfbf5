//! Rules about devices, shared memory, sizes, connections and a watchdog that is stuck.

use super::conclusion::{COMPARE_CALLS, Conclusion};
use super::digest::{Digest, SIGABRT, Seen};
use super::facts::Event;
use crate::report::format::{bytes, format_ranks};
use crate::report::{Code, Verdict};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

/// A call of CUDA failed.
pub(super) fn device(digest: &Digest<'_>) -> Option<Conclusion> {
    let mut before = digest
        .all
        .iter()
        .filter(|&&seen| !digest.is_after_termination(seen));
    let (seen, error) = before.find_map(|&seen| match &seen.fact.event {
        Event::DeviceError(error) => Some((seen, error)),
        _ => None,
    })?;
    let who = match seen.fact.rank {
        Some(rank) => format!("rank {rank}"),
        None => "a rank that the log does not name".to_owned(),
    };
    let mut found = Conclusion::new(
        Code::E150,
        Verdict::Crashed,
        0.75,
        format!("a CUDA call failed on {who}: {error}"),
    );
    found.culprits.extend(seen.fact.rank);
    found.lines = vec![seen.cite(error.clone())];
    found.next = if error.contains("out of memory") {
        "look at what uses the memory of that GPU: other processes, and what the program reserves"
            .to_owned()
    } else {
        "look for Xid messages in the kernel's log of that host (dmesg)".to_owned()
    };
    Some(found)
}

/// NCCL could not create shared memory for a rank.
pub(super) fn no_shared_memory(digest: &Digest<'_>) -> Option<Conclusion> {
    let failed: Vec<(Seen<'_>, Option<u64>, bool)> = digest
        .all
        .iter()
        .filter_map(|&seen| match seen.fact.event {
            Event::NoSharedMemory { bytes, is_full } => Some((seen, bytes, is_full)),
            _ => None,
        })
        .collect();
    // NCCL logs the error and the size in two lines.
    let &(seen, ..) = failed.first()?;
    let of_process: Vec<_> = failed
        .iter()
        .filter(|(other, ..)| other.fact.rank == seen.fact.rank)
        .collect();
    let size = of_process.iter().find_map(|(_, bytes, _)| *bytes);
    let is_full = of_process.iter().any(|(_, _, is_full)| *is_full);
    let who = match seen.fact.rank {
        Some(rank) => format!("rank {rank}"),
        None => "a rank that the log does not name".to_owned(),
    };
    let size = size.map_or(String::new(), |size| format!(" of {}", bytes(size)));
    let why = match is_full {
        true => "/dev/shm has no space left",
        false => "the log does not show why",
    };
    let mut found = Conclusion::new(
        Code::E150,
        Verdict::Crashed,
        if is_full { 0.9 } else { 0.6 },
        format!("NCCL could not create a shared memory segment{size} on {who}: {why}"),
    );
    found.victims.extend(seen.fact.rank);
    found.lines = of_process
        .iter()
        .map(|(seen, ..)| seen.cite("no shared memory".to_owned()))
        .collect();
    found.next = "compare the size of /dev/shm with what is used there (df -h /dev/shm); a Docker container has 64 MiB \
                  unless --shm-size or --ipc=host is given"
        .to_owned();
    Some(found)
}

/// Two ranks of a communicator use one device.
pub(super) fn same_device(digest: &Digest<'_>) -> Option<Conclusion> {
    let (seen, [one, other], device) =
        digest.all.iter().find_map(|&seen| match &seen.fact.event {
            Event::SameDevice { ranks, device } => Some((seen, *ranks, device)),
            _ => None,
        })?;
    let mut found = Conclusion::new(
        Code::E150,
        Verdict::Crashed,
        0.9,
        format!(
            "ranks {one} and {other} of a communicator use the same GPU (CUDA device {device}), and NCCL refuses that; \
             the log does not show which of them is on the wrong one"
        ),
    );
    found.lines = vec![seen.cite(format!("ranks {one} and {other} on one device"))];
    found.next = "look at how each rank chooses its device: one from its local rank, as with torch.cuda.set_device, \
                  and CUDA_VISIBLE_DEVICES of each process"
        .to_owned();
    Some(found)
}

/// The first line about a transfer whose two ends have different sizes: the address of the other side, which is empty
/// if the line does not name it, and the bytes on this side and the other.
pub(super) fn sizes_differ<'a>(digest: &Digest<'a>) -> Option<(Seen<'a>, &'a str, u64, u64)> {
    digest.all.iter().find_map(|&seen| match &seen.fact.event {
        Event::SizesDiffer { peer, here, there } => Some((seen, peer.as_str(), *here, *there)),
        _ => None,
    })
}

/// The two ends of a transfer have different sizes.
pub(super) fn sizes(digest: &Digest<'_>) -> Option<Conclusion> {
    let (seen, peer, here, there) = sizes_differ(digest)?;
    if peer.is_empty() {
        return Some(other_size_than_expected(digest, seen, here, there));
    }
    let who = match seen.fact.rank {
        Some(rank) => format!("rank {rank}"),
        None => "one process".to_owned(),
    };
    let mut found = Conclusion::new(
        Code::E112,
        Verdict::Mismatch,
        0.6,
        format!(
            "{who} and the process at {peer} disagree on the size of one transfer: {} against {}; the \
             log does not show which operation it belongs to",
            bytes(here),
            bytes(there)
        ),
    );
    found.lines = vec![seen.cite(format!("{here} B here, {there} B at {peer}"))];
    found.next =
        "compare the environment of the two hosts (NCCL's variables and version), then what their \
                  ranks issue"
            .to_owned();
    Some(found)
}

/// A process of gloo received another size than it expects, from a process that the line does not name.
fn other_size_than_expected(
    digest: &Digest<'_>,
    seen: Seen<'_>,
    here: u64,
    there: u64,
) -> Conclusion {
    let aborted: BTreeSet<Rank> = digest
        .all
        .iter()
        .filter(|seen| matches!(&seen.fact.event, Event::Ended(end) if end.code == -SIGABRT))
        .filter_map(|seen| seen.fact.rank)
        .collect();
    let only = aborted.first().copied().filter(|_| aborted.len() == 1);
    // After this line, which has no label, gloo aborts the process.
    let rank = only.or(seen.fact.rank);
    let who = rank.map_or("a process".to_owned(), |rank| format!("rank {rank}"));
    let mut found = Conclusion::new(
        Code::E112,
        Verdict::Mismatch,
        0.6,
        format!(
            "{who} received {there} B from another rank in place of {here} B: they issued one operation with different \
             sizes, or different operations; the log does not show which operation, nor which rank is at fault"
        ),
    );
    let mut line = seen.cite(format!("{there} B received, {here} B expected"));
    line.rank = rank;
    found.lines = vec![line];
    found.next = COMPARE_CALLS.to_owned();
    found
}

/// The other side of a connection is gone.
pub(super) fn peer_lost(digest: &Digest<'_>) -> Option<Conclusion> {
    let (seen, peer) = digest
        .before_the_end()
        .find_map(|seen| match &seen.fact.event {
            Event::PeerLost { peer } => Some((seen, peer)),
            _ => None,
        })?;
    let aborted = digest.all.iter().find_map(|other| match &other.fact.event {
        Event::Aborted {
            op: Some((op, seq)),
            ..
        } => Some((other, op.word(), *seq)),
        _ => None,
    });
    let who = seen
        .fact
        .rank
        .or_else(|| aborted.as_ref().and_then(|(other, ..)| other.fact.rank));
    let place = aborted
        .as_ref()
        .map_or(String::new(), |(_, op, seq)| format!(" in {op} #{seq}"));
    let who_text = who.map_or("a rank".to_owned(), |rank| format!("rank {rank}"));
    let mut found = Conclusion::new(
        Code::E150,
        Verdict::Crashed,
        0.6,
        format!(
            "a process at {peer} closed its connection to {who_text}{place}: that process has ended or left its \
             group, or its host is cut off"
        ),
    );
    found.victims.extend(who);
    if let Some((other, op, seq)) = aborted {
        found.seq = Some(seq);
        found
            .lines
            .push(other.cite(format!("NCCL aborted {op} #{seq}")));
        found.op = Some(op);
    }
    found
        .lines
        .push(seen.cite(format!("connection closed by {peer}")));
    found.next = format!(
        "look for the end of the processes at {peer}: their log, their exit code, the kernel's log there"
    );
    Some(found)
}

/// The network reported that it cannot reach the other side.
pub(super) fn unreachable(digest: &Digest<'_>) -> Option<Conclusion> {
    let (seen, peer, status) = digest
        .before_the_end()
        .find_map(|seen| match &seen.fact.event {
            Event::Unreachable { peer, status } => Some((seen, peer, status)),
            _ => None,
        })?;
    let who = match seen.fact.rank {
        Some(rank) => format!("rank {rank}"),
        None => "a rank".to_owned(),
    };
    let mut found = Conclusion::new(
        Code::E152,
        Verdict::Stuck,
        0.6,
        format!(
            "{who} cannot reach {peer} ({status}): the link, the other host, or its process; whether the other \
             direction works, the log does not show"
        ),
    );
    found.victims.extend(seen.fact.rank);
    found.lines = vec![seen.cite(status.clone())];
    found.next = format!("check the link to {peer} and whether its processes live");
    Some(found)
}

/// The watchdog of a rank made no progress.
pub(super) fn watchdog_stuck(digest: &Digest<'_>) -> Option<Conclusion> {
    let stuck: Vec<(Seen<'_>, u64)> = digest
        .before_the_end()
        .filter_map(|seen| match seen.fact.event {
            Event::WatchdogStuck(seconds) => Some((seen, seconds)),
            _ => None,
        })
        .collect();
    let &(_, seconds) = stuck.first()?;
    let ranks: BTreeSet<Rank> = stuck
        .iter()
        .filter_map(|(seen, _)| seen.fact.rank)
        .collect();
    let ranks: Vec<Rank> = ranks.into_iter().collect();
    let mut found = Conclusion::new(
        Code::E140,
        Verdict::Stuck,
        0.5,
        format!(
            "the watchdog of {} made no progress for {seconds} s: a call of CUDA or NCCL, or the \
             interpreter's lock, holds it",
            if ranks.is_empty() {
                "a rank".to_owned()
            } else {
                format_ranks(&ranks)
            }
        ),
    );
    found.lines = stuck
        .iter()
        .map(|(seen, seconds)| seen.cite(format!("no progress for {seconds} s")))
        .collect();
    found.victims = ranks;
    found.next = "take native stacks with py-spy dump --native".to_owned();
    Some(found)
}
