//! A short hunt for false verdicts: `cargo run --bin hunt` runs a long one.

use rcomm_tests::hunt::{Case, Class, Grade};
use std::ops::Range;

/// Seeds of [`Class::Any`] whose reports once stated something false.
const MENDED: &[u64] = &[
    5, 67, 75, 88, 121, 258, 716, 840, 881, 1005, 1017, 1136, 1520, 1890, 2340, 2363, 2511, 2575,
    2698, 2999, 3120, 3395, 3418, 3531, 3892, 4035, 4813, 5124, 5203, 5216, 5362, 6555, 20022,
    40061, 50142,
];
/// Seeds of the other classes whose reports once stated something false. The reports were wrong about ranks without a
/// record: about which of two calls they had made, and why they had left. They took dumps of an earlier run, which name
/// no job, for dumps of this one. And they accused ranks that a failure had made write a dump while they worked or gave
/// up. They paired messages that cannot belong together, and accused ranks whose records lack the start of an operation
/// that had completed, or that Slurm named first. They knew only six calls of the past, where layers of one shape make
/// more equal ones in a row.
const MENDED_OF_CLASS: &[(Class, u64)] = &[
    (Class::Attempts, 7),
    (Class::Attempts, 45),
    (Class::Attempts, 268),
    (Class::Attempts, 282),
    (Class::Attempts, 286),
    (Class::Attempts, 289),
    (Class::Attempts, 428),
    (Class::Attempts, 541),
    (Class::Attempts, 568),
    (Class::Attempts, 708),
    (Class::Attempts, 714),
    (Class::Odds, 187),
    (Class::Odds, 201),
    (Class::Odds, 366),
    (Class::Odds, 438),
    (Class::Odds, 40013),
    (Class::Dumps, 16),
    (Class::Dumps, 145),
    (Class::Dumps, 192),
    (Class::Dumps, 325),
    (Class::Dumps, 364),
    (Class::Dumps, 370),
    (Class::Dumps, 424),
    (Class::Dumps, 461),
    (Class::Dumps, 479),
    (Class::Dumps, 567),
    (Class::Dumps, 604),
    (Class::Dumps, 617),
    (Class::Dumps, 676),
    (Class::Dumps, 714),
    (Class::Dumps, 764),
    (Class::Dumps, 772),
    (Class::Meshes, 226),
    (Class::Meshes, 1388),
    (Class::Batches, 763),
    (Class::Logs, 936),
    (Class::Logs, 40136),
    (Class::Logs, 50556),
];
/// The seeds of [`Class::Any`] that every test run judges.
const SEEDS: Range<u64> = 0..160;
/// The seeds of each other class that every test run judges.
const SEEDS_OF_CLASS: Range<u64> = 0..24;

/// Asserts that no report on these jobs is false. Returns how many reports are right; the others leave something open.
fn assert_none_wrong(class: Class, seeds: impl Iterator<Item = u64>) -> usize {
    let (mut right, mut wrong) = (0, Vec::new());
    for seed in seeds {
        let case = Case::of(class, seed);
        let (report, grade, why) = case.judge();
        right += usize::from(grade == Grade::Right);
        if grade == Grade::Wrong {
            wrong.push(format!(
                "{class:?}, seed {seed}: {:?}: {case}: {why}",
                report.verdict
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    right
}

#[test]
fn no_report_on_a_simulated_job_is_false() {
    let right = assert_none_wrong(Class::Any, SEEDS);
    // A report that leaves all open would never be wrong.
    let cases = (SEEDS.end - SEEDS.start) as usize;
    assert!(right * 2 > cases, "{right} of {cases} reports are right");
}

#[test]
fn no_report_is_false_that_once_was() {
    assert_none_wrong(Class::Any, MENDED.iter().copied());
    for &(class, seed) in MENDED_OF_CLASS {
        assert_none_wrong(class, std::iter::once(seed));
    }
}

#[test]
fn a_seed_gives_the_same_records_each_time() {
    for seed in 0..8 {
        let (one, other) = (Case::make(seed), Case::make(seed));
        assert_eq!(one.dumps, other.dumps, "seed {seed}");
        assert_eq!(one.report(), other.report(), "seed {seed}");
    }
}

#[test]
fn no_report_on_a_class_of_evidence_is_false() {
    for class in Class::ALL.into_iter().filter(|&class| class != Class::Any) {
        let right = assert_none_wrong(class, SEEDS_OF_CLASS);
        let cases = (SEEDS_OF_CLASS.end - SEEDS_OF_CLASS.start) as usize;
        assert!(
            right * 4 > cases,
            "{class:?}: {right} of {cases} reports are right"
        );
    }
}
