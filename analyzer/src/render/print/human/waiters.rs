//! Prints the ranks that wait because of a finding as text.

use rcomm_recorder::model::Rank;
use rcomm_verdict::causes::{Link, chain};
use rcomm_verdict::format::{GroupNames, Ranks, is_undescribed};
use rcomm_verdict::{Finding, Report, Wait};

/// The lines for one finding; the list of victims if the report has no wait-for graph for it.
pub(super) fn format(finding: &Finding, report: &Report, names: &GroupNames) -> Vec<String> {
    let lines: Vec<String> = if finding.cycle.is_empty() {
        chain(report, &finding.culprit_ranks)
            .iter()
            .map(|link| format_link(link, names))
            .collect()
    } else {
        format_cycle(&finding.cycle, &report.waits, names)
    };
    if !lines.is_empty() || finding.victim_ranks.is_empty() {
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
    vec![format!("{}{more}", Ranks(&finding.victim_ranks))]
}

fn format_link(link: &Link, names: &GroupNames) -> String {
    let groups = match link.groups.as_slice() {
        [one] if is_undescribed(one) => format!("group {}", names.in_text(one)),
        [one] => names.name(one),
        // Numbers alone could be taken for ranks.
        several if several.iter().all(is_undescribed) => format!("groups {}", names.fold(several)),
        several => names.fold(several),
    };
    let seq = match link.seq {
        (first, last) if first == last => format!("#{first}"),
        (first, last) => format!("#{first} to #{last}"),
    };
    format!(
        "{}{} {} in {} {seq} on {}",
        if link.level > 1 { "behind them " } else { "" },
        Ranks(&link.ranks),
        if link.ranks.len() == 1 {
            "waits"
        } else {
            "wait"
        },
        link.op,
        groups,
    )
}

/// One line for each rank of a cycle, with the operation in which it waits for the next.
fn format_cycle(cycle: &[Rank], waits: &[Wait], names: &GroupNames) -> Vec<String> {
    cycle
        .iter()
        .zip(cycle.iter().cycle().skip(1))
        .map(|(&rank, &next)| {
            let wait = waits
                .iter()
                .find(|wait| wait.rank == rank && wait.on.contains(&next));
            match wait {
                Some(wait) => format!(
                    "rank {rank} waits for rank {next} in {}",
                    names.operation(&wait.op, wait.seq, &wait.group)
                ),
                None => format!("rank {rank} waits for rank {next}"),
            }
        })
        .collect()
}
