//! The rank × sequence matrix of one group: the state of each shown collective on each member.

use crate::report::{Code, Finding, GroupRef, InstanceReport, Report, SeqKind, Severity};
use rcomm_recorder::model::{Entry, EntryState, OpType, Rank};
use rcomm_recorder::publish::{Dump, Recorder};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The state of one collective on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cell {
    /// Issued, but no start was recorded.
    Queued,
    /// Started, but not completed.
    Started,
    /// Completed.
    Completed,
    /// Ended with an error or a time-out.
    Failed,
    /// The record covers this number, and the rank did not issue it.
    NeverIssued,
    /// Issued as another operation than that in [`Matrix::ops`], or with an element type, a size or an argument that a
    /// finding names as not fitting the others'.
    Mismatch,
    /// Older than what the rank's record holds of the group: the rank may have issued it.
    Lost,
    /// There is no record of this rank, or it does not list the group, or it ends too early to show the collective: the
    /// file was cut, or was taken before the others.
    NoRecord,
}

impl Cell {
    /// Every cell with its letter and its meaning.
    pub const LEGEND: &'static [(Self, char, &'static str)] = &[
        (Self::Completed, 'C', "completed"),
        (Self::Started, 'S', "started"),
        (Self::Queued, 'Q', "queued"),
        (Self::NeverIssued, '-', "never issued"),
        (Self::Mismatch, 'X', "mismatch"),
        (Self::Failed, 'F', "failed"),
        (Self::Lost, '*', "lost from the ring"),
        (Self::NoRecord, '?', "no record"),
    ];

    /// The cell's letter in [`Cell::LEGEND`].
    pub fn letter(self) -> char {
        Self::LEGEND
            .iter()
            .find(|(cell, ..)| *cell == self)
            .map_or('?', |&(_, letter, _)| letter)
    }
}

/// A row of the matrix: members with the same cells.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Global ranks, ascending.
    pub ranks: Vec<Rank>,
    /// One cell per sequence number of the matrix.
    pub cells: Vec<Cell>,
    /// When the oldest pending collective of these ranks was issued, ns since the epoch; `None` if none is pending or
    /// the time is unknown.
    pub pending_since_ns: Option<i64>,
}

/// The matrix of one group.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Matrix {
    /// Sequence numbers, ascending: one column each.
    pub seqs: Vec<u64>,
    /// The operation that most members issued at each number, in the order of `seqs`; in a tie, the first by name.
    /// An empty name where no member issued one.
    pub ops: Vec<String>,
    /// Rows in order of their first rank.
    pub rows: Vec<Row>,
}

/// Whether members with equal cells share a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// One row per rank.
    Each,
    /// One row per distinct sequence of cells; ranks at fault share no row with others.
    Folded,
}

/// The data of one rank, before rows are folded.
struct Line<'a> {
    rank: Rank,
    read: bool,
    /// The lowest collective number of this group in the record; older ones are lost.
    first: Option<u64>,
    /// Whether the record begins with the rank's first operation: then the ring has dropped none.
    complete: bool,
    /// The highest collective number of this group in the record.
    newest: Option<u64>,
    /// When the oldest pending collective was issued, ns since the epoch.
    pending_since_ns: Option<i64>,
    /// Collectives of lower numbers have ended if the record retired them: gloo's own recorder notes no other sign of an
    /// end. 0 for other recorders.
    retired_below: u64,
    /// By collective number, for those that may be shown: the entry, and the name of its operation.
    entries: HashMap<u64, (&'a Entry, &'a str)>,
}

/// The matrix of at most `columns` collectives of `group`: of the newest or, if the oldest unfinished one is older, of
/// those around it. Empty if the dumps hold none. Members without a dump have [`Cell::NoRecord`].
///
/// `report` is the one on these dumps; `dumps` are (rank, dump) in any order; ranks outside of the group
/// are ignored, if its ranks are known.
pub fn matrix<'a>(
    dumps: impl IntoIterator<Item = (Rank, &'a Dump)>,
    group: &GroupRef,
    report: &Report,
    columns: usize,
    rows: Rows,
) -> Matrix {
    let mut lines: BTreeMap<Rank, Line<'_>> = group
        .ranks
        .iter()
        .map(|&rank| (rank, Line::missing(rank)))
        .collect();
    let unfinished = oldest_unfinished(report, group);
    let mut newest = 0;
    for (rank, dump) in dumps {
        if !group.ranks.is_empty() && !lines.contains_key(&rank) {
            continue;
        }
        if let Some(line) = Line::read(rank, dump, group, columns as u64, unfinished) {
            newest = newest.max(line.newest.unwrap_or(0));
            // If a process has several recorders, the one that covers most of the group is shown.
            let known = lines.get(&rank).map_or(0, |known| known.entries.len());
            if known == 0 || known < line.entries.len() {
                lines.insert(rank, line);
            }
        }
    }
    let oldest = lines
        .values()
        .flat_map(|line| line.entries.keys().copied())
        .min();
    let Some(oldest) = oldest else {
        return Matrix::default();
    };
    let columns = columns as u64;
    let of_newest = (newest + 1).saturating_sub(columns);
    let start = match unfinished {
        // Half of the columns show what came before.
        Some(seq) if seq < of_newest => seq.saturating_sub(columns / 2),
        _ => of_newest,
    };
    let start = start.max(oldest);
    let seqs: Vec<u64> = (start..=newest.min(start + columns.saturating_sub(1))).collect();
    let ops: Vec<&str> = seqs.iter().map(|seq| majority(&lines, *seq)).collect();
    let odd = odd_calls(&report.findings, group);
    let absences = Absences::new(report, group, &lines);
    let mut matrix_rows: Vec<Row> = Vec::new();
    let mut row_of: HashMap<(bool, Vec<Cell>), usize> = HashMap::new();
    let errors = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error && finding.caused_by.is_none());
    let at_fault: HashSet<Rank> = errors
        .flat_map(|error| &error.culprit_ranks)
        .copied()
        .collect();
    for line in lines.values() {
        let cells: Vec<Cell> = seqs
            .iter()
            .zip(&ops)
            .map(
                |(&seq, op)| match line.cell(seq, op, odd.contains(&(line.rank, seq))) {
                    Cell::NeverIssued if !absences.are_known(line.rank, seq) => Cell::NoRecord,
                    cell => cell,
                },
            )
            .collect();
        let since = line.pending_since_ns;
        let index = match rows {
            Rows::Folded => *row_of
                .entry((at_fault.contains(&line.rank), cells.clone()))
                .or_insert(matrix_rows.len()),
            Rows::Each => matrix_rows.len(),
        };
        match matrix_rows.get_mut(index) {
            Some(row) => {
                row.ranks.push(line.rank);
                row.pending_since_ns = match (row.pending_since_ns, since) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
            }
            None => matrix_rows.push(Row {
                ranks: vec![line.rank],
                cells,
                pending_since_ns: since,
            }),
        }
    }
    Matrix {
        seqs,
        ops: ops.into_iter().map(str::to_owned).collect(),
        rows: matrix_rows,
    }
}

impl<'a> Line<'a> {
    /// A rank without a record.
    fn missing(rank: Rank) -> Self {
        Self {
            rank,
            read: false,
            first: None,
            complete: false,
            newest: None,
            pending_since_ns: None,
            retired_below: 0,
            entries: HashMap::new(),
        }
    }

    /// Reads the newest `columns` collectives of a dump or, if `unfinished` is older, as many before and after it;
    /// `None` if the dump has no such group.
    fn read(
        rank: Rank,
        dump: &'a Dump,
        group: &GroupRef,
        columns: u64,
        unfinished: Option<u64>,
    ) -> Option<Self> {
        let index = dump.groups.iter().position(|known| {
            known.info.name == group.name
                && (known.info.ranks.is_empty()
                    || group.ranks.is_empty()
                    || known.info.ranks == group.ranks)
        })?;
        let index = u32::try_from(index).ok()?;
        // rcomm numbers records from 1, PyTorch's recorders from 0.
        let first_id = dump.recorder.first_record_id();
        let mut line = Line {
            rank,
            read: true,
            first: None,
            complete: dump
                .entries
                .first()
                .is_some_and(|entry| entry.record_id <= first_id),
            newest: None,
            pending_since_ns: None,
            // Of a call that is unfinished elsewhere, a retired entry does not show whether it completed.
            retired_below: match dump.recorder == Recorder::NativeGloo {
                true => unfinished.unwrap_or(u64::MAX),
                false => 0,
            },
            entries: HashMap::new(),
        };
        let is_collective = |entry: &&Entry| {
            entry.group == index
                && !entry.is_p2p
                && !entry.op.is_p2p()
                && entry.op != OpType::Coalesced
        };
        line.first = dump
            .entries
            .iter()
            .find(is_collective)
            .map(|entry| entry.collective_seq_id);
        let mut last: Option<u64> = None;
        for entry in dump.entries.iter().rev().filter(is_collective) {
            let seq = entry.collective_seq_id;
            line.newest = line.newest.max(Some(seq));
            let last = *last.get_or_insert_with(|| unfinished.map_or(seq, |old| old.min(seq)));
            if seq + columns <= last {
                break;
            }
            if entry.state < EntryState::Completed && !entry.retired && entry.time_created_ns > 0 {
                let since = line.pending_since_ns.unwrap_or(i64::MAX);
                line.pending_since_ns = Some(since.min(entry.time_created_ns));
            }
            // Too far ahead of the oldest unfinished collective to be shown.
            if seq >= last + columns {
                continue;
            }
            let op = dump.signatures.get(entry.signature as usize).map_or(
                entry.op.name(),
                |signature| {
                    if entry.op == OpType::Other {
                        signature.op_name.as_str()
                    } else {
                        entry.op.name()
                    }
                },
            );
            line.entries.entry(seq).or_insert((entry, op));
        }
        Some(line)
    }

    fn cell(&self, seq: u64, op: &str, is_odd: bool) -> Cell {
        if !self.read {
            return Cell::NoRecord;
        }
        match self.entries.get(&seq) {
            Some((_, issued)) if is_odd || *issued != op => Cell::Mismatch,
            Some((entry, _)) => match entry.state {
                _ if entry.retired && seq < self.retired_below => Cell::Completed,
                EntryState::Scheduled => Cell::Queued,
                EntryState::Started => Cell::Started,
                EntryState::Completed => Cell::Completed,
                EntryState::Failed => Cell::Failed,
            },
            None if !self.complete && self.first.is_none_or(|first| seq < first) => Cell::Lost,
            None => Cell::NeverIssued,
        }
    }
}

/// Which of the collectives that the record of a member lacks were never issued. A record that was cut, or taken before
/// those of the others, lacks what the member issued since.
struct Absences {
    /// Each collective that a member provably did not issue.
    missing: HashSet<(Rank, u64)>,
    /// The members of which the records do not show whether they issued a collective.
    unknown: HashSet<Rank>,
    /// The collectives that have completed for some member, and cannot before every member has issued them.
    completed: HashSet<u64>,
}

impl Absences {
    fn new(report: &Report, group: &GroupRef, lines: &BTreeMap<Rank, Line<'_>>) -> Self {
        let is_of_group = |instance: &&InstanceReport| {
            instance.seq_kind == SeqKind::CollectiveSeqId && instance.group == *group
        };
        let mut absences = Self {
            missing: HashSet::new(),
            unknown: HashSet::new(),
            completed: HashSet::new(),
        };
        for instance in report.in_flight.iter().filter(is_of_group) {
            let missing = instance.missing.iter().map(|&rank| (rank, instance.seq));
            absences.missing.extend(missing);
            absences.unknown.extend(&instance.unknown);
        }
        for line in lines.values() {
            let completed = line.entries.iter().filter(|&(&seq, &(entry, op))| {
                entry.op.needs_all_members() && line.cell(seq, op, false) == Cell::Completed
            });
            absences.completed.extend(completed.map(|(&seq, _)| seq));
        }
        absences
    }

    /// Whether a member whose record lacks a collective provably did not issue it.
    fn are_known(&self, rank: Rank, seq: u64) -> bool {
        self.missing.contains(&(rank, seq))
            || !self.unknown.contains(&rank) && !self.completed.contains(&seq)
    }
}

/// The number of the collective of `group` that a report lists first: of the oldest one that is pending or, if none is,
/// of the first that has failed; `None` if there is neither.
fn oldest_unfinished(report: &Report, group: &GroupRef) -> Option<u64> {
    let of_group = |instance: &&InstanceReport| {
        instance.seq_kind == SeqKind::CollectiveSeqId && instance.group == *group
    };
    let pending = report.pending().find(of_group);
    let instance = pending.or_else(|| report.in_flight.iter().find(of_group))?;
    Some(instance.seq)
}

/// The rank and the number of each call on `group` that a finding names as not fitting the others'. If it names no rank
/// at fault, the calls of all sides.
fn odd_calls(findings: &[Finding], group: &GroupRef) -> BTreeSet<(Rank, u64)> {
    let about_calls = |finding: &&Finding| {
        use Code::{E110, E111, E112, E114};
        matches!(finding.code, E110 | E111 | E112 | E114)
            && finding.seq_kind == Some(SeqKind::CollectiveSeqId)
            && finding.group.as_ref() == Some(group)
    };
    let calls = findings.iter().filter(about_calls).flat_map(|finding| {
        let sides = match finding.culprit_ranks.is_empty() {
            true => finding.alternatives.as_slice(),
            false => std::slice::from_ref(&finding.culprit_ranks),
        };
        let ranks = sides.iter().flatten().copied();
        finding
            .seq
            .into_iter()
            .flat_map(move |seq| ranks.clone().map(move |rank| (rank, seq)))
    });
    calls.collect()
}

/// The operation that most ranks issued at `seq`; in a tie, the first by name.
fn majority<'a>(lines: &BTreeMap<Rank, Line<'a>>, seq: u64) -> &'a str {
    let mut votes: BTreeMap<&str, usize> = BTreeMap::new();
    for line in lines.values() {
        if let Some((_, op)) = line.entries.get(&seq) {
            *votes.entry(op).or_default() += 1;
        }
    }
    let mut best = ("", 0);
    for (op, count) in votes {
        if count > best.1 {
            best = (op, count);
        }
    }
    best.0
}
