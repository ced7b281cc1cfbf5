//! Draws the top line and the bottom line.

use super::put_line;
use crate::keys::{Action, BINDINGS};
use crate::page::theme::Tone;
use crate::page::width::{fit, text_width};
use crate::page::{Line, plain, styled};
use crate::state::State;
use crate::state::input::Purpose;
use crate::state::screen::{Screen, VIEWS};
use ratatui::buffer::Buffer;
use ratatui::layout::{Position, Rect};
use rcomm_analyzer::format::count;
use rcomm_recorder::model::text::time_of_day;
use std::time::{Duration, UNIX_EPOCH};

/// `6:warnings > E101 > rank 2 `: the view, and the details that were opened on it one after the other. On a narrow
/// terminal only the last of them.
fn trail(state: &State, narrow: bool) -> String {
    let mut names: Vec<String> = state
        .nav
        .trail()
        .map(|screen| name(state, screen))
        .collect();
    names.reverse();
    if narrow {
        names.drain(..names.len() - 1);
    }
    format!("{} ", names.join(" > "))
}

/// The name of a screen: `4:inflight`, `rank 2`, `E101`.
fn name(state: &State, screen: &Screen) -> String {
    if let Some(index) = VIEWS.iter().position(|(view, _)| view == screen) {
        // The tenth view has the key 0.
        return format!("{}:{}", (index + 1) % 10, VIEWS[index].1);
    }
    match screen {
        Screen::Rank(rank) => format!("rank {rank}"),
        Screen::RanksOf(ranks) => count(ranks.len() as u64, "rank"),
        Screen::Group(group) => format!("group {}", state.label_of(group)),
        Screen::GroupsOf(groups) => count(groups.len() as u64, "group"),
        Screen::Finding(id) => {
            let findings = state
                .snapshot()
                .map(|snapshot| snapshot.report.findings.iter());
            let finding = findings
                .into_iter()
                .flatten()
                .find(|finding| finding.id == *id);
            finding.map_or_else(
                || "finding".to_owned(),
                |finding| finding.code.id().to_owned(),
            )
        }
        Screen::Explained(code) => format!("{code} explained"),
        Screen::Why(_) => "why".to_owned(),
        Screen::Stacks => "stacks".to_owned(),
        Screen::Compare => "compare".to_owned(),
        Screen::Help => "help".to_owned(),
        // Views have numbers.
        _ => String::new(),
    }
}

/// Draws the view, job, size, connection, what hides or selects rows, step and time.
pub(super) fn header(state: &State, area: Rect, buffer: &mut Buffer) {
    if area.height == 0 {
        return;
    }
    let theme = &state.options.theme;
    let mut line: Line = vec![styled("rcomm-top ", Tone::Title)];
    // On a narrow terminal the first screen needs the line for the job.
    let narrow = area.width < 100;
    if !narrow || *state.screen() != Screen::Overview {
        line.push(styled(trail(state, narrow), Tone::Accent));
    }
    let time = clock(state);
    let time_width = u16::try_from(time.len()).unwrap_or(0);
    let room = area.width.saturating_sub(time_width + 1);
    if let Some(snapshot) = state.snapshot() {
        let connection = connection(state);
        let used: usize = line.iter().map(|words| text_width(&words.text)).sum();
        let others = state.other_jobs.as_ref();
        let others = others.map_or(0, |words| text_width(&words.text) + 2);
        let taken = used + 2 + text_width(&connection.text) + others;
        let left = usize::from(room).saturating_sub(taken);
        let job = match snapshot.job.as_str() {
            "" => String::new(),
            // A long name is cut, so that there is room for whether the job is live.
            job => fit(&format!(" job {job} "), left.max(8)),
        };
        let hosts = state.hosts();
        let mut size = format!(" {}", count(snapshot.ranks.len() as u64, "rank"));
        if hosts > 0 {
            size.push_str(&format!(" / {}", count(hosts as u64, "host")));
        }
        // On a narrow terminal, what hides rows, whether the job is live and whether others are in trouble are more
        // important than the job's size.
        let hides = !state.filter.is_empty() || state.problems_only || state.follow;
        let fits = text_width(&job) + text_width(&size) <= left;
        // The name ends with a space, the size does not.
        let mut gap = if job.is_empty() { "  " } else { " " };
        line.push(plain(job));
        if !narrow || !hides && fits {
            line.push(plain(size));
            gap = "  ";
        }
        line.push(plain(gap));
        line.push(connection);
    }
    if let Some(other_jobs) = &state.other_jobs {
        line.push(plain("  "));
        line.push(other_jobs.clone());
    }
    if !state.filter.is_empty() {
        line.push(styled(format!("  /{}", state.filter.text()), Tone::Accent));
    }
    if state.problems_only {
        line.push(styled("  problems only", Tone::Accent));
    }
    if state.follow {
        line.push(styled("  following", Tone::Accent));
    }
    if let Some(snapshot) = state.snapshot() {
        let step = snapshot
            .report
            .ranks
            .iter()
            .filter_map(|rank| rank.step)
            .max();
        let step = step.filter(|&step| step >= 0);
        let step = step.map(|step| format!("  step {step}"));
        let used: usize = line.iter().map(|words| text_width(&words.text)).sum();
        // A number that was cut would be another step.
        let fits = |step: &String| used + text_width(step) <= usize::from(room);
        line.extend(step.filter(fits).map(plain));
    }
    put_line(&line, Rect::new(area.x, area.y, room, 1), theme, buffer);
    if area.width > 2 * time_width {
        let x = area.right() - time_width;
        buffer.set_stringn(x, area.y, &time, time.len(), theme.style(Tone::Dim));
    }
}

/// The time of what is shown: now, or during a pause the time of the snapshot. In a replay, the date and time at which
/// the records were taken or, if they do not note it, of the newest operation.
fn clock(state: &State) -> String {
    let now_ns = state.now.wall_ns;
    if state.options.still && state.snapshot().is_some() {
        let time = |ns: i64| {
            let since_epoch = Duration::from_nanos(u64::try_from(ns).unwrap_or(0));
            let utc = humantime::format_rfc3339_seconds(UNIX_EPOCH + since_epoch);
            utc.to_string().replace('T', " ").replace('Z', " UTC")
        };
        let newest = || Some(format!("operations to {}", time(state.newest_event_ns()?)));
        let taken = state.as_of_ns().map(time);
        return taken.or_else(newest).unwrap_or_default();
    }
    let past = state.snapshot().filter(|_| state.history.is_paused());
    let wall_ns = past.map_or(now_ns, |snapshot| snapshot.at.wall_ns);
    format!("{} UTC", time_of_day(wall_ns))
}

/// The state of the connection: not yet connected, live, live with silent ranks, paused, a replay, over, or failing in
/// part or whole.
fn connection(state: &State) -> crate::page::StyledText {
    let Some(snapshot) = state.snapshot() else {
        return styled("CONNECTING", Tone::Silent);
    };
    if state.history.is_paused() {
        let (number, all) = state.history.position();
        return styled(format!("PAUSED {number}/{all}"), Tone::Accent);
    }
    let failing = snapshot
        .sources
        .iter()
        .filter(|source| source.error.is_some())
        .count();
    let silent = snapshot.ranks.iter().filter(|view| view.silent).count();
    if let Some(end) = &snapshot.report.end {
        // The last snapshot stays on display, but what it shows is over, so it is not live. If the job was restarted,
        // the job is not over, as the verdict's sentence says too.
        let words = match (end.later_attempt, end.attempt) {
            (Some(later), _) => format!("ATTEMPT {later} HAS BEGUN"),
            (None, 0) => "OVER".to_owned(),
            (None, attempt) => format!("ATTEMPT {attempt} OVER"),
        };
        return styled(words, Tone::Accent);
    }
    let with_sources = |words: String| match state.options.keymap.hint(&[Action::View(8)], "") {
        Some(key) => format!("{words} {key}"),
        None => words,
    };
    if failing == snapshot.sources.len() && failing > 0 {
        styled(with_sources("DISCONNECTED".into()), Tone::Silent)
    } else if failing > 0 {
        styled(
            with_sources(format!("{} FAILING", count(failing as u64, "SOURCE"))),
            Tone::Late,
        )
    } else if silent > 0 {
        styled(format!("LIVE, {silent} silent"), Tone::Late)
    } else if state.options.still {
        styled("REPLAY", Tone::Accent)
    } else {
        styled("LIVE", Tone::Good)
    }
}

/// Draws the question, the input line, the message, or the keys. Returns the position of the cursor in the input
/// line; `None` without one.
pub(super) fn footer(state: &State, area: Rect, buffer: &mut Buffer) -> Option<Position> {
    if area.height == 0 {
        return None;
    }
    let theme = &state.options.theme;
    if let Some(folder) = &state.confirm {
        let dumps = state.snapshot().map_or(0, |s| s.dumps().count());
        let text = format!(
            " write {} to {}?  [y] yes{}  [n] no",
            count(dumps as u64, "dump"),
            folder.display(),
            if state.options.askable {
                "  [r] ask the ranks for dumps"
            } else {
                ""
            }
        );
        put_line(&vec![styled(text, Tone::Late)], area, theme, buffer);
        return None;
    }
    if let Some(input) = &state.input {
        let sign = match input.purpose {
            Purpose::Filter => "/",
            Purpose::Command => ":",
        };
        let before: String = input.text.chars().take(input.cursor).collect();
        let mut line = vec![
            styled(sign, Tone::Accent),
            plain(input.text.clone()),
            plain("  "),
        ];
        match &input.error {
            Some(error) => line.push(styled(error.clone(), Tone::Bad)),
            None => {
                let next = input.candidates(&state.known_names());
                let next: Vec<String> = next.into_iter().take(8).collect();
                line.push(styled(next.join("  "), Tone::Dim));
            }
        }
        put_line(&line, area, theme, buffer);
        let column = u16::try_from(1 + text_width(&before)).unwrap_or(u16::MAX);
        return Some(Position::new(area.x + column.min(area.width - 1), area.y));
    }
    if let Some(message) = &state.message {
        let line = vec![plain(" "), styled(message.text.clone(), message.tone)];
        put_line(&line, area, theme, buffer);
        return None;
    }
    put_line(&keys(state, area.width), area, theme, buffer);
    None
}

/// The keys whose hints fit into `width`. The key to quit is always included.
fn keys(state: &State, width: u16) -> Line {
    let hints = BINDINGS.iter().filter(|b| !b.hint.is_empty());
    let hints = hints.filter(|b| b.action != Action::Dump || state.options.allow_actions);
    let hints = hints.filter_map(|binding| {
        let key = state.options.keymap.keys(binding.action).first()?;
        let hint = match binding.action {
            Action::Pause if state.history.is_paused() => "go on",
            _ => binding.hint,
        };
        Some((binding.action, key, hint))
    });
    let (quit, others): (Vec<_>, Vec<_>) = hints.partition(|(action, ..)| *action == Action::Quit);
    let hint_width = |key: &str, hint: &str| text_width(key) + hint.len() + 3;
    let room = usize::from(width);
    let mut used = 1 + quit
        .iter()
        .map(|(_, key, hint)| hint_width(key, hint))
        .sum::<usize>();
    let fitting = others.into_iter().take_while(|(_, key, hint)| {
        used += hint_width(key, hint);
        used <= room
    });
    let mut line: Line = vec![plain(" ")];
    for (_, key, hint) in fitting.collect::<Vec<_>>().into_iter().chain(quit) {
        line.push(styled(format!("[{key}]"), Tone::Accent));
        line.push(plain(format!("{} ", fit(hint, 20))));
    }
    line
}
