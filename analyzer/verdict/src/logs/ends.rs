//! Rules about processes that ended and exceptions.

use super::conclusion::Conclusion;
use super::digest::{Digest, SIGABRT, SIGKILL, SIGTERM, Seen};
use super::facts::{Ended, Event};
use super::{failures, gloo};
use crate::report::format::format_ranks;
use crate::report::{Code, Verdict};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

/// The job was asked to end, and no line before that shows why it may have failed. Comes before the rules about
/// connections and exit codes: processes that end close their connections.
pub(super) fn terminated(digest: &Digest<'_>) -> Option<Conclusion> {
    let is_termination = |seen: &&Seen<'_>| matches!(seen.fact.event, Event::Terminated);
    let seen = digest.all.iter().find(is_termination)?;
    if digest.any_timed_out() || digest.first_end().is_some() {
        return None;
    }
    let has_cause = digest.before_the_end().any(|before| {
        matches!(
            before.fact.event,
            Event::PeerLost { .. } | Event::Unreachable { .. } | Event::WatchdogStuck(_)
        )
    });
    if has_cause {
        return None;
    }
    let aborted = digest
        .before_the_end()
        .find_map(|before| match &before.fact.event {
            Event::Aborted { error, .. } => Some((before, error)),
            _ => None,
        });
    let sentence = match aborted {
        None => "the job was terminated from outside; the log does not show whether anything was wrong before".to_owned(),
        Some((_, error)) => format!(
            "the job was terminated from outside, after NCCL had aborted an operation: {error}; the log does not \
             show why"
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
    let (seen, end) = digest.first_end()?;
    let signal = end.code.checked_neg().filter(|&signal| signal > 0)?;
    let own_time_out = || gloo::has_timed_out(digest, seen.fact.rank);
    // PyTorch aborts a process after a time-out. gloo aborts one that receives another size than it expects.
    let explained =
        || digest.any_timed_out() || failures::sizes_differ(digest).is_some() || own_time_out();
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
    let has_own_lines = seen
        .fact
        .rank
        .is_some_and(|rank| digest.has_own_lines(rank));
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
    let (seen, end) = digest.first_end()?;
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
        .filter(|&&seen| !digest.is_after_termination(seen))
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
    found.next = format!("read the traceback of {who} in the log");
    Some(found)
}

/// The type of an exception: its text up to the first colon.
fn exception_type(error: &str) -> &str {
    error.split(':').next().unwrap_or(error)
}
