//! The groups of a world: found by name, made once for each purpose, and changed together.

use crate::config::DebugLevel;
use crate::group::maker::GroupOptions;
use crate::group::process_group::{Group, ProcessGroup, Timing};
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::watch::wait_counters::{RuntimeWait, WaitCounter};
use crate::watch::watched::{Held, WatchedGroup};
use crate::world::{World, WorldShared};
use rcomm_recorder::model::{EntryState, Rank, text};
use rcomm_recorder::publish::WaitStatistics;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often `wait_for_pending` checks.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

impl<B> World<B> {
    /// The groups of this world that still exist on this rank, in order of creation; the first is that of all ranks.
    pub fn groups(&self) -> Vec<ProcessGroup> {
        let held = self.shared.groups();
        held.iter().cloned().map(ProcessGroup::over).collect()
    }

    /// The group with this [name](ProcessGroup::name), if it still exists on this rank.
    pub fn group_named(&self, name: &str) -> Option<ProcessGroup> {
        let held = self.shared.groups();
        let group = held.iter().find(|group| group.info().name == name);
        group.cloned().map(ProcessGroup::over)
    }

    /// The group that an earlier call of this function on this rank made for the same ranks, in the same order, and
    /// with the same [`desc`](GroupOptions::desc), whatever the other options are. If there is none, this makes a new
    /// group, as [`new_group`](Self::new_group) does. It is for parts of a program that do not know of each other, like
    /// `pg_tag` of PyTorch. The group lives as long as the world, or until it is destroyed, aborted or fails; the next
    /// call then makes a new one.
    ///
    /// # Blocking
    /// See [`new_group`](Self::new_group).
    ///
    /// # Errors
    /// Those of [`new_group`](Self::new_group).
    pub fn shared_group(&self, ranks: &[Rank], options: &GroupOptions) -> Result<ProcessGroup> {
        let reused = || {
            let reused = &self.shared.reused;
            reused.lock().unwrap_or_else(PoisonError::into_inner)
        };
        let (known, refused) = {
            let mut shared = reused();
            let refused = shared.extract_if(.., |(_, group)| group.refusal().is_some());
            let refused: Vec<_> = refused.collect();
            let mut known = shared.iter();
            let known = known.find(|(desc, group)| *desc == options.desc && group.ranks() == ranks);
            (known.map(|(_, group)| group.clone()), refused)
        };
        // Without the lock: the end of a group may take long, and may run code of the program that calls this.
        drop(refused);
        if let Some(known) = known {
            return Ok(known);
        }
        let group = self.new_group(ranks, options)?;
        reused().push((options.desc.clone(), group.clone()));
        Ok(group)
    }

    /// Sets whether ranks compare what they issue ([`Config::debug`](crate::Config::debug)) in the groups that are made
    /// from now on; groups that exist keep their level. All members must have set the same level when they make a
    /// group: a member that finds another level at another member gets [`ErrorKind::Rendezvous`].
    pub fn set_debug_level(&self, level: DebugLevel) {
        let checks = level != DebugLevel::Off;
        self.shared.checks.store(checks, Ordering::Relaxed);
    }

    /// `Detail` if ranks compare what they issue in the groups that are made from now on, `Off` if not.
    pub fn debug_level(&self) -> DebugLevel {
        match self.shared.checks.load(Ordering::Relaxed) {
            true => DebugLevel::Detail,
            false => DebugLevel::Off,
        }
    }

    /// Sets the time-out of operations issued from now on, on this rank, in all groups that exist.
    pub fn set_timeouts(&self, timeout: Duration) {
        self.shared.each(|group| group.set_timeout(timeout));
    }

    /// [Extends the time-out](ProcessGroup::extend_timeout) of the next operations in all groups that exist.
    pub fn extend_timeouts(&self, extra: Duration) {
        self.shared.each(|group| group.extend_timeout(extra));
    }

    /// Sets in all groups that exist whether they measure how long operations run
    /// ([`ProcessGroup::set_timing`]).
    ///
    /// # Errors
    /// Those of [`ProcessGroup::set_timing`]; the groups that were made before the one that refuses are then changed.
    pub fn set_timing(&self, timing: Timing) -> Result<()> {
        let held = self.shared.groups();
        let mut groups = held.iter().cloned().map(ProcessGroup::over);
        groups.try_for_each(|group| group.set_timing(timing))
    }

    /// Aborts all groups for this reason, the newest first; later operations are refused.
    pub fn abort_groups(&self, reason: &str) {
        let held = self.shared.groups();
        let newest_first = held.iter().rev().cloned().map(ProcessGroup::over);
        newest_first.for_each(|group| group.abort(reason));
    }

    /// Waits until no operation that was issued (by a call that returns a [`Work`](crate::Work)) is pending in any
    /// group. The handles of the operations say whether they failed.
    ///
    /// # Blocking
    /// For at most `timeout`. Operations that are issued in the meantime count too.
    ///
    /// # Errors
    /// `Timeout` names the groups in which operations are pending, how many are, and the operation under way in them
    /// that was issued first.
    pub fn wait_for_pending(&self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::In(timeout).started();
        let mut waiting = None;
        loop {
            let held = self.shared.groups();
            let groups: Vec<_> = held.iter().cloned().map(ProcessGroup::over).collect();
            let pending = groups.iter().filter(|group| group.pending() > 0);
            let pending: Vec<&ProcessGroup> = pending.collect();
            if pending.is_empty() {
                return Ok(());
            }
            let left = deadline.remaining();
            if left.is_zero() {
                let named = pending
                    .iter()
                    .map(|group| format!("{} in {}", group.pending(), group.name()));
                let named: Vec<String> = named.collect();
                let message = format!(
                    "operations are still pending after {}: {}",
                    text::duration(timeout),
                    named.join(", ")
                );
                let oldest = self.oldest_operation(&pending).unwrap_or_default();
                return Err(Error::new(ErrorKind::Timeout, message).with_more(&oldest));
            }
            let waits = self.shared.watch.waits();
            waiting.get_or_insert_with(|| waits.begin(RuntimeWait::Pending));
            std::thread::sleep(POLL_INTERVAL.min(left));
        }
    }

    /// The counter of the program's waits of this name, for example of waits for a data loader; made if there is none.
    /// The rank's endpoint shows it next to the runtime's own (`GET /waits`, and as metrics `GET /metrics`). A world
    /// that is [recreated](World::grow) has new counters.
    ///
    /// # Errors
    /// `InvalidArgument` if the name is not 1 to 64 lower-case letters, digits, `-`, `_` and `.`, or begins with
    /// `rcomm.`; or if there are 256 others.
    pub fn wait_counter(&self, name: &str) -> Result<WaitCounter> {
        self.shared.watch.waits().named(name)
    }

    /// How often and how long threads of this process have waited, and wait now: first in the runtime
    /// (`rcomm.rendezvous`, `rcomm.store`, `rcomm.work`, `rcomm.pending`, `rcomm.shutdown`), then in the program's own
    /// waits. `rcomm.work` counts waits for operations that were issued; what a blocking call took is in its record.
    pub fn waits(&self) -> Vec<WaitStatistics> {
        self.shared.watch.waits().statistics()
    }

    /// The first operation under way in these groups, as text; `None` if the record does not have it.
    fn oldest_operation(&self, groups: &[&ProcessGroup]) -> Option<String> {
        let record = self.snapshot();
        let entry = record.entries.iter().find(|entry| {
            let group = &record.groups[entry.group as usize].info;
            matches!(entry.state, EntryState::Scheduled | EntryState::Started)
                && groups.iter().any(|pending| pending.name() == group.name)
        })?;
        let seq = match entry.is_p2p {
            true => entry.p2p_seq_id,
            false => entry.collective_seq_id,
        };
        let age = record.identity.dump_time_ns - entry.time_created_ns;
        Some(format!(
            "the oldest is {} #{seq} on group {}, issued {} ago",
            entry.op,
            record.groups[entry.group as usize].info.name,
            text::duration(Duration::from_nanos(u64::try_from(age).unwrap_or(0)))
        ))
    }
}

impl WorldShared {
    /// The groups of this world that still exist on this rank, in order of creation, for a loop over them.
    pub(super) fn groups(&self) -> Held<Group> {
        let made = self.registry.lock();
        let mut made = made.unwrap_or_else(PoisonError::into_inner);
        made.retain(|group| group.strong_count() > 0);
        Held::of(&made)
    }

    /// Calls `body` with each group that still exists on this rank; returns how many there are.
    pub(super) fn each(&self, body: impl Fn(&ProcessGroup)) -> usize {
        let held = self.groups();
        let groups = held.iter().cloned().map(ProcessGroup::over);
        groups.for_each(|group| body(&group));
        held.len()
    }
}
