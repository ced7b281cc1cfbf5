//! Tests that the HTML page is self-contained, that nothing in it can run, and that a browser shows it.

use crate::sample;
use rcomm_analyzer::print::html;
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::{InstanceState, Policy, Report, SeqKind, analyze};
use rcomm_recorder::model::EntryState;
use rcomm_recorder::publish::{Dump, RingReader};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

/// The page of this report and these dumps.
fn page(report: &Report, dumps: &[Dump]) -> String {
    let mut out = Vec::new();
    html::write(report, dumps, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// The dumps of 16 ranks of which one is stuck, 10 s after its fault.
fn dumps() -> Vec<Dump> {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    simulation.dumps_at(simulation.fault_ns() + 10_000_000_000)
}

#[test]
fn page_loads_nothing_else() {
    let page = page(&sample::stuck(), &dumps());
    for outside in [
        "http://", "https://", "<script", "<link", "<img", "@import", "url(h",
    ] {
        assert!(!page.contains(outside), "the page holds {outside}");
    }
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn findings_come_before_everything_else() {
    let page = page(&sample::stuck(), &dumps());
    let position = |text: &str| {
        page.find(text)
            .unwrap_or_else(|| panic!("{text} is missing"))
    };
    assert!(position("rank 6 never issued") < position("<h2>Findings"));
    assert!(position("<h2>Findings") < position("<h2>Who waits for whom"));
    assert!(position("<h2>Who waits for whom") < position("<h2>Collectives by rank"));
    assert!(position("<h2>Collectives by rank") < position("<h2>Timeline"));
    assert!(position("<h2>Timeline") < position("<h2>Stacks"));
}

#[test]
fn a_member_is_not_accused_before_the_collective_is_overdue() {
    let dumps = dumps();
    let mut report = analyze(&dumps, &Policy::default());
    let marked = |report: &Report| {
        let page = page(report, &dumps);
        let cells = ["never", "notyet"].map(|class| format!("<td class=\"cell {class}\""));
        cells.map(|cell| page.contains(&cell))
    };
    assert_eq!(marked(&report), [true, false]);
    for instance in &mut report.in_flight {
        instance.overdue = false;
    }
    assert_eq!(marked(&report), [false, true]);
}

#[test]
fn names_from_a_dump_cannot_become_markup() {
    let evil = "\"><script>alert(1)</script><b title='";
    let mut report = sample::stuck();
    report.findings[0].sentence = evil.into();
    report.findings[0].ruled_out = vec![evil.into()];
    report.findings[0].diff = vec![evil.into()];
    report.findings[0].frames[0].name = evil.into();
    report.findings[0].evidence[0].op = evil.into();
    report.problems[0].path = evil.into();
    report.ranks[0].host = evil.into();
    report.ranks[1].last_call = Some(evil.into());
    report.groups[0].group.desc = evil.into();
    report.groups[0].backend = evil.into();
    report.in_flight[0].op = evil.into();
    report.waits[0].op = evil.into();
    report.waits[0].group.desc = evil.into();
    report.stacks[0].name = evil.into();
    let mut dumps = dumps();
    for dump in &mut dumps {
        for group in &mut dump.groups {
            group.info.desc = evil.into();
        }
        for signature in &mut dump.signatures {
            signature.op_name = evil.into();
        }
    }
    let page = page(&report, &dumps);
    assert!(!page.contains("<script"), "a name became markup");
    assert!(page.contains("&lt;script&gt;"));
}

#[test]
fn report_without_dumps_has_no_empty_pictures() {
    let page = page(&sample::healthy(), &[]);
    assert!(page.contains("Nothing recorded is pending or wrong"));
    assert!(!page.contains("<h2>Timeline"));
    assert!(!page.contains("<h2>Collectives"));
    assert!(!page.contains("<h2>Who waits"));
}

#[test]
fn frame_says_who_is_in_it_and_who_went_another_way() {
    let page = page(&sample::stuck(), &[]);
    let frame = |name: &str| {
        let mut lines = page.lines().filter(|line| line.starts_with("<li"));
        lines
            .find(|line| line.contains(&format!("<code>{name}</code>")))
            .unwrap_or_else(|| panic!("no frame {name}"))
    };
    assert!(!frame("main").contains("not here"), "no rank is elsewhere");
    assert!(frame("step").contains("ranks 0-5</span> <span class=\"elsewhere\">not here: 6<"));
    assert!(frame("load").contains("rank 6</span> <span class=\"elsewhere\">not here: 0-5<"));
    assert!(
        frame("load").starts_with("<li class=\"fault\">"),
        "the frame of the rank at fault is not marked"
    );
    assert!(!frame("step").contains("fault"));
    assert!(page.contains("No stack of rank 7 is recorded."));
    assert!(page.contains(
        "<em>Not here</em>: ranks whose stacks are equal up to the caller of this frame"
    ));
}

#[test]
fn the_rank_at_fault_is_not_listed_again_among_the_alternatives() {
    let mut report = sample::stuck();
    report.findings[0].alternatives = vec![vec![6], vec![7]];
    let page = page(&report, &[]);
    let doubt = "<dd>the records allow as well: rank 7</dd>";
    assert!(page.contains(doubt), "{page}");
}

#[test]
fn cycle_of_waits_has_an_arrow_for_each_wait() {
    let page = page(&sample::cycle(), &[]);
    assert_eq!(page.matches("class=\"edge\"").count(), 2);
}

#[test]
fn a_cycle_of_which_no_wait_is_listed_is_not_drawn() {
    let mut report = sample::cycle();
    report.waits.clear();
    let page = page(&report, &[]);
    assert!(!page.contains("because of whom"), "{page}");
    assert!(!page.contains("class=\"edge\""), "{page}");
}

#[test]
fn ranks_that_failed_because_of_another_are_drawn_when_none_waits() {
    let mut dumps = dumps();
    let mut report = analyze(&dumps, &Policy::default());
    assert!(!page(&report, &dumps).contains("swatch failed"));
    let mut roots = report.findings.iter();
    let (group, seq) = roots
        .find_map(|finding| finding.group.clone().zip(finding.seq))
        .expect("the finding is about a collective");
    report.waits.clear();
    (report.in_flight).retain(|instance| (&instance.group, instance.seq) == (&group, seq));
    report.in_flight[0].state = InstanceState::Failed;
    for rank in &mut report.ranks {
        (rank.failure, rank.pending) = (Some("time-out".into()), 0);
    }
    for entry in dumps.iter_mut().filter_map(|dump| dump.entries.last_mut()) {
        entry.state = EntryState::Failed;
    }
    let page = page(&report, &dumps);
    assert!(page.contains("<h2>Who failed because of whom"), "{page}");
    assert_eq!(page.matches("class=\"edge\"").count(), 1, "{page}");
    assert!(page.contains(">failed in "), "{page}");
    // The bars, and the legend.
    assert!(page.contains(" failed\" x="), "{page}");
    assert!(page.contains("swatch failed"), "{page}");
}

#[test]
fn a_wait_that_has_failed_since_is_drawn_as_a_failure() {
    let mut report = sample::stuck();
    assert!(page(&report, &[]).contains("<h2>Who waits for whom"));
    for rank in &mut report.ranks {
        (rank.failure, rank.pending) = (Some("rank 6 is gone".into()), 0);
    }
    let page = page(&report, &[]);
    assert!(page.contains("<h2>Who failed because of whom"), "{page}");
    // The group is in a line of its own, so that neither it nor the operation is cut.
    let lines = ">failed in all_reduce #9133</text><text";
    assert!(page.contains(lines), "{page}");
    assert!(page.contains(">dp/12</text></g>"), "{page}");
}

#[test]
fn a_cycle_is_drawn_from_the_rank_at_fault_with_those_that_wait_behind_it() {
    let mut report = sample::cycle();
    report.findings[0].culprit_ranks = vec![1];
    let mut behind = report.waits[0].clone();
    (behind.rank, behind.on) = (2, vec![1]);
    report.waits.push(behind);
    let page = page(&report, &[]);
    let boxes: Vec<&str> = page
        .lines()
        .filter(|line| line.starts_with("<g "))
        .collect();
    let begins = |at: usize, class: &str, title: &str| {
        boxes[at].starts_with(&format!("<g class=\"{class}\"><title>{title}: "))
    };
    assert!(begins(0, "root", "rank 1"), "{boxes:?}");
    assert!(begins(1, "cycle", "rank 0"), "{boxes:?}");
    assert!(begins(2, "waits", "rank 2"), "{boxes:?}");
    assert_eq!(page.matches("class=\"edge\"").count(), 3);
}

#[test]
fn an_operation_of_a_process_that_is_gone_ends_with_its_record() {
    let mut dumps = dumps();
    let report = analyze(&dumps, &Policy::default());
    let is_pending = |dump: &&mut Dump| {
        let newest = dump.entries.last();
        newest.is_some_and(|entry| entry.state < EntryState::Completed)
    };
    for dump in dumps.iter_mut().filter(is_pending) {
        dump.identity.reason = RingReader::OWNER_IS_DEAD.into();
        dump.identity.dump_time_ns = dump.entries.last().map_or(0, |entry| entry.time_created_ns);
    }
    let page = page(&report, &dumps);
    assert!(!page.contains(" pending\" x="), "{page}");
    assert!(page.contains("swatch cutoff\"></b> never ended"), "{page}");
    let bars: Vec<&str> = page
        .lines()
        .filter(|line| line.contains(" cutoff\" x="))
        .collect();
    assert!(!bars.is_empty(), "{page}");
    for bar in bars {
        assert!(
            bar.contains(", not ended: its process is gone</title>"),
            "{bar}"
        );
        // It has the least width, and does not reach the right edge.
        assert!(bar.contains(" width=\"1.5\""), "{bar}");
    }
}

#[test]
fn kinds_of_groups_have_their_colors_by_name() {
    let dumps = dumps();
    let page = page(&analyze(&dumps, &Policy::default()), &dumps);
    let legend = page.lines().find(|line| line.contains("swatch g0"));
    let legend = legend.expect("the timeline has a legend");
    let kinds: Vec<&str> = (legend.split("</b> ").skip(1))
        .filter_map(|kind| kind.split('<').next())
        .filter(|kind| *kind != "pending")
        .collect();
    assert!(kinds.len() > 1 && kinds.is_sorted(), "{kinds:?}");
}

#[test]
fn a_warning_accuses_no_rank() {
    let page = page(&sample::warning(), &[]);
    assert!(page.contains("<dt>Late</dt><dd>rank 2</dd>"), "{page}");
    assert!(!page.contains("At fault"), "{page}");
}

#[test]
fn the_doubts_of_an_unsure_finding_are_beside_its_next_step() {
    let banner = |report: &Report| {
        let page = page(report, &[]);
        let (header, _) = page.split_once("</header>").expect("the page has a header");
        header.to_owned()
    };
    let mut report = sample::cycle();
    report.findings[0].doubts = vec!["rank 1 may be slow".into()];
    let unsure = banner(&report);
    assert!(unsure.contains("<b>Or else:</b> the records"), "{unsure}");
    assert!(
        unsure.contains("<b>Not sure:</b> rank 1 may be slow"),
        "{unsure}"
    );
    report.findings[0].confidence = 0.9;
    assert!(!banner(&report).contains("class=\"doubt\""));
}

#[test]
fn the_matrix_says_that_it_does_not_hold_the_message_that_a_finding_is_about() {
    let dumps = dumps();
    let mut report = analyze(&dumps, &Policy::default());
    let said = "E101 is about recv #7, a message: messages have numbers of their own";
    assert!(!page(&report, &dumps).contains(said));
    let finding = &mut report.findings[0];
    (finding.op, finding.seq) = (Some("recv".into()), Some(7));
    finding.seq_kind = Some(SeqKind::P2pSeqId);
    let page = page(&report, &dumps);
    assert_eq!(page.matches(said).count(), 1, "{page}");
}

#[test]
fn browser_shows_the_page_without_an_error() {
    let chromium = Path::new("/usr/bin/chromium");
    if !chromium.exists() {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: {} is not installed",
            chromium.display()
        );
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.html");
    std::fs::write(&file, page(&sample::stuck(), &dumps())).unwrap();
    let shown = Command::new("timeout")
        .arg("60")
        .arg(chromium)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .args([
            "--enable-logging=stderr",
            "--v=0",
            "--virtual-time-budget=2000",
        ])
        .arg(format!(
            "--user-data-dir={}",
            dir.path().join("profile").display()
        ))
        .arg(format!("file://{}", file.display()))
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&shown.stdout);
    let log = String::from_utf8_lossy(&shown.stderr);
    assert!(shown.status.success(), "{log}");
    assert!(dom.contains("rank 6 never issued"), "{dom}");
    assert!(dom.contains("class=\"graph\""));
    // Messages about the page are logged as CONSOLE; the rest of the log is the browser's own.
    assert!(!log.contains("CONSOLE"), "{log}");
}
