//! Tests exchanges (all_to_all with sizes for each pair) that fail or hang, with and without these sizes in the
//! records.

use crate::job::{State, alive, at, closed, dead, record};
use crate::{judge, root};
use rcomm_recorder::model::{OpType, ProcessExit, Rank, Signature};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Policy, Report, Verdict, analyze};

/// The record of a rank of 4 with an all_reduce, an exchange and, where `then` gives one, another all_reduce. `splits`
/// are the sizes that the rank sends to each, and those that it expects, if they are recorded.
fn exchanged(
    rank: Rank,
    backend: &str,
    splits: Option<[[u64; 4]; 2]>,
    (state, then): (State, Option<State>),
) -> Dump {
    let mut operations = vec![(0.0, State::Done(0.1)), (1.0, state)];
    operations.extend(then.map(|then| (1.1, then)));
    let mut dump = record(rank, 4, &operations);
    let [input_splits, output_splits] =
        splits.map_or([vec![], vec![]], |sides| sides.map(Vec::from));
    dump.signatures[0].backend = backend.to_owned();
    dump.signatures.push(Signature {
        op_name: "all_to_all_v_single".to_owned(),
        input_sizes: vec![vec![8]],
        output_sizes: vec![vec![8]],
        input_splits,
        output_splits,
        ..dump.signatures[0].clone()
    });
    (dump.entries[1].op, dump.entries[1].signature) = (OpType::AllToAllVSingle, 1);
    dump
}

/// Rank 2 sends 1, 3, 2 and 2 elements, where each rank expects 2. Its part completes, rank 1 receives too much and its
/// process ends, and the exchange fails on the others. The exit code is that of rank 1.
fn wrong_splits(backend: &str, are_recorded: bool, exit_code: Option<u8>) -> Vec<Dump> {
    let of_rank = |rank: Rank| {
        let state = match rank {
            1 => (State::Pending, None),
            2 => (State::Done(1.05), Some(State::Failed(1.2))),
            _ => (State::Failed(1.1), None),
        };
        let sends = if rank == 2 { [1, 3, 2, 2] } else { [2; 4] };
        let splits = are_recorded.then_some([sends, [2; 4]]);
        let mut dump = dead(
            exchanged(rank, backend, splits, state),
            if rank == 1 { 1.0 } else { 4.0 },
        );
        if rank == 1
            && let Some(code) = exit_code
        {
            let status = dump.status.as_mut().expect("the record has a status");
            status.exit = Some(ProcessExit {
                code,
                time_ns: at(1.1),
            });
        }
        dump
    };
    (0..4).map(of_rank).collect()
}

#[test]
fn a_rank_that_died_of_sizes_that_are_not_recorded_is_not_blamed_for_them() {
    for exit_code in [None, Some(134)] {
        let report = judge(&wrong_splits("gloo", false, exit_code), 60.0);
        assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[][..]));
        let finding = &report.findings[0];
        assert!(finding.confidence <= 0.5, "{}", finding.confidence);
        assert_eq!(finding.alternatives, [[1], [0], [2], [3]].map(Vec::from));
        assert!(finding.sentence.contains("the process of rank 1 is gone"));
        let expected = "compare the split sizes that all members pass there";
        assert!(finding.next.ends_with(expected), "{}", finding.next);
    }
}

#[test]
fn a_rank_whose_recorded_sizes_do_not_fit_leads_before_the_one_that_died_of_them() {
    let report = judge(&wrong_splits("gloo", true, None), 60.0);
    assert_eq!(root(&report), (Verdict::Mismatch, Code::E114, &[2][..]));
    let blamed = report
        .findings
        .iter()
        .flat_map(|finding| &finding.culprit_ranks);
    assert!(blamed.eq(&[2]), "{:?}", report.findings);
}

#[test]
fn a_rank_that_raised_or_was_asked_to_end_did_not_end_because_of_sizes() {
    let named = [(Some(1), "raised ValueError: bad batch"), (Some(143), "")];
    for (exit_code, phase) in named.into_iter().chain([(None, named[0].1)]) {
        let mut dumps = wrong_splits("gloo", false, exit_code);
        let status = dumps[1].status.as_mut().expect("the record has a status");
        status.phase = phase.to_owned();
        status.phase_since_ns = at(1.0);
        let report = judge(&dumps, 60.0);
        assert_eq!(root(&report).1, Code::E150, "{exit_code:?}");
        assert_eq!(report.findings[0].culprit_ranks, [1], "{exit_code:?}");
    }
}

#[test]
fn a_process_that_waits_for_a_device_does_not_end_because_of_sizes() {
    let report = judge(&wrong_splits("nccl", false, None), 60.0);
    assert_eq!(root(&report).1, Code::E150);
    assert_eq!(report.findings[0].culprit_ranks, [1]);
}

/// The report on four live ranks that have been in an exchange for 20 s.
fn hanging(splits: Option<[[u64; 4]; 2]>) -> Report {
    let dumps: Vec<Dump> = (0..4)
        .map(|rank| {
            alive(
                exchanged(rank, "gloo", splits, (State::Pending, None)),
                21.0,
            )
        })
        .collect();
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(21.0)),
        ..Policy::default()
    };
    analyze(&dumps, &policy)
}

#[test]
fn the_calls_of_an_exchange_whose_sizes_are_not_recorded_are_not_said_to_agree() {
    let rules_sizes_out = |report: &Report| {
        let mut reasons = report.findings[0].ruled_out.iter();
        reasons.any(|reason| reason.contains("size_mismatch"))
    };
    let hidden = hanging(None);
    assert_eq!(root(&hidden), (Verdict::Stuck, Code::E135, &[][..]));
    assert!(!rules_sizes_out(&hidden), "{:?}", hidden.findings);
    assert!(hidden.findings[0].confidence <= 0.5);
    let expected = "the fabric, a device, the library, or split sizes that do not fit";
    assert!(hidden.findings[0].sentence.ends_with(expected));
    let shown = hanging(Some([[2; 4]; 2]));
    assert!(rules_sizes_out(&shown), "{:?}", shown.findings);
    assert!(shown.findings[0].confidence > 0.5);
}

#[test]
fn an_exchange_that_ends_well_is_right_whatever_is_recorded() {
    let dumps: Vec<Dump> = (0..4)
        .map(|rank| closed(exchanged(rank, "gloo", None, (State::Done(1.2), None)), 2.0))
        .collect();
    assert_eq!(judge(&dumps, 60.0).verdict, Verdict::Ended);
}
