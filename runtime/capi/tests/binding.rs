//! The generated header matches the crate, and programs in C and C++ that use it work.
#![allow(clippy::unwrap_used)]

use rcomm::{Layout, OpType, Parts, Pattern};
use rcomm_tests::process::{Job, wait_until};
use std::collections::BTreeSet;
use std::io::{Read, Write};
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

/// Compiles a C or C++ program of this folder; prints why and returns `None` if there is no compiler.
#[expect(clippy::print_stderr, reason = "a test that skips must say so")]
fn compile(source: &str, folder: &Path) -> Option<PathBuf> {
    let (compiler, language) = match source.ends_with(".cpp") {
        true => ("c++", "c++17"),
        false => ("cc", "c11"),
    };
    if Command::new(compiler).arg("--version").output().is_err() {
        eprintln!("skipped: there is no compiler {compiler}");
        return None;
    }
    let program = folder.join(source.trim_end_matches(".cpp").trim_end_matches(".c"));
    let library = library();
    let built = Command::new(compiler)
        .arg(format!("-std={language}"))
        .args([
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

/// Runs a program of this folder with two ranks whose devices are a simulator's.
fn run_on_devices(source: &str, scenario: &str) {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(source, folder.path()) else {
        return;
    };
    let simulator = rcomm_tests::simulator::path();
    let program = program.to_str().unwrap();
    let mut job = Job::start_as(program, 2, scenario, |_, command| {
        command
            .env("RCOMM_TIMEOUT_MS", "60000")
            .env("RCOMM_BACKEND", "cpu:cpu,cuda:nccl")
            .env("RCOMM_NCCL_LIB", &simulator)
            .env("RCOMM_CUDA_LIB", &simulator)
            .env("RCOMM_NCCL_RAS", "0")
            // NCCL has no estimates without it.
            .env("RCOMM_NCCL_BLOCKING", "1");
    });
    for rank in 0..2 {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
    }
}

#[test]
fn a_c_program_works_on_devices() {
    run_on_devices("devices.c", "c");
}

#[test]
fn a_cpp_program_uses_every_class() {
    run_on_devices("ranks.cpp", "cpp");
}

/// The endpoint of a C program asks its functions.
#[test]
fn a_handler_of_a_c_program_answers_at_its_endpoint() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("survivor.c", folder.path()) else {
        return;
    };
    let stop = folder.path().join("stop");
    let mut job = Job::start_as(program.to_str().unwrap(), 1, "endpoint", |_, command| {
        command.env("RCOMM_TEST_STOP", &stop);
    });
    let socket = job.ring_path(0).with_extension("sock");
    let ask = |path: &str| {
        let mut client = UnixStream::connect(&socket).ok()?;
        let request = format!(
            "POST /handlers/{path} HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        );
        client.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        client.read_to_string(&mut answer).ok()?;
        Some(answer)
    };
    let answer = wait_until("the handler", || {
        ask("rate?step=7&rate=0.5").filter(|answer| !answer.starts_with("HTTP/1.1 404"))
    });
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // The parameters come in the order of their names.
    assert!(answer.contains("2 rate=0.5"), "{answer}");
    let failed = ask("rate").unwrap();
    assert!(failed.starts_with("HTTP/1.1 400"), "{failed}");
    assert!(failed.contains("0 ="), "{failed}");
    std::fs::write(&stop, "").unwrap();
    let ended = job.wait(0);
    assert!(ended.status.success(), "{ended:?}");
}

/// The functions that the header declares.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(root().join("include/rcomm.h")).unwrap();
    let lines = header.lines().filter(|line| !line.starts_with("//"));
    let text: String = lines.collect::<Vec<_>>().join("\n");
    let names = text.match_indices("rcomm_").filter_map(|(start, _)| {
        let rest = &text[start..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
        // A pointer to a function is a member in parentheses.
        rest[end..].starts_with('(').then(|| rest[..end].to_owned())
    });
    names.collect()
}

/// The types of the Rust crate whose methods the table in docs/C.md lists, with the files that implement them.
const LISTED: [(&str, &[&str]); 18] = [
    (
        "World",
        &[
            "world/mod.rs",
            "world/groups.rs",
            "world/grow.rs",
            "world/handlers.rs",
            "world/merge.rs",
            "world/merge_remote.rs",
            "world/mesh.rs",
        ],
    ),
    ("WorldBuilder", &["world/builder.rs"]),
    (
        "ProcessGroup",
        &[
            "group/process_group/handle.rs",
            "group/coalescing.rs",
            "group/collectives.rs",
            "group/hook.rs",
            "group/monitored_barrier.rs",
            "group/objects/collective.rs",
            "group/objects/message.rs",
            "group/p2p.rs",
            "group/sparse.rs",
            "group/split.rs",
            "group/window/mod.rs",
            "group/window/symmetric.rs",
        ],
    ),
    ("Work", &["group/work.rs"]),
    ("Window", &["group/window/mod.rs"]),
    ("SymmetricMemory", &["group/window/symmetric.rs"]),
    ("SparseTensor", &["group/sparse.rs"]),
    ("DeviceMesh", &["world/mesh.rs"]),
    (
        "Reducer",
        &[
            "data_parallel/reducer.rs",
            "data_parallel/finish.rs",
            "data_parallel/join.rs",
            "data_parallel/regroup.rs",
        ],
    ),
    ("MixedReducer", &["data_parallel/mixed.rs"]),
    ("ModelAverager", &["data_parallel/averager.rs"]),
    ("WaitCounter", &["watch/wait_counters.rs"]),
    ("StoreCollectives", &["store/collectives.rs"]),
    ("CudaDevice", &["../../nccl/src/cuda/device.rs"]),
    ("CudaStream", &["../../nccl/src/cuda/stream.rs"]),
    ("DeviceBuffer", &["../../nccl/src/cuda/memory.rs"]),
    ("DmaConnectivity", &["../../nccl/src/cuda/nvlink.rs"]),
    ("MemoryPool", &["../../nccl/src/pool.rs"]),
];

/// `Type::method` of the public methods in blocks `impl ... Type` of a source.
fn methods(type_name: &str, text: &str, found: &mut BTreeSet<String>) {
    let mut is_inside = false;
    for line in text.lines() {
        if line.starts_with("impl") {
            let head = line.split(" for ").next().unwrap_or(line);
            let is_trait = head.len() != line.len();
            let name = |word: &str| {
                let word = word.split('<').next().unwrap_or(word);
                word.trim_end_matches('{') == type_name
            };
            is_inside = !is_trait && line.split_whitespace().any(name);
        } else if line.starts_with('}') {
            is_inside = false;
        }
        let rest = (line.strip_prefix("    pub fn ")).or(line.strip_prefix("    pub unsafe fn "));
        let Some(rest) = rest.filter(|_| is_inside) else {
            continue;
        };
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let name = &rest[..end.unwrap_or(rest.len())];
        found.insert(format!("{type_name}::{}", name.trim_end_matches("_async")));
    }
}

/// The words between backticks in a cell of the table.
fn words(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Every public method of the types that programs use has a row in docs/C.md with its C functions, or the reason for
/// having none; every C function has a row; and a C or C++ program of these tests calls it.
#[test]
fn the_table_of_functions_has_no_gap() {
    let core = root().join("../core/src");
    let mut methods_found = BTreeSet::new();
    for (type_name, files) in LISTED {
        for file in files {
            let text = std::fs::read_to_string(core.join(file));
            let text = text.unwrap_or_else(|error| panic!("{file}: {error}"));
            methods(type_name, &text, &mut methods_found);
        }
    }
    // The operations that a macro makes have no `pub fn` of their own.
    let ops = OpType::ALL
        .iter()
        .filter(|&&op| reason_for_no_function(op).is_none());
    let ops = ops.filter(|op| op.pattern() != Pattern::OneSided);
    methods_found.extend(ops.map(|op| format!("ProcessGroup::{op}")));
    assert!(methods_found.len() > 100, "{methods_found:?}");

    let page = std::fs::read_to_string(root().join("../../docs/C.md")).unwrap();
    let rows = page.lines().filter_map(|line| {
        let cells: Vec<&str> = line.strip_prefix("| `")?.split(" | ").collect();
        let first = format!("`{}", cells[0]);
        Some((first, cells.get(1).copied().unwrap_or_default().to_owned()))
    });
    let (mut listed, mut named) = (BTreeSet::new(), BTreeSet::new());
    for (rust, c) in rows {
        let has_reason = c.contains('—') && c.len() > 20;
        assert!(
            words(&c).next().is_some() || has_reason,
            "{rust} has neither a function nor a reason"
        );
        // Several methods of one type may share a row: the type is that of the first.
        let mut type_name = "";
        for word in words(&rust) {
            match word.split_once("::") {
                Some((first, _)) => {
                    type_name = first;
                    listed.insert(word.to_owned());
                }
                None => drop(listed.insert(format!("{type_name}::{word}"))),
            }
        }
        named.extend(
            words(&c)
                .filter(|word| word.starts_with("rcomm_"))
                .map(str::to_owned),
        );
    }
    let missing: Vec<_> = methods_found.difference(&listed).collect();
    assert!(missing.is_empty(), "docs/C.md has no row for {missing:?}");
    let gone: Vec<_> = listed.difference(&methods_found).collect();
    assert!(
        gone.is_empty(),
        "docs/C.md has rows for methods that do not exist: {gone:?}"
    );
    let declared = declared();
    let unlisted: Vec<_> = declared.difference(&named).collect();
    assert!(
        unlisted.is_empty(),
        "docs/C.md names no Rust method for {unlisted:?}"
    );
    let unknown: Vec<_> = named.difference(&declared).collect();
    assert!(
        unknown.is_empty(),
        "docs/C.md names functions that do not exist: {unknown:?}"
    );

    let tests = [
        "ranks.c",
        "control.h",
        "devices.c",
        "ended.h",
        "symmetric.h",
        "stores.h",
        "values.h",
        "survivor.c",
        "ranks.cpp",
    ];
    let programs: String = tests
        .iter()
        .map(|file| std::fs::read_to_string(root().join("tests").join(file)).unwrap())
        .collect();
    let uncalled: Vec<_> = declared
        .iter()
        .filter(|name| !programs.contains(&format!("{name}(")))
        .collect();
    assert!(uncalled.is_empty(), "no test calls {uncalled:?}");
}

/// Unlike a Rust program, a C program does not ignore SIGPIPE.
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
