//! Rules about processes that ended, exceptions, devices and connections.

use super::conclusion::{COMPARE_CALLS, Conclusion};
use super::digest::{Digest, Seen};
use super::facts::{Ended, Event};
use super::gloo;
use crate::report::format::{bytes, format_ranks};
use crate::report::{Code, Verdict};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// The process that ended first: the one that the launcher names, or the first in the log that was not terminated by
/// SIGTERM. What ends after the job was asked to end does not count: some processes end by another signal then, or with
/// an error because their peers have gone.
pub(super) fn first_end<'a>(digest: &Digest<'a>) -> Option<(Seen<'a>, &'a Ended)> {
    let ends = || {
        digest
            .all
            .iter()
            .filter_map(|&seen| match &seen.fact.event {
                Event::Ended(end) => Some((seen, end)),
                _ => None,
            })
            .filter(|&(seen, _)| !is_after_termination(digest, seen))
    };
    ends()
        .find(|(_, end)| end.first)
        .or_else(|| ends().find(|(_, end)| end.code != -SIGTERM))
}

/// Whether the log of this line states before it that the job was asked to end.
fn is_after_termination(digest: &Digest<'_>, seen: Seen<'_>) -> bool {
    let asked = digest.termination_beside(seen);
    asked.is_some_and(|line| line < seen.fact.line)
}

/// The facts that may show why the job failed, of a job that was asked to end, too. If nothing else explains its end,
/// only those count that the same log has before that: processes that end close their connections.
fn before_the_end<'a>(digest: &Digest<'a>) -> impl Iterator<Item = Seen<'a>> {
    let are_others_late =
        digest.was_terminated() && !digest.any_timed_out() && first_end(digest).is_none();
    digest
        .all
        .iter()
        .copied()
        .filter(move |&seen| match digest.termination_beside(seen) {
            Some(line) => seen.fact.line < line,
            None => !are_others_late,
        })
}

/// The job was asked to end, and no line before that shows a failure. Comes before the rules about connections and exit
/// codes: processes that end close their connections.
pub(super) fn terminated(digest: &Digest<'_>) -> Option<Conclusion> {
    let is_termination = |seen: &&Seen<'_>| matches!(seen.fact.event, Event::Terminated);
    let seen = digest.all.iter().find(is_termination)?;
    if digest.any_timed_out() || first_end(digest).is_some() {
        return None;
    }
    let has_cause = before_the_end(digest).any(|before| {
        matches!(
            before.fact.event,
            Event::PeerLost { .. } | Event::Unreachable { .. } | Event::WatchdogStuck(_)
        )
    });
    if has_cause {
        return None;
    }
    let aborted = before_the_end(digest).find_map(|before| match &before.fact.event {
        Event::Aborted { error, .. } => Some((before, error)),
        _ => None,
    });
    let sentence = match aborted {
        None => "the job was terminated from outside; whether anything was wrong before, the log does not show".to_owned(),
        Some((_, error)) => format!(
            "the job was terminated from outside, after NCCL had aborted an operation: {error}; for what cause, the log \
             does not show"
        ),
    };
    let mut found = Conclusion::new(Code::N302, Verdict::Inconclusive, 0.0, sentence);
    found.lines = vec![seen.cite("the launcher was asked to end the job".to_owned())];
    found
        .lines
        .extend(aborted.map(|(before, error)| before.cite(error.clone())));
    found.next =
        "see who cancelled the job: a person, its time limit, or a node that failed".to_owned();
    Some(found)
}

/// A signal ended the first process: not SIGTERM, and not SIGABRT after a time-out or after a transfer whose two ends
/// have different sizes. If the rank raised an exception before, that is cited: a Python process can end by SIGABRT
/// after an exception if one of its threads still runs.
pub(super) fn killed(digest: &Digest<'_>) -> Option<Conclusion> {
    let (seen, end) = first_end(digest)?;
    let signal = end.code.checked_neg().filter(|&signal| signal > 0)?;
    let own_time_out = || gloo::has_timed_out(digest, seen.fact.rank);
    // PyTorch aborts a process after a time-out. gloo aborts one that receives another size than it expects.
    let explained = || digest.any_timed_out() || sizes_differ(digest).is_some() || own_time_out();
    if signal == SIGTERM || (signal == SIGABRT && explained()) {
        return None;
    }
    let memory = digest.all.iter().find(|seen| match seen.fact.event {
        Event::OutOfMemory { pid } => pid.is_none() || end.pid.is_none() || pid == end.pid,
        _ => false,
    });
    let raised = match (signal, memory) {
        (SIGKILL, _) | (_, Some(_)) => None,
        _ => raised_before(digest, seen),
    };
    let why = match (signal, memory, raised) {
        (_, Some(_), _) => "; the kernel ended it because memory ran out".to_owned(),
        (SIGKILL, ..) => {
            ", as the kernel's out-of-memory killer does; the log does not show who sent it"
                .to_owned()
        }
        (.., Some((_, error))) => format!(" after it had raised {error}"),
        _ => String::new(),
    };
    let has_own_lines = seen.fact.rank.is_some_and(|rank| {
        let mut own = digest.all.iter();
        own.any(|other| {
            other.fact.rank == Some(rank) && !matches!(other.fact.event, Event::Ended(_))
        })
    });
    let mut found = Conclusion::new(
        Code::E150,
        Verdict::Crashed,
        match memory {
            Some(_) => 0.9,
            // PyTorch's watchdog ends the process by SIGABRT after a time-out, which its own log states.
            None if signal == SIGABRT && !has_own_lines => 0.5,
            None => 0.75,
        },
        format!(
            "{} was killed by signal {signal}{}{why}",
            subject(seen, end),
            signal_name(signal)
        ),
    );
    found.culprits.extend(seen.fact.rank);
    found.lines = vec![seen.cite(format!("ended by signal {signal}"))];
    found
        .lines
        .extend(memory.map(|seen| seen.cite("out of memory".to_owned())));
    found
        .lines
        .extend(raised.map(|(seen, error)| seen.cite(format!("raised {error}"))));
    found.next = match (signal, raised) {
        (_, Some((raised, _))) => format!("read the traceback above line {}", raised.fact.line),
        (SIGKILL, _) => {
            "look for the out-of-memory killer in the kernel's log of its host (dmesg), and for \
                    limits of its container"
                .to_owned()
        }
        _ => "look for the core dump and the last lines of its own log".to_owned(),
    };
    Some(found)
}

/// The first exception that the rank of this end had raised by itself, in the same log.
fn raised_before<'a>(digest: &Digest<'a>, end: Seen<'a>) -> Option<(Seen<'a>, &'a str)> {
    let rank = end.fact.rank?;
    digest.all.iter().find_map(|&seen| match &seen.fact.event {
        Event::Raised(error)
            if seen.fact.rank == Some(rank)
                && std::ptr::eq(seen.log, end.log)
                && seen.fact.line < end.fact.line =>
        {
            Some((seen, error.as_str()))
        }
        _ => None,
    })
}

/// The first process ended with an exit code other than 0, and no time-out explains it.
pub(super) fn exited(digest: &Digest<'_>) -> Option<Conclusion> {
    let (seen, end) = first_end(digest)?;
    // An exit after a time-out is a consequence of the time-out.
    if end.code <= 0 || digest.any_timed_out() {
        return None;
    }
    let exception = exception_before(digest, seen);
    let why = match exception {
        None => "the log does not show why".to_owned(),
        Some((raised, error)) => match raised.fact.rank {
            Some(rank) => format!(
                "an exception of rank {rank} is in line {}: {error}",
                raised.fact.line
            ),
            None => format!(
                "an exception without a rank is in line {}: {error}",
                raised.fact.line
            ),
        },
    };
    let mut found = Conclusion::new(
        Code::E150,
        Verdict::Crashed,
        0.6,
        format!(
            "{} ended with exit code {}; {why}",
            subject(seen, end),
            end.code
        ),
    );
    found.culprits.extend(seen.fact.rank);
    found.lines = vec![seen.cite(format!("exit code {}", end.code))];
    found.next = match exception {
        None => "read the log of that process itself: its exception is there".to_owned(),
        Some((raised, error)) => {
            found.lines.push(raised.cite(error.to_owned()));
            let line = raised.fact.line;
            match refused_peer(error) {
                Some(peer) => format!(
                    "read the traceback above line {line}; see which process should listen at {peer}, and whether it \
                     has ended: after a restart, that can be an address of the previous attempt"
                ),
                None => format!("read the traceback above line {line}"),
            }
        }
    };
    Some(found)
}

/// The last exception before this end in the same log, else the first in any log. Only exceptions that name no cause
/// ([`Event::Exception`]) are searched.
fn exception_before<'a>(digest: &Digest<'a>, end: Seen<'a>) -> Option<(Seen<'a>, &'a str)> {
    let mut exceptions = digest
        .all
        .iter()
        .filter_map(|&seen| match &seen.fact.event {
            Event::Exception(error) => Some((seen, error.as_str())),
            _ => None,
        });
    let is_before = |(seen, _): &(Seen<'_>, &str)| {
        std::ptr::eq(seen.log, end.log) && seen.fact.line < end.fact.line
    };
    let before = exceptions.clone().rfind(is_before);
    before.or_else(|| exceptions.next())
}

/// The address to which gloo could not connect, as its error names it.
fn refused_peer(error: &str) -> Option<&str> {
    let (_, peer) = error
        .split_once("connectFullMesh failed")?
        .1
        .split_once("remote=")?;
    peer.split([',', ' ', ')'])
        .next()
        .filter(|peer| !peer.is_empty())
}

/// The process that ended, for a sentence.
fn subject(seen: Seen<'_>, end: &Ended) -> String {
    let pid = end.pid.map_or(String::new(), |pid| format!(" {pid}"));
    match (seen.fact.rank, end.local_rank) {
        (Some(rank), _) => format!("the process{pid} of rank {rank}"),
        (None, Some(local)) => format!("the process{pid} of local rank {local}"),
        (None, None) => format!("a process{pid} of the job"),
    }
}

/// The name of a signal in parentheses; empty for a signal that is not listed here.
fn signal_name(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL)",
        SIGABRT => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        SIGKILL => " (SIGKILL)",
        11 => " (SIGSEGV)",
        _ => "",
    }
}

/// A rank raised an exception that is not about communication.
pub(super) fn raised(digest: &Digest<'_>) -> Option<Conclusion> {
    let errors: Vec<(Seen<'_>, &str)> = digest
        .all
        .iter()
        .filter(|&&seen| !is_after_termination(digest, seen))
        .filter_map(|&seen| match &seen.fact.event {
            Event::Raised(error) => Some((seen, error.as_str())),
            _ => None,
        })
        .collect();
    let &(seen, error) = errors.first()?;
    let ranks: BTreeSet<Rank> = errors
        .iter()
        .filter(|(_, other)| exception_type(other) == exception_type(error))
        .filter_map(|(seen, _)| seen.fact.rank)
        .collect();
    let ranks: Vec<Rank> = ranks.into_iter().collect();
    let who = match ranks.as_slice() {
        [] => "a rank that the log does not name".to_owned(),
        some => format_ranks(some),
    };
    // Exceptions of a rank after its own time-out are consequences.
    let late = ranks.iter().all(|&rank| digest.timed_out(rank)) && digest.any_timed_out();
    if late {
        return None;
    }
    let confidence = if ranks.len() == 1 { 0.75 } else { 0.5 };
    let mut found = Conclusion::new(
        Code::E150,
        Verdict::Crashed,
        confidence,
        format!("{who} raised {error}"),
    );
    if ranks.len() == 1 {
        found.culprits = ranks;
    }
    found.lines = vec![seen.cite(format!("raised {error}"))];
    found.next = format!("read the traceback of {who} in its log");
    Some(found)
}

/// The type of an exception: its text up to the first colon.
fn exception_type(error: &str) -> &str {
    error.split(':').next().unwrap_or(error)
}

/// A call of CUDA failed.
pub(super) fn device(digest: &Digest<'_>) -> Option<Conclusion> {
    let mut before = digest
        .all
        .iter()
        .filter(|&&seen| !is_after_termination(digest, seen));
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
fn sizes_differ<'a>(digest: &Digest<'a>) -> Option<(Seen<'a>, &'a str, u64, u64)> {
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
    let (seen, peer) = before_the_end(digest).find_map(|seen| match &seen.fact.event {
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
            "a process at {peer} closed its connection to {who_text}{place}: that process has ended, or its \
             host is cut off"
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
    let (seen, peer, status) = before_the_end(digest).find_map(|seen| match &seen.fact.event {
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
    let stuck: Vec<(Seen<'_>, u64)> = before_the_end(digest)
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
