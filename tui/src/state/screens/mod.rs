//! Builds the page of each screen from a snapshot: one file per screen, `charts` for the trends of the first one, and
//! `look_further` for a pane that several screens have.

mod charts;
mod compare;
mod finding;
mod groups;
mod help;
mod in_flight;
mod jobs;
mod look_further;
mod matrix;
mod overview;
mod rank;
mod ranks;
mod reducer;
mod sources;
mod stacks;
mod stragglers;
mod timeline;
mod warnings;
mod why;

pub(super) use charts::{fill, has_trends};
pub(super) use jobs::trouble_elsewhere;
pub(super) use look_further::command as command_for;
pub use overview::OverviewPane;
pub(super) use overview::{first_rank, has_two_columns, page_of};
pub use ranks::Metric;
pub(super) use sources::no_ranks_page;
pub use timeline::Scale;
pub(super) use timeline::neighbor;

use super::arrangement::arranged;
use super::index::FrameIndex;
use super::screen::Screen;
use super::trends::Trends;
use crate::keys::{Action, Keymap};
use crate::page::columns::widths;
use crate::page::width::text_width;
use crate::page::{Page, Pane};
use rcomm_analyzer::filter::{Filter, Subject};
use rcomm_analyzer::format::rank_set;
use rcomm_analyzer::source::{ProcessFacts, TakenStacks};
use rcomm_analyzer::{
    Code, Finding, GroupRef, GroupReport, InstanceReport, Moment, NodeJob, Snapshot,
};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Whether similar groups, operations or ranks share a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fold {
    /// Similar ones share a row.
    #[default]
    Alike,
    /// Each has a row of its own.
    Nothing,
}

/// The inputs of a page: a snapshot with the current filter and fold settings.
pub struct ViewModel<'a> {
    /// The displayed snapshot.
    pub snapshot: &'a Snapshot,
    /// The index of the snapshot.
    pub index: &'a FrameIndex,
    /// The filter.
    pub filter: &'a Filter,
    /// Whether only rows with a problem are shown.
    pub problems_only: bool,
    /// Muted codes.
    pub muted: &'a BTreeSet<Code>,
    /// Ranks that the user marked.
    pub marks: &'a BTreeSet<Rank>,
    /// Time since the snapshot, ms, added to the ages of overdue operations; 0 while the display is paused, in a
    /// replay, and once the job has ended.
    pub later_ms: f64,
    /// When the records were taken, ns since the epoch; `None` if they do not note it.
    pub as_of_ns: Option<i64>,
    /// Whether similar groups, operations or ranks share a row.
    pub fold: Fold,
    /// Metric of the heat map.
    pub metric: Metric,
    /// The time range of the timeline.
    pub scale: Scale,
    /// The selected row of the first pane.
    pub row: usize,
    /// Columns and rows of the terminal.
    pub size: (u16, u16),
    /// The key bindings.
    pub keymap: &'a Keymap,
    /// Panes of the first screen; if empty, the default ones.
    pub layout: &'a [OverviewPane],
    /// The call stacks taken last, and when they were taken.
    pub stacks: Option<&'a (Arc<TakenStacks>, Moment)>,
    /// Facts about the processes, hosts and GPUs of the suspects and of the rank on display, as read last; empty during
    /// a pause. See [`State::process_facts`](crate::state::State::process_facts).
    pub process_facts: &'a [ProcessFacts],
    /// Whether dumps are replayed. The processes that wrote them are likely to have ended.
    pub is_replay: bool,
    /// Whether the rings of this node are read, and therefore facts about its processes too.
    pub reads_this_node: bool,
    /// The jobs of this node, those in trouble first.
    pub jobs: &'a [NodeJob],
    /// Figures of the job over time.
    pub trends: &'a Trends,
    /// The current time, wall clock, ns since the epoch.
    pub wall_ns: i64,
    /// When the fault of a simulated job begins, wall clock, ns since the epoch; `None` if there is none.
    pub fault_ns: Option<i64>,
}

/// `rank 3`, `ranks 0-63,70`: at most `max_spans` spans, then the number of ranks left.
fn name_ranks(ranks: &[Rank], max_spans: usize) -> String {
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", rank_set(ranks, max_spans))
}

impl ViewModel<'_> {
    /// The pane with the whole text of the warning, job, operation, cause or source in this row of the page, which the
    /// table may cut; `None` on other screens.
    pub(super) fn selected(&self, screen: &Screen, page: &Page, row: usize) -> Option<Pane> {
        match screen {
            Screen::Warnings => warnings::selected(self, page, row),
            Screen::Jobs => jobs::selected(self, page, row),
            Screen::InFlight => in_flight::selected(self, page, row),
            Screen::Why(_) => why::selected(self, page, row),
            Screen::Sources => sources::selected(self, page, row),
            _ => None,
        }
    }

    /// The page of `screen`.
    pub fn page(&self, screen: &Screen) -> Page {
        match screen {
            Screen::Overview => arranged(self, None, false).1,
            Screen::Groups => groups::page(self, None),
            Screen::GroupsOf(some) => groups::page(self, Some(some)),
            Screen::Group(group) => matrix::page(self, group),
            Screen::Ranks => ranks::page(self),
            Screen::RanksOf(some) => ranks::page_of(self, some),
            Screen::Rank(rank) => rank::page(self, *rank),
            Screen::InFlight => in_flight::page(self),
            Screen::Stragglers => stragglers::page(self),
            Screen::Warnings => warnings::page(self),
            Screen::Finding(id) => finding::page(self, *id),
            Screen::Explained(code) => finding::explained(*code, self.size.0),
            Screen::Timeline => timeline::page(self),
            Screen::Why(target) => why::page(self, target.as_ref()),
            Screen::Stacks => stacks::page(self),
            Screen::Compare => compare::page(self),
            Screen::Sources => sources::page(self),
            Screen::Jobs => jobs::page(self),
            Screen::Reducer => reducer::page(self),
            Screen::Help => help::page(self.keymap),
        }
    }

    /// Text shown instead of a table that has no rows.
    fn none_left(&self, noun: &str) -> String {
        match (self.filter.is_empty(), self.problems_only) {
            (true, true) => {
                let all = self.hint("; ", &[Action::Problems], "shows all");
                format!("no {noun} with a problem{all}")
            }
            (true, false) => format!("no {noun}"),
            (false, true) => format!("no {noun} with a problem passes the filter"),
            (false, false) => format!("no {noun} passes the filter"),
        }
    }

    /// Keys and what they do, after a separator: `; [z] shows all`. Empty if one of the actions has no key.
    fn hint(&self, separator: &str, actions: &[Action], does: &str) -> String {
        let hint = self.keymap.hint(actions, does);
        hint.map_or_else(String::new, |hint| format!("{separator}{hint}"))
    }

    fn passes(&self, subject: &Subject<'_>) -> bool {
        self.filter.matches(subject)
    }

    /// Whether a group, its ranks or their hosts pass the filter.
    fn passes_group(&self, group: &GroupRef, more: &Subject<'_>) -> bool {
        if self.filter.is_empty() {
            return true;
        }
        let host_of = |rank| self.host(rank);
        self.passes(&Subject {
            ranks: &group.ranks,
            group: Some(group),
            host_of: Some(&host_of),
            ..*more
        })
    }

    /// Whether a rank passes the filter.
    fn passes_rank(&self, rank: Rank, more: &Subject<'_>) -> bool {
        if self.filter.is_empty() {
            return true;
        }
        let host_of = |rank| self.host(rank);
        self.passes(&Subject {
            ranks: &[rank],
            host_of: Some(&host_of),
            ..*more
        })
    }

    fn host(&self, rank: Rank) -> &str {
        self.snapshot.rank(rank).map_or("", |view| &view.host)
    }

    /// A rank with its host and local rank, if the host is known: `rank 517 (n064/5)`.
    fn rank_label(&self, rank: Rank) -> String {
        match self.snapshot.rank(rank) {
            Some(view) if !view.host.is_empty() => {
                format!("rank {rank} ({}/{})", view.host, view.local_rank)
            }
            _ => format!("rank {rank}"),
        }
    }

    /// The sentence of a finding, with the ages as of now.
    fn sentence(&self, finding: &Finding) -> String {
        finding.sentence_after(self.later_ms).into_owned()
    }

    /// The name of a group, or that of several together.
    fn labels<'a>(&self, groups: impl IntoIterator<Item = &'a GroupRef>) -> String {
        self.index.names().fold(groups)
    }

    /// Converts an age (ms) at the time of the snapshot to the current age. `None` if the age is unknown, or if the
    /// records do not note when they were taken: the given age then ends at the newest operation.
    fn age(&self, ms: Option<f64>) -> Option<f64> {
        self.as_of_ns.and(ms).map(|ms| ms + self.later_ms)
    }

    /// The age of an operation that was pending in the snapshot: as of now if it was overdue, else at the time of the
    /// snapshot. Of the latter, most have ended since.
    fn age_of(&self, instance: &InstanceReport) -> Option<f64> {
        self.age_if(instance.overdue, instance.age_ms)
    }

    /// The age of a group's oldest collective; see [`Self::age_of`].
    fn age_in(&self, report: &GroupReport) -> Option<f64> {
        self.age_if(self.index.is_overdue(&report.group), report.oldest_ms)
    }

    /// An age as of now if it `grows`, else at the time of the snapshot.
    fn age_if(&self, grows: bool, ms: Option<f64>) -> Option<f64> {
        match grows {
            true => self.age(ms),
            false => self.as_of_ns.and(ms),
        }
    }
}

/// The text in this column of a row of the page's first table, or of its last row if there are fewer, if the table cuts
/// it; else `None`.
fn cut_cell<'a>(
    model: &ViewModel<'_>,
    page: &'a Page,
    row: usize,
    column: usize,
) -> Option<&'a str> {
    let table = page.table(0)?;
    let row = table.rows.get(row.min(table.rows.len().checked_sub(1)?))?;
    let text = &row.cells.get(column)?.text;
    let width = usize::from(model.size.0);
    let room = *widths(table, 0..table.rows.len(), width).get(column)?;
    (text_width(text) > room).then_some(text)
}

/// The target that opens these groups.
fn group_target(groups: &[&GroupRef]) -> crate::page::table::Target {
    match groups {
        [one] => crate::page::table::Target::Group(Arc::new((*one).clone())),
        many => crate::page::table::Target::Groups(
            many.iter().map(|g| Arc::new((*g).clone())).collect(),
        ),
    }
}
