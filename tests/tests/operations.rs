//! The table of operations is the only definition of operations. No code has a silent default for operations that it
//! does not name, and `docs/PARITY.md` names every operation.
#![allow(clippy::unwrap_used)]

use rcomm_recorder::model::{OpType, Pattern};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Adds the product's sources below `folder` to `found`, with their text up to their own tests.
fn sources(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && name != "tests" && !name.starts_with('.') {
            sources(&path, found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = std::fs::read_to_string(&path).unwrap();
            let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            found.push((path, product.to_owned()));
        }
    }
}

/// Whether a pattern names a variant of a type of the table of operations.
fn names_operation(code: &str) -> bool {
    const TYPES: [&str; 7] = [
        "Op", "OpType", "Pattern", "Layout", "Parts", "WaitsFor", "Bus",
    ];
    TYPES.iter().any(|name| {
        let path = format!("{name}::");
        code.match_indices(&path).any(|(at, _)| {
            let before = code[..at].chars().next_back();
            !before.is_some_and(|c| c.is_alphanumeric() || c == '_')
        })
    })
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Lines, counted from 1, of wildcard arms in matches on operations.
fn wildcards(text: &str) -> Vec<usize> {
    let lines: Vec<&str> = text.lines().collect();
    let is_wildcard = |line: &&str| line.trim_start().starts_with("_ =>");
    let found = (0..lines.len()).filter(|&at| is_wildcard(&lines[at]));
    let found = found.filter(|&at| {
        let depth = indent(lines[at]);
        let before = lines[..at].iter().rev();
        let block = before.take_while(|line| line.trim().is_empty() || indent(line) >= depth);
        let mut arms = block.filter(|line| indent(line) == depth);
        arms.any(|line| {
            let pattern = line.split("=>").next().unwrap_or_default();
            names_operation(pattern.split(" if ").next().unwrap_or_default())
        })
    });
    found.map(|at| at + 1).collect()
}

/// Lines, counted from 1, of `matches!` that list several operations.
fn lists(text: &str) -> Vec<usize> {
    let lists = text.match_indices("matches!(").filter(|&(at, _)| {
        let mut depth = 0;
        let inside = text[at + "matches!".len()..].chars();
        let inside = inside.take_while(|char| {
            depth += i32::from(*char == '(') - i32::from(*char == ')');
            depth > 0
        });
        let inside: String = inside.collect();
        inside.matches("OpType::").count() > 1 || inside.matches("| Op::").count() > 0
    });
    let line = |at: usize| text[..at].matches('\n').count() + 1;
    lists.map(|(at, _)| line(at)).collect()
}

#[test]
fn no_source_has_a_silent_default_for_operations_that_it_does_not_name() {
    let mut files = Vec::new();
    for folder in ["recorder", "runtime", "analyzer", "tui", "web"] {
        sources(&root().join(folder), &mut files);
    }
    assert!(files.len() > 300, "only {} sources", files.len());
    let silent: Vec<String> = files
        .iter()
        .flat_map(|(path, text)| {
            let lines = wildcards(text).into_iter().chain(lists(text));
            lines.map(|line| format!("{}:{line}", path.display()))
        })
        .collect();
    assert!(silent.is_empty(), "{}", silent.join("\n"));
}

#[test]
fn a_wildcard_among_operations_is_found() {
    let silent = "match op {\n    OpType::Send => 1,\n    _ => 2,\n}\n";
    assert_eq!(wildcards(silent), [3]);
    let explicit = "match op {\n    OpType::Send => match x {\n        _ => 1,\n    },\n}\n";
    assert_eq!(wildcards(explicit), [0; 0]);
    let reduction = "match op {\n    ReduceOp::Sum => 1,\n    _ => 2,\n}\n";
    assert_eq!(wildcards(reduction), [0; 0]);
    assert_eq!(lists("matches!(op, OpType::Send | OpType::Recv)"), [1]);
    assert_eq!(
        lists("matches!(op, OpType::Send) || x == OpType::Recv"),
        [0; 0]
    );
}

#[test]
fn the_document_has_every_operation_in_its_first_table() {
    let document = std::fs::read_to_string(root().join("docs/PARITY.md")).unwrap();
    let (_, table) = document.split_once("## Operations").unwrap();
    let table = table.split("\n## ").next().unwrap_or_default();
    let ours: Vec<&str> = table
        .lines()
        .filter_map(|line| line.trim_matches('|').split('|').nth(1))
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .map(|name| name.split('(').next().unwrap_or_default())
        .collect();
    for &op in OpType::ALL {
        let name = match op.pattern() {
            // Groups and windows have tables of their own.
            Pattern::Agreement | Pattern::OneSided | Pattern::Unknown => continue,
            Pattern::Block => "coalesce",
            Pattern::AllReduce
            | Pattern::Reduce
            | Pattern::Broadcast
            | Pattern::Barrier
            | Pattern::AllGather
            | Pattern::ReduceScatter
            | Pattern::AllToAll
            | Pattern::Gather
            | Pattern::Scatter
            | Pattern::Send
            | Pattern::Recv => op.name(),
        };
        assert!(ours.contains(&name), "docs/PARITY.md has no row for {op}");
    }
}
