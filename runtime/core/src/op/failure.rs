//! Conversion of errors to the recorder's [`Failure`] and back: the caller, the ring, the dumps and the other
//! ranks get the same facts.

use super::error::{Error, ErrorKind};
use rcomm_recorder::model::{Failure, FailureKind, Rank, text};

/// The most ranks that a sentence on processes that have ended lists by number.
const MAX_RANKS: usize = 64;
/// How many bytes of another rank's note are read. A longer note is cut, and then cannot be parsed.
const MAX_NOTE_BYTES: usize = 64 << 10;

impl ErrorKind {
    /// The kind of failure to record for an error of this kind that was not made from a failure record.
    const fn as_failure(self) -> FailureKind {
        match self {
            Self::Timeout => FailureKind::Timeout,
            Self::PeerLost => FailureKind::PeerGone,
            Self::Mismatch => FailureKind::Mismatch,
            Self::Aborted | Self::Closed => FailureKind::Cancelled,
            Self::InvalidArgument
            | Self::Unsupported
            | Self::Store
            | Self::Rendezvous
            | Self::Io
            | Self::Unauthorized
            | Self::Backend
            | Self::NotANumber => FailureKind::Backend,
        }
    }
}

impl Error {
    /// The error of an abort by the program of rank `own_rank` (this rank).
    pub fn aborted(own_rank: Rank, reason: &str) -> Self {
        let failure = Failure::new(FailureKind::Abort, &[own_rank], own_rank, reason);
        let message = format!("aborted by the program: {}", failure.text);
        Self::new(ErrorKind::Aborted, message).with_failure(failure)
    }

    /// The error for ranks whose processes are known to have ended. The message begins with that fact, and continues
    /// with `reason`.
    pub fn gone(ranks: &[Rank], reason: &str) -> Self {
        let message = format!("{}{reason}", gone_clause(ranks));
        Self::new(ErrorKind::PeerLost, message).with_ranks(ranks)
    }

    /// The facts as rank `own_rank` (this rank) records and publishes them: without group, operation and time.
    pub fn failure(&self, own_rank: Rank) -> Failure {
        match self.known_failure() {
            Some(known) => known.clone(),
            None => Failure::new(
                self.kind().as_failure(),
                self.ranks(),
                own_rank,
                self.message_with_cause(),
            ),
        }
    }

    /// Whether an awaited rank had not come by a deadline: that of this rank, or of the rank whose failure this error
    /// passes on.
    pub(crate) fn is_time_out(&self) -> bool {
        self.kind() == ErrorKind::Timeout || self.passes_on(FailureKind::Timeout)
    }

    /// Whether the processes that this error names are known to have ended: to this rank, or to the rank whose failure
    /// it passes on. Only the text of a failure distinguishes that from the loss of a connection.
    pub(crate) fn are_gone(&self) -> bool {
        self.is_loss()
            && match self.known_failure() {
                Some(known) => known.text.starts_with(&gone_clause(&known.ranks)),
                None => self
                    .message_with_cause()
                    .starts_with(&gone_clause(self.ranks())),
            }
    }

    /// Whether processes or the connections to them have ended, as this rank has found, or the rank whose failure this
    /// error passes on.
    pub(crate) fn is_loss(&self) -> bool {
        self.kind() == ErrorKind::PeerLost
            && (self.known_failure().is_none() || self.passes_on(FailureKind::PeerGone))
    }

    /// Whether this error names the culprits of another rank's failure of this kind.
    fn passes_on(&self, kind: FailureKind) -> bool {
        self.kind() == ErrorKind::PeerLost
            && self.known_failure().is_some_and(|known| known.kind == kind)
    }

    /// The facts as a note for the other ranks, which [`from_note`](Self::from_note) reads.
    pub fn to_note(&self, own_rank: Rank) -> Vec<u8> {
        serde_json::to_vec(&self.failure(own_rank)).unwrap_or_default()
    }

    /// The error of an operation that failed on rank `own_rank` (this rank), because rank `from` had ended the
    /// group's operations and left this note. If the note cannot be read, the error says so.
    pub fn from_note(note: &[u8], from: Rank, own_rank: Rank) -> Self {
        let read = serde_json::from_slice::<Failure>(&note[..note.len().min(MAX_NOTE_BYTES)]);
        let Ok(mut failure) = read else {
            let message = format!("rank {from} gave up, for a reason that cannot be read");
            return Self::new(ErrorKind::Aborted, message).with_rank(from);
        };
        failure.limit();
        let Failure { text, seen_by, .. } = &failure;
        let others = |rank: &&Rank| **rank != from && **rank != own_rank;
        let culprits: Vec<Rank> = failure.ranks.iter().filter(others).copied().collect();
        let error = match (failure.kind, culprits.as_slice()) {
            (FailureKind::Abort, _) => {
                let message = format!("rank {seen_by} aborted the group: {text}");
                Self::new(ErrorKind::Aborted, message).with_rank(*seen_by)
            }
            // The failure names no rank but this one and the sender: there is no other culprit to name.
            (_, []) => {
                let message = format!("rank {from} gave up: {text}");
                Self::new(ErrorKind::Aborted, message).with_rank(from)
            }
            (_, culprits) => {
                let message = format!("{text} (as rank {seen_by} found)");
                Self::new(ErrorKind::PeerLost, message).with_ranks(culprits)
            }
        };
        error.with_failure(failure)
    }
}

/// The beginning of a sentence on processes that have ended.
fn gone_clause(ranks: &[Rank]) -> String {
    let verb = if ranks.len() == 1 { "is" } else { "are" };
    format!("{} {verb} gone", text::ranks(ranks, MAX_RANKS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_connection_is_not_a_process_that_is_gone() {
        let broke = "the connection to rank 2 ended, but its process still runs";
        let broke = Error::new(ErrorKind::PeerLost, broke).with_rank(2);
        let gone = Error::gone(&[2, 3], ": their connections ended");
        assert_eq!(
            gone.to_string(),
            "ranks 2, 3 are gone: their connections ended"
        );
        for (original, are_gone) in [(broke, false), (gone, true)] {
            for error in [Error::from_note(&original.to_note(0), 0, 1), original] {
                assert_eq!(
                    (error.is_loss(), error.are_gone()),
                    (true, are_gone),
                    "{error}"
                );
            }
        }
        // Rank 3 reads that it is gone itself: the note is about rank 2, too.
        let note = Error::gone(&[2, 3], "").to_note(0);
        assert!(Error::from_note(&note, 0, 3).are_gone());
    }

    #[test]
    fn a_time_out_that_is_passed_on_is_no_loss() {
        let late = Error::new(ErrorKind::Timeout, "waited for rank 2").with_rank(2);
        let lost = Error::new(ErrorKind::PeerLost, "rank 2 is gone").with_rank(2);
        for (original, is_time_out) in [(late, true), (lost, false)] {
            for error in [Error::from_note(&original.to_note(0), 0, 1), original] {
                assert_eq!(
                    (error.is_time_out(), error.is_loss()),
                    (is_time_out, !is_time_out),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn the_reason_of_an_abort_reaches_every_rank() {
        let original = Error::aborted(0, "by hand");
        assert_eq!(original.to_string(), "aborted by the program: by hand");
        let received = Error::from_note(&original.to_note(0), 0, 1);
        assert_eq!(received.to_string(), "rank 0 aborted the group: by hand");
        assert_eq!(
            (received.kind(), received.rank()),
            (ErrorKind::Aborted, Some(0))
        );
        // The note is passed on once more, by a rank that read it.
        let passed_on = Error::from_note(&received.to_note(1), 1, 2);
        assert_eq!(passed_on.to_string(), received.to_string());
        let expected = Failure::new(FailureKind::Abort, &[0], 0, "by hand");
        assert_eq!(passed_on.failure(2), expected);
        let long = Error::aborted(0, &"x".repeat(10_000));
        assert!(long.to_note(0).len() < 2_000);
    }

    #[test]
    fn a_note_keeps_the_ranks_that_it_names_and_the_rank_that_saw_the_failure() {
        let late = Error::new(
            ErrorKind::Timeout,
            "waited for ranks 1, 3 until the deadline",
        );
        let late = late.with_ranks(&[1, 3]).in_group("dp");
        assert_eq!(late.rank(), None);
        let note = late.to_note(0);
        let on_rank_1 = Error::from_note(&note, 0, 1);
        let expected = "waited for ranks 1, 3 until the deadline (as rank 0 found)";
        assert_eq!(on_rank_1.to_string(), expected);
        let failure = on_rank_1.failure(1);
        assert_eq!((failure.kind, failure.seen_by), (FailureKind::Timeout, 0));
        assert_eq!(failure.ranks, [1, 3]);

        let lost = Error::new(ErrorKind::PeerLost, "rank 1 is gone").with_rank(1);
        let about_itself = Error::from_note(&lost.to_note(0), 0, 1);
        assert_eq!(about_itself.to_string(), "rank 0 gave up: rank 1 is gone");
    }

    #[test]
    fn the_error_from_an_unreadable_note_says_that_it_cannot_be_read() {
        let note = Error::aborted(0, "by hand").to_note(0);
        for note in [&b""[..], b"{}", &note[..note.len() - 1], &[b'['; 100_000]] {
            let error = Error::from_note(note, 3, 1);
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Aborted, Some(3)));
            assert!(error.to_string().contains("cannot be read"), "{error}");
        }
    }
}
