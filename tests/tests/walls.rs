//! Which crate may depend on which: the walls that Cargo holds, as `docs/ARCHITECTURE.md` draws them.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// The crates of this workspace, with what a program that uses them is built from.
struct Workspace {
    /// By crate: its dependencies, less those of tests and benches, and whether each can be left out.
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
            let linked = listed.iter().filter(|it| it["kind"] != "dev");
            let named = linked.map(|it| {
                let name = it["name"].as_str().unwrap().to_owned();
                (name, it["optional"].as_bool().unwrap())
            });
            (
                package["name"].as_str().unwrap().to_owned(),
                named.collect(),
            )
        });
        Self {
            crates: crates.collect(),
        }
    }

    fn direct(&self, of: &str) -> BTreeSet<&str> {
        let listed = self.crates.get(of);
        let listed = listed.unwrap_or_else(|| panic!("there is no crate {of}"));
        listed.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// Crates of this workspace that `of` links, directly or not.
    fn reached(&self, of: &str) -> BTreeSet<&str> {
        let mut reached = BTreeSet::new();
        let mut left = vec![of];
        while let Some(next) = left.pop() {
            let own = self.direct(next).into_iter();
            for name in own.filter(|name| self.crates.contains_key(*name)) {
                if reached.insert(name) {
                    left.push(name);
                }
            }
        }
        reached
    }

    fn dependents(&self, on: &str) -> BTreeSet<&str> {
        assert!(self.crates.contains_key(on), "there is no crate {on}");
        let names = self.crates.keys().map(String::as_str);
        names
            .filter(|name| self.direct(name).contains(on))
            .collect()
    }
}

// Invariant 1.
#[test]
fn the_recorder_knows_no_sibling_and_no_async_runtime_by_default() {
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

// Invariant 1.
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

// Invariant 7.
#[test]
fn the_judgement_links_the_vocabulary_and_nothing_that_could_look_around() {
    let workspace = Workspace::read();
    let reached = workspace.reached("rcomm-verdict");
    assert_eq!(reached, BTreeSet::from(["rcomm-recorder"]));
}

#[test]
fn the_core_knows_no_backend_and_backends_do_not_know_each_other() {
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
