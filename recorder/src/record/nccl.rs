//! Reads a ring's data on NCCL communicators other than groups and operations.

use super::clock::Anchor;
use super::layout::{RingLayout, group, halves, header, kernel, link, slot};
use super::ring::{Found, SlotRing};
use super::sync::Read;
use super::{layout, rings};
use crate::model::dump::{Dump, Recorder};
use crate::model::{Communicator, Entry, EntryState, KernelProgress, LinkProgress, LinkWait};
use std::collections::HashMap;

/// NCCL's algorithms, by their numbers in a ring; other numbers are unknown.
pub const ALGORITHMS: [&str; 8] = [
    "",
    "TREE",
    "RING",
    "COLLNET_DIRECT",
    "COLLNET_CHAIN",
    "NVLS",
    "NVLS_TREE",
    "PAT",
];

/// NCCL's protocols, by their numbers in a ring; other numbers are unknown.
pub const PROTOCOLS: [&str; 4] = ["", "LL", "LL128", "SIMPLE"];

/// How often a row is read at most while it changes.
const TRIES: u32 = 100;

/// Adds to a dump the communicators of the ring that it was read from. If the ring is a program's, a communicator has
/// its hash and its group's name, as in the program's dumps. If the ring is that of the plug-in for NCCL, it has its
/// group's name, its hash, and its operations and transfers in progress.
pub(crate) fn put_into(dump: &mut Dump, memory: &impl Read, layout: &RingLayout) {
    let anchor = layout::load_anchor(memory);
    let used = memory
        .load(header::GROUPS_USED)
        .min(layout.groups.rows as u64) as usize;
    let mut by_row: HashMap<usize, Communicator> = HashMap::new();
    for (row, dump_group) in dump.groups.iter().enumerate().take(used) {
        let start = layout.groups.row(row, group::WORDS);
        let hash = memory.load(start.saturating_add(group::COMM_HASH));
        if hash == 0 {
            continue;
        }
        let communicator = Communicator {
            group: dump_group.info.name.clone(),
            hash,
            kernels: Vec::new(),
            links: Vec::new(),
            links_lost: memory.load(header::LINKS_LOST),
        };
        by_row.insert(row, communicator);
    }
    if by_row.is_empty() {
        return;
    }
    if dump.recorder != Recorder::NcclProfiler {
        let mut communicators: Vec<_> = by_row.into_iter().collect();
        communicators.sort_unstable_by_key(|&(row, _)| row);
        let sections = communicators.into_iter().map(|(_, communicator)| {
            let id = format!("{:#018x}", communicator.hash);
            (id, vec![("group".to_owned(), communicator.group)])
        });
        dump.nccl_comm_state = sections.collect();
        return;
    }
    let slots = rings::slots(layout);
    for entry in &dump.entries {
        if let Some(progress) = kernel_of(entry, memory, layout, &slots, anchor)
            && let Some(communicator) = by_row.get_mut(&(entry.group as usize))
        {
            communicator.kernels.push(progress);
        }
    }
    let ring = rings::links(layout);
    let rows = memory
        .load(header::LINKS_USED)
        .min(layout.links.rows as u64) as usize;
    for index in 0..rows {
        if let Found::Record { words, .. } = ring.read(memory, index, TRIES)
            && let Some((row, progress)) = link_of(&words, anchor)
            && let Some(communicator) = by_row.get_mut(&row)
        {
            communicator.links.push(progress);
        }
    }
    let mut communicators: Vec<_> = by_row.into_iter().collect();
    communicators.sort_unstable_by_key(|&(row, _)| row);
    let facts = communicators
        .iter()
        .map(|(_, communicator)| communicator.to_facts());
    dump.nccl_comm_state = facts.collect();
}

/// The progress of an entry's kernel; `None` if the ring has none for it, or the entry has ended.
fn kernel_of(
    entry: &Entry,
    memory: &impl Read,
    layout: &RingLayout,
    slots: &SlotRing<{ slot::WORDS }>,
    anchor: Anchor,
) -> Option<KernelProgress> {
    if layout.kernels.rows == 0 || entry.state >= EntryState::Completed {
        return None;
    }
    let found = rings::kernels(layout).read(memory, slots.index_of(entry.record_id), TRIES);
    let Found::Record { id, words } = found else {
        return None;
    };
    if id != entry.record_id {
        return None;
    }
    let [channels, algorithm, protocol, ..] = words[kernel::PLAN].to_le_bytes();
    let name = |names: &[&str], number: u8| {
        let name = names.get(usize::from(number)).copied();
        name.unwrap_or_default().to_owned()
    };
    Some(KernelProgress {
        record_id: id,
        channels,
        algorithm: name(&ALGORITHMS, algorithm),
        protocol: name(&PROTOCOLS, protocol),
        enqueued_ns: anchor.wall_of(words[kernel::ENQUEUED]),
        launched_ns: anchor.wall_of(words[kernel::LAUNCHED]),
        started: words[kernel::STARTED],
        finished: words[kernel::FINISHED],
    })
}

/// The group's row, and the progress; `None` for a link without a transfer in progress.
fn link_of(words: &[u64; link::WORDS], anchor: Anchor) -> Option<(usize, LinkProgress)> {
    let place = words[link::PLACE];
    let wait = LinkWait::from_code((place >> link::WAIT_SHIFT) as u8 & 0x7f)?;
    let (step, steps) = halves(words[link::STEPS]);
    let progress = LinkProgress {
        channel: (place >> link::CHANNEL_SHIFT) as u8,
        peer: halves(place).1,
        is_send: place & link::SEND != 0,
        record_id: words[link::RECORD],
        step,
        steps,
        wait,
        since_ns: anchor.wall_of(words[link::SINCE]),
    };
    (wait != LinkWait::Idle).then_some((place as u16 as usize, progress))
}

/// A hash of the stamps of all links, which changes when any of them does.
pub(crate) fn fingerprint(memory: &impl Read, layout: &RingLayout) -> u64 {
    let ring = rings::links(layout);
    let rows = memory
        .load(header::LINKS_USED)
        .min(layout.links.rows as u64) as usize;
    ring.hash_stamps(memory, rows, 0)
}
