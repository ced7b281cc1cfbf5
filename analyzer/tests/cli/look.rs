//! `rcomm-fr` without arguments.

use crate::program::{Run, finish, rcomm_fr};
use std::path::Path;

/// Runs the program with this home directory, so that it finds no records of this machine, and with PyTorch's dumps in
/// `dumps`.
fn look(home: &Path, dumps: &Path) -> Run {
    let mut command = rcomm_fr(&[]);
    command
        .current_dir(home)
        .env("HOME", home)
        .env_remove("XDG_CACHE_HOME")
        .env_remove("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        .env_remove("RCOMM_DUMP_DIR")
        .env("RCOMM_RING_DIR", home.join("rings"))
        .env("TORCH_FR_DUMP_TEMP_FILE", dumps.join("rank_"));
    finish(command)
}

#[test]
fn the_newest_records_are_judged_and_the_searched_folders_named() {
    let home = tempfile::tempdir().unwrap();
    let fixture =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps/cascade-2x2x2/pickle");
    let dumps = home.path().join("dumps");
    std::fs::create_dir(&dumps).unwrap();
    for rank in 0..8 {
        let name = format!("rank_{rank}");
        std::fs::copy(fixture.join(&name), dumps.join(&name)).unwrap();
    }
    let run = look(home.path(), &dumps);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(
        run.stdout
            .starts_with("STUCK  rank 5 never issued all_reduce #6"),
        "{run:?}"
    );
    assert!(run.stdout.contains("PyTorch's dumps, 8 files"), "{run:?}");
    assert!(run.stdout.contains("no rings"), "{run:?}");
}

#[test]
fn without_records_it_names_where_it_looked_and_what_to_do() {
    // Dumps that other programs left in the default place of older versions are records, too.
    if std::fs::read_dir("/tmp").is_ok_and(|mut entries| {
        entries.any(|it| {
            it.is_ok_and(|it| {
                it.file_name()
                    .to_string_lossy()
                    .starts_with("nccl_trace_rank_")
            })
        })
    }) {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let run = look(home.path(), &home.path().join("none"));
    assert_eq!(run.code, Some(2), "{run:?}");
    for part in [
        "no records on this node",
        "comm_lib_trace_rank_*",
        "/tmp/nccl_trace_rank_*",
        "TORCH_FR_BUFFER_SIZE",
        "rcomm-top --ras",
    ] {
        assert!(run.stdout.contains(part), "{part}: {run:?}");
    }
}
