//! The error type of the whole runtime: a kind to match on, the facts as fields, and a sentence for people.
//!
//! The error of an operation names the operation and its group. Errors can be cloned, since every waiter of
//! an aborted group gets the same one.

use rcomm_recorder::model::{Failure, OpType, Rank};
use std::fmt;
use std::sync::Arc;

/// The result of a function of this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The class of an error. The codes are fixed, since the C binding returns them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A deadline passed.
    Timeout = 1,
    /// The group was aborted; pending and later operations end with this.
    Aborted = 2,
    /// The connection to a peer broke, or its process has ended. Or another rank, which the message names, has ended
    /// the group because of the ranks that the error names: for instance at its own deadline, which came before this
    /// rank's.
    PeerLost = 3,
    /// Ranks disagree on operation, type, size, root or reduction.
    Mismatch = 4,
    /// An argument that this rank can see to be wrong.
    InvalidArgument = 5,
    /// The operation, reduction or function is not supported, by rcomm or by the backend.
    Unsupported = 6,
    /// The store is gone, refused a request, or sent a wrong reply.
    Store = 7,
    /// The ranks could not find each other, or do not agree on the world that they start.
    Rendezvous = 8,
    /// The operating system returned an error.
    Io = 9,
    /// A peer did not prove that it knows the job's secret.
    Unauthorized = 10,
    /// The backend's library reported an error.
    Backend = 11,
    /// The world or group was used after `shutdown` or `destroy`, the world was dropped, or the result of a
    /// [`Work`](crate::Work) was taken before.
    Closed = 12,
    /// An input holds a NaN while NaNs are refused.
    NotANumber = 13,
}

impl ErrorKind {
    /// The integer code, which never changes for a class.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

/// Why an operation of this crate failed.
#[derive(Clone)]
pub struct Error(Box<Facts>);

#[derive(Clone)]
struct Facts {
    kind: ErrorKind,
    message: String,
    group: Option<String>,
    seq: Option<u64>,
    op: Option<OpType>,
    ranks: Vec<Rank>,
    /// The failure record that the error was made from, where it holds more facts than these fields.
    failure: Option<Failure>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    /// Whether the group is still usable, although other errors of this kind make it unusable.
    spares_group: bool,
    /// Facts that were added later, at the end of the sentence.
    more: String,
}

impl Error {
    /// An error of this kind; `message` is a lower-case fragment that names the facts.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Facts {
            kind,
            message: message.into(),
            group: None,
            seq: None,
            op: None,
            ranks: Vec::new(),
            failure: None,
            source: None,
            spares_group: false,
            more: String::new(),
        }))
    }

    /// An error of the operating system; `message` is a lower-case fragment that says what failed.
    pub fn io(message: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        let source = source.into();
        Self::new(ErrorKind::Io, message).with_source(source)
    }

    /// Names the group (its description, or its name).
    #[must_use]
    pub fn in_group(mut self, group: impl Into<String>) -> Self {
        self.0.group = Some(group.into());
        self
    }

    /// Names the operation, where it has no sequence number yet.
    #[must_use]
    pub fn during(mut self, op: OpType) -> Self {
        self.0.op = Some(op);
        self
    }

    /// Names the operation and its sequence number.
    #[must_use]
    pub fn at(mut self, op: OpType, seq: u64) -> Self {
        self.0.op = Some(op);
        self.0.seq = Some(seq);
        self
    }

    /// Names the one peer that the error is about, by its rank in the world.
    #[must_use]
    pub fn with_rank(mut self, rank: Rank) -> Self {
        self.0.ranks = vec![rank];
        self
    }

    /// Names the peers that the error is about, by their ranks in the world, instead of those named before.
    #[must_use]
    pub fn with_ranks(mut self, ranks: &[Rank]) -> Self {
        self.0.ranks = ranks.to_vec();
        self
    }

    /// Keeps the failure record that the error was made from.
    #[must_use]
    pub(super) fn with_failure(mut self, failure: Failure) -> Self {
        self.0.failure = Some(failure);
        self
    }

    /// Appends facts that were learned later to the sentence; an empty string adds nothing.
    #[must_use]
    pub fn with_more(mut self, facts: &str) -> Self {
        if !facts.is_empty() {
            self.0.more.push_str("; ");
            self.0.more.push_str(facts);
        }
        self
    }

    /// Puts facts that were learned later, and matter more than the message, in front of it.
    #[must_use]
    pub(crate) fn with_lead(mut self, facts: &str) -> Self {
        self.0.message = format!("{facts}: {}", self.0.message);
        self
    }

    /// Keeps the cause, which the sentence then contains.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Marks the group as still usable, unlike after other errors of this kind.
    #[must_use]
    pub(crate) fn sparing_group(mut self) -> Self {
        self.0.spares_group = true;
        self
    }

    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The group in which the error happened; `None` if the error names none.
    pub fn group(&self) -> Option<&str> {
        self.0.group.as_deref()
    }

    /// The sequence number of the operation that failed; `None` if the error names none.
    pub fn seq(&self) -> Option<u64> {
        self.0.seq
    }

    /// The operation that failed; `None` if the error names none.
    pub fn op(&self) -> Option<OpType> {
        self.0.op
    }

    /// The peer that the error names, by its rank in the world; `None` if it names none or several.
    pub fn rank(&self) -> Option<Rank> {
        match self.0.ranks[..] {
            [rank] => Some(rank),
            _ => None,
        }
    }

    /// The peers that the error names, by their ranks in the world.
    pub fn ranks(&self) -> &[Rank] {
        &self.0.ranks
    }

    pub(super) fn known_failure(&self) -> Option<&Failure> {
        self.0.failure.as_ref()
    }

    /// The message and its cause, without the group, the operation and the facts that were added later.
    pub(super) fn message_with_cause(&self) -> String {
        match &self.0.source {
            Some(source) => format!("{}: {source}", self.0.message),
            None => self.0.message.clone(),
        }
    }

    /// The cause of this error, if there is one.
    pub fn cause(&self) -> Option<&(dyn std::error::Error + Send + Sync + 'static)> {
        self.0.source.as_deref()
    }

    /// Whether the group is still usable, because the ranks still agree on what comes next. That is so if nothing was
    /// sent (`InvalidArgument`, `Unsupported`), or if the exchange was complete when the error was found (a monitored
    /// barrier that failed, an object of another type).
    pub fn is_recoverable(&self) -> bool {
        let nothing_was_sent = matches!(
            self.0.kind,
            ErrorKind::InvalidArgument | ErrorKind::Unsupported
        );
        nothing_was_sent || self.0.spares_group
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let facts = &self.0;
        if let Some(op) = facts.op {
            write!(f, "{op}")?;
            if let Some(seq) = facts.seq {
                write!(f, " #{seq}")?;
            }
            if facts.group.is_none() {
                write!(f, ": ")?;
            }
        }
        if let Some(group) = &facts.group {
            let lead = if facts.op.is_some() {
                " on group "
            } else {
                "group "
            };
            write!(f, "{lead}{group}: ")?;
        }
        f.write_str(&facts.message)?;
        if let Some(source) = &facts.source {
            write!(f, ": {source}")?;
        }
        f.write_str(&facts.more)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {
    /// The source of the cause: the sentence of this error already contains the cause.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref()?.source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_operation_group_and_cause() {
        let reset = std::io::Error::other("connection reset");
        let error = Error::io("rank 3 is gone", reset)
            .in_group("dp")
            .at(OpType::AllReduce, 41);
        assert_eq!(
            error.to_string(),
            "all_reduce #41 on group dp: rank 3 is gone: connection reset"
        );
        assert!(!error.is_recoverable());
        assert!(error.clone().sparing_group().is_recoverable());
        let text = error.with_more("arrived: rank 0").to_string();
        assert!(
            text.ends_with("connection reset; arrived: rank 0"),
            "{text}"
        );
    }
}
