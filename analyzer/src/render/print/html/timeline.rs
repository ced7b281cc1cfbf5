//! Draws the last operations of the chosen ranks over time, as SVG.
//!
//! The time axis ends soon after the last operation was issued: from then on, ranks only wait, and showing the wait to
//! scale would leave no space for its cause. Pending operations extend to the right edge; in a process that is gone,
//! nothing is pending: what it never ended extends to the end of its record.

use super::Text;
use super::shown::ShownRecords;
use rcomm_recorder::model::{Entry, EntryState};
use rcomm_recorder::publish::{Dump, RingReader};
use rcomm_verdict::format::{GroupNames, count, duration_ms, group_label};
use rcomm_verdict::{GroupRef, seq_of, status_entry};
use std::collections::BTreeSet;
use std::io::{self, Write};

const LABEL_WIDTH: f64 = 76.0;
const WIDTH: f64 = 960.0;
const ROW_HEIGHT: f64 = 22.0;
/// The space to the right of the last issue, as a share of the time span that is shown.
const TAIL: f64 = 0.12;
/// The time span is chosen to show this many completed operations of the median rank.
const SHOWN_OPERATIONS: usize = 24;
/// At most this many operations of a rank are drawn.
const MAX_DRAWN: usize = 200;
/// The number of colors for groups in the style sheet.
const COLORS: usize = 6;

/// The time span that is shown, ns since the epoch.
struct TimeSpan {
    /// When the median rank issued its oldest operation that is shown.
    start: i64,
    /// When the last operation was issued.
    last: i64,
}

impl TimeSpan {
    /// The time span for these records; `None` if no operation was issued after its start.
    fn of(shown: &ShownRecords<'_>) -> Option<Self> {
        let mut starts: Vec<i64> = Vec::new();
        let mut last = 0;
        for (_, dump) in shown_dumps(shown) {
            let timed = || dump.entries.iter().rev().filter(|e| e.time_created_ns > 0);
            let newest = timed().next()?.time_created_ns;
            last = last.max(newest);
            // A program that runs ahead of its device has many pending operations, all issued after the last completed
            // one, so only completed ones count.
            let ended = timed().filter(|entry| entry.state >= EntryState::Completed);
            let oldest = ended
                .take(SHOWN_OPERATIONS)
                .last()
                .or_else(|| timed().next_back())?;
            starts.push(oldest.time_created_ns);
        }
        starts.sort_unstable();
        let start = *starts.get(starts.len() / 2)?;
        (last > start).then_some(Self { start, last })
    }

    /// The x coordinate of a time; times outside of the span are at its edges.
    fn x(&self, ns: i64) -> f64 {
        let share = (ns.saturating_sub(self.start)) as f64 / (self.last - self.start) as f64;
        LABEL_WIDTH + share.clamp(0.0, 1.0 + TAIL) / (1.0 + TAIL) * (WIDTH - LABEL_WIDTH)
    }
}

/// The records of the shown ranks that have an operation with a time.
fn shown_dumps<'a>(shown: &'a ShownRecords<'_>) -> impl Iterator<Item = (u32, &'a Dump)> {
    shown.dumps.iter().copied().filter(|(rank, dump)| {
        shown.ranks.binary_search(rank).is_ok()
            && dump.entries.iter().any(|entry| entry.time_created_ns > 0)
    })
}

pub(super) fn write(
    shown: &ShownRecords<'_>,
    names: &GroupNames,
    out: &mut dyn Write,
) -> io::Result<()> {
    let Some(time_span) = TimeSpan::of(shown) else {
        return Ok(());
    };
    let kinds = kinds(shown);
    let mut rows = String::new();
    let mut height = 4.0;
    let mut previous = None;
    let mut drawn = Drawn::default();
    for (rank, dump) in shown_dumps(shown) {
        // The two records of a process with two recorders share a row.
        if previous != Some(rank) {
            if previous.is_some() {
                height += ROW_HEIGHT;
            }
            let class = if shown.culprits.contains(&rank) {
                "fault"
            } else {
                ""
            };
            rows += &format!(
                "<text class=\"{class}\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">rank {rank}</text>\n",
                LABEL_WIDTH - 8.0,
                height + ROW_HEIGHT / 2.0 + 4.0
            );
        }
        previous = Some(rank);
        draw(
            dump, names, &time_span, height, &kinds, &mut drawn, &mut rows,
        );
    }
    height += ROW_HEIGHT + 20.0;
    let edge = time_span.x(time_span.last);
    let cut_off = match drawn.cut_off {
        true => {
            " Those of a process that is gone never ended, and extend to the end of its record."
        }
        false => "",
    };
    writeln!(
        out,
        "<section>\n<h2>Timeline</h2>\n<p class=\"small\">From issue to completion, by the hosts' own clocks, the last {} before the newest issue. Pending operations extend to the right edge.{cut_off}</p>",
        duration_ms((time_span.last - time_span.start) as f64 / 1e6)
    )?;
    writeln!(
        out,
        "<div class=\"wide\" tabindex=\"0\"><svg class=\"timeline\" role=\"img\" aria-label=\"timeline\" width=\"{WIDTH}\" height=\"{height:.0}\" viewBox=\"0 0 {WIDTH} {height:.0}\">\n{rows}\
         <line x1=\"{edge:.1}\" x2=\"{edge:.1}\" y1=\"0\" y2=\"{:.0}\"/>\n<text x=\"{edge:.1}\" y=\"{:.0}\" text-anchor=\"middle\">last issue</text>\n\
         <text x=\"{LABEL_WIDTH}\" y=\"{:.0}\">{} before</text>\n</svg></div>",
        height - 18.0,
        height - 5.0,
        height - 5.0,
        duration_ms((time_span.last - time_span.start) as f64 / 1e6),
    )?;
    write!(out, "<p class=\"legend small\">")?;
    for (index, kind) in kinds
        .iter()
        .enumerate()
        .filter(|(index, _)| drawn.kinds.contains(index))
    {
        write!(
            out,
            "<span><b class=\"swatch g{}\"></b> {}</span> ",
            index % COLORS,
            Text(kind)
        )?;
    }
    let legend = [
        ("pending", "pending", drawn.pending),
        ("cutoff", "never ended", drawn.cut_off),
        ("failed", "failed", drawn.failed),
    ];
    for (class, word, _) in legend.into_iter().filter(|(.., is_drawn)| *is_drawn) {
        write!(out, "<span><b class=\"swatch {class}\"></b> {word}</span> ")?;
    }
    writeln!(out, "</p>")?;
    if shown.ranks_cut > 0 {
        let rest = count(shown.ranks_cut as u64, "more rank");
        writeln!(out, "<p class=\"small\">{rest} not shown here.</p>")?;
    }
    writeln!(out, "</section>")
}

/// The kinds of groups of which operations are drawn, by index, and the states other than completed.
#[derive(Default)]
struct Drawn {
    kinds: BTreeSet<usize>,
    pending: bool,
    /// Never ended, in a process that is gone.
    cut_off: bool,
    failed: bool,
}

/// Whether the record is a ring whose process is gone.
fn is_gone(dump: &Dump) -> bool {
    [RingReader::OWNER_IS_DEAD, RingReader::CLOSED].contains(&dump.identity.reason.as_str())
}

/// The group with this index in a record.
fn group_of(dump: &Dump, index: usize) -> Option<GroupRef> {
    let info = &dump.groups.get(index)?.info;
    Some(GroupRef {
        name: info.name.clone(),
        desc: info.desc.clone(),
        ranks: info.ranks.clone(),
    })
}

/// Groups of one kind (such as all tp groups) share a color. The kind is the label before a slash or number.
fn kind(group: &GroupRef) -> String {
    let label = group_label(group);
    let kind = label.split('/').next().unwrap_or(&label);
    let kind = kind.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_');
    if kind.is_empty() { &label } else { kind }.to_owned()
}

/// The kinds of the groups in which the shown ranks have operations, by name: the place of a kind is its color.
fn kinds(shown: &ShownRecords<'_>) -> Vec<String> {
    let mut kinds = BTreeSet::new();
    for (_, dump) in shown_dumps(shown) {
        let used: BTreeSet<usize> = (dump.entries.iter())
            .map(|entry| entry.group as usize)
            .collect();
        kinds.extend(
            used.iter()
                .filter_map(|&index| group_of(dump, index))
                .map(|group| kind(&group)),
        );
    }
    kinds.into_iter().collect()
}

/// Draws the operations of one record. `kinds` are those of the groups, by color.
fn draw(
    dump: &Dump,
    names: &GroupNames,
    time_span: &TimeSpan,
    top: f64,
    kinds: &[String],
    drawn: &mut Drawn,
    rows: &mut String,
) {
    let mut bars: Vec<&Entry> = dump
        .entries
        .iter()
        .rev()
        .filter(|entry| entry.time_created_ns > 0)
        .take(MAX_DRAWN)
        .collect();
    bars.reverse();
    let gone = is_gone(dump);
    for entry in bars {
        let status = status_entry(dump, entry);
        let pending = status.state < EntryState::Completed;
        let end = match status.time_discovered_completed_ns {
            _ if pending && gone => dump.identity.dump_time_ns.max(entry.time_created_ns),
            _ if pending => i64::MAX,
            0 => entry.time_created_ns,
            ns => ns,
        };
        if end < time_span.start {
            continue;
        }
        let Some(group) = group_of(dump, entry.group as usize) else {
            continue;
        };
        let kind = kind(&group);
        let color = kinds.iter().position(|known| *known == kind).unwrap_or(0);
        let (x, right) = (time_span.x(entry.time_created_ns), time_span.x(end));
        let op = dump
            .signatures
            .get(entry.signature as usize)
            .map_or(entry.op.name(), |signature| signature.op_name.as_str());
        let seq = seq_of(entry);
        let failed = status.state == EntryState::Failed;
        drawn.kinds.insert(color);
        drawn.pending |= pending && !gone;
        drawn.cut_off |= pending && gone;
        drawn.failed |= failed;
        let took = || duration_ms((end - entry.time_created_ns) as f64 / 1e6);
        let (class, state) = match (pending, failed) {
            (true, _) if gone => (" cutoff", "not ended: its process is gone".to_owned()),
            (true, _) => (" pending", "pending".to_owned()),
            (_, true) => (" failed", format!("failed after {}", took())),
            (false, false) => ("", took()),
        };
        *rows += &format!(
            "<rect class=\"g{}{}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{} #{seq} on {}, {state}</title></rect>\n",
            color % COLORS,
            class,
            top + 3.0,
            (right - x).max(1.5),
            ROW_HEIGHT - 6.0,
            Text(op),
            Text(&names.name(&group)),
        );
    }
}
