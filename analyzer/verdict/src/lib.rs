//! Judges flight recorder dumps: the same records always give the same [`Report`].
//!
//! Nothing here reads a clock, a file or a socket, starts a thread or prints: the time of judgment and everything else
//! is an argument. `rcomm-analyzer` reads the records, this crate judges them:
//!
//! ```
//! use rcomm_verdict::{Policy, Verdict, analyze};
//!
//! let dumps: Vec<rcomm_recorder::publish::Dump> = Vec::new();
//! assert_eq!(analyze(&dumps, &Policy::default()).verdict, Verdict::Inconclusive);
//! ```
//!
//! The modules, each of which uses only those below it:
//!
//! | module | holds |
//! |---|---|
//! | `logs` | what a job's logs show, alone and together with its records |
//! | `judge` | which rank waits for which and why: the wait-for graph, the checks, the verdict |
//! | `align` | the records of all ranks side by side, by group and sequence number |
//! | `report` | what an analysis returns, and helpers to show it |
#![forbid(unsafe_code)]
// Invariant 7 of docs/ARCHITECTURE.md: `clippy.toml` of this crate refuses clocks, files, sockets, threads and output.

mod align;
mod judge;
pub mod logs;
mod report;

pub use align::{
    Extent, MAX_WORLD, Message, MessageNumbers, Workers, ended_ns, retiring_is_all, seq_of,
    status_entry,
};
pub use judge::{Analysis, LaterAttempt, Policy, RecordFile, Unread, analyze, is_exception};
pub use report::{
    Code, Difference, EndKind, Evidence, Explanation, Finding, FrameRef, GroupChange, GroupRef,
    GroupReport, Input, InstanceReport, InstanceState, JobEnd, LogInput, LogLine, Place, Price,
    Problem, RankReport, Report, SeqKind, Severity, Since, StackNode, Until, Verdict, Wait, causes,
    explain, filter, format, matrix,
};
