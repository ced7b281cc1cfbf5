//! Whether records were taken too early for what their ranks are missed in.

use crate::align::p2p::{Counterpart, Messages};
use crate::align::record::{NONE, Op};
use crate::align::{Aligned, Lane, RecordIx, message};
use rcomm_recorder::model::EntryState;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

/// When a record was taken, common time, ns; `None` if it is unknown. If it is not known how its clock relates to the
/// others', `at_ns` is by its own clock: that a record is early is then a guess, which only leaves more open.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    /// When it was taken, or when its file was written.
    pub(crate) at_ns: Option<i64>,
    /// Until when it is sure to hold what its rank issued, by the time of its file. A record that states its time, which
    /// operations are judged by, has none.
    pub(crate) sure_until_ns: Option<i64>,
}

/// A record is early if it was taken this long before the newest.
pub(crate) const EARLY: Duration = Duration::from_secs(10);
/// A rank that is missed for less than this, or half of a shorter time-out, may be on its way: an early record proves
/// only what was so before.
const ON_ITS_WAY: Duration = Duration::from_secs(5);

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

impl Aligned<'_> {
    /// Marks records as too early if they were taken before their peers came to where they wait for these ranks, or, of
    /// early ones, soon after, and no peer had waited for them before. `taken`: for each record, when it was taken;
    /// `newest_ns`: the newest of these times by the clocks that are known. `messages`: of these records.
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
        let shows_until = |record: RecordIx, wait: Wait| {
            let early = early_ns(&taken[record]);
            let early = early.map(|own| own.saturating_sub(wait.on_its_way_ns()));
            early.or(taken[record].sure_until_ns)
        };
        let is_dated = |taken: &Taken| taken.sure_until_ns.is_some() || early_ns(taken).is_some();
        if !taken.iter().any(is_dated) {
            return;
        }
        let mut before = vec![false; self.records.len()];
        let mut after = vec![false; self.records.len()];
        let mut note = |record: RecordIx, wait: Wait| {
            if let Some(until_ns) = shows_until(record, wait) {
                match wait.since_ns > until_ns {
                    true => after[record] = true,
                    false => before[record] = true,
                }
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
                        note(peer, wait);
                    }
                }
            }
            for &(record, lane) in group.lanes.iter().flatten() {
                let reached = self.reached(record, &self.lanes[record][lane]);
                let later = waits.range((Bound::Excluded(reached), Bound::Unbounded));
                for (_, &wait) in later {
                    note(record, wait);
                }
            }
        }
        for record in 0..self.records.len() {
            self.ends_early[record] |= after[record] && !before[record];
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
