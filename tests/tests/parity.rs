//! Every test that `docs/PARITY.md` names exists.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::path::Path;

/// Adds the name of every function in the sources below `folder` to `found`.
fn add_functions(folder: &Path, found: &mut HashSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            add_functions(&path, found);
        } else if name.ends_with(".rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let after = text.split("fn ").skip(1);
            let names = after.filter_map(|rest| rest.split(['(', '<']).next());
            found.extend(names.map(str::to_owned));
        }
    }
}

#[test]
fn every_test_that_the_table_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut known = HashSet::new();
    add_functions(&root, &mut known);
    let table = std::fs::read_to_string(root.join("docs/PARITY.md")).unwrap();
    let mut named = 0;
    for line in table.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [_, ours, test] = cells[..] else { continue };
        let Some(test) = test
            .strip_prefix('`')
            .and_then(|test| test.strip_suffix('`'))
        else {
            continue;
        };
        assert!(known.contains(test), "{line}: there is no test {test}");
        assert!(
            !ours.starts_with('—'),
            "{line}: names a test of a feature that is missing"
        );
        named += 1;
    }
    assert!(named > 60, "only {named} rows name a test");
}
