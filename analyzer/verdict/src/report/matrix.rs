//! One group's rank × sequence matrix: what each member did with each of the newest collectives.

use crate::report::GroupRef;
use rcomm_recorder::model::{Entry, EntryState, OpType, Rank};
use rcomm_recorder::publish::Dump;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// What one rank did with one collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cell {
    /// Issued, not seen to start.
    Queued,
    /// Seen to have started, not completed.
    Started,
    /// Completed.
    Completed,
    /// Ended with an error or a time-out.
    Failed,
    /// The record reaches this far, and the rank did not issue it.
    NeverIssued,
    /// Issued as something else than most members issued.
    Mismatch,
    /// Older than the rank's record: it may have happened.
    Lost,
    /// There is no record of this rank.
    NoRecord,
}

impl Cell {
    /// Every cell, with its letter and its meaning.
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

    /// Its letter.
    pub fn letter(self) -> char {
        Self::LEGEND
            .iter()
            .find(|(cell, ..)| *cell == self)
            .map_or('?', |&(_, letter, _)| letter)
    }
}

/// Members that did the same, in one row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Global ranks, ascending.
    pub ranks: Vec<Rank>,
    /// One cell per sequence number of the matrix.
    pub cells: Vec<Cell>,
    /// When the oldest pending collective of these ranks was issued, ns since the epoch.
    pub pending_since_ns: Option<i64>,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Matrix {
    /// Sequence numbers, ascending: one column each.
    pub seqs: Vec<u64>,
    /// What most members issued at each, in the order of `seqs`; empty if none did.
    pub ops: Vec<String>,
    /// Rows in order of their first rank.
    pub rows: Vec<Row>,
}

/// Whether equal rows are shown as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// One row per rank.
    Each,
    /// One row per distinct sequence of cells.
    Folded,
}

/// One rank's line before folding.
struct Line<'a> {
    rank: Rank,
    read: bool,
    /// Newest first number in the record of this group; older ones are lost.
    first: Option<u64>,
    /// The record begins with the rank's first operation: nothing was lost.
    complete: bool,
    entries: HashMap<u64, (&'a Entry, &'a str)>,
}

/// The last `columns` collectives of `group`, over the members whose dumps are given.
///
/// `dumps` are (rank, record) in any order; ranks outside of the group are ignored.
pub fn matrix<'a>(
    dumps: impl IntoIterator<Item = (Rank, &'a Dump)>,
    group: &GroupRef,
    columns: usize,
    rows: Rows,
) -> Matrix {
    let mut lines: BTreeMap<Rank, Line<'_>> = group
        .ranks
        .iter()
        .map(|&rank| (rank, Line::missing(rank)))
        .collect();
    let mut newest = 0;
    for (rank, dump) in dumps {
        if !group.ranks.is_empty() && !lines.contains_key(&rank) {
            continue;
        }
        if let Some(line) = Line::read(rank, dump, group, columns as u64) {
            newest = newest.max(line.entries.keys().copied().max().unwrap_or(0));
            // Of several recorders of one process the one that covers most of the group is shown.
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
    let start = oldest.max((newest + 1).saturating_sub(columns as u64));
    let seqs: Vec<u64> = (start..=newest).collect();
    let ops: Vec<&str> = seqs.iter().map(|seq| majority(&lines, *seq)).collect();
    let mut out: Vec<Row> = Vec::new();
    let mut place: HashMap<Vec<Cell>, usize> = HashMap::new();
    for line in lines.values() {
        let cells: Vec<Cell> = seqs
            .iter()
            .zip(&ops)
            .map(|(&seq, op)| line.cell(seq, op))
            .collect();
        let since = line.pending_since();
        let at = match rows {
            Rows::Folded => *place.entry(cells.clone()).or_insert(out.len()),
            Rows::Each => out.len(),
        };
        match out.get_mut(at) {
            Some(row) => {
                row.ranks.push(line.rank);
                row.pending_since_ns = match (row.pending_since_ns, since) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
            }
            None => out.push(Row {
                ranks: vec![line.rank],
                cells,
                pending_since_ns: since,
            }),
        }
    }
    Matrix {
        seqs,
        ops: ops.into_iter().map(str::to_owned).collect(),
        rows: out,
    }
}

impl<'a> Line<'a> {
    fn missing(rank: Rank) -> Self {
        Self {
            rank,
            read: false,
            first: None,
            complete: false,
            entries: HashMap::new(),
        }
    }

    /// `None` if the dump does not know the group.
    fn read(rank: Rank, dump: &'a Dump, group: &GroupRef, columns: u64) -> Option<Self> {
        let index = dump.groups.iter().position(|known| {
            known.info.name == group.name
                && (known.info.ranks.is_empty()
                    || group.ranks.is_empty()
                    || known.info.ranks == group.ranks)
        })?;
        let index = u32::try_from(index).ok()?;
        // Ours number from 1, PyTorch's recorders from 0.
        let first_id = dump.recorder.first_record_id();
        let mut line = Line {
            rank,
            read: true,
            first: None,
            complete: dump
                .entries
                .first()
                .is_some_and(|e| e.record_id <= first_id),
            entries: HashMap::new(),
        };
        let collective = |e: &&Entry| {
            e.group == index && !e.is_p2p && !e.op.is_p2p() && e.op != OpType::Coalesced
        };
        line.first = dump
            .entries
            .iter()
            .find(collective)
            .map(|e| e.collective_seq_id);
        let mut newest: Option<u64> = None;
        for entry in dump.entries.iter().rev().filter(collective) {
            let newest = *newest.get_or_insert(entry.collective_seq_id);
            if entry.collective_seq_id + columns <= newest {
                break;
            }
            let op = dump
                .signatures
                .get(entry.signature as usize)
                .map_or(entry.op.name(), |s| {
                    if entry.op == OpType::Other {
                        s.op_name.as_str()
                    } else {
                        entry.op.name()
                    }
                });
            line.entries
                .entry(entry.collective_seq_id)
                .or_insert((entry, op));
        }
        Some(line)
    }

    fn cell(&self, seq: u64, op: &str) -> Cell {
        if !self.read {
            return Cell::NoRecord;
        }
        match self.entries.get(&seq) {
            Some((_, own)) if *own != op => Cell::Mismatch,
            Some((entry, _)) => match entry.state {
                EntryState::Scheduled => Cell::Queued,
                EntryState::Started => Cell::Started,
                EntryState::Completed => Cell::Completed,
                EntryState::Failed => Cell::Failed,
            },
            None if !self.complete && self.first.is_none_or(|first| seq < first) => Cell::Lost,
            None => Cell::NeverIssued,
        }
    }

    fn pending_since(&self) -> Option<i64> {
        self.entries
            .values()
            .filter(|(e, _)| e.state < EntryState::Completed && !e.retired)
            .map(|(e, _)| e.time_created_ns)
            .filter(|&ns| ns > 0)
            .min()
    }
}

/// The operation that most ranks issued at `seq`; the first by name where as many issued another.
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
