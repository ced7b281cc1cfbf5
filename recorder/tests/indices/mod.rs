//! Checks a property of every dump, whatever it was read from: its indices are valid in its own tables.

use rcomm_recorder::publish::Dump;

/// Panics if an index of this dump is out of range.
pub(crate) fn check_indices(dump: &Dump) {
    for entry in &dump.entries {
        assert!((entry.group as usize) < dump.groups.len());
        assert!((entry.signature as usize) < dump.signatures.len());
        assert!(
            entry
                .stack
                .is_none_or(|stack| (stack as usize) < dump.stacks.len())
        );
        assert!(
            entry
                .thread
                .is_none_or(|thread| (thread as usize) < dump.threads.len())
        );
    }
    for &frame in dump.stacks.iter().flatten() {
        assert!((frame as usize) < dump.frames.len());
    }
}
