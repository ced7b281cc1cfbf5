//! Writes files, sends requests to ranks and reads facts about processes on a separate thread, so that a slow disk or
//! rank does not delay key presses.

use crate::state::State;
use crate::state::event::{Command, Event, ExportFormat};
use crate::view::text;
use rcomm_analyzer::format::count;
use rcomm_analyzer::source::{
    DumpAnswers, DumpRequests, JobChoice, RingProcessFacts, StackRequests, TakenStacks,
};
use rcomm_analyzer::{Anchor, Snapshot, export, print};
use rcomm_recorder::publish::{Dump, write_dump_file};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the view can ask, read and choose besides its sources.
#[derive(Default)]
pub struct RequestTargets {
    /// Ranks that can be asked to write dumps.
    pub dumps: Vec<Box<dyn DumpRequests>>,
    /// Ranks that can be asked for their call stacks.
    pub stacks: Vec<Box<dyn StackRequests>>,
    /// Reads facts about the processes of this node's ranks, on the host and on GPUs; `None` if no rings are read.
    pub process_facts: Option<RingProcessFacts>,
    /// Selects the job of this node to show; `None` if no rings are read.
    pub job: Option<JobChoice>,
}

/// Time limit for the ranks' answers to a request.
const WAIT_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for reading facts about processes. A user who quits during a read waits until it ends.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// Starts `command` on a new thread, with the snapshot and the screen that `state` shows now. The result arrives as
/// [`Event::Done`], call stacks as [`Event::Stacks`], and facts about processes as [`Event::ProcessFacts`]. Other
/// commands are ignored.
///
/// The thread ends once the command has finished; the caller joins it.
///
/// # Errors
///
/// If no snapshot is shown yet, or the thread cannot be started.
pub fn start(
    state: &State,
    command: Command,
    targets: &Arc<RequestTargets>,
    anchor: Anchor,
    sender: Sender<Event>,
) -> io::Result<JoinHandle<()>> {
    let Some(snapshot) = state.snapshot().cloned() else {
        return Err(io::Error::other("no records have been read yet"));
    };
    let screen = text::of(state);
    let targets = targets.clone();
    let body = move || {
        let done = match command {
            Command::Export(format, path) => export(format, &path, &snapshot, &screen),
            Command::WriteRecords(folder) => write_records(&folder, &snapshot),
            Command::AskForDumps => ask_for_dumps(&targets.dumps),
            Command::TakeStacks => match take_stacks(&targets.stacks) {
                Ok(stacks) => {
                    let taken = Event::Stacks(Arc::new(stacks), anchor.moment());
                    // This fails if the program has quit since.
                    let _ = sender.send(taken);
                    return;
                }
                Err(error) => Err(error),
            },
            Command::ReadProcessFacts(ranks) => {
                let deadline = Instant::now() + LOOK_LIMIT;
                let reader = targets.process_facts.as_ref();
                let taken = reader.and_then(|reader| reader.take(&ranks, deadline).ok());
                // This fails if the program has quit since.
                let _ = sender.send(Event::ProcessFacts(taken.unwrap_or_default()));
                return;
            }
            _ => return,
        };
        // This fails if the program has quit since.
        let _ = sender.send(Event::Done(done));
    };
    let builder = std::thread::Builder::new().name("rcomm-top/writer".into());
    builder.spawn(body)
}

/// Writes the snapshot, or as text the screen, to a file; returns a sentence about the result.
fn export(
    format: ExportFormat,
    path: &Path,
    snapshot: &Snapshot,
    screen: &str,
) -> Result<String, String> {
    let write = || -> io::Result<()> {
        let mut out = BufWriter::new(File::create(path)?);
        match format {
            ExportFormat::Text => out.write_all(screen.as_bytes())?,
            ExportFormat::Json => print::json::write(&snapshot.report, &mut out)?,
            ExportFormat::Perfetto => {
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

/// Writes every dump as `rank_<rank>.json`; a file that exists is kept, and the new one gets a number. Returns a
/// sentence with the number of dumps written, or an error with the first failure.
fn write_records(folder: &Path, snapshot: &Snapshot) -> Result<String, String> {
    let mut written = 0;
    let mut failed: Option<String> = None;
    for view in snapshot.ranks.iter() {
        for dump in &view.dumps {
            let path = folder.join(format!("rank_{}.json", view.rank));
            match write_dump(&path, dump) {
                Ok(()) => written += 1,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
    }
    let dumps = snapshot.dumps().count();
    let folder = folder.display();
    match failed {
        None => Ok(format!(
            "wrote {} to {folder}",
            count(written as u64, "dump")
        )),
        Some(error) => Err(format!(
            "wrote {written} of {} to {folder}: {error}",
            count(dumps as u64, "dump")
        )),
    }
}

/// Asks ranks for dumps. Returns a sentence with the number of ranks that wrote one or are writing it. If a rank
/// refused, or a source could not be asked, returns an error with this sentence and the first reason.
fn ask_for_dumps(targets: &[Box<dyn DumpRequests>]) -> Result<String, String> {
    let mut all_answers = DumpAnswers::default();
    let mut failed: Option<String> = None;
    let deadline = Instant::now() + WAIT_LIMIT;
    for ranks in targets {
        let answers = match ranks.ask(deadline) {
            Ok(answers) => answers,
            Err(error) => {
                failed.get_or_insert_with(|| error.to_string());
                continue;
            }
        };
        all_answers.written.extend(answers.written);
        all_answers.agreed.extend(answers.agreed);
        all_answers.requested.extend(answers.requested);
        all_answers.refused.extend(answers.refused);
    }
    let Some(failed) = failed else {
        return format_answers(&all_answers);
    };
    if all_answers == DumpAnswers::default() {
        return Err(failed);
    }
    let (Ok(text) | Err(text)) = format_answers(&all_answers);
    Err(format!(
        "{text}; another source could not be asked: {failed}"
    ))
}

/// The sentence about the ranks' answers. It is an error if a rank refused, and then ends with the first reason.
fn format_answers(answers: &DumpAnswers) -> Result<String, String> {
    let (written, agreed) = (answers.written.len(), answers.agreed.len());
    let asked = written + agreed + answers.requested.len() + answers.refused.len();
    let share = |n: usize| format!("{n} of {}", count(asked as u64, "rank"));
    let mut text = match (written, agreed) {
        (0, 1..) => format!("dumps being written by {}", share(agreed)),
        (_, 0) => format!("dumps written by {}", share(written)),
        _ => format!(
            "dumps written by {}, being written by {agreed}",
            share(written)
        ),
    };
    if let Some(first) = answers.requested.first() {
        let n = answers.requested.len();
        let subject = match n {
            1 => format!("rank {first}"),
            _ => format!("{n} ranks"),
        };
        text.push_str(&format!(
            "; {subject} {} asked through the job's store",
            if n == 1 { "was" } else { "were" }
        ));
    }
    // A rank's failure is more useful than the location of the others' dumps.
    if let Some((rank, reason)) = answers.refused.first() {
        return Err(format!("{text}; rank {rank} did not: {reason}"));
    }
    if let Some((rank, path)) = answers.written.first() {
        text.push_str(&format!("; rank {rank}: {path}"));
    }
    Ok(text)
}

/// Takes the current stacks of the processes from the first source that provides any; if none does, returns the last
/// failure. The sources that the command line names, which give call stacks, come first in `targets`. Those of this
/// node know the states of threads or, for a job without rings, ask PyTorch's worker servers for call stacks.
fn take_stacks(targets: &[Box<dyn StackRequests>]) -> Result<TakenStacks, String> {
    let deadline = Instant::now() + WAIT_LIMIT;
    let mut failure = "no source can provide call stacks".to_owned();
    for ranks in targets {
        match ranks.take(deadline) {
            Ok(stacks) => return Ok(stacks),
            Err(error) => failure = error.to_string(),
        }
    }
    Err(failure)
}

fn write_dump(path: &Path, dump: &Arc<Dump>) -> Result<(), String> {
    let bytes = dump.to_json();
    write_dump_file(path, &bytes)
        .map(drop)
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::source::SourceError;

    /// A source whose ranks give these answers; `None` if it cannot be asked.
    struct Answers(Option<DumpAnswers>);

    impl DumpRequests for Answers {
        fn ask(&self, _: Instant) -> Result<DumpAnswers, SourceError> {
            self.0.clone().ok_or_else(|| SourceError::Unusable {
                place: "the store".to_owned(),
                reason: "it does not answer".to_owned(),
            })
        }
    }

    #[test]
    fn a_source_that_cannot_be_asked_hides_no_answer_of_another() {
        let wrote = || {
            Answers(Some(DumpAnswers {
                written: vec![(1, "rank_1".to_owned())],
                ..DumpAnswers::default()
            }))
        };
        let text = "dumps written by 1 of 1 rank; rank 1: rank_1";
        let ask = |sources: [Answers; 2]| {
            let sources = sources.map(|source| -> Box<dyn DumpRequests> { Box::new(source) });
            ask_for_dumps(&sources)
        };
        let failed = "cannot use the store: it does not answer";
        let both = format!("{text}; another source could not be asked: {failed}");
        assert_eq!(ask([wrote(), Answers(None)]), Err(both.clone()));
        assert_eq!(ask([Answers(None), wrote()]), Err(both));
        assert_eq!(ask([Answers(None), Answers(None)]), Err(failed.to_owned()));
    }
}
