//! Detects which recorder wrote a dump, and gives the world of gloo's recorder its members.

use crate::model::dump::{Dump, DumpGroup, Recorder};
use crate::model::{Entry, EntryState, OpType};
use std::collections::HashSet;

/// Decides by the backends, states, point-to-point fields and group descriptions of all entries; without entries, by
/// the groups.
pub(super) fn detect(dump: &Dump) -> Recorder {
    if dump.entries.is_empty() {
        // Gloo's recorder notes the world's ranks before the world has a name.
        let unnamed = matches!(&dump.groups[..], [only] if only.info.name.is_empty());
        return if unnamed {
            Recorder::NativeGloo
        } else {
            Recorder::Unknown
        };
    }
    let backend = |signature: u32| dump.signatures[signature as usize].backend.as_str();
    let all_entries = |holds: &dyn Fn(&crate::model::Entry) -> bool| dump.entries.iter().all(holds);
    // torchcomms describes a communicator by its backend, counts collectives and messages together (`p2p_seq_id` is 0),
    // and does not set `is_p2p`.
    if all_entries(&|entry| {
        let info = &dump.groups[entry.group as usize].info;
        entry.p2p_seq_id == 0 && !entry.is_p2p && info.desc == backend(entry.signature)
    }) {
        return Recorder::Torchcomms;
    }
    if all_entries(&|entry| {
        backend(entry.signature) == "gloo"
            && entry.state == EntryState::Scheduled
            && entry.time_discovered_started_ns == 0
            && entry.time_discovered_completed_ns == 0
            && !entry.is_p2p
    }) {
        return Recorder::NativeGloo;
    }
    // These backends have a recorder of their own, with states from device events. All other dumps (of gloo too, unless
    // its own recorder wrote them) were written by PyTorch's hook, which records any backend.
    if all_entries(&|entry| {
        matches!(
            backend(entry.signature),
            "nccl" | "ncclx" | "xccl" | "rccl" | "hccl" | "mccl" | "cncl"
        )
    }) {
        return Recorder::Nccl;
    }
    match markers_hold_states(dump) {
        true => Recorder::Nccl,
        false => Recorder::Hook,
    }
}

/// Whether completed markers close batches of messages whose own entries are all still scheduled. PyTorch's
/// ProcessGroupNCCL and its forks record batches in this way, whatever they call their backend.
fn markers_hold_states(dump: &Dump) -> bool {
    let batch = |entry: &Entry| (entry.group, entry.p2p_seq_id, entry.collective_seq_id);
    let closed: HashSet<_> = dump
        .entries
        .iter()
        .filter(|entry| entry.op == OpType::Coalesced && entry.state == EntryState::Completed)
        .map(batch)
        .collect();
    let members = dump.entries.iter();
    let mut members = members
        .filter(|entry| entry.is_p2p && entry.op.is_p2p() && closed.contains(&batch(entry)))
        .peekable();
    members.peek().is_some() && members.all(|entry| entry.state == EntryState::Scheduled)
}

/// Moves the ranks and the status of gloo's unnamed group to `default_pg`, and removes the unnamed group. Does nothing
/// if an entry refers to it, if it is not the last group, if there is no `default_pg` without ranks, or if there are
/// other groups. gloo's unnamed group is the one that was made last, which is then not the world.
pub(super) fn merge_unnamed_gloo_group(dump: &mut Dump) {
    let Some(unnamed) = dump.groups.iter().position(|group| {
        group.info.name.is_empty() && group.info.desc.is_empty() && !group.info.ranks.is_empty()
    }) else {
        return;
    };
    let used = dump
        .entries
        .iter()
        .any(|entry| entry.group as usize == unnamed);
    let is_world = |group: &DumpGroup| group.info.desc == "default_pg";
    let mut others = dump.groups.iter().enumerate();
    if others.any(|(index, group)| index != unnamed && !is_world(group)) {
        return;
    }
    let world = dump
        .groups
        .iter()
        .position(|group| is_world(group) && group.info.ranks.is_empty());
    // Groups without entries come last. Removing the unnamed group keeps the indices of the others only if it is the
    // last.
    if let (false, Some(world), true) = (used, world, unnamed + 1 == dump.groups.len())
        && let Some(group) = dump.groups.pop()
    {
        dump.groups[world].info.ranks = group.info.ranks;
        if dump.groups[world].status.is_none() {
            dump.groups[world].status = group.status;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ProcessGroupInfo;

    fn group(name: &str, desc: &str, ranks: &[u32]) -> DumpGroup {
        DumpGroup {
            info: ProcessGroupInfo {
                id: 0,
                name: name.to_owned(),
                desc: desc.to_owned(),
                ranks: ranks.into(),
            },
            place: None,
            status: None,
        }
    }

    fn merged(groups: Vec<DumpGroup>) -> Vec<DumpGroup> {
        let mut dump = Dump {
            groups,
            ..Dump::default()
        };
        merge_unnamed_gloo_group(&mut dump);
        dump.groups
    }

    #[test]
    fn the_newest_group_is_the_world_only_if_there_is_no_other_group() {
        let world = group("0", "default_pg", &[]);
        let newest = group("", "", &[0, 1]);
        assert_eq!(
            merged(vec![world.clone(), newest.clone()]),
            [group("0", "default_pg", &[0, 1])]
        );
        let three_groups = vec![world, group("1", "tp", &[]), newest];
        assert_eq!(merged(three_groups.clone()), three_groups);
    }
}
