//! W260: a finding rests on an order in time that the hosts' clocks are too uncertain to show.
//!
//! Verdicts rest on sequence numbers and waits, not on clocks. Clocks that differ by seconds are not reported, since
//! the difference is estimated from the collectives and subtracted. But a few questions can be answered only from
//! times: which of several silent ranks was missed first, or which rank came late if a recorder measures no waits. This
//! check reports when the times are closer together than the error of the clocks.

use crate::align::clocks::sum;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::report::format::format_time;
use crate::report::{Code, Severity};
use rcomm_recorder::model::Rank;

pub(crate) struct ClockUncertain;

impl Check for ClockUncertain {
    fn codes(&self) -> &'static [Code] {
        &[Code::W260]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let roots = so_far.iter().filter(|draft| draft.is_root);
        // If a hang was found without the clocks, this warning would only be noise.
        let is_clear = |draft: &FindingDraft| {
            draft.code.severity() == Severity::Error && draft.by_clock.is_none()
        };
        if roots.clone().any(is_clear) {
            return Vec::new();
        }
        let uncertain = roots.filter_map(|draft| {
            let (ranks, gap_ns) = draft.by_clock?;
            let known_ns = uncertainty_ns(ctx, ranks);
            known_ns
                .is_none_or(|known_ns| gap_ns <= known_ns)
                .then(|| warn(draft.code, ranks, gap_ns, known_ns))
        });
        uncertain.take(1).collect()
    }
}

/// The largest error, ns, of a time difference between two ranks after the estimated clock offsets are subtracted: 0 on
/// one host. `None` if there is no estimate.
fn uncertainty_ns(ctx: &Context<'_>, ranks: [Rank; 2]) -> Option<i64> {
    let [first, second] = ranks.map(|rank| ctx.aligned.record_of(rank));
    let (first, second) = (first?, second?);
    let host = |record: usize| ctx.aligned.records[record].identity.host.as_str();
    if first == second || (!host(first).is_empty() && host(first) == host(second)) {
        return Some(0);
    }
    sum(ctx.clocks[first]?.spread_ns, ctx.clocks[second]?.spread_ns)
}

/// The warning on a finding with this code that rests on a time difference of two ranks. `known_ns`: the error of such
/// a difference, if it is known.
fn warn(code: Code, [one, other]: [Rank; 2], gap_ns: i64, known_ns: Option<i64>) -> FindingDraft {
    let ms = |ns: i64| format_time(ns as f64 / 1e6);
    let known = known_ns.map_or_else(
        || {
            "too few collectives of the two are recorded to estimate how far their clocks are apart"
                .to_owned()
        },
        |known| format!("their clocks are known only within {}", ms(known)),
    );
    let mut draft = FindingDraft::new(
        Code::W260,
        format!(
            "{} ({code}) rests on moments of rank {one} and rank {other} that are {} apart, and {known}",
            code.name(),
            ms(gap_ns)
        ),
    );
    draft.confidence = 0.8;
    draft.next =
        "treat this order in time as a guess, and check the clocks of the hosts".to_owned();
    draft
}
