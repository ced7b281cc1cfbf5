//! What live views write after the verdict in the first line of a job.

use super::format::count;
use super::{Report, Verdict};

impl Report {
    /// The sentence that follows the [word](Self::word) of the verdict in the first line of a live view: that of the
    /// finding to show first, or how the job ended, or else [`calm`](Self::calm).
    pub fn first_line(&self) -> String {
        match (self.lead(), &self.end) {
            (Some(finding), _) => finding.sentence.clone(),
            (None, Some(end)) => end.sentence.clone(),
            (None, None) => self.calm(),
        }
    }

    /// The sentence for a job that is not over and has no finding to show first: that nothing is pending, how many
    /// operations are in flight, or what the records leave open; and how many ranks were read if not all were.
    pub fn calm(&self) -> String {
        let mut sentence = match self.verdict {
            Verdict::Healthy => "nothing recorded is pending or wrong".to_owned(),
            Verdict::Running => match self.pending().count() {
                // The list of operations may leave out some that a rank still has.
                0 if self.ranks.iter().any(|rank| rank.pending > 0) => {
                    "nothing is overdue".to_owned()
                }
                0 => "no operation in flight, nothing overdue".to_owned(),
                n => format!("{} in flight, none overdue", count(n as u64, "operation")),
            },
            Verdict::Inconclusive => match self.silence() {
                Some(silence) => silence.to_owned(),
                None => "the records do not decide".to_owned(),
            },
            // The user has muted its finding.
            _ => "the finding that says so is not shown".to_owned(),
        };
        let (read, all) = (self.input.ranks_read, self.input.ranks_expected);
        if read < all {
            let ranks = if all == 1 { "rank" } else { "ranks" };
            sentence.push_str(&format!("; {read} of {all} {ranks} read"));
        }
        sentence
    }
}
