//! Halves of messages that are left out, or posted in the wrong order.

use super::fault::Fault;
use super::mesh::Mesh;
use super::program::{Act, Message, Program};
use super::script::IN_ORDER;
use super::{Kind, Random, Spec};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;

pub(super) fn inject(
    kind: Kind,
    spec: &Spec,
    mesh: &Mesh,
    programs: &mut [Program],
    (rank, at): (Rank, usize),
    random: &mut Random,
) -> Option<Fault> {
    let act = &programs[rank as usize].acts[at];
    let group = act.group();
    let members = mesh.groups[group].ranks.len();
    let mut culprits = vec![rank];
    match kind {
        Kind::SendLeftOut => leave_out(&mut programs[rank as usize], at, true)?,
        Kind::ReceiveLeftOut => leave_out(&mut programs[rank as usize], at, false)?,
        Kind::Lopsided => leave_one_out(&mut programs[rank as usize].acts[at], random)?,
        Kind::SendFirst => send_first(&mut programs[rank as usize].acts, at)?,
        _ => {
            first_in_order(act)?;
            for program in programs.iter_mut() {
                for at in 0..program.acts.len() {
                    let _ = send_first(&mut program.acts, at);
                }
            }
            culprits.clear();
        }
    }
    // Two ends of one pair contradict each other: only others of their kind show which end deviates.
    let compared = mesh.siblings(group) > 2 || (members > 2 && mesh.groups[group].desc == "tp");
    Some(Fault {
        kind,
        rank,
        at,
        // torchcomms names no peers.
        decidable: (compared || culprits.is_empty())
            && spec.recording.recorder != Recorder::Torchcomms,
        culprits,
        group,
    })
}

fn leave_out(program: &mut Program, at: usize, sends: bool) -> Option<()> {
    let Act::Batch { messages, .. } = &program.acts[at] else {
        return None;
    };
    let one = |message: &Message| message.sends == sends && !message.from_any;
    // Without operations after it the rank only ends early.
    if !matches!(messages.as_slice(), [message] if one(message)) || at + 1 >= program.acts.len() {
        return None;
    }
    program.acts.remove(at);
    Some(())
}

fn leave_one_out(act: &mut Act, random: &mut Random) -> Option<()> {
    let Act::Batch { messages, .. } = act else {
        return None;
    };
    if messages.len() < 2 {
        return None;
    }
    let which = (random.draw() % messages.len() as u64) as usize;
    messages.remove(which);
    Some(())
}

pub(super) fn first_in_order(act: &Act) -> Option<()> {
    let is_first = matches!(act, Act::Batch { line, .. } if *line == IN_ORDER[0]);
    is_first.then_some(())
}

/// Puts the send of an exchange before its receive; `None` if no exchange with its receive first begins here.
fn send_first(acts: &mut [Act], at: usize) -> Option<()> {
    receives_first(acts, at)?;
    acts.swap(at, at + 1);
    Some(())
}

/// `Some` if an exchange begins here in which the receive comes first.
pub(super) fn receives_first(acts: &[Act], at: usize) -> Option<()> {
    first_in_order(&acts[at])?;
    let receives = |act: &Act| {
        matches!(act, Act::Batch { messages, .. }
            if messages.iter().all(|message| !message.sends))
    };
    (receives(&acts[at]) && !receives(acts.get(at + 1)?)).then_some(())
}
