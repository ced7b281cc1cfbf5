//! The timeline of ranks: marked ranks first, then root causes, late, silent, failed and waiting ranks, then the
//! others. A cursor goes from operation to operation of the selected rank, and a line describes the operation under the
//! cursor.

use super::ViewModel;
use super::rank::{group_of, op_name};
use crate::keys::Action;
use crate::page::theme::Tone;
use crate::page::{
    Body, FAILED, INSIDE, Lane, Line, PENDING, Page, Pane, Span, Timeline, plain, styled,
};
use crate::state::index::Marked;
use rcomm_analyzer::filter::Subject;
use rcomm_analyzer::format::{count, group_label};
use rcomm_analyzer::source::Liveness;
use rcomm_analyzer::{
    GroupRef, RankState, RankView, SeqKind, Snapshot, ended_ns, seq_of, status_entry,
};
use rcomm_recorder::model::text::{bytes, duration_ms, time_of_day};
use rcomm_recorder::model::{Entry, EntryState, Rank};
use rcomm_recorder::publish::Dump;

/// The least and the largest width of a range: 1 ms and 1 h.
const MIN_WIDTH_NS: i64 = 1_000_000;
const MAX_WIDTH_NS: i64 = 3_600_000_000_000;

/// The time range on display.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Width in ns.
    pub width_ns: i64,
    /// How far the range is moved back in time, in ns; at 0, the last recorded event of the shown ranks is at four
    /// fifths of the width.
    pub back_ns: i64,
    /// The time under the cursor, wall clock, ns since the epoch; `None` before the user has moved it.
    pub cursor_ns: Option<i64>,
}

impl Default for Scale {
    fn default() -> Self {
        Self {
            width_ns: 4_000_000_000,
            back_ns: 0,
            cursor_ns: None,
        }
    }
}

impl Scale {
    /// The range of all operations in these records, if it is shorter than the default one.
    pub fn of_whole(snapshot: &Snapshot) -> Self {
        let usual = Self::default();
        let entries = snapshot.dumps().flat_map(|(_, dump)| &dump.entries);
        let issued = entries.map(|entry| entry.time_created_ns);
        let first = issued.filter(|&ns| ns > 0).min();
        let last = snapshot.ranks.iter().filter_map(last_event).max();
        let span_ns = last.zip(first).map(|(last, first)| last - first);
        // A fifth of the range is behind the last event.
        let width_ns = span_ns.map_or(usual.width_ns, |ns| ns.saturating_mul(5) / 4);
        Self {
            width_ns: width_ns.clamp(MIN_WIDTH_NS, usual.width_ns),
            ..usual
        }
    }

    /// Multiplies the width by `factor`; it stays between 1 ms and 1 h. `to_ns` is the end of the range, if it is
    /// known: the time under the cursor then stays in its place, unless the range would end later than where `back_ns`
    /// is 0.
    pub fn zoom(&mut self, factor: f64, to_ns: Option<i64>) {
        let before = self.width_ns;
        let width = (before as f64 * factor) as i64;
        self.width_ns = width.clamp(MIN_WIDTH_NS, MAX_WIDTH_NS);
        if let (Some(cursor_ns), Some(to_ns)) = (self.cursor_ns, to_ns) {
            let newest_ns = to_ns + self.back_ns - before / 5;
            let share = (to_ns - cursor_ns) as f64 / before as f64;
            let wanted_ns = cursor_ns + (share * self.width_ns as f64) as i64;
            self.back_ns = (newest_ns + self.width_ns / 5 - wanted_ns).max(0);
        }
    }

    /// Moves the range by quarters of its width, earlier (+) or later (-), but not later than where `back_ns` is 0.
    pub fn pan(&mut self, quarters: i64) {
        let back = self.back_ns + quarters * self.width_ns / 4;
        self.back_ns = back.max(0);
    }

    /// Puts the cursor at this time and, if it is outside a range that ends at `to_ns`, moves the range to it.
    pub fn show(&mut self, at_ns: i64, to_ns: i64) {
        self.cursor_ns = Some(at_ns);
        if at_ns < to_ns - self.width_ns || at_ns > to_ns {
            let later = at_ns + self.width_ns / 2 - to_ns;
            self.back_ns = (self.back_ns - later).max(0);
        }
    }
}

/// Maximum number of lanes: rows of the timeline, one per rank.
const MAX_LANES: usize = 256;

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let ranks = &model.snapshot.ranks;
    let shown = shown(model);
    let kinds = kinds(model);
    let mut legend = Line::new();
    for (index, kind) in kinds.iter().enumerate().take(TONES.len()) {
        legend.push(styled(INSIDE.to_string(), TONES[index]));
        legend.push(plain(format!(" {kind}  ")));
    }
    if kinds.len() > TONES.len() {
        legend.push(plain("and others  "));
    }
    legend.push(plain(PENDING.to_string()));
    legend.push(plain(" pending"));
    let body = lanes(model, &shown, &kinds, MAX_LANES);
    if let Body::Timeline(timeline) = &body
        && timeline
            .lanes
            .iter()
            .any(|lane| lane.spans.iter().any(|span| span.failed))
    {
        legend.push(plain("  "));
        legend.push(styled(FAILED.to_string(), Tone::Late));
        legend.push(plain(" failed"));
    }
    let keys = [
        (
            Action::PreviousOperation,
            Action::NextOperation,
            "operation",
        ),
        (Action::Left, Action::Right, "time"),
        (Action::ZoomIn, Action::ZoomOut, "zoom"),
    ];
    let keys = keys.map(|(back, on, does)| model.hint(" ", &[back, on], does));
    legend.push(plain(format!(" {}", keys.concat())));
    let mut head = vec![legend];
    let selected = shown.get(model.row).or(shown.first());
    head.extend(selected.map(|&index| readout(model, &ranks[index])));
    let hidden = shown.len().saturating_sub(MAX_LANES);
    if hidden > 0 {
        head.push(vec![plain(format!(
            "{} not shown: a filter chooses ranks, and marked ones come first",
            count(hidden as u64, "rank")
        ))]);
    }
    Page {
        head,
        panes: vec![Pane {
            title: "timeline".into(),
            body,
        }],
        ..Page::default()
    }
}

/// The timeline of the first `max_lanes` ranks, for a pane of another screen.
pub(super) fn of_first(model: &ViewModel<'_>, max_lanes: usize) -> Body {
    lanes(model, &shown(model), &kinds(model), max_lanes)
}

/// Indices of the ranks to show, those that are marked or in trouble first.
fn shown(model: &ViewModel<'_>) -> Vec<usize> {
    let ranks = &model.snapshot.ranks;
    let mut shown: Vec<(u8, usize)> = (0..ranks.len())
        .filter(|&index| {
            let state = model.index.states[index];
            let rank = ranks[index].rank;
            let subject = Subject {
                state: Some(model.index.filter_words(model.snapshot, rank)),
                ..Subject::default()
            };
            (!model.problems_only || state.is_problem()) && model.passes_rank(rank, &subject)
        })
        .map(|index| {
            let place = match model.index.states[index] {
                _ if model.marks.contains(&ranks[index].rank) => 0,
                RankState::Root => 1,
                RankState::Late => 2,
                RankState::Silent | RankState::Unread => 3,
                RankState::Failed => 4,
                RankState::Waits => 5,
                RankState::Ok => 6,
            };
            (place, index)
        })
        .collect();
    shown.sort_unstable();
    shown.into_iter().map(|(_, index)| index).collect()
}

/// The timeline of the first `max_lanes` of the shown ranks.
fn lanes(model: &ViewModel<'_>, shown: &[usize], kinds: &[String], max_lanes: usize) -> Body {
    let ranks = &model.snapshot.ranks;
    let shown = &shown[..shown.len().min(max_lanes)];
    let last = shown
        .iter()
        .filter_map(|&index| last_event(&ranks[index]))
        .max()
        .unwrap_or(model.snapshot.at.wall_ns);
    // Include a little time after the last event, where the absence of events is visible.
    let to_ns = last + model.scale.width_ns / 5 - model.scale.back_ns;
    let from_ns = to_ns - model.scale.width_ns;
    Body::Timeline(Timeline {
        from_ns,
        to_ns,
        lanes: (shown.iter())
            .map(|&index| lane(model, index, (from_ns, to_ns), kinds))
            .collect(),
        cursor_ns: model.scale.cursor_ns,
    })
}

/// The time of the last event in the records of a rank: an operation may end after later ones.
fn last_event(view: &RankView) -> Option<i64> {
    let times = view.dumps.iter().flat_map(|dump| {
        let entries = dump.entries.iter();
        entries.map(move |entry| ended_ns(dump, entry).max(entry.time_created_ns))
    });
    times.max()
}

/// Tones of the kinds of groups; further kinds have the last tone.
const TONES: [Tone; 3] = [Tone::Good, Tone::Accent, Tone::Title];

/// A group's kind: its label without the number at the end, so that `dp_0` to `dp_7` are of one kind.
fn kind(label: &str) -> &str {
    let stem = label.trim_end_matches(|c: char| c.is_ascii_digit() || "_/-".contains(c));
    if stem.is_empty() { label } else { stem }
}

/// The kinds of all groups that have operations, in the order of the report.
fn kinds(model: &ViewModel<'_>) -> Vec<String> {
    let mut kinds: Vec<String> = Vec::new();
    let groups = model.snapshot.report.groups.iter();
    for group in groups.filter(|group| !group.backend.is_empty()) {
        let label = group_label(&group.group);
        let kind = kind(&label);
        if !kinds.iter().any(|known| known == kind) {
            kinds.push(kind.to_owned());
        }
    }
    kinds
}

/// The operations of a rank, with their dumps, by time of issue.
fn operations(view: &RankView) -> Vec<(&Dump, &Entry)> {
    let dumps = view.dumps.iter().map(AsRef::as_ref);
    let mut all: Vec<(&Dump, &Entry)> = dumps
        .flat_map(|dump: &Dump| dump.entries.iter().map(move |entry| (dump, entry)))
        .filter(|(_, entry)| entry.time_created_ns > 0)
        .collect();
    all.sort_by_key(|(_, entry)| entry.time_created_ns);
    all
}

/// The time of issue of the last operation that the rank issued before this time or, if `forward`, of the first after
/// it; `None` if there is none. Without a time, the time of issue of the rank's newest operation.
pub(in crate::state) fn neighbor(
    snapshot: &Snapshot,
    rank: Rank,
    at_ns: Option<i64>,
    forward: bool,
) -> Option<i64> {
    let operations = operations(snapshot.rank(rank)?);
    let mut times = operations.iter().map(|(_, entry)| entry.time_created_ns);
    match at_ns {
        None => times.next_back(),
        Some(at_ns) if forward => times.find(|time| *time > at_ns),
        Some(at_ns) => times.rfind(|time| *time < at_ns),
    }
}

/// Describes the operation that the rank issued last up to the cursor; without a cursor, the newest one.
fn readout(model: &ViewModel<'_>, view: &RankView) -> Line {
    let operations = operations(view);
    let at_ns = model.scale.cursor_ns.unwrap_or(i64::MAX);
    let issued_until = operations.partition_point(|(_, entry)| entry.time_created_ns <= at_ns);
    let mut line = vec![styled(format!("rank {}: ", view.rank), Tone::Title)];
    let Some((dump, entry)) = issued_until.checked_sub(1).map(|index| operations[index]) else {
        line.push(plain(match model.scale.cursor_ns {
            Some(_) => "no operation is recorded up to the cursor",
            None => "no operation is recorded",
        }));
        return line;
    };
    let group = group_of(dump, entry);
    let on_group = (group.as_ref()).map_or_else(String::new, |group| {
        format!(" on {}", model.labels([group]))
    });
    let mut text = format!("{} #{}{on_group}", op_name(dump, entry), seq_of(entry));
    let signature = dump.signatures.get(entry.signature as usize);
    let size = signature.map_or(0, |signature| signature.input_bytes());
    if size > 0 {
        text.push_str(&format!(", {}", bytes(size)));
    }
    let status = status_entry(dump, entry);
    let (fate, tone) = match (status.state, end_of(dump, entry)) {
        (EntryState::Failed, _) => ("failed".to_owned(), Tone::Bad),
        (_, Some(_)) if ended_ns(dump, entry) == 0 => (
            "ended at a time that is not recorded".to_owned(),
            Tone::Plain,
        ),
        (_, Some(end_ns)) => {
            let ms = (end_ns - entry.time_created_ns) as f64 / 1e6;
            (format!("ended after {}", duration_ms(ms)), Tone::Plain)
        }
        // Nothing is pending in a process that is gone.
        (_, None) if view.liveness == Liveness::Dead => {
            ("not ended: its process is gone".to_owned(), Tone::Bad)
        }
        (_, None) => {
            let now_ms = |now: i64| (now - entry.time_created_ns) as f64 / 1e6;
            let age = group.and_then(|group| overdue_age(model, &group, entry));
            let age = age.or_else(|| model.as_of_ns.map(now_ms));
            let age = age.map(|ms| format!("pending for {}", duration_ms(ms)));
            (age.unwrap_or_else(|| "pending".to_owned()), Tone::Waiting)
        }
    };
    line.push(plain(format!("{text}, ")));
    line.push(styled(fate, tone));
    let issued = time_of_day(entry.time_created_ns);
    let ms = entry
        .time_created_ns
        .div_euclid(1_000_000)
        .rem_euclid(1_000);
    let mut rest = format!(", issued {issued}.{ms:03} UTC");
    if let Some(frame) = super::rank::own_frame(dump, entry) {
        rest.push_str(&format!(" at {}:{}", frame.filename, frame.line));
    }
    line.push(plain(rest));
    line
}

/// The age of a pending operation of this group as of now, ms; `None` if it is not overdue, or the age is unknown.
pub(super) fn overdue_age(model: &ViewModel<'_>, group: &GroupRef, entry: &Entry) -> Option<f64> {
    let ms = |now: i64| (now - entry.time_created_ns) as f64 / 1e6;
    let is_overdue = is_overdue(model, group, entry);
    model.age(model.as_of_ns.map(ms)).filter(|_| is_overdue)
}

/// The counter and the number of an operation.
fn number_of(entry: &Entry) -> (SeqKind, u64) {
    let kind = match entry.is_p2p || entry.op.is_p2p() {
        true => SeqKind::P2pSeqId,
        false => SeqKind::CollectiveSeqId,
    };
    (kind, seq_of(entry))
}

/// Whether an operation of this group is pending, and overdue.
fn is_overdue(model: &ViewModel<'_>, group: &GroupRef, entry: &Entry) -> bool {
    model.snapshot.report.pending().any(|instance| {
        instance.overdue
            && (instance.seq_kind, instance.seq) == number_of(entry)
            && instance.group == *group
    })
}

/// When the end of an operation was noticed, ns since the epoch: the time of its issue if the record has none for the
/// end. `None` while it is pending.
pub(super) fn end_of(dump: &Dump, entry: &Entry) -> Option<i64> {
    let status = status_entry(dump, entry);
    let pending = status.state < EntryState::Completed && !status.retired;
    (!pending).then(|| ended_ns(dump, entry).max(entry.time_created_ns))
}

/// When the record was taken, ns since the epoch, if it is not continued: in a replay, or if its process is gone.
/// `None` if it may be continued, or does not note when it was taken.
fn end_of_record(model: &ViewModel<'_>, view: &RankView, dump: &Dump) -> Option<i64> {
    let is_over = model.is_replay || view.liveness == Liveness::Dead;
    Some(dump.identity.dump_time_ns).filter(|&taken_ns| is_over && taken_ns > 0)
}

/// The lane of the rank at this index, with the operations between two times.
fn lane(
    model: &ViewModel<'_>,
    index: usize,
    (from_ns, to_ns): (i64, i64),
    kinds: &[String],
) -> Lane {
    let view = &model.snapshot.ranks[index];
    let state = model.index.states[index];
    let marked = model.marks.contains(&view.rank);
    let mut operations = operations(view);
    // What the rank waits in is drawn over what is queued behind it.
    let waits = model.snapshot.report.waits.iter();
    let waits: Vec<_> = waits.filter(|wait| wait.rank == view.rank).collect();
    operations.sort_by_key(|&(dump, entry)| {
        end_of(dump, entry).is_none()
            && waits.iter().any(|wait| {
                (wait.seq_kind, wait.seq) == number_of(entry)
                    && group_of(dump, entry).as_ref() == Some(&wait.group)
            })
    });
    let spans = (operations.into_iter())
        .filter(|(_, entry)| entry.time_created_ns < to_ns)
        .filter_map(|(dump, entry)| {
            let end = end_of(dump, entry);
            let pending = end.is_none();
            let end = end.or_else(|| end_of_record(model, view, dump));
            let visible = end.is_none_or(|end| end >= from_ns);
            visible.then(|| {
                let group = group_of(dump, entry);
                let label = group.as_ref().map_or_else(String::new, group_label);
                let kind = kinds.iter().position(|known| known == kind(&label));
                // A bar that reaches to the edge does not show for how long the rank waits.
                let age_ms = (group.as_ref().filter(|_| end.is_none()))
                    .and_then(|group| overdue_age(model, group, entry));
                let label = group.map_or(label, |group| model.labels([&group]));
                Span {
                    from_ns: entry.time_created_ns,
                    to_ns: end,
                    pending,
                    failed: status_entry(dump, entry).state == EntryState::Failed,
                    op: op_name(dump, entry).to_owned(),
                    call: format!("#{} {label}", seq_of(entry)),
                    age: age_ms.map(duration_ms),
                    tone: TONES[kind.unwrap_or(0).min(TONES.len() - 1)],
                }
            })
        })
        .collect();
    let glyph = match state {
        RankState::Ok if marked => '*',
        RankState::Ok => ' ',
        other => other.mark().glyph,
    };
    Lane {
        rank: view.rank,
        label: format!("{glyph} r{}", view.rank),
        tone: if !state.is_problem() {
            Tone::Plain
        } else {
            state.mark().tone
        },
        spans,
    }
}
