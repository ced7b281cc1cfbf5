//! Formats the ranks that wait because of a finding, and the errors of those whose operations have failed, as text.

use rcomm_recorder::model::Rank;
use rcomm_verdict::causes::{Link, chain};
use rcomm_verdict::format::{GroupNames, Ranks, is_undescribed};
use rcomm_verdict::{Finding, Report};
use std::collections::BTreeSet;

/// Formats the errors of the ranks of a finding whose operations have failed: a line for each error.
pub(crate) fn failures(finding: &Finding, report: &Report) -> Vec<String> {
    let mut by_error: Vec<(&str, Vec<Rank>)> = Vec::new();
    let named = finding.victim_ranks.iter().chain(&finding.culprit_ranks);
    let ranks: BTreeSet<Rank> = named.copied().collect();
    for rank in ranks {
        let Some(error) = report.failure(rank) else {
            continue;
        };
        match by_error.iter_mut().find(|(known, _)| *known == error) {
            Some((_, ranks)) => ranks.push(rank),
            None => by_error.push((error, vec![rank])),
        }
    }
    let line = |(error, ranks): &(&str, Vec<Rank>)| match *error {
        "" => format!("{}, with an error that is not recorded", Ranks(ranks)),
        error => format!("{}: {error}", Ranks(ranks)),
    };
    by_error.iter().map(line).collect()
}

/// Formats the ranks that wait because of a finding, as lines of text. If the report's wait-for graph does not show
/// them, one line lists the victims that still wait.
pub(super) fn format(finding: &Finding, report: &Report, names: &GroupNames) -> Vec<String> {
    let lines: Vec<String> = if finding.cycle.is_empty() {
        chain(report, &finding.culprit_ranks)
            .iter()
            .map(|link| format_link(link, report, names))
            .collect()
    } else {
        format_cycle(&finding.cycle, report, names)
    };
    let waiting = finding.victim_ranks.iter().copied();
    let waiting: Vec<Rank> = waiting
        .filter(|&rank| report.failure(rank).is_none())
        .collect();
    if !lines.is_empty() || waiting.is_empty() {
        return lines;
    }
    let unnamed = finding
        .victim_count
        .saturating_sub(finding.victim_ranks.len());
    let more = if unnamed > 0 {
        format!(" and {unnamed} more")
    } else {
        String::new()
    };
    vec![format!("{}{more}", Ranks(&waiting))]
}

fn format_link(link: &Link, report: &Report, names: &GroupNames) -> String {
    let groups = match link.groups.as_slice() {
        [group] if is_undescribed(group) => format!("group {}", names.in_text(group)),
        [group] => names.name(group),
        // Numbers alone could be taken for ranks.
        several if several.iter().all(is_undescribed) => format!("groups {}", names.fold(several)),
        several => names.fold(several),
    };
    let seq = match link.seq {
        (first, last) if first == last => format!("#{first}"),
        (first, last) => format!("#{first} to #{last}"),
    };
    let failed = link.ranks.iter().copied();
    let failed: Vec<Rank> = failed
        .filter(|&rank| report.failure(rank).is_some())
        .collect();
    let (verb, end) = match failed.len() {
        0 if link.ranks.len() == 1 => ("waits", String::new()),
        0 => ("wait", String::new()),
        n if n == link.ranks.len() => ("waited", ", which failed".to_owned()),
        _ => ("wait", format!("; it failed on {}", Ranks(&failed))),
    };
    format!(
        "{}{} {verb} in {} {seq} on {groups}{end}",
        if link.level > 1 { "behind them " } else { "" },
        Ranks(&link.ranks),
        link.op,
    )
}

/// One line for each rank of a cycle, with the operation in which it waits for the next.
fn format_cycle(cycle: &[Rank], report: &Report, names: &GroupNames) -> Vec<String> {
    cycle
        .iter()
        .zip(cycle.iter().cycle().skip(1))
        .map(|(&rank, &next)| {
            let wait = report
                .waits
                .iter()
                .find(|wait| wait.rank == rank && wait.on.contains(&next));
            match wait {
                Some(wait) => format!(
                    "rank {rank} {} for rank {next} in {}",
                    if report.failure(rank).is_some() {
                        "waited"
                    } else {
                        "waits"
                    },
                    names.operation(&wait.op, wait.seq, &wait.group)
                ),
                None => format!("rank {rank} waits for rank {next}"),
            }
        })
        .collect()
}
