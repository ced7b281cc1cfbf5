//! One finding: the sentence, the doubts and the next step, its ranks, what to look at further, the evidence, where the
//! programs diverge, what was ruled out, and, where there is room, what its code means. Also the screen of a code, with
//! all of its explanation.

use super::{ViewModel, look_further, name_ranks, overview, rank};
use crate::page::layout::{cuts_doubt, is_doubt, needed, wrap};
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Body, Line, Page, Pane, plain, styled};
use crate::state::index::Marked;
use rcomm_analyzer::format::{count, rank_set};
use rcomm_analyzer::print::human::format_doubt;
use rcomm_analyzer::{Code, Finding, RankState, Severity, explain};
use rcomm_recorder::model::Rank;

pub(super) fn page(model: &ViewModel<'_>, id: u32) -> Page {
    let findings = &model.snapshot.report.findings;
    let Some(finding) = findings.iter().find(|f| f.id == id) else {
        let gone = "this finding is no longer reported";
        return Page {
            head: vec![vec![styled(gone, Tone::Dim)]],
            ..Page::default()
        };
    };
    let pane = |title: &str, body| Pane {
        title: title.into(),
        body,
    };
    let mut panes = vec![pane("ranks", Body::Table(ranks(model, finding)))];
    let culprit = finding.culprit_ranks.first();
    panes.extend(culprit.and_then(|&rank| look_further::pane(model, rank, model.size.0)));
    if !finding.evidence.is_empty() {
        panes.push(pane("evidence", Body::Text(evidence(model, finding))));
    }
    let lines = |texts: &[String]| -> Vec<Line> {
        texts.iter().map(|text| vec![plain(text.clone())]).collect()
    };
    if !finding.diff.is_empty() {
        // What the signs mean is in the title: few rows may be left for the lines.
        let (heads, calls): (Vec<&String>, Vec<&String>) = (finding.diff.iter())
            .partition(|line| line.starts_with("--- ") || line.starts_with("+++ "));
        let heads: Vec<String> = (heads.iter())
            .map(|line| format!("{} is {}", &line[..1], line[4..].trim()))
            .collect();
        let title = match heads.is_empty() {
            true => "where the programs diverge".to_owned(),
            false => format!("where the programs diverge: {}", heads.join(", ")),
        };
        // Where few rows are left, what is before the first difference is left out: equal calls, and the differing ones
        // rank by rank.
        let differs = |line: &&String| line.starts_with("- ") || line.starts_with("+ ");
        let first = calls.iter().position(differs).unwrap_or(0);
        let is_roomy = model.size.1 >= overview::ROOMY_ROWS;
        let left_out = if is_roomy { 0 } else { first };
        let calls = calls.into_iter().skip(left_out);
        let calls = calls.map(|line| vec![plain(line.clone())]);
        panes.push(pane(&title, Body::Text(calls.collect())));
    }
    if !finding.ruled_out.is_empty() {
        let width = usize::from(model.size.0);
        let texts = lines(&finding.ruled_out);
        let wrapped = texts.iter().flat_map(|text| wrap(text, width, usize::MAX));
        panes.push(pane("ruled out", Body::Text(wrapped.collect())));
    }
    let mut head = head(model, finding);
    if cuts_doubt(&head, model.size) {
        // The doubts are too long for the head: they get a pane, which can be scrolled.
        let (doubts, others): (Vec<Line>, Vec<Line>) = head.into_iter().partition(is_doubt);
        head = others;
        let width = usize::from(model.size.0);
        let lines = doubts.iter().flat_map(|line| wrap(line, width, usize::MAX));
        panes.insert(0, pane("why it may be wrong", Body::Text(lines.collect())));
    }
    let mut page = Page {
        head,
        panes,
        ..Page::default()
    };
    // What holds for every finding of the code takes no rows from this one.
    let spare = model.size.1.saturating_sub(needed(&page, model.size));
    page.panes
        .extend(explanation(finding, usize::from(model.size.0), spare));
    page
}

/// The fewest lines of an explanation that are shown.
const MIN_LINES: usize = 5;

/// As much of the explanation of a finding's code as `rows` hold, with the title. `None` if they hold too little.
fn explanation(finding: &Finding, width: usize, rows: u16) -> Option<Pane> {
    let mut lines = explanation_lines(finding.code, width);
    let room = usize::from(rows.saturating_sub(1));
    if lines.len() > room {
        lines.truncate(room.saturating_sub(1));
        let rest = format!("... the rest: rcomm-fr explain {}", finding.code);
        lines.push(vec![styled(rest, Tone::Dim)]);
    }
    (room >= MIN_LINES).then(|| explanation_pane(finding.code, lines))
}

/// The screen with the whole explanation of a code, which can be scrolled.
pub(super) fn explained(code: Code, width: u16) -> Page {
    let head = format!("{code} {}: {}", code.name(), code.meaning());
    Page {
        head: vec![vec![plain(head)]],
        panes: vec![explanation_pane(
            code,
            explanation_lines(code, usize::from(width)),
        )],
        ..Page::default()
    }
}

fn explanation_pane(code: Code, lines: Vec<Line>) -> Pane {
    Pane {
        title: format!("what {code} means"),
        body: Body::Text(lines),
    }
}

/// What a code means, where it usually comes from, and what to do, as `rcomm-fr explain` has it.
fn explanation_lines(code: Code, width: usize) -> Vec<Line> {
    let explained = explain(code);
    let mut lines = vec![vec![plain(explained.meaning)]];
    for (title, items) in [
        ("where it usually comes from", explained.causes),
        ("what to do", explained.actions),
    ] {
        lines.push(vec![styled(title, Tone::Title)]);
        lines.extend(items.iter().map(|item| vec![plain(format!("- {item}"))]));
    }
    let wrapped = lines.iter().flat_map(|line| wrap(line, width, usize::MAX));
    wrapped.collect()
}

fn head(model: &ViewModel<'_>, finding: &Finding) -> Vec<Line> {
    let tone = match finding.severity {
        Severity::Error => Tone::Bad,
        Severity::Warning => Tone::Late,
        Severity::Note => Tone::Dim,
    };
    let confidence = format!("  {:.0} % sure", finding.confidence * 100.0);
    let mut lines = vec![
        vec![
            styled(format!("{} {}", finding.code, finding.name), tone),
            styled(confidence, Tone::Dim),
        ],
        vec![plain(model.sentence(finding))],
    ];
    lines.extend(doubts(finding));
    lines.extend(next(finding));
    if !finding.cycle.is_empty() {
        let text = format!("cycle: {}", cycle(model, &finding.cycle).join(", "));
        lines.push(vec![plain(text)]);
    }
    // The meaning is the same for every finding of the code, so it may be cut first.
    lines.push(vec![styled(
        format!("means: {}", finding.code.meaning()),
        Tone::Dim,
    )]);
    lines
}

/// The waits of a cycle of ranks: `rank 0 waits for rank 2 in all_reduce #6 on tp`.
fn cycle(model: &ViewModel<'_>, ranks: &[Rank]) -> Vec<String> {
    let waits = &model.snapshot.report.waits;
    let nexts = ranks.iter().cycle().skip(1);
    let link = |(&rank, &next): (&Rank, &Rank)| {
        let mut waits = waits.iter();
        let wait = waits.find(|wait| wait.rank == rank && wait.on.contains(&next));
        match wait {
            Some(wait) => format!(
                "rank {rank} waits for {} in {}",
                name_ranks(&wait.on, 4),
                overview::call(model, &wait.op, wait.seq, &wait.group)
            ),
            None => format!("rank {rank} waits for rank {next}"),
        }
    };
    ranks.iter().zip(nexts).map(link).collect()
}

/// The next step; `None` if the finding has none.
pub(super) fn next(finding: &Finding) -> Option<Line> {
    let head = styled("next: ", Tone::Accent);
    (!finding.next.is_empty()).then(|| vec![head, plain(finding.next.clone())])
}

/// The highest confidence of a finding whose doubts are shown beside its sentence. The screen of the finding shows them
/// always.
const UNSURE: f64 = 0.75;

/// If a finding is not sure (its confidence is at most [`UNSURE`]), the lines with its doubts; on a terminal with few
/// rows, the first one, and how many others the finding's own screen has. Empty if it is sure.
pub(super) fn doubts_if_unsure(model: &ViewModel<'_>, finding: &Finding) -> Vec<Line> {
    if finding.confidence > UNSURE {
        return vec![];
    }
    let mut lines = doubts(finding);
    if model.size.1 < overview::ROOMY_ROWS && lines.len() > 1 {
        let more = count(lines.len() as u64 - 1, "other doubt");
        lines.truncate(1);
        lines[0].push(plain(format!("; and {more}")));
    }
    lines
}

/// Why the finding may be wrong, and whom the records accuse as well.
pub(super) fn doubts(finding: &Finding) -> Vec<Line> {
    let line = |head: &str, text: &str| vec![styled(head, Tone::Doubt), plain(text)];
    let or_else = Some(format_doubt(finding)).filter(|text| !text.is_empty());
    let or_else = or_else.map(|text| line("or else: ", &text));
    let doubts = finding.doubts.iter();
    let doubts = doubts.map(|doubt| line("not sure: ", doubt));
    or_else.into_iter().chain(doubts).collect()
}

fn ranks(model: &ViewModel<'_>, finding: &Finding) -> Table {
    let call_site = |rank| {
        let frame = finding.frames.iter().find(|frame| frame.rank == rank);
        frame.map_or_else(String::new, |f| {
            format!(
                "{}: {}:{} {}",
                f.when.replace('_', " "),
                f.filename,
                f.line,
                f.name
            )
        })
    };
    let row = |rank: u32, role: &str, tone| Row {
        mark: Mark::NONE,
        cells: vec![
            Cell::number(rank.to_string(), f64::from(rank)),
            Cell::text(model.host(rank)),
            Cell::text(role).toned(tone),
            Cell::text(call_site(rank)),
        ],
        tone: Tone::Plain,
        target: Some(Target::Rank(rank)),
        problem: tone == Tone::Bad,
    };
    let culprits =
        finding
            .culprit_ranks
            .iter()
            .map(|&r| match (finding.severity, model.index.rank(r)) {
                (Severity::Error, _) => row(r, "at fault", Tone::Bad),
                (_, state @ (RankState::Late | RankState::Silent)) => {
                    row(r, state.word(), state.mark().tone)
                }
                _ => row(r, "named", Tone::Late),
            });
    let victims = finding
        .victim_ranks
        .iter()
        .map(|&r| match model.snapshot.report.failure(r) {
            Some(_) => row(r, "failed", Tone::Late),
            None => row(r, "waits", Tone::Waiting),
        });
    let mut rows: Vec<Row> = culprits.chain(victims).collect();
    let left_out = finding
        .victim_count
        .saturating_sub(finding.victim_ranks.len());
    if left_out > 0 {
        let mut more = row(0, "wait", Tone::Waiting);
        more.cells[0] = Cell::text(format!("+{left_out}"));
        more.cells[1] = Cell::text("");
        more.cells[3] = Cell::text("");
        more.target = None;
        rows.push(more);
    }
    let mut columns = vec![
        number("rank", 0),
        text("host", 1),
        text("role", 0),
        rest("where", 0),
    ];
    // Dumps of PyTorch do not name hosts.
    if rows.iter().all(|row| row.cells[1].text.is_empty()) {
        columns.remove(1);
        for row in &mut rows {
            row.cells.remove(1);
        }
    }
    Table {
        columns,
        rows,
        headings: Headings::Shown,
        empty: "no rank identified".into(),
    }
}

fn evidence(model: &ViewModel<'_>, finding: &Finding) -> Vec<Line> {
    let line = |e: &rcomm_analyzer::Evidence| {
        let group = e.group.as_ref().or(finding.group.as_ref());
        let call = match group {
            Some(group) => overview::call(model, &e.op, e.seq, group),
            None => format!("{} #{}", e.op, e.seq),
        };
        vec![plain(format!(
            "rank {}: record {}, {call}, {}",
            e.rank,
            e.record_id,
            rank::state_word(e.state)
        ))]
    };
    let mut lines: Vec<Line> = finding.evidence.iter().map(line).collect();
    if let Some(group) = &finding.group {
        let members = rank_set(&group.ranks, 8);
        lines.push(vec![styled(
            format!("members of {}: {members}", model.labels([group])),
            Tone::Dim,
        )]);
    }
    lines
}
