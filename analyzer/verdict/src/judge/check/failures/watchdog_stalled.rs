//! E140: the watchdog of a rank stopped making its rounds.
//!
//! The rank's own record shows this: the heartbeat is much older than the record, both by the clock of the rank's host,
//! or the heartbeat monitor raised the alarm and so had the record written. [`rank_failed`](super::rank_failed) covers
//! a process that is gone, and [`rank_frozen`](super::rank_frozen) one that is stopped while others wait for it: their
//! watchdogs make no rounds either. A stalled watchdog holds up no rank, so this finding is listed under the cause of
//! the waits, if there is one.

use super::rank_frozen;
use crate::align::record::Record;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::report::Code;
use crate::report::format::format_time;
use rcomm_recorder::model::Rank;
use std::collections::HashSet;

pub(crate) struct WatchdogStalled;

/// The watchdog makes a round at least once a second; the runtime's heartbeat monitor raises the alarm after this time,
/// ns.
const STALLED_NS: i64 = 60_000_000_000;
/// The reason that the runtime's heartbeat monitor gives for the dump that it requests.
const ALARM: &str = "the watchdog is stuck";

impl Check for WatchdogStalled {
    fn codes(&self) -> &'static [Code] {
        &[Code::E140]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let explained = so_far.iter().any(|draft| draft.is_root);
        let frozen = so_far.iter().filter(|draft| draft.code == Code::E151);
        let frozen: HashSet<Rank> = frozen.flat_map(|draft| &draft.culprits).copied().collect();
        let records = ctx.aligned.records.iter().enumerate();
        records
            .filter(|(_, record)| record.stop().is_none() || !frozen.contains(&record.rank))
            .filter_map(|(index, record)| {
                let silent = silence(record)?;
                let mut draft = draft(ctx, index, record, silent);
                draft.is_root = !explained;
                Some(draft)
            })
            .collect()
    }
}

/// For how long the watchdog had made no round when the record was taken, ns; `None` if it had not stalled, if the
/// record does not show it, or if the process is gone.
fn silence(record: &Record) -> Option<i64> {
    let status = record.status.as_ref()?;
    let (beat, taken) = (status.heartbeat_ns, record.identity.dump_time_ns);
    if beat <= 0 || taken <= 0 || record.died() {
        return None;
    }
    let silent = taken.saturating_sub(beat);
    (silent >= STALLED_NS || record.identity.reason == ALARM).then_some(silent.max(0))
}

/// The finding on the watchdog of a record, which is given with its index.
fn draft(ctx: &Context<'_>, index: usize, record: &Record, silent_ns: i64) -> FindingDraft {
    let rank = record.rank;
    let sentence = format!(
        "the watchdog of rank {rank} has made no round for {}: the unfinished operations of its record may \
         be out of date; {}",
        format_time(silent_ns as f64 / 1e6),
        ctx.last_seen(index)
    );
    let mut draft = FindingDraft::new(Code::E140, sentence);
    draft.confidence = 0.9;
    draft.culprits = vec![rank];
    draft
        .ruled_out
        .push("rank_failed: its process was there when the record was taken".to_owned());
    if let Some(op) = ctx.last_op(index) {
        draft.frames = ctx.frames_of(index, op, "last_seen");
    }
    draft.next = match record.stop() {
        Some(stop) => rank_frozen::let_go_on(ctx, stop, &[index]),
        None => format!("take native stacks of rank {rank}: which thread holds what"),
    };
    draft
}
