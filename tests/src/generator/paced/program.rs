//! Writes the programs of the ranks: steps of acts, each of which computes and then communicates.

use super::{Layout, PacedSpec};
use crate::generator::Random;
use rcomm_recorder::model::{OpType, Rank};

/// A process group.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) desc: &'static str,
    pub(super) ranks: Vec<Rank>,
}

/// An act of a rank.
#[derive(Clone, Debug)]
pub(super) struct Act {
    /// The length of the computation before the act, in µs.
    pub(super) compute_us: u64,
    pub(super) kind: ActKind,
}

/// What a rank does in an act, after its computation.
#[derive(Clone, Copy, Debug)]
pub(super) enum ActKind {
    Collective {
        group: usize,
        op: OpType,
        name: &'static str,
        /// How long the collective takes once all members have arrived, in µs.
        takes_us: u64,
        /// Whether the next computation needs the collective's result.
        needed: bool,
    },
    /// A batch of one message to or from a member of the group.
    Message {
        group: usize,
        sends: bool,
        /// The peer's rank in the group.
        peer: u32,
    },
    /// The rank begins a step.
    Step,
}

/// The groups of the job: the world first and, in a pipeline, the tensor-parallel, data-parallel and pipeline groups.
/// Groups of one rank are left out.
pub(super) fn groups(spec: &PacedSpec) -> Vec<Group> {
    let (tp, pp, dp) = (spec.tp, spec.pp, spec.dp);
    let rank = |p: u32, d: u32, t: u32| (p * dp + d) * tp + t;
    let mut groups = vec![("default_pg", (0..spec.world()).collect::<Vec<Rank>>())];
    if matches!(spec.layout, Layout::Pipeline(_)) {
        let pairs = |n: u32, m: u32| (0..n).flat_map(move |a| (0..m).map(move |b| (a, b)));
        let tensor = pairs(pp, dp).map(|(p, d)| ("tp", (0..tp).map(|t| rank(p, d, t)).collect()));
        groups.extend(tensor);
        let data = pairs(pp, tp).map(|(p, t)| ("dp", (0..dp).map(|d| rank(p, d, t)).collect()));
        groups.extend(data);
        let stages = pairs(dp, tp).map(|(d, t)| ("pp", (0..pp).map(|p| rank(p, d, t)).collect()));
        groups.extend(stages);
    }
    let groups = groups.into_iter().filter(|(_, ranks)| ranks.len() > 1);
    groups
        .enumerate()
        .map(|(at, (desc, ranks))| Group {
            name: at.to_string(),
            desc,
            ranks,
        })
        .collect()
}

/// Writes a rank's program.
pub(super) fn write(spec: &PacedSpec, groups: &[Group], rank: Rank) -> Vec<Act> {
    // All ranks of the job draw the same numbers.
    let mut shared = Random::new(spec.seed ^ 0x7777);
    let layers = shared.between(3, 8);
    let compute_us = shared.between(2, 8) * 1000;
    let takes_us = *shared.pick(&[200, 400, 1500]);
    let group = |desc: &str| {
        let mut groups = groups.iter();
        groups.position(|group| group.desc == desc && group.ranks.contains(&rank))
    };
    let mut script = Script {
        acts: Vec::new(),
        compute_us,
        takes_us,
    };
    for _ in 0..spec.steps {
        script.act(0, ActKind::Step);
        match spec.layout {
            Layout::Replicas => script.replicas(layers),
            Layout::Sharded => script.sharded(layers),
            Layout::Pipeline(chunks) => {
                let stage = rank / (spec.tp * spec.dp);
                let position = Position {
                    stage,
                    stages: spec.pp,
                    chunks,
                    tp: group("tp"),
                    pp: group("pp"),
                };
                script.pipeline(&position, layers.min(4), false);
                script.pipeline(&position, layers.min(4), true);
                if let Some(dp) = group("dp") {
                    let scatter = (OpType::ReduceScatterSingle, "_reduce_scatter_base");
                    script.collective(dp, scatter, 0, true);
                    let gather = (OpType::AllGatherSingle, "_all_gather_base");
                    script.collective(dp, gather, 0, true);
                }
                script.collective(0, (OpType::AllReduce, "all_reduce"), 0, true);
            }
        }
    }
    script.acts
}

/// The program of one rank while it is being written.
struct Script {
    acts: Vec<Act>,
    compute_us: u64,
    takes_us: u64,
}

/// Where a rank is in the pipeline.
struct Position {
    stage: u32,
    stages: u32,
    chunks: u32,
    tp: Option<usize>,
    pp: Option<usize>,
}

impl Script {
    fn act(&mut self, compute_us: u64, kind: ActKind) {
        self.acts.push(Act { compute_us, kind });
    }

    fn collective(
        &mut self,
        group: usize,
        (op, name): (OpType, &'static str),
        compute_us: u64,
        needed: bool,
    ) {
        let kind = ActKind::Collective {
            group,
            op,
            name,
            takes_us: self.takes_us,
            needed,
        };
        self.act(compute_us, kind);
    }

    /// Adds a forward pass without communication, and a backward pass that adds up gradients in buckets.
    fn replicas(&mut self, layers: u64) {
        for layer in 0..layers {
            let forward = if layer == 0 {
                self.compute_us * layers / 2
            } else {
                0
            };
            let reduce = (OpType::AllReduce, "all_reduce");
            self.collective(0, reduce, forward + self.compute_us, false);
        }
    }

    /// Adds a forward pass and a backward pass over sharded parameters.
    fn sharded(&mut self, layers: u64) {
        let gather = (OpType::AllGatherSingle, "_all_gather_base");
        for _ in 0..layers {
            self.collective(0, gather, self.compute_us / 2, true);
        }
        for _ in 0..layers {
            self.collective(0, gather, self.compute_us / 2, true);
            let scatter = (OpType::ReduceScatterSingle, "_reduce_scatter_base");
            self.collective(0, scatter, self.compute_us, false);
        }
    }

    /// Adds a pass of as many micro-batches as there are stages. All micro-batches go through one chunk before the
    /// next.
    fn pipeline(&mut self, position: &Position, layers: u64, backward: bool) {
        let Some(pp) = position.pp else { return };
        let last = position.stages - 1;
        let (first_stage, next) = if backward {
            (last, (position.stage + last) % position.stages)
        } else {
            (0, (position.stage + 1) % position.stages)
        };
        let previous = 2 * position.stage + position.stages - next;
        let previous = previous % position.stages;
        let end_stage = last - first_stage;
        for chunk in 0..position.chunks {
            for _ in 0..position.stages {
                if position.stage != first_stage || chunk > 0 {
                    self.message(pp, false, previous);
                }
                for _ in 0..layers {
                    let times = 1 + u64::from(backward);
                    if let Some(tp) = position.tp {
                        let gather = (OpType::AllGatherSingle, "_all_gather_base");
                        self.collective(tp, gather, self.compute_us * times / 4, true);
                        let scatter = (OpType::ReduceScatterSingle, "_reduce_scatter_base");
                        self.collective(tp, scatter, self.compute_us * times / 4, true);
                    }
                }
                if position.stage != end_stage || chunk + 1 < position.chunks {
                    self.message(pp, true, next);
                }
            }
        }
    }

    fn message(&mut self, group: usize, sends: bool, peer: u32) {
        self.act(0, ActKind::Message { group, sends, peer });
    }
}
