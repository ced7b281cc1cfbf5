//! Makes the report: ranks the findings, lists consequences under their causes, counts victims, decides the verdict,
//! and notes what the records do not show.

use crate::align::record::Record;
use crate::judge::check::warnings::straggler;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::elsewhere::took_part;
use crate::judge::life::ending;
use crate::judge::policy::written_ns;
use crate::judge::silence;
use crate::judge::waits::wait_graph::{Missing, Node};
use crate::judge::young::oldest_when_taken;
use crate::judge::{loss, outdated, price, summary, unmissed};
use crate::report::format::{format_ranks, time_of_day};
use crate::report::{
    Code, EndKind, Finding, Input, Price, Problem, Report, Severity, Since, Until, Verdict,
};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::RingReader;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashSet};

/// Makes the report from the drafts of all checks.
pub(crate) fn report(
    ctx: &Context<'_>,
    mut drafts: Vec<FindingDraft>,
    mut problems: Vec<Problem>,
    input: Input,
) -> Report {
    loss::lower_confidence(ctx, &mut drafts);
    ending::lower_confidence(ctx, &mut drafts);
    ending::leave_order_open(ctx, &mut drafts);
    price::settle(ctx, &mut drafts);
    let mut drafts: Vec<(FindingDraft, Vec<Rank>)> = drafts
        .into_iter()
        .map(|draft| {
            let victims = victims(ctx, &draft);
            (draft, victims)
        })
        .collect();
    drafts.sort_by(compare);
    let shortfall = Shortfall::of(ctx, &problems);
    note_absences(ctx, &drafts, &shortfall, &mut problems);
    let has_errors = drafts
        .iter()
        .any(|(draft, _)| draft.code.severity() == Severity::Error);
    if !has_errors {
        problems.extend(straggler::note_jitter(ctx));
    }
    problems.sort();
    problems.dedup();
    let root = drafts
        .iter()
        .position(|(draft, _)| draft.is_root && draft.code.severity() == Severity::Error)
        .map(|index| index as u32 + 1);
    let findings: Vec<Finding> = drafts
        .into_iter()
        .enumerate()
        .map(|(index, (draft, victims))| finding(ctx, index as u32 + 1, draft, victims, root))
        .collect();
    let verdict = verdict(ctx, &findings, &input, &shortfall);
    let unmissed = unmissed::of(ctx, verdict);
    let silence = match (&unmissed, verdict) {
        (None, Verdict::Healthy | Verdict::Running) => silence::of(ctx),
        _ => None,
    };
    // Beside a warning, silence does not change the verdict: the warning says more.
    let warns = |finding: &Finding| finding.severity != Severity::Note;
    let doubt_decides = unmissed.is_some() || silence.is_some() && !findings.iter().any(warns);
    let doubt = unmissed.or_else(|| Some(silence?.sentence(ctx)));
    problems.extend(note_verdict(ctx, verdict, &input, &shortfall, doubt));
    let verdict = match doubt_decides {
        true => Verdict::Inconclusive,
        false => verdict,
    };
    let mut report = Report {
        schema: Report::SCHEMA.to_owned(),
        verdict,
        findings,
        problems,
        end: ending::of(ctx),
        input,
        groups: summary::groups(ctx),
        ranks: summary::ranks(ctx, has_errors),
        in_flight: summary::in_flight(ctx),
        waits: summary::waits(ctx),
        stacks: summary::stacks(ctx),
        now: Vec::new(),
    };
    ending::append(ctx, &mut report);
    report
}

/// The order of findings: by severity, errors first; then roots, then the most certain, then those with the most
/// victims; then by code, culprits and sentence.
fn compare(
    (a, a_victims): &(FindingDraft, Vec<Rank>),
    (b, b_victims): &(FindingDraft, Vec<Rank>),
) -> Ordering {
    let severity = |draft: &FindingDraft| draft.code.severity();
    severity(a)
        .cmp(&severity(b))
        .then(b.is_root.cmp(&a.is_root))
        .then(b.confidence.total_cmp(&a.confidence))
        .then(b_victims.len().cmp(&a_victims.len()))
        .then(a.code.cmp(&b.code))
        .then_with(|| a.culprits.cmp(&b.culprits))
        .then_with(|| a.sentence.cmp(&b.sentence))
}

/// The ranks that wait because of a finding, without its culprits; ascending.
fn victims(ctx: &Context<'_>, draft: &FindingDraft) -> Vec<Rank> {
    let mut targets: Vec<Node> = draft.targets.clone();
    targets.sort_unstable();
    targets.dedup();
    let mut victims: BTreeSet<Rank> = ctx
        .ranks(&ctx.graph.waiting_for(&targets, &ctx.reversed))
        .into_iter()
        .collect();
    // Targets that are ranks, such as the members of a cycle, may wait too; culprits and ranks that do not wait are
    // removed below.
    victims.extend(
        targets
            .iter()
            .filter(|&&node| node < ctx.graph.ranks)
            .map(|&node| ctx.rank(node)),
    );
    for rank in &draft.culprits {
        victims.remove(rank);
    }
    let waits = |rank: &Rank| {
        let node = ctx.graph.node(*rank);
        node.is_some_and(|node| ctx.graph.waits(node))
    };
    victims.into_iter().filter(waits).collect()
}

/// The finding of a draft. `id` is the finding's number, `root` that of the first error that is a root.
fn finding(
    ctx: &Context<'_>,
    id: u32,
    draft: FindingDraft,
    victims: Vec<Rank>,
    root: Option<u32>,
) -> Finding {
    let victim_count = victims.len();
    let since = since(ctx, &draft);
    let sentence = draft.sentence.clone() + &how_many_wait(ctx, &draft, victim_count);
    let mut victim_ranks = victims;
    victim_ranks.truncate(ctx.policy.max_victims);
    let is_consequence = !draft.is_root && root.is_some_and(|root| root != id);
    Finding {
        id,
        confidence: (draft.confidence * 100.0).round() / 100.0,
        alternatives: each_once(draft.alternatives),
        victim_ranks,
        victim_count,
        group: draft.at.as_ref().map(|op_ref| ctx.group_ref(op_ref.group)),
        seq: draft.at.as_ref().map(|op_ref| op_ref.seq),
        seq_kind: draft.at.as_ref().map(|op_ref| op_ref.kind),
        price: draft.price_ms.map(|ms| Price {
            ms,
            share: ms / ctx.lateness.span_ms,
        }),
        recorded_op: draft.at.as_ref().and_then(|op| ctx.recorded_name(op)),
        op: draft.at.map(|op_ref| op_ref.op),
        caused_by: if is_consequence { root } else { None },
        cycle: draft.cycle,
        since,
        // If no process is left, ages no longer grow.
        age_ms: draft
            .age_ms
            .filter(|_| ctx.policy.snapshot && ctx.life.lives_on()),
        evidence: draft.evidence,
        ruled_out: draft.ruled_out,
        doubts: draft.doubts,
        frames: draft.frames,
        diff: draft.diff,
        next: draft.next,
        ..Finding::new(draft.code, draft.culprits, sentence)
    }
}

/// Each of these sets of ranks once, in their order: several doubts may name the same.
fn each_once(mut alternatives: Vec<Vec<Rank>>) -> Vec<Vec<Rank>> {
    let mut known = HashSet::new();
    alternatives.retain(|ranks| known.insert(ranks.clone()));
    alternatives
}

/// The end of a sentence: how many ranks wait because of an error, of which `waiting` are victims. Empty if no more
/// ranks wait than the group of the operation has members or the finding names, if the finding is not a root, or if its
/// code does not call for the number.
fn how_many_wait(ctx: &Context<'_>, draft: &FindingDraft, waiting: usize) -> String {
    use Code::*;
    let states_count = matches!(
        draft.code,
        E103 | E104 | E110 | E111 | E112 | E113 | E114 | E120 | E121 | E130 | E135
    );
    let group = draft.at.as_ref().map(|op| &ctx.aligned.groups[op.group]);
    let members = group.map_or(0, |group| group.ranks.len());
    let named = draft.culprits.len().max(draft.cycle.len());
    // Culprits wait as well if they are in an operation, for example as members of a cycle.
    let waits = |rank: &&Rank| {
        let node = ctx.graph.node(**rank);
        node.is_some_and(|node| ctx.graph.waits(node))
    };
    let waiting = waiting + draft.culprits.iter().filter(waits).count();
    if !states_count || !draft.is_root || waiting <= members.max(named) {
        return String::new();
    }
    let waiting_nodes: Vec<Node> = (0..ctx.graph.ranks)
        .filter(|&node| ctx.graph.waits(node))
        .collect();
    let verb = ctx.wait_or_waited(&waiting_nodes);
    format!("; {waiting} of {} ranks {verb} in all", ctx.graph.ranks)
}

/// Since when ranks wait because of a finding. `None` if the finding is not an error, or if none of its targets is a
/// place where a rank waits or a rank that is missed at one.
fn since(ctx: &Context<'_>, draft: &FindingDraft) -> Option<Since> {
    if draft.code.severity() != Severity::Error {
        return None;
    }
    let places = draft
        .targets
        .iter()
        .flat_map(|&node| match node.checked_sub(ctx.graph.ranks) {
            Some(place) => vec![place],
            None => ctx
                .missed_at(node)
                .into_iter()
                .map(|(place, _)| place)
                .collect(),
        });
    let at_ns = places.filter_map(|place| ctx.waiting_since(place)).min()?;
    let until = ctx.until();
    let end_ns = match until {
        Until::Written => written_ns(ctx.aligned, ctx.policy),
        Until::Now | Until::Taken | Until::Ended => ctx.as_of_ns(),
    };
    Some(Since {
        at_ns,
        age_ms: end_ns.map(|end_ns| end_ns.saturating_sub(at_ns).max(0) as f64 / 1e6),
        until,
    })
}

/// The records that were not read, or only in part. A job with a shortfall cannot be called healthy, unless
/// [`Shortfall::is_none`] excuses it.
struct Shortfall {
    /// Ranks of which no record was read, without those known to have ended in order; ascending.
    absent: Vec<Rank>,
    /// Ranks whose record was read only in part, ascending.
    torn: Vec<Rank>,
    /// Whether some input could not be read, or only in part, and no other record replaces it.
    unusable: bool,
}

impl Shortfall {
    fn of(ctx: &Context<'_>, problems: &[Problem]) -> Self {
        // A damaged record that a newer one of the rank replaces is not missed.
        let replaced: BTreeSet<&str> = problems
            .iter()
            .filter(|problem| problem.code == Code::N300)
            .flat_map(Problem::paths)
            .collect();
        let damaged: BTreeSet<&str> = problems
            .iter()
            .filter(|problem| problem.code == Code::N301)
            .map(|problem| problem.path.as_str())
            .filter(|path| !replaced.contains(path))
            .collect();
        let records = ctx.aligned.records.iter();
        let torn = records.filter(|record| {
            record.cut || (!record.path.is_empty() && damaged.contains(record.path.as_str()))
        });
        let expected = ctx.aligned.expected.iter().copied();
        Self {
            absent: expected
                .filter(|rank| ctx.aligned.record_of(*rank).is_none())
                // The ranks of a host remove their rings once all have ended in order.
                .filter(|rank| !ctx.life.ended_in_order(*rank))
                .collect(),
            torn: torn.map(|record| record.rank).collect(),
            unusable: !damaged.is_empty(),
        }
    }

    /// Whether the records of all expected ranks were read completely, apart from those that a live view reports as
    /// silent (W150).
    fn is_none(&self, silent: &[Rank]) -> bool {
        let unread = self.absent.iter().any(|rank| !silent.contains(rank));
        !unread && self.torn.is_empty() && !self.unusable
    }
}

/// Adds one N301 on ranks without a record that no finding blames and that are not known to be silent. If no finding is
/// an error, it is also on ranks whose record was read only in part. Then adds what [`note_lost_history`] finds.
fn note_absences(
    ctx: &Context<'_>,
    drafts: &[(FindingDraft, Vec<Rank>)],
    shortfall: &Shortfall,
    problems: &mut Vec<Problem>,
) {
    let accused: BTreeSet<Rank> = drafts
        .iter()
        .flat_map(|(draft, _)| draft.culprits.iter().copied())
        .chain(ctx.policy.silent.iter().copied())
        .collect();
    let absent = shortfall.absent.iter().copied();
    let absent: Vec<Rank> = absent.filter(|rank| !accused.contains(rank)).collect();
    let mut notes: Vec<String> = Vec::new();
    if !absent.is_empty() {
        let waited_for: BTreeSet<Node> = ctx
            .graph
            .missing
            .iter()
            .flatten()
            .filter(|(_, why)| matches!(why, Missing::Unknown(_)))
            .map(|&(node, _)| node)
            .collect();
        let missed = absent.iter().filter_map(|&rank| ctx.graph.node(rank));
        let missed = missed.filter(|node| waited_for.contains(node)).count();
        let more = if missed > 0 && drafts.iter().any(|(draft, _)| draft.is_root) {
            let (whom, them) = match absent.len() {
                1 => ("it".to_owned(), "it"),
                _ => (format!("{missed} of them"), "them"),
            };
            format!("; others wait for {whom}, which the findings explain without {them}")
        } else {
            String::new()
        };
        let left = match ctx.only_aside(&absent) {
            true => "left no record but one that was left aside",
            false => "left no readable record",
        };
        notes.push(format!(
            "{} {left}{more}{}",
            format_ranks(&absent),
            where_absent_are(ctx, &absent)
        ));
    }
    let explained = drafts
        .iter()
        .any(|(draft, _)| draft.code.severity() == Severity::Error);
    if !explained && !shortfall.torn.is_empty() {
        let several = if shortfall.torn.len() == 1 { "" } else { "s" };
        notes.push(format!(
            "the record{several} of {} could be read only in part: what the rest held is not known",
            format_ranks(&shortfall.torn)
        ));
    }
    if !notes.is_empty() {
        problems.push(Problem::unreadable_dump("", notes.join("; ")));
    }
    note_lost_history(ctx, problems);
}

/// The end of a sentence on ranks without a record that are not known to have ended in order: what is known about one
/// of their processes, or else where their records may be. Empty if there is nothing to say.
fn where_absent_are(ctx: &Context<'_>, absent: &[Rank]) -> String {
    let mut text = String::new();
    let records = &ctx.aligned.records;
    let attempt = records.iter().map(|record| record.identity.attempt).max();
    let launches = ctx.policy.launches.iter();
    let launches =
        launches.filter(|launch| attempt.is_none_or(|attempt| attempt == launch.attempt));
    let mut started =
        launches.flat_map(|launch| launch.ranks.iter().map(move |process| (launch, process)));
    let running = started.find(|(launch, process)| {
        absent.contains(&process.rank)
            && process.end.is_none()
            && process.pid > 0
            && launch.ended_ns == 0
    });
    let is_ring = |record: &Record| {
        let reason = record.identity.reason.as_str();
        [
            RingReader::OWNER_LIVES,
            RingReader::OWNER_IS_STOPPED,
            RingReader::OWNER_IS_TRACED,
            RingReader::OWNER_IS_DEAD,
        ]
        .contains(&reason)
    };
    if let Some(at_ns) = ctx.life.none_left_ns() {
        let last = time_of_day(at_ns);
        text.push_str(&format!(
            "; no process of the others is left: the last sign of life is from {last}"
        ));
    }
    let exits = absent.iter();
    let mut exits = exits.filter_map(|&rank| Some((rank, ctx.life.gone(rank)?.exit?)));
    if let Some((rank, exit)) = exits.next() {
        text.push_str(&format!("; rank {rank} {}", ending::format_exit(&exit)));
    } else if let Some((launch, process)) = running {
        text.push_str(&format!(
            "; the launcher started rank {} as process {} on {} and has noted no end of it: look at what it does \
             before it joins the job (py-spy dump --pid {})",
            process.rank, process.pid, launch.host, process.pid
        ));
    } else if took_part(ctx, absent) {
        let (they, their) = match absent.len() {
            1 => ("it", "its ring is"),
            _ => ("they", "their rings are"),
        };
        text.push_str(&format!(
            "; {they} took part in operations before, so {their} on another host, or {they} left none: read the records of \
             all hosts"
        ));
    } else if records.iter().any(is_ring) {
        text.push_str(
            "; the ranks of a host that all end in order remove their rings, and one that never joined has none",
        );
    }
    text
}

/// N304 or N305: the question that a verdict leaves open; `None` if it leaves none. `doubt` is a sentence on a job that
/// is not over and has no error: on a failed rank that none waits for yet, or on silent ranks.
fn note_verdict(
    ctx: &Context<'_>,
    verdict: Verdict,
    input: &Input,
    shortfall: &Shortfall,
    doubt: Option<String>,
) -> Option<Problem> {
    let all_read = shortfall.is_none(&ctx.policy.silent) && input.entries > 0;
    let pending = ctx.graph.pending.iter().any(|pending| !pending.is_empty());
    const ADVICE: &str =
        "Look a second time, or say with --snapshot or --as-of what these records are";
    let (code, sentence) = match verdict {
        Verdict::Inconclusive if all_read && pending && ctx.life.end.is_none() => (
            Code::N304,
            match oldest_when_taken(ctx) {
                Some(sentence) => format!("{sentence}. {ADVICE}"),
                None => format!(
                "operations are pending, and nothing in the records shows whether the job hung or ran on. {ADVICE}"
                ),
            },
        ),
        Verdict::Inconclusive
            if input.entries == 0
                && input.ranks_read > 0
                && shortfall.is_none(&ctx.policy.silent)
                && ctx.life.end.is_none() =>
        {
            (Code::N305, silence::before_the_first(ctx))
        }
        _ if let Some(doubt) = doubt => (Code::N305, doubt),
        Verdict::Healthy if !ctx.policy.snapshot => (
            Code::N305,
            "every operation that was recorded has ended: if the job hung, it hung in code that records nothing; \
             the stacks of its ranks show where"
                .to_owned(),
        ),
        _ => return None,
    };
    Some(Problem::new(code, "", sentence))
}

/// Adds notes on what the records cannot show.
///
/// N302 reports rings that dropped entries which would show whether their ranks had reached a place where others wait;
/// rings that dropped operations that are unfinished by a group's status; rings that may have dropped the operations
/// that their ranks are in; and rings that had no room for network transfers. N300 says that records are outdated, and
/// that an operation which others completed is unfinished in a record.
fn note_lost_history(ctx: &Context<'_>, problems: &mut Vec<Problem>) {
    use crate::align::UnknownReason;
    let lost: BTreeSet<Rank> = ctx
        .graph
        .missing
        .iter()
        .flatten()
        .filter(|&&(_, why)| why == Missing::Unknown(UnknownReason::HistoryLost))
        .map(|&(node, _)| ctx.rank(node))
        .collect();
    let known = lost.clone();
    if !lost.is_empty() {
        let lost: Vec<Rank> = lost.into_iter().collect();
        problems.push(Problem::new(
            Code::N302,
            "",
            format!(
                "the records of {} do not hold the entries that would show whether {} reached the operation others wait in",
                format_ranks(&lost),
                if lost.len() == 1 { "it" } else { "they" }
            ),
        ));
    }
    for unkept in ctx.unkept.iter().filter(|unkept| unkept.absent.is_empty()) {
        let have = if unkept.waiting.len() == 1 {
            "has"
        } else {
            "have"
        };
        problems.push(Problem::new(
            Code::N302,
            "",
            format!(
                "by the status of group {}, {} {have} issued #{} on it and not completed it; the rings have overwritten it",
                ctx.group_name(unkept.group),
                format_ranks(&unkept.waiting),
                unkept.seq
            ),
        ));
    }
    let is_noted = |group: usize| ctx.unkept.iter().any(|unkept| unkept.group == group);
    for (group, ranks) in ctx
        .open_by_status
        .iter()
        .filter(|(group, _)| !is_noted(*group))
    {
        let have = if ranks.len() == 1 { "has" } else { "have" };
        problems.push(Problem::new(
            Code::N302,
            "",
            format!(
                "by the status of group {}, {} {have} issued an operation on it and not completed it, and the rings hold \
                 none that is pending",
                ctx.group_name(*group),
                format_ranks(ranks)
            ),
        ));
    }
    problems.extend(loss::note(ctx, &known));
    problems.extend(loss::note_transfers(ctx));
    problems.extend(outdated::note(ctx));
    problems.extend(outdated::note_still_inside(ctx));
}

/// The verdict: by the first error; else by what could be read, a straggler, how the job ended, and what is unfinished.
/// A doubt of [`report`] may still turn it into `inconclusive`.
fn verdict(
    ctx: &Context<'_>,
    findings: &[Finding],
    input: &Input,
    shortfall: &Shortfall,
) -> Verdict {
    use Code::*;
    let root = findings
        .iter()
        .find(|finding| finding.severity == Severity::Error);
    if let Some(root) = root {
        return match root.code {
            E103 | E104 | E105 | E110 | E111 | E112 | E113 | E114 | E121 => Verdict::Mismatch,
            E150 if ctx.life.end.is_some() => Verdict::Crashed,
            // No process is left that waits, and one signal may have ended them all.
            E150 if !ctx.life.possible().is_empty() => Verdict::Inconclusive,
            // Running operations do not need the store.
            E153 if ctx.policy.snapshot && !ctx.is_anything_overdue() => Verdict::Running,
            _ => Verdict::Stuck,
        };
    }
    // Without any record, a launcher may still have noted how the job ended.
    if input.ranks_read == 0 && ctx.life.end.is_none() {
        return Verdict::Inconclusive;
    }
    if findings.iter().any(|finding| finding.code == W220) {
        return Verdict::Slow;
    }
    if let Some(end) = &ctx.life.end {
        return match end.kind {
            EndKind::Ended => Verdict::Ended,
            EndKind::Cancelled => Verdict::Cancelled,
            EndKind::Crashed => Verdict::Crashed,
            EndKind::Unknown => Verdict::Inconclusive,
        };
    }
    // If records are missing, those that were read do not prove that nothing is wrong. Records without operations
    // prove nothing.
    if !shortfall.is_none(&ctx.policy.silent) || input.entries == 0 {
        return Verdict::Inconclusive;
    }
    let pending = ctx.graph.pending.iter().any(|pending| !pending.is_empty());
    // Whether the records show, or may hide, an unfinished operation that no finding explains.
    let unexplained = !ctx.unkept.is_empty()
        || outdated::early(ctx).next().is_some()
        || !ctx.still_inside.is_empty()
        || !ctx.open_by_status.is_empty()
        || ctx.graph.missing.iter().any(|missing| !missing.is_empty());
    let overdue = ctx.is_anything_overdue();
    match (ctx.policy.snapshot, pending) {
        (true, true) if overdue || ctx.young_files || ctx.young_dumps => Verdict::Inconclusive,
        (true, true) => Verdict::Running,
        (false, true) => Verdict::Inconclusive,
        (_, false) if unexplained => Verdict::Inconclusive,
        (_, false) => Verdict::Healthy,
    }
}
