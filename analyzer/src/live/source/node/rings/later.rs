//! Finds the processes of a later attempt of a job of which all processes with rings are gone. A program may take
//! seconds from its start until it has a ring.

use crate::live::source::RankProcess;
use rcomm_recorder::model::Rank;
use rcomm_verdict::LaterAttempt;
use std::collections::BTreeSet;

/// The newest attempt of this job after `attempt` that has one of these processes, with the ranks of those that have no
/// ring; `None` if there is no such attempt, or if all of its processes have rings.
pub(super) fn later_attempt(
    job: &str,
    attempt: u32,
    processes: &[RankProcess],
    has_ring: impl Fn(&RankProcess) -> bool,
) -> Option<LaterAttempt> {
    let of_job = || {
        let processes = processes.iter().filter(|process| process.is_of(job));
        processes.map(|process| (process, process.launched.attempt))
    };
    let attempts = of_job().map(|(_, attempt)| attempt);
    let newest = attempts.filter(|&other| other > attempt).max()?;
    let without_ring = of_job()
        .filter(|&(process, attempt)| attempt == newest && !has_ring(process))
        .map(|(process, _)| process.launched.rank);
    let ranks: BTreeSet<Rank> = without_ring.collect();
    (!ranks.is_empty()).then(|| LaterAttempt {
        attempt: newest,
        ranks: ranks.into_iter().collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::launch::Launched;

    fn process(rank: Rank, job: &str, attempt: u32) -> RankProcess {
        RankProcess {
            pid: 100 + rank,
            launched: Launched {
                rank,
                world_size: 4,
                job: Some(job.to_owned()),
                attempt,
            },
            variables: Default::default(),
        }
    }

    #[test]
    fn only_processes_of_the_same_job_and_a_later_attempt_count() {
        let after_attempt_1 =
            |processes: &[RankProcess]| later_attempt("train", 1, processes, |_| false);
        assert_eq!(after_attempt_1(&[]), None);
        assert_eq!(
            after_attempt_1(&[process(0, "train", 1), process(0, "other", 2)]),
            None
        );
        let processes = [
            process(3, "train", 2),
            process(0, "train", 2),
            process(1, "train", 1),
        ];
        let expected = LaterAttempt {
            attempt: 2,
            ranks: vec![0, 3],
        };
        assert_eq!(after_attempt_1(&processes), Some(expected));
    }

    #[test]
    fn processes_that_have_rings_are_left_out() {
        let processes = [process(3, "train", 2), process(0, "train", 2)];
        let ranks_without = |with_ring: &[Rank]| {
            let has_ring = |process: &RankProcess| with_ring.contains(&process.launched.rank);
            later_attempt("train", 1, &processes, has_ring).map(|later| later.ranks)
        };
        assert_eq!(ranks_without(&[0]), Some(vec![3]));
        assert_eq!(ranks_without(&[0, 3]), None);
    }
}
