//! Agreement of members through the store, without their backend: the monitored barrier, which names the ranks that do
//! not arrive; the search for the absent members of a failed group; and the shrinking of a group to its remaining
//! members.

use crate::group::agreement::{EXTRA_TIME, REMOVAL_TIME, StoreAgreement};
use crate::group::maker::{GroupOptions, Origin};
use crate::group::process_group::{End, OpParts, OpRecord, ProcessGroup, Share};
use crate::group::work::Work;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::limit::with_limit;
use crate::store::{Store, StoreQuery, absent_among};
use crate::watch::watched::WatchedGroup;
use rcomm_recorder::model::text;
use rcomm_recorder::model::{OpType, Peer, Rank};
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most ranks that the text of an error lists.
const MAX_RANKS: usize = 64;

/// Selects the ranks that the error of a monitored barrier names, among those that did not arrive. The choice of rank 0
/// of the group counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingRanks {
    /// The first, in the order of the group's ranks.
    #[default]
    First,
    /// All of them.
    All,
}

impl ProcessGroup {
    /// A barrier in which rank 0 of the group waits for all members and publishes which of them did not
    /// arrive.
    ///
    /// The barrier uses the store only, so it works where the backend hangs; it is far slower than
    /// [`barrier`](Self::barrier). The group stays usable after a monitored barrier that has failed.
    ///
    /// # Blocking
    /// Until all members have arrived, or the handle's time-out has passed; up to 5 s longer until the result is
    /// published, or if the store does not reply; then up to 1 s longer to remove the barrier's keys, if the store does
    /// not reply.
    ///
    /// # Errors
    /// `Timeout` names the ranks that did not arrive, as `missing` selects, by their numbers in the world; or
    /// rank 0 of the group, if it published no result. `Aborted` if the group is aborted during the call.
    /// Otherwise the store's error.
    #[track_caller]
    pub fn monitored_barrier(&self, missing: MissingRanks) -> Result<()> {
        let monitored = self.monitored(missing)?;
        let site = Location::caller();
        self.run_recorded(&MONITORED_BARRIER, site, |share| monitored.call(share))
    }

    /// Like [`monitored_barrier`](Self::monitored_barrier), but returns at once. Some ranks may call the blocking form
    /// and others this one.
    ///
    /// This rank arrives once its earlier asynchronous operations on objects, sparse tensors and windows, and its
    /// earlier monitored barriers, have ended. The time-out counts from the call.
    #[track_caller]
    pub fn monitored_barrier_async(&self, missing: MissingRanks) -> Result<Work<()>> {
        let monitored = self.monitored(missing)?;
        let site = Location::caller();
        self.run_on_worker(&MONITORED_BARRIER, site, move |share| monitored.call(share))
    }

    fn monitored(&self, missing: MissingRanks) -> Result<MonitoredBarrier> {
        Ok(MonitoredBarrier {
            store: self.group_store()?,
            ranks: self.ranks().to_vec(),
            rank: self.rank(),
            missing,
        })
    }

    /// Makes a group of the members that remain after the ranks `excluding`, numbered as in the world, were lost.
    /// All remaining members call this with the same list. This group may be open or aborted.
    ///
    /// # Blocking
    /// Until all remaining members have called this, or the handle's time-out has passed, and for up to 2 s more if the
    /// store does not reply or ranks are absent; then for up to 1 s to remove the keys of the agreement, if the store
    /// does not reply; then as [`World::new_group`](crate::World::new_group).
    ///
    /// # Errors
    /// `InvalidArgument` if the list holds the caller or a rank that is not a member; `Mismatch` if another
    /// member gave another list, or the others have shrunk the group without the caller; `Timeout` names the ranks that
    /// did not call this; `Closed` once the world was shut down. Otherwise the store's error, or as
    /// [`World::new_group`](crate::World::new_group).
    pub fn shrink(&self, excluding: &[Rank], options: &GroupOptions) -> Result<ProcessGroup> {
        let refuse = |kind, message: String| Error::new(kind, message).in_group(self.desc());
        let mut excluding = excluding.to_vec();
        excluding.sort_unstable();
        excluding.dedup();
        if let Some(outsider) = excluding.iter().find(|rank| !self.ranks().contains(rank)) {
            let message = format!("rank {outsider} is not a member and cannot be excluded");
            return Err(refuse(ErrorKind::InvalidArgument, message));
        }
        let maker = self.group.maker()?;
        let own_rank = self.ranks()[self.rank() as usize];
        if excluding.contains(&own_rank) {
            let message = format!("rank {own_rank} excludes itself");
            return Err(refuse(ErrorKind::InvalidArgument, message));
        }
        let remaining: Vec<Rank> = self
            .ranks()
            .iter()
            .copied()
            .filter(|rank| !excluding.contains(rank))
            .collect();
        // Members may repeat a failed call with another list.
        let count = &self.group.agreements.shrinks;
        let agreement = StoreAgreement::next(self.group_store()?, "shrink", count, &[LIST]);
        let (agreed, rest) = (agreement.clone(), remaining.clone());
        agreement
            .reach_within(self.timeout(), move |deadline| {
                agree_to_shrink(&agreed, own_rank, &excluding, &rest, deadline)
            })
            .map_err(|error| error.in_group(self.desc()))?;
        agreement.leave(remaining.len(), self.ranks());
        maker.new_group(&remaining, options, Origin::Shrink(&self.group))
    }

    /// Returns the members that do not call this within the time `within`, as ranks of the world, for a group
    /// that has failed. All members that still run call this, and all get the same list.
    ///
    /// The members agree through the store. The first member whose wait runs out publishes the absent ranks, and all
    /// members return its list. So `within` must cover the time that the slowest member takes to notice the failure.
    ///
    /// # Blocking
    /// Until all members have called, until a member has published the absent ranks, or for `within`, and for up to 2 s
    /// more if the store does not reply or ranks are absent; then for up to 1 s to remove the keys of the agreement, if
    /// the store does not reply.
    ///
    /// # Errors
    /// `PeerLost` if the published list contains the caller, or contained it before the others removed the list;
    /// `Closed` once the world was shut down. Otherwise the store's error.
    pub fn find_absent(&self, within: Duration) -> Result<Vec<Rank>> {
        let own_rank = self.ranks()[self.rank() as usize];
        let count = &self.group.agreements.searches;
        let agreement = StoreAgreement::next(self.group_store()?, "absent", count, &[RESULT]);
        let (search, members) = (agreement.clone(), self.ranks().to_vec());
        let agreed = agreement
            .reach_within(within, move |deadline| {
                agree_on_absent(&search, own_rank, &members, deadline)
            })
            .map_err(|error| error.in_group(self.desc()))?;
        agreement.leave(self.ranks().len() - agreed.len(), self.ranks());
        Ok(agreed)
    }

    /// The store under the group's own prefix.
    fn group_store(&self) -> Result<Arc<dyn Store>> {
        Ok(self.group.maker()?.group_store(self.group.wire_id()))
    }
}

/// Waits until all of the `remaining` ranks have called [`ProcessGroup::shrink`] with the same list as this one.
fn agree_to_shrink(
    agreement: &StoreAgreement,
    own_rank: Rank,
    excluding: &[Rank],
    remaining: &[Rank],
    deadline: Instant,
) -> Result<()> {
    let store = agreement.store();
    let refuse = |message: String| Err(Error::new(ErrorKind::Mismatch, message));
    let wanted = format!("{excluding:?}");
    let agreed = store.compare_set(&agreement.key(LIST), b"", wanted.as_bytes())?;
    if agreed != wanted.as_bytes() {
        let agreed = serde_json::from_slice::<Vec<Rank>>(&agreed).unwrap_or_default();
        let (own, other) = (list_of(excluding), list_of(&agreed));
        return refuse(format!("this rank excludes {own}, another member {other}"));
    }
    // If the others have ended this agreement, they have removed their list, and the list in the store is this
    // rank's own.
    if agreement.is_over()? {
        agreement.forget(own_rank);
        let message =
            "the other members have shrunk the group without this rank, which called too late";
        return refuse(message.to_owned());
    }
    store.set(&agreement.arrival(own_rank), b"1")?;
    let keys: Vec<String> = remaining
        .iter()
        .map(|&rank| agreement.arrival(rank))
        .collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    // A wait whose connection has gone silent leaves time to name the absent ranks over another one.
    let limit = deadline + EXTRA_TIME / 2;
    match with_limit(limit, || store.wait(&keys, time_until(deadline))) {
        Err(error) if error.kind() == ErrorKind::Timeout => {}
        waited => return waited,
    }
    // What is known must be said before the agreement has to end.
    let absent = absent_among(store, &keys, deadline + EXTRA_TIME * 7 / 8).at_least()?;
    if absent.is_empty() {
        // The last one came after the wait had ended.
        return Ok(());
    }
    let absent: Vec<Rank> = absent.into_iter().map(|index| remaining[index]).collect();
    let named = text::ranks(&absent, MAX_RANKS);
    let message = format!("{named} did not call shrink within its time-out");
    Err(Error::new(ErrorKind::Timeout, message).with_ranks(&absent))
}

/// Waits until all `members` have called [`ProcessGroup::find_absent`], and returns which have not: the list of the
/// first member that has waited until its deadline.
fn agree_on_absent(
    agreement: &StoreAgreement,
    own_rank: Rank,
    members: &[Rank],
    deadline: Instant,
) -> Result<Vec<Rank>> {
    let store = agreement.store();
    let late = || {
        let message =
            format!("the others continue without rank {own_rank}, which arrived too late");
        Err(Error::new(ErrorKind::PeerLost, message))
    };
    store.set(&agreement.arrival(own_rank), b"1")?;
    let keys: Vec<String> = members
        .iter()
        .map(|&rank| agreement.arrival(rank))
        .collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let result_key = agreement.key(RESULT);
    let mut absent = Vec::new();
    loop {
        match store.wait(&keys, time_until(deadline).clamp(MIN_WAIT, ABORT_CHECK)) {
            Ok(()) => break,
            Err(error) if error.kind() == ErrorKind::Timeout => {}
            Err(error) => return Err(error),
        }
        // Stop at a published list: waiting for all of the time would delay what the program does next.
        if store.check(&[&result_key])? {
            break;
        }
        if agreement.is_over()? {
            agreement.forget(own_rank);
            return late();
        }
        if Instant::now() >= deadline {
            absent = absent_among(store, &keys, deadline + EXTRA_TIME).all()?;
            break;
        }
    }
    let list: Vec<String> = absent
        .iter()
        .map(|&index| members[index].to_string())
        .collect();
    // The list is in brackets, since `compare_set` treats an empty value as absent.
    let list = format!("[{}]", list.join(","));
    // The first list counts; later ones are dropped.
    let agreed = store.compare_set(&result_key, b"", list.as_bytes())?;
    let agreed: Vec<Rank> = serde_json::from_slice(&agreed).map_err(|error| {
        let message = format!("{result_key} holds no list of ranks");
        Error::new(ErrorKind::Store, message).with_source(error)
    })?;
    // If the others have ended this search, they have removed their list, and the list in the store is this rank's
    // own.
    if agreement.is_over()? {
        agreement.forget(own_rank);
        return late();
    }
    if agreed.contains(&own_rank) {
        agreement.forget_arrival(own_rank);
        return late();
    }
    Ok(agreed)
}

fn time_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// The ranks of a list, for an error message.
fn list_of(ranks: &[Rank]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        ranks => text::ranks(ranks, MAX_RANKS),
    }
}

const MONITORED_BARRIER: OpRecord<'static> = OpRecord {
    op: OpType::MonitoredBarrier,
    backend: "store",
    peer: Peer::None,
    tensor: None,
    parts: OpParts::None,
    end: End::Own,
};

/// How long after its time-out a monitored barrier may last. Rank 0 takes at most half of it to find the absent ranks;
/// the others wait for its result for three quarters.
const RESULT_TIME: Duration = Duration::from_secs(5);
/// How often a waiting rank checks whether the group was aborted or, in a search for absent members, whether their list
/// was published.
const ABORT_CHECK: Duration = Duration::from_millis(250);

/// One rank's part in a monitored barrier.
struct MonitoredBarrier {
    store: Arc<dyn Store>,
    ranks: Vec<Rank>,
    rank: u32,
    missing: MissingRanks,
}

impl MonitoredBarrier {
    /// Carries out this rank's part.
    fn call(&self, share: &Share) -> Result<()> {
        // Earlier operations may have kept this rank for longer than its time-out.
        let due = share.due().max(Instant::now());
        let absent_list = if self.rank == 0 {
            self.collect(share, due)?
        } else {
            self.arrive(share, due)?
        };
        if absent_list.is_empty() {
            return Ok(());
        }
        let within = text::duration(share.timeout());
        let absent: Vec<Rank> = absent_list.split(", ").flat_map(str::parse).collect();
        let named = text::ranks(&absent, MAX_RANKS);
        let message = format!("{named} did not arrive within {within}");
        let error = Error::new(ErrorKind::Timeout, message).with_ranks(&absent);
        Err(error.sparing_group())
    }

    /// Waits for the other ranks. Publishes and returns the absent ranks that the error names: their numbers, separated
    /// by commas; empty if all have arrived. Runs on rank 0.
    fn collect(&self, share: &Share, due: Instant) -> Result<String> {
        let arrivals: Vec<String> = (1..self.ranks.len())
            .map(|rank| key(share, &rank.to_string()))
            .collect();
        let arrivals: Vec<&str> = arrivals.iter().map(String::as_str).collect();
        if arrivals.is_empty() {
            return Ok(String::new());
        }
        let mut absent: Vec<Rank> = Vec::new();
        if !self.wait(share, &arrivals, due, due)? {
            let until = due + RESULT_TIME / 2;
            let found = absent_among(&*self.store, &arrivals, until);
            let found = found.at_least().map_err(Error::sparing_group)?;
            absent.extend(found.into_iter().map(|index| self.ranks[index + 1]));
        }
        if self.missing == MissingRanks::First {
            absent.truncate(1);
        }
        let numbers: Vec<String> = absent.iter().map(Rank::to_string).collect();
        let absent_list = numbers.join(", ");
        let result_key = key(share, RESULT);
        let published = self.ask(due, |store| store.set(&result_key, absent_list.as_bytes()));
        published.map_err(Error::sparing_group)?;
        // Only this rank reads them, and repeated barriers would fill the store.
        let arrivals: Vec<String> = arrivals.into_iter().map(str::to_owned).collect();
        self.tidy(share, move |store| {
            arrivals
                .iter()
                .try_for_each(|key| store.delete(key).map(drop))
        });
        Ok(absent_list)
    }

    /// Announces this rank, then waits for the result from rank 0 and returns it.
    fn arrive(&self, share: &Share, due: Instant) -> Result<String> {
        let result_key = key(share, RESULT);
        let arrival = key(share, &self.rank.to_string());
        self.ask(due, |store| store.set(&arrival, b"1"))
            .map_err(Error::sparing_group)?;
        // The rest of the time is for asking the store whether it has the result: it may not answer.
        let until = due + RESULT_TIME * 3 / 4;
        let is_there = self.wait(share, &[&result_key], until, due)?
            || self
                .ask(due, |store| store.check(&[&result_key]))
                .map_err(Error::sparing_group)?;
        if !is_there {
            let message = format!(
                "rank {} published no result of the monitored barrier",
                self.ranks[0]
            );
            return Err(Error::new(ErrorKind::Timeout, message).sparing_group());
        }
        let result = self.ask(due, |store| store.get(&result_key, ABORT_CHECK));
        let result = result.map_err(Error::sparing_group)?;
        let absent_list = String::from_utf8_lossy(&result).into_owned();
        // Rank 0 has removed the keys of those that came in time, and needs none any more. A single number may be that
        // of the first of several absent ranks.
        let own_rank = self.ranks[self.rank as usize].to_string();
        let mut named = absent_list.split(", ");
        let may_be_late = !absent_list.is_empty()
            && (named.clone().count() == 1 || named.any(|it| *it == own_rank));
        let read_count = key(share, "read");
        let readers = self.ranks.len() as i64 - 1;
        self.tidy(share, move |store| {
            if may_be_late {
                store.delete(&arrival)?;
            }
            // The last rank to read the result removes it.
            if store.add(&read_count, 1)? == readers {
                store.delete(&result_key)?;
                store.delete(&read_count)?;
            }
            Ok(())
        });
        Ok(absent_list)
    }

    /// Makes requests that end with the barrier, whose time-out passes at `due`, whatever the store's own time-out is.
    fn ask<T>(&self, due: Instant, requests: impl FnOnce(&dyn Store) -> T) -> T {
        with_limit(due + RESULT_TIME, || requests(&*self.store))
    }

    /// Removes keys of this barrier by `remove`. If the store fails or does not answer in time, keys stay there: that
    /// changes nothing about the result, which this rank has.
    fn tidy(&self, share: &Share, remove: impl FnOnce(&dyn Store) -> Result<()> + Send + 'static) {
        if let Err(error) = StoreQuery::within(&self.store, REMOVAL_TIME, remove) {
            let seq = share.seq();
            tracing::debug!(seq, %error, "keys of a monitored barrier stay in the store");
        }
    }

    /// Waits until `until` for all of these keys, in a barrier whose time-out passes at `due`; returns whether they
    /// are there.
    ///
    /// # Errors
    /// The store's, or the group's if it fails or is aborted.
    fn wait(&self, share: &Share, keys: &[&str], until: Instant, due: Instant) -> Result<bool> {
        loop {
            let rest = until.saturating_duration_since(Instant::now());
            let wait = rest.clamp(MIN_WAIT, ABORT_CHECK);
            match self.ask(due, |store| store.wait(keys, wait)) {
                Ok(()) => return Ok(true),
                Err(error) if error.kind() != ErrorKind::Timeout => {
                    return Err(error.sparing_group());
                }
                Err(_) => {}
            }
            if let Some(reason) = share.group_error() {
                return Err(reason);
            }
            if rest.is_zero() {
                return Ok(false);
            }
        }
    }
}

/// The shortest wait at the store, so that keys are looked up once even if no time is left.
const MIN_WAIT: Duration = Duration::from_millis(1);
/// The key under which the members publish the list of those that they leave out.
const LIST: &str = "list";
/// The key under which the absent ranks are published: by rank 0 of a monitored barrier, or by the first member that
/// has waited long enough for the others.
const RESULT: &str = "verdict";

fn key(share: &Share, name: &str) -> String {
    format!("monitored_barrier/{}/{name}", share.seq())
}
