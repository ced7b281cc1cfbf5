//! The page in a real browser: headless Chromium, driven by playwright-core.
//!
//! `RCOMM_TEST_PLAYWRIGHT` names a folder below which playwright-core is installed; without it, npm installs it into
//! the target folder. Screenshots are kept in `RCOMM_TEST_PICTURES`, if that is set.

mod common;

use common::npm::installed_by_npm;
use common::{Web, dumps_of, skip};
use rcomm_analyzer::load::{LoadOptions, load_all};
use rcomm_analyzer::print::html;
use rcomm_analyzer::{Policy, analyze};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

const PLAYWRIGHT: &str = "playwright-core@1.65.1";
const AXE: &str = "axe-core@4.14.1";

fn runs(program: &str) -> bool {
    let output = Command::new(program).arg("--version").output();
    output.is_ok_and(|output| output.status.success())
}

/// Folder in which playwright-core is installed; `None`, with the reason printed, if it is not available.
fn playwright() -> Option<PathBuf> {
    if !runs("node") || !runs("chromium") {
        skip("node and chromium are not installed");
        return None;
    }
    if let Some(folder) = std::env::var_os("RCOMM_TEST_PLAYWRIGHT") {
        return Some(folder.into());
    }
    // Tests run in parallel: one of them installs, and the others wait for it.
    static INSTALLED: LazyLock<Option<PathBuf>> =
        LazyLock::new(|| installed_by_npm("playwright", &[PLAYWRIGHT]));
    INSTALLED.clone()
}

/// The folder for screenshots, and the guard that removes it after the test, unless the environment names the folder.
fn pictures() -> (PathBuf, Option<tempfile::TempDir>) {
    match std::env::var_os("RCOMM_TEST_PICTURES") {
        Some(folder) => (folder.into(), None),
        None => {
            let folder = tempfile::tempdir().expect("a temporary directory can be made");
            (folder.path().to_owned(), Some(folder))
        }
    }
}

/// Runs a script of this folder and returns its output.
fn drive(script: &str, modules: &Path, args: &[&str]) -> String {
    let chromium = Command::new("sh")
        .args(["-c", "command -v chromium"])
        .output();
    let chromium = chromium.expect("sh starts").stdout;
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new("node")
        .arg(
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("tests")
                .join(script),
        )
        .arg(modules)
        .arg(String::from_utf8_lossy(&chromium).trim())
        .args(args)
        .output()
        .expect("node runs");
    let text = String::from_utf8_lossy(&stdout).into_owned();
    let errors = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{text}{errors}");
    text
}

#[test]
fn page_shows_a_hang_as_it_happens() {
    let Some(modules) = playwright() else { return };
    let web = Web::demo("stuck", 64, &[]);
    let token = web.token.clone().expect("a token was printed");
    let url = format!("http://{}/?token={token}", web.address);
    let (pictures, _kept) = pictures();
    let pictures = pictures.to_str().expect("the path is UTF-8");
    let dumps = dumps_of("cascade-2x2x2");
    let text = drive("page.mjs", &modules, &[&url, "37", &dumps, "5", pictures]);
    assert!(text.contains("no console error: ok"), "{text}");
}

#[test]
fn page_draws_a_thousand_ranks() {
    let Some(modules) = playwright() else { return };
    let web = Web::demo("stuck", 1024, &["--no-token"]);
    let (pictures, _kept) = pictures();
    let pictures = pictures.to_str().expect("the path is UTF-8");
    let url = format!("http://{}/", web.address);
    let text = drive("page_scale.mjs", &modules, &[&url, pictures]);
    // Only the form of the output is checked: on a shared machine the times vary too much.
    let measured: serde_json::Value = serde_json::from_str(&text).expect("the text is JSON");
    assert!(
        measured["draw_ms"]["median"]
            .as_f64()
            .is_some_and(|ms| ms > 0.0),
        "{text}"
    );
}

/// The page in three widths and two themes, its dialogs, and the report as HTML, closed and opened.
#[test]
fn page_and_report_break_no_rule_of_axe() {
    let Some(modules) = playwright() else { return };
    // A folder of its own: that of playwright-core may be complete without it.
    let Some(axe) = installed_by_npm("axe", &[AXE]) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let report = folder.path().join("report.html");
    let paths = [dumps_of("cascade-2x2x2").into()];
    let (loaded, _) = load_all(&paths, &LoadOptions::default()).expect("the dumps are read");
    let dumps: Vec<_> = loaded.into_iter().map(|loaded| loaded.dump).collect();
    let mut page = Vec::new();
    html::write(&analyze(&dumps, &Policy::default()), &dumps, &mut page).expect("memory takes it");
    std::fs::write(&report, page).expect("the folder takes a file");
    let web = Web::demo("stuck", 64, &["--no-token"]);
    let url = format!("http://{}/", web.address);
    let [axe, report] = [&axe, &report].map(|path| path.to_str().expect("the path is UTF-8"));
    let text = drive("axe.mjs", &modules, &[axe, &url, report]);
    assert!(text.contains("axe: 30 checks, no violation"), "{text}");
}
