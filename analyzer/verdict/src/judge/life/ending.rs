//! Describes the end of a job in its report, and lowers the confidence of findings where the end leaves questions open.

use crate::judge::context::{Context, FindingDraft};
use crate::judge::life::harm::suffered_ns;
use crate::judge::life::raised::is_exception;
use crate::judge::life::{End, Gone, SIGNALLED, TOGETHER_NS, is_of_end_signal};
use crate::judge::policy::LaterAttempt;
use crate::report::format::{count, format_ranks, time_of_day};
use crate::report::{Code, EndKind, Finding, JobEnd, Report};
use rcomm_recorder::model::{EntryState, Rank};
use rcomm_recorder::publish::RankEnd;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// The end of the job; `None` if it is not over.
pub(crate) fn of(ctx: &Context<'_>) -> Option<JobEnd> {
    let end = ctx.life.end.as_ref()?;
    Some(JobEnd {
        how: end.kind,
        at_ns: end.last_ns,
        first_ranks: end.first.clone(),
        sentence: with_attempts(ctx, &sentence(ctx, end)),
        attempt: attempt(ctx),
        later_attempt: later_attempt(ctx).map(|later| later.attempt),
    })
}

/// The attempt that the records are of.
fn attempt(ctx: &Context<'_>) -> u32 {
    let records = ctx.aligned.records.iter();
    let attempt = records.map(|record| record.identity.attempt).max();
    attempt.unwrap_or(0)
}

/// A later attempt than that of the records, if its processes were seen.
fn later_attempt<'a>(ctx: &Context<'a>) -> Option<&'a LaterAttempt> {
    let later = ctx.policy.later_attempt.as_ref();
    later.filter(|later| later.attempt > attempt(ctx))
}

/// The highest confidence of a finding that rests on waits of unknown age.
const AGE_UNKNOWN: f64 = 0.5;

/// Lowers the confidence of findings that rest on unfinished operations, if the job may have been terminated soon after
/// they were issued ([`End::leaves_ages_open`]).
pub(crate) fn lower_confidence(ctx: &Context<'_>, drafts: &mut [FindingDraft]) {
    let end = ctx.life.end.as_ref();
    if !end.is_some_and(End::leaves_ages_open) {
        return;
    }
    for draft in drafts {
        if matches!(
            draft.code,
            Code::E101 | Code::E102 | Code::E120 | Code::E130 | Code::E135
        ) {
            draft.confidence = draft.confidence.min(AGE_UNKNOWN);
            draft.doubts.push(
                "the records do not show when the processes ended: if they were terminated while they worked, the \
                 unfinished operations had only just begun"
                    .into(),
            );
        }
    }
}

/// The highest confidence of a finding on processes that are gone, if only one of several may have ended first.
const ORDER_UNKNOWN: f64 = 0.5;

/// Lowers the confidence of findings on processes that ended first, where a launcher may have ended some because of
/// others. All that ended first become alternatives; of several culprits, none is blamed.
pub(crate) fn leave_order_open(ctx: &Context<'_>, drafts: &mut [FindingDraft]) {
    if !ctx.life.is_order_open() {
        return;
    }
    for draft in drafts.iter_mut().filter(|draft| draft.code == Code::E150) {
        let went_first = |rank: &Rank| ctx.life.went_first(*rank);
        if draft.culprits.is_empty() || !draft.culprits.iter().all(went_first) {
            continue;
        }
        draft.confidence = draft.confidence.min(ORDER_UNKNOWN);
        draft.doubts.push(
            "several processes are gone: a launcher may have ended the others because of the first, and the records do \
             not show which that was"
                .to_owned(),
        );
        let gone = ctx.aligned.expected.iter().copied();
        draft.alternatives = gone
            .filter(went_first)
            .map(|rank| vec![rank])
            .take(16)
            .collect();
        if draft.culprits.len() > 1 {
            draft.culprits.clear();
            draft
                .sentence
                .push_str("; which of them ended first is not recorded");
        }
    }
}

/// Adds to the sentence of the leading finding how the job ended afterward.
pub(crate) fn append(ctx: &Context<'_>, report: &mut Report) {
    let lead = report.lead().map(|finding| finding.id);
    let lead = report
        .findings
        .iter_mut()
        .find(|finding| Some(finding.id) == lead);
    if let (Some(end), Some(finding)) = (&ctx.life.end, lead) {
        let then = afterwards(ctx, end, finding);
        finding.sentence.push_str(&then);
        finding.sentence = with_attempts(ctx, &finding.sentence);
    }
}

/// A sentence on a job that is over, with its attempt. If a later attempt has begun, that comes before the sentence;
/// otherwise the number of the attempt follows it, unless it is 0.
fn with_attempts(ctx: &Context<'_>, sentence: &str) -> String {
    let attempt = attempt(ctx);
    match later_attempt(ctx) {
        Some(later) => {
            let (run, have) = match later.ranks.len() {
                1 => ("runs", "has"),
                _ => ("run", "have"),
            };
            format!(
                "attempt {} has begun, and {} {run} and {have} no ring yet; of attempt {attempt}: {sentence}",
                later.attempt,
                format_ranks(&later.ranks)
            )
        }
        None if attempt > 0 => format!("{sentence}; this was attempt {attempt}"),
        None => sentence.to_owned(),
    }
}

/// The end of a finding's sentence: how the job ended then.
fn afterwards(ctx: &Context<'_>, end: &End, finding: &Finding) -> String {
    let last_time = time_of_day(end.last_ns);
    // The ranks that the sentence names, else those that ended first.
    let named = match finding.culprit_ranks.as_slice() {
        [] => end.first.as_slice(),
        named => named,
    };
    let others = ctx.aligned.expected.iter();
    match end.kind {
        EndKind::Ended => format!("; then every process ended in order, the last at {last_time}"),
        EndKind::Cancelled => match ended_by(ctx, end) {
            Some(cause) => format!("; then the job was terminated {cause} at {last_time}"),
            None if ctx.life.asked_each() => {
                format!("; then the processes ended, as a signal asked them to, all by {last_time}")
            }
            None => format!("; then all processes ended together, the last at {last_time}"),
        },
        EndKind::Crashed if finding.code == Code::E150 && !named.is_empty() => {
            let others = others.filter(|rank| !named.contains(rank));
            let others: Vec<&Gone> = others.filter_map(|&rank| ctx.life.gone(rank)).collect();
            let named = named.iter().filter_map(|&rank| ctx.life.gone(rank));
            let first = named.map(Gone::seen_ns).max().unwrap_or(end.first_ns);
            let first = time_of_day(first);
            match others.iter().map(|gone| gone.seen_ns()).max() {
                None => format!("; the last sign of life is from {first}"),
                Some(last) => {
                    let number = count(others.len() as u64, "other");
                    let last = time_of_day(last);
                    format!(
                        "; the last sign of life is from {first}, that of the {number} from {last}"
                    )
                }
            }
        }
        EndKind::Crashed if end.first.is_empty() => {
            format!("; then the processes ended, all by {last_time}")
        }
        EndKind::Crashed => format!(
            "; then the processes ended, first {}, all by {last_time}",
            of_ranks(&end.first)
        ),
        EndKind::Unknown if !end.is_dated() => {
            "; no process is left, and when they ended is not recorded".to_owned()
        }
        EndKind::Unknown => {
            format!("; no process is left, the last signs of life are from {last_time}")
        }
    }
}

/// The sentence on how the job ended.
fn sentence(ctx: &Context<'_>, end: &End) -> String {
    let number = ctx.aligned.expected.len();
    let last_time = time_of_day(end.last_ns);
    let (all_ranks, processes) = match number {
        1 => ("the only rank".to_owned(), "process is"),
        number => (format!("all {number} ranks"), "processes are"),
    };
    // Gives `all 4 ranks' processes are` and `the only rank's process is`.
    let own = if number == 1 { "'s" } else { "'" };
    match end.kind {
        EndKind::Ended => {
            let rings = match ctx.aligned.records.is_empty() {
                true => {
                    "; no ring of this run is left, since ranks that end in order remove theirs"
                }
                false => "",
            };
            format!("{all_ranks} ended in order, the last at {last_time}{rings}")
        }
        EndKind::Cancelled => {
            let (were, none) = match number {
                1 => ("was", "not in order: it was"),
                _ => ("were", "none in order: they were"),
            };
            let how = match ended_by(ctx, end) {
                Some(cause) => format!("{were} terminated {cause} at {last_time}"),
                None if ctx.life.asked_each() => asked_each(ctx, &last_time),
                None => format!(
                    "ended together at {last_time}, {none} probably terminated from outside"
                ),
            };
            format!("{all_ranks} {how}{}{}", inside(ctx), launcher_too(ctx))
        }
        EndKind::Crashed => {
            let exit = end.first.first();
            let exit = exit.and_then(|&rank| Some((rank, ctx.life.gone(rank)?.exit?)));
            let exit = exit.map_or(String::new(), |(rank, exit)| {
                format!("; rank {rank} {}", format_exit(&exit))
            });
            let raised = match common_exception(ctx) {
                Some(_) => common_phase(ctx),
                None if all_ended_themselves(ctx) => each_exception(ctx),
                None => String::new(),
            };
            match end.first.len() {
                _ if !raised.is_empty() || all_ended_themselves(ctx) => {
                    format!("{all_ranks} ended by {last_time}, none in order{exit}{raised}")
                }
                0 => match end.possible.as_slice() {
                    [] => format!(
                        "the job was over at {last_time}; the records do not show whose process ended first"
                    ),
                    [only] => format!(
                        "the job was over at {last_time}: the process of rank {only} ended before others, and one signal \
                         may have ended them all"
                    ),
                    possible => format!(
                        "the job was over at {last_time}; one of {} ended first, and the records do not show which",
                        format_ranks(possible)
                    ),
                },
                // Of ends at about the same time, none is the first.
                first if first == number => {
                    format!("{all_ranks} ended by {last_time}, none in order{exit}")
                }
                _ => format!(
                    "the job was over at {last_time}: {} ended first{exit}",
                    of_ranks(&end.first)
                ),
            }
        }
        EndKind::Unknown if !end.is_dated() => format!(
            "{all_ranks}{own} {processes} gone; how and when this happened is not recorded{}{}{}",
            inside(ctx),
            common_phase(ctx),
            launcher_too(ctx)
        ),
        EndKind::Unknown => format!(
            "{all_ranks}{own} {processes} gone, with the last sign of life at {last_time}; none was in an operation, and how this happened is not recorded{}{}",
            common_phase(ctx),
            launcher_too(ctx)
        ),
    }
}

/// A predicate of all ranks, each of which ended in order or noted that a signal asked it to end.
fn asked_each(ctx: &Context<'_>, last_time: &str) -> String {
    let ranks = ctx.aligned.expected.iter().copied();
    let asked: Vec<Rank> = ranks
        .filter(|&rank| !ctx.life.ended_in_order(rank))
        .collect();
    let who = match ctx.aligned.expected.len() {
        1 => "not in order".to_owned(),
        number if number == asked.len() => "none in order".to_owned(),
        _ => format!("{} not in order", format_ranks(&asked)),
    };
    let as_noted = match common_phase(ctx) {
        phase if phase.is_empty() => {
            "; a signal had asked for that, as their exit codes or phases show".to_owned()
        }
        phase => phase,
    };
    format!("ended by {last_time}, {who}{as_noted}")
}

/// The end of a clause: the phase that all ranks named last, if it is the same. The recorder for PyTorch names an
/// exception that ends the program, and operations that are under way at its end, in a phase.
fn common_phase(ctx: &Context<'_>) -> String {
    let statuses = ctx
        .aligned
        .records
        .iter()
        .map(|record| record.status.as_ref());
    let mut phases = statuses.map(|status| status.map_or("", |status| status.phase.as_str()));
    let Some(first) = phases.next().filter(|phase| !phase.is_empty()) else {
        return String::new();
    };
    match phases.all(|phase| phase == first) {
        true => format!("; each was in phase `{first}`"),
        false => String::new(),
    }
}

/// The phase of the exception that has left the programs of all ranks, of which there are several. `None` if one of
/// them ended otherwise.
pub(crate) fn common_exception<'a>(ctx: &'a Context<'_>) -> Option<&'a str> {
    let records = ctx.aligned.records.iter();
    let mut phases = records.map(|record| Some(record.status.as_ref()?.phase.as_str()));
    let first = phases.next()??;
    let mut expected = ctx.aligned.expected.iter();
    let is_common = ctx.aligned.expected.len() > 1
        && phases.all(|phase| phase == Some(first))
        && expected.all(|&rank| ctx.aligned.record_of(rank).is_some());
    (is_common && is_exception(first)).then_some(first)
}

/// Whether all ranks, several, ended by themselves at about one time, each by an exception or with an exit code that is
/// an error, and no operation of any had failed: then nothing shows that one ended because of another.
pub(crate) fn all_ended_themselves(ctx: &Context<'_>) -> bool {
    let aligned = ctx.aligned;
    let by_itself = |&rank: &Rank| {
        let mut records = aligned.records_of(rank);
        let raised = records.any(|record| ctx.raised(record).is_some_and(is_exception));
        let gone = ctx.life.gone(rank);
        let code = gone.and_then(|gone| gone.exit?.exit_code);
        let is_error = code.is_some_and(|code| code != 0 && !is_of_end_signal(code));
        (raised || is_error) && suffered_ns(aligned, rank).is_none()
    };
    let ends = aligned.expected.iter();
    let ends = ends.filter_map(|&rank| ctx.life.gone(rank).map(Gone::at_ns));
    let (first, last) = (ends.clone().min(), ends.max());
    let together = first.zip(last);
    let together = together.is_some_and(|(first, last)| last.saturating_sub(first) <= TOGETHER_NS);
    aligned.expected.len() > 1 && together && aligned.expected.iter().all(by_itself)
}

/// The end of a sentence: the exceptions that left the programs of the first few ranks.
fn each_exception(ctx: &Context<'_>) -> String {
    const SHOWN: usize = 3;
    let records = ctx.aligned.records.iter().enumerate();
    let raised = records.filter_map(|(index, record)| {
        let phase = ctx.raised(index)?;
        Some(format!("; rank {} was in phase `{phase}`", record.rank))
    });
    raised.take(SHOWN).collect()
}

/// By whom or by what the job was terminated, as a part of a sentence. `None` if no launcher was asked to end it, and
/// no launcher noted one signal that ended all processes.
fn ended_by(ctx: &Context<'_>, end: &End) -> Option<String> {
    if let Some(asked) = end.asked {
        let signal = signal_name(asked.signal);
        return Some(format!("from outside (the launcher received {signal})"));
    }
    let ranks = ctx.aligned.expected.iter();
    let mut signals = ranks.map(|&rank| ctx.life.gone(rank)?.exit?.signal);
    let first = signals.next()??;
    let is_common = signals.all(|signal| signal == Some(first));
    is_common.then(|| format!("by {}", signal_name(first)))
}

/// The end of a sentence on a launcher that noted no end of the processes that it started: it would have, unless it was
/// killed or stopped itself. Empty if there is no such launcher.
fn launcher_too(ctx: &Context<'_>) -> String {
    let attempt = ctx
        .aligned
        .records
        .iter()
        .map(|record| record.identity.attempt);
    let attempt = attempt.max();
    let mut launches = ctx.policy.launches.iter();
    let silent = launches.find(|launch| {
        launch.ended_ns == 0
            && attempt.is_none_or(|attempt| attempt == launch.attempt)
            && launch.ranks.iter().all(|process| process.end.is_none())
    });
    silent.map_or(String::new(), |launch| {
        format!(
            "; their launcher, process {} on {}, noted none of these ends: it was killed or stopped before them",
            launch.launcher_pid, launch.host
        )
    })
}

/// The end of a process, like `was killed by SIGKILL`, `exited with code 3` or `ended with code 143, as after SIGTERM`.
pub(crate) fn format_exit(end: &RankEnd) -> String {
    let memory = match end.out_of_memory {
        Some(true) => " (the kernel ran out of memory)",
        Some(false) | None => "",
    };
    match (end.signal, end.exit_code) {
        (Some(signal), _) => format!("was killed by {}{memory}", signal_name(signal)),
        // The process may have been killed after it had noted this code.
        (None, Some(code)) if is_of_end_signal(code) => {
            let signal = signal_name(code - SIGNALLED);
            format!("ended with code {code}, as after {signal}{memory}")
        }
        (None, Some(code)) => format!("exited with code {code}{memory}"),
        (None, None) => format!("ended{memory}"),
    }
}

/// The signals that most often end processes, with their numbers on Linux.
const SIGNALS: [(i32, &str); 13] = [
    (1, "SIGHUP"),
    (2, "SIGINT"),
    (3, "SIGQUIT"),
    (4, "SIGILL"),
    (6, "SIGABRT"),
    (7, "SIGBUS"),
    (8, "SIGFPE"),
    (9, "SIGKILL"),
    (11, "SIGSEGV"),
    (13, "SIGPIPE"),
    (14, "SIGALRM"),
    (15, "SIGTERM"),
    (24, "SIGXCPU"),
];

/// The name of a signal; its number if it is not in [`SIGNALS`].
fn signal_name(signal: i32) -> String {
    let known = SIGNALS.iter().find(|(number, _)| *number == signal);
    known.map_or_else(
        || format!("signal {signal}"),
        |(_, name)| (*name).to_owned(),
    )
}

/// A part of a sentence, like `the process of rank 3`.
fn of_ranks(ranks: &[Rank]) -> String {
    match ranks {
        [rank] => format!("the process of rank {rank}"),
        many => format!("the processes of {}", format_ranks(many)),
    }
}

/// The end of a sentence: the operation that most ranks were in when they were terminated, and the ranks that were in
/// other operations. Empty if no rank was in an operation.
fn inside(ctx: &Context<'_>) -> String {
    let mut by_op: BTreeMap<String, BTreeSet<Rank>> = BTreeMap::new();
    for (index, record) in ctx.aligned.records.iter().enumerate() {
        let mut ops = record.ops.iter().rev();
        if let Some(op) = ops.find(|op| !op.retired && op.state < EntryState::Completed) {
            let text = ctx.describe_op(index, op);
            by_op.entry(text).or_default().insert(record.rank);
        }
    }
    let most = by_op
        .iter()
        .max_by_key(|(op, ranks)| (ranks.len(), Reverse(*op)));
    let Some((op, ranks)) = most else {
        return String::new();
    };
    let listed: Vec<Rank> = ranks.iter().copied().collect();
    let was = if listed.len() == 1 { "was" } else { "were" };
    let mut text = format!("; {} {was} inside {op}", format_ranks(&listed));
    let others: BTreeSet<Rank> = by_op.values().flatten().copied().collect();
    let others: Vec<Rank> = others.difference(ranks).copied().collect();
    if !others.is_empty() {
        let other_op = match by_op.len() {
            2 => "another",
            _ => "others",
        };
        text.push_str(&format!(", {} inside {other_op}", format_ranks(&others)));
    }
    text
}
