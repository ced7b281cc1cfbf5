//! The generated header matches the crate, and a C program that uses it works.
#![allow(clippy::unwrap_used)]

use rcomm::{Layout, OpType, Parts, Pattern};
use rcomm_tests::process::{Job, wait_until};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_header_matches_the_crate() {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::generate_with_config(root(), config).unwrap();
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).unwrap();
    let path = root().join("include/rcomm.h");
    if std::env::var_os("RCOMM_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap();
    assert!(
        stored == text,
        "include/rcomm.h is out of date: run this test with RCOMM_UPDATE_HEADER=1"
    );
}

/// Why there is no function with the name of the operation; `None` if there is one.
fn reason_for_no_function(op: OpType) -> Option<&'static str> {
    if op == OpType::Coalesced {
        Some("operations are gathered between `rcomm_start_coalescing` and `rcomm_end_coalescing`")
    } else {
        (op == OpType::Other).then_some("it represents operations that rcomm does not have")
    }
}

#[test]
fn the_header_declares_every_operation_with_the_arguments_of_its_kind() {
    let header = std::fs::read_to_string(root().join("include/rcomm.h")).unwrap();
    for &op in OpType::ALL {
        let of_window = op.pattern() == Pattern::OneSided;
        let name = format!("rcomm_{}{op}(", if of_window { "window_" } else { "" });
        let declared = header.split_once(&name);
        if let Some(reason) = reason_for_no_function(op) {
            assert!(declared.is_none(), "{op} has a function, but: {reason}");
            continue;
        }
        let (_, rest) = declared.unwrap_or_else(|| panic!("the header has no {name}"));
        let (arguments, _) = rest.split_once(");").unwrap();
        let has = |argument: &str| arguments.contains(argument);
        assert_eq!(has("uint32_t root"), op.pattern().is_rooted(), "{op}");
        // Sparse tensors are always summed, so their function takes no reduction.
        let reduces = op.pattern().reduces() && op.layout() != Layout::Sparse;
        assert_eq!(has("reduction"), reduces, "{op}");
        assert_eq!(has("input_splits"), op.has_splits(), "{op}");
        let is_listed = op.layout() == Layout::List && op.parts() != Parts::Equal;
        assert!(!is_listed || has("counts"), "{op}");
    }
}

/// The path of the shared library, which cargo builds next to the tests.
fn library() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let build = tests.ancestors().nth(2).unwrap();
    [
        build.join("librcomm_capi.so"),
        build.join("deps/librcomm_capi.so"),
    ]
    .into_iter()
    .find(|path| path.exists())
    .expect("the shared library, built with the tests")
}

/// Compiles a C program of this folder; prints why and returns `None` if there is none.
#[expect(clippy::print_stderr, reason = "a test that skips must say so")]
fn compile(source: &str, folder: &Path) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler is installed");
        return None;
    }
    let program = folder.join(source.trim_end_matches(".c"));
    let library = library();
    let built = Command::new("cc")
        .args([
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
            "-pthread",
            "-g",
            "-I",
        ])
        .arg(root().join("include"))
        .arg(root().join("tests").join(source))
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
    Some(program)
}

#[test]
fn a_c_program_calls_every_function() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("ranks.c", folder.path()) else {
        return;
    };
    for ranks in [1, 3] {
        let program = program.to_str().unwrap();
        let mut job = Job::start_as(program, ranks, "c", |_, command| {
            command.env("RCOMM_TIMEOUT_MS", "30000");
        });
        for rank in 0..ranks {
            let ended = job.wait(rank);
            assert!(ended.status.success(), "rank {rank} of {ranks}: {ended:?}");
        }
    }
}

/// Unlike Rust's, a C program does not ignore SIGPIPE.
#[test]
fn clients_of_the_endpoint_that_hang_up_do_not_end_a_c_program() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("survivor.c", folder.path()) else {
        return;
    };
    let stop = folder.path().join("stop");
    let mut job = Job::start_as(program.to_str().unwrap(), 1, "endpoint", |_, command| {
        command.env("RCOMM_TEST_STOP", &stop);
    });
    let socket = job.ring_path(0).with_extension("sock");
    wait_until("the endpoint", || UnixStream::connect(&socket).ok());
    for _ in 0..200 {
        // Several answers are due when the client is gone.
        let request = "GET /dump HTTP/1.1\r\nHost: rank\r\n\r\n".repeat(4);
        let mut client = UnixStream::connect(&socket).expect("the process still answers");
        client.write_all(request.as_bytes()).unwrap();
    }
    std::fs::write(&stop, "").unwrap();
    let ended = job.wait(0);
    assert!(ended.status.success(), "{ended:?}");
}

#[test]
fn a_peer_that_dies_fails_the_messages_of_a_c_program_and_does_not_end_it() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("survivor.c", folder.path()) else {
        return;
    };
    let mut job = Job::start_as(program.to_str().unwrap(), 2, "peer", |_, command| {
        command.env("RCOMM_TRANSPORT", "tcp");
    });
    let ended = job.wait(0);
    assert_eq!(ended.status.code(), Some(3), "{ended:?}");
}
