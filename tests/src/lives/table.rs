//! Defines the rows of the matrix of how jobs live and end, with the answers that are right for each.

use super::job::{Intervention, MemoryGroup};
use super::rank::CulpritAct;
use crate::process::CULPRIT;
use rcomm_analyzer::{Code, Verdict};
use rcomm_recorder::model::Rank;
use std::path::Path;

/// How the bytes move between the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory.
    Shm,
    /// TCP.
    Tcp,
}

impl Transport {
    /// Both transports.
    pub const ALL: [Self; 2] = [Self::Shm, Self::Tcp];

    /// The transport's name in `RCOMM_TRANSPORT`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// A right answer: one of the verdicts, with a leading finding of one of the codes that names exactly these ranks.
/// Without codes, no finding leads.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// The verdicts that are right.
    pub verdicts: &'static [Verdict],
    /// The codes that are right for the leading finding.
    pub codes: &'static [Code],
    /// The ranks that the leading finding must name, ascending.
    pub ranks: &'static [Rank],
}

/// A job with at most one fault and one intervention from outside, and the answers that are right for it.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The row's name on the command line.
    pub name: &'static str,
    /// A sentence on what happens in the job.
    pub about: &'static str,
    /// What the culprit does.
    pub(super) act: CulpritAct,
    /// What is done to the job from outside.
    pub(super) intervention: Intervention,
    /// The time-out of operations, in ms.
    pub(super) timeout_ms: u32,
    /// The right answer once the job is over.
    pub last: Expected,
    /// The right answers from the fault to the end of the job, besides that there is no fault and no end yet.
    pub meanwhile: &'static [Expected],
    /// What the dumps alone must show if they decide; `None` where the job need not leave any.
    pub dumps: Option<Expected>,
}

const CULPRITS: &[Rank] = &[CULPRIT];

const fn expected(verdicts: &'static [Verdict], codes: &'static [Code]) -> Expected {
    let ranks = if codes.is_empty() { &[] } else { CULPRITS };
    Expected {
        verdicts,
        codes,
        ranks,
    }
}

const ENDED: Expected = expected(&[Verdict::Ended], &[]);
const CANCELLED: Expected = expected(&[Verdict::Cancelled], &[]);
const CRASHED: Expected = expected(&[Verdict::Crashed], &[Code::E150]);
/// A rank whose process has ended, also while other ranks still run and wait for it.
const GONE: Expected = expected(&[Verdict::Stuck, Verdict::Crashed], &[Code::E150]);
const STOPPED: Expected = expected(&[Verdict::Stuck], &[Code::E151]);
/// All ranks are stopped for a moment before they are killed.
const ALL_STOPPED: Expected = Expected {
    ranks: &[0, 1, 2, 3],
    ..STOPPED
};
const SLOW: Expected = expected(&[Verdict::Slow], &[Code::W220]);
const ABSENT: Expected = expected(&[Verdict::Stuck], &[Code::E101]);
/// A rank that is or was stopped: recognized as absent (E101), or by the state of its process (E151).
const STOPPED_OR_ABSENT: Expected = expected(&[Verdict::Stuck], &[Code::E101, Code::E151]);
/// What dumps alone may say of a rank that is gone: they do not show its end if its peers did not notice it.
const GONE_BY_DUMPS: Expected = expected(
    &[Verdict::Stuck, Verdict::Crashed],
    &[Code::E101, Code::E102, Code::E150, Code::E151],
);

/// The time-out, in ms, of rows in which no operation times out.
const LONG_TIMEOUT_MS: u32 = 120_000;
/// The time-out, in ms, of rows in which operations time out after their waits are overdue.
const SHORT_TIMEOUT_MS: u32 = 8_000;

const fn row(
    name: &'static str,
    about: &'static str,
    act: CulpritAct,
    intervention: Intervention,
    (last, meanwhile, dumps): (Expected, &'static [Expected], Option<Expected>),
) -> Row {
    Row {
        name,
        about,
        act,
        intervention,
        timeout_ms: LONG_TIMEOUT_MS,
        last,
        meanwhile,
        dumps,
    }
}

impl Row {
    /// Why the row cannot be run on this host; `None` if it can.
    pub fn skip_reason(&self) -> Option<String> {
        match self.act {
            CulpritAct::Exhaust => MemoryGroup::make().err(),
            CulpritAct::Starve if !Path::new("/proc/self/schedstat").exists() => {
                Some("this system does not count waits for a processor".into())
            }
            _ => None,
        }
    }

    const fn with_timeout(self, timeout_ms: u32) -> Self {
        Self { timeout_ms, ..self }
    }
}

/// Every row. On a busy host, a rank that panics, aborts or uses up memory may end only after the waits of the others
/// are overdue. Until it ends, it is reported as absent.
pub const ROWS: &[Row] = &[
    row(
        "clean-end",
        "every rank shuts its world down and exits with 0",
        CulpritAct::Nothing,
        Intervention::Watch,
        (ENDED, &[], None),
    ),
    row(
        "error",
        "a rank returns an error between two operations",
        CulpritAct::Fail,
        Intervention::Watch,
        (CRASHED, &[GONE], Some(GONE_BY_DUMPS)),
    ),
    row(
        "panic",
        "a rank panics between two operations",
        CulpritAct::Panic,
        Intervention::Watch,
        (CRASHED, &[GONE, ABSENT], Some(GONE_BY_DUMPS)),
    ),
    row(
        "exit",
        "a rank exits with code 3 between two operations",
        CulpritAct::Exit,
        Intervention::Watch,
        (CRASHED, &[GONE], Some(GONE_BY_DUMPS)),
    ),
    row(
        "terminated",
        "the launcher gets SIGTERM while all is well",
        CulpritAct::Forever,
        Intervention::Terminate,
        (CANCELLED, &[], None),
    ),
    row(
        "slow",
        "a rank is slow in every step; then the launcher gets SIGTERM",
        CulpritAct::Dawdle,
        Intervention::TerminateSlow,
        (SLOW, &[], None),
    ),
    row(
        "starved",
        "a rank shares its processor with busy threads; then the launcher gets SIGTERM",
        CulpritAct::Starve,
        Intervention::Terminate,
        (CANCELLED, &[], None),
    ),
    row(
        "kill-inside",
        "a rank is killed inside an operation",
        CulpritAct::Hold,
        Intervention::KillInside,
        (CRASHED, &[GONE], Some(GONE_BY_DUMPS)),
    ),
    row(
        "kill-between",
        "a rank is killed between two operations",
        CulpritAct::Kill,
        Intervention::Watch,
        (CRASHED, &[GONE], Some(GONE_BY_DUMPS)),
    ),
    row(
        "kill-all",
        "all ranks are killed within a second, before any notices the end of another",
        CulpritAct::Forever,
        Intervention::KillAll,
        (CANCELLED, &[ALL_STOPPED], None),
    ),
    row(
        "stop-inside",
        "a rank is stopped inside an operation; then the job is terminated",
        CulpritAct::Hold,
        Intervention::StopInside,
        (STOPPED, &[STOPPED_OR_ABSENT], None),
    ),
    row(
        "stop-between",
        "a rank is stopped between two operations; then the job is terminated",
        CulpritAct::Stop,
        Intervention::TerminateStuck,
        (STOPPED, &[STOPPED_OR_ABSENT], None),
    ),
    row(
        "stop-killed",
        "a rank is stopped; then the launcher and all ranks are killed",
        CulpritAct::Stop,
        Intervention::KillStuck,
        (STOPPED, &[STOPPED_OR_ABSENT], None),
    ),
    row(
        "resume-before",
        "a stopped rank is resumed before the time-out",
        CulpritAct::Stop,
        Intervention::Resume,
        (ENDED, &[STOPPED_OR_ABSENT], None),
    ),
    row(
        "resume-after",
        "a stopped rank is resumed after the others have timed out",
        CulpritAct::Stop,
        Intervention::ResumeLate,
        (STOPPED_OR_ABSENT, &[], Some(STOPPED_OR_ABSENT)),
    )
    .with_timeout(SHORT_TIMEOUT_MS),
    row(
        "memory-limit",
        "an allocation fails on a rank, which aborts",
        CulpritAct::Allocate,
        Intervention::Watch,
        (CRASHED, &[GONE, ABSENT], Some(GONE_BY_DUMPS)),
    ),
    row(
        "out-of-memory",
        "the kernel kills a rank because memory ran out",
        CulpritAct::Exhaust,
        Intervention::Watch,
        (CRASHED, &[GONE, ABSENT], Some(GONE_BY_DUMPS)),
    ),
    row(
        "late",
        "a rank sleeps past a short time-out, then joins",
        CulpritAct::Late,
        Intervention::Watch,
        (ABSENT, &[], Some(ABSENT)),
    )
    .with_timeout(2_000),
    row(
        "stuck-cancelled",
        "a rank never joins; then the launcher gets SIGTERM",
        CulpritAct::Sleep,
        Intervention::TerminateStuck,
        (ABSENT, &[], None),
    ),
    row(
        "stuck-timed-out",
        "a rank never joins; the others time out and exit",
        CulpritAct::Sleep,
        Intervention::Watch,
        (ABSENT, &[], Some(ABSENT)),
    )
    .with_timeout(SHORT_TIMEOUT_MS),
    row(
        "stuck-other-killed",
        "a rank never joins; then another one is killed",
        CulpritAct::Sleep,
        Intervention::KillOther,
        (ABSENT, &[], Some(GONE_BY_DUMPS)),
    ),
];
