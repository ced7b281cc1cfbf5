//! Tests the layout of the text report.

use crate::sample;
use rcomm_analyzer::Report;
use rcomm_analyzer::print::human::{self, Detail, Layout};

/// The page without its colors.
fn page(report: &Report, width: usize, detail: Detail) -> String {
    let mut out = anstream::StripStream::new(Vec::new());
    human::write(report, &Layout { width, detail }, &mut out).unwrap();
    String::from_utf8(out.into_inner()).unwrap()
}

#[test]
fn stuck_job_at_eighty_columns() {
    insta::assert_snapshot!(page(&sample::stuck(), 80, Detail::Brief));
}

#[test]
fn stuck_job_with_everything() {
    insta::assert_snapshot!(page(&sample::stuck(), 100, Detail::Verbose));
}

#[test]
fn cycle_of_waits_shows_both_sides() {
    insta::assert_snapshot!(page(&sample::cycle(), 80, Detail::Brief));
}

#[test]
fn jobs_without_a_finding() {
    let pages = [
        sample::healthy(),
        sample::running(),
        sample::inconclusive(),
        sample::warning(),
    ]
    .map(|report| page(&report, 80, Detail::Brief));
    insta::assert_snapshot!(pages.join("--\n"));
}

#[test]
fn no_line_is_wider_than_the_page() {
    for width in [40, 60, 80, 100] {
        for detail in [Detail::Brief, Detail::Verbose] {
            for line in page(&sample::stuck(), width, detail).lines() {
                // A line of one word, such as a path, may be longer.
                let is_word = line.split_whitespace().count() == 1;
                let fits = line.chars().count() <= width;
                assert!(is_word || fits, "{width}: {line:?}");
            }
        }
    }
}

#[test]
fn first_line_is_the_verdict_and_its_sentence() {
    let report = sample::stuck();
    let text = page(&report, 200, Detail::Brief);
    assert_eq!(
        text.lines().next(),
        Some(format!("STUCK  {}", report.findings[0].sentence).as_str())
    );
    assert_eq!(human::one_line(&report), text.lines().next().unwrap());
}

#[test]
fn names_from_a_dump_cannot_control_the_terminal() {
    let mut report = sample::stuck();
    report.findings[0].sentence = "rank 6 is in \u{1b}]0;owned\u{7}evil".into();
    report.findings[0].frames[0].name = "\u{1b}[2Jclear".into();
    report.ranks[0].host = "\u{1b}[31mhost".into();
    let mut out = Vec::new();
    let layout = Layout {
        width: 100,
        detail: Detail::Verbose,
    };
    human::write(&report, &layout, &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert!(!text.contains("\u{1b}]0"), "{text}");
    assert!(!text.contains("\u{1b}[2J"), "{text}");
    assert!(!text.contains('\u{7}'), "{text}");
    assert!(text.contains("\\u{1b}[2Jclear"), "{text}");
}

#[test]
fn finding_that_names_itself_as_its_cause_is_still_printed() {
    let mut report = sample::stuck();
    report.findings[0].caused_by = Some(1);
    report.findings.truncate(1);
    let text = page(&report, 80, Detail::Brief);
    assert!(text.contains("rank 6 never issued"), "{text}");
}
