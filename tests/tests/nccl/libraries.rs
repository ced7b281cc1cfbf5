//! Libraries that are too old or differ are refused. If a library lacks a function, the backend does without it, or
//! names it in its refusal.

use super::{RANKS, fail, over, run, start};
use rcomm_tests::process::CULPRIT;
use rcomm_tests::simulator;
use std::path::PathBuf;

/// A copy of the simulator that lacks these functions, since their names are changed in the file. Returns the folder,
/// which is removed with the value, and the path of the copy.
pub(crate) fn without(symbols: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let mut bytes = std::fs::read(simulator::path()).unwrap();
    for symbol in symbols {
        let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
        let offsets: Vec<usize> = (0..bytes.len() - name.len())
            .filter(|&offset| bytes[offset..].starts_with(&name))
            .collect();
        assert!(!offsets.is_empty(), "{symbol} is not exported");
        for offset in offsets {
            bytes[offset + name.len() - 2] = b'_';
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libnccl.so.2");
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

#[test]
fn a_library_that_is_too_old_is_refused_with_its_version() {
    let job = start("train", |_, command| {
        command.env("RCOMM_SIM", "version=21105");
    });
    // Only rank 0 is checked: it serves the store, so the others may lose the store before they check the library.
    for (_, ended) in fail(job, 0..1).1 {
        let error = ended.stderr;
        assert!(
            error.contains("NCCL 2.11.5 is older than 2.18.0"),
            "{error}"
        );
    }
}

#[test]
fn libraries_that_differ_between_ranks_are_named_on_all() {
    let job = start("train", |rank, command| {
        // Each rank stays until all have reported their status.
        command.env("RCOMM_STATUS_WAIT_MS", "20000");
        if rank == CULPRIT {
            command.env("RCOMM_SIM", "version=22707");
        }
    });
    for (_, ended) in fail(job, 0..RANKS).1 {
        let error = ended.stderr;
        let sentence = "different releases of NCCL: rank 0 has 2.30.7, rank 2 has 2.27.7";
        assert!(error.contains(sentence), "{error}");
    }
}

#[test]
fn a_library_that_lacks_a_needed_function_is_refused_with_the_functions_name() {
    let (_folder, library) = without(&["ncclAllReduce"]);
    let job = start("train", |_, command| {
        over(&library, command);
    });
    // Only rank 0 is checked: it serves the store, so the others may lose the store before they check the library.
    for (_, ended) in fail(job, 0..1).1 {
        let error = ended.stderr;
        assert!(error.contains("no symbol ncclAllReduce"), "{error}");
    }
}

#[test]
fn groups_are_connected_anew_where_the_library_cannot_split() {
    let (_folder, library) = without(&["ncclCommSplit"]);
    let (_job, outputs) = run("split", |_, command| {
        over(&library, command);
    });
    super::groups::check_split(&outputs);
}

#[test]
fn lists_are_gathered_and_scattered_with_and_without_the_librarys_own_calls() {
    let (_folder, old) = without(&["ncclGather", "ncclScatter", "ncclAlltoAll"]);
    for library in [simulator::path(), old] {
        let (_job, outputs) = run("lists", |_, command| over(&library, command));
        for output in outputs {
            assert!(output.contains("gathered and scattered"), "{output}");
        }
    }
}

#[test]
fn registered_memory_is_refused_with_the_name_of_the_missing_function() {
    let (_folder, library) = without(&["ncclCommRegister"]);
    let (_job, outputs) = run("no_registration", |_, command| over(&library, command));
    for output in outputs {
        let sentence =
            "registered memory needs ncclCommRegister (NCCL 2.19); this library is 2.30.7";
        assert!(output.contains(sentence), "{output}");
    }
}

#[test]
fn one_id_serves_all_ranks_where_the_library_takes_no_more() {
    let (_folder, library) = without(&["ncclCommInitRankScalable"]);
    let (_job, outputs) = run("train", |_, command| {
        over(&library, command);
        // One id is meant for fewer ranks than the job has, as it is by default from 129 ranks on.
        command.env("RCOMM_NCCL_RANKS_PER_ID", "2");
    });
    for output in outputs {
        assert_eq!(super::groups::lines(&output, "sum:"), ["4"; 6], "{output}");
    }
}

#[test]
fn the_remaining_ranks_make_a_new_communicator_if_the_library_cannot_shrink() {
    for lacking in [&["ncclCommShrink"][..], &["ncclCommRevoke"][..]] {
        let (_folder, library) = without(lacking);
        let mut job = start("shrink", |_, command| {
            over(&library, command);
            // The ranks notice the lost process by its connection, so this time-out never passes.
            command.env("RCOMM_TIMEOUT_MS", "60000");
        });
        super::groups::check_shrink(&mut job);
    }
}
