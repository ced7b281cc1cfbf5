//! What a record shows about one collective, and whether the record was taken too early to show it.

use crate::align::membership::{GroupIx, RecordIx};
use crate::align::ran_on::ran_on_from;
use crate::align::record::{NONE, Op, retiring_is_all};
use crate::align::{Aligned, Lane};
use rcomm_recorder::publish::Recorder;

/// What a rank's record shows about one collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Recorded: index in the lane's collectives of the first entry with this number.
    Issued(usize),
    /// Issued, and no longer in the ring.
    Lost,
    /// The rank has not issued the collective.
    Absent,
    /// The rank's record does not show whether the rank issued it.
    Unknown(UnknownReason),
}

/// Why a record does not show a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum UnknownReason {
    /// No record that covers the group was read.
    NoRecord,
    /// The file was cut, and the missing part may have held the collective.
    Cut,
    /// The ring dropped the entries that would show it, or completed operations were left out of the dump.
    HistoryLost,
    /// The record was taken too early: by what other records show as completed, or by the times at which the records
    /// were taken and peers began to wait.
    Outdated,
}

/// How far the collectives of a group that need every member have provably completed, according to the two records that
/// show the newest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CompletedTo {
    newest: Option<(u32, RecordIx)>,
    second: Option<(u32, RecordIx)>,
}

impl CompletedTo {
    /// Whether a collective, or one after it, has provably completed.
    pub(crate) fn is_over(&self, seq: u32) -> bool {
        self.newest.is_some_and(|(to, _)| seq <= to)
    }

    /// The newest number that a record other than `except` shows as completed, and that record.
    fn by_others(&self, except: Option<RecordIx>) -> Option<(u32, RecordIx)> {
        let both = [self.newest, self.second].into_iter().flatten();
        let mut others = both.filter(|&(_, record)| Some(record) != except);
        others.next()
    }
}

impl Aligned<'_> {
    /// What a member's record shows about one collective of the group.
    pub(crate) fn presence(&self, group: GroupIx, member: usize, seq: u32) -> Presence {
        let rank = self.groups[group].ranks[member];
        let Some(record) = self.record_in(group, rank) else {
            return Presence::Unknown(UnknownReason::NoRecord);
        };
        let presence = match self.groups[group].lanes[member] {
            Some((record, lane)) => self.presence_in(record, lane, seq),
            None if self.records[record].cut => Presence::Unknown(UnknownReason::Cut),
            None if self.records[record].only_active && self.completes_together(group, seq) => {
                Presence::Absent
            }
            None if self.records[record].only_active => {
                Presence::Unknown(UnknownReason::HistoryLost)
            }
            None if self.records[record].wrapped() => self.by_peers(group, record, seq),
            None => Presence::Absent,
        };
        let is_over = self.is_over(group, seq);
        let ends_early = self.lacks_newest(record) == Some(UnknownReason::Outdated);
        if presence == Presence::Absent && (is_over || ends_early) {
            return Presence::Unknown(UnknownReason::Outdated);
        }
        presence
    }

    /// What a lane of a record shows about one collective.
    fn presence_in(&self, record: RecordIx, lane_index: usize, seq: u32) -> Presence {
        let lane = &self.lanes[record][lane_index];
        let full_record = &self.records[record];
        match self.find(record, lane, seq) {
            Ok(index) => return Presence::Issued(index),
            Err(index) if index < lane.collectives.len() => return Presence::Lost,
            Err(_) => {}
        }
        // The number is above every number in the lane.
        if full_record.cut {
            return Presence::Unknown(UnknownReason::Cut);
        }
        let status = full_record.groups[lane_index].status;
        if let Some(status) = status {
            let counts_collectives = match full_record.recorder {
                Recorder::Rcomm | Recorder::NcclProfiler => true,
                // `last_enqueued` is the number of the newest operation; of a message, among messages.
                Recorder::Nccl => self.ends_with_collective(lane),
                Recorder::Hook
                | Recorder::NativeGloo
                | Recorder::Torchcomms
                | Recorder::Unknown => false,
            };
            if status.last_enqueued < 0 && lane.collectives.is_empty() {
                return Presence::Absent;
            }
            if counts_collectives && status.last_enqueued >= 0 {
                return if status.last_enqueued < i64::from(seq) {
                    Presence::Absent
                } else {
                    Presence::Lost
                };
            }
        }
        if full_record.only_active {
            // A collective that no member can complete alone would still be active, so it was never issued.
            return if self.completes_together(lane.group, seq) {
                Presence::Absent
            } else {
                Presence::Unknown(UnknownReason::HistoryLost)
            };
        }
        if lane.collectives.is_empty() && full_record.wrapped() {
            return self.by_peers(lane.group, record, seq);
        }
        Presence::Absent
    }

    /// Whether the newest operation of a lane is a collective; of an empty lane, whether no member's record holds
    /// messages of the group.
    fn ends_with_collective(&self, lane: &Lane) -> bool {
        match (lane.collectives.last(), lane.messages.last()) {
            (collective, Some(message)) => collective > Some(message),
            (Some(_), None) => true,
            (None, None) => {
                let mut lanes = self.groups[lane.group].lanes.iter().flatten();
                lanes.all(|&(record, lane)| self.lanes[record][lane].messages.is_empty())
            }
        }
    }

    /// The presence of a collective in a group of which a wrapped ring holds nothing: absent if a peer issued it after
    /// a collective that both issued and that the ring still holds; else unknown.
    pub(super) fn by_peers(&self, group: GroupIx, record: RecordIx, seq: u32) -> Presence {
        // At most this many peers of each group are compared, which bounds the time in large groups.
        const MAX_PEERS: usize = 16;
        let is_after_common = self.lanes[record].iter().any(|lane| {
            let Some(&oldest) = lane.collectives.first() else {
                return false;
            };
            let oldest = self.seq(record, oldest);
            let both_issued = |peer_lane: &Lane, peer: RecordIx| {
                let theirs = self.seq(peer, *peer_lane.collectives.first()?);
                let seq = oldest.max(theirs);
                self.find(record, lane, seq).ok().map(|_| seq)
            };
            let peers = self.groups[lane.group].lanes.iter().flatten();
            let mut peers = peers.filter(|&&(peer, _)| peer != record).take(MAX_PEERS);
            peers.any(|&(peer, lane_index)| {
                let peer_lane = &self.lanes[peer][lane_index];
                let issued = self.lanes[peer].iter().find(|lane| lane.group == group);
                let position = |lane: &Lane, seq| {
                    let index = self.find(peer, lane, seq).ok()?;
                    Some(lane.collectives[index])
                };
                let issued = issued.and_then(|lane| position(lane, seq));
                let both = both_issued(peer_lane, peer).and_then(|seq| position(peer_lane, seq));
                both.is_some_and(|both| issued.is_some_and(|issued| both < issued))
            })
        });
        if is_after_common {
            Presence::Absent
        } else {
            Presence::Unknown(UnknownReason::HistoryLost)
        }
    }

    /// Whether this collective needs every member and no member that recorded it saw it complete; false if none
    /// recorded it.
    fn completes_together(&self, group: GroupIx, seq: u32) -> bool {
        let lanes = self.groups[group].lanes.iter().flatten();
        let mut entries = lanes.filter_map(|&(record, lane)| {
            let lane = &self.lanes[record][lane];
            let index = self.find(record, lane, seq).ok()?;
            Some(self.op(record, lane.collectives[index]))
        });
        let waits = |op: &Op| op.kind.needs_all_members() && !op.completed();
        entries.next().is_some_and(waits) && entries.all(waits)
    }

    /// How far the members of a group have provably completed: records show a collective as completed, or a rank
    /// continued for several rounds after one that is over.
    pub(super) fn proven_completion(&self, group: GroupIx) -> CompletedTo {
        let mut completed = CompletedTo::default();
        for &(record, lane) in self.groups[group].lanes.iter().flatten() {
            let lane = &self.lanes[record][lane];
            let full_record = &self.records[record];
            let found = if retiring_is_all(full_record.recorder) {
                ran_on_from(self.shared, full_record, lane)
            } else {
                let mut done = lane.collectives[..lane.pending_from].iter().rev().copied();
                done.find(|&position| {
                    let op = self.op(record, position);
                    op.completed() && op.kind.needs_all_members()
                })
            };
            let found = found.map(|position| (self.seq(record, position), record));
            if found > completed.newest {
                completed.second = completed.newest;
                completed.newest = found;
            } else {
                completed.second = completed.second.max(found);
            }
        }
        completed
    }

    /// Whether a collective that needs every member has provably completed for one of them, or a later one has.
    pub(crate) fn is_over(&self, group: GroupIx, seq: u32) -> bool {
        self.completed_to[group].is_over(seq)
    }

    /// Whether a collective that is pending in a record has completed since: the record was taken too early, and others
    /// show it.
    pub(crate) fn is_over_since(&self, record: RecordIx, group: GroupIx, seq: u32) -> bool {
        self.lacks_newest(record) == Some(UnknownReason::Outdated) && self.is_over(group, seq)
    }

    /// The records that were taken too early and in which only `retired` shows that an operation is over. Their peers
    /// may have timed out in their newest operations.
    pub(crate) fn early_and_vague(&self) -> impl Iterator<Item = RecordIx> + '_ {
        (0..self.records.len()).filter(|&record| {
            retiring_is_all(self.records[record].recorder)
                && self.lacks_newest(record) == Some(UnknownReason::Outdated)
        })
    }

    /// Whether another record shows that the rank continued after its record was taken at `taken_ns`, common time: a
    /// collective that needs all members completed only after that time.
    pub(super) fn went_on_after(&self, record: RecordIx, taken_ns: i64) -> bool {
        self.lanes[record].iter().any(|lane| {
            let others = self.completed_to[lane.group].by_others(Some(record));
            let Some((seq, other)) = others.filter(|_| lane.member != NONE) else {
                return false;
            };
            let mut theirs = self.lanes[other].iter();
            let there = theirs.find(|there| there.group == lane.group);
            let op = there.and_then(|there| {
                let index = self.find(other, there, seq).ok()?;
                Some(self.status_op(other, there, index))
            });
            op.is_some_and(|op| {
                let ended_ns = op.completed_ns().unwrap_or(op.created_ns);
                ended_ns.saturating_sub(self.offsets_ns[other]) > taken_ns
            })
        })
    }

    /// Whether other records show that this one was taken too early: they show collectives as completed that it lacks
    /// or shows as pending. What it lacks then proves nothing. The record `except` is ignored.
    ///
    /// False for a record that states when it was taken, which is judged by that time
    /// ([`went_on_after`](Self::went_on_after)), and for one from which completed operations were left out. False also
    /// for the ring of a stopped process, which lacks nothing: an operation in which the process had done its part may
    /// complete for the others after the stop.
    pub(crate) fn ends_before_its_peers(&self, record: RecordIx, except: Option<RecordIx>) -> bool {
        let full_record = &self.records[record];
        if full_record.identity.dump_time_ns > 0
            || full_record.only_active
            || full_record.stop().is_some()
        {
            return false;
        }
        self.lanes[record].iter().any(|lane| {
            let shown = match (
                lane.collectives.get(lane.pending_from),
                lane.collectives.last(),
            ) {
                (Some(&pending), _) => self.seq(record, pending).saturating_sub(1),
                (None, Some(&newest)) => self.seq(record, newest),
                (None, None) if full_record.wrapped() => return false,
                (None, None) => 0,
            };
            let others = self.completed_to[lane.group].by_others(except);
            lane.member != NONE && others.is_some_and(|(seq, _)| seq > shown)
        })
    }
}
