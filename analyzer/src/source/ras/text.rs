//! The report as text, for people: tables, then what stands out.
//!
//! Only communicators with something to tell are named there, each by a line that begins with
//! `#<group>-<number> (<hash>)`; how large they are, the table of their group says.

use crate::source::communicator::{Communicator, Member, MemberState, Process};
use std::collections::BTreeMap;

pub(super) fn read(report: &str) -> Result<Vec<Communicator>, String> {
    if !report.contains("NCCL version") {
        let begin: String = report.chars().take(60).collect();
        return Err(format!("it begins with {begin:?}"));
    }
    let mut reader = Reader::default();
    for line in report.lines() {
        reader.line(line);
    }
    Ok(reader.finish())
}

#[derive(Default)]
struct Reader {
    /// Ranks a communicator, by the number of its group.
    sizes: BTreeMap<u32, u32>,
    known: BTreeMap<String, Communicator>,
    /// What the lines below a headline are about.
    block: Block,
    dead: Vec<Process>,
}

#[derive(Default)]
enum Block {
    /// Something that no communicator is concerned with.
    #[default]
    Other,
    /// A communicator.
    Of {
        name: String,
        /// What the counts are of.
        kind: String,
        /// The count that ranks listed below have.
        count: Option<u64>,
    },
    /// Processes in this state.
    Processes(MemberState),
}

impl Reader {
    fn line(&mut self, line: &str) {
        let text = line.trim();
        if let Some(row) = group_row(text) {
            self.sizes.insert(row.0, row.1);
        } else if let Some((group, name)) = headline(text) {
            let size = self.sizes.get(&group).copied().unwrap_or(0);
            let known = self.known.entry(name.clone()).or_default();
            known.name.clone_from(&name);
            known.size = size;
            self.block = Block::Of {
                name,
                kind: "collective".into(),
                count: None,
            };
        } else if !line.starts_with(' ') && !text.is_empty() {
            self.block = match text {
                "DEAD" => Block::Processes(MemberState::Dead),
                "INCOMPLETE" => Block::Processes(MemberState::Unresponsive),
                _ => Block::Other,
            };
        } else {
            self.detail(text);
        }
    }

    fn detail(&mut self, text: &str) {
        match &mut self.block {
            Block::Other => {}
            Block::Processes(state) => {
                if let Some(process) = process_line(text)
                    && *state == MemberState::Dead
                {
                    self.dead.push(process);
                }
            }
            Block::Of { name, kind, count } => {
                let Some(communicator) = self.known.get_mut(name) else {
                    return;
                };
                if let Some(what) = between(text, "ranks have different ", " operation counts") {
                    what.clone_into(kind);
                } else if let Some(ranks) = missing_ranks(text) {
                    for rank in ranks {
                        member(communicator, rank).state = MemberState::Unresponsive;
                    }
                } else if let Some(rank) = number_after(text, "Rank ") {
                    let own = number_after(text, "launched up to operation ");
                    let none = text.contains("not launched any operations");
                    let launched = own.or(none.then_some(0)).or(*count);
                    let member = member(communicator, rank);
                    if let Some(process) = managed(text) {
                        member.process = process;
                    }
                    if let Some(launched) = launched {
                        member.launched.retain(|(known, _)| known != kind);
                        member.launched.push((kind.clone(), launched));
                    }
                } else if text.contains(" ranks have ") {
                    let launched = number_after(text, "launched up to operation ");
                    let none = text.contains("not launched any operations");
                    *count = launched.or(none.then_some(0));
                    // The most frequent count comes first.
                    if let (None, Some(count)) = (&communicator.others_launched, *count) {
                        communicator.others_launched = Some((kind.clone(), count));
                    }
                }
            }
        }
    }

    fn finish(self) -> Vec<Communicator> {
        let largest = self.sizes.values().copied().max().unwrap_or(0);
        let mut communicators: Vec<Communicator> = self.known.into_values().collect();
        let mut dead = Vec::new();
        for process in self.dead {
            let mut found = false;
            let members = communicators.iter_mut().flat_map(|c| &mut c.members);
            for member in members.filter(|m| m.process.pid == process.pid) {
                member.state = MemberState::Dead;
                found = true;
            }
            if !found {
                dead.push(Member {
                    rank: u32::MAX,
                    process,
                    state: MemberState::Dead,
                    launched: vec![],
                });
            }
        }
        // So that the job's size, and processes that no communicator names, are told in any case.
        let has_largest = communicators.iter().any(|c| c.size == largest);
        if !dead.is_empty() || (largest > 0 && !has_largest) {
            communicators.push(Communicator {
                name: String::new(),
                size: largest,
                members: dead,
                others_launched: None,
            });
        }
        communicators
    }
}

fn member(communicator: &mut Communicator, rank: u32) -> &mut Member {
    let members = &mut communicator.members;
    let at = match members.binary_search_by_key(&rank, |member| member.rank) {
        Ok(at) => at,
        Err(at) => {
            let new = Member {
                rank,
                ..Member::default()
            };
            members.insert(at, new);
            at
        }
    };
    &mut members[at]
}

/// A row of the table of groups: its number, and the ranks of each of its communicators.
fn group_row(text: &str) -> Option<(u32, u32)> {
    let mut words = text.split_whitespace();
    let numbers: Vec<u32> = words
        .by_ref()
        .take(6)
        .map_while(|w| w.parse().ok())
        .collect();
    // A status and an error follow six numbers.
    match (numbers.as_slice(), words.count()) {
        (&[group, _, _, _, ranks, _], 2..) => Some((group, ranks)),
        _ => None,
    }
}

/// `#<group>-<number> (<hash>) ...`.
fn headline(text: &str) -> Option<(u32, String)> {
    let rest = text.strip_prefix('#')?;
    let group = rest.split('-').next()?.parse().ok()?;
    Some((group, between(rest, "(", ")")?.to_owned()))
}

/// `The missing rank: 21`, `The missing ranks: 3,7-9`.
fn missing_ranks(text: &str) -> Option<Vec<u32>> {
    /// Nobody lists more in words.
    const MOST: u32 = 1 << 20;
    let (_, list) = text.strip_prefix("The missing rank")?.split_once(':')?;
    let mut ranks = Vec::new();
    for part in list.split([',', ' ']).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        ranks.extend(first..=last.min(first.saturating_add(MOST)));
    }
    Some(ranks)
}

/// `... GPU 3 managed by process 1650386 on node node1`.
fn managed(text: &str) -> Option<Process> {
    Some(Process {
        pid: number_after(text, "managed by process ")?,
        host: text
            .split(" on node ")
            .nth(1)?
            .split_whitespace()
            .next()?
            .to_owned(),
        device: number_after(text, "GPU "),
    })
}

/// `Process 3487984 on node 172.16.64.213 managing GPU 5`.
fn process_line(text: &str) -> Option<Process> {
    Some(Process {
        pid: number_after(text, "Process ")?,
        host: text
            .split(" on node ")
            .nth(1)?
            .split_whitespace()
            .next()?
            .to_owned(),
        device: number_after(text, "managing GPU "),
    })
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let rest = &text[text.find(before)? + before.len()..];
    Some(&rest[..rest.find(after)?])
}

fn number_after<N: std::str::FromStr>(text: &str, before: &str) -> Option<N> {
    let rest = &text[text.find(before)? + before.len()..];
    let digits = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    rest[..digits].parse().ok()
}
