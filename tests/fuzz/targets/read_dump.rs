//! Reads any bytes as a dump. It must not panic, must use no index out of range, and must be able to write what it
//! has read and to read that again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rcomm_recorder::publish::Dump;

fn check_indices(dump: &Dump) {
    for entry in &dump.entries {
        assert!((entry.group as usize) < dump.groups.len());
        assert!((entry.signature as usize) < dump.signatures.len());
        assert!(entry.stack.is_none_or(|at| (at as usize) < dump.stacks.len()));
        assert!(entry.thread.is_none_or(|at| (at as usize) < dump.threads.len()));
    }
    for &frame in dump.stacks.iter().flatten() {
        assert!((frame as usize) < dump.frames.len());
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Ok((dump, _)) = Dump::read(bytes) else {
        return;
    };
    check_indices(&dump);
    for written in [dump.to_json(), dump.to_pickle()] {
        let (again, problems) = Dump::read(&written).expect("what we write is readable");
        assert!(problems.is_empty(), "{problems:?}");
        check_indices(&again);
        assert_eq!(again.entries.len(), dump.entries.len());
        // A group that entries name with and without a description may become one.
        assert!(again.groups.len() <= dump.groups.len());
        for (one, other) in dump.entries.iter().zip(&again.entries) {
            assert_eq!(one.record_id, other.record_id);
            assert_eq!(one.state, other.state);
            assert_eq!(one.peer, other.peer);
            assert_eq!(
                dump.signatures[one.signature as usize],
                again.signatures[other.signature as usize]
            );
        }
    }
});
