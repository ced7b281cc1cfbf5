//! This process's rank, and the address of the job's store.
//!
//! A launcher passes both in each process's environment: torchrun's variables (which `rcomm-run` sets too), those
//! of Open MPI, of MPICH and other launchers that use PMI, or Slurm's. [`Rendezvous`] holds both in one form for
//! all launchers. This module does not read the process's environment: the caller passes a look-up function, so
//! that only `config` does.
//!
//! | | torchrun | Open MPI | MPICH, PMI | Slurm |
//! |---|---|---|---|---|
//! | rank | `RANK` | `OMPI_COMM_WORLD_RANK` | `PMI_RANK` | `SLURM_PROCID` |
//! | world size | `WORLD_SIZE` | `OMPI_COMM_WORLD_SIZE` | `PMI_SIZE` | `SLURM_STEP_NUM_TASKS`, `SLURM_NTASKS` |
//! | local rank | `LOCAL_RANK` | `OMPI_COMM_WORLD_LOCAL_RANK` | `MPI_LOCALRANKID` | `SLURM_LOCALID` |
//! | ranks on this host | `LOCAL_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_SIZE` | `MPI_LOCALNRANKS` | |
//! | job | `TORCHELASTIC_RUN_ID` | `PMIX_NAMESPACE`, `OMPI_MCA_ess_base_jobid` | | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
//! | attempt | `TORCHELASTIC_RESTART_COUNT` | | | `SLURM_RESTART_COUNT` |
//!
//! The launchers are tried in this order, and the first that sets a rank is used: `mpirun` inside a Slurm
//! allocation is Open MPI. `MASTER_ADDR` and `MASTER_PORT` are read under every launcher. Under torchrun,
//! `MASTER_ADDR` must be set. Under the other launchers, a job without it uses `127.0.0.1` if all of its ranks are on
//! one host, and a Slurm step uses the first host of its node list. Without `MASTER_PORT` the port is derived from the
//! job's id (20000 to 29999); a job without an id must set it.

#![forbid(unsafe_code)]

mod environment;
mod url;

pub(crate) use url::InitMethod;

use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{
    BatchReply, BatchRequest, Store, StoreAccess, StoreLimits, TcpStore, TcpStoreServer,
    addresses_of,
};
use rcomm_recorder::model::Rank;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The key below `rcomm/<attempt>` that holds the result of the rendezvous: `yes` and rank 0's settings if
/// all ranks have arrived, or why the job cannot start. It is set once.
pub(crate) const ALL_HERE: &str = "all here";

/// The key below `rcomm/<attempt>` of the number of ranks that know why the job cannot start.
pub(crate) const REFUSAL_READ: &str = "refusal read";

/// The launcher that gave this process its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// `RANK` and its companions: torchrun, `rcomm-run`, or set by hand.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH's `mpiexec`, or another launcher that uses PMI.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
    /// No launcher: the program gave the rank.
    Explicit,
}

/// This process's rank in the job, and the address of the job's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// The launcher that set these values.
    pub launcher: Launcher,
    /// This process's rank, below `world_size`.
    pub rank: Rank,
    /// How many ranks the job has; at least 1.
    pub world_size: u32,
    /// The rank among those of this host, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// How many ranks this host has, if the launcher sets it.
    pub local_world_size: Option<u32>,
    /// Host name or address of the store.
    pub master_addr: String,
    /// Port of the store.
    pub master_port: u16,
    /// The job's name, equal on all ranks. If no launcher names it, it is `master_addr` and `master_port`.
    pub job: String,
    /// The number of the attempt, from 0: how often the launcher has restarted the job, or a later number if the ranks
    /// have recreated the world ([`World::grow`](crate::World::grow)).
    pub attempt: u32,
    /// Whether the launcher's agent or the program provides the store. If not, rank 0 serves it.
    pub uses_agent_store: bool,
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Rendezvous, message)
}

impl Rendezvous {
    /// A rendezvous that the program gives, without a local rank.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] if the rank is not less than the world size, or if the port is 0.
    pub fn explicit(
        rank: Rank,
        world_size: u32,
        master_addr: impl Into<String>,
        master_port: u16,
    ) -> Result<Self> {
        let master_addr = master_addr.into();
        Self {
            launcher: Launcher::Explicit,
            rank,
            world_size,
            local_rank: None,
            local_world_size: None,
            job: format!("{master_addr}-{master_port}"),
            master_addr,
            master_port,
            attempt: 0,
            uses_agent_store: false,
        }
        .checked()
    }

    /// Whether the launcher's variables say that all ranks are on one host.
    pub fn is_single_host(&self) -> bool {
        self.local_world_size == Some(self.world_size)
    }

    /// Whether all ranks are known to be on one host, by the launcher or because the store's address is a loopback
    /// address.
    pub fn is_on_one_host(&self) -> bool {
        let address = self.master_addr.parse::<IpAddr>();
        self.is_single_host()
            || self.master_addr == "localhost"
            || address.is_ok_and(|address| address.is_loopback())
    }

    /// Whether this process serves the store, which then ends with it.
    pub(crate) fn serves_store(&self) -> bool {
        self.rank == 0 && !self.uses_agent_store
    }

    /// Refuses values that do not fit each other.
    fn checked(self) -> Result<Self> {
        let (rank, world_size) = environment::names_of(self.launcher);
        if self.world_size == 0 {
            return Err(refused(format!(
                "{world_size} is 0: a job has at least one rank"
            )));
        }
        if self.rank >= self.world_size {
            return Err(refused(format!(
                "{rank} is {} but {world_size} is {}: ranks count from 0 to {}",
                self.rank,
                self.world_size,
                self.world_size - 1
            )));
        }
        if let (Some(local), Some(size)) = (self.local_rank, self.local_world_size)
            && local >= size
        {
            return Err(refused(format!(
                "the local rank of rank {} is {local}, but this host has {size} ranks: local ranks count from 0",
                self.rank
            )));
        }
        if let Some(size) = self.local_world_size
            && size > self.world_size
        {
            return Err(refused(format!(
                "the launcher says that this host has {size} ranks and the job only {}",
                self.world_size
            )));
        }
        if self.master_port == 0 {
            let port = match self.launcher {
                Launcher::Explicit => "the port of the store",
                _ => "MASTER_PORT",
            };
            return Err(refused(format!(
                "{port} is 0: give all ranks one free port"
            )));
        }
        Ok(self)
    }

    /// Opens the job's store, checks in and counts this rank. A rank 0 that serves the store returns when all
    /// ranks are counted.
    ///
    /// `timeout` is for all three steps together, and for every later call that does not wait for ranks.
    ///
    /// # Errors
    /// Those of [`connect_store`](Self::connect_store), [`check_in`](Self::check_in) and
    /// [`TcpStore::wait_for_workers`].
    pub fn open_store(&self, access: &StoreAccess, timeout: Duration) -> Result<TcpStore> {
        let started = Instant::now();
        let store = self.connect_store(access, timeout)?;
        self.check_in(&store)?;
        store.wait_for_workers(self.world_size, timeout.saturating_sub(started.elapsed()))?;
        Ok(store)
    }

    /// Connects to the job's store, which rank 0 serves unless the launcher's agent does.
    ///
    /// The server listens on the addresses of `master_addr` only. One exception: if that is a name which this host
    /// resolves to its loopback (as `/etc/hosts` often does), and other hosts may be in the job, it listens on all
    /// addresses and logs that.
    ///
    /// # Errors
    /// Those of [`TcpStore::host_with`] and [`TcpStore::connect_with`].
    pub fn connect_store(&self, access: &StoreAccess, timeout: Duration) -> Result<TcpStore> {
        let (addr, port) = (self.master_addr.as_str(), self.master_port);
        if self.uses_agent_store || self.rank != 0 {
            return TcpStore::connect_with(addr, port, timeout, access);
        }
        if self.hides_behind_loopback()? {
            tracing::warn!(
                "{addr} is a name of this host's loopback address, where other hosts cannot reach the store: it \
                 listens on all addresses. Give MASTER_ADDR as an address to avoid that"
            );
            let server = TcpStoreServer::bind_any(port, access, StoreLimits::default())?;
            return TcpStore::attach(server, timeout, access);
        }
        TcpStore::host_with(addr, port, timeout, access)
    }

    /// Whether `master_addr` is a name that this host resolves to its loopback interface, although other hosts may
    /// be in the job.
    ///
    /// # Errors
    /// `Rendezvous` if the name cannot be resolved to an address.
    pub fn hides_behind_loopback(&self) -> Result<bool> {
        if self.is_single_host()
            || self.master_addr == "localhost"
            || self.master_addr.parse::<IpAddr>().is_ok()
        {
            return Ok(false);
        }
        let addresses = addresses_of(&self.master_addr)?;
        Ok(addresses.iter().all(IpAddr::is_loopback))
    }

    /// Registers this rank in the store, and verifies that it is the right store.
    ///
    /// With one call to the store, which does not wait, it detects a rank that was started twice, another job's store
    /// on this port, and ranks that disagree on the world size. Call it once per process.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] names which of these it is; the store's own errors are passed on.
    pub fn check_in(&self, store: &(impl Store + ?Sized)) -> Result<()> {
        let keys = self.check_in_keys();
        let replies = store.batch(&keys.requests())?;
        self.checked_in(store, &keys, &replies)
    }

    /// The keys that [`check_in`](Self::check_in) writes, for callers that write more in the same request.
    pub(crate) fn check_in_keys(&self) -> CheckInKeys {
        let prefix = format!("rcomm/rendezvous/{}", self.attempt);
        CheckInKeys {
            job: format!("{prefix}/job"),
            // A rank of another job, or one given another world size, is not counted as a rank of this job.
            rank: format!("{prefix}/rank/{}/{}", self.key_scope(), self.rank),
            job_value: format!("{}\n{}", self.world_size, self.job),
        }
    }

    /// A part of keys that differs between jobs and between world sizes.
    pub(crate) fn key_scope(&self) -> String {
        format!("{}/{}", self.world_size, self.job)
    }

    /// Checks the replies to the first requests of a batch, which wrote `keys`. Tells the other ranks if this rank was
    /// given another world size.
    ///
    /// # Errors
    /// Those of [`check_in`](Self::check_in).
    pub(crate) fn checked_in(
        &self,
        store: &(impl Store + ?Sized),
        keys: &CheckInKeys,
        replies: &[BatchReply],
    ) -> Result<()> {
        let [BatchReply::Value(held), BatchReply::Count(starts), ..] = replies else {
            return Err(Error::new(
                ErrorKind::Store,
                "the store did not answer a check-in with a value and a count",
            ));
        };
        if held != keys.job_value.as_bytes() {
            let held = String::from_utf8_lossy(held);
            let (size, job) = held.split_once('\n').unwrap_or(("?", &held));
            let address = format!("{}:{}", self.master_addr, self.master_port);
            if job != self.job {
                return Err(refused(format!(
                    "the store at {address} serves job {job:?}, not {:?}: two jobs share MASTER_PORT",
                    self.job
                )));
            }
            let refusal = format!(
                "rank {} was given a world size of {}, another rank of job {job:?} one of {size}",
                self.rank, self.world_size
            );
            // The other ranks would wait for this rank: publish the refusal to them, unless a result is
            // already published.
            if size.parse().is_ok_and(|size: u32| self.rank < size) {
                let result_key = format!("rcomm/{}/{ALL_HERE}", self.attempt);
                store.compare_set(&result_key, b"", refusal.as_bytes())?;
            }
            store.add(&format!("rcomm/{}/{REFUSAL_READ}", self.attempt), 1)?;
            return Err(refused(refusal));
        }
        if *starts > 1 {
            return Err(refused(format!(
                "rank {} of job {:?} was started {starts} times",
                self.rank, self.job
            )));
        }
        Ok(())
    }
}

/// The keys that a rank writes to the store when it checks in.
pub(crate) struct CheckInKeys {
    /// The key that holds the job's name and world size.
    job: String,
    /// The key of the number of times that this rank was started.
    rank: String,
    /// The value to write under `job` if that key is absent.
    job_value: String,
}

impl CheckInKeys {
    /// The key that exists once a process has come as this rank.
    pub(crate) fn rank(&self) -> &str {
        &self.rank
    }

    pub(crate) fn requests(&self) -> [BatchRequest<'_>; 2] {
        [
            BatchRequest::CompareSet {
                key: &self.job,
                expected: b"",
                desired: self.job_value.as_bytes(),
            },
            BatchRequest::Add {
                key: &self.rank,
                delta: 1,
            },
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::HashStore;

    fn rendezvous() -> Rendezvous {
        let mut rendezvous = Rendezvous::explicit(3, 8, "node0", 29500).unwrap();
        rendezvous.job = "train".to_owned();
        rendezvous
    }

    #[test]
    fn an_explicit_rendezvous_is_checked() {
        let wrong = |rank, world_size, port| {
            let rendezvous = Rendezvous::explicit(rank, world_size, "node0", port);
            rendezvous
                .expect_err("wrong values were accepted")
                .to_string()
        };
        assert_eq!(
            wrong(2, 2, 1),
            "the rank is 2 but the world size is 2: ranks count from 0 to 1"
        );
        assert_eq!(
            wrong(0, 0, 1),
            "the world size is 0: a job has at least one rank"
        );
        assert!(wrong(0, 1, 0).starts_with("the port of the store is 0"));
    }

    #[test]
    fn second_start_of_a_rank_is_refused() {
        let store = HashStore::new();
        let rendezvous = rendezvous();
        rendezvous.check_in(&store).unwrap();
        let again = rendezvous
            .check_in(&store)
            .expect_err("a second start was accepted");
        assert_eq!(
            again.to_string(),
            "rank 3 of job \"train\" was started 2 times"
        );
        // The next attempt uses other keys, also where the launcher's store outlives the attempt.
        let restarted = Rendezvous {
            attempt: 3,
            ..rendezvous
        };
        restarted.check_in(&store).unwrap();
    }

    #[test]
    fn other_world_size_and_other_job_are_refused() {
        let store = HashStore::new();
        let rendezvous = rendezvous();
        rendezvous.check_in(&store).unwrap();
        let other = Rendezvous {
            rank: 4,
            world_size: 16,
            ..rendezvous.clone()
        };
        assert_eq!(
            other
                .check_in(&store)
                .expect_err("another world size was accepted")
                .to_string(),
            "rank 4 was given a world size of 16, another rank of job \"train\" one of 8"
        );
        let other = Rendezvous {
            job: "eval".to_owned(),
            ..rendezvous
        };
        assert_eq!(
            other
                .check_in(&store)
                .expect_err("another job was accepted")
                .to_string(),
            "the store at node0:29500 serves job \"train\", not \"eval\": two jobs share MASTER_PORT"
        );
    }
}
