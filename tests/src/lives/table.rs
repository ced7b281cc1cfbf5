//! The rows, and what is true of each.

use super::rank::Deed;
use super::stage::{MemoryGroup, Plot};
use crate::process::CULPRIT;
use rcomm_analyzer::{Code, Verdict};
use rcomm_recorder::model::Rank;

/// How the bytes move between the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory.
    Shm,
    /// TCP.
    Tcp,
}

impl Transport {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Shm, Self::Tcp];

    /// Its name in `RCOMM_TRANSPORT`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// What a judgment may say: one of the verdicts, with a leading finding of one of the codes that names
/// exactly these ranks. Without codes, no finding leads.
#[derive(Clone, Copy, Debug)]
pub struct Said {
    /// The verdict words.
    pub verdicts: &'static [Verdict],
    /// The codes of the leading finding.
    pub codes: &'static [Code],
    /// The ranks that it names, ascending.
    pub ranks: &'static [Rank],
}

/// A job to which one thing happens.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its name on the command line.
    pub name: &'static str,
    /// What happens.
    pub about: &'static str,
    pub(super) deed: Deed,
    pub(super) plot: Plot,
    pub(super) timeout_ms: u32,
    /// What is true of the job once it is over.
    pub last: Said,
    /// What is true from the fault to the end of the job; "not yet" always is.
    pub passing: &'static [Said],
    /// What the dumps alone show; `None` where the job leaves none.
    pub dumps: Option<Said>,
}

const US: &[Rank] = &[CULPRIT];

const fn said(verdict: &'static [Verdict], codes: &'static [Code]) -> Said {
    let ranks = if codes.is_empty() { &[] } else { US };
    Said {
        verdicts: verdict,
        codes,
        ranks,
    }
}

const ENDED: Said = said(&[Verdict::Ended], &[]);
const CANCELLED: Said = said(&[Verdict::Cancelled], &[]);
const CRASHED: Said = said(&[Verdict::Crashed], &[Code::E150]);
/// While other ranks run, the rank whose process is gone holds them up.
const GONE: Said = said(&[Verdict::Stuck, Verdict::Crashed], &[Code::E150]);
const FROZEN: Said = said(&[Verdict::Stuck], &[Code::E151]);
const ABSENT: Said = said(&[Verdict::Stuck], &[Code::E101]);
/// A rank that was stopped and then went on left no sign of it but that it came late.
const HELD: Said = said(&[Verdict::Stuck], &[Code::E101, Code::E151]);
/// Dumps cannot show that a process is stopped, nor that it is gone where its peers did not notice.
const MISSED: Said = said(
    &[Verdict::Stuck, Verdict::Crashed],
    &[Code::E101, Code::E102, Code::E150, Code::E151],
);

/// Time-out in ms of rows in which no operation times out.
const LONG: u32 = 120_000;
/// Time-out in ms that is longer than it takes until a wait is overdue.
const SHORT: u32 = 8_000;

const fn row(
    name: &'static str,
    about: &'static str,
    deed: Deed,
    plot: Plot,
    (last, passing, dumps): (Said, &'static [Said], Option<Said>),
) -> Row {
    Row {
        name,
        about,
        deed,
        plot,
        timeout_ms: LONG,
        last,
        passing,
        dumps,
    }
}

impl Row {
    /// Why it cannot be run here; `None` if it can.
    pub fn skipped(&self) -> Option<String> {
        match self.deed {
            Deed::Exhaust => MemoryGroup::make().err(),
            _ => None,
        }
    }

    const fn within(self, timeout_ms: u32) -> Self {
        Self { timeout_ms, ..self }
    }
}

/// The whole matrix. A rank that panics, aborts or uses up memory may, on a busy host, end only after the
/// wait of the others is overdue: until it ends, it is reported as absent.
pub const ROWS: &[Row] = &[
    row(
        "clean-end",
        "every rank shuts its world down and exits with 0",
        Deed::Nothing,
        Plot::Watch,
        (ENDED, &[], None),
    ),
    row(
        "error",
        "a rank returns an error between two operations",
        Deed::Fail,
        Plot::Watch,
        (CRASHED, &[GONE], Some(MISSED)),
    ),
    row(
        "panic",
        "a rank panics between two operations",
        Deed::Panic,
        Plot::Watch,
        (CRASHED, &[GONE, ABSENT], Some(MISSED)),
    ),
    row(
        "exit",
        "a rank calls exit(3) between two operations",
        Deed::Exit,
        Plot::Watch,
        (CRASHED, &[GONE], Some(MISSED)),
    ),
    row(
        "terminated",
        "the launcher gets SIGTERM while all is well",
        Deed::Forever,
        Plot::Terminate,
        (CANCELLED, &[], None),
    ),
    row(
        "kill-inside",
        "a rank is killed inside an operation",
        Deed::Hold,
        Plot::KillInside,
        (CRASHED, &[GONE], Some(MISSED)),
    ),
    row(
        "kill-between",
        "a rank is killed between two operations",
        Deed::Kill,
        Plot::Watch,
        (CRASHED, &[GONE], Some(MISSED)),
    ),
    row(
        "kill-all",
        "all ranks are killed within half a second, none notices another's end",
        Deed::Forever,
        Plot::KillAll,
        (CANCELLED, &[], None),
    ),
    row(
        "stop-inside",
        "a rank is stopped inside an operation; then the job is terminated",
        Deed::Hold,
        Plot::StopInside,
        (FROZEN, &[HELD], None),
    ),
    row(
        "stop-between",
        "a rank is stopped between two operations; then the job is terminated",
        Deed::Stop,
        Plot::TerminateStuck,
        (FROZEN, &[HELD], None),
    ),
    row(
        "stop-killed",
        "a rank is stopped; then the launcher and all ranks are killed",
        Deed::Stop,
        Plot::KillStuck,
        (FROZEN, &[HELD], None),
    ),
    row(
        "resume-before",
        "a stopped rank goes on before the time-out",
        Deed::Stop,
        Plot::Resume,
        (ENDED, &[HELD], None),
    ),
    row(
        "resume-after",
        "a stopped rank goes on after the others have timed out",
        Deed::Stop,
        Plot::ResumeLate,
        (HELD, &[], Some(HELD)),
    )
    .within(SHORT),
    row(
        "memory-limit",
        "an allocation fails on a rank, which aborts",
        Deed::Allocate,
        Plot::Watch,
        (CRASHED, &[GONE, ABSENT], Some(MISSED)),
    ),
    row(
        "out-of-memory",
        "the kernel kills a rank for want of memory",
        Deed::Exhaust,
        Plot::Watch,
        (CRASHED, &[GONE, ABSENT], Some(MISSED)),
    ),
    row(
        "late",
        "a rank sleeps past a short time-out, and comes then",
        Deed::Late,
        Plot::Watch,
        (ABSENT, &[], Some(ABSENT)),
    )
    .within(2_000),
    row(
        "stuck-cancelled",
        "a rank never comes; then the launcher gets SIGTERM",
        Deed::Sleep,
        Plot::TerminateStuck,
        (ABSENT, &[], None),
    ),
    row(
        "stuck-out",
        "a rank never comes; the others time out and exit",
        Deed::Sleep,
        Plot::Watch,
        (ABSENT, &[], Some(ABSENT)),
    )
    .within(SHORT),
    row(
        "stuck-killed",
        "a rank never comes; then another one is killed",
        Deed::Sleep,
        Plot::KillOther,
        (ABSENT, &[], Some(MISSED)),
    ),
];
