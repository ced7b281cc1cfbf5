//! Keeps a copy of one rank's record current: [`EndpointFollower`] requests changes from the rank's endpoint, and
//! [`FollowedDump`] applies changes, those of an endpoint or of a ring.

use super::{Dump, DumpAnswer, EndpointClient, ReadProblem, ThreadInfo};
use crate::error::Result;
use crate::model::{Entry, Frame, GroupId, Signature, Stack};
use std::collections::HashMap;
use std::hash::Hash;
use std::time::Instant;

/// Follows one endpoint. The first answer is the whole record, later ones contain the changes.
#[derive(Debug)]
pub struct EndpointFollower {
    client: EndpointClient,
    /// The number of the last answer; `None` if the next request is for the whole record.
    change: Option<u64>,
    record: FollowedDump,
}

impl EndpointFollower {
    /// Follows the endpoint of this client.
    pub fn new(client: EndpointClient) -> Self {
        Self {
            client,
            change: None,
            record: FollowedDump::default(),
        }
    }

    /// The endpoint's client.
    pub fn client(&self) -> &EndpointClient {
        &self.client
    }

    /// Sends one request and updates the record; returns what was lost in reading the answer. Blocks until the deadline
    /// at the latest.
    ///
    /// # Errors
    /// Those of [`EndpointClient::dump`]. The record is then unchanged, and the next call requests all changes since
    /// the last answer.
    pub fn poll(&mut self, deadline: Instant) -> Result<Vec<ReadProblem>> {
        let answer = self.client.dump(self.change, deadline)?;
        let DumpAnswer {
            dump,
            problems,
            change,
            partial,
            entries,
        } = answer;
        // If a part of the answer could not be read, the next request is for the whole record: otherwise that
        // part would stay missing.
        self.change = change.filter(|_| problems.is_empty());
        if partial {
            self.record.take_in(dump, entries);
            if self.record.is_overgrown() {
                self.change = None;
            }
        } else {
            self.record = FollowedDump::of(dump);
        }
        Ok(problems)
    }

    /// The record as of the last answer; empty before the first.
    pub fn dump(&self) -> &Dump {
        &self.record.dump
    }
}

/// A copy of one rank's record: starts with the whole record and applies changes.
#[derive(Debug, Default)]
pub struct FollowedDump {
    dump: Dump,
    // The index of each value in the dump's table of the same name.
    signatures: HashMap<Signature, u32>,
    frames: HashMap<Frame, u32>,
    stacks: HashMap<Stack, u32>,
    threads: HashMap<ThreadInfo, u32>,
}

impl FollowedDump {
    /// A copy that starts with this whole record.
    pub fn of(dump: Dump) -> Self {
        Self {
            signatures: by_value(&dump.signatures),
            frames: by_value(&dump.frames),
            stacks: by_value(&dump.stacks),
            threads: by_value(&dump.threads),
            dump,
        }
    }

    /// The current record.
    pub fn dump(&self) -> &Dump {
        &self.dump
    }

    pub(super) fn dump_mut(&mut self) -> &mut Dump {
        &mut self.dump
    }

    /// Applies changes. Operations that have left a ring of `ring_entries` slots are removed; none are if it is `None`.
    pub fn take_in(&mut self, newer: Dump, ring_entries: Option<u64>) {
        let Dump {
            version,
            recorder,
            identity,
            status,
            comm_lib_version,
            groups,
            signatures,
            frames,
            stacks,
            threads,
            entries,
            nccl_comm_state,
            failures,
            closed_ns,
            peers,
            processor_wait,
            reducer_steps,
        } = newer;
        let dump = &mut self.dump;
        (dump.version, dump.recorder) = (version, recorder);
        (dump.identity, dump.status) = (identity, status);
        (dump.comm_lib_version, dump.nccl_comm_state) = (comm_lib_version, nccl_comm_state);
        (dump.failures, dump.closed_ns) = (failures, closed_ns);
        (dump.peers, dump.processor_wait) = (peers, processor_wait);
        dump.reducer_steps = reducer_steps;
        let mut known: HashMap<GroupId, u32> = (0..)
            .zip(&dump.groups)
            .map(|(index, group)| (group.info.id, index))
            .collect();
        let mut group_at = Vec::new();
        for group in groups {
            let index = *known
                .entry(group.info.id)
                .or_insert(dump.groups.len() as u32);
            match dump.groups.get_mut(index as usize) {
                Some(old) => *old = group,
                None => dump.groups.push(group),
            }
            group_at.push(index);
        }
        let signature_at = merge(&mut dump.signatures, &mut self.signatures, signatures);
        let frame_at = merge(&mut dump.frames, &mut self.frames, frames);
        let stacks = stacks.into_iter().map(|stack| {
            let frames = stack.into_iter().map(|frame| frame_at[frame as usize]);
            frames.collect()
        });
        let stack_at = merge(&mut dump.stacks, &mut self.stacks, stacks);
        let thread_at = merge(&mut dump.threads, &mut self.threads, threads);
        for entry in entries {
            let entry = Entry {
                group: group_at[entry.group as usize],
                signature: signature_at[entry.signature as usize],
                stack: entry.stack.map(|stack| stack_at[stack as usize]),
                thread: entry.thread.map(|thread| thread_at[thread as usize]),
                ..entry
            };
            let id = entry.record_id;
            match dump.entries.binary_search_by_key(&id, |old| old.record_id) {
                Ok(index) => dump.entries[index] = entry,
                Err(index) => dump.entries.insert(index, entry),
            }
        }
        let newest = dump.entries.last().map_or(0, |entry| entry.record_id);
        if let Some(ring_entries) = ring_entries {
            let oldest = newest.saturating_sub(ring_entries);
            let removed = dump
                .entries
                .partition_point(|entry| entry.record_id <= oldest);
            dump.entries.drain(..removed);
        }
    }

    /// Whether there are many more signatures than entries, since most belong to entries that were removed: reading the
    /// whole record again gives a smaller one.
    pub fn is_overgrown(&self) -> bool {
        self.dump.signatures.len() > 1_024 + 2 * self.dump.entries.len()
    }
}

/// The index of each value of a table.
fn by_value<T: Clone + Eq + Hash>(table: &[T]) -> HashMap<T, u32> {
    table.iter().cloned().zip(0..).collect()
}

/// Adds the values that are new to a table, and returns the index of each value.
fn merge<T: Clone + Eq + Hash>(
    table: &mut Vec<T>,
    known: &mut HashMap<T, u32>,
    values: impl IntoIterator<Item = T>,
) -> Vec<u32> {
    let index_of = |value: T| {
        *known.entry(value).or_insert_with_key(|value| {
            table.push(value.clone());
            (table.len() - 1) as u32
        })
    };
    values.into_iter().map(index_of).collect()
}
