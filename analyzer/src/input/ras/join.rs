//! Adds faults of RAS to the findings of a report.

use super::{RasFault, RasFaultKind, RasReport, RasSubject};
use rcomm_recorder::model::Rank;
use rcomm_verdict::{Code, Finding, RankReport, Report, Severity, Verdict};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Appends the most severe fault of RAS reports about each rank to the sentence of the first error that names the rank
/// as a culprit. If NCCL considers the rank dead, an error E102 or E150 also gains confidence.
///
/// A dead or failed rank that no error names becomes a finding E150, and a verdict `healthy`, `inconclusive`, `running`
/// or `slow` then becomes `stuck`.
pub fn join<'a>(report: &mut Report, ras: impl IntoIterator<Item = &'a RasReport>) {
    let mut of_rank: BTreeMap<Rank, Vec<&RasFault>> = BTreeMap::new();
    for fault in ras.into_iter().flat_map(|report| &report.faults) {
        if let Some(rank) = rank_of(&fault.process, report) {
            of_rank.entry(rank).or_default().push(fault);
        }
    }
    for (rank, mut faults) in of_rank {
        // The most severe fault is enough: a dead process does not answer either.
        faults.sort_by_key(|fault| order_of_severity(&fault.kind));
        let named = report.findings.iter_mut().find(|finding| {
            finding.severity == Severity::Error && finding.culprit_ranks.contains(&rank)
        });
        match named {
            Some(finding) => support(finding, rank, faults[0]),
            None if order_of_severity(&faults[0].kind) <= LAST_FAILURE => {
                accuse(report, rank, faults[0])
            }
            None => {}
        }
    }
}

/// Faults up to this position are enough to report the rank as failed: dead processes and errors. Silence, lower
/// operation counts and an abort are not.
const LAST_FAILURE: u8 = 1;

/// The position of a fault in the order of severity; 0 is the most severe.
fn order_of_severity(kind: &RasFaultKind) -> u8 {
    match kind {
        RasFaultKind::Dead => 0,
        RasFaultKind::Error(_) => 1,
        RasFaultKind::Unresponsive => 2,
        RasFaultKind::Behind { .. } => 3,
        // A program may abort because it waits too long for another rank, so the process may be a victim.
        RasFaultKind::Aborted => 4,
    }
}

/// The rank of a process, by host and process id or, if those do not decide, by its rank in a communicator as large as
/// the job; `None` if neither decides.
fn rank_of(process: &RasSubject, report: &Report) -> Option<Rank> {
    let unique_match = |fits: &dyn Fn(&RankReport) -> bool| {
        let mut fitting = report.ranks.iter().filter(|rank| fits(rank));
        let first = fitting.next()?;
        fitting.next().is_none().then_some(first.rank)
    };
    if process.pid != 0 {
        let same_host = |host: &str| short(host) == short(&process.host);
        let exact = unique_match(&|rank| rank.pid == process.pid && same_host(&rank.host));
        // An address cannot be compared with a host name: then the process id must be unique.
        let by_pid = || {
            process.host.parse::<IpAddr>().ok()?;
            unique_match(&|rank| rank.pid == process.pid)
        };
        if let Some(rank) = exact.or_else(by_pid) {
            return Some(rank);
        }
    }
    // If records name processes, a process that none of them names belongs to another job, unless the records of its
    // rank were not read.
    if report.ranks.iter().any(|rank| rank.pid != 0) {
        let (rank, size) = process.rank?;
        let is_unread = |known: &&RankReport| known.rank == rank && !known.read;
        return (size as usize == report.ranks.len())
            .then(|| report.ranks.iter().find(is_unread))
            .flatten()
            .map(|known| known.rank);
    }
    let (rank, size) = process.rank?;
    (size as usize == report.ranks.len() && rank < size).then_some(rank)
}

/// A host name without its domain; addresses are unchanged.
fn short(host: &str) -> &str {
    match host.parse::<IpAddr>() {
        Ok(_) => host,
        Err(_) => host.split('.').next().unwrap_or(host),
    }
}

fn format_fault(fault: &RasFault) -> String {
    let verb = match &fault.kind {
        RasFaultKind::Dead => "is considered dead".to_owned(),
        RasFaultKind::Unresponsive => "did not answer".to_owned(),
        RasFaultKind::Error(error) => format!("reported {error}"),
        RasFaultKind::Behind {
            function,
            launched,
            others,
        } => format!("launched {launched} {function} operations where most launched {others}"),
        RasFaultKind::Aborted => "aborted its communicator".to_owned(),
    };
    let RasSubject {
        host, pid, device, ..
    } = &fault.process;
    let mut process = if *pid == 0 {
        "its process".to_owned()
    } else {
        format!("its process {pid} on {host}")
    };
    if !device.is_empty() {
        process.push_str(&format!(" (GPU {device})"));
    }
    format!("{process} {verb}")
}

/// Adds the fault of a rank to the sentence of a finding that accuses the rank.
fn support(finding: &mut Finding, rank: Rank, fault: &RasFault) {
    let subject = if finding.culprit_ranks.len() > 1 {
        format!("rank {rank}: ")
    } else {
        String::new()
    };
    finding
        .sentence
        .push_str(&format!("; NCCL RAS: {subject}{}", format_fault(fault)));
    // A missing record (E102) or a process that seems gone (E150) proves less than NCCL's statement that it cannot
    // reach the process.
    if matches!(finding.code, Code::E102 | Code::E150) && fault.kind == RasFaultKind::Dead {
        finding.confidence = finding.confidence.max(0.97);
    }
}

/// Adds a finding E150 against a rank that no error names.
fn accuse(report: &mut Report, rank: Rank, fault: &RasFault) {
    let after_errors = report
        .findings
        .iter()
        .position(|finding| finding.severity != Severity::Error)
        .unwrap_or(report.findings.len());
    let ids = report.findings.iter().map(|finding| finding.id);
    let id = ids.max().unwrap_or(0) + 1;
    let is_waiting = |other: &&RankReport| other.pending > 0 && other.rank != rank;
    report.findings.insert(
        after_errors,
        Finding {
            id,
            // The confidence is lower if the report has other errors: ranks may wait because of those. The records do
            // not show whether they wait for this rank, so all ranks with pending operations count as its victims.
            confidence: if after_errors == 0 { 0.8 } else { 0.5 },
            victim_count: report.ranks.iter().filter(is_waiting).count(),
            next: format!(
                "look at the log and the exit code of rank {rank}, and the kernel's log of its host"
            ),
            ..Finding::rank_failed(
                vec![rank],
                format!(
                    "rank {rank} seems to have failed; NCCL RAS: {}",
                    format_fault(fault)
                ),
            )
        },
    );
    use Verdict::{Healthy, Inconclusive, Running, Slow};
    if matches!(report.verdict, Healthy | Inconclusive | Running | Slow) {
        report.verdict = Verdict::Stuck;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::simulate::{Simulation, Situation};
    use rcomm_verdict::{Policy, analyze};

    /// The report on a simulated job of 16 ranks on two hosts, a minute after its fault.
    fn report_of(situation: Situation) -> Report {
        let simulation = Simulation::new(situation, 16, 0);
        let mut dumps = simulation.dumps_at(simulation.fault_ns() + 60_000_000_000);
        for (rank, dump) in (0..).zip(&mut dumps) {
            dump.identity.host = format!("n{}.example.org", rank / 8);
            dump.identity.pid = 100 + rank % 8;
        }
        analyze(&dumps, &Policy::default())
    }

    fn ras(host: &str, pid: u32, rank: Option<(u32, u32)>, kind: RasFaultKind) -> RasReport {
        let process = RasSubject {
            host: host.into(),
            pid,
            device: "1".into(),
            rank,
        };
        RasReport {
            faults: vec![RasFault { process, kind }],
        }
    }

    #[test]
    fn a_fault_on_the_process_of_a_culprit_extends_the_sentence_of_its_finding() {
        let mut report = report_of(Situation::StuckRank);
        let before = report.clone();
        let rank = before.findings[0].culprit_ranks[0];
        let (host, pid) = (format!("n{}", rank / 8), 100 + rank % 8);
        // The rank in a smaller communicator does not matter if the process is identified.
        join(
            &mut report,
            &[ras(&host, pid, Some((1, 2)), RasFaultKind::Unresponsive)],
        );
        let expected = format!("NCCL RAS: its process {pid} on {host} (GPU 1) did not answer");
        assert!(
            report.findings[0].sentence.ends_with(&expected),
            "{}",
            report.findings[0].sentence
        );
        assert_eq!(report.findings.len(), before.findings.len());
    }

    #[test]
    fn a_fault_on_a_process_that_is_not_in_the_job_changes_nothing() {
        let before = report_of(Situation::StuckRank);
        for foreign in [
            ras("n7", 101, None, RasFaultKind::Dead),
            ras("n0", 999, None, RasFaultKind::Dead),
        ] {
            let mut report = before.clone();
            join(&mut report, &[foreign]);
            assert_eq!(report, before);
        }
        // Two ranks have this process id, on two hosts: an address cannot distinguish them.
        let mut report = before.clone();
        join(
            &mut report,
            &[ras("10.0.0.7", 101, None, RasFaultKind::Dead)],
        );
        assert_eq!(report, before);
    }

    #[test]
    fn a_dead_process_that_no_error_names_becomes_a_finding_and_a_silent_one_does_not() {
        let mut report = report_of(Situation::Healthy);
        let before = report.clone();
        join(
            &mut report,
            &[ras("n1", 102, None, RasFaultKind::Unresponsive)],
        );
        assert_eq!(report, before);
        join(&mut report, &[ras("n1", 102, None, RasFaultKind::Dead)]);
        assert_eq!(report.findings[0].code, Code::E150);
        assert_eq!(report.findings[0].culprit_ranks, [10]);
        assert_eq!(report.verdict, Verdict::Stuck);
    }
}
