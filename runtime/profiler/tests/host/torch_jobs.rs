//! Tests the script for PyTorch's jobs on a device (`tests/gpu/torch_jobs.py`), with processes of this program as the
//! ranks.

use crate::faults::COUNT;
use crate::loader;
use std::ffi::OsString;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gpu/torch_jobs.py")
}

/// Whether there is a Python; prints that the test skips if not.
#[allow(clippy::print_stderr, reason = "a test that is skipped says so")]
fn has_python() -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: no python3");
    }
    found
}

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new("python3");
    command.arg(script()).args(arguments);
    command.output().expect("a Python")
}

/// Not a test by itself: runs `rcomm-fr` with the arguments in `RCOMM_TEST_FR`, one per line.
#[test]
#[ignore = "the other tests run it as a separate process"]
fn fr() {
    if let Ok(arguments) = std::env::var("RCOMM_TEST_FR") {
        rcomm_analyzer::cli::main(arguments.lines().map(OsString::from).collect());
    }
}

fn write_program(at: &Path, text: &str) {
    std::fs::write(at, text).expect("writable");
    std::fs::set_permissions(at, Permissions::from_mode(0o755)).expect("own file");
}

/// Writes a program that takes the place of a Python with PyTorch: it says that there are four devices, and is a rank
/// of the job otherwise. As in PyTorch's jobs, the ranks that wait end by themselves: here, once there is a report on
/// the hang.
fn write_rank(at: &Path) {
    let program = std::env::current_exe().expect("a file");
    let text = format!(
        r#"#!/usr/bin/env bash
[ "$1" != -c ] || {{ echo "4 2.0 23007"; exit 0; }}
job=$3 count={COUNT} until=running waits="[ ! -e $RCOMM_RING_DIR/../hung.json ]"
case $job:$RANK in
never:2) until=not_called waits=true ;;
launch:2) until=planned waits=true ;;
kill:2) until=not_called; export RCOMM_TEST_SIGNAL=9 ;;
freeze:2) until=not_called waits=true; export RCOMM_TEST_SIGNAL=19 ;;
size:1) count=$((count + 4)) ;;
group:2) until=not_called ;;
group:3) until=not_called waits=true ;;
healthy:*) until=done waits=false ;;
esac
case $job:$RANK in
freeze:* | group:[012]) export RCOMM_TEST_ON_PAIR="2 running" ;;
group:3) export RCOMM_TEST_ON_PAIR="3 not_called" ;;
esac
export RCOMM_TEST_SCRIPT="6 $until $count" RCOMM_TEST_RANK=$RANK RCOMM_TEST_WORLD_SIZE=$WORLD_SIZE
exec < <(while eval "$waits" && kill -0 $$ 2>/dev/null; do sleep 0.1; done; [ $job != healthy ] || printf close)
exec {program} --exact a_rank_of_a_job --nocapture --ignored
"#,
        program = program.display()
    );
    write_program(at, &text);
}

#[test]
fn the_script_for_pytorch_on_a_device_judges_jobs_of_this_program() {
    if !has_python() {
        return;
    }
    let directory = tempfile::tempdir().expect("a folder");
    let at = |name: &str| directory.path().join(name);
    write_rank(&at("python"));
    let program = std::env::current_exe().expect("a file");
    let text = format!(
        "#!/usr/bin/env bash\nexport RCOMM_TEST_FR=$(printf '%s\\n' rcomm-fr \"$@\")\n{} --exact torch_jobs::fr --nocapture \
         --ignored | sed -n 's/^[^ ].*{{$/{{/; /^{{$/,/^}}$/p'\n",
        program.display()
    );
    write_program(&at("rcomm-fr"), &text);
    let (out, table) = (at("out"), at("table.json"));
    let text_of = |path: &Path| path.to_str().expect("text").to_owned();
    let plugin = text_of(&loader::path());
    let options = [
        ["--fr", &text_of(&at("rcomm-fr"))],
        ["--python", &text_of(&at("python"))],
        ["--plugin", &plugin],
        ["--out", &text_of(&out)],
        ["--json", &text_of(&table)],
        ["--at-once", "7"],
        ["--timeout", "60"],
    ];
    let output = run(options.as_flattened());
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}\n{errors}");
    let table = std::fs::read_to_string(&table).expect("the table");
    let table: serde_json::Value = serde_json::from_str(&table).expect("JSON");
    let jobs = table["jobs"].as_array().expect("a list");
    let names: Vec<&str> = jobs.iter().filter_map(|it| it["job"].as_str()).collect();
    assert_eq!(
        names,
        [
            "never", "launch", "kill", "freeze", "size", "group", "healthy"
        ]
    );
    for job in jobs {
        assert_eq!(job["hung"], "right", "{printed}");
    }

    // The reports are judged again as they are.
    let judge = |out: &Path| run(&["--judge", &text_of(out)]);
    let again = judge(&out);
    assert!(again.status.success(), "{again:?}");
    // One report is on rings and dumps together, in which the plug-in's two communicators stayed apart.
    let both = out.join("launch/both.json");
    std::fs::copy(out.join("launch/hung.json"), &both).expect("a report");
    let (path, table) = (text_of(&out), at("again.json"));
    let with_both = run(&["--judge", &path, "--json", &text_of(&table)]);
    assert!(with_both.status.success(), "{with_both:?}");
    let table = std::fs::read_to_string(&table).expect("the table");
    let table: serde_json::Value = serde_json::from_str(&table).expect("JSON");
    let rows = table["jobs"].as_array().expect("a list");
    let row = rows.iter().find(|row| row["job"] == "launch");
    let row = row.expect("a row");
    assert_eq!(row["both"], "right");
    assert!(row["apart"].as_u64() >= Some(1), "{row}");
    // Reports on other faults, or a missing one, make the table wrong.
    std::fs::copy(out.join("never/hung.json"), out.join("size/both.json")).expect("a report");
    assert_eq!(judge(&out).status.code(), Some(1));
    std::fs::remove_file(out.join("size/both.json")).expect("a report");
    std::fs::copy(out.join("size/hung.json"), out.join("kill/hung.json")).expect("two reports");
    let wrong = judge(&out);
    assert_eq!(wrong.status.code(), Some(1), "{wrong:?}");
    let text = String::from_utf8_lossy(&wrong.stdout).into_owned();
    let line = text.lines().find(|line| line.starts_with("kill"));
    assert!(line.is_some_and(|line| line.contains("WRONG")), "{text}");
    std::fs::remove_file(out.join("never/hung.json")).expect("a report");
    assert_eq!(judge(&out).status.code(), Some(1));
}

#[test]
fn the_script_for_pytorch_on_a_device_explains_itself_and_skips_aloud_without_one() {
    if !has_python() {
        return;
    }
    let help = run(&["--help"]);
    assert!(help.status.success());
    assert!(String::from_utf8_lossy(&help.stdout).contains("--ranks"));
    // A program that is no Python with PyTorch.
    let skipped = run(&["--python", "false"]);
    assert!(skipped.status.success(), "{skipped:?}");
    let said = String::from_utf8_lossy(&skipped.stderr);
    assert!(said.starts_with("skipped: no device"), "{said}");
    assert_eq!(run(&["no-such-job"]).status.code(), Some(2));
}

/// What the script prints on its output and its errors with this Python in the place of one with PyTorch, and its exit
/// code.
fn run_with(python: &str, directory: &Path) -> (String, String, Option<i32>) {
    let at = directory.join("python");
    write_program(&at, python);
    let out = directory.join("out");
    let text_of = |path: &Path| path.to_str().expect("text").to_owned();
    let output = run(&[
        "--fr",
        "true",
        "--plugin",
        &text_of(&loader::path()),
        "--python",
        &text_of(&at),
        "--out",
        &text_of(&out),
        "never",
        "healthy",
    ]);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        text(&output.stdout),
        text(&output.stderr),
        output.status.code(),
    )
}

#[test]
fn the_script_for_pytorch_on_a_device_says_why_a_job_did_not_begin() {
    if !has_python() {
        return;
    }
    let directory = tempfile::tempdir().expect("a folder");
    let python = "#!/bin/sh\n[ \"$1\" != -c ] || { echo 1 2.0 23007; exit 0; }\necho no memory on $RANK >&2\nexit 1\n";
    let (printed, errors, code) = run_with(python, directory.path());
    assert_eq!(code, Some(1), "{printed}\n{errors}");
    assert!(printed.contains("rank 3: no memory on 3"), "{printed}");
    for row in ["never", "healthy"] {
        assert!(
            printed.lines().any(|line| line.starts_with(row)),
            "{printed}"
        );
    }
}

#[test]
fn the_script_for_pytorch_on_a_device_skips_where_ranks_cannot_share_a_device() {
    if !has_python() {
        return;
    }
    let directory = tempfile::tempdir().expect("a folder");
    let (printed, errors, code) = run_with("#!/bin/sh\necho 1 2.0 22803\n", directory.path());
    assert_eq!((code, printed.as_str()), (Some(0), ""), "{errors}");
    assert!(
        errors.starts_with("skipped: 4 ranks cannot share"),
        "{errors}"
    );
}
