//! The generated header matches the crate, and a C program records through it.

#![allow(clippy::unwrap_used)]

use rcomm_recorder::model::{EntryState, GroupPlace, OpType, Peer, ReduceOp};
use rcomm_recorder::publish::{Dump, RingReader};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A constant for the code of each operation in the recorder's table.
fn operations() -> String {
    let constant = |op: &OpType| {
        let (name, code) = (op.name().to_uppercase(), op.code());
        format!(
            "// {}\n#define RCOMM_RECORDER_{name} {code}\n",
            op.meaning()
        )
    };
    let constants: Vec<String> = OpType::ALL.iter().map(constant).collect();
    format!("\n{}", constants.join("\n").trim_end())
}

#[test]
fn the_header_matches_the_crate() {
    let mut config = cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap();
    config.after_includes = Some(operations());
    let bindings = cbindgen::generate_with_config(root(), config).unwrap();
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).unwrap();
    let path = root().join("include/rcomm_recorder.h");
    if std::env::var_os("RCOMM_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap();
    assert!(
        stored == text,
        "include/rcomm_recorder.h is out of date: run this test with RCOMM_UPDATE_HEADER=1"
    );
}

/// The C library, which cargo puts next to the tests.
fn library() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let build = tests.ancestors().nth(2).unwrap();
    [build.to_owned(), build.join("deps")]
        .map(|folder| folder.join("librcomm_recorder_capi.so"))
        .into_iter()
        .find(|path| path.exists())
        .expect("the shared library, built with the tests")
}

fn snapshot(folder: &Path, rank: u32) -> Dump {
    RingReader::attach(folder.join(format!("fromC/{rank}.2.ring")))
        .unwrap()
        .snapshot()
}

#[test]
fn a_c_program_and_its_forked_child_each_leave_their_own_record() {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler is installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("record");
    let library = library();
    let built = Command::new("cc")
        .args([
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
            "-g",
            "-I",
        ])
        .arg(root().join("include"))
        .arg(root().join("tests/record.c"))
        .arg(&library)
        .arg(format!(
            "-Wl,-rpath,{}",
            library.parent().unwrap().display()
        ))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{stderr}");

    let rings = folder.path().join("rings");
    let ended = Command::new(&program).arg(&rings).output().unwrap();
    assert!(ended.status.success(), "{ended:?}");

    let dump = snapshot(&rings, 1);
    let [world, tensor, unknown] = &dump.groups[..] else {
        panic!("not three groups: {:?}", dump.groups);
    };
    assert_eq!(
        (&*world.info.name, &world.info.ranks[..]),
        ("0", &[0, 1, 2, 3][..])
    );
    assert_eq!(
        tensor.info.ranks[..],
        [3, 1],
        "the members given after the group was added differ"
    );
    assert_eq!(unknown.place, Some(GroupPlace { rank: 4, size: 8 }));
    let [reduced, sent, failed] = &dump.entries[..] else {
        panic!("not three entries: {:?}", dump.entries);
    };
    assert_eq!(reduced.state, EntryState::Completed);
    assert!(reduced.retired);
    assert_eq!(reduced.duration_ms, Some(2.5));
    assert_eq!(reduced.reduce_op, Some(ReduceOp::Sum));
    let signature = &dump.signatures[reduced.signature as usize];
    assert_eq!(
        (&*signature.backend, &*signature.op_name),
        ("gloo", "all_reduce")
    );
    assert_eq!(signature.input_sizes, [[4, 8]]);
    assert_eq!(signature.input_dtypes, ["BFloat16"]);
    let stack = &dump.stacks[reduced.stack.unwrap() as usize];
    let frame = &dump.frames[stack[0] as usize];
    assert_eq!(
        (&*frame.filename, &*frame.name, frame.line),
        ("train.py", "step", 17)
    );
    assert_eq!(
        (sent.peer, sent.state, sent.group),
        (Peer::Rank(0), EntryState::Started, 1)
    );
    assert!(sent.is_p2p && sent.stack.is_none());
    assert_eq!(failed.state, EntryState::Failed);
    assert_eq!(
        dump.signatures[failed.signature as usize].input_splits,
        [1, 2, 3, 4]
    );
    let status = dump.status.as_ref().unwrap();
    assert_eq!((&*status.phase, status.step), ("load data", 9));
    assert!(status.heartbeat_ns > 0);

    let child = snapshot(&rings, 2);
    assert_eq!(
        child.entries.len(),
        1,
        "calls of the child with its parent's handle were recorded"
    );
    assert_eq!(child.identity.rank, Some(2));
}
