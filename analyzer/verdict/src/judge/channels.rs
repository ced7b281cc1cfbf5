//! The channel and peer on which an operation of NCCL makes no progress. Only NCCL's profiler interface reports this;
//! no recorder above NCCL can see it.

use crate::align::{GroupIx, Presence};
use crate::judge::context::Context;
use rcomm_recorder::model::{KernelProgress, LinkProgress, LinkWait, Rank};
use std::collections::BTreeSet;

/// Where an operation that runs on several ranks lags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lag {
    /// The channels that have not finished, ascending; empty unless some others have.
    pub(crate) channels: Vec<u8>,
    /// The transfer that lags behind all others, if there is exactly one.
    pub(crate) link: Option<StuckTransfer>,
}

/// A transfer between two global ranks that makes no progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StuckTransfer {
    pub(crate) channel: u8,
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) step: u32,
    pub(crate) steps: u32,
    pub(crate) wait: LinkWait,
}

/// Where a collective lags, by the channels and links in the records of the group's members; `None` if they do not show
/// it.
pub(crate) fn lag_of(ctx: &Context<'_>, group: GroupIx, seq: u32) -> Option<Lag> {
    let ranks = &ctx.aligned.groups[group].ranks;
    let mut kernels: Vec<KernelProgress> = Vec::new();
    let mut links: Vec<(Rank, LinkProgress)> = Vec::new();
    for (member, &rank) in ranks.iter().enumerate() {
        let Presence::Issued(at) = ctx.aligned.presence(group, member, seq) else {
            continue;
        };
        let Some((record, lane)) = ctx.aligned.lane(group, member) else {
            continue;
        };
        let op = ctx.aligned.status_op(record, lane, at);
        let whole = &ctx.aligned.records[record];
        let id = whole.record_id(op);
        let name = &ctx.aligned.groups[group].name;
        for communicator in whole.communicators.iter().filter(|it| it.group == *name) {
            let mine = communicator.kernels.iter().filter(|it| it.record_id == id);
            kernels.extend(mine.cloned());
            let mine = communicator.links.iter().filter(|it| it.record_id == id);
            links.extend(mine.map(|link| (rank, link.clone())));
        }
    }
    let open: BTreeSet<u8> = kernels
        .iter()
        .flat_map(KernelProgress::unfinished)
        .collect();
    let most = kernels.iter().map(|it| usize::from(it.channels)).max();
    let some_finished = most.is_some_and(|most| !open.is_empty() && open.len() < most);
    let link = blocked(&links, |member| ranks.get(member as usize).copied());
    (some_finished || link.is_some()).then(|| Lag {
        channels: match some_finished {
            true => open.into_iter().collect(),
            false => Vec::new(),
        },
        link,
    })
}

/// The transfer that is held up by the network or by its receiver. Only the sender's record shows this: a receiver also
/// waits for a sender that has nothing to send itself. `None` if several transfers are equally far behind.
fn blocked(
    links: &[(Rank, LinkProgress)],
    rank_of: impl Fn(u32) -> Option<Rank>,
) -> Option<StuckTransfer> {
    let held = links
        .iter()
        .filter(|(_, link)| link.is_send && matches!(link.wait, LinkWait::Send | LinkWait::Peer));
    let mut held: Vec<(u64, Rank, &LinkProgress)> = held
        .map(|(rank, link)| {
            let done = u64::from(link.step) * 1_000_000 / u64::from(link.steps.max(1));
            (done, *rank, link)
        })
        .collect();
    held.sort_by_key(|&(done, rank, link)| (done, rank, link.channel, link.peer));
    let &(least, from, link) = held.first()?;
    // Several transfers are equally far: none of them alone holds up the rest.
    let rival = held.get(1).is_some_and(|&(done, rank, other)| {
        done == least && (rank, other.peer) != (from, link.peer)
    });
    (!rival).then_some(StuckTransfer {
        channel: link.channel,
        from,
        to: rank_of(link.peer)?,
        step: link.step,
        steps: link.steps,
        wait: link.wait,
    })
}

impl Lag {
    /// What lags, for the end of a sentence.
    pub(crate) fn describe(&self, host_of: impl Fn(Rank) -> Option<String>) -> String {
        let Some(link) = self.link else {
            let several = if self.channels.len() == 1 { "" } else { "s" };
            let verb = if self.channels.len() == 1 {
                "has"
            } else {
                "have"
            };
            let numbers: Vec<String> = self.channels.iter().map(u8::to_string).collect();
            return format!(
                "channel{several} {} {verb} not finished, the others have",
                numbers.join(", ")
            );
        };
        let name = |rank: Rank| match host_of(rank) {
            Some(host) => format!("rank {rank} ({host})"),
            None => format!("rank {rank}"),
        };
        let at = match link.steps {
            0 => String::new(),
            steps => format!(" at step {} of {steps}", link.step),
        };
        let why = match link.wait {
            LinkWait::Peer => "waits for the receiver's permission",
            _ => "waits for the network",
        };
        format!(
            "channel {} from {} to {} is stuck{at} and {why}",
            link.channel,
            name(link.from),
            name(link.to)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(channel: u8, peer: u32, is_send: bool, step: u32, wait: LinkWait) -> LinkProgress {
        LinkProgress {
            channel,
            peer,
            is_send,
            record_id: 1,
            step,
            steps: 16,
            wait,
            since_ns: 1,
        }
    }

    fn found(links: &[(Rank, LinkProgress)]) -> Option<(u8, Rank, Rank)> {
        let link = blocked(links, |member| Some(member + 10))?;
        Some((link.channel, link.from, link.to))
    }

    #[test]
    fn the_sender_held_up_by_the_network_is_named_and_not_the_waiting_ones() {
        let links = [
            (10, link(3, 1, true, 5, LinkWait::Send)),
            (11, link(3, 2, true, 4, LinkWait::Device)),
            (12, link(3, 1, false, 4, LinkWait::Receive)),
            (13, link(3, 0, true, 9, LinkWait::Peer)),
        ];
        assert_eq!(found(&links), Some((3, 10, 11)));
    }

    #[test]
    fn no_link_is_named_if_several_are_equally_far() {
        let links = [
            (10, link(0, 1, true, 5, LinkWait::Send)),
            (11, link(0, 2, true, 5, LinkWait::Send)),
        ];
        assert_eq!(found(&links), None);
        // Two channels of one link are one link.
        let links = [
            (10, link(0, 1, true, 5, LinkWait::Send)),
            (10, link(1, 1, true, 5, LinkWait::Send)),
        ];
        assert_eq!(found(&links), Some((0, 10, 11)));
        assert_eq!(found(&[(10, link(0, 1, true, 0, LinkWait::Posted))]), None);
    }

    #[test]
    fn a_lag_is_described_with_hosts_where_they_are_known() {
        let lag = Lag {
            channels: vec![3],
            link: blocked(&[(1, link(3, 2, true, 5, LinkWait::Peer))], Some),
        };
        assert_eq!(
            lag.describe(|rank| (rank == 1).then(|| "a".to_owned())),
            "channel 3 from rank 1 (a) to rank 2 is stuck at step 5 of 16 and waits for the receiver's permission"
        );
        let lag = Lag {
            channels: vec![3],
            link: None,
        };
        assert_eq!(
            lag.describe(|_| None),
            "channel 3 has not finished, the others have"
        );
    }
}
