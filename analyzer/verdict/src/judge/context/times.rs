//! How long ranks have waited.

use super::Context;
use crate::align::pending::PendingKind;
use crate::judge::policy::now_ns;
use crate::judge::wait_graph::Place;
use crate::report::Until;

impl Context<'_> {
    /// What states the end of the time that ages measure.
    pub(crate) fn until(&self) -> Until {
        let mut records = self.aligned.records.iter();
        match (&self.life.end, self.policy.now_ns) {
            _ if self.young_files => Until::Written,
            (Some(_), _) => Until::Ended,
            (None, _) if !self.life.lives_on() => Until::Taken,
            (None, Some(_)) => Until::Now,
            (None, None) if records.any(|record| record.identity.dump_time_ns > 0) => Until::Taken,
            (None, None) => Until::Written,
        }
    }

    /// The end of the time that ages measure, common time, ns. `None` if the records do not note when they were taken,
    /// since their newest operation may be much older, unless they are judged by the times of their files.
    pub(crate) fn as_of_ns(&self) -> Option<i64> {
        match self.until() {
            Until::Written if !self.young_files => None,
            Until::Written => self.policy.now_ns,
            Until::Now | Until::Taken | Until::Ended => now_ns(self.aligned, self.policy),
        }
    }

    /// How long the first rank at a place has waited, ms; `None` if times are unknown or it is less than 1 ms.
    pub(crate) fn waited_ms(&self, place: usize) -> Option<f64> {
        let since = self.waiting_since(place)?;
        let ms = self.as_of_ns()?.saturating_sub(since) as f64 / 1e6;
        (ms >= 1.0).then_some(ms)
    }

    /// When the first of the ranks that wait at a place issued the operation, common time, ns.
    pub(crate) fn waiting_since(&self, place: usize) -> Option<i64> {
        match self.graph.places[place] {
            Place::Collective { .. } => self.arrivals(place).map(|(at_ns, _)| at_ns).min(),
            Place::Batch {
                record, pending, ..
            } => {
                let first = self
                    .aligned
                    .op(record, self.first_of_batch(record, pending));
                Some(self.aligned.created_ns(record, first))
            }
        }
    }

    /// Whether the last member of a collective came so long ago that it should have finished; also true if this is not
    /// a snapshot or times are unknown. Until then the others have waited for this member, and the fabric has had no
    /// time.
    pub(crate) fn is_long_complete(&self, place: usize) -> bool {
        let now = now_ns(self.aligned, self.policy).filter(|_| self.policy.snapshot);
        let last = self.arrivals(place).max();
        now.zip(last).is_none_or(|(now, (last_ns, timeout_ms))| {
            let age = u128::try_from(now.saturating_sub(last_ns)).unwrap_or(0);
            age >= self.policy.overdue_after(timeout_ms).as_nanos()
        })
    }

    /// Whether an unfinished operation is overdue whose last member did not come just now.
    pub(crate) fn is_anything_overdue(&self) -> bool {
        let is_fresh = |group: usize, seq: u32| {
            let place = self.graph.collective(group, seq);
            place.is_some_and(|place| {
                self.graph.missing[place].is_empty() && !self.is_long_complete(place)
            })
        };
        self.graph
            .pending
            .iter()
            .enumerate()
            .any(|(record, pending)| {
                pending.iter().enumerate().any(|(at, one)| {
                    let fresh = match one.what {
                        PendingKind::Collective { seq } => is_fresh(one.group, seq),
                        _ => false,
                    };
                    self.graph.is_overdue(record, at) && !fresh
                })
            })
    }

    /// When the ranks that are inside a collective issued it, common time, ns, with its time-out there, ms.
    pub(crate) fn arrivals(&self, place: usize) -> impl Iterator<Item = (i64, u64)> {
        let at = match self.graph.places[place] {
            Place::Collective { group, seq } => Some((group, seq)),
            Place::Batch { .. } => None,
        };
        let nodes = at.map_or(&[][..], |_| &self.graph.arrived[place]);
        nodes.iter().filter_map(move |&node| {
            let (group, seq) = at?;
            let record = self.aligned.record_in(group, self.rank(node))?;
            let pending = self.graph.pending[record].iter().find(|one| {
                one.group == group
                    && matches!(one.what, PendingKind::Collective { seq: s } if s == seq)
            })?;
            let op = self.aligned.op(record, pending.position);
            let timeout_ms = self.aligned.shared.calls.get(op.call).timeout_ms;
            Some((self.aligned.created_ns(record, op), timeout_ms))
        })
    }
}
