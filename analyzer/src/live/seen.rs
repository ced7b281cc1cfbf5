//! States what no record shows: which ranks do not answer or were never read, and what NCCL's RAS reports.

use super::RankView;
use super::latest::{Watched, is_open};
use crate::input::ras::{Behind, Communicator, Member, MemberState};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, RingReader};
use rcomm_verdict::format::{format_time, rank_set};
use rcomm_verdict::{Finding, Policy, Problem, is_exception};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The confidence of a finding from launch counts alone: they show which rank is behind, but not whether others wait
/// for it.
const CONFIDENCE_BY_COUNTS: f64 = 0.6;

/// The problem that names the ranks without a record for which a source states a reason, and the first rank's reason;
/// `None` if there is no such rank.
pub(super) fn never_read(ranks: &[RankView]) -> Option<Problem> {
    let unread = ranks.iter().filter(|view| view.dumps.is_empty());
    let unread: Vec<(Rank, &str)> = unread
        .filter_map(|view| Some((view.rank, view.failure.as_deref()?)))
        .collect();
    let sentence = match unread.as_slice() {
        [] => return None,
        [(rank, why)] => format!("rank {rank} was not read: {why}"),
        [(first, why), ..] => {
            let numbers: Vec<Rank> = unread.iter().map(|&(rank, _)| rank).collect();
            let numbers = rank_set(&numbers, 6);
            format!("ranks {numbers} were not read; rank {first}: {why}")
        }
    };
    Some(Problem::unreadable_dump("", sentence))
}

/// The finding W150, which names the ranks that no longer answer; `None` if all ranks answer.
pub(super) fn silence(silent: &BTreeSet<Rank>, ranks: &[RankView]) -> Option<Finding> {
    if silent.is_empty() {
        return None;
    }
    let culprits: Vec<Rank> = silent.iter().copied().collect();
    let views = || ranks.iter().filter(|view| view.silent);
    let longest = views().max_by_key(|view| view.silence)?;
    let age_ms = longest.silence.unwrap_or_default().as_secs_f64() * 1e3;
    let age = format_time(age_ms);
    let failures: BTreeSet<Option<&str>> = views().map(|view| view.failure.as_deref()).collect();
    let reason = |subject: &str| {
        let why = longest.failure.as_ref();
        why.map_or_else(String::new, |why| format!("{subject}: {why}"))
    };
    let sentence = match culprits.as_slice() {
        [rank] => format!("rank {rank} has not answered for {age}{}", reason("")),
        many => format!(
            "{} ranks ({}) do not answer, rank {} for the longest time, {age}{}",
            many.len(),
            rank_set(many, 6),
            longest.rank,
            match failures.len() {
                1 => reason(""),
                _ => reason(&format!("; rank {}", longest.rank)),
            }
        ),
    };
    let hosts: BTreeSet<&str> = views().map(|view| view.host.as_ref()).collect();
    let on_host = match hosts.into_iter().collect::<Vec<_>>().as_slice() {
        [host] if !host.is_empty() => format!(" on {host}"),
        _ => String::new(),
    };
    let next = match culprits.len() {
        1 => format!(
            "check whether the process is alive{on_host}; its last record is shown as it was"
        ),
        _ => format!(
            "check whether the processes are alive{on_host}; their last records are shown as they were"
        ),
    };
    Some(Finding {
        age_ms: Some(age_ms),
        next,
        ..Finding::silent_rank(culprits, sentence)
    })
}

/// The time until the findings on ended processes, recorded failures and exceptions may change although no record does;
/// `None` if they will not. They may change when one of these is as old as [`Policy::SETTLE`], and when a process that
/// ended outside of any operation has been gone for `overdue`.
pub(super) fn until_change(ranks: &[RankView], now_ns: i64, overdue: Duration) -> Option<Duration> {
    let left = |since_ns: i64, limit: Duration| {
        let since = now_ns.saturating_sub(since_ns);
        let since = Duration::from_nanos(u64::try_from(since).unwrap_or(0));
        limit.checked_sub(since).filter(|left| !left.is_zero())
    };
    let dumps = || ranks.iter().flat_map(|view| &view.dumps);
    let is_dead = |dump: &&Arc<Dump>| dump.identity.reason == RingReader::OWNER_IS_DEAD;
    let ends = dumps()
        .filter(is_dead)
        .map(|dump| dump.identity.dump_time_ns);
    let failures = dumps().flat_map(|dump| &dump.failures);
    let statuses = dumps().filter_map(|dump| dump.status.as_ref());
    let exceptions = statuses.filter(|status| is_exception(&status.phase));
    let settled = ends
        .chain(failures.map(|failure| failure.time_ns))
        .chain(exceptions.map(|status| status.phase_since_ns))
        .filter_map(|ns| left(ns, Policy::SETTLE));
    let idle = dumps()
        .filter(is_dead)
        .filter(|dump| !dump.entries.iter().any(is_open));
    let missed = idle.filter_map(|dump| left(dump.identity.dump_time_ns, overdue));
    settled.chain(missed).min()
}

/// The global rank of a member of a communicator; `None` if it cannot be identified.
///
/// The member is identified by its process id if records hold that id (and by host and device if several processes have
/// it), else by host and device among the ranks whose records hold no process id. If none or several ranks match, it is
/// identified by its rank in the communicator, provided that the communicator is as large as the job. This assumes the
/// job's order of ranks, which the communicator may not have.
fn rank_of(member: &Member, communicator: &Communicator, ranks: &[RankView]) -> Option<Rank> {
    let process = &member.process;
    let pid = |view: &RankView| view.first_dump().map_or(0, |dump| dump.identity.pid);
    let has_host = |view: &&RankView| !process.host.is_empty() && *view.host == *process.host;
    let has_device = |view: &&RankView| Some(view.local_rank) == process.device;
    let mut matching: Vec<&RankView> = match process.pid {
        0 => vec![],
        wanted => ranks.iter().filter(|view| pid(view) == wanted).collect(),
    };
    // Process ids repeat from host to host, and a process may hold several devices.
    for matches in [&has_host as &dyn Fn(&&RankView) -> bool, &has_device] {
        if matching.len() > 1 {
            matching.retain(matches);
        }
    }
    if matching.is_empty() {
        matching = ranks
            .iter()
            .filter(|view| pid(view) == 0 && has_host(view) && has_device(view))
            .collect();
    }
    match matching.as_slice() {
        [view] => Some(view.rank),
        _ if communicator.size as usize == ranks.len() => {
            ranks.get(member.rank? as usize).map(|view| view.rank)
        }
        _ => None,
    }
}

/// A member as the subject of a sentence; `rank` is its global rank, if known.
fn format_member(member: &Member, rank: Option<Rank>) -> String {
    let process = &member.process;
    let mut facts = Vec::new();
    if !process.host.is_empty() {
        facts.push(process.host.clone());
    }
    if process.pid > 0 {
        facts.push(format!("process {}", process.pid));
    }
    if let Some(device) = process.device {
        facts.push(format!("device {device}"));
    }
    let facts = match facts.as_slice() {
        [] => String::new(),
        facts => format!(" ({})", facts.join(", ")),
    };
    match (rank, member.rank) {
        (Some(rank), _) => format!("rank {rank}{facts}"),
        (None, Some(in_comm)) => format!("rank {in_comm} of its communicator{facts}"),
        (None, None) => format!("a process{facts}"),
    }
}

/// Sets the remarks on each rank to NCCL's reports on the rank. If no record states the host of a rank, sets it to the
/// host that NCCL reports.
pub(super) fn set_remarks(watched: &[Watched], ranks: &mut [RankView]) {
    let mut remarks: BTreeMap<Rank, Vec<String>> = BTreeMap::new();
    let mut hosts: BTreeMap<Rank, String> = BTreeMap::new();
    for Watched { communicator, .. } in watched {
        for member in &communicator.members {
            let Some(rank) = rank_of(member, communicator, ranks) else {
                continue;
            };
            let counts = member.launched.iter().filter(|(_, count)| *count > 0);
            let counts: Vec<String> = counts
                .map(|(kind, count)| format!("{count} {kind}"))
                .collect();
            let launched = match counts.as_slice() {
                [] => String::new(),
                counts => format!(", launched {}", counts.join(", ")),
            };
            let (name, state) = (&communicator.name, member.state.word());
            let text = match member.rank {
                Some(in_comm) => {
                    format!("NCCL: rank {in_comm} of communicator {name} is {state}{launched}")
                }
                None => format!("NCCL: its process is {state}"),
            };
            remarks.entry(rank).or_default().push(text);
            hosts
                .entry(rank)
                .or_insert_with(|| member.process.host.clone());
        }
    }
    for view in ranks {
        view.remarks = remarks.remove(&view.rank).unwrap_or_default();
        if view.host.is_empty()
            && let Some(host) = hosts.remove(&view.rank)
        {
            view.host = host.into();
        }
    }
}

/// Makes a finding from culprits and a sentence.
type NewFinding = fn(Vec<Rank>, String) -> Finding;

/// The findings from NCCL's reports: processes that NCCL considers dead or that do not answer it, errors on its
/// communicators, and ranks whose launch counts have been behind without a change for `overdue` at the time `at`, as
/// [`Moment::elapsed`](super::Moment::elapsed). The last kind is left out if the state of the job `is_explained` by
/// other findings. In each communicator, only the first kind of operation and the first count that are behind become a
/// finding.
pub(super) fn library_findings(
    watched: &[Watched],
    ranks: &[RankView],
    at: Duration,
    overdue: Duration,
    is_explained: bool,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut reported: BTreeSet<(u32, String)> = BTreeSet::new();
    for Watched {
        communicator,
        since,
    } in watched
    {
        let rank = |member: &Member| rank_of(member, communicator, ranks);
        let name = &communicator.name;
        for member in &communicator.members {
            let (new_finding, verb): (NewFinding, String) = match &member.state {
                MemberState::Dead => (
                    Finding::rank_failed,
                    "was given up by NCCL: its process no longer answers".to_owned(),
                ),
                MemberState::Failed(error) => (
                    Finding::rank_failed,
                    format!("reported {error} on NCCL's communicator {name}"),
                ),
                MemberState::Unresponsive => (
                    Finding::silent_rank,
                    "does not answer NCCL's RAS".to_owned(),
                ),
                _ => continue,
            };
            let process = &member.process;
            let key = match process.pid {
                0 => (member.rank.unwrap_or_default(), name.clone()),
                pid => (pid, process.host.clone()),
            };
            // One process is a member of many communicators.
            if !reported.insert(key) {
                continue;
            }
            let rank = rank(member);
            let sentence = format!("{} {verb}", format_member(member, rank));
            let host = match process.host.as_str() {
                "" => "its host".to_owned(),
                host => host.to_owned(),
            };
            let next = format!("look for the process, and for errors of its device, on {host}");
            let culprits = rank.into_iter().collect();
            findings.push(Finding {
                next,
                ..new_finding(culprits, sentence)
            });
        }
        let unchanged = at.saturating_sub(*since);
        if is_explained || unchanged < overdue {
            continue;
        }
        let behind = communicator.behind();
        let Some(&first) = behind.first() else {
            continue;
        };
        let Behind {
            kind,
            launched,
            others,
            ..
        } = first;
        let members: Vec<&Member> = behind
            .iter()
            .filter(|late| (late.kind, late.launched) == (kind, launched))
            .map(|late| late.member)
            .collect();
        let mut culprits: Vec<Rank> = members.iter().filter_map(|member| rank(member)).collect();
        culprits.sort_unstable();
        let subject = match (members.len(), culprits.len()) {
            (1, _) => format!("{} has", format_member(first.member, rank(first.member))),
            (many, joined) if many == joined => {
                format!("{many} ranks ({}) have", rank_set(&culprits, 6))
            }
            (many, _) => format!("{many} members have"),
        };
        let sentence = format!(
            "{subject} launched {launched} {kind} on communicator {name}, others {others}; no count has \
             moved for {} s",
            unchanged.as_secs()
        );
        let whose = if members.len() == 1 {
            "its call stack"
        } else {
            "their call stacks"
        };
        let next = format!("take {whose}; NCCL counts launches only, a record shows more");
        findings.push(Finding {
            confidence: CONFIDENCE_BY_COUNTS,
            next,
            ..Finding::not_joined(culprits, sentence)
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::ras::Process;
    use rcomm_verdict::Code;

    /// Four ranks on two hosts; the records of even ranks hold process ids.
    fn ranks() -> Vec<RankView> {
        let view = |rank: Rank| {
            let mut dump = Dump::default();
            dump.identity.pid = if rank.is_multiple_of(2) { 100 } else { 0 };
            RankView {
                host: format!("n{}", rank / 2).into(),
                local_rank: rank % 2,
                dumps: vec![Arc::new(dump)],
                ..RankView::missing(rank)
            }
        };
        (0..4).map(view).collect()
    }

    fn member(rank: u32, host: &str, pid: u32, device: u32, launched: u64) -> Member {
        Member {
            rank: Some(rank),
            process: Process {
                host: host.into(),
                pid,
                device: Some(device),
            },
            state: MemberState::Running,
            launched: vec![("AllReduce".into(), launched)],
        }
    }

    /// A communicator of three members in another order than the ranks of the job.
    fn communicator(launched: [u64; 3]) -> Communicator {
        Communicator {
            name: "27a0".into(),
            size: 3,
            members: vec![
                member(0, "n1", 7, 1, launched[0]),
                member(1, "n1", 100, 0, launched[1]),
                member(2, "n0", 100, 0, launched[2]),
            ],
            others_launched: vec![],
        }
    }

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn members_are_joined_by_host_process_and_device() {
        let communicator = communicator([1, 1, 1]);
        let ranks = ranks();
        let joined: Vec<_> = communicator
            .members
            .iter()
            .map(|member| rank_of(member, &communicator, &ranks))
            .collect();
        // One by host and device, then two by a process id that occurs on both hosts.
        assert_eq!(joined, [Some(3), Some(2), Some(0)]);
        let unknown = member(1, "n9", 5, 0, 1);
        assert_eq!(rank_of(&unknown, &communicator, &ranks), None);
        let as_large_as_the_job = Communicator {
            size: 4,
            ..communicator
        };
        assert_eq!(rank_of(&unknown, &as_large_as_the_job, &ranks), Some(1));
    }

    #[test]
    fn of_several_silent_ranks_the_longest_silence_is_stated() {
        let silent = |seconds: &[u64], failures: &[Option<&str>]| {
            let views = seconds.iter().zip(failures).zip(1..);
            let views: Vec<RankView> = views
                .map(|((&silence, failure), rank)| RankView {
                    silent: true,
                    silence: Some(Duration::from_secs(silence)),
                    failure: failure.map(Into::into),
                    ..RankView::missing(rank)
                })
                .collect();
            let ranks = views.iter().map(|view| view.rank).collect();
            silence(&ranks, &views)
                .expect("silent ranks give a finding")
                .sentence
        };
        let refused = Some("connection refused");
        assert_eq!(
            silent(&[9], &[refused]),
            "rank 1 has not answered for 9.0 s: connection refused"
        );
        assert_eq!(
            silent(&[9, 20], &[refused, refused]),
            "2 ranks (1,2) do not answer, rank 2 for the longest time, 20 s: connection refused"
        );
        assert_eq!(
            silent(&[20, 9], &[refused, Some("timed out")]),
            "2 ranks (1,2) do not answer, rank 1 for the longest time, 20 s; rank 1: connection refused"
        );
        assert_eq!(
            silent(&[20, 9], &[None, refused]),
            "2 ranks (1,2) do not answer, rank 1 for the longest time, 20 s"
        );
    }

    #[test]
    fn launches_that_stay_behind_are_reported_when_no_count_moves() {
        let ranks = ranks();
        let first = Watched::update(&[], vec![communicator([42, 41, 42])], seconds(10));
        let moved = Watched::update(&first, vec![communicator([43, 41, 43])], seconds(12));
        let unmoved = Watched::update(&moved, vec![communicator([43, 41, 43])], seconds(30));
        assert_eq!(
            (unmoved[0].since, unmoved[0].is_uneven()),
            (seconds(12), true)
        );
        let found = |at, is_explained| {
            let (now, overdue) = (seconds(at), seconds(5));
            library_findings(&unmoved, &ranks, now, overdue, is_explained)
        };
        assert!(found(16, false).is_empty(), "too early");
        assert!(found(30, true).is_empty(), "a record explains more");
        let findings = found(30, false);
        let [finding] = findings.as_slice() else {
            panic!("one rank is behind: {findings:?}");
        };
        assert_eq!(
            (finding.code, finding.culprit_ranks.as_slice()),
            (Code::E101, &[2][..])
        );
        let expected = "rank 2 (n1, process 100, device 0) has launched 41 AllReduce on communicator \
                    27a0, others 43; no count has moved for 18 s";
        assert_eq!(finding.sentence, expected);
        let even = Watched::update(&unmoved, vec![communicator([43, 43, 43])], seconds(40));
        assert!(library_findings(&even, &ranks, seconds(90), seconds(5), false).is_empty());
    }

    #[test]
    fn a_process_that_nccl_considers_dead_or_failed_is_reported_once() {
        let ranks = ranks();
        let mut dead = communicator([42, 42, 42]);
        dead.members[0].state = MemberState::Dead;
        dead.members[1].state = MemberState::Failed("remote error".into());
        let mut other = dead.clone();
        other.name = "cf26".into();
        let watched = Watched::update(&[], vec![dead, other], seconds(1));
        let findings = library_findings(&watched, &ranks, seconds(1), seconds(5), false);
        let reported: Vec<_> = findings
            .iter()
            .map(|f| (f.code, f.culprit_ranks.clone()))
            .collect();
        assert_eq!(reported, [(Code::E150, vec![3]), (Code::E150, vec![2])]);
        assert!(
            findings[1]
                .sentence
                .contains("remote error on NCCL's communicator 27a0"),
            "{}",
            findings[1].sentence
        );
    }
}
