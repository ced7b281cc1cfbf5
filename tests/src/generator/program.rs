//! What each rank does: steps of pipeline messages, tensor-parallel collectives, expert exchange,
//! gradients, and a norm over the world.

use super::mesh::Mesh;
use super::{Random, Spec};
use rcomm_recorder::model::{OpType, Rank, ReduceOp};

/// One call with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    pub(super) op: OpType,
    pub(super) name: &'static str,
    pub(super) input: Vec<u64>,
    pub(super) output: Vec<u64>,
    pub(super) dtype: &'static str,
    pub(super) root: Option<u32>,
    pub(super) reduce_op: Option<ReduceOp>,
    /// What goes to each member, and what comes from each, of an exchange; else empty.
    pub(super) splits: [Vec<u64>; 2],
    /// What it sends is what its peers expect.
    pub(super) fits: bool,
    /// Line of the program.
    pub(super) line: u32,
}

/// One message of a batch, from the rank's own point of view.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Message {
    pub(super) sends: bool,
    /// Rank of the group.
    pub(super) peer: u32,
    pub(super) elements: u64,
}

/// One step of a rank's program.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Act {
    Collective {
        group: usize,
        calls: Vec<Call>,
    },
    Batch {
        group: usize,
        messages: Vec<Message>,
        line: u32,
    },
}

impl Act {
    pub(super) fn group(&self) -> usize {
        match self {
            Self::Collective { group, .. } | Self::Batch { group, .. } => *group,
        }
    }
}

/// What one rank does, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Program {
    pub(super) acts: Vec<Act>,
    /// It stops here and issues nothing more, although the program goes on.
    pub(super) stops: bool,
    /// Before which acts it is late, by how much, ms.
    pub(super) late: Vec<(usize, u64)>,
}

pub(super) fn collective(
    op: OpType,
    name: &'static str,
    input: &[u64],
    output: &[u64],
    line: u32,
) -> Call {
    Call {
        op,
        name,
        input: input.to_vec(),
        output: output.to_vec(),
        dtype: "BFloat16",
        root: None,
        reduce_op: None,
        splits: [Vec::new(), Vec::new()],
        fits: true,
        line,
    }
}

/// Writes a rank's program.
pub(super) fn write(spec: &Spec, mesh: &Mesh, rank: Rank) -> Program {
    let mut acts = Vec::new();
    let roles = mesh.roles(rank);
    let (stage, stages) = (mesh.stage(rank), spec.pp);
    // What all ranks of the job draw alike.
    let mut shared = Random::new(spec.seed ^ 0x5555);
    let layers = shared.between(1, 3);
    let hidden = 512 * shared.between(1, 4);
    let tp = u64::from(spec.tp);
    let one = |group: usize, call: Call| Act::Collective {
        group,
        calls: vec![call],
    };
    // Parameters from the first rank.
    acts.push(one(
        0,
        Call {
            root: Some(0),
            ..collective(OpType::Broadcast, "broadcast", &[hidden], &[hidden], 10)
        },
    ));
    for step in 0..spec.steps {
        for backward in [false, true] {
            let (line, away) = if backward { (60, -1i64) } else { (20, 1) };
            for micro_batch in 0..spec.micro_batches {
                let neighbour = |by: i64| {
                    let at = i64::from(stage) + by;
                    (0..i64::from(stages)).contains(&at).then_some(at as u32)
                };
                if let (Some(pp), Some(peer)) = (roles.pp, neighbour(-away)) {
                    acts.push(message(pp, false, peer, hidden, line));
                }
                for layer in 0..layers {
                    if let Some(group) = roles.tp {
                        acts.push(one(
                            group,
                            collective(
                                OpType::AllGatherSingle,
                                "_all_gather_base",
                                &[hidden],
                                &[hidden * tp],
                                line + 1,
                            ),
                        ));
                        acts.push(one(
                            group,
                            collective(
                                OpType::ReduceScatterSingle,
                                "_reduce_scatter_base",
                                &[hidden * tp],
                                &[hidden],
                                line + 2,
                            ),
                        ));
                        if layer == 0 {
                            acts.push(one(
                                group,
                                collective(
                                    OpType::AllReduce,
                                    "all_reduce",
                                    &[hidden, 1 + u64::from(micro_batch)],
                                    &[hidden, 1 + u64::from(micro_batch)],
                                    line + 3,
                                ),
                            ));
                        }
                    }
                    if let Some(group) = roles.ep {
                        acts.push(one(
                            group,
                            exchange(spec, mesh, group, rank, step, micro_batch, line + 4),
                        ));
                    }
                }
                if let (Some(pp), Some(peer)) = (roles.pp, neighbour(away)) {
                    acts.push(message(pp, true, peer, hidden, line + 5));
                }
            }
        }
        if let Some(group) = roles.dp {
            let dp = u64::from(spec.dp);
            if spec.seed % 4 == 1 {
                acts.push(Act::Collective {
                    group,
                    calls: (0..3)
                        .map(|n| {
                            collective(
                                OpType::ReduceScatterSingle,
                                "_reduce_scatter_base",
                                &[hidden * dp * (n + 1)],
                                &[hidden * (n + 1)],
                                80,
                            )
                        })
                        .collect(),
                });
            } else {
                acts.push(one(
                    group,
                    collective(
                        OpType::ReduceScatterSingle,
                        "_reduce_scatter_base",
                        &[hidden * dp],
                        &[hidden],
                        80,
                    ),
                ));
            }
            acts.push(one(
                group,
                collective(
                    OpType::AllGatherSingle,
                    "_all_gather_base",
                    &[hidden],
                    &[hidden * dp],
                    81,
                ),
            ));
        }
        if let Some(group) = roles.brief
            && step >= spec.steps / 2
        {
            let gathered = [16 * mesh.groups[group].ranks.len() as u64];
            acts.push(one(
                group,
                Call {
                    root: Some(0),
                    ..collective(
                        OpType::Gather,
                        "gather",
                        &[16],
                        if mesh.member(group, rank) == Some(0) {
                            &gathered
                        } else {
                            &[]
                        },
                        90,
                    )
                },
            ));
            acts.push(one(
                group,
                collective(OpType::Barrier, "barrier", &[], &[], 91),
            ));
        }
        acts.push(one(
            0,
            Call {
                reduce_op: Some(ReduceOp::Sum),
                dtype: "Float",
                ..collective(OpType::AllReduce, "all_reduce", &[1], &[1], 95)
            },
        ));
    }
    Program {
        acts,
        ..Program::default()
    }
}

fn message(group: usize, sends: bool, peer: u32, elements: u64, line: u32) -> Act {
    Act::Batch {
        group,
        messages: vec![Message {
            sends,
            peer,
            elements,
        }],
        line,
    }
}

/// An uneven exchange: what goes from one member to another is the same number seen from both.
fn exchange(
    spec: &Spec,
    mesh: &Mesh,
    group: usize,
    rank: Rank,
    step: u32,
    micro_batch: u32,
    line: u32,
) -> Call {
    let part = |from: Rank, to: Rank| {
        let key = u64::from(from) << 40 | u64::from(to) << 20 | u64::from(step * 64 + micro_batch);
        Random::new(spec.seed ^ key).between(0, 64)
    };
    let members = &mesh.groups[group].ranks;
    let sent: Vec<u64> = members.iter().map(|&to| part(rank, to)).collect();
    let taken: Vec<u64> = members.iter().map(|&from| part(from, rank)).collect();
    Call {
        splits: [sent.clone(), taken.clone()],
        ..collective(
            OpType::AllToAllSingle,
            "all_to_all_single",
            &[sent.iter().sum()],
            &[taken.iter().sum()],
            line,
        )
    }
}
