//! [`StoreAgreement`]: the keys by which the members of a group agree through the store, and when these are removed.

use crate::op::deadline::Deadline;
use crate::op::error::Result;
use crate::store::{Store, StoreQuery, raise};
use rcomm_recorder::model::Rank;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

/// How long a rank that has the result waits at most for the store to remove keys.
pub(crate) const REMOVAL_TIME: Duration = Duration::from_secs(1);
/// How long after its time-out an agreement may last, if the store does not reply, or to find out who is absent.
pub(crate) const EXTRA_TIME: Duration = Duration::from_secs(2);
/// The most agreements whose keys the last member to leave one removes: of that one, and of those before it that some
/// members gave up.
const SWEPT_ROUNDS: i64 = 64;
/// The key of how many members have left an agreement.
const LEFT: &str = "left";

/// One of the agreements of a kind among the members of a group. They are numbered from 1: the n-th calls of all
/// members belong together.
#[derive(Clone)]
pub(super) struct StoreAgreement {
    store: Arc<dyn Store>,
    kind: &'static str,
    round: i64,
    /// The keys of a round besides the arrivals and [`LEFT`].
    results: &'static [&'static str],
}

impl StoreAgreement {
    /// The next agreement of this kind, by the caller's count of them.
    pub(super) fn next(
        store: Arc<dyn Store>,
        kind: &'static str,
        count: &AtomicI64,
        results: &'static [&'static str],
    ) -> Self {
        let round = count.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        Self {
            store,
            kind,
            round,
            results,
        }
    }

    /// Calls `reach` with its deadline, which is `timeout` from now. Returns at most [`EXTRA_TIME`] after the deadline,
    /// whatever the store's own time-out is.
    ///
    /// # Errors
    /// Those of `reach`; `Timeout` if the store does not reply.
    pub(super) fn reach_within<T: Send + 'static>(
        &self,
        timeout: Duration,
        reach: impl FnOnce(Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let deadline = Deadline::In(timeout).start();
        let limit = timeout.saturating_add(EXTRA_TIME);
        StoreQuery::within(&self.store, limit, move |_| reach(deadline))
    }

    pub(super) fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(super) fn key(&self, part: &str) -> String {
        key_of(self.kind, self.round, part)
    }

    /// The key that a member sets when it has come.
    pub(super) fn arrival(&self, rank: Rank) -> String {
        self.key(&rank.to_string())
    }

    /// Whether all members that take part in this agreement have left it: the caller is none of them then, and the keys
    /// are gone.
    pub(super) fn is_over(&self) -> Result<bool> {
        let over = over(self.kind);
        Ok(self.store.check(&[&over])? && self.store.add(&over, 0)? >= self.round)
    }

    /// Removes what a member has set that came when the agreement was over. Keys that cannot be removed stay.
    pub(super) fn forget(&self, rank: Rank) {
        let results = self.results.iter().map(|part| self.key(part));
        self.remove(results.chain([self.arrival(rank)]).collect());
    }

    /// Removes the arrival of a member that the others do not wait for any more.
    pub(super) fn forget_arrival(&self, rank: Rank) {
        self.remove(vec![self.arrival(rank)]);
    }

    /// Notes that this member has the result, which `readers` of the group's `members` get. The last one removes the
    /// keys of this agreement, and of earlier ones that were given up. One key of each kind remains, from which a
    /// member that arrives later learns that it is late.
    pub(super) fn leave(&self, readers: usize, members: &[Rank]) {
        let (kind, round, results) = (self.kind, self.round, self.results);
        let left = self.key(LEFT);
        let members = members.to_vec();
        self.tidy(move |store| {
            if usize::try_from(store.add(&left, 1)?).is_ok_and(|left| left < readers) {
                return Ok(());
            }
            // Written before keys are removed, so that a member that does not find them knows why.
            let before = raise(store, &over(kind), round)?;
            let first = before.max(round.saturating_sub(SWEPT_ROUNDS));
            for round in first.saturating_add(1)..=round {
                for part in results.iter().chain([&LEFT]) {
                    store.delete(&key_of(kind, round, part))?;
                }
                for rank in &members {
                    store.delete(&key_of(kind, round, &rank.to_string()))?;
                }
            }
            Ok(())
        });
    }

    fn remove(&self, keys: Vec<String>) {
        self.tidy(move |store| keys.iter().try_for_each(|key| store.delete(key).map(drop)));
    }

    /// Removes keys by `remove`. If the store fails or does not answer in time, keys stay: that changes nothing about
    /// the result, which this rank has.
    fn tidy(&self, remove: impl FnOnce(&dyn Store) -> Result<()> + Send + 'static) {
        if let Err(error) = StoreQuery::within(&self.store, REMOVAL_TIME, remove) {
            let (kind, round) = (self.kind, self.round);
            tracing::debug!(kind, round, %error, "keys of an agreement stay in the store");
        }
    }
}

fn key_of(kind: &str, round: i64, part: &str) -> String {
    format!("{kind}/{round}/{part}")
}

/// The key of the newest agreement that all its members have left.
fn over(kind: &str) -> String {
    format!("{kind}/over")
}
