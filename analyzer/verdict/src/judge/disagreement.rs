//! Finds collectives on which the members of a group disagree.
//!
//! The calls of the members under one (group, sequence number) are divided into parts that agree. The largest part is
//! right, if members whose calls are not recorded cannot make another one as large, or if it is several times as large
//! as the next. Of parts that may all be the largest, these decide in turn: whether input and output of the calls fit;
//! what the sibling groups (of the same family) issued under the number; and the group's own past, that is, which call
//! followed the same calls before. If nothing decides, every part is an alternative.

use crate::align::record::NONE;
use crate::align::signature::CallDifference;
use crate::align::{Aligned, GroupIx, Numbers, Presence, RecordIx};
use rcomm_recorder::model::{EntryState, Layout, OpType, Pattern, Rank};
use rcomm_recorder::publish::Recorder;

/// The reason why one part is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ground {
    /// The part is larger than any other, whatever the members have called whose calls are not recorded.
    Largest,
    /// Of the members whose calls are recorded, the part has at least four times as many as the next part.
    FarLarger,
    /// Several parts may be the largest, and only in this one input and output of the call fit.
    Consistency,
    /// Several parts may be the largest, and most members of sibling groups issued the same as this one.
    Siblings,
    /// Several parts may be the largest, and this one continues the group's own past.
    Past,
    /// None: no part is known to be right.
    Nothing,
}

/// Members whose calls agree.
#[derive(Clone, Debug)]
pub(crate) struct AgreeingMembers {
    /// The members' ranks, ascending.
    pub(crate) ranks: Vec<Rank>,
    /// The members' records, in the order of the group.
    pub(crate) records: Vec<RecordIx>,
    /// The call of the first member at the point of difference.
    pub(crate) call: u32,
}

/// One collective on which members disagree.
#[derive(Clone, Debug)]
pub(crate) struct Disagreement {
    pub(crate) group: GroupIx,
    pub(crate) seq: u32,
    /// The right part first, if one is known; the others by size.
    pub(crate) parts: Vec<AgreeingMembers>,
    /// The most severe difference between two parts.
    pub(crate) difference: CallDifference,
    pub(crate) ground: Ground,
    /// Whether every record that holds the collective shows it as completed.
    pub(crate) completed: bool,
}

/// The first disagreement of each group, and the first one of each further rank that deviates later: at most
/// [`MAX_PER_GROUP`] of a group, and none after one in which no part is known to be right.
pub(crate) fn find(aligned: &Aligned<'_>) -> Vec<Disagreement> {
    let found = aligned.shared.map(aligned.groups.len(), |group| {
        let mut found = Vec::new();
        if aligned.groups[group].lanes.iter().flatten().count() >= 2 {
            find_in(aligned, group, &mut found);
        }
        found
    });
    found.into_iter().flatten().collect()
}

/// Adds the disagreements of one group to `found`.
fn find_in(aligned: &Aligned<'_>, group: GroupIx, found: &mut Vec<Disagreement>) {
    let before = found.len();
    let mut deviated: Vec<Rank> = Vec::new();
    for seq in seqs_to_compare(aligned, group) {
        let Some((blocks, completed)) = member_calls(aligned, group, seq) else {
            continue;
        };
        let fresh: Vec<_> = blocks
            .into_iter()
            .filter(|(rank, ..)| !deviated.contains(rank))
            .collect();
        let Some(disagreement) = judge(aligned, group, seq, &fresh, completed) else {
            continue;
        };
        let wrong = disagreement
            .parts
            .iter()
            .skip(1)
            .flat_map(|part| part.ranks.iter().copied());
        deviated.extend(wrong);
        let decided = disagreement.ground != Ground::Nothing;
        found.push(disagreement);
        if !decided || found.len() - before >= MAX_PER_GROUP {
            return;
        }
    }
}

/// At most this many disagreements of a group are found.
const MAX_PER_GROUP: usize = 64;

/// The sequence numbers under which members may have recorded calls that differ, ascending.
fn seqs_to_compare(aligned: &Aligned<'_>, group: GroupIx) -> Vec<u32> {
    if let Some(numbers) = Numbers::of(aligned, group) {
        let apart = numbers.all.iter().filter(|number| !number.is_alike);
        return apart.map(|number| number.seq).collect();
    }
    // The numbers have gaps: the record is damaged or holds active operations only.
    let list = |&(record, lane): &(RecordIx, usize)| {
        let lane = &aligned.lanes[record][lane];
        lane.collectives
            .iter()
            .map(move |&position| aligned.seq(record, position))
    };
    let lanes = aligned.groups[group].lanes.iter().flatten();
    let mut numbers: Vec<u32> = lanes.flat_map(list).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// A rank, its record, and the calls that it issued under one number.
type MemberCalls = (Rank, RecordIx, Vec<u32>);

/// The calls of the members under one number, without incomplete blocks of coalesced calls, and whether all completed;
/// `None` if all issued one and the same call.
fn member_calls(
    aligned: &Aligned<'_>,
    group: GroupIx,
    seq: u32,
) -> Option<(Vec<MemberCalls>, bool)> {
    let mut single: Option<u32> = None;
    let mut alike = true;
    for member in 0..aligned.groups[group].ranks.len() {
        let Some((record, lane)) = aligned.lane(group, member) else {
            continue;
        };
        let Ok(index) = aligned.find(record, lane, seq) else {
            continue;
        };
        let call = aligned.op(record, lane.collectives[index]).call;
        let is_block = aligned.block(record, lane, index).len() > 1;
        if is_block || *single.get_or_insert(call) != call {
            alike = false;
            break;
        }
    }
    if alike {
        return None;
    }
    let mut blocks = Vec::new();
    let mut block_states = Vec::new();
    let mut completed = true;
    for (member, &rank) in aligned.groups[group].ranks.iter().enumerate() {
        let Some((record, lane)) = aligned.lane(group, member) else {
            continue;
        };
        let Ok(index) = aligned.find(record, lane, seq) else {
            continue;
        };
        let block = aligned.block(record, lane, index);
        completed &= index < lane.pending_from;
        let closed = aligned.op(record, lane.collectives[block.end - 1]).kind == OpType::Coalesced;
        let begin_lost = index == 0 && aligned.records[record].wrapped();
        let open = block.end == lane.collectives.len()
            && !closed
            && !is_issued_whole(aligned, group, member, seq);
        let torn = open && aligned.records[record].cut;
        let calls: Vec<u32> = block
            .map(|index| aligned.op(record, lane.collectives[index]).call)
            .collect();
        blocks.push((rank, record, calls));
        block_states.push((begin_lost || torn, open, closed));
    }
    // A block is not compared if the ring may have dropped its beginning, if its record may be cut within it, or if its
    // rank may still be issuing it while another member's block is closed.
    let closes = block_states.iter().any(|&(.., closed)| closed);
    let coalesced = closes || blocks.iter().any(|(.., calls)| calls.len() > 1);
    if coalesced {
        let mut states = block_states.into_iter();
        blocks.retain(|_| {
            states
                .next()
                .is_some_and(|(partial, open, _)| !(partial || open && closes))
        });
    }
    Some((blocks, completed))
}

/// Whether the recorder of PyTorch's NCCL backend shows that a member has issued all calls of its newest number: it
/// counts a coalesced block, and shows its start, only once it is closed. The count is used only in a lane without
/// messages: after a message it is the message's number.
fn is_issued_whole(aligned: &Aligned<'_>, group: GroupIx, member: usize, seq: u32) -> bool {
    let Some((record, lane_index)) = aligned.groups[group].lanes[member] else {
        return false;
    };
    let lane = &aligned.lanes[record][lane_index];
    let newest = lane
        .collectives
        .last()
        .map(|&position| aligned.op(record, position));
    let has_begun = newest.is_some_and(|op| op.state != EntryState::Scheduled);
    let status = aligned.records[record].groups[lane_index].status;
    let is_counted = status.is_some_and(|status| status.last_enqueued >= i64::from(seq));
    aligned.records[record].recorder == Recorder::Nccl
        && (has_begun || is_counted && lane.messages.is_empty())
}

/// The first difference of two blocks and its index; `None` if they agree.
fn difference(aligned: &Aligned<'_>, a: &[u32], b: &[u32]) -> Option<(CallDifference, usize)> {
    let calls = &aligned.shared.calls;
    let pairs = a.iter().zip(b).enumerate();
    for (index, (&a, &b)) in pairs {
        if let Some(difference) = calls.difference(a, b) {
            return Some((difference, index));
        }
    }
    (a.len() != b.len()).then(|| (CallDifference::Op, a.len().min(b.len()).saturating_sub(1)))
}

/// The disagreement of members that issued these blocks of calls under one number; `None` if all agree.
fn judge(
    aligned: &Aligned<'_>,
    group: GroupIx,
    seq: u32,
    blocks: &[MemberCalls],
    completed: bool,
) -> Option<Disagreement> {
    let mut parts: Vec<(Vec<u32>, AgreeingMembers)> = Vec::new();
    let mut most_severe: Option<CallDifference> = None;
    for (rank, record, calls) in blocks {
        let fits = parts
            .iter_mut()
            .find(|(known, _)| difference(aligned, known, calls).is_none());
        match fits {
            Some((_, part)) => {
                part.ranks.push(*rank);
                part.records.push(*record);
            }
            None => {
                let apart = parts
                    .iter()
                    .filter_map(|(known, _)| difference(aligned, known, calls))
                    .min();
                if let Some((difference, _)) = apart {
                    most_severe =
                        Some(most_severe.map_or(difference, |known| known.min(difference)));
                }
                parts.push((
                    calls.clone(),
                    AgreeingMembers {
                        ranks: vec![*rank],
                        records: vec![*record],
                        call: calls[0],
                    },
                ));
            }
        }
    }
    let most_severe = most_severe?;
    for (_, part) in &mut parts {
        part.ranks.sort_unstable();
    }
    // In a coalesced block, the call of each part is the one at which the first two parts differ.
    let index = difference(aligned, &parts[0].0, &parts[1].0).map_or(0, |(_, index)| index);
    for (calls, part) in &mut parts {
        part.call = calls
            .get(index)
            .or(calls.last())
            .copied()
            .unwrap_or(part.call);
    }
    let parts: Vec<AgreeingMembers> = parts.into_iter().map(|(_, part)| part).collect();
    let mut disagreement = Disagreement {
        group,
        seq,
        parts,
        difference: most_severe,
        ground: Ground::Nothing,
        completed,
    };
    let by_size = |a: &AgreeingMembers, b: &AgreeingMembers| {
        (b.ranks.len(), &a.ranks).cmp(&(a.ranks.len(), &b.ranks))
    };
    disagreement.parts.sort_by(by_size);
    disagreement.ground = put_right_first(aligned, group, seq, &mut disagreement.parts);
    if disagreement.ground == Ground::Past && is_new_branch(aligned, &disagreement) {
        disagreement.ground = Ground::Nothing;
        disagreement.parts.sort_by(by_size);
    }
    Some(disagreement)
}

/// A part of at least this many members is right if it is at least this many times as large as any other, although
/// members whose calls are not recorded could make another part as large: one rank is at fault more often than many.
const FAR_LARGER: usize = 4;

/// Moves the right part to the front of `parts`, which are ordered by size, and returns why it is right.
fn put_right_first(
    aligned: &Aligned<'_>,
    group: GroupIx,
    seq: u32,
    parts: &mut [AgreeingMembers],
) -> Ground {
    let most = parts[0].ranks.len();
    let is_unseen = |&member: &usize| match aligned.presence(group, member, seq) {
        Presence::Lost | Presence::Unknown(_) => true,
        // A living process may still come.
        Presence::Absent => {
            let mut records = aligned.records_of(aligned.groups[group].ranks[member]);
            records.any(|record| aligned.records[record].lives())
        }
        Presence::Issued(_) => false,
    };
    let unseen = (0..aligned.groups[group].ranks.len())
        .filter(is_unseen)
        .count();
    let tied = parts
        .iter()
        .take_while(|part| part.ranks.len() + unseen >= most)
        .count();
    if tied == 1 {
        return Ground::Largest;
    }
    if most >= FAR_LARGER && most >= FAR_LARGER * parts[1].ranks.len() {
        return Ground::FarLarger;
    }
    let (members_known, members) = (
        aligned.groups[group].members_recorded,
        aligned.groups[group].ranks.len() as u64,
    );
    let consistent: Vec<usize> = parts[..tied]
        .iter()
        .map(|part| usize::from(!members_known || is_consistent(aligned, part.call, members)))
        .collect();
    let siblings = || sibling_votes(aligned, group, seq, &parts[..tied]);
    let past = || past_votes(aligned, group, seq, &parts[..tied]);
    let (ground, winner) = if let Some(winner) = clear_winner(&consistent) {
        (Ground::Consistency, winner)
    } else if let Some(winner) = clear_winner(&siblings()) {
        (Ground::Siblings, winner)
    } else if let Some(winner) = clear_winner(&past()) {
        (Ground::Past, winner)
    } else {
        return Ground::Nothing;
    };
    parts[..=winner].rotate_right(1);
    ground
}

/// The index of the largest number of votes; `None` if several are equally large.
fn clear_winner(votes: &[usize]) -> Option<usize> {
    let (winner, &most) = votes.iter().enumerate().max_by_key(|&(_, votes)| votes)?;
    (votes.iter().filter(|&&votes| votes == most).count() == 1).then_some(winner)
}

/// Whether input and output of a call fit each other: the output of an all-gather is one input for each member. `true`
/// for a call without such a rule.
fn is_consistent(aligned: &Aligned<'_>, call: u32, members: u64) -> bool {
    let call = aligned.shared.calls.get(call);
    let (input, output) = (
        call.signature.input_elements(),
        call.signature.output_elements(),
    );
    let is_variant = |pattern, layout| call.op.pattern() == pattern && call.op.layout() == layout;
    if is_variant(Pattern::AllGather, Layout::Single) {
        input.saturating_mul(members) == output
    } else if is_variant(Pattern::ReduceScatter, Layout::Single) {
        output.saturating_mul(members) == input
    } else if is_variant(Pattern::AllReduce, Layout::InPlace) {
        output == 0 || input == output
    } else {
        true
    }
}

/// For each part, the number of members of sibling groups that issued the same call under the same number.
fn sibling_votes(
    aligned: &Aligned<'_>,
    group: GroupIx,
    seq: u32,
    parts: &[AgreeingMembers],
) -> Vec<usize> {
    let mut votes = vec![0; parts.len()];
    let family = aligned.groups[group].family;
    for sibling in 0..aligned.groups.len() {
        if sibling == group || aligned.groups[sibling].family != family {
            continue;
        }
        for member in 0..aligned.groups[sibling].ranks.len() {
            let Some((record, lane)) = aligned.lane(sibling, member) else {
                continue;
            };
            let Ok(index) = aligned.find(record, lane, seq) else {
                continue;
            };
            let call = aligned.op(record, lane.collectives[index]).call;
            for (part, votes) in parts.iter().zip(&mut votes) {
                *votes += usize::from(aligned.shared.calls.difference(part.call, call).is_none());
            }
        }
    }
    votes
}

/// For each part, how often its call followed the same calls in the group's own past, by the record of one member.
/// Runs of calls that end directly before this sequence number are compared with the past, longest first; only the
/// longest one that any part's call has followed counts.
fn past_votes(
    aligned: &Aligned<'_>,
    group: GroupIx,
    seq: u32,
    parts: &[AgreeingMembers],
) -> Vec<usize> {
    // The longest run of calls that is compared: layers of one shape issue many equal calls in a row.
    const CONTEXT: usize = 512;
    let mut votes = vec![0; parts.len()];
    let record = parts[0].records[0];
    let Some(lane) = aligned.lanes[record]
        .iter()
        .find(|lane| lane.group == group)
    else {
        return votes;
    };
    let Ok(index) = aligned.find(record, lane, seq) else {
        return votes;
    };
    let past: Vec<u32> = lane.collectives[..index]
        .iter()
        .map(|&position| aligned.op(record, position).call)
        .collect();
    // For each earlier call that a part's call equals: how long the run before it is, and the parts.
    let mut followed: Vec<(usize, Vec<bool>)> = Vec::new();
    for next in 1..past.len() {
        let equals = |part: &AgreeingMembers| {
            let calls = &aligned.shared.calls;
            calls.difference(part.call, past[next]).is_none()
        };
        let by_part: Vec<bool> = parts.iter().map(equals).collect();
        let before = past[..next].iter().rev().zip(past.iter().rev());
        let run = before.take(CONTEXT).take_while(|(one, other)| one == other);
        if by_part.contains(&true) {
            followed.push((run.count(), by_part));
        }
    }
    let longest = followed.iter().map(|(run, _)| *run).max().unwrap_or(0);
    for (_, by_part) in followed
        .iter()
        .filter(|(run, _)| *run == longest && longest > 0)
    {
        for (votes, equals) in votes.iter_mut().zip(by_part) {
            *votes += usize::from(*equals);
        }
    }
    votes
}

/// Whether a part that is not right according to the group's past took a branch of the program for the first time: its
/// call never came before, and it comes from a line that none before came from, or the calls that follow are shifted or
/// in another order. The past then does not show whether the branch was due: for example, an evaluation that runs only
/// every few hundred steps.
fn is_new_branch(aligned: &Aligned<'_>, disagreement: &Disagreement) -> bool {
    let ops = |record: RecordIx| {
        let mut lanes = aligned.lanes[record].iter();
        let lane = lanes.find(|lane| lane.group == disagreement.group)?;
        let index = aligned.find(record, lane, disagreement.seq).ok()?;
        let op = move |position: &u32| aligned.op(record, *position);
        Some((
            lane.collectives[..index].iter().map(op),
            op(&lane.collectives[index]),
        ))
    };
    disagreement.parts.iter().skip(1).any(|part| {
        let record = part.records[0];
        let Some((mut past, op)) = ops(record) else {
            return false;
        };
        // Ranks may reach the same call through different callers, so a line is compared only with the earlier
        // lines of the same rank.
        let is_elsewhere = op.stack != NONE && past.clone().all(|before| before.stack != op.stack);
        let calls = &aligned.shared.calls;
        past.all(|before| calls.difference(before.call, part.call).is_some())
            && (is_elsewhere || shift(aligned, disagreement, record) != Shift::None)
    })
}

/// How the calls of a rank relate to those of the right part from the first difference on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Shift {
    /// The rank left out this many collectives.
    Skipped(usize),
    /// The rank issued this many collectives that the right part did not.
    Extra(usize),
    /// The rank issued this many collectives in another order.
    Reordered(usize),
    /// Like `Reordered`, but the rank's calls fit as well if it left out some collectives or issued more.
    ReorderedOrShifted(usize),
    /// One operation differs, and the following ones agree or are unknown; or the rank's calls fit in none of the
    /// ways above.
    None,
}

/// Compares the calls in a record with those of the right part from the first difference on.
pub(crate) fn shift(aligned: &Aligned<'_>, disagreement: &Disagreement, record: RecordIx) -> Shift {
    // At most this many calls are compared.
    const DEPTH: usize = 64;
    // At most this many collectives count as left out, as extra or as reordered.
    const REACH: usize = 8;
    let calls_of = |record: RecordIx| -> Vec<u32> {
        let lane = aligned.lanes[record]
            .iter()
            .find(|lane| lane.group == disagreement.group);
        let Some(lane) = lane else { return Vec::new() };
        let Ok(index) = aligned.find(record, lane, disagreement.seq) else {
            return Vec::new();
        };
        let rest = lane.collectives[index..].iter().take(DEPTH);
        rest.map(|&position| aligned.op(record, position).call)
            .collect()
    };
    let longest = disagreement.parts[0]
        .records
        .iter()
        .map(|&right| calls_of(right))
        .max_by_key(Vec::len);
    let right = longest.unwrap_or_default();
    let mine = calls_of(record);
    let same = |a: &u32, b: &u32| aligned.shared.calls.difference(*a, *b).is_none();
    let run = |a: &[u32], b: &[u32]| {
        let agree = a.iter().zip(b).all(|(a, b)| same(a, b));
        agree.then(|| a.len().min(b.len()))
    };
    // The shift under which most calls agree, if some were left out or added, with the number of calls that agree.
    let shifted = || {
        let mut best = (0, Shift::None);
        for by in 1..=REACH {
            let skipped = (by < right.len())
                .then(|| run(&mine, &right[by..]))
                .flatten();
            let extra = (by < mine.len())
                .then(|| run(&mine[by..], &right))
                .flatten();
            for (n, shift) in [(skipped, Shift::Skipped(by)), (extra, Shift::Extra(by))] {
                if let Some(n) = n
                    && n > best.0
                {
                    best = (n, shift);
                }
            }
        }
        best
    };
    // The same operations in another order, after which both agree again.
    for width in 2..=REACH.min(mine.len()).min(right.len()) {
        let mut rest: Vec<u32> = right[..width].to_vec();
        let is_permutation = mine[..width].iter().all(|call| {
            let found = rest.iter().position(|other| same(call, other));
            found.map(|index| rest.swap_remove(index)).is_some()
        });
        if !is_permutation {
            continue;
        }
        if run(&mine[width..], &right[width..]).is_none() {
            continue;
        }
        // Calls that repeat fit in both ways. Ranks stop at the same place of their program: one that left out n
        // collectives has n fewer there, and one that changed the order has as many.
        return match shifted().1 {
            Shift::None => Shift::Reordered(width),
            Shift::Skipped(n) if mine.len() + n == right.len() => Shift::Skipped(n),
            Shift::Extra(n) if right.len() + n == mine.len() => Shift::Extra(n),
            _ => Shift::ReorderedOrShifted(width),
        };
    }
    // One operation differs and the next ones agree.
    if run(&mine[1.min(mine.len())..], &right[1.min(right.len())..]).is_some_and(|n| n > 0) {
        return Shift::None;
    }
    shifted().1
}
