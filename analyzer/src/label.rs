//! How groups and sets of ranks are called on a screen.

use crate::finding::GroupRef;
use rcomm_recorder::model::Rank;
use std::fmt::Write as _;

/// A group in a word: its description where that says enough, with its name where it does not.
pub fn group_label(group: &GroupRef) -> String {
    let GroupRef { name, desc, .. } = group;
    if desc.is_empty() || desc == "undefined" || name.starts_with(desc.as_str()) {
        name.clone()
    } else if desc == "default_pg" || name.is_empty() {
        desc.clone()
    } else {
        format!("{desc}/{name}")
    }
}

/// Several groups in a word: `tp_0..127`.
///
/// The labels' last number is cut off and the smallest and largest are shown; labels that share no
/// stem are shown as the first one and a count.
pub fn group_labels(labels: &[String]) -> String {
    let split = |label: &str| -> Option<(String, u64)> {
        let digits = label.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| {
            at + label[at..].chars().next().map_or(1, char::len_utf8)
        });
        let number = label[digits..].parse().ok()?;
        Some((label[..digits].to_owned(), number))
    };
    match labels {
        [] => String::new(),
        [one] => one.clone(),
        [first, ..] => {
            let parts: Option<Vec<_>> = labels.iter().map(|label| split(label)).collect();
            let same = |parts: &Vec<(String, u64)>| parts.iter().all(|(s, _)| *s == parts[0].0);
            match parts.filter(same) {
                Some(parts) => {
                    let numbers = || parts.iter().map(|&(_, n)| n);
                    let low = numbers().min().unwrap_or(0);
                    let high = numbers().max().unwrap_or(0);
                    format!("{}{low}..{high}", parts[0].0)
                }
                None => format!("{first} +{}", labels.len() - 1),
            }
        }
    }
}

/// Ascending ranks as spans: `0-63,70`; cut after `max_spans` with a count of what is left.
pub fn rank_set(ranks: &[Rank], max_spans: usize) -> String {
    let mut text = String::new();
    let (mut at, mut spans) = (0, 0);
    while at < ranks.len() {
        let start = at;
        while at + 1 < ranks.len() && ranks[at + 1] == ranks[at] + 1 {
            at += 1;
        }
        if spans == max_spans {
            let _ = write!(text, ",+{}", ranks.len() - start);
            return text;
        }
        if spans > 0 {
            text.push(',');
        }
        let _ = match at - start {
            0 => write!(text, "{}", ranks[start]),
            1 => write!(text, "{},{}", ranks[start], ranks[at]),
            _ => write!(text, "{}-{}", ranks[start], ranks[at]),
        };
        spans += 1;
        at += 1;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(name: &str, desc: &str) -> String {
        group_label(&GroupRef {
            name: name.into(),
            desc: desc.into(),
            ranks: vec![],
        })
    }

    #[test]
    fn a_label_says_what_the_group_is_for_and_which_one() {
        assert_eq!(group("0", "default_pg"), "default_pg");
        assert_eq!(group("12", "dp"), "dp/12");
        assert_eq!(group("dp_5", "dp"), "dp_5");
        assert_eq!(group("7", "undefined"), "7");
    }

    #[test]
    fn numbered_labels_fold_into_a_span() {
        let labels: Vec<_> = (0..128).map(|i| format!("tp_{i}")).collect();
        assert_eq!(group_labels(&labels), "tp_0..127");
        assert_eq!(group_labels(&["a".into(), "b".into()]), "a +1");
        assert_eq!(group_labels(&["é1".into(), "é2".into()]), "é1..2");
    }

    #[test]
    fn ranks_read_as_spans() {
        assert_eq!(rank_set(&[0, 1, 2, 5, 6, 9], 8), "0-2,5,6,9");
        assert_eq!(rank_set(&[1, 3, 5, 7], 2), "1,3,+2");
        assert_eq!(rank_set(&[], 2), "");
    }
}
