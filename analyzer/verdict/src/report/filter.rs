//! The filter language of the live views: `rank:0-63 group:dp op:all_reduce age>5s !host:n07`.
//!
//! Terms are separated by spaces and all must hold; `!` negates a term; commas separate alternatives. A word without a
//! key matches a part of the row's group, operation, state, code or further text. A term about a property that a row
//! does not have (an operation, in a list of hosts) does not exclude the row, so one filter serves all views.

use crate::report::GroupRef;
use rcomm_recorder::model::Rank;

/// The keys and their values, for help and completion.
pub const KEYS: &[(&str, &str)] = &[
    ("rank:", "ranks: 3, 0-63, 1,5,8-11"),
    ("group:", "part of a group's name or description"),
    ("op:", "part of an operation's name"),
    (
        "state:",
        "root, late, wait, running, queued, mismatch, half_open, ok, ...",
    ),
    ("host:", "part of a host name"),
    ("code:", "a finding's code: E101"),
    ("age>", "at least this old: 500ms, 5s, 2m, 1h (also <)"),
    ("lag>", "at least this late: 1ms (also <)"),
    (
        "seq>",
        "at least this number: seq>100 (also seq<90, seq:41)",
    ),
    ("bytes>", "at least this large: 64K, 1M, 2G (also <)"),
];

/// The properties of a row; `None` if the row has no such property.
#[derive(Clone, Copy, Default)]
pub struct Subject<'a> {
    /// The global ranks of the row; empty if the row is about no particular ranks.
    pub ranks: &'a [Rank],
    /// The group of the row.
    pub group: Option<&'a GroupRef>,
    /// The operation of the row.
    pub op: Option<&'a str>,
    /// The state of the row.
    pub state: Option<&'a str>,
    /// Maps a rank to its host.
    pub host_of: Option<&'a dyn Fn(Rank) -> &'a str>,
    /// The code of a finding.
    pub code: Option<&'a str>,
    /// Age, ms; NaN if unknown.
    pub age_ms: Option<f64>,
    /// Arrival lag, ms; NaN if unknown.
    pub lag_ms: Option<f64>,
    /// Sequence number.
    pub seq: Option<u64>,
    /// Bytes.
    pub bytes: Option<u64>,
    /// Further text that a bare word may match.
    pub text: &'a str,
}

/// Why a filter could not be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason} in `{term}` (column {column})")]
pub struct FilterError {
    /// The term as written, without quotes.
    pub term: String,
    /// The column where the term begins, in characters from 1.
    pub column: usize,
    /// What is wrong with the term and what was expected.
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    AtLeast,
    AtMost,
    Equal,
}

impl Order {
    fn holds(self, value: f64, bound: f64) -> bool {
        match self {
            Self::AtLeast => value >= bound,
            Self::AtMost => value <= bound,
            Self::Equal => value == bound,
        }
    }
}

/// What a term asks of a row. Words are in lower case; ages and lags are in ms.
#[derive(Clone, Debug, PartialEq)]
enum Test {
    Ranks(Vec<(Rank, Rank)>),
    Group(Vec<String>),
    Op(Vec<String>),
    State(Vec<String>),
    Host(Vec<String>),
    Code(Vec<String>),
    Age(Order, f64),
    Lag(Order, f64),
    Seq(Order, f64),
    Bytes(Order, f64),
    Word(String),
}

#[derive(Clone, Debug, PartialEq)]
struct Term {
    /// Whether the test must hold; false if the term is negated.
    wanted: bool,
    test: Test,
}

/// A parsed filter. The default matches every row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filter {
    text: String,
    terms: Vec<Term>,
}

impl Filter {
    /// Parses a filter.
    ///
    /// # Errors
    ///
    /// If a term cannot be read: the first such term, its column, and what was expected.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        let mut terms = Vec::new();
        for (column, term) in split_terms(text) {
            terms.push(parse_term(&term).map_err(|reason| FilterError {
                term,
                column,
                reason,
            })?);
        }
        Ok(Self {
            text: trim_outer_blanks(text).to_owned(),
            terms,
        })
    }

    /// The filter as it was written, without the blanks around it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the filter has no terms, and so matches every row.
    pub fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// Whether the filter matches this row.
    pub fn matches(&self, subject: &Subject<'_>) -> bool {
        self.terms
            .iter()
            .all(|term| match term.test.holds(subject) {
                Some(holds) => holds == term.wanted,
                None => true,
            })
    }
}

impl Test {
    /// Whether the row passes the test; `None` if the row lacks the property.
    fn holds(&self, subject: &Subject<'_>) -> Option<bool> {
        match self {
            Self::Ranks(spans) => (!subject.ranks.is_empty()).then(|| {
                let inside = |rank: &Rank| spans.iter().any(|&(a, b)| (a..=b).contains(rank));
                subject.ranks.iter().any(inside)
            }),
            Self::Group(words) => subject
                .group
                .map(|group| any_part(words, &group.name) || any_part(words, &group.desc)),
            Self::Op(words) => subject.op.map(|op| any_part(words, op)),
            Self::State(words) => subject.state.map(|state| any_part(words, state)),
            Self::Host(words) => {
                subject
                    .host_of
                    .filter(|_| !subject.ranks.is_empty())
                    .map(|host| {
                        subject
                            .ranks
                            .iter()
                            .any(|&rank| any_part(words, host(rank)))
                    })
            }
            Self::Code(words) => subject.code.map(|code| any_part(words, code)),
            Self::Age(order, bound) => subject.age_ms.map(|age| order.holds(age, *bound)),
            Self::Lag(order, bound) => subject.lag_ms.map(|lag| order.holds(lag, *bound)),
            Self::Seq(order, bound) => subject.seq.map(|seq| order.holds(seq as f64, *bound)),
            Self::Bytes(order, bound) => subject.bytes.map(|n| order.holds(n as f64, *bound)),
            Self::Word(word) => {
                let group = subject
                    .group
                    .is_some_and(|group| has(&group.name, word) || has(&group.desc, word));
                let facts = [subject.op, subject.state, subject.code, Some(subject.text)];
                Some(group || facts.into_iter().flatten().any(|text| has(text, word)))
            }
        }
    }
}

/// Whether the text contains the word in any case; the word itself is in lower case.
fn has(text: &str, word: &str) -> bool {
    text.to_ascii_lowercase().contains(word)
}

/// Whether the text contains one of the words in any case; the words themselves are in lower case.
fn any_part(words: &[String], text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    words.iter().any(|word| text.contains(word.as_str()))
}

/// The text without leading and trailing blanks. Blanks after an open quote belong to the term and stay.
fn trim_outer_blanks(text: &str) -> &str {
    let text = text.trim_start();
    let is_open = text.matches('"').count() % 2 == 1;
    if is_open { text } else { text.trim_end() }
}

/// The terms with their columns, from 1. Double quotes keep text with spaces in one term.
fn split_terms(text: &str) -> Vec<(usize, String)> {
    let mut terms = Vec::new();
    let (mut term, mut start, mut quoted) = (String::new(), 1, false);
    for (index, c) in text.chars().enumerate() {
        if c == '"' {
            quoted = !quoted;
        } else if c.is_whitespace() && !quoted {
            if !term.is_empty() {
                terms.push((start, std::mem::take(&mut term)));
            }
        } else {
            if term.is_empty() {
                start = index + 1;
            }
            term.push(c);
        }
    }
    if !term.is_empty() {
        terms.push((start, term));
    }
    terms
}

fn parse_term(term: &str) -> Result<Term, String> {
    let (wanted, body) = match term.strip_prefix('!') {
        Some(body) => (false, body),
        None => (true, term),
    };
    if body.is_empty() {
        return Err("a term is missing after `!`".into());
    }
    let Some(index) = body.find([':', '>', '<']) else {
        let test = Test::Word(body.to_ascii_lowercase());
        return Ok(Term { wanted, test });
    };
    let (key, rest) = body.split_at(index);
    let (sign, value) = rest.split_at(1);
    if value.is_empty() {
        return Err(format!("a value is missing after `{key}{sign}`"));
    }
    let order = match sign {
        ">" => Order::AtLeast,
        "<" => Order::AtMost,
        _ => Order::Equal,
    };
    let words = || -> Result<Vec<String>, String> {
        if order != Order::Equal {
            return Err(format!("`{key}` takes `:`, not `{sign}`"));
        }
        Ok(value
            .split(',')
            .filter(|word| !word.is_empty())
            .map(str::to_ascii_lowercase)
            .collect())
    };
    let test = match key {
        "rank" | "ranks" => Test::Ranks(
            words()?
                .iter()
                .map(|span| parse_span(span))
                .collect::<Result<_, _>>()?,
        ),
        "group" => Test::Group(words()?),
        "op" => Test::Op(words()?),
        "state" => Test::State(words()?),
        "host" => Test::Host(words()?),
        "code" => Test::Code(words()?),
        "age" => Test::Age(order, parse_duration_ms(value)?),
        "lag" => Test::Lag(order, parse_duration_ms(value)?),
        "seq" => Test::Seq(order, parse_number(value)?),
        "bytes" => Test::Bytes(order, parse_bytes(value)?),
        _ => {
            let known: Vec<_> = KEYS
                .iter()
                .map(|(key, _)| key.trim_end_matches([':', '>']))
                .collect();
            return Err(format!(
                "unknown key `{key}`: the keys are {}",
                known.join(", ")
            ));
        }
    };
    Ok(Term { wanted, test })
}

/// Parses one rank, or the first and the last of a span.
fn parse_span(span: &str) -> Result<(Rank, Rank), String> {
    let rank = |text: &str| {
        text.parse::<Rank>()
            .map_err(|_| format!("`{text}` is not a rank: write 3 or 0-63"))
    };
    match span.split_once('-') {
        Some((a, b)) => {
            let (a, b) = (rank(a)?, rank(b)?);
            if a > b {
                return Err(format!("the span {a}-{b} runs backwards"));
            }
            Ok((a, b))
        }
        None => rank(span).map(|rank| (rank, rank)),
    }
}

fn parse_number(text: &str) -> Result<f64, String> {
    text.parse::<u64>()
        .map(|n| n as f64)
        .map_err(|_| format!("`{text}` is not a number"))
}

/// Parses a duration (`250us`, `500ms`, `5s`, `2m`, `1h`; a bare number is seconds) and returns it in ms.
///
/// # Errors
///
/// If the unit or the number is wrong; the text states what was expected.
pub fn parse_duration_ms(text: &str) -> Result<f64, String> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit {
        "us" => 0.001,
        "ms" => 1.0,
        "" | "s" => 1e3,
        "m" | "min" => 60e3,
        "h" => 3600e3,
        _ => {
            return Err(format!(
                "`{unit}` is not a unit of time: use us, ms, s, m or h"
            ));
        }
    };
    number
        .parse::<f64>()
        .map(|n| n * factor)
        .map_err(|_| format!("`{text}` is not a duration: write 500ms, 5s, 2m or 1h"))
}

/// Parses a number of bytes; a unit is a power of 1024.
fn parse_bytes(text: &str) -> Result<f64, String> {
    let lower = text.to_ascii_lowercase();
    let lower = lower.trim_end_matches("ib").trim_end_matches('b');
    let (number, factor) = match lower.char_indices().last() {
        Some((index, 'k')) => (&lower[..index], 1024.0),
        Some((index, 'm')) => (&lower[..index], 1024.0 * 1024.0),
        Some((index, 'g')) => (&lower[..index], 1024.0 * 1024.0 * 1024.0),
        _ => (lower, 1.0),
    };
    number
        .parse::<f64>()
        .map(|n| n * factor)
        .map_err(|_| format!("`{text}` is not a size: write 4096, 64K, 1M or 2G"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dp() -> GroupRef {
        GroupRef {
            name: "dp_5".into(),
            desc: "dp".into(),
            ranks: [3, 11].into(),
        }
    }

    fn passes(filter: &str, subject: &Subject<'_>) -> bool {
        Filter::parse(filter)
            .expect("the filter can be read")
            .matches(subject)
    }

    #[test]
    fn every_term_must_hold() {
        let group = dp();
        let subject = Subject {
            ranks: &group.ranks,
            group: Some(&group),
            op: Some("all_reduce"),
            state: Some("waiting"),
            age_ms: Some(6000.0),
            seq: Some(41),
            ..Subject::default()
        };
        assert!(passes("rank:0-3 group:dp op:all_reduce age>5s", &subject));
        assert!(passes("rank:4,11 seq:41 state:wait", &subject));
        assert!(!passes("rank:4-10", &subject));
        assert!(!passes("age>7s", &subject));
        assert!(!passes("age<5s", &subject));
        assert!(!passes("!group:dp", &subject));
        assert!(passes("!group:tp reduce", &subject));
        assert!(!passes("nothing-like-it", &subject));
    }

    #[test]
    fn a_term_about_a_property_that_a_row_lacks_does_not_exclude_it() {
        let host = |rank: Rank| if rank == 7 { "n007" } else { "n000" };
        let subject = Subject {
            ranks: &[7],
            host_of: Some(&host),
            ..Subject::default()
        };
        assert!(passes("op:all_reduce age>5s code:E101", &subject));
        assert!(passes("host:n007", &subject));
        assert!(!passes("!host:n007", &subject));
    }

    #[test]
    fn an_unknown_age_is_neither_above_nor_below() {
        let subject = Subject {
            age_ms: Some(f64::NAN),
            ..Subject::default()
        };
        assert!(!passes("age>0s", &subject));
        assert!(!passes("age<9h", &subject));
    }

    #[test]
    fn an_error_names_the_term_and_its_column() {
        for (text, column, part) in [
            ("rank:3 hots:n07", 8, "unknown key `hots`"),
            ("rank:x", 1, "not a rank"),
            ("rank:9-3", 1, "backwards"),
            ("age>5parsecs", 1, "unit of time"),
            ("op>3", 1, "takes `:`"),
            ("  !", 3, "missing after `!`"),
            ("bytes>huge", 1, "not a size"),
            ("group:", 1, "value is missing"),
        ] {
            let error = Filter::parse(text).expect_err(text);
            assert_eq!(error.column, column, "{text}");
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn quotes_keep_spaces_together() {
        let filter = Filter::parse("\"two words\"").expect("the filter can be read");
        let subject = Subject {
            text: "these two words",
            ..Subject::default()
        };
        assert!(filter.matches(&subject));
    }

    #[test]
    fn blanks_after_an_open_quote_belong_to_the_term() {
        let filter = Filter::parse(" two \"words ").expect("the filter can be read");
        assert_eq!(filter.text(), "two \"words ");
        assert_eq!(
            Filter::parse(" two ")
                .expect("the filter can be read")
                .text(),
            "two"
        );
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,80}") {
            let _ = Filter::parse(&text);
        }

        #[test]
        fn a_negated_rank_term_is_the_complement(a in 0u32..50, len in 0u32..50, rank in 0u32..120) {
            let b = a + len;
            let subject = Subject { ranks: &[rank], ..Subject::default() };
            let inside = passes(&format!("rank:{a}-{b}"), &subject);
            prop_assert_eq!(inside, (a..=b).contains(&rank));
            prop_assert_eq!(passes(&format!("!rank:{a}-{b}"), &subject), !inside);
        }
    }
}
