//! The report on the summaries of a job's nodes is the report on the job's records.

#![allow(clippy::unwrap_used)]

use rcomm_analyzer::load::{LoadOptions, Loaded, LoadedDump, load_all};
use rcomm_analyzer::rsum::Writer;
use rcomm_analyzer::{Analysis, Extent, Policy, Report};
use rcomm_recorder::model::Frame;
use rcomm_recorder::publish::Dump;
use rcomm_tests::generator::{Job, Kind, Random, Spec};
use std::path::{Path, PathBuf};

/// The generated job of this seed. Every third job has no fault.
fn job(seed: u64) -> Job {
    let mut spec = Spec::random(seed.wrapping_add(9 << 32), 32);
    if !seed.is_multiple_of(3) {
        let kinds = Kind::HANGS;
        spec.faults = vec![kinds[seed as usize % kinds.len()]];
    }
    spec.make()
}

fn judge(dumps: &[LoadedDump]) -> Report {
    let mut analysis = Analysis::new(Policy::default());
    for loaded in dumps {
        let extent = if loaded.cut {
            Extent::Cut
        } else {
            Extent::Whole
        };
        analysis.add_from("", &loaded.dump, extent);
    }
    analysis.finish()
}

/// Puts every rank on one of up to four nodes, and writes the summary of each node to `folder`. Returns the dumps.
fn pack(job: &Job, random: &mut Random, folder: &Path) -> Vec<LoadedDump> {
    let nodes = random.between(1, 4);
    let dumps: Vec<LoadedDump> = job
        .dumps
        .iter()
        .map(|dump| LoadedDump {
            dump: dump.clone(),
            path: format!("rank_{}", dump.identity.rank.unwrap()),
            // Some files were cut short.
            cut: random.chance(0.05),
            written_ns: None,
        })
        .collect();
    let node_of_dump: Vec<u64> = dumps.iter().map(|_| random.between(1, nodes)).collect();
    for node in 1..=nodes {
        let mut writer = Writer::new(Vec::new()).unwrap();
        let pairs = dumps.iter().zip(&node_of_dump);
        for (loaded, _) in pairs.filter(|(_, node_of_it)| **node_of_it == node) {
            writer.add(loaded).unwrap();
        }
        let bytes = writer.finish(&Loaded::default()).unwrap();
        std::fs::write(folder.join(format!("{node}.rsum")), bytes).unwrap();
    }
    dumps
}

/// The stacks as lists of frames, which can be compared: a stack may refer to either of two equal rows in the table of
/// frames.
fn stacks(dump: &Dump) -> Vec<Vec<&Frame>> {
    let frames = |stack: &Vec<u32>| stack.iter().map(|&at| &dump.frames[at as usize]).collect();
    dump.stacks.iter().map(frames).collect()
}

/// The dump without its stacks.
fn without_stacks(dump: &Dump) -> Dump {
    Dump {
        stacks: Vec::new(),
        ..dump.clone()
    }
}

#[test]
fn summaries_give_the_report_of_the_records() {
    let mut with_findings = 0;
    for seed in 0..60 {
        let job = job(seed);
        let folder = tempfile::tempdir().unwrap();
        let whole = pack(&job, &mut Random::new(seed), folder.path());
        let paths: [PathBuf; 1] = [folder.path().to_owned()];
        let (packed, loaded) = load_all(&paths, &LoadOptions::default()).unwrap();
        assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
        for (before, after) in whole.iter().zip(&packed) {
            assert_eq!(stacks(&before.dump), stacks(&after.dump), "seed {seed}");
            let rest = [&before.dump, &after.dump].map(without_stacks);
            assert_eq!(rest[0], rest[1], "seed {seed}");
            assert_eq!(before.cut, after.cut, "seed {seed}");
        }
        let (before, after) = (judge(&whole), judge(&packed));
        assert_eq!(
            serde_json::to_value(&before).unwrap(),
            serde_json::to_value(&after).unwrap(),
            "seed {seed}"
        );
        with_findings += usize::from(!before.findings.is_empty());
    }
    assert!(
        with_findings > 20,
        "only {with_findings} jobs show their fault"
    );
}

#[test]
fn a_summary_is_a_fraction_of_its_dumps() {
    let mut spec = Spec::random(7, 16);
    spec.steps = 6;
    let job = spec.make();
    let past = rcomm_tests::generator::Past::of(&job.dumps, 2000, 10);
    let (mut pickles, mut writer) = (0, Writer::new(Vec::new()).unwrap());
    for dump in job.dumps {
        let dump = past.lengthen(dump);
        pickles += dump.to_pickle().len();
        let path = String::new();
        writer
            .add(&LoadedDump {
                dump,
                path,
                cut: false,
                written_ns: None,
            })
            .unwrap();
    }
    let summary = writer.finish(&Loaded::default()).unwrap().len();
    assert!(summary * 10 < pickles, "{summary} of {pickles} bytes");
}
