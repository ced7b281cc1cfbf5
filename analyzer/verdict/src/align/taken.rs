//! Whether records were taken too early for what their ranks are missed in.

use crate::align::p2p::peer_of;
use crate::align::record::{NONE, Op};
use crate::align::{Aligned, Lane, RecordIx};
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
/// A rank that is missed for less than this may be on its way: an early record proves only what was so before.
const ON_ITS_WAY: Duration = Duration::from_secs(5);

impl Aligned<'_> {
    /// Marks records as too early if they were taken before their peers came to where they wait for these ranks, or, of
    /// early ones, soon after, and no peer had waited for them before. `taken`: for each record, when it was taken;
    /// `newest_ns`: the newest of these times by the clocks that are known.
    pub(crate) fn note_taken(&mut self, taken: &[Taken], newest_ns: Option<i64>) {
        let shows_until: Vec<Option<i64>> = taken
            .iter()
            .map(|taken| {
                let own = taken.at_ns.zip(newest_ns);
                let early = own
                    .filter(|(own, newest)| newest.saturating_sub(*own) >= EARLY.as_nanos() as i64);
                let margin_ns = ON_ITS_WAY.as_nanos() as i64;
                let early = early.map(|(own, _)| own.saturating_sub(margin_ns));
                early.or(taken.sure_until_ns)
            })
            .collect();
        if shows_until.iter().all(Option::is_none) {
            return;
        }
        let mut before = vec![false; self.records.len()];
        let mut after = vec![false; self.records.len()];
        let mut note = |record: RecordIx, since_ns: i64| {
            if let Some(until_ns) = shows_until[record] {
                match since_ns > until_ns {
                    true => after[record] = true,
                    false => before[record] = true,
                }
            }
        };
        for group in &self.groups {
            // Since when the first member waits in each of the collectives in which members wait.
            let mut waits: BTreeMap<u32, i64> = BTreeMap::new();
            for &(record, lane) in group.lanes.iter().flatten() {
                let lane = &self.lanes[record][lane];
                if let Some(&position) = lane.collectives.get(lane.pending_from) {
                    let op = self.op(record, position);
                    let since_ns = self.began_ns(record, op);
                    let first = waits.entry(op.seq).or_insert(since_ns);
                    *first = since_ns.min(*first);
                }
                for (member, since_ns) in self.awaits_messages(record, lane) {
                    if let Some(&Some((peer, _))) = group.lanes.get(member as usize) {
                        note(peer, since_ns);
                    }
                }
            }
            for &(record, lane) in group.lanes.iter().flatten() {
                let reached = self.reached(record, &self.lanes[record][lane]);
                let later = waits.range((Bound::Excluded(reached), Bound::Unbounded));
                for (_, &since_ns) in later {
                    note(record, since_ns);
                }
            }
        }
        for record in 0..self.records.len() {
            self.ends_early[record] |= after[record] && !before[record];
        }
    }

    /// When an operation began to wait: it was seen to start, else was issued; common time, ns.
    fn began_ns(&self, record: RecordIx, op: &Op) -> i64 {
        let queued_ns = match op.started_us {
            NONE => 0,
            started_us => i64::from(started_us) * 1000,
        };
        self.created_ns(record, op).saturating_add(queued_ns)
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

    /// The members with which this lane has messages that no later message of the lane shows as over, each with the time
    /// since which the first of these waits.
    fn awaits_messages(&self, record: RecordIx, lane: &Lane) -> Vec<(u32, i64)> {
        let list = &lane.messages;
        let last = list
            .iter()
            .rposition(|&position| self.op(record, position).completed());
        let members = self.groups[lane.group].ranks.len() as u32;
        let mut first: BTreeMap<u32, i64> = BTreeMap::new();
        for &position in &list[last.map_or(0, |last| last + 1)..] {
            let op = self.op(record, position);
            let peer = (op.kind.is_p2p() && lane.member != NONE)
                .then(|| peer_of(op, lane.member, members));
            if let Some(peer) = peer.flatten() {
                let since_ns = self.began_ns(record, op);
                first.entry(peer).or_insert(since_ns);
            }
        }
        first.into_iter().collect()
    }
}
