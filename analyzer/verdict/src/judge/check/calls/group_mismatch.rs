//! E105: ranks state different members for one group, or made their groups in different orders.
//!
//! Records state the members of the groups that their ranks made. All members make a group together (with PyTorch all
//! ranks of the world), so a member that states other members under the same name has made another group. The two
//! communicators never meet, and a recorder that starts with the communicator shows no operation of them. The
//! statements are proof by themselves, even if nothing is pending.
//!
//! Two statements contradict each other only if rank `a` names `b` as a member and `b` states other members under that
//! name. Groups of one name with different ranks (one for each tensor-parallel group, say) are usual.
//!
//! A rank that left out the creation of a group gives its next group the name of the one left out. If both have the
//! same members, only their descriptions differ. Such a difference is reported if the order in which the ranks made
//! their groups shows who is odd, and if no operation of such a group has completed.

use crate::align::record::Record;
use crate::align::shared::SharedGroup;
use crate::align::{GlooWorld, position};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::wait_graph::{Node, Place};
use crate::report::format::{format_ranks, group_label};
use crate::report::{Code, GroupRef};
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, BTreeSet, HashMap};

pub(crate) struct GroupMismatch;

impl Check for GroupMismatch {
    fn codes(&self) -> &'static [Code] {
        &[Code::E105]
    }

    fn run(&self, ctx: &Context<'_>, _so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let conflicts = conflicts(ctx);
        if !conflicts.is_empty() {
            let draft = by_order(ctx, &conflicts).unwrap_or_else(|| by_members(ctx, &conflicts));
            return vec![draft];
        }
        let conflicts = other_descriptions(ctx);
        let draft = (!conflicts.is_empty()).then(|| by_order(ctx, &conflicts));
        draft.flatten().into_iter().collect()
    }
}

/// The groups that ranks state under one name, and which ranks contradict each other.
struct Conflict {
    name: String,
    /// For each rank that is part of a contradiction: the group that it states, as an index into the shared groups.
    stated: BTreeMap<Rank, u32>,
    /// Pairs of ranks that contradict each other, the lower one first.
    pairs: BTreeSet<(Rank, Rank)>,
}

/// One entry for each group name under which ranks contradict each other.
fn conflicts(ctx: &Context<'_>) -> Vec<Conflict> {
    // Ranks can contradict each other only under names that several groups have.
    let mut of_name: HashMap<&str, usize> = HashMap::new();
    for group in &ctx.aligned.shared.groups {
        *of_name.entry(&group.name).or_default() += 1;
    }
    let is_ambiguous = |group: &SharedGroup| of_name.get(&*group.name).is_some_and(|&n| n > 1);
    let ambiguous: Vec<bool> = (ctx.aligned.shared.groups.iter())
        .map(|group| !group.name.is_empty() && is_ambiguous(group))
        .collect();
    // Gloo's own recorder may name the members of another group.
    let of_gloo = GlooWorld::of(ctx.aligned.shared, ctx.aligned.records);
    let is_by_gloo = |group: u32| {
        let world = of_gloo.as_ref();
        world.is_some_and(|world| world.contains(group))
    };
    let mut stated: BTreeMap<&str, BTreeMap<Rank, BTreeSet<u32>>> = BTreeMap::new();
    for record in ctx.aligned.records {
        for local in &record.groups {
            let group = group(ctx, local.group);
            if is_by_gloo(local.group) {
                continue;
            }
            if ambiguous[local.group as usize] && position(&group.ranks, record.rank).is_some() {
                let of_name = stated.entry(&group.name).or_default();
                of_name.entry(record.rank).or_default().insert(local.group);
            }
        }
    }
    let mut conflicts = Vec::new();
    for (name, by_rank) in stated {
        // If one rank has several groups of this name, the name does not identify a group.
        let single: Option<BTreeMap<Rank, u32>> = by_rank
            .iter()
            .map(|(&rank, groups)| (groups.len() == 1).then_some((rank, *groups.first()?)))
            .collect();
        let Some(stated) = single else { continue };
        let pairs = contradictions(ctx, &stated);
        if !pairs.is_empty() {
            let involved: BTreeSet<Rank> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
            conflicts.push(Conflict {
                name: name.to_owned(),
                stated: stated
                    .into_iter()
                    .filter(|(rank, _)| involved.contains(rank))
                    .collect(),
                pairs,
            });
        }
    }
    conflicts
}

/// One entry for each group of which ranks state the same name and members and different descriptions, if no operation
/// of it has completed.
fn other_descriptions(ctx: &Context<'_>) -> Vec<Conflict> {
    // Nearly always no group has several descriptions, and then the ranks that state them need not be collected.
    let mut first: Vec<Option<&str>> = vec![None; ctx.aligned.shared.groups.len()];
    let mut differ: BTreeSet<u32> = BTreeSet::new();
    let locals = ctx.aligned.records.iter().flat_map(|record| &record.groups);
    for local in locals.filter(|local| is_described(&local.desc)) {
        let first = first[local.group as usize].get_or_insert(&local.desc);
        if **first != *local.desc {
            differ.insert(local.group);
        }
    }
    if differ.is_empty() {
        return Vec::new();
    }
    let mut stated: BTreeMap<u32, BTreeMap<&str, Vec<Rank>>> = BTreeMap::new();
    let mut in_use: BTreeSet<u32> = BTreeSet::new();
    for (record, lanes) in ctx.aligned.records.iter().zip(&ctx.aligned.lanes) {
        for (local, lane) in record.groups.iter().zip(lanes) {
            if !is_described(&local.desc) || !differ.contains(&local.group) {
                continue;
            }
            let by_desc = stated.entry(local.group).or_default();
            by_desc.entry(&local.desc).or_default().push(record.rank);
            let mut positions = lane.collectives.iter().chain(&lane.messages);
            if positions.any(|&position| record.ops[position as usize].completed()) {
                in_use.insert(local.group);
            }
        }
    }
    stated.retain(|id, _| !in_use.contains(id));
    let conflicts = stated.into_iter().map(|(id, by_desc)| {
        let mut sides: Vec<Vec<Rank>> = by_desc.into_values().collect();
        sides.sort_by_key(|side| std::cmp::Reverse(side.len()));
        let first = sides[0][0];
        let others = sides[1..].iter().flatten();
        Conflict {
            name: group(ctx, id).name.clone(),
            pairs: others
                .map(|&other| (first.min(other), first.max(other)))
                .collect(),
            stated: sides.concat().into_iter().map(|rank| (rank, id)).collect(),
        }
    });
    conflicts.collect()
}

/// Whether this is a description that the program gave.
fn is_described(desc: &str) -> bool {
    !desc.is_empty() && desc != "undefined"
}

/// The pairs of ranks that contradict each other, the lower rank first. `stated`: for each rank, the group that it
/// states under one name.
fn contradictions(ctx: &Context<'_>, stated: &BTreeMap<Rank, u32>) -> BTreeSet<(Rank, Rank)> {
    let variants: BTreeSet<u32> = stated.values().copied().collect();
    let mut pairs = BTreeSet::new();
    if variants.len() < 2 {
        return pairs;
    }
    for variant in variants {
        let ranks = &group(ctx, variant).ranks;
        let others: Vec<Rank> = ranks
            .iter()
            .copied()
            .filter(|rank| {
                let theirs = stated.get(rank).copied();
                theirs.is_some_and(|theirs| !same_members(ctx, variant, theirs))
            })
            .collect();
        if others.is_empty() {
            continue;
        }
        for (&rank, _) in stated.iter().filter(|&(_, &group)| group == variant) {
            pairs.extend(
                others
                    .iter()
                    .map(|&other| (rank.min(other), rank.max(other))),
            );
        }
    }
    pairs
}

fn group<'a>(ctx: &Context<'a>, id: u32) -> &'a SharedGroup {
    &ctx.aligned.shared.groups[id as usize]
}

fn members(ctx: &Context<'_>, id: u32) -> Vec<Rank> {
    let mut ranks = group(ctx, id).ranks.to_vec();
    ranks.sort_unstable();
    ranks
}

fn same_members(ctx: &Context<'_>, a: u32, b: u32) -> bool {
    a == b || members(ctx, a) == members(ctx, b)
}

/// Descriptions of a rank's groups in the order in which it made them. `None` if a group has no description or its name
/// is not a number: only numbers show the order.
fn creation_order(ctx: &Context<'_>, record: &Record) -> Option<Vec<String>> {
    let mut numbered = Vec::new();
    for local in &record.groups {
        let group = group(ctx, local.group);
        if !is_described(&local.desc) {
            return None;
        }
        numbered.push((group.name.parse::<u64>().ok()?, local.desc.to_string()));
    }
    numbered.sort();
    Some(numbered.into_iter().map(|(_, desc)| desc).collect())
}

/// The finding on ranks that made their groups in another order than most. `None` if an order is not recorded, if these
/// ranks are not fewer than those with the most frequent order, or if the orders do not explain all conflicts.
fn by_order(ctx: &Context<'_>, conflicts: &[Conflict]) -> Option<FindingDraft> {
    let mut ranks_by_order: BTreeMap<Vec<String>, BTreeSet<Rank>> = BTreeMap::new();
    for record in ctx.aligned.records {
        let order = creation_order(ctx, record)?;
        ranks_by_order.entry(order).or_default().insert(record.rank);
    }
    let (usual, most) = ranks_by_order.iter().max_by_key(|(_, ranks)| ranks.len())?;
    let odd: BTreeSet<Rank> = ranks_by_order
        .values()
        .filter(|ranks| *ranks != most)
        .flatten()
        .copied()
        .collect();
    let explains = |conflict: &Conflict| {
        let mut pairs = conflict.pairs.iter();
        pairs.all(|(a, b)| odd.contains(a) || odd.contains(b))
    };
    if odd.len() >= most.len() || !conflicts.iter().all(explains) {
        return None;
    }
    let culprits: Vec<Rank> = odd.into_iter().collect();
    let first = *culprits.first()?;
    let (theirs, _) = ranks_by_order
        .iter()
        .find(|(_, ranks)| ranks.contains(&first))?;
    let from = theirs
        .iter()
        .zip(usual)
        .position(|(a, b)| a != b)
        .unwrap_or_else(|| theirs.len().min(usual.len()));
    let list = |order: &[String]| match &order[from.min(order.len())..] {
        [] => "no further group".to_owned(),
        rest => rest[..rest.len().min(4)].join(", then "),
    };
    let sentence = format!(
        "{} made {} groups in another order than the {} other ranks: {}, where these made {}",
        format_ranks(&culprits),
        if culprits.len() == 1 { "its" } else { "their" },
        most.len(),
        list(theirs),
        list(usual),
    );
    let mut draft = blame(ctx, conflicts, &culprits, sentence);
    draft.next = format!(
        "make {} create the same groups in the same order as all others: every new_group call is collective",
        format_ranks(&culprits)
    );
    Some(draft)
}

/// The finding on ranks that state other members than others. Its culprit is the one rank that is part of every
/// contradiction. If there is none, its culprits are the ranks that state other members than the majority; without a
/// majority it has none.
fn by_members(ctx: &Context<'_>, conflicts: &[Conflict]) -> FindingDraft {
    let all_pairs: BTreeSet<(Rank, Rank)> = conflicts
        .iter()
        .flat_map(|conflict| conflict.pairs.iter().copied())
        .collect();
    let involved: BTreeSet<Rank> = all_pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
    // One rank that is part of every contradiction explains them all.
    let in_all_pairs: Vec<Rank> = involved
        .iter()
        .copied()
        .filter(|rank| all_pairs.iter().all(|(a, b)| a == rank || b == rank))
        .collect();
    let minority = || {
        let mut odd: BTreeSet<Rank> = BTreeSet::new();
        for conflict in conflicts {
            let sides = sides(ctx, conflict);
            let most = sides.values().map(Vec::len).max().unwrap_or(0);
            let majority = sides.values().filter(|voters| voters.len() == most);
            if majority.count() != 1 {
                return None;
            }
            let fewer = sides.values().filter(|voters| voters.len() < most);
            odd.extend(fewer.flatten());
        }
        Some(odd.into_iter().collect::<Vec<Rank>>())
    };
    let culprits = match in_all_pairs.as_slice() {
        [one] => Some(vec![*one]),
        _ => minority().filter(|odd| odd.len() * 2 < involved.len()),
    };
    let conflict = &conflicts[0];
    let sides = sides(ctx, conflict);
    let label = {
        let groups = conflict.stated.values().map(|&id| group(ctx, id));
        let descs: BTreeSet<&str> = groups.map(|group| group.desc.as_str()).collect();
        let desc = descs.first().copied().unwrap_or_default();
        // Ranks that mean different groups describe them differently.
        if descs.len() > 1 || !is_described(desc) || desc == conflict.name {
            conflict.name.clone()
        } else {
            group_label(&GroupRef {
                name: conflict.name.clone(),
                desc: desc.to_owned(),
                ranks: [].into(),
            })
        }
    };
    let mut stated: Vec<(&Vec<Rank>, &Vec<Rank>)> = sides.iter().collect();
    // The side of the culprits comes first, then the smaller one.
    let is_blamed = |voters: &[Rank]| {
        let culprits = culprits.as_deref().unwrap_or_default();
        voters.iter().any(|rank| culprits.contains(rank))
    };
    stated.sort_by_key(|(ranks, voters)| (!is_blamed(voters), voters.len(), (*ranks).clone()));
    let statement = |(ranks, voters): &(&Vec<Rank>, &Vec<Rank>)| {
        let verb = if voters.len() == 1 { "states" } else { "state" };
        format!("{} {verb} {}", format_ranks(voters), format_ranks(ranks))
    };
    let shown: Vec<String> = stated.iter().take(3).map(statement).collect();
    let as_members = format!("as members of group {label}");
    let mut sentence = match shown.split_first() {
        Some((first, rest)) => format!("{first} {as_members}; {}", rest.join("; ")),
        None => format!("ranks state different ranks {as_members}"),
    };
    match culprits {
        Some(culprits) => {
            let mut draft = blame(ctx, conflicts, &culprits, sentence);
            let pass = if culprits.len() == 1 {
                "passes"
            } else {
                "pass"
            };
            draft.next = format!(
                "compare the ranks that {} {pass} to new_group for {label} with those of the others",
                format_ranks(&culprits)
            );
            draft
        }
        None => {
            sentence.push_str("; their statements alone do not show which of them is wrong");
            let mut draft = blame(ctx, conflicts, &[], sentence);
            draft.confidence = 0.5;
            draft.alternatives = stated
                .iter()
                .take(16)
                .map(|(_, voters)| (*voters).clone())
                .collect();
            draft.next = format!("compare the ranks that each passes to new_group for {label}");
            draft
        }
    }
}

/// For each list of members that is stated under one name: the ranks that state it.
fn sides(ctx: &Context<'_>, conflict: &Conflict) -> BTreeMap<Vec<Rank>, Vec<Rank>> {
    let mut sides: BTreeMap<Vec<Rank>, Vec<Rank>> = BTreeMap::new();
    for (&rank, &group) in &conflict.stated {
        sides.entry(members(ctx, group)).or_default().push(rank);
    }
    sides
}

/// An E105 with these culprits and this sentence. Its targets are all ranks that are part of a contradiction, and the
/// places of the groups under whose names they contradict each other.
fn blame(
    ctx: &Context<'_>,
    conflicts: &[Conflict],
    culprits: &[Rank],
    sentence: String,
) -> FindingDraft {
    let mut draft = FindingDraft::new(Code::E105, sentence);
    draft.confidence = 0.97;
    draft.culprits = culprits.to_vec();
    let names: BTreeSet<&str> = conflicts
        .iter()
        .map(|conflict| conflict.name.as_str())
        .collect();
    let places = ctx.graph.places.iter().enumerate().filter(|(_, place)| {
        let (Place::Collective { group, .. } | Place::Batch { group, .. }) = place;
        names.contains(ctx.aligned.groups[*group].name.as_str())
    });
    draft.targets = places.map(|(place, _)| place + ctx.graph.ranks).collect();
    let parties = conflicts.iter().flat_map(|conflict| conflict.stated.keys());
    let nodes: BTreeSet<Node> = parties.filter_map(|&rank| ctx.graph.node(rank)).collect();
    draft.targets.extend(nodes);
    draft.ruled_out = vec!["cross_group_deadlock: the ranks do not mean the same group".to_owned()];
    draft
}

#[cfg(test)]
mod tests {
    use crate::{Code, Policy, Report, Verdict, analyze};
    use rcomm_recorder::model::{ProcessGroupInfo, Rank};
    use rcomm_recorder::publish::{Dump, DumpGroup};

    /// The names, descriptions and members of the groups that a rank states.
    type Stated<'a> = Vec<(&'a str, &'a str, Vec<Rank>)>;

    /// Judges a job whose records hold nothing but the stated groups.
    fn judge(ranks: &[Stated<'_>]) -> Report {
        let dumps: Vec<Dump> = (0..)
            .zip(ranks)
            .map(|(rank, stated)| {
                let mut dump = Dump::default();
                dump.identity.rank = Some(rank);
                dump.groups = stated
                    .iter()
                    .map(|(name, desc, ranks)| DumpGroup {
                        info: ProcessGroupInfo {
                            id: ProcessGroupInfo::UNKNOWN_ID,
                            name: (*name).to_owned(),
                            desc: (*desc).to_owned(),
                            ranks: ranks.clone().into(),
                        },
                        status: None,
                        place: None,
                    })
                    .collect();
                dump
            })
            .collect();
        analyze(&dumps, &Policy::default())
    }

    fn world() -> (&'static str, &'static str, Vec<Rank>) {
        ("0", "default_pg", vec![0, 1, 2, 3])
    }

    #[test]
    fn the_rank_that_states_other_members_is_named_with_nothing_pending() {
        let usual = vec![world(), ("1", "dp", vec![0, 1, 2, 3])];
        let mut ranks = vec![usual; 4];
        ranks[1][1].2 = vec![0, 1, 2];
        let report = judge(&ranks);
        assert_eq!(report.verdict, Verdict::Mismatch);
        let first = &report.findings[0];
        assert_eq!((first.code, &first.culprit_ranks), (Code::E105, &vec![1]));
        assert_eq!(
            first.sentence,
            "rank 1 states ranks 0-2 as members of group dp/1; ranks 0, 2 and 3 state ranks 0-3"
        );
    }

    #[test]
    fn the_rank_that_made_its_groups_in_another_order_is_named() {
        let groups = |dp: &'static str, tp: &'static str, members: [[Rank; 2]; 2]| {
            vec![
                world(),
                (dp, "dp", members[0].to_vec()),
                (tp, "tp", members[1].to_vec()),
            ]
        };
        let report = judge(&[
            groups("1", "3", [[0, 2], [0, 1]]),
            groups("2", "3", [[1, 3], [0, 1]]),
            groups("1", "4", [[0, 2], [2, 3]]),
            // This rank makes tp's groups first.
            groups("4", "2", [[1, 3], [2, 3]]),
        ]);
        let first = &report.findings[0];
        assert_eq!((first.code, &first.culprit_ranks), (Code::E105, &vec![3]));
        assert_eq!(
            first.sentence,
            "rank 3 made its groups in another order than the 3 other ranks: tp, then dp, where these made dp, then tp"
        );
    }

    #[test]
    fn a_rank_that_left_out_a_group_is_named_if_the_next_has_the_same_members() {
        let members = vec![0, 1, 2, 3];
        let usual = vec![
            world(),
            ("1", "model", members.clone()),
            ("2", "data", members.clone()),
        ];
        let mut ranks = vec![usual; 4];
        ranks[2] = vec![world(), ("1", "data", members.clone())];
        let report = judge(&ranks);
        let first = &report.findings[0];
        assert_eq!((first.code, &first.culprit_ranks), (Code::E105, &vec![2]));
        assert_eq!(
            first.sentence,
            "rank 2 made its groups in another order than the 3 other ranks: data, where these made model, then data"
        );
        // Descriptions alone, by which no rank is odd, prove nothing.
        let own = ["a", "b", "c", "d"].map(|desc| vec![world(), ("1", desc, members.clone())]);
        assert!(judge(&own).findings.is_empty());
    }

    #[test]
    fn one_against_one_blames_neither() {
        let report = judge(&[
            vec![("1", "pair", vec![0, 1])],
            vec![("1", "pair", vec![0, 1, 2])],
        ]);
        let first = &report.findings[0];
        assert_eq!((first.code, first.culprit_ranks.len()), (Code::E105, 0));
        assert_eq!(first.alternatives, [vec![0], vec![1]]);
    }

    #[test]
    fn groups_of_one_name_with_different_ranks_do_not_contradict_each_other() {
        let report = judge(&[
            vec![world(), ("tp", "tp", vec![0, 1])],
            vec![world(), ("tp", "tp", vec![1, 0])],
            vec![world(), ("tp", "tp", vec![2, 3])],
            // Not made yet.
            vec![world()],
        ]);
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        // A name that one rank uses twice does not identify a group.
        let report = judge(&[
            vec![("tp", "tp", vec![0, 1]), ("tp", "tp", vec![0, 2])],
            vec![("tp", "tp", vec![0, 1])],
            vec![("tp", "tp", vec![0, 2])],
        ]);
        assert!(report.findings.is_empty(), "{:?}", report.findings);
    }
}
