//! Makes the calls of a rank under test besides its collectives.

use crate::scenario::Extra;
use rcomm::{GroupOptions, MissingRanks, ProcessGroup, Window};

const TAG: u32 = 7;

/// The call that all ranks make besides their collectives, and what it needs from step to step.
pub(crate) struct Extras {
    kind: Option<Extra>,
    group: ProcessGroup,
    window: Option<Window>,
}

impl Extras {
    pub(crate) fn new(kind: Option<Extra>, group: &ProcessGroup) -> rcomm::Result<Self> {
        let window = match kind {
            Some(Extra::Window) => Some(group.new_window(group.allocate::<u32>(64)?)?),
            _ => None,
        };
        Ok(Self {
            kind,
            group: group.clone(),
            window,
        })
    }

    /// Makes the call of a step; returns whether its result is right.
    pub(crate) fn run(&self, step: i64) -> rcomm::Result<bool> {
        let group = &self.group;
        let (rank, size) = (group.rank(), group.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let values_of = |rank: u32| vec![step as u32 ^ rank; 64];
        match self.kind {
            None => Ok(true),
            Some(Extra::Messages) => {
                let sent = group.send_async(values_of(rank), next, TAG)?;
                let mut received = vec![0_u32; 64];
                group.recv(&mut received, before, TAG)?;
                sent.wait()?;
                Ok(received == values_of(before))
            }
            Some(Extra::Window) => {
                let Some(window) = &self.window else {
                    return Ok(false);
                };
                window.put(next, 0, &values_of(rank))?;
                window.signal(next)?;
                window.wait_signal(before)?;
                let mut received = vec![0_u32; 64];
                window.get(rank, 0, &mut received)?;
                // The window was read once this signal has come: only then may the next step overwrite it.
                window.signal(before)?;
                window.wait_signal(next)?;
                Ok(received == values_of(before))
            }
            Some(Extra::Objects) => {
                let all = group.all_gather_object(&format!("{step} of {rank}"))?;
                let expected = (0..size).map(|rank| format!("{step} of {rank}"));
                Ok(all.into_iter().eq(expected))
            }
            Some(Extra::MonitoredBarrier) => {
                group.monitored_barrier(MissingRanks::All).map(|()| true)
            }
            Some(Extra::Split) => {
                let half = group.split(Some(rank % 2), 0, &GroupOptions::named("half"))?;
                Ok(half.is_some_and(|half| half.size() == size / 2))
            }
        }
    }
}
