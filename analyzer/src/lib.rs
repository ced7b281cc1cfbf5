//! Reads the records of a job, from files or live, and judges them.
//!
//! A [`Report`] is the result of every analysis, post-mortem or live: the same codes, names and
//! sentences in `rcomm-fr`, `rcomm-top` and `rcomm-web`.
//!
//! The dumps of a job that is over, or rings that are still written to:
//!
//! ```no_run
//! use rcomm_analyzer::load::{LoadOptions, load};
//! use rcomm_analyzer::print::human;
//! use rcomm_analyzer::{Analysis, Extent, Policy, Unread};
//!
//! let mut analysis = Analysis::new(Policy::default());
//! let read = load(&["dumps".into()], &LoadOptions::default(), |record| {
//!     let extent = if record.cut { Extent::Cut } else { Extent::Whole };
//!     analysis.add_from(&record.path, &record.dump, extent);
//! })?;
//! for problem in read.problems {
//!     analysis.add_problem(problem, Unread::Part);
//! }
//! let report = analysis.finish();
//! human::write(&report, &human::Layout::default(), &mut std::io::stdout())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`Source`] reads a running job and a [`Live`] judges it; a [`Watch`] does both on its own threads.
//!
//! | module | holds |
//! |---|---|
//! | [`load`], [`rsum`], [`ras`], [`log`], [`inspector`], [`stacks`] | readers of files: dumps, summaries, NCCL's RAS reports, logs, the log of NCCL's Inspector, stacks |
//! | [`source`] | readers of a running job, such as rings, endpoints, worker servers, NCCL's RAS, collectors |
//! | [`mod@print`], [`export`] | a report as text, JSON or HTML; records for other tools |
//! | [`redact`] | pseudonyms of paths, hosts, addresses, users, threads and the program's own frames |
//! | [`recording`], [`simulate`] | recorded and simulated jobs as sources |
//! | `parse_duration` | durations as values of options, behind the feature `args` |
//! | `cli` | the program `rcomm-fr`, behind the feature `cli` |
#![forbid(unsafe_code)]

// The command line uses the library as other programs do, by its public names.
#[cfg(feature = "cli")]
extern crate self as rcomm_analyzer;

#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "args")]
mod duration;
mod input;
mod live;
pub mod redact;
mod render;

#[cfg(feature = "args")]
pub use duration::parse_duration;
pub use input::threads::{Threads, analyze_on_threads};
pub use input::{inspector, load, log, ras, rsum, stacks};
pub use live::source::{self, Source};
pub use live::{
    Anchor, GroupState, JobsWatch, Judge, Live, LiveOptions, Moment, NodeJob, NodeJobs, Pace,
    RankState, RankView, ReducerView, Snapshot, SourceStatus, States, Urgency, Watch, recording,
    simulate,
};
pub use rcomm_verdict::{
    Analysis, Code, Difference, EndKind, Evidence, Explanation, Extent, Finding, FrameRef,
    GroupChange, GroupRef, GroupReport, Input, InstanceReport, InstanceState, JobEnd, LaterAttempt,
    LogInput, LogLine, Message, MessageNumbers, Place, Policy, Price, Problem, RankReport,
    RecordFile, Report, SeqKind, Severity, Since, StackNode, Unread, Until, Verdict, Wait, analyze,
    causes, ended_ns, explain, filter, format, logs, matrix, seq_of, status_entry,
};
pub use render::{export, print};
