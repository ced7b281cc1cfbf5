//! Faults, and the truth about a job that has them.

use super::mesh::Mesh;
use super::program::{Act, Call, Message, Program, collective};
use super::{Kind, Random, Spec, host_fault, message_fault, order_fault};
use rcomm_recorder::model::{OpType, Rank};

/// A fault as it was injected.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Its kind.
    pub kind: Kind,
    /// The rank into whose program it was injected.
    pub rank: Rank,
    /// Index of the act of the rank's program at which it was injected.
    pub at: usize,
    /// The ranks at fault, ascending: several if both ends of a message or all ranks of a host are; none if no
    /// rank can be blamed.
    pub culprits: Vec<Rank>,
    /// Index of the group with the first wrong operation.
    pub group: usize,
    /// Whether the dumps hold enough to identify the ranks at fault.
    pub decidable: bool,
}

/// Injects a fault into the programs; `None` if none of 64 random places is fit for it.
pub(super) fn inject(
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
        // A place in the second half, so that healthy operations precede it.
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
    let is_possible = match kind {
        Kind::Dead
        | Kind::Fails
        | Kind::Stalled
        | Kind::SlowHost
        | Kind::ShortRing
        | Kind::Dropped => recorder == Recorder::Rcomm,
        // Only with NCCL do operations wait on a device, where one blocks another and completions are noticed late.
        Kind::Overrun | Kind::Clocks | Kind::Inverted | Kind::BufferedSends => {
            recorder == Recorder::Nccl
        }
        Kind::Threads => spec.recording.frames,
        // Gloo's recorder records no messages.
        Kind::LostMessage
        | Kind::MessageSize
        | Kind::SendLeftOut
        | Kind::ReceiveLeftOut
        | Kind::Lopsided
        | Kind::SendFirst
        | Kind::AllSendFirst => recorder != Recorder::NativeGloo,
        // Gloo's recorder records no durations.
        Kind::Tiny | Kind::NearTimeout => recorder != Recorder::NativeGloo,
        _ => true,
    };
    if !is_possible {
        return None;
    }
    match kind {
        Kind::HostDown | Kind::HostsDown => {
            return host_fault::inject(kind, spec, programs, rank, at, random);
        }
        Kind::SendLeftOut
        | Kind::ReceiveLeftOut
        | Kind::Lopsided
        | Kind::SendFirst
        | Kind::AllSendFirst => {
            return message_fault::inject(kind, spec, mesh, programs, (rank, at), random);
        }
        _ => {}
    }
    // A receive from any source fixes no order, so that a wrong size cannot be placed.
    if let Act::Batch { messages, .. } = &programs[rank as usize].acts[at]
        && messages.iter().any(|message| message.from_any)
        && kind == Kind::MessageSize
    {
        return None;
    }
    let program = &mut programs[rank as usize];
    let group = program.acts[at].group();
    let members = mesh.groups[group].ranks.len();
    // In a group of two, only groups with the same role show which member deviates.
    let shows_culprit = members > 2 || mesh.siblings(group) > 2;
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
        Kind::Stuck | Kind::Crash | Kind::Dead | Kind::Overrun => {
            // The rest of the program has to fill the others' rings.
            if kind == Kind::Overrun && program.acts.len() - at <= super::record::LONGEST_RING {
                return None;
            }
            program.acts.truncate(at);
            // Gloo's recorder names no members of groups: a rank without a record shows only by the other
            // groups of the kind, and only if no other rank is at fault.
            let lost = kind == Kind::Crash && recorder == Recorder::NativeGloo;
            let shown = group == 0 || mesh.siblings(group) > 1;
            fault(!lost || (shown && spec.faults.len() == 1))
        }
        Kind::Skip => {
            let call = single(&program.acts[at])?;
            // A rank that leaves out the group's last call looks as if it had not joined: no later call shows the gap.
            let next = program.acts[at + 1..].iter().find_map(|act| match act {
                Act::Collective { group: g, .. } if *g == group => single(act),
                _ => None,
            })?;
            // If the group's next call is equal, only calls of other groups between them show that one is
            // missing.
            let roles = mesh.roles(rank);
            let between = group == 0 && roles.pp.is_some() && roles.dp.is_some();
            if (next == call && !between) || call.op == OpType::Gather {
                return None;
            }
            program.acts.remove(at);
            fault(shows_culprit)
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
            fault(shows_culprit)
        }
        Kind::Op | Kind::Dtype | Kind::Size => {
            let call = single(&program.acts[at])?;
            let wrong = with_wrong_argument(kind, &call)?;
            program.acts[at] = Act::Collective {
                group,
                calls: vec![wrong],
            };
            fault(shows_culprit)
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
            fault(shows_culprit)
        }
        Kind::LostMessage => {
            let Act::Batch { messages, .. } = &program.acts[at] else {
                return None;
            };
            let from_any = messages.iter().any(|message| message.from_any);
            // Without another message or a collective after it the rank just ends.
            if at + 1 >= program.acts.len() {
                return None;
            }
            program.acts.remove(at);
            // torchcomms names no peers. The two halves of a message do not show which rank left out one that a
            // receiver takes from any source, or whether the receiver took too few.
            fault(mesh.siblings(group) > 2 && recorder != Recorder::Torchcomms && !from_any)
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
        Kind::Members => {
            let records_members = !matches!(recorder, Recorder::NativeGloo | Recorder::Torchcomms);
            // A job whose default group has other members would be another job.
            if !records_members || members < 3 || group == 0 {
                return None;
            }
            // Nothing on the group ever completes: the first collective is where all wait.
            let is_of_group = |act: &Act| act.group() == group;
            let at = program.acts.iter().position(is_of_group)?;
            single(&program.acts[at])?;
            Some(Fault {
                kind,
                rank,
                at,
                culprits: vec![rank],
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
                // Gloo's recorder retires every operation, completed or not.
                decidable: recorder != Recorder::NativeGloo,
            })
        }
        Kind::Detour => {
            let next = program.acts.get(at + 1)?;
            let (a, b) = (single(&program.acts[at])?, single(next)?);
            let other = next.group();
            // In a group of two, only groups with the same role show which member deviates.
            let shows_culprit = mesh.siblings(group) > 2 || mesh.siblings(other) > 2;
            if other == group || !waits_for_all(&a) || !waits_for_all(&b) {
                return None;
            }
            program.acts.swap(at, at + 1);
            fault(shows_culprit)
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
            // Where roots are not recorded, an earlier gather of the group shows the root.
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
                shows_culprit || known
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
        Kind::Stalled | Kind::ShortRing | Kind::Dropped => fault(true),
        Kind::Threads => order_fault::in_threads(programs, rank, random),
        Kind::Inverted => order_fault::invert(mesh, programs, rank, at),
        Kind::BufferedSends => order_fault::buffer_sends(programs, rank, at),
        // Injected above, by other modules.
        Kind::HostDown
        | Kind::HostsDown
        | Kind::SendLeftOut
        | Kind::ReceiveLeftOut
        | Kind::Lopsided
        | Kind::SendFirst
        | Kind::AllSendFirst => None,
        Kind::Uneven => {
            let is_comparable = spec.recording.window == super::Window::Whole && members > 2;
            let exchanges = program
                .acts
                .iter_mut()
                .filter(|act| single(act).is_some_and(|call| call.op == OpType::AllToAllSingle));
            let exchanges: Vec<&mut Act> = exchanges.collect();
            if !is_comparable || exchanges.len() < 16 {
                return None;
            }
            let at_group = exchanges[0].group();
            if mesh.groups[at_group].ranks.len() < 3 {
                return None;
            }
            for act in exchanges {
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
        // Stages of a pipeline are at one point of the program at different times, and a rank that collects
        // has more acts than the others: the same act of both is not the same point.
        Kind::Clocks if spec.pp > 1 || spec.mix.collects => None,
        Kind::Clocks => two_crashes(mesh, programs, rank, at),
        Kind::Slow => {
            program.late = late_steps(program)?;
            // In a bare pipeline, or ring, each rank waits for the previous one, late or not.
            let synchronizes = spec.tp > 1 || spec.pp == 1;
            // A rank is not seen to be late if completions are noticed as late as the rank is.
            let noticed = recorder != Recorder::Nccl
                || spec.recording.starts
                || spec.recording.notice_ms == 0;
            fault(synchronizes && noticed && (spec.dp > 1 || !spec.mix.rings) && !spec.mix.collects)
        }
        Kind::Turns => {
            for nth in 0..spec.steps as usize {
                let late = (random.draw() % u64::from(spec.world())) as usize;
                let starts = late_steps(&programs[late])?;
                programs[late].late.extend(starts.get(nth));
            }
            let synchronizes = spec.pp == 1 && !spec.mix.rings && !spec.mix.collects;
            Some(Fault {
                kind,
                rank,
                at,
                culprits: Vec::new(),
                group,
                decidable: synchronizes && spec.world() > 3,
            })
        }
        Kind::SlowHost => {
            let culprits = spec.recording.ranks_of_host(rank, spec.world());
            // In a job of one host, no host is later than another.
            if culprits.len() == spec.world() as usize || culprits.len() < 2 {
                return None;
            }
            for &late in &culprits {
                let program = &mut programs[late as usize];
                program.late = late_steps(program)?;
            }
            Some(Fault {
                kind,
                rank,
                at,
                culprits,
                group,
                decidable: spec.pp == 1
                    && spec.world().is_multiple_of(8)
                    && !spec.mix.rings
                    && !spec.mix.collects,
            })
        }
    }
}

/// The acts with which each step but the first begins, each with a lateness of 200 ms; `None` if there are fewer than
/// three.
fn late_steps(program: &Program) -> Option<Vec<(usize, u64)>> {
    let late: Vec<(usize, u64)> = step_begins(program).map(|at| (at, 200)).collect();
    (late.len() >= 3).then_some(late)
}

/// The acts with which each step but the first begins: those after the norm over the world (line 95 of the
/// program).
pub(super) fn step_begins(program: &Program) -> impl Iterator<Item = usize> {
    let norm = |act: &Act| matches!(act, Act::Collective { calls, .. } if calls.len() == 1 && calls[0].line == 95);
    (1..program.acts.len()).filter(move |&at| norm(&program.acts[at - 1]))
}

/// Two ranks of different groups of one kind stop at the same point of the program, where no member of either
/// group takes part in the other's wait.
fn two_crashes(mesh: &Mesh, programs: &mut [Program], rank: Rank, at: usize) -> Option<Fault> {
    let act = &programs[rank as usize].acts[at];
    let group = act.group();
    if !matches!(act, Act::Collective { .. }) || group == 0 {
        return None;
    }
    let (desc, members) = (mesh.groups[group].desc, &mesh.groups[group].ranks);
    let is_disjoint = |other: &usize| {
        let one = &mesh.groups[*other];
        *other != group && one.desc == desc && !one.ranks.iter().any(|r| members.contains(r))
    };
    let elsewhere = (0..mesh.groups.len()).find(is_disjoint)?;
    let other = mesh.groups[elsewhere].ranks[mesh.member(group, rank)? as usize];
    // Consecutive ranks may be all of a host, which is then reported as gone, whatever the clocks show.
    if rank.abs_diff(other) == 1 {
        return None;
    }
    if programs[other as usize].acts.get(at).map(Act::group) != Some(elsewhere) {
        return None;
    }
    for gone in [rank, other] {
        let program = &mut programs[gone as usize];
        program.acts.truncate(at);
    }
    Some(Fault {
        kind: Kind::Clocks,
        rank,
        at,
        culprits: vec![rank.min(other), rank.max(other)],
        group,
        decidable: true,
    })
}

/// Whether no rank leaves the call before all have entered it.
pub(super) fn waits_for_all(call: &Call) -> bool {
    !matches!(call.op, OpType::Broadcast | OpType::Gather)
}

/// The call with another operation, type or size; `None` if the call has none that could be wrong.
fn with_wrong_argument(kind: Kind, call: &Call) -> Option<Call> {
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
                OpType::AllReduce
                    | OpType::AllGatherSingle
                    | OpType::AllGatherV
                    | OpType::ReduceScatterSingle
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
