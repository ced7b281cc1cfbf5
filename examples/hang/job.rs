//! Starts the ranks, shows their output, and collects their records.

use crate::Fault;
use anyhow::{Context, Result, bail};
use rcomm_recorder::model::text::duration;
use rcomm_recorder::publish::{Dump, RingReader, remove_stale_rings, write_dump_file};
use rcomm_recorder::record::default_directory;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The rank with the fault.
pub(crate) const CULPRIT: u32 = 2;
const RANKS: u32 = 4;
/// The time-out of operations.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The time-out of operations with `--hold`: so long that no operation ends while a user inspects the job.
const LONG_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
/// The time limit for the ranks to exit. It is long for slow machines.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The records and files that the job leaves.
pub(crate) struct Outcome {
    /// One dump for each rank.
    pub(crate) dumps: Vec<Dump>,
    /// The directory of the dump files.
    pub(crate) directory: PathBuf,
}

/// The job: four processes. They are killed when it is dropped.
pub(crate) struct Job {
    fault: Fault,
    name: String,
    directory: PathBuf,
    ranks: Vec<Rank>,
}

struct Rank {
    number: u32,
    process: Child,
    output_threads: Vec<JoinHandle<()>>,
}

impl Job {
    /// Starts this program once for each rank, with the environment of torchrun.
    pub(crate) fn start(fault: Fault) -> Result<Self> {
        let name = format!("hang-{}", std::process::id());
        let directory = std::env::temp_dir().join(format!("rcomm-{name}"));
        // The port is free now, and most likely still free when rank 0 binds it.
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        print_line(&match fault {
            Fault::Hold => {
                format!("== {RANKS} ranks of job {name}; rank {CULPRIT} hangs in step 5")
            }
            Fault::Hang => format!(
                "== {RANKS} ranks, time-out {}; rank {CULPRIT} hangs in step 5\n",
                duration(TIMEOUT)
            ),
            Fault::Kill => format!(
                "== {RANKS} ranks, time-out {}; rank {CULPRIT} is killed in step 5\n",
                duration(TIMEOUT)
            ),
        });
        let mut job = Self {
            fault,
            name,
            directory,
            ranks: Vec::new(),
        };
        for number in 0..RANKS {
            let rank = job.start_rank(number, port);
            job.ranks
                .push(rank.with_context(|| format!("cannot start rank {number}"))?);
        }
        Ok(job)
    }

    fn start_rank(&self, number: u32, port: u16) -> Result<Rank> {
        let timeout = match self.fault {
            Fault::Hold => LONG_TIMEOUT,
            Fault::Hang | Fault::Kill => TIMEOUT,
        };
        let mut process = Command::new(std::env::current_exe()?)
            .arg(self.fault.argument())
            .env("RANK", number.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("LOCAL_RANK", number.to_string())
            .env("LOCAL_WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_RUN_ID", &self.name)
            .env("RCOMM_TIMEOUT_MS", timeout.as_millis().to_string())
            .env("RCOMM_DUMP_DIR", &self.directory)
            .env_remove("RCOMM_RING_DIR")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut output_threads = Vec::new();
        if let Some(out) = process.stdout.take() {
            output_threads.push(print_lines(number, out));
        }
        if let Some(err) = process.stderr.take() {
            output_threads.push(print_lines(number, err));
        }
        Ok(Rank {
            number,
            process,
            output_threads,
        })
    }

    /// Prints the commands that show the job, and waits until all ranks have ended. Ctrl-c ends this process and the
    /// ranks.
    pub(crate) fn hold(mut self) -> Result<()> {
        let name = &self.name;
        print_line(&format!(
            "== in another terminal:\n\
             ==   rcomm-top --job {name}          the live view (or: cargo run -p rcomm-top)\n\
             ==   rcomm-top --once --job {name}   the verdict as text\n\
             ==   rcomm-web --job {name}          the page (or: cargo run -p rcomm-web)\n\
             == ctrl-c ends the job; its records stay until `rcomm-fr rings remove-stale`"
        ));
        for rank in &mut self.ranks {
            let status = rank.process.wait()?;
            print_line(&format!("== rank {} has ended: {status}", rank.number));
        }
        Ok(())
    }

    /// Waits until all ranks but [`CULPRIT`] have exited, kills the culprit, as a scheduler would, and collects the
    /// dumps.
    pub(crate) fn end_and_collect(mut self) -> Result<Outcome> {
        let deadline = Instant::now() + EXIT_TIMEOUT;
        for rank in self.ranks.iter_mut().filter(|rank| rank.number != CULPRIT) {
            while rank.process.try_wait()?.is_none() {
                if Instant::now() > deadline {
                    bail!(
                        "rank {} has not exited after {}",
                        rank.number,
                        duration(EXIT_TIMEOUT)
                    );
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        // A killed rank writes no dump, but its ring outlives it.
        let ring = default_directory()
            .join(&self.name)
            .join(format!("{CULPRIT}.0.ring"));
        let ring = (self.fault == Fault::Kill).then(|| RingReader::attach(&ring));
        self.end();
        let mut dumps = read_dumps(&self.directory)?;
        if let Some(ring) = ring {
            let ring = ring.context("cannot read the ring of the killed rank")?;
            print_line(&format!(
                "\n== the ring of rank {CULPRIT}: {}",
                ring.path().display()
            ));
            let dump = ring.snapshot();
            // Write the contents of the ring next to the dumps of the other ranks.
            let run = run_directory(&self.directory)?;
            write_dump_file(&run.join(format!("rank_{CULPRIT}.json")), &dump.to_json())?;
            dumps.push(dump);
        }
        remove_stale_rings(&default_directory(), Some(&self.name))?;
        Ok(Outcome {
            dumps,
            directory: self.directory.clone(),
        })
    }

    /// Kills the ranks that still run, and waits for their processes and their output.
    fn end(&mut self) {
        for rank in &mut self.ranks {
            // The process may have ended already.
            let _ = rank.process.kill();
            let _ = rank.process.wait();
            for thread in rank.output_threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.end();
    }
}

/// Prints a line. If the output is closed, the line is lost.
fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints each line of a rank's output with the rank's number, on a new thread, until the output ends.
fn print_lines(rank: u32, output: impl Read + Send + 'static) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            print_line(&format!("[rank {rank}] {line}"));
        }
    })
}

/// The directory in which the ranks of this run wrote their dumps.
fn run_directory(directory: &Path) -> Result<PathBuf> {
    let mut runs = std::fs::read_dir(directory).context("no rank wrote a dump")?;
    let run = runs.next().context("no rank wrote a dump")?;
    Ok(run?.path())
}

/// Reads all dumps below a directory.
fn read_dumps(directory: &Path) -> Result<Vec<Dump>> {
    let mut dumps = Vec::new();
    for run in std::fs::read_dir(directory).context("no rank wrote a dump")? {
        for file in std::fs::read_dir(run?.path())? {
            let path = file?.path();
            let context = || format!("cannot read {}", path.display());
            let bytes = std::fs::read(&path).with_context(context)?;
            let (dump, _) = Dump::read(&bytes).with_context(context)?;
            dumps.push(dump);
        }
    }
    Ok(dumps)
}
