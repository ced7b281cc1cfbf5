//! Reads the labels before a message: rank, time, and the labels of programs that forwarded the message.

use super::scan::leading_number;
use super::torch::MOST_RANKS;
use rcomm_recorder::model::Rank;
use serde::Deserialize;
use std::borrow::Cow;

/// The ranks that the labels of a line state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Label {
    /// The global rank.
    pub(super) rank: Option<Rank>,
    /// The rank on its host.
    pub(super) local_rank: Option<u32>,
}

/// At most this many labels of a line are read.
const MOST_LABELS: usize = 16;

impl Label {
    /// The labels of a line, and the index where its message begins. One space after a label is part of the label.
    pub(super) fn of(line: &str) -> (Self, usize) {
        let mut label = Self::default();
        let mut end = 0;
        for index in 0..MOST_LABELS {
            let rest = &line[end..];
            let indent = rest.len() - rest.trim_start().len();
            let Some((length, kind)) = next(&rest[indent..], index == 0) else {
                break;
            };
            match kind {
                LabelKind::Rank(rank) if rank < MOST_RANKS => label.rank = Some(rank),
                LabelKind::Task(rank) if rank < MOST_RANKS => {
                    label.rank = label.rank.or(Some(rank));
                }
                LabelKind::Local(rank) => label.local_rank = Some(rank),
                LabelKind::Rank(_) | LabelKind::Task(_) | LabelKind::Other => {}
            }
            end += indent + length;
            if line[end..].starts_with(' ') {
                end += 1;
            }
        }
        (label, end)
    }
}

/// What a label states.
enum LabelKind {
    /// The global rank.
    Rank(Rank),
    /// The task of a scheduler: its number is the rank unless the scheduler is configured otherwise.
    Task(Rank),
    /// The rank on its host.
    Local(u32),
    /// A label that states no rank.
    Other,
}

/// The label at the start of `text`: its length and its kind; `None` if there is none. `is_first`: whether `text` is
/// the start of the line.
fn next(text: &str, is_first: bool) -> Option<(usize, LabelKind)> {
    match text.as_bytes().first()? {
        b'[' => bracketed(text),
        b'(' => in_parentheses(text),
        b'|' => Some((1, LabelKind::Other)),
        b'0'..=b'9' => numeric(text, is_first),
        // Container runtimes write the stream, and whether the line is full or partial.
        _ => ["stdout F", "stderr F", "stdout P", "stderr P"]
            .iter()
            .find(|stream| text.starts_with(**stream))
            .map(|stream| (stream.len(), LabelKind::Other)),
    }
}

/// Reads a label in brackets: `[rank3]:`, `[default0]:`, `[RANK 3]`, `[rank 3]`, `[E321 02:07:08.4 file.cpp:607]`,
/// `[pod/train-0-3/main]`, `[80746]`, a date.
fn bracketed(text: &str) -> Option<(usize, LabelKind)> {
    const LONGEST: usize = 160;
    let end = text.find(']').filter(|&end| end <= LONGEST)?;
    let inside = &text[1..end];
    let colon = usize::from(text[end + 1..].starts_with(':'));
    let length = end + 1 + colon;
    let lower = inside.to_ascii_lowercase();
    if let Some(number) = lower.strip_prefix("rank") {
        // `[Rank 3]` of PyTorch is a rank within a group and part of the message.
        if inside.starts_with("Rank ") {
            return None;
        }
        return number
            .trim()
            .parse()
            .ok()
            .map(|rank| (length, LabelKind::Rank(rank)));
    }
    if inside.starts_with("pod/") {
        return Some((length, LabelKind::Other));
    }
    let digits = inside.trim_start_matches(|c: char| c.is_ascii_alphabetic());
    let letters = inside.len() - digits.len();
    if colon == 1 && letters > 1 && !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
    {
        return digits
            .parse()
            .ok()
            .map(|rank| (length, LabelKind::Local(rank)));
    }
    let is_number = !inside.is_empty() && inside.bytes().all(|byte| byte.is_ascii_digit());
    // A number alone is a label only if it has at least four digits: NCCL writes the numbers of devices in brackets,
    // too.
    if is_number && inside.len() >= 4 || is_time(inside) || is_glog(inside) {
        return Some((length, LabelKind::Other));
    }
    None
}

/// Whether this is a label of glog, like `E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607` or `E
/// ProcessGroupNCCL.cpp:607`.
fn is_glog(inside: &str) -> bool {
    let mut letters = inside.chars();
    let has_level = letters.next().is_some_and(|c| "IWEF".contains(c));
    let has_end_of_level = letters
        .next()
        .is_some_and(|c| c == ' ' || c.is_ascii_digit());
    has_level && has_end_of_level && inside.contains(".cpp:")
}

/// Reads a label of Ray or vLLM: `(RayWorkerVllm pid=409241)`, `(VllmWorker rank=0 pid=85)`.
fn in_parentheses(text: &str) -> Option<(usize, LabelKind)> {
    const LONGEST: usize = 160;
    let end = text.find(')').filter(|&end| end <= LONGEST)?;
    let inside = &text[1..end];
    if !inside.contains("pid=") {
        return None;
    }
    let rank = inside
        .split_once("rank=")
        .and_then(|(_, rest)| leading_number(rest));
    let kind = rank.map_or(LabelKind::Other, |(rank, _)| LabelKind::Rank(rank));
    Some((end + 1, kind))
}

/// Reads `3: ` of a scheduler at the start of a line, `10.0.0.7: ` of a launcher, dates and times.
fn numeric(text: &str, is_first: bool) -> Option<(usize, LabelKind)> {
    let word = text.split([' ', '\t']).next().unwrap_or(text);
    if let Some(number) = word.strip_suffix(':') {
        if is_first && number.len() <= 6 && number.bytes().all(|byte| byte.is_ascii_digit()) {
            return number
                .parse()
                .ok()
                .map(|rank| (word.len(), LabelKind::Task(rank)));
        }
        let is_address = number.split('.').count() == 4
            && number
                .bytes()
                .all(|byte| byte.is_ascii_digit() || byte == b'.');
        return is_address.then_some((word.len(), LabelKind::Other));
    }
    is_time(word).then_some((word.len(), LabelKind::Other))
}

/// Whether this is a date, a time or both: at least eight characters, all digits or the marks and letters of dates and
/// times, a digit first, with at least one hyphen, slash or colon.
fn is_time(word: &str) -> bool {
    let bytes = word.bytes();
    let allowed = |byte: u8| byte.is_ascii_digit() || b"-:./,TZ+ ".contains(&byte);
    word.starts_with(|c: char| c.is_ascii_digit())
        && word.len() >= 8
        && bytes.clone().all(allowed)
        && bytes.clone().any(|byte| b"-:/".contains(&byte))
}

/// A line in Docker's JSON form.
#[derive(Deserialize)]
struct Wrapped<'a> {
    #[serde(borrow)]
    log: Cow<'a, str>,
}

/// The line inside the JSON of Docker's logger, or else the line itself.
pub(super) fn without_docker_json(line: &str) -> Cow<'_, str> {
    if line.starts_with(r#"{"log":"#)
        && let Ok(wrapped) = serde_json::from_str::<Wrapped<'_>>(line)
    {
        return Cow::Owned(wrapped.log.trim_end_matches('\n').to_owned());
    }
    Cow::Borrowed(line)
}

/// The text without escape characters and the ANSI sequences that begin with one and `[`. If the text has no escape
/// character, a color sequence at its start that has lost its own is removed.
pub(super) fn without_colors(text: &str) -> Cow<'_, str> {
    if !text.contains('\u{1b}') {
        let after_code = text.trim_start().strip_prefix('[').and_then(|rest| {
            let (codes, rest) = rest.split_once('m')?;
            let is_code = !codes.is_empty()
                && codes.len() <= 8
                && codes.bytes().all(|b| b.is_ascii_digit() || b == b';');
            is_code.then_some(rest)
        });
        return Cow::Borrowed(after_code.unwrap_or(text));
    }
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\u{1b}') {
        plain.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(sequence) = rest.strip_prefix('[') {
            let end = sequence.find(|c: char| ('@'..='~').contains(&c));
            rest = end.map_or("", |end| &sequence[end + 1..]);
        }
    }
    plain.push_str(rest);
    Cow::Owned(plain)
}
