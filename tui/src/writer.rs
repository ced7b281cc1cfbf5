//! Writing files, on a thread of its own: a slow disk holds up no key.

use crate::event::{Command, Event};
use crate::state::State;
use crate::state::command::Format;
use crate::text;
use crate::units::count;
use rcomm_analyzer::{Snapshot, export, print};
use rcomm_recorder::publish::{Dump, write_dump_file};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

/// Starts to do `command` with what `state` shows; how it ended comes as [`Event::Done`].
///
/// The thread ends with the file; who started it joins it.
///
/// # Errors
///
/// If there is nothing to write, or the thread cannot be started.
pub fn start(state: &State, command: Command, sender: Sender<Event>) -> io::Result<JoinHandle<()>> {
    let Some(snapshot) = state.snapshot().cloned() else {
        return Err(io::Error::other("there is nothing to write yet"));
    };
    let screen = text::of(state);
    let work = move || {
        let done = match command {
            Command::Export(format, path) => export(format, &path, &snapshot, &screen),
            Command::WriteRecords(folder) => write_records(&folder, &snapshot),
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
        None => Ok(format!("wrote {} to {place}", count(written, "record"))),
        Some(error) => Err(format!(
            "wrote {written} of {all} records to {place}: {error}"
        )),
    }
}

fn write_record(path: &Path, dump: &Arc<Dump>) -> Result<(), String> {
    let bytes = dump.to_json();
    write_dump_file(path, &bytes)
        .map(drop)
        .map_err(|error| error.to_string())
}
