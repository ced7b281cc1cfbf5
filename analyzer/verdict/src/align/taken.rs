//! Marks records that were taken too early to show whether their ranks came to what others wait in.

use crate::align::p2p::{Counterpart, Messages};
use crate::align::record::{NONE, Op};
use crate::align::{Aligned, Lane, RecordIx, message};
use rcomm_recorder::model::EntryState;
use std::collections::BTreeMap;
use std::time::Duration;

/// When a record was taken, common time, ns; `None` if it is unknown. If it is not known how its clock relates to the
/// others', `at_ns` is by its own clock. That a record is early is then a guess, and the guess only leaves more open.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    /// When it was taken, or when its file was written.
    pub(crate) at_ns: Option<i64>,
    /// The time up to which it surely holds what its rank issued, by the time of its file. `None` for a record that
    /// states when it was taken: it is judged by that time.
    pub(crate) sure_until_ns: Option<i64>,
}

/// A record is early if it was taken this long before the newest.
pub(crate) const EARLY: Duration = Duration::from_secs(10);
/// A rank that is missed for less than this, or for less than half of the time-out if that is shorter, may be on its
/// way: an early record proves only the state before.
const ON_ITS_WAY: Duration = Duration::from_secs(5);

/// Times by the clocks of two hosts that are closer than this, ns, prove no order.
const SLACK_NS: i64 = 1_000_000_000;

/// A wait of others for a rank.
#[derive(Clone, Copy, Debug)]
struct Wait {
    /// When it began, common time, ns.
    since_ns: i64,
    /// The time-out of the operation, ms; 0 if it is not recorded.
    timeout_ms: u64,
}

impl Wait {
    /// For how long the rank may be on its way, ns.
    fn on_its_way_ns(self) -> i64 {
        let limit = match self.timeout_ms {
            0 => ON_ITS_WAY,
            known => ON_ITS_WAY.min(Duration::from_millis(known) / 2),
        };
        limit.as_nanos() as i64
    }
}

/// The extremes of one or more waits, common time, ns: the least and the greatest.
#[derive(Clone, Copy, Debug)]
struct Extremes {
    /// When the waits began.
    since_ns: [i64; 2],
    /// Until when the ranks that are missed may have been on their way.
    on_its_way_until_ns: [i64; 2],
}

impl Extremes {
    fn of(wait: Wait) -> Self {
        let until_ns = wait.since_ns.saturating_add(wait.on_its_way_ns());
        Self {
            since_ns: [wait.since_ns; 2],
            on_its_way_until_ns: [until_ns; 2],
        }
    }

    /// Adds other waits.
    fn add(&mut self, other: Self) {
        let both = |one: [i64; 2], other: [i64; 2]| [one[0].min(other[0]), one[1].max(other[1])];
        self.since_ns = both(self.since_ns, other.since_ns);
        self.on_its_way_until_ns = both(self.on_its_way_until_ns, other.on_its_way_until_ns);
    }
}

impl Aligned<'_> {
    /// Marks records as too early if peers wait for their ranks, and each of these waits began only after the time up
    /// to which the record surely shows what its rank issued. An early record ([`EARLY`]) is marked if in each of these
    /// waits the rank may still have been on its way after the record was taken. `taken`: for each record, when it was
    /// taken; `newest_ns`: the newest of these times by the clocks that are known; `messages`: those of these records.
    pub(crate) fn note_taken(
        &mut self,
        taken: &[Taken],
        newest_ns: Option<i64>,
        messages: &Messages,
    ) {
        let early_ns = |taken: &Taken| {
            let (own, newest) = taken.at_ns.zip(newest_ns)?;
            let is_early = newest.saturating_sub(own) >= EARLY.as_nanos() as i64;
            is_early.then_some(own)
        };
        // Whether some of these waits began after what a record is sure to show, and whether some began before.
        let compare = |record: RecordIx, waits: Extremes| {
            let ([first, last], until_ns) = match early_ns(&taken[record]) {
                Some(own) => (waits.on_its_way_until_ns, own),
                None => (waits.since_ns, taken[record].sure_until_ns?),
            };
            Some((last > until_ns, first <= until_ns))
        };
        let is_dated = |taken: &Taken| taken.sure_until_ns.is_some() || early_ns(taken).is_some();
        if !taken.iter().any(is_dated) {
            return;
        }
        let mut before = vec![false; self.records.len()];
        let mut after = vec![false; self.records.len()];
        let mut note = |record: RecordIx, waits: Extremes| {
            if let Some((any_after, any_before)) = compare(record, waits) {
                after[record] |= any_after;
                before[record] |= any_before;
            }
        };
        for group in &self.groups {
            // The wait of the first member in each of the collectives in which members wait.
            let mut waits: BTreeMap<u32, Wait> = BTreeMap::new();
            for &(record, lane) in group.lanes.iter().flatten() {
                let lane = &self.lanes[record][lane];
                if let Some(&position) = lane.collectives.get(lane.pending_from) {
                    let op = self.op(record, position);
                    let wait = self.wait(record, op);
                    let first = waits.entry(op.seq).or_insert(wait);
                    if wait.since_ns < first.since_ns {
                        *first = wait;
                    }
                }
                for (member, wait) in self.awaits_messages(record, lane, messages) {
                    if let Some(&Some((peer, _))) = group.lanes.get(member as usize) {
                        note(peer, Extremes::of(wait));
                    }
                }
            }
            // By number: the extremes of the waits in this collective and in those after it.
            let mut extremes: Vec<(u32, Extremes)> = Vec::with_capacity(waits.len());
            for (&seq, &wait) in waits.iter().rev() {
                let mut since_here = Extremes::of(wait);
                if let Some(&(_, later)) = extremes.last() {
                    since_here.add(later);
                }
                extremes.push((seq, since_here));
            }
            for &(record, lane) in group.lanes.iter().flatten() {
                let reached = self.reached(record, &self.lanes[record][lane]);
                let later = extremes.partition_point(|&(seq, _)| seq > reached);
                if let Some(&(_, waits)) = later.checked_sub(1).and_then(|last| extremes.get(last))
                {
                    note(record, waits);
                }
            }
        }
        for record in 0..self.records.len() {
            self.ends_early[record] |= after[record] && !before[record];
        }
    }

    /// Marks records as too early that state when they were taken, if their ranks provably continued after that.
    /// `taken`: for each record, when it was taken.
    pub(crate) fn note_went_on(&mut self, taken: &[Taken]) {
        for (record, taken) in taken.iter().enumerate() {
            let full_record = &self.records[record];
            let is_judged = full_record.identity.dump_time_ns > 0
                && !full_record.only_active
                && self.clock_known[record];
            let at_ns = taken.at_ns.filter(|_| is_judged);
            // The clocks of hosts are related by estimates.
            let surely_ns = at_ns.map(|at_ns| at_ns.saturating_add(SLACK_NS));
            let went_on = surely_ns.is_some_and(|ns| self.went_on_after(record, ns));
            self.ends_early[record] |= went_on;
        }
    }

    /// The wait in an operation: it began when the operation was seen to start, else was issued.
    fn wait(&self, record: RecordIx, op: &Op) -> Wait {
        let queued_ns = match op.started_us {
            NONE => 0,
            started_us => i64::from(started_us) * 1000,
        };
        Wait {
            since_ns: self.created_ns(record, op).saturating_add(queued_ns),
            timeout_ms: self.shared.calls.get(op.call).timeout_ms,
        }
    }

    /// The newest collective that the rank has reached: that has started if the lane shows starts, else that it issued;
    /// 0 if there is none.
    fn reached(&self, record: RecordIx, lane: &Lane) -> u32 {
        let has_begun = |&&position: &&u32| {
            !lane.shows_starts || self.op(record, position).state != EntryState::Scheduled
        };
        let newest = lane.collectives.iter().rev().find(has_begun);
        newest.map_or(0, |&position| self.seq(record, position))
    }

    /// The members with which this lane has messages that no later message of the lane shows as over, and whose records
    /// lack the other half, each with the first of these waits.
    fn awaits_messages(
        &self,
        record: RecordIx,
        lane: &Lane,
        messages: &Messages,
    ) -> Vec<(u32, Wait)> {
        let list = &lane.messages;
        let last = list
            .iter()
            .rposition(|&position| self.op(record, position).completed());
        let members = self.groups[lane.group].ranks.len();
        let mut first: BTreeMap<u32, Wait> = BTreeMap::new();
        for &position in &list[last.map_or(0, |last| last + 1)..] {
            let op = self.op(record, position);
            if !op.kind.is_p2p() || lane.member == NONE {
                continue;
            }
            let Some(ends) = message::ends(op.kind, op.peer(), lane.member, members) else {
                continue;
            };
            let other_half = messages.other_half((lane.group, ends), op.kind, position);
            if other_half == Counterpart::Missing {
                let peer = if ends.0 == lane.member {
                    ends.1
                } else {
                    ends.0
                };
                first.entry(peer).or_insert(self.wait(record, op));
            }
        }
        first.into_iter().collect()
    }
}
