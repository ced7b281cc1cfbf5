//! The groups of a job: the world, and the groups of tensor, pipeline, data and expert parallelism in a mesh of ranks.

use super::Spec;
use rcomm_recorder::model::Rank;

/// A process group.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) desc: &'static str,
    pub(super) ranks: Vec<Rank>,
}

/// The groups of a job, and the groups of each rank.
#[derive(Clone, Debug)]
pub(super) struct Mesh {
    pub(super) groups: Vec<Group>,
    tp: u32,
    dp: u32,
    by_rank: Vec<Roles>,
}

/// The indices of a rank's groups, by their role.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Roles {
    pub(super) tp: Option<usize>,
    pub(super) dp: Option<usize>,
    pub(super) pp: Option<usize>,
    pub(super) ep: Option<usize>,
    /// The group whose members each hold another part of the parameters.
    pub(super) shard: Option<usize>,
    /// The group whose members hold the same part of the parameters.
    pub(super) replicate: Option<usize>,
    /// A short-lived group.
    pub(super) brief: Option<usize>,
}

impl Mesh {
    pub(super) fn new(spec: &Spec) -> Self {
        let world = spec.world();
        let mut mesh = Self {
            groups: vec![Group {
                name: "0".into(),
                desc: "default_pg",
                ranks: (0..world).collect(),
            }],
            tp: spec.tp,
            dp: spec.dp,
            by_rank: vec![Roles::default(); world as usize],
        };
        let rank = |d: u32, p: u32, t: u32| (p * spec.dp + d) * spec.tp + t;
        // Some frameworks give every group of one kind the same name. In the records of Gloo's recorder, which name no
        // members, such groups would be one group.
        let reuses_names = spec.seed.is_multiple_of(5)
            && spec.recording.recorder != rcomm_recorder::publish::Recorder::NativeGloo;
        let (tp, pp, dp, ep) = (spec.tp, spec.pp, spec.dp, spec.ep);
        if tp > 1 {
            for p in 0..pp {
                for d in 0..dp {
                    mesh.add(
                        "tp",
                        reuses_names,
                        (0..tp).map(|t| rank(d, p, t)).collect(),
                        |roles| &mut roles.tp,
                    );
                }
            }
        }
        if dp > 1 {
            for p in 0..pp {
                for t in 0..tp {
                    mesh.add(
                        "dp",
                        reuses_names,
                        (0..dp).map(|d| rank(d, p, t)).collect(),
                        |roles| &mut roles.dp,
                    );
                }
            }
        }
        if pp > 1 {
            for d in 0..dp {
                for t in 0..tp {
                    mesh.add(
                        "pp",
                        reuses_names,
                        (0..pp).map(|p| rank(d, p, t)).collect(),
                        |roles| &mut roles.pp,
                    );
                }
            }
        }
        if ep > 1 {
            for p in 0..pp {
                for t in 0..tp {
                    for first in (0..dp).step_by(ep as usize) {
                        let ranks = (first..first + ep).map(|d| rank(d, p, t)).collect();
                        mesh.add("ep", reuses_names, ranks, |roles| &mut roles.ep);
                    }
                }
            }
        }
        if spec.mix.sharded && dp > 1 {
            mesh.add_shards(spec, reuses_names, rank);
        }
        if spec.seed.is_multiple_of(3) && world >= 4 {
            for half in 0..2 {
                let ranks = (0..world).filter(|rank| rank % 2 == half).collect();
                mesh.add("brief", false, ranks, |roles| &mut roles.brief);
            }
        }
        mesh
    }

    /// Adds the groups over which the parameters are sharded. A group has all replicas, or half of them in some jobs
    /// with enough replicas.
    fn add_shards(
        &mut self,
        spec: &Spec,
        reuses_names: bool,
        rank: impl Fn(u32, u32, u32) -> Rank,
    ) {
        let shard_size = if spec.dp >= 4 && spec.dp.is_multiple_of(2) && spec.seed.is_multiple_of(2)
        {
            spec.dp / 2
        } else {
            spec.dp
        };
        for p in 0..spec.pp {
            for t in 0..spec.tp {
                for first in (0..spec.dp).step_by(shard_size as usize) {
                    let ranks = (first..first + shard_size).map(|d| rank(d, p, t)).collect();
                    self.add("shard", reuses_names, ranks, |roles| &mut roles.shard);
                }
                for first in (0..shard_size).filter(|_| shard_size < spec.dp) {
                    let ranks = (first..spec.dp).step_by(shard_size as usize);
                    let ranks = ranks.map(|d| rank(d, p, t)).collect();
                    self.add("replicate", reuses_names, ranks, |roles| {
                        &mut roles.replicate
                    });
                }
            }
        }
    }

    fn add(
        &mut self,
        desc: &'static str,
        reuses_names: bool,
        ranks: Vec<Rank>,
        role: impl Fn(&mut Roles) -> &mut Option<usize>,
    ) {
        let at = self.groups.len();
        let name = if reuses_names {
            desc.to_owned()
        } else {
            at.to_string()
        };
        for &rank in &ranks {
            *role(&mut self.by_rank[rank as usize]) = Some(at);
        }
        self.groups.push(Group { name, desc, ranks });
    }

    pub(super) fn roles(&self, rank: Rank) -> Roles {
        self.by_rank[rank as usize]
    }

    /// The pipeline stage of a rank.
    pub(super) fn stage(&self, rank: Rank) -> u32 {
        rank / (self.tp * self.dp)
    }

    /// The rank's number within a group; `None` if the rank is not a member.
    pub(super) fn member(&self, group: usize, rank: Rank) -> Option<u32> {
        self.groups[group]
            .ranks
            .iter()
            .position(|&member| member == rank)
            .map(|member| member as u32)
    }

    /// The number of groups with the role of this group, which is included.
    pub(super) fn siblings(&self, group: usize) -> usize {
        self.groups
            .iter()
            .filter(|other| other.desc == self.groups[group].desc)
            .count()
    }

    /// Whether a rank belongs to a group.
    pub(super) fn has(&self, group: usize, rank: Rank) -> bool {
        self.groups[group].ranks.contains(&rank)
    }
}
