//! Finds the channel and peer on which an operation of NCCL makes no progress. Only NCCL's profiler interface reports
//! this; no recorder above NCCL can see it.

use crate::align::record::Op;
use crate::align::{GroupIx, Presence, RecordIx};
use crate::judge::context::Context;
use crate::report::format::format_ranks;
use rcomm_recorder::model::{KernelProgress, LinkProgress, LinkWait, Rank};
use std::collections::{BTreeMap, BTreeSet};

/// Where an operation that runs on several ranks lags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lag {
    /// The channels that have not finished, ascending; empty unless some others have.
    pub(crate) channels: Vec<u8>,
    /// The channels that have finished on every rank, ascending; empty if they are known to be all the others.
    pub(crate) finished: Vec<u8>,
    /// The transfer of `held` that lags behind all others ([`blocked`]); `None` if a record had no room for some
    /// transfers.
    pub(crate) link: Option<StuckTransfer>,
    /// All transfers that the network or a receiver holds up, least progress first.
    pub(crate) held: Vec<StuckTransfer>,
    /// Sender and receiver of each recorded transfer; only on the channels that have not finished, if some others have.
    pub(crate) under_way: BTreeSet<(Rank, Rank)>,
    /// Whether the record of any transfer shows its steps and what it waits for.
    pub(crate) has_steps: bool,
    /// The ranks whose records had no room for some transfers, each with their number.
    pub(crate) incomplete: Vec<(Rank, u64)>,
}

/// What several transfers that are held up have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Common {
    /// One rank sends all the transfers.
    From(Rank),
    /// One rank is to receive all the transfers.
    To(Rank),
    /// One host sends all the transfers.
    FromHost(String),
    /// All the transfers go to one host.
    ToHost(String),
}

/// A transfer between two global ranks that makes no progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StuckTransfer {
    pub(crate) channel: u8,
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    /// The number of completed steps.
    pub(crate) step: u32,
    /// The number of all steps; 0 if unknown.
    pub(crate) steps: u32,
    pub(crate) wait: LinkWait,
}

/// Where a collective lags, by the channels and links in the records of the group's members; `None` if they do not show
/// it.
pub(crate) fn lag_of(ctx: &Context<'_>, group: GroupIx, seq: u32) -> Option<Lag> {
    let members = 0..ctx.aligned.groups[group].ranks.len();
    let ops = members.filter_map(|member| {
        let Presence::Issued(index) = ctx.aligned.presence(group, member, seq) else {
            return None;
        };
        let (record, lane) = ctx.aligned.lane(group, member)?;
        Some((record, ctx.aligned.status_op(record, lane, index)))
    });
    lag_of_ops(ctx, group, ops)
}

/// Where messages lag, by the records of these halves; each half is a record and a position in it. `None` if the
/// records do not show it.
pub(crate) fn lag_of_messages(
    ctx: &Context<'_>,
    group: GroupIx,
    halves: &BTreeSet<(RecordIx, u32)>,
) -> Option<Lag> {
    let halves = halves.iter();
    let ops = halves.map(|&(record, position)| (record, ctx.aligned.op(record, position)));
    lag_of_ops(ctx, group, ops)
}

/// Where these operations of a group lag. `None` if no transfer of them is recorded, no record lacks any, and no
/// channel has finished on every rank while another has not.
fn lag_of_ops<'o>(
    ctx: &Context<'_>,
    group: GroupIx,
    ops: impl Iterator<Item = (RecordIx, &'o Op)>,
) -> Option<Lag> {
    let ranks = &ctx.aligned.groups[group].ranks;
    let mut kernels: Vec<KernelProgress> = Vec::new();
    let mut links: Vec<(Rank, LinkProgress)> = Vec::new();
    let mut incomplete: BTreeMap<Rank, u64> = BTreeMap::new();
    for (record, op) in ops {
        let full_record = &ctx.aligned.records[record];
        let id = full_record.record_id(op);
        let name = &ctx.aligned.groups[group].name;
        for communicator in full_record
            .communicators
            .iter()
            .filter(|communicator| communicator.group == *name)
        {
            let of_operation = communicator
                .kernels
                .iter()
                .filter(|kernel| kernel.record_id == id);
            kernels.extend(of_operation.cloned());
            let of_operation = communicator
                .links
                .iter()
                .filter(|link| link.record_id == id);
            links.extend(of_operation.map(|link| (full_record.rank, link.clone())));
            if communicator.links_lost > 0 {
                incomplete.insert(full_record.rank, communicator.links_lost);
            }
        }
    }
    let open: BTreeSet<u8> = kernels
        .iter()
        .flat_map(KernelProgress::unfinished)
        .collect();
    // A channel that has not started on some rank has not finished there.
    let finished = kernels
        .iter()
        .fold(u64::MAX, |all, kernel| all & kernel.finished);
    let finished: Vec<u8> = match open.is_empty() || kernels.is_empty() {
        true => Vec::new(),
        false => (0..64).filter(|bit| finished & 1 << bit != 0).collect(),
    };
    let some_finished = !finished.is_empty();
    // NCCL 2.26 does not report the number of channels, so a channel that has not started may be missing here.
    let all_started = kernels.iter().all(|kernel| {
        let started = kernel.started.count_ones();
        started == u32::from(kernel.channels) && started as usize == open.len() + finished.len()
    });
    let rank_of = |member: u32| ranks.get(member as usize).copied();
    let held = held_up(&links, rank_of);
    // A transfer that is not recorded may be further behind than all others.
    let link = blocked(&held).filter(|_| incomplete.is_empty());
    let is_open = |link: &LinkProgress| !some_finished || open.contains(&link.channel);
    let under_way = links.iter().filter(|(_, link)| is_open(link));
    let under_way: BTreeSet<(Rank, Rank)> = under_way
        .filter_map(|(rank, link)| {
            let peer = rank_of(link.peer)?;
            Some(if link.is_send {
                (*rank, peer)
            } else {
                (peer, *rank)
            })
        })
        .collect();
    let has_steps = (links.iter()).any(|(_, link)| link.wait != LinkWait::Posted);
    let shows = some_finished || !links.is_empty() || !incomplete.is_empty();
    shows.then(|| Lag {
        channels: match some_finished {
            true => open.into_iter().collect(),
            false => Vec::new(),
        },
        finished: if all_started { Vec::new() } else { finished },
        link,
        held,
        under_way,
        has_steps,
        incomplete: incomplete.into_iter().collect(),
    })
}

/// The transfers that are held up by the network or by their receivers, least progress first. Only the sender's record
/// shows this: a receiver also waits for a sender that has nothing to send itself.
fn held_up(
    links: &[(Rank, LinkProgress)],
    rank_of: impl Fn(u32) -> Option<Rank>,
) -> Vec<StuckTransfer> {
    let held = links
        .iter()
        .filter(|(_, link)| link.is_send && matches!(link.wait, LinkWait::Send | LinkWait::Peer));
    let mut held: Vec<StuckTransfer> = held
        .filter_map(|(from, link)| {
            Some(StuckTransfer {
                channel: link.channel,
                from: *from,
                to: rank_of(link.peer)?,
                step: link.step,
                steps: link.steps,
                wait: link.wait,
            })
        })
        .collect();
    held.sort_by_key(|link| (link.progress(), link.from, link.channel, link.to));
    held
}

/// The transfer with less progress than all others; `None` if there is none, or if several links are equally far
/// behind.
fn blocked(held: &[StuckTransfer]) -> Option<StuckTransfer> {
    let &first = held.first()?;
    // If transfers of several links are equally far, none of them alone holds up the rest.
    let mut others = held
        .iter()
        .take_while(|other| other.progress() == first.progress());
    let are_of_one_link = others.all(|other| (other.from, other.to) == (first.from, first.to));
    are_of_one_link.then_some(first)
}

/// A clause on how many transfers the records of these ranks had no room for; `None` if there are none.
pub(crate) fn lost_transfers(incomplete: &[(Rank, u64)]) -> Option<String> {
    let ranks: Vec<Rank> = incomplete.iter().map(|&(rank, _)| rank).collect();
    let number: u64 = incomplete.iter().map(|&(_, number)| number).sum();
    let ring = match ranks.len() {
        0 => return None,
        1 => "ring",
        _ => "rings",
    };
    let several = if number == 1 { "" } else { "s" };
    let ranks = format_ranks(&ranks);
    Some(format!(
        "the {ring} of {ranks} had no room for {number} transfer{several}"
    ))
}

/// The numbers of channels, as the subject of a sentence.
fn name_channels(channels: &[u8]) -> String {
    let several = if channels.len() == 1 { "" } else { "s" };
    let numbers: Vec<String> = channels.iter().map(u8::to_string).collect();
    format!("channel{several} {}", numbers.join(", "))
}

/// The verb that follows [`name_channels`].
fn has_or_have(channels: &[u8]) -> &'static str {
    match channels.len() {
        1 => "has",
        _ => "have",
    }
}

impl StuckTransfer {
    /// The progress of the transfer, in millionths.
    fn progress(&self) -> u64 {
        u64::from(self.step) * 1_000_000 / u64::from(self.steps.max(1))
    }
}

/// The `value` that all these transfers share; `None` if they differ or one is unknown.
fn same<T: PartialEq>(
    held: &[&StuckTransfer],
    value: impl Fn(&StuckTransfer) -> Option<T>,
) -> Option<T> {
    let first = value(held.first()?)?;
    let are_equal = held.iter().all(|link| value(link).as_ref() == Some(&first));
    are_equal.then_some(first)
}

impl Lag {
    /// How many transfers wait for the network, and what they have in common. `None` if there are none, if all go from
    /// one rank to one other, if they have nothing in common, or if a record had no room for some transfers.
    pub(crate) fn common(
        &self,
        host_of: impl Fn(Rank) -> Option<String>,
    ) -> Option<(usize, Common)> {
        if !self.incomplete.is_empty() {
            return None;
        }
        let waits = |link: &&StuckTransfer| link.wait == LinkWait::Send;
        let held: Vec<&StuckTransfer> = self.held.iter().filter(waits).collect();
        let first = held.first()?;
        if held
            .iter()
            .all(|link| (link.from, link.to) == (first.from, first.to))
        {
            return None;
        }
        let common = (same(&held, |link| Some(link.from)).map(Common::From))
            .or_else(|| same(&held, |link| Some(link.to)).map(Common::To))
            .or_else(|| same(&held, |link| host_of(link.from)).map(Common::FromHost))
            .or_else(|| same(&held, |link| host_of(link.to)).map(Common::ToHost))?;
        Some((held.len(), common))
    }

    /// What lags, as the end of a sentence; `None` if unknown.
    pub(crate) fn describe(&self, host_of: impl Fn(Rank) -> Option<String>) -> Option<String> {
        let common = self.common(&host_of).map(|(count, common)| {
            let end = match common {
                Common::From(rank) => format!("from rank {rank}"),
                Common::To(rank) => format!("to rank {rank}"),
                Common::FromHost(host) => format!("from host {host}"),
                Common::ToHost(host) => format!("to host {host}"),
            };
            format!("{count} transfers wait for the network, all of them {end}")
        });
        let parts: Vec<String> = self.slowest(host_of).into_iter().chain(common).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// Why it is not certain what lags; `None` if the records have all transfers.
    pub(crate) fn doubt(&self) -> Option<String> {
        let lost = lost_transfers(&self.incomplete)?;
        Some(format!(
            "{lost}, and the one that is stuck may be among them"
        ))
    }

    /// The sender and the receiver of all transfers under way; `None` if these differ, or if a record had no room for
    /// some transfers.
    fn only_pair(&self) -> Option<(Rank, Rank)> {
        let mut pairs = self.under_way.iter();
        let &pair = pairs.next()?;
        (pairs.next().is_none() && self.incomplete.is_empty()).then_some(pair)
    }

    /// Whether only the steps of transfers could show which transfer is stuck, and no record has them.
    pub(crate) fn needs_steps(&self) -> bool {
        self.under_way.len() > 1 && !self.has_steps
    }

    /// The transfer or the channels that lag.
    fn slowest(&self, host_of: impl Fn(Rank) -> Option<String>) -> Option<String> {
        let Some(link) = self.link else {
            if self.channels.is_empty() {
                return None;
            }
            let verb = has_or_have(&self.channels);
            let others = match &self.finished[..] {
                [] => "the others have".to_owned(),
                finished => format!("{} {}", name_channels(finished), has_or_have(finished)),
            };
            let between = self.only_pair().map_or(String::new(), |(from, to)| {
                format!(" from rank {from} to rank {to}")
            });
            return Some(format!(
                "{}{between} {verb} not finished, {others}",
                name_channels(&self.channels)
            ));
        };
        let name = |rank: Rank| match host_of(rank) {
            Some(host) => format!("rank {rank} ({host})"),
            None => format!("rank {rank}"),
        };
        let step = match link.steps {
            0 => String::new(),
            steps => format!(" at step {} of {steps}", link.step),
        };
        let why = match link.wait {
            LinkWait::Peer => "waits for the receiver's permission",
            _ => "waits for the network",
        };
        Some(format!(
            "channel {} from {} to {} is stuck{step} and {why}",
            link.channel,
            name(link.from),
            name(link.to)
        ))
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
        let link = blocked(&held_up(links, |member| Some(member + 10)))?;
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
        let [one, two] = links;
        let as_far = (11, link(0, 2, true, 5, LinkWait::Send));
        assert_eq!(found(&[one, two, as_far]), None);
        assert_eq!(found(&[(10, link(0, 1, true, 0, LinkWait::Posted))]), None);
    }

    #[test]
    fn a_lag_is_described_with_hosts_where_they_are_known() {
        let held = held_up(&[(1, link(3, 2, true, 5, LinkWait::Peer))], Some);
        let lag = Lag {
            channels: vec![3],
            link: blocked(&held),
            held,
            ..Lag::default()
        };
        assert_eq!(
            lag.describe(|rank| (rank == 1).then(|| "a".to_owned()))
                .as_deref(),
            Some(
                "channel 3 from rank 1 (a) to rank 2 is stuck at step 5 of 16 and waits for the receiver's permission"
            )
        );
        let lag = Lag {
            channels: vec![3],
            ..Lag::default()
        };
        assert_eq!(
            lag.describe(|_| None).as_deref(),
            Some("channel 3 has not finished, the others have")
        );
        // The number of channels is unknown.
        let some = Lag {
            channels: vec![3],
            finished: vec![0, 2],
            ..Lag::default()
        };
        assert_eq!(
            some.describe(|_| None).as_deref(),
            Some("channel 3 has not finished, channels 0, 2 have")
        );
        // Without steps, the ends are known if there are only two.
        let mut message = Lag {
            under_way: [(0, 1)].into(),
            ..lag
        };
        assert_eq!(
            message.describe(|_| None).as_deref(),
            Some("channel 3 from rank 0 to rank 1 has not finished, the others have")
        );
        assert!(!message.needs_steps());
        message.under_way.insert((1, 0));
        assert!(message.needs_steps());
        assert_eq!(
            message.describe(|_| None).as_deref(),
            Some("channel 3 has not finished, the others have")
        );
    }

    #[test]
    fn records_that_lack_transfers_name_no_pair_and_say_so() {
        let lag = Lag {
            channels: vec![3],
            under_way: [(0, 1)].into(),
            incomplete: vec![(0, 1), (2, 4)],
            ..Lag::default()
        };
        assert_eq!(
            lag.describe(|_| None).as_deref(),
            Some("channel 3 has not finished, the others have")
        );
        assert_eq!(
            lag.doubt().as_deref(),
            Some(
                "the rings of ranks 0 and 2 had no room for 5 transfers, and the one that is stuck may be among them"
            )
        );
        let complete = Lag {
            incomplete: Vec::new(),
            ..lag
        };
        assert_eq!(complete.doubt(), None);
        let shared = |incomplete| Lag {
            incomplete,
            ..self::lag(&[(0, 2, LinkWait::Send), (0, 3, LinkWait::Send)])
        };
        assert!(shared(Vec::new()).common(|_| None).is_some());
        assert_eq!(shared(vec![(0, 1)]).common(|_| None), None);
    }

    fn lag(links: &[(Rank, u32, LinkWait)]) -> Lag {
        let links: Vec<(Rank, LinkProgress)> = links
            .iter()
            .map(|&(from, to, wait)| (from, link(0, to, true, 5, wait)))
            .collect();
        let held = held_up(&links, Some);
        Lag {
            link: blocked(&held),
            held,
            ..Lag::default()
        }
    }

    #[test]
    fn what_transfers_that_wait_for_the_network_share_is_named() {
        use LinkWait::{Peer, Send};
        let host_of = |rank: Rank| Some(if rank < 2 { "a" } else { "b" }.to_owned());
        let common = |links: &[_]| lag(links).common(host_of).map(|(_, common)| common);
        let host = |name: &str| name.to_owned();
        assert_eq!(common(&[(0, 2, Send), (0, 3, Send)]), Some(Common::From(0)));
        assert_eq!(common(&[(0, 3, Send), (1, 3, Send)]), Some(Common::To(3)));
        let from_host = [(0, 2, Send), (1, 3, Send)];
        assert_eq!(common(&from_host), Some(Common::FromHost(host("a"))));
        let to_host = [(0, 2, Send), (2, 3, Send)];
        assert_eq!(common(&to_host), Some(Common::ToHost(host("b"))));
        // A transfer that waits for a receiver says nothing about the network, and a single link shares nothing with
        // another.
        assert_eq!(common(&[(0, 2, Send), (3, 1, Peer)]), None);
        assert_eq!(common(&[(0, 2, Send), (0, 2, Send)]), None);
        assert_eq!(common(&[(0, 2, Send), (3, 1, Send)]), None);
        assert_eq!(
            lag(&from_host).describe(host_of).as_deref(),
            Some("2 transfers wait for the network, all of them from host a")
        );
        assert_eq!(lag(&[(0, 2, Send), (3, 1, Send)]).describe(host_of), None);
    }
}
