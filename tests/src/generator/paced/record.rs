//! Writes the records of a job in the manner of PyTorch's NCCL recorder.

use super::PacedSpec;
use super::program::{Act, ActKind, Group};
use super::run::Times;
use crate::generator::Random;
use rcomm_recorder::model::{
    Entry, EntryState, OpType, Peer, ProcessGroupInfo, ProcessGroupStatus, Rank, Signature,
};
use rcomm_recorder::publish::{Dump, DumpGroup, FormatVersion, Identity, Recorder};
use std::collections::HashMap;

/// When the job starts, in ns since 1970: an arbitrary time in 2026.
const START_NS: i64 = 1_790_000_000_000_000_000;

/// The records of all ranks, ordered by rank.
pub(super) fn dumps(
    spec: &PacedSpec,
    groups: &[Group],
    programs: &[Vec<Act>],
    times: &[Vec<Times>],
) -> Vec<Dump> {
    let mut random = Random::new(spec.seed ^ 0xc10c);
    let mut within = |limit: i64| (random.draw() % (2 * limit + 1) as u64) as i64 - limit;
    let hosts = spec.world().div_ceil(spec.per_host);
    let clocks: Vec<Clock> = (0..hosts)
        .map(|_| Clock {
            offset_ns: within(spec.clock_spread_us as i64 * 1000),
            ppm: within(10),
        })
        .collect();
    (0..spec.world())
        .map(|rank| {
            let clock = clocks[(rank / spec.per_host) as usize];
            let mut writer = Writer::new(spec, groups, rank, clock);
            for (act, times) in programs[rank as usize].iter().zip(&times[rank as usize]) {
                writer.act(act, *times);
            }
            writer.finish()
        })
        .collect()
}

/// The clock of a host.
#[derive(Clone, Copy)]
struct Clock {
    /// The error of the clock at the start of the job, in ns.
    offset_ns: i64,
    /// The drift of the clock, in parts per million.
    ppm: i64,
}

impl Clock {
    /// What the clock shows this long after the start of the job, in ns since 1970.
    fn wall(self, ns: i64) -> i64 {
        START_NS + self.offset_ns + ns + ns / 1_000_000 * self.ppm
    }
}

/// The times at which the thread that notices completions polls.
struct Watchdog {
    first_ns: i64,
    period_ns: i64,
}

impl Watchdog {
    /// The time of the first poll at or after `ended`; both in ns since the start of the job.
    fn notices(&self, ended: i64) -> i64 {
        let since_first = (ended - self.first_ns).max(0) as u64;
        self.first_ns + since_first.div_ceil(self.period_ns as u64) as i64 * self.period_ns
    }
}

/// Writes the record of one rank.
struct Writer<'a> {
    spec: &'a PacedSpec,
    dump: Dump,
    clock: Clock,
    watchdog: Watchdog,
    /// The number of each group in the record.
    local: HashMap<usize, u32>,
    /// The numbers of collectives, batches and operations that each group has had so far.
    counts: HashMap<usize, [u64; 3]>,
    signatures: HashMap<OpType, u32>,
}

impl<'a> Writer<'a> {
    fn new(spec: &'a PacedSpec, groups: &[Group], rank: Rank, clock: Clock) -> Self {
        let mut random = Random::new(spec.seed ^ 0xd06 ^ u64::from(rank) << 40);
        let interval_ns = spec.poll_interval_us as i64 * 1000;
        // Polling itself takes time, so that the ranks' polls drift relative to each other.
        let period_ns = interval_ns + random.between(0, interval_ns as u64 / 100) as i64;
        let mut writer = Self {
            spec,
            dump: Dump {
                version: FormatVersion::WRITTEN,
                recorder: Recorder::Nccl,
                identity: Identity {
                    rank: Some(rank),
                    ..Identity::default()
                },
                ..Dump::default()
            },
            clock,
            watchdog: Watchdog {
                first_ns: -(random.between(0, interval_ns as u64) as i64),
                period_ns,
            },
            local: HashMap::new(),
            counts: HashMap::new(),
            signatures: HashMap::new(),
        };
        if spec.hosts_named {
            writer.dump.identity.host = format!("host{}", rank / spec.per_host);
        }
        let groups = groups.iter().enumerate();
        for (at, group) in groups.filter(|(_, group)| group.ranks.contains(&rank)) {
            let id = writer.dump.groups.len() as u32;
            writer.local.insert(at, id);
            writer.dump.groups.push(DumpGroup {
                info: ProcessGroupInfo {
                    id,
                    name: group.name.clone(),
                    desc: group.desc.into(),
                    ranks: group.ranks.as_slice().into(),
                },
                place: None,
                status: None,
            });
        }
        writer
    }

    fn act(&mut self, act: &Act, times: Times) {
        match act.kind {
            ActKind::Step => {}
            ActKind::Collective {
                group, op, name, ..
            } => {
                let counts = self.counts.entry(group).or_default();
                counts[0] += 1;
                counts[2] += 1;
                self.entry(group, (op, name), Peer::None, times);
            }
            ActKind::Message { group, sends, peer } => {
                let counts = self.counts.entry(group).or_default();
                counts[1] += 1;
                counts[2] += 1;
                let op = if sends {
                    (OpType::Send, "send")
                } else {
                    (OpType::Recv, "recv")
                };
                let hidden = Times { ended: 0, ..times };
                self.entry(group, op, Peer::Rank(peer), hidden);
                let marker = (OpType::Coalesced, "coalesced");
                self.entry(group, marker, Peer::None, times);
            }
        }
    }

    fn entry(&mut self, group: usize, (op, name): (OpType, &str), peer: Peer, times: Times) {
        let counts = self.counts[&group];
        let has_ended = times.ended > 0;
        let is_of_message = op.is_p2p() || op == OpType::Coalesced;
        let is_timed = has_ended && self.spec.timing;
        let signature = self.signature(op, name);
        self.dump.entries.push(Entry {
            record_id: self.dump.entries.len() as u64,
            collective_seq_id: counts[0],
            p2p_seq_id: if is_of_message { counts[1] } else { 0 },
            op_id: counts[2],
            group: self.local[&group],
            signature,
            stack: None,
            op,
            state: if has_ended {
                EntryState::Completed
            } else {
                EntryState::Scheduled
            },
            retired: has_ended,
            is_p2p: op.is_p2p() || (op == OpType::Coalesced && self.spec.marked),
            peer,
            root: None,
            reduce_op: None,
            time_created_ns: self.clock.wall(times.issued),
            time_discovered_started_ns: if is_timed {
                self.clock.wall(self.watchdog.notices(times.reached))
            } else {
                0
            },
            time_discovered_completed_ns: if has_ended {
                self.clock.wall(self.watchdog.notices(times.ended))
            } else {
                0
            },
            duration_ms: is_timed.then(|| (times.ended - times.reached) as f32 / 1e6),
            graph_id: None,
            timeout_ms: 600_000,
            thread: None,
        });
    }

    fn signature(&mut self, op: OpType, name: &str) -> u32 {
        let next = self.dump.signatures.len() as u32;
        let at = *self.signatures.entry(op).or_insert(next);
        if at == next {
            let shapes: Vec<Vec<u64>> = match op {
                OpType::Coalesced => Vec::new(),
                _ => vec![vec![1 << 24]],
            };
            let types = vec!["BFloat16".to_owned(); shapes.len()];
            self.dump.signatures.push(Signature {
                backend: "nccl".into(),
                op_name: name.into(),
                input_sizes: shapes.clone(),
                output_sizes: shapes,
                input_dtypes: types.clone(),
                output_dtypes: types,
                input_splits: Vec::new(),
                output_splits: Vec::new(),
            });
        }
        at
    }

    fn finish(mut self) -> Dump {
        for (group, counts) in &self.counts {
            let newest = if counts[0] == 0 { -1 } else { counts[0] as i64 };
            self.dump.groups[self.local[group] as usize].status = Some(ProcessGroupStatus {
                last_enqueued: newest,
                last_started: if self.spec.timing { newest } else { -1 },
                last_completed: newest,
                timeout_ms: 0,
            });
        }
        let excess = self.dump.entries.len().saturating_sub(self.spec.ring);
        self.dump.entries.drain(..excess);
        self.dump
    }
}
