//! The rules for logs that are judged alone, in the order in which they are tried.

use super::conclusion::{COMPARE_CALLS, Conclusion};
use super::digest::{Digest, Seen, is_world};
use super::facts::{Absent, Event, Issued};
use super::{ends, failures, gloo, timeouts};
use crate::report::format::format_ranks;
use crate::report::{Code, Verdict};
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, BTreeSet};

/// A rule; returns `None` if it does not apply.
type Rule = fn(&Digest<'_>) -> Option<Conclusion>;

/// Rules that prove a cause come before rules that suggest one.
const RULES: &[Rule] = &[
    differ,
    ends::killed,
    failures::no_shared_memory,
    failures::same_device,
    timeouts::differ,
    not_joined,
    barrier,
    timeouts::behind,
    ends::raised,
    failures::device,
    failures::sizes,
    timeouts::silent,
    gloo::timed_out,
    ends::terminated,
    failures::peer_lost,
    failures::unreachable,
    ends::exited,
    timeouts::all_inside,
    failures::watchdog_stuck,
    timeouts::undecided,
];

/// The conclusion of the first rule that applies; `None` if none does.
pub(super) fn judge(digest: &Digest<'_>) -> Option<Conclusion> {
    RULES.iter().find_map(|rule| rule(digest))
}

/// Two ranks compared their calls, and the calls differ.
fn differ(digest: &Digest<'_>) -> Option<Conclusion> {
    let pairs: Vec<(Seen<'_>, &[Issued; 2])> = digest
        .all
        .iter()
        .filter_map(|&seen| match &seen.fact.event {
            Event::Differ(pair) => Some((seen, &**pair)),
            _ => None,
        })
        .collect();
    let mut of_job = pairs.clone();
    of_job.retain(|(seen, pair)| are_of_job(digest, seen, pair));
    let (pairs, are_global) = match of_job.is_empty() {
        true => (pairs, false),
        false => (of_job, true),
    };
    let (_, [first, other]) = pairs.first()?;
    let code = code_of_difference(first, other)?;
    let mut sides: BTreeMap<String, BTreeSet<Rank>> = BTreeMap::new();
    for side in pairs.iter().flat_map(|(_, pair)| pair.iter()) {
        sides
            .entry(side_of(code, side))
            .or_default()
            .insert(side.rank);
    }
    let sides: Vec<(String, Vec<Rank>)> = sides
        .into_iter()
        .map(|(call, ranks)| (call, ranks.into_iter().collect()))
        .collect();
    let parts: Vec<String> = sides
        .iter()
        .map(|(call, ranks)| format!("{} issued {call}", format_ranks(ranks)))
        .collect();
    let seq = first.seq.filter(|_| first.seq == other.seq);
    let place = match seq {
        Some(seq) => format!("{} #{seq}", first.op.word()),
        None => first.op.word(),
    };
    let fault = match code {
        Code::E110 => "the ranks of a group issued different operations".to_owned(),
        Code::E111 => format!("the element types of {place} differ"),
        _ => format!("the shapes of {place} differ"),
    };
    let mut sentence = format!("{fault}: {}", parts.join("; "));
    if !are_global {
        sentence += OF_A_GROUP;
    }
    let confidence = if are_global { 0.9 } else { UNKNOWN_RANKS };
    let mut found = Conclusion::new(code, Verdict::Mismatch, confidence, sentence);
    if are_global {
        found.blame_minority(sides.into_iter().map(|(_, ranks)| ranks).collect());
    }
    found.seq = seq;
    found.op = Some(first.op.word());
    let of_group = if are_global { "" } else { " of the group" };
    found.lines = pairs
        .iter()
        .map(|(seen, [first, second])| {
            seen.cite(format!(
                "rank {} and rank {}{of_group} compared their calls",
                first.rank, second.rank
            ))
        })
        .collect();
    found.next = COMPARE_CALLS.to_owned();
    Some(found)
}

/// The confidence in a finding whose ranks within a process group are not known as ranks of the job.
const UNKNOWN_RANKS: f64 = 0.5;

/// The end of a sentence that names ranks within a process group.
const OF_A_GROUP: &str =
    "; these are ranks within a process group, and the log does not show which ranks of the job";

/// Whether the ranks that compared their calls, which are ranks within a group, are known to equal the global ranks.
/// Group ranks are in the order of the global ranks: if that of the line's own rank equals its global rank, all lower
/// ones do, too. Only the group of all ranks has one of the highest rank.
fn are_of_job(digest: &Digest<'_>, seen: &Seen<'_>, [own, other]: &[Issued; 2]) -> bool {
    let highest = own.rank.max(other.rank);
    let is_lower = seen.fact.rank == Some(own.rank) && other.rank < own.rank;
    is_lower || is_highest_of_job(digest, highest)
}

/// Whether this is the highest rank of the job.
fn is_highest_of_job(digest: &Digest<'_>, rank: Rank) -> bool {
    digest.world_size.and_then(|size| size.checked_sub(1)) == Some(rank)
}

/// The part of a rank's call that differs, as text.
fn side_of(code: Code, issued: &Issued) -> String {
    match (code, issued.seq) {
        (Code::E110, Some(seq)) => format!("{} #{seq}", issued.op.word()),
        (Code::E110, None) => issued.op.word(),
        (Code::E111, _) => issued.dtype.clone(),
        _ => format!("[{}]", issued.shape),
    }
}

/// The code of the first difference of two calls: in operation or number, in type, in shape. `None` if nothing that was
/// logged differs.
fn code_of_difference(one: &Issued, other: &Issued) -> Option<Code> {
    let known = |a: &str, b: &str| !a.is_empty() && !b.is_empty() && a != b;
    if one.op.kind.pattern() != other.op.kind.pattern() || one.seq != other.seq {
        Some(Code::E110)
    } else if known(&one.dtype, &other.dtype) {
        Some(Code::E111)
    } else if known(&one.shape, &other.shape) {
        Some(Code::E112)
    } else {
        None
    }
}

/// Lines name ranks that had not joined: those of a desync report of PyTorch, or a line of rcomm's runtime.
fn not_joined(digest: &Digest<'_>) -> Option<Conclusion> {
    let (reports, are_global) = reports_of_one_group(digest);
    let lists: Vec<(Seen<'_>, &[Absent])> = reports
        .iter()
        .filter_map(|&seen| match &seen.fact.event {
            Event::NotJoined(absent) | Event::Lagging(absent) if !absent.is_empty() => {
                Some((seen, absent.as_slice()))
            }
            _ => None,
        })
        .collect();
    let &(seen, _) = lists.first()?;
    // Ranks repeat each other's lists; the first statement on a rank counts.
    let mut last_of: BTreeMap<Rank, Option<u64>> = BTreeMap::new();
    for absent in lists.iter().flat_map(|(_, absent)| *absent) {
        last_of.entry(absent.rank).or_insert(absent.after);
    }
    let ranks: Vec<Rank> = last_of.keys().copied().collect();
    let mut by_last: BTreeMap<Option<u64>, Vec<Rank>> = BTreeMap::new();
    for (rank, after) in last_of {
        by_last.entry(after).or_default().push(rank);
    }
    let inside: Vec<(&Vec<Rank>, u64, String)> = reports
        .iter()
        .filter_map(|seen| match &seen.fact.event {
            Event::Newest {
                ranks: newest,
                seq,
                op,
                finished: false,
            } if !newest.iter().any(|rank| ranks.contains(rank)) => Some((newest, *seq, op.word())),
            _ => None,
        })
        .collect();
    let who = format_ranks(&ranks);
    let absent: Vec<String> = by_last
        .iter()
        .map(|(after, ranks)| never_joined(ranks, *after))
        .collect();
    let mut sentence = absent.join(", ");
    if !inside.is_empty() {
        let parts: Vec<String> = inside
            .iter()
            .take(3)
            .map(|(ranks, seq, op)| format!("{} in {op} #{seq}", format_ranks(ranks)))
            .collect();
        sentence += &format!("; {}", parts.join(", "));
    }
    if !are_global {
        sentence += OF_A_GROUP;
    }
    let confidence = if are_global { 0.85 } else { UNKNOWN_RANKS };
    let mut found = Conclusion::new(Code::E101, Verdict::Stuck, confidence, sentence);
    if are_global {
        found.victims = inside
            .iter()
            .flat_map(|(ranks, ..)| ranks.iter().copied())
            .collect();
        found.victims.sort_unstable();
        found.victims.dedup();
        found.culprits.clone_from(&ranks);
    }
    found.seq = match by_last.keys().collect::<Vec<_>>().as_slice() {
        [Some(after)] => Some(after + 1),
        _ => None,
    };
    let of_group = if are_global { "" } else { " of the group" };
    found.lines = vec![seen.cite(format!("{who}{of_group} had not joined"))];
    found.next = match are_global {
        true => look_after_last(&ranks),
        false => format!(
            "find which ranks of the job are in that group, then look at what {who} of the group did after the last \
             collective"
        ),
    };
    Some(found)
}

/// The facts of the reports on ranks that had not joined, and whether their ranks are those of the job. PyTorch makes a
/// desync report for each group, with the ranks within that group. The reports on the group of all ranks and the lists
/// of rcomm's runtime are taken or, if they name no rank, the first report that names one.
fn reports_of_one_group<'a>(digest: &Digest<'a>) -> (Vec<Seen<'a>>, bool) {
    let mut lists: Vec<Seen<'a>> = Vec::new();
    let mut reports: Vec<Vec<Seen<'a>>> = Vec::new();
    let mut last: Option<Seen<'a>> = None;
    for &seen in &digest.all {
        let is_list = matches!(seen.fact.event, Event::Lagging(_));
        match &seen.fact.event {
            Event::NotJoined(_) => lists.push(seen),
            Event::Lagging(_) | Event::Newest { .. } => {
                // The lists of a report come before the newest operations.
                let goes_on = last.is_some_and(|last| {
                    std::ptr::eq(last.log, seen.log)
                        && (matches!(last.fact.event, Event::Lagging(_))
                            || !is_list && matches!(last.fact.event, Event::Newest { .. }))
                });
                match reports.last_mut().filter(|_| goes_on) {
                    Some(report) => report.push(seen),
                    None => reports.push(vec![seen]),
                }
            }
            _ => {}
        }
        last = Some(seen);
    }
    let of_world = reports
        .iter()
        .filter(|report| is_about_world(digest, report));
    lists.extend(of_world.flatten());
    let has_list = |seen: &Seen<'_>| match &seen.fact.event {
        Event::NotJoined(absent) | Event::Lagging(absent) => !absent.is_empty(),
        _ => false,
    };
    if lists.iter().any(has_list) {
        return (lists, true);
    }
    let first = reports
        .into_iter()
        .find(|report| report.iter().any(has_list));
    (first.unwrap_or_default(), false)
}

/// Whether a desync report is about the group of all ranks: it lists the highest rank of the job, or says of ranks what
/// lines on that group say of them, too. One small number can be the same in two groups by chance, and is not enough.
fn is_about_world(digest: &Digest<'_>, report: &[Seen<'_>]) -> bool {
    const LARGE: u64 = 100;
    let in_world = |rank: Rank| {
        let mut positions = digest.positions.iter();
        positions.find_map(|(&(group, other), (progress, _))| {
            (other == rank && is_world(Some(group))).then_some(progress.enqueued)?
        })
    };
    let has_highest = report.iter().any(|seen| {
        let mut ranks = match &seen.fact.event {
            Event::Lagging(absent) => absent.iter().map(|absent| absent.rank).collect(),
            Event::Newest { ranks, .. } => ranks.clone(),
            _ => Vec::new(),
        }
        .into_iter();
        ranks.any(|rank| is_highest_of_job(digest, rank))
    });
    if has_highest {
        return true;
    }
    let mut same: Vec<u64> = Vec::new();
    for seen in report {
        let Event::Newest { ranks, seq, .. } = &seen.fact.event else {
            continue;
        };
        for newest in ranks.iter().filter_map(|&rank| in_world(rank)) {
            if newest != *seq {
                return false;
            }
            same.push(newest);
        }
    }
    same.len() > 2 || same.iter().any(|&number| number >= LARGE)
}

/// The statement on ranks that had not joined; `after` is the number of their last collective.
fn never_joined(ranks: &[Rank], after: Option<u64>) -> String {
    let who = format_ranks(ranks);
    let their = if ranks.len() == 1 { "its" } else { "their" };
    match after {
        Some(after) => format!(
            "{who} never joined collective #{} ({their} last is #{after})",
            after + 1
        ),
        None => format!("{who} never joined any collective"),
    }
}

/// The next step for ranks that did not join.
pub(super) fn look_after_last(ranks: &[Rank]) -> String {
    let who = format_ranks(ranks);
    let (their, logs) = match ranks {
        [_] => ("its", "its own log"),
        _ => ("their", "their own logs"),
    };
    format!("look at what {who} did after {their} last collective: a stack, {logs}")
}

/// Ranks did not pass a monitored barrier.
fn barrier(digest: &Digest<'_>) -> Option<Conclusion> {
    let (seen, ranks) = digest.all.iter().find_map(|seen| match &seen.fact.event {
        Event::BarrierMissed(ranks) if !ranks.is_empty() => Some((*seen, ranks)),
        _ => None,
    })?;
    let reached: BTreeMap<Rank, Option<Rank>> = digest
        .all
        .iter()
        .filter_map(|seen| match seen.fact.event {
            Event::BarrierReached { in_group } => Some((in_group?, seen.fact.rank)),
            _ => None,
        })
        .collect();
    let who = format_ranks(ranks);
    let came: Vec<Rank> = reached.keys().copied().collect();
    let came_text = match came.as_slice() {
        [] => String::new(),
        came => format!("; {} reached it", format_ranks(came)),
    };
    let fault = "did not reach a monitored barrier in time";
    let op = Some("monitored_barrier".to_owned());
    let mut found = if group_ranks_are_global(digest, ranks, &reached) {
        let sentence = format!("{who} {fault}{came_text}");
        let mut found = Conclusion::new(Code::E101, Verdict::Stuck, 0.85, sentence);
        found.culprits.clone_from(ranks);
        found.victims = came;
        found
    } else {
        let sentence = format!(
            "{who} of a process group {fault}{came_text}; the log does not show which ranks of the job these are"
        );
        Conclusion::new(Code::E101, Verdict::Stuck, 0.5, sentence)
    };
    found.op = op;
    found.lines = vec![seen.cite(format!("{who} did not pass the barrier"))];
    found.next = format!(
        "look at what {who} did before the barrier: fewer batches than the others, a slower step, an error"
    );
    Some(found)
}

/// Whether the group ranks in a monitored barrier's lines are known to equal the global ranks, as in the group of all
/// ranks. `reached` has group ranks, each with the global rank if a line shows it.
fn group_ranks_are_global(
    digest: &Digest<'_>,
    missed: &[Rank],
    reached: &BTreeMap<Rank, Option<Rank>>,
) -> bool {
    // The first rank of the group reports those that are missing.
    let is_world = digest.world_size.is_some_and(|size| {
        (1..size).all(|rank| missed.contains(&rank) || reached.contains_key(&rank))
    });
    // Group ranks are in the order of the global ranks: if one equals its global rank, all lower ones do, too.
    let highest_alike = reached
        .iter()
        .filter(|(in_group, in_job)| **in_job == Some(**in_group))
        .map(|(in_group, _)| in_group)
        .next_back();
    is_world
        || highest_alike
            .is_some_and(|highest_alike| missed.iter().all(|rank| rank <= highest_alike))
}
