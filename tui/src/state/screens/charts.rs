//! Draws the trends of the first screen as charts.

use super::ViewModel;
use crate::page::theme::Tone;
use crate::page::{Line, plain, styled};
use crate::state::trends::Trend;

/// Characters of a bar, from low to high. The last one fills its cell, so that a bar can continue in the cell above.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// `steps/s   9.8  ▁▂▃▅▇  max 12`: one chart below the other, each with bars of `height` rows, the newest value on the
/// right of a line of `width` characters. The highest bar ends below the top, so that the bars of two charts do not touch.
pub(super) fn trends(model: &ViewModel<'_>, width: u16, height: usize) -> Vec<Line> {
    let trends = model.trends.until(model.snapshot.at.wall_ns);
    // 36 of the characters are for the texts around the bars.
    let room = usize::from(width).saturating_sub(36).max(8);
    let number = |value: Option<f64>| match value {
        Some(value) if value >= 100.0 => format!("{value:.0}"),
        Some(value) if value >= 10.0 => format!("{value:.1}"),
        Some(value) if value > 0.0 && value < 0.005 => "<0.01".to_owned(),
        Some(value) => format!("{value:.2}"),
        None => "--".to_owned(),
    };
    let lines = |trend: &Trend| {
        if !trend.is_known() {
            let unknown = format!("  {:<9}{:>7}  {}", trend.name, "--", trend.unknown);
            return vec![vec![styled(unknown, Tone::Dim)]];
        }
        let newest = &trend.values[trend.values.len().saturating_sub(room)..];
        let max = newest.iter().flatten().copied().reduce(f64::max);
        // The height of a bar is in eighths of a row: the lowest bar has one, and the highest has all but one.
        let most = BARS.len() * height - 1;
        let eighths = |value: f64| match max {
            Some(max) if max > 0.0 => 1 + (value / max * (most - 1) as f64).round() as usize,
            _ => 1,
        };
        let bar = |value: &Option<f64>, row: usize| {
            let above = value.map_or(0, |value| eighths(value).min(most));
            match above.saturating_sub(row * BARS.len()) {
                0 => ' ',
                filled => BARS[filled.min(BARS.len()) - 1],
            }
        };
        let blank = " ".repeat(room.saturating_sub(newest.len()));
        let now = number(trend.values.last().copied().flatten());
        (0..height)
            .rev()
            .map(move |row| {
                let bars: String = newest.iter().map(|value| bar(value, row)).collect();
                let first = row + 1 == height;
                let mut line = match first {
                    true => vec![
                        styled(format!("  {:<9}", trend.name), Tone::Dim),
                        plain(format!("{now:>7}  ")),
                    ],
                    false => vec![plain(" ".repeat(20))],
                };
                line.push(styled(format!("{blank}{bars}"), Tone::Accent));
                if first {
                    line.push(styled(format!("  max {}", number(max)), Tone::Dim));
                }
                line
            })
            .collect::<Vec<Line>>()
    };
    trends.iter().flat_map(lines).collect()
}
