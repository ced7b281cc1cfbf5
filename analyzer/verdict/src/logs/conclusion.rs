//! The result of a rule for logs.

use crate::report::{Code, LogLine, Verdict};
use rcomm_recorder::model::Rank;

/// What a rule concludes; [`join`](fn@super::join) makes a finding from it.
#[derive(Clone, Debug)]
pub(super) struct Conclusion {
    pub(super) code: Code,
    pub(super) verdict: Verdict,
    pub(super) confidence: f64,
    pub(super) culprits: Vec<Rank>,
    pub(super) alternatives: Vec<Vec<Rank>>,
    pub(super) victims: Vec<Rank>,
    /// The name of the group as logged.
    pub(super) group: Option<String>,
    pub(super) seq: Option<u64>,
    pub(super) op: Option<String>,
    pub(super) sentence: String,
    pub(super) ruled_out: Vec<String>,
    pub(super) next: String,
    pub(super) lines: Vec<LogLine>,
}

impl Conclusion {
    pub(super) fn new(code: Code, verdict: Verdict, confidence: f64, sentence: String) -> Self {
        Self {
            code,
            verdict,
            confidence,
            culprits: Vec::new(),
            alternatives: Vec::new(),
            victims: Vec::new(),
            group: None,
            seq: None,
            op: None,
            sentence,
            ruled_out: Vec::new(),
            next: String::new(),
            lines: Vec::new(),
        }
    }

    /// Blames the smaller of two sides. If two sides are equally large, or there are more than two, the sides become
    /// alternatives, the smallest 16 at most, and the confidence is lowered.
    pub(super) fn blame_minority(&mut self, mut sides: Vec<Vec<Rank>>) {
        const MAX_SIDES: usize = 16;
        sides.sort_by_key(|side| (side.len(), side.clone()));
        match sides.as_slice() {
            [few, many] if few.len() < many.len() => self.culprits.clone_from(few),
            _ => {
                sides.truncate(MAX_SIDES);
                self.alternatives = sides;
                self.confidence *= 0.8;
            }
        }
    }
}

/// The next step for the reader if ranks issue different calls.
pub(super) const COMPARE_CALLS: &str = "compare what these ranks do before this call: a branch, a batch, a buffer or \
                                  a part of the model that not all of them have";
