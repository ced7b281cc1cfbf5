//! Injects faults of order that do no harm yet.
//!
//! In the simulation, no operation of a rank ends while another operation of that rank waits. The programs therefore
//! run in the harmless order, and the records show that the rank issued the operations in the other order.

use super::fault::{Fault, step_begins, waits_for_all};
use super::mesh::Mesh;
use super::message_fault::{first_in_order, receives_first};
use super::program::{Act, Call, Program, collective};
use super::simulate::Times;
use super::{Kind, Random};
use rcomm_recorder::model::{OpType, Rank};

/// Makes all ranks issue two equal operations in each step, from two lines. The rank at fault swaps them in one step.
pub(super) fn swap_threads(
    programs: &mut [Program],
    rank: Rank,
    random: &mut Random,
) -> Option<Fault> {
    let steps: Vec<usize> = step_begins(&programs[rank as usize]).collect();
    // A step before and a step after the swapped one show that all ranks issue both operations from the same lines.
    let swapped = random.between(1, (steps.len() as u64).checked_sub(2)?.max(1)) as usize;
    if steps.len() < 3 {
        return None;
    }
    let world = programs.len();
    let mut found = None;
    for (other, program) in programs.iter_mut().enumerate() {
        let begins: Vec<usize> = step_begins(program).collect();
        for (nth, &at) in begins.iter().enumerate().rev() {
            let mut lines = [220, 221];
            if other == rank as usize && nth == swapped {
                lines.reverse();
                found = Some(at + 2 * nth);
            }
            let calls = lines.map(|line| Act::Collective {
                group: 0,
                calls: vec![collective(
                    OpType::AllReduce,
                    "all_reduce",
                    &[33],
                    &[33],
                    line,
                )],
            });
            program.acts.splice(at..at, calls);
        }
    }
    let at = found?;
    Some(Fault {
        kind: Kind::Threads,
        rank,
        at,
        culprits: if world > 2 { vec![rank] } else { Vec::new() },
        group: 0,
        decidable: true,
    })
}

/// The fault of a rank that issues the operations at `at` and `at + 1` in the other order; `None` unless they are
/// collectives of two groups that share another rank.
pub(super) fn invert(mesh: &Mesh, programs: &[Program], rank: Rank, at: usize) -> Option<Fault> {
    let acts = &programs[rank as usize].acts;
    let single = |act: &Act| -> Option<Call> {
        match act {
            Act::Collective { calls, .. } if calls.len() == 1 => Some(calls[0].clone()),
            _ => None,
        }
    };
    let (act, next) = (&acts[at], acts.get(at + 1)?);
    let both_wait = waits_for_all(&single(act)?) && waits_for_all(&single(next)?);
    let [group, other] = [act, next].map(Act::group);
    let members = &mesh.groups[group].ranks;
    let common = members.iter().filter(|&&member| mesh.has(other, member));
    let common = common.count();
    if !both_wait || group == other || common < 2 {
        return None;
    }
    Some(Fault {
        kind: Kind::Inverted,
        rank,
        at,
        culprits: if common > 2 { vec![rank] } else { Vec::new() },
        group,
        decidable: true,
    })
}

/// The fault of a job in which both ends of all exchanges send first; `None` unless an exchange begins at `at`.
pub(super) fn buffer_sends(programs: &[Program], rank: Rank, at: usize) -> Option<Fault> {
    first_in_order(&programs[rank as usize].acts[at])?;
    Some(Fault {
        kind: Kind::BufferedSends,
        rank,
        at,
        culprits: Vec::new(),
        group: programs[rank as usize].acts[at].group(),
        decidable: true,
    })
}

/// A rank's acts in the order in which it issued them, with the times of each.
pub(super) fn as_issued(
    faults: &[Fault],
    rank: Rank,
    program: &Program,
    times: &[Times],
) -> (Program, Vec<Times>) {
    let (mut program, mut times) = (program.clone(), times.to_vec());
    for fault in faults {
        let swapped: Vec<usize> = match fault.kind {
            Kind::Inverted if fault.rank == rank => vec![fault.at],
            Kind::BufferedSends => (0..program.acts.len())
                .filter(|&at| receives_first(&program.acts, at).is_some())
                .collect(),
            _ => Vec::new(),
        };
        for at in swapped {
            program.acts.swap(at, at + 1);
            if at + 1 < times.len() {
                let (first, second) = (times[at], times[at + 1]);
                times[at].ended = second.ended;
                times[at + 1] = Times {
                    arrived: first.arrived + 1000,
                    ..first
                };
            }
        }
    }
    (program, times)
}
