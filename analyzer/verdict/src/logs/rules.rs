//! The rules for logs that are judged alone, in the order in which they are tried.

use super::conclusion::{COMPARE_CALLS, Conclusion};
use super::digest::{Digest, Seen};
use super::facts::{Event, Issued};
use super::{failures, timeouts};
use crate::report::format::format_ranks;
use crate::report::{Code, Verdict};
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, BTreeSet};

/// A rule; returns `None` if it does not apply.
type Rule = fn(&Digest<'_>) -> Option<Conclusion>;

/// Rules that prove a cause come before rules that suggest one.
const RULES: &[Rule] = &[
    differ,
    failures::killed,
    timeouts::differ,
    not_joined,
    barrier,
    timeouts::behind,
    failures::raised,
    failures::device,
    failures::sizes,
    timeouts::silent,
    failures::peer_lost,
    failures::unreachable,
    failures::exited,
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
    let (_, [one, other]) = pairs.first()?;
    let code = what_differs(one, other)?;
    let mut sides: BTreeMap<String, BTreeSet<Rank>> = BTreeMap::new();
    for side in pairs.iter().flat_map(|(_, pair)| pair.iter()) {
        sides
            .entry(side_of(code, side))
            .or_default()
            .insert(side.rank);
    }
    let sides: Vec<(String, Vec<Rank>)> = sides
        .into_iter()
        .map(|(what, ranks)| (what, ranks.into_iter().collect()))
        .collect();
    let parts: Vec<String> = sides
        .iter()
        .map(|(what, ranks)| format!("{} issued {what}", format_ranks(ranks)))
        .collect();
    let seq = one.seq.filter(|_| one.seq == other.seq);
    let place = match seq {
        Some(seq) => format!("{} #{seq}", one.op.word()),
        None => one.op.word(),
    };
    let what = match code {
        Code::E110 => "the ranks of a group issued different operations".to_owned(),
        Code::E111 => format!("the element types of {place} differ"),
        _ => format!("the shapes of {place} differ"),
    };
    let sentence = format!("{what}: {}", parts.join("; "));
    let mut found = Conclusion::new(code, Verdict::Mismatch, 0.9, sentence);
    found.blame_minority(sides.into_iter().map(|(_, ranks)| ranks).collect());
    found.seq = seq;
    found.op = Some(one.op.word());
    found.lines = pairs
        .iter()
        .map(|(seen, [a, b])| {
            seen.cite(format!(
                "rank {} and rank {} compared their calls",
                a.rank, b.rank
            ))
        })
        .collect();
    found.next = COMPARE_CALLS.to_owned();
    Some(found)
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

fn what_differs(one: &Issued, other: &Issued) -> Option<Code> {
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

/// A desync report, or a line of the runtime that names the ranks that had not arrived.
fn not_joined(digest: &Digest<'_>) -> Option<Conclusion> {
    let (seen, ranks, after) = digest.all.iter().find_map(|seen| match &seen.fact.event {
        Event::NotJoined { ranks, after } if !ranks.is_empty() => Some((*seen, ranks, *after)),
        _ => None,
    })?;
    let inside: Vec<(&Vec<Rank>, u64, String)> = digest
        .all
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
    let who = format_ranks(ranks);
    let mut sentence = match after {
        Some(after) => format!("{who} never joined collective #{}", after + 1),
        None => format!("{who} never joined any collective"),
    };
    if let Some(after) = after {
        sentence += &format!(" (its last is #{after})");
    }
    if !inside.is_empty() {
        let parts: Vec<String> = inside
            .iter()
            .take(3)
            .map(|(ranks, seq, op)| format!("{} in {op} #{seq}", format_ranks(ranks)))
            .collect();
        sentence += &format!("; {}", parts.join(", "));
    }
    let mut found = Conclusion::new(Code::E101, Verdict::Stuck, 0.85, sentence);
    found.victims = inside
        .iter()
        .flat_map(|(ranks, ..)| ranks.iter().copied())
        .collect();
    found.victims.sort_unstable();
    found.victims.dedup();
    found.seq = after.map(|after| after + 1);
    found.culprits.clone_from(ranks);
    found.lines = vec![seen.cite(format!("{who} had not joined"))];
    found.next = format!("look at what {who} did after its last collective: a stack, its own log");
    Some(found)
}

/// Ranks did not pass a monitored barrier.
fn barrier(digest: &Digest<'_>) -> Option<Conclusion> {
    let (seen, ranks) = digest.all.iter().find_map(|seen| match &seen.fact.event {
        Event::BarrierMissed(ranks) if !ranks.is_empty() => Some((*seen, ranks)),
        _ => None,
    })?;
    let mut reached: Vec<Rank> = digest
        .all
        .iter()
        .filter(|seen| seen.fact.event == Event::BarrierReached)
        .filter_map(|seen| seen.fact.rank)
        .collect();
    reached.sort_unstable();
    reached.dedup();
    let who = format_ranks(ranks);
    let came = match reached.as_slice() {
        [] => String::new(),
        came => format!("; {} reached it", format_ranks(came)),
    };
    let mut found = Conclusion::new(
        Code::E101,
        Verdict::Stuck,
        0.85,
        format!("{who} did not reach a monitored barrier in time{came}"),
    );
    found.op = Some("monitored_barrier".to_owned());
    found.culprits.clone_from(ranks);
    found.victims = reached;
    found.lines = vec![seen.cite(format!("{who} did not pass the barrier"))];
    found.next = format!(
        "look at what {who} did before the barrier: fewer batches than the others, a slower step, an error"
    );
    Some(found)
}
