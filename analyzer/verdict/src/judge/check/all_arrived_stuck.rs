//! E135: every member is inside, they agree on what they do, and nobody has finished.
//!
//! The program did its part, so the fabric, a device or the library has not. Said only where nothing
//! else is wrong: a peer that is waited for elsewhere, or a member that merely finished first, explains
//! such a wait better.

use super::Check;
use super::p2p_size_mismatch::both_ends;
use crate::align::Presence;
use crate::judge::case::{Case, Draft};
use crate::judge::sink::Sink;
use crate::judge::wait_graph::Place;
use crate::report::Code;
use crate::report::words::{count_ranks, name_time};

pub(super) struct AllArrivedStuck;

impl Check for AllArrivedStuck {
    fn codes(&self) -> &'static [Code] {
        &[Code::E135]
    }

    fn run(&self, case: &Case<'_>, so_far: &[Draft]) -> Vec<Draft> {
        if so_far.iter().any(|draft| draft.is_root) {
            return Vec::new();
        }
        let full = case.sinks.iter().filter_map(|sink| match sink {
            &Sink::Full(place) => Some(place),
            _ => None,
        });
        full.filter(|&place| nobody_finished(case, place))
            .map(|place| draft(case, place))
            .collect()
    }
}

fn nobody_finished(case: &Case<'_>, place: usize) -> bool {
    let (group, seq) = match case.graph.places[place] {
        Place::Collective { group, seq } => (group, seq),
        // A half whose other one the ring has dropped is not known to be met.
        Place::Batch {
            group,
            record,
            pending,
        } => {
            let mut halves = case.halves(record, pending).iter();
            return halves.all(|&half| both_ends(case, group, record, half).is_some());
        }
    };
    (0..case.aligned.groups[group].ranks.len()).all(|member| {
        let Presence::Issued(at) = case.aligned.presence(group, member, seq) else {
            return true;
        };
        let lane = case.aligned.lane(group, member);
        lane.is_none_or(|(record, lane)| !case.aligned.teller(record, lane, at).completed())
    })
}

fn draft(case: &Case<'_>, place: usize) -> Draft {
    let spot = case.spot_of_place(place);
    let inside = case.graph.arrived[place].len();
    let waited = case
        .waited_ms(place)
        .map_or(String::new(), |ms| format!(" after {}", name_time(ms)));
    let sentence = format!(
        "{} inside {} #{} on group {} and nobody has finished{waited}: the fabric, a device or the library",
        count_ranks(inside, "is", "are all"),
        spot.op,
        spot.seq,
        case.group_name(spot.group)
    );
    let mut draft = Draft::new(Code::E135, sentence);
    draft.age_ms = case.waited_ms(place);
    draft.confidence = 0.7;
    draft.evidence = case.evidence_of_place(place, 2);
    draft.ruled_out = vec![
        "not_joined: every member has issued it".to_owned(),
        "op_mismatch, dtype_mismatch, size_mismatch: they agree".to_owned(),
    ];
    draft.next =
        "look at links and devices: errors of the network cards, of the switches, of the GPUs"
            .to_owned();
    draft.targets = vec![place + case.graph.ranks];
    draft.at = Some(spot);
    draft
}
