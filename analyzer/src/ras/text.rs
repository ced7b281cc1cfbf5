//! The text form: what `ncclras` prints.
//!
//! Lines of interest name a process (`Process 812 on node n7 managing GPU 3`) or a rank (`Rank 5 ...
//! -- GPU 5 managed by process 812 on node n7`). What is wrong with it stands in the same line, in the
//! line before (`2 ranks reported ...`), or is the kind of the section. Outliers beyond a quarter are
//! not listed by NCCL unless it is asked for the verbose report.

use super::{Fact, RasReport, What, Who};
use std::collections::HashMap;

pub(super) fn parse(bytes: &[u8]) -> Option<RasReport> {
    let text = std::str::from_utf8(bytes).ok()?;
    let is_report = text.trim_start().starts_with("NCCL version ")
        && text.contains("Job summary")
        && text.contains("Communicators...");
    if !is_report {
        return None;
    }
    let mut reader = Reader::default();
    text.lines().for_each(|line| reader.line(line.trim_end()));
    Some(RasReport {
        facts: reader.facts,
    })
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Section {
    #[default]
    Other,
    Incomplete,
    Dead,
    Error,
    Mismatch,
}

#[derive(Default)]
struct Reader {
    section: Section,
    /// Size of the communicator at hand; 0 = unknown.
    size: u32,
    /// Sizes by the number of the row in the table.
    sizes: HashMap<u32, u32>,
    /// What holds for the ranks that follow.
    heading: Option<What>,
    /// In a comparison of launches: the function, and what most launched.
    function: String,
    others: Option<u64>,
    facts: Vec<Fact>,
}

impl Reader {
    fn line(&mut self, line: &str) {
        let Some(inner) = line.strip_prefix("  ") else {
            return self.heading(line);
        };
        let inner = inner.trim_start();
        if let Some(rest) = inner.strip_prefix("Process ") {
            self.process(rest);
        } else if let Some(rest) = inner.strip_prefix("Rank ") {
            self.rank(rest);
        } else if let Some(rest) = inner.strip_prefix("Communicator ranks have different ") {
            let function = rest.strip_suffix(" operation counts");
            self.function = function.unwrap_or_default().to_owned();
            (self.others, self.heading) = (None, None);
        } else if let Some((_, said)) = inner.split_once(" ranks ") {
            let launched = launched(said);
            if let (Some(launched), None) = (launched, self.others) {
                // The most frequent count comes first.
                self.others = Some(launched);
            }
            self.heading = self.what(said);
        } else {
            self.table_row(inner);
        }
    }

    fn heading(&mut self, line: &str) {
        if line.is_empty() {
            return;
        }
        self.table_row(line);
        let kind = line.rsplit(' ').next().unwrap_or_default();
        self.section = match kind {
            "INCOMPLETE" => Section::Incomplete,
            "DEAD" => Section::Dead,
            "ERROR" => Section::Error,
            "MISMATCH" => Section::Mismatch,
            _ => Section::Other,
        };
        self.heading = None;
        // `#0-2 (hash) KIND`: the second communicator... of row 0 of the table.
        let row = line
            .strip_prefix('#')
            .and_then(|rest| rest.split('-').next());
        let row = row.and_then(|row| row.parse::<u32>().ok());
        self.size = row
            .and_then(|row| self.sizes.get(&row))
            .copied()
            .unwrap_or(0);
    }

    /// Row, communicators, nodes, ranks of each node, ranks of the communicator, ranks, status, errors.
    fn table_row(&mut self, line: &str) {
        let columns: Vec<&str> = line.split_whitespace().collect();
        if let [row, _, _, _, size, _, status, _] = columns[..]
            && status.bytes().all(|byte| byte.is_ascii_uppercase())
            && let (Ok(row), Ok(size)) = (row.parse(), size.parse())
        {
            self.sizes.insert(row, size);
        }
    }

    /// `812 on node n7 managing GPU 3`
    fn process(&mut self, rest: &str) {
        let what = match self.section {
            Section::Dead => What::Dead,
            Section::Incomplete => What::Unresponsive,
            _ => return,
        };
        let Some((pid, rest)) = rest.split_once(" on node ") else {
            return;
        };
        let (host, device) = rest.split_once(" managing GPU").unwrap_or((rest, ""));
        self.facts.push(Fact {
            who: Who {
                host: host.to_owned(),
                pid: pid.parse().unwrap_or(0),
                device: device.trim_start_matches('s').trim().to_owned(),
                rank: None,
            },
            what,
        });
    }

    /// `5 has launched up to operation 41 -- GPU 5 managed by process 812 on node n7`
    fn rank(&mut self, rest: &str) {
        let (said, process) = rest.split_once(" -- ").unwrap_or((rest, ""));
        let (number, said) = said.split_once(' ').unwrap_or((said, ""));
        let Ok(number) = number.parse() else { return };
        let what = if said.is_empty() {
            self.heading.clone()
        } else {
            self.what(said)
        };
        let what = match (what, self.section) {
            (Some(what), _) => what,
            (None, Section::Incomplete) => What::Unresponsive,
            (None, _) => return,
        };
        let mut who = Who {
            rank: Some((number, self.size)),
            ..Who::default()
        };
        if let Some((device, rest)) = process.split_once(" managed by process ")
            && let Some((pid, host)) = rest.split_once(" on node ")
        {
            who.host = host.to_owned();
            who.pid = pid.parse().unwrap_or(0);
            who.device = device.trim_start_matches("GPU ").to_owned();
        }
        self.facts.push(Fact { who, what });
    }

    /// What is said of a rank, if it is something wrong.
    fn what(&self, said: &str) -> Option<What> {
        if let Some(error) = said.strip_prefix("reported ") {
            return Some(What::Error(error.to_owned()));
        }
        if said.ends_with("have status ABORT") || said.ends_with("has status ABORT") {
            return Some(What::Error("communicator aborted".to_owned()));
        }
        let launched = launched(said)?;
        let others = self.others?;
        (self.section == Section::Mismatch && launched < others).then(|| What::Behind {
            function: self.function.clone(),
            launched,
            others,
        })
    }
}

/// How many operations were launched, if that is what is said.
fn launched(said: &str) -> Option<u64> {
    if said.ends_with("not launched any operations") {
        return Some(0);
    }
    let (_, number) = said.split_once("launched up to operation ")?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes, eight ranks: rank 5 is behind, process 777 is dead.
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

";

    #[test]
    fn dead_silent_and_late_ranks_are_read() {
        let facts = parse(REPORT.as_bytes()).unwrap_or_default().facts;
        let who = |rank, pid, device: &str| Who {
            host: "n2".into(),
            pid,
            device: device.into(),
            rank,
        };
        assert_eq!(
            facts,
            [
                Fact {
                    who: who(None, 777, "3"),
                    what: What::Dead
                },
                Fact {
                    who: who(Some((7, 8)), 777, "3"),
                    what: What::Unresponsive
                },
                Fact {
                    who: who(Some((5, 8)), 712, "1"),
                    what: What::Behind {
                        function: "AllReduce".into(),
                        launched: 41,
                        others: 42
                    }
                },
            ]
        );
    }

    #[test]
    fn other_text_is_no_report() {
        assert_eq!(parse(b"NCCL version 2.28.9\n"), None);
        assert_eq!(parse(b"\xff\xfe"), None);
    }

    #[test]
    fn errors_of_several_ranks_hold_for_the_ranks_below() {
        let text = REPORT.replace(
            "Warnings\n",
            "#0-0 (00ab) ERROR\n  Asynchronous errors on 2 ranks\n  2 ranks reported remote error\n  \
             Rank 1 -- GPU 1 managed by process 11 on node n1\n  \
             Rank 2 -- [process information not found]\n\nWarnings\n",
        );
        let facts = parse(text.as_bytes()).unwrap_or_default().facts;
        let failed: Vec<_> = facts
            .iter()
            .filter(|fact| fact.what == What::Error("remote error".into()))
            .map(|fact| (fact.who.rank, fact.who.pid))
            .collect();
        assert_eq!(failed, [(Some((1, 8)), 11), (Some((2, 8)), 0)]);
    }
}
