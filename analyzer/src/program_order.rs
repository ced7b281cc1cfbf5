//! In which order the program does things, as the ranks' own records show it.
//!
//! Ranks of one job mostly run one program: what rank 3 does on its `tp` group, rank 5 does on its own.
//! So an operation is compared between ranks by the part that its group plays (its family) and its
//! sequence number, and a question such as "does `tp` #95 come before `world` #3?" is put to all ranks
//! that have issued one of them. This is what tells the odd rank in a wait cycle, and which of several
//! things a silent rank would have done next.

use crate::align::{Aligned, GroupIx, Lane, Presence, RecordIx};
use crate::p2p::{Messages, Other, peer_of};
use crate::record::NONE;
use rcomm_recorder::model::OpType;

/// Something that ranks of one program do at the same point of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Event {
    /// The collective `seq` on the n-th group of a family.
    Collective {
        family: u32,
        nth: u32,
        seq: u32,
        call: u32,
    },
    /// The send or receive that this member counts as `p2p_seq`.
    Message {
        family: u32,
        nth: u32,
        member: u32,
        sends: bool,
        peer: u32,
        /// Its place among the rank's messages to or from that peer, or [`NONE`] where the ring has
        /// wrapped: then its `p2p_seq` tells.
        at: u32,
        p2p_seq: u32,
    },
    /// What `peer` posts so that this message of `member` can complete.
    OtherHalf {
        family: u32,
        nth: u32,
        member: u32,
        sends: bool,
        peer: u32,
        /// Its place among the rank's messages to or from that peer, or [`NONE`] where the ring has
        /// wrapped: then its `p2p_seq` tells.
        at: u32,
        p2p_seq: u32,
    },
}

/// When a rank did it, as its record tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// Before its window.
    Lost,
    /// Position in its operations.
    At(u32),
    /// Not yet.
    Never,
}

/// How many ranks put one of two events first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Votes {
    pub(crate) first: usize,
    pub(crate) second: usize,
}

/// The event of a collective, from the point of view of a member.
pub(crate) fn collective(
    aligned: &Aligned<'_>,
    record: RecordIx,
    group: GroupIx,
    seq: u32,
) -> Event {
    Event::Collective {
        family: aligned.groups[group].family,
        nth: nth_of_family(aligned, record, group),
        seq,
        call: usual_call(aligned, group, seq).unwrap_or(u32::MAX),
    }
}

/// The other half of a message that a member has recorded, as an event of the peer.
pub(crate) fn other_half(
    aligned: &Aligned<'_>,
    record: RecordIx,
    group: GroupIx,
    position: u32,
) -> Option<Event> {
    let op = aligned.op(record, position);
    let lane = aligned.lanes[record]
        .iter()
        .find(|lane| lane.group == group)?;
    let members = aligned.groups[group].ranks.len() as u32;
    Some(Event::OtherHalf {
        family: aligned.groups[group].family,
        nth: nth_of_family(aligned, record, group),
        member: lane.member,
        peer: peer_of(op, lane.member, members)?,
        sends: op.kind == OpType::Send,
        at: place_in_pair(aligned, record, lane, position),
        p2p_seq: op.p2p_seq,
    })
}

/// The event of a message that a member has recorded.
pub(crate) fn message(
    aligned: &Aligned<'_>,
    record: RecordIx,
    group: GroupIx,
    position: u32,
) -> Event {
    let op = aligned.op(record, position);
    let lane = aligned.lanes[record]
        .iter()
        .find(|lane| lane.group == group);
    Event::Message {
        family: aligned.groups[group].family,
        nth: nth_of_family(aligned, record, group),
        member: lane.map_or(u32::MAX, |lane| lane.member),
        sends: op.kind == OpType::Send,
        peer: op.peer,
        at: lane.map_or(NONE, |lane| place_in_pair(aligned, record, lane, position)),
        p2p_seq: op.p2p_seq,
    }
}

/// What most members of a group issued under a number.
pub(crate) fn usual_call(aligned: &Aligned<'_>, group: GroupIx, seq: u32) -> Option<u32> {
    let mut counts: Vec<(u32, usize)> = Vec::new();
    for member in 0..aligned.groups[group].ranks.len() {
        let Some((record, lane)) = aligned.lane(group, member) else {
            continue;
        };
        let Ok(at) = aligned.find(record, lane, seq) else {
            continue;
        };
        let call = aligned.op(record, lane.collectives[at]).call;
        match counts.iter_mut().find(|(known, _)| *known == call) {
            Some((_, count)) => *count += 1,
            None => counts.push((call, 1)),
        }
    }
    // Among equals the lesser number would depend on the order of files: the text decides.
    let text = |call: u32| aligned.shared.calls.get(call).describe();
    counts
        .into_iter()
        .max_by(|a, b| (a.1, text(b.0)).cmp(&(b.1, text(a.0))))
        .map(|(call, _)| call)
}

/// Asks all ranks that are at the same point of the program as `like` which of two events they put
/// first.
///
/// A rank is not at the same point if it had issued another number of the first's family when it
/// issued the collective before the second (stages of a pipeline may have layers of their own). Where
/// the ring has dropped what would tell, a rank is asked only if nobody at the same point answers.
pub(crate) fn ask(
    aligned: &Aligned<'_>,
    messages: &Messages,
    like: RecordIx,
    first: Event,
    second: Event,
) -> Votes {
    let (mut sure, mut unsure) = (Votes::default(), Votes::default());
    let point = point_before(aligned, like, first, second);
    for record in 0..aligned.records.len() {
        let votes = match (point, point_before(aligned, record, first, second)) {
            (Some(point), Some(other)) if point != other => continue,
            (Some(_), None) => &mut unsure,
            _ => &mut sure,
        };
        let (Some(a), Some(b)) = (
            when(aligned, messages, record, first),
            when(aligned, messages, record, second),
        ) else {
            continue;
        };
        match (a, b) {
            (When::At(a), When::At(b)) if a < b => votes.first += 1,
            (When::At(a), When::At(b)) if a > b => votes.second += 1,
            (When::Lost, When::At(_) | When::Never) | (When::At(_), When::Never) => {
                votes.first += 1
            }
            (When::At(_) | When::Never, When::Lost) | (When::Never, When::At(_)) => {
                votes.second += 1
            }
            _ => {}
        }
    }
    if sure == Votes::default() {
        unsure
    } else {
        sure
    }
}

/// What a rank's own past says of the order of two collectives, where it is regular: how many of one
/// family there were between two of the other, the same number each time.
///
/// `Some(true)`: the first comes before the second.
pub(crate) fn past(
    aligned: &Aligned<'_>,
    record: RecordIx,
    first: Event,
    second: Event,
) -> Option<bool> {
    let one = expected_before(aligned, record, first, second).map(|count| seq_of(second) > count);
    let other = expected_before(aligned, record, second, first).map(|count| seq_of(first) <= count);
    match (one, other) {
        (Some(a), Some(b)) if a != b => None,
        (a, b) => a.or(b),
    }
}

fn seq_of(event: Event) -> u32 {
    match event {
        Event::Collective { seq, .. } => seq,
        Event::Message { p2p_seq, .. } | Event::OtherHalf { p2p_seq, .. } => p2p_seq,
    }
}

/// How many of the second's family should have been issued when the first comes, by the rhythm of the
/// ones before the first.
fn expected_before(
    aligned: &Aligned<'_>,
    record: RecordIx,
    first: Event,
    second: Event,
) -> Option<u32> {
    const INTERVALS: u32 = 3;
    let (Event::Collective { seq, .. }, Event::Collective { .. }) = (first, second) else {
        return None;
    };
    let mut counts = Vec::new();
    for back in 0..=INTERVALS {
        let Event::Collective {
            family, nth, call, ..
        } = first
        else {
            return None;
        };
        let seq = seq.checked_sub(back)?;
        let before = Event::Collective {
            family,
            nth,
            seq: seq.max(1),
            call,
        };
        // The count when number `seq - 1` was issued.
        match point_before(aligned, record, second, before) {
            Some(count) => counts.push(count),
            None => break,
        }
    }
    let intervals: Vec<u32> = counts
        .windows(2)
        .filter_map(|pair| pair[0].checked_sub(pair[1]))
        .collect();
    let &rhythm = intervals.first()?;
    (intervals.len() >= 2 && rhythm > 0 && intervals.iter().all(|&n| n == rhythm))
        .then(|| counts[0] + rhythm)
}

/// How far the first event's lane was when the collective before the second event was issued.
fn point_before(
    aligned: &Aligned<'_>,
    record: RecordIx,
    first: Event,
    second: Event,
) -> Option<u32> {
    let (
        Event::Collective {
            family: a,
            nth: nth_a,
            ..
        },
        Event::Collective {
            family: b,
            nth: nth_b,
            seq,
            ..
        },
    ) = (first, second)
    else {
        return None;
    };
    let counted = &aligned.lanes[record][lane_of_family(aligned, record, a, nth_a)?];
    let lane = &aligned.lanes[record][lane_of_family(aligned, record, b, nth_b)?];
    let at = aligned.find(record, lane, seq.checked_sub(1)?).ok()?;
    let position = lane.collectives[at];
    let before = counted.collectives.partition_point(|&at| at < position);
    let newest = counted.collectives.get(before.checked_sub(1)?)?;
    Some(aligned.seq(record, *newest))
}

fn when(
    aligned: &Aligned<'_>,
    messages: &Messages,
    record: RecordIx,
    event: Event,
) -> Option<When> {
    match event {
        Event::Collective {
            family,
            nth,
            seq,
            call,
        } => {
            let lane_at = lane_of_family(aligned, record, family, nth)?;
            let lane = &aligned.lanes[record][lane_at];
            match aligned.presence(lane.group, lane.member as usize, seq) {
                Presence::Issued(at) => {
                    let position = lane.collectives[at];
                    // Another operation under that number: this rank is at another point.
                    let same = call == u32::MAX
                        || aligned
                            .shared
                            .calls
                            .key(aligned.op(record, position).call)
                            .class
                            == aligned.shared.calls.key(call).class;
                    same.then_some(When::At(position))
                }
                Presence::Lost => Some(When::Lost),
                Presence::Absent => Some(When::Never),
                Presence::Unknown(_) => None,
            }
        }
        Event::Message {
            family,
            nth,
            member,
            sends,
            peer,
            at,
            p2p_seq,
        } => {
            let lane_at = lane_of_family(aligned, record, family, nth)?;
            let lane = &aligned.lanes[record][lane_at];
            if lane.member != member {
                return None;
            }
            when_message(aligned, record, lane, sends, peer, (at, p2p_seq))
        }
        Event::OtherHalf {
            family,
            nth,
            member,
            sends,
            peer,
            at,
            p2p_seq,
        } => {
            let lane_at = lane_of_family(aligned, record, family, nth)?;
            let lane = &aligned.lanes[record][lane_at];
            if lane.member != peer {
                return None;
            }
            let (there, other) = aligned.lane(lane.group, member as usize)?;
            let When::At(position) =
                when_message(aligned, there, other, sends, peer, (at, p2p_seq))?
            else {
                return None;
            };
            let ends = if sends {
                (member, peer)
            } else {
                (peer, member)
            };
            let pair = messages.pairs.get(&(lane.group, ends))?;
            let list = if sends { &pair.sends } else { &pair.receives };
            let at = list
                .binary_search_by_key(&position, |half| half.position)
                .ok()?;
            let half = if sends {
                messages.receive_of(pair, at)
            } else {
                messages.send_of(pair, at)
            };
            match half {
                Other::Posted(half) => Some(When::At(half.position)),
                Other::Lost => Some(When::Lost),
                Other::Missing if aligned.records[record].cut => None,
                Other::Missing => Some(When::Never),
            }
        }
    }
}

/// The place of a message among those of its rank, peer and direction.
fn place_in_pair(aligned: &Aligned<'_>, record: RecordIx, lane: &Lane, position: u32) -> u32 {
    let whole = &aligned.records[record];
    if whole.wrapped() || whole.only_active {
        return NONE;
    }
    let wanted = aligned.op(record, position);
    let earlier = lane
        .messages
        .iter()
        .take_while(|&&at| at < position)
        .filter(|&&at| {
            let op = aligned.op(record, at);
            op.kind == wanted.kind && op.peer == wanted.peer
        });
    earlier.count() as u32
}

fn when_message(
    aligned: &Aligned<'_>,
    record: RecordIx,
    lane: &Lane,
    sends: bool,
    peer: u32,
    (place, p2p_seq): (u32, u32),
) -> Option<When> {
    let members = aligned.groups[lane.group].ranks.len() as u32;
    if place != NONE && !aligned.records[record].wrapped() && !aligned.records[record].only_active {
        let mut of_pair = lane.messages.iter().copied().filter(|&at| {
            let op = aligned.op(record, at);
            op.kind.is_p2p()
                && (op.kind == OpType::Send) == sends
                && peer_of(op, lane.member, members) == Some(peer)
        });
        return match of_pair.nth(place as usize) {
            Some(at) => Some(When::At(at)),
            None => (!aligned.records[record].cut).then_some(When::Never),
        };
    }
    let found = lane.messages.iter().copied().find(|&at| {
        let op = aligned.op(record, at);
        op.p2p_seq == p2p_seq
            && op.kind.is_p2p()
            && (op.kind == OpType::Send) == sends
            && peer_of(op, lane.member, members) == Some(peer)
    });
    if let Some(at) = found {
        return Some(When::At(at));
    }
    let oldest = lane
        .messages
        .first()
        .map(|&at| aligned.op(record, at).p2p_seq);
    let newest = lane
        .messages
        .last()
        .map(|&at| aligned.op(record, at).p2p_seq);
    match (oldest, newest) {
        (Some(oldest), _) if p2p_seq < oldest => Some(When::Lost),
        (_, Some(newest)) if p2p_seq > newest && !aligned.records[record].cut => Some(When::Never),
        (None, None) if !aligned.records[record].wrapped() => Some(When::Never),
        // Another kind of message under that number: at another point of the program.
        _ => None,
    }
}

fn nth_of_family(aligned: &Aligned<'_>, record: RecordIx, group: GroupIx) -> u32 {
    let family = aligned.groups[group].family;
    let lanes = aligned.lanes[record].iter();
    lanes
        .take_while(|lane| lane.group != group)
        .filter(|lane| aligned.groups[lane.group].family == family)
        .count() as u32
}

fn lane_of_family(aligned: &Aligned<'_>, record: RecordIx, family: u32, nth: u32) -> Option<usize> {
    let lanes = aligned.lanes[record].iter().enumerate();
    lanes
        .filter(|(_, lane)| aligned.groups[lane.group].family == family && lane.member != NONE)
        .nth(nth as usize)
        .map(|(at, _)| at)
}
