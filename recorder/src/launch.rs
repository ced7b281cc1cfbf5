//! The environment variables of launchers: a process's rank, and its job.
//!
//! | | torchrun | Open MPI | MPICH, PMI | Slurm |
//! |---|---|---|---|---|
//! | rank | `RANK` | `OMPI_COMM_WORLD_RANK` | `PMI_RANK` | `SLURM_PROCID` |
//! | world size | `WORLD_SIZE` | `OMPI_COMM_WORLD_SIZE` | `PMI_SIZE` | `SLURM_STEP_NUM_TASKS`, `SLURM_NTASKS` |
//! | job | `TORCHELASTIC_RUN_ID` | `PMIX_NAMESPACE`, `OMPI_MCA_ess_base_jobid` | | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
//! | attempt | `TORCHELASTIC_RESTART_COUNT` | | | `SLURM_RESTART_COUNT` |
//!
//! The launchers are tried from left to right, and the first whose rank variable is set is used: inside a Slurm
//! allocation, a process that `mpirun` started gets Open MPI's rank. If the launcher gives no job name, `MASTER_ADDR`
//! and `MASTER_PORT` serve as one.

use crate::model::Rank;

/// A process's rank and job, as set by its launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The process's rank, below `world_size`.
    pub rank: Rank,
    /// Number of ranks of the job.
    pub world_size: u32,
    /// The job's name, the same on all its ranks; `None` if the environment has none.
    pub job: Option<String>,
    /// How often the launcher has restarted the job; 0 if the environment has no such number.
    pub attempt: u32,
}

/// A function that looks up an environment variable by name.
type Environment<'e> = dyn Fn(&str) -> Option<String> + 'e;

/// The names of one launcher's variables, and how its job's name is found. A name is empty if the launcher has no such
/// variable.
struct LauncherVariables {
    rank: &'static str,
    world_size: &'static [&'static str],
    attempt: &'static str,
    job: fn(&Environment<'_>) -> Option<String>,
}

const LAUNCHERS: [LauncherVariables; 4] = [
    LauncherVariables {
        rank: "RANK",
        world_size: &["WORLD_SIZE"],
        attempt: "TORCHELASTIC_RESTART_COUNT",
        // torchrun sets "none" if it was given no id.
        job: |env| env("TORCHELASTIC_RUN_ID").filter(|job| job != "none"),
    },
    LauncherVariables {
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        attempt: "",
        job: |env| env("PMIX_NAMESPACE").or_else(|| env("OMPI_MCA_ess_base_jobid")),
    },
    LauncherVariables {
        rank: "PMI_RANK",
        world_size: &["PMI_SIZE"],
        attempt: "",
        job: |_| None,
    },
    LauncherVariables {
        rank: "SLURM_PROCID",
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        attempt: "SLURM_RESTART_COUNT",
        job: |env| {
            let job = env("SLURM_JOB_ID")?;
            Some(match env("SLURM_STEP_ID") {
                Some(step) => format!("{job}.{step}"),
                None => job,
            })
        },
    },
];

impl Launched {
    /// The launcher's values, read through `lookup` (for example `|name| std::env::var(name).ok()`). Only the first
    /// launcher whose rank variable is set counts. `None` if there is none, if its rank is not a number, if none of its
    /// variables has a world size, or if the rank is not below the world size. An empty variable counts as not set.
    pub fn from_environment(lookup: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let text = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let number = |name: &str| text(name)?.trim().parse::<u32>().ok();
        let launcher = LAUNCHERS
            .iter()
            .find(|launcher| text(launcher.rank).is_some())?;
        let rank = number(launcher.rank)?;
        let world_size = launcher.world_size.iter().find_map(|name| number(name))?;
        let master_name = || Some(format!("{}-{}", text("MASTER_ADDR")?, text("MASTER_PORT")?));
        (rank < world_size).then(|| Self {
            rank,
            world_size,
            job: (launcher.job)(&text).or_else(master_name),
            attempt: number(launcher.attempt).unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Option<Launched> {
        Launched::from_environment(|name| {
            let pair = pairs.iter().find(|(key, _)| *key == name);
            pair.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn rank_and_job_are_read_from_the_variables_of_each_launcher() {
        let torchrun = read(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
            ("SLURM_PROCID", "0"),
        ]);
        let expected = Launched {
            rank: 3,
            world_size: 8,
            job: Some("node0-29500".to_owned()),
            attempt: 2,
        };
        assert_eq!(torchrun, Some(expected));
        let slurm = read(&[
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "1"),
        ]);
        let slurm = slurm.expect("a rank");
        assert_eq!((slurm.rank, slurm.world_size), (5, 16));
        assert_eq!(slurm.job.as_deref(), Some("77.1"));
        let mpi = read(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("PMIX_NAMESPACE", "prterun-1"),
        ]);
        assert_eq!(
            mpi.and_then(|launched| launched.job).as_deref(),
            Some("prterun-1")
        );
        let pmi = read(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]);
        assert_eq!(pmi.and_then(|launched| launched.job), None);
    }

    #[test]
    fn inconsistent_variables_give_none() {
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[("RANK", "3")]), None);
        assert_eq!(read(&[("RANK", "8"), ("WORLD_SIZE", "8")]), None);
        assert_eq!(read(&[("RANK", "x"), ("WORLD_SIZE", "8")]), None);
    }
}
