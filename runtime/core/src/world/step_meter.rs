//! How many steps of the program the ring holds, for the log.

use rcomm_recorder::model::Rank;
use rcomm_recorder::record::FlightRecorder;
use std::sync::Mutex;

/// After this many steps the log says how many the ring holds: the first steps alone may be unlike later ones.
const STEPS: i64 = 5;
/// A ring with fewer steps may not show what led to a hang.
const ENOUGH_STEPS: u64 = 3;

/// Counts the operations of the program's first steps.
#[derive(Debug, Default)]
pub(super) struct StepMeter(Mutex<Stage>);

#[derive(Debug, Default)]
enum Stage {
    #[default]
    NoStep,
    /// The first step, and how many operations were recorded before it.
    Since(i64, u64),
    Logged,
}

impl StepMeter {
    /// Notes a step that begins now. Does not wait: if another thread notes one at this moment, it does nothing.
    pub(super) fn note(&self, step: i64, rank: Rank, recorder: &FlightRecorder) {
        let Ok(mut stage) = self.0.try_lock() else {
            return;
        };
        let records = match *stage {
            Stage::Logged => return,
            Stage::NoStep | Stage::Since(..) => recorder.counters().records,
        };
        let (first, before) = match *stage {
            // A program that starts over with a smaller number is measured from there.
            Stage::Since(first, before) if first <= step => (first, before),
            _ => {
                *stage = Stage::Since(step, records);
                return;
            }
        };
        let steps = step.saturating_sub(first);
        let operations = records.saturating_sub(before);
        if steps < STEPS || operations == 0 {
            return;
        }
        *stage = Stage::Logged;
        let operations_per_step = operations.div_ceil(steps.unsigned_abs());
        let ring_steps = recorder.entries() as u64 / operations_per_step;
        if ring_steps < ENOUGH_STEPS {
            tracing::warn!(
                rank,
                ring_steps,
                operations_per_step,
                "the ring holds few steps: RCOMM_RING_STEPS=8x{operations_per_step}, in place of another size, gives it room for eight"
            );
        } else {
            tracing::info!(
                rank,
                ring_steps,
                operations_per_step,
                "the ring holds this many steps"
            );
        }
    }
}
