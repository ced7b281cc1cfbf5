//! The screen of the jobs of this node, those in trouble first.

use super::overview::verdict;
use super::{ViewModel, finding};
use crate::keys::Action;
use crate::page::layout::wrap;
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Body, Line, Page, Pane, StyledText, plain, styled};
use crate::state::index::head_of;
use rcomm_analyzer::format::count;
use rcomm_analyzer::{Code, Finding, NodeJob, Report, Severity, Verdict};
use rcomm_recorder::model::text::{age, time_of_day};
use std::cmp::Reverse;
use std::collections::BTreeSet;

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let mut jobs: Vec<&NodeJob> = model.jobs.iter().collect();
    jobs.sort_by_key(|job| (urgency(model, job), Reverse(job.created_ns)));
    let rows = jobs.into_iter().map(|job| {
        let shown = *job.name == *model.snapshot.job;
        let (word, tone) = word(model, job);
        let age_ms = (model.wall_ns - job.created_ns).max(0) as f64 / 1e6;
        Row {
            mark: Mark::new(if shown { '>' } else { ' ' }, Tone::Accent),
            cells: vec![
                Cell::text(job.name.as_str()),
                Cell::text(word).toned(tone),
                Cell::number(format!("{}/{}", job.alive, job.ranks), job.alive as f64),
                Cell::number(format!("{} ago", age(Some(age_ms))), age_ms),
                Cell::text(sentence(model, job).unwrap_or_default()),
            ],
            tone: match tone {
                Tone::Bad => Tone::Bad,
                _ => Tone::Plain,
            },
            target: Some(Target::Job(job.name.as_str().into())),
            problem: trouble(model, job).is_some(),
        }
    });
    let table = Table {
        columns: vec![
            text("job", 0),
            text("verdict", 0),
            number("alive", 0),
            number("started", 1),
            rest("first line", 2),
        ],
        rows: rows.collect(),
        headings: Headings::Shown,
        empty: match model.is_replay {
            true => "a replay shows one job".into(),
            false => "no other job: these sources show one job, or this node has no rings".into(),
        },
    };
    let head = vec![vec![plain(format!(
        "jobs with rings on this node, those in trouble first{}",
        model.hint("; ", &[Action::Enter], "chooses one")
    ))]];
    Page::of(head, "jobs", table)
}

/// The whole first line of the job in a row, which the table cuts or leaves out, with the time since when it holds, the
/// doubts and the next step; `None` if the row has no judged job.
pub(super) fn selected(model: &ViewModel<'_>, page: &Page, row: usize) -> Option<Pane> {
    let rows = &page.table(0)?.rows;
    let row = rows.get(row.min(rows.len().saturating_sub(1)))?;
    let Some(Target::Job(name)) = &row.target else {
        return None;
    };
    let job = model.jobs.iter().find(|job| *job.name == **name)?;
    let mut lines = vec![vec![plain(sentence(model, job)?)]];
    let report = report_on(model, job);
    let head = report.and_then(|report| Some(&report.findings[head_of(report, model.muted)?]));
    if let Some(head) = head.filter(|_| report.is_some_and(|report| report.end.is_none())) {
        lines.extend(head.since.map(|since| {
            let since = format!("{} UTC", time_of_day(since.at_ns));
            vec![styled("since: ", Tone::Accent), plain(since)]
        }));
        lines.extend(finding::doubts_if_unsure(model, head));
        lines.extend(finding::next(head));
    }
    let width = usize::from(model.size.0);
    let lines = lines.iter().flat_map(|line| wrap(line, width, usize::MAX));
    let hint = match *job.name == *model.snapshot.job {
        true => ": on display".to_owned(),
        false => model.hint(": ", &[Action::Enter], "shows it"),
    };
    Some(Pane {
        title: format!("{name}{hint}"),
        body: Body::Text(lines.collect()),
    })
}

/// The first line of the report on a job without the verdict, which has a separate column, and without muted findings.
/// `None` if the job has not been judged.
fn sentence(model: &ViewModel<'_>, job: &NodeJob) -> Option<String> {
    let report = report_on(model, job)?;
    let is_muted = |finding: &Finding| model.muted.contains(&finding.code);
    Some(match report.findings.iter().any(is_muted) {
        true => unmuted(report, model.muted).first_line(),
        false => report.first_line(),
    })
}

/// The report without muted findings and without the consequences of others: so no line is about a finding whose cause
/// is muted.
fn unmuted(report: &Report, muted: &BTreeSet<Code>) -> Report {
    let mut report = report.clone();
    report
        .findings
        .retain(|finding| finding.caused_by.is_none() && !muted.contains(&finding.code));
    report
}

/// How grave the trouble of a job is; `None` if it is in none, or all of it is muted.
fn trouble(model: &ViewModel<'_>, job: &NodeJob) -> Option<Severity> {
    let report = report_on(model, job)?;
    let head = head_of(report, model.muted)?;
    Some(report.findings[head].severity)
}

/// The order of the list: jobs in trouble, then others that are alive, then others that are over.
fn urgency(model: &ViewModel<'_>, job: &NodeJob) -> (u8, Option<Severity>) {
    match trouble(model, job) {
        Some(trouble) => (0, Some(trouble)),
        None if job.alive > 0 => (1, None),
        None => (2, None),
    }
}

/// The report on a job: of the displayed job, that of the displayed snapshot.
fn report_on<'a>(model: &'a ViewModel<'_>, job: &'a NodeJob) -> Option<&'a Report> {
    match *job.name == *model.snapshot.job {
        true => Some(&model.snapshot.report),
        false => job.report.as_deref(),
    }
}

/// The verdict on a job, in the view's words.
fn word(model: &ViewModel<'_>, job: &NodeJob) -> (&'static str, Tone) {
    match report_on(model, job) {
        // A warning is the word if no operation hangs or mismatches, as on the first screen.
        Some(report)
            if matches!(report.verdict, Verdict::Healthy | Verdict::Running)
                && head_of(report, model.muted).is_some() =>
        {
            ("WARNING", Tone::Late)
        }
        Some(report) => verdict(report),
        None if job.alive == 0 => ("GONE", Tone::Dim),
        None => ("NOT JUDGED", Tone::Dim),
    }
}

/// A line about the other jobs that are alive or in trouble: `4 other jobs on this node, 1 STUCK, 2 over  [9]`, or `1
/// other job on this node: STUCK  [9]`. `None` if there is none.
pub(super) fn others(model: &ViewModel<'_>) -> Option<Line> {
    let others: Vec<&NodeJob> = (other_jobs(model))
        .filter(|job| job.alive > 0 || trouble(model, job).is_some())
        .collect();
    if others.is_empty() {
        return None;
    }
    let n = others.len() as u64;
    let mut line = vec![plain(format!("{} on this node", count(n, "other job")))];
    // A job without a process no longer hangs, whatever its record shows.
    let (alive, over): (Vec<&NodeJob>, Vec<_>) = others.into_iter().partition(|job| job.alive > 0);
    if let Some((alike, name, tone)) = worst(model, &alive) {
        let words = match n {
            1 => format!(": {name}"),
            _ => format!(", {alike} {name}"),
        };
        line.push(styled(words, tone));
    }
    if !over.is_empty() {
        line.push(plain(format!(", {} over", over.len())));
    }
    line.push(styled(model.hint("  ", &[Action::View(9)], ""), Tone::Dim));
    Some(line)
}

/// The jobs that are not on display.
fn other_jobs<'a>(model: &'a ViewModel<'_>) -> impl Iterator<Item = &'a NodeJob> {
    let jobs = model.jobs.iter();
    jobs.filter(|job| *job.name != *model.snapshot.job)
}

/// How many of these jobs are in the gravest trouble of all, and its word; `None` if none is in trouble.
fn worst(model: &ViewModel<'_>, jobs: &[&NodeJob]) -> Option<(usize, &'static str, Tone)> {
    let in_trouble = || jobs.iter().filter(|job| trouble(model, job).is_some());
    let worst = in_trouble().min_by_key(|job| trouble(model, job))?;
    let (name, tone) = word(model, worst);
    let alike = in_trouble().filter(|job| word(model, job).0 == name);
    Some((alike.count(), name, tone))
}

/// What the first line of a view says of the other jobs that are alive and in trouble: `other jobs: 1 STUCK [9]`.
/// `None` if there is none.
pub(in crate::state) fn trouble_elsewhere(model: &ViewModel<'_>) -> Option<StyledText> {
    let alive: Vec<&NodeJob> = other_jobs(model).filter(|job| job.alive > 0).collect();
    let (number, name, tone) = worst(model, &alive)?;
    let key = model.hint(" ", &[Action::View(9)], "");
    Some(styled(format!("other jobs: {number} {name}{key}"), tone))
}
