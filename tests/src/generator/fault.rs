//! Faults, and what is true of a job that has them.

use super::mesh::Mesh;
use super::program::{Act, Call, Message, Program, collective};
use super::{Random, Spec};
use rcomm_analyzer::Code;
use rcomm_recorder::model::{OpType, Rank};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A rank stops issuing anything.
    Stuck,
    /// A rank stops, and leaves no record.
    Crash,
    /// A rank leaves out one collective.
    Skip,
    /// A rank issues one collective that nobody else does.
    Extra,
    /// A rank issues another operation.
    Op,
    /// Another element type.
    Dtype,
    /// Another size.
    Size,
    /// Two neighbouring collectives of one group in the other order.
    Swap,
    /// A rank leaves out a message.
    LostMessage,
    /// The sizes of the two halves of a message differ.
    MessageSize,
    /// A collective in which everybody arrives and nobody finishes.
    Fabric,
    /// A rank comes late in every step.
    Slow,
}

impl Kind {
    /// All kinds that end in a hang.
    pub const HANGS: &'static [Self] = &[
        Self::Stuck,
        Self::Crash,
        Self::Skip,
        Self::Extra,
        Self::Op,
        Self::Dtype,
        Self::Size,
        Self::Swap,
        Self::LostMessage,
        Self::MessageSize,
    ];

    /// Codes that say it; what the same dumps support equally well is among them.
    pub fn codes(self) -> &'static [Code] {
        use Code::*;
        match self {
            Self::Stuck => &[E101, E120],
            Self::Crash => &[E102],
            Self::Skip | Self::Extra => &[E103, E104, E110, E111, E112, E113, E101, E130],
            Self::Op => &[E110, E103, E104],
            Self::Dtype => &[E111],
            Self::Size => &[E112],
            Self::Swap => &[E113, E110, E112, E103, E104],
            Self::LostMessage => &[E120, E121, E130, E103],
            Self::MessageSize => &[E121],
            Self::Fabric => &[E135],
            Self::Slow => &[W220],
        }
    }
}

/// A fault as it was put in.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What.
    pub kind: Kind,
    /// The rank.
    pub rank: Rank,
    /// Where in its program.
    pub at: usize,
    /// Who is to blame, ascending; more than one rank where both ends of a message are.
    pub culprits: Vec<Rank>,
    /// In which group the first wrong thing is.
    pub group: usize,
    /// The dumps hold enough to tell who is at fault.
    pub decidable: bool,
}

/// Puts a fault into the programs; `None` if the job has no place for it.
pub(super) fn put_in(
    kind: Kind,
    spec: &Spec,
    mesh: &Mesh,
    programs: &mut [Program],
    taken: &[Fault],
    random: &mut Random,
) -> Option<Fault> {
    for _ in 0..64 {
        let rank = (random.draw() % u64::from(spec.world())) as Rank;
        if taken.iter().any(|fault| fault.culprits.contains(&rank)) {
            continue;
        }
        let acts = programs[rank as usize].acts.len();
        // Somewhere in the second half, so that there is a past.
        let at = random.between(acts as u64 / 2, acts as u64 - 1) as usize;
        // Two faults in one group may agree on what is wrong, and be the majority.
        let group = programs[rank as usize].acts[at].group();
        if taken.iter().any(|fault| fault.group == group) {
            continue;
        }
        if let Some(fault) = try_at(kind, spec, mesh, programs, rank, at, random) {
            return Some(fault);
        }
    }
    None
}

fn try_at(
    kind: Kind,
    _spec: &Spec,
    mesh: &Mesh,
    programs: &mut [Program],
    rank: Rank,
    at: usize,
    random: &mut Random,
) -> Option<Fault> {
    let program = &mut programs[rank as usize];
    let group = program.acts[at].group();
    let members = mesh.groups[group].ranks.len();
    // One against one is told only by the groups that play the same part.
    let told = members > 2 || mesh.siblings(group) > 2;
    let fault = |decidable: bool| {
        Some(Fault {
            kind,
            rank,
            at,
            culprits: vec![rank],
            group,
            decidable,
        })
    };
    let single = |act: &Act| match act {
        Act::Collective { calls, .. } if calls.len() == 1 => Some(calls[0].clone()),
        _ => None,
    };
    match kind {
        Kind::Stuck | Kind::Crash => {
            program.acts.truncate(at);
            program.stops = true;
            fault(true)
        }
        Kind::Skip => {
            let call = single(&program.acts[at])?;
            // The last of the program left out is as if the rank had not come: no later call shows it.
            let next = program.acts[at + 1..].iter().find_map(|act| match act {
                Act::Collective { group: g, .. } if *g == group => single(act),
                _ => None,
            })?;
            if next == call || call.op == OpType::Gather {
                return None;
            }
            program.acts.remove(at);
            fault(told)
        }
        Kind::Extra => {
            single(&program.acts[at])?;
            let extra = collective(OpType::AllReduce, "all_reduce", &[77], &[77], 200);
            program.acts.insert(
                at,
                Act::Collective {
                    group,
                    calls: vec![extra],
                },
            );
            fault(told)
        }
        Kind::Op | Kind::Dtype | Kind::Size => {
            let call = single(&program.acts[at])?;
            let wrong = spoil(kind, &call)?;
            program.acts[at] = Act::Collective {
                group,
                calls: vec![wrong],
            };
            fault(told)
        }
        Kind::Swap => {
            let (a, b) = (
                single(&program.acts[at])?,
                single(program.acts.get(at + 1)?)?,
            );
            if program.acts[at + 1].group() != group || a.op == b.op {
                return None;
            }
            program.acts.swap(at, at + 1);
            fault(told)
        }
        Kind::LostMessage => {
            let Act::Batch { .. } = program.acts[at] else {
                return None;
            };
            // Without another message or a collective after it the rank just ends.
            if at + 1 >= program.acts.len() {
                return None;
            }
            program.acts.remove(at);
            fault(mesh.siblings(group) > 2)
        }
        Kind::MessageSize => {
            let Act::Batch { messages, .. } = &mut program.acts[at] else {
                return None;
            };
            let which = (random.draw() % messages.len() as u64) as usize;
            let Message { peer, elements, .. } = &mut messages[which];
            *elements += 1;
            let peer = mesh.groups[group].ranks[*peer as usize];
            Some(Fault {
                kind,
                rank,
                at,
                culprits: vec![rank.min(peer), rank.max(peer)],
                group,
                decidable: true,
            })
        }
        Kind::Fabric => {
            single(&program.acts[at])?;
            Some(Fault {
                kind,
                rank,
                at,
                culprits: Vec::new(),
                group,
                decidable: true,
            })
        }
        Kind::Slow => {
            // Where a step begins: after the norm over the world.
            let norm = |act: &Act| single(act).is_some_and(|call| call.line == 95);
            let starts: Vec<usize> = (1..program.acts.len())
                .filter(|&at| norm(&program.acts[at - 1]))
                .collect();
            if starts.len() < 3 {
                return None;
            }
            program.late = starts.into_iter().map(|at| (at, 200)).collect();
            fault(true)
        }
    }
}

fn spoil(kind: Kind, call: &Call) -> Option<Call> {
    let mut wrong = call.clone();
    match kind {
        Kind::Op => {
            wrong = match call.op {
                OpType::AllReduce => collective(OpType::Barrier, "barrier", &[], &[], call.line),
                _ => collective(OpType::AllReduce, "all_reduce", &[48], &[48], call.line),
            };
        }
        Kind::Dtype => {
            if matches!(
                call.op,
                OpType::Barrier | OpType::Broadcast | OpType::AllToAllSingle
            ) {
                return None;
            }
            wrong.dtype = "Half";
        }
        _ => {
            if !matches!(
                call.op,
                OpType::AllReduce | OpType::AllGatherSingle | OpType::ReduceScatterSingle
            ) {
                return None;
            }
            for shape in [&mut wrong.input, &mut wrong.output] {
                shape[0] *= 3;
            }
        }
    }
    Some(wrong)
}
