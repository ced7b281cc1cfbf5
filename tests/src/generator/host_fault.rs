//! Injects faults of hosts that fail with all their ranks.

use super::fault::Fault;
use super::program::Program;
use super::{Kind, Random, Spec};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;

/// Ends the programs of all ranks of the rank's host, and for [`Kind::HostsDown`] those of another host too, at act
/// `at` or up to two before it. `None` if only one rank would end, if fewer than two would be left, or if the same host
/// was drawn twice.
pub(super) fn inject(
    kind: Kind,
    spec: &Spec,
    programs: &mut [Program],
    rank: Rank,
    at: usize,
    random: &mut Random,
) -> Option<Fault> {
    let world = spec.world();
    let mut culprits = spec.recording.ranks_of_host(rank, world);
    if kind == Kind::HostsDown {
        let other = (random.draw() % u64::from(world)) as Rank;
        if culprits.contains(&other) {
            return None;
        }
        culprits.extend(spec.recording.ranks_of_host(other, world));
    }
    // The fault of a host with one rank would be that of the rank, and at least two of the remaining ranks must wait.
    if culprits.len() < 2 || culprits.len() + 2 > world as usize {
        return None;
    }
    culprits.sort_unstable();
    for &gone in &culprits {
        let acts = &mut programs[gone as usize].acts;
        let last = at.saturating_sub(random.between(0, 2) as usize);
        acts.truncate(last.max(1));
    }
    Some(Fault {
        kind,
        rank,
        at,
        culprits,
        // The ranks end in acts of different groups, so the fault is assigned to the world, of which all are members.
        group: 0,
        // Gloo's recorder names no members, and all groups of one role may be gone with the host.
        decidable: spec.recording.recorder != Recorder::NativeGloo,
    })
}
