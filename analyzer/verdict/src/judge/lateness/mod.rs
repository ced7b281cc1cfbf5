//! Finds which ranks arrive late, what that costs, and whether it is more than chance.
//!
//! In a collective that needs every member, all leave together, so the last to arrive waits least. One such collective
//! over all its members is an *instance*. If durations are recorded, a member's *lag* is the longest duration in the
//! instance minus its own; this needs neither a common clock nor a watchdog. Otherwise lags come from issue times in
//! common time ([`rows`]), and differences below the error of the clocks are ignored.
//!
//! The *loss* of an instance is how much earlier it would have begun if its last member had arrived together with the
//! second last. A rank may be late only because it waited for another rank before: in a message, or on another group,
//! perhaps one of which a member left no record. And a delay that was already counted must not be counted again. So two
//! times since the members' previous common operation are summed for the last and the second last member: how long the
//! member waited, and how long others waited for it. If the last member's sum is larger, the difference is subtracted
//! from the loss. Arrivals are not compared across messages unless both ranks passed the same messages.
//!
//! Losses that exceed the usual spread are tested against chance ([`chance`]): a rank or a host that causes too many of
//! them is repeatedly late, unless waits for a processor explain that ([`starved`]). If there is no such rank or host,
//! but much is lost, ranks may take turns at being late. Reports, screens, metrics and alerts all use this rule.

mod chance;
mod hosts;
mod rows;
mod starved;

pub(crate) use chance::{ERROR_RATE, Late};
pub(crate) use starved::Starved;

use crate::align::clocks::Offset;
use crate::align::{Aligned, GroupIx, RecordIx};
use crate::judge::policy::Policy;
use chance::{Loss, Tally};
use hosts::Hosts;
use rcomm_recorder::model::Rank;
use rows::{ArrivalReader, Arrived, InstanceArrivals};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

/// Percentiles are made from at most this many lags of a rank in a group, and worst lags of a group.
const SAMPLES: usize = 1024;
/// Smaller losses never count, ms, if devices measure the waits.
const LEAST_DEVICE_MS: f32 = 0.2;
/// Smaller losses never count, ms, if hosts measure the waits: the members of a collective do not leave it at exactly
/// the same time.
const LEAST_HOST_MS: f32 = 1.0;
/// A loss counts from this many times the usual spread.
const STANDS_OUT: f32 = 3.0;
/// At most this many operations are searched for the previous compared one.
const MAX_LOOKED_BACK: usize = 256;
/// Instances with more hosts than this are not compared by host.
const MAX_HOSTS: usize = 64;

/// The lateness of one rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankLateness {
    /// The number of instances that the rank took part in.
    pub(crate) instances: usize,
    /// The losses that the rank caused beyond the usual spread, ms.
    pub(crate) lost: Vec<f32>,
    lag_p50_ms: Option<f64>,
}

impl RankLateness {
    /// The largest of the rank's median lags in its groups, ms: a rank that is late in one group out of three is in
    /// time for most operations. `None` if the rank took part in no instance.
    pub(crate) fn lag_p50_ms(&self) -> Option<f64> {
        self.lag_p50_ms
    }

    /// Adds what one group shows: the number of its instances, and the rank's median lag in them, ms.
    fn add_group(&mut self, instances: usize, median_ms: Option<f64>) {
        self.instances += instances;
        self.lag_p50_ms = match (self.lag_p50_ms, median_ms) {
            (Some(known), Some(median)) => Some(known.max(median)),
            (known, median) => known.or(median),
        };
    }
}

/// Which ranks or hosts are late.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Pattern {
    /// None: too little is lost, or too few instances show which rank is late.
    #[default]
    None,
    /// These ranks, as indices of their first records.
    Ranks(Vec<Late>),
    /// All ranks of these hosts of [`Lateness::hosts`].
    Hosts(Vec<Late>),
    /// Ranks take turns.
    ByTurns,
    /// These ranks are late because they waited for a processor: their hosts are overloaded.
    Starved(Vec<Starved>),
}

/// The lateness of all ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lateness {
    /// By record: `lost` is at the first record of a rank, the rest at each record that took part.
    pub(crate) ranks: Vec<RankLateness>,
    pub(crate) hosts: Hosts,
    pub(crate) pattern: Pattern,
    /// The number of ranks that took part in an instance.
    pub(crate) ranks_compared: usize,
    /// The cost of each rank's lateness, by the index of the rank's first record.
    pub(crate) by_rank: Tally,
    /// The cost of each host's lateness.
    pub(crate) by_host: Tally,
    /// For each host, the number of instances that lost time, beyond the usual spread, because the host as a whole was
    /// last, or one of its ranks was.
    pub(crate) host_losses: BTreeMap<usize, usize>,
    /// By group: the worst lag in each instance, ms, for at most [`SAMPLES`] instances.
    groups: Vec<Vec<f32>>,
    /// The usual spread: the median difference between the second and the third last to arrive, ms. `None` if no
    /// instance had three members that can be compared.
    pub(crate) usual_ms: Option<f64>,
    /// The job's time, ms: the median over the records of the time that each spans.
    pub(crate) span_ms: f64,
}

/// What the instances of one group show.
#[derive(Default)]
struct GroupLateness {
    instances: usize,
    /// For at most [`SAMPLES`] instances, the lags of all members in the order of their lanes, ms.
    lags_ms: Vec<f32>,
    /// The worst lag in each of these instances, ms.
    worst_ms: Vec<f32>,
    gathered: Gathered,
}

impl GroupLateness {
    /// The median lag of each member in the order of its lane, ms; empty if there was no instance. Drops the lags.
    fn take_medians(&mut self) -> Vec<Option<f64>> {
        let lags_ms = std::mem::take(&mut self.lags_ms);
        let members = lags_ms.len() / self.instances.clamp(1, SAMPLES);
        let lags_of = |member: usize| lags_ms[member..].iter().step_by(members).copied();
        let mut of_member = Vec::new();
        let median = |member: usize| {
            of_member.clear();
            of_member.extend(lags_of(member));
            percentile(&of_member, 0.5)
        };
        (0..members).map(median).collect()
    }
}

/// The losses of all instances, before they are judged.
#[derive(Default)]
struct Gathered {
    /// The differences between the second and the third last to arrive, ms.
    usual: Vec<f32>,
    /// Losses because of ranks, each with the size up to which a loss in such an instance never counts, ms.
    ranks: Vec<(Loss, f32)>,
    /// The same for losses because of hosts.
    hosts: Vec<(Loss, f32)>,
}

impl Lateness {
    /// Measures all completed collectives and judges the losses.
    pub(crate) fn new(aligned: &Aligned<'_>, clocks: &[Option<Offset>], policy: &Policy) -> Self {
        let mut lateness = Self {
            ranks: vec![RankLateness::default(); aligned.records.len()],
            groups: vec![Vec::new(); aligned.groups.len()],
            hosts: Hosts::new(aligned),
            span_ms: span_ms(aligned),
            ..Self::default()
        };
        let reader = ArrivalReader::new(aligned, clocks, &lateness.hosts);
        let groups = aligned.groups.len();
        // For each operation: how long its rank waited in it, ms, or, if negative, how long others waited for the rank.
        // Each operation is of one group, so no two threads write one value.
        let borne_ms = reader.uncompared_waits();
        let set = |member: &Arrived, ms: f32| {
            borne_ms[member.record][member.position as usize]
                .store(ms.to_bits(), Ordering::Relaxed);
        };
        aligned.shared.map(groups, |group| {
            reader.each(group, |instance| {
                let [last, second, _] = latest(instance);
                let Some((last, second)) = last.zip(second) else {
                    return;
                };
                for member in &instance.members {
                    set(member, member.wait_ms - last.wait_ms);
                }
                // Negative: the others waited for this member.
                set(last, last.wait_ms - second.wait_ms);
            });
        });
        let plain = |of_record: Vec<AtomicU32>| -> Vec<f32> {
            let bits = of_record.into_iter().map(AtomicU32::into_inner);
            bits.map(f32::from_bits).collect()
        };
        let borne_ms: Vec<Vec<f32>> = borne_ms.into_iter().map(plain).collect();
        let by_group = aligned.shared.map(groups, |group| {
            let mut group_lateness = GroupLateness::default();
            reader.each(group, |instance| {
                lateness.add_instance(aligned, &reader, instance, &borne_ms, &mut group_lateness);
            });
            let medians = group_lateness.take_medians();
            (group_lateness, medians)
        });
        let mut gathered = Gathered::default();
        for (group, (group_lateness, medians)) in by_group.into_iter().enumerate() {
            let lanes = aligned.groups[group].lanes.iter().flatten();
            for (&(record, _), median_ms) in lanes.zip(medians) {
                lateness.ranks[record].add_group(group_lateness.instances, median_ms);
            }
            lateness.groups[group] = group_lateness.worst_ms;
            gathered.usual.extend(group_lateness.gathered.usual);
            gathered.ranks.extend(group_lateness.gathered.ranks);
            gathered.hosts.extend(group_lateness.gathered.hosts);
        }
        lateness.judge(aligned, gathered, policy);
        lateness
    }

    /// The percentile `fraction`, 0..1, of the worst lags of a group's instances, ms; `None` if none was measured.
    pub(crate) fn group_lag_ms(&self, group: GroupIx, fraction: f64) -> Option<f64> {
        percentile(&self.groups[group], fraction)
    }

    /// The share of the job's time that was lost because of a rank, 0..1; the shares of all ranks add up to the share
    /// that was lost in all. `None` if the rank took part in no instance, or the job's time is unknown.
    pub(crate) fn share(&self, aligned: &Aligned<'_>, rank: Rank) -> Option<f64> {
        let mut records = aligned.records_of(rank);
        let first = records.start;
        if self.span_ms <= 0.0 || records.all(|record| self.ranks[record].instances == 0) {
            return None;
        }
        let mut ms = self.by_rank.price(first);
        if let Pattern::Hosts(late) = &self.pattern {
            // The ranks of a late host share what it costs.
            let host = self.hosts.of(first);
            let late_host = late.iter().find(|late| Some(late.unit) == host);
            ms = late_host.map_or(0.0, |late| {
                let ranks = self.hosts.ranks(late.unit).len() as f64;
                self.by_host.price(late.unit) / ranks
            });
        }
        Some(ms / self.span_ms)
    }

    /// Adds one instance to what its group shows.
    fn add_instance(
        &self,
        aligned: &Aligned<'_>,
        reader: &ArrivalReader<'_>,
        instance: &InstanceArrivals,
        borne_ms: &[Vec<f32>],
        group_lateness: &mut GroupLateness,
    ) {
        let [Some(last), Some(second), third] = latest(instance) else {
            return;
        };
        let (error, threshold) = (
            reader.error_ms(instance, last, second),
            reader.threshold_ms(instance, last, second),
        );
        let longest_ms = instance.members.iter().map(|member| member.wait_ms);
        let longest_ms = longest_ms.fold(0.0, f32::max);
        let significant = |lag: f32| if lag > threshold { lag } else { 0.0 };
        group_lateness.instances += 1;
        if group_lateness.instances <= SAMPLES {
            let lags_ms = instance.members.iter();
            let lags_ms = lags_ms.map(|member| significant(longest_ms - member.wait_ms));
            group_lateness.lags_ms.extend(lags_ms);
            group_lateness
                .worst_ms
                .push(significant(longest_ms - last.wait_ms));
        }
        let gathered = &mut group_lateness.gathered;
        if let Some(third) = third
            && reader.are_comparable(second, third)
        {
            gathered.usual.push(third.wait_ms - second.wait_ms);
        }
        let least = if instance.measured && instance.by_device {
            LEAST_DEVICE_MS
        } else {
            LEAST_HOST_MS
        };
        let op = aligned.op(last.record, last.position);
        let at_ns = aligned.created_ns(last.record, op);
        let borne = |member: &Arrived| -> f32 {
            let since =
                borne_ms[member.record].get(member.since as usize..member.position as usize);
            since.map_or(0.0, |since| since.iter().map(|ms| ms.abs()).sum())
        };
        let gap = second.wait_ms - last.wait_ms;
        let mut lost = 0.0;
        if gap > threshold {
            let excused = (borne(last) - borne(second)).max(0.0);
            let carried = if instance.measured {
                0.0
            } else {
                carried(aligned, reader, borne_ms, last, second)
            };
            lost = (gap - excused.max(carried)).min(gap - error);
            lost = lost.min(reader.bound_ms(instance, last, second) - error);
        }
        let loss = Loss {
            at_ns,
            unit: aligned.records_of(aligned.records[last.record].rank).start,
            ms: lost,
            by_device: instance.measured && instance.by_device,
            busy_ms: reader.busy_ms(instance, last),
        };
        if lost > least {
            gathered.ranks.push((loss, least));
        }
        if self.hosts.count() > 1 {
            let host = self.late_host(reader, instance, borne);
            let of_last = self.hosts.of(last.record).filter(|_| lost > least);
            let host = host.filter(|&(_, ms)| ms > least);
            if let Some((unit, ms)) = host.or(of_last.map(|host| (host, lost))) {
                gathered.hosts.push((Loss { unit, ms, ..loss }, least));
            }
        }
    }

    /// The host that was last as a whole and the loss that it caused, ms. A host is late if all its ranks are, so its
    /// earliest rank counts. The host is excused by how much more its ranks bore since the members' previous common
    /// operation than those of the next host: the most that one rank bore, less the least there. `None` if a host is
    /// unknown or has only one rank in the instance, if there are fewer than two hosts or more than [`MAX_HOSTS`], or
    /// if the order is within the error of the clocks.
    fn late_host(
        &self,
        reader: &ArrivalReader<'_>,
        instance: &InstanceArrivals,
        borne: impl Fn(&Arrived) -> f32,
    ) -> Option<(usize, f32)> {
        let mut hosts: Vec<HostPart<'_>> = Vec::new();
        for member in &instance.members {
            let (host, excuse) = (self.hosts.of(member.record)?, borne(member));
            if let Some(part) = hosts.iter_mut().find(|part| part.host == host) {
                if member.wait_ms > part.earliest.wait_ms {
                    part.earliest = member;
                }
                part.excuse_ms = part.excuse_ms.max(excuse);
                part.least_excuse_ms = part.least_excuse_ms.min(excuse);
                part.ranks += 1;
            } else if hosts.len() < MAX_HOSTS {
                hosts.push(HostPart {
                    host,
                    earliest: member,
                    excuse_ms: excuse,
                    least_excuse_ms: excuse,
                    ranks: 1,
                });
            } else {
                return None;
            }
        }
        // A single rank does not show whether its whole host is late.
        if hosts.len() < 2 || hosts.iter().any(|part| part.ranks < 2) {
            return None;
        }
        hosts.sort_by(|a, b| a.earliest.wait_ms.total_cmp(&b.earliest.wait_ms));
        let (last, second) = (&hosts[0], &hosts[1]);
        let excused = (last.excuse_ms - second.least_excuse_ms).max(0.0);
        let (late, next) = (last.earliest, second.earliest);
        let gap = next.wait_ms - late.wait_ms;
        if gap <= reader.threshold_ms(instance, late, next) {
            return None;
        }
        let error = reader.error_ms(instance, late, next);
        let bound = reader.bound_ms(instance, late, next).min(gap) - error;
        Some((last.host, bound.min(gap - excused)))
    }

    /// Counts and sums the losses beyond the usual spread, and finds the pattern in them.
    fn judge(&mut self, aligned: &Aligned<'_>, mut gathered: Gathered, policy: &Policy) {
        self.usual_ms = percentile(&gathered.usual, 0.5);
        let usual = self.usual_ms.unwrap_or(0.0) as f32 * STANDS_OUT;
        for losses in [&mut gathered.ranks, &mut gathered.hosts] {
            losses.retain(|(loss, least)| loss.ms > usual.max(*least));
            leave_out_ahead(losses);
        }
        for (loss, _) in &gathered.hosts {
            *self.host_losses.entry(loss.unit).or_default() += 1;
        }
        let losses =
            |losses: &[(Loss, f32)]| losses.iter().map(|(loss, _)| *loss).collect::<Vec<_>>();
        for (loss, _) in &gathered.ranks {
            self.ranks[loss.unit].lost.push(loss.ms);
        }
        self.by_rank = Tally::new(&losses(&gathered.ranks), self.span_ms);
        self.by_host = Tally::new(&losses(&gathered.hosts), self.span_ms);
        let least_ms = self.span_ms * policy.straggler_share;
        let taken_part = |record: &RecordIx| self.ranks[*record].instances > 0;
        let mut compared: Vec<Rank> = (0..self.ranks.len())
            .filter(taken_part)
            .map(|record| aligned.records[record].rank)
            .collect();
        compared.dedup();
        let before = policy.late.iter();
        let before: Vec<usize> = before.map(|&rank| aligned.records_of(rank).start).collect();
        self.ranks_compared = compared.len();
        let mut ranks = self.by_rank.late(self.ranks_compared, least_ms, &before);
        let was_late = |host: &usize| {
            let mut ranks = self.hosts.ranks(*host).iter();
            ranks.all(|rank| policy.late.contains(rank))
        };
        let before: Vec<usize> = (0..self.hosts.count()).filter(was_late).collect();
        let mut hosts = self.by_host.late(self.hosts.count(), least_ms, &before);
        hosts.retain(|late| self.hosts.ranks(late.unit).len() > 1);
        // A host counts only if it cost more than twice as much as any rank of it: one late rank alone can make its
        // host late. The ranks of a late host share its cost.
        hosts.retain(|late| {
            let ranks = self.hosts.ranks(late.unit).iter();
            let costs = ranks.map(|&rank| self.by_rank.cost(aligned.records_of(rank).start));
            costs.fold(0.0, f64::max) * 2.0 < self.by_host.cost(late.unit)
        });
        ranks.retain(|late| {
            let host = self.hosts.of(late.unit);
            host.is_none_or(|host| hosts.iter().all(|late| late.unit != host))
        });
        let starved =
            |late: &Late| starved::starved(aligned, &self.hosts, late.unit, &gathered.ranks);
        let starving: Vec<Starved> = ranks.iter().filter_map(starved).collect();
        ranks.retain(|late| starving.iter().all(|starved| starved.record != late.unit));
        let lost_ms = self.by_rank.total_ms().max(self.by_host.total_ms());
        if !ranks.is_empty() {
            self.pattern = Pattern::Ranks(ranks);
        } else if !hosts.is_empty() {
            self.pattern = Pattern::Hosts(hosts);
        } else if !starving.is_empty() {
            self.pattern = Pattern::Starved(starving);
        } else if lost_ms >= least_ms && self.by_rank.is_by_turns() {
            self.pattern = Pattern::ByTurns;
        }
    }
}

/// One host's part in one instance.
struct HostPart<'a> {
    host: usize,
    /// The first of the host's ranks to arrive.
    earliest: &'a Arrived,
    /// How long each of the host's ranks waited, and made others wait, since the members' previous common operation,
    /// ms: the largest of these times.
    excuse_ms: f32,
    /// The smallest of these times, ms.
    least_excuse_ms: f32,
    /// The number of the host's ranks in the instance.
    ranks: usize,
}

/// Removes the losses of ranks or hosts whose device was mostly still busy when they were late: they delayed nothing.
fn leave_out_ahead(losses: &mut Vec<(Loss, f32)>) {
    let mut by_unit: BTreeMap<usize, [f32; 2]> = BTreeMap::new();
    for (loss, _) in losses.iter() {
        if let Some([busy_ms, error_ms]) = loss.busy_ms {
            let [idle, busy] = by_unit.entry(loss.unit).or_default();
            // A device that was busy for less than half of the loss counts as idle. An eighth of the error is allowed.
            let counted = if busy_ms <= error_ms / 8.0 + loss.ms / 2.0 {
                idle
            } else {
                busy
            };
            *counted += loss.ms;
        }
    }
    let ahead = |unit| by_unit.get(&unit).is_some_and(|[idle, busy]| busy > idle);
    losses.retain(|(loss, _)| loss.busy_ms.is_none() || !ahead(loss.unit));
}

/// How late the last member already was when it issued its previous compared operation, ms: a rank that is behind the
/// others stays behind without being late again. 0 if the second last member issued this operation only after the
/// last member issued its previous one: then the others had waited, and the delay is new.
fn carried(
    aligned: &Aligned<'_>,
    reader: &ArrivalReader<'_>,
    borne_ms: &[Vec<f32>],
    last: &Arrived,
    second: &Arrived,
) -> f32 {
    let ops = &aligned.records[last.record].ops[..last.position as usize];
    let compared = |position: &usize| {
        borne_ms[last.record][*position] != 0.0 && reader.is_compared(last.record, &ops[*position])
    };
    let mut before = (0..ops.len()).rev().take(MAX_LOOKED_BACK);
    let Some(position) = before.find(compared) else {
        return 0.0;
    };
    let issued = |record: RecordIx, position: usize| {
        aligned.created_ns(record, aligned.op(record, position as u32))
    };
    let ahead = issued(second.record, second.position as usize) < issued(last.record, position);
    if ahead {
        (-borne_ms[last.record][position]).max(0.0)
    } else {
        0.0
    }
}

/// The last to arrive, the second last and the third last; `None` for members that the instance lacks.
fn latest(instance: &InstanceArrivals) -> [Option<&Arrived>; 3] {
    let mut by_wait: [Option<&Arrived>; 3] = [None; 3];
    for member in &instance.members {
        let mut displaced = Some(member);
        for place in &mut by_wait {
            match (*place, displaced) {
                (Some(held), Some(new)) if new.wait_ms >= held.wait_ms => {}
                _ => displaced = std::mem::replace(place, displaced),
            }
            if displaced.is_none() {
                break;
            }
        }
    }
    by_wait
}

/// The job's time ([`Lateness::span_ms`]); 0 if no record holds an operation that has ended.
fn span_ms(aligned: &Aligned<'_>) -> f64 {
    let mut spans: Vec<f32> = aligned
        .records
        .iter()
        .filter_map(|record| {
            let done = record
                .ops
                .iter()
                .rev()
                .find(|op| op.completed() || op.retired)?;
            let end = done.completed_ns().unwrap_or(done.created_ns);
            Some(end.saturating_sub(record.ops.first()?.created_ns) as f32 / 1e6)
        })
        .collect();
    spans.sort_by(f32::total_cmp);
    spans
        .get(spans.len() / 2)
        .map_or(0.0, |&span| f64::from(span))
}

/// The percentile `fraction`, 0..1, of the values; `None` if there are none.
pub(crate) fn percentile(values: &[f32], fraction: f64) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let mut sorted = values.to_vec();
    let nth = ((sorted.len() - 1) as f64 * fraction).round() as usize;
    let (_, value, _) = sorted.select_nth_unstable_by(nth, f32::total_cmp);
    Some(f64::from(*value))
}
