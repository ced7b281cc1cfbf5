//! Prints the changes between two reports as text.

use super::page::{ALARM, DIM, Detail, FINE, Layout, PLAIN, Page};
use super::verdict_style;
use rcomm_verdict::format::{GroupNames, Ranks, count, duration_ms};
use rcomm_verdict::{Difference, GroupChange};
use std::io::{self, Write};

/// A brief page lists at most this many groups.
const BRIEF_GROUPS: usize = 8;

/// Writes the changes, new findings first.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write_difference(
    difference: &Difference,
    layout: &Layout,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut page = Page::new(layout, out);
    let [before, after] = difference.words.map(str::to_uppercase);
    let style = verdict_style(difference.verdicts[1]);
    let comparison = if before == after {
        "as before".to_owned()
    } else {
        format!("was {before} before")
    };
    let text = match (difference.new.len() as u64, difference.gone.len() as u64) {
        (0, 0) => format!("{comparison}; no finding is new and none is gone"),
        (new, 0) => format!("{comparison}; {}", count(new, "new finding")),
        (0, gone) => format!("{comparison}; {} gone", count(gone, "finding")),
        (new, gone) => format!("{comparison}; {}, {gone} gone", count(new, "new finding")),
    };
    page.headline(&after, style, &text)?;
    for (key, style, findings) in [
        ("new", ALARM, &difference.new),
        ("remains", PLAIN, &difference.remaining),
        ("gone", FINE, &difference.gone),
    ] {
        for (index, finding) in findings.iter().enumerate() {
            let text = format!("{} {}", finding.code, finding.sentence);
            page.item(if index == 0 { key } else { "" }, style, &text)?;
        }
    }
    write_ranks(difference, &mut page)?;
    write_groups(difference, &mut page)
}

fn write_ranks(difference: &Difference, page: &mut Page<'_>) -> io::Result<()> {
    if !difference.ranks_lost.is_empty() {
        let text = format!("{} left no record this time", Ranks(&difference.ranks_lost));
        page.item("ranks", ALARM, &text)?;
    }
    if !difference.ranks_gained.is_empty() {
        let text = format!("{} had no record before", Ranks(&difference.ranks_gained));
        page.item("ranks", PLAIN, &text)?;
    }
    if !difference.ranks_unmoved.is_empty() {
        let text = format!(
            "{} still in the same call",
            Ranks(&difference.ranks_unmoved)
        );
        page.item("unmoved", PLAIN, &text)?;
    }
    Ok(())
}

fn write_groups(difference: &Difference, page: &mut Page<'_>) -> io::Result<()> {
    let names = GroupNames::new(difference.groups.iter().map(|change| &change.group));
    let (unmoved, moved): (Vec<&GroupChange>, Vec<&GroupChange>) = difference
        .groups
        .iter()
        .partition(|change| change.advanced() == Some(0));
    let shown = match page.detail() {
        Detail::Brief => BRIEF_GROUPS,
        Detail::Verbose => usize::MAX,
    };
    for (key, changes) in [("unmoved", unmoved), ("moved", moved)] {
        for (index, change) in changes.iter().take(shown).enumerate() {
            page.item(
                if index == 0 { key } else { "" },
                PLAIN,
                &format_change(change, &names),
            )?;
        }
        if changes.len() > shown {
            let text = count((changes.len() - shown) as u64, "more group");
            page.item("", DIM, &format!("and {text}; --verbose shows all"))?;
        }
    }
    Ok(())
}

fn format_change(change: &GroupChange, names: &GroupNames) -> String {
    let label = names.name(&change.group);
    let mut text = match (change.last_seq, change.advanced()) {
        ([Some(at), _], Some(0)) => format!("{label} at collective #{at}"),
        ([Some(old), Some(now)], Some(by)) => format!("{label} #{old} to #{now} (+{by})"),
        ([Some(old), Some(now)], None) => format!("{label} #{old} to #{now} (another run)"),
        ([None, Some(now)], _) => format!("{label} is new, at #{now}"),
        ([Some(old), None], _) => format!("{label} was at #{old} and is gone"),
        ([None, None], _) => format!("{label} without a collective"),
    };
    if let [Some(old), Some(now)] = change.lag_p50_ms.map(|lag| lag.map(duration_ms))
        && old != now
    {
        text += &format!(", lag {old} to {now}");
    }
    text
}
