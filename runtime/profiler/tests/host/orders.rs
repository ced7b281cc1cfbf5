//! Reports events in an order that bytes determine: generated ones in a test, those of a fuzzer in a fuzz target.

use crate::library::{Call, Comm, Handle, NONE, Plugin};

/// Maximum number of handles that are kept at a time.
const HANDLES: usize = 64;

/// Reports events until `next` gives no byte: of every kind, with parents of every kind, also parents that have ended
/// and parents of communicators that have ended. `fresh` makes a communicator in place of one that ends; if it gives
/// none, the old one goes on. Events that are still open are stopped at the end.
pub(crate) fn play(
    plugin: &Plugin,
    comms: &mut [Comm],
    mut next: impl FnMut() -> Option<u8>,
    mut fresh: impl FnMut() -> Option<Comm>,
) {
    let mut handles = vec![NONE];
    while let Some(made) = event(plugin, comms, &mut handles, &mut next, &mut fresh) {
        handles.push(made);
        if handles.len() > HANDLES {
            let gone = handles.swap_remove(HANDLES / 2);
            plugin.stop(gone);
        }
    }
    for handle in handles {
        plugin.stop(handle);
    }
}

/// Reports one event, or the end of one. Returns the handle of an event that began, else [`NONE`]; `None` once `next`
/// gives no byte.
fn event(
    plugin: &Plugin,
    comms: &mut [Comm],
    handles: &mut Vec<Handle>,
    next: &mut impl FnMut() -> Option<u8>,
    fresh: &mut impl FnMut() -> Option<Comm>,
) -> Option<Handle> {
    let calls = [
        Call::all_reduce(16, 2),
        Call::all_reduce(64, 1),
        Call::message(c"Send", 8, 2),
        Call::message(c"Recv", 8, 3),
    ];
    let mut below = |most: usize| Some(usize::from(next()?) % most);
    let (kind, at) = (below(13)?, below(comms.len())?);
    let (parent, call) = (handles[below(handles.len())?], calls[below(calls.len())?]);
    let channel = (below(4)?) as u8;
    let comm = &comms[at];
    let made = match kind {
        0 if plugin.has_calls() => plugin.group_api(comm),
        0 => plugin.plan(comm),
        1 if plugin.has_calls() => plugin.call(comm, parent, &call, below(8)? == 0),
        2 => plugin.task(comm, parent, &call),
        3 => plugin.task_of(comm, parent, parent, &call),
        4 | 5 => plugin.kernel(comm, parent, channel, 1),
        6 => {
            let is_send = below(2)? == 0;
            plugin.transfer(comm, parent, (channel, 1, is_send), std::process::id())
        }
        7 => plugin.step(comm, parent, 1),
        8 => {
            plugin.record(parent, below(32)? as i32, 5, 3);
            NONE
        }
        9 if below(64)? == 0 => {
            if let Some(comm) = fresh() {
                plugin.finalize(&std::mem::replace(&mut comms[at], comm));
            }
            NONE
        }
        _ => {
            let gone = handles.swap_remove(below(handles.len())?);
            plugin.stop(gone);
            NONE
        }
    };
    Some(made)
}
