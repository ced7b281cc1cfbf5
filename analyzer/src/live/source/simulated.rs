//! Shows a simulated job as a source.

use super::{Liveness, Observation, Poll, Seen, Source, SourceError};
use crate::live::simulate::Simulation;
use rcomm_recorder::model::Rank;
use std::collections::HashMap;
use std::time::Instant;

/// A [`Simulation`] that runs on a clock.
pub struct SimulatedSource {
    simulation: Simulation,
    now_ns: Box<dyn FnMut() -> i64 + Send>,
    /// For each rank, the newest record id and the number of unfinished operations at the last poll: every change but
    /// the start of an operation alters one of them.
    stamps: HashMap<Rank, (u64, usize)>,
}

impl SimulatedSource {
    /// Shows the simulation at the times that `now_ns` returns (wall clock, ns since the epoch).
    pub fn new(simulation: Simulation, now_ns: impl FnMut() -> i64 + Send + 'static) -> Self {
        Self {
            simulation,
            now_ns: Box::new(now_ns),
            stamps: HashMap::new(),
        }
    }
}

impl Source for SimulatedSource {
    fn name(&self) -> String {
        format!("simulated job {}", self.simulation.job())
    }

    fn poll(&mut self, _deadline: Instant) -> Result<Poll, SourceError> {
        let now = (self.now_ns)();
        let observations = self
            .simulation
            .each_at(now)
            .zip(0..)
            .map(|(dump, rank)| {
                if !self.simulation.answers(rank, now) {
                    return Observation {
                        rank,
                        part: 0,
                        liveness: Liveness::Unknown,
                        seen: Seen::Failed("connection refused".into()),
                    };
                }
                let newest_id = dump.entries.last().map_or(0, |entry| entry.record_id);
                let pending = dump.entries.iter().filter(|entry| !entry.retired);
                let stamp = (newest_id, pending.count());
                let is_unchanged = self.stamps.insert(rank, stamp) == Some(stamp);
                Observation {
                    rank,
                    part: 0,
                    liveness: Liveness::Alive,
                    seen: if is_unchanged {
                        Seen::Unchanged {
                            heartbeat_ns: now,
                            as_of_ns: now,
                        }
                    } else {
                        Seen::Changed(Box::new(dump))
                    },
                }
            })
            .collect();
        Ok(Poll {
            observations,
            world_size: Some(self.simulation.ranks()),
            ..Poll::default()
        })
    }
}
