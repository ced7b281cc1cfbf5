//! Operations that all ranks that run the same program issue at the same point of it, and when a rank issued them.
//!
//! Collectives are compared between ranks by the family of the group and the sequence number; messages by their index
//! among the messages of the two ranks, or by the collective that they follow.

use crate::align::p2p::{Counterpart, Messages, peer_of};
use crate::align::record::{ANY, NONE, Op};
use crate::align::{Aligned, GroupIx, Lane, Presence, RecordIx, position, retiring_is_all};
use rcomm_recorder::model::OpType;

/// An operation that all ranks that run the same program issue at the same point of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ProgramEvent {
    /// The collective `seq` on the n-th group of a family; `call` is the call that most members issued, or `u32::MAX`
    /// if any call is meant.
    Collective {
        family: u32,
        nth: u32,
        seq: u32,
        call: u32,
    },
    /// The send or receive of a member.
    Message(Posted),
    /// The half that the peer posts to complete this message of a member.
    OtherHalf(Posted),
}

/// One half of a message, in numbers that mean the same on every rank: those of families, members and places in an
/// order, not those of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Posted {
    pub(crate) family: u32,
    pub(crate) nth: u32,
    /// The member that posts this half.
    pub(crate) member: u32,
    pub(crate) sends: bool,
    /// Member at the other end, [`ANY`], or [`NONE`] if the record names none.
    pub(crate) peer: u32,
    /// The index of the message among the rank's messages in this direction with that peer, or [`NONE`] if the record
    /// may lack earlier ones: then `after` locates it.
    pub(crate) index: u32,
    /// The newest collective that the rank issued before the message, in any group.
    pub(crate) after: Option<After>,
    pub(crate) p2p_seq: u32,
}

/// A collective, and the number of messages with the same direction and peer that the rank posted between it and the
/// message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct After {
    family: u32,
    nth: u32,
    seq: u32,
    since: u32,
}

impl Posted {
    /// The collective that the message follows; `None` if there is none.
    pub(crate) fn follows(self) -> Option<ProgramEvent> {
        let After {
            family, nth, seq, ..
        } = self.after?;
        Some(ProgramEvent::Collective {
            family,
            nth,
            seq,
            call: u32::MAX,
        })
    }
}

/// When a rank issued an operation, according to its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occurrence {
    /// Issued, but older than what its record holds.
    Lost,
    /// Issued: the position in its record's operations.
    At(u32),
    /// Not issued yet.
    Never,
}

/// A collective as an event; its group is numbered among those of its family in `record`.
pub(crate) fn collective(
    aligned: &Aligned<'_>,
    record: RecordIx,
    group: GroupIx,
    seq: u32,
) -> ProgramEvent {
    ProgramEvent::Collective {
        family: aligned.groups[group].family,
        nth: nth_of_family(aligned, record, group),
        seq,
        call: usual_call(aligned, group, seq).unwrap_or(u32::MAX),
    }
}

/// The other half of a recorded message as an event of the peer; `None` if the record does not name the peer, or has no
/// such group.
pub(crate) fn other_half(
    aligned: &Aligned<'_>,
    record: RecordIx,
    group: GroupIx,
    position: u32,
) -> Option<ProgramEvent> {
    let posted = posted(aligned, record, group, position)?;
    (posted.peer < ANY).then_some(ProgramEvent::OtherHalf(posted))
}

/// A recorded message as an event; `None` if the record has no such group.
pub(crate) fn message(
    aligned: &Aligned<'_>,
    record: RecordIx,
    group: GroupIx,
    position: u32,
) -> Option<ProgramEvent> {
    posted(aligned, record, group, position).map(ProgramEvent::Message)
}

/// A recorded send or receive; `None` if the record has no such group.
fn posted(
    aligned: &Aligned<'_>,
    record: RecordIx,
    group: GroupIx,
    position: u32,
) -> Option<Posted> {
    let op = aligned.op(record, position);
    let lane = aligned.lanes[record]
        .iter()
        .find(|lane| lane.group == group)?;
    let peer = other_end(aligned, lane, op);
    Some(Posted {
        family: aligned.groups[group].family,
        nth: nth_of_family(aligned, record, group),
        member: lane.member,
        sends: op.kind == OpType::Send,
        peer,
        index: index_in_pair(aligned, record, lane, position),
        after: newest_collective_before(aligned, record, lane, position),
        p2p_seq: op.p2p_seq,
    })
}

/// The member at the other end of a message; the recorded value if that names no member.
pub(crate) fn other_end(aligned: &Aligned<'_>, lane: &Lane, op: &Op) -> u32 {
    let members = aligned.groups[lane.group].ranks.len() as u32;
    peer_of(op, lane.member, members).unwrap_or(op.peer)
}

/// The newest collective before a message, in any group, and the number of messages with the same direction and peer
/// between the two.
fn newest_collective_before(
    aligned: &Aligned<'_>,
    record: RecordIx,
    lane: &Lane,
    position: u32,
) -> Option<After> {
    let mut newest: Option<(u32, &Lane)> = None;
    for other in &aligned.lanes[record] {
        let before = other
            .collectives
            .partition_point(|&collective| collective < position);
        if let Some(&collective) = before
            .checked_sub(1)
            .and_then(|index| other.collectives.get(index))
            && newest.is_none_or(|(known, _)| known < collective)
        {
            newest = Some((collective, other));
        }
    }
    let (collective, other) = newest?;
    let wanted = aligned.op(record, position);
    let since = lane.messages.iter().filter(|&&message| {
        let op = aligned.op(record, message);
        collective < message
            && message < position
            && op.kind == wanted.kind
            && op.peer == wanted.peer
    });
    Some(After {
        family: aligned.groups[other.group].family,
        nth: nth_of_family(aligned, record, other.group),
        seq: aligned.seq(record, collective),
        since: since.count() as u32,
    })
}

/// The call that most members of a group issued under a number; `None` if none recorded it.
pub(crate) fn usual_call(aligned: &Aligned<'_>, group: GroupIx, seq: u32) -> Option<u32> {
    let mut counts: Vec<(u32, usize)> = Vec::new();
    for member in 0..aligned.groups[group].ranks.len() {
        let Some((record, lane)) = aligned.lane(group, member) else {
            continue;
        };
        let Ok(index) = aligned.find(record, lane, seq) else {
            continue;
        };
        let call = aligned.op(record, lane.collectives[index]).call;
        match counts.iter_mut().find(|(known, _)| *known == call) {
            Some((_, count)) => *count += 1,
            None => counts.push((call, 1)),
        }
    }
    // Call numbers depend on the order of the files, so in a tie the text decides.
    let text = |call: u32| aligned.shared.calls.get(call).describe();
    counts
        .into_iter()
        .max_by(|a, b| (a.1, text(b.0)).cmp(&(b.1, text(a.0))))
        .map(|(call, _)| call)
}

/// When the rank of `record` issued the operation of an event. `None` if the record does not show it, or if the rank is
/// at another point of the program.
pub(crate) fn when(
    aligned: &Aligned<'_>,
    messages: &Messages,
    record: RecordIx,
    event: ProgramEvent,
) -> Option<Occurrence> {
    match event {
        ProgramEvent::Collective {
            family,
            nth,
            seq,
            call,
        } => {
            let Some(lane_index) = lane_of_family(aligned, record, family, nth) else {
                return has_not_used(aligned, record, family).then_some(Occurrence::Never);
            };
            let lane = &aligned.lanes[record][lane_index];
            match aligned.presence(lane.group, lane.member as usize, seq) {
                Presence::Issued(index) => {
                    let position = lane.collectives[index];
                    // With another operation under that number, this rank is at another point.
                    let same = call == u32::MAX
                        || aligned
                            .shared
                            .calls
                            .key(aligned.op(record, position).call)
                            .class
                            == aligned.shared.calls.key(call).class;
                    same.then_some(Occurrence::At(position))
                }
                Presence::Lost => Some(Occurrence::Lost),
                Presence::Absent => Some(Occurrence::Never),
                Presence::Unknown(_) => None,
            }
        }
        ProgramEvent::Message(posted) => {
            let lane_index = lane_of_family(aligned, record, posted.family, posted.nth)?;
            let lane = &aligned.lanes[record][lane_index];
            if lane.member != posted.member {
                return None;
            }
            when_posted(aligned, record, lane, posted)
        }
        ProgramEvent::OtherHalf(posted) => when_answered(aligned, messages, record, posted),
    }
}

/// Whether a rank has issued nothing on the only group of a family, although it is a member: its recorder learns of a
/// group with the group's first operation, and its record is whole.
fn has_not_used(aligned: &Aligned<'_>, record: RecordIx, family: u32) -> bool {
    let full_record = &aligned.records[record];
    let is_whole = !full_record.wrapped() && !full_record.cut && !full_record.only_active;
    // A large job has many groups: they are only searched for the few records to which this can apply.
    if !retiring_is_all(full_record.recorder) || !is_whole || aligned.lacks_newest(record).is_some()
    {
        return false;
    }
    let groups = aligned.groups.iter().enumerate();
    let mut of_family = groups.filter(|(_, group)| group.family == family);
    let (Some((index, group)), None) = (of_family.next(), of_family.next()) else {
        return false;
    };
    let lists = aligned.lanes[record].iter().any(|lane| lane.group == index);
    !lists && position(&group.ranks, full_record.rank).is_some()
}

/// When the peer of a message, whose record is `record`, posted the other half; `None` if that is unknown.
fn when_answered(
    aligned: &Aligned<'_>,
    messages: &Messages,
    record: RecordIx,
    posted: Posted,
) -> Option<Occurrence> {
    let Posted {
        member,
        peer,
        sends,
        ..
    } = posted;
    let lane_index = lane_of_family(aligned, record, posted.family, posted.nth)?;
    let lane = &aligned.lanes[record][lane_index];
    if lane.member != peer {
        return None;
    }
    let (there, other) = aligned.lane(lane.group, member as usize)?;
    let Occurrence::At(position) = when_posted(aligned, there, other, posted)? else {
        return None;
    };
    let ends = if sends {
        (member, peer)
    } else {
        (peer, member)
    };
    let pair = messages.pairs.get(&(lane.group, ends))?;
    let list = if sends { &pair.sends } else { &pair.receives };
    let index = list
        .binary_search_by_key(&position, |half| half.position)
        .ok()?;
    let half = if sends {
        messages.receive_of(pair, index)
    } else {
        messages.send_of(pair, index)
    };
    match half {
        Counterpart::Posted(half) => Some(Occurrence::At(half.position)),
        Counterpart::Lost => Some(Occurrence::Lost),
        Counterpart::Missing if aligned.lacks_newest(record).is_some() => None,
        Counterpart::Missing => Some(Occurrence::Never),
    }
}

/// The index of a message among those of the same rank, peer and direction; [`NONE`] if the record may lack earlier
/// ones.
fn index_in_pair(aligned: &Aligned<'_>, record: RecordIx, lane: &Lane, position: u32) -> u32 {
    let full_record = &aligned.records[record];
    if full_record.wrapped() || full_record.only_active {
        return NONE;
    }
    let wanted = aligned.op(record, position);
    let earlier = lane
        .messages
        .iter()
        .take_while(|&&message| message < position)
        .filter(|&&message| {
            let op = aligned.op(record, message);
            op.kind == wanted.kind && op.peer == wanted.peer
        });
    earlier.count() as u32
}

/// When the rank of `record` posted this half of a message itself; `None` if the record does not show it.
fn when_posted(
    aligned: &Aligned<'_>,
    record: RecordIx,
    lane: &Lane,
    posted: Posted,
) -> Option<Occurrence> {
    let full_record = &aligned.records[record];
    let is_like = |position: &u32| {
        let op = aligned.op(record, *position);
        op.kind.is_p2p()
            && (op.kind == OpType::Send) == posted.sends
            && other_end(aligned, lane, op) == posted.peer
    };
    let mut of_pair = lane.messages.iter().copied().filter(is_like);
    let found = if posted.index != NONE && !full_record.wrapped() && !full_record.only_active {
        of_pair.nth(posted.index as usize)
    } else {
        let after = posted.after?;
        let lane_index = lane_of_family(aligned, record, after.family, after.nth)?;
        let after_lane = &aligned.lanes[record][lane_index];
        match aligned.presence(after_lane.group, after_lane.member as usize, after.seq) {
            Presence::Issued(index) => {
                let from = after_lane.collectives[index];
                let found = of_pair
                    .filter(|&message| message > from)
                    .nth(after.since as usize);
                // A rank that had posted more or fewer messages by then is at another point of the program.
                let is_other = |&message: &u32| {
                    let seq = aligned.op(record, message).p2p_seq;
                    seq != posted.p2p_seq && seq != 0 && posted.p2p_seq != 0
                };
                if found.as_ref().is_some_and(is_other) {
                    return None;
                }
                found
            }
            // The record does not show which of its messages follow this collective.
            Presence::Lost | Presence::Unknown(_) => return None,
            Presence::Absent => None,
        }
    };
    match found {
        Some(position) => Some(Occurrence::At(position)),
        None => (aligned.lacks_newest(record).is_none()).then_some(Occurrence::Never),
    }
}

/// The index of a group among those of its family in which the record's rank is a member.
pub(crate) fn nth_of_family(aligned: &Aligned<'_>, record: RecordIx, group: GroupIx) -> u32 {
    let family = aligned.groups[group].family;
    let lanes = aligned.lanes[record].iter();
    lanes
        .take_while(|lane| lane.group != group)
        .filter(|lane| aligned.groups[lane.group].family == family && lane.member != NONE)
        .count() as u32
}

/// The index of the lane in which a record holds the `nth` group of a family; `None` if it has fewer.
pub(crate) fn lane_of_family(
    aligned: &Aligned<'_>,
    record: RecordIx,
    family: u32,
    nth: u32,
) -> Option<usize> {
    let lanes = aligned.lanes[record].iter().enumerate();
    lanes
        .filter(|(_, lane)| aligned.groups[lane.group].family == family && lane.member != NONE)
        .nth(nth as usize)
        .map(|(index, _)| index)
}
