//! The command line of `rcomm-run`.

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use rcomm::{Config, TlsFiles};
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const AFTER_HELP: &str = "\
rcomm-run demo healthy|slow|stuck|kill|freeze|mismatch|deadlock|pipeline starts \
a job that is healthy or has that fault, to watch with rcomm-top or rcomm-web; see rcomm-run demo \
--help.

Each rank gets torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, \
GROUP_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID, ...), RCOMM_JOB_SECRET and \
RCOMM_STORE. The launcher of host 0 (--node-rank) serves the store at MASTER_ADDR \
and MASTER_PORT, to those who prove the secret. Every line of a rank's output begins with \"[rank N] \".

When a rank fails, the others may go on for --linger, to write their dumps and report the \
failure. Then they get SIGTERM, and SIGKILL if they still run after --grace.

SIGINT, SIGTERM and SIGHUP are passed on, and SIGKILL follows after --grace. If one of them comes \
when the ranks have already got such a signal, they are killed at once. SIGUSR1 and SIGUSR2 are \
only passed on. A launcher that was started with SIGHUP ignored (nohup) goes on to ignore it.

Once a rank of this host has ended with 0, or all that are left are stopped, a rank that a signal \
(SIGSTOP) has stopped and that nothing continues within --stop-timeout gets SIGTERM and SIGCONT, \
and SIGKILL after --grace. A rank that runs is waited for, however long it takes; standard error \
names it.

With --max-restarts, all ranks are started again after a failure: a program that saves its state \
can continue from what it saved last. A launcher that a signal tells to end starts no ranks again.

With --replace, the others go on when a rank fails, and a process joins in its place \
(RCOMM_JOIN=1): the remaining ranks must call World::grow.

With --nnodes MIN:MAX the job starts as soon as MAX hosts are there, or --last-call after MIN are. \
When another host comes for which there is a place, a host is lost, or a signal tells a host's \
launcher to end, all ranks end (SIGTERM, and SIGKILL after --grace) and start again with the hosts that \
are there, numbered anew, in the next attempt. The host with the store must stay.

Exit codes (with --max-restarts, of the last attempt):
  0      every rank exited with 0
  N      the first rank that failed exited with N
  128+S  the first rank that failed was killed by signal S, or the launcher
         received signal S
  2      the command line is wrong
  124    a rank was ended because it was stopped for --stop-timeout, on this
         host or another, whatever failed afterwards
  125    the launcher failed: no port, no agreement with the other hosts, a
         host that is lost
  126    PROGRAM cannot be executed
  127    PROGRAM was not found";

/// Starts the ranks of a job on this host and supervises them.
#[derive(Clone, Debug, Parser)]
#[command(name = "rcomm-run", version, after_help = AFTER_HELP, max_term_width = 100)]
pub struct Options {
    /// Number of ranks to start on this host.
    #[arg(short = 'n', long = "nproc", visible_alias = "nproc-per-node", alias = "nproc_per_node",
          value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub nproc: u32,

    /// Number of hosts of the job, or MIN:MAX; start one rcomm-run on each. Hosts beyond MAX wait until one is lost or
    /// leaves.
    #[arg(long, default_value_t, value_name = "N|MIN:MAX")]
    pub nnodes: NodeCount,

    /// Index of this host, from 0 [default: 0]. With MIN:MAX, the launchers number the hosts, and the option says only
    /// whether this host serves the store (0) or not (another number); without the option, the first host that can
    /// listen at --master-addr does.
    #[arg(long, alias = "node_rank")]
    pub node_rank: Option<u32>,

    /// Name or address of the host that serves the store, as reached from the other hosts.
    #[arg(
        long,
        alias = "master_addr",
        default_value = "127.0.0.1",
        value_name = "HOST"
    )]
    pub master_addr: String,

    /// Port of the store; 0 picks a free one, with one host only.
    #[arg(long, alias = "master_port", default_value_t = 0, value_name = "PORT")]
    pub master_port: u16,

    /// The job's name, the same on all hosts [default: a random one].
    #[arg(long, value_name = "NAME")]
    pub job_id: Option<String>,

    /// The job's secret, the same on all hosts [default: a random one]. Other users of this host can see the command
    /// line, so prefer the variable.
    #[arg(
        long,
        env = "RCOMM_JOB_SECRET",
        hide_env_values = true,
        value_name = "SECRET"
    )]
    pub job_secret: Option<String>,

    /// Serve PyTorch's protocol to every client of the store's port, without requiring the job's secret: for programs
    /// that use PyTorch's own TCPStore. The store then uses no TLS, even with --tls-cert.
    #[arg(long)]
    pub open_store: bool,

    /// The TLS certificate of this host's processes, in PEM, followed by those between it and the CA. It requires
    /// --tls-key and --tls-ca, and every host needs such files. The ranks' connections and endpoints over TCP then use
    /// TLS, and so does the store, except with --open-store.
    #[arg(long, env = "RCOMM_TLS_CERT", value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    pub tls_cert: Option<PathBuf>,

    /// The private key of --tls-cert, in PEM; others must not be able to read the file.
    #[arg(long, env = "RCOMM_TLS_KEY", value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    pub tls_key: Option<PathBuf>,

    /// The CA that signed the certificates of all hosts, in PEM.
    #[arg(long, env = "RCOMM_TLS_CA", value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    pub tls_ca: Option<PathBuf>,

    /// Time that ranks have to end after SIGTERM, in seconds.
    #[arg(long, default_value = "10", value_parser = seconds, value_name = "SECONDS")]
    pub grace: Duration,

    /// Time that the other ranks have, after one has failed, to notice it and to write their dumps, in seconds. The
    /// default suffices for the default values of RCOMM_SIGNAL_INTERVAL_MS and RCOMM_STATUS_WAIT_MS; 0 ends the others
    /// at once.
    #[arg(long, default_value = "5", value_parser = seconds, value_name = "SECONDS")]
    pub linger: Duration,

    /// How long a rank may be stopped by a signal, in seconds, from when another rank of this host has ended with 0, or
    /// all that are left are stopped; 0 is no limit [default: the ranks' time-out, which bounds their shutdown:
    /// RCOMM_TIMEOUT_MS, or 10 minutes].
    #[arg(long, value_parser = seconds, value_name = "SECONDS")]
    pub stop_timeout: Option<Duration>,

    /// How often the job is started again after a rank has failed: all ranks end, and start with a higher attempt
    /// (TORCHELASTIC_RESTART_COUNT). With a fixed number of hosts, the smallest of their numbers counts; with MIN:MAX,
    /// that of the host with the store, and starts because hosts have come or gone are not counted.
    #[arg(long, alias = "max_restarts", default_value_t = 0, value_name = "N")]
    pub max_restarts: u32,

    /// How many failed ranks of this host are replaced by new processes, while the other ranks go on.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub replace: u32,

    /// With --nnodes MIN:MAX: how long a job with MIN hosts waits for more before it starts, in seconds.
    #[arg(long, default_value = "5", value_parser = seconds, value_name = "SECONDS")]
    pub last_call: Duration,

    /// A host whose launcher gives no sign of life for this long is lost, in seconds.
    #[arg(long, default_value = "30", value_parser = time_until_lost, value_name = "SECONDS")]
    pub node_timeout: Duration,

    /// Time that the launchers of several hosts wait for each other, in seconds.
    #[arg(long, default_value = "120", value_parser = seconds, value_name = "SECONDS")]
    pub timeout: Duration,

    /// Program to run, and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    pub program: Vec<String>,

    /// The zeroth argument of PROGRAM; `None` for PROGRAM as it is written.
    #[arg(skip)]
    pub(crate) program_name: Option<&'static str>,
}

impl Options {
    /// Default options for `nproc` ranks; `program` is the program to run, followed by its arguments. The job's secret
    /// and the TLS files are those of the environment (`RCOMM_JOB_SECRET`, `RCOMM_TLS_CERT`, `RCOMM_TLS_KEY`,
    /// `RCOMM_TLS_CA`).
    ///
    /// Ends the process with a message if the environment has only some of the variables for TLS.
    pub fn new(nproc: u32, program: Vec<String>) -> Self {
        let mut options = Self::parse_from(["rcomm-run", "-n", "1", "program"]);
        options.nproc = nproc;
        options.program = program;
        options
    }

    /// Parses a command line, the first part of which is the program's name.
    ///
    /// Ends the process if the command line is wrong or asks for help, as [`Parser::parse`] does.
    pub(crate) fn from_arguments(arguments: Vec<OsString>) -> Self {
        let options = Self::parse_from(accept_mpirun_spelling(arguments.into_iter()));
        if let Err(wrong) = options.check() {
            Self::command()
                .error(ErrorKind::ValueValidation, wrong)
                .exit();
        }
        options
    }

    /// The files of the TLS identity, if there is one.
    pub(super) fn tls_files(&self) -> Option<TlsFiles> {
        Some(TlsFiles {
            certificate: self.tls_cert.clone()?,
            key: self.tls_key.clone()?,
            ca: self.tls_ca.clone()?,
        })
    }

    /// How long a rank may be stopped; 0 without a limit.
    pub(super) fn stop_timeout(&self) -> Duration {
        // If the environment is invalid, the ranks report that.
        let ranks_timeout = || Config::from_environment().unwrap_or_default().timeout;
        self.stop_timeout.unwrap_or_else(ranks_timeout)
    }

    /// Whether this launcher serves the job's store; `None` if that depends on whether it can listen at the store's
    /// address.
    pub(super) fn serves_store(&self) -> Option<bool> {
        match (self.nnodes.is_range(), self.node_rank) {
            (true, None) => None,
            (_, node) => Some(node.unwrap_or(0) == 0),
        }
    }

    /// Checks options that depend on each other. Returns the message for the user if they are wrong.
    fn check(&self) -> Result<(), String> {
        let NodeCount { least, most } = self.nnodes;
        if let Some(node) = self.node_rank.filter(|&node| node >= most) {
            return Err(format!(
                "--node-rank is {node} but --nnodes is {}: hosts are numbered from 0",
                self.nnodes
            ));
        }
        if most > 1 && (self.master_port == 0 || self.job_secret.is_none()) {
            return Err(
                "a job on several hosts needs --master-addr, --master-port and --job-secret (or \
                 RCOMM_JOB_SECRET), the same on every host"
                    .to_owned(),
            );
        }
        if let Some(program) = self.program.first().filter(|name| name.starts_with('-')) {
            return Err(format!(
                "unexpected argument '{program}' found: options come before PROGRAM (./{program} is a program of that name)"
            ));
        }
        if self.replace > 0 && least < most {
            return Err(
                "--replace keeps the other ranks, and --nnodes MIN:MAX starts all again: give one of the two"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

/// The number of a job's hosts, which may change while the job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeCount {
    /// The minimum number of hosts, at least 1. No ranks run on fewer. If the number may change and hosts are lost, the
    /// job waits for others, and ends if they do not come in time.
    pub least: u32,
    /// The maximum number of hosts, not less than `least`: the job does not use more.
    pub most: u32,
}

impl NodeCount {
    /// Whether the number may change.
    pub const fn is_range(self) -> bool {
        self.least < self.most
    }
}

impl Default for NodeCount {
    fn default() -> Self {
        Self { least: 1, most: 1 }
    }
}

impl std::fmt::Display for NodeCount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.is_range() {
            true => write!(f, "{}:{}", self.least, self.most),
            false => write!(f, "{}", self.least),
        }
    }
}

impl FromStr for NodeCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (least, most) = text.split_once(':').unwrap_or((text, text));
        let number = |text: &str| {
            let number: Option<u32> = text.trim().parse().ok();
            number.filter(|&number| number > 0)
        };
        match (number(least), number(most)) {
            (Some(least), Some(most)) if least <= most => Ok(Self { least, most }),
            _ => Err(
                "give a number of at least 1, or MIN:MAX such as 1:4, with MIN not above MAX"
                    .to_owned(),
            ),
        }
    }
}

/// Replaces mpirun's `-np N`, as the first option, with `-n N`.
fn accept_mpirun_spelling(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let replace = |(index, argument): (usize, OsString)| match index == 1 && argument == "-np" {
        true => "-n".into(),
        false => argument,
    };
    args.enumerate().map(replace)
}

/// Parses the time after which a host is lost, which must be long enough for several signs of life.
fn time_until_lost(text: &str) -> Result<Duration, String> {
    let time = seconds(text)?;
    match time >= Duration::from_secs(2) {
        true => Ok(time),
        false => {
            Err("launchers give a sign of life twice a second: give at least 2 seconds".to_owned())
        }
    }
}

/// Parses a number of seconds, which may have a fraction.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_help_ends_with_the_exit_codes() {
        let help = Options::command().render_long_help().to_string();
        let (_, codes) = help
            .split_once("Exit codes (with --max-restarts, of the last attempt):\n")
            .expect(&help);
        for code in ["0", "N", "128+S", "2", "124", "125", "126", "127"] {
            let begins = |line: &str| line.split_whitespace().next() == Some(code);
            assert!(codes.lines().any(begins), "{code} in {codes}");
        }
    }

    #[test]
    fn a_tls_identity_needs_all_its_files() {
        let parse = |files: &[&str]| {
            let line = [&["rcomm-run", "-n", "1"][..], files, &["program"]].concat();
            Options::try_parse_from(line).map(|options| options.tls_files())
        };
        let all = ["--tls-cert", "a", "--tls-key", "b", "--tls-ca", "c"];
        let files = parse(&all).unwrap().unwrap();
        assert_eq!(files.key.to_str(), Some("b"));
        assert_eq!(parse(&[]).unwrap(), None);
        let error = parse(&all[..4]).unwrap_err().to_string();
        assert!(error.contains("--tls-ca"), "{error}");
    }

    #[test]
    fn the_spellings_of_torchrun_and_mpirun_are_understood() {
        let parse = |line: &str| {
            let args = line.split_whitespace().map(OsString::from);
            Options::try_parse_from(accept_mpirun_spelling(args)).unwrap()
        };
        let mpirun = parse("rcomm-run -np 3 program -np 9");
        assert_eq!(
            (mpirun.nproc, &*mpirun.program),
            (3, &["program".to_owned(), "-np".into(), "9".into()][..])
        );
        let torchrun = parse(
            "rcomm-run --nproc_per_node=2 --nnodes=2 --node_rank=1 --master_addr=a --master_port=7 \
             --max_restarts=3 program",
        );
        assert_eq!(torchrun.max_restarts, 3);
        assert_eq!((torchrun.nproc, torchrun.node_rank), (2, Some(1)));
        assert_eq!(torchrun.nnodes, NodeCount { least: 2, most: 2 });
        assert_eq!((&*torchrun.master_addr, torchrun.master_port), ("a", 7));
    }

    #[test]
    fn an_unknown_option_is_not_taken_for_the_program() {
        let check = |line: &[&str]| Options::try_parse_from(line).unwrap().check();
        let wrong = check(&["rcomm-run", "-n", "2", "--verbose", "program"]).unwrap_err();
        assert!(wrong.contains("unexpected argument '--verbose'"), "{wrong}");
        assert_eq!(
            check(&["rcomm-run", "-n", "2", "program", "--verbose"]),
            Ok(())
        );
    }

    #[test]
    fn a_number_of_hosts_is_one_number_or_a_range() {
        assert_eq!("1:4".parse(), Ok(NodeCount { least: 1, most: 4 }));
        assert_eq!("3".parse(), Ok(NodeCount { least: 3, most: 3 }));
        for wrong in ["", "0", "0:2", "3:2", "1:", "x", "1:2:3"] {
            assert!(wrong.parse::<NodeCount>().is_err(), "{wrong:?}");
        }
        let parse = |more: &[&str]| {
            let line = [&["rcomm-run", "-n", "1"][..], more, &["program"]].concat();
            Options::try_parse_from(line).map_err(|error| error.to_string())
        };
        let range = ["--nnodes", "1:3", "--master-port", "7", "--job-secret", "s"];
        let options = parse(&range).unwrap();
        assert_eq!((options.check(), options.serves_store()), (Ok(()), None));
        let options = parse(&[&range[..], &["--node-rank", "3"]].concat()).unwrap();
        assert!(options.check().unwrap_err().contains("--nnodes is 1:3"));
        let options = parse(&[&range[..], &["--replace", "1"]].concat()).unwrap();
        assert!(options.check().unwrap_err().contains("one of the two"));
        let error = parse(&["--node-timeout", "1"]).unwrap_err();
        assert!(error.contains("at least 2"), "{error}");
    }
}
