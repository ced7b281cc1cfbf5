//! Finds out which processes ended first.

use super::gave_up::timed_out;
use super::harm::{harm_ns, lack_failed, losses, lost, suffered_ns};
use super::outlived::Outlived;
use super::{Gone, NOTICED_NS, TOGETHER_NS, is_dated, is_end_signal, is_of_end_signal, ranks_of};
use crate::align::record::{Op, Record};
use crate::align::{Aligned, RecordIx};
use crate::judge::life::raised::{INTERRUPTED, began_ns, has_left_groups, is_exception, went_on};
use crate::judge::overcome::is_history;
use rcomm_recorder::model::{EntryState, FailureKind, Rank};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The CPU backend notices within this time, ns, that a peer's process is gone, even on a busy host.
const PEERS_NOTICE_NS: i64 = 3_000_000_000;
/// The name of the CPU backend in records.
const CPU: &str = "cpu";
/// Ranks that note within this time, ns, that a signal asked them to end, were asked at one time, even on a busy host.
const ASKED_TOGETHER_NS: i64 = 3_000_000_000;
/// Of processes that were asked to end at one time, none notes that by this, ns, or more after another, unless the host is
/// busy.
const CLEARLY_LATER_NS: i64 = 20_000_000;
/// Clocks of which no operation shows how they are related differ by less than this, ns.
const CLOCKS_AGREE_NS: i64 = 60_000_000_000;
/// Processes that were killed together are lost within this time, ns, even on a busy host. A launcher that terminates
/// the others takes longer to notice that one has ended.
const LOST_TOGETHER_NS: i64 = 100_000_000;

/// If the kernel killed one of the ranks in `first` because memory ran out, adds the ranks that it killed at about the
/// same time. A killed process ends once its memory is freed, the largest last: the order of the ends is not that of
/// the kills.
fn add_killed_for_memory(failed: &[&Gone], first: &mut Vec<Rank>) {
    let killed = |process: &&&Gone| {
        process
            .exit
            .is_some_and(|end| end.out_of_memory == Some(true))
    };
    let killed: Vec<&Gone> = failed.iter().filter(killed).copied().collect();
    let known = killed.iter().find(|process| first.contains(&process.rank));
    if let Some(at_ns) = known.map(|process| process.at_ns) {
        let near = |process: &&&Gone| process.at_ns.abs_diff(at_ns) <= TOGETHER_NS.unsigned_abs();
        first.extend(killed.iter().filter(near).map(|process| process.rank));
        first.sort_unstable();
        first.dedup();
    }
}

/// What is known of the order in which processes ended.
#[derive(Clone, Debug)]
pub(super) enum Order {
    /// These ranks' processes ended first, ascending.
    First(Vec<Rank>),
    /// One of these ranks' processes ended first, ascending, or any rank's if the list is empty. Others suffered from
    /// that, or were asked to end because of it.
    OneOf(Vec<Rank>),
    /// The records do not show the order.
    Unknown,
}

/// Which processes ended first. A process that ended in order counts only if its end made others fail. The order is
/// unknown if a signal asked all to end ([`asked_each_ns`]), or if no end is dated. `gone` is sorted by time.
pub(super) fn order_of(aligned: &Aligned<'_>, gone: &[Gone], were_asked: bool) -> Order {
    // A process whose last event is old may have lived on long after it.
    if were_asked || !is_dated(aligned, gone) {
        return Order::Unknown;
    }
    let failed: Vec<&Gone> = gone.iter().filter(|process| !process.in_order).collect();
    let is_noted = failed
        .iter()
        .any(|process| process.is_launched && !process.was_signalled);
    if !is_noted && let Some(order) = before_signals(aligned, &failed) {
        return order;
    }
    if !is_noted
        && exited_first(aligned, &failed, |process| by_itself(aligned, process)).is_none()
        && let Some(harm_ns) = harm_ns(aligned).filter(|_| !failed.is_empty())
    {
        return before_harm(aligned, gone, harm_ns);
    }
    went_first(aligned, gone).unwrap_or(Order::Unknown)
}

/// Whether nothing shows that a process ended because of another: it neither suffered from the end of one, nor gave up
/// at a time-out.
fn by_itself(aligned: &Aligned<'_>, process: &Gone) -> bool {
    suffered_ns(aligned, process.rank).is_none() && !timed_out(aligned, process)
}

/// Which processes ended first: those that did not end in order, or those that did, if the others failed because of
/// that. `None` if the order is unknown.
fn went_first(aligned: &Aligned<'_>, gone: &[Gone]) -> Option<Order> {
    let failed: Vec<&Gone> = gone.iter().filter(|process| !process.in_order).collect();
    let rank_count = aligned.expected.len();
    let suffers = |rank: Rank| suffered_ns(aligned, rank).is_some();
    let by_launcher: Vec<&Gone> = failed
        .iter()
        .copied()
        .filter(|process| process.is_launched && !process.was_signalled)
        .collect();
    // If one signal that ends jobs on purpose ended all processes at once, it came from outside.
    let signals: BTreeSet<_> = by_launcher
        .iter()
        .map(|process| process.exit.and_then(|exit| exit.signal))
        .collect();
    let spread = failed.last()?.at_ns.saturating_sub(failed.first()?.at_ns);
    let at_once = by_launcher.len() == rank_count && rank_count > 1 && spread <= TOGETHER_NS;
    if at_once
        && signals.len() == 1
        && signals
            .iter()
            .flatten()
            .any(|signal| is_end_signal(*signal))
    {
        return None;
    }
    if !by_launcher.is_empty() {
        let unharmed: Vec<&Gone> = by_launcher
            .iter()
            .copied()
            .filter(|process| !suffers(process.rank))
            .collect();
        let possible = match unharmed.is_empty() {
            true => by_launcher,
            false => unharmed,
        };
        let earliest = possible[0].at_ns;
        // A rank may end without an error before its peers are done: these then fail because it is gone.
        let left_early = |process: &&Gone| {
            let is_before = process.in_order && process.is_launched && process.at_ns < earliest;
            is_before && !suffers(process.rank)
        };
        if possible.iter().all(|process| suffers(process.rank))
            && gone.iter().any(|process| left_early(&process))
        {
            let mut first: Vec<&Gone> = gone.iter().filter(left_early).collect();
            let lost = lost_first(aligned);
            if first.iter().any(|process| lost.contains(&process.rank)) {
                first.retain(|process| lost.contains(&process.rank));
            }
            return Some(Order::First(ranks_of(&first)));
        }
        let near = |process: &&Gone| process.at_ns.saturating_sub(earliest) <= NOTICED_NS;
        let mut first = ranks_of(&possible.into_iter().filter(near).collect::<Vec<_>>());
        let lost = lost_first(aligned);
        if first.iter().any(|rank| lost.contains(rank)) {
            first.retain(|rank| lost.contains(rank));
        }
        add_killed_for_memory(&failed, &mut first);
        return Some(Order::First(first));
    }
    if let Some(first) = exited_first(aligned, &failed, |process| by_itself(aligned, process)) {
        return Some(first);
    }
    let gap_index = gap_after(&failed, apart_ns(aligned))?;
    if waited_on(aligned, &failed[..=gap_index], &failed[gap_index + 1..]) {
        return None;
    }
    // If no operation was interrupted, the order of ends shows no cause.
    let interrupted = |process: &&Gone| {
        let mut records = aligned.records_of(process.rank);
        records.any(|index| {
            let record = &aligned.records[index];
            let mut ops = record.ops.iter();
            let lasting =
                |op: &Op| op.state == EntryState::Failed && !is_history(aligned, index, op);
            is_inside(record) || ops.any(lasting)
        })
    };
    failed
        .iter()
        .any(interrupted)
        .then(|| Order::First(ranks_of(&failed[..=gap_index])))
}

/// The last of the processes before the first gap of more than `apart_ns` between ends, by position in `gone`, which is
/// sorted by time; `None` if there is no such gap.
fn gap_after(gone: &[&Gone], apart_ns: i64) -> Option<usize> {
    let gap = |pair: &[&Gone]| pair[1].at_ns.saturating_sub(pair[0].at_ns) > apart_ns;
    gone.windows(2).position(gap)
}

/// Whether the processes seem to have ended at different times, but by clocks that nothing relates.
pub(super) fn is_order_hidden(aligned: &Aligned<'_>, failed: &[&Gone]) -> bool {
    apart_ns(aligned) > TOGETHER_NS && gap_after(failed, TOGETHER_NS).is_some()
}

/// The ranks that noted their own exit first, if others noted none: the others were killed, as by a launcher once a
/// rank has failed. Only processes for which `may_be_first` holds count, and no exit that a signal asked for. If
/// nothing relates the clocks, the result is only that one of these ranks was the first. `None` if all processes noted
/// such an exit, if none of those that may be first did, or if a process had died long before.
fn exited_first(
    aligned: &Aligned<'_>,
    failed: &[&Gone],
    may_be_first: impl Fn(&Gone) -> bool,
) -> Option<Order> {
    let exited = failed
        .iter()
        .filter(|process| process.exit.is_some() && !was_asked(aligned, process));
    if exited.clone().count() == failed.len() {
        return None;
    }
    let possible: Vec<&Gone> = exited
        .copied()
        .filter(|process| may_be_first(process))
        .collect();
    let earliest = possible.iter().map(|process| process.at_ns).min()?;
    // A rank that had died long before may be what the others exited for. One that was asked to end did not die; clocks
    // of several hosts may not show whether that was before.
    let apart_ns = apart_ns(aligned);
    let is_one_clock = apart_ns == TOGETHER_NS;
    let lived = |process: &&Gone| {
        let is_asked = !is_one_clock && was_asked(aligned, process);
        is_asked || process.at_ns.saturating_add(TOGETHER_NS) >= earliest
    };
    if !failed.iter().all(lived) {
        return None;
    }
    let near_ns = if is_one_clock { NOTICED_NS } else { apart_ns };
    let near = |process: &&Gone| process.at_ns.saturating_sub(earliest) <= near_ns;
    let first: Vec<&Gone> = possible.into_iter().filter(near).collect();
    let ranks = ranks_of(&first);
    Some(match is_one_clock || ranks.len() == 1 {
        true => Order::First(ranks),
        false => Order::OneOf(ranks),
    })
}

/// Whether a process that noted its own exit ended because a signal asked it to: its exit code says so, or the
/// exception of an interrupt ended its program.
pub(super) fn was_asked(aligned: &Aligned<'_>, process: &Gone) -> bool {
    let code = process.exit.and_then(|exit| exit.exit_code);
    let by_code = code.is_some_and(is_of_end_signal);
    !process.is_launched && (by_code || was_interrupted(aligned, process.rank))
}

/// Whether the exception of an interrupt has ended a rank's program.
fn was_interrupted(aligned: &Aligned<'_>, rank: Rank) -> bool {
    interrupted_ns(aligned, rank).is_some()
}

/// When the exception of an interrupt left a rank's program, common time, ns; `None` if it did not.
fn interrupted_ns(aligned: &Aligned<'_>, rank: Rank) -> Option<i64> {
    aligned.records_of(rank).find_map(|record| {
        let status = aligned.records[record].status.as_ref()?;
        let offset = aligned.offsets_ns[record];
        let since = status.phase_since_ns.saturating_sub(offset);
        status.phase.starts_with(INTERRUPTED).then_some(since)
    })
}

/// When the first process noted that a signal asked it to end, common time, ns. `None` unless some processes are gone,
/// and all processes, except those that ended in order, noted such a signal at about one time, and not some clearly first
/// ([`are_some_asked_first`]): a terminal sends it to all. Which of them ends first then shows no cause: each takes as long to end as its program and its libraries do.
pub(super) fn asked_each_ns(aligned: &Aligned<'_>, gone: &[Gone]) -> Option<i64> {
    // For each process that was asked: when it noted that, and when it ended; by host, unless all clocks are related.
    let are_related = aligned.clock_known.iter().all(|&known| known);
    let clock_of = |rank: Rank| {
        let record = aligned.record_of(rank).filter(|_| !are_related);
        record.map_or("", |record| aligned.records[record].identity.host.as_str())
    };
    let mut asked: BTreeMap<&str, Vec<(i64, i64)>> = BTreeMap::new();
    let dated = |rank: Rank| interrupted_ns(aligned, rank).filter(|&since| since > 0);
    for process in gone.iter().filter(|process| !process.in_order) {
        if !was_asked(aligned, process) {
            return None;
        }
        let noted = dated(process.rank).unwrap_or(process.at_ns);
        let of_clock = asked.entry(clock_of(process.rank)).or_default();
        of_clock.push((noted, process.at_ns));
    }
    if asked.is_empty() {
        return None;
    }
    let is_gone: HashSet<Rank> = gone.iter().map(|process| process.rank).collect();
    for &rank in aligned
        .expected
        .iter()
        .filter(|rank| !is_gone.contains(rank))
    {
        if !was_interrupted(aligned, rank) {
            return None;
        }
        let of_clock = asked.entry(clock_of(rank)).or_default();
        of_clock.extend(dated(rank).map(|noted| (noted, i64::MAX)));
    }
    if are_some_asked_first(aligned, gone) {
        return None;
    }
    let first = asked.into_values().map(asked_together);
    first.collect::<Option<Vec<i64>>>()?.into_iter().min()
}

/// Whether a signal asked some processes to end, and the others were asked because these had ended: they noted the signal
/// clearly later, and one had suffered from the end of a process clearly before it noted the signal. No, if nothing
/// relates the clocks.
fn are_some_asked_first(aligned: &Aligned<'_>, gone: &[Gone]) -> bool {
    // A program may take long to end after an interrupt.
    let noted_ns = |process: &Gone| interrupted_ns(aligned, process.rank).unwrap_or(process.at_ns);
    let asked = gone.iter().filter(|process| !process.in_order);
    let mut asked: Vec<(i64, &Gone)> = asked.map(|process| (noted_ns(process), process)).collect();
    asked.sort_by_key(|(at_ns, _)| *at_ns);
    let later = |pair: &[(i64, &Gone)]| pair[1].0.saturating_sub(pair[0].0) >= CLEARLY_LATER_NS;
    let Some(last) = asked.windows(2).position(later) else {
        return false;
    };
    let (first, others) = asked.split_at(last + 1);
    let has_suffered = |(_, process): &(i64, &Gone)| suffered_ns(aligned, process.rank).is_some();
    let is_harmed = |(at_ns, process): &(i64, &Gone)| {
        suffered_ns(aligned, process.rank)
            .is_some_and(|harm_ns| at_ns.saturating_sub(harm_ns) >= CLEARLY_LATER_NS)
    };
    let is_interrupted = |(_, process): &(i64, &Gone)| was_interrupted(aligned, process.rank);
    apart_ns(aligned) <= TOGETHER_NS
        && !first.iter().any(has_suffered)
        && !others.iter().any(is_interrupted)
        && others.iter().any(is_harmed)
}

/// When the first of these processes noted that it was asked to end, by one clock, ns; `None` unless all noted it at
/// about one time. `asked`: for each process, when it noted that, and when it ended.
fn asked_together(mut asked: Vec<(i64, i64)>) -> Option<i64> {
    asked.sort_unstable();
    let first_ns = asked.first().map_or(i64::MAX, |&(noted, _)| noted);
    let mut ended: BTreeSet<i64> = BTreeSet::new();
    for (noted, at_ns) in asked {
        // A rank may be inside an operation that returns only once a peer's process is gone.
        let since = ended.range(..=noted).next_back().copied();
        let since = since.map_or(first_ns, |since| since.max(first_ns));
        if noted.saturating_sub(since) > ASKED_TOGETHER_NS {
            return None;
        }
        ended.insert(at_ns);
    }
    Some(first_ns)
}

/// Which processes ended first if others noted that a signal asked them to end: a launcher sends it once a process has
/// failed. They are those that noted no exit, since they were killed or aborted, that gave no sign of life after the
/// first of the others had ended, and that did not suffer from another's end. `None` if no process noted such a signal,
/// if one noted another exit, or if no process remains that may have ended first; nor if nothing relates the clocks: a
/// launcher also kills processes that do not end soon after the signal.
fn before_signals(aligned: &Aligned<'_>, failed: &[&Gone]) -> Option<Order> {
    let (asked, others): (Vec<&Gone>, Vec<&Gone>) = failed
        .iter()
        .partition(|process| was_asked(aligned, process));
    let earliest = asked.iter().map(|process| process.at_ns).min()?;
    let are_noted = others.iter().any(|process| process.exit.is_some());
    if are_noted || apart_ns(aligned) > TOGETHER_NS {
        return None;
    }
    let before: Vec<&Gone> = others
        .into_iter()
        .filter(|process| process.at_ns <= earliest && by_itself(aligned, process))
        .collect();
    match before.len() {
        0 => None,
        1 => Some(Order::First(ranks_of(&before))),
        _ => Some(Order::OneOf(ranks_of(&before))),
    }
}

/// Which processes ended first if others suffered from that, and neither a launcher nor an exit code shows the order.
/// `harm_ns` is the result of the function of that name.
fn before_harm(aligned: &Aligned<'_>, gone: &[Gone], harm_ns: i64) -> Order {
    // A process that lived on after the first failure did not cause it: launchers terminate such ranks once one has
    // failed.
    let slack_ns = match on_one_host(aligned) {
        true => NOTICED_NS,
        false => apart_ns(aligned),
    };
    let causes = |process: &&Gone| {
        let is_before = process.at_ns <= harm_ns.saturating_add(slack_ns);
        is_before && by_itself(aligned, process)
    };
    let mut possible: Vec<&Gone> = gone
        .iter()
        .filter(|process| !ended_or_left(aligned, process))
        .filter(causes)
        .collect();
    // A rank that an exception has left closes its connections, and its process may end much later.
    let raised = gone.iter().filter(|process| {
        let is_new = !possible.iter().any(|known| known.rank == process.rank);
        is_new && by_itself(aligned, process) && raised_by(aligned, process.rank, harm_ns)
    });
    let raised: Vec<&Gone> = raised.collect();
    possible.extend(raised);
    if possible.is_empty() {
        let (left, lack_failed) = left_before_harm(aligned, gone, causes);
        if lack_failed && !left.is_empty() {
            return Order::First(ranks_of(&left));
        }
        possible = left;
    }
    let lost = lost(aligned);
    let is_lost = |process: &&Gone| lost.contains(&process.rank);
    if possible.iter().any(is_lost) {
        possible.retain(is_lost);
    }
    // A launcher asks the others to end once a process has ended.
    let unasked_ns = possible
        .iter()
        .filter(|process| !was_asked(aligned, process));
    if let Some(unasked_ns) = unasked_ns.map(|process| process.at_ns).min() {
        possible.retain(|process| !was_asked(aligned, process) || process.at_ns < unasked_ns);
    }
    // A signal that ends a whole job ends some processes before others notice, and those that notice last never do.
    let none_left = none_is_left(aligned, gone);
    let mut is_outlived = true;
    if none_left {
        let outlived = Outlived::new(aligned, gone);
        let survived = |process: &&Gone| process.in_order || outlived.has(process.rank);
        is_outlived = possible.iter().any(survived);
        possible.retain(|process| !is_outlived || survived(process));
    }
    let ranks = ranks_of(&possible);
    let named: HashSet<Rank> = ranks.iter().copied().collect();
    let mut ends: Vec<i64> = possible.iter().map(|process| process.at_ns).collect();
    ends.sort_unstable();
    let near = |process: &&Gone| {
        let from = process.at_ns.saturating_sub(TOGETHER_NS);
        let next = ends.get(ends.partition_point(|&end| end < from));
        next.is_some_and(|&end| end <= process.at_ns.saturating_add(TOGETHER_NS))
    };
    let unaware = gone.iter().filter(|process| {
        let is_open = !process.in_order && process.exit.is_none() && !is_lost(process);
        is_open && !named.contains(&process.rank) && causes(process)
    });
    let unaware: Vec<&Gone> = unaware.filter(near).collect();
    match possible.len() {
        0 => Order::OneOf(ranks),
        _ if none_left && !(is_outlived && unaware.is_empty()) => {
            possible.extend(unaware);
            Order::OneOf(ranks_of(&possible))
        }
        1 => Order::First(ranks),
        // Once no process is left, a launcher may have terminated those that were lost later.
        _ if possible.iter().all(is_lost)
            && (!none_left || were_lost_together(aligned, &named)) =>
        {
            Order::First(ranks)
        }
        // A host that is lost lets no process note its exit.
        _ if are_whole_hosts(aligned, &possible)
            && possible.iter().all(|process| process.exit.is_none()) =>
        {
            Order::First(ranks)
        }
        // A launcher may have terminated the others before they noticed.
        _ => Order::OneOf(ranks),
    }
}

/// Whether an exception had left the program of a rank by this common time, ns. No, if the clocks do not show it.
fn raised_by(aligned: &Aligned<'_>, rank: Rank, at_ns: i64) -> bool {
    let mut records = aligned.records_of(rank);
    on_one_host(aligned)
        && records.any(|record| {
            let full_record = &aligned.records[record];
            let status = full_record.status.as_ref();
            let raised = status.is_some_and(|status| is_exception(&status.phase));
            let began = began_ns(aligned, record).filter(|_| raised && !went_on(full_record));
            began.is_some_and(|began| began <= at_ns)
        })
}

/// Whether a process ended in order, or had left its groups: a launcher may have ended it before it could end in order.
fn ended_or_left(aligned: &Aligned<'_>, process: &Gone) -> bool {
    process.in_order || has_left_groups(aligned, process.rank)
}

/// The processes that ended in order, or left their groups, although others needed them: those that had not issued what
/// failed for the others, however late they ended; if there are none, those for which `causes` holds. Empty if most have
/// left without the operation that failed: then the others issued one too many. Also returns whether they had not issued
/// what failed.
fn left_before_harm<'a>(
    aligned: &Aligned<'_>,
    gone: &'a [Gone],
    causes: impl Fn(&&'a Gone) -> bool,
) -> (Vec<&'a Gone>, bool) {
    let left = gone
        .iter()
        .filter(|process| ended_or_left(aligned, process));
    let lack = lack_failed(aligned);
    let lacking = left
        .clone()
        .filter(|process| lack.contains(&process.rank) && by_itself(aligned, process));
    let lacking: Vec<&Gone> = lacking.collect();
    match lacking.len() {
        0 => (left.filter(causes).collect(), false),
        number if number * 2 > aligned.expected.len() => (Vec::new(), true),
        _ => (lacking, true),
    }
}

/// Whether the processes of all records are gone.
fn none_is_left(aligned: &Aligned<'_>, gone: &[Gone]) -> bool {
    let gone: HashSet<Rank> = gone.iter().map(|process| process.rank).collect();
    let mut records = aligned.records.iter();
    records.all(|record| gone.contains(&record.rank))
}

/// Signs of life that are no further apart than this, ns, show no order.
pub(super) fn apart_ns(aligned: &Aligned<'_>) -> i64 {
    match on_one_host(aligned) || aligned.clock_known.iter().all(|&is_known| is_known) {
        true => TOGETHER_NS,
        false => CLOCKS_AGREE_NS,
    }
}

/// Whether all records are of one host, so that one clock gave all their times.
fn on_one_host(aligned: &Aligned<'_>) -> bool {
    let hosts = aligned.records.iter().map(|record| &record.identity.host);
    hosts.collect::<BTreeSet<_>>().len() == 1
}

/// Whether these are all ranks of one or more hosts, and other hosts had ranks, too.
pub(super) fn are_whole_hosts(aligned: &Aligned<'_>, gone: &[&Gone]) -> bool {
    let host = |rank: Rank| {
        aligned
            .record_of(rank)
            .map(|record| aligned.records[record].identity.host.as_str())
    };
    let hosts: BTreeSet<_> = gone.iter().map(|process| host(process.rank)).collect();
    let of_hosts = |rank: &&Rank| hosts.contains(&host(**rank));
    let rank_count = aligned.expected.iter().filter(of_hosts).count();
    !hosts.contains(&None) && rank_count == gone.len() && rank_count < aligned.expected.len()
}

/// Whether the first recorded losses of all these ranks are of about one time.
fn were_lost_together(aligned: &Aligned<'_>, ranks: &HashSet<Rank>) -> bool {
    let mut first_ns: HashMap<Rank, i64> = HashMap::new();
    for (record, offset_ns) in aligned.records.iter().zip(&aligned.offsets_ns) {
        for failure in losses(record) {
            let at_ns = failure.time_ns.saturating_sub(*offset_ns);
            for rank in failure.ranks.iter().filter(|rank| ranks.contains(rank)) {
                let first = first_ns.entry(*rank).or_insert(at_ns);
                *first = at_ns.min(*first);
            }
        }
    }
    let (first, last) = (first_ns.values().min(), first_ns.values().max());
    first
        .zip(last)
        .is_some_and(|(first, last)| last.saturating_sub(*first) <= LOST_TOGETHER_NS)
}

/// The ranks that the first recorded loss of a peer names; empty if none was recorded.
fn lost_first<'a>(aligned: &'a Aligned<'_>) -> &'a [Rank] {
    let records = aligned.records.iter().zip(&aligned.offsets_ns);
    let failures = records.flat_map(|(record, offset)| {
        let of_record = record.failures.iter();
        of_record.map(move |failure| (failure.time_ns.saturating_sub(*offset), failure))
    });
    let lost = failures.filter(|(_, failure)| failure.kind == FailureKind::PeerGone);
    let first = lost.min_by_key(|(at_ns, _)| *at_ns);
    first.map_or(&[], |(_, failure)| &failure.ranks)
}

/// Whether one of the `others` waited until its own end, in an operation of the CPU backend, for processes that had
/// given no sign of life for a long time (`quiet`). It would have noticed if the quiet processes had been gone: so
/// these were stopped or without processor time, and ended together with the others.
fn waited_on(aligned: &Aligned<'_>, quiet: &[&Gone], others: &[&Gone]) -> bool {
    let Some(last) = quiet.last() else {
        return false;
    };
    let is_quiet = |rank: &Rank| quiet.iter().any(|process| process.rank == *rank);
    let noticing = others
        .iter()
        .filter(|process| process.at_ns.saturating_sub(last.at_ns) >= PEERS_NOTICE_NS);
    noticing.into_iter().any(|process| {
        let waits = |record: RecordIx| {
            let mut ops = aligned.records[record].ops.iter();
            ops.any(|op| {
                let call = aligned.shared.calls.get(op.call);
                let lane = &aligned.lanes[record][usize::from(op.group)];
                let age = process.at_ns.saturating_sub(aligned.created_ns(record, op));
                !op.retired
                    && op.state < EntryState::Completed
                    && call.signature.backend == CPU
                    && age >= PEERS_NOTICE_NS
                    && aligned.groups[lane.group].ranks.iter().any(is_quiet)
            })
        };
        aligned.records_of(process.rank).any(waits)
    })
}

/// Whether a record has an unfinished operation.
pub(super) fn is_inside(record: &Record) -> bool {
    let mut ops = record.ops.iter();
    ops.any(|op| !op.retired && op.state < EntryState::Completed)
}
