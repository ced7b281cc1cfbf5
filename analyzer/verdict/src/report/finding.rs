//! Findings: what is wrong, the culprits, and the evidence.

use std::fmt;

use crate::report::format::{duration_ms, format_ranks, format_time, time_of_day};
use crate::report::refs::{FrameRef, GroupRef, SeqKind};
use rcomm_recorder::model::{EntryState, Rank};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

macro_rules! codes {
    ($( $code:ident $name:ident $severity:ident $text:literal; )+) => {
        /// A stable code of a finding. It is never reused for another meaning.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Code {
            $(
                #[doc = concat!("`", stringify!($name), "`: ", $text)]
                $code,
            )+
        }

        impl Code {
            /// Every code, in order.
            pub const ALL: &'static [Self] = &[$(Self::$code),+];

            /// The name of the code, like `not_joined`.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$code => stringify!($name), )+ }
            }

            /// The code as text, like `E101`.
            pub const fn id(self) -> &'static str {
                match self { $( Self::$code => stringify!($code), )+ }
            }

            /// The severity of the findings with this code.
            pub const fn severity(self) -> Severity {
                match self { $( Self::$code => Severity::$severity, )+ }
            }

            /// When the code is reported: one line.
            pub const fn meaning(self) -> &'static str {
                match self { $( Self::$code => $text, )+ }
            }

            /// Parses an id or a name, in any case; `None` if there is no such code.
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|code| {
                    code.id().eq_ignore_ascii_case(text) || code.name().eq_ignore_ascii_case(text)
                })
            }
        }
    };
}

codes! {
    E101 not_joined Error "a rank left a record but did not join the operation that its peers wait in";
    E102 missing_dump Error "an expected rank left no readable record, and no readable rank explains the wait";
    E103 skipped_collective Error "a rank left out a collective: its later operations match the others' once shifted";
    E104 extra_collective Error "a rank issued a collective that no other did: its later ones match once shifted, or the others left without it";
    E105 group_mismatch Error "ranks state different members for one group, or made their groups in another order";
    E110 op_mismatch Error "same group and sequence number, different operations";
    E111 dtype_mismatch Error "same operation, different element types";
    E112 size_mismatch Error "same operation, sizes that the operation does not allow to differ";
    E113 order_mismatch Error "the same operations in another order on some ranks of one group";
    E114 argument_mismatch Error "root, reduce operation or split sizes disagree";
    E120 p2p_unmatched Error "a send or receive that has met no other half on its peer";
    E121 p2p_size_mismatch Error "both halves of a message are posted, and their sizes or element types differ";
    E130 cross_group_deadlock Error "ranks wait on each other across groups: a wait cycle";
    E135 all_arrived_stuck Error "every member has issued the operation and none finished it: fabric, device or library";
    E140 watchdog_stalled Error "the watchdog inside the process stopped making progress";
    E150 rank_failed Error "the rank recorded an error, was killed, or its process is gone";
    E151 rank_frozen Error "a rank that others wait for is stopped (signal, debugger) or gets no processor";
    E152 unreachable Error "a rank or host is cut off from another: the network between them gives no sign of life, or gave up";
    E153 store_lost Error "the store does not answer: its host is gone, frozen or cut off";
    W150 silent_rank Warning "a rank's record or endpoint stopped answering";
    W160 ring_too_small Warning "the ring holds less than a step, has overwritten what is needed, or lacks records";
    W220 straggler Warning "a rank is repeatedly the last to arrive";
    W230 uneven_bytes Warning "ranks of one group move very different amounts";
    W240 tiny_collectives Warning "many operations too small to be worth their latency";
    W250 timeout_too_close Warning "the slowest successful operations come near the time-out";
    W260 clock_uncertain Warning "a finding rests on two times that are closer together than the error of the clocks";
    W270 call_site_order Warning "ranks issue two operations of a group from the same two places, some in the other order";
    W280 group_order Warning "some ranks use two groups in the opposite order, and the job still runs";
    W290 unbatched_sends Warning "two ranks send to each other before they receive: only buffers prevent a deadlock";
    N300 stale_dump Note "a file from another run, another shape or an older time was left aside";
    N301 unreadable_dump Note "a file cut short or damaged; what could be salvaged was used";
    N302 history_lost Note "the ring has overwritten, or the log does not hold, what would decide the verdict";
    N303 mixed_versions Note "files of several format versions were read together";
    N304 live_or_hang Note "the files do not show whether the job still ran or hung when they were taken";
    N305 nothing_pending Note "nothing recorded is pending or wrong: if the job hung, it hung in what is not recorded";
    N306 host_jitter Note "ranks take turns at being late: the cause is the hosts or the network, not a rank";
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.id())
    }
}

/// How bad a finding is. A healthy job has neither errors nor warnings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The job is stuck or wrong.
    Error,
    /// The job is slower than necessary, or close to a failure.
    Warning,
    /// Something that the reader of the verdict should know, mostly about the input.
    Note,
}

/// A recorded operation that a finding rests on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// Global rank that left the record.
    pub rank: Rank,
    /// The number of the record on that rank.
    pub record_id: u64,
    /// The state of that operation.
    pub state: EntryState,
    /// The group of that operation, if it is not the finding's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupRef>,
    /// The sequence number of that operation, in the counter of its kind.
    pub seq: u64,
    /// The operation with the relevant arguments.
    pub op: String,
}

/// The time since which a state has lasted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Since {
    /// When the state began, wall clock, ns since the epoch.
    pub at_ns: i64,
    /// How long the state had lasted at `until`, ms; `None` if the records do not note when they were taken.
    pub age_ms: Option<f64>,
    /// The end of the time that `age_ms` measures.
    pub until: Until,
}

/// Prints like `13:00:01 UTC, 20 s before the records were taken`.
impl fmt::Display for Since {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&time_of_day(self.at_ns))?;
        let Some(age) = self.age_ms.map(duration_ms) else {
            return out.write_str("; the records do not note when they were taken");
        };
        match self.until {
            Until::Now => write!(out, ", {age} ago"),
            Until::Taken => write!(out, ", {age} before the records were taken"),
            Until::Written => {
                write!(out, ", {age} before the files were written, by their times")
            }
            Until::Ended => write!(out, ", {age} before the job ended"),
        }
    }
}

/// The end of the time that an age measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Until {
    /// The time of judgment.
    Now,
    /// When the records were taken, according to them.
    Taken,
    /// When the files were written, according to the file system: the records state no time.
    Written,
    /// The end of the job.
    Ended,
}

/// How much less time the job would take without what a finding is about. The prices of all findings of a report
/// together are at most the job's time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Price {
    /// Milliseconds.
    pub ms: f64,
    /// The share of the job's time, 0..1.
    pub share: f64,
}

/// One statement of the analysis about the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Number within the report, from 1.
    pub id: u32,
    /// Stable code.
    pub code: Code,
    /// The code's name.
    pub name: String,
    /// The code's severity.
    pub severity: Severity,
    /// The probability, 0..1, that `culprit_ranks` is right.
    pub confidence: f64,
    /// Global ranks of the culprits, ascending; empty if no rank can be blamed.
    pub culprit_ranks: Vec<Rank>,
    /// Other possible sets of culprits, if the records are ambiguous.
    pub alternatives: Vec<Vec<Rank>>,
    /// Ranks that wait because of the fault, ascending. The list may be cut: then `victim_count` is larger.
    pub victim_ranks: Vec<Rank>,
    /// The number of ranks that wait because of the fault.
    pub victim_count: usize,
    /// The group that the finding is about.
    pub group: Option<GroupRef>,
    /// The sequence number that the finding is about.
    pub seq: Option<u64>,
    /// The counter of `seq`.
    pub seq_kind: Option<SeqKind>,
    /// The operation that most members issued there.
    pub op: Option<String>,
    /// The recorder's own name of that operation, as in logs, if it differs from `op`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded_op: Option<String>,
    /// What the fault costs; `None` if the records do not show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
    /// The number of the finding that this one is a consequence of; `None` if it is no consequence.
    pub caused_by: Option<u32>,
    /// Ranks of a wait cycle, in order: each waits for the next, the last for the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cycle: Vec<Rank>,
    /// The finding in one sentence, with the facts.
    pub sentence: String,
    /// The time since which ranks wait because of the fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Since>,
    /// The age, ms, that the sentence of a running job contains. It grows while nothing else changes
    /// ([`Finding::sentence_after`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<f64>,
    /// A few of the recorded operations that prove the finding.
    pub evidence: Vec<Evidence>,
    /// Explanations that were ruled out, with the reason.
    pub ruled_out: Vec<String>,
    /// What keeps the finding from being certain.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<String>,
    /// Where the culprits were in the source.
    pub frames: Vec<FrameRef>,
    /// Where the programs differ: the first differing call of each side with its place in the source, one line each;
    /// then, if the records show more, the next steps of two ranks as a unified diff.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diff: Vec<String>,
    /// The next step for the reader.
    pub next: String,
    /// Lines of logs that agree with the finding or contradict it, contradictions first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<LogLine>,
}

/// One line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// The path of the log.
    pub path: String,
    /// Number of the line, from 1.
    pub line: u64,
    /// The global rank that logged the line, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<Rank>,
    /// A short text of what the line states.
    pub text: String,
    /// Whether the line contradicts the finding: one of the two is wrong.
    #[serde(default, skip_serializing_if = "is_false")]
    pub contradicts: bool,
}

fn is_false(value: &bool) -> bool {
    !*value
}

impl Finding {
    /// The words in [`next`](Self::next) that ask for the stack of the one rank that `next` names.
    pub const TAKE_STACK: &str = "take its stack";
    /// How [`next`](Self::next) begins where it asks for a stack; the rank follows.
    pub(crate) const LOOK_AT_RANK: &str = "look at what rank ";

    /// The rank whose stack [`next`](Self::next) asks for; `None` if it asks for none.
    pub fn rank_of_stack(&self) -> Option<Rank> {
        let rest = self.next.strip_prefix(Self::LOOK_AT_RANK)?;
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        let rank = rest[..end].parse().ok()?;
        self.next.contains(Self::TAKE_STACK).then_some(rank)
    }

    /// A finding with only these facts, confidence 1 and number 0; a report numbers its findings.
    pub fn new(code: Code, culprit_ranks: Vec<Rank>, sentence: String) -> Self {
        Self {
            id: 0,
            code,
            name: code.name().to_owned(),
            severity: code.severity(),
            confidence: 1.0,
            culprit_ranks,
            alternatives: Vec::new(),
            victim_ranks: Vec::new(),
            victim_count: 0,
            group: None,
            seq: None,
            seq_kind: None,
            op: None,
            recorded_op: None,
            price: None,
            caused_by: None,
            cycle: Vec::new(),
            sentence,
            since: None,
            age_ms: None,
            evidence: Vec::new(),
            ruled_out: Vec::new(),
            doubts: Vec::new(),
            frames: Vec::new(),
            diff: Vec::new(),
            next: String::new(),
            log: Vec::new(),
        }
    }

    /// E101: these ranks have not issued the operation that others wait in.
    pub fn not_joined(culprit_ranks: Vec<Rank>, sentence: String) -> Self {
        Self::new(Code::E101, culprit_ranks, sentence)
    }

    /// E150: these ranks failed by themselves.
    pub fn rank_failed(culprit_ranks: Vec<Rank>, sentence: String) -> Self {
        Self::new(Code::E150, culprit_ranks, sentence)
    }

    /// W150: these ranks do not answer.
    pub fn silent_rank(culprit_ranks: Vec<Rank>, sentence: String) -> Self {
        Self::new(Code::W150, culprit_ranks, sentence)
    }

    /// E150: the processes of these ranks are gone. `detail` is the end of the sentence.
    pub fn process_gone(culprit_ranks: Vec<Rank>, detail: &str) -> Self {
        let subject = match culprit_ranks.as_slice() {
            [rank] => format!("the process of rank {rank} is gone"),
            many => format!("the processes of {} are gone", format_ranks(many)),
        };
        let first = culprit_ranks.first().map_or(&[][..], std::slice::from_ref);
        Self {
            next: format!(
                "look for the end of {}: its log, its exit code, the kernel's log of its host",
                format_ranks(first)
            ),
            ..Self::rank_failed(culprit_ranks, format!("{subject}{detail}"))
        }
    }

    /// The sentence as it reads `later_ms` later if nothing but the time has changed: its age is replaced, if it has
    /// one.
    pub fn sentence_after(&self, later_ms: f64) -> Cow<'_, str> {
        let Some(age_ms) = self.age_ms else {
            return Cow::Borrowed(&self.sentence);
        };
        let (age_text, later_text) = (format_time(age_ms), format_time(age_ms + later_ms));
        let is_whole_word = |&(start, _): &(usize, &str)| {
            let before = self.sentence[..start].chars().next_back();
            let after = self.sentence[start + age_text.len()..].chars().next();
            !before.is_some_and(|c| c.is_ascii_alphanumeric() || c == '.')
                && !after.is_some_and(char::is_alphanumeric)
        };
        match self.sentence.match_indices(&age_text).find(is_whole_word) {
            Some((start, _)) => {
                let after = &self.sentence[start + age_text.len()..];
                Cow::Owned(format!("{}{later_text}{after}", &self.sentence[..start]))
            }
            None => Cow::Borrowed(&self.sentence),
        }
    }
}
