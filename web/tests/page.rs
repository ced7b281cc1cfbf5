//! The page in a real browser: headless Chromium, driven by playwright-core.
//!
//! `RCOMM_TEST_PLAYWRIGHT` names a folder below which playwright-core is installed; without it, npm installs it into
//! the target folder. Screenshots are kept in `RCOMM_TEST_PICTURES`, if that is set.

mod common;

use common::npm::installed_by_npm;
use common::{Web, dumps_of, skip};
use rcomm_analyzer::load::{LoadOptions, load_all};
use rcomm_analyzer::print::html;
use rcomm_analyzer::{Finding, Policy, analyze};
use rcomm_recorder::model::text::{bytes, duration_ms};
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

/// Runs a script of this folder with Chromium, and returns its output. `modules` is the folder of playwright-core.
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

/// The page counts ages itself, in the words of the reports.
#[test]
fn the_page_writes_a_duration_as_the_reports_do() {
    if !runs("node") {
        skip("node is not installed");
        return;
    }
    let times = [
        0.0,
        0.25,
        0.35,
        0.75,
        0.99,
        2.25,
        10.5,
        11.5,
        2_250.0,
        10_500.0,
        -3.0,
        -4_200.0,
        1.0,
        9.94,
        9.96,
        42.0,
        999.4,
        999.6,
        1_000.0,
        4_200.0,
        9_949.0,
        9_960.0,
        102_400.0,
        119_499.0,
        119_500.0,
        164_000.0,
        720_000.0,
        3_599_600.0,
        5_400_000.0,
        90_000_000.0,
    ];
    let written = evaluate(&format!(
        "const {{ age }} = await import('./format.js');
         console.log({times:?}.map((ms) => age(ms)).join('\\n'));"
    ));
    let expected: Vec<String> = times.iter().map(|&ms| duration_ms(ms)).collect();
    assert_eq!(written.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn the_page_writes_a_small_lag_with_two_digits() {
    if !runs("node") {
        skip("node is not installed");
        return;
    }
    let written = evaluate(
        "const { lag } = await import('./format.js');
         console.log([null, 0.012, 0.0949, 0.096, 2.25, 300].map((ms) => lag(ms)).join('|'));",
    );
    assert_eq!(written.trim_end(), "|0.01 ms|0.09 ms|0.1 ms|2.2 ms|300 ms");
}

/// Every rank that waits for a killed one leads to it, and the edge that closes a cycle is drawn above the boxes.
#[test]
fn the_graph_leads_every_rank_to_the_cause_and_hides_no_edge() {
    if !runs("node") {
        skip("node is not installed");
        return;
    }
    let written = evaluate(
        "const { boxes, edge } = await import('./graph.js');
         const gone = { severity: 'error', code: 'E150', caused_by: null, culprit_ranks: [2] };
         const wait = (rank, on, ...ranks) => ({ rank, on: [on], group: { name: 'g' + ranks, desc: '', ranks }, seq: 51, op: 'all_reduce' });
         const waits = [wait(0, 2, 0, 2), wait(1, 3, 1, 3), wait(3, 2, 2, 3)];
         const ranks = [0, 1, 2, 3].map((rank) => ({ rank, pending: 0, failure: rank === 2 ? undefined : 'rank 2 is gone' }));
         const groups = waits.map(({ group }) => ({ group }));
         const drawn = boxes({ findings: [gone], waits, ranks, groups });
         for (const box of drawn) console.log(box.kind, box.ranks.join(), box.before.map((i) => drawn[i].ranks.join()).join());
         console.log(edge({ x: 0, y: 50 }, { x: 300, y: 50 }, 1).split(' ')[3]);",
    );
    let expected = ["root 2 ", "waits 0 2", "waits 1 3", "waits 3 2", "24"];
    assert_eq!(written.lines().collect::<Vec<_>>(), expected);
}

/// The age in the verdict's sentence grows as in the reports, and nothing else in the sentence changes.
#[test]
fn the_page_lets_the_age_of_a_sentence_grow_as_the_reports_do() {
    if !runs("node") {
        skip("node is not installed");
        return;
    }
    let mut finding = a_finding();
    let mut expected = Vec::new();
    let mut script = "const { sentenceAfter } = await import('./verdict.js');\n".to_owned();
    for (age_ms, sentence) in [
        (3_000.0, "rank 13.0 s waits: 3.0 s, and 3.0 s"),
        (2.5, "step 42 ms, 12 ms and 2 ms"),
        (118_000.0, "118 seconds, 118 s"),
        (5.0, "no age in it"),
    ] {
        finding.age_ms = Some(age_ms);
        finding.sentence = sentence.to_owned();
        expected.push(finding.sentence_after(2_000.0).into_owned());
        script.push_str(&format!(
            "console.log(sentenceAfter({{ report: {{ findings: [{{ age_ms: {age_ms} }}] }},
               status: {{ lead: 0, sentence: {sentence:?} }} }}, 2000));\n"
        ));
    }
    assert_eq!(expected[0], "rank 13.0 s waits: 5.0 s, and 3.0 s");
    assert_eq!(evaluate(&script).lines().collect::<Vec<_>>(), expected);
}

/// A finding of a job that hangs.
fn a_finding() -> Finding {
    let paths = [dumps_of("cascade-2x2x2").into()];
    let (loaded, _) = load_all(&paths, &LoadOptions::default()).expect("the dumps are read");
    let dumps: Vec<_> = loaded.into_iter().map(|loaded| loaded.dump).collect();
    let report = analyze(&dumps, &Policy::default());
    report.findings.into_iter().next().expect("there is one")
}

/// The operations before a long wait are seen beside it.
#[test]
fn the_timeline_gives_a_wait_at_most_half_of_its_width() {
    if !runs("node") {
        skip("node is not installed");
        return;
    }
    let written = evaluate(
        "const { firstRange, timeOfDay } = await import('./timeline.js');
         const ended = { start: 90, length: 10 }, pending = { start: 100, length: null };
         const range = (length, ...slices) => { const { from, to } = firstRange({ length, lanes: [{ slices }] });
           console.log(from, to); };
         range(1000, { start: 0, length: 10 }, ended, pending);
         range(150, { start: 0, length: 10 }, ended, pending);
         range(1000, { start: 950, length: 50 });
         console.log(firstRange(null).to);
         const us = 1700056997123456;
         console.log(timeOfDay(us, 5e6), timeOfDay(us, 2e5), timeOfDay(us, 10));",
    );
    let times = "14:03:17 14:03:17.123 14:03:17.123456";
    let expected = ["0 200", "0 150", "949 1000", "1", times];
    assert_eq!(written.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn the_page_writes_a_size_as_the_reports_do() {
    if !runs("node") {
        skip("node is not installed");
        return;
    }
    let sizes = [
        0,
        1,
        512,
        1_023,
        1_024,
        1_536,
        10_240,
        10_290,
        65_536,
        1_048_524,
        1_048_575,
        1_048_576,
        1_610_612_736,
        1_073_741_823,
        1 << 40,
        1 << 50,
    ];
    let written = evaluate(&format!(
        "const {{ size }} = await import('./format.js');
         console.log({sizes:?}.map((bytes) => size(bytes)).join('\\n'));"
    ));
    let expected: Vec<String> = sizes.iter().map(|&size| bytes(size)).collect();
    assert_eq!(written.lines().collect::<Vec<_>>(), expected);
}

/// A report's doubts, the attempt that is over, and an unknown number of ranks are said in rcomm-fr's words.
#[test]
fn the_page_says_what_is_not_known() {
    if !runs("node") {
        skip("node is not installed");
        return;
    }
    let written = evaluate(
        "const { asText, overText, unknownSize } = await import('./verdict.js');
         console.log(overText({}));
         console.log(overText({ attempt: 1 }));
         console.log(overText({ later_attempt: 1 }));
         console.log(unknownSize({ input: {} }) === '');
         const finding = { severity: 'error', sentence: 'rank 2 is late', code: 'E101', name: 'not_joined',
           culprit_ranks: [2], alternatives: [[2], [0, 1]], doubts: ['It is early.'], next: '' };
         const report = { findings: [finding], problems: [], input: { may_have_more: true } };
         const look = { rank: 2, host: 'N7', command: 'gdb -p 42' };
         const status = { word: 'stuck', sentence: finding.sentence, lead: 0, look, sources: [] };
         console.log(asText({ report, status }, '').trim());
         // A report leaves out a list of doubts that is empty.
         delete finding.doubts;
         console.log(asText({ report, status }, '').trim().split('\\n').length);",
    );
    let expected = [
        "over",
        "attempt 1 over",
        "attempt 1 has begun; attempt 0 over",
        "true",
        "STUCK rank 2 is late",
        "or else: the records allow as well: ranks 0,1",
        "not sure: It is early.",
        "look at rank 2, on N7: gdb -p 42",
        "no record states how many ranks the job has",
        "4",
    ];
    assert_eq!(written.trim_end().lines().collect::<Vec<_>>(), expected);
}

/// Runs a script that imports modules of the page and returns its output.
fn evaluate(script: &str) -> String {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    for module in [
        "format.js",
        "graph.js",
        "tables.js",
        "timeline.js",
        "verdict.js",
    ] {
        std::fs::copy(assets.join(module), folder.path().join(module))
            .expect("the file can be copied");
    }
    // The modules read the page's address when they are loaded.
    let script = format!("globalThis.location = {{ pathname: '/', search: '' }};\n{script}");
    for (name, text) in [
        ("package.json", r#"{"type": "module"}"#),
        ("script.js", &script),
    ] {
        std::fs::write(folder.path().join(name), text).expect("the file can be written");
    }
    let output = Command::new("node")
        .arg(folder.path().join("script.js"))
        .output()
        .expect("node runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
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
