//! Decides for receives from any source whether the message has been sent, and which ranks may still send it.

use super::wait_graph::Missing;
use crate::align::p2p::{self, Half, Messages};
use crate::align::{Aligned, GroupIx, RecordIx, UnknownReason};
use rcomm_recorder::model::Rank;

/// The ranks from which the member `me` may still receive a message from any source, and what is known about each. If
/// all records hold all their messages, only the ranks that have sent least to `me`.
pub(super) fn possible_senders(
    aligned: &Aligned<'_>,
    messages: &Messages,
    group: GroupIx,
    me: u32,
) -> Vec<(Rank, Missing)> {
    let ranks = &aligned.groups[group].ranks;
    let others = (0..ranks.len() as u32).filter(|&member| member != me);
    let mut senders: Vec<(Rank, Missing, usize)> = Vec::with_capacity(ranks.len());
    let mut all_known = true;
    for member in others {
        let rank = ranks[member as usize];
        let record = aligned.record_in(group, rank);
        let lacks = record.map(|index| (&aligned.records[index], aligned.lacks_newest(index)));
        let why = match lacks {
            None => Missing::Unknown(UnknownReason::NoRecord),
            Some((_, Some(why))) => Missing::Unknown(why),
            Some((record, None)) => {
                all_known &= !record.wrapped() && !record.only_active;
                Missing::Candidate
            }
        };
        all_known &= why == Missing::Candidate;
        let pair = messages.pairs.get(&(group, (member, me)));
        senders.push((rank, why, pair.map_or(0, |pair| pair.sends.len())));
    }
    let least = senders.iter().map(|&(.., sent)| sent).min();
    senders.retain(|&(.., sent)| !all_known || Some(sent) == least);
    senders
        .into_iter()
        .map(|(rank, why, _)| (rank, why))
        .collect()
}

/// Whether a member has posted receives from any source, or ones whose record names no peer.
pub(super) fn takes_from_any(messages: &Messages, group: GroupIx, receiver: u32) -> bool {
    messages.any.contains_key(&(group, receiver))
}

/// Whether some rank has sent the message that this receive from any source takes.
pub(super) fn any_is_served(
    aligned: &Aligned<'_>,
    messages: &Messages,
    group: GroupIx,
    me: u32,
    half: Half,
) -> bool {
    let Some(list) = messages.any.get(&(group, me)) else {
        return false;
    };
    let of_member = |member: u32| {
        aligned
            .lane(group, member as usize)
            .map(|(record, _)| record)
    };
    let is_complete = |record: RecordIx| {
        let record = &aligned.records[record];
        !record.wrapped() && !record.only_active
    };
    let members = 0..aligned.groups[group].ranks.len() as u32;
    let exact = members.clone().filter_map(of_member).all(is_complete);
    // If rings have dropped entries, only unfinished halves can be counted.
    let counts = |record: Option<RecordIx>, half: Half| {
        exact || record.is_some_and(|record| !p2p::done(aligned, record, half))
    };
    let earlier = list
        .iter()
        .filter(|any| any.position < half.position && counts(of_member(me), **any));
    // Sends to `me` that no receive from that source takes.
    let unclaimed = members.filter_map(|source| {
        let pair = messages.pairs.get(&(group, (source, me)))?;
        let open = |list: &[Half], member| {
            list.iter()
                .filter(|half| counts(of_member(member), **half))
                .count()
        };
        Some(open(&pair.sends, source).saturating_sub(open(&pair.receives, me)))
    });
    unclaimed.sum::<usize>() > earlier.count()
}
