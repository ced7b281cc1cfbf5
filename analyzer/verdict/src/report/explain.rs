//! What each code means, where it usually comes from, and what to do: `rcomm-fr explain`.
//!
//! The prose is in [`prose`], one entry a code; this module only looks it up. Sentences about one
//! particular job are the checks' own.

mod prose;

use crate::report::Code;

/// The prose of one code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Of which code.
    pub code: Code,
    /// What it says, and how the analysis knows: one paragraph.
    pub meaning: &'static str,
    /// Where it usually comes from, most frequent first.
    pub causes: &'static [&'static str],
    /// What to do, in this order.
    pub actions: &'static [&'static str],
}

/// The prose of `code`.
pub fn explain(code: Code) -> Explanation {
    prose::of(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_prose_worth_reading() {
        for &code in Code::ALL {
            let prose = explain(code);
            assert_eq!(prose.code, code);
            let words = prose.meaning.split_whitespace().count();
            assert!(words >= 20, "{code}: the meaning has only {words} words");
            assert!(prose.causes.len() >= 2, "{code}: too few causes");
            assert!(!prose.actions.is_empty(), "{code}: nothing to do");
        }
    }

    #[test]
    fn no_two_codes_share_their_prose() {
        for (at, &code) in Code::ALL.iter().enumerate() {
            for &other in &Code::ALL[at + 1..] {
                assert_ne!(explain(code).meaning, explain(other).meaning);
            }
        }
    }
}
