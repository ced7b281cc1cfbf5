//! Tests the matrix of the ranks and sequence numbers of a group, on simulated jobs.

use rcomm_analyzer::matrix::{Matrix, Row, Rows, matrix};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::{Analysis, Extent, Finding, GroupRef, Policy, Report, analyze};
use rcomm_recorder::model::{Entry, EntryState};
use rcomm_recorder::publish::{Dump, Recorder};

/// The last five operations of a group in a simulated job of 16 ranks, 10 s after the fault.
fn matrix_of(situation: Situation, desc: &str, name: &str, rows: Rows) -> Matrix {
    let simulation = Simulation::new(situation, 16, 0);
    let dumps = simulation.dumps_at(simulation.fault_ns() + 10_000_000_000);
    let group = dumps
        .iter()
        .flat_map(|dump| &dump.groups)
        .find(|group| group.info.name == name)
        .expect("the simulation has this group");
    let group = GroupRef {
        name: name.into(),
        desc: desc.into(),
        ranks: group.info.ranks.clone(),
    };
    let report = analyze(&dumps, &Policy::default());
    matrix((0..).zip(&dumps), &group, &report, 5, rows)
}

/// The dumps of a simulated job of 16 ranks, 10 s after one of them got stuck, and the group of the first eight ranks.
fn stuck() -> (Vec<Dump>, GroupRef) {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let group = GroupRef {
        name: "tp_0".into(),
        desc: "tp".into(),
        ranks: (0..8).collect(),
    };
    let dumps = simulation.dumps_at(simulation.fault_ns() + 10_000_000_000);
    (dumps, group)
}

/// The letter of each cell.
fn letters(row: &Row) -> String {
    row.cells.iter().map(|cell| cell.letter()).collect()
}

#[test]
fn the_missing_rank_stands_out_in_its_group() {
    let matrix = matrix_of(Situation::StuckRank, "dp", "dp_5", Rows::Each);
    let rows: Vec<_> = matrix
        .rows
        .iter()
        .map(|row| (row.ranks[0], letters(row)))
        .collect();
    assert_eq!(rows, [(5, "CCCCS".into()), (13, "CCCC-".into())]);
    assert_eq!(matrix.seqs.last(), Some(&(Simulation::FAULT_STEP + 1)));
}

#[test]
fn operations_that_gloos_recorder_retired_have_completed() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let mut dumps = simulation.dumps_at(simulation.fault_ns() + 10_000_000_000);
    for dump in &mut dumps {
        dump.recorder = Recorder::NativeGloo;
        for entry in &mut dump.entries {
            entry.retired = entry.state == EntryState::Completed;
            entry.state = EntryState::Scheduled;
        }
    }
    let groups = dumps.iter().flat_map(|dump| &dump.groups);
    let group = groups
        .map(|group| &group.info)
        .find(|group| group.name == "dp_5")
        .expect("the simulation has this group");
    let group = GroupRef {
        name: group.name.clone(),
        desc: group.desc.clone(),
        ranks: group.ranks.clone(),
    };
    let report = analyze(&dumps, &Policy::default());
    let matrix = matrix((0..).zip(&dumps), &group, &report, 5, Rows::Each);
    let rows: Vec<_> = matrix
        .rows
        .iter()
        .map(|row| (row.ranks[0], letters(row)))
        .collect();
    assert_eq!(rows, [(5, "CCCCQ".into()), (13, "CCCC-".into())]);
}

#[test]
fn equal_rows_fold_into_one_and_another_operation_is_a_mismatch() {
    let matrix = matrix_of(Situation::Mismatch, "tp", "tp_1", Rows::Folded);
    let rows: Vec<_> = matrix
        .rows
        .iter()
        .map(|row| (row.ranks.len(), letters(row)))
        .collect();
    assert_eq!(rows, [(7, "CCCCS".into()), (1, "CCCCX".into())]);
    assert_eq!(
        matrix.ops.last().map(String::as_str),
        Some("reduce_scatter_single")
    );
}

#[test]
fn a_rank_at_fault_shares_no_row_with_those_that_wait() {
    let dumps = Simulation::new(Situation::Healthy, 4, 0).dumps_at(1_000_000_000);
    let group = &dumps[0].groups[0].info;
    let group = GroupRef {
        name: group.name.clone(),
        desc: group.desc.clone(),
        ranks: group.ranks.clone(),
    };
    let mut report = analyze(&dumps, &Policy::default());
    let rows_of = |report: &Report| -> Vec<Vec<u32>> {
        let matrix = matrix((0..).zip(&dumps), &group, report, 1, Rows::Folded);
        matrix.rows.into_iter().map(|row| row.ranks).collect()
    };
    report.findings = vec![];
    assert_eq!(rows_of(&report), [[0, 1, 2, 3]]);
    report.findings = vec![Finding::not_joined(vec![2], "rank 2 is at fault".into())];
    assert_eq!(rows_of(&report), [vec![0, 1, 3], vec![2]]);
}

#[test]
fn an_overwritten_entry_is_lost_and_not_missing() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut dumps = simulation.dumps_at(20_000_000_000);
    let group = GroupRef {
        name: "tp_0".into(),
        desc: "tp".into(),
        ranks: [0, 1].into(),
    };
    let overwritten = dumps[0].entries.len() - 3;
    dumps[0].entries.drain(..overwritten);
    let report = analyze(&dumps, &Policy::default());
    let matrix = matrix((0..).zip(&dumps), &group, &report, 6, Rows::Each);
    assert!(letters(&matrix.rows[0]).starts_with('*'));
    assert!(letters(&matrix.rows[1]).starts_with('C'));
}

#[test]
fn a_member_without_a_record_is_shown_as_such() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let dumps = simulation.dumps_at(20_000_000_000);
    let group = GroupRef {
        name: "tp_0".into(),
        desc: "tp".into(),
        ranks: [0, 1].into(),
    };
    let report = analyze(&dumps[..1], &Policy::default());
    let matrix = matrix([(0, &dumps[0])], &group, &report, 3, Rows::Each);
    assert_eq!(letters(&matrix.rows[1]), "???");
}

#[test]
fn what_a_cut_record_lacks_at_its_end_is_not_called_missing() {
    let (mut dumps, group) = stuck();
    // Of rank 3, which waits with others, the end of the file is lost.
    let kept = dumps[3].entries.len() - 6;
    dumps[3].entries.truncate(kept);
    let rows_of = |extent| {
        let mut analysis = Analysis::new(Policy::default());
        for (rank, dump) in dumps.iter().enumerate() {
            let extent = if rank == 3 { extent } else { Extent::Whole };
            analysis.add_from(&format!("dump_{rank}"), dump, extent);
        }
        let report = analysis.finish();
        let matrix = matrix((0..).zip(&dumps), &group, &report, 5, Rows::Each);
        matrix.rows.iter().map(letters).collect::<Vec<_>>()
    };
    let rows = rows_of(Extent::Cut);
    assert!(rows[3].ends_with('?'), "{rows:?}");
    assert!(!rows[3].contains('-'), "{rows:?}");
    // A whole record that lacks what has completed for the others was taken before theirs.
    let rows = rows_of(Extent::Whole);
    let lacks = |completed: (char, char)| completed.0 == 'C' && completed.1 == '-';
    assert!(!rows[2].chars().zip(rows[3].chars()).any(lacks), "{rows:?}");
}

#[test]
fn a_call_whose_size_does_not_fit_is_a_mismatch_though_its_operation_is_that_of_the_others() {
    let (mut dumps, group) = stuck();
    // The newest call of rank 3 on the group sends one element more.
    let dump = &mut dumps[3];
    let index = dump
        .groups
        .iter()
        .position(|known| known.info.name == "tp_0");
    let index = index.expect("the simulation has this group") as u32;
    let last = dump.entries.iter_mut().rfind(|entry| entry.group == index);
    let last = last.expect("the rank has an operation on it");
    let mut signature = dump.signatures[last.signature as usize].clone();
    for size in signature
        .input_sizes
        .iter_mut()
        .chain(&mut signature.output_sizes)
    {
        size[0] += 1;
    }
    last.signature = dump.signatures.len() as u32;
    let seq = last.collective_seq_id;
    dump.signatures.push(signature);
    let report = analyze(&dumps, &Policy::default());
    let matrix = matrix((0..).zip(&dumps), &group, &report, 5, Rows::Each);
    let column = matrix.seqs.iter().position(|&shown| shown == seq);
    let column = column.expect("the call is among the newest");
    let letters: String = matrix
        .rows
        .iter()
        .map(|row| row.cells[column].letter())
        .collect();
    assert_eq!(
        letters.find('X'),
        Some(3),
        "{letters} {:?}",
        report.findings
    );
    assert_eq!(letters.matches('X').count(), 1, "{letters}");
}

#[test]
fn the_columns_include_the_oldest_unfinished_collective() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let mut dumps = simulation.dumps_at(simulation.fault_ns() + 10_000_000_000);
    let group = GroupRef {
        name: "dp_5".into(),
        desc: "dp".into(),
        ranks: [5, 13].into(),
    };
    // Rank 5, which waits for rank 13, has issued twelve more.
    let dump = &mut dumps[5];
    let mut groups = dump.groups.iter();
    let index = groups.position(|known| known.info.name == "dp_5");
    let index = index.expect("the simulation has this group") as u32;
    let last = dump.entries.iter().rfind(|entry| entry.group == index);
    let last = last.expect("the rank waits on it").clone();
    for ahead in 1..=12 {
        let record_id = dump.entries.last().map_or(0, |entry| entry.record_id) + 1;
        dump.entries.push(Entry {
            record_id,
            collective_seq_id: last.collective_seq_id + ahead,
            state: EntryState::Scheduled,
            ..last.clone()
        });
    }
    let report = analyze(&dumps, &Policy::default());
    let matrix = matrix((0..).zip(&dumps), &group, &report, 5, Rows::Each);
    assert_eq!(matrix.seqs[2], last.collective_seq_id);
    let rows: Vec<_> = matrix.rows.iter().map(letters).collect();
    assert_eq!(rows, ["CCSQQ", "CC---"]);
}
