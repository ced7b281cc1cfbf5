//! Messages of which both halves are posted, on backends that compare tags.
//!
//! NCCL has no tags. gloo, MPI and rcomm's CPU backend pair a send with the receive of the same tag, and no record
//! holds the tag of a message: two halves that count as a pair may each wait for another one.

use crate::align::RecordIx;
use crate::align::p2p::Half;
use crate::align::pending::on_device;
use crate::align::record::Op;
use crate::judge::check::calls::p2p_size_mismatch::both_ends;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::wait_graph::Place;
use crate::report::Code;
use crate::report::format::format_time;

/// One message: the sender's record and the position in it, then those of the receiver.
type Ends = ((RecordIx, u32), (RecordIx, u32));

/// The ends of the first message of a place. `None` if its backend does not compare tags, if its halves are not both
/// posted or are not certain to belong together, or if the place is a collective.
pub(super) fn tagged(ctx: &Context<'_>, place: usize) -> Option<Ends> {
    let Place::Batch {
        group,
        record,
        pending,
    } = ctx.graph.places[place]
    else {
        return None;
    };
    let half: &Half = ctx.halves(record, pending).first()?;
    let op = ctx.aligned.op(record, half.position);
    if on_device(backend_of(ctx, op)) || ctx.aligned.records[record].recorder.sees_device() {
        return None;
    }
    let (from, send, to, receive) = both_ends(ctx, group, record, *half)?;
    Some(((from, send.position), (to, receive.position)))
}

/// The backend of an operation, as recorded.
fn backend_of<'a>(ctx: &'a Context<'_>, op: &Op) -> &'a str {
    &ctx.aligned.shared.calls.get(op.call).signature.backend
}

/// The finding on a message whose tags may differ.
pub(super) fn draft(ctx: &Context<'_>, place: usize, ends: Ends) -> FindingDraft {
    let ((from, send), (to, receive)) = ends;
    let rank = |record: RecordIx| ctx.aligned.records[record].rank;
    let [sent, received] =
        [(from, send), (to, receive)].map(|(record, op)| ctx.aligned.op(record, op));
    let [send_text, receive_text] =
        [(from, sent), (to, received)].map(|(record, op)| ctx.describe_op(record, op));
    let time = ctx.waited_ms(place).map(format_time);
    let has_waited = time.map_or("waits".to_owned(), |time| format!("has waited {time}"));
    let text = match (sent.completed(), received.completed()) {
        (false, false) => format!(
            "rank {} is in {send_text} and rank {} in {receive_text}, and neither has finished",
            rank(from),
            rank(to)
        ),
        (true, _) => format!(
            "rank {} {has_waited} in {receive_text}, although the {send_text} has completed on rank {}",
            rank(to),
            rank(from)
        ),
        (false, true) => format!(
            "rank {} {has_waited} in {send_text}, although the {receive_text} has completed on rank {}",
            rank(from),
            rank(to)
        ),
    };
    // On gloo, a receive ends only when its program waits for it, even if the message has arrived.
    let unwaited =
        sent.completed() && !received.completed() && backend_of(ctx, received).starts_with("gloo");
    let text = match unwaited {
        true => format!(
            "{receive_text} has not ended on rank {}, although the {send_text} has completed on rank {}: its program has \
             not come to wait for it, or",
            rank(to),
            rank(from)
        ),
        false => format!("{text}:"),
    };
    let host = |record: RecordIx| &ctx.aligned.records[record].identity.host;
    let or_network = match host(from) == host(to) {
        true => "",
        false => ", or the network between their hosts holds the message",
    };
    let sentence = format!("{text} their tags, which are not recorded, may differ{or_network}");
    let mut draft = FindingDraft::new(Code::E120, sentence);
    draft.confidence = 0.5;
    draft.alternatives = vec![vec![rank(from)], vec![rank(to)]];
    if unwaited {
        draft.alternatives.reverse();
    }
    draft.age_ms = ctx.waits_ms(place);
    draft.evidence = ctx.evidence_of_place(place, 2);
    draft.ruled_out =
        vec!["size_mismatch: the sizes of the two halves do not contradict each other".to_owned()];
    draft.next = format!(
        "compare the tags, and the order of messages, of rank {} and rank {}",
        rank(from),
        rank(to)
    );
    draft.targets = vec![place + ctx.graph.ranks];
    draft.at = Some(ctx.op_ref_of_place(place));
    draft
}
