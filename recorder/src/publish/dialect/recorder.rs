//! Detects which recorder wrote a dump.

use crate::model::EntryState;
use crate::model::dump::{Dump, Recorder};

/// Decides by the entries' backends and by the fields that each recorder omits.
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
    let all = |holds: &dyn Fn(&crate::model::Entry) -> bool| dump.entries.iter().all(holds);
    // torchcomms describes a communicator by its backend, and has no separate count of messages.
    if all(&|entry| {
        let info = &dump.groups[entry.group as usize].info;
        entry.p2p_seq_id == 0 && !entry.is_p2p && info.desc == backend(entry.signature)
    }) {
        return Recorder::Torchcomms;
    }
    if all(&|entry| {
        backend(entry.signature) == "gloo"
            && entry.state == EntryState::Scheduled
            && entry.time_discovered_started_ns == 0
            && entry.time_discovered_completed_ns == 0
            && !entry.is_p2p
    }) {
        return Recorder::NativeGloo;
    }
    // These backends have recorders of their own, with states from device events; every other backend is
    // recorded by the hook.
    if all(&|entry| {
        matches!(
            backend(entry.signature),
            "nccl" | "ncclx" | "xccl" | "rccl" | "hccl"
        )
    }) {
        return Recorder::Nccl;
    }
    Recorder::Hook
}

/// Gives the ranks and the status of gloo's unnamed group to the world that entries name.
pub(super) fn name_gloo_world(dump: &mut Dump) {
    let Some(unnamed) = dump.groups.iter().position(|group| {
        group.info.name.is_empty() && group.info.desc.is_empty() && !group.info.ranks.is_empty()
    }) else {
        return;
    };
    let used = dump
        .entries
        .iter()
        .any(|entry| entry.group as usize == unnamed);
    let world = dump
        .groups
        .iter()
        .position(|group| group.info.desc == "default_pg" && group.info.ranks.is_empty());
    // Groups without entries come last. Only if the unnamed group is the last one, removing it shifts no index.
    if let (false, Some(world), true) = (used, world, unnamed + 1 == dump.groups.len())
        && let Some(group) = dump.groups.pop()
    {
        dump.groups[world].info.ranks = group.info.ranks;
        if dump.groups[world].status.is_none() {
            dump.groups[world].status = group.status;
        }
    }
}
