//! Writing files and asking ranks to, on a thread of its own: a slow disk or rank holds up no key.

use crate::event::{Command, Event};
use crate::state::State;
use crate::state::command::Format;
use crate::text;
use rcomm_analyzer::source::{DumpAnswers, WorkerServerDumps};
use rcomm_analyzer::words::count;
use rcomm_analyzer::{Snapshot, export, print};
use rcomm_recorder::publish::{Dump, write_dump_file};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long ranks may take to answer when they are asked for their dumps.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts to do `command` with what `state` shows; how it ended comes as [`Event::Done`].
///
/// The thread ends with the file; who started it joins it.
///
/// # Errors
///
/// If there is nothing to write, or the thread cannot be started.
pub fn start(
    state: &State,
    command: Command,
    asked: &Arc<[WorkerServerDumps]>,
    sender: Sender<Event>,
) -> io::Result<JoinHandle<()>> {
    let Some(snapshot) = state.snapshot().cloned() else {
        return Err(io::Error::other("there is nothing to write yet"));
    };
    let screen = text::of(state);
    let asked = asked.clone();
    let work = move || {
        let done = match command {
            Command::Export(format, path) => export(format, &path, &snapshot, &screen),
            Command::WriteRecords(folder) => write_records(&folder, &snapshot),
            Command::AskForDumps => ask_for_dumps(&asked),
            _ => return,
        };
        // Who quit meanwhile does not want to know.
        let _ = sender.send(Event::Done(done));
    };
    let builder = std::thread::Builder::new().name("rcomm-top/writer".into());
    builder.spawn(work)
}

fn export(
    format: Format,
    path: &Path,
    snapshot: &Snapshot,
    screen: &str,
) -> Result<String, String> {
    let write = || -> io::Result<()> {
        let mut out = BufWriter::new(File::create(path)?);
        match format {
            Format::Text => out.write_all(screen.as_bytes())?,
            Format::Json => print::json::write(&snapshot.report, &mut out)?,
            Format::Perfetto => {
                let dumps: Vec<Dump> = snapshot.dumps().map(|(_, dump)| dump.clone()).collect();
                export::perfetto::write(&dumps, &snapshot.report, &mut out)?;
            }
        }
        out.flush()
    };
    match write() {
        Ok(()) => Ok(format!("wrote {}", path.display())),
        Err(error) => Err(format!("failed to write {}: {error}", path.display())),
    }
}

/// Every record as `rank_<rank>.json`, and how many of them could be written.
fn write_records(folder: &Path, snapshot: &Snapshot) -> Result<String, String> {
    let mut written = 0;
    let mut failed: Option<String> = None;
    for view in snapshot.ranks.iter() {
        for dump in &view.dumps {
            let path = folder.join(format!("rank_{}.json", view.rank));
            match write_record(&path, dump) {
                Ok(()) => written += 1,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
    }
    let all = snapshot.dumps().count();
    let place = folder.display();
    match failed {
        None => Ok(format!(
            "wrote {} to {place}",
            count(written as u64, "record")
        )),
        Some(error) => Err(format!(
            "wrote {written} of {all} records to {place}: {error}"
        )),
    }
}

/// How many ranks write their dumps, of how many that were asked.
fn ask_for_dumps(asked: &[WorkerServerDumps]) -> Result<String, String> {
    let mut said = DumpAnswers::default();
    let deadline = Instant::now() + PATIENCE;
    for ranks in asked {
        let answers = ranks.ask(deadline).map_err(|error| error.to_string())?;
        said.agreed.extend(answers.agreed);
        said.refused.extend(answers.refused);
    }
    let all = said.agreed.len() + said.refused.len();
    let text = format!("{} of {all} ranks write their dumps", said.agreed.len());
    match said.refused.first() {
        None => Ok(text),
        Some((rank, reason)) => Err(format!("{text}; rank {rank}: {reason}")),
    }
}

fn write_record(path: &Path, dump: &Arc<Dump>) -> Result<(), String> {
    let bytes = dump.to_json();
    write_dump_file(path, &bytes)
        .map(drop)
        .map_err(|error| error.to_string())
}
