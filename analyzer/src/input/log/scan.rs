//! Helpers that take a line of a log apart.

use rcomm_recorder::model::Rank;

/// The text between `before` and the next `after`, or the end.
pub(super) fn between<'a>(text: &'a str, before: &str, after: &[char]) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    Some(rest.split(after).next().unwrap_or(rest))
}

/// The number that directly follows `before`, which may be signed.
pub(super) fn number_after<N: std::str::FromStr>(text: &str, before: &str) -> Option<N> {
    let (_, rest) = text.split_once(before)?;
    leading_number(rest.trim_start()).map(|(number, _)| number)
}

/// The number at the start, and what follows it.
pub(super) fn leading_number<N: std::str::FromStr>(text: &str) -> Option<(N, &str)> {
    let sign = usize::from(text.starts_with('-'));
    let digits = text[sign..]
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len() - sign);
    let (number, rest) = text.split_at(sign + digits);
    Some((number.parse().ok()?, rest))
}

/// Ranks in a list such as `4, 5, 6`, ascending; at most this many.
pub(super) fn ranks(text: &str) -> Vec<Rank> {
    const MOST: usize = 1 << 16;
    let mut ranks: Vec<Rank> = text
        .split(',')
        .take(MOST)
        .map_while(|part| part.trim().parse().ok())
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// The start of a text, no longer than so many characters.
pub(super) fn truncated(text: &str, most: usize) -> String {
    let mut cut: String = text.chars().take(most).collect();
    if cut.len() < text.len() {
        cut.push('…');
    }
    cut
}
