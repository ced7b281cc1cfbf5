//! Rules about time-outs in gloo, whose errors name neither the operation nor the rank that was waited for.

use super::conclusion::Conclusion;
use super::digest::{Digest, Seen};
use super::facts::Event;
use crate::report::format::{format_ranks, format_time};
use crate::report::{Code, Verdict};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

/// The exceptions of ranks that timed out in a message of gloo, each with the time-out in ms.
fn waits<'a>(digest: &Digest<'a>) -> Vec<(Seen<'a>, Rank, u64)> {
    let waits = digest.all.iter().filter_map(|&seen| {
        let Event::Exception(error) = &seen.fact.event else {
            return None;
        };
        Some((seen, seen.fact.rank?, time_out(error)?))
    });
    waits.collect()
}

/// The time-out, ms, in `[…/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete`; `None` for
/// another error.
fn time_out(error: &str) -> Option<u64> {
    let (_, rest) = error.split_once("] Timed out waiting ")?;
    let (time, rest) = rest.split_once("ms for ")?;
    let is_message = rest.starts_with("recv operation") || rest.starts_with("send operation");
    time.parse().ok().filter(|_| is_message)
}

/// Whether this rank, or any if it is unknown, timed out in a message of gloo.
pub(super) fn has_timed_out(digest: &Digest<'_>, rank: Option<Rank>) -> bool {
    let waits = waits(digest);
    waits
        .iter()
        .any(|(_, other, _)| rank.is_none_or(|rank| rank == *other))
}

/// Ranks timed out in messages of gloo. The ranks that did not are named if they are few. Comes before the rule about
/// closed connections: a rank that ends by its time-out closes its own.
pub(super) fn timed_out(digest: &Digest<'_>) -> Option<Conclusion> {
    let waits = waits(digest);
    let longest = waits.iter().map(|(.., time_out)| *time_out).max()?;
    let ranks: BTreeSet<Rank> = waits.iter().map(|(_, rank, _)| *rank).collect();
    // The others waited for the process that ended first by itself. One that exited with an error and left no lines may
    // have timed out, too: launchers do not name processes in the order of their ends.
    let first = digest.first_end().and_then(|(seen, end)| {
        let rank = seen.fact.rank?;
        let is_by_itself = end.code < 0 || end.first || digest.has_own_lines(rank);
        (end.code != 0 && is_by_itself).then_some(rank)
    });
    if first.is_some_and(|rank| !ranks.contains(&rank)) {
        return None;
    }
    // Without a stated world size, only gaps below the highest rank named are known to be ranks.
    let size = digest
        .world_size
        .or_else(|| digest.named.last().map(|last| last.saturating_add(1)))?;
    // A few are enough: a line may state any number as a rank.
    let missing = (0..size).filter(|rank| !ranks.contains(rank));
    let missing: Vec<Rank> = missing.take(ranks.len()).collect();
    let ranks: Vec<Rank> = ranks.into_iter().collect();
    let fact = format!(
        "{} timed out in a message of gloo, after {}",
        format_ranks(&ranks),
        format_time(longest as f64)
    );
    let is_few = !missing.is_empty() && missing.len() * 2 < ranks.len();
    let mut found = if is_few {
        let who = format_ranks(&missing);
        let sentence = format!(
            "{fact}, and no line shows that {who} did: either the others waited for {who}, or the lines are missing \
             from the log"
        );
        let confidence = if digest.world_size.is_some() {
            0.4
        } else {
            0.32
        };
        let mut found = Conclusion::new(Code::E102, Verdict::Stuck, confidence, sentence);
        found.next = format!("read the log of {who} itself; {RECORD}");
        found.culprits = missing;
        found
    } else {
        let they = if ranks.len() == 1 { "it" } else { "they" };
        let sentence = format!("{fact}; the log does not show for which rank {they} waited");
        let mut found = Conclusion::new(Code::N302, Verdict::Inconclusive, 0.0, sentence);
        found.next = format!("collect the logs of all ranks; {RECORD}");
        found
    };
    found.victims = ranks;
    let cited = waits.iter().map(|(seen, _, time_out)| {
        let after = format_time(*time_out as f64);
        seen.cite(format!("timed out in a message of gloo after {after}"))
    });
    found.lines = cited.collect();
    Some(found)
}

/// How the next such hang can be judged.
const RECORD: &str =
    "gloo writes no dumps, so start the next job with RCOMM_RECORD=1 to see where each rank is";
