//! Rules about time-outs: the operations that ranks timed out in, and the ranks that report no time-out.

use super::conclusion::{COMPARE_CALLS, Conclusion};
use super::digest::{Digest, Seen, TimedOutWait, is_world};
use super::facts::{Event, TimedOut};
use super::rules::look_after_last;
use crate::report::format::{format_ranks, format_time, grouped};
use crate::report::{Code, Verdict};
use rcomm_recorder::model::{Layout, OpType, Parts, Pattern, Rank};
use std::collections::{BTreeMap, BTreeSet};

/// The time-outs of one group.
struct GroupTimeouts<'a, 'b> {
    group: Option<&'a str>,
    /// The lowest number of an operation that timed out.
    seq: u64,
    /// The time-outs in the operation of this number.
    here: Vec<&'b TimedOutWait<'a>>,
    /// All ranks that timed out in this group, ascending.
    ranks: Vec<Rank>,
}

impl GroupTimeouts<'_, '_> {
    /// The ranks that timed out in the operation, ascending.
    fn ranks_here(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.here.iter().map(|wait| wait.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The operation as text.
    fn place(&self) -> String {
        let op = self.here[0].timed_out.op.word();
        place(&op, Some(self.seq), self.group)
    }

    /// Fills in the group, the number and the operation, and adds the lines of the time-outs.
    fn fill(&self, found: &mut Conclusion) {
        found.group = self.group.map(str::to_owned);
        found.seq = Some(self.seq);
        found.op = Some(self.here[0].timed_out.op.word());
        found.lines.extend(self.here.iter().map(|wait| cite(wait)));
    }
}

/// The line of a time-out, as evidence.
fn cite(wait: &TimedOutWait<'_>) -> crate::report::LogLine {
    cite_line(&wait.seen, wait.timed_out, wait.group)
}

/// The line of a time-out in an operation of this group, as evidence.
fn cite_line(seen: &Seen<'_>, timed_out: &TimedOut, group: Option<&str>) -> crate::report::LogLine {
    let elements = match timed_out.elements {
        [Some(n), _] => format!(", {} elements in", grouped(n)),
        _ => String::new(),
    };
    let place = place(&timed_out.op.word(), timed_out.seq, group);
    let after = format_time(timed_out.timeout_ms as f64);
    seen.cite(format!("timed out in {place}{elements} after {after}"))
}

/// An operation as text, like `all_reduce #41 on group 12`; unknown parts are left out.
fn place(op: &str, seq: Option<u64>, group: Option<&str>) -> String {
    let seq = seq.map_or(String::new(), |seq| format!(" #{seq}"));
    let group = group.map_or(String::new(), |group| format!(" on group {group}"));
    format!("{op}{seq}{group}")
}

/// The groups with time-outs of collectives, those with most ranks first. Time-outs without a logged group count as one
/// group; conclusions from them are less certain.
fn group_timeouts<'a, 'b>(digest: &'b Digest<'a>) -> Vec<GroupTimeouts<'a, 'b>> {
    let mut groups: BTreeMap<Option<&'a str>, Vec<&'b TimedOutWait<'a>>> = BTreeMap::new();
    for wait in &digest.waits {
        if wait.timed_out.seq.is_some() && is_comparable(wait.timed_out.op.kind) {
            groups.entry(wait.group).or_default().push(wait);
        }
    }
    let mut timeouts: Vec<GroupTimeouts<'a, 'b>> = groups
        .into_iter()
        .filter_map(|(group, waits)| {
            let seq = waits.iter().filter_map(|wait| wait.timed_out.seq).min()?;
            let ranks: BTreeSet<Rank> = waits.iter().map(|wait| wait.rank).collect();
            let here = waits
                .into_iter()
                .filter(|wait| wait.timed_out.seq == Some(seq))
                .collect();
            let ranks = ranks.into_iter().collect();
            Some(GroupTimeouts {
                group,
                seq,
                here,
                ranks,
            })
        })
        .collect();
    timeouts.sort_by_key(|group| (std::cmp::Reverse(group.ranks.len()), group.seq));
    timeouts
}

/// Whether all ranks of a group give this operation the same sequence number.
fn is_comparable(kind: OpType) -> bool {
    kind.is_collective() && !matches!(kind.pattern(), Pattern::Block | Pattern::Unknown)
}

/// Whether the input, and whether the output, of this operation must have the same length on all ranks.
fn equal_lengths(kind: OpType) -> [bool; 2] {
    let pattern = kind.pattern();
    let equal = kind.parts() == Parts::Equal;
    let has_full_length = matches!(pattern, Pattern::AllReduce | Pattern::Broadcast);
    let parts = matches!(pattern, Pattern::AllGather | Pattern::ReduceScatter);
    let output = equal && (has_full_length || parts && kind.layout() == Layout::Single);
    [output || equal && pattern == Pattern::Reduce, output]
}

/// Ranks timed out under one sequence number in different operations, or with different lengths.
pub(super) fn differ(digest: &Digest<'_>) -> Option<Conclusion> {
    group_timeouts(digest).iter().find_map(differ_at)
}

/// The conclusion of [`differ`] on one group.
fn differ_at(timeouts: &GroupTimeouts<'_, '_>) -> Option<Conclusion> {
    let first = timeouts.here.first()?;
    let other_op = |wait: &&&TimedOutWait<'_>| {
        wait.timed_out.op.kind.pattern() != first.timed_out.op.kind.pattern()
    };
    let ops_differ = timeouts.here.iter().any(|wait| other_op(&wait));
    let lengths = |wait: &TimedOutWait<'_>| {
        let [input, output] = equal_lengths(wait.timed_out.op.kind);
        let [elements_in, elements_out] = wait.timed_out.elements;
        [
            elements_in.filter(|_| input),
            elements_out.filter(|_| output),
        ]
    };
    let unequal = |wait: &&TimedOutWait<'_>| {
        lengths(wait)
            .into_iter()
            .zip(lengths(first))
            .any(|(a, b)| a.is_some() && b.is_some() && a != b)
    };
    let code = match ops_differ {
        true => Code::E110,
        false if timeouts.here.iter().any(unequal) => Code::E112,
        false => return None,
    };
    let mut sides: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
    for wait in &timeouts.here {
        let issued = match code {
            Code::E110 => wait.timed_out.op.word(),
            _ => match wait.timed_out.elements {
                [Some(a), Some(b)] if a == b => format!("{} elements", grouped(a)),
                [Some(a), Some(b)] => format!("{} elements in, {} out", grouped(a), grouped(b)),
                _ => "a length that is not logged".to_owned(),
            },
        };
        sides.entry(issued).or_default().push(wait.rank);
    }
    let parts: Vec<String> = sides
        .iter_mut()
        .map(|(issued, ranks)| {
            ranks.sort_unstable();
            format!("{} with {issued}", format_ranks(ranks))
        })
        .collect();
    let sentence = match code {
        Code::E110 => format!(
            "the ranks are in different operations under number #{}{}: {}",
            timeouts.seq,
            timeouts
                .group
                .map_or(String::new(), |group| format!(" on group {group}")),
            parts.join(", ").replace(" with ", " in ")
        ),
        _ => format!(
            "the sizes of {} differ: {}",
            timeouts.place(),
            parts.join(", ")
        ),
    };
    // Without a group, the number may belong to operations of several groups.
    let confidence = if timeouts.group.is_some() { 0.85 } else { 0.55 };
    let mut found = Conclusion::new(code, Verdict::Mismatch, confidence, sentence);
    found.blame_minority(sides.into_values().collect());
    found.victims = timeouts.ranks_here();
    found.victims.retain(|rank| !found.culprits.contains(rank));
    timeouts.fill(&mut found);
    found.next = COMPARE_CALLS.to_owned();
    Some(found)
}

/// Lines show that some ranks had not enqueued the operation in which others of the same group timed out.
pub(super) fn behind(digest: &Digest<'_>) -> Option<Conclusion> {
    group_timeouts(digest).iter().find_map(|timeouts| {
        let group = timeouts.group?;
        let late: Vec<(Rank, Option<u64>, _)> = digest
            .positions
            .iter()
            .filter(|((name, rank), (progress, _))| {
                *name == group
                    && !timeouts.ranks.contains(rank)
                    // A rank that timed out in another group waited there.
                    && !digest.timed_out(*rank)
                    && progress.enqueued.is_none_or(|newest| newest < timeouts.seq)
            })
            .map(|((_, rank), (progress, seen))| (*rank, progress.enqueued, *seen))
            .collect();
        let ranks: Vec<Rank> = late.iter().map(|(rank, ..)| *rank).collect();
        if ranks.is_empty() || ranks.len() >= timeouts.ranks.len() {
            return None;
        }
        let who = format_ranks(&ranks);
        let mut newest: Vec<Option<u64>> = late.iter().map(|(_, newest, _)| *newest).collect();
        newest.sort_unstable();
        newest.dedup();
        let their = if ranks.len() == 1 { "its" } else { "their" };
        let newest = match newest.as_slice() {
            [None] => ", nor any collective there before it".to_owned(),
            [Some(newest_seq)] => format!("; {their} newest is #{newest_seq}"),
            _ => format!("; {their} newest differ, and the cited lines have them"),
        };
        // A rank that had not come may itself have waited in another group, for less than the time-out.
        let is_other = |wait: &TimedOutWait<'_>| wait.group.is_some_and(|other| other != group);
        let waits_elsewhere = digest.waits.iter().any(is_other);
        let confidence = if waits_elsewhere { 0.5 } else { 0.85 };
        let mut found = Conclusion::new(
            Code::E101,
            Verdict::Stuck,
            confidence,
            format!(
                "{who} never issued {}, in which {} timed out{newest}",
                timeouts.place(),
                format_ranks(&timeouts.ranks_here()),
            ),
        );
        found.victims = timeouts.ranks_here();
        found.culprits = ranks;
        timeouts.fill(&mut found);
        found.lines.splice(
            0..0,
            late.iter().map(|(_, newest, seen)| {
                seen.cite(match newest {
                    Some(newest) => format!("had enqueued up to #{newest}"),
                    None => "had enqueued none".to_owned(),
                })
            }),
        );
        found.next = look_after_last(&found.culprits);
        Some(found)
    })
}

/// More than two thirds of the ranks of the job report a time-out, and the other ranks do not.
pub(super) fn silent(digest: &Digest<'_>) -> Option<Conclusion> {
    let timeouts = group_timeouts(digest)
        .into_iter()
        .find(|timeouts| is_world(timeouts.group))?;
    // Without a stated world size, only gaps below the highest rank named are known to be ranks.
    let size = digest
        .world_size
        .or_else(|| digest.named.last().map(|last| last.saturating_add(1)))?;
    // A few are enough: a line may state any number as a rank.
    let missing = (0..size).filter(|&rank| !digest.timed_out(rank));
    let missing: Vec<Rank> = missing.take(timeouts.ranks.len()).collect();
    if missing.is_empty() || missing.len() * 2 >= timeouts.ranks.len() {
        return None;
    }
    let without_lines: Vec<Rank> = missing
        .iter()
        .copied()
        .filter(|&rank| !digest.has_lines(rank))
        .collect();
    let who = format_ranks(&missing);
    let (code, confidence, shown) = if without_lines.is_empty() {
        (Code::E101, 0.5, "reported none")
    } else {
        (Code::E102, 0.4, "left no line about it")
    };
    let verb = if missing.len() == 1 { "has" } else { "have" };
    let mut found = Conclusion::new(
        code,
        Verdict::Stuck,
        confidence,
        format!(
            "{} timed out in {}, and {who} {shown}: either {who} {verb} not issued it, or those lines are \
             missing from the log",
            format_ranks(&timeouts.ranks),
            timeouts.place(),
        ),
    );
    if digest.world_size.is_none() || timeouts.group.is_none() {
        found.confidence *= 0.8;
    }
    found.victims = timeouts.ranks_here();
    found.culprits = missing;
    timeouts.fill(&mut found);
    found.next = format!("read the log of {who} itself, and its exit code; {COLLECT}");
    Some(found)
}

/// Every rank of the job timed out in the same operation.
pub(super) fn all_inside(digest: &Digest<'_>) -> Option<Conclusion> {
    let timeouts = group_timeouts(digest)
        .into_iter()
        .find(|timeouts| is_world(timeouts.group))?;
    let size = digest.world_size? as usize;
    let here = timeouts.ranks_here();
    if here.len() != size || size < 2 || digest.waits.len() > size {
        return None;
    }
    let mut found = Conclusion::new(
        Code::E135,
        Verdict::Stuck,
        0.45,
        format!(
            "all {size} ranks timed out in {}: every rank had issued it, with the same operation and sizes \
             as far as they are logged, and none finished",
            timeouts.place()
        ),
    );
    found.victims = here;
    timeouts.fill(&mut found);
    found
        .ruled_out
        .push("not_joined: every rank reports the time-out of this operation".to_owned());
    found.next = format!("check links, devices and NCCL_DEBUG=WARN output; {COLLECT}");
    Some(found)
}

/// Time-outs that no other rule explains.
pub(super) fn undecided(digest: &Digest<'_>) -> Option<Conclusion> {
    if !digest.any_timed_out() {
        return None;
    }
    let mut places: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
    for wait in &digest.waits {
        let place = place(&wait.timed_out.op.word(), wait.timed_out.seq, wait.group);
        let ranks = places.entry(place).or_default();
        if !ranks.contains(&wait.rank) {
            ranks.push(wait.rank);
        }
    }
    let mut parts: Vec<(usize, String)> = places
        .into_iter()
        .map(|(place, mut ranks)| {
            ranks.sort_unstable();
            let text = format!("{} timed out in {place}", format_ranks(&ranks));
            (ranks.len(), text)
        })
        .collect();
    parts.sort_by_key(|(ranks, text)| (std::cmp::Reverse(*ranks), text.clone()));
    let left = parts.len().saturating_sub(2);
    let mut texts: Vec<String> = parts.into_iter().take(2).map(|(_, text)| text).collect();
    if left > 0 {
        texts.push(format!("further operations with time-outs: {left}"));
    }
    let nameless = || {
        let all = digest.nameless.iter();
        all.filter_map(|seen| match &seen.fact.event {
            Event::TimedOut(timed_out) => Some((*seen, timed_out)),
            _ => None,
        })
    };
    if let Some((_, first)) = nameless().next().filter(|_| texts.is_empty()) {
        let place = place(&first.op.word(), first.seq, first.group.as_deref());
        let is_there = |other: &TimedOut| {
            (&other.op, other.seq, &other.group) == (&first.op, first.seq, &first.group)
        };
        let there = nameless().filter(|(_, timed_out)| is_there(timed_out));
        let in_group: BTreeSet<Rank> = there
            .filter_map(|(_, timed_out)| timed_out.in_group)
            .collect();
        let in_group: Vec<Rank> = in_group.into_iter().collect();
        texts.push(match in_group.as_slice() {
            [] => format!("ranks that the log does not name timed out in {place}"),
            [rank] => format!(
                "rank {rank} of a process group timed out in {place}, and the log does not show which rank of the job \
                 that is"
            ),
            ranks => format!(
                "{} of a process group timed out in {place}, and the log does not show which ranks of the job these are",
                format_ranks(ranks)
            ),
        });
    }
    let mut found = Conclusion::new(
        Code::N302,
        Verdict::Inconclusive,
        0.0,
        format!(
            "{}; the log does not show which rank the others wait for, nor whether their calls agree",
            texts.join("; ")
        ),
    );
    found.lines = digest.waits.iter().map(cite).collect();
    let lines = nameless().map(|(seen, op)| cite_line(&seen, op, op.group.as_deref()));
    found.lines.extend(lines);
    found.next = format!("collect the logs of all ranks; {COLLECT}");
    Some(found)
}

/// Further input that would decide the verdict.
const COLLECT: &str = "give PyTorch's dumps as well (comm_lib_trace_rank_* or nccl_trace_rank_*; versions \
                       up to 2.6 write them with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and \
                       TORCH_NCCL_DUMP_ON_TIMEOUT=1)";
