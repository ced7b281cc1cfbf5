//! The transcripts in the documents are what the program prints.
//!
//! In a document, a block that begins with ```` ```console ```` holds commands (`$ rcomm-fr ...`) and their output.
//! Commands run in the folder of the checked-in dumps. With `RCOMM_UPDATE_DOCS=1` the documents are rewritten, not
//! compared.

use crate::program::{finish, fixture, rcomm_fr};
use std::fs;
use std::path::{Path, PathBuf};

/// The documents that hold transcripts.
const DOCUMENTS: &[&str] = &["GALLERY.md"];

fn document(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../docs")
        .join(name)
}

/// What the program prints for the command of a transcript.
fn output_of(command: &str) -> String {
    let words = shlex::split(command).unwrap();
    assert_eq!(words[0], "rcomm-fr", "{command}");
    let args: Vec<&str> = words[1..].iter().map(String::as_str).collect();
    let mut command = rcomm_fr(&args);
    command.current_dir(fixture("", ""));
    let run = finish(command);
    format!("{}{}", run.stdout, run.stderr)
}

/// The document with every transcript regenerated, and how many commands it holds.
fn regenerate(text: &str) -> (String, usize) {
    let mut regenerated = String::new();
    let mut commands = 0;
    let mut in_block = false;
    for line in text.lines() {
        if !in_block {
            regenerated.push_str(line);
            regenerated.push('\n');
            in_block = line == "```console";
            continue;
        }
        if line == "```" {
            in_block = false;
            regenerated.push_str("```\n");
        } else if let Some(command) = line.strip_prefix("$ ") {
            commands += 1;
            regenerated.push_str(line);
            regenerated.push('\n');
            regenerated.push_str(&output_of(command));
        }
    }
    assert!(!in_block, "a transcript does not end");
    (regenerated, commands)
}

#[test]
fn documents_show_what_the_program_prints() {
    for name in DOCUMENTS {
        let path = document(name);
        let text = fs::read_to_string(&path).unwrap();
        let (regenerated, commands) = regenerate(&text);
        assert!(commands >= 5, "{name} holds only {commands} transcripts");
        if std::env::var_os("RCOMM_UPDATE_DOCS").is_some() {
            fs::write(&path, regenerated).unwrap();
            continue;
        }
        let lines = text.lines().zip(regenerated.lines());
        for (number, (line, expected)) in (1..).zip(lines) {
            assert_eq!(
                line, expected,
                "{name}:{number} has drifted; RCOMM_UPDATE_DOCS=1 rewrites it"
            );
        }
        assert_eq!(
            text.lines().count(),
            regenerated.lines().count(),
            "{name} has drifted"
        );
    }
}

#[test]
fn the_readme_shows_the_beginning_of_a_real_report() {
    let readme = include_str!("../../../README.md");
    let mut blocks = readme.split("```text\n").skip(1);
    let block = blocks.find(|block| block.starts_with("STUCK  rank 5 "));
    let shown = block.and_then(|block| block.split("```").next());
    let shown = shown.expect("the README shows a report on rank 5");
    let report = output_of("rcomm-fr analyze cascade-2x2x2/pickle");
    assert!(
        report.starts_with(shown),
        "the README shows\n{shown}\nand the program prints\n{report}"
    );
}
