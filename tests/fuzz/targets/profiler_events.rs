//! Reports NCCL's events to the profiler plug-in in an order that arbitrary bytes decide, in each version of the
//! interface. The plug-in must not panic, and must return success for each event.
#![no_main]

#[allow(dead_code, reason = "shared with the tests of the plug-in")]
#[path = "../../../runtime/profiler/tests/host/library.rs"]
mod library;
#[path = "../../../runtime/profiler/tests/host/orders.rs"]
mod orders;

use libfuzzer_sys::fuzz_target;
use library::{Comm, Plugin};
use std::sync::{LazyLock, Mutex, PoisonError};

/// The communicators that this target makes have smaller numbers: a plug-in records 4,096 in the life of a process.
const COMMUNICATORS: u64 = 4_000;

/// Each version with its first communicators, whose numbers are below 100, and the number of the newest communicator.
static STATE: LazyLock<Mutex<(Vec<(Plugin, Vec<Comm>)>, u64)>> = LazyLock::new(|| {
    // The newest version comes first: the first communicator gives the process its rank, which version 3 does not
    // state.
    let versions = [6, 5, 4, 3].map(|version| {
        let plugin = Plugin::open(version).expect("the plug-in has this version");
        let comm = |number| plugin.init(None, number, 0, 4).expect("a communicator");
        let comms = (0..4)
            .map(|index| comm(u64::from(version) * 10 + index))
            .collect();
        (plugin, comms)
    });
    Mutex::new((versions.into(), 100))
});

fuzz_target!(
    init: {
        // SAFETY: libFuzzer has started no thread yet.
        unsafe {
            std::env::set_var("RCOMM_RING_DIR", "memory");
            std::env::set_var("RCOMM_NCCL_EVENTS", "channels,steps");
        }
    },
    |bytes: &[u8]| {
        let Some((&first, rest)) = bytes.split_first() else {
            return;
        };
        let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        let (versions, newest) = &mut *state;
        let (plugin, comms) = &mut versions[usize::from(first) % 4];
        let mut bytes = rest.iter().copied();
        let new_communicator = || {
            *newest += 1;
            let has_room = *newest < COMMUNICATORS;
            has_room.then(|| plugin.init(None, *newest, 0, 4).expect("a communicator"))
        };
        orders::play(plugin, comms, || bytes.next(), new_communicator);
    }
);
