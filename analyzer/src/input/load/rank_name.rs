//! Finds the rank in a file name, which may hold several numbers.
//!
//! PyTorch's dumps state their rank only in the name, and users rename them and add prefixes and suffixes
//! (`host-node07_40`, `rank_3.json`, `comm_lib_trace_rank_12`). So all names are examined together: names that differ
//! only in numbers form a series, and within a series the rank is the number that differs in all files. A number after
//! the word `rank` or `global` takes precedence over all others; numbers after words with another meaning (`node07`,
//! `pid812`) are never the rank.

use rcomm_recorder::model::Rank;
use std::collections::{HashMap, HashSet};

/// How likely a number is to be the rank, by the word before it; the most likely first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum NumberMeaning {
    Rank,
    Plain,
    SomethingElse,
}

/// A name split into text and numbers.
struct Numbered {
    /// The text with each number replaced by `#`.
    series: String,
    /// The numbers in their order, each with its meaning.
    numbers: Vec<(NumberMeaning, u64)>,
}

impl Numbered {
    fn of(name: &str) -> Self {
        let name = without_endings(name);
        let (mut series, mut numbers) = (String::new(), Vec::new());
        let mut rest = name;
        while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
            let (text, tail) = rest.split_at(start);
            let end = tail.find(|c: char| !c.is_ascii_digit());
            let (digits, tail) = tail.split_at(end.unwrap_or(tail.len()));
            series.push_str(text);
            series.push('#');
            // A number that is too large is not a rank, but it counts as a position, since positions are compared.
            let number = digits.parse().unwrap_or(u64::MAX);
            numbers.push((meaning_of(text), number));
            rest = tail;
        }
        series.push_str(rest);
        Self { series, numbers }
    }
}

/// The name without endings that state how a file is packed or in which format it is.
fn without_endings(mut name: &str) -> &str {
    const ENDINGS: [&str; 9] = [
        ".gz", ".zst", ".tar", ".tgz", ".tzst", ".json", ".pickle", ".pkl", ".rcap",
    ];
    while let Some(short) = ENDINGS.iter().find_map(|end| name.strip_suffix(end)) {
        name = short;
    }
    name
}

/// The meaning of a number, from the text before the number.
fn meaning_of(before: &str) -> NumberMeaning {
    let word = before.trim_end_matches(|c: char| !c.is_ascii_alphabetic());
    let start = word
        .rfind(|c: char| !c.is_ascii_alphabetic())
        .map_or(0, |at| at + 1);
    let before = word[..start].trim_end_matches(|c: char| !c.is_ascii_alphabetic());
    match word[start..].to_ascii_lowercase().as_str() {
        "rank" | "ranks" if before.to_ascii_lowercase().ends_with("local") => {
            NumberMeaning::SomethingElse
        }
        "rank" | "ranks" | "global" => NumberMeaning::Rank,
        "node" | "host" | "pid" | "attempt" | "restart" | "job" | "step" | "gpu" | "local"
        | "localrank" | "version" | "v" | "world" | "size" | "of" => NumberMeaning::SomethingElse,
        _ => NumberMeaning::Plain,
    }
}

/// The numbers in a file's name that may be a rank, in their order; those of its folders are left out.
pub(super) fn numbers(path: &str) -> Vec<Rank> {
    let file = path.rsplit('/').next().unwrap_or(path);
    let numbers = Numbered::of(file).numbers.into_iter();
    numbers
        .filter(|(meaning, _)| *meaning != NumberMeaning::SomethingElse)
        .filter_map(|(_, number)| Rank::try_from(number).ok())
        .collect()
}

/// The rank in each name; `None` if it cannot be determined.
pub(super) fn ranks(names: &[String]) -> Vec<Option<Rank>> {
    let shared = shared_folder(names).len();
    let numbered: Vec<Numbered> = names
        .iter()
        .map(|name| Numbered::of(&name[shared..]))
        .collect();
    let mut series: HashMap<&str, Vec<usize>> = HashMap::new();
    for (at, name) in numbered.iter().enumerate() {
        series.entry(&name.series).or_default().push(at);
    }
    let mut ranks = vec![None; names.len()];
    for members in series.values() {
        let index = index_of_rank(members, &numbered);
        for &at in members {
            let number = index.map(|index| numbered[at].numbers[index].1);
            ranks[at] = number.and_then(|number| Rank::try_from(number).ok());
        }
    }
    ranks
}

/// The folder that all names share, with its slash: its numbers do not distinguish the files.
fn shared_folder(names: &[String]) -> &str {
    let Some((first, rest)) = names.split_first() else {
        return "";
    };
    let mut shared = first.rfind('/').map_or("", |at| &first[..=at]);
    for name in rest {
        while !name.starts_with(shared) {
            let parent = shared[..shared.len() - 1].rfind('/');
            shared = parent.map_or("", |at| &shared[..=at]);
        }
    }
    shared
}

/// The index of the rank among the numbers in the names of a series; `None` if it cannot be determined.
fn index_of_rank(members: &[usize], numbered: &[Numbered]) -> Option<usize> {
    let first = &numbered[*members.first()?].numbers;
    let is_distinct = |index: &usize| {
        let mut seen = HashSet::new();
        members
            .iter()
            .all(|&at| seen.insert(numbered[at].numbers[*index].1))
    };
    // Among numbers of the same meaning, later ones take precedence.
    let best = (0..first.len())
        .rev()
        .filter(is_distinct)
        .min_by_key(|&index| first[index].0)
        .filter(|&index| first[index].0 != NumberMeaning::SomethingElse);
    // With several runs side by side (`run1/rank_0`, `run2/rank_0`), no number differs in all files.
    let after_rank = || {
        (0..first.len())
            .rev()
            .find(|&index| first[index].0 == NumberMeaning::Rank)
    };
    match best {
        Some(index) if first[index].0 == NumberMeaning::Rank => Some(index),
        other => after_rank().or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks_of(names: &[&str]) -> Vec<Option<Rank>> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        ranks(&names)
    }

    #[test]
    fn the_name_of_a_single_file_gives_its_rank() {
        assert_eq!(ranks_of(&["/tmp/comm_lib_trace_rank_12"]), [Some(12)]);
        assert_eq!(ranks_of(&["rank_3.json"]), [Some(3)]);
        assert_eq!(ranks_of(&["trace_7.pickle.gz"]), [Some(7)]);
        assert_eq!(ranks_of(&["node07/dump"]), [None]);
        assert_eq!(ranks_of(&["dump"]), [None]);
        assert_eq!(ranks_of(&["run_7/dump"]), [None]);
    }

    #[test]
    fn the_number_that_varies_is_the_rank() {
        let with_host = ranks_of(&["host-node07_40", "host-node07_41", "host-node08_48"]);
        assert_eq!(with_host, [Some(40), Some(41), Some(48)]);
        let with_size = ranks_of(&["dump_0_of_2", "dump_1_of_2"]);
        assert_eq!(with_size, [Some(0), Some(1)]);
        let with_date = ranks_of(&["trace_3_20261121", "trace_5_20261121"]);
        assert_eq!(with_date, [Some(3), Some(5)]);
        let in_folder = ranks_of(&["7/dump.json", "9/dump.json"]);
        assert_eq!(in_folder, [Some(7), Some(9)]);
    }

    #[test]
    fn only_the_number_after_the_word_rank_counts() {
        let pid = ranks_of(&["rank_0_pid_912", "rank_1_pid_913"]);
        assert_eq!(pid, [Some(0), Some(1)]);
        let bare = ranks_of(&["rank0-81223", "rank1-81224"]);
        assert_eq!(bare, [Some(0), Some(1)]);
        let runs = ranks_of(&["run1/rank_0", "run1/rank_1", "run2/rank_0", "run2/rank_1"]);
        assert_eq!(runs, [Some(0), Some(1), Some(0), Some(1)]);
    }

    #[test]
    fn a_number_that_is_no_rank_is_not_taken_for_one() {
        assert_eq!(ranks_of(&["dump_99999999999999999999"]), [None]);
        assert_eq!(ranks_of(&["a_1_1", "a_1_1"]), [None, None]);
    }

    #[test]
    fn a_global_rank_takes_precedence_over_that_on_the_host() {
        let both = ranks_of(&[
            "host0_rank0_global0",
            "host0_rank1_global1",
            "host1_rank0_global2",
        ]);
        assert_eq!(both, [Some(0), Some(1), Some(2)]);
        let local = ranks_of(&["local_rank0_of_4_7", "local_rank1_of_4_9"]);
        assert_eq!(local, [Some(7), Some(9)]);
    }

    #[test]
    fn series_are_kept_apart() {
        let mixed = ranks_of(&["rank_0", "rank_1", "truth.json", "old_1_5"]);
        assert_eq!(mixed, [Some(0), Some(1), None, Some(5)]);
    }
}
