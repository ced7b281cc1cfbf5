//! Tests dumps that were taken at different moments of one job.

use crate::job::{Call, job};
use rcomm_recorder::model::EntryState;
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_verdict::{Code, Policy, Verdict, analyze};

#[test]
fn an_operation_that_only_older_dumps_show_as_unfinished_is_no_hang() {
    const WORLD: Call = Call::AllReduce { group: 0, line: 10 };
    const PAIR: Call = Call::AllReduce { group: 1, line: 20 };
    let early = vec![WORLD, PAIR, WORLD, PAIR, WORLD, PAIR];
    let late: Vec<Call> = early.iter().chain(&early).copied().collect();
    let mut dumps = job("gloo", &[early.clone(), early, late.clone(), late]);
    for (rank, dump) in (0u32..).zip(&mut dumps) {
        let pair = rank / 2;
        dump.groups[1].info.name = format!("pair{pair}");
        dump.groups[1].info.ranks = [2 * pair, 2 * pair + 1].into();
        if pair == 0 {
            let last = dump.entries.last_mut().expect("a rank has operations");
            last.state = EntryState::Started;
            last.retired = false;
            last.time_discovered_completed_ns = 0;
        }
    }
    let report = analyze(&dumps, &Policy::default());
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Inconclusive);
}

#[test]
fn one_older_dump_does_not_hide_that_all_others_are_stuck() {
    const WORLD: Call = Call::AllReduce { group: 0, line: 10 };
    const PAIR: Call = Call::AllReduce { group: 1, line: 20 };
    let programs = vec![vec![WORLD, PAIR, WORLD, PAIR, WORLD]; 8];
    let mut dumps = job("gloo", &programs);
    for (rank, dump) in (0u32..).zip(&mut dumps) {
        let pair = rank / 2;
        dump.groups[1].info.name = format!("pair{pair}");
        dump.groups[1].info.ranks = [2 * pair, 2 * pair + 1].into();
        // In the dump of rank 7, the second operation on its pair is still unfinished.
        let done = if rank == 7 { 3 } else { 4 };
        for entry in &mut dump.entries[done..] {
            entry.state = EntryState::Started;
            entry.retired = false;
            entry.time_discovered_completed_ns = 0;
        }
    }
    let report = analyze(&dumps, &Policy::default());
    let finding = &report.findings[0];
    assert_eq!((report.verdict, finding.code), (Verdict::Stuck, Code::E135));
    let expected = "ranks 0-7 are all inside all_reduce #3 on group default_pg and none is known to have finished";
    assert!(
        finding.sentence.starts_with(expected),
        "{}",
        finding.sentence
    );
    let doubt =
        "the record of rank 7 was taken before those of others, and it may have finished since";
    assert!(finding.doubts.iter().any(|found| found == doubt));
}

/// Dumps by gloo's own recorder. `ranks` has for each rank the seconds at which it issued its all_reduces, and whether
/// the newest is over.
fn by_gloo(ranks: &[(&[f64], bool)]) -> Vec<Dump> {
    let of_rank = |&(issued, is_over): &(&[f64], bool)| {
        let program = vec![Call::AllReduce { group: 0, line: 10 }; issued.len()];
        let mut dump = job("gloo", &vec![program; ranks.len()]).remove(0);
        dump.recorder = Recorder::NativeGloo;
        for signature in &mut dump.signatures {
            signature.backend = "gloo".to_owned();
        }
        let newest = issued.len();
        for ((number, entry), second) in (1..).zip(&mut dump.entries).zip(issued) {
            entry.state = EntryState::Scheduled;
            entry.retired = number < newest || is_over;
            entry.time_created_ns = 1_699_966_800_000_000_000 + (second * 1e9) as i64;
            entry.time_discovered_started_ns = 0;
            entry.time_discovered_completed_ns = 0;
            entry.timeout_ms = 30_000;
        }
        dump
    };
    let mut dumps: Vec<Dump> = ranks.iter().map(of_rank).collect();
    for (rank, dump) in (0..).zip(&mut dumps) {
        dump.identity.rank = Some(rank);
    }
    dumps
}

/// The times, s, of this many operations, one every 100 ms.
fn steps(number: u32) -> Vec<f64> {
    (0..number).map(|step| f64::from(step) * 0.1).collect()
}

#[test]
fn gloo_s_dumps_of_different_moments_accuse_no_rank() {
    let (early, late) = (steps(20), steps(60));
    for (early_over, late_over) in [(true, true), (true, false), (false, true), (false, false)] {
        let early = (&early[..], early_over);
        let dumps = by_gloo(&[early, early, early, (&late[..], late_over)]);
        let report = analyze(&dumps, &Policy::default());
        assert_eq!(report.findings, [], "{:?}", report.findings);
        assert_eq!(report.verdict, Verdict::Inconclusive);
        let mut notes = report.problems.iter();
        let note = notes.find(|problem| problem.code == Code::N300);
        let note = &note.expect("a note on the earlier records").sentence;
        assert!(note.contains("ranks 0-2 were taken earlier"), "{note}");
    }
}

#[test]
fn gloo_s_operations_that_timed_out_or_failed_together_accuse_the_rank_that_did_not_come() {
    let behind = steps(20);
    // A step every 100 ms, then an operation that timed out after 30 s, or several that failed together.
    let timed_out = [&behind[..], &[2.0]].concat();
    let burst: Vec<f64> = (0..8).map(|nth| 2.0 + f64::from(nth) * 0.01).collect();
    let burst = [&behind[..], &burst].concat();
    let again: Vec<f64> = (0..8).map(|nth| 2.0 + f64::from(nth) * 30.0).collect();
    let again = [&behind[..], &again].concat();
    for ahead in [timed_out, burst, again] {
        let waits = (&ahead[..], true);
        let dumps = by_gloo(&[waits, (&behind, true), waits, waits]);
        let report = analyze(&dumps, &Policy::default());
        let finding = &report.findings[0];
        assert_eq!((report.verdict, finding.code), (Verdict::Stuck, Code::E101));
        assert_eq!(finding.culprit_ranks, [1], "{}", finding.sentence);
    }
}

#[test]
fn an_early_dump_by_gloo_does_not_hide_the_rank_that_others_wait_for() {
    let (early, behind, waits) = (steps(20), steps(60), steps(61));
    // The others still wait, or have timed out.
    for is_over in [false, true] {
        let waits = (&waits[..], is_over);
        let dumps = by_gloo(&[waits, (&behind, true), (&early, true), waits]);
        let report = analyze(&dumps, &Policy::default());
        let finding = report.findings.first();
        let finding = finding.unwrap_or_else(|| panic!("{is_over}: {:?}", report.problems));
        assert_eq!((report.verdict, finding.code), (Verdict::Stuck, Code::E101));
        assert_eq!(finding.culprit_ranks, [1], "{}", finding.sentence);
    }
}

/// The times, s, of `steps` steps with `each` operations each. The operations of a step are issued `apart` s apart, and
/// the steps begin `step` s apart.
fn bursts(steps: u32, each: u32, apart: f64, step: f64) -> Vec<f64> {
    let step_of =
        |nth| (0..each).map(move |operation| f64::from(nth) * step + f64::from(operation) * apart);
    (0..steps).flat_map(step_of).collect()
}

#[test]
fn gloo_s_operations_of_one_long_step_that_failed_together_accuse_the_rank_that_did_not_come() {
    // Fast and slow operations, with several steps, one or none before the step that failed.
    for (steps, each, apart, step) in [
        (6, 200, 0.001, 0.6),
        (6, 40, 0.01, 0.5),
        (1, 200, 0.001, 0.6),
        (2, 300, 0.002, 0.9),
    ] {
        let ahead = bursts(steps, each, apart, step);
        let behind = bursts(steps - 1, each, apart, step);
        let waits = (&ahead[..], true);
        let dumps = by_gloo(&[waits, (&behind, true), waits, waits]);
        let report = analyze(&dumps, &Policy::default());
        let Some(finding) = report.findings.first() else {
            panic!("{steps} {each}: {:?}", report.problems);
        };
        assert_eq!((report.verdict, finding.code), (Verdict::Stuck, Code::E101));
        assert_eq!(finding.culprit_ranks, [1], "{}", finding.sentence);
    }
    // A rank that is several steps ahead of all others has completed the first of these.
    let (early, late) = (bursts(2, 200, 0.001, 0.6), bursts(6, 200, 0.001, 0.6));
    let early = (&early[..], true);
    let dumps = by_gloo(&[early, early, early, (&late, true)]);
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(report.findings, [], "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Inconclusive);
}

#[test]
fn a_gloo_rank_that_is_a_little_ahead_of_all_others_leaves_a_doubt() {
    let (early, late) = (steps(20), steps(22));
    let early = (&early[..], true);
    for late_over in [true, false] {
        let late = (&late[..], late_over);
        for (dumps, behind) in [
            ([early, early, early, late], "those of ranks 0-2, they"),
            ([early, late, late, late], "that of rank 0, it"),
        ] {
            let report = analyze(&by_gloo(&dumps), &Policy::default());
            for finding in &report.findings {
                assert!(finding.confidence <= 0.5, "{}", finding.confidence);
                let mut doubts = finding.doubts.iter();
                let doubt =
                    format!("if the others' are newer than {behind} may have gone on since");
                assert!(
                    doubts.any(|found| found.contains(&doubt)),
                    "{:?}",
                    finding.doubts
                );
            }
        }
    }
}

#[test]
fn gloo_s_group_without_a_name_hides_no_rank_that_is_missing_in_a_group_with_the_same_members() {
    // Each rank has left dumps by two recorders, in either order of the two.
    const CALL: Call = Call::AllReduce { group: 0, line: 10 };
    for number in [5, 20, 25] {
        let beside = steps(number);
        let mut gloo = by_gloo(&[(&beside[..], true); 4]);
        for dump in &mut gloo {
            let nameless = &mut dump.groups[0].info;
            (nameless.name, nameless.desc) = (String::new(), String::new());
        }
        let mut nccl = job("nccl", &vec![vec![CALL; 31]; 4]);
        for (rank, dump) in nccl.iter_mut().enumerate() {
            for (number, entry) in (0..).zip(&mut dump.entries) {
                // The records of a rank are of one run, as their times show.
                let shift_ns = 1_699_966_800_000_000_000 + number * 100_000_000;
                entry.time_created_ns += shift_ns;
                entry.time_discovered_started_ns += shift_ns;
                entry.time_discovered_completed_ns += shift_ns;
            }
            match rank {
                2 => drop(dump.entries.pop()),
                _ => {
                    let waits = dump.entries.last_mut().expect("a rank has operations");
                    waits.state = EntryState::Started;
                    waits.retired = false;
                    waits.time_discovered_completed_ns = 0;
                }
            }
        }
        for dumps in [[&nccl[..], &gloo[..]], [&gloo[..], &nccl[..]]] {
            let report = analyze(&dumps.concat(), &Policy::default());
            let finding = report.findings.first();
            let finding = finding.unwrap_or_else(|| panic!("{number}: {:?}", report.problems));
            assert_eq!((report.verdict, finding.code), (Verdict::Stuck, Code::E101));
            assert_eq!(finding.culprit_ranks, [2], "{}", finding.sentence);
        }
    }
}

#[test]
fn ranks_of_gloo_s_world_that_made_a_smaller_group_are_of_the_same_job() {
    let (behind, waits) = (steps(20), steps(21));
    let waits = (&waits[..], false);
    for lists_group in [false, true] {
        let mut dumps = by_gloo(&[waits, waits, waits, (&behind, true)]);
        for (rank, dump) in dumps.iter_mut().enumerate() {
            dump.groups.truncate(1);
            if rank > 1 {
                continue;
            }
            // Ranks 0 and 1 have made a group, whose members gloo lists in place of the world's.
            if lists_group {
                let listed = [("1", "undefined", &[][..]), ("", "", &[0, 1])];
                dump.groups[0].info.ranks = [].into();
                for (name, desc, ranks) in listed {
                    let mut group = dump.groups[0].clone();
                    (group.info.name, group.info.desc) = (name.to_owned(), desc.to_owned());
                    group.info.ranks = ranks.into();
                    dump.groups.push(group);
                }
            } else {
                dump.groups[0].info.ranks = [0, 1].into();
            }
        }
        let report = analyze(&dumps, &Policy::default());
        let finding = report.findings.first();
        let finding = finding.unwrap_or_else(|| panic!("{lists_group}: {:?}", report.problems));
        assert_eq!((report.verdict, finding.code), (Verdict::Stuck, Code::E101));
        assert_eq!(finding.culprit_ranks, [3], "{}", finding.sentence);
        assert_eq!(report.input.ranks_read, 4, "{:?}", report.problems);
    }
}

#[test]
fn a_group_without_a_name_has_none_in_the_text() {
    let (behind, waits) = (steps(20), steps(21));
    let waits = (&waits[..], false);
    let mut dumps = by_gloo(&[waits, waits, (&behind, true), waits]);
    for dump in &mut dumps {
        let nameless = &mut dump.groups[0].info;
        (nameless.name, nameless.desc) = (String::new(), String::new());
    }
    let report = analyze(&dumps, &Policy::default());
    let sentence = &report.findings[0].sentence;
    assert!(sentence.contains("on group \"\" (ranks 0-3)"), "{sentence}");
}

#[test]
fn healthy_gloo_ranks_behind_one_that_waits_for_nothing_are_not_accused() {
    // An operation every 100 ms, without pauses or with a few of 1 s, as for checkpoints.
    let with_pauses = |number: u32| -> Vec<f64> {
        let pauses =
            |step: u32| f64::from([60, 100, 150].iter().filter(|&&at| step >= at).count() as u32);
        let times = (0..number).map(|step| f64::from(step) * 0.1 + pauses(step));
        times.collect()
    };
    let even = [30, 45, 50].map(|late| (steps(20), steps(late)));
    let uneven = [220, 250].map(|late| (with_pauses(20), with_pauses(late)));
    for (early, late) in even.into_iter().chain(uneven) {
        let early = (&early[..], true);
        let dumps = by_gloo(&[early, early, early, (&late, true)]);
        let report = analyze(&dumps, &Policy::default());
        assert_eq!(report.findings, [], "{}: {:?}", late.len(), report.findings);
        assert_eq!(report.verdict, Verdict::Inconclusive);
    }
}
