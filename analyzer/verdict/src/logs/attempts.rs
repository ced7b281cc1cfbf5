//! Finds the attempts of a job in its logs.

use super::facts::{Attempt, Log};
use std::collections::BTreeMap;

/// The attempts of all logs by age: 0 is the newest.
pub(super) struct Attempts<'a> {
    by_age: BTreeMap<usize, Vec<(&'a Log, &'a Attempt)>>,
}

impl<'a> Attempts<'a> {
    /// The attempts of these logs. `others` are further files, in which no fact was found.
    pub(super) fn new<'b>(logs: &'a [Log], others: impl Iterator<Item = &'b str>) -> Self {
        let mut newest: BTreeMap<&str, u32> = BTreeMap::new();
        let paths = logs.iter().map(|log| log.path.as_str());
        let (of_logs, of_others): (Vec<_>, Vec<_>) = (paths.collect(), others.collect());
        let all = of_logs.into_iter().chain(of_others);
        for (folder, number) in all.filter_map(numbered_folder) {
            let known = newest.entry(folder).or_default();
            *known = number.max(*known);
        }
        let mut by_age: BTreeMap<usize, Vec<_>> = BTreeMap::new();
        for log in logs {
            let later = numbered_folder(&log.path)
                .map_or(0, |(folder, number)| newest[folder] - number)
                as usize;
            for (age, attempt) in log.attempts.iter().rev().enumerate() {
                by_age.entry(age + later).or_default().push((log, attempt));
            }
        }
        Self { by_age }
    }

    /// The age of the newest attempt with a fact; 0 if there is no fact.
    pub(super) fn newest_with_facts(&self) -> usize {
        let has_facts = |attempts: &[(&Log, &Attempt)]| {
            attempts
                .iter()
                .any(|(_, attempt)| !attempt.facts.is_empty())
        };
        let found = self.by_age.iter().find(|(_, attempts)| has_facts(attempts));
        found.map_or(0, |(&age, _)| age)
    }

    /// The attempts of this age, in the order of the logs.
    pub(super) fn of_age(&self, age: usize) -> &[(&'a Log, &'a Attempt)] {
        self.by_age.get(&age).map_or(&[], Vec::as_slice)
    }

    /// The number of facts of other ages.
    pub(super) fn facts_besides(&self, age: usize) -> u64 {
        let others = self.by_age.iter().filter(|&(&other, _)| other != age);
        others
            .flat_map(|(_, attempts)| attempts)
            .map(|(_, attempt)| attempt.facts.len() as u64)
            .sum()
    }
}

/// Of `job/attempt_2/3/stderr.log`, the part `job/` and the number 2: torchrun has a folder for each attempt of its
/// workers. `None` if no such folder is in the path.
fn numbered_folder(path: &str) -> Option<(&str, u32)> {
    let mut start = 0;
    for part in path.split('/') {
        let number = part.strip_prefix("attempt_").and_then(|n| n.parse().ok());
        if let Some(number) = number {
            return Some((&path[..start], number));
        }
        start += part.len() + 1;
    }
    None
}
