//! The order in which the program issues operations, according to the ranks' own records.
//!
//! The ranks of a job mostly run one program: rank 5 does the same on its `tp` group as rank 3 on its own. So all ranks
//! that have issued one of two operations vote on a question such as "does `tp` #95 come before `world` #3?". The votes
//! identify the rank that deviates in a wait cycle, and which of several operations a silent rank would have issued
//! next.

use crate::align::event::{Occurrence, Posted, ProgramEvent, lane_of_family, when};
use crate::align::p2p::Messages;
use crate::align::{Aligned, RecordIx};
use crate::judge::programs::Point;

/// The number of ranks that issued each of two events first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Votes {
    pub(crate) first: usize,
    pub(crate) second: usize,
    /// Where a rank that issued the first event first did so; `None` if no record holds such a point.
    pub(crate) shown_by: Option<Point>,
}

/// Counts which of two events the ranks at the same point of the program as `reference` issued first.
///
/// A rank is not at the same point if it had issued another number of collectives in the family of `first` when it
/// issued the collective before `second` (stages of a pipeline may have their own layers). A rank whose ring has
/// dropped these entries counts only if no rank at the same point can decide.
pub(crate) fn vote(
    aligned: &Aligned<'_>,
    messages: &Messages,
    reference: RecordIx,
    first: ProgramEvent,
    second: ProgramEvent,
) -> Votes {
    let (mut of_same_point, mut of_unknown_point) = (Votes::default(), Votes::default());
    let point = point_before(aligned, reference, first, second);
    let mut next = 0;
    while next < aligned.records.len() {
        // A process may have several recorders, and each may hold one of the two events.
        let of_rank = aligned.records_of(aligned.records[next].rank);
        next = of_rank.end;
        let other_point = of_rank
            .clone()
            .find_map(|record| point_before(aligned, record, first, second));
        let votes = match (point, other_point) {
            (Some(point), Some(other)) if point != other => continue,
            (Some(_), None) => &mut of_unknown_point,
            _ => &mut of_same_point,
        };
        let occurrences = [first, second].map(|event| {
            let mut of_rank = of_rank.clone();
            of_rank.find_map(|record| Some((record, when(aligned, messages, record, event)?)))
        });
        let [
            Some((first_record, first_place)),
            Some((second_record, second_place)),
        ] = occurrences
        else {
            continue;
        };
        let before = |(one, a): (RecordIx, u32), (other, b): (RecordIx, u32)| {
            let created = |record: RecordIx, position: u32| aligned.op(record, position).created_ns;
            if one == other {
                a < b
            } else {
                created(one, a) < created(other, b)
            }
        };
        let is_first = match (first_place, second_place) {
            (Occurrence::At(a), Occurrence::At(b))
                if before((first_record, a), (second_record, b)) =>
            {
                true
            }
            (Occurrence::At(a), Occurrence::At(b))
                if before((second_record, b), (first_record, a)) =>
            {
                false
            }
            (Occurrence::Lost, Occurrence::At(_) | Occurrence::Never)
            | (Occurrence::At(_), Occurrence::Never) => true,
            (Occurrence::At(_) | Occurrence::Never, Occurrence::Lost)
            | (Occurrence::Never, Occurrence::At(_)) => false,
            _ => continue,
        };
        if !is_first {
            votes.second += 1;
            continue;
        }
        votes.first += 1;
        if let (Occurrence::At(position), None) = (first_place, votes.shown_by) {
            let record = first_record;
            votes.shown_by = Some(Point { record, position });
        }
    }
    if of_same_point == Votes::default() {
        of_unknown_point
    } else {
        of_same_point
    }
}

/// The order of two collectives by a rank's own past, if it is regular: between two collectives of one family it issued
/// the same number of the other each time.
///
/// `Some(true)`: the first comes before the second. `None`: the past is not regular, or an event is of a message.
pub(crate) fn past(
    aligned: &Aligned<'_>,
    record: RecordIx,
    first: ProgramEvent,
    second: ProgramEvent,
) -> Option<bool> {
    let by_first =
        expected_before(aligned, record, first, second).map(|count| seq_of(second) > count);
    let by_second =
        expected_before(aligned, record, second, first).map(|count| seq_of(first) <= count);
    match (by_first, by_second) {
        (Some(a), Some(b)) if a != b => None,
        (a, b) => a.or(b),
    }
}

/// The sequence number of an event.
fn seq_of(event: ProgramEvent) -> u32 {
    match event {
        ProgramEvent::Collective { seq, .. } => seq,
        ProgramEvent::Message(Posted { p2p_seq, .. })
        | ProgramEvent::OtherHalf(Posted { p2p_seq, .. }) => p2p_seq,
    }
}

/// The number of the second's family that is expected when the first is issued, extrapolated from the collectives
/// before the first; `None` if these are not regular.
fn expected_before(
    aligned: &Aligned<'_>,
    record: RecordIx,
    first: ProgramEvent,
    second: ProgramEvent,
) -> Option<u32> {
    // At most this many intervals between collectives of the first's family are compared.
    const INTERVALS: u32 = 3;
    let (ProgramEvent::Collective { seq, .. }, ProgramEvent::Collective { .. }) = (first, second)
    else {
        return None;
    };
    let mut counts = Vec::new();
    for back in 0..=INTERVALS {
        let ProgramEvent::Collective {
            family, nth, call, ..
        } = first
        else {
            return None;
        };
        let seq = seq.checked_sub(back)?;
        let earlier = ProgramEvent::Collective {
            family,
            nth,
            seq: seq.max(1),
            call,
        };
        // The count when collective `seq - 1` was issued.
        match point_before(aligned, record, second, earlier) {
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

/// The newest number in the first event's lane when the collective before the second event was issued; `None` if the
/// record does not show it.
fn point_before(
    aligned: &Aligned<'_>,
    record: RecordIx,
    first: ProgramEvent,
    second: ProgramEvent,
) -> Option<u32> {
    let (
        ProgramEvent::Collective {
            family: first_family,
            nth: first_nth,
            ..
        },
        ProgramEvent::Collective {
            family: second_family,
            nth: second_nth,
            seq,
            ..
        },
    ) = (first, second)
    else {
        return None;
    };
    let counted = &aligned.lanes[record][lane_of_family(aligned, record, first_family, first_nth)?];
    let lane = &aligned.lanes[record][lane_of_family(aligned, record, second_family, second_nth)?];
    let index = aligned.find(record, lane, seq.checked_sub(1)?).ok()?;
    let position = lane.collectives[index];
    let before = counted
        .collectives
        .partition_point(|&counted| counted < position);
    let newest = counted.collectives.get(before.checked_sub(1)?)?;
    Some(aligned.seq(record, *newest))
}
