//! One finding: the sentence, the doubts and the next step, its ranks, what to look at further, the evidence, where the
//! programs diverge, what was ruled out, and, where there is room, what its code means.

use super::{ViewModel, look_further, overview};
use crate::page::layout::{cuts_doubt, is_doubt, needed, wrap};
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Body, Line, Page, Pane, plain, styled};
use crate::state::index::Marked;
use rcomm_analyzer::format::rank_set;
use rcomm_analyzer::print::human::format_doubt;
use rcomm_analyzer::{Finding, RankState, Severity, explain};

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
        panes.push(pane(
            "where the programs diverge",
            Body::Text(lines(&finding.diff)),
        ));
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
    page.panes
        .push(explanation(finding, usize::from(model.size.0)));
    if needed(&page, model.size) > model.size.1 {
        page.panes.pop();
    }
    page
}

/// What the code of a finding means, where it usually comes from, and what to do, as `rcomm-fr explain` has it.
fn explanation(finding: &Finding, width: usize) -> Pane {
    let known = explain(finding.code);
    let mut lines = vec![vec![plain(known.meaning)]];
    for (title, items) in [
        ("usual causes", known.causes),
        ("what to do", known.actions),
    ] {
        lines.push(vec![styled(title, Tone::Title)]);
        lines.extend(items.iter().map(|item| vec![plain(format!("- {item}"))]));
    }
    let lines = lines.iter().flat_map(|line| wrap(line, width, usize::MAX));
    Pane {
        title: format!("what {} means", finding.code),
        body: Body::Text(lines.collect()),
    }
}

fn head(model: &ViewModel<'_>, finding: &Finding) -> Vec<Line> {
    let tone = match finding.severity {
        Severity::Error => Tone::Bad,
        Severity::Warning => Tone::Late,
        Severity::Note => Tone::Dim,
    };
    let sure = format!("  {:.0} % sure", finding.confidence * 100.0);
    let mut lines = vec![
        vec![
            styled(format!("{} {}", finding.code, finding.name), tone),
            styled(sure, Tone::Dim),
        ],
        vec![plain(model.sentence(finding))],
    ];
    lines.extend(doubts(finding));
    if !finding.next.is_empty() {
        lines.push(vec![
            styled("next: ", Tone::Accent),
            plain(finding.next.clone()),
        ]);
    }
    if !finding.cycle.is_empty() {
        let cycle: Vec<_> = finding.cycle.iter().map(u32::to_string).collect();
        lines.push(vec![plain(format!(
            "cycle: {} -> {}",
            cycle.join(" -> "),
            cycle[0]
        ))]);
    }
    // The meaning is the same for every finding of the code, so it may be cut first.
    lines.push(vec![styled(
        format!("means: {}", finding.code.meaning()),
        Tone::Dim,
    )]);
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
    Table {
        columns: vec![
            number("rank", 0),
            text("host", 1),
            text("role", 0),
            rest("where", 0),
        ],
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
            e.state.name()
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
