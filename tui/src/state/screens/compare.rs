//! Marked ranks side by side: the state of each in the newest collectives of any of them.

use super::ViewModel;
use super::rank::{group_of, op_name};
use crate::keys::Action;
use crate::page::table::{Align, Cell, Column, Headings, Mark, Row, Table, number, rest};
use crate::page::theme::Tone;
use crate::page::{Page, plain, styled};
use rcomm_analyzer::GroupRef;
use rcomm_recorder::model::{EntryState, Rank};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

/// Maximum number of ranks to compare.
const MAX_RANKS: usize = 8;
/// Number of newest operations of each rank that are searched for collectives.
const SEARCHED: usize = 40;

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let ranks: Vec<Rank> = model.marks.iter().copied().take(MAX_RANKS).collect();
    if ranks.len() < 2 {
        let key = model.hint(": ", &[Action::Mark], "on a row or a rank's own screen");
        let hint = format!("mark at least two ranks{key}");
        return Page {
            head: vec![vec![styled(hint, Tone::Silent)]],
            ..Page::default()
        };
    }
    // (group, sequence number) → when the collective was first issued (ns), and the operation and state of each rank.
    type States = HashMap<Rank, (String, EntryState)>;
    let mut operations: BTreeMap<(GroupRef, u64), (i64, States)> = BTreeMap::new();
    for &rank in &ranks {
        let Some(dump) = model.snapshot.rank(rank).and_then(|view| view.first_dump()) else {
            continue;
        };
        for entry in dump
            .entries
            .iter()
            .rev()
            .take(SEARCHED)
            .filter(|e| !e.is_p2p && !e.op.is_p2p())
        {
            let Some(group) = group_of(dump, entry) else {
                continue;
            };
            let (first_ns, states) = operations
                .entry((group, entry.collective_seq_id))
                .or_insert((entry.time_created_ns, HashMap::new()));
            *first_ns = (*first_ns).min(entry.time_created_ns);
            states.insert(rank, (op_name(dump, entry).to_owned(), entry.state));
        }
    }
    let mut ordered: Vec<_> = operations.into_iter().collect();
    ordered.sort_by_key(|(_, (first_ns, _))| std::cmp::Reverse(*first_ns));
    let rows = ordered.iter().map(|((group, seq), (_, states))| {
        let mut ops: Vec<&str> = states.values().map(|(op, _)| op.as_str()).collect();
        ops.sort_unstable();
        ops.dedup();
        let mut is_problem = ops.len() > 1;
        let mut cells = vec![
            Cell::text(model.labels([group])),
            Cell::number(seq.to_string(), *seq as f64),
        ];
        for rank in &ranks {
            let is_member = group.ranks.is_empty() || group.ranks.contains(rank);
            cells.push(match states.get(rank) {
                Some((_, EntryState::Completed)) => Cell::text("C").toned(Tone::Good),
                Some((_, EntryState::Started)) => Cell::text("S").toned(Tone::Waiting),
                Some((_, EntryState::Scheduled)) => Cell::text("Q").toned(Tone::Waiting),
                Some((_, EntryState::Failed)) => Cell::text("F").toned(Tone::Bad),
                None if !is_member => Cell::text(""),
                None => {
                    is_problem = true;
                    Cell::text("-").toned(Tone::Bad)
                }
            });
        }
        cells.push(Cell::text(ops.join(" / ")));
        Row {
            mark: if is_problem {
                Mark::new('!', Tone::Bad)
            } else {
                Mark::NONE
            },
            cells,
            tone: Tone::Plain,
            target: Some(super::group_target(&[group])),
            problem: is_problem,
        }
    });
    let mut columns = vec![rest("group", 0), number("seq", 0)];
    columns.extend(ranks.iter().map(|rank| Column {
        name: Cow::Owned(format!("r{rank}")),
        align: Align::Right,
        drop_order: 0,
        grows: false,
    }));
    columns.push(rest("op", 0));
    let table = Table {
        columns,
        rows: rows
            .filter(|row| row.problem || !model.problems_only)
            .collect(),
        headings: Headings::Shown,
        empty: format!(
            "no collective, or none with a problem, among the newest {SEARCHED} operations of each"
        ),
    };
    let mut head = vec![vec![plain(format!(
        "newest first; empty: not a member; -: not among its newest {SEARCHED} operations"
    ))]];
    if model.marks.len() > MAX_RANKS {
        let marked = model.marks.len();
        head.push(vec![plain(format!(
            "only the first {MAX_RANKS} of the {marked} marked ranks are compared"
        ))]);
    }
    Page::of(head, "marked ranks", table)
}
