//! Prints the ranks that wait because of a finding as text.

use rcomm_recorder::model::Rank;
use rcomm_verdict::causes::{Link, chain};
use rcomm_verdict::format::{Ranks, group_label, group_labels, operation};
use rcomm_verdict::{Finding, Report, Wait};

/// The lines for one finding; without a wait-for graph, the list of victims.
pub(super) fn format(finding: &Finding, report: &Report) -> Vec<String> {
    let lines: Vec<String> = if finding.cycle.is_empty() {
        chain(report, &finding.culprit_ranks)
            .iter()
            .map(format_link)
            .collect()
    } else {
        format_cycle(&finding.cycle, &report.waits)
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

fn format_link(link: &Link) -> String {
    let labels: Vec<String> = link.groups.iter().map(group_label).collect();
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
        group_labels(&labels),
    )
}

/// One line for each rank of a cycle, with the operation in which it waits for the next.
fn format_cycle(cycle: &[Rank], waits: &[Wait]) -> Vec<String> {
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
                    operation(&wait.op, wait.seq, &wait.group)
                ),
                None => format!("rank {rank} waits for rank {next}"),
            }
        })
        .collect()
}
