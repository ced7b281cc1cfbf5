//! Text for groups, ranks, counts, times and operations, shared by all printers and screens.

pub use crate::report::names::{GroupNames, group_label, group_labels, is_undescribed};
use crate::report::refs::{FrameRef, SeqKind};
use crate::report::{InstanceReport, InstanceState};
use rcomm_recorder::model::Rank;
pub use rcomm_recorder::model::text::{bytes, duration_ms, format_time};
use std::borrow::Cow;
use std::fmt::{self, Display, Write as _};

/// The size of an operation; if its members passed different ones that must be equal, the least and the largest.
pub fn size(instance: &InstanceReport) -> String {
    let most = bytes(instance.bytes);
    match instance.least_bytes {
        Some(least) => format!("{} or {most}", bytes(least)),
        None => most,
    }
}

/// The number of ranks of which [`arrived`] counts those that are there: the group's members; of a message, its two ends;
/// of a batch of messages of one rank, that rank and all those that it still waits for, at least two; of a receive from
/// any source, its rank and all those that may send.
pub fn expected(instance: &InstanceReport) -> usize {
    match instance.seq_kind {
        SeqKind::CollectiveSeqId => instance.group.ranks.len(),
        SeqKind::P2pSeqId => 2.max(1 + instance.missing.len() + instance.unknown.len()),
    }
}

/// The number of ranks that have joined an operation. A message is recorded by one of its ends, so the other end is
/// there if the report does not list it as missing or unknown.
pub fn arrived(instance: &InstanceReport) -> usize {
    match instance.seq_kind {
        SeqKind::CollectiveSeqId => instance.joined.len(),
        SeqKind::P2pSeqId => expected(instance) - instance.missing.len() - instance.unknown.len(),
    }
}

/// [`arrived`] and [`expected`], like `1/2`.
pub fn joined(instance: &InstanceReport) -> String {
    format!("{}/{}", arrived(instance), expected(instance))
}

/// The age of an operation; `None` if it is not known, or the operation has failed: then it grows no older.
pub fn age_in_words(instance: &InstanceReport) -> Option<String> {
    let age_ms = instance
        .age_ms
        .filter(|_| instance.state != InstanceState::Failed);
    age_ms.map(duration_ms)
}

/// Whether a file of a call stack belongs to the communication library or its wrappers, and not to the program.
pub fn is_library(filename: &str) -> bool {
    ["/torch/", "torch/distributed/", "/torchcomms/", "c10d"]
        .iter()
        .any(|part| filename.contains(part))
}

/// Ascending ranks as spans, like `0-63,70`: at most `max_spans` of them, then the number of ranks left, like `,+9`.
pub fn rank_set(ranks: &[Rank], max_spans: usize) -> String {
    spans(ranks, "-", max_spans)
}

/// Ascending numbers as spans: at most `max_spans` of them, then the number of numbers left.
pub(super) fn spans<N: Copy + Display + Into<u64>>(
    numbers: &[N],
    separator: &str,
    max_spans: usize,
) -> String {
    let mut text = String::new();
    let mut left = numbers.len();
    for (index, run) in consecutive_runs(numbers).enumerate() {
        if index == max_spans {
            let _ = write!(text, ",+{left}");
            break;
        }
        if index > 0 {
            text.push(',');
        }
        match run {
            [a, b] => _ = write!(text, "{a},{b}"),
            run => text.push_str(&format_run(run, separator)),
        }
        left -= run.len();
    }
    text
}

/// Splits ascending numbers into runs of consecutive ones.
fn consecutive_runs<N: Copy + Into<u64>>(numbers: &[N]) -> impl Iterator<Item = &[N]> {
    numbers.chunk_by(|&a, &b| a.into().checked_add(1) == Some(b.into()))
}

/// Splits ascending numbers into runs of consecutive ones; a run of only two becomes two runs of one.
pub(crate) fn runs<N: Copy + Into<u64>>(numbers: &[N]) -> impl Iterator<Item = &[N]> {
    consecutive_runs(numbers).flat_map(|run| run.chunks(if run.len() == 2 { 1 } else { run.len() }))
}

/// A run as text: `7`, `0-3`.
pub(crate) fn format_run<N: Display>(run: &[N], separator: &str) -> String {
    match run {
        [] => String::new(),
        [one] => one.to_string(),
        [first, .., last] => format!("{first}{separator}{last}"),
    }
}

/// A set of ranks shows at most this many spans; the rest is counted.
const SHOWN_SPANS: usize = 8;

/// Prints a set of ranks, in any order, like `rank 3` or `ranks 0-3,7`.
#[derive(Clone, Copy, Debug)]
pub struct Ranks<'a>(pub &'a [Rank]);

impl Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("no rank"),
            [one] => write!(f, "rank {one}"),
            many => write!(f, "ranks {}", Spans(many)),
        }
    }
}

/// Prints a set of ranks, in any order, without the word: `0-3,7`.
#[derive(Clone, Copy, Debug)]
pub struct Spans<'a>(pub &'a [Rank]);

impl Display for Spans<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranks = self.0.to_vec();
        ranks.sort_unstable();
        ranks.dedup();
        f.write_str(&rank_set(&ranks, SHOWN_SPANS))
    }
}

/// A number of ranks with its verb: `1 rank has`, `3 ranks have`.
pub(crate) fn count_ranks(n: usize, singular: &str, plural: &str) -> String {
    if n == 1 {
        format!("1 rank {singular}")
    } else {
        format!("{n} ranks {plural}")
    }
}

/// Ascending ranks for a sentence: `rank 3`, `ranks 3 and 5`, `ranks 0-6, 8 and 10-12`, `ranks 1, 3-5, ... and 9 more`.
pub fn format_ranks(ranks: &[Rank]) -> String {
    const SHOWN: usize = 6;
    let [_, _, ..] = ranks else {
        return ranks
            .first()
            .map_or_else(|| "no rank".to_owned(), |rank| format!("rank {rank}"));
    };
    let spans: Vec<&[Rank]> = runs(ranks).collect();
    // "and 1 more" is no shorter than the item itself.
    let shown = match spans.len() {
        n if n > SHOWN + 1 => SHOWN,
        n => n,
    };
    let mut parts: Vec<String> = spans[..shown]
        .iter()
        .map(|span| format_run(span, "-"))
        .collect();
    let left: usize = spans[shown..].iter().map(|span| span.len()).sum();
    let last = match left {
        0 => parts.pop(),
        left => Some(format!("{left} more")),
    };
    let last = last.unwrap_or_default();
    match parts.is_empty() {
        true => format!("ranks {last}"),
        false => format!("ranks {} and {last}", parts.join(", ")),
    }
}

/// A number with its noun, in singular or plural: `1 rank`, `1,024 ranks`.
pub fn count(n: u64, noun: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", grouped(n))
}

/// A number with commas between groups of three digits: `2,046,000`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The time of day of a wall clock in ns since the epoch: `21:35:17 UTC`.
pub fn time_of_day(wall_ns: i64) -> String {
    let seconds = wall_ns.div_euclid(1_000_000_000).rem_euclid(86_400);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02} UTC")
}

/// Where a rank is or was, like `rank 6 was last seen in load (data.py:88)`.
pub fn format_frame(frame: &FrameRef) -> String {
    let when = match frame.when.as_str() {
        "last_seen" => "was last seen in",
        "waiting" => "waits in",
        "failed" => "failed in",
        "now" => "is now in",
        "native" => "is, below Python, in",
        _ => "in",
    };
    format!("rank {} {when} {}", frame.rank, format_place(frame))
}

/// The place of a frame, like `load (data.py:88)`; unknown parts are left out.
pub fn format_place(frame: &FrameRef) -> String {
    let place = match (frame.filename.as_str(), frame.line) {
        ("", _) => String::new(),
        (file, 0) => file.to_owned(),
        (file, line) => format!("{file}:{line}"),
    };
    match (frame.name.as_str(), place.as_str()) {
        ("", place) => place.to_owned(),
        (name, "") => name.to_owned(),
        (name, place) => format!("{name} ({place})"),
    }
}

/// A lateness given in ms as text: like [`format_time`], but with one decimal below 10 ms, and "less than 0.1 ms" where
/// that would read 0.0.
pub fn format_lateness(ms: f64) -> String {
    if ms < 0.05 {
        "less than 0.1 ms".to_owned()
    } else if ms < 9.95 {
        format!("{ms:.1} ms")
    } else {
        format_time(ms)
    }
}

/// A share, 0..1, in percent. A share that would round to 100 % reads "more than 99.9 %".
pub fn format_percent(share: f64) -> String {
    if share >= 0.9995 {
        "more than 99.9 %".to_owned()
    } else {
        format!("{:.1} %", share * 100.0)
    }
}

/// The name of a counter as records spell it.
pub const fn counter(kind: SeqKind) -> &'static str {
    match kind {
        SeqKind::CollectiveSeqId => "collective_seq_id",
        SeqKind::P2pSeqId => "p2p_seq_id",
    }
}

/// `text` with every control character, and every character that changes the direction of text, escaped.
///
/// Names in a dump are untrusted: an escape sequence must not reach the reader's terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unprintable) {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_unprintable(c) {
            let _ = write!(clean, "\\u{{{:x}}}", u32::from(c));
        } else {
            clean.push(c);
        }
    }
    Cow::Owned(clean)
}

/// Whether this is a control character, or one that changes the direction of the text (Unicode's property
/// `Bidi_Control`).
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::GroupRef;

    #[test]
    fn a_message_counts_its_own_rank_and_those_that_it_waits_for() {
        let joined_by = |seq_kind, missing: &[Rank], unknown: &[Rank]| {
            joined(&InstanceReport {
                group: GroupRef {
                    name: "pp".into(),
                    desc: String::new(),
                    ranks: [0, 1, 2, 3].into(),
                },
                seq: 1,
                seq_kind,
                op: "send".into(),
                bytes: 4,
                least_bytes: None,
                joined: vec![0],
                missing: missing.to_vec(),
                unknown: unknown.to_vec(),
                state: InstanceState::HalfOpen,
                error: None,
                age_ms: None,
                overdue: false,
            })
        };
        assert_eq!(joined_by(SeqKind::P2pSeqId, &[1], &[]), "1/2");
        assert_eq!(joined_by(SeqKind::P2pSeqId, &[], &[1]), "1/2");
        assert_eq!(joined_by(SeqKind::P2pSeqId, &[], &[]), "2/2");
        assert_eq!(joined_by(SeqKind::P2pSeqId, &[1, 2], &[3]), "1/4");
        assert_eq!(joined_by(SeqKind::CollectiveSeqId, &[1, 2], &[3]), "1/4");
    }

    #[test]
    fn ranks_read_as_spans() {
        assert_eq!(rank_set(&[0, 1, 2, 5, 6, 9], 8), "0-2,5,6,9");
        assert_eq!(rank_set(&[1, 3, 5, 7], 2), "1,3,+2");
        assert_eq!(rank_set(&[], 2), "");
    }

    #[test]
    fn ranks_are_written_as_spans_in_any_order() {
        assert_eq!(Ranks(&[3]).to_string(), "rank 3");
        assert_eq!(Ranks(&[]).to_string(), "no rank");
        assert_eq!(Ranks(&[7, 0, 1, 2, 2, 3]).to_string(), "ranks 0-3,7");
    }

    #[test]
    fn numbers_are_grouped_and_nouns_agree() {
        assert_eq!(count(1, "rank"), "1 rank");
        assert_eq!(count(2_046_000, "operation"), "2,046,000 operations");
        assert_eq!(grouped(123), "123");
        assert_eq!(grouped(u64::MAX), "18,446,744,073,709,551,615");
    }

    #[test]
    fn escape_sequences_do_not_reach_the_terminal() {
        assert_eq!(
            printable("dp\u{1b}[2J\n\u{202e}x"),
            "dp\\u{1b}[2J\\u{a}\\u{202e}x"
        );
        assert!(matches!(printable("größe"), Cow::Borrowed("größe")));
        // All characters with the property Bidi_Control, as Unicode's PropList.txt has them.
        for c in [
            '\u{061c}', '\u{200e}', '\u{200f}', '\u{202a}', '\u{202b}', '\u{202c}', '\u{202d}',
            '\u{202e}', '\u{2066}', '\u{2067}', '\u{2068}', '\u{2069}',
        ] {
            let escaped = format!("\\u{{{:x}}}", u32::from(c));
            assert_eq!(printable(&c.to_string()), escaped);
        }
    }
}
