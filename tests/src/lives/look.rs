//! Judges a job: live, and from the records that it left.

use super::table::Expected;
use rcomm_analyzer::load::{LoadOptions, LoadedDump, load_all};
use rcomm_analyzer::source::{RingSource, Source as _};
use rcomm_analyzer::{
    Analysis, Anchor, Code, Extent, Live, LiveOptions, Policy, Report, Severity, Unread, Verdict,
};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, LaunchRecord};
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The records on which a judgment is based.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The rings, polled while the job runs and ends.
    Live,
    /// The rings that are left.
    Rings,
    /// The dumps, and the rings of ranks that left none.
    Dumps,
    /// The dumps, without any ring and without the launcher's record.
    DumpsAlone,
}

impl Source {
    /// Every source.
    pub const ALL: [Self; 4] = [Self::Live, Self::Rings, Self::Dumps, Self::DumpsAlone];

    /// The source's name in the printed results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Rings => "rings",
            Self::Dumps => "dumps",
            Self::DumpsAlone => "dumps-alone",
        }
    }
}

/// The first statement of a report: its verdict and its leading finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The verdict.
    pub verdict: Verdict,
    /// The code of the leading finding: the first error that no other finding caused, or W220 in a slow job.
    pub code: Option<Code>,
    /// The ranks that the leading finding names, ascending.
    pub ranks: Vec<Rank>,
    /// Other sets of ranks that may be at fault instead.
    pub alternatives: Vec<Vec<Rank>>,
    /// The sentence of the leading finding; if there is none, the sentence on the job's end.
    pub sentence: String,
}

impl Answer {
    pub(super) fn of(report: &Report) -> Self {
        let mut findings = report.findings.iter();
        let lead = findings.find(|finding| {
            let is_cause = finding.severity == Severity::Error && finding.caused_by.is_none();
            is_cause || (report.verdict == Verdict::Slow && finding.code == Code::W220)
        });
        let end = report.end.as_ref().map(|end| end.sentence.clone());
        Self {
            verdict: report.verdict,
            code: lead.map(|finding| finding.code),
            ranks: lead.map_or_else(Vec::new, |finding| finding.culprit_ranks.clone()),
            alternatives: lead.map_or_else(Vec::new, |finding| finding.alternatives.clone()),
            sentence: lead
                .map(|finding| finding.sentence.clone())
                .or(end)
                .unwrap_or_default(),
        }
    }

    /// Whether the answer reports no fault and no end.
    pub fn is_not_yet(&self) -> bool {
        let undecided = [Verdict::Running, Verdict::Healthy, Verdict::Inconclusive];
        self.code.is_none() && undecided.contains(&self.verdict)
    }

    /// Whether the answer names no rank, but lists the expected ranks among its alternatives and is otherwise as
    /// expected.
    pub fn leaves_open(&self, expected: &Expected) -> bool {
        let with_ranks = Self {
            ranks: expected.ranks.to_vec(),
            ..self.clone()
        };
        let is_alternative = self.alternatives.iter().any(|set| set == expected.ranks);
        self.ranks.is_empty() && is_alternative && with_ranks.is(expected)
    }

    /// Whether the answer is one that `expected` allows.
    pub fn is(&self, expected: &Expected) -> bool {
        let has_right_code = match self.code {
            Some(code) => expected.codes.contains(&code),
            None => expected.codes.is_empty(),
        };
        let has_right_verdict = expected.verdicts.contains(&self.verdict);
        has_right_verdict && has_right_code && self.ranks == expected.ranks
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = format!("{:?}", self.verdict).to_uppercase();
        match &self.code {
            Some(code) => write!(f, "{verdict} {code:?} {:?}", self.ranks),
            None => write!(f, "{verdict}"),
        }
    }
}

/// A live view that judges on a separate thread until it is dropped, and keeps all its answers.
pub(super) struct View {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// Whether the view has been dropped.
    is_over: AtomicBool,
    /// Every answer that differs from the previous one, with its time.
    answers: Mutex<Vec<(Instant, Answer)>>,
}

/// The polling interval. It is shorter than that of `rcomm-top`, so that a state between the ends of two ranks is
/// seldom missed.
const PAUSE: Duration = Duration::from_millis(20);

impl View {
    /// Starts to judge the rings below this directory.
    pub(super) fn of(rings: PathBuf) -> Self {
        let shared = Arc::new(Shared {
            is_over: AtomicBool::new(false),
            answers: Mutex::default(),
        });
        let for_thread = shared.clone();
        let thread = std::thread::spawn(move || judge_until_over(rings, &for_thread));
        Self {
            shared,
            thread: Some(thread),
        }
    }

    pub(super) fn answers(&self) -> Vec<(Instant, Answer)> {
        let answers = self.shared.answers.lock();
        answers.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has reported it itself.
            let _ = thread.join();
        }
    }
}

fn judge_until_over(rings: PathBuf, shared: &Shared) {
    let anchor = Anchor::now();
    let mut source = RingSource::new(rings, None);
    let judge = |dumps: &[Arc<Dump>], policy: &Policy| rcomm_analyzer::analyze(dumps, policy);
    let mut live = Live::new(LiveOptions::default(), judge, vec![source.name()]);
    while !shared.is_over.load(Ordering::Relaxed) {
        let poll = source.poll(Instant::now() + Duration::from_secs(10));
        live.observe(0, poll, anchor.moment());
        if let Some(snapshot) = live.refresh(anchor.moment()) {
            let answer = Answer::of(&snapshot.report);
            let mut answers = shared
                .answers
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let is_same = |last: &Answer| {
                (last.verdict, last.code, &last.ranks)
                    == (answer.verdict, answer.code, &answer.ranks)
            };
            if !answers.last().is_some_and(|(_, last)| is_same(last)) {
                answers.push((Instant::now(), answer));
            }
        }
        std::thread::sleep(PAUSE);
    }
}

/// The answer from the records that a job left. `None` for [`Source::Live`], and for a source of dumps if the job left
/// no dump.
pub(super) fn afterwards(source: Source, dumps: &Path, rings: &Path) -> Option<Answer> {
    let mut analysis = Analysis::new(Policy::default());
    let mut read: BTreeSet<Rank> = BTreeSet::new();
    let mut add_unread = |paths: &[PathBuf], read: &mut BTreeSet<Rank>| {
        let Ok((found, loaded)) = load_all(paths, &LoadOptions::default()) else {
            return;
        };
        let known = read.clone();
        let is_new = |dump: &&LoadedDump| {
            let rank = dump.dump.identity.rank;
            rank.is_none_or(|rank| !known.contains(&rank))
        };
        for dump in found.iter().filter(is_new) {
            read.extend(dump.dump.identity.rank);
            let extent = match dump.cut {
                true => Extent::Cut,
                false => Extent::Whole,
            };
            analysis.add_from(&dump.path, &dump.dump, extent);
        }
        for problem in loaded.problems {
            analysis.add_problem(problem, Unread::Part);
        }
    };
    match source {
        Source::Live => return None,
        Source::Rings => add_unread(&[rings.to_owned()], &mut read),
        Source::Dumps | Source::DumpsAlone => {
            add_unread(&[dumps.to_owned()], &mut read);
        }
    }
    let dumped = read.len();
    if source == Source::Dumps {
        add_unread(&[rings.to_owned()], &mut read);
    }
    if matches!(source, Source::Dumps | Source::DumpsAlone) && dumped == 0 {
        return None;
    }
    if source != Source::DumpsAlone {
        let launches = LaunchRecord::in_directory(rings);
        if let Some(launch) = launches.first() {
            analysis.expect(launch.world_size);
        }
        analysis.add_launches(launches);
    }
    Some(Answer::of(&analysis.finish()))
}
