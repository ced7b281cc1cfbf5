//! Tries on a job what another user of its host could, and reports whether any of it works.

use crate::job::{INIT_TIMEOUT, TIME_LIMIT};
use anyhow::{Context, ensure};
use clap::Args;
use rcomm::store::{Store, TcpStore};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// `nobody`, on most systems the user without rights.
const USER: u32 = 65_534;
/// How many connections to each port of the job the user keeps open.
const HELD: usize = 64;

#[derive(Debug, Args)]
pub(crate) struct StrangerArgs {
    /// A folder that the user owns.
    folder: PathBuf,
    #[arg(long)]
    job: String,
    /// The folder of the rings.
    #[arg(long)]
    rings: PathBuf,
    /// The folder of the owner's secret.
    #[arg(long)]
    secret: PathBuf,
    /// The port of the store.
    #[arg(long)]
    store: u16,
    #[arg(long, value_delimiter = ',')]
    pids: Vec<u32>,
    #[arg(long, value_delimiter = ',')]
    ports: Vec<u16>,
    /// Names of the job's abstract Unix sockets.
    #[arg(long, value_delimiter = ',')]
    sockets: Vec<String>,
}

fn as_stranger() -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.uid(USER).gid(USER).stdin(Stdio::null());
    Ok(command)
}

/// Checks that this program can be run as another user.
///
/// # Errors
/// The reason why not.
pub(crate) fn probe() -> anyhow::Result<()> {
    ensure!(geteuid().is_root(), "only root may become another user");
    let listed = as_stranger()?.arg("list").output();
    let listed = listed.context("another user cannot run this program")?;
    ensure!(
        listed.status.success(),
        "this program does not run as another user"
    );
    Ok(())
}

/// Makes another user try everything in [`run`] on the job.
///
/// # Errors
/// Something worked; the error lists it. Or no port of the job was found, the attempt could not be prepared, or the
/// other user's process failed.
pub(crate) fn attack(folder: &Path, job: &str, store: u16, pids: &[u32]) -> anyhow::Result<()> {
    // All users may enter the test's own folder, so that only what rcomm makes there protects the job.
    fs::set_permissions(folder, PermissionsExt::from_mode(0o755))?;
    let owned = folder.join("stranger");
    for inner in ["", "events"] {
        let path = owned.join(inner);
        fs::create_dir_all(&path)?;
        fs::set_permissions(&path, PermissionsExt::from_mode(0o777))?;
    }
    let (mut ports, mut sockets) = (Vec::new(), Vec::new());
    for &pid in pids {
        let listening = Listening::of(pid)?;
        ports.extend(listening.ports.iter().map(u16::to_string));
        sockets.extend(listening.abstract_sockets);
    }
    ensure!(!ports.is_empty(), "no port of the job was found");
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let mut command = as_stranger()?;
    command.arg("stranger").arg(&owned).args(["--job", job]);
    command.arg("--rings").arg(folder.join("rings"));
    let secret = rcomm_recorder::record::default_directory().join("secret");
    command.arg("--secret").arg(secret);
    command.args(["--store", &store.to_string(), "--pids", &pids.join(",")]);
    command.args(["--ports", &ports.join(",")]);
    if !sockets.is_empty() {
        command.args(["--sockets", &sockets.join(",")]);
    }
    let done = command.output()?;
    let error = String::from_utf8_lossy(&done.stderr);
    let worked: Vec<String> = serde_json::from_slice(&done.stdout)
        .with_context(|| format!("the other user's process failed: {error}"))?;
    ensure!(worked.is_empty(), "another user could: {worked:?}");
    Ok(())
}

/// Where a process listens.
#[derive(Default)]
struct Listening {
    ports: Vec<u16>,
    /// Names of abstract Unix sockets.
    abstract_sockets: Vec<String>,
}

impl Listening {
    fn of(pid: u32) -> anyhow::Result<Self> {
        let table = |name: &str| fs::read_to_string(format!("/proc/{pid}/net/{name}"));
        // The number of a TCP port, or, as the error, the name of an abstract Unix socket.
        let mut by_inode: BTreeMap<String, Result<u16, String>> = BTreeMap::new();
        for text in [table("tcp")?, table("tcp6").unwrap_or_default()] {
            for line in text.lines().skip(1) {
                let fields: Vec<&str> = line.split_whitespace().collect();
                let port = fields[1].rsplit(':').next().unwrap_or_default();
                if fields[3] == "0A" {
                    by_inode.insert(fields[9].to_owned(), Ok(u16::from_str_radix(port, 16)?));
                }
            }
        }
        for line in table("unix")?.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if let Some(name) = fields.get(7).and_then(|path| path.strip_prefix('@')) {
                by_inode.insert(fields[6].to_owned(), Err(name.to_owned()));
            }
        }
        let mut all = Self::default();
        for file in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
            let target = fs::read_link(file.path()).unwrap_or_default();
            let inode = target
                .to_str()
                .and_then(|text| text.strip_prefix("socket:["));
            match inode.and_then(|text| by_inode.get(text.trim_end_matches(']'))) {
                Some(Ok(port)) => all.ports.push(*port),
                Some(Err(name)) => all.abstract_sockets.push(name.clone()),
                None => {}
            }
        }
        Ok(all)
    }
}

/// Tries everything as the user of this process, and prints what worked as JSON.
///
/// # Errors
/// A port or a socket of the job cannot be connected to, or a rank cannot be started.
#[expect(clippy::print_stdout, reason = "the result goes to the driver")]
pub(crate) fn run(args: &StrangerArgs) -> anyhow::Result<()> {
    // These connections stay open until the end: the ranks must reach each other nevertheless.
    let mut held = Vec::new();
    for &port in &args.ports {
        for _ in 0..HELD {
            held.push(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?);
        }
        let mut noisy = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        // The port may close the connection before it has read everything.
        let _ = noisy.write_all(&[0xa5; 64 << 10]);
    }
    let mut held_sockets = Vec::new();
    for name in &args.sockets {
        let mut socket = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
        let _ = socket.write_all(&[0xa5; 4 << 10]);
        held_sockets.push(socket);
    }
    let mut worked = Vec::new();
    let mut note = |act: String, succeeded: bool| {
        if succeeded {
            worked.push(act);
        }
    };
    try_files(args, &mut note);
    try_processes(args, &mut note);
    try_store(args, &mut note);
    note("join the job".to_owned(), joins(args)?);
    println!("{}", serde_json::to_string(&worked)?);
    Ok(())
}

fn opens(path: &Path, write: bool) -> bool {
    OpenOptions::new()
        .read(true)
        .write(write)
        .open(path)
        .is_ok()
}

fn try_files(args: &StrangerArgs, note: &mut impl FnMut(String, bool)) {
    let job_folder = args.rings.join(&args.job);
    for folder in [&args.rings, &job_folder] {
        let shown = folder.display();
        note(format!("list {shown}"), fs::read_dir(folder).is_ok());
        let planted = folder.join("planted");
        note(format!("write to {shown}"), File::create(planted).is_ok());
    }
    for rank in 0..args.pids.len() {
        let ring = job_folder.join(format!("{rank}.0.ring"));
        let socket = ring.with_extension("sock");
        let connected = UnixStream::connect(&socket).is_ok();
        note(format!("connect to {}", socket.display()), connected);
        for write in [false, true] {
            let act = format!("open {}, write: {write}", ring.display());
            note(act, opens(&ring, write));
        }
        let act = format!("remove {}", ring.display());
        note(act, fs::remove_file(&ring).is_ok());
    }
    note("read the secret".to_owned(), opens(&args.secret, false));
}

fn try_processes(args: &StrangerArgs, note: &mut impl FnMut(String, bool)) {
    for (rank, &pid) in args.pids.iter().enumerate() {
        for file in ["environ", "mem", "maps", "syscall"] {
            let path = PathBuf::from(format!("/proc/{pid}/{file}"));
            note(
                format!("read {file} of rank {rank}"),
                fs::read(path).is_ok(),
            );
        }
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd"));
        note(format!("see files of rank {rank}"), descriptors.is_ok());
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let sent = id.is_some_and(|id| kill_process(id, Signal::TERM).is_ok());
        note(format!("signal rank {rank}"), sent);
    }
}

fn try_store(args: &StrangerArgs, note: &mut impl FnMut(String, bool)) {
    let patience = Duration::from_secs(2);
    let Ok(store) = TcpStore::connect("127.0.0.1", args.store, patience) else {
        return;
    };
    note("list keys".to_owned(), store.list_keys().is_ok());
    note("write a key".to_owned(), store.set("planted", b"x").is_ok());
    let alarm = store.add("rcomm/alarm/0", 1);
    note("raise the alarm".to_owned(), alarm.is_ok());
}

/// Whether a rank that this user starts becomes a rank of the job. A process that does not end in time counts as
/// joined.
fn joins(args: &StrangerArgs) -> anyhow::Result<bool> {
    let mut command = Command::new(std::env::current_exe()?);
    let size = args.pids.len().to_string();
    command.arg("rank").arg(&args.folder);
    command
        .env("RANK", "1")
        .env("WORLD_SIZE", &size)
        .env("LOCAL_RANK", "1")
        .env("LOCAL_WORLD_SIZE", &size)
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", args.store.to_string())
        .env("TORCHELASTIC_RUN_ID", &args.job)
        .env("RCOMM_JOB_SECRET", "what another user would guess")
        .env(
            "RCOMM_INIT_TIMEOUT_MS",
            INIT_TIMEOUT.as_millis().to_string(),
        )
        .env("RCOMM_RING_DIR", args.folder.join("rings"))
        .env("RCOMM_DUMP_DIR", args.folder.join("dumps"))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut rank = command.spawn()?;
    let until = Instant::now() + TIME_LIMIT;
    let ended = loop {
        match rank.try_wait()? {
            Some(status) => break Some(status),
            None if Instant::now() >= until => break None,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    rank.kill()?;
    rank.wait()?;
    Ok(ended.is_none_or(|status| status.success()))
}
