//! Compares the two ways to read entries, and tests that a shape which entries share is not read without end.
#![allow(clippy::unwrap_used)]

use super::*;
use std::path::{Path, PathBuf};

fn pickles() -> Vec<PathBuf> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps");
    let scenarios = std::fs::read_dir(fixtures).unwrap();
    let folders = scenarios.map(|entry| entry.unwrap().path().join("pickle"));
    let files = folders.filter_map(|folder| std::fs::read_dir(folder).ok());
    let mut files: Vec<_> = files.flatten().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The complete result as text, including a fault, and the number of entries.
fn outcome_of(bytes: &[u8], entries: EntryReading) -> (String, usize) {
    let mut builder = Builder::default();
    let mut pickle = Pickle::default();
    let outcome = match run(bytes, &mut pickle, &mut builder, entries) {
        Err(Fault::Taken { .. }) if entries == EntryReading::InPlace => {
            return outcome_of(bytes, EntryReading::Stacked);
        }
        outcome => outcome,
    };
    let rejected = (builder.rejected, builder.first_rejected);
    let dump = builder.finish();
    (
        format!("{outcome:?} {rejected:?} {dump:?}"),
        dump.entries.len(),
    )
}

fn check_both_ways(bytes: &[u8], name: &str) {
    let (in_place, stacked) = (
        outcome_of(bytes, EntryReading::InPlace),
        outcome_of(bytes, EntryReading::Stacked),
    );
    assert!(in_place == stacked, "{name}:\n{in_place:?}\n{stacked:?}");
}

#[test]
fn entries_read_in_place_are_those_that_the_machine_reads() {
    let files = pickles();
    assert!(files.len() > 50, "only {} files", files.len());
    for (file, path) in files.iter().enumerate() {
        let bytes = std::fs::read(path).unwrap();
        let name = path.display();
        check_both_ways(&bytes, &name.to_string());
        // The positions of the truncations and changes differ from file to file.
        for round in 0..8 {
            let index = (file * 7919 + round * 104_729) % bytes.len();
            check_both_ways(&bytes[..index], &format!("{name} cut at {index}"));
            let mut changed = bytes.clone();
            changed[index] = changed[index].wrapping_add(1 + round as u8);
            // Entries that were read in place are in the dump already, even if the machine then loses the list.
            let in_place = outcome_of(&changed, EntryReading::InPlace);
            let stacked = outcome_of(&changed, EntryReading::Stacked);
            assert!(
                in_place == stacked || in_place.1 > stacked.1,
                "{name} changed at {index}:\n{in_place:?}\n{stacked:?}"
            );
        }
    }
}

/// A pickle of protocol 2 that consists of these pieces and STOP.
fn pickle(pieces: &[&[u8]]) -> Vec<u8> {
    [&[0x80, 2][..], &pieces.concat(), b"."].concat()
}

/// The instruction that pushes this text.
fn text(text: &str) -> Vec<u8> {
    let len = (text.len() as u32).to_le_bytes();
    [b"X", &len[..], text.as_bytes()].concat()
}

#[test]
fn an_ordinary_entry_that_is_read_in_place_is_not_kept_as_a_container() {
    let (entries, name) = (text("entries"), text("profiling_name"));
    let mut list = vec![b"}(".to_vec(), entries, b"](".to_vec()];
    for _ in 0..1000 {
        list.extend([
            b"}(".to_vec(),
            name.clone(),
            text("gloo:barrier"),
            b"u".to_vec(),
        ]);
    }
    list.push(b"eu".to_vec());
    let pieces: Vec<&[u8]> = list.iter().map(Vec::as_slice).collect();
    let bytes = pickle(&pieces);
    let (mut in_place, mut stacked) = (Pickle::default(), Pickle::default());
    for (pickle, entries) in [
        (&mut in_place, EntryReading::InPlace),
        (&mut stacked, EntryReading::Stacked),
    ] {
        let mut builder = Builder::default();
        run(&bytes, pickle, &mut builder, entries).unwrap();
        assert_eq!(builder.dump.entries.len(), 1000);
    }
    assert_eq!(stacked.container_count(), 1002);
    assert_eq!(in_place.container_count(), 2);
}

#[test]
fn an_entry_that_occurs_twice_in_its_list_is_two_entries() {
    let (entries, name, barrier) = (
        text("entries"),
        text("profiling_name"),
        text("gloo:barrier"),
    );
    let entry: [&[u8]; 4] = [b"}q\x00(", &name, &barrier, b"u"];
    let bytes = pickle(&[b"}(", &entries, b"](", &entry.concat(), b"h\x00eu"]);
    let mut builder = Builder::default();
    let problem = read(&bytes, &mut Pickle::default(), &mut builder).unwrap();
    assert_eq!(problem, None);
    assert_eq!(builder.dump.entries.len(), 2);
}

#[test]
fn two_lists_of_entries_give_the_same_dump_both_ways() {
    let (entries, name) = (text("entries"), text("profiling_name"));
    let mut lists = Vec::new();
    for op in ["gloo:barrier", "gloo:broadcast"] {
        let entry = [b"}(", &name[..], &text(op), b"u"].concat();
        lists.push([&entries[..], b"](", &entry, b"e"].concat());
    }
    check_both_ways(&pickle(&[b"}(", &lists.concat(), b"u"]), "two lists");
}

#[test]
fn invalid_items_are_counted_alike_both_ways() {
    let (entries, name, barrier) = (
        text("entries"),
        text("profiling_name"),
        text("gloo:barrier"),
    );
    let entry = [b"}(", &name[..], &barrier, b"u"].concat();
    for list in [
        [b"](K\x01", &entry[..], b"K\x02", &entry, b"e"].concat(),
        [b"](", &entry[..], b"K\x02e(", &entry, b"e"].concat(),
        [b"](", &entry[..], b"e", &entry, b"a(", &entry, b"e"].concat(),
        [b"](", &entry[..], b"((", &entry, b"tte"].concat(),
    ] {
        check_both_ways(
            &pickle(&[b"}(", &entries, &list, b"u"]),
            &format!("{list:?}"),
        );
    }
}

/// A dump in which all entries share one shape from the memo.
fn shared_shape(entries: usize, dimensions: usize) -> Vec<u8> {
    let mut bytes = b"\x80\x02}".to_vec();
    bytes.extend(text("entries"));
    bytes.extend(b"](");
    for entry in 0..entries {
        bytes.extend(b"}(");
        bytes.extend(text("profiling_name"));
        bytes.extend(text("nccl:all_reduce"));
        bytes.extend(text("input_sizes"));
        if entry == 0 {
            // A list with one list, which the memo keeps under the number 0.
            bytes.extend(b"](](");
            bytes.extend(b"K\x01".repeat(dimensions));
            bytes.extend(b"eeq\x00");
        } else {
            bytes.extend(b"h\x00");
        }
        bytes.extend(b"u");
    }
    bytes.extend(b"es.");
    bytes
}

#[test]
fn a_shape_that_entries_share_is_not_read_without_end() {
    let rejected = |bytes: &[u8]| {
        let mut builder = Builder::default();
        run(
            bytes,
            &mut Pickle::default(),
            &mut builder,
            EntryReading::InPlace,
        )
        .unwrap();
        builder.rejected
    };
    assert_eq!(rejected(&shared_shape(50, 1000)), 0);
    assert!(rejected(&shared_shape(40, 1 << 20)) > 0);
}
