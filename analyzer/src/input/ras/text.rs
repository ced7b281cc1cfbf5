//! Reads the text form of RAS reports, as `ncclras` prints it: tables, then the exceptions.
//!
//! Only communicators with exceptions are listed in the second part, each with a line that begins with
//! `#<group>-<number> (<hash>)`; their size is in the table of their group. Below that line, a line names a rank (`Rank
//! 5 ... -- GPU 5 managed by process 812 on node n7`) or a process (`Process 812 on node n7 managing GPU 3`). The fault
//! is in the same line, in a line above (`2 ranks reported ...`), or is the kind of the section. If more than a
//! quarter of the ranks differ, NCCL lists them only in the verbose report.

use super::communicator::{Communicator, Member, MemberState, Process};
use std::collections::BTreeMap;

/// The communicators of a report, or why these bytes are not a report.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<Communicator>, String> {
    let report = std::str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
    let is_report = report.trim_start().starts_with("NCCL version ")
        && report.contains("Job summary")
        && report.contains("Communicators...");
    if !is_report {
        let begin: String = report.chars().take(60).collect();
        return Err(format!("it begins with {begin:?}"));
    }
    let mut reader = TextParser::default();
    for line in report.lines() {
        reader.line(line.trim_end());
    }
    Ok(reader.finish())
}

#[derive(Default)]
struct TextParser {
    /// The number of ranks of a communicator, by the number of its group.
    sizes: BTreeMap<u32, u32>,
    /// The communicators that were read so far, by hash.
    known: BTreeMap<String, Communicator>,
    /// The subject of the lines below a headline.
    block: Block,
    /// Processes that are dead or do not answer.
    troubled: Vec<(Process, MemberState)>,
    /// The number of ranks that were listed by number alone.
    listed: usize,
}

/// At most this many ranks listed by number alone are read, which bounds the memory.
const MOST_LISTED: usize = 1 << 18;

/// What the lines below a headline are about.
#[derive(Default)]
enum Block {
    /// Text that is not about a communicator.
    #[default]
    Other,
    /// A communicator.
    Communicator {
        name: String,
        /// The state of ranks that are listed without a state.
        default_state: MemberState,
        /// The kind of operation that is counted.
        kind: String,
        /// The state of the ranks in the next lines, unless their line states another.
        heading: Option<Parsed>,
    },
    /// Processes in this state.
    Processes(MemberState),
}

/// The state or the number of launches in a line about one or several ranks.
#[derive(Clone)]
enum Parsed {
    Launched(u64),
    Is(MemberState),
}

impl Parsed {
    /// The state or the number in a text like `launched up to operation 42`; `None` if there is neither.
    fn of(text: &str) -> Option<Self> {
        if let Some(error) = text.strip_prefix("reported ") {
            return Some(Self::Is(MemberState::Failed(error.to_owned())));
        }
        if text.ends_with(" status ABORT") {
            return Some(Self::Is(MemberState::Aborted));
        }
        if text.ends_with("not launched any operations") {
            return Some(Self::Launched(0));
        }
        number_after(text, "launched up to operation ").map(Self::Launched)
    }
}

impl TextParser {
    fn line(&mut self, line: &str) {
        let text = line.trim_start();
        if let Some((group, ranks)) = group_row(text) {
            self.sizes.insert(group, ranks);
        } else if let Some((group, name, section)) = headline(text) {
            let size = self.sizes.get(&group).copied().unwrap_or(0);
            let known = self.known.entry(name.clone()).or_default();
            known.name.clone_from(&name);
            known.size = size;
            self.block = Block::Communicator {
                name,
                default_state: match section {
                    "INCOMPLETE" => MemberState::Unresponsive,
                    _ => MemberState::Running,
                },
                kind: "collective".into(),
                heading: None,
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

    /// Reads a line below a headline.
    fn detail(&mut self, text: &str) {
        match &mut self.block {
            Block::Other => {}
            Block::Processes(state) => {
                if let Some(process) = process_line(text) {
                    self.troubled.push((process, state.clone()));
                }
            }
            Block::Communicator {
                name,
                default_state,
                kind,
                heading,
            } => {
                let Some(communicator) = self.known.get_mut(name) else {
                    return;
                };
                if let Some(counts) = text.strip_prefix("Communicator ranks have different ") {
                    let function = counts.strip_suffix(" operation counts");
                    *kind = function.unwrap_or("collective").to_owned();
                    *heading = None;
                } else if let Some(ranks) = missing_ranks(text, MOST_LISTED - self.listed) {
                    self.listed += ranks.len();
                    for rank in ranks {
                        member(communicator, rank).state = MemberState::Unresponsive;
                    }
                } else if let Some(rest) = text.strip_prefix("Rank ") {
                    let (text, process) = rest.split_once(" -- ").unwrap_or((rest, ""));
                    let (rank, state) = text.split_once(' ').unwrap_or((text, ""));
                    let Ok(rank) = rank.parse() else { return };
                    let state = match state {
                        "" => heading.clone(),
                        text => Parsed::of(text),
                    };
                    let member = member(communicator, rank);
                    if let Some(process) = managed(process) {
                        member.process = process;
                    }
                    match state {
                        Some(Parsed::Launched(count)) => {
                            member.launched.retain(|(known, _)| known != kind);
                            member.launched.push((kind.clone(), count));
                        }
                        Some(Parsed::Is(state)) => member.state = state,
                        // A rank may be listed in several sections; this section does not show the rank's state.
                        None if *default_state == MemberState::Running => {}
                        None => member.state = default_state.clone(),
                    }
                } else if let Some((_, state)) = text.split_once(" ranks ") {
                    *heading = Parsed::of(state);
                    // The most frequent count comes first.
                    if let Some(Parsed::Launched(count)) = heading
                        && !communicator
                            .others_launched
                            .iter()
                            .any(|(known, _)| known == kind)
                    {
                        communicator.others_launched.push((kind.clone(), *count));
                    }
                }
            }
        }
    }

    /// The communicators, with the states of the processes that the sections DEAD and INCOMPLETE list.
    fn finish(self) -> Vec<Communicator> {
        let largest = self.sizes.values().copied().max().unwrap_or(0);
        let mut communicators: Vec<Communicator> = self.known.into_values().collect();
        let mut without_communicator = Vec::new();
        for (process, state) in self.troubled {
            let mut found = false;
            for member in communicators.iter_mut().flat_map(|c| &mut c.members) {
                let known = &member.process;
                if (known.pid, &known.host) == (process.pid, &process.host) {
                    // Dead processes are also listed among those that do not answer.
                    if member.state != MemberState::Dead {
                        member.state = state.clone();
                    }
                    found = true;
                }
            }
            if !found {
                without_communicator.push(Member {
                    rank: None,
                    process,
                    state,
                    launched: vec![],
                });
            }
        }
        // A communicator without a name holds the size of the job and the processes that no communicator names.
        let has_largest = communicators.iter().any(|c| c.size == largest);
        if !without_communicator.is_empty() || (largest > 0 && !has_largest) {
            communicators.push(Communicator {
                name: String::new(),
                size: largest,
                members: without_communicator,
                others_launched: Vec::new(),
            });
        }
        communicators
    }
}

/// The member of this rank, which is added if it is new.
fn member(communicator: &mut Communicator, rank: u32) -> &mut Member {
    let members = &mut communicator.members;
    let index = match members.binary_search_by_key(&Some(rank), |member| member.rank) {
        Ok(index) => index,
        Err(index) => {
            let new = Member {
                rank: Some(rank),
                ..Member::default()
            };
            members.insert(index, new);
            index
        }
    };
    &mut members[index]
}

/// A row of the table of groups: its number and the number of ranks of each of its communicators.
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

/// The group, the hash and the section of a headline `#<group>-<number> (<hash>) <section>`.
fn headline(text: &str) -> Option<(u32, String, &str)> {
    let rest = text.strip_prefix('#')?;
    let (numbers, rest) = rest.split_once(" (")?;
    let (name, section) = rest.split_once(')')?;
    let group = numbers.split('-').next()?.parse().ok()?;
    Some((group, name.to_owned(), section.trim()))
}

/// The first `limit` ranks in `The missing rank: 21` or `The missing ranks: 3,7-9`.
fn missing_ranks(text: &str, limit: usize) -> Option<Vec<u32>> {
    let (_, list) = text.strip_prefix("The missing rank")?.split_once(':')?;
    let mut ranks = Vec::new();
    for part in list.split([',', ' ']).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        ranks.extend((first..=last).take(limit - ranks.len()));
    }
    Some(ranks)
}

/// The process in `GPU 3 managed by process 1650386 on node node1`.
fn managed(text: &str) -> Option<Process> {
    Some(Process {
        pid: number_after(text, "managed by process ")?,
        host: node(text)?,
        device: number_after(text, "GPU "),
    })
}

/// The process in `Process 3487984 on node 172.16.64.213 managing GPU 5`.
fn process_line(text: &str) -> Option<Process> {
    Some(Process {
        pid: number_after(text, "Process ")?,
        host: node(text)?,
        device: number_after(text, "managing GPU "),
    })
}

fn node(text: &str) -> Option<String> {
    let (_, rest) = text.split_once(" on node ")?;
    Some(rest.split_whitespace().next()?.to_owned())
}

fn number_after<N: std::str::FromStr>(text: &str, before: &str) -> Option<N> {
    let (_, rest) = text.split_once(before)?;
    let digits = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    rest[..digits].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes, eight ranks: ranks 5 and 6 are behind, process 777 is dead.
    const REPORT: &str = "\
NCCL version 2.28.9 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  MISMATCH

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 777 on node n2 managing GPU 3

#0-0 (00ab) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 7 -- GPU 3 managed by process 777 on node n2

Warnings
========

#0-0 (00ab) MISMATCH
  Communicator ranks have different AllReduce operation counts
  6 ranks have launched up to operation 42
  Rank 5 has launched up to operation 41 -- GPU 1 managed by process 712 on node n2
  Communicator ranks have different Broadcast operation counts
  7 ranks have launched up to operation 2
  Rank 6 has not launched any operations -- GPU 2 managed by process 713 on node n2

";

    fn members(text: &str) -> Vec<Member> {
        let mut communicators = read(text.as_bytes()).expect("the text is a report");
        assert_eq!(communicators.len(), 1, "{communicators:?}");
        communicators.remove(0).members
    }

    #[test]
    fn dead_ranks_and_ranks_that_are_behind_are_read() {
        let communicators = read(REPORT.as_bytes()).expect("the text is a report");
        let [communicator] = communicators.as_slice() else {
            panic!("the report lists one communicator: {communicators:?}");
        };
        assert_eq!(communicator.size, 8);
        let states: Vec<_> = communicator
            .members
            .iter()
            .map(|m| (m.rank, m.process.pid, m.process.device, m.state.word()))
            .collect();
        assert_eq!(
            states,
            [
                (Some(5), 712, Some(1), "running"),
                (Some(6), 713, Some(2), "running"),
                (Some(7), 777, Some(3), "dead"),
            ]
        );
        let behind: Vec<_> = communicator
            .behind()
            .iter()
            .map(|late| (late.member.rank, late.kind, late.launched, late.others))
            .collect();
        assert_eq!(
            behind,
            [(Some(5), "AllReduce", 41, 42), (Some(6), "Broadcast", 0, 2)]
        );
    }

    #[test]
    fn other_text_is_no_report() {
        assert!(read(b"NCCL version 2.28.9\n").is_err());
        assert!(read(b"\xff\xfe").is_err());
    }

    #[test]
    fn errors_of_several_ranks_hold_for_the_ranks_below() {
        let text = REPORT.replace(
            "Warnings\n",
            "#0-0 (00ab) ERROR\n  Asynchronous errors on 2 ranks\n  2 ranks reported remote error\n  \
             Rank 1 -- GPU 1 managed by process 11 on node n1\n  \
             Rank 2 -- [process information not found]\n\nWarnings\n",
        );
        let failed: Vec<_> = members(&text)
            .into_iter()
            .filter(|member| member.state == MemberState::Failed("remote error".into()))
            .map(|member| (member.rank, member.process.pid))
            .collect();
        assert_eq!(failed, [(Some(1), 11), (Some(2), 0)]);
    }

    #[test]
    fn ranges_of_missing_ranks_without_end_take_bounded_memory() {
        let line = "  The missing ranks: 0-4294967295,0-4294967295\n";
        let text = REPORT.replace(
            "  Missing communicator data from 1 rank\n",
            &line.repeat(300),
        );
        assert_eq!(members(&text).len(), MOST_LISTED);
    }
}
