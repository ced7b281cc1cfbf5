//! Finds the rank of a dump that states none: in the name of its file or, if the groups of a dump by PyTorch's NCCL
//! recorder do not allow that rank, by these groups.
//!
//! Such a dump lists groups with their members. Its rank is a member of each group in which the dump has an operation.
//! Files are often named after something else: the number of the process on its host, or its process id next to the
//! rank.

use super::rank_name;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_verdict::Problem;
use rcomm_verdict::format::format_ranks;
use std::collections::BTreeSet;

/// The rank of a dump, and how it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placed {
    /// The number that was found in the name or, if the groups allow only that, another number in the name; `None` if
    /// there is none.
    Named(Option<Rank>),
    /// The rank that the groups show; the name states another one or none.
    ByGroups(Rank),
}

/// A dump that was given the rank that its groups show.
#[derive(Clone, Debug)]
pub(super) struct Renamed {
    pub(super) path: String,
    pub(super) named: Option<Rank>,
    pub(super) rank: Rank,
}

/// The rank of a dump that states none, in a file of this path and with this rank in its name.
pub(super) fn place(dump: &Dump, path: &str, named: Option<Rank>) -> Placed {
    let is_of_nccl = match dump.recorder {
        // A dump without entries does not show its recorder.
        Recorder::Nccl | Recorder::Unknown => true,
        Recorder::Rcomm
        | Recorder::NcclProfiler
        | Recorder::Hook
        | Recorder::NativeGloo
        | Recorder::Torchcomms => false,
    };
    if !is_of_nccl {
        return Placed::Named(named);
    }
    // Without an entry, every group counts as used.
    let mut is_used = vec![dump.entries.is_empty(); dump.groups.len()];
    for entry in &dump.entries {
        is_used[entry.group as usize] = true;
    }
    let used = is_used.iter().zip(&dump.groups);
    let used = used.filter_map(|(used, group)| used.then_some(&group.info.ranks[..]));
    let used: Vec<&[Rank]> = used.filter(|ranks| !ranks.is_empty()).collect();
    let is_member_of_used = |rank: Rank| used.iter().all(|ranks| ranks.contains(&rank));
    if used.is_empty() || named.is_some_and(is_member_of_used) {
        return Placed::Named(named);
    }
    let listed = dump.groups.iter().map(|group| &group.info.ranks[..]);
    let listed: Vec<&[Rank]> = listed.filter(|ranks| !ranks.is_empty()).collect();
    let mut members = common_members(&listed);
    if members.is_empty() {
        members = common_members(&used);
    }
    let numbers: BTreeSet<Rank> = rank_name::numbers(path)
        .into_iter()
        .filter(|number| members.contains(number))
        .collect();
    match (Vec::from_iter(numbers).as_slice(), members.as_slice()) {
        (&[number], _) => Placed::Named(Some(number)),
        (_, &[member]) => Placed::ByGroups(member),
        _ => Placed::Named(named),
    }
}

/// The ranks that are members of all of these groups.
fn common_members(groups: &[&[Rank]]) -> Vec<Rank> {
    let smallest = groups.iter().min_by_key(|ranks| ranks.len());
    let mut common = smallest.map_or(Vec::new(), |ranks| ranks.to_vec());
    common.retain(|rank| groups.iter().all(|ranks| ranks.contains(rank)));
    common
}

/// One note on all dumps that were given the rank that their groups show; `None` if there are none.
pub(super) fn note(mut renamed: Vec<Renamed>) -> Option<Problem> {
    const SHOWN: usize = 3;
    renamed.sort_by(|a, b| (a.rank, &a.path).cmp(&(b.rank, &b.path)));
    let ranks: Vec<Rank> = renamed.iter().map(|dump| dump.rank).collect();
    let shown = renamed.iter().take(SHOWN).map(|dump| {
        let file = dump.path.rsplit(['/', ':']).next().unwrap_or(&dump.path);
        let not_named = dump
            .named
            .map_or(String::new(), |named| format!(", not {named}"));
        format!("{file} is of rank {}{not_named}", dump.rank)
    });
    let mut shown: Vec<String> = shown.collect();
    if renamed.len() > SHOWN {
        shown.push(format!("and {} more", renamed.len() - SHOWN));
    }
    let shown = shown.join(", ");
    let mut paths = renamed.into_iter().map(|dump| dump.path);
    let path = paths.next()?;
    let mut note = Problem::stale_dump(
        path,
        format!(
            "the records of {} were given their rank by their groups, since their names do not state it: {shown}",
            format_ranks(&ranks)
        ),
    );
    note.more_paths = paths.collect();
    Some(note)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A dump with an operation in each of these groups.
    fn dump(groups: &[&[Rank]]) -> Dump {
        let entries: Vec<String> = (0..groups.len())
            .map(|at| {
                format!(
                    r#"{{"record_id":{at},"pg_id":{at},"process_group":["{at}","x"],"collective_seq_id":1,"op_id":1,
                    "profiling_name":"nccl:all_reduce","time_created_ns":1,"state":"completed"}}"#
                )
            })
            .collect();
        let config: Vec<String> = groups
            .iter()
            .enumerate()
            .map(|(at, ranks)| {
                format!(r#""{at}":{{"name":"{at}","desc":"x","ranks":"{ranks:?}"}}"#)
            })
            .collect();
        let text = format!(
            r#"{{"version":"2.10","entries":[{}],"pg_config":{{{}}}}}"#,
            entries.join(","),
            config.join(",")
        );
        let (dump, problems) = Dump::read(text.as_bytes()).expect("the text is a dump");
        assert!(problems.is_empty(), "{problems:?}");
        dump
    }

    const WORLD: &[Rank] = &[0, 1, 2, 3, 4, 5, 6, 7];

    #[test]
    fn a_name_that_the_groups_allow_counts() {
        let mesh = dump(&[WORLD, &[2, 3], &[2, 6]]);
        assert_eq!(place(&mesh, "rank_2", Some(2)), Placed::Named(Some(2)));
        let world = dump(&[WORLD]);
        assert_eq!(place(&world, "rank_5", Some(5)), Placed::Named(Some(5)));
    }

    #[test]
    fn another_number_of_the_name_is_the_rank_if_the_groups_allow_only_that() {
        let world = dump(&[WORLD]);
        let placed = place(&world, "/d/fr_5_4111", Some(4111));
        assert_eq!(placed, Placed::Named(Some(5)));
        let local = place(&world, "/d/node9-local3", None);
        assert_eq!(local, Placed::Named(None), "a number on a host is no rank");
    }

    #[test]
    fn the_only_common_member_of_all_groups_is_the_rank() {
        let mesh = dump(&[WORLD, &[4, 5], &[0, 4]]);
        let placed = place(&mesh, "/d/node-1.rank-0.pkl", Some(0));
        assert_eq!(placed, Placed::ByGroups(4), "rank 0 is not in [4, 5]");
        assert_eq!(place(&mesh, "/d/dump", None), Placed::ByGroups(4));
        let two = dump(&[WORLD, &[4, 5]]);
        assert_eq!(place(&two, "/d/rank_1", Some(1)), Placed::Named(Some(1)));
    }
}
