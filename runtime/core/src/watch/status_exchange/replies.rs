//! [`StatusReplies`]: what the members of an operation have answered, and which ranks hold it up by these answers.

use super::{MAX_RANKS, StatusQuery};
use rcomm_recorder::model::{Rank, text};
use serde::{Deserialize, Serialize};

/// The status of an operation's members.
#[derive(Debug, Default)]
pub(crate) struct StatusReplies {
    /// The whole status, as text.
    pub(crate) text: String,
    /// Members that have issued the operation; if another member's summary was read, all members that are not `absent`.
    /// Empty for messages, and if only the text is known.
    pub(crate) arrived: Vec<Rank>,
    /// Members that have not issued the operation, have not answered, or have ended; for a message, only those that
    /// have not answered or have ended. Empty if only the text is known.
    pub(crate) absent: Vec<Rank>,
    /// Whether some of `absent` may have come: they have not answered, or the operation is a message.
    pub(super) is_uncertain: bool,
    /// Where the waits of the ranks that this rank waited for end; empty if those wait for no other rank.
    pub(crate) last_in_chain: Vec<Rank>,
}

impl StatusReplies {
    /// The ranks that a time-out should name instead of `waited_for`; `None` if these replies do not change that.
    pub(crate) fn cause_of_wait(&self, waited_for: &[Rank]) -> Option<CauseOfWait<'_>> {
        if !self.last_in_chain.is_empty() {
            return Some(CauseOfWait {
                ranks: &self.last_in_chain,
                why: WhyNamed::EndOfChain,
            });
        }
        let have_arrived = waited_for.iter().all(|rank| self.arrived.contains(rank));
        (have_arrived && !self.absent.is_empty()).then_some(CauseOfWait {
            ranks: &self.absent,
            why: match self.is_uncertain {
                true => WhyNamed::AbsentOrSilent,
                false => WhyNamed::Absent,
            },
        })
    }

    /// A status of which only the text is known.
    pub(crate) fn text(text: String) -> Self {
        Self {
            text,
            ..Self::default()
        }
    }
}

/// The ranks that a time-out names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CauseOfWait<'a> {
    pub(crate) ranks: &'a [Rank],
    why: WhyNamed,
}

/// Why a time-out names ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WhyNamed {
    /// They have not arrived at the operation.
    Absent,
    /// They have not come, or have not answered.
    AbsentOrSilent,
    /// The ranks that were waited for wait for these, directly or through others.
    EndOfChain,
}

impl CauseOfWait<'_> {
    /// A clause that names the ranks, for the beginning of the sentence.
    pub(crate) fn to_text(self) -> String {
        let ranks = text::ranks(self.ranks, MAX_RANKS);
        let has = if self.ranks.len() == 1 { "has" } else { "have" };
        match self.why {
            WhyNamed::Absent => format!("{ranks} {has} not come"),
            WhyNamed::AbsentOrSilent => format!("{ranks} {has} not come or not answered"),
            WhyNamed::EndOfChain => format!("the waits lead to {ranks}"),
        }
    }
}

/// The answers, as the first member of a large group that asked passes them on to the others.
#[derive(Serialize, Deserialize)]
pub(super) struct Summary {
    text: String,
    /// The absent members; `None` if they are more than [`Summary::MAX_ABSENT`].
    absent: Option<Vec<Rank>>,
    #[serde(rename = "unheard")]
    is_uncertain: bool,
}

impl Summary {
    /// The most absent members of a summary, which all members read.
    const MAX_ABSENT: usize = 256;

    pub(super) fn of(replies: &StatusReplies) -> Self {
        let are_few = replies.absent.len() <= Self::MAX_ABSENT;
        // Of replies that have only the text, it is not known who has arrived.
        let is_known = !replies.arrived.is_empty() || !replies.absent.is_empty();
        Self {
            text: replies.text.clone(),
            absent: (are_few && is_known).then(|| replies.absent.clone()),
            is_uncertain: replies.is_uncertain,
        }
    }

    /// The replies for `asker`, the rank that reads the summary. That rank asks, so it has arrived, even if the summary
    /// lists it as absent. No member of a message counts as arrived: an answer does not show that its rank has come.
    pub(super) fn replies(self, query: &StatusQuery<'_>, asker: Rank) -> StatusReplies {
        let Some(mut absent) = self.absent else {
            return StatusReplies::text(self.text);
        };
        absent.retain(|&rank| rank != asker);
        let members = query.members.iter().copied();
        let arrived = members.filter(|rank| !query.is_p2p && !absent.contains(rank));
        StatusReplies {
            text: self.text,
            arrived: arrived.collect(),
            absent,
            is_uncertain: self.is_uncertain,
            last_in_chain: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_that_held_an_operation_up_are_named_with_what_is_known_of_them() {
        let lead = |replies: &StatusReplies| {
            let cause = replies.cause_of_wait(&[0])?;
            Some((cause.ranks.to_vec(), cause.to_text()))
        };
        let mut replies = StatusReplies {
            arrived: vec![0, 2],
            absent: vec![1],
            ..StatusReplies::default()
        };
        assert_eq!(
            lead(&replies),
            Some((vec![1], "rank 1 has not come".to_owned()))
        );
        replies.absent.push(3);
        replies.is_uncertain = true;
        let uncertain = "ranks 1, 3 have not come or not answered";
        assert_eq!(lead(&replies), Some((vec![1, 3], uncertain.to_owned())));
        // The others read the same from the summary.
        let query = |members| StatusQuery {
            members,
            wire_id: 7,
            seq: 41,
            is_p2p: false,
            gone: &[],
            lost: &[],
            is_stopped: &|_| false,
            roll_call: None,
            waited_for: &[0],
            timeout: std::time::Duration::from_secs(3),
        };
        let passed_on = Summary::of(&replies).replies(&query(&[0, 1, 2, 3]), 0);
        assert_eq!(lead(&passed_on), lead(&replies));
        let many: Vec<Rank> = (1..=300).collect();
        let too_many = StatusReplies {
            arrived: vec![0],
            absent: many.clone(),
            ..StatusReplies::text("as text".to_owned())
        };
        let passed_on = Summary::of(&too_many).replies(&query(&many), 0);
        assert_eq!(
            (passed_on.text.as_str(), lead(&passed_on)),
            ("as text", None)
        );
        replies.last_in_chain = vec![7];
        let chain = "the waits lead to rank 7";
        assert_eq!(lead(&replies), Some((vec![7], chain.to_owned())));
        // Rank 0, which was waited for, is itself the one that has not come.
        let direct = StatusReplies {
            absent: vec![0],
            ..StatusReplies::default()
        };
        assert_eq!(lead(&direct), None);
    }
}
