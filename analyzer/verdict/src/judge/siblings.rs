//! Compares the messages of a rank step by step with those of its siblings: the ranks with the same part in other
//! groups of the same description, such as other pipelines.
//!
//! If one end of a message left its half out, the two records contradict each other, and neither shows which end is
//! wrong. The siblings show it, since the same member of another pipeline runs the same program. Its messages with the
//! same peer are compared with the rank's own, with the collectives of all groups between them as marks. So a step that
//! was left out is found where it happened, not where the job stopped because of it.

use crate::align::event::{lane_of_family, nth_of_family, other_end};
use crate::align::record::{NONE, Record};
use crate::align::{Aligned, GroupIx, RecordIx};
use rcomm_recorder::model::{OpType, Rank};
use rcomm_recorder::publish::Recorder;
use std::collections::HashMap;

/// How the messages of a rank with a peer differ from those of its siblings. `sends` states whether the half is a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Deviation {
    /// The rank left out this half and continued.
    LeftOut { sends: bool },
    /// The rank posted another step where its siblings post this half, which it left out or would post later.
    NotFirst { sends: bool },
    /// The rank posted this half and its siblings do not.
    Extra { sends: bool },
    /// The rank posted this half with another size and continues as its siblings do.
    Resized { sends: bool },
}

/// A rank that deviates from its siblings.
#[derive(Clone, Debug)]
pub(crate) struct Odd {
    pub(crate) record: RecordIx,
    pub(crate) deviation: Deviation,
    /// The position of the rank's first step that differs from its siblings'.
    pub(crate) position: u32,
    /// The ranks of the siblings that show the deviation, ascending.
    pub(crate) siblings: Vec<Rank>,
    /// The record of the first of these siblings, and the position of the step there that the rank lacks or replaced.
    pub(crate) shown_by: (RecordIx, u32),
    /// The number of siblings that did the same as the rank.
    pub(crate) siblings_alike: usize,
}

/// At most this many siblings are compared with a rank.
const SIBLINGS: usize = 12;
/// At most this many steps may be left out together.
const STEPS: usize = 4;

/// A step that a rank and its siblings share.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Collective { family: u32, nth: u32, seq: u32 },
    Message { sends: bool, size: Option<u64> },
}

impl Step {
    /// Whether the message is a send; `None` for a collective.
    fn direction(self) -> Option<bool> {
        match self {
            Self::Message { sends, .. } => Some(sends),
            Self::Collective { .. } => None,
        }
    }
}

/// Steps, each with its position in the record's operations.
type Steps = Vec<(Step, u32)>;

/// Compares the messages of a rank with one peer of a group with those of its siblings. `None` if they do not deviate,
/// if too many siblings did the same or deviate in other ways, or if the record does not hold all steps. A single
/// sibling may itself be the one that deviates.
pub(crate) fn odd(
    aligned: &Aligned<'_>,
    record: RecordIx,
    group: GroupIx,
    peer: u32,
) -> Option<Odd> {
    let lane_index = aligned.lanes[record]
        .iter()
        .position(|lane| lane.group == group)?;
    let member = aligned.lanes[record][lane_index].member;
    if member == NONE || !is_usable(&aligned.records[record]) {
        return None;
    }
    let part = Part {
        group,
        member,
        peer,
    };
    let mut program = Program::read(aligned, record, lane_index, peer);
    let mut siblings = siblings(aligned, record, &part);
    if let Some(odd) = decide(aligned, record, &walks(aligned, &program, &siblings)) {
        return Some(odd);
    }
    // Pipelines that exchange parts of different lengths are alike only in their order.
    program.forget_sizes();
    siblings.iter_mut().for_each(Program::forget_sizes);
    decide(aligned, record, &walks(aligned, &program, &siblings))
}

/// The part of a rank: a member of a group and its peer.
struct Part {
    group: GroupIx,
    member: u32,
    peer: u32,
}

/// A rank's messages with a peer and the collectives of all its groups, in order of issue.
struct Program {
    record: RecordIx,
    steps: Steps,
}

/// The programs of the ranks with the same part in other groups of the family, at most [`SIBLINGS`].
fn siblings(aligned: &Aligned<'_>, record: RecordIx, part: &Part) -> Vec<Program> {
    let family = aligned.groups[part.group].family;
    let nth = nth_of_family(aligned, record, part.group);
    let others = aligned.groups.iter().enumerate();
    let others = others.filter(|&(index, other)| index != part.group && other.family == family);
    let with_same_part = others.filter_map(|(_, other)| {
        let &(sibling, lane) = other.lanes.get(part.member as usize)?.as_ref()?;
        let same_part = lane_of_family(aligned, sibling, family, nth) == Some(lane);
        let usable = sibling != record && same_part && is_usable(&aligned.records[sibling]);
        usable.then_some((sibling, lane))
    });
    with_same_part
        .map(|(sibling, lane)| Program::read(aligned, sibling, lane, part.peer))
        .take(SIBLINGS)
        .collect()
}

/// Compares the steps of a rank with those of each sibling; siblings that cannot be compared are left out.
fn walks(aligned: &Aligned<'_>, program: &Program, siblings: &[Program]) -> Vec<(RecordIx, Walk)> {
    let walks = siblings.iter().filter_map(|sibling| {
        let walk = walk(aligned, program, sibling)?;
        Some((sibling.record, walk))
    });
    walks.collect()
}

/// Whether a record holds all steps and their peers.
fn is_usable(record: &Record) -> bool {
    // torchcomms records no peers and describes all groups alike.
    !record.only_active && record.recorder != Recorder::Torchcomms
}

/// How far two programs agree, and where they differ.
struct Walk {
    /// Position in the rank's operations up to which they agree.
    agreed_to: u32,
    /// Whether both continue after that, in different ways.
    differs: bool,
    /// The deviation, its position in the rank's operations, and the position of the sibling's step there.
    deviated: Option<(Deviation, u32, u32)>,
}

/// A sibling that shows a deviation: its rank, its record and the position of its step.
type Vote = (Rank, RecordIx, u32);

/// The deviation that most siblings show; `None` if it is shown by no more siblings than did the same as the rank, or
/// deviate in other ways.
fn decide(aligned: &Aligned<'_>, record: RecordIx, walks: &[(RecordIx, Walk)]) -> Option<Odd> {
    let mut votes: HashMap<(Deviation, u32), Vec<Vote>> = HashMap::new();
    for &(sibling, Walk { deviated, .. }) in walks {
        if let Some((deviation, position, sibling_position)) = deviated {
            let rank = aligned.records[sibling].rank;
            let votes = votes.entry((deviation, position)).or_default();
            votes.push((rank, sibling, sibling_position));
        }
    }
    let most = votes
        .into_iter()
        .max_by_key(|((deviation, position), votes)| {
            (votes.len(), std::cmp::Reverse((*position, *deviation)))
        });
    let ((deviation, position), mut votes) = most?;
    let siblings_alike = walks
        .iter()
        .filter(|(_, walk)| walk.agreed_to > position)
        .count();
    // Siblings that deviate in other ways do not show what is usual.
    let others = walks.iter().filter(|(_, walk)| walk.differs).count() - votes.len();
    votes.sort_unstable();
    if votes.len() <= siblings_alike + others {
        return None;
    }
    let (_, sibling, sibling_position) = votes[0];
    Some(Odd {
        record,
        deviation,
        position,
        siblings: votes.iter().map(|&(rank, ..)| rank).collect(),
        shown_by: (sibling, sibling_position),
        siblings_alike,
    })
}

impl Program {
    /// Reads a record's messages with `peer` in the lane at `lane_index`, and its collectives in all lanes.
    fn read(aligned: &Aligned<'_>, record: RecordIx, lane_index: usize, peer: u32) -> Self {
        let lanes = &aligned.lanes[record];
        let nths: Vec<u32> = lanes
            .iter()
            .map(|lane| nth_of_family(aligned, record, lane.group))
            .collect();
        let calls = &aligned.shared.calls;
        let mut newest_seq: Vec<Option<u32>> = vec![None; lanes.len()];
        let mut steps = Vec::new();
        for (position, op) in (0u32..).zip(&aligned.records[record].ops) {
            let index = usize::from(op.group);
            let lane = &lanes[index];
            if op.kind.is_p2p() {
                if index == lane_index && other_end(aligned, lane, op) == peer {
                    let step = Step::Message {
                        sends: op.kind == OpType::Send,
                        size: calls.key(op.call).size,
                    };
                    steps.push((step, position));
                }
            } else if op.kind.is_collective()
                && !op.is_p2p
                && lane.member != NONE
                && newest_seq[index].replace(op.seq) != Some(op.seq)
            {
                let step = Step::Collective {
                    family: aligned.groups[lane.group].family,
                    nth: nths[index],
                    seq: op.seq,
                };
                steps.push((step, position));
            }
        }
        Self { record, steps }
    }

    /// Removes the sizes, so messages of different sizes become equal steps.
    fn forget_sizes(&mut self) {
        for (step, _) in &mut self.steps {
            if let Step::Message { size, .. } = step {
                *size = None;
            }
        }
    }
}

/// Whether another rank's step is compared with the steps of a record: every message is, and a collective if the record
/// holds it. A rank may not have reached a collective that its record lacks.
fn is_compared(aligned: &Aligned<'_>, record: RecordIx, step: Step) -> bool {
    match step {
        Step::Message { .. } => true,
        Step::Collective { family, nth, seq } => lane_of_family(aligned, record, family, nth)
            .is_some_and(|lane| {
                let lane = &aligned.lanes[record][lane];
                aligned.find(record, lane, seq).is_ok()
            }),
    }
}

/// Compares both programs from their beginning or, if a ring has wrapped, from the first collective that both hold;
/// `None` if they have none in common.
fn walk(aligned: &Aligned<'_>, program: &Program, sibling: &Program) -> Option<Walk> {
    let wrapped = |program: &Program| aligned.records[program.record].wrapped();
    let is_shared = |&(step, _): &(Step, u32)| is_compared(aligned, sibling.record, step);
    let is_ours = |&(step, _): &(Step, u32)| is_compared(aligned, program.record, step);
    let (mut mine, mut usual) = (&program.steps[..], &sibling.steps[..]);
    if wrapped(program) || wrapped(sibling) {
        let first = mine
            .iter()
            .position(|step| step.0.direction().is_none() && is_shared(step))?;
        let start = usual.iter().position(|&(step, _)| step == mine[first].0)?;
        (mine, usual) = (&mine[first..], &usual[start..]);
    }
    let mut agreed_to = 0;
    loop {
        // Equal steps are in both records, so a step is looked up only if the two differ.
        match (mine.split_first(), usual.split_first()) {
            (Some((one, after)), Some((other, after_other))) if one.0 == other.0 => {
                (agreed_to, mine, usual) = (one.1 + 1, after, after_other);
            }
            (Some((one, after)), _) if !is_shared(one) => mine = after,
            (_, Some((other, after_other))) if !is_ours(other) => usual = after_other,
            _ => break,
        }
    }
    let rest = |steps: &[(Step, u32)], is_kept: &dyn Fn(&(Step, u32)) -> bool| -> Steps {
        steps.iter().filter(|step| is_kept(step)).copied().collect()
    };
    let (mine, usual) = (rest(mine, &is_shared), rest(usual, &is_ours));
    Some(Walk {
        agreed_to,
        differs: !mine.is_empty() && !usual.is_empty(),
        deviated: deviation_of(&mine, &usual),
    })
}

/// The deviation of a rank's steps from a sibling's, both from where they no longer agree, with the position of the
/// first step of each. `None` if a list is empty, if the first difference is one of collectives, or if no deviation
/// explains it.
fn deviation_of(
    rank_steps: &[(Step, u32)],
    sibling_steps: &[(Step, u32)],
) -> Option<(Deviation, u32, u32)> {
    let (&(mine, position), &(usual, sibling_position)) =
        (rank_steps.first()?, sibling_steps.first()?);
    let messages = |steps: &[(Step, u32)]| steps.iter().all(|(step, _)| step.direction().is_some());
    let later = |steps: &[(Step, u32)], wanted: Step| {
        let found = steps.iter().take(STEPS + 1).skip(1);
        found.clone().position(|&(step, _)| step == wanted)
    };
    // A message of another size, after which the two agree again, is neither an extra nor a missing step.
    let agree = |a: &[(Step, u32)], b: &[(Step, u32)]| {
        let pairs = a.iter().zip(b);
        pairs.take_while(|((a, _), (b, _))| a == b).count()
    };
    let resized = mine.direction().is_some() && mine.direction() == usual.direction();
    let as_one_step = if resized {
        agree(&rank_steps[1..], &sibling_steps[1..])
    } else {
        0
    };
    if let Some(left_out) = later(sibling_steps, mine) {
        let sends = usual.direction()?;
        if agree(rank_steps, &sibling_steps[left_out + 1..]) < as_one_step {
            return Some((Deviation::Resized { sends }, position, sibling_position));
        }
        if !messages(&sibling_steps[..=left_out]) {
            return None;
        }
        let follows = sibling_steps.get(left_out + 2).map(|&(step, _)| step);
        let went_on = rank_steps.get(1).map(|&(step, _)| step);
        // If the rank posted the missing half right after this step, the two steps are swapped.
        let turned = went_on == Some(usual);
        let deviation = if follows.is_some() && went_on == follows && !turned {
            Deviation::LeftOut { sends }
        } else {
            Deviation::NotFirst { sends }
        };
        return Some((deviation, position, sibling_position));
    }
    let sends = mine.direction()?;
    let resized = resized.then_some((Deviation::Resized { sends }, position, sibling_position));
    let known = sibling_steps.iter().any(|&(step, _)| step == mine);
    if resized.is_some() && !known {
        return resized;
    }
    let Some(extra) = later(rank_steps, usual) else {
        return resized;
    };
    if resized.is_some() && agree(&rank_steps[extra + 1..], sibling_steps) <= as_one_step {
        return resized;
    }
    messages(&rank_steps[..=extra]).then_some((
        Deviation::Extra { sends },
        position,
        sibling_position,
    ))
}
