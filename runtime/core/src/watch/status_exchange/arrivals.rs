//! Which members of an operation have arrived, by their answers.

use super::report::{RankReport, wire_name};
use super::{MAX_RANKS, StatusQuery};
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text;
use std::fmt::Write as _;
use std::time::Duration;

/// The members of an operation, by whether they have arrived.
#[derive(Default)]
pub(super) struct Arrivals {
    /// How many members there are.
    pub(super) members: usize,
    pub(super) arrived: Vec<Rank>,
    /// Members that have answered but not arrived (of a message: all that have answered), and their progress
    /// as text.
    pub(super) missing: Vec<(Rank, String)>,
    /// Members that have not answered.
    pub(super) silent: Vec<Rank>,
    /// Members whose processes have ended.
    pub(super) gone: Vec<Rank>,
}

impl Arrivals {
    /// Adds a member by its answer, `None` if it has not answered.
    pub(super) fn add(&mut self, query: &StatusQuery<'_>, rank: Rank, report: Option<&RankReport>) {
        let Some(report) = report else {
            self.silent.push(rank);
            return;
        };
        let status = report.groups.get(&wire_name(query.wire_id));
        let last = status.map_or(-1, |status| status.last_enqueued);
        let seq = i64::try_from(query.seq).unwrap_or(i64::MAX);
        if !query.is_p2p && last >= seq {
            self.arrived.push(rank);
            return;
        }
        let mut progress = match (status, last) {
            (None, _) => "has not made this group, or no longer has it".to_owned(),
            (_, ..=0) => "has called no collective here yet".to_owned(),
            (_, last) => format!("last collective here is #{last}"),
        };
        if !report.phase.is_empty() {
            let lasted = text::duration(Duration::from_millis(report.phase_ms));
            let _ = write!(progress, ", in phase {:?} for {lasted}", report.phase);
        }
        if report.step >= 0 {
            let _ = write!(progress, ", in step {}", report.step);
        }
        self.missing.push((rank, progress));
    }

    /// The members that are not known to have arrived, ascending. For a message, only those that have not answered or
    /// have ended: an answer does not show whether its rank has reached the message.
    pub(super) fn absent(&self, is_p2p: bool) -> Vec<Rank> {
        let missing = self.missing.iter().map(|(rank, _)| rank);
        let missing = missing.filter(|_| !is_p2p);
        let absent = missing.chain(&self.silent).chain(&self.gone);
        let mut absent: Vec<Rank> = absent.copied().collect();
        absent.sort_unstable();
        absent
    }

    /// Text for an error: which members have arrived (not for messages), have not arrived, have ended, and have not
    /// answered.
    pub(super) fn to_text(&self, is_p2p: bool) -> String {
        let mut parts = Vec::new();
        if !is_p2p {
            let none = self.arrived.is_empty();
            parts.push(format!(
                "arrived: {}",
                if none {
                    "none".to_owned()
                } else {
                    text::ranks(&self.arrived, MAX_RANKS)
                }
            ));
        }
        if !self.missing.is_empty() {
            let title = if is_p2p { "answered" } else { "not arrived" };
            let mut text = format!("{title}: ");
            for (index, (rank, progress)) in self.missing.iter().take(MAX_RANKS).enumerate() {
                let comma = if index == 0 { "" } else { ", " };
                let _ = write!(text, "{comma}rank {rank} ({progress})");
            }
            if let Some(more) = self.missing.len().checked_sub(MAX_RANKS + 1) {
                let _ = write!(text, " and {} more", more + 1);
            }
            parts.push(text);
        }
        if !self.gone.is_empty() {
            parts.push(format!("gone: {}", text::ranks(&self.gone, MAX_RANKS)));
        }
        if !self.silent.is_empty() {
            let answered = self.arrived.len() + self.missing.len();
            parts.push(format!(
                "no answer: {} ({answered} of {} members answered)",
                text::ranks(&self.silent, MAX_RANKS),
                self.members
            ));
        }
        parts.join("; ")
    }
}
