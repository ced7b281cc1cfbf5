//! The file with all programs runs the program that its name or first argument names, and writes the pages and scripts
//! of all programs.
#![allow(clippy::unwrap_used)]

use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const FILE: &str = env!("CARGO_BIN_EXE_rcomm");
const PROGRAMS: [&str; 5] = [
    "rcomm-fr",
    "rcomm-top",
    "rcomm-web",
    "rcomm-run",
    "rcomm-bench",
];

fn run(file: impl AsRef<Path>, arguments: &[&str]) -> Output {
    Command::new(file.as_ref())
        .args(arguments)
        .output()
        .unwrap()
}

/// The standard output of a command that succeeded.
fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Fails unless the command exits with 2 and prints this sentence and the names of all programs to standard error.
fn assert_refused(mut command: Command, sentence: &str) {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(output.stdout, b"", "{output:?}");
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(message.lines().next(), Some(sentence), "{message}");
    for program in PROGRAMS {
        assert!(message.contains(program), "{message}");
    }
}

#[test]
fn a_link_is_the_program_of_its_name() {
    let folder = tempfile::tempdir().unwrap();
    for program in PROGRAMS {
        let link = folder.path().join(program);
        symlink(FILE, &link).unwrap();
        let version = printed(&run(&link, &["--version"]));
        assert!(version.starts_with(&format!("{program} ")), "{version}");
        // Through a link, a program's name as the first argument is passed on to the program.
        let output = run(&link, &["rcomm-bench", "--version"]);
        assert!(
            !String::from_utf8(output.stdout)
                .unwrap()
                .starts_with("rcomm-bench ")
        );
    }
}

#[test]
fn the_first_argument_names_a_program_by_its_whole_or_short_name() {
    for program in PROGRAMS {
        let short = program.strip_prefix("rcomm-").unwrap();
        for name in [program, short] {
            let version = printed(&run(FILE, &[name, "--version"]));
            assert!(version.starts_with(&format!("{program} ")), "{version}");
            let wrong = run(FILE, &[name, "--no-such-flag"]);
            assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
            let usage = String::from_utf8(wrong.stderr).unwrap();
            assert!(usage.contains(&format!("Usage: {program}")), "{usage}");
        }
    }
}

#[test]
fn without_the_name_of_a_program_it_says_which_there_are() {
    let command_with = |arguments: &[&str]| {
        let mut command = Command::new(FILE);
        command.args(arguments);
        command
    };
    assert_refused(command_with(&[]), "rcomm: no program is named");
    assert_refused(
        command_with(&["rcomm"]),
        "rcomm: no program has the name \"rcomm\"",
    );
    assert_refused(
        command_with(&["--frob"]),
        "rcomm: no program has the name \"--frob\"",
    );
    assert_refused(command_with(&["pages"]), "rcomm: pages needs one folder");
    let mut unknown_link = command_with(&["frr"]);
    unknown_link.arg0("/usr/bin/rcomm-frr");
    assert_refused(unknown_link, "rcomm: no program has the name \"frr\"");
    for flag in ["--help", "-h"] {
        let help = printed(&run(FILE, &[flag]));
        assert!(PROGRAMS.iter().all(|name| help.contains(name)), "{help}");
    }
    assert_eq!(
        printed(&run(FILE, &["--version"])),
        concat!("rcomm ", env!("CARGO_PKG_VERSION"), "\n")
    );
}

/// `rcomm-bench` starts its ranks from its own executable, which here is the file with all programs.
#[test]
fn programs_that_start_themselves_do_so_from_this_file() {
    let measured = run(
        FILE,
        &[
            "bench",
            "barrier",
            "-n",
            "2",
            "--iterations",
            "3",
            "--bind",
            "none",
        ],
    );
    let table = printed(&measured);
    assert!(table.contains("barrier"), "{table}");
    let tuned = run(
        FILE,
        &[
            "rcomm-bench",
            "tune",
            "--ranks",
            "2",
            "--topologies",
            "memory",
            "--min-bytes",
            "1K",
            "--max-bytes",
            "1K",
            "--time",
            "1ms",
            "--rounds",
            "1",
        ],
    );
    assert!(printed(&tuned).contains("memory"), "{tuned:?}");
}

/// The number of rings below this folder, at any depth.
fn rings_below(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let found = entries.map(|entry| match entry.unwrap().path() {
        path if path.is_dir() => rings_below(&path),
        path => usize::from(path.extension().is_some_and(|ending| ending == "ring")),
    });
    found.sum()
}

#[test]
fn the_ranks_of_a_demonstration_are_this_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = Command::new(FILE)
        .args(["run", "demo", "healthy", "-n", "2"])
        .env("RCOMM_RING_DIR", folder.path())
        .env("RCOMM_DUMP_DIR", folder.path().join("dumps"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while rings_below(folder.path()) < 2 {
        assert_eq!(
            launcher.try_wait().unwrap(),
            None,
            "the demonstration ended"
        );
        assert!(Instant::now() < deadline, "the ranks have no rings");
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    let status = launcher.wait().unwrap();
    assert_eq!(status.code(), Some(128 + Signal::TERM.as_raw()), "{status}");
}

#[test]
fn every_program_has_a_page_and_a_script_for_each_shell() {
    let out = tempfile::tempdir().unwrap();
    printed(&run(FILE, &["pages", out.path().to_str().unwrap()]));
    for name in PROGRAMS {
        let page = out.path().join(format!("man/man1/{name}.1"));
        let page = fs::read_to_string(page).unwrap();
        assert!(page.contains(&format!(".TH {name} 1")), "{page}");
        for shell in ["bash", "zsh", "fish"] {
            let script = out.path().join(format!("completions/{name}.{shell}"));
            let script = fs::read_to_string(script).unwrap();
            // Every program's --help is completed in every shell.
            assert!(script.contains(name) && script.contains("help"), "{script}");
        }
    }
    let file = out.path().join("completions/rcomm-fr.bash");
    let wrong = run(FILE, &["pages", file.to_str().unwrap()]);
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    let message = String::from_utf8(wrong.stderr).unwrap();
    assert!(
        message.starts_with("rcomm: failed to write the pages of"),
        "{message}"
    );
}
