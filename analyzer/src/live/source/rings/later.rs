//! The processes of a later attempt of a job whose rings are all of processes that are gone. A program may take seconds
//! from its start until it has a ring.

use crate::live::source::RankProcess;
use rcomm_recorder::model::Rank;
use rcomm_verdict::LaterAttempt;
use std::collections::BTreeSet;

/// The newest attempt of this job after `attempt` that has one of these processes; `None` if there is none.
pub(super) fn later_attempt(
    job: &str,
    attempt: u32,
    processes: &[RankProcess],
) -> Option<LaterAttempt> {
    let of_job = || {
        let processes = processes.iter().filter(|process| process.is_of(job));
        processes.map(|process| &process.launched)
    };
    let attempts = of_job().map(|launched| launched.attempt);
    let newest = attempts.filter(|&other| other > attempt).max()?;
    let of_newest = of_job().filter(|launched| launched.attempt == newest);
    let ranks: BTreeSet<Rank> = of_newest.map(|launched| launched.rank).collect();
    Some(LaterAttempt {
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
        let of = |processes: &[RankProcess]| later_attempt("train", 1, processes);
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[process(0, "train", 1), process(0, "other", 2)]), None);
        let processes = [
            process(3, "train", 2),
            process(0, "train", 2),
            process(1, "train", 1),
        ];
        let expected = LaterAttempt {
            attempt: 2,
            ranks: vec![0, 3],
        };
        assert_eq!(of(&processes), Some(expected));
    }
}
