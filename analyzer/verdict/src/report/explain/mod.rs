//! The meaning, the usual causes and the next steps of each code, for `rcomm-fr explain`.
//!
//! The meaning is one paragraph; causes and actions are fragments without a full stop. Printers wrap them, so no text
//! here has line breaks. Sentences about a particular job come from the checks.

mod calls;
mod notes;
mod waits;
mod warnings;

use crate::report::Code;

/// The explanation of one code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The code.
    pub code: Code,
    /// What the code means and how the analysis detects it: one paragraph.
    pub meaning: &'static str,
    /// The usual causes, the most frequent first.
    pub causes: &'static [&'static str],
    /// The next steps, in this order.
    pub actions: &'static [&'static str],
}

/// The texts of an explanation.
struct Prose {
    meaning: &'static str,
    causes: &'static [&'static str],
    actions: &'static [&'static str],
}

/// The explanation of `code`.
pub fn explain(code: Code) -> Explanation {
    let Prose {
        meaning,
        causes,
        actions,
    } = match code {
        Code::E101 => calls::E101,
        Code::E102 => calls::E102,
        Code::E103 => calls::E103,
        Code::E104 => calls::E104,
        Code::E105 => calls::E105,
        Code::E110 => calls::E110,
        Code::E111 => calls::E111,
        Code::E112 => calls::E112,
        Code::E113 => calls::E113,
        Code::E114 => calls::E114,
        Code::E120 => waits::E120,
        Code::E121 => waits::E121,
        Code::E130 => waits::E130,
        Code::E135 => waits::E135,
        Code::E140 => waits::E140,
        Code::E150 => waits::E150,
        Code::E151 => waits::E151,
        Code::E152 => waits::E152,
        Code::E153 => waits::E153,
        Code::W150 => warnings::W150,
        Code::W160 => warnings::W160,
        Code::W220 => warnings::W220,
        Code::W230 => warnings::W230,
        Code::W240 => warnings::W240,
        Code::W250 => warnings::W250,
        Code::W260 => warnings::W260,
        Code::W270 => warnings::W270,
        Code::W280 => warnings::W280,
        Code::W290 => warnings::W290,
        Code::N300 => notes::N300,
        Code::N301 => notes::N301,
        Code::N302 => notes::N302,
        Code::N303 => notes::N303,
        Code::N304 => notes::N304,
        Code::N305 => notes::N305,
        Code::N306 => notes::N306,
    };
    Explanation {
        code,
        meaning,
        causes,
        actions,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_an_explanation() {
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
    fn no_two_codes_share_an_explanation() {
        for (index, &code) in Code::ALL.iter().enumerate() {
            for &other in &Code::ALL[index + 1..] {
                assert_ne!(explain(code).meaning, explain(other).meaning);
            }
        }
    }
}
