//! Helpers that parse a line of a log.

use rcomm_recorder::model::Rank;

/// The text after the first `before`, up to the first of the characters in `after`, or to the end of the text; `None`
/// if `before` is not in it.
pub(super) fn between<'a>(text: &'a str, before: &str, after: &[char]) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    Some(rest.split(after).next().unwrap_or(rest))
}

/// The whole number after the first `before` and spaces, possibly negative; `None` if there is none, or if it does not
/// fit in an `N`. Of `3.5` it is 3.
pub(super) fn number_after<N: std::str::FromStr>(text: &str, before: &str) -> Option<N> {
    let (_, rest) = text.split_once(before)?;
    leading_number(rest.trim_start()).map(|(number, _)| number)
}

/// The whole number at the start, possibly negative, and the rest of the text; `None` as for [`number_after`].
pub(super) fn leading_number<N: std::str::FromStr>(text: &str) -> Option<(N, &str)> {
    let sign = usize::from(text.starts_with('-'));
    let digits = text[sign..]
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len() - sign);
    let (number, rest) = text.split_at(sign + digits);
    Some((number.parse().ok()?, rest))
}

/// The ranks in a list such as `4, 5, 6`, ascending, each once; the first entry that is not a number ends the list, and
/// at most 65,536 entries are read.
pub(super) fn ranks(text: &str) -> Vec<Rank> {
    const MAX_ENTRIES: usize = 1 << 16;
    let mut ranks: Vec<Rank> = text
        .split(',')
        .take(MAX_ENTRIES)
        .map_while(|part| part.trim().parse().ok())
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// The first `max_chars` characters of a text; an ellipsis marks a cut.
pub(super) fn truncated(text: &str, max_chars: usize) -> String {
    let mut cut: String = text.chars().take(max_chars).collect();
    if cut.len() < text.len() {
        cut.push('…');
    }
    cut
}
