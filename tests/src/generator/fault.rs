//! Injects faults into the programs of a job, and states who is at fault.

use super::mesh::Mesh;
use super::program::{Act, Call, Message, Program, collective};
use super::{Kind, Random, Spec, host_fault, message_fault, order_fault};
use rcomm_recorder::model::{OpType, Rank};

/// A fault as it was injected.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The kind of the fault.
    pub kind: Kind,
    /// The rank into whose program it was injected.
    pub rank: Rank,
    /// Index of the act of the rank's program at which the fault was injected.
    pub at: usize,
    /// The ranks at fault, ascending. There are several if both ends of a message or all ranks of a host are at fault,
    /// and none if no rank can be blamed.
    pub culprits: Vec<Rank>,
    /// Index of the group with the first wrong operation.
    pub group: usize,
    /// Whether the dumps hold enough to identify the ranks at fault.
    pub decidable: bool,
}

/// Injects a fault into the programs, at a rank and in a group without one of the `taken` faults; `None` if none of 64
/// random places is fit for the fault.
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

/// Injects a fault at one act of a rank's program; `None` if it does not fit there.
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
            // Gloo's recorder names no members of groups. There, a rank without a record shows only by the other groups
            // with the same role, and only if no other rank is at fault.
            let lacks_members = kind == Kind::Crash && recorder == Recorder::NativeGloo;
            let is_shown = group == 0 || mesh.siblings(group) > 1;
            fault(!lacks_members || (is_shown && spec.faults.len() == 1))
        }
        Kind::Skip => {
            let call = single(&program.acts[at])?;
            // A rank that leaves out the group's last call looks as if it had not joined, since no later call shows the
            // gap.
            let next = program.acts[at + 1..].iter().find_map(|act| match act {
                Act::Collective { group: of_act, .. } if *of_act == group => single(act),
                _ => None,
            })?;
            // If the group's next call is equal, only calls of other groups between them show that one is
            // missing.
            let roles = mesh.roles(rank);
            let others_between = group == 0 && roles.pp.is_some() && roles.dp.is_some();
            if (next == call && !others_between) || call.op == OpType::Gather {
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
            let (call, next) = (
                single(&program.acts[at])?,
                single(program.acts.get(at + 1)?)?,
            );
            if program.acts[at + 1].group() != group || call.op == next.op {
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
            // Without another act after the message, the rank just ends.
            if at + 1 >= program.acts.len() {
                return None;
            }
            program.acts.remove(at);
            // torchcomms names no peers. If a receiver takes messages from any source, the records do not show which
            // rank left one out, or whether the receiver took too few.
            fault(mesh.siblings(group) > 2 && recorder != Recorder::Torchcomms && !from_any)
        }
        Kind::MessageSize => {
            let Act::Batch { messages, .. } = &mut program.acts[at] else {
                return None;
            };
            let nth = (random.draw() % messages.len() as u64) as usize;
            let Message { peer, elements, .. } = &mut messages[nth];
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
            // With other members of its default group, the job would be another job.
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
            let (call, next_call) = (single(&program.acts[at])?, single(next)?);
            let other = next.group();
            // In a group of two, only groups with the same role show which member deviates.
            let shows_culprit = mesh.siblings(group) > 2 || mesh.siblings(other) > 2;
            if other == group || !waits_for_all(&call) || !waits_for_all(&next_call) {
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
            let is_root_known = before.filter(|act| act.group() == group).count() > 0;
            program.acts[at] = Act::Collective {
                group,
                calls: vec![wrong],
            };
            let records_roots = recorder == Recorder::Rcomm;
            let is_whole = spec.recording.window == super::Window::Whole;
            fault(if records_roots {
                shows_culprit || is_root_known
            } else {
                is_root_known && is_whole
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
            let added = call.splits[0].len() as u64;
            for part in &mut call.splits[0] {
                *part += 1;
            }
            call.input[0] += added;
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
        Kind::Threads => order_fault::swap_threads(programs, rank, random),
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
            let exchange_group = exchanges[0].group();
            if mesh.groups[exchange_group].ranks.len() < 3 {
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
                group: exchange_group,
                decidable: true,
            })
        }
        Kind::Tiny => {
            // Every program gets the same row of operations of the world.
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
            let others_wait = single(&program.acts[at]).is_some_and(|call| waits_for_all(&call));
            Some(Fault {
                kind,
                rank,
                at,
                culprits: Vec::new(),
                group,
                decidable: others_wait && spec.recording.window == super::Window::Whole,
            })
        }
        // The stages of a pipeline reach a point of the program at different times, and a rank that collects messages
        // has more acts than the others. In both cases, acts with the same index are not at the same point.
        Kind::Clocks if spec.pp > 1 || spec.mix.collects => None,
        Kind::Clocks => two_crashes(mesh, programs, rank, at),
        Kind::Slow => {
            program.late = late_steps(program)?;
            // In a pipeline or a ring without other operations, each rank waits for the previous one, late or not.
            let synchronizes = spec.tp > 1 || spec.pp == 1;
            // If completions are noticed as late as the rank is, the records do not show that it is late.
            let is_noticed = recorder != Recorder::Nccl
                || spec.recording.starts
                || spec.recording.notice_ms == 0;
            fault(
                synchronizes
                    && is_noticed
                    && (spec.dp > 1 || !spec.mix.rings)
                    && !spec.mix.collects,
            )
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

/// The first acts of all steps but the first, each with a lateness of 200 ms; `None` if there are fewer than three.
fn late_steps(program: &Program) -> Option<Vec<(usize, u64)>> {
    let late: Vec<(usize, u64)> = step_begins(program).map(|at| (at, 200)).collect();
    (late.len() >= 3).then_some(late)
}

/// The first acts of all steps but the first: those after the norm over the world (line 95 of the program).
pub(super) fn step_begins(program: &Program) -> impl Iterator<Item = usize> {
    let is_norm = |act: &Act| matches!(act, Act::Collective { calls, .. } if calls.len() == 1 && calls[0].line == 95);
    (1..program.acts.len()).filter(move |&at| is_norm(&program.acts[at - 1]))
}

/// Ends two ranks of different groups with the same role at the same point of the program. The groups share no rank,
/// so that neither group's wait concerns the other.
fn two_crashes(mesh: &Mesh, programs: &mut [Program], rank: Rank, at: usize) -> Option<Fault> {
    let act = &programs[rank as usize].acts[at];
    let group = act.group();
    if !matches!(act, Act::Collective { .. }) || group == 0 {
        return None;
    }
    let (desc, members) = (mesh.groups[group].desc, &mesh.groups[group].ranks);
    let is_disjoint = |other: &usize| {
        let candidate = &mesh.groups[*other];
        let shares_rank = candidate.ranks.iter().any(|rank| members.contains(rank));
        *other != group && candidate.desc == desc && !shares_rank
    };
    let elsewhere = (0..mesh.groups.len()).find(is_disjoint)?;
    let other = mesh.groups[elsewhere].ranks[mesh.member(group, rank)? as usize];
    // Consecutive ranks may be all ranks of a host, which is then reported as gone, whatever the clocks show.
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

/// The call with another operation, type or size; `None` if the call has no such argument that could be wrong.
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
