//! Rings with wrong counts: reading such a ring takes little memory, and its dump is smaller than the ring.

use super::{all_reduce, config, path_of, world};
use rcomm_recorder::model::ProcessGroupInfo;
use rcomm_recorder::publish::{Dump, DumpGroup, RingReader};
use rcomm_recorder::record::FlightRecorder;
use std::fs;

/// Words of the header: offset of the groups' rows in bytes and number of rows, offset of the arena, rows in use.
const GROUPS: usize = 16;
const GROUPS_ROWS: usize = 17;
const ARENA: usize = 24;
const GROUPS_USED: usize = 176;
/// Words of a group's row: the reference to its members, and their number.
const RANKS: usize = 3;
const SIZE: usize = 4;

/// The words of a ring with one group and one operation.
fn words() -> Vec<u64> {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let group = world(&recorder);
    recorder.completed(recorder.begin(&all_reduce(group, 1)));
    let bytes = fs::read(path_of(&recorder)).unwrap();
    let (words, rest) = bytes.as_chunks();
    assert!(rest.is_empty());
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn read(words: &[u64]) -> Dump {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("0.0.ring");
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    fs::write(&path, bytes).unwrap();
    RingReader::attach(&path).unwrap().snapshot()
}

#[test]
fn groups_of_one_name_take_few_bytes_each_in_a_dump() {
    let group = DumpGroup {
        info: ProcessGroupInfo {
            id: 0,
            name: String::new(),
            desc: String::new(),
            ranks: [].into(),
        },
        place: None,
        status: None,
    };
    let json = |number: usize| {
        let dump = Dump {
            groups: vec![group.clone(); number],
            ..Dump::default()
        };
        let json = dump.to_json();
        let problems = Dump::read(&json).unwrap().1;
        assert!(problems.is_empty(), "{problems:?}");
        json.len()
    };
    // The key of each group contains its number, of up to three digits.
    let (few, many) = (json(100), json(900));
    let bytes_each = (many - few) / 800;
    assert!(
        bytes_each < 120,
        "{bytes_each} bytes for each further group"
    );
}

#[test]
fn rows_beyond_the_table_of_groups_make_no_dump_larger_than_the_ring() {
    let mut words = words();
    words[GROUPS_ROWS] = 2_245;
    words[GROUPS_USED] = 110_592;
    let dump = read(&words);
    assert_eq!(dump.groups.len(), 2_245);
    let json = dump.to_json().len();
    assert!(json < words.len() * 8, "{json} bytes");
}

#[test]
fn members_that_do_not_add_up_to_their_number_take_no_memory() {
    const MANY: u64 = 1 << 24;
    let mut words = words();
    let row = words[GROUPS] as usize / 8;
    let members = words[row + RANKS] as u32 as usize;
    let runs = (words[ARENA] as usize + members) / 8;
    assert_eq!(words[runs + 1], 4, "the run of the four ranks of the world");
    words[row + SIZE] = MANY;
    words[runs + 1] = MANY - 1;
    let bytes = words.len() as u64 * 8;
    let mut dump = Dump::default();
    let used = allocation_counter::measure(|| dump = read(&words));
    assert!(dump.groups[0].info.ranks.is_empty());
    assert!(used.bytes_max < 8 * bytes, "{} bytes", used.bytes_max);
    // Runs that add up to the number are read.
    words[row + SIZE] = 1_000;
    words[runs + 1] = 1_000;
    assert_eq!(read(&words).groups[0].info.ranks.len(), 1_000);
}
