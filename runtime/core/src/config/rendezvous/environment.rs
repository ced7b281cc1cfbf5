//! The environment variables of each launcher; the table is at the head of [`rendezvous`](super).

use super::{Launcher, Rendezvous, refused};
use crate::config::values::largest;
use crate::op::error::Result;
use std::str::FromStr;

/// The environment, looked up by name. A variable with an empty value counts as not set.
struct Environment<F>(F);

impl<F: Fn(&str) -> Option<String>> Environment<F> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    /// The unsigned integer in a variable; `None` if it is not set.
    fn number<T: FromStr>(&self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        text.trim().parse().map(Some).map_err(|_| {
            refused(format!(
                "{name} is {text:?}, which is not a number from 0 to {}",
                largest::<T>()
            ))
        })
    }

    /// The number in the first of these variables that is set.
    fn first<T: FromStr>(&self, names: &[&str]) -> Result<Option<T>> {
        for name in names {
            if let Some(value) = self.number(name)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }
}

/// The names of one launcher's variables. A name is empty if the launcher has no such variable.
struct VariableNames {
    launcher: Launcher,
    rank: &'static str,
    /// The first of these that is set has the world size.
    world_size: &'static [&'static str],
    local_rank: &'static str,
    /// The number of ranks on this host.
    local_world_size: &'static str,
    /// How often the launcher has restarted the job.
    attempt: &'static str,
}

const LAUNCHERS: [VariableNames; 4] = [
    VariableNames {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world_size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_world_size: "LOCAL_WORLD_SIZE",
        attempt: "TORCHELASTIC_RESTART_COUNT",
    },
    VariableNames {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        attempt: "",
    },
    VariableNames {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world_size: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
        local_world_size: "MPI_LOCALNRANKS",
        attempt: "",
    },
    VariableNames {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: "SLURM_LOCALID",
        local_world_size: "",
        attempt: "SLURM_RESTART_COUNT",
    },
];

/// The launcher's variables for the rank and the world size; a description of both if no launcher gave the rank.
pub(super) fn names_of(launcher: Launcher) -> (&'static str, &'static str) {
    let names = LAUNCHERS.iter().find(|names| names.launcher == launcher);
    names.map_or(("the rank", "the world size"), |names| {
        (names.rank, names.world_size[0])
    })
}

impl Rendezvous {
    /// Reads the launcher's variables through `lookup` (`std::env::var(name).ok()`, for example).
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::ErrorKind::Rendezvous) if no launcher has set a rank, or if a variable that the
    /// job needs is missing or has a wrong value: the message names the variable and says what is expected.
    pub fn from_environment(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let env = Environment(lookup);
        let Some(names) = LAUNCHERS
            .iter()
            .find(|names| env.text(names.rank).is_some())
        else {
            return Err(refused(
                "no launcher set this process's rank: start it with rcomm-run, torchrun, mpirun or \
                 srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
                    .to_owned(),
            ));
        };
        let missing = |name: &str| {
            let advice = match (name, names.launcher) {
                ("MASTER_ADDR", _) => "give all ranks the host of rank 0",
                ("MASTER_PORT", Launcher::Pmi) => {
                    "give all ranks one free port, as in mpiexec -genv MASTER_PORT 29500"
                }
                ("MASTER_PORT", _) => "give all ranks one free port",
                _ => "the launcher, or a script in its place, must set both",
            };
            refused(format!("{} is set but {name} is not: {advice}", names.rank))
        };
        let rank = env.number(names.rank)?.ok_or_else(|| missing(names.rank))?;
        let world_size = env
            .first(names.world_size)?
            .ok_or_else(|| missing(names.world_size[0]))?;
        let local_world_size = env.number(names.local_world_size)?;
        let job = job_of(&env, names.launcher);
        let master_addr = match env.text("MASTER_ADDR") {
            Some(addr) => addr,
            None => default_addr(&env, names.launcher, world_size, local_world_size)
                .ok_or_else(|| missing("MASTER_ADDR"))?,
        };
        let master_port = match (env.number("MASTER_PORT")?, &job) {
            (Some(port), _) => port,
            (None, Some(job)) => port_of(job),
            (None, None) => return Err(missing("MASTER_PORT")),
        };
        Self {
            launcher: names.launcher,
            rank,
            world_size,
            local_rank: env.number(names.local_rank)?,
            local_world_size,
            job: job.unwrap_or_else(|| format!("{master_addr}-{master_port}")),
            master_addr,
            master_port,
            attempt: env.number(names.attempt)?.unwrap_or(0),
            uses_agent_store: env.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True"),
        }
        .checked()
    }
}

/// The job's name by the launcher's variables; `None` if they do not have it.
fn job_of<F: Fn(&str) -> Option<String>>(
    env: &Environment<F>,
    launcher: Launcher,
) -> Option<String> {
    match launcher {
        // torchrun sets "none" when it was given no id.
        Launcher::Torchrun => env.text("TORCHELASTIC_RUN_ID").filter(|job| job != "none"),
        Launcher::OpenMpi => env
            .text("PMIX_NAMESPACE")
            .or_else(|| env.text("OMPI_MCA_ess_base_jobid")),
        Launcher::Slurm => {
            let job = env.text("SLURM_JOB_ID")?;
            Some(match env.text("SLURM_STEP_ID") {
                Some(step) => format!("{job}.{step}"),
                None => job,
            })
        }
        Launcher::Pmi | Launcher::Explicit => None,
    }
}

/// The store's host where `MASTER_ADDR` is not set; `None` if the launcher's variables do not show it.
fn default_addr<F: Fn(&str) -> Option<String>>(
    env: &Environment<F>,
    launcher: Launcher,
    world_size: u32,
    local_world_size: Option<u32>,
) -> Option<String> {
    if launcher == Launcher::Torchrun {
        return None;
    }
    let nodes = env
        .text("SLURM_STEP_NUM_NODES")
        .or_else(|| env.text("SLURM_NNODES"));
    let is_one_host = match launcher {
        Launcher::Slurm => nodes.as_deref() == Some("1"),
        _ => local_world_size == Some(world_size),
    };
    if is_one_host {
        return Some("127.0.0.1".to_owned());
    }
    if launcher != Launcher::Slurm {
        return None;
    }
    let list = env
        .text("SLURM_STEP_NODELIST")
        .or_else(|| env.text("SLURM_JOB_NODELIST"))?;
    first_host(&list)
}

/// The first host of a Slurm node list: `gpu[03-07,12],login1` starts with `gpu03`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    while let Some(cut) = rest.find(['[', ',']) {
        host.push_str(&rest[..cut]);
        if rest.as_bytes()[cut] == b',' {
            return Some(host).filter(|host| !host.is_empty());
        }
        let (range, after) = rest[cut + 1..].split_once(']')?;
        let number: String = range.chars().take_while(char::is_ascii_digit).collect();
        if number.is_empty() {
            return None;
        }
        host.push_str(&number);
        rest = after;
    }
    host.push_str(rest);
    Some(host).filter(|host| !host.is_empty())
}

/// A port that all ranks of a job derive from its id by a hash (FNV-1a), below the usual range of ephemeral ports.
fn port_of(job: &str) -> u16 {
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    20_000 + (hash % 10_000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::error::ErrorKind;

    fn rendezvous_of(pairs: &[(&str, &str)]) -> Result<Rendezvous> {
        Rendezvous::from_environment(|name| {
            let pair = pairs.iter().find(|(key, _)| *key == name);
            pair.map(|(_, value)| (*value).to_owned())
        })
    }

    fn refusal_of(pairs: &[(&str, &str)]) -> String {
        let error = rendezvous_of(pairs).expect_err("a wrong environment was accepted");
        assert_eq!(error.kind(), ErrorKind::Rendezvous);
        error.to_string()
    }

    const TORCHRUN: [(&str, &str); 9] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RUN_ID", "train"),
        ("TORCHELASTIC_RESTART_COUNT", "2"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ];

    #[test]
    fn every_value_is_read_from_torchruns_variables() {
        let rendezvous = rendezvous_of(&TORCHRUN).unwrap();
        assert_eq!(
            rendezvous,
            Rendezvous {
                launcher: Launcher::Torchrun,
                rank: 3,
                world_size: 8,
                local_rank: Some(1),
                local_world_size: Some(2),
                master_addr: "node0".to_owned(),
                master_port: 29500,
                job: "train".to_owned(),
                attempt: 2,
                uses_agent_store: true,
            }
        );
        assert!(!rendezvous.is_single_host());
    }

    #[test]
    fn a_job_without_a_name_is_named_after_the_address_of_its_store() {
        let mut pairs = TORCHRUN;
        pairs[6].1 = "none";
        assert_eq!(rendezvous_of(&pairs).unwrap().job, "node0-29500");
    }

    #[test]
    fn open_mpi_on_one_host_needs_no_master_addr() {
        let pairs = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("OMPI_MCA_ess_base_jobid", "3055812609"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
        ];
        let rendezvous = rendezvous_of(&pairs).unwrap();
        assert_eq!(rendezvous.launcher, Launcher::OpenMpi);
        assert_eq!((rendezvous.rank, rendezvous.world_size), (1, 4));
        assert_eq!(rendezvous.master_addr, "127.0.0.1");
        assert!((20_000..30_000).contains(&rendezvous.master_port));
        assert_eq!(rendezvous.master_port, port_of("3055812609"));
        assert!(rendezvous.is_single_host());
    }

    #[test]
    fn open_mpi_on_several_hosts_needs_master_addr() {
        let pairs = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "7"),
        ];
        assert_eq!(
            refusal_of(&pairs),
            "OMPI_COMM_WORLD_RANK is set but MASTER_ADDR is not: give all ranks the host of rank 0"
        );
    }

    #[test]
    fn pmi_needs_master_port() {
        let pairs = [
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "0"),
            ("MPI_LOCALNRANKS", "2"),
        ];
        assert_eq!(
            refusal_of(&pairs),
            "PMI_RANK is set but MASTER_PORT is not: give all ranks one free port, as in mpiexec -genv \
             MASTER_PORT 29500"
        );
    }

    #[test]
    fn slurm_defaults_to_the_first_host_of_the_step() {
        let pairs = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_NUM_NODES", "4"),
            ("SLURM_STEP_NODELIST", "gpu[003-005,9],login"),
            ("SLURM_JOB_ID", "812"),
            ("SLURM_STEP_ID", "0"),
        ];
        let rendezvous = rendezvous_of(&pairs).unwrap();
        assert_eq!(rendezvous.master_addr, "gpu003");
        assert_eq!(rendezvous.job, "812.0");
        assert_eq!(rendezvous.local_rank, Some(1));
    }

    #[test]
    fn the_first_host_of_a_node_list_is_found_and_a_malformed_list_has_none() {
        assert_eq!(first_host("a1").as_deref(), Some("a1"));
        assert_eq!(first_host("a1,b2").as_deref(), Some("a1"));
        assert_eq!(first_host("r[1-2]n[07,9]x,z").as_deref(), Some("r1n07x"));
        assert_eq!(first_host("a[1-"), None);
        assert_eq!(first_host(""), None);
        assert_eq!(first_host("a[]"), None);
    }

    #[test]
    fn a_wrong_environment_gives_an_error_that_names_the_variable() {
        assert!(refusal_of(&[]).starts_with("no launcher set this process's rank"));
        assert_eq!(
            refusal_of(&[("RANK", "0")]),
            "RANK is set but WORLD_SIZE is not: the launcher, or a script in its place, must set both"
        );
        assert_eq!(
            refusal_of(&[("RANK", "0"), ("WORLD_SIZE", "2")]),
            "RANK is set but MASTER_ADDR is not: give all ranks the host of rank 0"
        );
        let mut pairs = TORCHRUN;
        pairs[0].1 = "8";
        assert_eq!(
            refusal_of(&pairs),
            "RANK is 8 but WORLD_SIZE is 8: ranks count from 0 to 7"
        );
        pairs[0].1 = "-1";
        assert_eq!(
            refusal_of(&pairs),
            "RANK is \"-1\", which is not a number from 0 to 4294967295"
        );
        let mut pairs = TORCHRUN;
        pairs[5].1 = "70000";
        assert_eq!(
            refusal_of(&pairs),
            "MASTER_PORT is \"70000\", which is not a number from 0 to 65535"
        );
        pairs[5].1 = "0";
        assert!(refusal_of(&pairs).starts_with("MASTER_PORT is 0"));
    }
}
