//! E101: a rank left a record, others wait for it, and it waits for no other rank: it never issued the operation, or
//! issued it but has not started it.
//!
//! Such a rank is stuck in its own code or took another branch. Of all the places where it is missed, the finding names
//! the first in the order of the program; the other waits are consequences.

use super::undated;
use crate::align::record::Record;
use crate::align::{Group, retiring_is_all};
use crate::judge::check::Check;
use crate::judge::check::failures::exits::doubt_early_end;
use crate::judge::check::waits::at_work::may_still_come;
use crate::judge::context::{Context, FindingDraft, OpRef};
use crate::judge::life::raised::{began_ns, has_left, left_groups_ns};
use crate::judge::outdated::taken_early;
use crate::judge::silence::unmade_in_words;
use crate::judge::waits::missed::first_missed;
use crate::judge::waits::wait_graph::{Missing, Node, Place};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::format::{count_ranks, format_ranks};
use crate::report::{Code, Finding};
use rcomm_recorder::model::{FailureKind, Rank};
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, HashMap, HashSet};

pub(crate) struct NotJoined;

impl Check for NotJoined {
    fn codes(&self) -> &'static [Code] {
        &[Code::E101]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        // Ranks that are first missed at the same place share one finding.
        let mut by_place: BTreeMap<usize, Vec<(Node, Missing)>> = BTreeMap::new();
        let mut lost: BTreeMap<usize, HashSet<Rank>> = BTreeMap::new();
        for wait_root in &ctx.wait_roots {
            let &WaitRoot::Idle(node) = wait_root else {
                continue;
            };
            if so_far.iter().any(|draft| draft.targets.contains(&node)) {
                continue;
            }
            if let Some((place, why)) = first_missed(ctx, node)
                && matches!(ctx.graph.places[place], Place::Collective { .. })
                && (!ctx.failed_at_once(place) || had_left(ctx, place, node))
                && !lost
                    .entry(place)
                    .or_insert_with(|| lost_others(ctx, place))
                    .contains(&ctx.rank(node))
            {
                by_place.entry(place).or_default().push((node, why));
            }
        }
        let groups_differ = so_far.iter().any(|draft| draft.code == Code::E105);
        let drafts = by_place.into_iter().map(|(place, nodes)| {
            let mut draft = draft(ctx, place, &nodes);
            if groups_differ {
                draft.confidence = draft.confidence.min(GROUPS_DIFFER);
                draft.doubts.push(
                    "the ranks do not agree on the members of a group, so any of them may wait in the call that makes \
                     one, which is not recorded"
                        .to_owned(),
                );
            }
            // A rank that is late may still come; one that is gone cannot.
            let mut missing = ctx.graph.missing[place].iter();
            if let Some(&(node, _)) = missing.find(|(node, _)| ctx.life.went_first(ctx.rank(*node)))
            {
                draft.confidence = draft.confidence.min(BESIDE_GONE);
                draft.doubts.push(format!(
                    "rank {} is missing there, too, and its process is gone",
                    ctx.rank(node)
                ));
            }
            draft
        });
        drafts.collect()
    }
}

/// Common times of two hosts that differ by less than this, ns, do not show what came first.
const CLOCK_ERROR_NS: i64 = 50_000_000;

/// Whether an exception had left the program of this rank, or the program its groups, before the operation of a place
/// failed: both close connections. Not if another rank that is missing there is gone, which may be the cause of an
/// exception, or if the clocks do not show what came first.
fn had_left(ctx: &Context<'_>, place: usize, node: Node) -> bool {
    let mut others = ctx.graph.missing[place].iter();
    if others.any(|&(other, _)| other != node && ctx.life.gone(ctx.rank(other)).is_some()) {
        return false;
    }
    let ops = || ctx.ops_of(place).into_iter();
    let is_known = |record: usize| ctx.aligned.clock_known[record];
    if !ops().all(|(record, _)| is_known(record))
        || !ctx.aligned.records_of(ctx.rank(node)).all(is_known)
    {
        return false;
    }
    let failed = ops().filter_map(|(record, position)| {
        let failed_ns = ctx.aligned.op(record, position).failed_ns()?;
        Some(failed_ns.saturating_sub(ctx.aligned.offsets_ns[record]))
    });
    let Some(first_failed_ns) = failed.min() else {
        return false;
    };
    let mut records = ctx.aligned.records_of(ctx.rank(node));
    records.any(|record| {
        // The operations of others fail as soon as a rank leaves a group, and some time after an exception.
        let soon_ns = match left_groups_ns(ctx.aligned, record) {
            Some(_) => 0,
            None => CLOCK_ERROR_NS,
        };
        has_left(ctx.aligned, ctx.policy, ctx.life, record)
            && began_ns(ctx.aligned, record)
                .is_some_and(|began_ns| began_ns.saturating_add(soon_ns) <= first_failed_ns)
    })
}

/// The ranks that are missing at a place because they lost others, which are missing there too, in a call that records
/// no operation, such as the one that makes a group ([`lost_in_no_operation`]). Every rank that they lost is missing,
/// and their losses lead, directly or through the losses of others, to a missing rank that lost none of the missing.
/// Ranks that only lost each other do not count.
fn lost_others(ctx: &Context<'_>, place: usize) -> HashSet<Rank> {
    let missing = ctx.graph.missing[place].iter();
    let missing: HashSet<Rank> = missing.map(|&(node, _)| ctx.rank(node)).collect();
    let mut lost_by: HashMap<Rank, Vec<Rank>> = HashMap::new();
    let mut causes: Vec<Rank> = Vec::new();
    for &rank in &missing {
        let lost = lost_in_no_operation(ctx, rank);
        if lost.iter().all(|other| !missing.contains(other)) {
            causes.push(rank);
        } else if lost.iter().all(|other| missing.contains(other)) {
            for &other in lost {
                lost_by.entry(other).or_default().push(rank);
            }
        }
    }
    let mut excused = HashSet::new();
    while let Some(cause) = causes.pop() {
        for rank in lost_by.remove(&cause).into_iter().flatten() {
            if excused.insert(rank) {
                causes.push(rank);
            }
        }
    }
    excused
}

/// The other ranks that the newest failure of this rank names, if the failure is their loss or a time-out, outside of
/// any operation, and the rank has issued no operation since. Else empty.
fn lost_in_no_operation<'a>(ctx: &'a Context<'_>, rank: Rank) -> &'a [Rank] {
    let records = || {
        let records = ctx.aligned.records_of(rank);
        records.map(|record| &ctx.aligned.records[record])
    };
    let failures = records().filter_map(|record| record.failures.last());
    let Some(newest) = failures.max_by_key(|failure| failure.time_ns) else {
        return &[];
    };
    let is_loss = matches!(newest.kind, FailureKind::PeerGone | FailureKind::Timeout);
    let is_outside = newest.operation.is_none() && !newest.ranks.contains(&rank);
    let mut last = records().filter_map(|record| record.ops.last());
    let went_on = last.any(|op| op.created_ns > newest.time_ns);
    match is_loss && is_outside && !went_on {
        true => &newest.ranks,
        false => &[],
    }
}

/// The highest confidence if ranks do not agree on their groups: less than that of the finding on that disagreement.
const GROUPS_DIFFER: f64 = 0.45;

/// The highest confidence if a missing rank may wait in the call that makes a group.
const GROUP_UNMADE: f64 = 0.6;

/// The highest confidence if another thread of a missing rank is in an operation: the threads may wait for each other.
const BUSY: f64 = 0.8;

/// The highest confidence if a rank is missing in a record that was taken much earlier than others, and it is not known
/// of all other members whether they arrived.
const MISSED_EARLY: f64 = 0.5;

/// The highest confidence if several ranks are missing that wait for nothing: all may be at fault, or one alone.
const SEVERAL: f64 = 0.75;

/// Whether each of these ranks has named a phase: then each is at work by itself. The phase of an exception does not
/// show that: another rank may be its cause.
fn all_named_phases(ctx: &Context<'_>, records: &[usize]) -> bool {
    let is_at_work = |&record: &usize| ctx.phase(record).is_some() && ctx.raised(record).is_none();
    records.iter().all(is_at_work)
}

/// The highest confidence if a rank is missing whose process is gone: less than that of the finding on that rank.
const BESIDE_GONE: f64 = 0.8;

/// The E101 on ranks that are missing at a place, each with why.
fn draft(ctx: &Context<'_>, place: usize, nodes: &[(Node, Missing)]) -> FindingDraft {
    let op_ref = ctx.op_ref_of_place(place);
    let culprits: Vec<Rank> = nodes.iter().map(|&(node, _)| ctx.rank(node)).collect();
    let arrived = &ctx.graph.arrived[place];
    let mut records: Vec<usize> = culprits
        .iter()
        .filter_map(|&rank| ctx.aligned.record_of(rank))
        .collect();
    // A rank whose program ends by an exception will not come. The first that raised may be why another did.
    records.sort_by_key(|&record| (ctx.raised(record).is_none(), began_ns(ctx.aligned, record)));
    let ranks_of = |issued: bool| -> Vec<Rank> {
        let of_kind = nodes
            .iter()
            .filter(|(_, why)| matches!(why, Missing::Held(_)) == issued);
        of_kind.map(|&(node, _)| ctx.rank(node)).collect()
    };
    let (absent, held) = (ranks_of(false), ranks_of(true));
    let targets: Vec<Node> = nodes.iter().map(|&(node, _)| node).collect();
    let waiting = count_ranks(
        arrived.len(),
        &ctx.waiting(place, false),
        &ctx.waiting(place, true),
    );
    let group = ctx.group_name(op_ref.group);
    let in_all = ctx.waiting_in_all(&targets, arrived.len());
    let op = format!("{} #{} on group {group}", op_ref.op, op_ref.seq);
    let have = if held.len() == 1 { "has" } else { "have" };
    let did = match (absent.as_slice(), held.as_slice()) {
        (absent, []) => format!("{} never issued {op}", format_ranks(absent)),
        ([], held) => format!(
            "{} issued {op} but {have} not started it",
            format_ranks(held)
        ),
        (absent, held) => format!(
            "{} never issued {op}, and {} issued but {have} not started it",
            format_ranks(absent),
            format_ranks(held)
        ),
    };
    let unmade = lacks_group(ctx, place, nodes);
    let not_made = match (unmade, culprits.len()) {
        (false, _) => "",
        (true, 1) => ", and has not made that group",
        (true, _) => ", and have not made that group",
    };
    let mut sentence = format!("{did}{not_made}; {waiting}{in_all}");
    match records[..] {
        [record] => {
            if let Some(seen) = ctx.last_seen_beside(record, &op_ref) {
                sentence.push_str(&format!("; {seen}"));
            }
        }
        [record, ..] if let Some(phase) = ctx.raised(record) => {
            let rank = ctx.aligned.records[record].rank;
            sentence.push_str(&format!("; rank {rank} is in phase `{phase}`"));
        }
        _ => {}
    }
    let mut draft = FindingDraft::from(Finding::not_joined(culprits, sentence));
    draft.age_ms = ctx.waits_ms(place);
    draft.confidence = confidence(ctx, arrived.len(), nodes);
    if nodes.len() > 1 && held.is_empty() && !all_named_phases(ctx, &records) {
        // A process that is gone waits for no rank.
        let is_there = |rank: &&Rank| ctx.life.gone(**rank).is_none();
        let there: Vec<Rank> = draft.culprits.iter().filter(is_there).copied().collect();
        let ranks = format_ranks(&draft.culprits);
        let may_wait = match there.len() {
            0 => None,
            there if there == nodes.len() => Some(format!("one of {ranks} may wait for another")),
            _ => Some(format!(
                "{} may wait for another of {ranks}",
                format_ranks(&there)
            )),
        };
        if let Some(may_wait) = may_wait {
            draft.confidence = draft.confidence.min(SEVERAL);
            draft.doubts.push(format!(
                "{may_wait} in a call that records no operation, such as that which makes a group"
            ));
        }
    }
    let busy = nodes.iter().any(|&(node, _)| ctx.graph.waits(node));
    // A rank that has issued the operation, or is in another, is not at work between two operations.
    let at_work = match held.is_empty() && !busy {
        true => may_still_come(ctx, place, &draft.culprits),
        false => None,
    };
    if let Some(at_work) = at_work {
        draft.confidence = draft.confidence.min(at_work.confidence);
        draft.doubts.push(at_work.doubt(&draft.culprits));
    }
    doubt_early_end(ctx, place, &mut draft);
    if !taken_early(ctx, &draft.culprits).is_empty() {
        let others = undated::of_unknown_presence(ctx, place, |_| true);
        if !others.is_empty() {
            draft.confidence = draft.confidence.min(MISSED_EARLY);
            draft.doubts.push(format!(
                "records were taken at different moments: {} may have come since, and it is not known whether {} did",
                format_ranks(&draft.culprits),
                format_ranks(&others)
            ));
            let others = others.iter().take(16).map(|&rank| vec![rank]);
            draft.alternatives.extend(others);
        }
    }
    if nodes.len() > arrived.len() && arrived.len() * 3 <= nodes.len() {
        // A few wait for many: they may have issued an operation that no other rank was to issue.
        draft.alternatives.push(ctx.ranks(arrived));
    }
    // One of these ranks may be in the call that makes another group.
    let making = draft.culprits.iter();
    let making = making.filter_map(|&rank| unmade_in_words(ctx, rank)).next();
    if unmade {
        leave_open(ctx, place, &mut draft);
    } else if let Some(making) = &making {
        draft.confidence = draft.confidence.min(GROUP_UNMADE);
        draft.doubts.push(format!(
            "{making}: {} may wait in the call that makes it, which is not recorded, and for a rank that does not call it",
            format_ranks(&draft.culprits)
        ));
    }
    draft.evidence = ctx.evidence_of_place(place, 2);
    for &(node, _) in nodes.iter().take(4) {
        let newest = ctx.record_at(place, node);
        let newest = newest.and_then(|record| ctx.evidence_of_newest(record, op_ref.group));
        draft.evidence.extend(newest);
    }
    if busy {
        draft.confidence = draft.confidence.min(BUSY);
        draft.doubts.push(format!(
            "another thread of {} is in an operation, which began long after the others came to wait here",
            format_ranks(&draft.culprits)
        ));
    }
    let may_wait = busy || unmade || making.is_some();
    draft.ruled_out = ruled_out(ctx, place, &op_ref, nodes, may_wait);
    if let Some(doubt) = undated::doubt(ctx, place, nodes) {
        draft.confidence = draft.confidence.min(undated::HIGHEST);
        draft.doubts.push(doubt);
    }
    let unread = unread_and_vague(ctx, nodes);
    if !unread.is_empty() {
        draft.doubts.push(format!(
            "gloo records neither members nor completions, and {} left no record that would show it",
            format_ranks(&unread)
        ));
        let unread = unread.iter().take(16).map(|&rank| vec![rank]);
        draft.alternatives.extend(unread);
    }
    for &record in records.iter().take(8) {
        if let Some(op) = ctx.last_op_for(record, op_ref.group) {
            draft.frames.extend(ctx.frames_of(record, op, "last_seen"));
        }
    }
    let issued_none = held.is_empty();
    draft.next = next(
        ctx,
        place,
        &op_ref,
        (&draft.culprits, issued_none),
        &records,
    );
    if records_no_messages(ctx, nodes) {
        draft.next.push_str(
            "; gloo's own recorder shows no sends and no receives, so it may be in one: compare the stacks of all \
             ranks",
        );
    }
    draft.targets = targets;
    draft.at = Some(op_ref);
    draft
}

/// Whether each of these ranks left a record by rcomm's recorder, which lists every group that its rank made, and the
/// group of the place is not among them.
fn lacks_group(ctx: &Context<'_>, place: usize, nodes: &[(Node, Missing)]) -> bool {
    let group = ctx.group_at(place);
    nodes.iter().all(|&(node, _)| {
        let mut records = ctx.aligned.records_of(ctx.rank(node)).peekable();
        records.peek().is_some()
            && records.all(|record| {
                let mut lanes = ctx.aligned.lanes[record].iter();
                // Other recorders learn of a group with its first operation.
                ctx.aligned.records[record].recorder == Recorder::Rcomm
                    && lanes.all(|lane| lane.group != group)
            })
    })
}

/// Lowers the confidence of a finding on ranks that have not made the group of the place, and makes the ranks that wait
/// an alternative. If a group with other ranks has the same name, the ranks that wait may have made theirs out of turn:
/// then the culprits become an alternative, too.
fn leave_open(ctx: &Context<'_>, place: usize, draft: &mut FindingDraft) {
    let group = &ctx.aligned.groups[ctx.group_at(place)];
    let same_name = |other: &&Group| other.name == group.name && other.ranks != group.ranks;
    draft.confidence = draft.confidence.min(GROUP_UNMADE);
    draft.doubts.push(
        "a rank may wait in the call that makes a group, which is not recorded: in a job whose ranks make their groups \
         in different orders, another rank is at fault"
            .to_owned(),
    );
    draft
        .alternatives
        .push(ctx.ranks(&ctx.graph.arrived[place]));
    if ctx.aligned.groups.iter().any(|other| same_name(&other)) {
        draft.confidence = 0.5;
        draft
            .alternatives
            .insert(0, std::mem::take(&mut draft.culprits));
    }
}

/// A ring with fewer operations may have dropped one that is still under way.
const SMALL_RING: usize = 256;

/// The probability, 0..1, that the missing ranks are at fault, for which `arrived` others wait there.
fn confidence(ctx: &Context<'_>, arrived: usize, nodes: &[(Node, Missing)]) -> f64 {
    let mut confidence: f64 = if arrived >= nodes.len() { 0.97 } else { 0.8 };
    if nodes.len() >= arrived * 3 {
        confidence = 0.6;
    }
    let lossy = nodes.iter().any(|&(node, _)| {
        let mut records = ctx.aligned.records_of(ctx.rank(node));
        records.any(|record| ctx.aligned.records[record].only_active)
    });
    // A small ring may have dropped the operation that the device of its rank is in.
    let front_may_be_lost = nodes.iter().any(|&(node, why)| {
        let mut records = ctx.aligned.records_of(ctx.rank(node));
        let is_small = |record: &Record| record.wrapped() && record.ops.len() < SMALL_RING;
        matches!(why, Missing::Held(_))
            && records.any(|record| is_small(&ctx.aligned.records[record]))
    });
    if front_may_be_lost {
        confidence = confidence.min(0.6);
    }
    if records_no_messages(ctx, nodes) {
        confidence = confidence.min(0.5);
    }
    if !unread_and_vague(ctx, nodes).is_empty() {
        confidence = confidence.min(0.5);
    }
    if lossy { confidence * 0.9 } else { confidence }
}

/// Whether one of these ranks has a record by gloo's own recorder, which records no sends and no receives: a rank that
/// seems to wait for nothing may be in one.
fn records_no_messages(ctx: &Context<'_>, nodes: &[(Node, Missing)]) -> bool {
    nodes.iter().any(|&(node, _)| {
        let mut records = ctx.aligned.records_of(ctx.rank(node));
        records.any(|record| ctx.aligned.records[record].recorder == Recorder::NativeGloo)
    })
}

/// Ranks without a record, ascending, that may be the missing ones, since gloo's recorder records neither members nor
/// completions. Empty if the recorder of these nodes records them.
fn unread_and_vague(ctx: &Context<'_>, nodes: &[(Node, Missing)]) -> Vec<Rank> {
    let vague = nodes.iter().any(|&(node, _)| {
        let mut records = ctx.aligned.records_of(ctx.rank(node));
        records.any(|record| retiring_is_all(ctx.aligned.records[record].recorder))
    });
    let expected = ctx.aligned.expected.iter().copied();
    expected
        .filter(|&rank| vague && ctx.aligned.record_of(rank).is_none())
        .collect()
}

/// What the finding rules out. `may_wait`: whether one of the missing ranks may wait for another rank, unrecorded.
fn ruled_out(
    ctx: &Context<'_>,
    place: usize,
    op_ref: &OpRef,
    nodes: &[(Node, Missing)],
    may_wait: bool,
) -> Vec<String> {
    let arrived = ctx.graph.arrived[place].len();
    let mut reasons = Vec::new();
    if ctx.disagreement_at(place).is_none() && arrived > 1 {
        let arrived_ranks = match arrived {
            2 => "both".to_owned(),
            many => format!("all {many}"),
        };
        reasons.push(format!(
            "op_mismatch: {arrived_ranks} arrived ranks issued {}",
            op_ref.op
        ));
    }
    let missing = ctx.graph.missing[place].len();
    let waiting = ctx.graph.missing[place]
        .iter()
        .filter(|&&(node, _)| ctx.graph.waits(node))
        .count();
    if waiting > 0 && missing > 1 {
        reasons.push(format!(
            "{waiting} of the {missing} ranks that are missing there wait elsewhere themselves"
        ));
    }
    // A missing rank may wait for another in a message that is not recorded, in the call that makes a group, or on
    // another thread.
    if !records_no_messages(ctx, nodes) && !may_wait {
        let waits = if nodes.len() == 1 {
            "it waits"
        } else {
            "they wait"
        };
        reasons.push(format!("cross_group_deadlock: {waits} for no other rank"));
    }
    reasons
}

/// A rank that has issued at least this many operations on the same thread since then has probably left the operation
/// out: its stack would only show a running program.
const WENT_ON: usize = 3;

/// The next step of the finding. It is about the first of `records`, which are the culprits'.
fn next(
    ctx: &Context<'_>,
    place: usize,
    op_ref: &OpRef,
    (culprits, issued_none): (&[Rank], bool),
    records: &[usize],
) -> String {
    let Some(&record) = records.first() else {
        return format!("find out what {} did", format_ranks(culprits));
    };
    let rank = ctx.aligned.records[record].rank;
    let since = ctx.waiting_since(place);
    let went_on = since.and_then(|since_ns| ctx.went_on(record, op_ref.group, since_ns));
    let went_on = went_on.filter(|(number, _)| issued_none && *number >= WENT_ON);
    if let Some((number, newest)) = went_on {
        return format!(
            "find out why rank {rank} has not issued that {}: it goes on, with {number} operations since the others wait \
             there, the last of them {}; a branch of its program may leave it out",
            op_ref.op,
            ctx.describe_op(record, newest)
        );
    }
    let done = ctx.last_completed(record);
    let done = done.map(|op| {
        format!(
            "; its last completed operation was {}",
            ctx.describe_op(record, op)
        )
    });
    let site = ctx
        .last_op_for(record, op_ref.group)
        .and_then(|op| ctx.call_site(op));
    let site = site.map(|frame| format!(" after {}", Context::name_site(frame)));
    let site = site.unwrap_or_default();
    let done = done.unwrap_or_default();
    if ctx.life.gone(rank).is_some() {
        return format!(
            "look at the end of the log of rank {rank}, and at what it does{site}{done}"
        );
    }
    format!(
        "{}{rank}{} does{site}: {}{done}",
        Finding::LOOK_AT_RANK,
        ctx.whereabouts(record),
        Finding::TAKE_STACK,
    )
}
