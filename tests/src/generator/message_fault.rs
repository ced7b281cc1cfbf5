//! Injects faults of messages: halves that are left out, or posted in the wrong order.

use super::fault::Fault;
use super::mesh::Mesh;
use super::program::{Act, Message, Program};
use super::script::IN_ORDER;
use super::{Kind, Random, Spec};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;

/// Injects a fault of messages at an act of a rank's program; `None` if it does not fit there.
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
    // The two ends of a message contradict each other. Only other pairs with the same role show which end deviates.
    let is_comparable =
        mesh.siblings(group) > 2 || (members > 2 && mesh.groups[group].desc == "tp");
    Some(Fault {
        kind,
        rank,
        at,
        // torchcomms names no peers.
        decidable: (is_comparable || culprits.is_empty())
            && spec.recording.recorder != Recorder::Torchcomms,
        culprits,
        group,
    })
}

/// Removes the batch at `at`; `None` unless it is a single send, or a single receive, with an act after it.
fn leave_out(program: &mut Program, at: usize, sends: bool) -> Option<()> {
    let Act::Batch { messages, .. } = &program.acts[at] else {
        return None;
    };
    let is_wanted = |message: &Message| message.sends == sends && !message.from_any;
    let is_single = matches!(messages.as_slice(), [message] if is_wanted(message));
    // Without an act after the message, the rank only ends early.
    if !is_single || at + 1 >= program.acts.len() {
        return None;
    }
    program.acts.remove(at);
    Some(())
}

/// Removes a random message of a batch; `None` unless the batch has several.
fn leave_one_out(act: &mut Act, random: &mut Random) -> Option<()> {
    let Act::Batch { messages, .. } = act else {
        return None;
    };
    if messages.len() < 2 {
        return None;
    }
    let nth = (random.draw() % messages.len() as u64) as usize;
    messages.remove(nth);
    Some(())
}

/// `Some` if the act is the first message of a rank in an exchange in order.
pub(super) fn first_in_order(act: &Act) -> Option<()> {
    let is_first = matches!(act, Act::Batch { line, .. } if *line == IN_ORDER[0]);
    is_first.then_some(())
}

/// Puts the send of an exchange before its receive; `None` if no exchange that receives first begins at `at`.
fn send_first(acts: &mut [Act], at: usize) -> Option<()> {
    receives_first(acts, at)?;
    acts.swap(at, at + 1);
    Some(())
}

/// `Some` if an exchange that receives first begins at `at`.
pub(super) fn receives_first(acts: &[Act], at: usize) -> Option<()> {
    first_in_order(&acts[at])?;
    let receives = |act: &Act| {
        matches!(act, Act::Batch { messages, .. }
            if messages.iter().all(|message| !message.sends))
    };
    (receives(&acts[at]) && !receives(acts.get(at + 1)?)).then_some(())
}
