//! Tells which programs issue nothing more: an exception has left them, or they have left their groups. The recorder for
//! PyTorch notes both as a phase of the rank.

use crate::align::record::Record;
use crate::align::{Aligned, RecordIx};
use crate::judge::life::Life;
use crate::judge::policy::{Policy, now_ns};
use rcomm_recorder::model::{Rank, RankStatus};

/// The beginning of the phase that the recorder notes for an exception that ends the program.
pub(crate) const RAISED: &str = RankStatus::RAISED;
/// The beginning of the phase that it notes for the exception of SIGINT.
pub(crate) const INTERRUPTED: &str = "raised KeyboardInterrupt";

/// The phase that it notes for a program that has left its groups.
const LEFT: &str = RankStatus::LEFT;

/// The phase that a rank named last; `None` if it named none, or if the phase began when the job was being ended.
pub(crate) fn phase<'a>(
    aligned: &'a Aligned<'_>,
    life: &Life,
    record: RecordIx,
) -> Option<&'a str> {
    let status = aligned.records[record].status.as_ref()?;
    // Such a phase, for example of an exception, does not show what the rank did before.
    let is_of_end = began_ns(aligned, record).is_some_and(|began| life.is_being_ended(began));
    (!status.phase.is_empty() && !is_of_end).then_some(&*status.phase)
}

/// When the phase of a rank began, common time, ns; `None` if that is not known.
pub(crate) fn began_ns(aligned: &Aligned<'_>, record: RecordIx) -> Option<i64> {
    let status = aligned.records[record].status.as_ref()?;
    let since_ns = Some(status.phase_since_ns).filter(|&since_ns| since_ns > 0)?;
    Some(since_ns.saturating_sub(aligned.offsets_ns[record]))
}

/// Whether a rank has issued an operation since its phase began: then the program has caught the exception.
pub(crate) fn went_on(record: &Record) -> bool {
    let since = record
        .status
        .as_ref()
        .map_or(0, |status| status.phase_since_ns);
    let newest = record.ops.last();
    since > 0 && newest.is_some_and(|op| op.created_ns > since)
}

/// Whether the recorder for PyTorch notes this phase for an exception that has left the program. An interrupt does not
/// count: it may be about to end all ranks.
pub fn is_exception(phase: &str) -> bool {
    phase.starts_with(RAISED) && !phase.starts_with(INTERRUPTED)
}

/// Whether an exception has left the program of a rank, or the program its groups, [`Policy::SETTLE`] ago or longer: the
/// rank issues nothing more, though its process may take long to end.
pub(crate) fn has_left(
    aligned: &Aligned<'_>,
    policy: &Policy,
    life: &Life,
    record: RecordIx,
) -> bool {
    let age = began_ns(aligned, record).zip(now_ns(aligned, policy));
    let age = age.map_or(0, |(began, now)| now.saturating_sub(began));
    u128::try_from(age).is_ok_and(|age| age >= Policy::SETTLE.as_nanos())
        && phase(aligned, life, record).is_some_and(|phase| is_exception(phase) || phase == LEFT)
        && !went_on(&aligned.records[record])
}

/// When the program of a rank left its groups, common time, ns; `None` if it did not, or went on after that.
pub(crate) fn left_groups_ns(aligned: &Aligned<'_>, record: RecordIx) -> Option<i64> {
    let full_record = &aligned.records[record];
    let status = full_record.status.as_ref()?;
    (status.phase == LEFT && !went_on(full_record))
        .then(|| began_ns(aligned, record))
        .flatten()
}

/// Whether the program of a rank has left its groups.
pub(crate) fn has_left_groups(aligned: &Aligned<'_>, rank: Rank) -> bool {
    let mut records = aligned.records_of(rank);
    records.any(|record| left_groups_ns(aligned, record).is_some())
}
