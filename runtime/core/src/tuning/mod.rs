//! The table of algorithms for collectives in host memory, as text.
//!
//! A line of the table has an operation, a topology, the largest number of ranks and of bytes to which it applies
//! (or `any`), and an algorithm. The first line that matches is used; a line whose algorithm cannot carry out the
//! operation (see [`Algorithm`]) is skipped. Bytes are counted as `rcomm-bench` counts them: the buffer of an
//! all_reduce, reduce or broadcast, the whole output of an all_gather or gather, the whole input of a
//! reduce_scatter, scatter or all_to_all.
//!
//! ```
//! use rcomm::tuning::Tuning;
//!
//! let tuning: Tuning = "
//!     ## operation topology  ranks  bytes  algorithm
//!     all_reduce   sockets   4      32K    notice
//!     streams      2
//! ".parse()?;
//! assert_eq!(tuning.streams(), 2);
//! // Other lines are as they were.
//! assert!(tuning.to_string().contains("all_reduce      memory    any    any    shares"));
//! # Ok::<(), rcomm::Error>(())
//! ```
//!
//! `rcomm-bench tune` measures a machine and writes such lines; `rcomm-bench tune --print` shows the table in
//! use. All ranks of a job use the table of rank 0.

#![forbid(unsafe_code)]

mod default_table;

use crate::op::error::{Error, ErrorKind, Result};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The largest value of [`Tuning::streams`].
pub const MAX_STREAMS: usize = 16;
/// The most bytes of data, over all ranks, that an operation's *notices* may carry: the messages by which ranks
/// compare what they issue.
pub const MAX_NOTICED: usize = 128 << 10;

macro_rules! named_values {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// All values.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The name in the table.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            fn from_name(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.name() == text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

named_values! {
    /// The movement of data between ranks. Every collective has one of these patterns.
    Pattern {
        /// Each rank gets the reduction of all.
        AllReduce = "all_reduce",
        /// The root gets the reduction of all.
        Reduce = "reduce",
        /// Each rank gets its part of the reduction.
        ReduceScatter = "reduce_scatter",
        /// Each rank gets the root's bytes.
        Broadcast = "broadcast",
        /// Each rank gets the parts of all.
        AllGather = "all_gather",
        /// Each rank sends a part to each rank.
        AllToAll = "all_to_all",
        /// The root gets the parts of all.
        Gather = "gather",
        /// Each rank gets its part of the root's bytes.
        Scatter = "scatter",
        /// No rank leaves before all have arrived.
        Barrier = "barrier",
    }
}

named_values! {
    /// Where the ranks of a group are.
    Topology {
        /// All ranks share memory.
        Memory = "memory",
        /// No two ranks share memory.
        Sockets = "sockets",
        /// The ranks are on several hosts, and at least one host has several ranks, which share memory.
        Hosts = "hosts",
    }
}

named_values! {
    /// How ranks carry out a collective.
    Algorithm {
        /// In memory, one phase: every rank reads all inputs and combines them by itself.
        Whole = "whole",
        /// In memory: every rank combines a share of each chunk, and copies the others' shares.
        Shares = "shares",
        /// In memory: chunks are written to slots, from which their receivers read them.
        Slots = "slots",
        /// In memory: ranks work in each other's buffers. Where one of these buffers is not registered
        /// ([`ProcessGroup::allocate`](crate::ProcessGroup::allocate)), the next line that matches is used.
        Direct = "direct",
        /// The data are sent with the notices that ranks exchange anyway, in a number of messages that grows with the
        /// logarithm of the number of ranks (or hosts). For up to [`MAX_NOTICED`] bytes of all ranks together.
        Notice = "notice",
        /// Two ranks send each other their whole input, and both combine the two.
        Swap = "swap",
        /// Every pair of ranks that has bytes for each other exchanges them.
        Exchange = "exchange",
        /// Data pass from rank to rank; each rank forwards what it receives.
        Chain = "chain",
        /// Each byte is sent once between hosts, and through memory inside them. In all_to_all, gather and scatter, one
        /// message carries all that the ranks of two hosts have for each other. Reductions use it only where all ranks
        /// of a host precede all of the next host.
        Nested = "nested",
    }
}

impl Algorithm {
    /// The algorithms for this pattern and topology, those for fewer bytes first.
    pub fn of(pattern: Pattern, topology: Topology) -> &'static [Self] {
        use Algorithm::*;
        match (topology, pattern) {
            (_, Pattern::Barrier) => &[Notice],
            (Topology::Memory, Pattern::AllReduce) => &[Whole, Shares, Direct],
            (Topology::Memory, Pattern::Reduce) => &[Shares, Direct],
            (Topology::Memory, Pattern::Gather | Pattern::Scatter) => &[Slots],
            (Topology::Memory, _) => &[Slots, Direct],
            (Topology::Sockets, Pattern::AllReduce) => &[Notice, Swap, Exchange],
            (Topology::Sockets, Pattern::AllGather) => &[Notice, Exchange],
            (Topology::Sockets, Pattern::Broadcast) => &[Notice, Chain],
            (Topology::Hosts, Pattern::AllReduce | Pattern::AllGather) => {
                &[Notice, Nested, Exchange]
            }
            (Topology::Hosts, Pattern::Broadcast) => &[Notice, Nested, Chain],
            (Topology::Hosts, _) => &[Nested, Exchange],
            (Topology::Sockets, _) => &[Exchange],
        }
    }

    /// Whether the algorithm works among this many ranks.
    pub fn allows_ranks(self, ranks: usize) -> bool {
        self != Self::Swap || ranks == 2
    }
}

/// A line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The operation.
    pub pattern: Pattern,
    /// Where the group's ranks are.
    pub topology: Topology,
    /// The largest number of ranks to which the line applies; `None` for any number.
    pub ranks: Option<usize>,
    /// The largest number of bytes to which the line applies; `None` for any number.
    pub bytes: Option<usize>,
    /// The algorithm to use.
    pub algorithm: Algorithm,
}

/// The table, and the number of streams between two ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    choices: Vec<Choice>,
    streams: usize,
}

impl Default for Tuning {
    /// The table that was measured on the developers' machine.
    fn default() -> Self {
        Self {
            choices: default_table::CHOICES.to_vec(),
            streams: default_table::STREAMS,
        }
    }
}

impl Tuning {
    /// The table of exactly these lines, in the form in which it is printed.
    pub(crate) fn from_table(lines: &str) -> Result<Self> {
        let mut tuning = Self {
            choices: Vec::new(),
            streams: default_table::STREAMS,
        };
        tuning.prepend(lines)?;
        Ok(tuning)
    }

    /// The lines, in the order in which they are tried.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// How many sockets two ranks have for the collectives of a group, and how many for its messages: 1 to
    /// [`MAX_STREAMS`].
    pub fn streams(&self) -> usize {
        self.streams
    }

    /// Puts `lines` before those of the table; a line `streams` sets the number of streams.
    ///
    /// # Errors
    /// `InvalidArgument` quotes what is invalid and says what is valid. The lines of the table are then as before; the
    /// number of streams may have changed.
    pub fn prepend(&mut self, lines: &str) -> Result<()> {
        let mut choices = Vec::new();
        for line in lines
            .lines()
            .flat_map(|line| without_comment(line).split(';'))
        {
            let fields: Vec<&str> = line.split_whitespace().collect();
            match fields[..] {
                [] => {}
                ["streams", count] => self.set_streams(count)?,
                _ => choices.push(parse_choice(line.trim(), &fields)?),
            }
        }
        choices.append(&mut self.choices);
        self.choices = choices;
        Ok(())
    }

    /// Sets the number of streams from its decimal text.
    ///
    /// # Errors
    /// `InvalidArgument` gives the valid range.
    pub(crate) fn set_streams(&mut self, count: &str) -> Result<()> {
        let parsed = count.trim().parse().ok();
        let parsed = parsed.filter(|count| (1..=MAX_STREAMS).contains(count));
        self.streams = parsed.ok_or_else(|| {
            let message = format!(
                "two ranks cannot have {count:?} streams between them: give 1 to {MAX_STREAMS}"
            );
            Error::new(ErrorKind::InvalidArgument, message)
        })?;
        Ok(())
    }

    /// The lines that apply to a group of this many ranks.
    pub fn plan(&self, topology: Topology, ranks: usize) -> Plan {
        let applies = |choice: &&Choice| {
            choice.topology == topology
                && choice.ranks.is_none_or(|max| ranks <= max)
                && choice.algorithm.allows_ranks(ranks)
        };
        Plan {
            choices: self.choices.iter().filter(applies).copied().collect(),
        }
    }
}

fn without_comment(line: &str) -> &str {
    line.split('#').next().unwrap_or_default()
}

/// Reads a line of the table, which is split into `fields`.
fn parse_choice(line: &str, fields: &[&str]) -> Result<Choice> {
    let refuse = |reason: String| {
        let message = format!("the line {line:?} of the tuning table: {reason}");
        Error::new(ErrorKind::InvalidArgument, message)
    };
    let &[pattern, topology, ranks, bytes, algorithm] = fields else {
        let form = "operation, topology, ranks, bytes, algorithm, or streams and a number";
        return Err(refuse(format!("it must be {form}")));
    };
    let unknown = |kind: &str, text: &str, known: Vec<&str>| {
        refuse(format!(
            "{text:?} is not a known {kind}: give {}",
            known.join(", ")
        ))
    };
    let named_pattern = Pattern::from_name(pattern).ok_or_else(|| {
        let known = Pattern::ALL.iter().map(|value| value.name()).collect();
        unknown("operation", pattern, known)
    })?;
    let named_topology = Topology::from_name(topology).ok_or_else(|| {
        let known = Topology::ALL.iter().map(|value| value.name()).collect();
        unknown("topology", topology, known)
    })?;
    let known = Algorithm::of(named_pattern, named_topology);
    let named_algorithm = Algorithm::from_name(algorithm).filter(|named| known.contains(named));
    let named_algorithm = named_algorithm.ok_or_else(|| {
        let known = known.iter().map(|value| value.name()).collect();
        unknown(
            &format!("algorithm for {pattern} over {topology}"),
            algorithm,
            known,
        )
    })?;
    let parse_max = |unit: &str, text: &str| match (text, parse_size(text)) {
        ("any", _) => Ok(None),
        (_, Some(max)) => Ok(Some(max)),
        _ => Err(refuse(format!(
            "{text:?} is not a number of {unit}: give one (with K, M or G for powers of 1024) or any"
        ))),
    };
    Ok(Choice {
        pattern: named_pattern,
        topology: named_topology,
        ranks: parse_max("ranks", ranks)?,
        bytes: parse_max("bytes", bytes)?,
        algorithm: named_algorithm,
    })
}

/// A number, which may end in `K`, `M` or `G`; `None` if it is none or too large.
fn parse_size(text: &str) -> Option<usize> {
    let (digits, shift) = match text.char_indices().last()? {
        (at, 'K') => (&text[..at], 10),
        (at, 'M') => (&text[..at], 20),
        (at, 'G') => (&text[..at], 30),
        _ => (text, 0),
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

/// The size as [`parse_size`] reads it; `any` for `None`.
fn format_size(size: Option<usize>) -> String {
    let Some(size) = size else {
        return "any".to_owned();
    };
    for (shift, unit) in [(30, "G"), (20, "M"), (10, "K")] {
        if size > 0 && size.trailing_zeros() >= shift {
            return format!("{}{unit}", size >> shift);
        }
    }
    size.to_string()
}

impl FromStr for Tuning {
    type Err = Error;

    /// The default table, with `lines` before its own lines.
    fn from_str(lines: &str) -> Result<Self> {
        let mut tuning = Self::default();
        tuning.prepend(lines)?;
        Ok(tuning)
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, bytes) = (format_size(self.ranks), format_size(self.bytes));
        let Self {
            pattern,
            topology,
            algorithm,
            ..
        } = self;
        write!(
            f,
            "{pattern:<15} {topology:<9} {ranks:<6} {bytes:<6} {algorithm}"
        )
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# operation     topology  ranks  bytes  algorithm")?;
        for choice in &self.choices {
            writeln!(f, "{choice}")?;
        }
        writeln!(f, "streams         {}", self.streams)
    }
}

/// The lines of the table that apply to one group.
#[derive(Clone, Debug)]
pub struct Plan {
    choices: Vec<Choice>,
}

impl Plan {
    /// The algorithm for this many bytes, among those that `allows` admits; [`Algorithm::Exchange`] if no line
    /// matches.
    ///
    /// All ranks must agree on whether data are sent with the notices, so what `allows` says of
    /// [`Algorithm::Notice`] must depend only on values that the notices compare.
    pub fn choose(
        &self,
        pattern: Pattern,
        bytes: usize,
        allows: impl Fn(Algorithm) -> bool,
    ) -> Algorithm {
        let fits = |choice: &&Choice| {
            choice.pattern == pattern
                && choice.bytes.is_none_or(|max| bytes <= max)
                && allows(choice.algorithm)
        };
        let found = self
            .choices
            .iter()
            .find(fits)
            .map(|choice| choice.algorithm);
        // The default table has a line without limits for every pattern.
        found.unwrap_or(Algorithm::Exchange)
    }

    /// The first range of sizes, in bytes, for which this algorithm is the first choice; empty if there is none.
    pub fn span(&self, pattern: Pattern, algorithm: Algorithm) -> Range<usize> {
        let choices = self.choices.iter();
        let mut start = 0;
        for choice in choices.filter(|choice| choice.pattern == pattern) {
            let end = choice.bytes.map_or(usize::MAX, |max| max.saturating_add(1));
            if choice.algorithm == algorithm && end > start {
                return start..end;
            }
            start = start.max(end);
        }
        0..0
    }

    /// The most bytes up to which this algorithm is the first choice for every size; 0 if another algorithm is
    /// the first choice for the smallest sizes.
    pub fn most(&self, pattern: Pattern, algorithm: Algorithm) -> usize {
        let choices = self.choices.iter();
        let mut max = 0;
        for choice in choices.filter(|choice| choice.pattern == pattern) {
            if choice.algorithm != algorithm {
                // Later lines apply only above the bytes of this one.
                match choice.bytes {
                    Some(bytes) if bytes <= max => continue,
                    _ => break,
                }
            }
            max = max.max(choice.bytes.unwrap_or(usize::MAX));
        }
        max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_table_reads_back_as_the_same_table() {
        let tuning: Tuning = "all_reduce hosts 8 3M notice; streams 4".parse().unwrap();
        let again = Tuning::from_table(&tuning.to_string()).unwrap();
        assert_eq!(again, tuning);
        assert_eq!(
            tuning.choices().len(),
            Tuning::default().choices().len() + 1
        );
    }

    #[test]
    fn the_default_table_has_an_algorithm_for_every_pattern_and_topology() {
        for &topology in Topology::ALL {
            let plan = Tuning::default().plan(topology, 1000);
            for &pattern in Pattern::ALL {
                let known = Algorithm::of(pattern, topology);
                let chosen = plan.choose(pattern, usize::MAX, |_| true);
                assert!(
                    known.contains(&chosen),
                    "{pattern} over {topology}: {chosen}"
                );
                // The case of hosts whose ranks are interleaved, and of data that cannot be sent with
                // notices.
                let fallback = plan.choose(pattern, 8, |algorithm| {
                    pattern == Pattern::Barrier
                        || !matches!(algorithm, Algorithm::Nested | Algorithm::Notice)
                });
                assert!(
                    known.contains(&fallback),
                    "{pattern} over {topology}: {fallback}"
                );
            }
        }
        for choice in Tuning::default().choices() {
            let known = Algorithm::of(choice.pattern, choice.topology);
            assert!(known.contains(&choice.algorithm), "{choice}");
        }
    }

    #[test]
    fn the_first_line_that_matches_is_used() {
        let lines = "
            all_reduce sockets 2   1M  notice   # two ranks
            all_reduce sockets any 1K  notice
            all_reduce sockets any any exchange
        ";
        let tuning: Tuning = lines.parse().unwrap();
        let choose = |ranks, bytes| {
            let plan = tuning.plan(Topology::Sockets, ranks);
            plan.choose(Pattern::AllReduce, bytes, |_| true)
        };
        assert_eq!(choose(2, 1 << 20), Algorithm::Notice);
        assert_eq!(choose(2, (1 << 20) + 1), Algorithm::Exchange);
        assert_eq!(choose(3, 1024), Algorithm::Notice);
        assert_eq!(choose(3, 1025), Algorithm::Exchange);
        let plan = tuning.plan(Topology::Sockets, 2);
        assert_eq!(
            plan.choose(Pattern::AllReduce, 8, |other| other != Algorithm::Notice),
            Algorithm::Exchange
        );
        assert_eq!(plan.most(Pattern::AllReduce, Algorithm::Notice), 1 << 20);
        assert_eq!(plan.most(Pattern::AllReduce, Algorithm::Whole), 0);
        let span = plan.span(Pattern::AllReduce, Algorithm::Exchange);
        assert_eq!(span, (1 << 20) + 1..usize::MAX);
        assert!(plan.span(Pattern::AllReduce, Algorithm::Chain).is_empty());
    }

    #[test]
    fn a_line_that_is_not_valid_is_refused_with_a_reason() {
        let refusal = |line: &str| line.parse::<Tuning>().unwrap_err().to_string();
        assert_eq!(
            refusal("all_reduce memory any any nested"),
            "the line \"all_reduce memory any any nested\" of the tuning table: \"nested\" is not \
             a known algorithm for all_reduce over memory: give whole, shares, direct"
        );
        assert!(refusal("allreduce memory any any whole").contains("is not a known operation"));
        assert!(refusal("all_reduce ram any any whole").contains("memory, sockets, hosts"));
        assert!(refusal("all_reduce memory any 5X whole").contains("is not a number of bytes"));
        assert!(refusal("all_reduce memory").contains("it must be operation"));
        assert!(refusal("streams 0").contains("give 1 to 16"));
    }
}
