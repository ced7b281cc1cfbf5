//! Crates, and modules of a crate, depend on each other only as `docs/ARCHITECTURE.md` permits.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates of this workspace, with their dependencies.
struct Workspace {
    /// The dependencies of each crate, and whether each dependency is optional; without those of tests and benches.
    crates: BTreeMap<String, Vec<(String, bool)>>,
}

impl Workspace {
    fn read() -> Self {
        let output = Command::new(env!("CARGO"))
            .args([
                "metadata",
                "--no-deps",
                "--offline",
                "--format-version",
                "1",
            ])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let crates = packages.iter().map(|package| {
            let listed = package["dependencies"].as_array().unwrap();
            let linked = listed
                .iter()
                .filter(|dependency| dependency["kind"] != "dev");
            let dependencies = linked.map(|dependency| {
                let name = dependency["name"].as_str().unwrap().to_owned();
                (name, dependency["optional"].as_bool().unwrap())
            });
            (
                package["name"].as_str().unwrap().to_owned(),
                dependencies.collect(),
            )
        });
        Self {
            crates: crates.collect(),
        }
    }

    /// The direct dependencies of a crate.
    fn direct(&self, name: &str) -> BTreeSet<&str> {
        let listed = self.crates.get(name);
        let listed = listed.unwrap_or_else(|| panic!("there is no crate {name}"));
        listed.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The crates of this workspace that a crate links, directly or not.
    fn reached(&self, name: &str) -> BTreeSet<&str> {
        let mut reached = BTreeSet::new();
        let mut left = vec![name];
        while let Some(next) = left.pop() {
            let dependencies = self.direct(next).into_iter();
            for name in dependencies.filter(|name| self.crates.contains_key(*name)) {
                if reached.insert(name) {
                    left.push(name);
                }
            }
        }
        reached
    }

    /// The crates of this workspace that depend on a crate directly.
    fn dependents(&self, name: &str) -> BTreeSet<&str> {
        assert!(self.crates.contains_key(name), "there is no crate {name}");
        let names = self.crates.keys().map(String::as_str);
        names
            .filter(|dependent| self.direct(dependent).contains(name))
            .collect()
    }
}

// Invariant 1 of docs/ARCHITECTURE.md.
#[test]
fn the_recorder_links_no_crate_of_the_workspace_and_no_async_runtime_by_default() {
    let workspace = Workspace::read();
    assert_eq!(workspace.reached("rcomm-recorder"), BTreeSet::new());
    let heavy = ["axum", "hyper", "hyper-util", "tokio"];
    for (name, optional) in &workspace.crates["rcomm-recorder"] {
        assert!(*optional || !heavy.contains(&name.as_str()), "{name}");
    }
    let foreign = ["cudarc", "libloading", "candle-core"];
    for name in workspace.direct("rcomm-recorder") {
        assert!(!foreign.contains(&name), "{name}");
    }
}

// Invariant 1 of docs/ARCHITECTURE.md.
#[test]
fn readers_link_no_runtime() {
    let workspace = Workspace::read();
    for reader in ["rcomm-verdict", "rcomm-analyzer", "rcomm-top", "rcomm-web"] {
        for name in ["rcomm", "rcomm-core", "rcomm-cpu", "rcomm-nccl"] {
            assert!(
                !workspace.reached(reader).contains(name),
                "{reader} links {name}"
            );
        }
    }
}

// Invariant 7 of docs/ARCHITECTURE.md.
#[test]
fn the_verdict_crate_links_the_recorder_only() {
    let workspace = Workspace::read();
    let reached = workspace.reached("rcomm-verdict");
    assert_eq!(reached, BTreeSet::from(["rcomm-recorder"]));
}

#[test]
fn the_core_links_no_backend_and_backends_do_not_link_each_other() {
    let workspace = Workspace::read();
    assert_eq!(
        workspace.reached("rcomm-core"),
        BTreeSet::from(["rcomm-recorder"])
    );
    for backend in ["rcomm-cpu", "rcomm-nccl"] {
        let below = BTreeSet::from(["rcomm-core", "rcomm-recorder"]);
        assert_eq!(workspace.reached(backend), below, "{backend}");
        let above = workspace.dependents(backend);
        assert_eq!(
            above,
            BTreeSet::from(["rcomm"]),
            "what depends on {backend}"
        );
    }
}

/// The modules of `docs/ARCHITECTURE.md`, by the folder that holds them, in the page's order. Each module uses only
/// those below it.
fn modules() -> BTreeMap<String, Vec<String>> {
    let page = std::fs::read_to_string(root().join("docs/ARCHITECTURE.md")).unwrap();
    let (_, after) = page.split_once("\n## Modules\n").unwrap();
    let (section, _) = after.split_once("\n## ").unwrap();
    let mut modules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in section.lines().filter_map(|line| line.strip_prefix("| `")) {
        let (path, _) = row.split_once('`').unwrap();
        let (folder, module) = path.rsplit_once('/').unwrap();
        modules
            .entry(folder.to_owned())
            .or_default()
            .push(module.to_owned());
    }
    modules
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// The Rust files of a module, whether it is a folder or a file.
fn files_of(module: &Path) -> Vec<PathBuf> {
    let file = module.with_extension("rs");
    let mut found: Vec<PathBuf> = file.exists().then_some(file).into_iter().collect();
    let mut folders = vec![module.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(kind) if kind == "rs" => found.push(path),
                _ => {}
            }
        }
    }
    found
}

/// The names that follow `crate::` in a file, without its comments and its tests.
fn names_used(text: &str) -> BTreeSet<String> {
    let is_module = |after: &str| {
        after
            .lines()
            .next()
            .is_some_and(|line| line.contains("mod "))
    };
    let tests = text
        .match_indices("\n#[cfg(test)]\n")
        .find(|(at, mark)| is_module(&text[at + mark.len()..]));
    let product = tests.map_or(text, |(at, _)| &text[..at]);
    let code: Vec<&str> = product
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect();
    let code = code.join("\n");
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let ident = |text: &str| -> String {
            let letters = text.chars();
            letters
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect()
        };
        let Some(list) = rest.strip_prefix('{') else {
            names.insert(ident(rest));
            continue;
        };
        let mut depth = 0;
        let mut at_start = true;
        for (at, letter) in list.char_indices() {
            match letter {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => at_start = true,
                letter if at_start && letter.is_alphabetic() => {
                    names.insert(ident(&list[at..]));
                    at_start = false;
                }
                _ => {}
            }
        }
    }
    names
}

#[test]
fn names_after_crate_are_found_in_paths_and_lists() {
    let text = "use crate::group::Work;\nuse crate::{op::{Op, Sides}, store::Store};\n// crate::world\n\
                fn f() { crate::tuning::g(); }\n#[cfg(test)]\nmod tests { use crate::watch; }\n";
    let names: Vec<String> = names_used(text).into_iter().collect();
    assert_eq!(names, ["group", "op", "store", "tuning"]);
}

#[test]
fn modules_use_only_those_below_them() {
    let mut uses = 0;
    let mut upward = Vec::new();
    for (folder, modules) in modules() {
        for (at, module) in modules.iter().enumerate() {
            for file in files_of(&root().join(&folder).join(module)) {
                let used = names_used(&std::fs::read_to_string(&file).unwrap());
                uses += modules[at + 1..]
                    .iter()
                    .filter(|module| used.contains(*module))
                    .count();
                let above = modules[..at].iter().filter(|module| used.contains(*module));
                upward.extend(above.map(|above| format!("{} uses {above}", file.display())));
                // A type that the crate's root re-exports would hide the module that defines it.
                let hidden = used
                    .iter()
                    .filter(|name| name.starts_with(char::is_uppercase));
                upward
                    .extend(hidden.map(|name| {
                        format!("{} uses the re-export crate::{name}", file.display())
                    }));
            }
        }
    }
    assert!(uses > 100, "only {uses} uses of modules were found");
    assert!(upward.is_empty(), "{}", upward.join("\n"));
}

/// Of the code that records, and of the runtime's core and backends, the files that read the wall clock, each with what
/// it reads the clock for. No deadline depends on that clock, and no age but that of files: other ages are counted on
/// the monotonic clock, which does not jump.
const WALL_CLOCK: &[(&str, &str)] = &[
    (
        "recorder/src/record/clock/mod.rs",
        "the time at a ring's anchor",
    ),
    (
        "recorder/src/record/file/directory.rs",
        "the age of files, which the file system dates",
    ),
    ("runtime/core/src/world/init.rs", "the name of a run"),
];

#[test]
fn deadlines_and_ages_of_operations_do_not_depend_on_the_wall_clock() {
    let folders = [
        "recorder/src/record",
        "runtime/core/src",
        "runtime/cpu/src",
        "runtime/nccl/src",
    ];
    let mut found: Vec<String> = Vec::new();
    for file in folders
        .iter()
        .flat_map(|folder| files_of(&root().join(folder)))
    {
        let text = std::fs::read_to_string(&file).unwrap();
        let program = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        if ["SystemTime", "Realtime"]
            .iter()
            .any(|word| program.contains(word))
        {
            let name = file.strip_prefix(root()).unwrap();
            found.push(name.display().to_string());
        }
    }
    found.sort();
    let known: Vec<&str> = WALL_CLOCK.iter().map(|(file, _)| *file).collect();
    assert_eq!(found, known);
}
