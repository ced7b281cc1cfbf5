//! Drafts of findings.

use crate::align::GroupIx;
use crate::judge::waits::wait_graph::Node;
use crate::report::{Code, Evidence, Finding, FrameRef, SeqKind};
use rcomm_recorder::model::Rank;

/// A finding before it is ranked among the others. A field without a comment is the one of that name in [`Finding`].
#[derive(Clone, Debug)]
pub(crate) struct FindingDraft {
    pub(crate) code: Code,
    pub(crate) confidence: f64,
    /// [`Finding::culprit_ranks`].
    pub(crate) culprits: Vec<Rank>,
    pub(crate) alternatives: Vec<Vec<Rank>>,
    /// Nodes whose waiters are victims of this finding.
    pub(crate) targets: Vec<Node>,
    /// The operation that the finding is about.
    pub(crate) at: Option<OpRef>,
    pub(crate) cycle: Vec<Rank>,
    pub(crate) sentence: String,
    /// How much less time the job would take without the fault, ms ([`price`](crate::judge::price)); `None` if unknown.
    pub(crate) price_ms: Option<f64>,
    /// The age in the sentence, ms, if the sentence contains one.
    pub(crate) age_ms: Option<f64>,
    pub(crate) evidence: Vec<Evidence>,
    pub(crate) ruled_out: Vec<String>,
    /// Reasons why the finding is not certain.
    pub(crate) doubts: Vec<String>,
    pub(crate) frames: Vec<FrameRef>,
    pub(crate) diff: Vec<String>,
    pub(crate) next: String,
    /// Whether the finding explains others' waits; else it is a consequence of the first finding that does.
    pub(crate) is_root: bool,
    /// Set if clocks decided the finding: the two ranks whose times were compared, and the difference of these times,
    /// ns.
    pub(crate) by_clock: Option<([Rank; 2], i64)>,
}

impl FindingDraft {
    /// A draft with only these facts and confidence 0.9. It counts as a root.
    pub(crate) fn new(code: Code, sentence: String) -> Self {
        Self {
            code,
            confidence: 0.9,
            culprits: Vec::new(),
            alternatives: Vec::new(),
            targets: Vec::new(),
            at: None,
            cycle: Vec::new(),
            sentence,
            price_ms: None,
            age_ms: None,
            evidence: Vec::new(),
            ruled_out: Vec::new(),
            doubts: Vec::new(),
            frames: Vec::new(),
            diff: Vec::new(),
            next: String::new(),
            is_root: true,
            by_clock: None,
        }
    }
}

impl From<Finding> for FindingDraft {
    /// A draft with the code, ranks, sentence and next step of a finding, and no evidence.
    fn from(finding: Finding) -> Self {
        Self {
            culprits: finding.culprit_ranks,
            next: finding.next,
            ..Self::new(finding.code, finding.sentence)
        }
    }
}

/// The operation that a finding is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpRef {
    pub(crate) group: GroupIx,
    /// The operation's number as the records show it.
    pub(crate) seq: u64,
    pub(crate) kind: SeqKind,
    /// The operation's name.
    pub(crate) op: String,
}
