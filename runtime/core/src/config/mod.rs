//! Every option with its default, and the one place of this crate that reads options from the environment.
//!
//! [`Config::default`] reads nothing; [`Config::from_environment`] adds the variables that are set and not blank.
//!
//! | variable | option | default |
//! |---|---|---|
//! | `RCOMM_JOIN` | [`joins`](Config::joins): `0`, `1` | `0` |
//! | `RCOMM_TIMEOUT_MS` | [`timeout`](Config::timeout) | 600,000 |
//! | `RCOMM_INIT_TIMEOUT_MS`, `TORCH_NCCL_NONBLOCKING_TIMEOUT` (in seconds) | [`init_timeout`](Config::init_timeout) | 120,000 |
//! | `RCOMM_BACKEND` | [`backend`](Config::backend) | `cpu` |
//! | `RCOMM_TRANSPORT` | [`transport`](Config::transport): `auto`, `shm`, `tcp` | `auto` |
//! | `RCOMM_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME` | [`socket_ifname`](Config::socket_ifname) | the one that leads to the store |
//! | `RCOMM_HOST_ID` | [`host_id`](Config::host_id) | none |
//! | `RCOMM_TUNING_FILE`, and before its lines those of `RCOMM_TUNING` | [`tuning`](Config::tuning) | as measured on the developers' machine |
//! | `RCOMM_SOCKET_STREAMS` | [`Tuning::streams`](crate::tuning::Tuning::streams) | 1 |
//! | `RCOMM_JOB_SECRET` | [`secret`](Config::secret) | on one host from a file of the user, else made by rank 0 and sealed for each rank |
//! | `RCOMM_TLS_CERT`, `RCOMM_TLS_KEY`, `RCOMM_TLS_CA` | [`tls`](Config::tls) | none |
//! | `RCOMM_STORE` | [`store`](Config::store): `secret`, `open` | `secret` where rcomm serves the store and there is a secret, else `open` |
//! | `RCOMM_RING_DIR` | [`ring_dir`](Config::ring_dir); `memory` for none | `/dev/shm/rcomm-<uid>` |
//! | `RCOMM_RING_ENTRIES`, `TORCH_FR_BUFFER_SIZE`, `TORCH_NCCL_TRACE_BUFFER_SIZE`, `TORCHCOMM_FR_BUFFER_SIZE` | [`ring_entries`](Config::ring_entries) | 16,384 |
//! | `RCOMM_RING_STEPS` | the same, as steps times operations of a step: `8x1250` | none |
//! | `RCOMM_RING_MIB` | [`ring_mib`](Config::ring_mib) | none |
//! | `RCOMM_RING_KEEP_JOBS`, `RCOMM_RING_KEEP_MIB` | [`kept_jobs`](Config::kept_jobs) | 32, 1,024 |
//! | `RCOMM_DUMP_DIR` | [`dump_dir`](Config::dump_dir) | `rcomm-dumps` in the working directory |
//! | `RCOMM_DUMP_FORMAT` | [`dump_format`](Config::dump_format): `json`, `pickle`, `both` | `json` |
//! | `RCOMM_DUMP_PIPE`, `TORCH_NCCL_DEBUG_INFO_PIPE_FILE` | [`dump_pipes`](Config::dump_pipes) | none |
//! | `RCOMM_DEBUG`, `TORCH_DISTRIBUTED_DEBUG` | [`debug`](Config::debug): `off`, `info`, `detail` | `off` |
//! | `RCOMM_NAN_CHECK`, `TORCH_NCCL_NAN_CHECK` | [`nan_check`](Config::nan_check): `0`, `1` | `0` |
//! | `RCOMM_ENDPOINT` | [`endpoint`](Config::endpoint): `unix`, `tcp:ADDRESS:PORT`, `off` | `unix` |
//! | `RCOMM_ENDPOINT_TOKEN` | [`endpoint_token`](Config::endpoint_token) | derived from the job's secret |
//! | `RCOMM_WATCHDOG_INTERVAL_MS` | [`watchdog_interval`](Config::watchdog_interval) | 100 |
//! | `RCOMM_HEARTBEAT_TIMEOUT_MS`, `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` | [`heartbeat_timeout`](Config::heartbeat_timeout) | 60,000 |
//! | `RCOMM_SIGNAL_INTERVAL_MS`, `TORCH_NCCL_COORD_CHECK_MILSEC` | [`signal_interval`](Config::signal_interval) | 500 |
//! | `RCOMM_STATUS_WAIT_MS` | [`status_wait`](Config::status_wait) | 2,000 |
//! | `RCOMM_NCCL_PROPAGATE_ERROR`, `TORCH_NCCL_PROPAGATE_ERROR` | [`propagation`](Config::propagation) | off |
//!
//! A backend may have options of its own ([`Config::backend_options`]), which it lists itself.

mod backend_options;
pub mod rendezvous;
mod values;

use crate::op::error::{Error, ErrorKind, Result};
pub use crate::store::StoreChoice;
use crate::tuning::Tuning;
pub use backend_options::BackendOptions;
use rcomm_recorder::publish::{EndpointToken, KeptJobs, Secret, Tls, TlsFiles};
use rendezvous::Rendezvous;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use values::{endpoint, in_variable, is_on, number, ring_size, wrong_value};

/// All options of a world. Plain data: it can be filled in by hand.
#[derive(Clone, Debug)]
pub struct Config {
    /// How long an operation may take, unless its group or the call sets another time-out.
    pub timeout: Duration,
    /// How long ranks may take to find each other, when a world or a group is made.
    pub init_timeout: Duration,
    /// Backends by name, each for one kind of device: `NAME`, or `DEVICE:NAME` separated by commas.
    pub backend: String,
    /// Whether this process joins a running job: in place of a lost rank, or as a further rank. It then waits until the
    /// ranks of the job ask for its rank ([`World::grow`](crate::World::grow)).
    pub joins: bool,
    /// How ranks reach each other over host memory.
    pub transport: TransportChoice,
    /// Network interfaces, separated by commas: this rank announces one address of each to the others. `None` = the
    /// interface that leads to the store. Connections are spread over them: the sockets of one channel
    /// ([`Tuning::streams`](crate::tuning::Tuning::streams)), and channels to different ranks. If they lead to other
    /// hosts, each needs a network of its own: the system chooses the interface by the address that is dialed.
    pub socket_ifname: Option<String>,
    /// Identity of this host, added to the one that the system reports: ranks whose identities differ share no
    /// memory, and are taken to be on different hosts. This separates containers, and simulates several hosts
    /// on one machine.
    pub host_id: Option<String>,
    /// The algorithm for each collective in host memory. Rank 0's table is used by all ranks of the job.
    pub tuning: Tuning,
    /// Options of individual backends. A backend that finds none here reads the environment when the world is made.
    pub backend_options: BackendOptions,
    /// This process's rank and the address of the job's store; `None` = read from the launcher's environment when
    /// the world is made.
    pub rendezvous: Option<Rendezvous>,
    /// The job's secret; `None` = on one host derived from the secret of the user ([`Secret::of_user`]), else made
    /// by rank 0 and sealed for each rank.
    pub secret: Option<Secret>,
    /// The files of this rank's TLS identity; `None` = no TLS. All ranks have one or none: with it the job's store, the
    /// data connections over TCP and endpoints over TCP use TLS. They are read only while the world is made.
    pub tls: Option<TlsFiles>,
    /// The clients that may use the job's store.
    pub store: StoreChoice,
    /// The directory of the ring file, if there is a file.
    pub ring_dir: RingDir,
    /// How many operations the ring holds, rounded up to a power of two; at most 1,048,576.
    pub ring_entries: u32,
    /// How much memory the ring may take with its tables, in MiB: it holds as many operations as fit, at most
    /// 1,048,576, and [`ring_entries`](Self::ring_entries) has no effect. `None` = as much as `ring_entries` needs.
    pub ring_mib: Option<u32>,
    /// How many dead jobs keep their rings, and how much memory these rings may take together. Once this rank has
    /// made its ring, it removes the rings of older dead jobs, unless a lower rank of the job lives on this host.
    pub kept_jobs: KeptJobs,
    /// The directory of the dumps. It is made when the first dump is written.
    pub dump_dir: PathBuf,
    /// The form of dump files.
    pub dump_format: DumpFormat,
    /// Stems of FIFOs: any byte written to `<stem><rank>.pipe` requests a dump.
    pub dump_pipes: Vec<PathBuf>,
    /// Whether ranks compare what they issue before each collective.
    pub debug: DebugLevel,
    /// Whether inputs that hold a NaN are refused.
    pub nan_check: NanCheck,
    /// Where the rank answers status requests, while it runs or hangs.
    pub endpoint: EndpointChoice,
    /// The token that clients send to an endpoint over TCP; `None` = [`Secret::endpoint_token`].
    pub endpoint_token: Option<EndpointToken>,
    /// The interval at which the watchdog polls pending work that does not report its end by itself.
    pub watchdog_interval: Duration,
    /// How long the watchdog may go without a round before its monitor makes a dump.
    pub heartbeat_timeout: Duration,
    /// The interval at which a rank polls for a failure of another rank. It should be shorter than `status_wait`.
    pub signal_interval: Duration,
    /// How long a rank that timed out waits for the status of the others. It asks before the time-out which ranks run
    /// (this long before, or once half of the time-out has passed, whichever is later). It then waits only a quarter of
    /// a second for the status of ranks that have been silent for this long. It waits only half a second for the status
    /// of a rank of its host whose process is stopped by a signal, unless the process is continued in that time.
    pub status_wait: Duration,
    /// The reaction of this rank to the failure of another.
    pub propagation: Propagation,
}

/// The reaction of a rank that finds in the store that another rank has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Propagation {
    /// It makes its dump and continues: an operation that can no longer end fails by itself.
    #[default]
    DumpOnly,
    /// It makes its dump, then aborts all its groups with an error that names the rank.
    Abort,
}

/// How ranks reach each other over host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TransportChoice {
    /// Shared memory on one host, sockets elsewhere.
    #[default]
    Auto,
    /// Shared memory, or an error where that is not possible.
    Shm,
    /// Sockets everywhere.
    Tcp,
}

/// Whether ranks compare what they issue before each collective
/// ([`Wrapper`](crate::backend::wrapper::Wrapper)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DebugLevel {
    /// Ranks do not compare. PyTorch's `INFO` is read as this level, since it only adds log lines.
    #[default]
    Off,
    /// Ranks compare, over a side group.
    Detail,
}

/// Whether inputs that hold a NaN are refused, on all ranks. The check needs the same comparison of ranks as
/// [`DebugLevel::Detail`] and reads all inputs: it is for finding errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NanCheck {
    /// Inputs are not checked.
    #[default]
    Off,
    /// Inputs that hold a NaN are refused.
    On,
}

/// Where a rank's endpoint listens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EndpointChoice {
    /// Nowhere.
    Off,
    /// On a Unix socket of mode 0600 in the directory of the ring file; nowhere if the ring is in memory.
    #[default]
    Unix,
    /// On this TCP address, for clients that present the token. Port 0 is any free port. With another port,
    /// the ranks of one host use that port plus their local rank.
    Tcp(SocketAddr),
}

/// Where the ring is: in a file that outlives the process, or in the process's own memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RingDir {
    /// Below `/dev/shm/rcomm-<uid>`.
    #[default]
    Shared,
    /// Below this directory.
    Dir(PathBuf),
    /// Nowhere: the ring is in the process's own memory and is lost when the process ends.
    Memory,
}

/// The form of dump files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DumpFormat {
    /// JSON, which people and other programs read.
    #[default]
    Json,
    /// Pickle, which PyTorch's analyzer reads.
    Pickle,
    /// One file of each.
    Both,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            init_timeout: Duration::from_secs(120),
            backend: "cpu".to_owned(),
            joins: false,
            transport: TransportChoice::Auto,
            socket_ifname: None,
            host_id: None,
            tuning: Tuning::default(),
            backend_options: BackendOptions::default(),
            rendezvous: None,
            secret: None,
            tls: None,
            store: StoreChoice::Auto,
            ring_dir: RingDir::Shared,
            ring_entries: 16_384,
            ring_mib: None,
            kept_jobs: KeptJobs::default(),
            dump_dir: PathBuf::from("rcomm-dumps"),
            dump_format: DumpFormat::Json,
            dump_pipes: Vec::new(),
            endpoint: EndpointChoice::Unix,
            endpoint_token: None,
            debug: DebugLevel::Off,
            nan_check: NanCheck::Off,
            watchdog_interval: Duration::from_millis(100),
            heartbeat_timeout: Duration::from_secs(60),
            signal_interval: Duration::from_millis(500),
            status_wait: Duration::from_secs(2),
            propagation: Propagation::DumpOnly,
        }
    }
}

impl Config {
    /// The defaults, overridden by the process's environment.
    ///
    /// # Errors
    /// Same as [`from_lookup`](Self::from_lookup).
    pub fn from_environment() -> Result<Self> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// This process's rendezvous: as configured, or from the launcher's environment.
    ///
    /// # Errors
    /// `Rendezvous` names the variable that is missing or wrong.
    pub fn rendezvous(&self) -> Result<Rendezvous> {
        match &self.rendezvous {
            Some(rendezvous) => Ok(rendezvous.clone()),
            None => Rendezvous::from_environment(|name| std::env::var(name).ok()),
        }
    }

    /// Reads the files of [`tls`](Self::tls).
    ///
    /// # Errors
    /// `InvalidArgument` names the file and what is wrong with it, as [`Tls::from_files`] does.
    pub fn read_tls(&self) -> Result<Option<Tls>> {
        let read = self.tls.as_ref().map(Tls::from_files).transpose();
        read.map_err(|error| Error::new(ErrorKind::InvalidArgument, error.to_string()))
    }

    /// Whether [`backend`](Self::backend) names the backend `name`.
    pub fn names_backend(&self, name: &str) -> bool {
        let mut names = self
            .backend
            .split(',')
            .map(|part| match part.split_once(':') {
                Some((_, name)) => name,
                None => part,
            });
        names.any(|named| named.trim() == name)
    }

    /// The defaults, overridden by the variables that `lookup` finds.
    ///
    /// # Errors
    /// `InvalidArgument` names the variable, its value unless that is a secret, and what it may be; or two variables of
    /// which only one may be set.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let text = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let mut config = Self::default();
        let millis = |name: &str, option: &mut Duration| -> Result<()> {
            if let Some(value) = text(name) {
                let ms: u64 = number(name, &value)?;
                if ms == 0 {
                    return Err(wrong_value(name, &value, "at least 1"));
                }
                *option = Duration::from_millis(ms);
            }
            Ok(())
        };
        // PyTorch's variables are read first, in their own units: rcomm's are read later and so have precedence.
        let seconds = |name: &str| -> Result<Option<Duration>> {
            let value = text(name).map(|value| number(name, &value)).transpose()?;
            Ok(value.filter(|value| *value > 0).map(Duration::from_secs))
        };
        if let Some(timeout) = seconds("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")? {
            config.heartbeat_timeout = timeout;
        }
        // A negative value means no time-out in PyTorch. rcomm has no such setting and ignores the value.
        let nonblocking = text("TORCH_NCCL_NONBLOCKING_TIMEOUT");
        if nonblocking.is_some_and(|value| !value.trim().starts_with('-'))
            && let Some(timeout) = seconds("TORCH_NCCL_NONBLOCKING_TIMEOUT")?
        {
            config.init_timeout = timeout;
        }
        millis("TORCH_NCCL_COORD_CHECK_MILSEC", &mut config.signal_interval)?;
        for name in [
            "TORCHCOMM_FR_BUFFER_SIZE",
            "TORCH_NCCL_TRACE_BUFFER_SIZE",
            "TORCH_FR_BUFFER_SIZE",
        ] {
            if let Some(value) = text(name) {
                let entries: u32 = number(name, &value)?;
                // In PyTorch 0 turns the recorder off; rcomm's recorder is always on.
                if entries > 0 {
                    config.ring_entries = entries;
                }
            }
        }
        millis("RCOMM_TIMEOUT_MS", &mut config.timeout)?;
        millis("RCOMM_INIT_TIMEOUT_MS", &mut config.init_timeout)?;
        millis("RCOMM_WATCHDOG_INTERVAL_MS", &mut config.watchdog_interval)?;
        millis("RCOMM_HEARTBEAT_TIMEOUT_MS", &mut config.heartbeat_timeout)?;
        millis("RCOMM_SIGNAL_INTERVAL_MS", &mut config.signal_interval)?;
        millis("RCOMM_STATUS_WAIT_MS", &mut config.status_wait)?;
        if let Some(value) = text("RCOMM_JOIN") {
            config.joins = is_on("RCOMM_JOIN", &value)?;
        }
        if let Some(value) = text("RCOMM_BACKEND") {
            config.backend = value;
        }
        if let Some(value) = text("RCOMM_TRANSPORT") {
            config.transport = match value.to_ascii_lowercase().as_str() {
                "auto" => TransportChoice::Auto,
                "shm" => TransportChoice::Shm,
                "tcp" => TransportChoice::Tcp,
                _ => return Err(wrong_value("RCOMM_TRANSPORT", &value, "auto, shm or tcp")),
            };
        }
        let ifname = text("RCOMM_SOCKET_IFNAME").or_else(|| text("GLOO_SOCKET_IFNAME"));
        config.socket_ifname = ifname.map(|name| name.trim().to_owned());
        config.host_id = text("RCOMM_HOST_ID");
        if let Some(path) = text("RCOMM_TUNING_FILE") {
            let lines = read_table(&path).map_err(|error| {
                let message = format!("RCOMM_TUNING_FILE: cannot read {path}");
                Error::new(ErrorKind::InvalidArgument, message).with_source(error)
            })?;
            let read = config.tuning.prepend(&lines);
            read.map_err(|error| in_variable(error, "RCOMM_TUNING_FILE"))?;
        }
        if let Some(lines) = text("RCOMM_TUNING") {
            let read = config.tuning.prepend(&lines);
            read.map_err(|error| in_variable(error, "RCOMM_TUNING"))?;
        }
        if let Some(count) = text("RCOMM_SOCKET_STREAMS") {
            let read = config.tuning.set_streams(&count);
            read.map_err(|error| in_variable(error, "RCOMM_SOCKET_STREAMS"))?;
        }
        config.secret = text("RCOMM_JOB_SECRET").map(|secret| Secret::from_text(&secret));
        config.tls = TlsFiles::from_lookup(text);
        if let Some(value) = text("RCOMM_STORE") {
            config.store = match value.as_str() {
                "secret" => StoreChoice::Secret,
                "open" => StoreChoice::Open,
                _ => return Err(wrong_value("RCOMM_STORE", &value, "secret or open")),
            };
        }
        if let Some(value) = text("RCOMM_RING_DIR") {
            config.ring_dir = match value.as_str() {
                "memory" => RingDir::Memory,
                dir => RingDir::Dir(dir.into()),
            };
        }
        ring_size(text, &mut config)?;
        if let Some(value) = text("RCOMM_RING_KEEP_JOBS") {
            config.kept_jobs.jobs = number("RCOMM_RING_KEEP_JOBS", &value)?;
        }
        if let Some(value) = text("RCOMM_RING_KEEP_MIB") {
            let mib: u64 = number("RCOMM_RING_KEEP_MIB", &value)?;
            config.kept_jobs.bytes = mib.saturating_mul(1 << 20);
        }
        if let Some(value) = text("RCOMM_DUMP_DIR") {
            config.dump_dir = value.into();
        }
        if let Some(value) = text("RCOMM_DUMP_FORMAT") {
            config.dump_format = match value.to_ascii_lowercase().as_str() {
                "json" => DumpFormat::Json,
                "pickle" => DumpFormat::Pickle,
                "both" => DumpFormat::Both,
                _ => {
                    return Err(wrong_value(
                        "RCOMM_DUMP_FORMAT",
                        &value,
                        "json, pickle or both",
                    ));
                }
            };
        }
        // The variable of rcomm has precedence over PyTorch's, so it is read last.
        for name in ["TORCH_DISTRIBUTED_DEBUG", "RCOMM_DEBUG"] {
            if let Some(value) = text(name) {
                config.debug = match value.to_ascii_lowercase().as_str() {
                    "off" | "info" => DebugLevel::Off,
                    "detail" => DebugLevel::Detail,
                    _ => return Err(wrong_value(name, &value, "off, info or detail")),
                };
            }
        }
        for name in ["TORCH_NCCL_NAN_CHECK", "RCOMM_NAN_CHECK"] {
            if let Some(value) = text(name) {
                config.nan_check = match is_on(name, &value)? {
                    true => NanCheck::On,
                    false => NanCheck::Off,
                };
            }
        }
        // Of the two variables, the first that is set counts.
        let names = ["RCOMM_NCCL_PROPAGATE_ERROR", "TORCH_NCCL_PROPAGATE_ERROR"];
        let set = names.into_iter().find_map(|name| Some((name, text(name)?)));
        if let Some((name, value)) = set
            && is_on(name, &value)?
        {
            config.propagation = Propagation::Abort;
        }
        config.dump_pipes = ["RCOMM_DUMP_PIPE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
            .into_iter()
            .filter_map(text)
            .map(PathBuf::from)
            .collect();
        config.dump_pipes.dedup();
        if let Some(value) = text("RCOMM_ENDPOINT") {
            config.endpoint = endpoint(&value)?;
        }
        if let Some(value) = lookup("RCOMM_ENDPOINT_TOKEN").filter(|value| !value.is_empty()) {
            // The value is a secret: the error must not contain it.
            let token = EndpointToken::new(value).map_err(|error| {
                let message = format!("RCOMM_ENDPOINT_TOKEN: {error}");
                Error::new(ErrorKind::InvalidArgument, message)
            })?;
            config.endpoint_token = Some(token);
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests;

/// The longest table of algorithms that is read from a file, in bytes.
const MAX_TABLE_BYTES: u64 = 1 << 20;

/// Reads the file at `path`, which holds a table of algorithms.
fn read_table(path: &str) -> std::io::Result<String> {
    use std::io::Read as _;
    let mut table = String::new();
    let file = std::fs::File::open(path)?;
    file.take(MAX_TABLE_BYTES + 1).read_to_string(&mut table)?;
    match table.len() as u64 > MAX_TABLE_BYTES {
        true => Err(std::io::Error::new(
            std::io::ErrorKind::FileTooLarge,
            format!("it has more than {MAX_TABLE_BYTES} bytes"),
        )),
        false => Ok(table),
    }
}
