//! Ranks without a record that belong together: those of a host, or consecutive ranks.

use crate::judge::context::Context;
use crate::judge::waits::wait_graph::Node;
use crate::report::format::{count, format_ranks};
use rcomm_recorder::model::Rank;
use std::collections::BTreeMap;

/// A block of ranks: one or more rows of consecutive ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    ranks: Vec<Rank>,
    /// The number of ranks on a host, if the block consists of whole hosts: by the hosts that records name, or by the
    /// numbers of the ranks.
    per_host: Option<u32>,
    /// Whether `per_host` comes from the hosts that records name, and not from the numbers of the ranks.
    named: bool,
}

/// From this probability on, 0..1, a block of lost records may be chance.
const MAY_BE_CHANCE: f64 = 0.05;

impl Block {
    /// All ranks without a record, if they form a block, and others wait for at least one rank of each row.
    pub(crate) fn of_absent(ctx: &Context<'_>) -> Option<Self> {
        let expected = ctx.aligned.expected.iter().copied();
        let absent: Vec<Rank> = expected
            .filter(|&rank| ctx.aligned.record_of(rank).is_none())
            .collect();
        let is_missed = |&rank: &Rank| {
            let node = ctx.graph.node(rank);
            node.is_some_and(|node| !ctx.missed_at(node).is_empty())
        };
        let mut rows = rows(&absent);
        let are_missed = rows.all(|row| row.iter().any(is_missed));
        are_missed.then(|| Self::of(ctx, &absent)).flatten()
    }

    /// These ranks as a block: one row of consecutive ranks, or rows that are whole hosts; all hosts have one size, but
    /// the last of the world may be smaller. `None` if the ranks are fewer than two or more than the ranks with a
    /// record, if one of them left a record, if they form no block, or if as many records that were lost at random
    /// would often form one, too.
    pub(crate) fn of(ctx: &Context<'_>, ranks: &[Rank]) -> Option<Self> {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        let read = |&rank: &Rank| ctx.aligned.record_of(rank).is_some();
        if ranks.len() < 2 || ranks.iter().any(read) {
            return None;
        }
        // If most records are missing, they were not collected, or the others ended before they wrote theirs.
        if ranks.len() > ctx.aligned.ranks_read() {
            return None;
        }
        let rows: Vec<&[Rank]> = rows(&ranks).collect();
        // The last host may have fewer ranks than the others.
        let world = ctx.aligned.expected.last().map_or(0, |last| last + 1);
        let by_name = ranks_per_host(ctx);
        let per_host = by_name.or_else(|| common_size(&rows, world));
        let fits = |row: &&[Rank]| {
            let [first, .., last] = **row else {
                return false;
            };
            per_host.is_some_and(|size| {
                first.is_multiple_of(size) && ((last + 1).is_multiple_of(size) || last + 1 == world)
            })
        };
        let hosts = rows.iter().all(fits);
        if !hosts && rows.len() > 1 {
            return None;
        }
        let named = hosts && by_name.is_some();
        let per_host = per_host.filter(|_| hosts);
        let chance = chance(ctx.aligned.expected.len(), ranks.len(), per_host);
        let is_no_chance = named || chance < MAY_BE_CHANCE;
        is_no_chance.then_some(Self {
            ranks,
            per_host,
            named,
        })
    }

    /// The nodes of the ranks in the wait-for graph.
    pub(crate) fn nodes(&self, ctx: &Context<'_>) -> Vec<Node> {
        self.ranks
            .iter()
            .filter_map(|&rank| ctx.graph.node(rank))
            .collect()
    }

    /// A description like `all ranks of one host` or `8 ranks in a row, one host by their numbers`.
    pub(crate) fn describe(&self) -> String {
        let hosts = |hosts: u32| match hosts {
            1 => "one host".to_owned(),
            hosts => format!("{hosts} hosts"),
        };
        match (self.hosts(), self.named) {
            (Some((n, _)), true) => format!("all ranks of {}", hosts(n)),
            (Some((1, 3..)), false) => {
                let row = count(self.ranks.len() as u64, "rank");
                format!("{row} in a row, one host by their numbers")
            }
            (Some((n @ 2.., size @ 2..)), false) => {
                format!("by their numbers {} of {size} ranks", hosts(n))
            }
            _ => format!("{} in a row", count(self.ranks.len() as u64, "rank")),
        }
    }

    /// Each rank alone, if the confidence is so low that only one of them may be gone; else empty.
    pub(crate) fn alternatives(&self) -> Vec<Vec<Rank>> {
        if self.confidence() > 0.5 {
            return Vec::new();
        }
        self.ranks.iter().map(|&rank| vec![rank]).collect()
    }

    /// The probability, 0..1, that the processes of these ranks are gone: single records get lost, but rarely those of
    /// all ranks of a host.
    pub(crate) fn confidence(&self) -> f64 {
        match (self.hosts(), self.ranks.len()) {
            (Some(_), 3..) => 0.85,
            (_, 0..=2) => 0.5,
            _ => 0.75,
        }
    }

    /// The next step of a finding on the block; it names `ranks`.
    pub(crate) fn next(&self, ranks: &[Rank]) -> String {
        let (host, its) = match self.hosts() {
            Some((2.., _)) => ("hosts", "their"),
            _ => ("host", "its"),
        };
        format!(
            "look at the {host} of {}: power, network, {its} kernel's log, and whether the scheduler took {} away",
            format_ranks(ranks),
            if host == "host" { "it" } else { "them" }
        )
    }

    /// The number of hosts and of ranks on each; `None` if the block does not consist of hosts.
    fn hosts(&self) -> Option<(u32, u32)> {
        let size = self.per_host?;
        let hosts: std::collections::BTreeSet<u32> =
            self.ranks.iter().map(|rank| rank / size).collect();
        Some((hosts.len() as u32, size.min(self.ranks.len() as u32)))
    }
}

/// These ranks, ascending, as rows of consecutive ones.
fn rows(ranks: &[Rank]) -> impl Iterator<Item = &[Rank]> {
    ranks.chunk_by(|&rank, &next| rank.checked_add(1) == Some(next))
}

/// The probability, 0..1, that this many of a world's ranks, drawn at random, are whole hosts of this size, or one row
/// of consecutive ranks if no size is given.
fn chance(world: usize, drawn: usize, per_host: Option<u32>) -> f64 {
    // The logarithm of the number of ways to draw `some` of `all`.
    let ways = |all: usize, some: usize| -> f64 {
        let factors = 0..some.min(all);
        factors
            .map(|nth| ((all - nth) as f64 / (nth + 1) as f64).ln())
            .sum()
    };
    let as_block = match per_host.map(|size| size as usize) {
        Some(size) => ways(world.div_ceil(size), drawn.div_ceil(size)),
        None => ((world + 1).saturating_sub(drawn) as f64).ln(),
    };
    (as_block - ways(world, drawn)).exp()
}

/// The largest number of ranks with a record on one host, by the names of hosts in the records. `None` if no record
/// names a host, if the number is 1, or if the ranks of a host lie on both sides of a multiple of it.
fn ranks_per_host(ctx: &Context<'_>) -> Option<u32> {
    let mut hosts: BTreeMap<&str, Vec<Rank>> = BTreeMap::new();
    for record in ctx.aligned.records {
        if !record.identity.host.is_empty() {
            let ranks = hosts.entry(&record.identity.host).or_default();
            if ranks.last() != Some(&record.rank) {
                ranks.push(record.rank);
            }
        }
    }
    let size = hosts.values().map(Vec::len).max()? as u32;
    let are_aligned = hosts.values().all(|ranks| match ranks[..] {
        [first, .., last] => first / size == last / size,
        _ => true,
    });
    (size > 1 && are_aligned).then_some(size)
}

/// The largest size greater than 1 at whose multiples all rows begin and end; the last row of the world may end
/// anywhere. A single row at the end of the world gives at most its length, and the caller checks that the row begins
/// at a multiple of that. `None` if there is no such size, or if a row has one rank.
fn common_size(rows: &[&[Rank]], world: Rank) -> Option<u32> {
    let common_divisor = |a: u32, b: u32| {
        let (mut a, mut b) = (a, b);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let mut size = 0;
    for row in rows {
        let [first, .., last] = **row else {
            return None;
        };
        size = common_divisor(size, first);
        if last + 1 != world || first == 0 {
            size = common_divisor(size, last + 1);
        }
    }
    // A single row at the end of the world is at most one host.
    let size = match rows {
        [row] if size > 0 => size.min(row.len() as u32),
        _ => size,
    };
    (size > 1).then_some(size)
}
