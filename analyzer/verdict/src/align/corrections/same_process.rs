//! Joins the two records of one process: its own recorder's, and that of rcomm's plug-in for NCCL.
//!
//! Both hold the same operations. The program's record has the groups' names, members and stacks; the plug-in's has
//! what the device and the network did. If a communicator of the plug-in is one of the program's groups, the
//! program's record gets the plug-in's channels, links and times, and the plug-in's copy of the operations is dropped:
//! the process is one rank, and each operation counts once. If that is not certain, both records keep their
//! operations.

use crate::align::record::{LocalGroup, NONE, Op, Record};
use crate::align::shared::Shared;
use rcomm_recorder::model::{Communicator, EntryState, OpType, Pattern};
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, HashMap};

/// At most this many calls in the program's record have not reached NCCL yet.
const AHEAD: usize = 4;
/// At most this many operations of a communicator are only in the plug-in's record: a backend issues one itself to
/// connect the ranks of a new communicator.
const PLUGIN_ONLY: usize = 1;
/// If either ring has dropped operations, at least this many operations must agree. Fewer are enough if both records
/// are known to be of one process and the times agree, too. If only times show that the process is the same, at least
/// this many must agree in any case.
const ENOUGH: usize = 8;
/// The largest difference between the two issue times that the two recorders noted for one call, ns.
const NEAR_NS: u64 = 50_000_000;
/// One call in this many may have times that differ by more than [`NEAR_NS`].
const CALLS_PER_FAR: usize = 16;

/// Joins the plug-in's records to the programs', and drops what has been joined.
pub(crate) fn join(shared: &Shared, records: &mut Vec<Record>) {
    let is_plugin = |record: &Record| record.recorder == Recorder::NcclProfiler;
    if !records.iter().any(is_plugin) {
        return;
    }
    let mut of_rank: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (index, record) in records.iter().enumerate() {
        of_rank.entry(record.rank).or_default().push(index);
    }
    let mut empty = Vec::new();
    for indices in of_rank.values() {
        let is_plugin = |index: &&usize| records[**index].recorder == Recorder::NcclProfiler;
        // `provenance` has left aside the records of other runs, so a process has one record by the plug-in.
        let (&[plugin], [_, ..]) = (
            &*indices
                .iter()
                .filter(is_plugin)
                .copied()
                .collect::<Vec<_>>(),
            &*indices
                .iter()
                .filter(|index| !is_plugin(index))
                .collect::<Vec<_>>(),
        ) else {
            continue;
        };
        for &program in indices.iter().filter(|&&index| index != plugin) {
            match same_process(&records[plugin], &records[program]) {
                Some(false) => {}
                same => join_two(shared, records, [plugin, program], same == Some(true)),
            }
        }
        if records[plugin].groups.is_empty() {
            empty.push(plugin);
        }
    }
    empty.sort_unstable();
    for index in empty.into_iter().rev() {
        records.remove(index);
    }
}

/// Whether two records are of one process; `None` if a host or a process id is not recorded, and no recorded one
/// differs.
fn same_process(a: &Record, b: &Record) -> Option<bool> {
    let (a, b) = (&a.identity, &b.identity);
    let hosts = !a.host.is_empty() && !b.host.is_empty();
    let pids = a.pid != 0 && b.pid != 0;
    if hosts && a.host != b.host || pids && a.pid != b.pid {
        return Some(false);
    }
    (hosts && pids).then_some(true)
}

/// Joins the groups of two records that are certain to be the same. Unless `is_one_process`, NCCL's number of a
/// communicator, or the times of a group's calls, must show that both records are of one process.
fn join_two(
    shared: &Shared,
    records: &mut [Record],
    [plugin, program]: [usize; 2],
    is_one_process: bool,
) {
    let mut joined: HashMap<usize, Vec<Pair>> = HashMap::new();
    let mut groups: HashMap<usize, usize> = HashMap::new();
    // One rank in one communicator is one process, so one certain group is enough.
    let is_one_process = is_one_process
        || (0..records[plugin].groups.len()).any(|local| {
            partner(shared, &records[plugin], local, &records[program], false).is_some()
        });
    for local in 0..records[plugin].groups.len() {
        let (seen, issued) = (&records[plugin], &records[program]);
        if let Some((group, pairs)) = partner(shared, seen, local, issued, is_one_process)
            && !groups.values().any(|&taken| taken == group)
        {
            groups.insert(local, group);
            joined.insert(local, pairs);
        } else if is_one_process && let Some(pairs) = messages(shared, seen, local, issued) {
            joined.insert(local, pairs);
        }
    }
    for (&local, pairs) in &joined {
        if let Some(&group) = groups.get(&local)
            && let Some(communicator) = communicator_of(shared, &records[plugin], local)
        {
            let name = &shared.groups[records[program].groups[group].group as usize].name;
            let communicator = communicator.clone();
            let moved = moved(
                communicator,
                name,
                &records[plugin],
                &records[program],
                pairs,
            );
            records[program].communicators.push(moved);
        }
        for pair in pairs {
            let seen = records[plugin].ops[pair.plugin];
            add_times(&mut records[program].ops[pair.program], &seen);
        }
    }
    drop_groups(shared, &mut records[plugin], &joined);
}

/// An operation in both records, by its position in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pair {
    plugin: usize,
    program: usize,
}

/// The communicator of one of the groups of the plug-in's record; `None` if the record does not hold it.
fn communicator_of<'a>(
    shared: &Shared,
    record: &'a Record,
    local: usize,
) -> Option<&'a Communicator> {
    let name = &shared.groups[record.groups[local].group as usize].name;
    record
        .communicators
        .iter()
        .find(|communicator| communicator.group == *name)
}

/// The program's group to which the communicator of the plug-in's group `local` belongs, with the operations that both
/// records hold.
///
/// The group is found by NCCL's number if the program's record has it, else by the communicator's name. PyTorch gives
/// communicators no name: these are found by the process's place in the group. The operations must also have been
/// recorded at the same times, unless the group was found by number, or by name and `is_one_process`. `None` unless
/// exactly one such group has operations that agree.
fn partner(
    shared: &Shared,
    plugin: &Record,
    local: usize,
    program: &Record,
    is_one_process: bool,
) -> Option<(usize, Vec<Pair>)> {
    let hash = communicator_of(shared, plugin, local)?.hash;
    let known = &shared.groups[plugin.groups[local].group as usize];
    // Operations that CUDA graphs replay have their own order, which no program's recorder knows.
    if known.name.ends_with("-graphs") {
        return None;
    }
    let place = plugin.groups[local].place;
    let fits = |local: &LocalGroup| {
        let ranks = &shared.groups[local.group as usize].ranks;
        place.is_none_or(|place| {
            ranks.is_empty()
                || (ranks.len() == place.size as usize
                    && ranks.get(place.rank as usize) == Some(&plugin.rank))
        })
    };
    let by_number = |local: &LocalGroup| {
        let name = &shared.groups[local.group as usize].name;
        let mut ids = program.comm_ids.iter();
        ids.any(|(number, group)| *number == hash && group == name)
    };
    let by_name = |local: &LocalGroup| {
        let group = &shared.groups[local.group as usize];
        known.desc == group.name || known.desc == group.desc
    };
    let groups_that = |also_fits: &dyn Fn(&LocalGroup) -> bool| -> Vec<usize> {
        let groups = program.groups.iter().enumerate();
        groups
            .filter(|(_, local)| fits(local) && also_fits(local))
            .map(|(index, _)| index)
            .collect()
    };
    let by_place = |local: &LocalGroup| {
        place.is_some() && !shared.groups[local.group as usize].ranks.is_empty()
    };
    let mut candidates = groups_that(&by_number);
    let is_numbered = !candidates.is_empty();
    let is_named = !known.desc.is_empty();
    if !is_numbered {
        candidates = match is_named {
            true => groups_that(&by_name),
            false => groups_that(&by_place),
        };
    }
    let agreeing = candidates.into_iter().filter_map(|group| {
        let pairs = pairs([plugin, program], local, group, is_one_process)?;
        let has_times = || are_near([plugin, program], &pairs);
        let is_certain = is_numbered
            || is_one_process && (is_named || has_times())
            || pairs.len() >= ENOUGH && has_times();
        is_certain.then_some((group, pairs))
    });
    let mut agreeing: Vec<_> = agreeing.collect();
    match agreeing.len() {
        1 => agreeing.pop(),
        _ => None,
    }
}

/// The pattern under which NCCL's profiler reports an operation that NCCL runs as one collective. `None` for messages
/// and for operations that NCCL runs as messages, and for blocks, agreements and one-sided accesses.
fn as_collective(kind: OpType) -> Option<Pattern> {
    match kind.pattern() {
        // A barrier is an all-reduce of one element.
        Pattern::AllReduce | Pattern::Barrier => Some(Pattern::AllReduce),
        pattern @ (Pattern::AllGather
        | Pattern::ReduceScatter
        | Pattern::Broadcast
        | Pattern::Reduce
        | Pattern::Unknown) => Some(pattern),
        Pattern::AllToAll
        | Pattern::Gather
        | Pattern::Scatter
        | Pattern::Send
        | Pattern::Recv
        | Pattern::Block
        | Pattern::Agreement
        | Pattern::OneSided => None,
    }
}

/// The operations of a group that NCCL runs as one collective each: their positions, with the patterns that NCCL's
/// profiler reports.
fn collectives(record: &Record, group: usize) -> Vec<(usize, Pattern)> {
    let ops = record.ops.iter().enumerate();
    let of_group = ops.filter(|(_, op)| usize::from(op.group) == group && !op.is_p2p);
    of_group
        .filter_map(|(position, op)| Some((position, as_collective(op.kind)?)))
        .collect()
}

/// The collectives that both records have, newest first; `None` if too few agree or they differ.
fn pairs(
    [plugin, program]: [&Record; 2],
    local: usize,
    group: usize,
    is_one_process: bool,
) -> Option<Vec<Pair>> {
    let seen = collectives(plugin, local);
    let issued = collectives(program, group);
    let is_complete = !plugin.wrapped() && !program.wrapped();
    // From the newest: the program may be ahead by calls that have not reached NCCL.
    let offsets = (0..=AHEAD.min(issued.len().saturating_sub(1))).filter_map(|ahead| {
        let issued = issued[..issued.len() - ahead].iter().rev();
        let pairs = agree(seen.iter().rev().zip(issued))?;
        let is_enough = match is_complete {
            true => seen.len() <= pairs.len() + PLUGIN_ONLY,
            false => pairs.len() >= ENOUGH || is_one_process && are_near([plugin, program], &pairs),
        };
        is_enough.then_some(())?;
        let distance_ns = |pair: &Pair| {
            let [a, b] = [plugin.ops[pair.plugin], program.ops[pair.program]];
            u128::from(a.created_ns.abs_diff(b.created_ns))
        };
        let mean = pairs.iter().map(distance_ns).sum::<u128>() / pairs.len() as u128;
        Some((mean, pairs))
    });
    offsets
        .min_by_key(|(mean, _)| *mean)
        .map(|(_, pairs)| pairs)
}

/// Whether both records hold these calls at nearly the same times. One in [`CALLS_PER_FAR`] may differ, since a thread
/// may lose its processor between the two records of a call. The calls of two processes would differ more often.
fn are_near([plugin, program]: [&Record; 2], pairs: &[Pair]) -> bool {
    let is_near = |pair: &Pair| {
        let [a, b] = [plugin.ops[pair.plugin], program.ops[pair.program]];
        b.created_ns > 0 && a.created_ns.abs_diff(b.created_ns) <= NEAR_NS
    };
    let far = pairs.iter().filter(|pair| !is_near(pair)).count();
    far * CALLS_PER_FAR <= pairs.len()
}

/// Pairs the plug-in's messages with those of the program's group. rcomm's backend for NCCL makes communicators for the
/// messages from one rank to another, and describes them as `<group>/0-1`. `None` if the plug-in's group `local` is of
/// no such communicator, the program has no such group, a ring has wrapped, or the messages do not match.
fn messages(shared: &Shared, plugin: &Record, local: usize, program: &Record) -> Option<Vec<Pair>> {
    let desc = &shared.groups[plugin.groups[local].group as usize].desc;
    let (name, ranks) = desc.rsplit_once('/')?;
    let (from, to) = ranks.split_once('-')?;
    let [from, to]: [u32; 2] = [from.parse().ok()?, to.parse().ok()?];
    let is_complete = !plugin.wrapped() && !program.wrapped();
    let has_name = |local: &LocalGroup| shared.groups[local.group as usize].name == name;
    let group = program
        .groups
        .iter()
        .position(has_name)
        .filter(|_| is_complete)?;
    let group_rank = plugin.groups[local].place?.rank;
    // Rank 0 of such a communicator sends, rank 1 receives.
    let (peer, pattern) = match group_rank {
        0 => (to, Pattern::Send),
        _ => (from, Pattern::Recv),
    };
    let matching = |record: &Record, group: usize, peer: Option<u32>| -> Vec<(usize, Pattern)> {
        let ops = record.ops.iter().enumerate();
        let of_group = ops.filter(|(_, op)| usize::from(op.group) == group);
        let is_wanted =
            |op: &Op| op.kind.pattern() == pattern && peer.is_none_or(|peer| peer == op.peer);
        of_group
            .filter(|(_, op)| is_wanted(op))
            .map(|(position, _)| (position, pattern))
            .collect()
    };
    let (seen, issued) = (
        matching(plugin, local, None),
        matching(program, group, Some(peer)),
    );
    (seen.len() <= issued.len()).then_some(())?;
    agree(seen.iter().zip(&issued))
}

/// One call of the plug-in's record and one of the program's, each by its position and its pattern.
type CallPair<'a> = (&'a (usize, Pattern), &'a (usize, Pattern));

/// The positions of all pairs; `None` if there are none, or if the two patterns of a pair are known and differ.
fn agree<'a>(both: impl Iterator<Item = CallPair<'a>>) -> Option<Vec<Pair>> {
    let mut pairs = Vec::new();
    for (&(plugin, seen), &(program, issued)) in both {
        if seen != issued && seen != Pattern::Unknown && issued != Pattern::Unknown {
            return None;
        }
        pairs.push(Pair { plugin, program });
    }
    (!pairs.is_empty()).then_some(pairs)
}

/// The plug-in's communicator with the name of the program's group and the program's record ids. Kernels and links of
/// operations that the program did not record are left out.
fn moved(
    communicator: Communicator,
    name: &str,
    plugin: &Record,
    program: &Record,
    pairs: &[Pair],
) -> Communicator {
    let numbers: HashMap<u64, u64> = pairs
        .iter()
        .map(|pair| {
            let from = plugin.record_id(&plugin.ops[pair.plugin]);
            (from, program.record_id(&program.ops[pair.program]))
        })
        .collect();
    let mut moved = Communicator {
        group: name.to_owned(),
        ..communicator
    };
    moved.kernels.retain_mut(|kernel| {
        let number = numbers.get(&kernel.record_id);
        kernel.record_id = number.copied().unwrap_or(0);
        number.is_some()
    });
    moved.links.retain_mut(|link| {
        let number = numbers.get(&link.record_id);
        link.record_id = number.copied().unwrap_or(0);
        number.is_some()
    });
    moved
}

/// Adds the plug-in's duration and start to an operation of the program that lacks them. If it was only scheduled, a
/// start makes it a started one.
fn add_times(op: &mut Op, seen: &Op) {
    if op.duration_ms < 0.0 {
        op.duration_ms = seen.duration_ms;
    }
    if op.started_us == NONE && seen.started_us != NONE {
        let started_ns = seen
            .created_ns
            .saturating_add(i64::from(seen.started_us) * 1_000);
        let after = started_ns.saturating_sub(op.created_ns).max(0) / 1_000;
        op.started_us = u32::try_from(after).unwrap_or(NONE - 1).min(NONE - 1);
        if op.state == EntryState::Scheduled {
            op.state = EntryState::Started;
        }
    }
}

/// Drops the joined groups with their operations and communicators.
fn drop_groups(shared: &Shared, record: &mut Record, joined: &HashMap<usize, Vec<Pair>>) {
    let is_joined: Vec<bool> = (0..record.groups.len())
        .map(|local| joined.contains_key(&local))
        .collect();
    let mut next = 0;
    let numbers: Vec<u16> = is_joined
        .iter()
        .map(|is_joined| {
            let number = next;
            next += u16::from(!is_joined);
            number
        })
        .collect();
    record.ops.retain_mut(|op| {
        let group = usize::from(op.group);
        op.group = numbers[group];
        !is_joined[group]
    });
    let names: Vec<&str> = (record.groups.iter().zip(&is_joined))
        .filter(|(_, is_joined)| **is_joined)
        .map(|(local, _)| shared.groups[local.group as usize].name.as_str())
        .collect();
    (record.communicators).retain(|communicator| !names.contains(&&*communicator.group));
    let mut is_joined = is_joined.into_iter();
    record.groups.retain(|_| !is_joined.next().unwrap_or(false));
}
