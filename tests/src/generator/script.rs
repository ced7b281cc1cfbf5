//! Writes the program of each rank. Its steps consist of pipeline messages, tensor-parallel collectives and rings,
//! exchanges between experts, collectives of sharded parameters and of gradients, messages that one rank receives from
//! any rank, and a norm over the world.

use super::mesh::{Mesh, Roles};
use super::program::{Act, Call, Exchange, Message, Program, collective};
use super::{Random, Spec};
use rcomm_recorder::model::{OpType, Rank, ReduceOp};

/// The line at which the first rank broadcasts the parameters.
pub(super) const PARAMETERS: u32 = 10;

/// The lines of the first and the second message of a rank in an [`Exchange::InOrder`].
pub(super) const IN_ORDER: [u32; 2] = [110, 111];

/// Writes a rank's program.
pub(super) fn write(spec: &Spec, mesh: &Mesh, rank: Rank) -> Program {
    // All ranks of the job draw the same numbers.
    let mut shared = Random::new(spec.seed ^ 0x5555);
    let mut script = Script {
        spec,
        mesh,
        rank,
        roles: mesh.roles(rank),
        layers: shared.between(1, 3),
        hidden: 512 * shared.between(1, 4),
        acts: Vec::new(),
    };
    // The first rank broadcasts the parameters.
    let hidden = script.hidden;
    script.issue(
        0,
        Call {
            root: Some(0),
            ..collective(
                OpType::Broadcast,
                "broadcast",
                &[hidden],
                &[hidden],
                PARAMETERS,
            )
        },
    );
    for step in 0..spec.steps {
        script.pass(step, Pass::Forward);
        script.exchange_with_neighbors();
        script.pass(step, Pass::Backward);
        script.exchange_with_neighbors();
        script.gradients();
        if step >= spec.steps / 2 {
            script.save();
        }
        script.collect();
        script.issue(
            0,
            Call {
                reduce_op: Some(ReduceOp::Sum),
                dtype: "Float",
                ..collective(OpType::AllReduce, "all_reduce", &[1], &[1], 95)
            },
        );
    }
    Program {
        acts: script.acts,
        ..Program::default()
    }
}

/// A pass through the layers of the model.
#[derive(Clone, Copy, PartialEq)]
enum Pass {
    Forward,
    Backward,
}

/// The program of one rank while it is being written.
struct Script<'a> {
    spec: &'a Spec,
    mesh: &'a Mesh,
    rank: Rank,
    roles: Roles,
    layers: u64,
    hidden: u64,
    acts: Vec<Act>,
}

impl Script<'_> {
    fn issue(&mut self, group: usize, call: Call) {
        self.acts.push(Act::Collective {
            group,
            calls: vec![call],
        });
    }

    fn members(&self, group: usize) -> u64 {
        self.mesh.groups[group].ranks.len() as u64
    }

    /// Sends all micro-batches through all layers of this stage.
    fn pass(&mut self, step: u32, pass: Pass) {
        let (line, direction) = match pass {
            Pass::Forward => (20, 1i64),
            Pass::Backward => (60, -1),
        };
        let (stage, stages) = (self.mesh.stage(self.rank), self.spec.pp);
        let neighbor = |distance: i64| {
            let other = i64::from(stage) + distance;
            (0..i64::from(stages))
                .contains(&other)
                .then_some(other as u32)
        };
        for micro_batch in 0..self.spec.micro_batches {
            if let (Some(pp), Some(peer)) = (self.roles.pp, neighbor(-direction)) {
                self.acts.push(message(pp, false, peer, self.hidden, line));
            }
            for layer in 0..self.layers {
                self.fetch(pass, layer);
                self.layer(layer, micro_batch, line);
                if let Some(group) = self.roles.ep {
                    let call = self.exchange(group, step, micro_batch, line + 4);
                    self.issue(group, call);
                }
                self.reduce(pass, layer);
            }
            if let (Some(pp), Some(peer)) = (self.roles.pp, neighbor(direction)) {
                self.acts
                    .push(message(pp, true, peer, self.hidden, line + 5));
            }
        }
    }

    /// The operations of a layer on its tensor-parallel group.
    fn layer(&mut self, layer: u64, micro_batch: u32, line: u32) {
        let Some(group) = self.roles.tp else { return };
        let (hidden, tp) = (self.hidden, u64::from(self.spec.tp));
        if self.spec.mix.rings {
            self.pass_around(group, line + 6);
        }
        self.issue(
            group,
            collective(
                OpType::AllGatherSingle,
                "_all_gather_base",
                &[hidden],
                &[hidden * tp],
                line + 1,
            ),
        );
        self.issue(
            group,
            collective(
                OpType::ReduceScatterSingle,
                "_reduce_scatter_base",
                &[hidden * tp],
                &[hidden],
                line + 2,
            ),
        );
        if layer == 0 {
            let shape = [hidden, 1 + u64::from(micro_batch)];
            self.issue(
                group,
                collective(OpType::AllReduce, "all_reduce", &shape, &shape, line + 3),
            );
        }
    }

    /// Passes blocks around a ring over the group. In each hop, every rank sends to the next rank and receives from the
    /// previous one, in one batch.
    fn pass_around(&mut self, group: usize, line: u32) {
        let (Some(this_member), members) = (
            self.mesh.member(group, self.rank),
            self.members(group) as u32,
        ) else {
            return;
        };
        for _ in 1..members {
            let half = |sends: bool, peer: u32| Message {
                sends,
                peer,
                elements: self.hidden,
                from_any: false,
            };
            let messages = vec![
                half(true, (this_member + 1) % members),
                half(false, (this_member + members - 1) % members),
            ];
            self.acts.push(Act::Batch {
                group,
                messages,
                line,
            });
        }
    }

    /// Exchanges messages with the previous and the next stage.
    fn exchange_with_neighbors(&mut self) {
        let Some(group) = self.roles.pp else { return };
        let stage = self.mesh.stage(self.rank);
        let before = stage.checked_sub(1);
        let after = Some(stage + 1).filter(|&stage| stage < self.spec.pp);
        let elements = self.hidden + 8;
        let half = |sends: bool, peer: u32| Message {
            sends,
            peer,
            elements,
            from_any: false,
        };
        let batch = |messages: Vec<Message>, line: u32| Act::Batch {
            group,
            messages,
            line,
        };
        let neighbors = [before, after].into_iter().flatten();
        let pairs = neighbors.map(|peer| [half(peer > stage, peer), half(peer < stage, peer)]);
        match self.spec.mix.exchange {
            Exchange::None => {}
            Exchange::Paired => {
                self.acts
                    .extend(pairs.map(|pair| batch(pair.to_vec(), 100)));
            }
            Exchange::Joint => self.acts.push(batch(pairs.flatten().collect(), 101)),
            Exchange::InOrder => {
                let single =
                    |[first, second]: [Message; 2]| [(first, IN_ORDER[0]), (second, IN_ORDER[1])];
                let singles = pairs.flat_map(single);
                self.acts
                    .extend(singles.map(|(message, line)| batch(vec![message], line)));
            }
        }
    }

    /// Gathers the sharded parameters of the next layer before this one computes; before the first, those of both.
    fn fetch(&mut self, pass: Pass, layer: u64) {
        let Some(group) = self.roles.shard else {
            return;
        };
        let gather = |layer: u64, hidden: u64, members: u64| {
            let part = hidden + 64 * layer;
            collective(
                OpType::AllGatherSingle,
                "_all_gather_base",
                &[part],
                &[part * members],
                match pass {
                    Pass::Forward => 30,
                    Pass::Backward => 70,
                },
            )
        };
        let members = self.members(group);
        if layer == 0 {
            self.issue(group, gather(0, self.hidden, members));
        }
        if layer + 1 < self.layers {
            self.issue(group, gather(layer + 1, self.hidden, members));
        }
    }

    /// Reduces the sharded gradients of a layer.
    fn reduce(&mut self, pass: Pass, layer: u64) {
        let (Some(group), Pass::Backward) = (self.roles.shard, pass) else {
            return;
        };
        let part = self.hidden + 64 * layer;
        let call = collective(
            OpType::ReduceScatterSingle,
            "_reduce_scatter_base",
            &[part * self.members(group)],
            &[part],
            75,
        );
        self.issue(group, call);
    }

    /// Gathers parts of different lengths.
    fn gather_parts(&mut self) {
        let (Some(group), true) = (self.roles.dp, self.spec.mix.ragged) else {
            return;
        };
        let part = |member: u64| 32 * (member + 1);
        let this_member = self.mesh.member(group, self.rank).map_or(0, u64::from);
        let total = (0..self.members(group)).map(part).sum();
        let call = collective(
            OpType::AllGatherV,
            "all_gather_v",
            &[part(this_member)],
            &[total],
            85,
        );
        self.issue(group, call);
    }

    /// The operations of the model's replicas at the end of a step.
    fn gradients(&mut self) {
        self.gather_parts();
        if self.roles.shard.is_some() {
            if let Some(group) = self.roles.replicate {
                for layer in 0..self.layers {
                    let shape = [self.hidden + 64 * layer];
                    self.issue(
                        group,
                        collective(OpType::AllReduce, "all_reduce", &shape, &shape, 83),
                    );
                }
            }
            return;
        }
        let Some(group) = self.roles.dp else { return };
        let (hidden, dp) = (self.hidden, u64::from(self.spec.dp));
        let scatter = |times: u64| {
            collective(
                OpType::ReduceScatterSingle,
                "_reduce_scatter_base",
                &[hidden * dp * times],
                &[hidden * times],
                80,
            )
        };
        if self.spec.seed % 4 == 1 {
            let calls = (1..=3).map(scatter).collect();
            self.acts.push(Act::Collective { group, calls });
        } else {
            self.issue(group, scatter(1));
        }
        self.issue(
            group,
            collective(
                OpType::AllGatherSingle,
                "_all_gather_base",
                &[hidden],
                &[hidden * dp],
                81,
            ),
        );
    }

    /// Gathers on a short-lived group, with a barrier after it, as when a job saves a checkpoint.
    fn save(&mut self) {
        let Some(group) = self.roles.brief else {
            return;
        };
        let gathered = [16 * self.members(group)];
        let output: &[u64] = if self.mesh.member(group, self.rank) == Some(0) {
            &gathered
        } else {
            &[]
        };
        let gather = Call {
            root: Some(0),
            ..collective(OpType::Gather, "gather", &[16], output, 90)
        };
        self.issue(group, gather);
        self.issue(group, collective(OpType::Barrier, "barrier", &[], &[], 91));
    }

    /// Sends a message from each other rank to the first rank, which receives them in any order.
    fn collect(&mut self) {
        if !self.spec.mix.collects {
            return;
        }
        let receives = self.rank == 0;
        let messages = if receives { self.spec.world() - 1 } else { 1 };
        for _ in 0..messages {
            self.acts.push(Act::Batch {
                group: 0,
                messages: vec![Message {
                    sends: !receives,
                    peer: 0,
                    elements: 4,
                    from_any: true,
                }],
                line: 92,
            });
        }
    }

    /// The call of an uneven exchange between experts. The two ranks of each pair agree on the numbers of elements.
    fn exchange(&self, group: usize, step: u32, micro_batch: u32, line: u32) -> Call {
        let part = |from: Rank, to: Rank| {
            let key =
                u64::from(from) << 40 | u64::from(to) << 20 | u64::from(step * 64 + micro_batch);
            Random::new(self.spec.seed ^ key).between(0, 64)
        };
        let members = &self.mesh.groups[group].ranks;
        let sent: Vec<u64> = members.iter().map(|&to| part(self.rank, to)).collect();
        let received: Vec<u64> = members.iter().map(|&from| part(from, self.rank)).collect();
        Call {
            splits: [sent.clone(), received.clone()],
            ..collective(
                OpType::AllToAllSingle,
                "all_to_all_single",
                &[sent.iter().sum()],
                &[received.iter().sum()],
                line,
            )
        }
    }
}

/// A batch of one message.
fn message(group: usize, sends: bool, peer: u32, elements: u64, line: u32) -> Act {
    Act::Batch {
        group,
        messages: vec![Message {
            sends,
            peer,
            elements,
            from_any: false,
        }],
        line,
    }
}
