//! The groups of a job: the world, and lines through a mesh of tensor, pipeline, data and expert
//! parallelism.

use super::Spec;
use rcomm_recorder::model::Rank;

/// One group.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) desc: &'static str,
    pub(super) ranks: Vec<Rank>,
}

/// All groups, and those of each rank.
#[derive(Clone, Debug)]
pub(super) struct Mesh {
    pub(super) groups: Vec<Group>,
    tp: u32,
    dp: u32,
    by_rank: Vec<Roles>,
}

/// A rank's groups by their role.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Roles {
    pub(super) tp: Option<usize>,
    pub(super) dp: Option<usize>,
    pub(super) pp: Option<usize>,
    pub(super) ep: Option<usize>,
    /// Each member holds another part of the parameters.
    pub(super) shard: Option<usize>,
    /// Members hold the same part of the parameters.
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
        let reused = spec.seed.is_multiple_of(5)
            && spec.recording.recorder != rcomm_recorder::publish::Recorder::NativeGloo;
        let (tp, pp, dp, ep) = (spec.tp, spec.pp, spec.dp, spec.ep);
        if tp > 1 {
            for p in 0..pp {
                for d in 0..dp {
                    mesh.add(
                        "tp",
                        reused,
                        (0..tp).map(|t| rank(d, p, t)).collect(),
                        |r| &mut r.tp,
                    );
                }
            }
        }
        if dp > 1 {
            for p in 0..pp {
                for t in 0..tp {
                    mesh.add(
                        "dp",
                        reused,
                        (0..dp).map(|d| rank(d, p, t)).collect(),
                        |r| &mut r.dp,
                    );
                }
            }
        }
        if pp > 1 {
            for d in 0..dp {
                for t in 0..tp {
                    mesh.add(
                        "pp",
                        reused,
                        (0..pp).map(|p| rank(d, p, t)).collect(),
                        |r| &mut r.pp,
                    );
                }
            }
        }
        if ep > 1 {
            for p in 0..pp {
                for t in 0..tp {
                    for first in (0..dp).step_by(ep as usize) {
                        let ranks = (first..first + ep).map(|d| rank(d, p, t)).collect();
                        mesh.add("ep", reused, ranks, |r| &mut r.ep);
                    }
                }
            }
        }
        if spec.mix.sharded && dp > 1 {
            mesh.add_shards(spec, reused, rank);
        }
        if spec.seed.is_multiple_of(3) && world >= 4 {
            for half in 0..2 {
                let ranks = (0..world).filter(|r| r % 2 == half).collect();
                mesh.add("brief", false, ranks, |r| &mut r.brief);
            }
        }
        mesh
    }

    /// Adds the groups over which the parameters are sharded: all replicas, or, in some jobs with enough
    /// replicas, each half of them.
    fn add_shards(&mut self, spec: &Spec, reused: bool, rank: impl Fn(u32, u32, u32) -> Rank) {
        let wide = if spec.dp >= 4 && spec.dp.is_multiple_of(2) && spec.seed.is_multiple_of(2) {
            spec.dp / 2
        } else {
            spec.dp
        };
        for p in 0..spec.pp {
            for t in 0..spec.tp {
                for first in (0..spec.dp).step_by(wide as usize) {
                    let ranks = (first..first + wide).map(|d| rank(d, p, t)).collect();
                    self.add("shard", reused, ranks, |r| &mut r.shard);
                }
                for first in (0..wide).filter(|_| wide < spec.dp) {
                    let ranks = (first..spec.dp).step_by(wide as usize);
                    let ranks = ranks.map(|d| rank(d, p, t)).collect();
                    self.add("replicate", reused, ranks, |r| &mut r.replicate);
                }
            }
        }
    }

    fn add(
        &mut self,
        desc: &'static str,
        reused: bool,
        ranks: Vec<Rank>,
        role: impl Fn(&mut Roles) -> &mut Option<usize>,
    ) {
        let at = self.groups.len();
        let name = if reused {
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

    /// The rank within a group; `None` if the rank is not a member.
    pub(super) fn member(&self, group: usize, rank: Rank) -> Option<u32> {
        self.groups[group]
            .ranks
            .iter()
            .position(|&r| r == rank)
            .map(|at| at as u32)
    }

    /// How many groups have the same role, this one included.
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
