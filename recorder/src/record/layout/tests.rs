//! The size of a ring's layout.

use super::*;

#[test]
fn default_ring_takes_less_than_four_mebibytes() {
    let layout = RingLayout::plan(&RecorderConfig::new("job", 0, 8));
    assert!(layout.bytes < 4 << 20, "{} bytes", layout.bytes);
    assert!(layout.bytes.is_multiple_of(4096));
}

#[test]
fn a_ring_within_a_size_holds_as_many_operations_as_fit() {
    let config = RecorderConfig::new("job", 0, 8);
    for mib in [1, 3, 16, 200] {
        let entries = config.entries_within(mib << 20).unwrap();
        assert!(entries.is_power_of_two(), "{mib} MiB: {entries}");
        assert!(config.bytes_with(entries) <= mib << 20, "{mib} MiB");
        let twice = entries * 2;
        assert!(
            entries == RecorderConfig::MAX_ENTRIES || config.bytes_with(twice) > mib << 20,
            "{mib} MiB: {entries}"
        );
    }
    assert_eq!(
        config.entries_within(usize::MAX),
        Some(RecorderConfig::MAX_ENTRIES)
    );
    assert_eq!(config.entries_within(config.bytes_with(1) - 1), None);
}
