//! Tests the text of the differences between two reports.

use crate::sample;
use rcomm_analyzer::print::human::{self, Layout};
use rcomm_analyzer::{Difference, Report};

/// The differences as they are printed, without colors.
fn text(before: &Report, after: &Report) -> String {
    let difference = Difference::between(before, after);
    let mut out = anstream::StripStream::new(Vec::new());
    human::write_difference(&difference, &Layout::default(), &mut out).unwrap();
    String::from_utf8(out.into_inner()).unwrap()
}

#[test]
fn report_does_not_differ_from_itself() {
    let difference = Difference::between(&sample::stuck(), &sample::stuck());
    assert_eq!(difference.new, vec![]);
    assert_eq!(difference.gone, vec![]);
    assert_eq!(difference.remaining.len(), 3);
    assert_eq!(difference.ranks_lost, Vec::<u32>::new());
}

#[test]
fn what_began_to_hang_is_new() {
    insta::assert_snapshot!(text(&sample::healthy(), &sample::stuck()));
}

#[test]
fn finding_whose_wait_grew_remains() {
    let before = sample::stuck();
    let mut after = before.clone();
    after.findings[0].sentence = after.findings[0].sentence.replace("102 s", "402 s");
    after.findings.remove(2);
    after.ranks[3].read = false;
    after.groups[0].lag_p50_ms = Some(4.0);
    insta::assert_snapshot!(text(&before, &after));
}

#[test]
fn group_that_went_on_says_how_far() {
    let before = sample::stuck();
    let mut after = before.clone();
    after.groups[0].last_seq = Some(9140);
    assert!(text(&before, &after).contains("dp/12 #9133 to #9140 (+7)"));
    after.groups[0].last_seq = Some(3);
    assert!(text(&before, &after).contains("dp/12 #9133 to #3 (another run)"));
}
