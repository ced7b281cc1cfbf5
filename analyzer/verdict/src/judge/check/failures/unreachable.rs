//! E152: links show no sign of life and cut off a rank or a host.
//!
//! The systems at both ends of an idle connection exchange packets whatever their processes do. So a link on which no
//! packets arrive shows a fault of the network or of a host, not of a program. The links that still work show which end
//! is at fault: the largest set of ranks that still receive from each other is on the good side.

use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::wait_graph::Place;
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::Code;
use crate::report::format::{format_ranks, time_of_day};
use rcomm_recorder::model::{LinkEnd, PeerLink, Rank};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) struct Unreachable;

impl Check for Unreachable {
    fn codes(&self) -> &'static [Code] {
        &[Code::E152]
    }

    fn run(&self, ctx: &Context<'_>, _so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let links = Links::of(ctx);
        let aborted = links.aborted();
        if !aborted.is_empty() {
            return vec![aborted_there(ctx, &aborted)];
        }
        if links.bad.is_empty() {
            return Vec::new();
        }
        let sides = links.sides();
        let largest = sides.values().map(BTreeSet::len).max().unwrap_or(0);
        let mut main = sides.values().filter(|side| side.len() == largest);
        let good = match (main.next(), main.next()) {
            (Some(side), None) if largest > 1 => side.clone(),
            _ => BTreeSet::new(),
        };
        let (between, across): (Vec<Pair>, Vec<Pair>) = links
            .bad
            .keys()
            .partition(|pair| good.contains(&pair.0) == good.contains(&pair.1));
        let mut drafts = Vec::new();
        if !across.is_empty() {
            drafts.push(cut_off(ctx, &links, &good, &across));
        }
        // Broken links between ranks that are cut off add nothing.
        let between: Vec<Pair> = between
            .into_iter()
            .filter(|pair| across.is_empty() || good.contains(&pair.0))
            .collect();
        if !between.is_empty() {
            drafts.push(match links.hub(&between) {
                Some(hub) if across.is_empty() && good.is_empty() => {
                    cut_off(ctx, &links, &links.ranks_except(hub), &between)
                }
                _ => broken(ctx, &links, &between),
            });
        }
        drafts
    }
}

/// Two ranks, the lower first.
type Pair = (Rank, Rank);

fn pair(a: Rank, b: Rank) -> Pair {
    (a.min(b), a.max(b))
}

/// What one rank recorded of a link.
#[derive(Clone, Copy)]
struct End<'a> {
    /// The offset to subtract from the rank's clock to get common time, ns.
    offset_ns: i64,
    link: &'a PeerLink,
}

impl End<'_> {
    /// When the last sign of life came, common time, ns.
    fn last_sign_ns(&self) -> i64 {
        self.link.heard_ns.saturating_sub(self.offset_ns)
    }

    /// When the rank last looked at the link, common time, ns.
    fn sampled_ns(&self) -> i64 {
        self.link.sampled_ns.saturating_sub(self.offset_ns)
    }
}

/// The links of all ranks.
struct Links<'a> {
    /// By the rank that recorded the end, and its peer.
    ends: BTreeMap<(Rank, Rank), End<'a>>,
    /// Links that are silent at an end, or that both ends record as broken by an error of the network; each with since
    /// when, common time, ns.
    bad: BTreeMap<Pair, i64>,
    /// Links with a sign of life since the first of the bad ones fell silent.
    good: BTreeSet<Pair>,
}

impl<'a> Links<'a> {
    /// The links in the records of all ranks whose processes are not stopped.
    fn of(ctx: &'a Context<'_>) -> Self {
        let mut ends = BTreeMap::new();
        for (index, record) in ctx.aligned.records.iter().enumerate() {
            // A stopped process samples nothing, and what it saw last is old.
            if record.stop().is_some() {
                continue;
            }
            let offset_ns = ctx.aligned.offsets_ns[index];
            for link in &record.peers {
                if let LinkEnd::Rank(peer) = link.end
                    && peer != record.rank
                {
                    ends.insert((record.rank, peer), End { offset_ns, link });
                }
            }
        }
        let silent = ends.values().filter(|end| end.link.is_silent());
        let first_silence = silent.map(End::last_sign_ns).min();
        // On a working link, the last sign of life may be one and a half intervals old.
        let idle_ns = |end: &End<'_>| i64::from(end.link.interval_ms).saturating_mul(1_500_000);
        // Ranks that have failed reset their connections: a reset of a connection that worked for long after another
        // one had fallen silent is a consequence.
        let follows = |end: &End<'_>| {
            let first = first_silence.unwrap_or(i64::MAX);
            end.link.errno == RESET && end.last_sign_ns() > first.saturating_add(idle_ns(end))
        };
        let mut bad: BTreeMap<Pair, i64> = BTreeMap::new();
        for (&(from, to), end) in &ends {
            let reverse = ends.get(&(to, from));
            // A process that ends resets its connections, and records nothing of that: so a reset counts only if both
            // ends recorded it.
            let reset = |end: &End<'_>| is_network_error(end.link.errno) && !follows(end);
            let since = match (end.link.is_silent(), reverse) {
                (true, _) => end.last_sign_ns(),
                (false, Some(reverse)) if reset(end) && reset(reverse) => {
                    end.sampled_ns().min(reverse.sampled_ns())
                }
                (false, _) => continue,
            };
            let known = bad.entry(pair(from, to)).or_insert(since);
            *known = since.min(*known);
        }
        let first = bad.values().copied().min().unwrap_or(i64::MAX);
        let lives = |end: &End<'_>| {
            let works =
                end.link.errno == 0 && end.last_sign_ns().saturating_add(idle_ns(end)) > first;
            !end.link.is_silent()
                && end.link.silence_ns().is_some()
                && end.sampled_ns() > first
                && (works || follows(end))
        };
        let good = ends
            .iter()
            .filter(|(_, end)| lives(end))
            .map(|(&(from, to), _)| pair(from, to))
            .filter(|pair| !bad.contains_key(pair))
            .collect();
        Self { ends, bad, good }
    }

    /// Links that the system of the first rank's host aborted, each with the time at which that rank last looked at it,
    /// common time, ns. Other links that broke are consequences: ranks that fail close their links.
    fn aborted(&self) -> BTreeMap<(Rank, Rank), i64> {
        let ends = self.ends.iter();
        let aborted = ends.filter(|(_, end)| end.link.errno == ABORTED);
        aborted
            .map(|(&ranks, end)| (ranks, end.sampled_ns()))
            .collect()
    }

    /// The ranks with links, in sets that receive from each other, by the lowest rank of each set.
    fn sides(&self) -> BTreeMap<Rank, BTreeSet<Rank>> {
        let pairs = self.bad.keys().chain(&self.good);
        let mut side: BTreeMap<Rank, Rank> = pairs.flat_map(|&(a, b)| [(a, a), (b, b)]).collect();
        for &(a, b) in &self.good {
            let (a, b) = (side[&a], side[&b]);
            let (to, from) = pair(a, b);
            for lowest in side.values_mut().filter(|lowest| **lowest == from) {
                *lowest = to;
            }
        }
        let mut sides: BTreeMap<Rank, BTreeSet<Rank>> = BTreeMap::new();
        for (rank, lowest) in side {
            sides.entry(lowest).or_default().insert(rank);
        }
        sides
    }

    /// The rank that is at an end of all these links; `None` if there is none, or fewer than two links.
    fn hub(&self, pairs: &[Pair]) -> Option<Rank> {
        let &(a, b) = pairs.first()?;
        let at_all = |rank: Rank| pairs.iter().all(|&(a, b)| a == rank || b == rank);
        let hub = [a, b].into_iter().find(|&rank| at_all(rank));
        hub.filter(|_| pairs.len() > 1)
    }

    /// All ranks with a bad link, without this one.
    fn ranks_except(&self, except: Rank) -> BTreeSet<Rank> {
        let ranks = self.bad.keys().flat_map(|&(a, b)| [a, b]);
        ranks.filter(|&rank| rank != except).collect()
    }

    /// Whether what `from` sent to `to` got there; `None` if the records do not show it, or nothing was on its way.
    fn arrives(&self, from: Rank, to: Rank) -> Option<bool> {
        let sender = self.ends.get(&(from, to))?.link;
        let receiver = self.ends.get(&(to, from))?.link;
        // Without an unacknowledged packet nothing was on its way.
        (sender.unacknowledged > 0).then_some(sender.sent <= receiver.received)
    }

    /// Which direction of these links may still work, seen from the ranks in `cut`; `None` if what was sent arrived in
    /// both or in neither, or if the records do not show it. It need not work: what arrived may have arrived just before
    /// the links broke, and only its acknowledgment is lost.
    fn one_way(&self, cut: &BTreeSet<Rank>, pairs: &[Pair]) -> Option<Direction> {
        let outward = |&(a, b): &Pair| if cut.contains(&a) { (a, b) } else { (b, a) };
        let common = |arrives: &dyn Fn(Pair) -> Option<bool>| -> Option<bool> {
            let mut known = pairs.iter().map(outward).filter_map(arrives).peekable();
            let first = *known.peek()?;
            known.all(|other| other == first).then_some(first)
        };
        let out = common(&|(cut, other)| self.arrives(cut, other));
        let into = common(&|(cut, other)| self.arrives(other, cut));
        match (out, into) {
            (Some(true), Some(false)) => Some(Direction::Outward),
            (Some(false), Some(true)) => Some(Direction::Inward),
            _ => None,
        }
    }
}

/// Which direction of a link may still work, seen from the ranks that are cut off.
#[derive(Clone, Copy)]
enum Direction {
    /// What these ranks send arrives; what is sent to them does not.
    Outward,
    /// What is sent to these ranks arrives; what they send does not.
    Inward,
}

/// ECONNABORTED: the host's own system ended the connection. An end by the other host has another number.
const ABORTED: u32 = 103;
/// ECONNRESET: the process at the other end ended the connection, or its system did.
const RESET: u32 = 104;

/// Whether this error number is that of a fault of the network, or of a connection that was reset.
fn is_network_error(errno: u32) -> bool {
    // ENETDOWN, ENETUNREACH, ENETRESET, ECONNABORTED, ECONNRESET, ETIMEDOUT, EHOSTDOWN, EHOSTUNREACH
    [100, 101, 102, 103, 104, 110, 112, 113].contains(&errno)
}

/// The finding on ranks that are cut off from the others.
fn cut_off(
    ctx: &Context<'_>,
    links: &Links<'_>,
    good: &BTreeSet<Rank>,
    pairs: &[Pair],
) -> FindingDraft {
    let ends = || pairs.iter().flat_map(|&(a, b)| [a, b]);
    let cut: BTreeSet<Rank> = ends().filter(|rank| !good.contains(rank)).collect();
    let witnesses: Vec<Rank> = ends()
        .filter(|rank| good.contains(rank))
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    let culprits: Vec<Rank> = cut.iter().copied().collect();
    let direction = match links.one_way(&cut, pairs) {
        Some(Direction::Outward) => {
            "; what was sent from there arrived, what was sent there did not: the links may work in one direction only"
        }
        Some(Direction::Inward) => {
            "; what was sent there arrived, what was sent from there did not: the links may work in one direction only"
        }
        None => "",
    };
    let living = links
        .good
        .iter()
        .filter(|(a, b)| good.contains(a) && good.contains(b));
    let living: BTreeSet<Rank> = living.flat_map(|&(a, b)| [a, b]).collect();
    let living: Vec<Rank> = living.into_iter().collect();
    let others = match living.as_slice() {
        [] => String::new(),
        some => format!(", while {} received from each other", format_ranks(some)),
    };
    let sentence = format!(
        "{}{} and {} heard nothing from each other after {}{others}{direction}",
        format_ranks(&culprits),
        hosts(ctx, &culprits),
        format_ranks(&witnesses),
        since(links, pairs),
    );
    let mut draft = draft(ctx, sentence, &culprits);
    draft.confidence = if good.len() > 1 { 0.95 } else { 0.8 };
    draft.culprits = culprits;
    draft
}

/// The finding on connections that were aborted on one end's host.
fn aborted_there(ctx: &Context<'_>, aborted: &BTreeMap<(Rank, Rank), i64>) -> FindingDraft {
    let distinct = |ranks: &mut dyn Iterator<Item = Rank>| -> Vec<Rank> {
        ranks.collect::<BTreeSet<_>>().into_iter().collect()
    };
    let culprits = distinct(&mut aborted.keys().map(|&(rank, _)| rank));
    let peers = distinct(&mut aborted.keys().map(|&(_, peer)| peer));
    let first = aborted.values().copied().min().unwrap_or(0);
    let (noun, whose) = match culprits.len() {
        1 => ("host", "its"),
        _ => ("hosts", "their"),
    };
    let sentence = format!(
        "the {noun} of {}{} aborted {whose} connections to {} at {}",
        format_ranks(&culprits),
        hosts(ctx, &culprits),
        format_ranks(&peers),
        time_of_day(first),
    );
    let mut draft = draft(ctx, sentence, &culprits);
    draft.ruled_out = vec![
        "rank_failed: if the other host or its process had ended the connection, the system would report another error"
            .to_owned(),
    ];
    draft.next = format!(
        "look for what ends connections on the {noun} of {}: `ss --kill`, a service that manages the network, an \
         address that was removed",
        format_ranks(&culprits)
    );
    draft.confidence = 0.9;
    draft.culprits = culprits;
    draft
}

/// The finding on links of which either end may be at fault.
fn broken(ctx: &Context<'_>, links: &Links<'_>, pairs: &[Pair]) -> FindingDraft {
    let ranks: BTreeSet<Rank> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
    let ranks: Vec<Rank> = ranks.into_iter().collect();
    let sentence = match pairs {
        [(a, b)] => format!(
            "ranks {a} and {b} heard nothing from each other after {}; the records do not show which end is at fault",
            since(links, pairs)
        ),
        _ => format!(
            "{} links between {} were silent after {}; the records do not show which end is at fault",
            pairs.len(),
            format_ranks(&ranks),
            since(links, pairs)
        ),
    };
    let mut draft = draft(ctx, sentence, &ranks);
    draft.confidence = 0.7;
    draft.alternatives = ranks.iter().take(16).map(|&rank| vec![rank]).collect();
    draft
}

/// An E152 with this sentence. Its targets are these ranks, and the operations in which they wait although all members
/// have come.
fn draft(ctx: &Context<'_>, sentence: String, ranks: &[Rank]) -> FindingDraft {
    let mut draft = FindingDraft::new(Code::E152, sentence);
    draft.targets = ranks
        .iter()
        .filter_map(|&rank| ctx.graph.node(rank))
        .collect();
    // An operation that all members have reached does not end because of the link.
    let places = ctx.wait_roots.iter().filter_map(|root| match root {
        &WaitRoot::Full(place) => Some(place),
        _ => None,
    });
    for place in places {
        let came = ctx.ranks(&ctx.graph.arrived[place]);
        if came.iter().any(|rank| ranks.contains(rank)) {
            draft.targets.push(place + ctx.graph.ranks);
            draft.at.get_or_insert_with(|| ctx.op_ref_of_place(place));
            if let Place::Collective { .. } = ctx.graph.places[place] {
                draft.evidence = ctx.evidence_of_place(place, 2);
            }
        }
    }
    draft.ruled_out.push(
        "rank_frozen, rank_failed: the systems of hosts that are reached answer on idle connections, \
         whatever their processes do"
            .to_owned(),
    );
    draft.next = format!(
        "look at the network between {} and the others: cables, switch ports, routes, firewalls, and whether \
         the host is up",
        format_ranks(ranks)
    );
    draft
}

/// The time of day at which the first of these links went bad.
fn since(links: &Links<'_>, pairs: &[Pair]) -> String {
    let first = pairs.iter().filter_map(|pair| links.bad.get(pair)).min();
    time_of_day(first.copied().unwrap_or(0))
}

/// A part of a sentence, like ` (host a)` or ` (hosts a, b)`; empty if the records name no host, or more than four.
fn hosts(ctx: &Context<'_>, ranks: &[Rank]) -> String {
    let host_of = |&rank: &Rank| {
        let record = ctx.aligned.record_of(rank)?;
        let host = ctx.aligned.records[record].identity.host.as_str();
        (!host.is_empty()).then(|| crate::report::format::printable(host))
    };
    let hosts: BTreeSet<_> = ranks.iter().filter_map(host_of).collect();
    let names: Vec<String> = hosts.into_iter().map(|host| host.to_string()).collect();
    match names.as_slice() {
        [host] => format!(" (host {host})"),
        [_, ..] if names.len() <= 4 => format!(" (hosts {})", names.join(", ")),
        _ => String::new(),
    }
}
