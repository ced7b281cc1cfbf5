//! The guides name only paths that exist, every page is in the contents, every link has a target, and the configuration
//! page has every environment variable with its true default.
#![allow(clippy::unwrap_used)]

use rcomm::Config;
use rcomm::backend::nccl::NcclOptions;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The folders of product code.
const PRODUCTS: &[&str] = &["recorder", "runtime", "analyzer", "tui", "web"];

/// Variables that a program passes to the ranks that it starts. They are not for users.
const INTERNAL: &[&str] = &["RCOMM_BENCH_CHILD"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The text of a page.
fn page(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The text between backticks, line by line.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .flat_map(|line| line.split('`').skip(1).step_by(2))
}

/// The lines below a heading, up to the next heading of level 2.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let (_, rest) = page.split_once(&format!("\n{heading}\n")).unwrap();
    rest.split("\n## ").next().unwrap()
}

/// Whether the word is the name of an environment variable of rcomm, PyTorch, gloo, NCCL or a launcher.
fn is_variable(word: &str) -> bool {
    let prefixes = [
        "RCOMM_",
        "TORCH_",
        "TORCHCOMM_",
        "TORCHELASTIC_",
        "GLOO_",
        "NCCL_",
        "OMPI_",
        "PMI_",
        "PMIX_",
        "MPI_",
        "SLURM_",
        "MASTER_",
    ];
    let is_name = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    word.bytes().all(is_name)
        && !word.ends_with('_')
        && prefixes.iter().any(|prefix| word.starts_with(prefix))
}

/// The environment variables between backticks.
fn variables(text: &str) -> BTreeSet<String> {
    let names = quoted(text).filter(|word| is_variable(word));
    names.map(str::to_owned).collect()
}

/// A text of all options of the runtime and of the NCCL backend, as an environment sets them.
fn options(environment: impl Fn(&str) -> Option<String>) -> String {
    let config = Config::from_lookup(&environment).unwrap();
    let nccl = NcclOptions::from_lookup(&environment).unwrap();
    format!("{config:?} {nccl:?}")
}

#[test]
fn every_path_that_the_guides_name_exists() {
    let folders: BTreeSet<String> = std::fs::read_dir(root())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    for (document, min_named) in [
        ("docs/ARCHITECTURE.md", 60),
        ("CONTRIBUTING.md", 8),
        ("README.md", 8),
    ] {
        let text = page(document);
        let is_path = |word: &&str| {
            let first = word.split('/').next().unwrap();
            word.contains('/') && !word.contains([' ', '*', '<']) && folders.contains(first)
        };
        let mut named = 0;
        for path in quoted(&text)
            .filter(is_path)
            .filter(|path| !path.starts_with("target/"))
        {
            assert!(root().join(path).exists(), "{document}: there is no {path}");
            named += 1;
        }
        let document_path = root().join(document);
        let links = text
            .split("](")
            .skip(1)
            .map(|rest| rest.split([')', '#']).next().unwrap());
        for link in links.filter(|link| !link.is_empty() && !link.contains("://")) {
            let path = document_path.parent().unwrap().join(link);
            assert!(path.exists(), "{document}: there is no {link}");
            named += 1;
        }
        assert!(named >= min_named, "{document} names only {named} paths");
    }
}

/// Adds the paths of the Markdown pages below `folder` to `found`.
fn add_pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The targets of the links and pictures of a page, outside of code.
fn links(text: &str) -> Vec<&str> {
    let mut in_code = false;
    let prose = text.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    });
    let targets = prose.flat_map(|line| line.split("](").skip(1));
    targets
        .map(|rest| rest.split(')').next().unwrap())
        .collect()
}

/// The anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

#[test]
fn every_page_is_in_the_contents_and_every_link_leads_somewhere() {
    let folder = root().join("docs").canonicalize().unwrap();
    let mut paths = Vec::new();
    add_pages(&folder, &mut paths);
    let contents = page("docs/SUMMARY.md");
    let listed: BTreeSet<PathBuf> = links(&contents)
        .iter()
        .map(|link| folder.join(link))
        .collect();
    let mut followed = 0;
    for path in &paths {
        let shown = path.strip_prefix(&folder).unwrap().display();
        let is_contents = path.ends_with("SUMMARY.md");
        assert!(
            is_contents || listed.contains(path),
            "docs/SUMMARY.md lacks {shown}"
        );
        let text = std::fs::read_to_string(path).unwrap();
        for link in links(&text)
            .into_iter()
            .filter(|link| !link.contains("://"))
        {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => path.clone(),
                file => path.parent().unwrap().join(file),
            };
            let target = target.canonicalize();
            let target = target.unwrap_or_else(|error| panic!("docs/{shown}: {link}: {error}"));
            // The site has the files of `docs` only.
            assert!(
                target.starts_with(&folder),
                "docs/{shown}: {link} is outside of docs"
            );
            if !anchor.is_empty() {
                let text = std::fs::read_to_string(&target).unwrap();
                let anchors = anchors(&text);
                assert!(
                    anchors.iter().any(|known| known == anchor),
                    "docs/{shown}: no heading {link}"
                );
            }
            followed += 1;
        }
    }
    assert!(followed > 40, "only {followed} links were found");
}

#[test]
fn the_configuration_page_has_every_variable_of_config_and_no_other() {
    let looked_up = RefCell::new(BTreeSet::new());
    options(|name| {
        looked_up.borrow_mut().insert(name.to_owned());
        None
    });
    let text = page("docs/CONFIGURATION.md");
    let mut listed = variables(section(&text, "## The runtime"));
    listed.extend(variables(section(&text, "## The NCCL backend")));
    // NCCL is searched for in the Python environment that these variables name.
    listed.extend(["VIRTUAL_ENV", "CONDA_PREFIX"].map(str::to_owned));
    assert_eq!(listed, looked_up.into_inner());
}

#[test]
fn the_defaults_on_the_configuration_page_are_those_of_config() {
    let text = page("docs/CONFIGURATION.md");
    let default = options(|_| None);
    let mut compared = 0;
    let rows = ["## The runtime", "## The NCCL backend"]
        .into_iter()
        .flat_map(|heading| section(&text, heading).lines())
        .filter(|line| line.starts_with("| `"));
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [names, _, value] = cells[..] else {
            panic!("not three cells: {row}")
        };
        let name = quoted(names).next().unwrap();
        let Some(value) = value
            .strip_prefix('`')
            .and_then(|value| value.strip_suffix('`'))
        else {
            continue;
        };
        // Such a cell describes the default, for example one that depends on the user.
        if value.contains(['<', '`']) {
            continue;
        }
        let with_value = options(|variable| (variable == name).then(|| value.to_owned()));
        assert!(with_value == default, "{name} is not {value} by default");
        compared += 1;
    }
    assert!(compared > 20, "only {compared} defaults could be compared");
}

#[test]
fn the_configuration_page_has_every_variable_that_the_sources_name() {
    let mut named = BTreeSet::new();
    for product in PRODUCTS {
        add_variables(&root().join(product), &mut named);
    }
    let text = page("docs/CONFIGURATION.md");
    let listed = variables(&text);
    let missing: Vec<_> = named.difference(&listed).collect();
    assert!(
        missing.is_empty(),
        "not in docs/CONFIGURATION.md: {missing:?}"
    );
    let gone: Vec<_> = listed.difference(&named).collect();
    assert!(gone.is_empty(), "named by no source: {gone:?}");
}

/// Adds the variables that are whole string literals in product code below `folder` to `found`.
fn add_variables(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !["tests", "benches", "target"].contains(&name.as_str()) {
                add_variables(&path, found);
            }
        } else if name.ends_with(".py") || name.ends_with(".rs") && name != "tests.rs" {
            let text = std::fs::read_to_string(&path).unwrap();
            let product = text.split("#[cfg(test)]").next().unwrap();
            let literals = product
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .flat_map(|line| line.split('"').skip(1).step_by(2));
            let names = literals.filter(|word| is_variable(word) && !INTERNAL.contains(word));
            found.extend(names.map(str::to_owned));
        }
    }
}
