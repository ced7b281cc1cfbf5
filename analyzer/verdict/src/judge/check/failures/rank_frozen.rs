//! E151: a rank that others wait for is stopped, or gets no processor; or all ranks of a job are stopped.
//!
//! A stopped process issues nothing, and in an operation it holds up all members. If the system of this host reports
//! that a process is stopped, that alone is no proof, since a tracer stops a process for moments only. It is proof once
//! the watchdog of the process has made no round for a second, or if its rounds are unknown. If the process cannot be
//! seen, a watchdog that stopped long ago is evidence, if all others whose rounds are known continue.

use crate::align::RecordIx;
use crate::align::record::Stop;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::missed::first_missed;
use crate::judge::waits::wait_graph::{Node, Place};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::Code;
use crate::report::format::{count_ranks, format_ranks, format_time, time_of_day};
use std::collections::BTreeMap;

pub(crate) struct RankFrozen;

/// The watchdog of a stopped process has made no round for at least this long, ns. In this time, a running process
/// makes ten rounds with rcomm's runtime, and one with rcomm's recorder for PyTorch.
const STOPPED_NS: i64 = 1_000_000_000;
/// A next step lists at most this many processes.
const MAX_PIDS: usize = 8;
/// A busy host does not delay the watchdog's rounds for this long, ns.
const SILENT_NS: i64 = 5_000_000_000;

/// Why a rank makes no progress.
#[derive(Clone, Copy, PartialEq)]
enum Frozen {
    /// A signal or a debugger has stopped the rank's process.
    Stopped(Stop),
    /// The rank's watchdog makes no rounds.
    Silent,
}

impl Check for RankFrozen {
    fn codes(&self) -> &'static [Code] {
        &[Code::E151]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        if let Some(everyone) = everyone(ctx) {
            return vec![everyone];
        }
        let explained = |node: Node| so_far.iter().any(|draft| draft.targets.contains(&node));
        let mut drafts = Vec::new();
        let mut missed: BTreeMap<usize, Vec<(Node, usize, Frozen)>> = BTreeMap::new();
        for wait_root in &ctx.wait_roots {
            match *wait_root {
                WaitRoot::Idle(node) if !explained(node) => {
                    if let Some((record, why)) = frozen_rank(ctx, node)
                        && let Some((place, _)) = first_missed(ctx, node)
                    {
                        missed.entry(place).or_default().push((node, record, why));
                    }
                }
                WaitRoot::Full(place) if !explained(place + ctx.graph.ranks) => {
                    drafts.extend(inside(ctx, place));
                }
                _ => {}
            }
        }
        drafts.extend(
            missed
                .iter()
                .map(|(place, frozen)| idle(ctx, *place, frozen)),
        );
        drafts
    }
}

/// Why a record's rank is frozen; `None` if the records do not show that it is.
fn frozen(ctx: &Context<'_>, record: usize) -> Option<Frozen> {
    let full_record = &ctx.aligned.records[record];
    let silent = silence(ctx, record);
    if let Some(stop) = full_record.stop() {
        return silent
            .is_none_or(|ns| ns >= STOPPED_NS)
            .then_some(Frozen::Stopped(stop));
    }
    let records = ctx.aligned.records.iter().enumerate();
    let others = records.filter(|(_, other)| other.rank != full_record.rank);
    let mut others = others
        .filter_map(|(index, _)| silence(ctx, index))
        .peekable();
    // In a job that is over, the last round of every watchdog is older than the end of its process, so the two limits
    // are closer together.
    let (limit, awake) = match ctx.life.end {
        Some(_) => (SILENT_NS - STOPPED_NS, STOPPED_NS * 2),
        None => (SILENT_NS, STOPPED_NS),
    };
    let others_continue = others.peek().is_some() && others.all(|ns| ns < awake);
    (others_continue && silent.is_some_and(|ns| ns >= limit)).then_some(Frozen::Silent)
}

/// The record of a rank that is frozen, and why; `None` if the rank is not frozen.
fn frozen_rank(ctx: &Context<'_>, node: Node) -> Option<(usize, Frozen)> {
    let mut records = ctx.aligned.records_of(ctx.rank(node));
    records.find_map(|record| Some((record, frozen(ctx, record)?)))
}

/// The finding on a job of which every process is stopped, whether operations are pending or not. `None` if the job is
/// over, has one rank, or has a process that is not known to be stopped.
fn everyone(ctx: &Context<'_>) -> Option<FindingDraft> {
    if ctx.life.end.is_some() || ctx.graph.ranks < 2 {
        return None;
    }
    let stopped = (0..ctx.graph.ranks).map(|node| match frozen_rank(ctx, node)? {
        (record, why @ Frozen::Stopped(_)) => Some((node, record, why)),
        (_, Frozen::Silent) => None,
    });
    let stopped: Vec<(Node, usize, Frozen)> = stopped.collect::<Option<_>>()?;
    let place = ctx.wait_roots.first().and_then(|root| match *root {
        WaitRoot::Full(place) => Some(place),
        WaitRoot::Idle(node) | WaitRoot::Unread(node) => Some(first_missed(ctx, node)?.0),
        WaitRoot::Cycle { ref places, .. } => places.first().copied(),
    });
    let op_ref = place.map(|place| ctx.op_ref_of_place(place));
    let pending = place.zip(op_ref.as_ref()).map(|(place, op_ref)| {
        let (op, group) = (&op_ref.op, ctx.group_name(op_ref.group));
        let waited = ctx.waited_ms(place).map(format_time);
        let is_pending = match waited {
            Some(time) => format!("has been pending for {time}"),
            None => "is pending".to_owned(),
        };
        format!("; {op} #{} on group {group} {is_pending}", op_ref.seq)
    });
    let detail = format!(
        "these are all ranks of the job{}",
        pending.unwrap_or_default()
    );
    let mut draft = draft(ctx, &stopped, &detail);
    draft.age_ms = place.and_then(|place| ctx.waits_ms(place));
    draft.evidence = place.map_or_else(Vec::new, |place| ctx.evidence_of_place(place, 2));
    let places = ctx.wait_roots.iter().filter_map(|root| match *root {
        WaitRoot::Full(place) => Some(place + ctx.graph.ranks),
        _ => None,
    });
    draft.targets.extend(places);
    draft.at = op_ref;
    Some(draft)
}

/// For how long the watchdog had made no round when the record was taken, or when the process ended or was asked to
/// end, ns; `None` if unknown.
fn silence(ctx: &Context<'_>, record: usize) -> Option<i64> {
    let full_record = &ctx.aligned.records[record];
    let beat = full_record.status.as_ref()?.heartbeat_ns;
    let asked = ctx.life.end.as_ref().and_then(|end| end.asked);
    let asked_ns = asked.map_or(i64::MAX, |asked| asked.time_ns);
    let until = match (ctx.life.gone(full_record.rank), &ctx.life.end) {
        (Some(gone), end) if full_record.died() => match (gone.exit, end) {
            // A process that was asked to end may take its time, so the silence counts only up to the request.
            (Some(exit), _) => exit.time_ns.min(asked_ns),
            // All processes ended together, so the end of the job is the end of this process.
            (None, Some(end)) if end.first.is_empty() => {
                end.last_ns.saturating_add(ctx.aligned.offsets_ns[record])
            }
            (None, _) => return None,
        },
        // The ring was read before the process ended, or while it was ending.
        (Some(_), _) if full_record.lives() => full_record.identity.dump_time_ns.min(asked_ns),
        // A dump shows no rounds after it was taken.
        (Some(_), _) => return None,
        (None, _) => full_record.identity.dump_time_ns,
    };
    (beat > 0 && until > 0).then(|| until.saturating_sub(beat))
}

/// The finding on frozen ranks that never arrived where others wait.
fn idle(ctx: &Context<'_>, place: usize, frozen: &[(Node, usize, Frozen)]) -> FindingDraft {
    let op_ref = ctx.op_ref_of_place(place);
    let never = match ctx.graph.places[place] {
        Place::Collective { .. } => "never issued",
        Place::Batch { .. } => "never answered",
    };
    let arrived = &ctx.graph.arrived[place];
    let (they, last_seen, cannot) = match frozen {
        [(node, record, _)] => (
            "it",
            format!("; {}", last_seen(ctx, *node, *record)),
            "not_joined: its program cannot go on",
        ),
        _ => (
            "they",
            String::new(),
            "not_joined: their programs cannot go on",
        ),
    };
    let detail = format!(
        "{they} {never} {} #{} on group {}, where {}{last_seen}",
        op_ref.op,
        op_ref.seq,
        ctx.group_name(op_ref.group),
        waiting(ctx, place, frozen),
    );
    let mut draft = draft(ctx, frozen, &detail);
    draft.age_ms = ctx.waits_ms(place).filter(|_| !are_gone(ctx, arrived));
    draft.evidence = ctx.evidence_of_place(place, 2);
    for &(_, record, _) in frozen.iter().take(3) {
        draft
            .evidence
            .extend(ctx.evidence_of_newest(record, op_ref.group));
    }
    draft.ruled_out.push(cannot.to_owned());
    draft.at = Some(op_ref);
    draft
}

/// What a frozen rank did last, for the end of a sentence. Its record does not show whether it is still inside an
/// operation that all others have completed.
fn last_seen(ctx: &Context<'_>, node: Node, record: usize) -> String {
    match ctx.graph.completed_by_others(node) {
        None => ctx.last_seen(record),
        Some(place) => format!("its last event is of {}", describe_place(ctx, place)),
    }
}

/// The operation of a place with its group.
fn describe_place(ctx: &Context<'_>, place: usize) -> String {
    let op_ref = ctx.op_ref_of_place(place);
    let group = ctx.group_name(op_ref.group);
    format!("{} #{} on group {group}", op_ref.op, op_ref.seq)
}

/// Whether all these ranks' processes are gone in a job that is not over.
fn are_gone(ctx: &Context<'_>, nodes: &[Node]) -> bool {
    let gone = |&node: &Node| ctx.life.gone(ctx.rank(node)).is_some();
    ctx.life.end.is_none() && nodes.iter().all(gone)
}

/// A clause on how many ranks wait at a place for frozen ones, for how long, and how many wait in all. If all that
/// waited have ended since, it is not known how long they waited.
fn waiting(ctx: &Context<'_>, place: usize, frozen: &[(Node, usize, Frozen)]) -> String {
    let arrived = &ctx.graph.arrived[place];
    match (are_gone(ctx, arrived), arrived.len()) {
        (false, number) => {
            let targets: Vec<Node> = frozen.iter().map(|&(node, ..)| node).collect();
            let in_all = ctx.waiting_in_all(&targets, number);
            waiting_ranks(ctx, place, number) + &in_all
        }
        (true, 1) => "1 rank waited, whose process is gone".to_owned(),
        (true, number) => format!("{number} ranks waited, whose processes are gone"),
    }
}

/// The finding on frozen ranks in an operation that all members have reached; `None` if none is frozen, or if no other
/// rank waits.
fn inside(ctx: &Context<'_>, place: usize) -> Option<FindingDraft> {
    let here = &ctx.graph.arrived[place];
    let stopped: Vec<(Node, usize, Frozen)> = here
        .iter()
        .filter_map(|&node| {
            let record = ctx.record_at(place, node)?;
            Some((node, record, frozen(ctx, record)?))
        })
        .collect();
    // The peers may have completed the operation and wait for the stopped ranks elsewhere.
    let waits = |node: &Node| frozen_rank(ctx, *node).is_none() && ctx.graph.waits(*node);
    let waiting = (0..ctx.graph.ranks).filter(waits).count();
    if stopped.is_empty() || waiting == 0 {
        return None;
    }
    let op_text = describe_place(ctx, place);
    let detail = match here.len() - stopped.len() {
        // No other rank is inside, so the stopped ones may have left it, too.
        0 => format!(
            "the last event is of {op_text}, and {} elsewhere",
            count_ranks(waiting, "waits", "wait"),
        ),
        others => format!(
            "{} inside {op_text}, where {}",
            if stopped.len() == 1 {
                "it is"
            } else {
                "they are"
            },
            waiting_ranks(ctx, place, others),
        ),
    };
    let mut draft = draft(ctx, &stopped, &detail);
    draft.age_ms = ctx.waits_ms(place);
    draft.evidence = ctx.evidence_of_place(place, 2);
    draft
        .ruled_out
        .push("all_arrived_stuck: not every process that came can go on".to_owned());
    draft.targets.push(place + ctx.graph.ranks);
    draft.at = Some(ctx.op_ref_of_place(place));
    Some(draft)
}

/// How many ranks wait at a place, and for how long if that is known: `1 rank has waited 7 s`, `2 ranks wait`.
fn waiting_ranks(ctx: &Context<'_>, place: usize, count: usize) -> String {
    match ctx.waited_ms(place).map(format_time) {
        Some(time) if ctx.life.end.is_some() => {
            format!("{} {time}", count_ranks(count, "waited", "waited"))
        }
        Some(time) => format!("{} {time}", count_ranks(count, "has waited", "have waited")),
        None => count_ranks(count, "waits", "wait"),
    }
}

/// The finding on frozen ranks, without its operation. `detail` is the second half of the sentence.
fn draft(ctx: &Context<'_>, frozen: &[(Node, usize, Frozen)], detail: &str) -> FindingDraft {
    let mut culprits = ctx.ranks(&frozen.iter().map(|&(node, ..)| node).collect::<Vec<_>>());
    culprits.sort_unstable();
    let over = ctx.life.end.is_some();
    let beats = frozen.iter().filter_map(|&(_, record, _)| {
        let full_record = &ctx.aligned.records[record];
        silence(ctx, record).and(full_record.status.as_ref())
    });
    let since = beats.map(|status| status.heartbeat_ns).min();
    let (is, are) = match (over, since) {
        (true, _) => ("was", "were"),
        (false, Some(_)) => ("has been", "have been"),
        (false, None) => ("is", "are"),
    };
    let records: Vec<RecordIx> = frozen.iter().map(|&(_, record, _)| record).collect();
    let whose = match culprits.as_slice() {
        [rank] => format!("the process of rank {rank} {is}"),
        many => format!(
            "the processes of {}{} {are}",
            format_ranks(many),
            match ctx.whole_host(&records).as_str() {
                "" => String::new(),
                host => format!("{host},"),
            },
        ),
    };
    let are_all = |why| frozen.iter().all(|&(.., known)| known == why);
    let state = if are_all(Frozen::Stopped(Stop::Signal)) {
        "stopped by a signal"
    } else if are_all(Frozen::Stopped(Stop::Debugger)) {
        "held by a debugger"
    } else if frozen.iter().all(|&(.., why)| why != Frozen::Silent) {
        "stopped by a signal or a debugger"
    } else {
        "stopped or without processor time"
    };
    let since = since.map_or(String::new(), |ns| format!(" since {}", time_of_day(ns)));
    let mut draft = FindingDraft::new(Code::E151, format!("{whose} {state}{since}: {detail}"));
    let is_seen = frozen.iter().all(|&(.., why)| why != Frozen::Silent);
    draft.confidence = if is_seen { 0.97 } else { 0.7 };
    for &(_, record, _) in frozen.iter().take(3) {
        if let Some(op) = ctx.last_op(record) {
            draft.frames.extend(ctx.frames_of(record, op, "last_seen"));
        }
    }
    draft.next = match is_seen {
        true if are_all(Frozen::Stopped(Stop::Debugger)) => {
            let_go_on(ctx, Stop::Debugger, &records)
        }
        true => let_go_on(ctx, Stop::Signal, &records),
        false => look_at_load(ctx, &records),
    };
    draft.targets = frozen.iter().map(|&(node, ..)| node).collect();
    draft.culprits = culprits;
    draft
}

/// The pronoun for the ranks of these records: "it" or "them".
const fn pronoun(records: &[RecordIx]) -> &'static str {
    match records.len() {
        1 => "it",
        _ => "them",
    }
}

/// The next step for ranks that are stopped.
pub(super) fn let_go_on(ctx: &Context<'_>, stop: Stop, records: &[RecordIx]) -> String {
    match stop {
        Stop::Debugger => detach(ctx, records),
        Stop::Signal => go_on(ctx, records),
    }
}

/// The next step for ranks that a debugger holds.
fn detach(ctx: &Context<'_>, records: &[RecordIx]) -> String {
    let first = ctx.processes(records, 1).pop();
    let (pid, on_host) = first.unwrap_or(("PID".to_owned(), String::new()));
    format!(
        "find out which debugger holds {it} and detach it: `grep TracerPid /proc/{pid}/status`{on_host} has its process",
        it = pronoun(records),
    )
}

/// The next step for ranks that a signal has stopped.
fn go_on(ctx: &Context<'_>, records: &[RecordIx]) -> String {
    let parts = ctx.processes(records, MAX_PIDS).into_iter();
    let parts: Vec<String> = parts
        .map(|(pids, on_host)| format!("`kill -CONT {pids}`{on_host}"))
        .collect();
    format!(
        "find out who stopped {it}; {} {} {it} go on, unless a debugger holds {it}",
        parts.join(" and "),
        if parts.len() == 1 { "lets" } else { "let" },
        it = pronoun(records),
    )
}

/// The next step for ranks of which only the watchdog is known to make no rounds.
fn look_at_load(ctx: &Context<'_>, records: &[RecordIx]) -> String {
    let parts = ctx.processes(records, MAX_PIDS).into_iter();
    let parts: Vec<String> = parts.map(|(pids, on_host)| pids + &on_host).collect();
    let (states, its_host) = match (records.len(), parts.len()) {
        (1, _) => ("state of process", "its host"),
        (_, 1) => ("states of the processes", "their host"),
        _ => ("states of the processes", "their hosts"),
    };
    format!(
        "look at the {states} {}, and at load, quota and memory of {its_host}",
        parts.join(" and ")
    )
}
