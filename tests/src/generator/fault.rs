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
    /// A rank takes two neighbouring steps on different groups in the other order.
    Detour,
    /// A rank takes itself for the root of a gather.
    Root,
    /// A rank sends other split sizes in an exchange than its peers expect.
    Splits,
    /// As [`Kind::Splits`], where only sums are recorded.
    Sum,
    /// A rank's process is gone (a record that outlives it only).
    Dead,
    /// An operation fails on one rank while everybody is in it (a record that tells failures only).
    Fails,
    /// A rank's watchdog makes no rounds; the job runs on.
    Stalled,
    /// A rank's ring holds less than a step.
    ShortRing,
    /// A rank moves far more bytes than its peers in exchanges.
    Uneven,
    /// Rows of small operations, again and again.
    Tiny,
    /// An operation succeeds shortly before its time-out.
    NearTimeout,
    /// Two ranks leave no record, and clocks are too far apart to tell which was missed first.
    Clocks,
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
        Self::Detour,
        Self::Root,
        Self::Splits,
        Self::Sum,
        Self::Dead,
        Self::Fails,
    ];

    /// Kinds that let the job run on.
    pub const WARNINGS: &'static [Self] = &[
        Self::Stalled,
        Self::ShortRing,
        Self::Uneven,
        Self::Tiny,
        Self::NearTimeout,
    ];

    /// Whether the job runs to its end.
    pub fn runs_on(self) -> bool {
        self == Self::Slow || Self::WARNINGS.contains(&self)
    }

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
            Self::Detour => &[E130, E113, E101, E120, E103],
            Self::Root | Self::Splits => &[E114],
            Self::Sum => &[E112],
            Self::Dead | Self::Fails => &[E150],
            Self::Stalled => &[E140],
            Self::ShortRing => &[W160],
            Self::Uneven => &[W230],
            Self::Tiny => &[W240],
            Self::NearTimeout => &[W250],
            Self::Clocks => &[E102, W260],
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
        if acts < 2 {
            continue;
        }
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
    spec: &Spec,
    mesh: &Mesh,
    programs: &mut [Program],
    rank: Rank,
    at: usize,
    random: &mut Random,
) -> Option<Fault> {
    use rcomm_recorder::publish::Recorder;
    let recorder = spec.recording.recorder;
    let needs = match kind {
        Kind::Dead | Kind::Fails | Kind::Stalled => recorder == Recorder::Rcomm,
        // Messages that nobody records.
        Kind::LostMessage | Kind::MessageSize => recorder != Recorder::NativeGloo,
        // Nobody tells how long anything took.
        Kind::Slow | Kind::Tiny | Kind::NearTimeout => recorder != Recorder::NativeGloo,
        _ => true,
    };
    if !needs {
        return None;
    }
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
        Kind::Stuck | Kind::Crash | Kind::Dead => {
            program.acts.truncate(at);
            program.stops = true;
            // Gloo's recorder names no members of groups: that one left no record shows by the other groups
            // of the kind, if there are any, and if nobody else is at fault.
            let lost = kind == Kind::Crash && recorder == Recorder::NativeGloo;
            let shown = group == 0 || mesh.siblings(group) > 1;
            fault(!lost || (shown && spec.faults.len() == 1))
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
            // torchcomms names no peers.
            fault(mesh.siblings(group) > 2 && recorder != Recorder::Torchcomms)
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
        Kind::Fabric | Kind::Fails => {
            single(&program.acts[at])?;
            Some(Fault {
                kind,
                rank,
                at,
                culprits: if kind == Kind::Fails {
                    vec![rank]
                } else {
                    Vec::new()
                },
                group,
                // What gloo's recorder retired may have completed.
                decidable: recorder != Recorder::NativeGloo,
            })
        }
        Kind::Detour => {
            let next = program.acts.get(at + 1)?;
            let (a, b) = (single(&program.acts[at])?, single(next)?);
            let other = next.group();
            // One against one is told only by the groups that play the same part.
            let told = mesh.siblings(group) > 2 || mesh.siblings(other) > 2;
            if other == group || !waits_for_all(&a) || !waits_for_all(&b) {
                return None;
            }
            program.acts.swap(at, at + 1);
            fault(told)
        }
        Kind::Root => {
            let call = single(&program.acts[at])?;
            if call.op != OpType::Gather || call.root == mesh.member(group, rank) {
                return None;
            }
            let parts = members as u64 * call.input[0];
            let wrong = Call {
                root: mesh.member(group, rank),
                output: vec![parts],
                ..call.clone()
            };
            // Where roots are not recorded, an earlier gather of the group tells who it is.
            let before = program.acts[..at]
                .iter()
                .filter(|act| single(act).as_ref() == Some(&call));
            let known = before.filter(|act| act.group() == group).count() > 0;
            program.acts[at] = Act::Collective {
                group,
                calls: vec![wrong],
            };
            let recorded = recorder == Recorder::Rcomm;
            let seen = recorded || spec.recording.window == super::Window::Whole;
            fault(if recorded {
                told || known
            } else {
                known && seen
            })
        }
        Kind::Splits | Kind::Sum => {
            let mut call = single(&program.acts[at])?;
            let records_splits = !matches!(recorder, Recorder::NativeGloo | Recorder::Torchcomms);
            if call.op != OpType::AllToAllSingle
                || (kind == Kind::Splits) != (records_splits && spec.recording.splits)
            {
                return None;
            }
            let more = call.splits[0].len() as u64;
            for part in &mut call.splits[0] {
                *part += 1;
            }
            call.input[0] += more;
            call.fits = false;
            program.acts[at] = Act::Collective {
                group,
                calls: vec![call],
            };
            Some(Fault {
                kind,
                rank,
                at,
                culprits: if kind == Kind::Splits {
                    vec![rank]
                } else {
                    Vec::new()
                },
                group,
                decidable: recorder != Recorder::NativeGloo,
            })
        }
        Kind::Stalled | Kind::ShortRing => fault(true),
        Kind::Uneven => {
            let mine = spec.recording.window == super::Window::Whole && members > 2;
            let heavy = program
                .acts
                .iter_mut()
                .filter(|act| single(act).is_some_and(|call| call.op == OpType::AllToAllSingle));
            let heavy: Vec<&mut Act> = heavy.collect();
            if !mine || heavy.len() < 16 {
                return None;
            }
            let at_group = heavy[0].group();
            if mesh.groups[at_group].ranks.len() < 3 {
                return None;
            }
            for act in heavy {
                if let Act::Collective { calls, .. } = act {
                    calls[0].input[0] += 8 << 20;
                }
            }
            Some(Fault {
                kind,
                rank,
                at,
                culprits: vec![rank],
                group: at_group,
                decidable: true,
            })
        }
        Kind::Tiny => {
            // The same row in every program, over the world.
            let rows = 600;
            for program in programs.iter_mut() {
                let row = (0..rows).map(|_| Act::Collective {
                    group: 0,
                    calls: vec![collective(OpType::AllReduce, "all_reduce", &[4], &[4], 210)],
                });
                let end = program.acts.len();
                program.acts.splice(end..end, row);
            }
            Some(Fault {
                kind,
                rank,
                at,
                culprits: Vec::new(),
                group: 0,
                decidable: true,
            })
        }
        Kind::NearTimeout => {
            program.late = vec![(at, 500_000)];
            let waited_for = single(&program.acts[at]).is_some_and(|call| waits_for_all(&call));
            Some(Fault {
                kind,
                rank,
                at,
                culprits: Vec::new(),
                group,
                decidable: waited_for && spec.recording.window == super::Window::Whole,
            })
        }
        Kind::Clocks => None,
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
            // In a bare pipeline everybody waits for the stage before, late or not.
            fault(spec.tp > 1 || spec.pp == 1)
        }
    }
}

/// Nobody leaves it before everybody has come.
fn waits_for_all(call: &Call) -> bool {
    !matches!(call.op, OpType::Broadcast | OpType::Gather)
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
