//! Tests the loader on folders, archives, rings and summaries, and on files that are damaged, too large or no records.

#![allow(clippy::unwrap_used)]

use flate2::Compression;
use flate2::write::GzEncoder;
use rcomm_analyzer::load::{FindError, LoadOptions, Loaded, LoadedDump, load, load_all};
use rcomm_analyzer::{Analysis, Code, Extent, Policy, Problem, Report};
use rcomm_recorder::publish::Dump;
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use std::fs;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/dumps")
        .join(path)
}

/// The bytes of the pickle of one of four ranks.
fn dump(rank: u32) -> Vec<u8> {
    fs::read(fixture(&format!("batch-ring-w4/pickle/rank_{rank}"))).unwrap()
}

/// A folder with these files.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    folder
}

/// Loads everything at this path with the default options.
fn load_path(path: &Path) -> (Vec<LoadedDump>, Loaded) {
    load_all(&[path.to_owned()], &LoadOptions::default()).unwrap()
}

/// The ranks of these dumps, in their order.
fn ranks(dumps: &[LoadedDump]) -> Vec<u32> {
    let rank = |loaded: &LoadedDump| loaded.dump.identity.rank.unwrap();
    dumps.iter().map(rank).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packer = GzEncoder::new(Vec::new(), Compression::fast());
    packer.write_all(bytes).unwrap();
    packer.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        archive.append_data(&mut header, name, *bytes).unwrap();
    }
    archive.into_inner().unwrap()
}

#[test]
fn a_folder_of_dumps_is_read_with_ranks_from_its_names() {
    let (dumps, loaded) = load_path(&fixture("batch-ring-w4/pickle"));
    assert_eq!(ranks(&dumps), [0, 1, 2, 3]);
    assert_eq!((loaded.files, loaded.dumps), (4, 4));
    assert!(loaded.problems.is_empty());
    let (whole, _) = Dump::read(&dump(2)).unwrap();
    assert_eq!(dumps[2].dump.entries, whole.entries);
    assert!(!dumps[2].cut);
}

#[test]
fn folders_that_are_too_deep_are_named_and_not_left_out_in_silence() {
    let folder = folder(&[("rank_0", &dump(0))]);
    let deep = (0..17).fold(folder.path().to_owned(), |path, _| path.join("d"));
    std::fs::create_dir_all(&deep).unwrap();
    std::fs::write(deep.join("rank_1"), dump(1)).unwrap();
    let (dumps, loaded) = load_path(folder.path());
    assert_eq!(ranks(&dumps), [0]);
    let [problem] = &loaded.problems[..] else {
        panic!("one folder is too deep: {:?}", loaded.problems)
    };
    assert_eq!(problem.code, Code::N301, "{problem:?}");
    assert_eq!(problem.path, deep.display().to_string());
    let advice = "more than 16 folders below the named one: give its path as an argument, too";
    assert!(problem.sentence.contains(advice), "{problem:?}");
    let (dumps, _) = load_path(&deep);
    assert_eq!(ranks(&dumps), [1]);
}

#[test]
fn a_foreign_file_becomes_one_problem_and_affects_nothing_else() {
    let (dumps, loaded) = load_path(&fixture("truncated-dump-w4"));
    // Pickles and JSON of the same moment are in neighboring folders, with the expected result next to them.
    assert_eq!(ranks(&dumps), [0, 0, 1, 1, 2, 2, 3, 3]);
    let of_truth: Vec<Code> = loaded
        .problems
        .iter()
        .filter(|problem| problem.path.ends_with("truth.json"))
        .map(|problem| problem.code)
        .collect();
    assert_eq!(of_truth, [Code::N300]);
}

#[test]
fn a_cut_file_gives_what_came_before() {
    let whole = dump(1);
    let folder = folder(&[
        ("rank_0", &dump(0)),
        ("rank_1", &whole[..whole.len() - 300]),
    ]);
    let (dumps, loaded) = load_path(folder.path());
    assert_eq!(ranks(&dumps), [0, 1]);
    assert_eq!((dumps[0].cut, dumps[1].cut), (false, true));
    let [problem] = &loaded.problems[..] else {
        panic!("one file is cut: {:?}", loaded.problems)
    };
    assert_eq!(problem.code, Code::N301);
    assert!(
        problem.sentence.contains("cut short"),
        "{}",
        problem.sentence
    );
}

#[test]
fn empty_garbage_and_hostile_files_are_left_aside() {
    let folder = folder(&[
        ("rank_0", &dump(0)),
        ("rank_1", b""),
        ("rank_2", b"Segmentation fault"),
        ("rank_3", b"\x80\x02cposix\nsystem\n."),
        ("dump", &dump(3)),
        (".rank_9.812.0.part", &dump(3)),
    ]);
    let (dumps, loaded) = load_path(folder.path());
    assert_eq!(ranks(&dumps), [0]);
    let reported: Vec<(Code, &str)> = loaded
        .problems
        .iter()
        .map(|problem| {
            let name = Path::new(&problem.path).file_name().unwrap();
            (problem.code, name.to_str().unwrap())
        })
        .collect();
    assert_eq!(
        reported,
        [
            (Code::N301, "dump"),
            (Code::N301, "rank_1"),
            (Code::N300, "rank_2"),
            (Code::N301, "rank_3"),
        ]
    );
    assert!(loaded.problems[3].sentence.contains("GLOBAL"));
}

#[test]
fn archives_of_every_kind_hold_the_same_dumps() {
    let members: Vec<(String, Vec<u8>)> = (0..4)
        .map(|rank| (format!("job/host-node07_{rank}"), dump(rank)))
        .collect();
    let members: Vec<(&str, &[u8])> = members
        .iter()
        .map(|(name, bytes)| (&name[..], &bytes[..]))
        .collect();
    let plain = tar(&members);
    let archives = [plain.clone(), gzip(&plain), zstd(&plain)];
    for archive in archives {
        // The name gives no hint, so the content decides.
        let folder = folder(&[("records", &archive)]);
        let (dumps, loaded) = load_path(folder.path());
        assert_eq!(ranks(&dumps), [0, 1, 2, 3]);
        assert_eq!((loaded.files, loaded.problems.len()), (4, 0));
        assert!(
            dumps[3].path.ends_with("records:job/host-node07_3"),
            "{}",
            dumps[3].path
        );
    }
}

#[test]
fn packed_single_files_keep_the_rank_of_their_name() {
    let two_frames = [zstd(&dump(1)[..500]), zstd(&dump(1)[500..])].concat();
    let folder = folder(&[
        ("rank_0.gz", &gzip(&dump(0))),
        ("rank_1.zst", &two_frames),
        ("rank_2.tar.gz", &gzip(&tar(&[("dump", &dump(2))]))),
    ]);
    let (dumps, loaded) = load_path(folder.path());
    assert_eq!(ranks(&dumps), [0, 1, 2]);
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    let (whole, _) = Dump::read(&dump(1)).unwrap();
    assert_eq!(dumps[1].dump.entries, whole.entries);
}

#[test]
fn a_packed_file_that_was_cut_gives_what_came_before() {
    let packed = gzip(&dump(1));
    let folder = folder(&[("rank_1.gz", &packed[..packed.len() * 9 / 10])]);
    let (dumps, loaded) = load_path(folder.path());
    assert_eq!(ranks(&dumps), [1]);
    assert!(dumps[0].cut && !dumps[0].dump.entries.is_empty());
    assert!(
        loaded
            .problems
            .iter()
            .all(|problem| problem.code == Code::N301)
    );
}

#[test]
fn a_damaged_member_affects_no_other_member() {
    let mut broken = gzip(&dump(1));
    broken.truncate(20);
    let archive = tar(&[
        ("rank_0", &dump(0)),
        ("rank_1.gz", &broken),
        ("rank_2.gz", &gzip(&dump(2))),
    ]);
    let folder = folder(&[("all.tar", &archive)]);
    let (dumps, loaded) = load_path(folder.path());
    assert_eq!(ranks(&dumps), [0, 2]);
    assert!(!loaded.problems.is_empty());
    assert!(
        loaded
            .problems
            .iter()
            .all(|problem| problem.path.ends_with("all.tar:rank_1.gz"))
    );
}

#[test]
fn absences_in_an_archive_become_problems() {
    let manifest = br#"{"schema":"rcomm.capture/1","made_by":"rcomm-fr","made_ns":0,"files":[],
        "absent":[{"host":"node9","path":"/tmp/rank_1","reason":"No such file"}],"left_out":0}"#;
    let archive = tar(&[("node8/tmp/rank_0", &dump(0)), ("manifest.json", manifest)]);
    let folder = folder(&[("job.rcap", &archive)]);
    let (dumps, loaded) = load_path(folder.path());
    assert_eq!(ranks(&dumps), [0]);
    let [problem] = &loaded.problems[..] else {
        panic!("one file is absent: {:?}", loaded.problems)
    };
    assert!(
        problem
            .sentence
            .contains("/tmp/rank_1 on node9: No such file")
    );
}

/// The report on the records at this path, which `jobs` threads read.
fn judge(path: &Path, jobs: usize) -> Report {
    let options = LoadOptions {
        jobs: NonZeroUsize::new(jobs),
        ..LoadOptions::default()
    };
    let mut analysis = Analysis::new(Policy::default());
    let mut add = |loaded: LoadedDump| {
        analysis.add_from(&loaded.path, &loaded.dump, Extent::Whole);
    };
    load(&[path.to_owned()], &options, &mut add).unwrap();
    analysis.finish()
}

#[test]
fn of_two_records_of_one_rank_the_newer_is_used_in_any_order() {
    let record = |time_ns: i64| {
        format!(
            r#"{{"version":"2.10","rank":5,"pg_config":{{}},"entries":[{{"profiling_name":"cpu:barrier","time_created_ns":{time_ns}}}]}}"#
        )
    };
    let (old, new) = (record(1_000), record(2_000));
    for names in [["a", "b"], ["b", "a"]] {
        let folder = folder(&[(names[0], old.as_bytes()), (names[1], new.as_bytes())]);
        for jobs in [1, 4] {
            let report = judge(folder.path(), jobs);
            assert_eq!(report.input.ranks_read, 1);
            let mut problems = report.problems.iter();
            let set_aside = problems
                .find(|problem| problem.code == Code::N300)
                .unwrap_or_else(|| panic!("one record is set aside: {:?}", report.problems));
            assert!(set_aside.path.ends_with(names[0]), "{}", set_aside.path);
        }
    }
}

#[test]
fn of_two_forms_of_one_record_the_one_with_stacks_is_used() {
    for jobs in [1, 2, 8] {
        let report = judge(&fixture("never-join-w4"), jobs);
        let first = &report.findings[0];
        assert!(first.sentence.contains("train.py:61"), "{}", first.sentence);
        let set_aside = report.problems.iter();
        let set_aside = set_aside.filter(|problem| problem.code == Code::N300);
        let of_json = set_aside.filter(|problem| problem.path.contains("/json/"));
        assert_eq!(of_json.count(), 4, "{:?}", report.problems);
    }
}

#[test]
fn patterns_and_files_may_be_mixed_and_repeated() {
    let pickles = fixture("batch-ring-w4/pickle");
    let paths = [
        pickles.join("rank_[0-1]"),
        pickles.join("rank_1"),
        pickles.join("rank_2"),
    ];
    let (dumps, loaded) = load_all(&paths, &LoadOptions::default()).unwrap();
    assert_eq!(ranks(&dumps), [0, 1, 2]);
    assert_eq!(loaded.files, 3);
}

#[test]
fn a_path_that_names_nothing_is_an_error() {
    let missing = Path::new("/nonexistent/rank_0").to_owned();
    let error = load_all(&[missing], &LoadOptions::default()).unwrap_err();
    assert!(matches!(error, FindError::Path { .. }));
    assert!(error.to_string().contains("/nonexistent/rank_0"), "{error}");
    let pattern = Path::new("/nonexistent/rank_*").to_owned();
    let error = load_all(&[pattern], &LoadOptions::default()).unwrap_err();
    assert!(matches!(error, FindError::NoMatch { .. }), "{error}");
}

#[test]
fn a_ring_file_is_a_record_in_a_folder_and_in_an_archive() {
    let rings = tempfile::tempdir().unwrap();
    let mut config = RecorderConfig::new("job", 3, 4);
    config.placement = Placement::Dir(rings.path().to_owned());
    config.entries = 64;
    let recorder = FlightRecorder::create(&config).unwrap();
    recorder.phase("load data");
    let (dumps, loaded) = load_path(rings.path());
    assert_eq!(ranks(&dumps), [3]);
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    assert_eq!(dumps[0].dump.status.as_ref().unwrap().phase, "load data");

    let ring = fs::read(recorder.storage().path().unwrap()).unwrap();
    let folder = folder(&[("rings.tar", &tar(&[("node7/3.0.ring", &ring)]))]);
    let (dumps, loaded) = load_path(folder.path());
    assert_eq!(ranks(&dumps), [3]);
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    assert_eq!(dumps[0].dump.identity.reason, "copy of a ring");
}

#[test]
fn a_file_larger_than_allowed_is_left_aside() {
    let folder = folder(&[
        ("rank_0", &dump(0)),
        ("rank_1.gz", &gzip(&vec![b' '; 1 << 20])),
        ("rank_2", &vec![b' '; 1 << 20]),
    ]);
    let options = LoadOptions {
        max_file_bytes: 100_000,
        ..LoadOptions::default()
    };
    let (dumps, loaded) = load_all(&[folder.path().to_owned()], &options).unwrap();
    assert_eq!(ranks(&dumps), [0]);
    let [packed, plain] = &loaded.problems[..] else {
        panic!("two files are too large: {:?}", loaded.problems)
    };
    assert!(packed.sentence.contains("larger than 97.7 KiB"));
    assert_eq!(packed.sentence, plain.sentence);
}

/// Asserts that the sentence of a problem contains `part`.
fn assert_reported(loaded: &Loaded, part: &str) {
    let mut problems = loaded.problems.iter();
    assert!(
        problems.any(|problem| problem.sentence.contains(part)),
        "{part}: {:?}",
        loaded.problems
    );
}

#[test]
fn compression_in_layers_is_not_unpacked_past_1000_times_the_size() {
    let archive = tar(&[("rank_0", &vec![0; 10 << 20]), ("rank_1", &dump(1))]);
    let folder = folder(&[("bomb.gz", &gzip(&gzip(&archive)))]);
    let options = LoadOptions {
        max_file_bytes: 100_000,
        ..LoadOptions::default()
    };
    let (dumps, loaded) = load_all(&[folder.path().to_owned()], &options).unwrap();
    assert!(dumps.is_empty());
    assert_reported(&loaded, "over 1000 times the size of the whole input");
}

#[test]
fn many_small_files_unpack_to_no_more_than_they_may_together() {
    let packed = gzip(&vec![b' '; 1 << 20]);
    let names: Vec<String> = (1..65).map(|rank| format!("rank_{rank}.gz")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (&name[..], &packed[..])).collect();
    let folder = folder(&files);
    fs::write(folder.path().join("rank_0"), dump(0)).unwrap();
    let options = LoadOptions {
        jobs: NonZeroUsize::new(4),
        max_unpacked: (8 << 20, 20),
        ..LoadOptions::default()
    };
    let (dumps, loaded) = load_all(&[folder.path().to_owned()], &options).unwrap();
    // A file that is not packed is read nevertheless.
    assert_eq!(ranks(&dumps), [0]);
    let part = "unpack to more than 8 MiB, and to over 20 times their size, together";
    let is_refusal = |problem: &&Problem| problem.sentence.contains(part);
    let refused = loaded.problems.iter().filter(is_refusal).count();
    // Eight fit, less what the four threads had read of others by then.
    assert!(
        (55..=60).contains(&refused),
        "{refused}: {:?}",
        loaded.problems
    );
}

#[test]
fn summaries_count_among_what_is_unpacked() {
    let mut packer = GzEncoder::new(Vec::new(), Compression::fast());
    for _ in 0..16 {
        // A part that states 16 MiB, of which it uses only the first bytes.
        packer.write_all(&(16_u32 << 20).to_le_bytes()).unwrap();
        packer.write_all(&vec![0; 16 << 20]).unwrap();
    }
    let summary = [b"rcommsum\x05\0".as_slice(), &packer.finish().unwrap()].concat();
    let folder = folder(&[("node.rsum", &summary)]);
    let options = LoadOptions {
        max_unpacked: (1 << 20, 1),
        ..LoadOptions::default()
    };
    let (_, loaded) = load_all(&[folder.path().to_owned()], &options).unwrap();
    assert_reported(&loaded, "unpack to more than 1 MiB");
}

#[test]
fn large_files_that_wait_for_each_other_are_all_read() {
    let large_dump = |rank: u32| {
        let mut text = fs::read(fixture(&format!("batch-ring-w4/json/rank_{rank}.json"))).unwrap();
        // White space at the end of a file is no part of it.
        text.extend(std::iter::repeat_n(b'\n', 33 << 20));
        text
    };
    let files: Vec<(String, Vec<u8>)> = (0..3)
        .map(|rank| (format!("rank_{rank}"), large_dump(rank)))
        .collect();
    let files: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, text)| (&name[..], &text[..]))
        .collect();
    let folder = folder(&files);
    let options = LoadOptions {
        jobs: NonZeroUsize::new(3),
        ..LoadOptions::default()
    };
    let (dumps, loaded) = load_all(&[folder.path().to_owned()], &options).unwrap();
    assert_eq!(ranks(&dumps), [0, 1, 2], "{:?}", loaded.problems);
}

#[test]
fn a_file_of_another_format_is_named_as_not_read() {
    let folder = folder(&[
        ("a.zip", b"PK\x03\x04\x14\0\0\0"),
        ("b.tar.xz", b"\xfd7zXZ\0\0\0"),
    ]);
    let (_, loaded) = load_path(folder.path());
    let sentences: Vec<&str> = loaded.problems.iter().map(|p| &*p.sentence).collect();
    let [zip, xz] = sentences[..] else {
        panic!("both files are problems: {sentences:?}")
    };
    assert!(zip.contains("zip files are not read"), "{zip}");
    assert!(xz.contains("xz files are not read"), "{xz}");
}

#[test]
fn progress_counts_every_file_once() {
    let (calls, highest) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let count = |progress: rcomm_analyzer::load::Progress| {
        calls.fetch_add(1, Ordering::Relaxed);
        highest.fetch_max(progress.done, Ordering::Relaxed);
        assert_eq!(progress.files, 4);
    };
    let options = LoadOptions {
        progress: Some(&count),
        ..LoadOptions::default()
    };
    let mut dumps = 0;
    load(&[fixture("batch-ring-w4/pickle")], &options, |_| dumps += 1).unwrap();
    assert_eq!((dumps, calls.into_inner(), highest.into_inner()), (4, 4, 4));
}
