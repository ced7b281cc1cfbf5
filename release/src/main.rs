//! `rcomm`: all programs in one file. They share most of their code, which the file holds once.
//!
//! A link to the file, or a copy of it, with the name of a program runs that program. Under any other name, the file
//! runs the program that its first argument names: `rcomm fr analyze dumps/` is `rcomm-fr analyze dumps/`. Each program
//! also has a package with a file of its own, for `cargo install`.

#![forbid(unsafe_code)]

mod pages;

use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

/// A program of the file.
struct Program {
    name: &'static str,
    main: fn(Vec<OsString>) -> ExitCode,
}

const PROGRAMS: [Program; 5] = [
    Program {
        name: "rcomm-fr",
        main: rcomm_analyzer::cli::main,
    },
    Program {
        name: "rcomm-top",
        main: rcomm_top::start::main,
    },
    Program {
        name: "rcomm-web",
        main: rcomm_web::program::main,
    },
    Program {
        name: "rcomm-run",
        main: rcomm_tools::run::main,
    },
    Program {
        name: "rcomm-bench",
        main: rcomm_tools::bench::main,
    },
];

const USAGE: &str = "\
Usage: rcomm PROGRAM [ARGUMENTS...]
       rcomm pages DIR

Programs (a link to rcomm with the longer of two names runs that program, without PROGRAM):
  rcomm-fr, fr        reads records, and names the rank at fault
  rcomm-top, top      the live view in a terminal
  rcomm-web, web      the live view in a browser, metrics and traces
  rcomm-run, run      starts the ranks of a job
  rcomm-bench, bench  measures collectives

rcomm PROGRAM --help describes one. rcomm pages writes the manual pages (DIR/man/man1) and the
completion scripts (DIR/completions) of all.
";

fn main() -> ExitCode {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let own_path = arguments.first().map(Path::new);
    if let Some(program) = own_path.and_then(Path::file_name).and_then(named) {
        return start(program, arguments);
    }
    let Some(first) = arguments.get(1).cloned() else {
        return usage_error("no program is named");
    };
    if let Some(program) = with_short_name(&first) {
        arguments.remove(0);
        arguments[0] = program.name.into();
        return start(program, arguments);
    }
    match (first.to_str(), &arguments[2..]) {
        (Some("pages"), [directory]) => pages::main(Path::new(directory)),
        (Some("pages"), _) => usage_error("pages needs one folder"),
        (Some("--help" | "-h"), _) => print(USAGE),
        (Some("--version" | "-V"), _) => print(concat!("rcomm ", env!("CARGO_PKG_VERSION"), "\n")),
        _ => usage_error(&format!("no program has the name {first:?}")),
    }
}

/// The program of exactly this name.
fn named(name: &OsStr) -> Option<&'static Program> {
    PROGRAMS.iter().find(|program| name == program.name)
}

/// The program of this name, which may lack `rcomm-`.
fn with_short_name(name: &OsStr) -> Option<&'static Program> {
    let mut full_name = OsString::from("rcomm-");
    full_name.push(name);
    named(name).or_else(|| named(&full_name))
}

/// Runs a program; `arguments` begin with its name.
fn start(program: &Program, arguments: Vec<OsString>) -> ExitCode {
    // Then `ps` and `pgrep` show the program's name. If this fails, they show the file's name.
    let _ = rustix::thread::set_name(&std::ffi::CString::new(program.name).unwrap_or_default());
    (program.main)(arguments)
}

/// Prints a text to standard output.
fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(2),
    }
}

/// Prints what is wrong with the arguments, and the usage, to standard error.
fn usage_error(sentence: &str) -> ExitCode {
    // If standard error is closed, the message is lost.
    let _ = write!(std::io::stderr(), "rcomm: {sentence}\n\n{USAGE}");
    ExitCode::from(2)
}
